"""Small calls of kv_gather and check_sequences on memory of exactly their size, for
compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize_sequences.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize_sequences.py --small fp16

Every result is checked as well. Prints the kernels that ran.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import capi
import capi_gather
import capi_moe
import gather_cases
import numpy as np
from gather_cases import POISON, WAYS
from gpu import sanitize
from gpu.sanitize import Driver

DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
PARTS = (*DTYPES, "check")
_EXTREME = np.array([-(2**31), -1, 0, 1, 3, 5, 1000, 2**31 - 2, 2**31 - 1])


def stated_kernels(part: str) -> set[str]:
    if part == "check":
        return {"check_sequences_sm89"}
    return {f"kv_gather_sm89_{part}", f"kv_gather_sm89_{part}_fp8"}


def serves(part: str) -> bool:
    rows = np.zeros((1, 1, 1, 8), np.float32)
    params = capi_gather.gather_params(dict.fromkeys(("k_cache", "k"), rows))
    return sanitize.serves(params, capi_moe.plan_of)


def _make(rng: np.random.Generator, dtype: str, **fixed: Any) -> gather_cases.Case:
    """A case without an empty tensor, of which the driver has no memory."""
    while True:
        case = gather_cases.Case(rng, DTYPES[dtype], **fixed)
        if case.seq and all(x.size for x in case.given.values()):
            return case


def check_gather(driver: Driver, case: gather_cases.Case, hostile: bool = False) -> set[str]:
    outputs = dict(zip("kv", case.results(), strict=False))
    arrays = dict(zip(("k_cache", "v_cache"), case.given_caches(), strict=False))
    arrays |= case.given | outputs
    ran = sanitize.run(driver, arrays, outputs, capi_gather.gather_params(arrays, case.layout),
                       capi_moe.plan_of, "flashmoe_kv_gather")  # fmt: skip
    if not hostile:
        gather_cases.assert_right(case, [arrays[name] for name in outputs])
    return set(ran)


def check_fp8(driver: Driver, rng: np.random.Generator, dtype: str) -> set[str]:
    """Pages of fp8, with a scale of each page and head that is a power of two."""
    pages, size, heads, dim = 9, 5, 2, 48
    cache = capi.normal(rng, (pages, size, heads, dim), capi.FP8)
    scale = np.exp2(rng.integers(-2, 3, (pages, heads))).astype(np.float32)
    table = rng.permutation(pages)[:8].reshape(2, 4).astype(np.int32)
    out = capi.aligned_empty((2, 20, heads, dim), capi.DTYPES[dtype])
    out[...] = POISON
    arrays = {"k_cache": cache, "seqused_k": np.array([20, 7], np.int32), "page_table": table,
              "k_scale": scale, "k": out}  # fmt: skip
    ran = sanitize.run(driver, arrays, ("k",), capi_gather.gather_params(arrays),
                       capi_moe.plan_of, "flashmoe_kv_gather")  # fmt: skip
    wide = cache.astype(np.float32) * scale[:, None, :, None]
    want = wide[table].reshape(2, 20, heads, dim)
    want[1, 7:] = POISON
    assert np.array_equal(out.astype(np.float32), want)
    return set(ran)


def check_faults(driver: Driver, rng: np.random.Generator, batch: int, width: int) -> set[str]:
    """Numbers from anywhere: the GPU finds what the CPU finds."""
    q, k = np.zeros((1, 40, 2, 16), np.float16), np.zeros((11, 3, 1, 16), np.float16)
    tables = {
        "cu_seqlens_q": np.sort(rng.integers(0, 41, batch + 1)).astype(np.int32),
        "seqused_k": rng.integers(0, 3 * width + 1, batch).astype(np.int32),
        "k_begin": rng.integers(0, 5, batch).astype(np.int32),
        "page_table": rng.integers(0, 11, (batch, width)).astype(np.int32),
    }
    for table in tables.values():
        strange = rng.random(table.shape) < 0.05
        table[strange] = rng.choice(_EXTREME, int(strange.sum()))
    made = []
    for on_gpu in (False, True):
        status = np.full(batch, 77, np.int32)
        params = capi_gather.check_params(q, k, status, tables)
        if on_gpu:
            arrays = {"q": q, "k": k, "status": status, **tables}
            ran = sanitize.run(driver, arrays, ("status",), params, capi_moe.plan_of,
                               "flashmoe_check_sequences")  # fmt: skip
        else:
            capi_moe.run(params)
        made.append(status)
    assert np.array_equal(*made)
    return set(ran)


def run_part(driver: Driver, part: str, small: bool, share: tuple[int, int]) -> set[str]:
    rng = np.random.default_rng(share[0])
    seen: set[str] = set()
    if part == "check":
        shapes = [(1, 1), (3, 7), (60, 4), (5, 300), (1100, 3)]
        for batch, width in sanitize.part_of(shapes, share):
            for _ in range(1 if small else 4):
                seen |= check_faults(driver, rng, batch, width)
        return seen
    cases = [{"way": way, "packed": packed} for way in WAYS for packed in (False, True)]
    cases.append({"way": "paged", "packed": True, "overlapping": True, "most_batch": 300})
    for fixed in sanitize.part_of(cases, share):
        for _ in range(1 if small else 4):
            seen |= check_gather(driver, _make(rng, part, **fixed))
        if small:
            continue
        case = _make(rng, part, **fixed)
        for name, x in case.given.items():
            case.given[name] = rng.choice(_EXTREME, x.shape).astype(x.dtype)
        # Two sequences may claim one row: of that racecheck would be right to tell.
        seen |= check_gather(driver, case, hostile=True)
    return seen | check_fp8(driver, rng, part)


if __name__ == "__main__":
    sanitize.main(__doc__, PARTS, serves, run_part)
