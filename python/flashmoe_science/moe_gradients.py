"""Gradients of the mixture of experts.

`moe_backward`, `moe_route_backward` and `grouped_product_backward` belong to the functions of these
names in flashmoe_science.moe, and `fused_moe_backward` to a whole layer. torch's autograd and JAX
call them automatically. On a GPU they take fp16 and bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flashmoe_science import _core, _dispatch, _moe
from flashmoe_science._dtypes import parse_flag
from flashmoe_science.errors import ArgumentTypeError, InvalidArgumentError, _naming
from flashmoe_science.moe import (
    Activation,
    Gate,
    MoeRouting,
    Scoring,
    fused_moe,
    grouped_product,
    moe_route,
)
from flashmoe_science.moe_plans import fused_moe_plan


class MoeGradients(NamedTuple):
    """Gradients of moe_forward, named after their tensors; None for one that is not wanted."""

    x: Any
    """[T, H]."""
    w_gate_up: Any
    """As w_gate_up."""
    w_up: Any
    """As w_up; None without one."""
    w_down: Any
    """As w_down."""
    b_gate_up: Any
    """As b_gate_up, and the next two as their biases; None without one."""
    b_up: Any
    b_down: Any
    weights: Any
    """[T, K]: gradient of routing.weights, in their dtype."""


class ProductGradients(NamedTuple):
    """Gradients of grouped_product; None for one that is not wanted."""

    x: Any
    w: Any
    bias: Any


class FusedMoeGradients(NamedTuple):
    """Gradients of fused_moe, named after their tensors; None if it had no such tensor."""

    tokens: Any
    router_weights: Any
    router_bias: Any
    logits: Any
    w_gate_up: Any
    w_up: Any
    w_down: Any
    b_gate_up: Any
    b_up: Any
    b_down: Any


def wanted_flags(wanted: Any, kind: type) -> list[bool] | None:
    """A flag for each gradient; None is all."""
    names = kind._fields  # type: ignore[attr-defined]
    if wanted is None:
        return None
    flags = isinstance(wanted, Sequence) and all(isinstance(flag, bool) for flag in wanted)
    if not flags or len(wanted) != len(names):
        raise ArgumentTypeError(
            f"wanted: got {wanted!r}, accepted is a flag for each of {', '.join(names)}, or None"
        )
    return list(wanted)


def moe_backward(
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
    accumulate: bool = False,
    dx: Any = None,
    dw_gate_up: Any = None,
    dw_up: Any = None,
    dw_down: Any = None,
    db_gate_up: Any = None,
    db_up: Any = None,
    db_down: Any = None,
    dweights: Any = None,
    max_workspace_bytes: int | None = None,
    kernel: str | None = None,
    stream: object = None,
) -> MoeGradients:
    """Computes the gradients of moe_forward from that of its out.

    Any of them may be left out, and what only it needs is not computed: those of frozen experts, or
    those of weights, which a later separate call computes with the same bits. They have the dtype
    of their tensors, or fp32 if such outputs are given. The same inputs give the same bits, with
    any number of threads. A NaN in a token reaches its own dx and dweights and the gradients of its
    experts, and nothing else.

    Beyond `limit`, g and u have gradients of 0; at the limit they have their own. Takes tensors of
    NumPy, torch, JAX, CuPy or any library with DLPack, on the CPU or a GPU; JAX arrays are never
    written or added to.

    Args:
        dout: [T, H], x's dtype.
        x, w_gate_up, w_down, routing, w_up, gate, activation: As in moe_forward.
        b_gate_up, b_up, b_down, alpha, limit, up_offset, weight_on_input: Likewise.
        pre_activation: The result of moe_forward with return_pre_activation; None computes it
            again, with the same bits.
        overwrite_pre_activation: The call may use its memory as workspace, so its contents are
            lost. The workspace is smaller by its size, except with "interleaved". Not for JAX.
        wanted: A flag for each of MoeGradients, in order; None is all. One that is neither wanted
            nor given below is None in the result.
        accumulate: Add to the given gradients; no others are computed.
        dx, dw_gate_up, dw_up, dw_down, db_gate_up, db_up, db_down, dweights: Where to write, with
            the shape of their tensors, in their dtype or fp32. They have their own strides, as
            moe_forward takes them. dweights has the weights' dtype and is contiguous. They must
            overlap no other tensor.
        max_workspace_bytes: The most memory for intermediates. To stay within it the call goes in
            chunks of I and of H, with the same bits. A bound that is too low is an error that names
            the least. None: whatever is fastest.
        kernel: "cpu", "sm89", "sm90", or None: the best here.
        stream: As in flash_attention.

    Raises: What flash_attention raises. A message names the argument, or the tensor of `routing`.
    """
    return _core.moe_backward(  # type: ignore[return-value]
        dout, x, w_gate_up, w_down, routing, w_up, gate, activation, b_gate_up, b_up, b_down, alpha,
        limit, up_offset, weight_on_input, pre_activation, overwrite_pre_activation,
        wanted_flags(wanted, MoeGradients), accumulate, dx, dw_gate_up, dw_up, dw_down, db_gate_up,
        db_up, db_down, dweights, max_workspace_bytes, kernel, stream,
    )  # fmt: skip


def grouped_product_backward(
    dout: Any,
    x: Any,
    w: Any,
    *,
    offsets: Any = None,
    counts: Any = None,
    wanted: Sequence[bool] | None = None,
    accumulate: bool = False,
    dx: Any = None,
    dw: Any = None,
    dbias: Any = None,
    kernel: str | None = None,
    stream: object = None,
) -> ProductGradients:
    """Computes the gradients of grouped_product from that of its out:

        dx[r] = w[e]^T dout[r]    dw[e] = sum of dout[r] x[r]^T    dbias[e] = sum of dout[r]

    over the rows r of expert e. Rows that belong to no expert get dx = 0, and experts without rows
    get dw = 0 and dbias = 0. Dtypes, accumulation, tensors and devices are as in moe_backward.

    Args:
        dout: Like out of grouped_product.
        x, w, offsets, counts: As in grouped_product. x may be None without dw, w without dx.
        wanted: A flag for each of ProductGradients; None is x and w.
        accumulate: Add to the given gradients; no others are computed.
        dx, dw, dbias: Where to write, as in moe_backward.
        kernel, stream: As in moe_backward.

    Raises: What flash_attention raises. A message names the argument.
    """
    return _core.grouped_product_backward(  # type: ignore[return-value]
        dout, x, w, offsets, counts, wanted_flags(wanted, ProductGradients), accumulate, dx, dw,
        dbias, kernel, stream,
    )  # fmt: skip


def moe_route_backward(
    dweights: Any,
    routing: MoeRouting,
    *,
    logits: Any = None,
    given_weights: Any = None,
    dlse: Any = None,
    scoring: Scoring = "softmax",
    renormalize: bool = False,
    scale: float = 1.0,
    accumulate: bool = False,
    dlogits: Any = None,
    dgiven_weights: Any = None,
    stream: object = None,
) -> Any:
    """Computes the gradient of moe_route's logits, or of moe_route_given's weights, from that of
    the routing's weights. The choice of experts has none.

    Args:
        dweights: [T, K] fp32, for fp64 scores fp64.
        routing: The result of moe_route or moe_route_given. Only its ids are read.
        logits: As in moe_route.
        given_weights: As in moe_route_given, instead of logits.
        dlse: [T], dtype of dweights: the gradient of routing.lse; None is none.
        scoring, renormalize, scale: As in that call. Groups and a selection_bias only affect the
            choice and do not matter here.
        accumulate: Add to what the output holds, such as the gradient of an auxiliary loss.
        dlogits, dgiven_weights: Where to write, one of the two; with the shape of logits or
            given_weights, in their dtype or fp32.
        stream: As in flash_attention.

    Returns:
        dlogits or dgiven_weights, or a new tensor.

    Raises: What flash_attention raises. A message names the argument, or the tensor of `routing`.
    """
    if parse_flag("accumulate", accumulate) and dlogits is None and dgiven_weights is None:
        name = "dlogits" if given_weights is None else "dgiven_weights"
        raise InvalidArgumentError(f"{name}: got None, with accumulate accepted is what to add to")
    return _core.moe_route_backward(
        dweights, routing, logits, given_weights, dlse, scoring, renormalize, scale, accumulate,
        dlogits, dgiven_weights, stream,
    )  # fmt: skip


def fused_moe_backward(
    dout: Any,
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
    max_workspace_bytes: int | None = None,
    kernel: str | None = None,
    stream: object = None,
) -> FusedMoeGradients:
    """Computes the gradients of fused_moe from that of its out: those of the layer and, through the
    routing, of the router. Nothing of the forward is kept: routing and the activation's input are
    computed again, with the same bits. With JAX arrays the whole forward is computed again, as
    jax.vjp does.

    Args:
        dout: The gradient of out, with the shape and dtype of tokens.
        tokens: [T, H]; two-dimensional here.
        router_weights, w_gate_up, w_down, top_k, logits, router_bias, scoring: As in fused_moe. If
            the number of experts is no multiple of 8, compute the router's product yourself and
            pass logits.
        renormalize, selection_bias, num_groups, top_groups, scale, w_up, gate: Likewise.
        activation, b_gate_up, b_up, b_down, alpha, limit, up_offset, weight_on_input: Likewise.
        max_workspace_bytes: As in moe_backward, for its part of the call.
        kernel, stream: As in moe_backward.

    Raises: What flash_attention raises. A message names the argument.
    """
    if _dispatch.is_jax(tokens):
        return _fused_backward_of_jax(
            dout, top_k, tokens=tokens, router_weights=router_weights, router_bias=router_bias,
            logits=logits, w_gate_up=w_gate_up, w_up=w_up, w_down=w_down, b_gate_up=b_gate_up,
            b_up=b_up, b_down=b_down, scoring=scoring, renormalize=renormalize,
            selection_bias=selection_bias, num_groups=num_groups, top_groups=top_groups,
            scale=scale, gate=gate, activation=activation, alpha=alpha, limit=limit,
            up_offset=up_offset, weight_on_input=weight_on_input,
            max_workspace_bytes=max_workspace_bytes, kernel=kernel, stream=stream,
        )  # fmt: skip
    if len(getattr(tokens, "shape", (0, 0))) != 2:
        raise InvalidArgumentError(f"tokens: got {len(tokens.shape)} dimensions, accepted are 2")
    # Errors use this function's argument names; the steps have others.
    fused_moe_plan(
        tokens, router_weights, w_gate_up, w_down, top_k, logits=logits, router_bias=router_bias,
        scoring=scoring, renormalize=renormalize, selection_bias=selection_bias,
        num_groups=num_groups, top_groups=top_groups, scale=scale, w_up=w_up, gate=gate,
        activation=activation, b_gate_up=b_gate_up, b_up=b_up, b_down=b_down, alpha=alpha,
        limit=limit, up_offset=up_offset, weight_on_input=weight_on_input,
    )  # fmt: skip
    rows = router = None
    made = logits
    if router_weights is not None:
        if router_weights.shape[0] % _moe.ROUTER_MULTIPLE != 0:
            raise InvalidArgumentError(
                f"router_weights: its number of experts is {router_weights.shape[0]}, accepted are "
                f"multiples of {_moe.ROUTER_MULTIPLE}; of others pass logits"
            )
        rows = _moe.all_rows(tokens)
        router = router_weights[None]
        bias = None if router_bias is None else router_bias[None]
        made = grouped_product(tokens, router, offsets=rows, bias=bias, stream=stream)
    routing = moe_route(
        made, top_k, scoring=scoring, renormalize=renormalize, selection_bias=selection_bias,
        num_groups=num_groups, top_groups=top_groups, scale=scale, stream=stream,
    )  # fmt: skip
    layer = _backward_of_tokens(
        dout, tokens, w_gate_up, w_down, routing, w_up=w_up, gate=gate, activation=activation,
        b_gate_up=b_gate_up, b_up=b_up, b_down=b_down, alpha=alpha, limit=limit,
        up_offset=up_offset, weight_on_input=weight_on_input,
        max_workspace_bytes=max_workspace_bytes, kernel=kernel, stream=stream,
    )  # fmt: skip
    dlogits = moe_route_backward(
        layer.weights, routing, logits=made, scoring=scoring, renormalize=renormalize, scale=scale,
        stream=stream,
    )  # fmt: skip
    through = ProductGradients(None, None, None)
    dtokens = layer.x
    if router_weights is not None:
        through = grouped_product_backward(
            dlogits, tokens, router, offsets=rows, wanted=(False, True, router_bias is not None),
            stream=stream,
        )  # fmt: skip
        grouped_product_backward(
            dlogits, None, router, offsets=rows, accumulate=True, dx=dtokens, stream=stream
        )
    return FusedMoeGradients(
        dtokens,
        None if through.w is None else through.w[0],
        None if through.bias is None else through.bias[0],
        dlogits if router_weights is None else None,
        layer.w_gate_up, layer.w_up, layer.w_down, layer.b_gate_up, layer.b_up, layer.b_down,
    )  # fmt: skip


_backward_of_tokens = _naming({"x": "tokens"})(moe_backward)


def _fused_backward_of_jax(dout: Any, top_k: int, **given: Any) -> FusedMoeGradients:
    import jax

    names = FusedMoeGradients._fields
    tensors = {n: x for n, x in given.items() if n in names and x is not None}
    rest = {n: x for n, x in given.items() if n not in tensors}

    def layer(tensors: dict[str, Any]) -> Any:
        return fused_moe(**(rest | tensors), top_k=top_k)

    made = jax.vjp(layer, tensors)[1](dout)[0]
    return FusedMoeGradients(*(made.get(name) for name in names))
