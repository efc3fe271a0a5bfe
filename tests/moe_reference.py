"""The mixture of experts in float64 NumPy, as flashmoe/moe.h says it: no code of the library.

`forward` also computes the layer plainly in its own dtype, rounding after every step as frameworks
do, for the accuracy rule max|ours - exact| <= 2 max|plain - exact| + ulp.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray
_erf = np.vectorize(math.erf, otypes=[np.float64])


# ---- routing ---------------------------------------------------------------------------------


def best(values: Array, count: int) -> Array:
    """Indices of the greatest, in order; equals by index, a NaN as -inf."""
    cleaned = np.where(np.isnan(values), -np.inf, values)
    return np.argsort(-cleaned, kind="stable")[:count]


def sigmoid(z: Array) -> Array:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-z))


def _choice(logits: Array, bias: Array | None, num_groups: int, top_groups: int) -> Array:
    """What orders the experts of one token; with groups their ranks, those of open groups first."""
    biased = sigmoid(logits) + (0 if bias is None else bias.astype(np.float64))
    choice = logits.copy() if bias is None else biased
    if num_groups > 1:
        groups = np.where(np.isnan(biased), -np.inf, biased).reshape(num_groups, -1)
        two = np.sort(groups, axis=1)[:, -2:].sum(1)
        closed = np.ones(num_groups, bool)
        closed[best(two, top_groups)] = False
        # An expert of a closed group is not chosen even if all of the open ones are -inf.
        open_first = np.where(np.repeat(closed, groups.shape[1]), 1, 0)
        order = np.lexsort(
            (np.arange(choice.size), -np.nan_to_num(choice, nan=-np.inf), open_first)
        )
        ranks = np.empty(choice.size)
        ranks[order] = np.arange(choice.size)
        return -ranks
    return choice


@dataclasses.dataclass
class Routed:
    ids: Array
    weights: Array
    lse: Array | None


def route(
    logits: Array,
    top_k: int,
    *,
    scoring: str = "softmax",
    selection_bias: Array | None = None,
    renormalize: int = 0,
    num_groups: int = 0,
    top_groups: int = 0,
    scale: float = 0.0,
) -> Routed:
    """Experts and weights of each token, from logits."""
    exact = logits.astype(np.float64)
    tokens = exact.shape[0]
    ids = np.empty((tokens, top_k), np.int32)
    weights = np.empty((tokens, top_k))
    lse = np.empty(tokens)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        for t, row in enumerate(exact):
            ids[t] = best(_choice(row, selection_bias, num_groups, top_groups), top_k)
            chosen = row[ids[t]]
            if scoring == "sigmoid":
                score = sigmoid(chosen)
            else:
                summed = row if scoring == "softmax" else chosen
                most = np.max(summed)
                score = np.exp(chosen - most) / np.exp(summed - most).sum()
            if renormalize and score.sum() != 0:
                score = score / score.sum()
            weights[t] = score * (scale or 1.0)
            lse[t] = np.logaddexp.reduce(row)
    return Routed(ids, weights, lse)


def take(
    given_ids: Array,
    experts: int,
    *,
    given_weights: Array | None = None,
    expert_map: Array | None = None,
    renormalize: int = 0,
    scale: float = 0.0,
) -> Routed:
    """The same of a choice that is given."""
    ids = np.full(given_ids.shape, -1, np.int32)
    weights = np.zeros(given_ids.shape)
    scores = np.ones(given_ids.shape) if given_weights is None else given_weights.astype(np.float64)
    for t, k in np.ndindex(*given_ids.shape):
        expert = int(given_ids[t, k])
        if expert_map is not None:
            expert = int(expert_map[expert]) if 0 <= expert < len(expert_map) else -1
        total = scores[t].sum() if renormalize and scores[t].sum() != 0 else 1.0
        if 0 <= expert < experts:
            ids[t, k] = expert
            weights[t, k] = scores[t, k] / total * (scale or 1.0)
    return Routed(ids, weights, None)


def layout(ids: Array, experts: int) -> tuple[Array, Array, Array]:
    """(offsets, pairs, slots) of the pairs sorted by expert."""
    flat = ids.reshape(-1)
    order = [pair for expert in range(experts) for pair in np.flatnonzero(flat == expert)]
    pairs = np.full(flat.size, -1, np.int32)
    pairs[: len(order)] = order
    slots = np.full(flat.size, -1, np.int32)
    slots[order] = np.arange(len(order))
    counts = [np.count_nonzero(flat == expert) for expert in range(experts)]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return offsets, pairs, slots.reshape(ids.shape)


# ---- the layer -------------------------------------------------------------------------------


def activate(name: str, z: Array, alpha: float = 1.0) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        if name == "silu":
            return z * sigmoid(alpha * z)
        if name == "gelu":
            return z * 0.5 * (1 + _erf(z / math.sqrt(2))) if z.size else z
        if name == "gelu_tanh":
            return z * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
        positive = np.maximum(z, 0)
        return positive if name == "relu" else positive**2


@dataclasses.dataclass
class Experts:
    """The weights of a layer whatever their layout: gate and up [E, I, H], down [E, H, I]."""

    gate: Array | None
    up: Array
    down: Array
    b_gate: Array | None = None
    b_up: Array | None = None
    b_down: Array | None = None


@dataclasses.dataclass
class Layer:
    out: Array
    plain: Array
    before: Array  # [T * K, 2I] or [T * K, I]; NaN where no pair is


def forward(
    x: Array,
    experts: Experts,
    ids: Array,
    weights: Array,
    slots: Array,
    *,
    activation: str = "silu",
    alpha: float = 0.0,
    limit: float = 0.0,
    up_offset: float = 0.0,
    weight_on_input: int = 0,
) -> Layer:
    tokens, top_k = ids.shape
    inner = experts.up.shape[1]
    gated = experts.gate is not None
    before = np.full((tokens * top_k, (2 if gated else 1) * inner), np.nan)
    options = (activation, alpha or 1.0, limit or math.inf, up_offset)
    out = np.zeros(x.shape)
    plain = np.zeros(x.shape, np.float32)

    def rounded(values: Array) -> Array:
        return values.astype(x.dtype).astype(np.float32)

    def through(expert: int, row: Array, scale: Any, kind: Any, after: Any) -> tuple[Array, ...]:
        """(y, g, u) of one row in the arithmetic of `kind`, rounded by `after` at every step."""
        row = after(row.astype(kind) * kind(scale))

        def product(matrix: Array, vector: Array, bias: Array | None) -> Array:
            made = matrix[expert].astype(kind) @ vector
            return after(made if bias is None else made + bias[expert].astype(kind))

        up = product(experts.up, row, experts.b_up)
        gate = product(experts.gate, row, experts.b_gate) if experts.gate is not None else None
        name, slope, most, offset = options
        cut = np.clip(up, -most, most)
        if gate is None:
            a = activate(name, cut, slope)
        else:
            a = activate(name, np.minimum(gate, most), slope) * (cut + kind(offset))
        return product(experts.down, after(a.astype(kind)), experts.b_down), gate, up

    for t, k in np.ndindex(tokens, top_k):
        expert = ids[t, k]
        if expert < 0:
            continue
        weight = float(weights[t, k])
        on_input = weight if weight_on_input else 1.0
        on_output = 1.0 if weight_on_input else weight
        y, gate, up = through(expert, x[t], on_input, np.float64, lambda values: values)
        out[t] += on_output * y
        slot = slots[t, k]
        before[slot] = up if gate is None else np.concatenate([gate, up])
        y, _, _ = through(expert, x[t], on_input, np.float32, rounded)
        plain[t] = rounded(plain[t] + rounded(np.float32(on_output) * y))
    return Layer(out, plain, before)


def assert_accurate(ours: Array, exact: Array, plain: Array, dtype: np.dtype) -> None:
    """The accuracy rule, with an ulp of the greatest value; in fp32, where both are off by a few
    roundings and chance decides by which, with eight."""
    if exact.size == 0:
        return
    eps = float(ml_dtypes.finfo(dtype).eps) * (8 if dtype == np.float32 else 1)
    allowed = 2 * np.abs(plain - exact).max() + eps * np.abs(exact).max()
    error = np.abs(ours.astype(np.float64) - exact).max()
    assert error <= allowed, (error, allowed)
