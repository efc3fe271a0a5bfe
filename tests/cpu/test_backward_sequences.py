"""Gradients of ragged and padded batches: each sequence has those of its dense call, bit by bit,
and what no sequence has gets zeros."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import capi
import numpy as np
import pairs
import pytest
import sequence_ways
from capi import Gradients, aligned_empty, normal
from guarded import between_guards
from reference_backward import assert_gradients_accurate
from sequence_ways import Way

DTYPES = ("fp32", "fp16", "bf16")
INT_MAX = 2**31 - 1
POISON = -77.0

LENGTHS_Q = (5, 0, 1, 40, 3, 230, 1, 200)
LENGTHS_K = (9, 300, 0, 33, 1, 70, 515, 400)
DIM, DIM_V = 40, 24


def int32(values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def starts(lengths: Sequence[int]) -> np.ndarray:
    return int32(np.concatenate([[0], np.cumsum(lengths)]))


class Sequences:
    """For each sequence q, k, v, dout and dlse, and out and lse from the dense forward."""

    def __init__(
        self,
        lib: ctypes.CDLL,
        dtype: np.dtype,
        lengths: tuple[Sequence[int], Sequence[int]] = (LENGTHS_Q, LENGTHS_K),
        heads: tuple[int, int] = (6, 2),
        sinks: bool = False,
        masked: bool = False,
        **options: Any,
    ) -> None:
        rng = np.random.default_rng(7)

        def random(lengths: Sequence[int], heads: int, dim: int) -> list[np.ndarray]:
            return [normal(rng, (1, n, heads, dim), dtype) for n in lengths]

        self.lib, self.options = lib, options
        self.lengths_q, self.lengths_k = lengths
        self.q = random(self.lengths_q, heads[0], DIM)
        self.k = random(self.lengths_k, heads[1], DIM)
        self.v = random(self.lengths_k, heads[1], DIM_V)
        self.dout = random(self.lengths_q, heads[0], DIM_V)
        self.sinks = normal(rng, (heads[0],), np.dtype(np.float32)) if sinks else None
        self.pairs: list[dict[str, np.ndarray]] = [{} for _ in self.q]
        if masked:
            self.pairs = [
                {"attn_bias": pairs.random_bias(rng, (1, heads[0], n, m), np.dtype(np.float32)),
                 "attn_mask": pairs.random_mask(rng, (1, 1, n, m))}
                for n, m in zip(self.lengths_q, self.lengths_k, strict=True)
            ]  # fmt: skip
        made = [
            capi.attention(q, k, v, sinks=self.sinks, lib=lib, **options, **own)
            for q, k, v, own in zip(self.q, self.k, self.v, self.pairs, strict=True)
        ]
        self.out = [out for out, _ in made]
        self.lse = [lse for _, lse in made]
        self.dlse = [normal(rng, x.shape, x.dtype) for x in self.lse]

    def dense(self, **how: Any) -> list[Gradients]:
        each = zip(self.dout, self.q, self.k, self.v, self.out, self.lse, self.dlse, self.pairs,
                   strict=True)  # fmt: skip
        return [
            capi.attention_backward(
                *x, sinks=self.sinks, lib=self.lib, **self.options, **own, **how
            )
            for *x, own in each
        ]


def filled(shape: tuple[int, ...], dtype: np.dtype, value: float) -> np.ndarray:
    made = aligned_empty(shape, dtype)
    made[...] = value
    return made


class Rows(sequence_ways.Rows):
    def lay(self, parts: list[np.ndarray], axis: int = 1) -> np.ndarray:
        """Among NaN; the rows of parts [1, ...] are their `axis`."""
        shape = list(parts[0].shape)
        shape[0], shape[axis] = self.batch, self.length
        made = filled(tuple(shape), parts[0].dtype, np.nan)
        for (b, begin), part in zip(self.places, parts, strict=True):
            at = [slice(b, b + 1)] + [slice(None)] * (part.ndim - 1)
            at[axis] = slice(begin, begin + part.shape[axis])
            made[tuple(at)] = part
        return made


def ways(given: Sequences) -> dict[str, Way]:
    return sequence_ways.ways(given.lengths_q, given.lengths_k, 4, Rows, int32)


def tensors_of(given: Sequences, way: Way) -> dict[str, np.ndarray]:
    lay_q, lay_k = way.queries.lay, way.keys.lay
    tensors = {
        "dout": lay_q(given.dout), "q": lay_q(given.q), "k": lay_k(given.k), "v": lay_k(given.v),
        "out": lay_q(given.out), "lse": lay_q(given.lse, 2), "dlse": lay_q(given.dlse, 2),
    }  # fmt: skip
    if given.sinks is not None:
        tensors["sinks"] = given.sinks
    return tensors | pairs_of(given, way)


def pairs_of(given: Sequences, way: Way) -> dict[str, np.ndarray]:
    """Each sequence's pairs in the corner of its rows and keys, before k_begin, among NaN and
    ones."""
    skips = way.tables.get("k_begin", [0] * len(given.q))
    shape = (max(given.lengths_q), max(n + i for n, i in zip(given.lengths_k, skips, strict=True)))
    made = {}
    for name in given.pairs[0]:
        parts = [x[name] for x in given.pairs]
        value = np.nan if name == "attn_bias" else 1
        made[name] = np.full((len(parts), parts[0].shape[1], *shape), value, parts[0].dtype)
        for b, (part, skip) in enumerate(zip(parts, skips, strict=True)):
            made[name][b, :, : part.shape[2], skip : skip + part.shape[3]] = part[0]
    return made


def run(
    given: Sequences, way: Way, before: float = POISON, dtype: Any = None, **how: Any
) -> dict[str, np.ndarray]:
    """The gradients, each of which holds `before` beforehand. Nothing else is changed."""
    tensors = tensors_of(given, way)
    gradients = {
        f"d{name}": filled(tensors[name].shape, dtype or tensors[name].dtype, before)
        for name in ("q", "k", "v", "sinks") if name in tensors
    }  # fmt: skip
    untouched = {name: x.copy() for name, x in (tensors | way.tables).items()
                 if isinstance(x, np.ndarray)}  # fmt: skip
    params = capi.attention_backward_params(
        tensors | gradients, tables=way.tables, **given.options, **how
    )
    capi.run_attention_backward(params, given.lib)
    for name, x in untouched.items():
        assert (tensors | way.tables)[name].tobytes() == x.tobytes()
    return gradients


def assert_same_bits(
    got: dict[str, np.ndarray], want: list[Gradients], given: Sequences, way: Way, rest: float = 0
) -> None:
    """And `rest` in every row that no sequence has."""
    for name, rows, lengths in (
        ("dq", way.queries, given.lengths_q),
        ("dk", way.keys, given.lengths_k),
        ("dv", way.keys, given.lengths_k),
    ):
        made = got[name]
        for b, part in enumerate(rows.take(made, lengths)):
            assert part.tobytes() == getattr(want[b], name).tobytes(), f"{name} of sequence {b}"
            part[...] = rest
        assert (made.astype(np.float64) == rest).all(), name


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "top_left": {"causal": "top_left"},
    "window": {"causal": "bottom_right", "window": (20, None)},
    "both_ends": {"window": (7, 3)},
    "softcap": {"softcap": 1.5, "causal": "bottom_right", "scale": 0.3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_has_the_bits_of_dense_calls(
    isa_library: ctypes.CDLL, dtype: str, options: dict[str, Any]
) -> None:
    given = Sequences(isa_library, capi.DTYPES[dtype], **options)
    want = given.dense()
    for b, gradients in enumerate(want):
        assert_gradients_accurate(
            gradients[:3], given.dout[b], given.q[b], given.k[b], given.v[b], given.dlse[b],
            **options,
        )  # fmt: skip
    for way in ways(given).values():
        assert_same_bits(run(given, way), want, given, way)


@pytest.mark.parametrize("causal", ["none", "bottom_right"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_kv_head_has_the_bits_of_dense_calls(
    isa_library: ctypes.CDLL, dtype: str, causal: str
) -> None:
    """The rows of a sequence are cut into parts as its own length says."""
    lengths = (130, 0, 5, 200, 70), (250, 40, 60, 400, 0)
    given = Sequences(isa_library, capi.DTYPES[dtype], lengths, heads=(8, 1), causal=causal)
    want = given.dense()
    try:
        for threads in (1, 2, 16):
            isa_library.flashmoe_set_num_threads(threads)
            for way in ways(given).values():
                assert_same_bits(run(given, way), want, given, way)
    finally:
        isa_library.flashmoe_set_num_threads(0)


def test_fp64(library: ctypes.CDLL) -> None:
    given = Sequences(library, np.dtype(np.float64), causal="bottom_right", window=(60, None))
    want = given.dense()
    for way in ways(given).values():
        assert_same_bits(run(given, way), want, given, way)


@pytest.mark.parametrize("dtype", [*DTYPES, "fp64"])
def test_sinks(isa_library: ctypes.CDLL, dtype: str) -> None:
    kind = capi.DTYPES.get(dtype, np.dtype(np.float64))
    given = Sequences(isa_library, kind, sinks=True, causal="bottom_right")
    parts = [x.dsinks.astype(np.float64) for x in given.dense()]
    made = [run(given, way)["dsinks"] for way in ways(given).values()]
    np.testing.assert_allclose(made[0], sum(parts), rtol=1e-5, atol=1e-4)
    for x in made[1:]:
        assert x.tobytes() == made[0].tobytes()


@pytest.mark.parametrize("dtype", [*DTYPES, "fp64"])
def test_biases_and_masks(isa_library: ctypes.CDLL, dtype: str) -> None:
    kind = capi.DTYPES.get(dtype, np.dtype(np.float64))
    given = Sequences(
        isa_library, kind, sinks=True, masked=True, causal="bottom_right", softcap=1.5
    )
    want = given.dense()
    if dtype == "fp32":  # beside sinks, short rows of 16 bits have little but the rounding of out
        for b, gradients in enumerate(want):
            assert_gradients_accurate(
                gradients, given.dout[b], given.q[b], given.k[b], given.v[b], given.dlse[b],
                sinks=given.sinks, **given.options, **given.pairs[b],
            )  # fmt: skip
    bounds = {"max_seqlen_q": max(LENGTHS_Q), "max_seqlen_k": max(LENGTHS_K)}
    sinks = []
    for way in ways(given).values():
        bounded = way._replace(tables=way.tables | bounds)
        got = run(given, bounded)
        assert_same_bits(got, want, given, bounded)
        sinks.append(got["dsinks"])
    np.testing.assert_allclose(
        sinks[0], sum(x.dsinks.astype(np.float64) for x in want), rtol=1e-5, atol=1e-4
    )
    for x in sinks[1:]:
        assert x.tobytes() == sinks[0].tobytes()


@pytest.mark.parametrize("dtype", [*DTYPES, "fp64"])
def test_offsets_of_an_alignment_have_its_bits(library: ctypes.CDLL, dtype: str) -> None:
    kind = capi.DTYPES.get(dtype, np.dtype(np.float64))
    given = Sequences(library, kind, sinks=True, causal="top_left", window=(30, None))
    want = given.dense()
    given.options["causal"] = "bottom_right"
    for way in ways(given).values():
        offset = way._replace(tables=way.tables | {"q_offset": int32([0] * len(given.q))})
        assert_same_bits(run(given, offset), want, given, way)


def test_queries_stand_where_they_are_said_to(isa_library: ctypes.CDLL) -> None:
    offsets = (4, 0, -INT_MAX - 1, -10, -1, 30, 600, 90)
    given = Sequences(isa_library, np.dtype(np.float32))
    hides = [
        np.arange(k.shape[1]) > np.arange(q.shape[1])[:, None] + offset
        for q, k, offset in zip(given.q, given.k, offsets, strict=True)
    ]
    given.pairs = [{"attn_mask": ~x[None, None]} for x in hides]
    for b, (q, k, v) in enumerate(zip(given.q, given.k, given.v, strict=True)):
        given.out[b], given.lse[b] = capi.attention(q, k, v, lib=isa_library, **given.pairs[b])
    want = given.dense()
    given.pairs = [{} for _ in given.q]
    given.options["causal"] = "bottom_right"
    for way in ways(given).values():
        made = run(given, way._replace(tables=way.tables | {"q_offset": int32(offsets)}))
        for name, rows, lengths in (("dq", way.queries, given.lengths_q),
                                    ("dk", way.keys, given.lengths_k),
                                    ("dv", way.keys, given.lengths_k)):  # fmt: skip
            for b, part in enumerate(rows.take(made[name], lengths)):
                np.testing.assert_allclose(part, getattr(want[b], name), atol=2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_lengths_have_the_bits_of_a_dense_batch(library: ctypes.CDLL, dtype: str) -> None:
    given = Sequences(
        library, capi.DTYPES[dtype], ((210,) * 3, (250,) * 3), sinks=True, causal="top_left"
    )
    whole = [np.concatenate(x) for x in (given.dout, given.q, given.k, given.v, given.out,
                                         given.lse, given.dlse)]  # fmt: skip
    want = capi.attention_backward(*whole, sinks=given.sinks, lib=library, causal="top_left")
    for way in ways(given).values():
        got = run(given, way)
        assert got["dsinks"].tobytes() == want.dsinks.tobytes()
        each = [Gradients(*(x[b : b + 1] for x in want[:3])) for b in range(3)]
        assert_same_bits(got, each, given, way)


@pytest.mark.parametrize("wanted", [("dq",), ("dk",), ("dv",), ("dsinks",), ("dq", "dv")])
def test_each_gradient_alone(library: ctypes.CDLL, wanted: tuple[str, ...]) -> None:
    given = Sequences(library, capi.DTYPES["bf16"], sinks=True, causal="bottom_right")
    for way in ways(given).values():
        want = run(given, way)
        tensors = tensors_of(given, way)
        made = {name: filled(want[name].shape, want[name].dtype, POISON) for name in wanted}
        params = capi.attention_backward_params(
            tensors | made, tables=way.tables, causal="bottom_right"
        )
        capi.run_attention_backward(params, library)
        for name, x in made.items():
            assert x.tobytes() == want[name].tobytes()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gradients_are_accumulated_where_a_sequence_is(library: ctypes.CDLL, dtype: str) -> None:
    fp32 = np.dtype(np.float32)
    given = Sequences(library, capi.DTYPES[dtype], sinks=True, causal="bottom_right")
    for way in ways(given).values():
        clean = run(given, way, dtype=fp32)
        added = run(given, way, 3.0, dtype=fp32, accumulate=True)
        for name in ("dq", "dk", "dv", "dsinks"):
            assert added[name].tobytes() == (clean[name] + np.float32(3)).tobytes()
        # Not so much as read: a NaN would have stayed one, and so would a zero's sign.
        signs = run(given, way, -0.0, dtype=fp32, accumulate=True)
        spare = np.ones(signs["dk"].shape[:2], bool)
        for (b, i), n in zip(way.keys.places, given.lengths_k, strict=True):
            spare[b, i : i + n] = False
        assert np.signbit(signs["dk"][spare]).all()


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_bits_are_those_of_any_number_of_threads_and_loose_bounds(
    library: ctypes.CDLL, threads: int
) -> None:
    lengths = (300, 1, 1, 2, 1, 64, 500) + (9,) * 20, (900, 1400, 1, 7, 0, 64, 500) + (33,) * 20
    given = Sequences(library, capi.DTYPES["bf16"], lengths, causal="bottom_right")
    want = given.dense()
    before = library.flashmoe_get_num_threads()
    assert library.flashmoe_set_num_threads(threads) == capi.OK
    try:
        for bounds in ({}, {"max_seqlen_q": 500, "max_seqlen_k": 1400},
                       {"max_seqlen_q": 10**9, "max_seqlen_k": 10**15}):  # fmt: skip
            for way in ways(given).values():
                bounded = way._replace(tables=way.tables | bounds)
                assert_same_bits(run(given, bounded), want, given, way)
    finally:
        library.flashmoe_set_num_threads(before)


def test_bounds_that_are_too_small_cut_at_the_end(library: ctypes.CDLL) -> None:
    options = {"causal": "bottom_right"}
    given = Sequences(library, capi.DTYPES["fp32"], **options)
    cut = Sequences(library, capi.DTYPES["fp32"], ((1,), (1,)), **options)
    cut.pairs = given.pairs
    cut.lengths_q = [min(n, 30) for n in given.lengths_q]
    cut.lengths_k = [min(n, 250) for n in given.lengths_k]
    cut.q, cut.dout = ([x[:, :30] for x in parts] for parts in (given.q, given.dout))
    cut.k, cut.v = ([x[:, :250] for x in parts] for parts in (given.k, given.v))
    cut.dlse = [x[:, :, :30] for x in given.dlse]
    made = [capi.attention(q, k, v, lib=library, **options)
            for q, k, v in zip(cut.q, cut.k, cut.v, strict=True)]  # fmt: skip
    cut.out, cut.lse = ([x[i] for x in made] for i in range(2))
    want = cut.dense()
    for way in ways(given).values():
        bounded = way._replace(tables=way.tables | {"max_seqlen_q": 30, "max_seqlen_k": 250})
        assert_same_bits(run(cut, bounded), want, cut, way)


def test_layout_bhsd_and_a_workspace_for_one_thread(library: ctypes.CDLL) -> None:
    given = Sequences(library, capi.DTYPES["fp32"], causal="bottom_right")
    way = ways(given)["packed"]
    tensors = tensors_of(given, way)
    swapped = {name: x if x.ndim < 4 else np.ascontiguousarray(x.swapaxes(1, 2))
               for name, x in tensors.items()}  # fmt: skip
    gradients = {name: filled(swapped[name[1:]].shape, np.dtype(np.float32), POISON)
                 for name in ("dq", "dk", "dv")}  # fmt: skip
    params = capi.attention_backward_params(
        swapped | gradients, tables=way.tables, layout="bhsd", causal="bottom_right"
    )
    size = ctypes.c_size_t()
    before = library.flashmoe_get_num_threads()
    library.flashmoe_set_num_threads(1)
    capi.check(library.flashmoe_attention_backward_workspace_size(params, size), library)
    library.flashmoe_set_num_threads(before)
    capi.run_attention_backward(params, library, aligned_empty((size.value,), np.dtype(np.uint8)))
    back = {name: np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in gradients.items()}
    assert_same_bits(back, given.dense(), given, way)


def test_no_sequence_at_all(library: ctypes.CDLL) -> None:
    """Gradients are zeros all over."""
    q, k = (normal(np.random.default_rng(0), (1, 7, 2, 16), np.dtype(np.float32)) for _ in "qk")
    lse, sinks = np.zeros((1, 2, 7), np.float32), np.zeros(2, np.float32)
    tensors = {"dout": q, "q": q, "k": k, "v": k, "out": q, "lse": lse, "sinks": sinks}
    for offsets in ([4], [0, 0], [9, -3], [3, 3, 3]):
        made = {f"d{name}": filled(tensors[name].shape, np.dtype(np.float32), np.nan)
                for name in ("q", "k", "v", "sinks")}  # fmt: skip
        tables = {"cu_seqlens_q": int32(offsets), "cu_seqlens_k": int32(offsets)}
        capi.run_attention_backward(
            capi.attention_backward_params(tensors | made, tables=tables), library
        )
        for x in made.values():
            assert (x == 0).all()


HOSTILE = (-INT_MAX - 1, -1, 0, 1, 7, 12, 13, 100, INT_MAX - 1, INT_MAX)


@pytest.mark.parametrize("seed", range(40))
def test_hostile_numbers_stay_inside_the_tensors(library: ctypes.CDLL, seed: int) -> None:
    """Tensors next to pages that may not be touched, and numbers from anywhere."""
    rng = np.random.default_rng(seed)
    batch, at_end = 6, bool(seed % 2)
    rows_q, rows_k = (400, 330) if seed % 5 == 0 else (12, 13)

    def numbers(count: int) -> np.ndarray:
        return between_guards(int32(rng.choice((*HOSTILE, rows_q), count)), at_end)

    def tensor(*shape: int) -> np.ndarray:
        return between_guards(normal(rng, shape, np.dtype(np.float32)), at_end)

    tables: dict[str, Any] = {}
    if seed % 4 < 2:
        tables["cu_seqlens_q"] = numbers(batch + 1)
    if seed % 3 < 2:
        tables["cu_seqlens_k"] = numbers(batch + 1)
    batch_q, batch_k = (1 if f"cu_seqlens_{x}" in tables else batch for x in "qk")
    for name in ("seqused_q", "seqused_k", "k_begin", "q_offset"):
        if rng.random() < 0.6:
            tables[name] = numbers(batch)
    tensors = {
        "q": tensor(batch_q, rows_q, 4, 16), "k": tensor(batch_k, rows_k, 2, 16),
        "v": tensor(batch_k, rows_k, 2, 8), "out": tensor(batch_q, rows_q, 4, 8),
        "dout": tensor(batch_q, rows_q, 4, 8),
    }  # fmt: skip
    tensors["lse"] = between_guards(np.full((batch_q, 4, rows_q), 5.0, np.float32), at_end)
    made = {f"d{name}": between_guards(np.full(tensors[name].shape, np.nan, np.float32), at_end)
            for name in "qkv"}  # fmt: skip
    if seed % 5 == 1:
        tables |= {"max_seqlen_q": 7, "max_seqlen_k": 8}
        rows_q, rows_k = 7, 8
    if seed % 2:
        tensors["attn_bias"] = tensor(batch, 4, rows_q, rows_k)
        tensors["attn_mask"] = between_guards(
            pairs.random_mask(rng, (batch, 1, rows_q, rows_k)), at_end
        )
    params = capi.attention_backward_params(
        tensors | made, tables=tables, causal=("none", "bottom_right")[seed // 2 % 2]
    )
    capi.run_attention_backward(params, library)
    for x in made.values():
        assert np.isfinite(x).all()


def test_sequences_that_share_rows_take_turns(library: ctypes.CDLL) -> None:
    """Offsets that go back and forth name more rows than there is room for at a time."""
    given = Sequences(library, capi.DTYPES["fp32"], ((400,), (500,)), causal="bottom_right")
    want = given.dense()[0]
    back_q, back_k = int32([0, 400] * 40), int32([0, 500] * 40)
    way = Way(Rows([(0, 0)], 1, 400), Rows([(0, 0)], 1, 500),
              {"cu_seqlens_q": back_q, "cu_seqlens_k": back_k})  # fmt: skip
    before = library.flashmoe_get_num_threads()
    library.flashmoe_set_num_threads(1)  # so that no two write at a time
    try:
        assert_same_bits(run(given, way), [want], given, way)
    finally:
        library.flashmoe_set_num_threads(before)


def test_plans_tell_no_lengths(library: ctypes.CDLL) -> None:
    given = Sequences(library, capi.DTYPES["fp32"])
    way = ways(given)["packed"]
    tensors = tensors_of(given, way)
    made = {"dq": filled(tensors["q"].shape, np.dtype(np.float32), POISON)}
    params = capi.attention_backward_params(tensors | made, tables=way.tables)
    plan = capi.attention_backward_plan(params, library)
    assert plan.flops == 0
    assert plan.launches[0].grid[0] == len(given.q) * 2
    assert plan.bytes == sum(x.nbytes for x in (tensors | made | way.tables).values())
    capi.run_attention_backward(params, library)
    assert capi.is_planned(plan, capi.last_launches(library))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "index": ({"batch_index": int32([0] * 3)}, "batch_index: got one, accepted is none"),
    "pages": ({"page_table": int32([[0]] * 3)}, "page_table: got one, accepted is none"),
    "cu_q": ({"cu_seqlens_q": int32([0] * 4)}, "q: its batch is 3, accepted with cu_seqlens_q"),
    "count": ({"seqused_k": int32([1] * 4)}, "seqused_k: got 4 numbers, accepted are 3"),
    "dtype": ({"k_begin": np.array([0] * 3)}, "k_begin: got dtype int64"),
    "bound_q": ({"max_seqlen_q": -1}, "max_seqlen_q: got -1, accepted is 0"),
    "size": ({"struct_size": 8}, "flashmoe_attention_sequences.struct_size: got 8"),
}  # fmt: skip


@pytest.mark.parametrize(("tables", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_makes_no_sense_is_refused(
    library: ctypes.CDLL, tables: dict[str, Any], sentence: str
) -> None:
    q = np.zeros((3, 4, 2, 16), np.float32)
    dq, lse = filled(q.shape, q.dtype, POISON), np.zeros((3, 2, 4), np.float32)
    tensors = {"dout": q, "q": q, "k": q, "v": q, "out": q, "lse": lse, "dq": dq}
    params = capi.attention_backward_params(tensors, tables=tables)
    with pytest.raises(capi.FlashmoeError) as raised:
        capi.attention_backward_plan(params, library)
    assert sentence in str(raised.value)
    with pytest.raises(capi.FlashmoeError):
        capi.run_attention_backward(params, library, np.empty(1 << 20, np.uint8))
    assert (dq == POISON).all()


def test_callers_of_before_there_were_sequences(library: ctypes.CDLL) -> None:
    """Whose params end before them, and have anything behind."""
    given = Sequences(library, capi.DTYPES["fp32"], ((20,), (30,)))
    tensors = tensors_of(given, ways(given)["padded"])
    dense = {name: np.ascontiguousarray(x[:, : 30 if name in "kv" else 20])
             for name, x in tensors.items() if x.ndim == 4}  # fmt: skip
    dense |= {name: np.ascontiguousarray(tensors[name][:, :, :20]) for name in ("lse", "dlse")}
    dense["dq"] = filled(dense["q"].shape, np.dtype(np.float32), POISON)
    params = capi.attention_backward_params(dense, tables={"struct_size": 3})
    params.struct_size = capi.AttentionBackwardParams.sequences.offset
    capi.run_attention_backward(params, library)
    assert dense["dq"].tobytes() == given.dense()[0].dq.tobytes()
