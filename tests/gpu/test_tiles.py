"""How the work is cut into tiles, and what lies beyond their ends.

Blocks that compute one tile after another, and that load and store whole boxes by the copy engine,
can go wrong where tiles and blocks do not come out even, and where a box reaches past its tensor.
"""

from __future__ import annotations

import dataclasses

import flashmoe_science as fm
import kernels
import pytest
import torch
from gpu import cases, families, memory
from gpu.cases import Case
from gpu.memory import Placement

pytestmark = pytest.mark.gpu

# Dimensions of the compiled kernels that differ in tile, step or roles, and some that are padded to
# them.
DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
PADDED = ((8, 8), (40, 24), (72, 80), (112, 112), (128, 40), (160, 160), (200, 248))
GUARD_ROWS = 256  # no tile has more


def _plan(case: Case) -> fm.AttentionPlan:
    return fm.attention_plan_for(
        batch=case.batch, seq_q=case.seq_q, seq_k=case.seq_k, heads_q=case.heads_q,
        heads_kv=case.heads_kv, dim=case.dim, dim_v=case.dim_v, dtype=case.dtype, device="cuda:0",
        causal={"none": False}.get(case.causal, case.causal), window=case.window,
        softcap=case.softcap, kernel=case.kernel,
    )  # fmt: skip


def _check(case: Case) -> None:
    """One call, right and with nothing else touched, on the blocks that its tiles need."""
    try:
        cases.check_case(case, "cuda:0")
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from error
    assert case.kernel is not None
    launch = fm.last_launches()[0]
    assert launch.kernel.startswith(f"attention_forward_{kernels.stem(case.kernel)}_")
    assert launch.grid == (families.blocks(case, _plan(case)), 1, 1)


@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
@pytest.mark.parametrize("causal", cases.CAUSAL)
def test_tiles_that_blocks_do_not_divide(dim: int, dim_v: int, causal: str, family: str) -> None:
    """A little fewer and a little more than one, two and three for each multiprocessor."""
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    tile = _plan(Case(dim=dim, dim_v=dim_v, kernel=family)).tile_q
    for i, tiles in enumerate((1, blocks - 1, blocks, blocks + 1, 2 * blocks + 1, 3 * blocks - 1)):
        options = {"dtype": ("fp16", "bf16")[i % 2], "dim": dim, "dim_v": dim_v, "causal": causal,
                   "kernel": family, "seed": i}  # fmt: skip
        # One short tile a head, then heads of several tiles of which the last is short.
        _check(Case(**options, seq_q=tile - 7, seq_k=tile + 30, heads_q=tiles, heads_kv=tiles))
        _check(Case(**options, seq_q=tiles // 7 * tile + 1, seq_k=500, heads_q=7))


@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
@pytest.mark.parametrize("causal", ["bottom_right", "top_left"])
def test_masks_of_unequal_lengths(dim: int, dim_v: int, causal: str, family: str) -> None:
    """Tiles that see no key, a few, or all of them, several to a block; diagonals that begin
    anywhere in a step, and end there."""
    lengths = ((1500, 300), (300, 1500), (1153, 1025), (1025, 1153), (517, 518), (389, 420),
               (420, 389), (640, 703), (700, 800))  # fmt: skip
    for i, (seq_q, seq_k) in enumerate(lengths):
        case = Case(dtype=("fp16", "bf16")[i % 2], batch=3, seq_q=seq_q, seq_k=seq_k, heads_q=9,
                    heads_kv=3, dim=dim, dim_v=dim_v, causal=causal, kernel=family)  # fmt: skip
        _check(case)


@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_windows_over_several_tiles(
    dim: int, dim_v: int, softcap: float | None, family: str
) -> None:
    """Narrower than a step, about as wide as steps and tiles, and wider than all keys."""
    windows = ((0, 0), (1, 0), (47, 0), (48, 16), (63, 64), (64, 0), (65, 1), (127, 128), (129, 0),
               (300, None), (None, 70), (1000, 1000), (2**62, 2**62))  # fmt: skip
    for i, window in enumerate(windows):
        seq_q, seq_k = ((1030, 1030), (700, 1153), (1153, 700))[i % 3]
        causal = cases.CAUSAL[i // 3 % 3] if window[1] in (None, 0) else "none"
        case = Case(dtype=("fp16", "bf16")[i % 2], batch=2, seq_q=seq_q, seq_k=seq_k, heads_q=4,
                    heads_kv=2, dim=dim, dim_v=dim_v, causal=causal, window=window,
                    softcap=softcap, kernel=family)  # fmt: skip
        _check(case)


@pytest.mark.parametrize(
    ("heads_q", "heads_kv"), [(8, 1), (8, 2), (6, 3), (12, 4), (16, 4), (5, 1)]
)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_groups_of_heads(heads_q: int, heads_kv: int, layout: str, family: str) -> None:
    for i, (dim, dim_v) in enumerate(DIMS):
        case = Case(dtype=("fp16", "bf16")[i % 2], batch=3, seq_q=450, seq_k=530, heads_q=heads_q,
                    heads_kv=heads_kv, dim=dim, dim_v=dim_v, causal=cases.CAUSAL[i % 3],
                    layout=layout, kernel=family)  # fmt: skip
        _check(case)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("group", [1, 2])
def test_more_keys_than_the_l2_holds(dtype: str, group: int, family: str) -> None:
    """With a mask, L2 swizzle groups are of heads whose keys and values fit the L2 together."""
    seq_k, dim = 8192, 128
    heads = fm.device_info("cuda:0").l2_bytes // (seq_k * 2 * dim * 2) + 3
    case = Case(dtype=dtype, seq_q=400, seq_k=seq_k, heads_q=heads * group, heads_kv=heads, dim=dim,
                dim_v=dim, causal="bottom_right", kernel=family)  # fmt: skip
    _check(case)


def _with_room(case: Case, heads: int, dim: int) -> Placement:
    """Contiguous, but with room for rows behind each sequence and for columns behind each row."""
    columns = 64
    if case.layout == "bhsd":
        return Placement((0, 1, 2, 3), (0, 0, GUARD_ROWS * (dim + columns), columns))
    return Placement((0, 1, 2, 3), (0, GUARD_ROWS * heads * (dim + columns), 0, columns))


@pytest.mark.parametrize(("dim", "dim_v"), DIMS + PADDED)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_nothing_beyond_a_sequence_is_read_or_written(
    dim: int, dim_v: int, layout: str, family: str
) -> None:
    """All of it is NaN, and the room behind the rows of out and lse must keep its very bits."""
    for i, seq_q in enumerate((1, 8, 63, 64, 65, 127, 128, 129, 191, 193, 257)):
        shape = Case(dtype=("fp16", "bf16")[i % 2], batch=2, seq_q=seq_q, seq_k=seq_q + 5 * (i % 3),
                     heads_q=4, heads_kv=2, dim=dim, dim_v=dim_v, causal=cases.CAUSAL[i % 3],
                     layout=layout, kernel=family)  # fmt: skip
        sizes = ((4, dim), (2, dim), (2, dim_v), (4, dim_v))
        case = dataclasses.replace(
            shape,
            placements=tuple(_with_room(shape, heads, last) for heads, last in sizes),
            lse_placement=Placement((0, 1, 2), (0, 0, GUARD_ROWS)),
        )
        _check(case)


@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
def test_lse_makes_no_difference_to_the_output(dim: int, dim_v: int, family: str) -> None:
    case = Case(dtype="bf16", batch=3, seq_q=700, seq_k=900, heads_q=12, heads_kv=12, dim=dim,
                dim_v=dim_v)  # fmt: skip
    inputs = cases.make_values(case, "cuda:0")
    options = {"causal": True, "kernel": family}
    out, _ = fm.flash_attention(*inputs, **options, return_lse=True)
    assert torch.equal(memory.bits(fm.flash_attention(*inputs, **options)), memory.bits(out))
