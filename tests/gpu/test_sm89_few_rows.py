"""The few-row family: packed query rows, keys split over blocks, and which calls it takes."""

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

CLUSTERS = (1, 2, 4, 8, 16)
GROUPS = (1, 3, 4, 7, 8, 32)
FEW_ROW_KERNELS = sorted(kernels.attention("sm89_few_rows"))


@pytest.fixture(autouse=True)
def _served() -> None:
    reason = families.why_not("sm89_few_rows")
    if reason is not None:
        pytest.skip(reason)


def _multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def _has_clusters() -> bool:
    """Whether this device and its code have clusters; newer devices run code made from sm_89's."""
    built = fm.build_info().cuda_architectures
    return torch.cuda.get_device_capability(0) == (9, 0) and "90" in built


def _plan(case: Case) -> fm.AttentionPlan:
    return fm.attention_plan_for(
        batch=case.batch, seq_q=case.seq_q, seq_k=case.seq_k, heads_q=case.heads_q,
        heads_kv=case.heads_kv, dim=case.dim, dim_v=case.dim_v, dtype=case.dtype, device="cuda:0",
        causal=False if case.causal == "none" else case.causal, kernel=case.kernel,
    )  # fmt: skip


def _check(case: Case) -> fm.AttentionPlan:
    """One call, right, with nothing else touched, on the planned grid of the planned kernel."""
    plan = _plan(case)
    try:
        cases.check_case(case, "cuda:0")
    except AssertionError as error:
        raise AssertionError(f"{case} ({plan}): {error}") from error
    assert plan.grid == (families.blocks(case, plan), 1, 1)
    assert fm.last_launches() == plan.launches
    assert len(plan.launches) == (2 if plan.workspace_bytes > 0 else 1)
    return plan


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("seq_q", [1, 2, 3, 5, 8, 17, 33])
def test_rows_of_all_heads_of_a_group_share_a_tile(group: int, seq_q: int) -> None:
    """Rows of several queries and heads, the last tile of a head not full."""
    options = itertools.product(((64, 64), (128, 128), (192, 128), (256, 256)), cases.CAUSAL)
    for i, ((dim, dim_v), causal) in enumerate(options):
        _check(Case(dtype=("fp16", "bf16")[i % 2], batch=1 + i % 3, seq_q=seq_q, seq_k=150,
                    heads_q=3 * group, heads_kv=3, dim=dim, dim_v=dim_v, causal=causal,
                    layout=("bshd", "bhsd")[i % 2], kernel="sm89_few_rows", seed=i))  # fmt: skip


@pytest.mark.parametrize("kernel", FEW_ROW_KERNELS, ids=lambda kernel: kernel.table_name)
def test_every_kernel_by_name(kernel: Kernel) -> None:
    """Also where another number of rows would be the choice."""
    for i, (seq_q, seq_k, group) in enumerate(
        ((1, 700, 4), (100, 130, 1), (5, 3, 3), (33, 1025, 8))
    ):
        for dim, dim_v in ((kernel.dim, kernel.dim_v), (kernel.dim - 24, kernel.dim_v - 40)):
            case = Case(dtype=kernel.dtype, batch=2, seq_q=seq_q, seq_k=seq_k, heads_q=2 * group,
                        heads_kv=2, dim=dim, dim_v=dim_v, causal=cases.CAUSAL[i % 3],
                        kernel=kernel.table_name, seed=i)  # fmt: skip
            plan = _check(case)
            assert plan.kernel == kernel.table_name
            assert plan.tile_q == kernel.rows


def _splits(dim: int, dim_v: int, dtype: str) -> dict[int, Case]:
    """A call for each cluster size that is planned for some number of heads and keys."""
    found: dict[int, Case] = {}
    for seq_k, heads in itertools.product((8192, 2048, 1024), range(1, 2 * _multiprocessors() + 2)):
        case = Case(dtype=dtype, seq_q=1, seq_k=seq_k, heads_q=heads, heads_kv=heads, dim=dim,
                    dim_v=dim_v, kernel="sm89_few_rows", seed=heads)  # fmt: skip
        plan = _plan(case)
        if plan.workspace_bytes == 0:
            found.setdefault(plan.cluster, case)
    return found


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("dim", "dim_v"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_every_size_of_a_cluster(dim: int, dim_v: int, dtype: str) -> None:
    splits = _splits(dim, dim_v, dtype)
    assert set(splits) == set(CLUSTERS if _has_clusters() else (1,))
    for cluster, case in splits.items():
        assert _check(case).cluster == cluster
        # A step more or less than the blocks divide evenly, and a last one that is not full.
        for seq_k in (case.seq_k - 15, case.seq_k + 17):
            _check(dataclasses.replace(case, seq_k=seq_k))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize(("dim", "dim_v"), [(64, 64), (128, 128), (192, 128), (256, 256), (72, 40)])
def test_parts_go_through_the_workspace(dim: int, dim_v: int, dtype: str) -> None:
    """Blocks of a tile that are no cluster leave their parts there, for a second kernel."""
    parts = []
    shapes = (
        (1, 65536, 1, 4),
        (5, 40000, 2, 1),
        (3, 32769, 5, 3),
        (16, 50001, 1, 2),
        (1, 9000, 4, 8),
    )
    for i, (seq_q, seq_k, heads_kv, group) in enumerate(shapes):
        for causal in cases.CAUSAL:
            case = Case(dtype=dtype, batch=1 + i % 2, seq_q=seq_q, seq_k=seq_k,
                        heads_q=heads_kv * group, heads_kv=heads_kv, dim=dim, dim_v=dim_v,
                        causal=causal, layout=("bshd", "bhsd")[i % 2], kernel="sm89_few_rows",
                        entry=("python", "c")[i % 2], softcap=30.0 if i == 2 else None,
                        seed=i)  # fmt: skip
            plan = _check(case)
            assert plan.workspace_bytes <= 2**24
            parts.append(families.parts(case, plan))
    assert max(parts) > 16  # more than a cluster has


def _many_keys(dtype: str, seq_q: int = 8) -> tuple[torch.Tensor, ...]:
    """Tensors of a call whose plan has parts."""
    case = Case(
        dtype=dtype, seq_q=seq_q, seq_k=65536, heads_q=4, dim=128, dim_v=128, kernel="sm89_few_rows"
    )
    assert families.parts(case, _plan(case)) > 1
    return cases.make_values(case, "cuda:0")


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_rows_of_parts_are_computed_again(dtype: str) -> None:
    """A NaN of V beside the diagonal is of the rows that see it, and of no other."""
    q, k, v = _many_keys(dtype)
    v[0, -4, 0, 5] = float("nan")
    v[0, -2, 0, 77] = float("inf")
    options = {"causal": "bottom_right", "return_lse": True, "kernel": "sm89_few_rows"}
    want = fm.flash_attention(q, k, v, **options)
    query = torch.arange(8, device="cuda")[:, None]
    columns = torch.arange(128, device="cuda")
    finite = ~((query >= 4) & (columns == 5) | (query >= 6) & (columns == 77))
    assert torch.equal(want[0][0].isfinite(), finite[:, None, :].expand(8, 4, 128))
    assert want[1].isfinite().all()
    for _ in range(20):
        got = fm.flash_attention(q, k, v, **options)
        assert all(
            torch.equal(memory.bits(a), memory.bits(b)) for a, b in zip(got, want, strict=True)
        )


@pytest.mark.parametrize("causal", ["bottom_right", "top_left"])
@pytest.mark.parametrize(("dim", "dim_v"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_blocks_without_keys(dim: int, dim_v: int, causal: str) -> None:
    """Tiles at the top of the diagonal see fewer keys than a cluster has warps."""
    clusters = set()
    for seq_q, seq_k in ((512, 512), (40, 2000), (300, 900), (520, 260)):
        clusters.add(_check(Case(dtype="bf16", seq_q=seq_q, seq_k=seq_k, dim=dim, dim_v=dim_v,
                                 causal=causal, kernel="sm89_few_rows")).cluster)  # fmt: skip
    assert not _has_clusters() or max(clusters) > 1


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_blocks_of_a_cluster_agree_on_rows_computed_again(dtype: str) -> None:
    """A NaN of V on the diagonal: each block computes its share of the tile again, or does not."""
    seq = 512
    case = Case(dtype=dtype, seq_q=seq, seq_k=seq, causal="top_left", kernel="sm89_few_rows")
    q, k, v = cases.make_values(case, "cuda:0")
    v[0, 200, 0, 5] = float("nan")
    v[0, 300, 0, 60] = float("inf")
    options = {"causal": "top_left", "return_lse": True, "kernel": "sm89_few_rows"}
    want = fm.flash_attention(q, k, v, **options)
    seen = torch.arange(seq, device="cuda")[:, None]
    columns = torch.arange(64, device="cuda")
    finite = ~((seen >= 200) & (columns == 5) | (seen >= 300) & (columns == 60))
    assert torch.equal(want[0][0, :, 0].isfinite(), finite)
    assert want[1].isfinite().all()
    for _ in range(50):
        got = fm.flash_attention(q, k, v, **options)
        assert all(
            torch.equal(memory.bits(a), memory.bits(b)) for a, b in zip(got, want, strict=True)
        )


@pytest.mark.parametrize(("seq_q", "group"), [(1, 4), (1, 8), (4, 4), (1, 1), (2, 1)])
def test_few_rows_go_to_short(seq_q: int, group: int) -> None:
    for heads_kv, seq_k, batch in ((8, 8192, 1), (8, 4096, 16), (1, 100, 1), (2, 65536, 1)):
        case = Case(dtype="bf16", batch=batch, seq_q=seq_q, seq_k=seq_k, heads_q=heads_kv * group,
                    heads_kv=heads_kv, dim=128, dim_v=128)  # fmt: skip
        plan = _plan(case)
        assert plan.family == "sm89_few_rows", f"{case}: {plan}"


@pytest.mark.parametrize("seq", [1, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("causal", cases.CAUSAL)
def test_small_problems_go_to_short(seq: int, causal: str) -> None:
    case = Case(seq_q=seq, seq_k=seq, causal=causal)
    plan = _plan(case)
    assert plan.family == "sm89_few_rows"
    cases.check_case(case, "cuda:0")
    assert fm.last_launches() == plan.launches


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("causal", cases.CAUSAL)
def test_many_rows_do_not(dim: int, causal: str) -> None:
    case = Case(dtype="bf16", batch=4, seq_q=4096, seq_k=4096, heads_q=16, heads_kv=16, dim=dim,
                dim_v=dim, causal=causal)  # fmt: skip
    plan = _plan(case)
    assert plan.family == families.of_many_rows()
    reasons = dict(line.split(": ", 1) for line in plan.rejected.splitlines())
    assert reasons["sm89_few_rows"].startswith("takes ")
    named = _plan(dataclasses.replace(case, kernel="sm89_few_rows"))
    assert named.family == "sm89_few_rows"
    assert named.microseconds >= plan.microseconds
    assert named.cluster == 1  # there are more tiles than multiprocessors


def test_a_split_keeps_the_device_busy_and_its_blocks_fed() -> None:
    """Blocks up to what the device holds, and none of them without a step of its own."""
    for heads, seq_k in itertools.product((1, 2, 8, 30, 64, 200), (16, 100, 1000, 10000, 100000)):
        case = Case(dtype="bf16", seq_q=1, seq_k=seq_k, heads_q=heads, heads_kv=heads, dim=128,
                    dim_v=128, kernel="sm89_few_rows")  # fmt: skip
        plan = _plan(case)
        blocks = plan.grid[0]
        steps = -(-seq_k // plan.tile_k)
        assert blocks == families.blocks(case, plan)
        assert blocks <= max(heads, 2 * _multiprocessors())
        assert blocks // heads <= max(1, steps)
        if seq_k >= 10000:
            assert 2 * blocks > _multiprocessors() // 2


@pytest.mark.parametrize("seq_k", [400, 65536])
def test_calls_that_follow_one_another_wait_for_their_inputs(seq_k: int) -> None:
    """Each may start before the one in front of it is done, whose output it reads, and whose
    workspace it may get."""
    torch.manual_seed(0)
    k, v = (torch.randn(1, seq_k, 4, 64, device="cuda").half() for _ in "kv")
    x = torch.randn(1, 1, 16, 64, device="cuda").half()

    def chain(wait: bool) -> torch.Tensor:
        y = x
        for _ in range(200):
            y = fm.flash_attention(y, k, v, kernel="sm89_few_rows")
            if wait:
                torch.cuda.synchronize()
        return y

    want = chain(wait=True)
    for _ in range(5):
        assert torch.equal(memory.bits(chain(wait=False)), memory.bits(want))

    # And before what reads a buffer in front of it is done, which it then writes.
    buffer = torch.empty_like(want)
    copies = []
    for i in range(100):
        fm.flash_attention(x * (i % 7), k, v, kernel="sm89_few_rows", out=buffer)
        copies.append(buffer + 0)
    for i, copy in enumerate(copies):
        expected = fm.flash_attention(x * (i % 7), k, v, kernel="sm89_few_rows")
        assert torch.equal(memory.bits(copy), memory.bits(expected)), i


def test_odd_strides_are_walked() -> None:
    """What the copy engine of sm90 refuses: strides of 0, and backwards by the C ABI."""
    rows = memory.Placement((0, 1, 2, 3), (0, 0, 0, 8), 8, (1,), ())
    backwards = memory.Placement((0, 1, 2, 3), (0, 16, 0, 0), 0, (), (0, 1, 2))
    for placement in (rows, backwards):
        case = Case(dtype="bf16", batch=2, seq_q=3, seq_k=333, heads_q=8, heads_kv=2, entry="c",
                    causal="bottom_right", kernel="sm89_few_rows")  # fmt: skip
        placements = (placement, placement, placement, case.placements[3])
        _check(dataclasses.replace(case, placements=placements))
