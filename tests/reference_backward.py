"""Gradients of attention in float64, and the accuracy rule that every backward kernel is held to.

    max|ours - ref| <= 2 * max|plain - ref| + 2 ulp + what fp32 leaves of a cancellation

for dq by query head, for dk and dv by KV head. ref is float64 mathematics on the same inputs, plain
the same formulas the ordinary way: everything that is stored rounded to the inputs' dtype, lse and
sums in fp32. ulp is one unit in the last place of the dtype at the largest reference value of the
head. The last term is of rows that see one key: their weight is 1 and their dscore 0 without any
rounding where lse is the logit itself, to the last bit, and delta made of dweights. A forward may
sum in another order, and delta is made of out. See reference.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from reference import (
    Window,
    _heads_first,
    _products_in_order,
    dtype_of,
    to_numpy,
    ulp,
    visible,
)

DOUBLE = np.dtype(np.float64)
SINGLE = np.dtype(np.float32)


CANCELLATION = 4 * 2.0**-23  # of a weight, and of the largest of dweights in dscores


class Gradients(NamedTuple):
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


def _gradients(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dlse: np.ndarray | None,
    compute: np.dtype[Any],
    rounded: np.dtype[Any],
    *,
    causal: bool | str = "none",
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    layout: str = "bshd",
) -> Gradients:
    def round_(x: np.ndarray) -> np.ndarray:
        low = x.astype(rounded).astype(compute)
        return np.where(np.isinf(low), x, low)

    in_order = rounded == np.float32
    heads_kv = _heads_first(k, layout).shape[1]
    dout, q, k, v = (_heads_first(x, layout).astype(compute) for x in (dout, q, k, v))
    group = q.shape[1] // heads_kv
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    factor = compute.type(scale or q.shape[-1] ** -0.5)
    seen = visible(q.shape[2], k.shape[2], causal, window)

    def products(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return _products_in_order(a, b) if in_order else np.matmul(a, b.swapaxes(-1, -2))

    with np.errstate(all="ignore"):
        logits = round_(products(q, k) * factor)
        slope = 1.0
        if softcap is not None:
            bent = round_(np.tanh(round_(logits / compute.type(softcap))))
            logits = round_(bent * compute.type(softcap))
            slope = round_(1 - bent * bent)
        logits = np.where(seen, logits, -np.inf)
        top = logits.max(-1, keepdims=True, initial=-np.inf)
        lse = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
        weights = np.where(seen, round_(np.exp(logits - lse)), 0)
        dweights = round_(products(dout, v))
        delta = (weights * dweights).sum(-1, keepdims=True)
        if dlse is not None:
            delta = delta - dlse.astype(compute)[..., None]
        dscores = np.where(seen, round_(weights * (dweights - delta) * slope), 0)
        dq = np.matmul(dscores, k) * factor
        dk = np.matmul(dscores.swapaxes(-1, -2), q) * factor
        dv = np.matmul(weights.swapaxes(-1, -2), dout)
    dk, dv = (x.reshape(x.shape[0], heads_kv, group, *x.shape[2:]).sum(2) for x in (dk, dv))
    return Gradients(*(_heads_first(round_(x), layout) for x in (dq, dk, dv)))


def gradients_float64(
    dout: Any, q: Any, k: Any, v: Any, dlse: Any = None, **options: Any
) -> Gradients:
    """In float64. A query that sees no key has 0, and so has a key that no query sees."""
    given = [to_numpy(x) for x in (dout, q, k, v)]
    return _gradients(*given, None if dlse is None else to_numpy(dlse), DOUBLE, DOUBLE, **options)


def cancellation(
    given: list[np.ndarray], dtype: np.dtype[Any], scale: float | None
) -> dict[str, float]:
    """By gradient what the last term of the rule allows."""
    dout, q, k, v = (float(np.abs(x[np.isfinite(x)]).max(initial=0.0)) for x in given)
    eps = CANCELLATION if dtype != DOUBLE else CANCELLATION * 2.0**-29
    dims = given[3].shape[-1] ** 0.5  # sums of random signs grow with the root
    dscores = eps * dout * v * dims * (scale or given[1].shape[-1] ** -0.5)
    return {"dq": dscores * k, "dk": dscores * q, "dv": eps * dout}


def assert_gradients_accurate(
    got: Any,
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    dlse: Any = None,
    **options: Any,
) -> None:
    """Holds (dq, dk, dv), each of any framework or None, to the accuracy rule."""
    dtype = dtype_of(q)
    given = [to_numpy(x) for x in (dout, q, k, v)]
    dlse = None if dlse is None else to_numpy(dlse)
    ref = _gradients(*given, dlse, DOUBLE, DOUBLE, **options)
    plain = _gradients(*given, dlse, SINGLE, dtype, **options)
    head_axis = 1 if options.get("layout") == "bhsd" else 2
    left = cancellation(given, dtype, options.get("scale"))
    for name, x, want, usual in zip(Gradients._fields, got, ref, plain, strict=True):
        if x is None:
            continue
        x = to_numpy(x)
        assert x.shape == want.shape, name
        for head in range(want.shape[head_axis] if want.size else 0):
            here = np.index_exp[:, head] if head_axis == 1 else np.index_exp[:, :, head]
            target = want[here]
            allowed = 2 * np.abs(usual[here] - want[here]).max()
            allowed += 2 * ulp(dtype, float(np.abs(target).max())) + left[name]
            error = np.abs(x[here] - target)
            worst = np.unravel_index(np.argmax(error), error.shape)  # NaN counts as the largest
            assert error[worst] <= allowed, (
                f"{name} of head {head}: {x[here][worst]} at {list(map(int, worst))}, reference "
                f"{target[worst]}: error {error[worst]:.3g}, allowed {allowed:.3g}"
            )
