"""kv_gather on the CPU: what goes where, to the bit beside a loop; nothing else is touched."""

from __future__ import annotations

from typing import Any

import flashmoe_science as fm
import numpy as np
import pytest
from gather_cases import DTYPES, POISON, WAYS, Case, assert_right

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_goes_where(dtype: str, way: str, packed: bool) -> None:
    rng = np.random.default_rng([DTYPES.index(dtype), len(way), packed])
    for _ in range(30):
        case = Case(rng, dtype, way=way, packed=packed)
        assert_right(case, case.call())


def test_offsets_in_no_order() -> None:
    """A row of several sequences is the first one's, with any number of threads."""
    rng = np.random.default_rng(3)
    for threads in (1, 3):
        fm.set_num_threads(threads)
        try:
            for batch in (3, 40, 300):
                for _ in range(5):
                    case = Case(rng, packed=True, overlapping=True, most_batch=batch, most_seq=40)
                    assert_right(case, case.call())
        finally:
            fm.set_num_threads(0)


def test_the_cases_reach_every_argument() -> None:
    rng = np.random.default_rng(5)
    cases = [Case(rng) for _ in range(200)]
    for name in ("cu_seqlens_k", "seqused_k", "k_begin", "batch_index", "page_table"):
        assert sum(name in case.given for case in cases) > 10, name
    every = [source for case in cases for source in case.sources().values()]
    zeros = sum(source is None for source in every)
    assert 0.02 < zeros / len(every) < 0.5
    untouched = [(case.expected()[0] == POISON).any() for case in cases]
    assert 0.2 < np.mean(untouched) < 1


def test_threads_share_large_calls() -> None:
    rng = np.random.default_rng(1)
    k = rng.standard_normal((60, 64, 4, 64), np.float32)
    v = rng.standard_normal((60, 64, 4, 32), np.float32)
    table = rng.permutation(60).reshape(3, 20).astype(np.int32)
    used = np.array([1280, 0, 700], np.int32)
    made, threads = [], []
    for count in (1, 3):
        fm.set_num_threads(count)
        try:
            plan = fm.kv_gather_plan(k, v, page_table=table, seqused_k=used)
            made.append(fm.kv_gather(k, v, page_table=table, seqused_k=used))
        finally:
            fm.set_num_threads(0)
        assert plan.launches == fm.last_launches()
        assert plan.launches[0].kernel == "kv_gather_cpu_fp32"
        threads.append(plan.launches[0].block[0])
    assert threads == [1, 3]
    for keys, values in made:
        assert keys.shape == (3, 1280, 4, 64) and values.shape == (3, 1280, 4, 32)
        for b, count in enumerate(used):
            np.testing.assert_array_equal(keys[b, :count], k[table[b]].reshape(-1, 4, 64)[:count])
            np.testing.assert_array_equal(values[b, :count], v[table[b]].reshape(-1, 4, 32)[:count])


def test_what_is_gathered_is_what_attention_reads() -> None:
    """Attention has the same bits over the pages and over what is gathered of them."""
    rng = np.random.default_rng(2)
    k, v = (rng.standard_normal((30, 16, 2, 64), np.float32) for _ in range(2))
    table = rng.permutation(30).reshape(3, 10).astype(np.int32)
    used, begin = np.array([160, 1, 77], np.int32), np.array([5, 0, 40], np.int32)
    q = rng.standard_normal((3, 2, 4, 64), np.float32)
    paged = fm.flash_attention(
        q, k, v, causal=True, page_table=table, seqused_k=used, k_begin=begin
    )
    starts = np.cumsum([0, *(used - begin)]).astype(np.int32)
    rows = fm.kv_gather(
        k, v, page_table=table, seqused_k=used, k_begin=begin, cu_seqlens_k=starts,
        rows=int(starts[-1]),
    )  # fmt: skip
    out = fm.flash_attention(q, *rows, causal=True, cu_seqlens_k=starts)
    assert out.tobytes() == paged.tobytes()


FP8 = getattr(torch, "float8_e4m3fn", None)


@pytest.mark.parametrize("scales", ["none", "one", "heads", "pages"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_fp8_is_widened_and_rounded_once(dtype: Any, scales: str) -> None:
    """Every number of e4m3."""
    bits = torch.arange(256, dtype=torch.uint8)
    cache = bits.repeat(10 * 4 * 2 * 64 // 256).view(FP8).view(10, 4, 2, 64)
    table = torch.tensor([[9, 3, 1], [0, 2, -1]], dtype=torch.int32)
    shape = {"one": (), "heads": (2,), "pages": (10, 2)}.get(scales)
    scale = None if shape is None else torch.rand(shape, generator=torch.Generator()) + 0.3
    k, v = fm.kv_gather(
        cache, cache, page_table=table, k_scale=scale,
        v_scale=None if scale is None else scale * 2, dtype=dtype,
    )  # fmt: skip
    for got, factor in ((k, 1), (v, 2)):
        wide = cache.float()
        if scale is not None:
            each = (scale * factor).expand(10, 2) if scale.dim() < 2 else scale * factor
            wide = wide * each[:, None, :, None]
        want = wide.to(dtype)[table.clamp(min=0).long()].reshape(2, 12, 2, 64)
        want[1, 8:] = 0
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.nan_to_num(), want.nan_to_num())


def arguments() -> dict[str, Any]:
    rows = lambda *shape: np.zeros(shape, np.float32)  # noqa: E731
    return {"k_cache": rows(2, 9, 2, 16), "v_cache": rows(2, 9, 2, 24), "k": rows(2, 3, 2, 16),
            "v": rows(2, 3, 2, 24)}  # fmt: skip


INT32 = np.zeros(2, np.int32)
WRONG = {
    "batch": ("v", {"v": np.zeros((1, 3, 2, 24), np.float32)}),
    "rows": ("v", {"v": np.zeros((2, 4, 2, 24), np.float32)}),
    "heads": ("k_cache", {"k_cache": np.zeros((2, 9, 3, 16), np.float32)}),
    "dim": ("v_cache", {"v_cache": np.zeros((2, 9, 2, 16), np.float32)}),
    "dim_of_8": ("k", {"k": np.zeros((2, 3, 2, 12), np.float32)}),
    "dtype": ("k_cache", {"k_cache": np.zeros((2, 9, 2, 16), np.float16)}),
    "cache_batch": ("k_cache", {"k_cache": np.zeros((3, 9, 2, 16), np.float32),
                                "v_cache": np.zeros((3, 9, 2, 24), np.float32)}),
    "cache_rows": ("v_cache", {"v_cache": np.zeros((2, 8, 2, 24), np.float32)}),
    "no_v_cache": ("v", {"v_cache": None}),
    "wide_lengths": ("seqused_k", {"seqused_k": INT32.astype(np.int64)}),
    "lengths": ("k_begin", {"k_begin": np.zeros(3, np.int32)}),
    "two_places": ("batch_index", {"batch_index": INT32, "page_table": np.zeros((2, 1), np.int32)}),
    "table": ("page_table", {"page_table": np.zeros((3, 1), np.int32)}),
    "packed": ("k", {"cu_seqlens_k": np.zeros(3, np.int32)}),
    "scale": ("k_scale", {"k_scale": np.ones((), np.float32)}),
    "layout": ("layout", {"layout": "sbhd"}),
    "kernel": ("kernel", {"kernel": "sm90"}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "given"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named_and_nothing_written(name: str, given: dict[str, Any]) -> None:
    whole = arguments() | given
    for output in (whole["k"], whole["v"]):
        output[...] = POISON
    for call in (fm.kv_gather, fm.kv_gather_plan):
        with pytest.raises((ValueError, TypeError), match=f"^{name}: "):
            call(**whole)
    assert (whole["k"] == POISON).all() and (whole["v"] == POISON).all()
    fm.kv_gather(**arguments())


def test_outputs_overlap_nothing() -> None:
    given = arguments()
    given["k"] = given["k_cache"][:, :3]
    with pytest.raises(ValueError, match=r"^k: "):
        fm.kv_gather(**given)
