"""The accuracy rule for gradients of attention.

    max|ours - ref| <= 2 max|plain - ref| + 2 ulp + what fp32 leaves of a cancellation

as for the output (reference.py), for each of dq, dk and dv. `ref` is float64 mathematics from q, k,
v and dout only; `plain` rounds scores, weights, their gradients and the results to the inputs'
dtype, with the log-sum-exp and sums in fp32. The last term is for rows that see few keys: if a
weight is 1, the gradient of its score is 0 except for rounding in the subtraction.
"""

from __future__ import annotations

import math
from typing import Any

from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.peers.peer import BackwardInputs
from flashmoe_science.cli.reference import (
    EPSILON,
    SCORE_BLOCK,
    SCORE_BUDGET,
    Accuracy,
    Logits,
    difference,
    fault,
    hidden_keys,
    largest,
    sample,
    softmax_parts,
    worse,
)
from flashmoe_science.cli.shapes import Shape

NAMES = ("dq", "dk", "dv")
_CANCELLATION = 4 * 2.0**-23  # for a weight, and for the largest of dweights in dscores

Gradients = dict[str, Any]


def _gradients(
    arrays: Arrays, given: tuple[Any, ...], logits: Logits, dtype: str
) -> tuple[Any, Any, Any]:
    """dq of the given rows, and their parts of dk and dv, summed over query heads and not rounded
    yet. "fp64" rounds nothing; otherwise stored numbers have `dtype`.

    q [group, rows, dim], k [1, keys, dim], v [1, keys, dim_v], dout [group, rows, dim_v].
    """
    xp = arrays.xp

    def stored(x: Any) -> Any:
        return x if dtype == "fp64" else arrays.rounded(x, dtype)

    def turned(x: Any) -> Any:
        return xp.swapaxes(x, 1, 2)

    q, k, v, dout = (arrays.cast(x, "fp64" if dtype == "fp64" else "fp32") for x in given)
    scores = stored(q @ turned(k) * logits.scale)
    slope: Any = 1.0
    if logits.softcap is not None:
        bent = stored(xp.tanh(stored(scores / logits.softcap)))
        scores, slope = stored(bent * logits.softcap), stored(1.0 - bent * bent)
    weights, sums, _ = softmax_parts(arrays, scores, logits.hidden)
    weights = stored(weights / xp.where(sums == 0, 1.0, sums))
    dweights = stored(dout @ turned(v))
    delta = (weights * dweights).sum(axis=-1, keepdims=True)
    dscores = stored(weights * (dweights - delta) * slope)
    dk = (turned(dscores) @ q).sum(axis=0) * logits.scale
    dv = (turned(weights) @ dout).sum(axis=0)
    return stored(dscores @ k * logits.scale), dk, dv


def _cancellation(arrays: Arrays, shape: Shape, inputs: BackwardInputs) -> dict[str, float]:
    """What the last term of the rule allows for each gradient."""
    q, k, v, dout = (largest(arrays.xp, arrays.cast(x, "fp32")) for x in inputs)
    # Sums of random signs grow with the root of their number.
    dscores = _CANCELLATION * dout * v * math.sqrt(shape.dim_v) / math.sqrt(shape.dim)
    return {"dq": dscores * k, "dk": dscores * q, "dv": _CANCELLATION * dout}


class _Errors:
    """Greatest errors by gradient, and greatest values of the reference."""

    def __init__(self, names: list[str]) -> None:
        self.greatest = dict.fromkeys(NAMES, 0.0)
        self.plain = dict.fromkeys(NAMES, 0.0)
        self.of = {name: dict.fromkeys(NAMES, 0.0) for name in names}

    def add(self, arrays: Arrays, name: str, ref: Any, plain: Any, ours: dict[str, Any]) -> None:
        """Counts a part of one gradient; `ours` has that part of every contender."""
        xp = arrays.xp
        self.greatest[name] = max(self.greatest[name], largest(xp, ref))
        found = difference(xp, arrays.cast(plain, "fp64"), ref)
        self.plain[name] = max(self.plain[name], found)
        for who, values in ours.items():
            found = difference(xp, arrays.cast(values, "fp64"), ref)
            self.of[who][name] = worse(self.of[who][name], found)


def judge_gradients(
    arrays: Arrays,
    shape: Shape,
    inputs: BackwardInputs,
    outputs: dict[str, tuple[Any, Any, Any]],
) -> dict[str, Accuracy]:
    """Holds every (dq, dk, dv) [batch, seq, heads, dim] to the rule, against one reference.

    The errors are those of the gradient that comes closest to its bound, or breaks it. For long
    sequences only some KV heads are checked, with all rows of all their query heads, since a key's
    gradient depends on all of them. That every element was written is checked on all heads.
    """
    xp = arrays.xp
    kind = "cpu" if arrays.device == "cpu" else "cuda"
    group = shape.heads_q // shape.heads_kv
    total = shape.batch * shape.heads_kv
    scores = group * shape.seq_q * shape.seq_k
    heads = sample(total, max(1, SCORE_BUDGET[kind] // scores))
    rows_at_once = max(1, SCORE_BLOCK[kind] // (group * shape.seq_k))
    errors = _Errors(list(outputs))
    for head in heads:
        at, kv = divmod(head, shape.heads_kv)
        of_q = slice(kv * group, (kv + 1) * group)

        def queries(x: Any, begin: int, at: int = at, of_q: slice = of_q) -> Any:
            """[group, rows, dim] of [batch, seq, heads, dim]"""
            return xp.swapaxes(x[at, begin : begin + rows_at_once, of_q], 0, 1)

        q, k, v, dout = inputs
        of_k, of_v = k[at, :, kv][None], v[at, :, kv][None]
        sums: dict[str, list[Any]] = {"fp64": [0.0, 0.0], shape.dtype: [0.0, 0.0]}
        for begin in range(0, shape.seq_q, rows_at_once):
            rows = arrays.arange(shape.seq_q)[begin : begin + rows_at_once]
            logits = Logits(
                1.0 / math.sqrt(shape.dim), shape.softcap, hidden_keys(arrays, shape, rows)
            )
            block = (queries(q, begin), of_k, of_v, queries(dout, begin))
            dq = {}
            for dtype, (dk, dv) in sums.items():
                dq[dtype], more_dk, more_dv = _gradients(arrays, block, logits, dtype)
                sums[dtype] = [dk + more_dk, dv + more_dv]
            ours = {name: queries(found[0], begin) for name, found in outputs.items()}
            errors.add(arrays, "dq", dq["fp64"], dq[shape.dtype], ours)
        for i, name in enumerate(NAMES[1:]):
            plain = arrays.rounded(sums[shape.dtype][i], shape.dtype)
            ours = {who: found[i + 1][at, :, kv] for who, found in outputs.items()}
            errors.add(arrays, name, sums["fp64"][i], plain, ours)
    checked = f"{len(heads)} of {total} KV heads, all rows"
    left = _cancellation(arrays, shape, inputs)
    bounds = {}
    for name, greatest in errors.greatest.items():
        ulp = EPSILON[shape.dtype] * 2.0 ** math.floor(math.log2(greatest)) if greatest else 0.0
        bounds[name] = 2.0 * errors.plain[name] + 2.0 * ulp + left[name]
    return {
        who: _verdict(arrays, found, errors.of[who], errors.plain, bounds, checked)
        for who, found in outputs.items()
    }


def _verdict(
    arrays: Arrays,
    gradients: tuple[Any, Any, Any],
    errors: dict[str, float],
    plain: dict[str, float],
    bounds: dict[str, float],
    checked: str,
) -> Accuracy:
    def of(name: str, tensor: Any) -> Accuracy:
        finite = bool(arrays.xp.isfinite(tensor).all())
        reason = fault(errors[name], bounds[name], None, finite, name)
        return Accuracy(
            not reason, errors[name], plain[name], bounds[name], None, checked, reason, name
        )

    verdicts = [of(*each) for each in zip(NAMES, gradients, strict=True)]
    failed = [verdict for verdict in verdicts if not verdict.passed]
    return failed[0] if failed else max(verdicts, key=lambda found: found.error / found.bound)
