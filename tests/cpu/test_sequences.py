"""Ragged, padded and paged batches: each sequence is the dense call of what it gathers, bit by bit,
and nothing else is read or written."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import capi
import numpy as np
import pairs
import pytest
from capi import aligned_empty, normal
from guarded import between_guards
from reference import assert_accurate, visible

DTYPES = ("fp32", "fp16", "bf16")
POISON = -77.0
INT_MAX = 2**31 - 1

LENGTHS_Q = (5, 0, 1, 40, 3, 130, 1)
LENGTHS_K = (9, 300, 0, 33, 1, 70, 515)
HEADS_Q, HEADS_KV, DIM, DIM_V = 6, 2, 40, 24


def int32(values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def starts(lengths: Sequence[int]) -> np.ndarray:
    return int32(np.concatenate([[0], np.cumsum(lengths)]))


class Case(NamedTuple):
    """Sequences as dense tensors [1, length, heads, dim] each."""

    q: list[np.ndarray]
    k: list[np.ndarray]
    v: list[np.ndarray]
    sinks: np.ndarray | None


def make_case(
    dtype: np.dtype,
    lengths_q: Sequence[int] = LENGTHS_Q,
    lengths_k: Sequence[int] = LENGTHS_K,
    dim: int = DIM,
    dim_v: int = DIM_V,
    heads: tuple[int, int] = (HEADS_Q, HEADS_KV),
    with_sinks: bool = False,
) -> Case:
    rng = np.random.default_rng(7)
    return Case(
        [normal(rng, (1, n, heads[0], dim), dtype) for n in lengths_q],
        [normal(rng, (1, n, heads[1], dim), dtype) for n in lengths_k],
        [normal(rng, (1, n, heads[1], dim_v), dtype) for n in lengths_k],
        normal(rng, (heads[0],), np.dtype(np.float32)) if with_sinks else None,
    )


def nan(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    made = aligned_empty(shape, dtype)
    made[...] = np.nan
    return made


def pack(parts: list[np.ndarray], behind: int) -> np.ndarray:
    """One behind the other, and rows of NaN that no sequence has."""
    total = sum(x.shape[1] for x in parts)
    made = nan((1, total + behind, *parts[0].shape[2:]), parts[0].dtype)
    made[:, :total] = np.concatenate(parts, 1)
    return made


def pad(parts: list[np.ndarray], before: Sequence[int], length: int) -> np.ndarray:
    """[batch, length, ...], with so many rows of NaN before each, and NaN behind."""
    made = nan((len(parts), length, *parts[0].shape[2:]), parts[0].dtype)
    for b, (x, skip) in enumerate(zip(parts, before, strict=True)):
        made[b, skip : skip + x.shape[1]] = x[0]
    return made


class Pages(NamedTuple):
    k: np.ndarray
    v: np.ndarray
    table: np.ndarray


def paginate(
    case: Case, size: int, before: Sequence[int], order: str = "nhd", seed: int = 3, spare: int = 2
) -> Pages:
    """Pages in random places among free ones of NaN. What is unused in the table is no page."""
    rng = np.random.default_rng(seed)
    lengths = [x.shape[1] + skip for x, skip in zip(case.k, before, strict=True)]
    needed = [-(-n // size) for n in lengths]
    count = sum(needed) + 3
    places = rng.permutation(count)
    table = int32(
        rng.choice([-1, count, INT_MAX, -INT_MAX - 1], (len(lengths), max(needed) + spare))
    )
    made = []
    for parts in (case.k, case.v):
        heads, dim = parts[0].shape[2:]
        if order == "nhd":
            pages = nan((count, size, heads, dim), parts[0].dtype)
        else:
            pages = nan((count, heads, size, dim), parts[0].dtype).swapaxes(1, 2)
        made.append(pages)
    used = 0
    for b, length in enumerate(lengths):
        table[b, : needed[b]] = places[used : used + needed[b]]
        used += needed[b]
        for row in range(before[b], length):
            page, slot = table[b, row // size], row % size
            made[0][page, slot] = case.k[b][0, row - before[b]]
            made[1][page, slot] = case.v[b][0, row - before[b]]
    return Pages(made[0], made[1], table)


class Result(NamedTuple):
    out: list[np.ndarray]  # of each sequence, as dense calls have it
    lse: list[np.ndarray]


def run(
    lib: ctypes.CDLL,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    rows: list[tuple[int, int, int]],
    tables: dict[str, Any],
    **options: Any,
) -> Result:
    """Results for the rows (batch, begin, length) of q. All others stay as they were."""
    out = aligned_empty((*q.shape[:3], v.shape[3]), q.dtype)
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), POISON, capi.sums_dtype(q.dtype))
    out[...] = POISON
    inputs = [q, k, v, *(x for x in tables.values() if isinstance(x, np.ndarray))]
    before = [x.copy() for x in inputs]
    capi.run_attention(capi.attention_params(q, k, v, out, lse, tables=tables, **options), lib)
    for x, was in zip(inputs, before, strict=True):
        assert x.tobytes() == was.tobytes()
    result = Result([], [])
    for b, begin, length in rows:
        result.out.append(out[b : b + 1, begin : begin + length].copy())
        result.lse.append(lse[b : b + 1, :, begin : begin + length].copy())
        out[b, begin : begin + length] = POISON
        lse[b, :, begin : begin + length] = POISON
    assert (out.astype(np.float64) == POISON).all()
    assert (lse == POISON).all()
    return result


def dense(lib: ctypes.CDLL, case: Case, **options: Any) -> Result:
    made = [
        capi.attention(q, k, v, sinks=case.sinks, lib=lib, **options)
        for q, k, v in zip(case.q, case.k, case.v, strict=True)
    ]
    return Result([x[0] for x in made], [x[1] for x in made])


def assert_same_bits(got: Result, want: Result) -> None:
    for b, (x, y) in enumerate(zip(got.out + got.lse, want.out + want.lse, strict=True)):
        assert x.shape == y.shape
        assert x.tobytes() == y.tobytes(), f"sequence {b % len(got.out)}"


def packed_rows(case: Case) -> list[tuple[int, int, int]]:
    lengths = [x.shape[1] for x in case.q]
    return [(0, int(a), n) for a, n in zip(starts(lengths), lengths, strict=False)]


def lengths_of(parts: list[np.ndarray]) -> np.ndarray:
    return int32([x.shape[1] for x in parts])


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "top_left": {"causal": "top_left"},
    "window": {"causal": "bottom_right", "window": (20, None)},
    "both_ends": {"window": (7, 3)},
    "softcap": {"softcap": 1.5, "causal": "bottom_right"},
    "scale": {"scale": 0.3},
}


def ways(case: Case, sinks: bool = True) -> dict[str, Any]:
    """Every way to say where the same sequences are: q, k, v, rows of q, tables."""
    lengths_q, lengths_k = lengths_of(case.q), lengths_of(case.k)
    batch = len(case.q)
    none = [0] * batch
    before = [(3 * b + 1) % 11 for b in range(batch)]
    ends = int32([n + skip for n, skip in zip(lengths_k, before, strict=True)])
    longest = int(max(ends)) + 2
    packed_q, rows = pack(case.q, 4), packed_rows(case)
    cu_q = starts(lengths_q)
    padded_q = pad(case.q, none, int(max(lengths_q)) + 3)
    padded_rows = [(b, 0, int(n)) for b, n in enumerate(lengths_q)]
    index = np.random.default_rng(1).permutation(batch + 2)[:batch]
    scattered = [nan((batch + 2, longest, *x[0].shape[2:]), x[0].dtype) for x in (case.k, case.v)]
    for b, at in enumerate(index):
        scattered[0][at, : lengths_k[b]] = case.k[b][0]
        scattered[1][at, : lengths_k[b]] = case.v[b][0]
    pages = paginate(case, 16, before)
    return {
        "packed": (packed_q, pack(case.k, 5), pack(case.v, 5), rows,
                   {"cu_seqlens_q": cu_q, "cu_seqlens_k": starts(lengths_k)}),
        "padded": (padded_q, pad(case.k, none, longest), pad(case.v, none, longest), padded_rows,
                   {"seqused_q": lengths_q, "seqused_k": lengths_k}),
        "left": (padded_q, pad(case.k, before, longest), pad(case.v, before, longest), padded_rows,
                 {"seqused_q": lengths_q, "seqused_k": ends, "k_begin": int32(before)}),
        "indexed": (packed_q, *scattered, rows,
                    {"cu_seqlens_q": cu_q, "seqused_k": lengths_k, "batch_index": int32(index)}),
        "paged": (packed_q, pages.k, pages.v, rows,
                  {"cu_seqlens_q": cu_q, "seqused_k": ends, "k_begin": int32(before),
                   "page_table": pages.table}),
    }  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_has_the_bits_of_dense_calls(
    isa_library: ctypes.CDLL, dtype: str, options: dict[str, Any]
) -> None:
    case = make_case(capi.DTYPES[dtype], with_sinks="softcap" in options)
    want = dense(isa_library, case, **options)
    for b, (q, k, v) in enumerate(zip(case.q, case.k, case.v, strict=True)):
        causal = options.get("causal", "none")
        rest = {name: x for name, x in options.items() if name != "causal"}
        assert_accurate(want.out[b], want.lse[b], q, k, v, causal, sinks=case.sinks, **rest)
    for q, k, v, rows, tables in ways(case).values():
        got = run(isa_library, q, k, v, rows, tables, sinks=case.sinks, **options)
        assert_same_bits(got, want)


@pytest.mark.parametrize("order", ["nhd", "hnd"])
@pytest.mark.parametrize("size", [1, 4, 5, 8, 16, 128, 600])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_of_any_size_in_any_place(
    isa_library: ctypes.CDLL, dtype: str, size: int, order: str
) -> None:
    case = make_case(capi.DTYPES[dtype])
    want = dense(isa_library, case, causal="bottom_right")
    for seed in range(2):
        before = [(5 * b + seed) % 9 for b in range(len(case.q))]
        pages = paginate(case, size, before, order, seed)
        tables = {
            "cu_seqlens_q": starts(lengths_of(case.q)),
            "seqused_k": lengths_of(case.k) + int32(before),
            "k_begin": int32(before),
            "page_table": pages.table,
        }
        got = run(isa_library, pack(case.q, 0), pages.k, pages.v, packed_rows(case), tables,
                  causal="bottom_right")  # fmt: skip
        assert_same_bits(got, want)


@pytest.mark.parametrize("dim", [8, 64, 128, 256])
@pytest.mark.parametrize("group", [1, 8, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decoding_from_pages(isa_library: ctypes.CDLL, dtype: str, group: int, dim: int) -> None:
    lengths = (700, 1, 0, 64, 257)
    case = make_case(capi.DTYPES[dtype], (1, 1, 1, 1, 1), lengths, dim, dim, (group, 1))
    want = dense(isa_library, case)
    pages = paginate(case, 16, [0] * 5)
    tables = {"seqused_k": int32(lengths), "page_table": pages.table}
    got = run(isa_library, np.concatenate(case.q), pages.k, pages.v, [(b, 0, 1) for b in range(5)],
              tables)  # fmt: skip
    assert_same_bits(got, want)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_in_keys(isa_library: ctypes.CDLL, dtype: str, heads: int) -> None:
    """With a cache that holds both at once, as in multi-head latent attention."""
    lengths = (300, 1, 0, 64)
    case = make_case(capi.DTYPES[dtype], (1, 2, 1, 1), lengths, 576, 512, (heads, 1))
    case = case._replace(v=[k[..., :512] for k in case.k])
    want = dense(isa_library, case, causal="bottom_right")
    pages = paginate(case, 16, [0] * 4)
    tables = {
        "cu_seqlens_q": starts(lengths_of(case.q)), "seqused_k": int32(lengths),
        "page_table": pages.table,
    }  # fmt: skip
    got = run(isa_library, pack(case.q, 0), pages.k, pages.k[..., :512], packed_rows(case), tables,
              causal="bottom_right")  # fmt: skip
    assert_same_bits(got, want)


def test_layout_bhsd(library: ctypes.CDLL) -> None:
    case = make_case(capi.DTYPES["fp32"])
    want = dense(library, case, causal="top_left")
    pages = paginate(case, 8, [0] * len(case.q))
    tables = {
        "cu_seqlens_q": starts(LENGTHS_Q), "seqused_k": int32(LENGTHS_K), "page_table": pages.table
    }  # fmt: skip
    q = pack(case.q, 2)
    out = aligned_empty((1, HEADS_Q, q.shape[1], DIM_V), q.dtype)
    lse = np.zeros((1, HEADS_Q, q.shape[1]), np.float32)
    capi.run_attention(
        capi.attention_params(
            *(x.swapaxes(1, 2) for x in (q, pages.k, pages.v)), out, lse, layout="bhsd",
            causal="top_left", tables=tables,
        ),
        library,
    )  # fmt: skip
    for b, (_, begin, length) in enumerate(packed_rows(case)):
        rows = slice(begin, begin + length)
        assert out[:, :, rows].swapaxes(1, 2).tobytes() == want.out[b].tobytes()
        assert lse[:, :, rows].tobytes() == want.lse[b].tobytes()


def test_fp64(library: ctypes.CDLL) -> None:
    case = make_case(np.dtype(np.float64), with_sinks=True)
    want = dense(library, case, causal="bottom_right", window=(40, None))
    for q, k, v, rows, tables in ways(case).values():
        got = run(library, q, k, v, rows, tables, sinks=case.sinks, causal="bottom_right",
                  window=(40, None))  # fmt: skip
        assert_same_bits(got, want)


def pairs_of(
    case: Case, tables: dict[str, Any], dtype: np.dtype, one: str
) -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """A bias and a mask of all sequences, which have rows of them behind, and those of each: keys
    count from the first row, before k_begin. The bias is NaN where no sequence has a pair."""
    rng = np.random.default_rng(11)
    skips = tables.get("k_begin", [0] * len(case.q))
    places = [
        (b, slice(x.shape[1]), slice(skip, skip + y.shape[1]))
        for b, (x, y, skip) in enumerate(zip(case.q, case.k, skips, strict=True))
    ]
    full = (len(case.q), case.q[0].shape[2],
            *(max(place[axis].stop for place in places) + 3 for axis in (1, 2)))  # fmt: skip
    shape = pairs.extents(full, one)
    given = {"attn_bias": pairs.random_bias(rng, shape, dtype),
             "attn_mask": pairs.random_mask(rng, shape, np.uint8)}  # fmt: skip
    wide = {name: np.broadcast_to(x, full) for name, x in given.items()}
    each = [{name: x[b : b + 1, :, rows, keys].copy() for name, x in wide.items()}
            for b, rows, keys in places]  # fmt: skip
    if one == "":
        given["attn_bias"][...] = np.nan
        for (b, rows, keys), own in zip(places, each, strict=True):
            given["attn_bias"][b, :, rows, keys] = own["attn_bias"][0]
    return given, each


@pytest.mark.parametrize("one", ["", "b", "bh", "q", "k", "bhqk"])
@pytest.mark.parametrize("dtype", [*DTYPES, "fp64"])
def test_biases_and_masks(isa_library: ctypes.CDLL, dtype: str, one: str) -> None:
    kind = capi.DTYPES.get(dtype, np.dtype(np.float64))
    case = make_case(kind, with_sinks=True)
    of_bias = kind if one in ("", "bh") else np.dtype(np.float32)
    bounds = {"max_seqlen_q": max(LENGTHS_Q), "max_seqlen_k": max(LENGTHS_K)}
    options = {"causal": "bottom_right", "window": (200, None), "softcap": 1.5}
    for q, k, v, rows, tables in ways(case).values():
        given, each = pairs_of(case, tables, of_bias, one)
        made = [
            capi.attention(*x, sinks=case.sinks, lib=isa_library, **options, **own)
            for *x, own in zip(case.q, case.k, case.v, each, strict=True)
        ]
        got = run(isa_library, q, k, v, rows, tables | bounds, sinks=case.sinks, **options, **given)
        assert_same_bits(got, Result([x[0] for x in made], [x[1] for x in made]))
    if dtype != "fp64":
        for b, own in enumerate(each):
            assert_accurate(*made[b], case.q[b], case.k[b], case.v[b], sinks=case.sinks, **options,
                            **own)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_lengths_have_the_bits_of_a_dense_batch_with_masks(
    library: ctypes.CDLL, dtype: str
) -> None:
    """With extents of the dense call's, for which there is no bound to be told."""
    case = make_case(capi.DTYPES[dtype], (70,) * 3, (90,) * 3)
    q, k, v = (np.concatenate(x) for x in (case.q, case.k, case.v))
    rng = np.random.default_rng(5)
    given = {"attn_bias": pairs.random_bias(rng, (3, HEADS_Q, 70, 90), np.dtype(np.float32)),
             "attn_mask": pairs.random_mask(rng, (3, 1, 70, 90))}  # fmt: skip
    want = capi.attention(q, k, v, lib=library, **given)
    for tables in ({}, {"seqused_q": int32([70] * 3), "seqused_k": int32([90] * 3)},
                   {"batch_index": int32([0, 1, 2])}):  # fmt: skip
        got = run(library, q, k, v, [(b, 0, 70) for b in range(3)], tables, **given)
        assert np.concatenate(got.out).tobytes() == want[0].tobytes()
        assert np.concatenate(got.lse).tobytes() == want[1].tobytes()


def test_keys_that_a_mask_does_not_have_are_cut_off(library: ctypes.CDLL) -> None:
    """As k_begin leaves some behind max_seqlen_k, by which the mask is bounded."""
    rng = np.random.default_rng(6)
    q, k, v = (normal(rng, (2, n, 2, 16), np.dtype(np.float32)) for n in (9, 50, 50))
    mask = between_guards(pairs.random_mask(rng, (2, 2, 9, 40)), True)
    begin = int32([7, 45])
    tables = {"k_begin": begin, "max_seqlen_k": 40}
    got = run(library, q, k, v, [(0, 0, 9), (1, 0, 9)], tables, causal="bottom_right",
              attn_mask=mask)  # fmt: skip
    want = capi.attention(q[:1], k[:1, 7:40], v[:1, 7:40], causal="bottom_right", lib=library,
                          attn_mask=mask[:1, ..., 7:])  # fmt: skip
    assert got.out[0].tobytes() == want[0].tobytes()
    assert got.lse[0].tobytes() == want[1].tobytes()
    assert (got.out[1] == 0).all() and np.isneginf(got.lse[1]).all()


@pytest.mark.parametrize("rows", [1, 90])
@pytest.mark.parametrize("dtype", [*DTYPES, "fp64"])
def test_masks_beside_pages_that_there_are_not(
    isa_library: ctypes.CDLL, dtype: str, rows: int
) -> None:
    size, length = 16, 16 * 40
    kind = capi.DTYPES.get(dtype, np.dtype(np.float64))
    case = make_case(kind, (rows,), (length,))
    pages = paginate(case, size, [0])
    absent = np.zeros(length, bool)
    absent[3 * size : 38 * size] = True
    pages.table[0, 3:38] = -1
    given, each = pairs_of(case, {}, np.dtype(np.float32), "")
    each[0]["attn_mask"][..., absent] = 0  # as the dense call has it
    tables = {"seqused_k": int32([length]), "page_table": pages.table[:, :40]}
    rest = (case.q[0], pages.k, pages.v, [(0, 0, rows)], tables)
    got = run(isa_library, *rest, **given)
    want = capi.attention(case.q[0], case.k[0], case.v[0], lib=isa_library, **each[0])
    allowed = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-2, "fp64": 1e-12}[dtype]
    for x, y in zip((got.out[0], got.lse[0]), want, strict=True):
        np.testing.assert_allclose(x.astype(np.float64), y.astype(np.float64), atol=allowed)
    # What the mask leaves is in no page.
    given["attn_mask"][..., :length] = absent
    got = run(isa_library, *rest, **given)
    assert (got.out[0].astype(np.float32) == 0).all()
    assert np.isneginf(got.lse[0]).all()


OFFSETS = (4, 0, -INT_MAX - 1, -10, -1, 30, 600)


STANDING: tuple[dict[str, Any], ...] = (
    {"causal": "bottom_right"}, {"causal": "top_left"}, {"window": (20, None)}, {"window": (7, 3)},
    {"causal": "top_left", "window": (0, None)}, {},
)  # fmt: skip


@pytest.mark.parametrize("options", STANDING, ids=str)
@pytest.mark.parametrize("dtype", [*DTYPES, "fp64"])
def test_queries_stand_where_they_are_said_to(
    isa_library: ctypes.CDLL, dtype: str, options: dict[str, Any]
) -> None:
    """Beside masks that hide the same."""
    case = make_case(capi.DTYPES.get(dtype, np.dtype(np.float64)), with_sinks=True)
    made: Any = None
    for q, k, v, rows, tables in ways(case).values():
        tables = tables | {"q_offset": int32(OFFSETS)}
        got = run(isa_library, q, k, v, rows, tables, sinks=case.sinks, **options)
        if made is not None:
            assert_same_bits(got, made)
        made = got
    for b, offset in enumerate(OFFSETS):
        n, m = case.q[b].shape[1], case.k[b].shape[1]
        seen = visible(n, m, **options, offset=offset)
        want = capi.attention(case.q[b], case.k[b], case.v[b], sinks=case.sinks, lib=isa_library,
                              attn_mask=seen[None, None])  # fmt: skip
        allowed = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-2, "fp64": 1e-12}[dtype]
        for x, y in zip((made.out[b], made.lse[b]), want, strict=True):
            np.testing.assert_allclose(x.astype(np.float64), y.astype(np.float64), atol=allowed)


@pytest.mark.parametrize("causal", ["bottom_right", "top_left"])
def test_offsets_of_either_alignment_have_its_bits(library: ctypes.CDLL, causal: str) -> None:
    """Whatever the call's own is; and a caller from before the field was there has none."""
    case = make_case(capi.DTYPES["bf16"])
    want = dense(library, case, causal=causal)
    offsets = lengths_of(case.k) - lengths_of(case.q)
    other = {"bottom_right": "top_left", "top_left": "bottom_right"}[causal]
    for q, k, v, rows, tables in ways(case).values():
        given = tables | {"q_offset": offsets if causal == "bottom_right" else 0 * offsets}
        for alignment in (causal, other):
            assert_same_bits(run(library, q, k, v, rows, given, causal=alignment), want)
        older = tables | {"struct_size": capi.AttentionSequences.q_offset.offset}
        assert_same_bits(run(library, q, k, v, rows, older, causal=causal), want)


def test_keys_of_several_ranks(library: ctypes.CDLL) -> None:
    """Context parallelism: queries and keys in chunks, each pair a call, whose results merge."""
    rng = np.random.default_rng(8)
    q, k, v = (normal(rng, (1, 64, 2, 16), np.dtype(np.float32)) for _ in range(3))
    want, want_lse = capi.attention(q, k, v, causal="bottom_right", lib=library)
    for first_q in (0, 24, 48):
        rows = slice(first_q, first_q + 16)
        parts = []
        for first_k in range(0, 64, 16):
            keys = slice(first_k, first_k + 16)
            tables = {"q_offset": int32([first_q - first_k])}
            parts.append(run(library, q[:, rows], k[:, keys], v[:, keys], [(0, 0, 16)], tables,
                             causal="bottom_right"))  # fmt: skip
        lse = np.logaddexp.reduce([x.lse[0] for x in parts])
        out = sum(np.exp(x.lse[0] - lse).swapaxes(1, 2)[..., None] * x.out[0] for x in parts)
        np.testing.assert_allclose(out, want[:, rows], atol=1e-5)
        np.testing.assert_allclose(lse, want_lse[..., rows], atol=1e-5)


PAIRS_REFUSED: dict[str, tuple[dict[str, Any], tuple[int, ...], str]] = {
    "batch": ({"seqused_k": int32([1] * 3)}, (2, 1, 1, 1),
              "its batch is 2, accepted are the sequences' 3, and 1 for all"),
    "heads": ({"seqused_k": int32([1] * 3)}, (1, 3, 1, 1),
              "its number of heads is 3, accepted are q's 2, and 1 for all"),
    "queries": ({"seqused_q": int32([1] * 3)}, (1, 1, 3, 5),
                "its number of queries is 3, accepted are q's or max_seqlen_q's 4 and more, and 1"),
    "keys": ({"max_seqlen_k": 4}, (1, 1, 4, 3),
             "its number of keys is 3, accepted are k's or max_seqlen_k's 4 and more, and 1"),
    "pages": ({"page_table": int32([[0, 1]] * 3)}, (1, 1, 4, 9),
              "its number of keys is 9, accepted are k's or max_seqlen_k's 10 and more, and 1"),
}  # fmt: skip


@pytest.mark.parametrize(("tables", "shape", "sentence"), PAIRS_REFUSED.values(), ids=PAIRS_REFUSED)
@pytest.mark.parametrize("name", ["attn_bias", "attn_mask"])
def test_pairs_that_are_too_few_are_refused(
    library: ctypes.CDLL, tables: dict[str, Any], shape: tuple[int, ...], sentence: str, name: str
) -> None:
    q, out = (np.zeros((3, 4, 2, 16), np.float32) for _ in range(2))
    k = np.zeros((3, 5, 2, 16), np.float32)
    numbers = np.zeros(shape, np.float32 if name == "attn_bias" else np.bool_)
    params = capi.attention_params(q, k, k, out, tables=tables, **{name: numbers})
    with pytest.raises(capi.FlashmoeError) as raised:
        capi.attention_plan(params, library)
    assert f": {name}: {sentence}" in str(raised.value)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_bits_are_those_of_any_number_of_threads_and_loose_bounds(
    library: ctypes.CDLL, threads: int
) -> None:
    lengths_q = (300, 1, 1, 2, 1, 64) + (1,) * 20
    lengths_k = (900, 4000, 1, 7, 0, 64) + (33,) * 20
    case = make_case(capi.DTYPES["bf16"], lengths_q, lengths_k)
    want = dense(library, case, causal="bottom_right")
    before = library.flashmoe_get_num_threads()
    assert library.flashmoe_set_num_threads(threads) == capi.OK
    try:
        for bounds in ({}, {"max_seqlen_q": 300, "max_seqlen_k": 4000},
                       {"max_seqlen_q": 10**9, "max_seqlen_k": 10**15},
                       {"split_size": 32}):  # fmt: skip
            for q, k, v, rows, tables in ways(case).values():
                got = run(library, q, k, v, rows, tables | bounds, causal="bottom_right")
                assert_same_bits(got, want)
    finally:
        library.flashmoe_set_num_threads(before)


def test_bounds_that_are_too_small_cut_at_the_end(library: ctypes.CDLL) -> None:
    case = make_case(capi.DTYPES["fp32"])
    cut = Case([x[:, :30] for x in case.q], [x[:, :40] for x in case.k],
               [x[:, :40] for x in case.v], None)  # fmt: skip
    want = dense(library, cut, causal="bottom_right")
    for q, k, v, rows, tables in ways(case).values():
        rows = [(b, begin, min(length, 30)) for b, begin, length in rows]
        got = run(library, q, k, v, rows, tables | {"max_seqlen_q": 30, "max_seqlen_k": 40},
                  causal="bottom_right")  # fmt: skip
        assert_same_bits(got, want)


def test_sequences_share_pages(library: ctypes.CDLL) -> None:
    case = make_case(capi.DTYPES["fp16"], (2, 3, 1), (40, 56, 33))
    prefix = 32  # two pages that all three begin with
    for parts in (case.k, case.v):
        for x in parts[1:]:
            x[:, :prefix] = parts[0][:, :prefix]
    want = dense(library, case, causal="bottom_right")
    pages = paginate(case, 16, [0, 0, 0])
    for x in (pages.k, pages.v):
        x[pages.table[1:, :2]] = np.nan
    pages.table[1:, :2] = pages.table[0, :2]
    tables = {"cu_seqlens_q": starts((2, 3, 1)), "seqused_k": int32((40, 56, 33)),
              "page_table": pages.table}  # fmt: skip
    got = run(library, pack(case.q, 0), pages.k, pages.v, packed_rows(case), tables,
              causal="bottom_right")  # fmt: skip
    assert_same_bits(got, want)


def test_tables_of_any_strides(library: ctypes.CDLL) -> None:
    case = make_case(capi.DTYPES["fp32"])
    want = dense(library, case)

    def spread(x: np.ndarray) -> np.ndarray:
        made = np.full((*(2 * n for n in x.shape),), -5, np.int32)
        made[tuple(slice(None, None, 2) for _ in x.shape)] = x[::-1]
        return made[tuple(slice(None, None, 2) for _ in x.shape)][::-1]

    for q, k, v, rows, tables in ways(case).values():
        strided = {name: spread(x) for name, x in tables.items()}
        assert all(x.strides[0] < 0 for x in strided.values())
        assert_same_bits(run(library, q, k, v, rows, strided), want)


@pytest.mark.parametrize("rows", [1, 2, 90])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [*DTYPES, "fp64"])
def test_pages_that_there_are_not_are_hidden(
    isa_library: ctypes.CDLL, dtype: str, softcap: float | None, rows: int
) -> None:
    """As calls in which the window leaves out what is hidden before, or all that is there."""
    size, length = 16, 16 * 40
    case = make_case(
        np.dtype(np.float64) if dtype == "fp64" else capi.DTYPES[dtype], (rows,), (length,)
    )
    pages = paginate(case, size, [0])
    for table in (pages.k, pages.v):
        table[pages.table[0, 3:38]] = np.nan
    pages.table[0, 3:38] = [-1, 10**6, pages.k.shape[0], -INT_MAX - 1, INT_MAX] * 7
    kept = np.r_[0 : 3 * size, 38 * size : length]
    few = Case(case.q, [case.k[0][:, kept]], [case.v[0][:, kept]], None)
    tables = {"seqused_k": int32([length]), "page_table": pages.table}
    got = run(isa_library, case.q[0], pages.k, pages.v, [(0, 0, rows)], tables, softcap=softcap)
    want = dense(isa_library, few, softcap=softcap)
    allowed = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-2, "fp64": 1e-12}[dtype]
    for x, y in zip(got.out + got.lse, want.out + want.lse, strict=True):
        np.testing.assert_allclose(x.astype(np.float64), y.astype(np.float64), atol=allowed)
    # A window over hidden pages alone sees nothing.
    pages.table[0, 3:] = -1
    got = run(isa_library, case.q[0], pages.k, pages.v, [(0, 0, rows)], tables, softcap=softcap,
              window=(100, None))  # fmt: skip
    assert (got.out[0].astype(np.float32) == 0).all()
    assert np.isneginf(got.lse[0]).all()


HOSTILE = (-INT_MAX - 1, -1, 0, 1, 7, 12, 13, 100, INT_MAX - 1, INT_MAX)


@pytest.mark.parametrize("seed", range(40))
def test_hostile_numbers_stay_inside_the_tensors(library: ctypes.CDLL, seed: int) -> None:
    """Tensors next to pages that may not be touched, and numbers from anywhere."""
    rng = np.random.default_rng(seed)
    batch, at_end = 6, bool(seed % 2)

    def numbers(*shape: int) -> np.ndarray:
        return between_guards(int32(rng.choice(HOSTILE, shape)), at_end)

    def tensor(*shape: int) -> np.ndarray:
        return between_guards(normal(rng, shape, np.dtype(np.float32)), at_end)

    paged, packed_q, packed_k = seed % 3 == 0, seed % 4 < 2, seed % 3 == 1
    q = tensor(1 if packed_q else batch, 12, 4, 16)
    tables: dict[str, Any] = {}
    if packed_q:
        tables["cu_seqlens_q"] = numbers(batch + 1)
    if packed_k:
        tables["cu_seqlens_k"] = numbers(batch + 1)
        k, v = tensor(1, 13, 2, 16), tensor(1, 13, 2, 8)
    elif paged:
        tables["page_table"] = numbers(batch, 5)
        k, v = tensor(7, 3, 2, 16), tensor(7, 3, 2, 8)
    else:
        tables["batch_index"] = numbers(batch)
        k, v = tensor(7, 13, 2, 16), tensor(7, 13, 2, 8)
    for name in ("seqused_q", "seqused_k", "k_begin", "q_offset"):
        if rng.random() < 0.6:
            tables[name] = numbers(batch)
    out = between_guards(np.full((*q.shape[:3], 8), POISON, np.float32), at_end)
    lse = between_guards(np.full((q.shape[0], 4, 12), POISON, np.float32), at_end)
    rows, keys, bounds = 12, 15 if paged else 13, {}
    if seed % 5 == 0:
        rows, keys = 7, 8
        bounds = {"max_seqlen_q": rows, "max_seqlen_k": keys}
    given = {
        "attn_bias": tensor(batch, 4, rows, keys),
        "attn_mask": between_guards(pairs.random_mask(rng, (batch, 1, rows, keys)), at_end),
    }  # fmt: skip
    if seed % 2:
        given.pop(("attn_bias", "attn_mask")[seed // 2 % 2])
    params = capi.attention_params(
        q, k, v, out, lse, causal="bottom_right", tables=tables | bounds, **given
    )
    capi.run_attention(params, library)
    written = out != POISON
    assert np.isfinite(out).all()
    assert (written.all((2, 3)) == written.any((2, 3))).all()

    def read(name: str, b: int, missing: int) -> int:
        return int(tables[name][b]) if name in tables else missing

    for b in range(batch):  # rows that no sequence has are untouched
        begin, end = (0, 12) if not packed_q else np.clip(tables["cu_seqlens_q"][b : b + 2], 0, 12)
        count = int(np.clip(read("seqused_q", b, 12), 0, max(end - begin, 0)))
        count = min(count, rows)
        row = 0 if packed_q else b
        assert written[row, begin : begin + count].all()
        written[row, begin : begin + count] = packed_q  # may be another's, too
        if not packed_q:
            assert not written[row].any()


def test_plans_tell_no_lengths(library: ctypes.CDLL) -> None:
    case = make_case(capi.DTYPES["fp32"])
    q, k, v, _, tables = ways(case)["packed"]
    out = nan((*q.shape[:3], DIM_V), q.dtype)
    plan = capi.attention_plan(capi.attention_params(q, k, v, out, tables=tables), library)
    assert plan.flops == 0
    assert plan.launches[0].grid[0] == len(case.q) * HEADS_KV
    sizes = [x.nbytes for x in (q, k, v, out, *tables.values())]
    assert plan.bytes == sum(sizes)
    capi.run_attention(capi.attention_params(q, k, v, out, tables=tables), library)
    assert capi.is_planned(plan, capi.last_launches(library))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "cu_k_and_pages": ({"cu_seqlens_k": int32([0] * 4), "page_table": int32([[0]] * 3)},
                       "cu_seqlens_k: got one, accepted with page_table is none"),
    "index_and_pages": ({"batch_index": int32([0] * 3), "page_table": int32([[0]] * 3)},
                        "batch_index: got one, accepted with page_table is none"),
    "index_and_cu_k": ({"batch_index": int32([0] * 3), "cu_seqlens_k": int32([0] * 4)},
                       "batch_index: got one, accepted with cu_seqlens_k is none"),
    "cu_q": ({"cu_seqlens_q": int32([0] * 4)}, "q: its batch is 3, accepted with cu_seqlens_q"),
    "cu_k": ({"cu_seqlens_k": int32([0] * 4)}, "k: its batch is 3, accepted with cu_seqlens_k"),
    "count": ({"seqused_k": int32([1] * 4)}, "seqused_k: got 4 numbers, accepted are 3"),
    "cu_count": ({"cu_seqlens_k": int32([0] * 3)}, "cu_seqlens_k: got 3 numbers, accepted are 4"),
    "pages": ({"page_table": int32([[0]] * 2)}, "page_table: got 2 numbers, accepted are 3"),
    "rank": ({"page_table": int32([0] * 3)}, "page_table: got 1 dimensions, accepted are 2"),
    "dtype": ({"k_begin": np.array([0] * 3)}, "k_begin: got dtype int64"),
    "float": ({"seqused_q": np.ones(3, np.float32)}, "seqused_q: got dtype fp32"),
    "offsets": ({"q_offset": int32([1] * 2)}, "q_offset: got 2 numbers, accepted are 3"),
    "bound_q": ({"max_seqlen_q": -1}, "max_seqlen_q: got -1, accepted is 0"),
    "bound_k": ({"max_seqlen_k": -(2**63)}, "max_seqlen_k: got -9223372036854775808"),
    "split_size": ({"split_size": -1}, "split_size: got -1, accepted is 0 (as suits all lengths)"),
    "size": ({"struct_size": 8}, "flashmoe_attention_sequences.struct_size: got 8"),
}  # fmt: skip


@pytest.mark.parametrize(("tables", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_makes_no_sense_is_refused(
    library: ctypes.CDLL, tables: dict[str, Any], sentence: str
) -> None:
    q, out = (np.zeros((3, 4, 2, 16), np.float32) for _ in range(2))
    k = np.zeros((3, 5, 2, 16), np.float32)
    params = capi.attention_params(q, k, k, out, tables=tables)
    with pytest.raises(capi.FlashmoeError) as raised:
        capi.attention_plan(params, library)
    assert str(raised.value).startswith(sentence) or sentence in str(raised.value)
    with pytest.raises(capi.FlashmoeError):
        capi.run_attention(params, library, np.empty(1 << 20, np.uint8))


@pytest.mark.parametrize("name", capi.SEQUENCE_TENSORS)
def test_outputs_lie_apart_from_the_tables(library: ctypes.CDLL, name: str) -> None:
    q = np.zeros((1, 4, 2, 16), np.float32)
    memory = aligned_empty((1, 4, 2, 16), np.dtype(np.float32))
    inside = memory.view(np.int32).reshape(-1)[:2]
    memory[...] = 0
    tables = {name: inside.reshape(1, 2) if name == "page_table" else inside[: 1 + ("cu" in name)]}
    with pytest.raises(capi.FlashmoeError, match=f"{name}|out"):
        capi.run_attention(capi.attention_params(q, q, q, memory, tables=tables), library)
    assert (memory == 0).all()
