"""FlashInfer as a peer of benchmarks/serving.py: its wrappers are told where the queries and keys
of each sequence are, as a reader of its documentation has it, which computes by them."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import flashmoe_science as fm  # noqa: E402
import serving  # noqa: E402


class Ragged:
    """BatchPrefillWithRaggedKVCacheWrapper."""

    def __init__(self, workspace: Any, layout: str) -> None:
        assert layout == "NHD" and workspace.dtype == torch.uint8

    def plan(self, qo_indptr: Any, kv_indptr: Any, heads_q: int, heads_kv: int, dim: int, *,
             causal: bool, q_data_type: Any, kv_data_type: Any) -> None:  # fmt: skip
        self.heads, self.causal, self.dtypes = (heads_q, heads_kv, dim), causal, (
            q_data_type, kv_data_type)  # fmt: skip
        self.rows, self.keys = qo_indptr.tolist(), kv_indptr.tolist()

    def keys_of(self, b: int, cache: Any) -> list[Any]:
        return [x[self.keys[b] : self.keys[b + 1]] for x in cache]

    def attend(self, q: Any, cache: Any, out: Any) -> None:
        assert self.heads == (q.shape[1], cache[0].shape[-2], q.shape[2])
        assert self.dtypes == (q.dtype, cache[0].dtype)
        for b in range(len(self.rows) - 1):
            rows = slice(*self.rows[b : b + 2])
            k, v = (x[None] for x in self.keys_of(b, cache))
            out[rows] = fm.flash_attention(q[None, rows], k, v, causal=self.causal)[0]

    def run(self, q: Any, k: Any, v: Any, *, out: Any) -> None:
        self.attend(q, (k, v), out)


class Paged(Ragged):
    """BatchPrefillWithPagedKVCacheWrapper."""

    def plan(self, qo_indptr: Any, indptr: Any, indices: Any, last: Any, heads_q: int,  # type: ignore[override]
             heads_kv: int, dim: int, page: int, **options: Any) -> None:  # fmt: skip
        super().plan(qo_indptr, indptr, heads_q, heads_kv, dim, **options)
        assert indices.dtype == last.dtype == indptr.dtype == torch.int32
        self.indices, self.last, self.page = indices.tolist(), last.tolist(), page

    def keys_of(self, b: int, cache: Any) -> list[Any]:
        pages = self.indices[self.keys[b] : self.keys[b + 1]]
        assert 1 <= self.last[b] <= self.page
        count = (len(pages) - 1) * self.page + self.last[b]
        return [x[pages].flatten(0, 1)[:count] for x in cache]

    def run(self, q: Any, cache: Any, *, out: Any) -> None:  # type: ignore[override]
        assert all(x.shape[1] == self.page for x in cache)
        self.attend(q, cache, out)


class Decode(Paged):
    """BatchDecodeWithPagedKVCacheWrapper."""

    def __init__(self, workspace: Any, layout: str, use_tensor_cores: bool) -> None:
        super().__init__(workspace, layout)
        self.uses_tensor_cores = use_tensor_cores

    def plan(self, indptr: Any, *others: Any, **options: Any) -> None:  # type: ignore[override]
        ones = torch.arange(indptr.shape[0])
        super().plan(ones, indptr, *others, causal=False, **options)
        assert self.uses_tensor_cores == (self.heads[0] != self.heads[1])


CASES = {
    "ragged": serving.Case("ragged", "", 4, 2, 32, (5, 1, 9), (5, 1, 9)),
    "decode": serving.Case("decode", "", 4, 2, 32, (1, 1, 1), (33, 1, 16), 16),
    "decode of as many heads": serving.Case("decode", "", 2, 2, 32, (1, 1), (8, 9), 8),
    "mixed": serving.Case("mixed", "", 4, 2, 32, (7, 1, 2), (40, 17, 2), 8),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_flashinfer_is_told_where_everything_is(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = types.ModuleType("flashinfer")
    made.__dict__.update(
        BatchPrefillWithRaggedKVCacheWrapper=Ragged, BatchPrefillWithPagedKVCacheWrapper=Paged,
        BatchDecodeWithPagedKVCacheWrapper=Decode,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "flashinfer", made)
    monkeypatch.setattr(serving, "_FLASHINFER_BYTES", 16)
    rng = torch.Generator().manual_seed(1)
    starts = lambda x: torch.tensor([0, *x]).cumsum(0).int()  # noqa: E731
    used = torch.tensor(case.keys, dtype=torch.int32)
    draw = lambda *shape: torch.randn(shape, generator=rng).bfloat16()  # noqa: E731
    tables: tuple[Any, ...] = (None, None)
    if case.page is None:
        shape: tuple[int, ...] = (sum(case.keys),)
    else:
        columns = -(-max(case.keys) // case.page)
        shape = (40, case.page)
        tables = tuple(
            torch.randperm(40, generator=rng)[: len(used) * columns].view(-1, columns).int()
            for _ in range(2)
        )
    k, v = (tuple(draw(*shape, case.heads_kv, case.dim) for _ in range(2)) for _ in "kv")
    q = draw(sum(case.queries), case.heads_q, case.dim)
    inputs = serving.Inputs(q, k, v, tables, starts(case.queries), starts(case.keys), used)
    call, planned = serving.flashinfer_call(case, inputs)
    assert planned > 0
    for copy in range(2):
        ours, theirs = torch.empty_like(q), torch.empty_like(q)
        serving.our_call(case, inputs, copy, ours)
        call(copy, theirs)
        assert torch.equal(ours, theirs)
