"""Gradients of attention in float64, and the accuracy rule that every backward kernel is held to.

    max|ours - ref| <= 2 * max|plain - ref| + 2 ulp + what fp32 leaves of a cancellation

for dq and dsinks by query head, for dk and dv by KV head. ref is float64 mathematics on the same
inputs, plain the same formulas the ordinary way: everything that is stored rounded to the inputs'
dtype, lse and sums in fp32. ulp is one unit in the last place of the dtype at the largest
reference value of the head. The last term is of rows that see one key: their weight is 1 and their
dscore 0 without any rounding where lse is the logit itself, to the last bit, and out is v. A
forward may sum in another order. A bias moves logits and lse to where fp32 is coarser: it rounds
both of them, and the logits once more. See reference.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from reference import (
    Window,
    _heads_first,
    _pairs,
    _products_in_order,
    attention_float64,
    dtype_of,
    remembering,
    seen_by,
    to_numpy,
    ulp,
    visible,
)

DOUBLE = np.dtype(np.float64)
SINGLE = np.dtype(np.float32)


CANCELLATION = 4 * 2.0**-23  # of a weight, and of the largest of dweights in dscores
ROUNDINGS = 3  # by half a ulp each: the forward's logit, lse and the backward's logit


class Gradients(NamedTuple):
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dsinks: np.ndarray | None = None


@remembering
def _gradients(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dlse: np.ndarray | None,
    sinks: np.ndarray | None,
    compute: np.dtype[Any],
    rounded: np.dtype[Any],
    *,
    causal: bool | str = "none",
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    layout: str = "bshd",
    attn_bias: Any = None,
    attn_mask: Any = None,
) -> Gradients:
    attn_bias, attn_mask = _pairs(attn_bias, attn_mask)

    def round_(x: np.ndarray) -> np.ndarray:
        low = x.astype(rounded).astype(compute)
        return np.where(np.isinf(low), x, low)

    in_order = rounded == np.float32
    heads_kv = _heads_first(k, layout).shape[1]
    dout, q, k, v = (_heads_first(x, layout).astype(compute) for x in (dout, q, k, v))
    group = q.shape[1] // heads_kv
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    factor = compute.type(scale or q.shape[-1] ** -0.5)
    seen = seen_by(visible(q.shape[2], k.shape[2], causal, window), attn_bias, attn_mask)

    def products(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return _products_in_order(a, b) if in_order else np.matmul(a, b.swapaxes(-1, -2))

    with np.errstate(all="ignore"):
        logits = round_(products(q, k) * factor)
        slope = 1.0
        if softcap is not None:
            bent = round_(np.tanh(round_(logits / compute.type(softcap))))
            logits = round_(bent * compute.type(softcap))
            slope = round_(1 - bent * bent)
        if attn_bias is not None:
            logits = round_(logits + attn_bias.astype(compute))
        logits = np.where(seen, logits, -np.inf)
        top = logits.max(-1, keepdims=True, initial=-np.inf)
        sink = np.full(q.shape[1], -np.inf) if sinks is None else sinks
        sink = sink.astype(compute)[:, None, None]
        top = np.maximum(top, sink)
        base = np.where(np.isinf(top), 0, top)
        sums = np.exp(logits - base).sum(-1, keepdims=True)
        lse = np.where(np.isinf(top), top, base + np.log(sums + np.exp(sink - base)))
        weights = np.where(seen, round_(np.exp(logits - lse)), 0)
        dweights = round_(products(dout, v))
        delta = (dout * round_(np.matmul(weights, v))).sum(-1, keepdims=True)
        if dlse is not None:
            delta = delta - dlse.astype(compute)[..., None]
        dscores = np.where(seen, round_(weights * (dweights - delta) * slope), 0)
        dq = np.matmul(dscores, k) * factor
        dk = np.matmul(dscores.swapaxes(-1, -2), q) * factor
        dv = np.matmul(weights.swapaxes(-1, -2), dout)
        of_sink = np.where(sink == -np.inf, 0, np.where(sink == lse, 1, np.exp(sink - lse)))
        dsinks = -(of_sink * delta).sum((0, 2, 3))
    dk, dv = (x.reshape(x.shape[0], heads_kv, group, *x.shape[2:]).sum(2) for x in (dk, dv))
    each = (_heads_first(round_(x), layout) for x in (dq, dk, dv))
    return Gradients(*each, None if sinks is None else dsinks)


def gradients_float64(
    dout: Any, q: Any, k: Any, v: Any, dlse: Any = None, sinks: Any = None, **options: Any
) -> Gradients:
    """In float64. A query that sees no key has 0, and so has a key that no query sees."""
    given = [to_numpy(x) for x in (dout, q, k, v)]
    extra = (None if x is None else to_numpy(x) for x in (dlse, sinks))
    return _gradients(*given, *extra, DOUBLE, DOUBLE, **options)


def cancellation(
    given: list[np.ndarray], dtype: np.dtype[Any], scale: float | None, biased_lse: Any = None
) -> dict[str, float]:
    """By gradient what the last term of the rule allows. `biased_lse`: of a call with a bias."""

    def largest(x: np.ndarray) -> float:
        return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))

    dout, q, k, v = map(largest, given)
    eps = CANCELLATION
    if biased_lse is not None:
        eps += ROUNDINGS / 2 * ulp(SINGLE, largest(biased_lse))
    if dtype == DOUBLE:
        eps *= 2.0**-29
    dims = given[3].shape[-1] ** 0.5  # sums of random signs grow with the root
    dscores = eps * dout * v * dims * (scale or given[1].shape[-1] ** -0.5)
    rows = float(np.prod(given[0].shape[:-1])) ** 0.5
    dsinks = eps * dout * v * dims * rows
    return {"dq": dscores * k, "dk": dscores * q, "dv": eps * dout, "dsinks": dsinks}


def assert_gradients_accurate(
    got: Any,
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    dlse: Any = None,
    sinks: Any = None,
    **options: Any,
) -> None:
    """Holds (dq, dk, dv, dsinks), each of any framework or None, to the accuracy rule."""
    dtype = dtype_of(q)
    given = [to_numpy(x) for x in (dout, q, k, v)]
    extra = [None if x is None else to_numpy(x) for x in (dlse, sinks)]
    ref = _gradients(*given, *extra, DOUBLE, DOUBLE, **options)
    plain = _gradients(*given, *extra, SINGLE, dtype, **options)
    biased = None
    if options.get("attn_bias") is not None:
        biased = attention_float64(*given[1:], sinks=extra[1], **options).lse
    left = cancellation(given, dtype, options.get("scale"), biased)
    got = Gradients(*got)
    for name, x, want, usual in zip(Gradients._fields, got, ref, plain, strict=True):
        if x is None:
            continue
        x = to_numpy(x)
        assert x.shape == want.shape, name
        head_axis = 0 if name == "dsinks" else 1 if options.get("layout") == "bhsd" else 2
        for head in range(want.shape[head_axis] if want.size else 0):
            here = (slice(None),) * head_axis + (head,)
            target = want[here]
            allowed = 2 * np.abs(usual[here] - want[here]).max()
            allowed += 2 * ulp(dtype, float(np.abs(target).max())) + left[name]
            error = np.abs(np.asarray(x[here] - target))
            worst = np.unravel_index(np.argmax(error), error.shape)  # NaN counts as the largest
            assert error[worst] <= allowed, (
                f"{name} of head {head}: {np.asarray(x[here])[worst]} at {list(map(int, worst))}, "
                f"reference {np.asarray(target)[worst]}: error {error[worst]:.3g}, "
                f"allowed {allowed:.3g}"
            )
