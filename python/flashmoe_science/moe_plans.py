"""How a call of the mixture of experts would be computed, without computing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashmoe_science import _core
from flashmoe_science._dtypes import Dtype, parse_device, parse_dtype, parse_extent, parse_flag
from flashmoe_science.errors import ArgumentTypeError
from flashmoe_science.moe import Activation, Gate, MoeRouting, Scoring
from flashmoe_science.plan import Launch, Plan

_INT32 = Dtype(0, 32)
_FP32 = Dtype(2, 32)


MoeLaunch = Launch
"""What launches of a MoePlan are."""


@dataclass(frozen=True)
class MoePlan(Plan):
    """The plan of one call of the mixture of experts."""


def _plan(operation: str, tensors: dict[str, Any], options: dict[str, Any]) -> MoePlan:
    from flashmoe_science import _dispatch

    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if any(_dispatch.is_jax(tensor) for tensor in given.values()):
        from flashmoe_science import jax  # its arrays may be on a device of another process

        fields = jax.plan(operation, given, options)
    else:
        fields = _core.plan(operation, given, options)
    return MoePlan.of(fields)


def moe_route_plan(
    logits: Any,
    top_k: int,
    *,
    scoring: Scoring = "softmax",
    renormalize: bool = False,
    selection_bias: Any = None,
    num_groups: int = 1,
    top_groups: int | None = None,
    scale: float = 1.0,
    return_lse: bool = False,
) -> MoePlan:
    """What moe_route would do with these arguments. Reads no data and launches nothing.

    Raises what moe_route would raise for its arguments.
    """
    return _plan(
        "moe_route",
        {"logits": logits, "selection_bias": selection_bias},
        {
            "top_k": top_k, "scoring": scoring, "renormalize": renormalize,
            "num_groups": num_groups, "top_groups": top_groups, "scale": scale,
            "return_lse": parse_flag("return_lse", return_lse),
        },
    )  # fmt: skip


def moe_plan(
    x: Any,
    w_gate_up: Any,
    w_down: Any,
    routing: MoeRouting,
    *,
    w_up: Any = None,
    gate: Gate = "gate_up",
    activation: Activation = "silu",
    b_gate_up: Any = None,
    b_up: Any = None,
    b_down: Any = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    weight_on_input: bool = False,
    out: Any = None,
    pre_activation: Any = None,
    return_pre_activation: bool = False,
    kernel: str | None = None,
) -> MoePlan:
    """What moe_forward would do with these arguments. Reads no data and launches nothing.

    Raises what moe_forward would raise for its arguments.
    """
    if not isinstance(routing, tuple) or len(routing) != len(MoeRouting._fields):
        raise ArgumentTypeError(
            f"routing: got {type(routing).__name__}, accepted is a MoeRouting, which moe_route and "
            "moe_route_given return"
        )
    _, weights, offsets, pairs, slots, _ = routing
    tensors = {
        "x": x, "w_gate_up": w_gate_up, "w_up": w_up, "w_down": w_down, "b_gate_up": b_gate_up,
        "b_up": b_up, "b_down": b_down, "weights": weights, "offsets": offsets, "pairs": pairs,
        "slots": slots, "out": out, "pre_activation": pre_activation,
    }  # fmt: skip
    options = {
        "gate": gate, "activation": activation, "alpha": alpha, "limit": limit,
        "up_offset": up_offset, "weight_on_input": weight_on_input, "kernel": kernel,
        "return_pre_activation": parse_flag("return_pre_activation", return_pre_activation),
    }  # fmt: skip
    return _plan("moe_forward", tensors, options)


def grouped_product_plan(
    x: Any,
    w: Any,
    *,
    offsets: Any = None,
    counts: Any = None,
    bias: Any = None,
    out: Any = None,
    kernel: str | None = None,
) -> MoePlan:
    """What grouped_product would do with these arguments. Reads no data and launches nothing.

    Raises what grouped_product would raise for its arguments.
    """
    tensors = {"x": x, "w": w, "offsets": offsets, "counts": counts, "bias": bias, "out": out}
    return _plan("grouped_product", tensors, {"kernel": kernel})


def moe_route_plan_for(
    *,
    tokens: int,
    experts: int,
    top_k: int,
    dtype: object = "bf16",
    device: object = "cpu",
    scoring: Scoring = "softmax",
    renormalize: bool = False,
) -> MoePlan:
    """The plan of moe_route for logits of these extents, which need not exist.

    Args:
        dtype: Of the logits: "fp16", "bf16", "fp32", or an object that prints as one.
        device: "cpu", "cuda", "cuda:N", an object that prints as one (a torch.device), or a model
            of GPUs that need not be here: "h100", "h200", "l4", "rtx4090".

    Raises what moe_route would raise for such logits.
    """
    tokens, experts = _parse_extents(tokens=tokens, experts=experts)
    logits = ((tokens, experts), parse_dtype(dtype), parse_device(device), None)
    return moe_route_plan(logits, top_k, scoring=scoring, renormalize=renormalize)


def moe_plan_for(
    *,
    tokens: int,
    hidden: int,
    inner: int,
    experts: int,
    top_k: int,
    dtype: object = "bf16",
    device: object = "cpu",
    gate: Gate = "gate_up",
    activation: Activation = "silu",
    transposed: bool = False,
    bias: bool = False,
    return_pre_activation: bool = False,
    kernel: str | None = None,
) -> MoePlan:
    """The plan of moe_forward for contiguous tensors of these extents, which need not exist.

    Args:
        tokens, hidden, inner, experts, top_k: T, H, I, E and K of moe_forward.
        dtype: "fp16", "bf16", "fp32", or an object that prints as one (torch.bfloat16).
        device: "cpu", "cuda", "cuda:N", an object that prints as one (a torch.device), or a model
            of GPUs that need not be here: "h100", "h200", "l4", "rtx4090".
        transposed: Whether weights are stored as [E, H, 2I] and [E, I, H].
        bias: Whether experts have biases.

    Raises what moe_forward would raise for such tensors.
    """
    tokens, hidden, inner, experts, top_k = _parse_extents(
        tokens=tokens, hidden=hidden, inner=inner, experts=experts, top_k=top_k
    )
    parse_flag("transposed", transposed)
    parse_flag("bias", bias)
    where, numbers = parse_device(device), parse_dtype(dtype)

    def tensor(*shape: int, of: Dtype = numbers, turned: bool = False) -> Any:
        strides = None
        if turned and transposed:
            strides = (shape[1] * shape[2], 1, shape[1])
        return shape, of, where, strides

    both = inner if gate in ("separate", "none") else 2 * inner
    separate = gate == "separate"
    routing = MoeRouting(
        ids=None,
        weights=tensor(tokens, top_k, of=_FP32),
        offsets=tensor(experts + 1, of=_INT32),
        pairs=tensor(tokens * top_k, of=_INT32),
        slots=tensor(tokens, top_k, of=_INT32),
    )
    return moe_plan(
        tensor(tokens, hidden),
        tensor(experts, both, hidden, turned=True),
        tensor(experts, hidden, inner, turned=True),
        routing,
        w_up=tensor(experts, inner, hidden, turned=True) if separate else None,
        b_gate_up=tensor(experts, both) if bias else None,
        b_up=tensor(experts, inner) if bias and separate else None,
        b_down=tensor(experts, hidden) if bias else None,
        gate=gate,
        activation=activation,
        return_pre_activation=return_pre_activation,
        kernel=kernel,
    )


def _parse_extents(**extents: Any) -> list[int]:
    """Of which sizes of tensors fit 64 bits."""
    return [parse_extent(name, extent, 2**31, "0 to 2^31 - 1") for name, extent in extents.items()]


def fused_moe_plan(
    tokens: Any,
    router_weights: Any,
    w_gate_up: Any,
    w_down: Any,
    top_k: int,
    *,
    logits: Any = None,
    router_bias: Any = None,
    scoring: Scoring = "softmax",
    renormalize: bool = False,
    selection_bias: Any = None,
    num_groups: int = 1,
    top_groups: int | None = None,
    scale: float = 1.0,
    w_up: Any = None,
    gate: Gate = "gate_up",
    activation: Activation = "silu",
    b_gate_up: Any = None,
    b_up: Any = None,
    b_down: Any = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    weight_on_input: bool = False,
    out: Any = None,
    kernel: str | None = None,
) -> MoePlan:
    """What fused_moe would do with these arguments: the launches of the router's product, of
    routing and of the layer. Reads no data and launches nothing.

    With a number of experts that is no multiple of 8 the router's product is the tensors' own
    library's, and not among the launches. Raises what fused_moe would raise for its arguments.
    """
    from flashmoe_science import _moe

    tensors = {
        "tokens": tokens, "router_weights": router_weights, "router_bias": router_bias,
        "logits": logits, "selection_bias": selection_bias, "w_gate_up": w_gate_up, "w_up": w_up,
        "w_down": w_down, "b_gate_up": b_gate_up, "b_up": b_up, "b_down": b_down, "out": out,
    }  # fmt: skip
    options = {
        "top_k": top_k, "scoring": scoring, "renormalize": renormalize, "num_groups": num_groups,
        "top_groups": top_groups, "scale": scale, "gate": gate, "activation": activation,
        "alpha": alpha, "limit": limit, "up_offset": up_offset,
        "weight_on_input": weight_on_input, "kernel": kernel,
    }  # fmt: skip
    return _plan("fused_moe", _moe.tensors_of_fused_plan(tensors), options)
