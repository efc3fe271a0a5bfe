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
