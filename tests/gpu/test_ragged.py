"""Ragged, padded and paged batches: every sequence as a dense call of its own, bit by bit where the
kernels are alike, and nothing else read or written. By each family that computes them and by the
plan's choice."""

from __future__ import annotations

import itertools
from typing import Any

import flashmoe_science as fm
import kernels
import pytest
import torch
from gpu import memory, oracle, ragged
from gpu.cases import DTYPES
from gpu.ragged import HOSTILE, INT_MAX, Batch, Call, int32, starts

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
LENGTHS_Q = (5, 0, 1, 40, 3, 300, 1, 129)
LENGTHS_K = (9, 300, 0, 33, 1, 170, 515, 128)
# Every compiled kernel, and dimensions that are padded to one.
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
PADDED = ((8, 8), (40, 24), (72, 96), (96, 96), (128, 64), (136, 160), (192, 192), (200, 248))

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "top_left": {"causal": "top_left"},
    "window": {"causal": "bottom_right", "window": (20, None)},
    "both_ends": {"window": (70, 3)},
    "left_end": {"window": (100, None)},
    "ahead_of_keys": {"causal": "top_left", "window": (25, 0)},
    "softcap": {"softcap": 1.5, "causal": "bottom_right"},
    "scale": {"scale": 0.3},
}


def _make(**options: Any) -> Batch:
    return ragged.make(LENGTHS_Q, LENGTHS_K, **options)


def _check(batch: Batch, call: Call, **options: Any) -> ragged.Result:
    return ragged.check(batch, call, DEVICE, **options)


def _assert_finite_alike(got: ragged.Result, ref: oracle.Attention) -> None:
    out = torch.cat(got.out, 1).transpose(1, 2)
    assert torch.equal(out.isfinite(), ref.out.isfinite())
    assert torch.equal(torch.cat(got.lse, 2).isfinite(), ref.lse.isfinite())


def _has_both_ends(options: dict[str, Any]) -> bool:
    left, right = options.get("window", (None, None))
    return left is not None and (right is not None or "causal" in options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
def test_every_way_to_say_where_sequences_are(
    dim: int, dim_v: int, options: dict[str, Any], kernel: str | None
) -> None:
    for i, dtype in enumerate(DTYPES):
        heads = ((4, 2), (3, 3), (8, 1))[(i + dim // 64) % 3]
        sinks = i == 1 or "softcap" in options
        batch = _make(dtype=dtype, dim=dim, dim_v=dim_v, heads=heads, sinks=sinks, seed=i)
        for call in ragged.ways(batch).values():
            got = _check(batch, call, kernel=kernel, **options)
            if kernel in ("sm89", "sm90_whole_tiles"):
                name = f"attention_forward_{kernels.stem(kernel)}_{dtype}_d{dim}_dv{dim_v}_ragged"
                if kernel != "sm89" and "softcap" in options:
                    name += "_softcap"
                elif kernel != "sm89" and dim == 64 and _has_both_ends(options):
                    name += "_window"
                assert got.kernel == name


@pytest.mark.parametrize(("dim", "dim_v"), PADDED)
def test_dimensions_that_are_padded(dim: int, dim_v: int, kernel: str | None) -> None:
    for i, dtype in enumerate(DTYPES):
        batch = _make(dtype=dtype, dim=dim, dim_v=dim_v, sinks=True, seed=i)
        for call in ragged.ways(batch).values():
            _check(batch, call, kernel=kernel, causal=("bottom_right", "top_left")[i])


@pytest.mark.parametrize("order", ["nhd", "hnd"])
@pytest.mark.parametrize("size", [1, 5, 16, 48, 64, 600])
def test_pages_of_any_size_in_any_place(size: int, order: str, kernel: str | None) -> None:
    for i, (dim, dtype) in enumerate(itertools.product((64, 128, 256), DTYPES)):
        batch = _make(dtype=dtype, dim=dim)
        for seed in range(2):
            before = [(5 * b + seed) % 9 for b in range(len(batch.q))]
            call = ragged.paginate(batch, size, before, order, seed, packed=i % 2 == 0)
            _check(batch, call, kernel=kernel, causal="bottom_right")


@pytest.mark.parametrize("size", [1, 16, 2048])
@pytest.mark.parametrize("window", [(3, None), (1200, None), (0, 0), (2000, 100)])
def test_windows_within_a_page_and_over_many(
    size: int, window: tuple[int | None, int | None], kernel: str | None
) -> None:
    batch = ragged.make((1, 70, 300), (2500, 2100, 1300), dim=128, dtype="bf16")
    _check(batch, ragged.paginate(batch, size), kernel=kernel, window=window)


@pytest.mark.parametrize("way", ["packed", "padded", "left", "indexed", "paged"])
def test_layout_bhsd(way: str, kernel: str | None) -> None:
    batch = _make(dim=128, heads=(6, 3))
    _check(batch, ragged.ways(batch)[way], kernel=kernel, layout="bhsd", causal="bottom_right")


@pytest.mark.parametrize("group", [1, 5, 8])
@pytest.mark.parametrize("size", [1, 16, 64])
def test_decoding_from_pages(group: int, size: int, kernel: str | None) -> None:
    """One query each; one of many keys beside others of few."""
    lengths = (30000, 1, 0, 64, 257, *range(1, 252))
    batch = ragged.make((1,) * 256, lengths, dtype="bf16", dim=128, heads=(group, 1))
    call = ragged.paginate(batch, size)
    _check(batch, call, kernel=kernel)
    _check(batch, call._replace(tables=call.tables | {"max_seqlen_q": 1}), kernel=kernel)
    _check(batch, ragged.paginate(batch, size, packed=False), kernel=kernel, causal=True)


@pytest.mark.parametrize("group", [1, 3, 8, 33, 64, 71, 128, 129])
@pytest.mark.parametrize(("dim", "dim_v"), [*DIMS, (96, 40)])
def test_heads_of_a_kv_head_share_a_tile(
    group: int, dim: int, dim_v: int, kernel: str | None
) -> None:
    """Where no sequence has more than one query. One of another head's rows may not reach it."""
    options = (
        {"causal": "bottom_right"},
        {"window": (9, None)},
        {"causal": "top_left", "softcap": 2.0},
    )
    lengths = (1, 70, 0, 200, 48, 33)
    for i, option in enumerate(options):
        batch = ragged.make((1, 1, 1, 0, 1, 1), lengths, dtype=("fp16", "bf16")[i % 2], dim=dim,
                            dim_v=dim_v, heads=(2 * group, 2), sinks=i != 1, seed=i)  # fmt: skip
        for call in ragged.ways(batch).values():
            tables = call.tables | {"max_seqlen_q": 1}
            _check(batch, call._replace(tables=tables), kernel=kernel, **option)
        call = ragged.paginate(batch, 16, packed=False)
        _check(batch, call._replace(q=call.q[:, :1].contiguous()), kernel=kernel, **option)


SHORT = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "top_left": {"causal": "top_left"},
    "left_end": {"window": (20, None)},
    "both_ends": {"causal": "bottom_right", "window": (9, None)},
    "softcap": {"softcap": 1.5, "causal": "bottom_right"},
}


@pytest.mark.parametrize("options", SHORT.values(), ids=SHORT)
@pytest.mark.parametrize("group", [1, 2, 3, 5, 8, 16])
def test_heads_of_short_sequences_share_tiles(
    group: int, options: dict[str, Any], kernel: str | None
) -> None:
    """32 sequences of at most 128 rows and keys, whose heads may be in one tile; and behind them,
    in a chunk of their own, one of more. Rows without keys, and sequences without rows, too."""
    lengths_q = (128, 65, 64, 0, 1, 127, 63, 33, *range(4, 124, 6), 100, 7, 128, 17)
    lengths_k = (128, 128, 3, 9, 128, 0, 64, 65, *range(126, 6, -6), 101, 1, 127, 64)
    for i, dtype in enumerate(DTYPES):
        batch = ragged.make((*lengths_q, 40), (*lengths_k, 300), dtype=dtype, dim=64,
                            heads=(3 * group, 3), sinks=i == 1, seed=group)  # fmt: skip
        assert len(lengths_q) == len(lengths_k) == 32
        for call in ragged.ways(batch).values():
            _check(batch, call, kernel=kernel, **options)


@pytest.mark.parametrize("window", [None, (60, 0)])
def test_a_nan_reaches_no_other_head_of_a_tile(
    window: tuple[int, int] | None, kernel: str | None
) -> None:
    options: dict[str, Any] = {"causal": "bottom_right", "window": window}
    for i, dtype in enumerate(DTYPES):
        batch = ragged.make((100, 7, 63), (120, 64, 63), dtype=dtype, dim=64, heads=(8, 2), seed=i)
        batch.v[0][0, 100, 0, 5] = torch.nan
        batch.k[2][0, 40, 1, 2] = torch.nan
        batch.q[0][0, 33, 5, 1] = torch.nan
        batch.q[1][0, 6, 2, 0] = torch.inf
        for call in ragged.ways(batch).values():
            got = ragged.run(call, DEVICE, kernel=kernel, **options)
            _assert_finite_alike(got, batch.reference(DEVICE, **options)[0])


@pytest.mark.parametrize("group", [2, 8, 64, 71, 128, 129, 192, 193])
@pytest.mark.parametrize(("dim", "dim_v"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_heads_share_a_tile_where_nothing_tells_them_apart(
    sm90: str, group: int, dim: int, dim_v: int
) -> None:
    lengths = (1, 70, 0, 200, 48, 515)
    for i, options in enumerate(({"causal": "bottom_right"}, {}, {"softcap": 2.0})):
        batch = ragged.make((1, 1, 1, 0, 1, 1), lengths, dtype=("fp16", "bf16")[i % 2], dim=dim,
                            dim_v=dim_v, heads=(2 * group, 2), seed=i)  # fmt: skip
        batch.v[1][0, 69, 1] = torch.nan  # of the other head's rows it is none
        for call in ragged.ways(batch).values():
            tables = call.tables | {"max_seqlen_q": 1}
            got = ragged.run(call._replace(tables=tables), DEVICE, kernel=sm90, **options)
            ref, _ = batch.reference(DEVICE, **options)
            out = torch.cat(got.out, 1).transpose(1, 2)
            assert torch.equal(out.isfinite(), ref.out.isfinite())
            dense = got.kernel.replace("_ragged", "").removesuffix("_packed")
            ragged.assert_same_bits(got, batch.dense(dense, DEVICE, **options))


@pytest.mark.parametrize("group", [2, 3, 5, 7, 8, 16, 24, 33, 64])
@pytest.mark.parametrize(("dim", "dim_v"), [(64, 64), (128, 128), (96, 72), (256, 256)])
def test_queries_of_all_heads_share_a_tile(sm90: str, group: int, dim: int, dim_v: int) -> None:
    """Sequences of at most 64 queries. What one row has reaches no other."""
    lengths_q = (1, 64, 5, 0, 8, 33, 63, 2, 4, 17)
    lengths_k = (300, 64, 1500, 9, 3, 0, 70, 129, 1, 515)
    for i, options in enumerate(
        ({"causal": "bottom_right"}, {}, {"causal": "top_left", "scale": 0.3})
    ):
        batch = ragged.make(lengths_q, lengths_k, dtype=("fp16", "bf16")[i % 2], dim=dim,
                            dim_v=dim_v, heads=(3 * group, 3), seed=i)  # fmt: skip
        calls = [*ragged.ways(batch).values(), ragged.paginate(batch, 16, packed=False)]
        for call in calls:
            got = _check(
                batch, call._replace(tables=call.tables | {"max_seqlen_q": 64}),
                kernel=sm90, **options,
            )  # fmt: skip
            assert got.kernel.endswith("_ragged_packed")
        batch = ragged.make(lengths_q, lengths_k, dtype=("fp16", "bf16")[i % 2], dim=dim,
                            dim_v=dim_v, heads=(3 * group, 3), seed=i)  # fmt: skip
        batch.v[2][0, 1497, 1] = torch.nan  # which the last queries alone see, under a causal mask
        batch.q[1][0, 63, 2 * group - 1, 1] = torch.inf
        for call in ragged.ways(batch).values():
            tables = call.tables | {"max_seqlen_q": 64}
            got = ragged.run(call._replace(tables=tables), DEVICE, kernel=sm90, **options)
            _assert_finite_alike(got, batch.reference(DEVICE, **options)[0])


def test_queries_that_no_tile_can_pack(sm90: str) -> None:
    """Such as with sinks, with a window and beyond 64 queries: tiles are of one head."""
    batch = ragged.make((5, 64, 1), (300, 64, 9), dim=128, heads=(8, 2), sinks=True)
    bare = ragged.make((5, 64, 1), (300, 64, 9), dim=128, heads=(8, 2))
    for given, most, options in (
        (batch, 64, {}),
        (bare, 65, {}),
        (bare, 64, {"window": (20, None)}),
        (bare, 64, {"softcap": 2.0}),
    ):
        call = ragged.ways(given)["packed"]
        tables = call.tables | {"max_seqlen_q": most}
        got = _check(given, call._replace(tables=tables), kernel=sm90, **options)
        assert "_ragged" in got.kernel and not got.kernel.endswith("_packed")


def test_blocks_of_decoding(kernel: str | None) -> None:
    batch = ragged.make((1,) * 5, (40,) * 5, dim=128, heads=(12, 3))
    call = ragged.paginate(batch, 16)
    tensors = [x.to(DEVICE) for x in (call.q, call.k, call.v)]
    tables = {name: x.to(DEVICE) for name, x in call.tables.items()}
    plan = fm.attention_plan(*tensors, **tables, max_seqlen_q=1, kernel=kernel)
    fm.flash_attention(*tensors, **tables, max_seqlen_q=1, kernel=kernel)
    assert fm.last_launches() == plan.launches
    if plan.family == "sm89":
        assert plan.grid == (3 * 5, 1, 1)


@pytest.mark.parametrize("count", [1, 2, 129, 2000])
def test_any_number_of_sequences(count: int, kernel: str | None) -> None:
    generator = torch.Generator().manual_seed(count)

    def lengths(most: int) -> list[int]:
        return torch.randint(0, most, (count,), generator=generator).tolist()

    batch = ragged.make(lengths(9), lengths(70), heads=(2, 1))
    for call in ragged.ways(batch).values():
        for bounds in ({}, {"max_seqlen_q": 9, "max_seqlen_k": 70}):
            _check(batch, call._replace(tables=call.tables | bounds), kernel=kernel, causal=True)


def test_bits_do_not_depend_on_bounds(kernel: str | None) -> None:
    batch = _make(dtype="bf16", dim=128)
    for most_q, most_k in ((300, 515), (10**9, 10**15), (301, None)):
        for call in ragged.ways(batch).values():
            tables = call.tables | {"max_seqlen_q": most_q, "max_seqlen_k": most_k}
            call = call._replace(tables=tables)
            _check(batch, call, kernel=kernel, causal="bottom_right")


def test_bounds_that_are_too_small_cut_at_the_end(kernel: str | None) -> None:
    batch = _make(dtype="fp16")
    cut = Batch([x[:, :131] for x in batch.q], [x[:, :140] for x in batch.k],
                [x[:, :140] for x in batch.v])  # fmt: skip
    for call in ragged.ways(batch).values():
        rows = [(b, begin, min(length, 131)) for b, begin, length in call.rows]
        tables = call.tables | {"max_seqlen_q": 131, "max_seqlen_k": 140}
        _check(cut, call._replace(rows=rows, tables=tables), kernel=kernel, causal="bottom_right")


def test_tables_of_any_strides(kernel: str | None) -> None:
    batch = _make()

    def spread(x: torch.Tensor) -> torch.Tensor:
        made = torch.full([3 * n for n in x.shape], -5, dtype=torch.int32, device=DEVICE)
        view = made[tuple(slice(1, None, 3) for _ in x.shape)]
        return view.copy_(x)

    for call in ragged.ways(batch).values():
        q, k, v = (x.to(DEVICE) for x in (call.q, call.k, call.v))
        wanted = {"kernel": kernel, "return_lse": True, "causal": True}
        got, want = (
            fm.flash_attention(q, k, v, **wanted, **{n: to(x) for n, x in call.tables.items()})
            for to in (spread, lambda x: x.to(DEVICE))
        )
        for b, begin, length in call.rows:
            some = slice(begin, begin + length)
            assert torch.equal(got[0][b, some], want[0][b, some])
            assert torch.equal(got[1][b, :, some], want[1][b, :, some])


def test_sequences_share_pages(kernel: str | None) -> None:
    batch = ragged.make((2, 30, 1), (40, 56, 33), dim=128)
    for parts in (batch.k, batch.v):
        for x in parts[1:]:
            x[:, :32] = parts[0][:, :32]
    call = ragged.paginate(batch, 16)
    table = call.tables["page_table"]
    for x in (call.k, call.v):
        x[table[1:, :2].long()] = torch.nan
    table[1:, :2] = table[0, :2]
    _check(batch, call, kernel=kernel, causal="bottom_right")


@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_is_of_the_rows_that_see_it(
    dtype: str, dim: int, dim_v: int, kernel: str | None
) -> None:
    """With keys next to the diagonal and the window's end."""
    batch = ragged.make((200, 7, 90), (230, 300, 90), dtype=dtype, dim=dim, dim_v=dim_v)
    for b, key, column, value in ((0, 100, 5, torch.nan), (0, 180, 7, torch.inf),
                                  (1, 297, 0, torch.nan), (2, 40, 3, -torch.inf)):  # fmt: skip
        batch.v[b][0, key, 0, column] = value
    batch.k[2][0, 70, 1, 2] = torch.nan
    batch.q[0][0, 33, 1, 1] = torch.nan
    options = {"causal": "bottom_right", "window": (60, 0)}
    for call in ragged.ways(batch).values():
        got = ragged.run(call, DEVICE, kernel=kernel, **options)
        _assert_finite_alike(got, batch.reference(DEVICE, **options)[0])
        dense = ragged.dense_kernel(got.kernel)
        if dense is not None:
            ragged.assert_same_bits(got, batch.dense(dense, DEVICE, **options))


@pytest.mark.parametrize(("rows", "pages"), [(1, 40), (90, 40), (300, 40), (90, 8)])
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
def test_pages_that_there_are_not_are_hidden(
    dim: int, dim_v: int, rows: int, pages: int, kernel: str | None
) -> None:
    """As a call without the keys that they would hold. Of 8 pages heads may share tiles."""
    size, length = 16, 16 * pages
    hidden = slice(3, pages - 2)
    for dtype, sinks in (("fp16", False), ("bf16", True)):
        batch = ragged.make((rows, 5), (length, 70), dtype=dtype, dim=dim, dim_v=dim_v,
                            heads=(6, 2), sinks=sinks)  # fmt: skip
        call = ragged.paginate(batch, size)
        table = call.tables["page_table"]
        for x in (call.k, call.v):
            x[table[0, hidden].long()] = torch.nan
        nowhere = [-1, 10**6, call.k.shape[0], -INT_MAX - 1, INT_MAX] * 7
        table[0, hidden] = int32(nowhere[: hidden.stop - hidden.start])
        kept = [*range(hidden.start * size), *range(hidden.stop * size, length)]
        few = Batch(batch.q, [batch.k[0][:, kept], batch.k[1]], [batch.v[0][:, kept], batch.v[1]],
                    batch.sinks)  # fmt: skip
        got = ragged.run(call, DEVICE, sinks=batch.sinks, kernel=kernel)
        ref, usual = few.reference(DEVICE)
        out, lse = torch.cat(got.out, 1).transpose(1, 2), torch.cat(got.lse, 2)
        oracle.assert_near(out, lse, ref, usual, out.dtype)
        # A window over hidden pages alone sees nothing.
        table[0] = -1
        got = ragged.run(call, DEVICE, sinks=batch.sinks, kernel=kernel, window=(100, None))
        assert (got.out[0] == 0).all()
        if batch.sinks is None:
            assert got.lse[0].isneginf().all()
        else:
            alone = batch.sinks.to(DEVICE)[None, :, None].expand_as(got.lse[0])
            torch.testing.assert_close(got.lse[0], alone, rtol=0, atol=1e-3)
        assert got.lse[1].isfinite().all()


def _hostile(seed: int) -> Call:
    """Numbers from anywhere, in tables of every kind."""
    generator = torch.Generator().manual_seed(seed)
    batch = 6

    def numbers(*shape: int) -> torch.Tensor:
        return int32(HOSTILE)[torch.randint(len(HOSTILE), shape, generator=generator)]

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).half()

    tables: dict[str, Any] = {}
    packed_q = seed % 4 < 2
    if packed_q:
        tables["cu_seqlens_q"] = numbers(batch + 1)
    first, rows = (7, 3) if seed % 3 == 0 else (1, 13) if seed % 3 == 1 else (7, 13)
    if seed % 3 == 0:
        tables["page_table"] = numbers(batch, 5)
    elif seed % 3 == 1:
        tables["cu_seqlens_k"] = numbers(batch + 1)
    else:
        tables["batch_index"] = numbers(batch)
    for name in ("seqused_q", "seqused_k", "k_begin"):
        if torch.rand((), generator=generator) < 0.6:
            tables[name] = numbers(batch)
    length = (12, 400)[seed % 2]
    q = tensor(1 if packed_q else batch, length, 4, 64)
    return Call(q, tensor(first, rows, 2, 64), tensor(first, rows, 2, 64), [], tables)


@pytest.mark.parametrize("seed", range(48))
def test_hostile_numbers_stay_inside_the_tensors(seed: int, kernel: str | None) -> None:
    """Beside the CPU, on tensors that NaN surround."""
    call = _hostile(seed)
    poison = 0x5A5A  # a number, as bits
    shape = (*call.q.shape[:3], 64)
    options = {"causal": ("bottom_right", "top_left", False)[seed % 3], "return_lse": True}

    def outputs(device: str) -> tuple[memory.Placed, memory.Placed]:
        out = memory.place(shape, torch.float16, device)
        lse = memory.place((shape[0], shape[2], shape[1]), torch.float32, device)
        memory.bits(out.view).fill_(poison)
        lse.view.fill_(-77.0)
        for placed in (out, lse):
            placed.remember()
        return out, lse

    results = []
    for device, family in ((DEVICE, kernel), ("cpu", None)):
        inputs = [memory.place_values(x.to(device)).view for x in (call.q, call.k, call.v)]
        tables = {name: memory.place_values(x.to(device)).view for name, x in call.tables.items()}
        out, lse = outputs(device)
        fm.flash_attention(*inputs, **tables, **options, out=out.view, lse=lse.view, kernel=family)
        assert out.intact() and lse.intact()
        results.append((out.view.cpu(), lse.view.cpu()))
    (out, lse), (want, want_lse) = results
    untouched = memory.bits(out) == poison
    assert torch.equal(untouched, memory.bits(want) == poison)
    assert torch.equal(lse == -77.0, want_lse == -77.0)
    assert out.isfinite().all()
    owners = torch.zeros(shape[0], shape[1], dtype=torch.int32)
    for b in range(6):
        begin, end = 0, shape[1]
        if "cu_seqlens_q" in call.tables:
            begin, end = call.tables["cu_seqlens_q"][b : b + 2].clamp(0, shape[1]).tolist()
        count = max(end - begin, 0)
        if "seqused_q" in call.tables:
            count = min(max(int(call.tables["seqused_q"][b]), 0), count)
        owners[b if shape[0] > 1 else 0, begin : begin + count] += 1
    assert torch.equal(owners == 0, untouched.all(-1).all(-1))
    alone = owners == 1  # rows of two sequences are either's
    torch.testing.assert_close(out[alone], want[alone], rtol=2e-3, atol=4e-3)
    of_rows, want_of_rows = (x.transpose(1, 2)[alone] for x in (lse, want_lse))
    torch.testing.assert_close(of_rows, want_of_rows, rtol=0, atol=1e-3)


def _sizes(generator: torch.Generator, total: int, count: int) -> list[int]:
    """So many lengths, some of them 0, of so many rows at most."""
    cuts = torch.randint(0, total + 1, (count,), generator=generator).sort().values.tolist()
    return [b - a for a, b in itertools.pairwise([0, *cuts])]


@pytest.mark.parametrize("keys", ["packed", "paged"])
def test_one_capture_serves_any_lengths(keys: str, kernel: str | None) -> None:
    generator = torch.Generator().manual_seed(5)
    total_q, total_k, count, size = 1500, 2600, 9, 16
    pages = total_k // size + count + 3
    rows = (1, total_k) if keys == "packed" else (pages, size)
    static = {
        "q": torch.zeros(1, total_q, 4, 128, dtype=torch.bfloat16, device=DEVICE),
        "k": torch.zeros(*rows, 2, 128, dtype=torch.bfloat16, device=DEVICE),
        "v": torch.zeros(*rows, 2, 128, dtype=torch.bfloat16, device=DEVICE),
    }
    tables = {"cu_seqlens_q": torch.zeros(count + 1, dtype=torch.int32, device=DEVICE)}
    if keys == "packed":
        tables["cu_seqlens_k"] = torch.zeros(count + 1, dtype=torch.int32, device=DEVICE)
    else:
        tables["seqused_k"] = torch.zeros(count, dtype=torch.int32, device=DEVICE)
        tables["page_table"] = torch.zeros(count, pages, dtype=torch.int32, device=DEVICE)
    options = {"causal": "bottom_right", "return_lse": True, "kernel": kernel}
    fm.flash_attention(**static, **tables, **options)  # loads the code
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fm.flash_attention(**static, **tables, **options)
    ran = fm.last_launches()[0].kernel
    for seed in range(6):
        lengths_q = [0] * count if seed == 4 else _sizes(generator, total_q, count)
        lengths_k = [0] * count if seed == 5 else _sizes(generator, total_k, count)
        batch = ragged.make(lengths_q, lengths_k, dtype="bf16", dim=128, seed=seed)
        call = ragged.paginate(batch, size, seed=seed)
        if keys == "packed":
            cu = {"cu_seqlens_k": starts(lengths_k)}
            call = call._replace(
                k=ragged.pack(batch.k), v=ragged.pack(batch.v), tables=call.tables | cu
            )
        for name, x in (("q", call.q), ("k", call.k), ("v", call.v)):
            static[name].fill_(torch.nan)
            axis = 0 if keys == "paged" and name != "q" else 1
            static[name].narrow(axis, 0, x.shape[axis]).copy_(x)
        for name, table in tables.items():
            given = call.tables[name]
            table.fill_(-1)
            table[tuple(slice(0, n) for n in given.shape)] = given.to(DEVICE)
        out.fill_(-77.0)
        lse.fill_(-77.0)
        graph.replay()
        got = ragged.Result([], [], ran)
        for _, begin, length in call.rows:
            some = slice(begin, begin + length)
            got.out.append(out[:, some])
            got.lse.append(lse[:, :, some])
        ref, usual = batch.reference(DEVICE, causal="bottom_right")
        heads_first = torch.cat(got.out, 1).transpose(1, 2)
        oracle.assert_near(heads_first, torch.cat(got.lse, 2), ref, usual, out.dtype)
        dense = ragged.dense_kernel(ran)
        if dense is not None:
            ragged.assert_same_bits(got, batch.dense(dense, DEVICE, causal="bottom_right"))
        assert (out[:, sum(lengths_q) :] == -77.0).all()
        assert (lse[:, :, sum(lengths_q) :] == -77.0).all()


def test_lengths_are_read_when_the_call_computes(kernel: str | None) -> None:
    """By a kernel that is ahead of it on the stream, which the call may not overtake."""
    batch = _make(dim=128, dtype="bf16")
    call = ragged.ways(batch)["paged"]
    q, k, v = (x.to(DEVICE) for x in (call.q, call.k, call.v))
    right = {name: x.to(DEVICE) for name, x in call.tables.items()}
    options = {"causal": True, "return_lse": True, "kernel": kernel}
    rows = slice(0, sum(batch.lengths_q))
    want = [x.clone() for x in fm.flash_attention(q, k, v, **right, **options)]
    tables = {name: torch.zeros_like(x) for name, x in right.items()}
    copies = []
    for run in range(40):
        for name, x in tables.items():
            x.copy_(right[name] if run % 2 == 0 else torch.zeros_like(x))
        out, lse = fm.flash_attention(q, k, v, **tables, **options)
        if run % 2 == 0:
            copies.append((out[:, rows].clone(), lse[:, :, rows].clone()))
    for out, lse in copies:
        assert torch.equal(out, want[0][:, rows])
        assert torch.equal(lse, want[1][:, :, rows])


def test_calls_that_read_what_the_one_before_wrote(kernel: str | None) -> None:
    batch = ragged.make((70, 1, 300), (200, 31, 300), dim=64, dtype="bf16")
    call = ragged.ways(batch)["packed"]
    x, k, v = (
        ragged.pack(batch.q).to(DEVICE),
        *(ragged.pack(parts).to(DEVICE) for parts in (batch.k, batch.v)),
    )
    tables = {name: table.to(DEVICE) for name, table in call.tables.items()}

    def chain(wait: bool) -> torch.Tensor:
        y = x
        for _ in range(50):
            y = fm.flash_attention(y, k, v, **tables, causal=True, kernel=kernel)
            if wait:
                torch.cuda.synchronize()
        return y

    want = chain(wait=True)
    for _ in range(5):
        assert torch.equal(memory.bits(chain(wait=False)), memory.bits(want))


def test_the_plan_is_the_launch(kernel: str | None) -> None:
    """And knows no lengths: blocks are bounded by rows, sequences and bounds."""
    batch = _make(dim=128, heads=(6, 2))
    for call, bound in itertools.product(ragged.ways(batch).values(), (None, 100)):
        tensors = [x.to(DEVICE) for x in (call.q, call.k, call.v)]
        tables = {name: x.to(DEVICE) for name, x in call.tables.items()}
        options = {**tables, "max_seqlen_q": bound, "causal": True, "kernel": kernel}
        plan = fm.attention_plan(*tensors, **options)
        fm.flash_attention(*tensors, **options)
        assert fm.last_launches() == plan.launches
        assert plan.flops == 0
        assert plan.microseconds > 0
        assert fm.last_launches()[0].local_bytes == 0
        blank = {name: torch.zeros_like(x) for name, x in tables.items()}
        assert fm.attention_plan(*tensors, **options | blank) == plan
        if plan.family != "sm89":
            continue
        rows, count = call.q.shape[1], len(batch.q)
        blocks = count * -(-min(rows, bound or rows) // plan.tile_q)
        if "cu_seqlens_q" in tables:
            blocks = min(blocks, rows // plan.tile_q + count)
        assert plan.grid == (6 * blocks, 1, 1)
        assert plan.workspace_bytes == 0


def test_rows_of_nothing(kernel: str | None) -> None:
    """No sequences, no rows, no keys."""
    for lengths_q, lengths_k in (((0, 0), (5, 7)), ((3, 200), (0, 0)), ((0,), (0,))):
        batch = ragged.make(lengths_q, lengths_k)
        for name, call in ragged.ways(batch).items():
            if name != "paged" or sum(lengths_k) > 0:
                _check(batch, call, kernel=kernel, causal="top_left")
    q, k = (torch.zeros(1, n, 2, 64, dtype=torch.float16, device=DEVICE) for n in (5, 9))
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    out = torch.full_like(q, -77.0)
    fm.flash_attention(q, k, k, cu_seqlens_q=none, cu_seqlens_k=none, out=out, kernel=kernel)
    assert (out == -77.0).all()


def test_offsets_beyond_32_bits(kernel: str | None) -> None:
    """Pages behind the first 2^31 elements."""
    size, heads, dim = 16, 8, 128
    count = 2**31 // (size * heads * dim) + 20
    if torch.cuda.mem_get_info()[0] < 3 * count * size * heads * dim:
        pytest.skip("needs 7 GB of the GPU's memory")
    pages = torch.empty(count, size, heads, dim, dtype=torch.float16, device=DEVICE)
    batch = ragged.make((40, 1), (100, 33), dim=dim, heads=(heads, heads))
    batch.v = batch.k  # one tensor is both
    table = torch.full((2, 7), -1, dtype=torch.int32)
    last = iter(range(count - 1, 0, -1))
    for b, x in enumerate(batch.k):
        for first in range(0, x.shape[1], size):
            table[b, first // size] = page = next(last)
            part = x[0, first : first + size]
            pages[page, : len(part)] = part.to(DEVICE)
    got = fm.flash_attention(
        ragged.pack(batch.q).to(DEVICE), pages, pages, page_table=table.to(DEVICE),
        cu_seqlens_q=starts((40, 1)).to(DEVICE), seqused_k=int32([100, 33]).to(DEVICE),
        causal=True, return_lse=True, kernel=kernel,
    )  # fmt: skip
    ref, usual = batch.reference(DEVICE, causal=True)
    oracle.assert_near(got[0].transpose(1, 2), got[1], ref, usual, torch.float16)


def test_operators(kernel: str | None) -> None:
    """Under torch.compile with other lengths, without another graph."""
    counted = 0

    def backend(module: Any, _: Any) -> Any:
        nonlocal counted
        counted += 1
        return module

    def attend(q: Any, k: Any, v: Any, tables: Any) -> Any:
        return fm.flash_attention(q, k, v, **tables, causal=True, return_lse=True, kernel=kernel)

    compiled = torch.compile(attend, backend=backend, fullgraph=True, dynamic=True)
    for seed in range(3):
        batch = ragged.make((40 + seed, 3, 9 - seed), (70, 5 + seed, 90 - seed), seed=seed)
        call = ragged.paginate(batch, 16, seed=seed)
        tensors = [x.to(DEVICE) for x in (call.q, call.k, call.v)]
        tables = {name: x.to(DEVICE) for name, x in call.tables.items()}
        got = compiled(*tensors, tables)
        for x, y in zip(got, attend(*tensors, tables), strict=True):
            assert torch.equal(x, y)
    assert counted == 1


def test_families_without_tables_refuse() -> None:
    batch = _make()
    call = ragged.ways(batch)["packed"]
    with pytest.raises(NotImplementedError, match="whose tables its kernels do not read"):
        ragged.run(call, DEVICE, kernel="sm89_few_rows")
    with pytest.raises(NotImplementedError, match=r"_ragged serves this call, not"):
        ragged.run(call, DEVICE, kernel="attention_forward_sm89_fp16_d64_dv64")
    q = call.q.to(DEVICE)
    with pytest.raises(NotImplementedError, match="serves this call, not"):
        fm.flash_attention(q, q, q, kernel="attention_forward_sm89_fp16_d64_dv64_ragged")


def test_the_split_schedule_refuses(sm90: str) -> None:
    call = ragged.ways(_make())["packed"]
    with pytest.raises(NotImplementedError, match="whose tables its kernels do not read"):
        ragged.run(call, DEVICE, kernel=f"{sm90}_split_kv")
    with pytest.raises(NotImplementedError, match=r"_ragged serves this call, not"):
        ragged.run(call, DEVICE, kernel=f"attention_forward_{sm90}_fp16_d64_dv64")


@pytest.mark.parametrize("way", ["packed", "padded", "paged"])
def test_later_tiles_of_long_sequences(sm90: str, way: str) -> None:
    """Rounds, L2 swizzle groups and chunks of sequences: more tiles than there are blocks, of few
    sequences and of many."""
    for lengths in ((5000, 3, 2100, 0, 900), [1 + 37 * b % 300 for b in range(100)]):
        batch = ragged.make(lengths, lengths, dtype="bf16", dim=128, heads=(6, 3))
        for options in ({"causal": "bottom_right"}, {}, {"window": (200, 0)}):
            _check(batch, ragged.ways(batch)[way], kernel=f"{sm90}_whole_tiles", **options)
