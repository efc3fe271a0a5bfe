"""Attention in torch's autograd and autocast.

The native half calls this module for flash_attention calls whose gradients torch records or whose
tensors it casts; the operators of flashmoe_science.torch share the code below. It is imported at
the first such call, when torch is already imported.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from flashmoe_science import _core
from flashmoe_science._dispatch import is_transformed
from flashmoe_science._dtypes import CPU, CUDA, Device, Dtype
from flashmoe_science.attention import (
    BOUNDS,
    NO_SEQUENCES,
    SEQUENCES,
    flash_attention_backward,
    of_backward,
)
from flashmoe_science.errors import FlashMoEError, InvalidArgumentError, UnsupportedError

_Tensors = tuple[Any, ...]
_Flags = Sequence[bool]
_ROW_ALIGNMENT = 16  # bytes
_GIVEN = "{}: got one in a call that gradients are recorded of, accepted is None"
_TWICE = (
    "attention: its gradients are differentiated again, and have no derivative yet; accepted is "
    "one differentiation, without create_graph=True or a transform of torch.func around another"
)


def is_recorded(*tensors: Any) -> bool:
    """Whether torch records operations on one of these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


# ---- whether there are gradients -------------------------------------------------------------

_CODES = {
    torch.bfloat16: 4,
    torch.bool: 6,
    torch.float8_e4m3fn: 10,
}  # DLPack's; other dtypes by their kind
_FLOAT, _COMPLEX, _SIGNED, _UNSIGNED = 2, 5, 0, 1
_LACKING = (
    "{0}: requires grad, but no kernel computes the gradients of this call ({1}); call under "
    "torch.no_grad() or pass {0}.detach()"
)
SHARED_KEYS = _LACKING.format(
    "{0}",
    "{1}: got one, accepted is None: keys that sequences may share have no gradients in this "
    "version",
)
SCALED_KEYS = _LACKING.format(
    "{0}", "{1}: got one, accepted is None: keys and values with scales have no gradients"
)
_NARROW_KEYS = (
    "{}: got dtype {}, accepted is {} as q's: keys and values of 8 bits have no gradients"
)
NO_BIAS_GRADIENT = (
    "attn_bias: requires grad, but no kernel computes the gradient of a bias in this version; pass "
    "attn_bias.detach()"
)
NO_MERGE_GRADIENT = (
    "prior_out: got one in a call that gradients are recorded of, accepted is None: what is merged "
    "in has no gradients in this version; call under torch.no_grad() or on detached tensors"
)
_MOST_KEPT = 1024
_kept_reasons: dict[Any, str] = {}  # by problem: asking would take too long for a call


def described(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    strides: tuple[int, ...] | None = None,
) -> Any:
    """A description of a tensor for plans, where it need not exist; contiguous without strides."""
    code = _CODES.get(dtype)
    if code is None and dtype.is_complex:
        code = _COMPLEX
    if code is None and not dtype.is_floating_point:
        code = _SIGNED if dtype.is_signed else _UNSIGNED
    numbers = Dtype(_FLOAT if code is None else code, 8 * dtype.itemsize)
    cuda = device.type == "cuda"
    where = Device(CUDA if cuda else CPU, (device.index or 0) if cuda else 0)
    return tuple(shape), numbers, where, strides


def split(sequences: Any) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The tables and the bounds of ragged, padded and paged batches; empty for a dense one."""
    if sequences is None or all(x is None for x in sequences):
        return {}, ()
    bounds = (None if x is None else operator.index(x) for x in sequences[-BOUNDS:])
    return dict(zip(SEQUENCES[:-BOUNDS], sequences[:-BOUNDS], strict=True)), tuple(bounds)


def joined(tables: Sequence[Any], bounds: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Joins what `split` split."""
    return (*tables, *bounds) or None


def _facts(tensor: Any) -> Any:
    return None if tensor is None else (tensor.shape, tensor.dtype, tensor.device, tensor.stride())


def lacks_gradients(
    tensors: dict[str, Any],
    options: dict[str, Any],
    tables: dict[str, Any] | None = None,
    bounds: tuple[Any, ...] = (),
) -> str:
    """Why the library cannot compute the gradients that torch records for q, k, v and sinks, "" if
    it can. Also "" for a wrong call, which has a sentence of its own."""
    of = [_facts(x) for x in tensors.values()]
    sequences = {name: _facts(x) for name, x in (tables or {}).items()}
    wanted = tuple(x is not None and x.requires_grad for x in tensors.values())
    packed = _core.pack_options("attention_backward", options)
    key = (*of, wanted, packed, *sequences.values(), *bounds)
    reason = _kept_reasons.get(key)
    if reason is None:
        further = dict(zip(SEQUENCES[-BOUNDS:], bounds, strict=False))
        reason = _why_not(of, options | {"wanted": wanted} | further, sequences)
        if len(_kept_reasons) >= _MOST_KEPT:
            _kept_reasons.clear()
        _kept_reasons[key] = reason
    return reason and _LACKING.format(list(tensors)[wanted.index(True)], reason)


def _why_not(
    tensors: Sequence[Any], options: dict[str, Any], tables: dict[str, Any] | None = None
) -> str:
    """Why the library refuses the backward of q, k, v and sinks, each as `described` takes it."""
    q, k, v, sinks = tensors
    for name, (_, dtype, *_) in (("k", k), ("v", v)):
        if dtype.itemsize == 1:
            return _NARROW_KEYS.format(
                name, *(str(x).removeprefix("torch.") for x in (dtype, q[1]))
            )
    if any(len(x[0]) != 4 for x in (q, k, v)):
        return ""
    shape, dtype, device, *_ = q
    rows = (shape[1], shape[2]) if options["layout"] == "bhsd" else (shape[2], shape[1])
    out = described((*shape[:3], v[0][3]), dtype, device)
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    given = {
        "q": described(*q), "k": described(*k), "v": described(*v), "out": out, "dout": out,
        "lse": described((shape[0], *rows), sums, device),
        "sinks": None if sinks is None else described(*sinks),
    }  # fmt: skip
    for name, table in (tables or {}).items():
        given[name] = None if table is None else described(*table)
    try:
        _core.plan("attention_backward", given, options)
    except UnsupportedError as error:
        return str(error)
    except FlashMoEError as error:  # the call's own error, or that of an extent without gradients
        return str(error) if _is_served(given, options) else ""
    return ""


def _is_served(given: dict[str, Any], options: dict[str, Any]) -> bool:
    """Whether the forward call for this backward is served."""
    inputs = {name: x for name, x in given.items() if name not in ("dout", "out", "lse")}
    kept = {name: option for name, option in options.items() if name != "wanted"}
    try:
        _core.plan("attention_forward", inputs, kept | {"return_lse": True})
    except FlashMoEError:
        return False
    return True


_EXAMPLE = 128  # keys and queries


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _lacks_gradients_of_dims(dtype: torch.dtype, device: torch.device, dim: int, dim_v: int) -> str:
    q, v = (((1, _EXAMPLE, 1, extent), dtype, device) for extent in (dim, dim_v))
    reason = _why_not((q, q, v, None), {"layout": "bshd"})
    return reason and _LACKING.format("query", reason)


def graph_lacks_gradients(query: torch.Tensor, value: torch.Tensor) -> str:
    """The same for a call that torch.compile traces, as far as a graph can know: its lengths may be
    any."""
    # Makes the graph treat a variable as a constant.
    dim, dim_v = operator.index(query.shape[-1]), operator.index(value.shape[-1])
    reason: str = _lacks_gradients_of_dims(query.dtype, query.device, dim, dim_v)
    return reason


# ---- recording -------------------------------------------------------------------------------


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
    """Gradients by `differentiate`, as in attend. The gradient of an unused output is None."""
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
    """(out, lse) of tensors with is_recorded and without lacks_gradients.

    `compute` makes them from the tensors. `differentiate` makes the gradients, or None, from (dout,
    dlse or None, *tensors, out, lse, whether each tensor's gradient is wanted).
    """
    apply: Any = _Attention.apply
    return apply(compute, differentiate, *tensors.values())


def once(compute: Callable[..., Any], *tensors: Any) -> Any:
    """compute(*tensors) for a function without derivative: differentiating it raises an error that
    says so."""
    if not is_recorded(*tensors):
        return compute(*tensors)
    apply: Any = _Gradients.apply
    return apply(compute, *tensors)


def readable(x: torch.Tensor) -> torch.Tensor:
    """A gradient in a layout that kernels take: torch's gradient of out may be expanded, or lie
    anywhere."""
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


def _to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype)


def autocast(
    *tensors: torch.Tensor, cast: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = _to
) -> tuple[torch.Tensor, ...]:
    """Casts all of these to autocast's dtype if torch.autocast is on and one is fp32; fp64 and fp8
    stay. `cast` makes a tensor of a dtype from one."""
    if not _is_cast(*tensors):
        return tensors
    kind = tensors[0].device.type
    dtype = torch.get_autocast_dtype(kind)

    def of_autocast(x: torch.Tensor) -> torch.Tensor:
        takes_part = x.is_floating_point() and x.itemsize in (2, 4) and x.device.type == kind
        return cast(x, dtype) if takes_part else x

    return tuple(map(of_autocast, tensors))


def is_handled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: Any = None, attn_bias: Any = None,
    attn_mask: Any = None, prior_out: Any = None, prior_lse: Any = None,
) -> bool:  # fmt: skip
    """Whether the function below handles a call with these."""
    recorded = is_recorded(q, k, v, sinks, attn_bias, prior_out, prior_lse)
    return recorded or _is_cast(q, k, v)


def flash_attention(
    q: Any, k: Any, v: Any, causal: Any, window: Any, scale: Any, softcap: Any, sinks: Any,
    layout: Any, return_lse: Any, out: Any, lse: Any, kernel: Any, stream: Any,
    sequences: Any = None, attn_bias: Any = None, attn_mask: Any = None, prior_out: Any = None,
    prior_lse: Any = None,
) -> Any:  # fmt: skip
    """The native flash_attention calls this for calls with is_handled. It calls back with tensors
    that need no handling: cast, and without grad mode."""
    q, k, v = autocast(q, k, v)
    tensors = {"q": q, "k": k, "v": v, "sinks": sinks}
    options = (causal, window, scale, softcap)
    if not is_recorded(*tensors.values(), attn_bias, prior_out, prior_lse):
        return _core.flash_attention(
            q, k, v, *options, sinks, layout, return_lse, out, lse, kernel, stream, sequences,
            attn_bias, attn_mask, prior_out, prior_lse,
        )  # fmt: skip
    if prior_out is not None:
        raise UnsupportedError(NO_MERGE_GRADIENT)
    if is_recorded(attn_bias):
        raise UnsupportedError(NO_BIAS_GRADIENT)
    for name, given in (("out", out), ("lse", lse), ("stream", stream)):
        if given is not None:
            raise InvalidArgumentError(_GIVEN.format(name))
    of_scores = {"layout": layout, "causal": causal, "window": window, "scale": scale,
                 "softcap": softcap}  # fmt: skip
    tables, bounds = split(sequences)
    pairs = {"attn_bias": attn_bias, "attn_mask": attn_mask}
    reason = lacks_gradients(tensors, of_scores, pairs | tables, bounds)
    if reason:
        raise UnsupportedError(reason)

    def compute(
        q: Any, k: Any, v: Any, sinks: Any, attn_bias: Any, attn_mask: Any, *tables: Any
    ) -> Any:
        return _core.flash_attention(
            q, k, v, *options, sinks, layout, True, None, None, kernel, None,
            joined(tables, bounds), attn_bias, attn_mask,
        )  # fmt: skip

    def differentiate(*arguments: Any) -> Any:
        made = once(functools.partial(of_wanted, arguments[-1]), *arguments[:-1])
        return *made, *(None for _ in pairs | tables)

    def of_wanted(
        wanted: Any, dout: Any, dlse: Any, q: Any, k: Any, v: Any, sinks: Any, attn_bias: Any,
        attn_mask: Any, *others: Any,
    ) -> Any:  # fmt: skip
        *tables, out, lse = others
        sequences = joined(tables, bounds) or NO_SEQUENCES
        return flash_attention_backward(
            readable(dout), q, k, v, out, lse, dlse=dlse, sinks=sinks, attn_bias=attn_bias,
            attn_mask=attn_mask, **of_scores, wanted=wanted[: len(tensors)],
            **of_backward(sequences),
        )  # fmt: skip

    made = attend(compute, differentiate, tensors | pairs | tables)
    return tuple(made) if return_lse else made[0]
