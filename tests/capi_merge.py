"""flashmoe_merge_states by ctypes and NumPy, and what float64 makes of the same partials."""

from __future__ import annotations

import ctypes as c
from typing import Any

import capi
import capi_moe
import numpy as np
from capi_moe import TensorPointer


class MergeParams(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("outs", TensorPointer),
        ("lses", TensorPointer),
        ("prior_out", TensorPointer),
        ("prior_lse", TensorPointer),
        ("out", TensorPointer),
        ("lse", TensorPointer),
        ("kernel", c.c_char_p),
        ("layout", c.c_int32),
        ("reserved", c.c_uint32),
    ]


capi_moe.FUNCTIONS[MergeParams] = "flashmoe_merge_states"


def make_params(**values: Any) -> MergeParams:
    made: MergeParams = capi_moe.make_params(MergeParams, **values)
    return made


def merged(
    outs: np.ndarray, lses: np.ndarray, layout: str = "bshd"
) -> tuple[np.ndarray, np.ndarray]:
    """out and lse of partials along the first axis, as flashmoe.h has them, in float64."""
    outs, lses = outs.astype(np.float64), lses.astype(np.float64)
    with np.errstate(all="ignore"):
        largest = np.max(lses, axis=0, initial=-np.inf)
        powers = np.exp(lses - np.where(np.isneginf(largest), 0, largest))
        powers = np.where(np.isposinf(largest), np.isposinf(lses).astype(float), powers)
        powers = np.where(np.isnan(largest), np.nan, powers)  # np.max of a NaN is one
        total = powers.sum(0)
        weights = np.where(np.isneginf(lses), 0, powers / np.where(total == 0, 1, total))
        lse = np.where(total == 0, -np.inf, largest + np.log(total))
        rows = weights if layout == "bhsd" else np.swapaxes(weights, 2, 3)
        seen = ~np.isneginf(lses if layout == "bhsd" else np.swapaxes(lses, 2, 3))
        terms = np.where(seen[..., None], rows[..., None] * np.where(seen[..., None], outs, 0), 0)
        return terms.sum(0), lse


def partials(
    rng: np.random.Generator,
    shape: tuple[int, int, int, int, int],
    dtype: np.dtype,
    layout: str = "bshd",
) -> tuple[np.ndarray, np.ndarray]:
    """outs [partials, batch, seq, heads, dim], in layout bhsd with seq and heads exchanged, and
    lses."""
    n, batch, seq, heads, dim = shape
    rows = (seq, heads) if layout == "bshd" else (heads, seq)
    outs = capi.normal(rng, (n, batch, *rows, dim), dtype)
    lses = rng.normal(0, 3, (n, batch, heads, seq)).astype(capi.sums_dtype(dtype))
    return outs, lses


def special_partials(dtype: np.dtype, at: int) -> tuple[np.ndarray, np.ndarray]:
    """40 partials of 8 rows, of which rows 0 to 6 have special numbers in partial `at`."""
    outs, lses = partials(np.random.default_rng(at), (40, 1, 8, 1, 16), dtype)
    lses[at, 0, 0, 0] = np.nan
    lses[at, 0, 0, 1] = np.inf
    lses[[at, 39], 0, 0, 2] = np.inf  # which share the row
    lses[:, 0, 0, 3] = -np.inf
    lses[at, 0, 0, 3] = np.nan
    lses[[at, 38], 0, 0, 4] = np.nan, np.inf
    outs[at, 0, 5, 0, 3] = np.nan
    outs[at, 0, 6, 0, 4] = np.inf
    return outs, lses


def assert_special(
    out: np.ndarray, lse: np.ndarray, outs: np.ndarray, at: int, *, rtol: float, atol: float
) -> None:
    """Rows 0 to 6 are what flashmoe.h says of them, in float64."""
    for row in (0, 3, 4):
        assert np.isnan(out[0, row]).all() and np.isnan(lse[0, 0, row])
    wide = outs.astype(np.float64)
    np.testing.assert_array_equal(out[0, 1], wide[at, 0, 1])
    mean = (wide[at, 0, 2] + wide[39, 0, 2]) / 2
    np.testing.assert_allclose(out[0, 2], mean, rtol=rtol, atol=atol)
    assert np.isposinf(lse[0, 0, [1, 2]]).all()
    assert np.isnan(out[0, 5, 0, 3]) and np.isfinite(np.delete(out[0, 5, 0], 3)).all()
    assert np.isposinf(out[0, 6, 0, 4]) and np.isfinite(np.delete(out[0, 6, 0], 4)).all()
