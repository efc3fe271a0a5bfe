"""The mixture of experts in torch's autograd.

The native half calls this module when torch records gradients. Calls go on to the operators of
flashmoe_science.torch, which share the code below. It is imported at the first such call, when
torch is already imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from flashmoe_science import _core
from flashmoe_science._autograd import autocast, is_recorded
from flashmoe_science._dispatch import NO_DERIVATIVE
from flashmoe_science._moe import WORDS
from flashmoe_science.errors import InvalidArgumentError, UnsupportedError
from flashmoe_science.moe import MoeRouting

_Tensors = Sequence[Any]
_GIVEN = "{}: got one in a call that gradients are recorded of, accepted is None"
_TWICE = (
    "the mixture of experts: its gradients are differentiated again, and have no derivative yet; "
    "accepted is one differentiation, without create_graph=True or a transform of torch.func "
    "around another"
)


class Steps(NamedTuple):
    """How a call is computed and differentiated. Objects that a transform of torch.func has wrapped
    must be among the tensors: the functions close over options only."""

    names: tuple[str, ...]
    """Names of the tensors."""
    compute: Callable[..., tuple[Any, ...]]
    """Computes the outputs from the tensors."""
    differentiate: Callable[..., Sequence[Any]]
    """Computes the tensors' gradients, or None, from the outputs' gradients, the tensors, the kept
    outputs, and whether each tensor's gradient is wanted."""
    differentiable: tuple[int, ...]
    """The outputs that have gradients."""
    kept: tuple[int, ...] = ()
    """The outputs that the gradients are computed from. No other is saved."""
    overwrite: Callable[..., Sequence[Any] | None] | None = None
    """Like `differentiate`, but in the memory of the kept outputs; None if others may read them. A
    retained graph then differentiates without them."""


def _each(call: Callable[..., Any], info: Any, in_dims: Any, *arguments: Any) -> Any:
    """call(*arguments) under torch.func.vmap: entry by entry."""
    from flashmoe_science.torch import operators

    return operators.batching_rule(call, None)(info, in_dims, *arguments)


def _refuse_tangents(names: Sequence[str], tangents: Sequence[Any]) -> NoReturn:
    having = (name for name, x in zip(names, tangents, strict=False) if x is not None)
    raise InvalidArgumentError(NO_DERIVATIVE.format(next(having, names[0]), WORDS.name))


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(steps: Steps, *tensors: Any) -> Any:
        return steps.compute(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        steps, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(x for i, x in enumerate(output) if i not in steps.differentiable)
        )
        ctx.save_for_backward(*tensors, *(output[i] for i in steps.kept))
        ctx.steps, ctx.count, ctx.spent = steps, len(tensors), False

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        steps, count = ctx.steps, ctx.count
        if all(grads[i] is None for i in steps.differentiable):
            return None, *(None,) * count
        saved = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        tensors, kept = saved[:count], () if ctx.spent else saved[count:]
        if kept and steps.overwrite is not None:
            gradients = steps.overwrite(grads, tensors, kept, wanted)
            if gradients is not None:
                ctx.spent = True
                return None, *gradients
        return None, *steps.differentiate(grads, tensors, kept, wanted)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _each(_Recorded.apply, info, in_dims, *arguments)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        _refuse_tangents(ctx.steps.names, tangents[1:])


def recorded(steps: Steps, *tensors: Any) -> tuple[Any, ...]:
    """The outputs, attached to torch's autograd."""
    apply: Any = _Recorded.apply
    made: tuple[Any, ...] = apply(steps, *tensors)
    return made


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(compute: Callable[..., Any], *tensors: Any) -> Any:
        return compute(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *unused: Any) -> NoReturn:
        raise UnsupportedError(_TWICE)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
        return _each(_Once.apply, info, in_dims, *arguments)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise UnsupportedError(_TWICE)


def once(compute: Callable[..., Any], *tensors: Any) -> Any:
    """compute(*tensors) for a function without derivative: differentiating it raises an error that
    says so."""
    if not is_recorded(*(x for x in tensors if isinstance(x, torch.Tensor))):
        return compute(*tensors)
    apply: Any = _Once.apply
    return apply(compute, *tensors)


# ---- calls of the native half ----------------------------------------------------------------


def cast(*tensors: Any) -> list[Any]:
    """Casts the fp32 tensors among these if torch.autocast is on; optional ones may be None.
    Gradients of fp32 master weights are fp32."""
    made = iter(autocast(*(x for x in tensors if x is not None)))
    return [None if x is None else next(made) for x in tensors]


def _is_recorded(*arguments: Any) -> bool:
    return is_recorded(*(x for x in arguments if isinstance(x, torch.Tensor)))


def _below_autocast(call: Callable[..., Any], first: torch.Tensor, *arguments: Any) -> Any:
    """Calls the native half with autocast off; tensors are already cast."""
    with torch.autocast(first.device.type, enabled=False):
        return call(first, *arguments)


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise InvalidArgumentError(_GIVEN.format(name))


def moe_route(
    logits: Any, top_k: Any, scoring: Any, renormalize: Any, selection_bias: Any, num_groups: Any,
    top_groups: Any, scale: Any, return_lse: Any, out: Any, stream: Any,
) -> MoeRouting:  # fmt: skip
    from flashmoe_science.torch import operators

    _refuse(out=out, stream=stream)
    return operators.traced_moe_route(
        logits, top_k, scoring, renormalize, selection_bias, num_groups, top_groups, scale,
        return_lse,
    )  # fmt: skip


def moe_route_given(
    given_ids: Any, given_weights: Any, num_experts: Any, renormalize: Any, scale: Any,
    expert_map: Any, out: Any, stream: Any,
) -> MoeRouting:  # fmt: skip
    from flashmoe_science.torch import operators

    _refuse(out=out, stream=stream)
    return operators.traced_moe_route_given(
        given_ids, given_weights, num_experts, renormalize, scale, expert_map
    )


def moe_forward(
    x: Any, w_gate_up: Any, w_down: Any, routing: Any, w_up: Any, gate: Any, activation: Any,
    b_gate_up: Any, b_up: Any, b_down: Any, alpha: Any, limit: Any, up_offset: Any,
    weight_on_input: Any, out: Any, pre_activation: Any, return_pre_activation: Any,
    max_workspace_bytes: Any, recompute: Any, kernel: Any, stream: Any,
) -> Any:  # fmt: skip
    from flashmoe_science.torch import operators

    x, w_gate_up, w_down, w_up = cast(x, w_gate_up, w_down, w_up)
    if not _is_recorded(x, w_gate_up, w_down, w_up, b_gate_up, b_up, b_down, *routing):
        return _below_autocast(
            _core.moe_forward, x, w_gate_up, w_down, routing, w_up, gate, activation, b_gate_up,
            b_up, b_down, alpha, limit, up_offset, weight_on_input, out, pre_activation,
            return_pre_activation, max_workspace_bytes, recompute, kernel, stream,
        )  # fmt: skip
    _refuse(out=out, pre_activation=pre_activation, stream=stream)
    return operators.traced_moe_forward(
        x, w_gate_up, w_down, routing, return_pre_activation, w_up, gate, activation, b_gate_up,
        b_up, b_down, alpha, limit, up_offset, weight_on_input, max_workspace_bytes, recompute,
        kernel,
    )  # fmt: skip


def grouped_product(
    x: Any, w: Any, offsets: Any, counts: Any, bias: Any, out: Any, kernel: Any, stream: Any
) -> Any:
    from flashmoe_science.torch import operators

    x, w = cast(x, w)
    if not _is_recorded(x, w, bias):
        return _below_autocast(
            _core.grouped_product, x, w, offsets, counts, bias, out, kernel, stream
        )
    _refuse(out=out, stream=stream)
    return operators.traced_grouped_product(x, w, offsets, counts, bias, kernel)


def fused_moe(*arguments: Any) -> Any:
    from flashmoe_science.torch import operators

    *layer, out, max_workspace_bytes, recompute, kernel, stream = arguments
    layer = cast_layer(layer)
    if not _is_recorded(*layer):
        return _below_autocast(
            _core.fused_moe, *layer, out, max_workspace_bytes, recompute, kernel, stream
        )
    _refuse(out=out, stream=stream)
    return operators.traced_fused_moe(*layer, max_workspace_bytes, recompute, kernel)


_FUSED_MATRICES = (0, 1, 2, 3, 13)  # tokens, router_weights, w_gate_up, w_down, w_up


def cast_layer(arguments: Sequence[Any]) -> list[Any]:
    """The arguments of fused_moe, cast: operands of products, but not biases, which may be fp32."""
    made = list(arguments)
    for i, tensor in zip(_FUSED_MATRICES, cast(*(made[i] for i in _FUSED_MATRICES)), strict=True):
        made[i] = tensor
    return made
