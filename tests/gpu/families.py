"""Which kernel families serve calls on this machine's GPU."""

from __future__ import annotations

import functools

import flashmoe_science as fm
import kernels
import torch
from gpu.cases import Case

_NEEDS_CAPABILITY = dict.fromkeys(
    (*kernels.COPY_ENGINE, "sm90_mla"), (9, 0)
)  # of the families that run only on one
# Threads per block, and the most shared memory per block.
THREADS = {"sm89_few_rows": (32, 64, 128, 256), "sm90_split_kv": (384, 512),
           "sm90_whole_tiles": (384, 512),
           "sm89": (128, 256)}  # fmt: skip
SHARED_BYTES = {"sm89_few_rows": 99 * 1024, "sm90_split_kv": 227 * 1024,
                "sm90_whole_tiles": 227 * 1024, "sm89": 99 * 1024}  # fmt: skip
# Namespaces of kernels that differ from the family's name.
NAMESPACES = dict.fromkeys(kernels.COPY_ENGINE, "sm90")
REGISTERS = 65536  # per multiprocessor


@functools.cache
def why_not(family: str) -> str | None:
    """None where the family serves calls on cuda:0, else the reason."""
    if kernels.family_of(family) not in fm.build_info().kernel_families.split():
        return f"built without the {family} kernels"
    needed = _NEEDS_CAPABILITY.get(family)
    capability = torch.cuda.get_device_capability(0)
    if needed is not None and capability != needed:
        return f"the {family} kernels need compute capability {needed}, cuda:0 has {capability}"
    return None


def serving() -> list[str]:
    """In the order in which a call finds them."""
    return [family for family in kernels.FAMILIES if why_not(family) is None]


def of_plan(plan: fm.AttentionPlan) -> str:
    """Which of kernels.FAMILIES a plan is by."""
    if plan.family != "sm90":
        return plan.family
    splits = plan.kernel.startswith("attention_forward_sm90_split_kv_")
    return "sm90_split_kv" if splits else "sm90_whole_tiles"


def blocks(case: Case, plan: fm.AttentionPlan) -> int:
    """The number of blocks that a case needs with the planned tile."""
    # Tiles of all query heads that share keys, a cluster for each.
    if plan.family == "sm89_few_rows":
        rows = case.seq_q * case.heads_q // case.heads_kv
        tiles = -(-rows // plan.tile_q) * case.batch * case.heads_kv
        return tiles * (parts(case, plan) or plan.cluster)
    resident = torch.cuda.get_device_properties(0).multi_processor_count
    if of_plan(plan) == "sm90_split_kv":
        return min(_stream_k_blocks(case, plan), resident)
    tiles = -(-case.seq_q // plan.tile_q) * case.batch * case.heads_q
    return min(tiles, resident) if plan.family == "sm90" else tiles


def packed_tiles(case: Case, tile_q: int) -> int:
    """Tiles of split KV: groups of 64 rows, each with whole queries for all heads of a KV head, in
    tiles of sizes as equal as possible."""
    heads = case.heads_q // case.heads_kv
    repeated = case.placements[0].broadcast and (3 - case.seq_axis) in case.placements[0].broadcast
    chunks = heads if repeated and case.heads_q > 1 else -(-heads // 64)
    groups = -(-case.seq_q // (64 // -(-heads // chunks)))
    of_tile = -(-groups // max(1, -(-groups // (tile_q // 64))))
    return -(-groups // max(1, of_tile)) * chunks * case.batch * case.heads_kv


def parts(case: Case, plan: fm.AttentionPlan) -> int:
    """Blocks of a tile that leave their parts of it in the workspace, of split KV on average and
    rounded up; 0 where none do."""
    rows = case.seq_q * case.heads_q // case.heads_kv
    tiles = -(-rows // plan.tile_q) * case.batch * case.heads_kv
    places = _places(plan)
    if of_plan(plan) == "sm90_split_kv":
        return -(-places // packed_tiles(case, plan.tile_q))
    assert places % tiles == 0, f"{case}: {plan}"
    return places // tiles


def _places(plan: fm.AttentionPlan) -> int:
    """Parts of tiles that the workspace holds: the output's rows in fp32, with an offset and a sum
    each."""
    found, rest = divmod(plan.workspace_bytes, plan.tile_q * (4 * plan.dim_v + 8))
    assert rest == 0, plan
    return found


def is_uneven(case: Case, plan: fm.AttentionPlan) -> bool:
    """Whether split KV lays its tiles end to end, so that blocks begin and end within them."""
    return _places(plan) > 0 and plan.grid[0] % packed_tiles(case, plan.tile_q) != 0


def _stream_k_blocks(case: Case, plan: fm.AttentionPlan) -> int:
    """As many as the tiles, or as the plan says if that goes with its workspace: a cut makes one
    part of its tile more, and another one if the tile has no other cut."""
    tiles = packed_tiles(case, plan.tile_q)
    places = _places(plan)
    if places == 0:
        return tiles
    cuts = plan.grid[0] - 1
    assert 2 <= places <= min(2 * cuts, tiles + cuts), f"{case}: {plan}"
    return plan.grid[0]


def of_many_rows() -> str:
    """The family of long calls that name none, if it can walk their strides."""
    return next(kernels.family_of(family) for family in serving() if family != "sm89_few_rows")
