"""Decoding and other few queries of ragged, padded and paged batches: keys that blocks share, and
chunks whose bits depend on the sequence alone. tests/gpu/test_ragged.py has the same kernels in
every way to say where sequences are."""

from __future__ import annotations

from typing import Any

import flashmoe_science as fm
import kernels
import pytest
import torch
from gpu import memory, oracle, ragged
from gpu.ragged import Batch, int32, starts

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
FAMILY = "sm89_decode"
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (700, None)},
    "both_ends": {"window": (300, 3)},
    "top_left": {"causal": "top_left", "window": (25, 0)},
    "softcap": {"softcap": 1.5, "causal": "bottom_right"},
}


def _kernels() -> list[kernels.Kernel]:
    return sorted(kernel for kernel in kernels.attention(FAMILY) if not kernel.fp8)


def _lengths(seed: int, count: int, most: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    made = (torch.rand(count, generator=generator) ** 3 * most).int().tolist()
    made[seed % count] = most
    made[(seed + 1) % count] = 0
    return made


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("split_size", [None, 100, 256, 2048])
@pytest.mark.parametrize("compiled", _kernels(), ids=lambda k: k.table_name.split("decode_")[1])
def test_long_sequences_beside_short_ones(
    compiled: kernels.Kernel, split_size: int | None, options: dict[str, Any]
) -> None:
    """One query each and several; pages of several sizes, and keys one behind the other."""
    heads = (2 * min(compiled.rows, 6), 2)
    for i, queries in enumerate((1, 5)):
        lengths = _lengths(i, 9, 9000)
        batch = ragged.make([queries] * 8 + [1], lengths, dtype=compiled.dtype, dim=compiled.dim,
                            dim_v=compiled.dim_v, heads=heads, sinks=i == 1, seed=i)  # fmt: skip
        calls = [ragged.ways(batch)["packed"]]
        calls += [ragged.paginate(batch, size) for size in ((1, 16), (5, 64))[i]]
        for call in calls:
            got = ragged.check(
                batch, call, DEVICE, kernel=compiled.table_name, split_size=split_size, **options
            )
            assert got.kernel == compiled.table_name


@pytest.mark.parametrize("split_size", [None, 4096])
def test_a_million_keys_beside_255_short_sequences(split_size: int | None) -> None:
    lengths = [300 + b % 90 for b in range(256)]
    lengths[100] = 1_000_003
    batch = ragged.make([1] * 256, lengths, dtype="bf16", dim=128, heads=(4, 1))
    for size in (1, 16):
        call = ragged.paginate(batch, size)
        call = call._replace(tables=call.tables | {"max_seqlen_q": 1})
        ragged.check(batch, call, DEVICE, kernel=FAMILY, split_size=split_size)


@pytest.mark.parametrize("compiled", _kernels(), ids=lambda k: k.table_name.split("decode_")[1])
@pytest.mark.parametrize("count", [1, 6, 40, 500])
def test_cuts_beside_tiles_and_within(count: int, compiled: kernels.Kernel) -> None:
    """Tiles of a step or two: most cuts of equal shares are in front of a tile's keys, some blocks
    have none, and others many tiles, whose first steps are taken by other warps each time."""
    lengths = [1 + 7 * b % 97 for b in range(count)]
    heads = (int(compiled.tuning), 1) if count > 1 else (3 * int(compiled.tuning), 3)
    batch = ragged.make([1] * count, lengths, dtype=compiled.dtype, dim=compiled.dim,
                        dim_v=compiled.dim_v, heads=heads, seed=count)  # fmt: skip
    first = ragged.check(batch, ragged.paginate(batch, 16), DEVICE, kernel=compiled.table_name,
                         causal="bottom_right")  # fmt: skip
    for size in (1, 64):
        got = ragged.check(batch, ragged.paginate(batch, size), DEVICE, kernel=compiled.table_name,
                           causal="bottom_right")  # fmt: skip
        for b in range(0, count, 7):
            assert torch.equal(_bits(got, b)[0], _bits(first, b)[0])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("compiled", _kernels(), ids=lambda k: k.table_name.split("decode_")[1])
@pytest.mark.parametrize(("count", "heads_kv"), [(130, 2), (70, 4), (130, 8), (90, 6)])
def test_tiles_of_several_heads(
    count: int, heads_kv: int, compiled: kernels.Kernel, options: dict[str, Any]
) -> None:
    """So many sequences that a tile has two or four KV heads, in kernels that have room for their
    queries. Some sequences have no pages, others few keys beside one that blocks share."""
    lengths = [b * 37 % 211 for b in range(count)]
    lengths[3] = 5000
    rows = int(compiled.tuning)
    queries = [1 + b % 3 if rows == 8 else 1 for b in range(count)]
    heads = (heads_kv * (2 if rows == 8 else rows), heads_kv)
    batch = ragged.make(queries, lengths, dtype=compiled.dtype, dim=compiled.dim,
                        dim_v=compiled.dim_v, heads=heads, sinks=heads_kv == 4,
                        seed=count)  # fmt: skip
    for size in (16, 5):
        call = ragged.paginate(batch, size)
        call = call._replace(tables=call.tables | {"max_seqlen_q": max(queries)})
        got = ragged.check(batch, call, DEVICE, kernel=compiled.table_name, **options)
        assert got.kernel == compiled.table_name


def _bits(result: ragged.Result, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    return memory.bits(result.out[b]), memory.bits(result.lse[b])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("split_size", [64, 300, 1024])
def test_bits_of_chunks_depend_on_the_sequence_alone(
    split_size: int, options: dict[str, Any]
) -> None:
    """Not on the batch, its order, the size and order of pages, packing, or bounds."""
    lengths = [7000, 1, 0, 333, 2048, 5000, 1025, 64, 12000]
    queries = [1, 1, 3, 1, 4, 1, 2, 1, 1]
    batch = ragged.make(queries, lengths, dtype="bf16", dim=128, heads=(8, 2), sinks=True)
    wanted = {"sinks": batch.sinks, "split_size": split_size, **options}
    first = ragged.run(ragged.paginate(batch, 16), DEVICE, **wanted)
    assert first.kernel == "attention_forward_mixed_lengths"  # of 8 queries at most, by the tables
    for way in (*ragged.ways(batch).values(), ragged.paginate(batch, 1),
                ragged.paginate(batch, 48, None, "hnd", 5)):  # fmt: skip
        got = ragged.run(way, DEVICE, **wanted)
        for b in range(len(lengths)):
            for mine, other in zip(_bits(got, b), _bits(first, b), strict=True):
                assert torch.equal(mine, other), b
    for b in range(len(lengths)):
        alone = Batch([batch.q[b]], [batch.k[b]], [batch.v[b]], batch.sinks)
        got = ragged.run(ragged.paginate(alone, 16), DEVICE, **wanted)
        for mine, other in zip(_bits(got, 0), _bits(first, b), strict=True):
            assert torch.equal(mine, other), b
    many = [7, 0, 3, 8, 5, 1] * 40
    copies = Batch(*([x[b] for b in many] for x in (batch.q, batch.k, batch.v)), batch.sinks)
    got = ragged.run(ragged.paginate(copies, 64), DEVICE, **wanted)
    for i, b in enumerate(many):
        for mine, other in zip(_bits(got, i), _bits(first, b), strict=True):
            assert torch.equal(mine, other), (i, b)


@pytest.mark.parametrize("compiled", _kernels(), ids=lambda k: k.table_name.split("decode_")[1])
def test_bits_of_chunks_beside_rows_without_a_page(compiled: kernels.Kernel) -> None:
    """Only the rows whose keys are in no page are computed by the fallback, where a block has the
    whole tile as where blocks have parts of it: so bits do not depend on the number of blocks."""
    rows, length = int(compiled.tuning), 512  # one head of q for one of k: as many queries
    there = rows - 2  # keys in pages, of which the first two queries see none
    one = ragged.make([rows], [length], dtype=compiled.dtype, dim=compiled.dim,
                      dim_v=compiled.dim_v, heads=(2, 2), seed=5)  # fmt: skip

    def run(batch: Batch) -> ragged.Result:
        call = ragged.paginate(batch, 1)
        call.tables["page_table"][:, : length - there] = -1
        return ragged.run(call, DEVICE, kernel=compiled.table_name, split_size=64,
                          causal="bottom_right")  # fmt: skip

    alone = run(one)  # a chunk is a block's
    assert torch.isneginf(alone.lse[0][:, :, :2]).all()
    assert torch.isfinite(alone.lse[0][:, :, 2:]).all()
    assert not alone.out[0][:, :2].any()
    for count in (20, 100):  # blocks have some chunks of a tile, or whole tiles
        got = run(Batch(one.q * count, one.k * count, one.v * count))
        for b in range(count):
            for mine, other in zip(_bits(got, b), _bits(alone, 0), strict=True):
                assert torch.equal(mine, other), (count, b)


@pytest.mark.parametrize("split_size", [None, 512])
def test_the_same_bits_on_every_run(split_size: int | None) -> None:
    batch = ragged.make([1] * 20, _lengths(3, 20, 6000), dtype="fp16", dim=64, heads=(16, 2))
    call = ragged.paginate(batch, 16)
    first = ragged.run(call, DEVICE, kernel=FAMILY, split_size=split_size)
    for _ in range(5):
        again = ragged.run(call, DEVICE, kernel=FAMILY, split_size=split_size)
        ragged.assert_same_bits(again, first)


@pytest.mark.parametrize("split_size", [None, 256])
def test_one_capture_serves_other_lengths(split_size: int | None) -> None:
    """And other pages; with NaN in all that no sequence has."""
    count, size, pages = 12, 16, 4000
    generator = torch.Generator().manual_seed(2)
    shape = (pages, size, 2, 128)
    static = {
        "q": torch.randn((count, 1, 8, 128), device=DEVICE).bfloat16(),
        "k": torch.full(shape, torch.nan, dtype=torch.bfloat16, device=DEVICE),
        "v": torch.full(shape, torch.nan, dtype=torch.bfloat16, device=DEVICE),
        "seqused_k": torch.zeros(count, dtype=torch.int32, device=DEVICE),
        "page_table": torch.full((count, 1000), -1, dtype=torch.int32, device=DEVICE),
    }
    options = {"return_lse": True, "split_size": split_size, "kernel": FAMILY}
    fm.flash_attention(**static, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fm.flash_attention(**static, **options)
    for seed, most in ((1, 3), (2, 700), (3, 15000), (4, 0), (5, 4000)):
        lengths = [0] * count if most == 0 else _lengths(seed, count, most)
        static["k"].fill_(torch.nan)
        static["v"].fill_(torch.nan)
        static["page_table"].fill_(-1)
        places = torch.randperm(pages, generator=generator).to(DEVICE)
        keys = []
        for b, length in enumerate(lengths):
            mine, places = places[: -(-length // size)], places[-(-length // size) :]
            static["page_table"][b, : len(mine)] = mine.int()
            k, v = (torch.randn(1, length, 2, 128, device=DEVICE).bfloat16() for _ in range(2))
            rows = torch.arange(length, device=DEVICE)
            at = mine[rows // size] * size + rows % size
            static["k"].flatten(0, 1)[at] = k[0]
            static["v"].flatten(0, 1)[at] = v[0]
            keys.append((k, v))
        static["seqused_k"].copy_(int32(lengths))
        graph.replay()
        for b, (k, v) in enumerate(keys):
            q = static["q"][b : b + 1]
            ref = oracle.attention_float64(q, k, v)
            oracle.assert_near(out[b : b + 1].transpose(1, 2), lse[b : b + 1], ref,
                               oracle.plain(q, k, v).out, torch.bfloat16)  # fmt: skip
        if split_size is None:
            continue
        again, lse_again = fm.flash_attention(**static, **options)  # outside of the graph
        assert torch.equal(memory.bits(again), memory.bits(out))
        assert torch.equal(memory.bits(lse_again), memory.bits(lse))


def test_16384_sequences() -> None:
    count = 16384
    lengths = [(37 * b) % 41 for b in range(count)]
    batch = ragged.make([1] * count, lengths, dtype="fp16", dim=64, heads=(2, 1))
    total = sum(lengths)
    q = torch.cat(batch.q, 1).to(DEVICE)
    k, v = (torch.cat(x, 1).to(DEVICE) for x in (batch.k, batch.v))
    tables = {
        "cu_seqlens_q": torch.arange(count + 1, dtype=torch.int32, device=DEVICE),
        "cu_seqlens_k": starts(lengths).to(DEVICE),
    }
    assert k.shape[1] == total
    out = fm.flash_attention(q, k, v, **tables, kernel=FAMILY)
    want = fm.flash_attention(q.cpu().float(), k.cpu().float(), v.cpu().float(),
                              **{name: x.cpu() for name, x in tables.items()})  # fmt: skip
    torch.testing.assert_close(out.cpu().float(), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("count", [1, 40])
def test_a_block_that_ends_in_the_middle_of_rows_that_see_no_key(count: int) -> None:
    """Sequences without keys between others: their rows are 0, and lse -inf."""
    lengths = [0, 3000, 0, 0, 1, 0] * count
    batch = ragged.make([1] * len(lengths), lengths, dtype="bf16", dim=128, heads=(4, 1))
    got = ragged.check(batch, ragged.paginate(batch, 16), DEVICE, kernel=FAMILY)
    for b, length in enumerate(lengths):
        if length == 0:
            assert (got.out[b] == 0).all()
            assert got.lse[b].isneginf().all()


def test_offsets_beyond_2_to_the_31() -> None:
    """Offsets in elements: the last pages of a cache of more than 4 GiB."""
    pages, size = 20000, 64
    k, v = (torch.zeros(pages, size, 2, 1024, dtype=torch.bfloat16, device=DEVICE)[..., :128]
            for _ in range(2))  # fmt: skip
    table = torch.tensor([[pages - 1, 0, pages - 2]], dtype=torch.int32, device=DEVICE)
    for x in (k, v):
        x[table[0].long()] = torch.randn((3, size, 2, 128), device=DEVICE).bfloat16()
    q = torch.randn((1, 1, 8, 128), device=DEVICE).bfloat16()
    used = torch.tensor([170], dtype=torch.int32, device=DEVICE)
    out = fm.flash_attention(q, k, v, page_table=table, seqused_k=used, kernel=FAMILY)
    keys = [x[table[0].long()].reshape(1, 192, 2, 128)[:, :170] for x in (k, v)]
    ref = oracle.attention_float64(q, *keys)
    usual = oracle.plain(q, *keys).out
    assert (out.transpose(1, 2) - ref.out).abs().max() <= 2 * (usual - ref.out).abs().max() + 1e-3


def test_what_the_family_refuses() -> None:
    q, k = (torch.zeros(1, 4, 2, 64, dtype=torch.float16, device=DEVICE) for _ in range(2))
    with pytest.raises(NotImplementedError, match="dense batches, accepted are ragged"):
        fm.flash_attention(q, k, k, kernel=FAMILY)
    with pytest.raises(NotImplementedError, match="split_size, chunks of keys"):
        fm.flash_attention(q, k, k, split_size=64, kernel="sm89")
    with pytest.raises(ValueError, match="split_size: got -1, accepted is a number of 0"):
        fm.flash_attention(q, k, k, split_size=-1)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("split_size", [None, 256])
@pytest.mark.parametrize(("dim", "dim_v"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_prompts_beside_decoding(
    dim: int, dim_v: int, split_size: int | None, options: dict[str, Any]
) -> None:
    queries = [300, 1, 1, 0, 5, 33, 1, 9, 1, 130]
    lengths = [500, 4000, 1, 7, 600, 33, 0, 2000, 9000, 130]
    for i, dtype in enumerate(("fp16", "bf16")):
        heads = ((4, 2), (8, 1))[i]
        batch = ragged.make(queries, lengths, dtype=dtype, dim=dim, dim_v=dim_v, heads=heads,
                            sinks=i == 1, seed=i)  # fmt: skip
        for call in (*ragged.ways(batch).values(), ragged.paginate(batch, 1)):
            got = ragged.check(
                batch, call, DEVICE, kernel="mixed", split_size=split_size, **options
            )
            assert got.kernel == "attention_forward_mixed_lengths"


def test_bits_do_not_depend_on_prompts_beside() -> None:
    """Those of chunks: neither of a prompt on what decodes beside it, nor the other way round."""
    queries = [1, 400, 1, 8, 9, 77, 3]
    lengths = [5000, 700, 64, 3000, 1200, 2000, 9]
    batch = ragged.make(queries, lengths, dtype="bf16", dim=128, heads=(8, 2))
    wanted = {"split_size": 512, "causal": True}
    first = ragged.run(ragged.paginate(batch, 16), DEVICE, **wanted)
    assert first.kernel == "attention_forward_mixed_lengths"
    for size in (1, 64):
        got = ragged.run(ragged.paginate(batch, size), DEVICE, **wanted)
        ragged.assert_same_bits(got, first)
    for some in ([0], [1], [2, 3], [6, 0, 2], [5, 4, 0], [6, 5, 4, 3, 2, 1, 0]):
        part = Batch(*([x[b] for b in some] for x in (batch.q, batch.k, batch.v)))
        for most in (None, max(queries[b] for b in some)):
            call = ragged.paginate(part, 16)
            got = ragged.run(call._replace(tables=call.tables | {"max_seqlen_q": most}), DEVICE,
                             **wanted)  # fmt: skip
            for i, b in enumerate(some):
                for mine, other in zip(_bits(got, i), _bits(first, b), strict=True):
                    assert torch.equal(mine, other), (some, b)


@pytest.mark.parametrize(("dim", "dim_v"), [(64, 64), (128, 128), (256, 256)])
def test_a_nan_beside_decoding_is_of_the_rows_that_see_it(dim: int, dim_v: int) -> None:
    """Blocks come back to the tiles that they have taken, whichever these were."""
    queries = [900, 1, 300, 1, 5, 1, 2000]
    lengths = [1100, 4000, 300, 77, 600, 9000, 2000]
    batch = ragged.make(queries, lengths, dtype="bf16", dim=dim, dim_v=dim_v, heads=(8, 2))
    for b, key, value in ((0, 850, torch.nan), (2, 250, torch.inf), (6, 7, torch.inf),
                          (6, 1500, torch.nan), (1, 70, torch.nan)):  # fmt: skip
        batch.v[b][0, key, b % 2, 5] = value
    options = {"causal": "bottom_right"}
    for call in (*ragged.ways(batch).values(), ragged.paginate(batch, 48)):
        got = ragged.run(call, DEVICE, kernel="mixed", **options)
        ref, _ = batch.reference(DEVICE, **options)
        out = torch.cat(got.out, 1).transpose(1, 2)
        assert torch.equal(out.isfinite(), ref.out.isfinite())
        alone = ragged.run(call, DEVICE, kernel=_of_prompts(), **options)
        for b in (0, 2, 6):
            for mine, other in zip(_bits(got, b), _bits(alone, b), strict=True):
                assert torch.equal(mine, other)


def _of_prompts() -> str:
    """The kernels of prompts beside decoding."""
    return "sm90" if torch.cuda.get_device_capability() == (9, 0) else "sm89"


@pytest.mark.parametrize("count", [1, 2, 33, 700, 16384])
def test_prompts_among_many_sequences(count: int) -> None:
    """At either end, a few in between, and all of them; each call again, with the same bits."""
    generator = torch.Generator().manual_seed(count)
    queries = torch.ones(count, dtype=torch.int32)
    queries[:: max(count // 5, 1)] = torch.randint(20, 300, (1,), generator=generator).int()
    queries[-1] = 150
    keys = queries + torch.randint(0, 60, (count,), generator=generator).int()
    q = torch.randn((1, int(queries.sum()), 4, 64), device=DEVICE).bfloat16()
    k, v = (torch.randn((1, int(keys.sum()), 2, 64), device=DEVICE).bfloat16() for _ in range(2))
    tables = {
        name: torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().to(DEVICE)
        for name, lengths in (("cu_seqlens_q", queries), ("cu_seqlens_k", keys))
    }
    call: dict[str, Any] = {
        **tables,
        "causal": "bottom_right",
        "max_seqlen_q": 400,
        "return_lse": True,
    }
    want, want_lse = fm.flash_attention(q, k, v, kernel=_of_prompts(), **call)
    for i in range(3):
        out, lse = torch.full_like(q, torch.nan), torch.full_like(want_lse, torch.nan)
        fm.flash_attention(q, k, v, kernel="mixed", out=out, lse=lse, **call)
        assert fm.last_launches()[0].kernel == "attention_forward_mixed_lengths"
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-3)
        if i == 0:
            first = out.clone(), lse.clone()
        assert torch.equal(out, first[0]) and torch.equal(lse, first[1])
    # Prompts have the bits of a separate call.
    rows = (queries > 16).repeat_interleave(queries).to(DEVICE)
    assert torch.equal(out[:, rows], want[:, rows])


def test_one_capture_of_a_mixed_batch_serves_other_lengths() -> None:
    """Lengths of queries, too."""
    count, total = 8, 600
    q = torch.randn((1, total, 8, 128), device=DEVICE).bfloat16()
    k, v = (torch.randn((1, 30000, 2, 128), device=DEVICE).bfloat16() for _ in range(2))
    tables = {name: torch.zeros(count + 1, dtype=torch.int32, device=DEVICE)
              for name in ("cu_seqlens_q", "cu_seqlens_k")}  # fmt: skip
    options = {"causal": True, "return_lse": True, "kernel": "mixed"}
    fm.flash_attention(q, k, v, **tables, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fm.flash_attention(q, k, v, **tables, **options)
    for queries in ([1] * 8, [400, 1, 1, 0, 1, 90, 1, 1], [70] * 8, [0] * 7 + [600], [0] * 8,
                    [2, 3, 4, 1, 30, 9, 8, 300]):  # fmt: skip
        lengths = [900 * b + n for b, n in enumerate(queries)]
        tables["cu_seqlens_q"].copy_(starts(queries))
        tables["cu_seqlens_k"].copy_(starts(lengths))
        graph.replay()
        row = key = 0
        for n, m in zip(queries, lengths, strict=True):
            some = [q[:, row : row + n], k[:, key : key + m], v[:, key : key + m]]
            if n > 0:
                ref = oracle.attention_float64(*some, causal=True)
                oracle.assert_near(
                    out[:, row : row + n].transpose(1, 2), lse[:, :, row : row + n], ref,
                    oracle.plain(*some, causal=True).out, torch.bfloat16,
                )  # fmt: skip
            row, key = row + n, key + m


def test_who_takes_what() -> None:
    """Without a wish: few queries of long sequences are decoded, prompts beside them mixed."""
    pages = torch.zeros(4096, 64, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    table = torch.arange(4096, dtype=torch.int32, device=DEVICE).reshape(32, 128)
    used = torch.full((32,), 8192, dtype=torch.int32, device=DEVICE)

    def plan(rows: int, most: int, **options: Any) -> fm.AttentionPlan:
        q = torch.zeros(1, rows, 32, 128, dtype=torch.bfloat16, device=DEVICE)
        offsets = torch.zeros(33, dtype=torch.int32, device=DEVICE)
        return fm.attention_plan(
            q, pages, pages, cu_seqlens_q=offsets, page_table=table, seqused_k=used,
            max_seqlen_q=most, causal=True, **options,
        )  # fmt: skip

    assert plan(32, 1).family == FAMILY
    assert plan(32 * 2, 2).family == FAMILY
    several = plan(32 * 4, 4)  # of all heads in one tile
    assert several.launches[0].kernel.endswith("_ragged_packed")
    assert plan(32 * 4, 4, split_size=1024).family == FAMILY
    assert plan(31 + 2048, 2048).family == "mixed"
    assert plan(31 + 2048, 2048, split_size=1024).family == "mixed"
    assert plan(32, 1, split_size=1024).family == FAMILY
    assert plan(32 * 2048, 2048).family in ("sm90", "sm89")
