"""Calls of kv_gather with random arguments, hostile numbers among them, and what a loop makes of
them."""

from __future__ import annotations

from typing import Any

import capi
import flashmoe_science as fm
import numpy as np
import reference

DTYPES = ["float32", "float16", "bfloat16", "float64"]
WAYS = ("plain", "indexed", "paged")
POISON = -77.0


class Case:
    """Random arguments, hostile numbers among them, and what the call is to do with them.

    fixed: What is not random; most_batch, most_seq, most_heads and most_dim say how large it may
    be, and overlapping that offsets are in no order.
    """

    def __init__(self, rng: np.random.Generator, dtype: str = "float32", **fixed: Any) -> None:
        choose = lambda name, *of: fixed.get(name, of[rng.integers(len(of))])  # noqa: E731
        most = lambda name, usual: int(fixed.get(f"most_{name}", usual))  # noqa: E731
        self.dtype = reference.DTYPES.get(dtype, np.dtype(dtype))
        self.layout = choose("layout", "bshd", "bhsd")
        self.way = choose("way", *WAYS)
        self.packed = choose("packed", False, True)
        self.keys_alone = choose("keys_alone", False, False, True)
        self.most_seq = most("seq", 8)
        self.batch = int(rng.integers(1, most("batch", 3) + 1))
        self.heads = int(rng.integers(1, most("heads", 3) + 1))
        self.dim, self.dim_v = (8 * int(rng.integers(1, most("dim", 32) // 8 + 1)) for _ in "kv")
        self.dim = fixed.get("dim", self.dim)
        self.given: dict[str, Any] = {}
        places = self.places(rng)
        self.caches = [
            self.of_layout(capi.normal(rng, (*places, self.heads, dim), self.dtype))
            for dim in (self.dim, self.dim_v)
        ]
        n = self.most_seq
        for name in ("seqused_k", "k_begin"):
            if choose(name, False, True):
                self.given[name] = rng.integers(-1, n + 4, self.batch).astype(np.int32)
        self.seq = int(rng.integers(0, n + 3))
        if self.packed:
            lengths = rng.integers(0, n + 1, self.batch)
            self.seq = int(lengths.sum()) + int(rng.integers(0, 3))
            starts = np.cumsum([0, *lengths])
            if fixed.get("overlapping"):
                starts = rng.integers(-3, self.seq + 4, self.batch + 1)
                extreme = rng.choice([-(2**31), 2**31 - 1], self.batch + 1)
                starts = np.where(rng.random(self.batch + 1) < 0.05, extreme, starts)
            self.given["cu_seqlens_k"] = starts.astype(np.int32)

    def of_layout(self, array: np.ndarray) -> np.ndarray:
        return array if self.layout == "bshd" else np.ascontiguousarray(array.swapaxes(1, 2))

    def bshd(self, array: np.ndarray) -> np.ndarray:
        return array if self.layout == "bshd" else array.swapaxes(1, 2)

    def places(self, rng: np.random.Generator) -> tuple[int, int]:
        """Extents of the cache."""
        given, n = self.given, self.most_seq
        if self.way == "paged":
            pages, page = 8 * max(self.batch, 3) - 1, int(rng.integers(1, max(n // 2, 4) + 1))
            given["page_table"] = rng.integers(-2, pages + 3, (self.batch, 7)).astype(np.int32)
            return pages, page
        if self.way == "indexed":
            given["batch_index"] = rng.integers(-1, self.batch + 4, self.batch).astype(np.int32)
            return self.batch + 3, n + 2
        return self.batch, n + 2

    def results(self) -> list[np.ndarray]:
        batch = 1 if self.packed else self.batch
        dims = (self.dim,) if self.keys_alone else (self.dim, self.dim_v)
        return [
            self.of_layout(np.full((batch, self.seq, self.heads, dim), POISON).astype(self.dtype))
            for dim in dims
        ]

    def given_caches(self) -> list[np.ndarray]:
        return self.caches[:1] if self.keys_alone else self.caches

    def call(self) -> list[np.ndarray]:
        made = self.results()
        outputs = dict(zip("kv", made, strict=False))
        got = fm.kv_gather(*self.given_caches(), layout=self.layout, **self.given, **outputs)
        assert got is made[0] if self.keys_alone else got[0] is made[0] and got[1] is made[1]
        return made

    def sources(self) -> dict[tuple[int, int], tuple[int, int] | None]:
        """By row of the results that of the cache, None where it is zeros."""
        given = self.given
        batches, rows = self.bshd(self.caches[0]).shape[:2]
        found: dict[tuple[int, int], tuple[int, int] | None] = {}
        taken: set[tuple[int, int]] = set()
        for b in range(self.batch):
            row, first, end = b, 0, self.seq
            if self.packed:
                first, end = (int(x) for x in given["cu_seqlens_k"][b : b + 2])
                row, first = 0, min(max(first, 0), self.seq)
                end = min(max(end, first), self.seq)
            count = 7 * rows if self.way == "paged" else rows
            if "seqused_k" in given:
                count = min(max(int(given["seqused_k"][b]), 0), count)
            begin = min(max(int(given["k_begin"][b]), 0), count) if "k_begin" in given else 0
            for at in range(first, end):
                if (row, at) in taken:
                    continue
                taken.add((row, at))
                key = begin + at - first
                if key >= count:
                    continue
                place = (b, key)
                if self.way == "paged":
                    place = (int(given["page_table"][b, key // rows]), key % rows)
                elif self.way == "indexed":
                    place = (int(given["batch_index"][b]), key)
                there = 0 <= place[0] < batches
                if there or self.way == "paged":
                    found[row, at] = place if there else None
        return found

    def expected(self) -> list[np.ndarray]:
        made = [self.bshd(x) for x in self.results()]
        for to, source in self.sources().items():
            for result, cache in zip(made, self.caches, strict=False):
                result[to] = 0 if source is None else self.bshd(cache)[source]
        return [self.of_layout(x) for x in made]


def assert_right(case: Case, got: list[np.ndarray]) -> None:
    """To the bit."""
    for ours, want in zip(got, case.expected(), strict=True):
        assert ours.tobytes() == want.tobytes()
