"""Sequences of different lengths, every way to say where they are, and the verdict on a call.

What no sequence has is NaN: rows behind lengths and before k_begin, free pages, everything around
the tensors. Outputs hold bits that must be there still where no sequence has a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import flashmoe_science as fm
import torch
from gpu import memory, oracle
from gpu.cases import DTYPES
from gpu.memory import Placement

INT_MAX = 2**31 - 1
HOSTILE = (-INT_MAX - 1, -1, 0, 1, 7, 12, 13, 100, INT_MAX - 1, INT_MAX)
_ORDERS = {
    "nhd": memory.contiguous(4),
    "hnd": Placement((0, 2, 1, 3), (0, 0, 0, 0)),
}  # of the rows and heads of a page in memory


def int32(values: Any) -> torch.Tensor:
    return torch.as_tensor(values).to(torch.int32)


def starts(lengths: Sequence[int]) -> torch.Tensor:
    return int32([sum(lengths[:b]) for b in range(len(lengths) + 1)])


@dataclass
class Batch:
    """Sequences as dense tensors [1, length, heads, dim], on the host."""

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    sinks: torch.Tensor | None = None
    _known: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def lengths_q(self) -> list[int]:
        return [x.shape[1] for x in self.q]

    @property
    def lengths_k(self) -> list[int]:
        return [x.shape[1] for x in self.k]

    def dense(self, kernel: str, device: str, **options: Any) -> Result:
        """Calls of each sequence alone."""
        key = f"{kernel} {device} {options}"
        if key not in self._known:
            made = [
                fm.flash_attention(
                    *(x.to(device) for x in tensors), sinks=_on(device, self.sinks),
                    return_lse=True, kernel=kernel, **options,
                )
                for tensors in zip(self.q, self.k, self.v, strict=True)
            ]  # fmt: skip
            self._known[key] = Result([x[0] for x in made], [x[1] for x in made], kernel)
        return self._known[key]

    def reference(self, device: str, **options: Any) -> tuple[oracle.Attention, torch.Tensor]:
        """float64 and the plain computation of all sequences, one behind the other."""
        key = f"reference {options}"
        if key not in self._known:
            refs, usual = [], []
            for tensors in zip(self.q, self.k, self.v, strict=True):
                given = [x.to(device) for x in tensors]
                rest = {"sinks": _on(device, self.sinks), **options}
                refs.append(oracle.attention_float64(*given, **rest))
                usual.append(oracle.plain(*given, **rest).out)
            ref = oracle.Attention(
                torch.cat([x.out for x in refs], 2), torch.cat([x.lse for x in refs], 2)
            )
            self._known[key] = (ref, torch.cat(usual, 2))
        return self._known[key]


def _on(device: str, x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.to(device)


def make(
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    *,
    dtype: str = "fp16",
    dim: int = 64,
    dim_v: int | None = None,
    heads: tuple[int, int] = (4, 2),
    sinks: bool = False,
    seed: int = 0,
) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def normal(length: int, heads: int, dim: int) -> torch.Tensor:
        return torch.randn((1, length, heads, dim), generator=generator).to(DTYPES[dtype])

    return Batch(
        [normal(n, heads[0], dim) for n in lengths_q],
        [normal(n, heads[1], dim) for n in lengths_k],
        [normal(n, heads[1], dim_v or dim) for n in lengths_k],
        torch.randn(heads[0], generator=generator) if sinks else None,
    )


class Call(NamedTuple):
    """Tensors on the host, and where in q each sequence is: (batch, begin, length)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rows: list[tuple[int, int, int]]
    tables: dict[str, Any]
    order: str = "nhd"
    latent: int | None = None  # v is so many first columns of k, in the same memory


class Result(NamedTuple):
    """For each sequence [1, length, heads, dim_v] and [1, heads, length]."""

    out: list[torch.Tensor]
    lse: list[torch.Tensor]
    kernel: str


def _nan(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.full(tuple(shape), torch.nan, dtype=like.dtype)


def pack(parts: list[torch.Tensor], behind: int = 0) -> torch.Tensor:
    """One behind the other, and rows of NaN that no sequence has."""
    return torch.cat([*parts, _nan((1, behind, *parts[0].shape[2:]), parts[0])], 1)


def pad(
    parts: list[torch.Tensor], before: Sequence[int], length: int, at: Sequence[int] | None = None
) -> torch.Tensor:
    """[batch, length, ...], with so many rows of NaN before each, and NaN behind; of each in the
    row `at` of the batch, among others."""
    at = range(len(parts)) if at is None else at
    made = _nan((max(at, default=-1) + 1, length, *parts[0].shape[2:]), parts[0])
    for b, skip, x in zip(at, before, parts, strict=True):
        made[b, skip : skip + x.shape[1]] = x[0]
    return made


def packed_rows(batch: Batch) -> list[tuple[int, int, int]]:
    begins = starts(batch.lengths_q).tolist()
    return [(0, begin, n) for begin, n in zip(begins, batch.lengths_q, strict=False)]


def paginate(
    batch: Batch, size: int, before: Sequence[int] | None = None, order: str = "nhd",
    seed: int = 3, packed: bool = True,
) -> Call:  # fmt: skip
    """Pages in random places among free ones of NaN. What is unused in the table is no page."""
    generator = torch.Generator().manual_seed(seed)
    skips = [0] * len(batch.k) if before is None else list(before)
    ends = [n + skip for n, skip in zip(batch.lengths_k, skips, strict=True)]
    needed = [-(-n // size) for n in ends]
    count = sum(needed) + 3
    places = int32(torch.randperm(count, generator=generator))
    none = int32([-1, count, INT_MAX, -INT_MAX - 1])
    table = none[torch.randint(4, (len(ends), max(needed) + 2), generator=generator)]
    k, v = (_nan((count, size, *x.shape[2:]), x) for x in (batch.k[0], batch.v[0]))
    for b, (skip, end) in enumerate(zip(skips, ends, strict=True)):
        table[b, : needed[b]] = places[sum(needed[:b]) : sum(needed[: b + 1])]
        row = torch.arange(skip, end)
        at = table[b, row // size].long() * size + row % size
        k.flatten(0, 1)[at] = batch.k[b][0]
        v.flatten(0, 1)[at] = batch.v[b][0]
    tables = {"seqused_k": int32(ends), "page_table": table}
    if before is not None:
        tables["k_begin"] = int32(skips)
    if packed:
        tables["cu_seqlens_q"] = starts(batch.lengths_q)
        return Call(pack(batch.q), k, v, packed_rows(batch), tables, order)
    tables["seqused_q"] = int32(batch.lengths_q)
    rows = [(b, 0, n) for b, n in enumerate(batch.lengths_q)]
    q = pad(batch.q, [0] * len(rows), max(batch.lengths_q) + 1)
    return Call(q, k, v, rows, tables, order)


def ways(batch: Batch) -> dict[str, Call]:
    """Every way to say where the same sequences are."""
    count = len(batch.q)
    none = [0] * count
    before = [(3 * b + 1) % 11 for b in range(count)]
    used = int32(batch.lengths_k)
    ends = int32([n + skip for n, skip in zip(batch.lengths_k, before, strict=True)])
    longest = int(ends.max()) + 2
    packed, rows = pack(batch.q, 4), packed_rows(batch)
    cu_q = {"cu_seqlens_q": starts(batch.lengths_q)}
    padded = pad(batch.q, none, max(batch.lengths_q) + 3)
    used_q = {"seqused_q": int32(batch.lengths_q)}
    padded_rows = [(b, 0, n) for b, n in enumerate(batch.lengths_q)]
    index = torch.randperm(count + 2, generator=torch.Generator().manual_seed(1))[:count].tolist()

    def keys(*where: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return pad(batch.k, *where), pad(batch.v, *where)

    return {
        "packed": Call(packed, pack(batch.k, 5), pack(batch.v, 5), rows,
                       cu_q | {"cu_seqlens_k": starts(batch.lengths_k)}),
        "padded": Call(padded, *keys(none, longest), padded_rows, used_q | {"seqused_k": used}),
        "left": Call(padded, *keys(before, longest), padded_rows,
                     used_q | {"seqused_k": ends, "k_begin": int32(before)}),
        "indexed": Call(packed, *keys(none, longest, index), rows,
                        cu_q | {"seqused_k": used, "batch_index": int32(index)}),
        "paged": paginate(batch, 16, before),
    }  # fmt: skip


def run(
    call: Call, device: str, *, sinks: torch.Tensor | None = None, kernel: str | None = None,
    layout: str = "bshd", **options: Any,
) -> Result:  # fmt: skip
    """One call with everything poisoned. Nothing is written but the rows of sequences."""
    keys = _ORDERS[call.order]
    inputs = [
        memory.place_values(x.to(device), where)
        for x, where in ((call.q, None), (call.k, keys), (call.v, keys))
    ]
    if call.latent is not None:
        inputs[2] = inputs[1]
    tables, bounds = {}, {}
    for name, given in call.tables.items():
        if isinstance(given, torch.Tensor):
            tables[name] = memory.place_values(given.to(device))
        else:
            bounds[name] = given
    for placed in (*inputs, *tables.values()):
        placed.remember()
    batch, rows_q, heads = call.q.shape[:3]
    out = memory.place((batch, rows_q, heads, call.v.shape[3]), call.q.dtype, device)
    lse = memory.place((batch, heads, rows_q), torch.float32, device)
    for placed in (out, lse):
        placed.remember()
    views = [placed.view for placed in (*inputs, out)]
    views[2] = views[2][..., : call.latent]
    if layout == "bhsd":
        views = [view.transpose(1, 2) for view in views]
    fm.flash_attention(
        *views[:3], **{name: placed.view for name, placed in tables.items()}, **bounds, **options,
        sinks=_on(device, sinks), layout=layout, return_lse=True, out=views[3], lse=lse.view,
        kernel=kernel,
    )  # fmt: skip
    launches = fm.last_launches()
    for name, placed in zip(("q", "k", "v", *tables), (*inputs, *tables.values()), strict=True):
        assert placed.intact(inside=True), f"{name} was written to"
    result = Result([], [], launches[0].kernel if launches else "")
    for b, begin, length in call.rows:
        some = slice(begin, begin + length)
        result.out.append(out.view[b : b + 1, some].clone())
        result.lse.append(lse.view[b : b + 1, :, some].clone())
        for placed, index in ((out, (b, some)), (lse, (b, slice(None), some))):
            target = memory.bits(placed.view[index])
            target.copy_(memory.bits(_before(placed)[index]))
    for name, placed in (("out", out), ("lse", lse)):
        assert placed.intact(inside=True), f"{name}: a row that no sequence has was written to"
    return result


def _before(placed: memory.Placed) -> torch.Tensor:
    assert placed.before is not None
    view = placed.view
    return placed.before.as_strided(view.shape, view.stride(), view.storage_offset())


def dense_kernel(kernel: str) -> str | None:
    """The kernel of dense calls that sums in the same order as one of ragged batches."""
    if kernel.startswith("attention_forward_cpu_"):
        return "cpu"
    if kernel.endswith("_packed"):  # whose steps begin with pages
        return None
    return kernel.replace("_ragged", "") if "_ragged" in kernel else None


def assert_same_bits(got: Result, want: Result) -> None:
    for what, axis in (("out", 1), ("lse", 2)):
        mine, other = (getattr(x, what) for x in (got, want))
        assert [x.shape for x in mine] == [x.shape for x in other]
        if not torch.equal(*(memory.bits(torch.cat(x, axis)) for x in (mine, other))):
            pairs = zip(mine, other, strict=True)
            wrong = [b for b, (x, y) in enumerate(pairs) if not torch.equal(x, y)]
            raise AssertionError(f"{what} of sequences {wrong}: {got.kernel}, {want.kernel}")


def check(
    batch: Batch, call: Call, device: str, *, kernel: str | None = None, layout: str = "bshd",
    split_size: int | None = None, **options: Any,
) -> Result:  # fmt: skip
    """One call: right, and where kernels of dense calls are alike, with the bits of those."""
    got = run(
        call, device, sinks=batch.sinks, kernel=kernel, layout=layout, split_size=split_size,
        **options,
    )  # fmt: skip
    ref, usual = batch.reference(device, **options)
    out = oracle.heads_first(torch.cat(got.out, 1), "bshd")
    oracle.assert_near(out, torch.cat(got.lse, 2), ref, usual, batch.q[0].dtype)
    dense = dense_kernel(got.kernel)
    if dense is not None:
        assert_same_bits(got, batch.dense(dense, device, **options))
    return got
