"""Split KV, a schedule of the sm90 family: query heads packed into tiles, keys split over blocks,
and which calls it takes."""

from __future__ import annotations

import dataclasses
import itertools

import flashmoe_science as fm
import kernels
import pytest
import torch
from gpu import cases, families, memory
from gpu.cases import Case
from kernels import Kernel

pytestmark = pytest.mark.gpu

DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
SPLIT_KERNELS = sorted(kernels.attention("sm90_split_kv"))


@pytest.fixture(autouse=True)
def _served() -> None:
    reason = families.why_not("sm90_split_kv")
    if reason is not None:
        pytest.skip(reason)


def _plan(case: Case) -> fm.AttentionPlan:
    return fm.attention_plan_for(
        batch=case.batch, seq_q=case.seq_q, seq_k=case.seq_k, heads_q=case.heads_q,
        heads_kv=case.heads_kv, dim=case.dim, dim_v=case.dim_v, dtype=case.dtype, device="cuda:0",
        causal=False if case.causal == "none" else case.causal, window=case.window,
        softcap=case.softcap, kernel=case.kernel,
    )  # fmt: skip


def _check(case: Case) -> int:
    """One call, right, with nothing else touched, on the planned grid; its parts of a tile."""
    plan = _plan(case)
    try:
        cases.check_case(case, "cuda:0")
    except AssertionError as error:
        raise AssertionError(f"{case} ({plan}): {error}") from error
    assert families.of_plan(plan) == "sm90_split_kv"
    assert plan.grid == (families.blocks(case, plan), 1, 1)
    assert fm.last_launches() == plan.launches
    assert len(plan.launches) == (2 if plan.workspace_bytes > 0 else 1)
    assert plan.workspace_bytes <= 2**24
    return families.parts(case, plan)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 12, 16, 33, 64, 71])
@pytest.mark.parametrize("keys", [150, 1999])
def test_rows_of_all_heads_of_a_group_share_a_tile(group: int, keys: int) -> None:
    """Groups of rows that are full and not, one, two and three of them a tile, parts of it."""
    options = itertools.product(DIMS, cases.CAUSAL)
    for i, ((dim, dim_v), causal) in enumerate(options):
        _check(Case(dtype=("fp16", "bf16")[i % 2], batch=1 + i % 2, seq_q=(1, 5, 17, 33, 70)[i % 5],
                    seq_k=keys, heads_q=2 * group, heads_kv=2, dim=dim, dim_v=dim_v, causal=causal,
                    layout=("bshd", "bhsd")[i % 2], kernel="sm90_split_kv", seed=i))  # fmt: skip


@pytest.mark.parametrize("kernel", SPLIT_KERNELS, ids=lambda kernel: kernel.table_name)
def test_every_kernel_by_name(kernel: Kernel) -> None:
    parts = []
    for i, (seq_q, seq_k, group) in enumerate(
        ((64, 5000, 4), (300, 310, 1), (9, 700, 7), (130, 1025, 8))
    ):
        for dim, dim_v in ((kernel.dim, kernel.dim_v), (kernel.dim - 24, kernel.dim_v - 40)):
            case = Case(dtype=kernel.dtype, batch=2, seq_q=seq_q, seq_k=seq_k, heads_q=2 * group,
                        heads_kv=2, dim=dim, dim_v=dim_v, causal=cases.CAUSAL[i % 3],
                        softcap=20.0 if kernel.capped else None, kernel=kernel.table_name,
                        seed=i)  # fmt: skip
            parts.append(_check(case))
            assert fm.last_launches()[0].kernel == kernel.table_name
    assert max(parts) > 4


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("dim", "dim_v"), [*DIMS, (96, 96), (72, 40)])
def test_parts_of_tiles(dtype: str, dim: int, dim_v: int) -> None:
    """Parts without a key that some rows, or all, see; steps that parts do not divide."""
    shapes = (
        (64, 8192, 2, 4, None),
        (33, 40000, 1, 7, None),
        (200, 3001, 3, 1, (1000, 0)),
        (500, 4096, 1, 2, (100, 30)),
        (700, 300, 1, 1, None),
        (150, 9000, 2, 3, (8000, None)),
    )
    parts = []
    for i, (seq_q, seq_k, heads_kv, group, window) in enumerate(shapes):
        for causal in cases.CAUSAL:
            if causal != "none" and window is not None and window[1] not in (None, 0):
                continue
            case = Case(dtype=dtype, batch=1 + i % 2, seq_q=seq_q, seq_k=seq_k,
                        heads_q=heads_kv * group, heads_kv=heads_kv, dim=dim, dim_v=dim_v,
                        causal=causal, window=window, layout=("bshd", "bhsd")[i % 2],
                        kernel="sm90_split_kv", entry=("python", "c")[i % 2],
                        values=("normal", "peaked", "rising")[i % 3], seed=i)  # fmt: skip
            parts.append(_check(case))
    assert max(parts) > 16


@pytest.mark.parametrize("causal", cases.CAUSAL)
@pytest.mark.parametrize("dim", [64, 128])
def test_stream_k_begins_and_ends_within_tiles(dim: int, causal: str) -> None:
    """A few tiles less and more than blocks, and more again, of all sizes of groups: whole ones and
    parts of others are the same block's. Twice the same bits. (From the top left rows of many heads
    would see too few keys for tiles to be cut.)"""
    uneven = 0
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    tile = 192 if dim == 64 else 128
    groups = (1,) * 8 if causal == "top_left" else (1, 4, 5, 7, 8, 16, 64, 71)
    for i, group in enumerate(groups):
        heads_kv = (1, 2, 3)[i % 3]
        batch = (2, 1)[i % 2]
        tiles = blocks * (3, 5, 4, 8, 13)[i % 5] // (5, 4, 3, 3, 4)[i % 5] // (heads_kv * batch)
        case = Case(dtype=("fp16", "bf16")[i % 2], batch=batch,
                    seq_q=max(1, tiles * tile // group) + i, seq_k=(4001, 4501, 5003)[i % 3],
                    heads_q=heads_kv * group, heads_kv=heads_kv, dim=dim, dim_v=dim,
                    causal=causal, window=(None, (700, 0))[i % 4 == 3],
                    softcap=(None, 20.0)[i % 5 == 4], layout=("bshd", "bhsd")[i % 2],
                    values=("normal", "rising")[i % 2], kernel="sm90_split_kv",
                    entry=("c", "python")[i % 2], seed=i)  # fmt: skip
        _check(case)
        uneven += families.is_uneven(case, _plan(case))
        q, k, v = cases.make_values(case, "cuda:0")
        options = {
            **case.mask,
            "layout": case.layout,
            "return_lse": True,
            "kernel": "sm90_split_kv",
        }
        first, again = (fm.flash_attention(q, k, v, **options) for _ in "12")
        assert all(
            torch.equal(memory.bits(a), memory.bits(b)) for a, b in zip(first, again, strict=True)
        )
    if (
        torch.cuda.get_device_properties(0).multi_processor_count == 132
    ):  # whose estimates are known
        assert uneven > 2


@pytest.mark.parametrize("window", [None, (300, 0), (2000, None), (64, 40)])
def test_stream_k_of_tiles_of_unequal_length(window: tuple[int, int | None] | None) -> None:
    """From none to all of the keys, and rows that see none."""
    uneven = 0
    for i, (heads_q, heads_kv, seq_q, seq_k, dim, batch) in enumerate(
        ((6, 3, 3000, 3001, 64, 1), (3, 3, 3000, 5000, 128, 1), (12, 4, 2500, 3000, 128, 2),
         (12, 4, 5000, 3000, 128, 1), (12, 4, 1700, 4000, 256, 1))
    ):  # fmt: skip
        for causal in cases.CAUSAL:
            if causal != "none" and window is not None and window[1] not in (None, 0):
                continue
            case = Case(dtype=("fp16", "bf16")[i % 2], batch=batch, seq_q=seq_q, seq_k=seq_k,
                        heads_q=heads_q, heads_kv=heads_kv, dim=dim, dim_v=dim, causal=causal,
                        window=window, kernel="sm90_split_kv", entry=("c", "python")[i % 2],
                        seed=i)  # fmt: skip
            _check(case)
            uneven += families.is_uneven(case, _plan(case))
    if window is None and torch.cuda.get_device_properties(0).multi_processor_count == 132:
        assert uneven >= 4


@pytest.mark.parametrize(
    ("keys", "heads_kv", "batch", "parts"), [(700, 2, 330, 0), (9000, 2, 40, 1), (30000, 1, 1, 2)]
)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_rows_that_a_masked_key_spoils_are_computed_again(
    dtype: str, keys: int, heads_kv: int, batch: int, parts: int
) -> None:
    """A NaN of V beside the diagonal is of the rows that see it, and of no other. All tiles are
    whole, or some, or none."""
    case = Case(dtype=dtype, batch=batch, seq_q=64, seq_k=keys, heads_q=4 * heads_kv,
                heads_kv=heads_kv, dim=128, dim_v=128, causal="bottom_right",
                kernel="sm90_split_kv")  # fmt: skip
    assert min(2, families.parts(case, _plan(case))) in (parts, 2 * (parts > 0))
    q, k, v = cases.make_values(case, "cuda:0")
    v[-1, -40, 0, 5] = float("nan")
    v[-1, -20, 0, 77] = float("inf")
    options = {"causal": "bottom_right", "return_lse": True, "kernel": "sm90_split_kv"}
    want = fm.flash_attention(q, k, v, **options)
    query = torch.arange(64, device="cuda")[:, None]
    columns = torch.arange(128, device="cuda")
    finite = ~((query >= 24) & (columns == 5) | (query >= 44) & (columns == 77))
    assert torch.equal(want[0][-1, :, :4].isfinite(), finite[:, None, :].expand(64, 4, 128))
    assert want[0][:-1].isfinite().all() and want[0][:, :, 4:].isfinite().all()
    assert want[1].isfinite().all()
    for _ in range(20):
        got = fm.flash_attention(q, k, v, **options)
        assert all(
            torch.equal(memory.bits(a), memory.bits(b)) for a, b in zip(got, want, strict=True)
        )


@pytest.mark.parametrize("seq_k", [400, 16384])
def test_calls_that_follow_one_another_wait_for_their_inputs(seq_k: int) -> None:
    """Each may start before the one in front of it is done, whose output it reads, and whose
    workspace it may get."""
    torch.manual_seed(0)
    k, v = (torch.randn(1, seq_k, 4, 64, device="cuda").half() for _ in "kv")
    x = torch.randn(1, 40, 16, 64, device="cuda").half()

    def chain(wait: bool) -> torch.Tensor:
        y = x
        for _ in range(100):
            y = fm.flash_attention(y, k, v, kernel="sm90_split_kv")
            if wait:
                torch.cuda.synchronize()
        return y

    want = chain(wait=True)
    for _ in range(5):
        assert torch.equal(chain(wait=False), want)


@pytest.mark.parametrize("dim", [64, 128])
def test_some_rows_of_many_keys_go_to_split_kv(dim: int) -> None:
    for seq_q, seq_k in itertools.product((64, 128, 256), (8192, 32768)):
        case = Case(dtype="bf16", seq_q=seq_q, seq_k=seq_k, heads_q=32, heads_kv=8, dim=dim,
                    dim_v=dim, causal="bottom_right")  # fmt: skip
        assert _check(case) > 1


@pytest.mark.parametrize(
    ("seq_q", "heads_q", "heads_kv", "dim"), [(1024, 32, 8, 64), (512, 40, 8, 128)]
)
def test_a_little_more_than_a_wave_of_tiles_goes_to_split(
    seq_q: int, heads_q: int, heads_kv: int, dim: int
) -> None:
    for seq_k in (8192, 32768):
        case = Case(dtype="bf16", seq_q=seq_q, seq_k=seq_k, heads_q=heads_q, heads_kv=heads_kv,
                    dim=dim, dim_v=dim)  # fmt: skip
        plan = _plan(case)
        assert families.of_plan(plan) == "sm90_split_kv"
        if torch.cuda.get_device_properties(0).multi_processor_count == 132:
            assert families.is_uneven(case, plan)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("causal", cases.CAUSAL)
def test_many_rows_do_not(dim: int, causal: str) -> None:
    case = Case(dtype="bf16", batch=4, seq_q=4096, seq_k=4096, heads_q=16, heads_kv=16, dim=dim,
                dim_v=dim, causal=causal)  # fmt: skip
    plan = _plan(case)
    assert families.of_plan(plan) == "sm90_whole_tiles"
    assert (
        _plan(dataclasses.replace(case, kernel="sm90_split_kv")).microseconds >= plan.microseconds
    )


def test_parts_keep_the_device_busy() -> None:
    """Blocks up to what the device holds, and none of them without a step of its own."""
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    for heads, seq_k in itertools.product((1, 2, 8, 30), (1000, 10000, 100000)):
        case = Case(dtype="bf16", seq_q=64, seq_k=seq_k, heads_q=heads, heads_kv=heads, dim=128,
                    dim_v=128, kernel="sm90_split_kv")  # fmt: skip
        plan = _plan(case)
        steps = -(-seq_k // plan.tile_k)
        assert plan.grid[0] <= steps * families.packed_tiles(case, plan.tile_q)
        if seq_k >= 100000:
            assert 3 * plan.grid[0] >= 2 * blocks
