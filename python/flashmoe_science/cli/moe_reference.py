"""The accuracy rule for a mixture of experts, and the checks of routing.

    max|ours - ref| <= 2 max|plain - ref| + ulp

as for attention (reference.py). `plain` is the loop over experts of a framework without fused
kernels: every product, activation and weighting takes and gives the inputs' dtype and accumulates
in fp32. Routing must be exact: the chosen experts, and the place of each pair.
"""

from __future__ import annotations

import math
from typing import Any

from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.moe_inputs import MoeInputs
from flashmoe_science.cli.moe_shapes import MoeShape
from flashmoe_science.cli.reference import (
    EPSILON,
    Accuracy,
    difference,
    fault,
    largest,
    sample,
    worse,
)

WEIGHT_TOLERANCE = 1e-5  # for a routing weight, which is fp32
# Total operations of the reference, and tokens that it checks whatever they cost.
_FLOP_BUDGET = {"cpu": 2**32, "cuda": 2**39}
_LEAST_TOKENS, _MOST_TOKENS = 4, 512


def routing_of(arrays: Arrays, shape: MoeShape, logits: Any) -> tuple[Any, Any]:
    """Ids [T, K], greatest logit first, and the weights in float64: the softmax of all logits, with
    the chosen ones divided by their sum."""
    xp = arrays.xp
    ids = arrays.stable_order(arrays.cast(logits, "fp32"))[:, : shape.top_k]
    rows = arrays.arange(logits.shape[0])[:, None]
    chosen = arrays.cast(logits, "fp64")[rows, ids]
    weights = xp.exp(chosen - chosen[:, :1])
    return ids, weights / weights.sum(axis=-1, keepdims=True)


def routing_fault(arrays: Arrays, shape: MoeShape, logits: Any, routing: Any) -> str:
    """What is wrong with a routing, on all tokens; "" if nothing."""
    xp = arrays.xp
    ids, weights = routing_of(arrays, shape, logits)
    if not bool((ids == routing.ids).all()):
        return "routing: a token's experts are not those of its greatest logits"
    error = difference(xp, arrays.cast(routing.weights, "fp64"), weights)
    if not error <= WEIGHT_TOLERANCE:
        allowed = f"allowed is {WEIGHT_TOLERANCE:g}"
        return f"routing: max|weight - float64| is {error:.3g}, {allowed}"
    flat = ids.reshape((shape.pairs,))
    order = arrays.stable_order(-flat)  # by expert, and within one by the pair's number
    if not bool((routing.pairs == order).all()):
        return "routing: the pairs are not in the order of their experts"
    slots = routing.slots.reshape((shape.pairs,))
    if not bool((slots[order] == arrays.arange(shape.pairs)).all()):
        return "routing: the slots are not the inverse of the pairs"
    bounds = (flat[None, :] < arrays.arange(shape.experts + 1)[:, None]).sum(axis=1)
    if not bool((routing.offsets == bounds).all()):
        return "routing: the offsets are not the experts' first slots"
    return ""


def counts_of(arrays: Arrays, shape: MoeShape, logits: Any) -> list[int]:
    """The number of tokens of each expert."""
    ids, _ = routing_of(arrays, shape, logits)
    counts = [0] * shape.experts
    for expert in ids.reshape((shape.pairs,)).tolist():
        counts[expert] += 1
    return counts


def loads(arrays: Arrays, shape: MoeShape, logits: Any) -> dict[str, int]:
    """The distribution of tokens: how many experts have any, and the most that one has."""
    counts = counts_of(arrays, shape, logits)
    return {"active_experts": sum(c > 0 for c in counts), "most_tokens": max(counts)}


def _silu(xp: Any, values: Any) -> Any:
    return values / (1.0 + xp.exp(-values))


def _layer(
    arrays: Arrays, shape: MoeShape, inputs: MoeInputs, x: Any, ids: Any, weights: Any
) -> tuple[Any, Any]:
    """The output of the tokens x in float64, and that of the plain computation."""
    xp = arrays.xp

    def rounded(values: Any) -> Any:
        return arrays.rounded(values, shape.dtype)

    exact = arrays.cast(x, "fp64") * 0
    parts = xp.zeros_like(
        arrays.cast(x, "fp32")[:, None, :] + arrays.cast(weights, "fp32")[..., None]
    )
    coarse = rounded(arrays.cast(weights, "fp32"))
    inner = shape.inner
    for expert in sorted(set(ids.reshape((-1,)).tolist())):
        rows, ks = xp.where(ids == expert)
        for dtype in ("fp64", "fp32"):
            w_gate_up = arrays.cast(inputs.w_gate_up[expert], dtype)
            w_down = arrays.cast(inputs.w_down[expert], dtype)
            both = arrays.cast(x[rows], dtype) @ w_gate_up.T
            if dtype == "fp64":
                y = (_silu(xp, both[:, :inner]) * both[:, inner:]) @ w_down.T
                exact[rows] += weights[rows, ks][:, None] * y
            else:
                both = rounded(both)
                y = rounded(rounded(_silu(xp, both[:, :inner])) * both[:, inner:]) @ w_down.T
                parts[rows, ks] = rounded(rounded(y) * coarse[rows, ks][:, None])
    return exact, arrays.cast(rounded(parts.sum(axis=1)), "fp64")


def judge_moe(
    arrays: Arrays, shape: MoeShape, inputs: MoeInputs, outputs: dict[str, Any]
) -> dict[str, Accuracy]:
    """Checks every output [T, H] of the first logits against the rule, with one reference.

    Of many tokens, evenly spaced ones are checked; that every element was written is checked on
    all.
    """
    xp = arrays.xp
    kind = "cpu" if arrays.device == "cpu" else "cuda"
    affordable = int(_FLOP_BUDGET[kind] / (shape.flops / shape.tokens))
    tokens = sample(shape.tokens, max(_LEAST_TOKENS, min(_MOST_TOKENS, affordable)))
    checked = f"{len(tokens)} of {shape.tokens} tokens"

    ids, weights = routing_of(arrays, shape, inputs.logits[0][tokens])
    reference, plain = _layer(arrays, shape, inputs, inputs.x[tokens], ids, weights)
    greatest = largest(xp, reference)
    plain_error = difference(xp, plain, reference)
    ulp = EPSILON[shape.dtype] * 2.0 ** math.floor(math.log2(greatest)) if greatest > 0 else 0.0
    bound = 2.0 * plain_error + ulp
    verdicts = {}
    for name, out in outputs.items():
        error = worse(0.0, difference(xp, arrays.cast(out[tokens], "fp64"), reference))
        reason = fault(error, bound, None, bool(xp.isfinite(out).all()))
        verdicts[name] = Accuracy(not reason, error, plain_error, bound, None, checked, reason)
    return verdicts
