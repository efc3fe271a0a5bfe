"""The accuracy rule: float64 attention, the plain low-precision computation, and a verdict.

    max|ours - ref| <= 2 max|plain - ref| + ulp        |lse - ref| <= 1e-3

`ref` is float64 mathematics on the same inputs. `plain` is what a framework without a fused kernel
computes: every operation takes and gives the inputs' dtype and accumulates in fp32. `ulp` is one
unit in the last place of that dtype at the largest |ref|. See docs/accuracy.md.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Iterator
from typing import Any

from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.shapes import Shape

LSE_TOLERANCE = 1e-3
EPSILON = {"fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7}

# Total scores computed, and scores at a time: these bound time and memory.
SCORE_BUDGET = {"cpu": 2**24, "cuda": 2**30}
SCORE_BLOCK = {"cpu": 2**21, "cuda": 2**26}


@dataclasses.dataclass
class Accuracy:
    """Errors of one output against float64, and whether the rule holds."""

    passed: bool
    error: float
    plain_error: float
    bound: float
    lse_error: float | None
    checked: str
    reason: str = ""
    tensor: str = "out"  # whose errors these are


def sample(total: int, wanted: int) -> list[int]:
    """`wanted` of range(total), evenly spaced, the first and the last among them."""
    if wanted >= total:
        return list(range(total))
    if wanted == 1:
        return [total - 1]
    return sorted({round(i * (total - 1) / (wanted - 1)) for i in range(wanted)})


def _blocks(
    pairs: list[int], rows: list[int], keys: int, dim: int, limit: int
) -> Iterator[tuple[list[int], list[int]]]:
    rows_at_once = max(1, min(len(rows), limit // keys))
    # Few rows: the gathered keys of each pair take more than its scores.
    pairs_at_once = max(1, limit // (keys * max(rows_at_once, dim)))
    for p in range(0, len(pairs), pairs_at_once):
        for r in range(0, len(rows), rows_at_once):
            yield pairs[p : p + pairs_at_once], rows[r : r + rows_at_once]


def _per_head(arrays: Arrays, values: Any) -> Any:
    """[batch, seq, heads, dim] as [batch * heads, seq, dim]."""
    swapped = arrays.xp.swapaxes(values, 1, 2)
    batch, heads, seq, dim = swapped.shape
    return swapped.reshape((batch * heads, seq, dim))


def hidden_keys(arrays: Arrays, shape: Shape, rows: Any) -> Any:
    """True where the mask hides key j from query i, [rows, keys]; None without a mask."""
    left, right = shape.bounds
    ahead = arrays.arange(shape.seq_k)[None, :] - rows[:, None]
    hidden = [] if left is None else [ahead < left]
    hidden += [] if right is None else [ahead > right]
    return functools.reduce(operator.or_, hidden) if hidden else None


def softmax_parts(
    arrays: Arrays, scores: Any, hidden: Any, sinks: Any = None
) -> tuple[Any, Any, Any]:
    """Unnormalised weights, their sums and the maxima; a row that sees no key has sum 0, or that of
    its sink."""
    xp = arrays.xp
    if hidden is not None:
        scores = xp.where(hidden, -math.inf, scores)
    maxima = xp.amax(scores, axis=-1, keepdims=True)
    if sinks is not None:
        maxima = xp.maximum(maxima, sinks)
    maxima = xp.where(maxima == -math.inf, 0.0, maxima)
    weights = xp.exp(scores - maxima)
    sums = weights.sum(axis=-1, keepdims=True)
    return weights, sums if sinks is None else sums + xp.exp(sinks - maxima), maxima


@dataclasses.dataclass(frozen=True)
class Logits:
    """How products of q and k become logits."""

    scale: float
    softcap: float | None
    hidden: Any
    sinks: Any = None  # of each head, in float64


def _exact(arrays: Arrays, q: Any, k: Any, v: Any, logits: Logits) -> tuple[Any, Any]:
    """Output and LSE in float64."""
    xp = arrays.xp
    q, k, v = (arrays.cast(x, "fp64") for x in (q, k, v))
    scores = q @ xp.swapaxes(k, 1, 2) * logits.scale
    if logits.softcap is not None:
        scores = xp.tanh(scores / logits.softcap) * logits.softcap
    weights, sums, maxima = softmax_parts(arrays, scores, logits.hidden, logits.sinks)
    safe = xp.where(sums == 0, 1.0, sums)
    lse = xp.where(sums == 0, -math.inf, maxima + xp.log(safe))
    return (weights @ v) / safe, lse[..., 0]


def _plain(arrays: Arrays, dtype: str, q: Any, k: Any, v: Any, logits: Logits) -> Any:
    """Output of the unfused computation in `dtype`."""
    xp = arrays.xp
    q, k, v = (arrays.cast(x, "fp32") for x in (q, k, v))
    scores = arrays.rounded(q @ xp.swapaxes(k, 1, 2), dtype)
    scores = arrays.rounded(scores * logits.scale, dtype)
    if logits.softcap is not None:
        ratios = arrays.rounded(scores / logits.softcap, dtype)
        scores = arrays.rounded(arrays.rounded(xp.tanh(ratios), dtype) * logits.softcap, dtype)
    sinks = None if logits.sinks is None else arrays.cast(logits.sinks, "fp32")
    weights, sums, _ = softmax_parts(arrays, scores, logits.hidden, sinks)
    weights = arrays.rounded(weights / xp.where(sums == 0, 1.0, sums), dtype)
    return arrays.rounded(weights @ v, dtype)


def largest(xp: Any, values: Any) -> float:
    return float(xp.amax(xp.abs(values)))


def difference(xp: Any, ours: Any, reference: Any) -> float:
    """max|ours - reference|, NaN if ours contains one; equal infinities differ by 0."""
    same = ours == reference
    return largest(xp, xp.where(same, 0.0, ours) - xp.where(same, 0.0, reference))


def judge(
    arrays: Arrays,
    shape: Shape,
    inputs: tuple[Any, Any, Any],
    outputs: dict[str, Any],
    lse: Any = None,
    scale: float | None = None,
    sinks: Any = None,
) -> dict[str, Accuracy]:
    """Checks every output [batch, seq_q, heads_q, dim_v] against the rule, with one reference.

    `lse` [batch, heads_q, seq_q] belongs to the first of them. Long sequences are checked on evenly
    spaced heads and rows; that every element was written is checked on all.
    """
    xp = arrays.xp
    kind = "cpu" if arrays.device == "cpu" else "cuda"
    scale = 1.0 / math.sqrt(shape.dim) if scale is None else scale
    total_pairs = shape.batch * shape.heads_q
    budget = SCORE_BUDGET[kind] // shape.seq_k
    rows = sample(shape.seq_q, max(1, min(shape.seq_q, budget // min(total_pairs, 4))))
    pairs = sample(total_pairs, max(1, budget // len(rows)))
    checked = f"{len(pairs)} of {total_pairs} heads, {len(rows)} of {shape.seq_q} rows"

    q, k, v = (_per_head(arrays, x) for x in inputs)
    flat = {name: _per_head(arrays, out) for name, out in outputs.items()}
    flat_lse = None if lse is None else lse.reshape((total_pairs, shape.seq_q))
    group = shape.heads_q // shape.heads_kv

    greatest = plain_error = 0.0
    errors = dict.fromkeys(outputs, 0.0)
    lse_error = 0.0
    for some_pairs, some_rows in _blocks(
        pairs, rows, shape.seq_k, max(shape.dim, shape.dim_v), SCORE_BLOCK[kind]
    ):
        of_kv = [p // shape.heads_q * shape.heads_kv + p % shape.heads_q // group
                 for p in some_pairs]  # fmt: skip
        index = arrays.arange(shape.seq_q)[some_rows]
        its_sinks = None
        if sinks is not None:
            of_heads = sinks[[p % shape.heads_q for p in some_pairs]]
            its_sinks = arrays.cast(of_heads, "fp64")[:, None, None]
        hidden = hidden_keys(arrays, shape, index)
        logits = Logits(scale, shape.softcap, hidden, its_sinks)
        block = (q[some_pairs][:, index], k[of_kv], v[of_kv])
        reference, reference_lse = _exact(arrays, *block, logits)
        plain = arrays.cast(_plain(arrays, shape.dtype, *block, logits), "fp64")
        greatest = max(greatest, largest(xp, reference))
        plain_error = max(plain_error, difference(xp, plain, reference))
        for name, out in flat.items():
            ours = arrays.cast(out[some_pairs][:, index], "fp64")
            errors[name] = worse(errors[name], difference(xp, ours, reference))
        if flat_lse is not None:
            ours = arrays.cast(flat_lse[some_pairs][:, index], "fp64")
            lse_error = worse(lse_error, difference(xp, ours, reference_lse))

    ulp = EPSILON[shape.dtype] * 2.0 ** math.floor(math.log2(greatest)) if greatest > 0 else 0.0
    bound = 2.0 * plain_error + ulp
    verdicts = {}
    for i, (name, out) in enumerate(outputs.items()):
        its_lse = lse_error if i == 0 and lse is not None else None
        reason = fault(errors[name], bound, its_lse, bool(xp.isfinite(out).all()))
        verdicts[name] = Accuracy(
            not reason, errors[name], plain_error, bound, its_lse, checked, reason
        )
    return verdicts


def worse(a: float, b: float) -> float:
    """The larger; NaN when either is."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


def fault(
    error: float, bound: float, lse_error: float | None, finite: bool, tensor: str = "out"
) -> str:
    """Why the rule does not hold for a tensor, "" if it does."""
    if not finite:
        what = "the output" if tensor == "out" else tensor
        return f"{what} holds NaN or infinity: some of it was never written, or is wrong"
    if not error <= bound:  # false for NaN as well
        return f"max|{tensor} - float64| is {error:.3g}, allowed is {bound:.3g}"
    if lse_error is not None and not lse_error <= LSE_TOLERANCE:
        return f"max|lse - float64| is {lse_error:.3g}, allowed is {LSE_TOLERANCE:g}"
    return ""
