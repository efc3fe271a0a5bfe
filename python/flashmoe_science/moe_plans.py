"""Plans of mixture-of-experts calls, without computing them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashmoe_science import _core
from flashmoe_science._dtypes import Dtype, parse_device, parse_dtype, parse_extent, parse_flag
from flashmoe_science.errors import ArgumentTypeError
from flashmoe_science.moe import Activation, Gate, MoeRouting, Scoring
from flashmoe_science.plan import Launch, Plan

_INT32 = Dtype(0, 32)
_FP32, _FP64 = Dtype(2, 32), Dtype(2, 64)


MoeLaunch = Launch
"""The class of the launches of a MoePlan."""


@dataclass(frozen=True)
class MoePlan(Plan):
    """The plan of one call of the mixture of experts."""


def _plan(operation: str, tensors: dict[str, Any], options: dict[str, Any]) -> MoePlan:
    from flashmoe_science import _dispatch

    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if any(_dispatch.is_jax(tensor) for tensor in given.values()):
        from flashmoe_science import jax  # JAX arrays may be on a device of another process

        fields = jax.plan(operation, given, options)
    else:
        fields = _core.plan(operation, given, options)
    return MoePlan.of(fields)


def _checked(routing: Any) -> MoeRouting:
    if not isinstance(routing, tuple) or len(routing) != len(MoeRouting._fields):
        raise ArgumentTypeError(
            f"routing: got {type(routing).__name__}, accepted is a MoeRouting, which moe_route and "
            "moe_route_given return"
        )
    return MoeRouting(*routing)


def _order_of(routing: Any) -> tuple[Any, Any, Any, Any]:
    """The parts of a routing that a layer reads: weights, offsets, pairs and slots."""
    _, weights, offsets, pairs, slots, _ = _checked(routing)
    return weights, offsets, pairs, slots


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
    """Plans what moe_route would do with these arguments. Reads no data and launches nothing.

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
    """Plans what moe_forward would do with these arguments. Reads no data and launches nothing.

    Raises what moe_forward would raise for its arguments.
    """
    weights, offsets, pairs, slots = _order_of(routing)
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
    """Plans what grouped_product would do with these arguments. Reads no data and launches nothing.

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
    """Plans moe_route for logits of these extents, which need not exist.

    Args:
        dtype: The logits' dtype: "fp16", "bf16", "fp32", on the CPU also "fp64", or an object that
            prints as one.
        device: "cpu", "cuda", "cuda:N", an object that prints as one (a torch.device), or a model
            of GPUs that need not be here: "h100", "h200", "l4", "rtx4090".

    Raises what moe_route would raise for such logits.
    """
    tokens, experts = _parse_extents(tokens=tokens, experts=experts)
    logits = ((tokens, experts), parse_dtype(dtype), parse_device(device), None)
    return moe_route_plan(logits, top_k, scoring=scoring, renormalize=renormalize)


def moe_backward_plan(
    dout: Any,
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
    pre_activation: Any = None,
    overwrite_pre_activation: bool = False,
    wanted: Sequence[bool] | None = None,
    max_workspace_bytes: int | None = None,
    kernel: str | None = None,
) -> MoePlan:
    """Plans what moe_backward would do with these arguments and new gradients. Reads no data and
    launches nothing.

    Raises what moe_backward would raise for its arguments.
    """
    from flashmoe_science import moe_gradients

    weights, offsets, pairs, slots = _order_of(routing)
    tensors = {
        "dout": dout, "x": x, "w_gate_up": w_gate_up, "w_up": w_up, "w_down": w_down,
        "b_gate_up": b_gate_up, "b_up": b_up, "b_down": b_down, "weights": weights,
        "offsets": offsets, "pairs": pairs, "slots": slots, "pre_activation": pre_activation,
    }  # fmt: skip
    options = {
        "gate": gate, "activation": activation, "alpha": alpha, "limit": limit,
        "up_offset": up_offset, "weight_on_input": weight_on_input, "kernel": kernel,
        "max_workspace_bytes": max_workspace_bytes,
        "overwrite_pre_activation": overwrite_pre_activation,
        "wanted": moe_gradients.wanted_flags(wanted, moe_gradients.MoeGradients),
    }  # fmt: skip
    return _plan("moe_backward", tensors, options)


def moe_route_backward_plan(
    dweights: Any,
    routing: MoeRouting,
    *,
    logits: Any = None,
    given_weights: Any = None,
    dlse: Any = None,
    scoring: Scoring = "softmax",
    renormalize: bool = False,
    scale: float = 1.0,
) -> MoePlan:
    """Plans what moe_route_backward would do with these arguments and a new gradient. Reads no data
    and launches nothing.

    Raises what moe_route_backward would raise for its arguments.
    """
    tensors = {
        "dweights": dweights, "ids": _checked(routing).ids, "logits": logits,
        "given_weights": given_weights, "dlse": dlse,
    }  # fmt: skip
    options = {"scoring": scoring, "renormalize": renormalize, "scale": scale}
    return _plan("moe_route_backward", tensors, options)


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
    """Plans moe_forward for contiguous tensors of these extents, which need not exist.

    Args:
        tokens, hidden, inner, experts, top_k: T, H, I, E and K of moe_forward.
        dtype: "fp16", "bf16", on the CPU also "fp32" and "fp64", or an object that prints as one
            (torch.bfloat16).
        device: "cpu", "cuda", "cuda:N", an object that prints as one (a torch.device), or a model
            of GPUs that need not be here: "h100", "h200", "l4", "rtx4090".
        transposed: Whether weights are stored as [E, H, 2I] and [E, I, H].
        bias: Whether experts have biases.

    Raises what moe_forward would raise for such tensors.
    """
    layer = _Layer(tokens, hidden, inner, experts, top_k, dtype, device)
    return moe_plan(
        layer.tensor(layer.tokens, layer.hidden),
        *layer.weights(gate, transposed),
        layer.routing(),
        **layer.options(gate, activation, transposed, bias),
        return_pre_activation=return_pre_activation,
        kernel=kernel,
    )


def moe_backward_plan_for(
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
    pre_activation: bool = True,
    overwrite_pre_activation: bool = False,
    wanted: Sequence[bool] | None = None,
    max_workspace_bytes: int | None = None,
    kernel: str | None = None,
) -> MoePlan:
    """Plans moe_backward for contiguous tensors of these extents, which need not exist.

    Args:
        tokens, hidden, inner, experts, top_k, dtype, device, transposed, bias: As in moe_plan_for.
        pre_activation: Whether the forward returned it; else it is computed again.
        overwrite_pre_activation, wanted, max_workspace_bytes: As in moe_backward.

    Raises what moe_backward would raise for such tensors.
    """
    layer = _Layer(tokens, hidden, inner, experts, top_k, dtype, device)
    x = layer.tensor(layer.tokens, layer.hidden)
    pairs = layer.tokens * layer.top_k
    saved = layer.tensor(pairs, layer.inner * (1 if gate == "none" else 2))
    return moe_backward_plan(
        x,
        x,
        *layer.weights(gate, transposed),
        layer.routing(),
        **layer.options(gate, activation, transposed, bias),
        pre_activation=saved if parse_flag("pre_activation", pre_activation) else None,
        overwrite_pre_activation=overwrite_pre_activation,
        wanted=wanted,
        max_workspace_bytes=max_workspace_bytes,
        kernel=kernel,
    )


def moe_route_backward_plan_for(
    *,
    tokens: int,
    experts: int,
    top_k: int,
    dtype: object = "bf16",
    device: object = "cpu",
    scoring: Scoring = "softmax",
    renormalize: bool = False,
) -> MoePlan:
    """Plans moe_route_backward for the gradient of logits of these extents, which need not exist.
    The arguments are those of moe_route_plan_for.

    Raises what moe_route_backward would raise for such tensors.
    """
    layer = _Layer(tokens, 0, 0, experts, top_k, dtype, device)
    return moe_route_backward_plan(
        layer.routing().weights,
        layer.routing(),
        logits=layer.tensor(layer.tokens, layer.experts),
        scoring=scoring,
        renormalize=renormalize,
    )


class _Layer:
    """Descriptions of a layer's contiguous tensors, which need not exist, as _core.plan takes
    them."""

    def __init__(
        self, tokens: int, hidden: int, inner: int, experts: int, top_k: int, dtype: object,
        device: object,
    ) -> None:  # fmt: skip
        self.tokens, self.hidden, self.inner, self.experts, self.top_k = _parse_extents(
            tokens=tokens, hidden=hidden, inner=inner, experts=experts, top_k=top_k
        )
        self._where, self._numbers = parse_device(device), parse_dtype(dtype)

    def tensor(self, *shape: int, of: Dtype | None = None, turned: bool = False) -> Any:
        strides = (shape[1] * shape[2], 1, shape[1]) if turned else None
        return shape, of or self._numbers, self._where, strides

    def weights(self, gate: Gate, transposed: bool) -> tuple[Any, Any]:
        """w_gate_up and w_down."""
        turned = parse_flag("transposed", transposed)
        both = self.inner if gate in ("separate", "none") else 2 * self.inner
        return (
            self.tensor(self.experts, both, self.hidden, turned=turned),
            self.tensor(self.experts, self.hidden, self.inner, turned=turned),
        )

    def options(
        self, gate: Gate, activation: Activation, transposed: bool, bias: bool
    ) -> dict[str, Any]:
        """The other options of a layer."""
        experts, inner = self.experts, self.inner
        separate = gate == "separate"
        both = inner if gate in ("separate", "none") else 2 * inner
        parse_flag("bias", bias)
        up = self.tensor(experts, inner, self.hidden, turned=transposed) if separate else None
        return {
            "w_up": up,
            "b_gate_up": self.tensor(experts, both) if bias else None,
            "b_up": self.tensor(experts, inner) if bias and separate else None,
            "b_down": self.tensor(experts, self.hidden) if bias else None,
            "gate": gate,
            "activation": activation,
        }

    def routing(self) -> MoeRouting:
        tokens, top_k = self.tokens, self.top_k
        return MoeRouting(
            ids=self.tensor(tokens, top_k, of=_INT32),
            weights=self.tensor(tokens, top_k, of=_FP64 if self._numbers == _FP64 else _FP32),
            offsets=self.tensor(self.experts + 1, of=_INT32),
            pairs=self.tensor(tokens * top_k, of=_INT32),
            slots=self.tensor(tokens, top_k, of=_INT32),
        )


def _parse_extents(**extents: Any) -> list[int]:
    """Parses extents whose tensor sizes fit 64 bits."""
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
    """Plans what fused_moe would do with these arguments: the launches of the router's product, of
    routing and of the layer. Reads no data and launches nothing.

    If the number of experts is no multiple of 8, the tensors' own library computes the router's
    product, which is then not among the launches. Raises what fused_moe would raise for its
    arguments.
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
