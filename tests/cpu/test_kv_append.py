"""kv_append on the CPU: what it writes where, beside a loop in float64; nothing else is touched."""

from __future__ import annotations

import ctypes
from typing import Any

import capi_append
import capi_moe
import flashmoe_science as fm
import numpy as np
import pytest
from append_cases import DTYPES, POISON, Case, assert_right


@pytest.mark.parametrize("rotary", ["", "neox", "interleaved"])
@pytest.mark.parametrize("way", ["plain", "indexed", "paged", "slots"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_goes_where(dtype: str, way: str, rotary: str) -> None:
    rng = np.random.default_rng([DTYPES.index(dtype), len(way), len(rotary)])
    for _ in range(25):
        assert_right(Case(rng, dtype, way=way, rotary=rotary))


@pytest.mark.parametrize("rotary", ["neox", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instruction_set_has_the_same_bits(
    isa_library: ctypes.CDLL, dtype: str, rotary: str
) -> None:
    """For any number of rotated dimensions."""
    rng = np.random.default_rng(11)
    for pairs in range(1, 49):
        case = Case(rng, dtype, rotary=rotary, dim=96, pairs=pairs)
        arrays = {"k": case.k, "v": case.v, "k_cache": case.caches[0], "v_cache": case.caches[1]}
        arrays = {name: x.copy() for name, x in arrays.items()}
        arrays |= {name: x for name, x in case.given.items() if isinstance(x, np.ndarray)}
        arrays["q_out"] = np.full(arrays["q"].shape, POISON).astype(case.dtype)
        params = capi_append.make_params(**arrays, **capi_append.options_of(case))
        plan = capi_moe.plan_of(params, isa_library)
        isa = plan.isa.decode()
        assert plan.launches[0].kernel.decode().startswith(f"kv_append_cpu_{isa}_")
        capi_moe.run(params, isa_library)
        want = [*case.caches, case.call()]
        for name, x in zip(("k_cache", "v_cache", "q_out"), want, strict=True):
            assert arrays[name].tobytes() == x.tobytes()


def test_the_cases_reach_every_argument() -> None:
    rng = np.random.default_rng(5)
    cases = [Case(rng) for _ in range(200)]
    names = (
        "slots", "cache_seqlens", "cu_seqlens", "seqused", "batch_index", "page_table",
        "positions", "rotary_cos", "rotary_sin", "interleaved", "q", "q_stays",
    )  # fmt: skip
    for name in names:
        assert sum(name in case.given for case in cases) > 10, name
    written = [(case.expected()[1] != POISON).any() for case in cases]
    assert np.mean(written) > 0.3


def test_bits_depend_on_no_number_of_threads() -> None:
    rng = np.random.default_rng(1)
    k, v = (rng.standard_normal((3, 700, 4, 64), np.float32) for _ in range(2))
    cos, sin = (rng.standard_normal((900, 32), np.float32) for _ in range(2))
    q = rng.standard_normal((3, 700, 8, 64), np.float32)
    made, launches = [], []
    for threads in (1, 3):
        fm.set_num_threads(threads)
        try:
            caches = [np.zeros((3, 900, 4, 64), np.float32) for _ in range(2)]
            lengths = np.array([200, 0, 7], np.int32)
            rotary = {"rotary_cos": cos, "rotary_sin": sin}
            plan = fm.kv_append_plan(k, v, *caches, cache_seqlens=lengths, **rotary, q=q)
            out = fm.kv_append(k, v, *caches, cache_seqlens=lengths, **rotary, q=q)
        finally:
            fm.set_num_threads(0)
        assert plan.launches == fm.last_launches()
        made.append([*caches, out])
        launches.append(plan.launches[0].block[0])
    assert launches == [1, 3]
    for one, three in zip(*made, strict=True):
        assert one.tobytes() == three.tobytes()


def test_queries_in_place() -> None:
    rng = np.random.default_rng(2)
    for rotary in ("neox", "interleaved"):
        case = Case(rng, rotary=rotary, way="slots", layout="bshd")
        while case.given["q"].size == 0:
            case = Case(rng, rotary=rotary, way="slots", layout="bshd")
        want = case.call()
        q = case.given["q"]
        kept = np.where(want == POISON, q, want)  # positions that no table has
        assert fm.kv_append(case.k, case.v, *case.caches, **case.given, q_out=q) is q
        assert q.tobytes() == kept.tobytes()


def arguments() -> dict[str, Any]:
    rows = lambda *shape: np.zeros(shape, np.float32)  # noqa: E731
    return {
        "k": rows(2, 3, 2, 16), "v": rows(2, 3, 2, 24), "k_cache": rows(2, 9, 2, 16),
        "v_cache": rows(2, 9, 2, 24), "rotary_cos": rows(9, 4), "rotary_sin": rows(9, 4),
        "q": rows(2, 3, 4, 16),
    }  # fmt: skip


INT32 = np.zeros(2, np.int32)
WRONG = {
    "batch": ("v", {"v": np.zeros((1, 3, 2, 24), np.float32)}),
    "rows": ("v", {"v": np.zeros((2, 4, 2, 24), np.float32)}),
    "heads": ("k_cache", {"k_cache": np.zeros((2, 9, 3, 16), np.float32)}),
    "dim": ("v_cache", {"v_cache": np.zeros((2, 9, 2, 16), np.float32)}),
    "dim_of_8": ("k", {"k": np.zeros((2, 3, 2, 12), np.float32)}),
    "dtype": ("v", {"v": np.zeros((2, 3, 2, 24), np.float16)}),
    "cache_batch": ("k_cache", {"k_cache": np.zeros((3, 9, 2, 16), np.float32),
                                "v_cache": np.zeros((3, 9, 2, 24), np.float32)}),
    "slots_and_lengths": ("cache_seqlens", {"slots": np.zeros((2, 3), np.int32),
                                            "cache_seqlens": INT32}),
    "slots_alone": ("positions", {"slots": np.zeros((2, 3), np.int32)}),
    "slots_shape": ("slots", {"slots": np.zeros((2, 4), np.int32),
                              "positions": np.zeros((2, 3), np.int32)}),
    "float_slots": ("slots", {"slots": np.zeros((2, 3), np.float32),
                              "positions": np.zeros((2, 3), np.int32)}),
    "wide_lengths": ("cache_seqlens", {"cache_seqlens": INT32.astype(np.int64)}),
    "lengths": ("cache_seqlens", {"cache_seqlens": np.zeros(3, np.int32)}),
    "two_places": ("batch_index", {"batch_index": INT32,
                                   "page_table": np.zeros((2, 1), np.int32)}),
    "table": ("page_table", {"page_table": np.zeros((3, 1), np.int32)}),
    "packed": ("k", {"cu_seqlens": np.zeros(3, np.int32)}),
    "sin_alone": ("rotary_sin", {"rotary_cos": None, "q": None}),
    "no_sin": ("rotary_sin", {"rotary_sin": None}),
    "sin_shape": ("rotary_sin", {"rotary_sin": np.zeros((8, 4), np.float32)}),
    "pairs": ("rotary_cos", {"rotary_cos": np.zeros((9, 9), np.float32)}),
    "q_alone": ("q", {"rotary_cos": None, "rotary_sin": None}),
    "q_dim": ("q", {"q": np.zeros((2, 3, 4, 24), np.float32)}),
    "q_rows": ("q", {"q": np.zeros((2, 5, 4, 16), np.float32),
                     "positions": np.zeros((2, 3), np.int32)}),
    "stays": ("q_stays", {"q_stays": True, "positions": np.zeros((2, 3), np.int32)}),
    "layout": ("layout", {"layout": "sbhd"}),
    "kernel": ("kernel", {"kernel": "sm90"}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "given"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named_and_nothing_written(name: str, given: dict[str, Any]) -> None:
    whole = arguments() | given
    caches = [whole["k_cache"].copy(), whole["v_cache"].copy()]
    for call in (fm.kv_append, fm.kv_append_plan):
        with pytest.raises((ValueError, TypeError), match=f"^{name}: "):
            call(**whole)
    for cache, before in zip((whole["k_cache"], whole["v_cache"]), caches, strict=True):
        assert (cache == before).all()
    fm.kv_append(**arguments())


def test_outputs_overlap_nothing() -> None:
    given = arguments()
    given["v_cache"] = np.zeros((2, 9, 2, 16), np.float32)
    given["v"] = given["v_cache"][:, :3]
    with pytest.raises(ValueError, match=r"^v_cache: "):
        fm.kv_append(**given)
    both = np.zeros((2, 2, 9, 2, 16), np.float32)  # as vLLM has them
    given |= {"v": given["k"] + 1, "k_cache": both[:, 0], "v_cache": both[:, 1]}
    fm.kv_append(**given)
    assert (both[:, 1, :3] == 1).all() and (both[:, 1, 3:] == 0).all()
