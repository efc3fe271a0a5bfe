"""Small calls of merge_states on memory of exactly its size: a program for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize_merge.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize_merge.py --small fp16

Every result is checked as well. Prints the kernels that ran.
"""

from __future__ import annotations

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
    return {_check(driver, rng, dtype, *case) for case in sanitize.part_of(cases, share)}


if __name__ == "__main__":
    sanitize.main(__doc__, PARTS, serves, run_dtype)
