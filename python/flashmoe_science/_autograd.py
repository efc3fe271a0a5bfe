"""Attention as torch's autograd and autocast have it.

The native half comes here with calls of flash_attention that torch records gradients of, or casts
the tensors of; the operators of flashmoe_science.torch share what is below. Imported when the first
such call comes, by which time torch is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from flashmoe_science import _core
from flashmoe_science._dispatch import is_transformed
from flashmoe_science.attention import flash_attention_backward
from flashmoe_science.errors import InvalidArgumentError, UnsupportedError

_Tensors = tuple[Any, ...]
_Flags = Sequence[bool]
_ROW_ALIGNMENT = 16  # bytes
_GIVEN = "{}: got one in a call that gradients are recorded of, accepted is None"
_TWICE = (
    "attention: its gradients are differentiated again, and have no derivative yet; accepted is "
    "one differentiation, without create_graph=True or a transform of torch.func around another"
)


def is_recorded(*tensors: Any) -> bool:
    """Whether torch records what becomes of one of these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def lacks_gradients(name: str, tensor: torch.Tensor) -> str:
    """Why torch cannot be given the gradient that it wants of a tensor, "" when it can."""
    if tensor.device.type != "cuda":
        return ""
    return (
        f"{name}: requires grad on {tensor.device}, but this version computes gradients of "
        f"attention on the CPU alone; call under torch.no_grad() or pass {name}.detach()"
    )


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, compute: Callable[..., Any], differentiate: Callable[..., Any], *tensors: Any
    ) -> Any:
        ctx.set_materialize_grads(False)
        out, lse = compute(*tensors)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.differentiate = differentiate
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
        wanted = ctx.needs_input_grad[2:]
        return None, None, *gradients(ctx.differentiate, dout, dlse, ctx.saved_tensors, wanted)


def gradients(
    differentiate: Callable[..., Any], dout: Any, dlse: Any, saved: _Tensors, wanted: _Flags
) -> _Tensors:
    """By `differentiate`, as of attend. Of an output that is not used the gradient is None."""
    if dout is None:
        if dlse is None:
            return (None,) * len(wanted)
        dout = torch.zeros_like(saved[-2])
    made: _Tensors = differentiate(dout, dlse, *saved, wanted)
    return made


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], *tensors: Any) -> Any:
        return compute(*tensors)

    @staticmethod
    def backward(ctx: Any, *unused: Any) -> Any:
        refuse_second()


def refuse_second() -> NoReturn:
    raise UnsupportedError(_TWICE)


def attend(
    compute: Callable[..., Any], differentiate: Callable[..., Any], tensors: dict[str, Any]
) -> Any:
    """(out, lse) of tensors that is_recorded.

    `compute` makes them of the tensors; `differentiate` of (dout, dlse or None, *tensors, out, lse,
    whether each tensor's gradient is wanted) these gradients, or None.
    """
    for name, tensor in tensors.items():
        reason = lacks_gradients(name, tensor) if is_recorded(tensor) else ""
        if reason:
            raise UnsupportedError(reason)
    apply: Any = _Attention.apply
    return apply(compute, differentiate, *tensors.values())


def once(compute: Callable[..., Any], *tensors: Any) -> Any:
    """compute(*tensors), where that is what has no derivative: who differentiates it is told so."""
    if not is_recorded(*tensors):
        return compute(*tensors)
    apply: Any = _Gradients.apply
    return apply(compute, *tensors)


def readable(x: torch.Tensor) -> torch.Tensor:
    """As kernels take it: a gradient that torch has for out may be expanded, or lie anywhere."""
    if is_transformed(x):
        return x
    size = x.element_size()
    steps = (step * size for step, extent in zip(x.stride()[:-1], x.shape[:-1], strict=True)
             if extent > 1)  # fmt: skip
    served = (
        x.stride(-1) == 1
        and x.data_ptr() % _ROW_ALIGNMENT == 0
        and all(step % _ROW_ALIGNMENT == 0 for step in steps)
        and not x.is_neg()
    )
    return x if served else x.clone(memory_format=torch.contiguous_format)


def _is_cast(*tensors: torch.Tensor) -> bool:
    kind = tensors[0].device.type
    return (
        any(x.dtype == torch.float32 for x in tensors)
        and kind in ("cpu", "cuda")
        and torch.is_autocast_enabled(kind)
    )


def autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Where torch.autocast is on and one of these is fp32, all in its dtype, but for fp64."""
    if not _is_cast(*tensors):
        return tensors
    kind = tensors[0].device.type
    dtype = torch.get_autocast_dtype(kind)

    def cast(x: torch.Tensor) -> torch.Tensor:
        takes_part = x.is_floating_point() and x.dtype != torch.float64 and x.device.type == kind
        return x.to(dtype) if takes_part else x

    return tuple(map(cast, tensors))


def is_handled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any = None) -> bool:
    """Whether a call of these is for the function below."""
    return is_recorded(q, k, v, sinks) or _is_cast(q, k, v)


def flash_attention(
    q: Any, k: Any, v: Any, causal: Any, window: Any, scale: Any, softcap: Any, sinks: Any,
    layout: Any, return_lse: Any, out: Any, lse: Any, kernel: Any, stream: Any,
) -> Any:  # fmt: skip
    """flash_attention, called by the native one, to which what is_handled goes back as what is not:
    cast, and without grad mode."""
    q, k, v = autocast(q, k, v)
    tensors = {"q": q, "k": k, "v": v, "sinks": sinks}
    options = (causal, window, scale, softcap)
    if not is_recorded(*tensors.values()):
        return _core.flash_attention(
            q, k, v, *options, sinks, layout, return_lse, out, lse, kernel, stream
        )
    for name, given in (("out", out), ("lse", lse), ("stream", stream)):
        if given is not None:
            raise InvalidArgumentError(_GIVEN.format(name))

    def compute(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return _core.flash_attention(
            q, k, v, *options, sinks, layout, True, None, None, kernel, None
        )

    def differentiate(*arguments: Any) -> Any:
        return once(functools.partial(of_wanted, arguments[-1]), *arguments[:-1])

    def of_wanted(
        wanted: Any, dout: Any, dlse: Any, q: Any, k: Any, v: Any, sinks: Any, out: Any, lse: Any
    ) -> Any:
        return flash_attention_backward(
            readable(dout), q, k, v, out, lse, dlse=dlse, sinks=sinks, causal=causal, window=window,
            scale=scale, softcap=softcap, layout=layout, wanted=wanted,
        )  # fmt: skip

    made = attend(compute, differentiate, tensors)
    return tuple(made) if return_lse else made[0]
