"""The mixture of experts.

A layer of E experts over T tokens, each of which takes K: `moe_route` chooses and sorts,
`moe_forward` computes, `grouped_product` is only the products, and `fused_moe` does all of it in
one call. A *pair* is one token with one of its experts, numbered t * K + k; a *slot* is a pair's
place in the order by expert.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeVar, overload

from flashmoe_science import _core
from flashmoe_science._tracing import is_traced, operators
from flashmoe_science.errors import _TransformedError

_T = TypeVar("_T")

Scoring = Literal["softmax", "topk_softmax", "sigmoid"]
Gate = Literal["gate_up", "up_gate", "interleaved", "separate", "none"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]


class MoeRouting(NamedTuple):
    """The experts of each token, their weights, and the order by expert.

    Made by moe_route and moe_route_given. Tensors are contiguous and of the kind of the logits.
    """

    ids: Any
    """[T, K] int32: experts of each token, the greatest choice first; -1 for an expert not of this
    call."""
    weights: Any
    """[T, K] fp32, for fp64 logits or given weights fp64."""
    offsets: Any
    """[E + 1] int32: expert e has the slots offsets[e] to offsets[e + 1] - 1."""
    pairs: Any
    """[T * K] int32: the pair in each slot; -1 from slot offsets[E] on."""
    slots: Any
    """[T, K] int32: the slot of each pair, or -1."""
    lse: Any = None
    """[T], dtype of weights: log-sum-exp of each token's logits; None if not asked for."""

    @property
    def counts(self) -> Any:
        """[E] int32: the number of pairs of each expert, computed by the tensors' own library."""
        return self.offsets[1:] - self.offsets[:-1]


def moe_route(
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
    out: MoeRouting | None = None,
    stream: object = None,
) -> MoeRouting:
    """Chooses the top_k experts of each token, and sorts the pairs by expert.

    The experts of a token are distinct, whatever its logits are. Ties go to the lower expert, and
    NaN ranks last, as -inf does. Scores are computed in fp32, for fp64 (CPU only) in fp64. Takes
    tensors of NumPy, torch, JAX, CuPy or any library with DLPack, and returns the same kind. A GPU
    gets at most two launches on the current stream, and the call does not wait for it.

    Args:
        logits: [T, E], fp16, bf16 or fp32, on the CPU also fp64, last stride 1. 1 <= E <= 1024; T
            may be 0.
        top_k: K, from 1 to E, at most 32; T * K at most 2**31 - 2**16.
        scoring: How a logit becomes a weight. "softmax": softmax over all E logits. "topk_softmax":
            softmax over the K chosen ones. "sigmoid": each its own; with a selection_bias experts
            are chosen by sigmoid(logits) + selection_bias.
        renormalize: Divide the weights of a token by their sum if that is not 0.
        selection_bias: [E] fp32, for fp64 logits also fp64; "sigmoid" only. It affects the choice,
            not the weights.
        num_groups: Groups of neighbouring experts; experts are chosen only from the best groups
            (DeepSeek-V3, arXiv:2412.19437). A group's score is the sum of its two greatest
            sigmoid(logits) + selection_bias. Divides E, with 2 experts or more each; "sigmoid"
            only. 1 is none.
        top_groups: How many groups to choose from; None without groups.
        scale: Factor of the weights, after renormalisation; finite and not 0.
        return_lse: Also compute the log-sum-exp of each token's logits.
        out: A MoeRouting to write into, with tensors as described there, which must overlap neither
            one another nor the arguments. Not for JAX.
        stream: As in flash_attention.

    Returns:
        The routing; `out` if that was given.

    Raises: What flash_attention raises. A message names the argument, or the tensor of `out`.
    """
    if not is_traced():
        try:
            return _core.moe_route(  # type: ignore[return-value]
                logits, top_k, scoring, renormalize, selection_bias, num_groups, top_groups, scale,
                return_lse, out, stream,
            )  # fmt: skip
        except _TransformedError:  # torch's operators take these
            pass
    traced: MoeRouting = operators().moe_route(
        logits, top_k, scoring=scoring, renormalize=renormalize, selection_bias=selection_bias,
        num_groups=num_groups, top_groups=top_groups, scale=scale, return_lse=return_lse,
        out=out, stream=stream,
    )  # fmt: skip
    return traced


def moe_route_given(
    given_ids: Any,
    given_weights: Any = None,
    *,
    num_experts: int,
    renormalize: bool = False,
    scale: float = 1.0,
    expert_map: Any = None,
    out: MoeRouting | None = None,
    stream: object = None,
) -> MoeRouting:
    """Sorts pairs whose experts were chosen elsewhere.

    An id that is negative, not below E, or mapped to such a number is no expert of this call ("not
    mine"): its pair gets id -1, no slot and weight 0. So each of several devices can compute a part
    of the experts.

    Args:
        given_ids: [T, K] int32 or int64, last stride 1; K at most 32, T * K at most 2**31 - 2**16.
        given_weights: [T, K] fp16, bf16 or fp32, on the CPU also fp64, last stride 1; None is 1
            for each.
        num_experts: E, from 1 to 1024: the experts of this call.
        renormalize: Divide the weights of a token by the sum of all K, including those not mine, if
            that is not 0.
        scale: As in moe_route.
        expert_map: [any] int32: the expert of this call for each id; an id beyond it is not mine.
            None takes ids as they are.
        out, stream: As in moe_route.

    Returns:
        The routing; its lse is None.

    Raises: What flash_attention raises. A message names the argument, or the tensor of `out`.
    """
    if not is_traced():
        try:
            return _core.moe_route_given(  # type: ignore[return-value]
                given_ids, given_weights, num_experts, renormalize, scale, expert_map, out, stream
            )
        except _TransformedError:  # as above
            pass
    traced: MoeRouting = operators().moe_route_given(
        given_ids, given_weights, num_experts=num_experts, renormalize=renormalize, scale=scale,
        expert_map=expert_map, out=out, stream=stream,
    )  # fmt: skip
    return traced


@overload
def moe_forward(
    x: _T,
    w_gate_up: _T,
    w_down: _T,
    routing: MoeRouting,
    *,
    w_up: _T | None = None,
    gate: Gate = "gate_up",
    activation: Activation = "silu",
    b_gate_up: _T | None = None,
    b_up: _T | None = None,
    b_down: _T | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    weight_on_input: bool = False,
    out: _T | None = None,
    pre_activation: _T | None = None,
    return_pre_activation: Literal[False] = False,
    max_workspace_bytes: int | None = None,
    recompute: bool = False,
    kernel: str | None = None,
    stream: object = None,
) -> _T: ...


@overload
def moe_forward(
    x: _T,
    w_gate_up: _T,
    w_down: _T,
    routing: MoeRouting,
    *,
    w_up: _T | None = None,
    gate: Gate = "gate_up",
    activation: Activation = "silu",
    b_gate_up: _T | None = None,
    b_up: _T | None = None,
    b_down: _T | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    weight_on_input: bool = False,
    out: _T | None = None,
    pre_activation: _T | None = None,
    return_pre_activation: Literal[True],
    max_workspace_bytes: int | None = None,
    recompute: bool = False,
    kernel: str | None = None,
    stream: object = None,
) -> tuple[_T, _T]: ...


def moe_forward(
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
    max_workspace_bytes: int | None = None,
    recompute: bool = False,
    kernel: str | None = None,
    stream: object = None,
) -> Any:
    """Computes the experts of a layer: out[t] = sum_k weights[t, k] * y(t, ids[t, k]).

        y(t, e) = w_down[e] a(t, e) + b_down[e]
        a(t, e) = act(g) * (u + up_offset)        with g = w_gate[e] x[t] + b_gate[e], u likewise
                = act(u)                          without a gate

    Weights are read in place: nothing is copied, packed or padded. Products are accumulated in fp32
    (for fp64 in fp64), a and y are kept in x's dtype, and the sum over k has the dtype of the
    products and the order of k, so that the same inputs give the same bits on every run. A token
    without experts gets 0. Tensors, devices and streams are as in moe_route. torch's autograd and
    JAX differentiate it, as they do moe_route, grouped_product and fused_moe; moe_backward computes
    only the gradients.

    H and I are multiples of 8. In an expert's matrix either the last stride or the one before it is
    1: weights stored as [E, H, 2I] are passed as their transposed view. Other strides, also of x
    and out, and the start of every tensor are multiples of 16 bytes; strides between experts are
    free. w_down may be transposed where w_gate_up is not, and vice versa; on a GPU w_gate_up and
    w_up are both transposed or neither. "sm89_few_tokens" takes no transposed weights, "sm90" no
    interleaved ones.

    Args:
        x: [T, H], fp16 or bf16, on the CPU also fp32 and fp64.
        w_gate_up: [E, 2I, H], x's dtype, rows in the order of `gate`; with "separate" the gate,
            and with "none" the only matrix, [E, I, H].
        w_down: [E, H, I], x's dtype.
        routing: The result of moe_route or moe_route_given for these tokens and experts.
        w_up: [E, I, H], with "separate" only.
        gate: "gate_up": rows 0 to I - 1 are the gate, the rest up. "up_gate": vice versa.
            "interleaved": row 2i gate, row 2i + 1 up. "separate": two tensors. "none": no gate.
        activation: "silu": z * sigmoid(alpha * z). "gelu": z * Phi(z). "gelu_tanh": its
            approximation by tanh. "relu": max(z, 0). "relu2": max(z, 0)**2.
        b_gate_up, b_up, b_down: One row of biases per expert, fp32 or x's dtype, in the order of
            the rows of their weights; None is none.
        alpha: For "silu" only; finite and not 0.
        limit: Clamps g to at most limit and u to -limit to limit before the activation; finite and
            positive. None clamps nothing.
        up_offset: Finite; 0 without a gate.
        weight_on_input: Multiply x[t] by weights[t, k] instead of y.
        out: [T, H], x's dtype: where to write. Must overlap no other tensor. Not for JAX.
        pre_activation: [T * K, 2I] (g, then u), without a gate [T * K, I], x's dtype: where to
            write the input of the activation before `limit`, by slot. Rows without a pair are not
            written. Must overlap no other tensor. Not for JAX.
        return_pre_activation: Also return it, in a new tensor if none was given.
        max_workspace_bytes: For the gradients, if torch or JAX differentiates this call: as in
            moe_backward. The forward itself ignores it.
        recompute: Save no pre_activation for the gradients of torch or JAX: they compute it again,
            with one more product. The forward itself ignores it.
        kernel: Kernel family to use ("cpu", "sm89_few_tokens", "sm89", "sm90"): that one runs, or
            the call fails. None is the best.
        stream: As in flash_attention.

    Returns:
        out, or (out, pre_activation) with return_pre_activation.

    Raises: What flash_attention raises. A message names the argument, or the tensor of `routing`.
    """
    if not is_traced():
        try:
            return _core.moe_forward(
                x, w_gate_up, w_down, routing, w_up, gate, activation, b_gate_up, b_up, b_down,
                alpha, limit, up_offset, weight_on_input, out, pre_activation,
                return_pre_activation, max_workspace_bytes, recompute, kernel, stream,
            )  # fmt: skip
        except _TransformedError:  # as above
            pass
    return operators().moe_forward(
        x, w_gate_up, w_down, routing, w_up=w_up, gate=gate, activation=activation,
        b_gate_up=b_gate_up, b_up=b_up, b_down=b_down, alpha=alpha, limit=limit,
        up_offset=up_offset, weight_on_input=weight_on_input, out=out,
        pre_activation=pre_activation, return_pre_activation=return_pre_activation,
        max_workspace_bytes=max_workspace_bytes, recompute=recompute, kernel=kernel, stream=stream,
    )  # fmt: skip


def grouped_product(
    x: _T,
    w: _T,
    *,
    offsets: _T | None = None,
    counts: _T | None = None,
    bias: _T | None = None,
    out: _T | None = None,
    kernel: str | None = None,
    stream: object = None,
) -> _T:
    """out[r] = w[e] x[r] + bias[e] for every row r of every expert e.

    Tensors, devices and streams are as in moe_route; dtypes, strides and arithmetic as in
    moe_forward.

    Args:
        x: [rows, K] with offsets, or [E, M, K] with counts. K is a multiple of 8.
        w: [E, N, K]; N is a multiple of 8.
        offsets: [E + 1] int32, with a two-dimensional x: expert e has the rows offsets[e] to
            offsets[e + 1] - 1.
        counts: [E] int32, with a three-dimensional x: expert e has the first counts[e] of its M
            rows.
        bias: [E, N], fp32 or x's dtype; None is none.
        out: [rows, N] or [E, M, N]: where to write. Rows that belong to no expert are not written,
            and are undefined in a new out. Must overlap no other tensor. Not for JAX.
        kernel, stream: As in moe_forward.

    Returns:
        out.

    Raises: What flash_attention raises. A message names the argument.
    """
    if not is_traced():
        try:
            return _core.grouped_product(  # type: ignore[return-value]
                x, w, offsets, counts, bias, out, kernel, stream
            )
        except _TransformedError:  # as above
            pass
    traced: _T = operators().grouped_product(
        x, w, offsets=offsets, counts=counts, bias=bias, out=out, kernel=kernel, stream=stream
    )
    return traced


def fused_moe(
    tokens: _T,
    router_weights: _T | None,
    w_gate_up: _T,
    w_down: _T,
    top_k: int,
    *,
    logits: _T | None = None,
    router_bias: _T | None = None,
    scoring: Scoring = "softmax",
    renormalize: bool = False,
    selection_bias: _T | None = None,
    num_groups: int = 1,
    top_groups: int | None = None,
    scale: float = 1.0,
    w_up: _T | None = None,
    gate: Gate = "gate_up",
    activation: Activation = "silu",
    b_gate_up: _T | None = None,
    b_up: _T | None = None,
    b_down: _T | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    weight_on_input: bool = False,
    out: _T | None = None,
    max_workspace_bytes: int | None = None,
    recompute: bool = False,
    kernel: str | None = None,
    stream: object = None,
) -> _T:
    """Computes a whole layer, from hidden states and router to output: moe_route, then moe_forward.

    The logits are the router's product, accumulated in fp32 (for fp64 in fp64) and rounded to the
    tokens' dtype, as in the models' own layers. Intermediates share one workspace. If the number of
    experts is no multiple of 8, the tensors' own library computes that product.

    Args:
        tokens: [..., H]: any leading dimensions whose rows are evenly spaced in memory.
        router_weights: [E, H], tokens' dtype; None with `logits`.
        w_gate_up, w_down: As in moe_forward.
        top_k: As in moe_route.
        logits: [..., E], instead of router_weights.
        router_bias: [E], fp32 or tokens' dtype, with router_weights.
        scoring, renormalize, selection_bias, num_groups, top_groups, scale: As in moe_route.
        w_up, gate, activation, b_gate_up, b_up, b_down, alpha, limit, up_offset, weight_on_input:
            As in moe_forward.
        out: Where to write, with the shape and dtype of tokens. Must overlap no other tensor. Not
            for JAX.
        max_workspace_bytes, recompute: As in moe_forward.
        kernel: As in moe_forward, for the experts' products.
        stream: As in flash_attention.

    Returns:
        out, with the shape of tokens.

    Raises: What flash_attention raises. A message names the argument.
    """
    if not is_traced():
        try:
            return _core.fused_moe(  # type: ignore[return-value]
                tokens, router_weights, w_gate_up, w_down, top_k, logits, router_bias, scoring,
                renormalize, selection_bias, num_groups, top_groups, scale, w_up, gate, activation,
                b_gate_up, b_up, b_down, alpha, limit, up_offset, weight_on_input, out,
                max_workspace_bytes, recompute, kernel, stream,
            )  # fmt: skip
        except _TransformedError:  # as above
            pass
    traced: _T = operators().fused_moe(
        tokens, router_weights, w_gate_up, w_down, top_k, logits=logits, router_bias=router_bias,
        scoring=scoring, renormalize=renormalize, selection_bias=selection_bias,
        num_groups=num_groups, top_groups=top_groups, scale=scale, w_up=w_up, gate=gate,
        activation=activation, b_gate_up=b_gate_up, b_up=b_up, b_down=b_down, alpha=alpha,
        limit=limit, up_offset=up_offset, weight_on_input=weight_on_input, out=out,
        max_workspace_bytes=max_workspace_bytes, recompute=recompute, kernel=kernel, stream=stream,
    )  # fmt: skip
    return traced
