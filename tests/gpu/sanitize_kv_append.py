"""Small calls of kv_append on memory of exactly their size: a program for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize_kv_append.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize_kv_append.py --small fp16

Every result is checked as well. Prints the kernels that ran.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import capi
import capi_append
import capi_moe
import numpy as np
from append_cases import POISON, Case, check
from gpu import sanitize
from gpu.sanitize import Driver

PARTS = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
_WAYS = ("plain", "indexed", "paged", "slots")


def _params(arrays: dict[str, np.ndarray], **options: int) -> Any:
    params = capi_append.make_params(**arrays, **options)
    params.keep = dict(zip(arrays, params.keep, strict=True))
    return params


def serves(dtype: str) -> bool:
    rows = np.zeros((1, 1, 1, 8), capi.DTYPES[dtype])
    params = _params(dict.fromkeys(("k", "v", "k_cache", "v_cache"), rows))
    return sanitize.serves(params, capi_moe.plan_of)


def _make(rng: np.random.Generator, dtype: str, **fixed: Any) -> Case:
    """A case without an empty tensor, of which the driver has no memory."""
    while True:
        case = Case(rng, PARTS[dtype], **fixed)
        if case.k.size and all(x.size for x in case.given.values() if isinstance(x, np.ndarray)):
            return case


def check_case(driver: Driver, case: Case, hostile: bool = False) -> str:
    """One call; the name of the kernel that ran."""
    arrays = {"k": case.k, "v": case.v, "k_cache": case.caches[0], "v_cache": case.caches[1]}
    arrays |= {name: x for name, x in case.given.items() if isinstance(x, np.ndarray)}
    if "q" in arrays:
        arrays["q_out"] = np.full(arrays["q"].shape, POISON).astype(case.dtype)
    outputs = ["k_cache", "v_cache", *(["q_out"] if "q" in arrays else [])]
    params = _params(arrays, **capi_append.options_of(case))
    (kernel,) = sanitize.run(
        driver, arrays, outputs, params, capi_moe.plan_of, "flashmoe_kv_append"
    )
    made = [arrays[name] for name in outputs]
    if hostile:
        assert all(np.isfinite(x.astype(np.float64)).all() for x in made)
    else:
        check(case, made[:2], made[2] if len(made) > 2 else None)
    return kernel


_EXTREME = np.array([-(2**31), -1, 0, 1, 3, 5, 1000, 2**31 - 2, 2**31 - 1])


def run_dtype(driver: Driver, dtype: str, small: bool, share: tuple[int, int]) -> set[str]:
    rng = np.random.default_rng(share[0])
    cases = [
        {"way": way, "rotary": rotary, "packed": packed and way != "slots"}
        for way in _WAYS for rotary in ("", "neox", "interleaved") for packed in (False, True)
    ]  # fmt: skip
    # As many as one block has of rows, and more sequences than threads that look for their owners.
    cases.append({"way": "paged", "rotary": "neox", "packed": True, "most_batch": 300,
                  "most_seq": 3})  # fmt: skip
    seen = set()
    for fixed in sanitize.part_of(cases, share):
        for _ in range(1 if small else 4):
            seen.add(check_case(driver, _make(rng, dtype, **fixed)))
        if small:
            continue
        case = _make(rng, dtype, **fixed)
        for name, x in case.given.items():
            if isinstance(x, np.ndarray) and x.dtype.kind == "i":
                case.given[name] = rng.choice(_EXTREME, x.shape).astype(x.dtype)
        # Two rows may go to one place: of that racecheck would be right to tell.
        seen.add(check_case(driver, case, hostile=True))
    return seen


if __name__ == "__main__":
    sanitize.main(__doc__, PARTS, serves, run_dtype)
