"""kv_append on the CPU: what it writes where, beside a loop in float64; nothing else is touched."""

from __future__ import annotations

from typing import Any

import capi
import flashmoe_science as fm
import numpy as np
import pytest
import reference

DTYPES = ["float32", "float16", "bfloat16", "float64"]
POISON = -77.0


class Case:
    """Random arguments, hostile numbers among them, and what the call is to do with them."""

    def __init__(self, rng: np.random.Generator, dtype: str = "float32", **fixed: Any) -> None:
        choose = lambda name, *of: fixed.get(name, of[rng.integers(len(of))])  # noqa: E731
        self.dtype = reference.DTYPES.get(dtype, np.dtype(dtype))
        self.layout = choose("layout", "bshd", "bhsd")
        self.batch, self.heads_kv = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        self.dim, self.dim_v = (8 * int(rng.integers(1, 5)) for _ in range(2))
        self.way = choose("way", "plain", "indexed", "paged", "slots")
        self.packed = choose("packed", False, True) and self.way != "slots"
        self.rotary = choose("rotary", "", "neox", "interleaved")
        self.wide = choose("wide", False, True)  # fp32 cosines, int64 slots and positions
        seq = int(rng.integers(0, 9))
        lengths = rng.integers(0, 9, self.batch)
        batch = 1 if self.packed else self.batch
        if self.packed:
            seq = int(lengths.sum()) + int(rng.integers(0, 3))
        self.given: dict[str, Any] = {}
        self.k = self.rows(rng, batch, seq, self.heads_kv, self.dim)
        self.v = self.rows(rng, batch, seq, self.heads_kv, self.dim_v)
        places = self.places(rng)
        self.caches = [
            self.of_layout(np.full((*places, self.heads_kv, dim), POISON).astype(self.dtype))
            for dim in (self.dim, self.dim_v)
        ]
        if self.packed:
            self.given["cu_seqlens"] = np.cumsum([0, *lengths]).astype(np.int32)
        if self.way != "slots" and choose("used", False, True):
            self.given["seqused"] = rng.integers(-1, 10, self.batch).astype(np.int32)
        if self.rotary:
            self.add_rotary(rng, batch, seq)

    def rows(self, rng: np.random.Generator, *shape: int) -> np.ndarray:
        return self.of_layout(capi.normal(rng, shape, self.dtype))

    def of_layout(self, array: np.ndarray) -> np.ndarray:
        return array if self.layout == "bshd" else np.ascontiguousarray(array.swapaxes(1, 2))

    def bshd(self, array: np.ndarray) -> np.ndarray:
        return array if self.layout == "bshd" else array.swapaxes(1, 2)

    def places(self, rng: np.random.Generator) -> tuple[int, int]:
        """Extents of the cache. Few of its rows are asked for twice."""
        given, pages, page = self.given, 23, int(rng.integers(1, 5))
        index = np.int64 if self.wide else np.int32
        if self.way == "slots":
            seq = self.bshd(self.k).shape[1]
            slots = rng.permutation(np.arange(-4, 5 * 37))[: self.batch * seq]  # some are beyond
            given["slots"] = slots.reshape(self.batch, seq).astype(index)
            return 37, 5
        given["cache_seqlens"] = rng.integers(-1, 12, self.batch).astype(np.int32)
        if self.way == "paged":
            table = rng.permutation(np.arange(-2, pages + 3))[: 7 * self.batch]
            given["page_table"] = table.reshape(self.batch, 7).astype(np.int32)
            return pages, page
        if self.way == "indexed":
            index = rng.permutation(np.arange(-1, 6))[: self.batch]
            given["batch_index"] = index.astype(np.int32)
            return 5, 14
        return self.batch, 14

    def add_rotary(self, rng: np.random.Generator, batch: int, seq: int) -> None:
        self.pairs = int(rng.integers(1, self.dim // 2 + 1))
        dtype = np.dtype(np.float32) if self.wide and self.dtype != np.float64 else self.dtype
        angles = rng.uniform(0, 6, (16, self.pairs))  # positions from 16 on are in no table
        self.given["rotary_cos"] = np.cos(angles).astype(dtype)
        self.given["rotary_sin"] = np.sin(angles).astype(dtype)
        self.given["interleaved"] = self.rotary == "interleaved"
        fixed = self.way == "slots" or bool(rng.integers(2))
        seq_q = seq if fixed or self.packed else int(rng.integers(0, 6))
        self.given["q"] = self.rows(rng, batch, seq_q, int(rng.integers(1, 5)), self.dim)
        if fixed:
            index = np.int64 if self.wide else np.int32
            self.given["positions"] = rng.integers(-1, 18, (batch, seq)).astype(index)
        elif rng.integers(2):
            self.given["q_stays"] = True

    def call(self) -> Any:
        q = self.given.get("q")
        out = None if q is None else np.full(q.shape, POISON).astype(self.dtype)
        made = fm.kv_append(
            self.k, self.v, *self.caches, layout=self.layout, q_out=out, **self.given
        )
        assert made is out
        return made

    def rotated(self, row: np.ndarray, position: int) -> np.ndarray:
        x, made = row.astype(np.float64), row.astype(np.float64)
        cos, sin = (self.given[f"rotary_{n}"][position].astype(np.float64) for n in ("cos", "sin"))
        n = self.pairs
        a, b = (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
        if self.rotary == "neox":
            a, b = slice(0, n), slice(n, 2 * n)
        made[..., a] = x[..., a] * cos - x[..., b] * sin
        made[..., b] = x[..., b] * cos + x[..., a] * sin
        return made

    def expected(self) -> tuple[np.ndarray, ...]:
        """Caches, and the queries or None, in float64."""
        k, v = self.bshd(self.k), self.bshd(self.v)
        k_cache, v_cache = (np.full(self.bshd(x).shape, POISON) for x in self.caches)
        q = self.given.get("q")
        q_out = None if q is None else np.full(self.bshd(q).shape, POISON)
        given = self.given
        for b in range(self.batch):
            row, first, count = (
                (0, *given["cu_seqlens"][b : b + 2]) if self.packed else (b, 0, k.shape[1])
            )
            count -= first
            begin = int(given["cache_seqlens"][b]) if "cache_seqlens" in given else 0
            queries = 0 if q is None else count if self.packed else self.bshd(q).shape[1]
            if "seqused" in given:
                count = min(max(int(given["seqused"][b]), 0), count)
            if begin < 0:
                continue
            for i in range(max(count, queries)):
                at = first + i
                fixed = "positions" in given
                position = int(given["positions"][row, at]) if fixed else begin + i
                if i < queries:
                    stands = begin if given.get("q_stays") else position
                    if 0 <= stands < 16:
                        q_out[row, at] = self.rotated(self.bshd(q)[row, at], stands)
                place = self.place(b, i, begin)
                if i >= count or place is None or (self.rotary and not 0 <= position < 16):
                    continue
                k_cache[place] = self.rotated(k[row, at], position) if self.rotary else k[row, at]
                v_cache[place] = v[row, at]
        return k_cache, v_cache, q_out

    def place(self, b: int, i: int, begin: int) -> tuple[int, int] | None:
        batches, rows = self.bshd(self.caches[0]).shape[:2]
        if self.way == "slots":
            slot = int(self.given["slots"][b, i])
            at = (slot // rows, slot % rows)
        elif self.way == "paged":
            page, row = divmod(begin + i, rows)
            if page >= 7:
                return None
            at = (int(self.given["page_table"][b, page]), row)
        else:
            at = (int(self.given["batch_index"][b]) if self.way == "indexed" else b, begin + i)
        return at if 0 <= at[0] < batches and 0 <= at[1] < rows else None


def assert_right(case: Case) -> None:
    """The caches and queries, to one rounding of the dtype and three of fp32; values to the bit."""
    rotated = case.call()
    k_cache, v_cache, q_out = case.expected()
    np.testing.assert_array_equal(case.bshd(case.caches[1]).astype(np.float64), v_cache)
    pairs = [(case.caches[0], k_cache)] + ([] if rotated is None else [(rotated, q_out)])
    for got, want in pairs:
        got = case.bshd(got).astype(np.float64)
        assert ((got == POISON) == (want == POISON)).all()
        if not case.rotary:
            np.testing.assert_array_equal(got, want)
        eps = 2.0**-52 if case.dtype == np.float64 else 2.0**-23
        kept = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(str(case.dtype), 0)
        # Two numbers of up to 6 in size are multiplied by those of up to 1 and added.
        assert (np.abs(got - want) <= kept * np.abs(want) * 1.001 + 6 * 4 * eps).all()


@pytest.mark.parametrize("rotary", ["", "neox", "interleaved"])
@pytest.mark.parametrize("way", ["plain", "indexed", "paged", "slots"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_goes_where(dtype: str, way: str, rotary: str) -> None:
    rng = np.random.default_rng([DTYPES.index(dtype), len(way), len(rotary)])
    for _ in range(25):
        assert_right(Case(rng, dtype, way=way, rotary=rotary))


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
