"""Calls of kv_append with random arguments, hostile numbers among them, and what a loop in float64
makes of the same."""

from __future__ import annotations

from typing import Any

import capi
import flashmoe_science as fm
import numpy as np
import reference

DTYPES = ["float32", "float16", "bfloat16", "float64"]
POISON = -77.0


class Case:
    """Random arguments, hostile numbers among them, and what the call is to do with them.

    fixed: What is not random; most_batch, most_seq, most_heads and most_dim say how large it may
    be, and overlapping that offsets are in no order.
    """

    def __init__(self, rng: np.random.Generator, dtype: str = "float32", **fixed: Any) -> None:
        choose = lambda name, *of: fixed.get(name, of[rng.integers(len(of))])  # noqa: E731
        self.dtype = reference.DTYPES.get(dtype, np.dtype(dtype))
        self.layout = choose("layout", "bshd", "bhsd")
        most = lambda name, usual: int(fixed.get(f"most_{name}", usual))  # noqa: E731
        self.most_seq = most("seq", 8)
        self.most_heads = most("heads", 3)
        self.batch = int(rng.integers(1, most("batch", 3) + 1))
        self.heads_kv = int(rng.integers(1, self.most_heads + 1))
        self.dim, self.dim_v = (8 * int(rng.integers(1, most("dim", 32) // 8 + 1)) for _ in "kv")
        self.dim = fixed.get("dim", self.dim)
        self.way = choose("way", "plain", "indexed", "paged", "slots")
        self.packed = choose("packed", False, True) and self.way != "slots"
        self.rotary = choose("rotary", "", "neox", "interleaved")
        self.wide = choose("wide", False, True)  # fp32 cosines, int64 slots and positions
        seq = int(rng.integers(0, self.most_seq + 1))
        lengths = rng.integers(0, self.most_seq + 1, self.batch)
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
            starts = np.cumsum([0, *lengths])
            if fixed.get("overlapping"):
                starts = rng.integers(-3, seq + 4, self.batch + 1)
                extreme = rng.choice([-(2**31), 2**31 - 1], self.batch + 1)
                starts = np.where(rng.random(self.batch + 1) < 0.05, extreme, starts)
            self.given["cu_seqlens"] = starts.astype(np.int32)
        if self.way != "slots" and choose("used", False, True):
            self.given["seqused"] = rng.integers(-1, self.most_seq + 2, self.batch).astype(np.int32)
        if self.rotary:
            self.add_rotary(rng, batch, seq, fixed)

    def rows(self, rng: np.random.Generator, *shape: int) -> np.ndarray:
        return self.of_layout(capi.normal(rng, shape, self.dtype))

    def of_layout(self, array: np.ndarray) -> np.ndarray:
        return array if self.layout == "bshd" else np.ascontiguousarray(array.swapaxes(1, 2))

    def bshd(self, array: np.ndarray) -> np.ndarray:
        return array if self.layout == "bshd" else array.swapaxes(1, 2)

    def places(self, rng: np.random.Generator) -> tuple[int, int]:
        """Extents of the cache. Few of its rows are asked for twice."""
        given, n = self.given, self.most_seq
        index = np.int64 if self.wide else np.int32
        if self.way == "slots":
            seq = self.bshd(self.k).shape[1]
            pages = 37 + self.batch * seq // 4
            slots = rng.permutation(np.arange(-4, 5 * pages))[: self.batch * seq]
            given["slots"] = slots.reshape(self.batch, seq).astype(index)
            return pages - 2, 5  # some slots are beyond
        given["cache_seqlens"] = rng.integers(-1, n + 4, self.batch).astype(np.int32)
        if self.way == "paged":
            pages, page = 8 * max(self.batch, 3) - 1, int(rng.integers(1, max(n // 2, 4) + 1))
            table = rng.permutation(np.arange(-2, pages + 3))[: 7 * self.batch]
            given["page_table"] = table.reshape(self.batch, 7).astype(np.int32)
            return pages, page
        if self.way == "indexed":
            rows = rng.permutation(np.arange(-1, self.batch + 4))[: self.batch]
            given["batch_index"] = rows.astype(np.int32)
            return self.batch + 3, n + 6
        return self.batch, n + 6

    def add_rotary(
        self, rng: np.random.Generator, batch: int, seq: int, fixed: dict[str, Any]
    ) -> None:
        self.pairs = fixed.get("pairs") or int(rng.integers(1, self.dim // 2 + 1))
        dtype = np.dtype(np.float32) if self.wide and self.dtype != np.float64 else self.dtype
        self.positions = 2 * self.most_seq  # those from there on are in no table
        angles = rng.uniform(0, 6, (self.positions, self.pairs))
        self.given["rotary_cos"] = np.cos(angles).astype(dtype)
        self.given["rotary_sin"] = np.sin(angles).astype(dtype)
        self.given["interleaved"] = self.rotary == "interleaved"
        if not fixed.get("queries", True):
            return
        stands = self.way == "slots" or bool(rng.integers(2))
        seq_q = seq if stands or self.packed else int(rng.integers(0, self.most_seq))
        self.given["q"] = self.rows(
            rng, batch, seq_q, int(rng.integers(1, self.most_heads + 2)), self.dim
        )
        if stands:
            index = np.int64 if self.wide else np.int32
            positions = rng.integers(-1, self.positions + 2, (batch, seq))
            self.given["positions"] = positions.astype(index)
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
            first = min(max(first, 0), k.shape[1])
            count = min(max(count, first), k.shape[1]) - first if self.packed else count
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
                    if 0 <= stands < self.positions:
                        q_out[row, at] = self.rotated(self.bshd(q)[row, at], stands)
                place = self.place(b, i, begin)
                if (
                    i >= count
                    or place is None
                    or (self.rotary and not 0 <= position < self.positions)
                ):
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


def check(case: Case, caches: list[np.ndarray], rotated: np.ndarray | None) -> None:
    """Results of a call: keys and queries to one rounding of the dtype and three of fp32, values to
    the bit."""
    k_cache, v_cache, q_out = case.expected()
    np.testing.assert_array_equal(case.bshd(caches[1]).astype(np.float64), v_cache)
    pairs = [(caches[0], k_cache)] + ([] if rotated is None else [(rotated, q_out)])
    for got, want in pairs:
        got = case.bshd(got).astype(np.float64)
        assert ((got == POISON) == (want == POISON)).all()
        if not case.rotary:
            np.testing.assert_array_equal(got, want)
        eps = 2.0**-52 if case.dtype == np.float64 else 2.0**-23
        kept = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(str(case.dtype), 0)
        # Two numbers of up to 6 in size are multiplied by those of up to 1 and added.
        assert (np.abs(got - want) <= kept * np.abs(want) * 1.001 + 6 * 4 * eps).all()


def assert_right(case: Case) -> None:
    """By the CPU."""
    rotated = case.call()
    check(case, case.caches, rotated)
