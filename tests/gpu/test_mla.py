"""Values that are the first columns of their keys, in the same memory: multi-head latent attention
with absorbed queries, by blocks that share all keys."""

from __future__ import annotations

from typing import Any

import flashmoe_science as fm
import kernels
import pytest
import torch
from gpu import memory, oracle, ragged
from gpu.ragged import Batch, Call, int32

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
FAMILY = "sm90_mla"
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (700, None)},
    "both_ends": {"window": (300, 3)},
    "top_left": {"causal": "top_left", "window": (25, 0)},
    "softcap": {"softcap": 1.5, "causal": "bottom_right"},
}


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if torch.cuda.get_device_capability(DEVICE) != (9, 0):
        pytest.skip("the kernel is of sm_90a alone")


def make(
    queries: list[int], lengths: list[int], *, dim: int = 576, dim_v: int = 512, **how: Any
) -> Batch:
    batch = ragged.make(queries, lengths, dim=dim, **how)
    return Batch(batch.q, batch.k, [k[..., :dim_v] for k in batch.k], batch.sinks)


def latent(call: Call) -> Call:
    return call._replace(latent=call.v.shape[3])


def check(batch: Batch, call: Call, kernel: str = FAMILY, **how: Any) -> ragged.Result:
    got = ragged.check(batch, latent(call), DEVICE, kernel=kernel, **how)
    dtype = "bf16" if batch.q[0].dtype == torch.bfloat16 else "fp16"
    known = {x.table_name for x in kernels.attention(FAMILY) if x.dtype == dtype}
    assert got.kernel in known
    return got


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("heads", [(128, 1), (16, 1), (6, 2), (80, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_way_to_say_where_sequences_are(
    dtype: str, heads: tuple[int, int], options: dict[str, Any]
) -> None:
    queries = [1, 2, 1, 1, 0, 4, 1]
    lengths = [130, 65, 0, 1000, 64, 700, 1]
    batch = make(queries, lengths, dtype=dtype, heads=heads, sinks=True, seed=heads[0])
    for call in (*ragged.ways(batch).values(), ragged.paginate(batch, 64)):
        check(batch, call, **options)


@pytest.mark.parametrize("size", [1, 2, 5, 16, 48, 64, 128])
@pytest.mark.parametrize("heads", [(128, 1), (16, 1)], ids=str)
def test_pages_of_any_size(heads: tuple[int, int], size: int) -> None:
    """Long sequences beside short ones: tiles that many blocks share, and blocks of many tiles."""
    lengths = [9000, 3, 64, 0, 129, 128, 1500, 63, 4001, 1]
    batch = make([1] * len(lengths), lengths, dtype="bf16", heads=heads, seed=size)
    check(batch, ragged.paginate(batch, size, packed=False), causal="bottom_right")


@pytest.mark.parametrize("count", [1, 7, 60, 300])
def test_cuts_beside_tiles_and_within(count: int) -> None:
    lengths = [1 + 37 * b % 297 for b in range(count)]
    batch = make([1] * count, lengths, dtype="bf16", heads=(16, 1), seed=count)
    # Bounds say how many blocks there are, and so where cuts are.
    bounds = {"max_seqlen_q": 1, "max_seqlen_k": max(lengths)}

    def of_pages(size: int) -> ragged.Result:
        call = ragged.paginate(batch, size)
        return check(batch, call._replace(tables=call.tables | bounds))

    ragged.assert_same_bits(of_pages(16), of_pages(64))


def _shares(heads: int) -> int:
    """Blocks of each row tile."""
    count = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    return int(count // max(heads // 64, 1))


@pytest.mark.parametrize("heads", [(128, 1), (16, 1)], ids=str)
@pytest.mark.parametrize("tiles", [1, 2])
def test_whole_tiles_where_sequences_are_alike(tiles: int, heads: tuple[int, int]) -> None:
    """As many sequences as shares, or twice as many: each is in one block, and has the bits that it
    has alone in a share."""
    keys, shares = 700, _shares(heads[0])
    batch = make([1] * (tiles * shares), [keys] * (tiles * shares), dtype="bf16", heads=heads)
    some = Batch(*(x[:shares] for x in (batch.q, batch.k, batch.v)), batch.sinks)
    whole = check(batch, ragged.paginate(batch, 64), causal="bottom_right")
    alone = check(some, ragged.paginate(some, 64), causal="bottom_right")
    for got, want in zip(whole.out, alone.out, strict=False):
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("heads", [(128, 1), (16, 1)], ids=str)
@pytest.mark.parametrize("count", [1, 3, 33, 65, 67, 100, 140, 390])
def test_shares_that_begin_with_sequences(count: int, heads: tuple[int, int]) -> None:
    """Several shares of a sequence, several sequences of a share, cuts where neither is about
    equal, and sequences without queries or keys between them."""
    for lengths in ([400] * count, [(1500 if b % 5 == 0 else 70 * (b % 3)) for b in range(count)]):
        queries = [0 if b % 7 == 3 else 1 for b in range(count)]
        batch = make(queries, lengths, dtype="bf16", heads=heads, seed=count)
        check(batch, ragged.paginate(batch, 64), causal="bottom_right")


@pytest.mark.parametrize(
    "dims", [(576, 512), (512, 512), (320, 256), (264, 8), (568, 504)], ids=str
)
@pytest.mark.parametrize("heads", [16, 24])
def test_other_head_dimensions(heads: int, dims: tuple[int, int]) -> None:
    """Queries of 16 heads come by boxes, of 24 they do not."""
    batch = make(
        [1, 3, 2], [500, 77, 4], dim=dims[0], dim_v=dims[1], dtype="fp16", heads=(heads, 1)
    )
    check(batch, ragged.paginate(batch, 16), causal="bottom_right")


@pytest.mark.parametrize(
    "compiled", sorted(kernels.attention(FAMILY)), ids=lambda kernel: kernel.table_name
)
@pytest.mark.parametrize("heads", [16, 64, 80, 128, 176])
def test_every_kernel_with_any_number_of_row_tiles(compiled: kernels.Kernel, heads: int) -> None:
    batch = make([1, 2, 4, 0, 1], [500, 77, 2000, 64, 0], dtype=compiled.dtype, heads=(heads, 1))
    got = check(batch, ragged.paginate(batch, 64), compiled.table_name, causal="bottom_right")
    assert got.kernel == compiled.table_name


def test_prompts() -> None:
    batch = make([150, 1, 33], [400, 900, 33], dtype="bf16", heads=(16, 1))
    check(batch, ragged.paginate(batch, 64), causal="bottom_right")


def test_infinities_and_nan_reach_the_rows_that_see_them_alone() -> None:
    """In a key that the last query alone sees; and a NaN in a column that is no value."""
    for wild in (torch.inf, torch.nan):
        batch = make([3, 1], [200, 70], dtype="bf16", heads=(16, 1))
        batch.k[0][0, 199, 0, 5] = wild
        batch.k[1][0, 3, 0, 560] = torch.nan
        for q in batch.q:
            q[..., 5] = 0
        values = [k[..., :512] for k in batch.k]
        got = ragged.run(latent(ragged.paginate(Batch(batch.q, batch.k, values), 16)), DEVICE,
                         kernel=FAMILY, causal="bottom_right")  # fmt: skip
        assert got.out[0][:, :2].isfinite().all()
        assert not got.out[0][:, 2].isfinite().all()
        assert not got.out[1].isfinite().any()


def test_large_logits() -> None:
    batch = make([1, 2], [300, 100], dtype="bf16", heads=(16, 1))
    for q in batch.q:
        q *= 1e4
    check(batch, ragged.paginate(batch, 64), causal="bottom_right")


def test_the_same_bits_on_every_run() -> None:
    lengths = [5000, 100, 3000, 1, 0, 64]
    batch = make([1] * 6, lengths, dtype="bf16", heads=(128, 1))
    call = latent(ragged.paginate(batch, 64))
    first = ragged.run(call, DEVICE, kernel=FAMILY)
    for _ in range(5):
        ragged.assert_same_bits(ragged.run(call, DEVICE, kernel=FAMILY), first)


@pytest.mark.parametrize("heads", [128, 16])
def test_one_capture_serves_other_lengths(heads: int) -> None:
    """And other pages; with NaN in all that no sequence has, and numbers that are no page's."""
    count, size, pages = 12, 64, 700
    generator = torch.Generator().manual_seed(2)
    q = torch.randn((count, 1, heads, 576), device=DEVICE).bfloat16()
    k = torch.full((pages, size, 1, 576), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    used = torch.zeros(count, dtype=torch.int32, device=DEVICE)
    table = torch.full((count, 256), -1, dtype=torch.int32, device=DEVICE)

    def call() -> Any:
        return fm.flash_attention(q, k, k[..., :512], seqused_k=used, page_table=table,
                                  return_lse=True, kernel=FAMILY)  # fmt: skip

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for lengths in ([3] * 12, [700, 0, 64, 65, 5000, 1, 1, 128, 900, 300, 0, 2], [0] * 12,
                    [12000] + [100] * 11):  # fmt: skip
        k.fill_(torch.nan)
        table.copy_(int32([-1, pages, ragged.INT_MAX, -ragged.INT_MAX - 1]).repeat(count, 64))
        places = torch.randperm(pages, generator=generator).to(DEVICE)
        keys = []
        for b, length in enumerate(lengths):
            mine, places = places[: -(-length // size)], places[-(-length // size) :]
            table[b, : len(mine)] = mine.int()
            rows = torch.arange(length, device=DEVICE)
            each = torch.randn(length, 1, 576, device=DEVICE).bfloat16()
            k.flatten(0, 1)[mine[rows // size] * size + rows % size] = each
            keys.append(each[None])
        used.copy_(int32(lengths))
        graph.replay()
        for b, each in enumerate(keys):
            given = (q[b : b + 1], each, each[..., :512])
            ref = oracle.attention_float64(*given)
            oracle.assert_near(out[b : b + 1].transpose(1, 2), lse[b : b + 1], ref,
                               oracle.plain(*given).out, torch.bfloat16)  # fmt: skip


def test_hidden_pages_and_hostile_lengths() -> None:
    """A page that is none hides its keys; lengths are cut to what the table has room for."""
    pages, size = 9, 16
    k = torch.randn((pages, size, 1, 576), device=DEVICE).bfloat16()
    q = torch.randn((len(ragged.HOSTILE), 2, 16, 576), device=DEVICE).bfloat16()
    numbers = [[1, -1, 4, 9, 2, 3, ragged.INT_MAX, 0], [-1] * 8]
    table = int32([numbers[b % 2] for b in range(len(ragged.HOSTILE))]).to(DEVICE)
    used = int32(list(ragged.HOSTILE)).to(DEVICE)
    placed = memory.place_values(k)
    out, lse = fm.flash_attention(
        q, placed.view, placed.view[..., :512], seqused_k=used, page_table=table, causal=True,
        return_lse=True, kernel=FAMILY,
    )  # fmt: skip
    want, want_lse = fm.flash_attention(
        q.cpu().float(), k.cpu().float(), k.cpu().float()[..., :512], seqused_k=used.cpu(),
        page_table=table.cpu(), causal=True, return_lse=True,
    )  # fmt: skip
    torch.testing.assert_close(out.cpu().float(), want, rtol=2e-2, atol=2e-2, equal_nan=True)
    torch.testing.assert_close(lse.cpu(), want_lse, rtol=1e-3, atol=1e-3, equal_nan=True)


def test_who_takes_what() -> None:
    k = torch.zeros((64, 64, 1, 576), dtype=torch.bfloat16, device=DEVICE)
    q = torch.zeros((4, 1, 128, 576), dtype=torch.bfloat16, device=DEVICE)
    tables = {
        "page_table": torch.arange(64, dtype=torch.int32, device=DEVICE).reshape(4, 16),
        "seqused_k": int32([1000] * 4).to(DEVICE),
    }
    assert fm.attention_plan(q, k, k[..., :512], **tables).family == FAMILY
    for v in (k[..., :512].clone(), k[..., 64:]):
        with pytest.raises(NotImplementedError, match="a v of its own"):
            fm.flash_attention(q, k, v, **tables, kernel=FAMILY)
        with pytest.raises(NotImplementedError, match="head dimensions 576 of q and k and 512 of"):
            fm.flash_attention(q, k, v, **tables)
    with pytest.raises(NotImplementedError, match="dense batches"):
        fm.flash_attention(q, k[:4], k[:4, :, :, :512], kernel=FAMILY)
    with pytest.raises(NotImplementedError, match="split_size"):
        fm.flash_attention(q, k, k[..., :512], **tables, split_size=256, kernel=FAMILY)


@pytest.mark.parametrize("split_size", [None, 64], ids=str)
def test_prompts_beside_decoding_are_not_its_own(split_size: int | None) -> None:
    """Prompts beside decoding are by kernels that divide no keys, so that with `split_size` bits
    depend on the sequence alone, whether values lie in keys or elsewhere."""
    generator = torch.Generator(DEVICE).manual_seed(7)
    queries, lengths = [1, 300, 1, 1, 64], [900, 700, 1, 3000, 64]
    k = torch.randn(100, 64, 1, 128, generator=generator, device=DEVICE).bfloat16()
    q = torch.randn(sum(queries), 16, 128, generator=generator, device=DEVICE).bfloat16()
    pages = torch.randperm(100, generator=generator, device=DEVICE)
    table = torch.stack([pages[:50], pages[50:], *(pages[i : i + 50] for i in (3, 20, 40))]).int()
    ends = torch.tensor([0, *queries]).cumsum(0)
    call: dict[str, Any] = {
        "cu_seqlens_q": int32(ends).to(DEVICE),
        "seqused_k": int32(lengths).to(DEVICE),
        "page_table": table,
        "causal": "bottom_right",
        "split_size": split_size,
        "max_seqlen_q": 300,
    }
    within = fm.flash_attention(q[None], k, k, **call)
    plan = fm.attention_plan(q[None], k, k, **call)
    if split_size is not None:
        assert plan.family == "mixed"
        assert not any(FAMILY in launch.kernel for launch in plan.launches)
        assert torch.equal(within, fm.flash_attention(q[None], k, k.clone(), **call))
    for i, (begin, end, length) in enumerate(zip(ends, ends[1:], lengths, strict=False)):
        rows = k[table[i].long()].reshape(-1, 1, 128)[:length].double().expand(-1, 16, -1)
        own = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in (q[begin:end].double(), rows, rows)),
            attn_mask=torch.ones(end - begin, length, dtype=torch.bool, device=DEVICE).tril(
                length - int(end - begin)
            ),
        ).transpose(0, 1)
        torch.testing.assert_close(within[0, begin:end].double(), own, atol=0.02, rtol=0.02)
