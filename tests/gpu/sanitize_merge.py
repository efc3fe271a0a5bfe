"""Small calls of merge_states, and of attention that merges a partial result in, on memory of
exactly its size: a program for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize_merge.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize_merge.py --small fp16

Every result is checked as well. Prints the kernels that ran.
"""

from __future__ import annotations

import ctypes as c
import itertools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import capi
import capi_merge
import capi_moe
import numpy as np
from capi_merge import merged, partials
from gpu import sanitize
from gpu.sanitize import Driver

PARTS = ("fp16", "bf16", "fp32")
_UNITS = {"fp32": 1e-6, "fp16": 2.0**-11 * 1.02, "bf16": 2.0**-8 * 1.02}
_NAMES = ("outs", "lses", "prior_out", "prior_lse", "out", "lse")


def kernels_of(dtype: str) -> set[str]:
    name = f"merge_states_sm89_{dtype}"
    return {name} if dtype == "fp32" else {name, f"{name}_beside_fp32"}


def _params(arrays: dict[str, np.ndarray]) -> Any:
    params = capi_merge.make_params(**arrays)
    params.keep = dict(zip(arrays, params.keep, strict=True))
    return params


def serves(dtype: str) -> bool:
    rows, sums = np.zeros((1, 1, 1, 8), capi.DTYPES[dtype]), np.zeros((1, 1, 1), np.float32)
    return sanitize.serves(_params({"outs": rows, "lses": sums, "out": rows}), capi_moe.plan_of)


def _check(
    driver: Driver, rng: np.random.Generator, dtype: str, of_out: str, count: int, prior: bool,
    shape: tuple[int, int, int, int],
) -> str:  # fmt: skip
    """One call; the name of the kernel that ran."""
    outs, lses = partials(rng, (count, *shape), capi.DTYPES[dtype])
    lses[rng.random(lses.shape) < 0.2] = -np.inf
    first, first_lse = partials(rng, (1, *shape), capi.DTYPES[of_out])
    out = capi.aligned_empty(shape, capi.DTYPES[of_out])
    lse = np.empty(first_lse.shape[1:], np.float32)
    given = (outs, lses, first[0], first_lse[0], out, lse)
    arrays = dict(zip(_NAMES, given, strict=True))
    if not prior:
        arrays = {name: x for name, x in arrays.items() if "prior" not in name}
    (kernel,) = sanitize.run(
        driver, arrays, ["out", "lse"], _params(arrays), capi_moe.plan_of, "flashmoe_merge_states"
    )
    every = outs.astype(np.float64)
    if prior:
        every = np.concatenate([first.astype(np.float64), every])
        lses = np.concatenate([first_lse, lses])
    want = merged(every, lses)
    unit = _UNITS[of_out]
    np.testing.assert_allclose(out.astype(np.float64), want[0], rtol=unit, atol=2e-6)
    np.testing.assert_allclose(lse, want[1], rtol=2e-7, atol=2e-6)
    return kernel


def _merge_in_params(arrays: dict[str, np.ndarray], kernel: bytes | None) -> Any:
    tables = {name: arrays[name] for name in ("cu_seqlens_q", "seqused_q")}
    tensors = (arrays[name] for name in ("q", "k", "v", "out", "lse"))
    params = capi.attention_params(*tensors, tables=tables, kernel=kernel)
    for name in ("prior_out", "prior_lse"):
        params.keep[name] = capi.tensor(arrays[name])
        setattr(params, name, c.pointer(params.keep[name]))
    params.keep |= params.keep_sequences.keep
    return params


def _on_cpu(arrays: dict[str, np.ndarray]) -> None:
    params, lib, size = _merge_in_params(arrays, None), capi.load(), c.c_size_t()
    capi.check(lib.flashmoe_attention_forward_workspace_size(params, size), lib)
    workspace = capi.aligned_empty((max(size.value, 1),), np.dtype(np.uint8))
    status = lib.flashmoe_attention_forward(params, workspace.ctypes.data, size.value, None)
    capi.check(status, lib)


def _check_merge_in(
    driver: Driver, rng: np.random.Generator, dtype: str, starts: list[int], used: list[int]
) -> str:
    """Attention of packed sequences into a partial result of all rows, beside the CPU's; rows that
    no sequence has are NaN, and stay as they were. The name of the merging kernel."""
    batch, rows = len(used), 40
    own = capi.DTYPES[dtype]
    arrays = {
        "q": capi.normal(rng, (1, rows, 4, 64), own),
        "k": capi.normal(rng, (batch, 9, 2, 64), own),
        "v": capi.normal(rng, (batch, 9, 2, 64), own),
        "out": np.full((1, rows, 4, 64), 7, np.float32),
        "lse": np.full((1, 4, rows), 7, np.float32),
        "prior_out": capi.normal(rng, (1, rows, 4, 64), np.dtype(np.float32)),
        "prior_lse": rng.normal(0, 3, (1, 4, rows)).astype(np.float32),
        "cu_seqlens_q": np.array(starts, np.int64).clip(-(2**31), 2**31 - 1).astype(np.int32),
        "seqused_q": np.array(used, np.int64).clip(-(2**31), 2**31 - 1).astype(np.int32),
    }
    want = {name: x.copy() for name, x in arrays.items()}
    _on_cpu(want)
    untouched = (want["lse"] == 7).all(1)[0]
    assert untouched.any() and not untouched.all()
    for name, at in (("q", np.s_[0, untouched]), ("prior_out", np.s_[0, untouched]),
                     ("prior_lse", np.s_[0, :, untouched])):  # fmt: skip
        arrays[name][at] = np.nan
    params = _merge_in_params(arrays, b"sm89")
    *_, kernel = sanitize.run(
        driver, arrays, ("out", "lse"), params, capi.attention_plan, "flashmoe_attention_forward"
    )
    np.testing.assert_array_equal((arrays["lse"] == 7).all(1)[0], untouched)
    assert (arrays["out"][0, untouched] == 7).all()
    np.testing.assert_allclose(arrays["out"], want["out"], rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(arrays["lse"], want["lse"], rtol=1e-4, atol=1e-4)
    return kernel


# Tables: rows of nobody before, between and behind; numbers that lead anywhere, each row of one
# sequence at the most all the same.
_TABLES = [([3, 7, 7, 30], [4, 5, 20]), ([35, 99, -7, 9], [2, -1, 2**31])]


def run_dtype(driver: Driver, dtype: str, small: bool, share: tuple[int, int]) -> set[str]:
    rng = np.random.default_rng(share[0])
    cases: list[Any] = [
        (of_out, count, prior, (2, 5, 3, 24))
        for of_out, count, prior in itertools.product(
            (dtype, "fp32"), (2, 11) if small else (1, 2, 5, 11, 40, 200), (False, True)
        )
    ]
    if not small:
        # More rows than a block has, rows of more units than it has threads.
        cases += [("fp32", 3, True, (1, 300, 4, 8)), (dtype, 3, True, (1, 2, 2, 4104))]
    seen = {_check(driver, rng, dtype, *case) for case in sanitize.part_of(cases, share)}
    if dtype != "fp32":
        tables = _TABLES[:1] if small else _TABLES
        seen |= {_check_merge_in(driver, rng, dtype, *x) for x in sanitize.part_of(tables, share)}
    return seen


if __name__ == "__main__":
    sanitize.main(__doc__, PARTS, serves, run_dtype)
