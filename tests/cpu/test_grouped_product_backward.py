"""Gradients of the grouped product on the CPU against float64."""

from __future__ import annotations

import ctypes
from typing import Any

import capi
import capi_moe
import moe_gradients
import numpy as np
import pytest
import torch
from moe_layers import matrix, rows_apart

WANTED = ("dx", "dw", "dbias")


def bounds_of(rng: np.random.Generator, experts: int, rows: int, counted: bool) -> np.ndarray:
    if counted:
        return rng.integers(0, rows + 1, experts).astype(np.int32)
    inner = np.sort(rng.integers(1, rows, experts - 1))
    return np.concatenate([[1], inner, [rows - 1]]).astype(np.int32)  # the ends are nobody's


def slices_of(bounds: np.ndarray, experts: int, counted: bool) -> list[Any]:
    if counted:
        return [(e, slice(0, int(bounds[e]))) for e in range(experts)]
    return [slice(int(bounds[e]), int(bounds[e + 1])) for e in range(experts)]


def gradients(
    dout: np.ndarray, x: np.ndarray, w: np.ndarray, parts: list[Any], dtype: torch.dtype
) -> dict[str, np.ndarray]:
    xs, ws = moe_gradients.tensor(x, dtype), moe_gradients.tensor(w, dtype)
    bias = torch.zeros(w.shape[:2], dtype=dtype, requires_grad=True)
    d = moe_gradients.tensor(dout, dtype).detach()
    for e, part in enumerate(parts):
        (xs[part] @ ws[e].T + bias[e]).backward(d[part])
    leaves = {"dx": xs, "dw": ws, "dbias": bias}
    return {n: np.zeros(t.shape) if t.grad is None else t.grad.double().numpy()
            for n, t in leaves.items()}  # fmt: skip


def outputs_of(x: np.ndarray, w: np.ndarray, orientation: str, dtype: Any, fill: float) -> Any:
    rng = np.random.default_rng(0)
    dx = capi.aligned_empty(x.shape, dtype)
    dw = matrix(np.zeros(w.shape, dtype), orientation, rng)
    made = {"dx": dx, "dw": dw, "dbias": np.zeros(w.shape[:2], dtype)}
    for array in made.values():
        array[...] = np.float64(fill).astype(dtype)
    return made


@pytest.mark.parametrize("dtype", capi_moe.DTYPES)
@pytest.mark.parametrize("counted", [False, True], ids=["offsets", "counts"])
@pytest.mark.parametrize("orientation", [("rows", "columns"), ("columns", "rows")])
def test_gradients(
    isa_library: ctypes.CDLL, dtype: str, counted: bool, orientation: tuple[str, str]
) -> None:
    rng = np.random.default_rng(1)
    kind = capi_moe.DTYPES[dtype]
    for experts, rows, columns, out_columns in ((5, 40, 72, 104), (3, 300, 136, 40)):
        lead = (experts, rows) if counted else (rows,)
        x = capi.normal(rng, (*lead, columns), kind)
        dout = capi.normal(rng, (*lead, out_columns), kind)
        if not counted:
            x, dout = rows_apart(x, 8), rows_apart(dout, 16)
        w = matrix(capi.normal(rng, (experts, out_columns, columns), kind), orientation[0], rng)
        bounds = bounds_of(rng, experts, rows, counted)
        parts = slices_of(bounds, experts, counted)
        ref = gradients(dout, x, w, parts, torch.float64)
        plain = gradients(dout, x, w, parts, moe_gradients._FLOATS[str(kind)])
        given = {"x": x, "w": w, "counts" if counted else "offsets": bounds}
        bits: dict[str, bytes] = {}
        for wanted in (WANTED, *((name,) for name in WANTED)):
            made = outputs_of(x, w, orientation[1], kind, 7.0)
            params = capi_moe.make_params(
                capi_moe.ProductBackwardParams, dout=dout, **given,
                **{name: made[name] for name in wanted},
            )  # fmt: skip
            capi_moe.run(params, isa_library)
            for name in wanted:
                moe_gradients.assert_near(name, made[name], ref[name], plain[name], kind)
                assert bits.setdefault(name, made[name].tobytes()) == made[name].tobytes()
        # Added to, in fp32: twice what it was.
        wide = outputs_of(x, w, orientation[1], np.dtype(np.float32), 0.0)
        params = capi_moe.make_params(
            capi_moe.ProductBackwardParams, dout=dout, accumulate=1, **given, **wide
        )
        capi_moe.run(params, isa_library)
        once = {name: array.copy() for name, array in wide.items()}
        capi_moe.run(params, isa_library)
        for name, array in wide.items():
            assert (array == 2 * once[name]).all(), name
            moe_gradients.assert_near(name, once[name], ref[name], plain[name], kind)


def test_rows_of_nobody_and_hostile_bounds(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(2)
    kind = capi_moe.DTYPES["fp32"]
    x, dout = capi.normal(rng, (20, 24), kind), capi.normal(rng, (20, 16), kind)
    w = matrix(capi.normal(rng, (4, 16, 24), kind), "rows", rng)
    dout[[0, 19]] = np.nan
    offsets = np.array([1, 5, 5, 12, 19], np.int32)
    made = outputs_of(x, w, "rows", kind, 7.0)
    params = capi_moe.make_params(
        capi_moe.ProductBackwardParams, dout=dout, x=x, w=w, offsets=offsets, **made
    )
    capi_moe.run(params, library)
    assert (made["dx"][[0, 19]] == 0).all()
    assert (made["dw"][1] == 0).all()
    assert all(np.isfinite(array).all() for array in made.values())
    dout[...] = 1
    for _ in range(30):
        offsets[...] = rng.integers(-(2**31), 2**31 - 1, 5)
        capi_moe.run(params, library)
        assert all(np.isfinite(array).all() for array in made.values())
