"""Grouped products on the CPU against float64: rows by offsets, and by counts."""

from __future__ import annotations

import ctypes

import capi
import capi_moe
import moe_oracle
import numpy as np
import pytest
from moe_layers import ORIENTATIONS, matrix, rows_apart

TIMES = {"fp64": 2, "fp32": 4, "fp16": 2, "bf16": 2}  # of the ordinary computation's error


def weights(rng, experts: int, rows: int, columns: int, dtype: np.dtype) -> np.ndarray:
    return (rng.standard_normal((experts, rows, columns)) / np.sqrt(columns)).astype(dtype)


@pytest.mark.parametrize("dtype", capi_moe.DTYPES)
@pytest.mark.parametrize("orientation", ORIENTATIONS)
@pytest.mark.parametrize("bias", [None, "same", "fp32"])
def test_offsets(isa_library: ctypes.CDLL, dtype: str, orientation: str, bias: str | None) -> None:
    rng = np.random.default_rng(1)
    kind = capi_moe.DTYPES[dtype]
    experts, columns, out_columns = 5, 72, 88
    offsets = np.array([2, 2, 9, 50, 50, 51], np.int32)  # rows before, between and behind
    x = rows_apart(capi.normal(rng, (60, columns), kind), 8)
    w = weights(rng, experts, out_columns, columns, kind)
    b = rng.standard_normal((experts, out_columns)).astype(np.float32 if bias == "fp32" else kind)
    b = None if bias is None else b
    out = rows_apart(np.full((60, out_columns), 7, kind), 16)
    params = capi_moe.make_params(
        capi_moe.ProductParams, x=x, w=matrix(w, orientation, rng), bias=b, offsets=offsets, out=out
    )
    capi_moe.run(params, isa_library)
    assert (out[:2] == 7).all() and (out[51:] == 7).all()
    moe_oracle.assert_grouped_product(out, x, w, offsets=offsets, bias=b, times=TIMES[dtype])
    plan = capi_moe.plan_of(params, isa_library)
    assert capi.is_planned(plan, capi.last_launches(isa_library))
    assert len(plan.launches) == 1


@pytest.mark.parametrize("dtype", capi_moe.DTYPES)
@pytest.mark.parametrize("orientation", ["rows", "columns"])
def test_counts(isa_library: ctypes.CDLL, dtype: str, orientation: str) -> None:
    rng = np.random.default_rng(2)
    kind = capi_moe.DTYPES[dtype]
    experts, most, columns, out_columns = 4, 50, 40, 48
    counts = np.array([0, 50, 7, 1], np.int32)
    x = np.full((experts, most + 1, columns), np.nan, kind)[:, :most]  # what is not theirs is NaN
    for expert, count in enumerate(counts):
        x[expert, :count] = rng.standard_normal((count, columns)).astype(kind)
    w = weights(rng, experts, out_columns, columns, kind)
    out = capi.aligned_empty((experts, most, out_columns), kind)
    out[...] = np.float64(7).astype(kind)
    aligned = capi.aligned_empty(x.shape, kind)
    aligned[...] = x
    capi_moe.run(
        capi_moe.make_params(
            capi_moe.ProductParams, x=aligned, w=matrix(w, orientation, rng), counts=counts, out=out
        ),
        isa_library,
    )
    moe_oracle.assert_grouped_product(out, x, w, counts=counts, times=TIMES[dtype])
    for expert, count in enumerate(counts):
        assert (out[expert, count:] == 7).all()


@pytest.mark.parametrize("by", ["offsets", "counts"])
@pytest.mark.parametrize("seed", range(20))
def test_whatever_they_hold_nothing_outside_is_touched(by: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    experts, rows = 5, 6
    shape = (rows, 16) if by == "offsets" else (experts, rows, 16)
    index = rng.integers(-4, rows + 4, experts + (by == "offsets")).astype(np.int32)
    index[rng.integers(0, index.size)] = rng.choice(np.array([-(2**31), 2**31 - 1], np.int32))
    kind = capi_moe.DTYPES["fp32"]
    guarded = capi.aligned_empty((shape[0] + 2, *shape[1:]), kind)
    guarded[...] = 7
    x = capi.normal(rng, shape, kind)
    params = capi_moe.make_params(
        capi_moe.ProductParams,
        x=x,
        w=weights(rng, experts, 16, 16, kind),
        out=guarded[1:-1],
        **{by: index},
    )
    capi_moe.run(params)
    assert (guarded[0] == 7).all() and (guarded[-1] == 7).all()


def test_no_rows() -> None:
    rng = np.random.default_rng(3)
    for shape, by in (((0, 16), "offsets"), ((3, 0, 16), "counts")):
        index = np.zeros(4 if by == "offsets" else 3, np.int32)
        arrays = {"x": np.zeros(shape, np.float32), "out": np.zeros(shape, np.float32), by: index}
        w = weights(rng, 3, 16, 16, np.dtype(np.float32))
        capi_moe.run(capi_moe.make_params(capi_moe.ProductParams, w=w, **arrays))
