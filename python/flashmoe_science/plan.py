"""How a call would be computed, without computing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flashmoe_science import _core
from flashmoe_science._dtypes import parse_device, parse_dtype, parse_extent, parse_flag

Causal = bool | Literal["bottom_right", "top_left"]
Window = tuple[int | None, int | None]
Layout = Literal["bshd", "bhsd"]


@dataclass(frozen=True)
class AttentionPlan:
    """How one attention call is computed. The launch is made from this very plan."""

    kernel: str
    """Such as "attention_forward_sm90_bf16_d128_dv128"."""
    family: str
    """Kernel family: "short", "split", "sm90", "sm89", "cpu"."""
    isa: str
    """The code that runs: "sm_90a", "avx512"."""
    tile_q: int
    """Query rows of one tile, which a block computes alone, one after another, or with others of a
    cluster. The rows of "short" and "split" are of all query heads that share keys."""
    tile_k: int
    """Keys of one step of the main loop."""
    dim: int
    """Head dimensions the kernel was compiled for; the call's are padded to it."""
    dim_v: int
    stages: int
    """Depth of the pipeline of keys and values."""
    cluster: int
    """Blocks of a cluster, which share the keys of a tile; 0 or 1: none do."""
    grid: tuple[int, int, int]
    """Blocks, of which sm90 and split launch no more than are resident; on the CPU grid[0] counts
    tiles."""
    block: tuple[int, int, int]
    """Threads of a block; on the CPU block[0] counts the threads that share the tiles."""
    shared_bytes: int
    """Shared memory of one block."""
    workspace_bytes: int
    flops: float
    """Of the two products, a multiply-add counting as two; pairs the mask hides do not count."""
    rejected: str
    """Why the other families do not serve the call: lines of "family: reason"."""


def attention_plan(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Causal = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    layout: Layout = "bshd",
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    kernel: str | None = None,
) -> AttentionPlan:
    """What flash_attention would do with these arguments. Reads no data and launches nothing.

    Raises what flash_attention would raise for its arguments.
    """
    options: dict[str, Any] = {"causal": causal, "window": window, "layout": layout}
    options |= {"scale": scale, "softcap": softcap, "kernel": kernel}
    options["return_lse"] = parse_flag("return_lse", return_lse)
    from flashmoe_science import _dispatch

    if any(_dispatch.is_jax(tensor) for tensor in (q, k, v)):
        _dispatch.common_framework({"q": q, "k": k, "v": v})
        from flashmoe_science import jax

        return AttentionPlan(**jax.plan(q, k, v, **options))
    return AttentionPlan(**_core.attention_plan(q, k, v, out, lse, **options))


def attention_plan_for(
    *,
    batch: int,
    seq_q: int,
    heads_q: int,
    dim: int,
    seq_k: int | None = None,
    heads_kv: int | None = None,
    dim_v: int | None = None,
    dtype: object = "bf16",
    device: object = "cpu",
    causal: Causal = False,
    window: Window | None = None,
    softcap: float | None = None,
    layout: Layout = "bshd",
    return_lse: bool = False,
    kernel: str | None = None,
) -> AttentionPlan:
    """The plan of a call on contiguous tensors of these extents, which need not exist.

    Args:
        seq_k, heads_kv, dim_v: seq_q, heads_q and dim when None.
        dtype: "fp16", "bf16", "fp32", or an object that prints as one (torch.bfloat16).
        device: "cpu", "cuda", "cuda:N", an object that prints as one (a torch.device), or a model
            of GPUs that need not be here: "h100", "h200", "l4", "rtx4090".

    Raises what flash_attention would raise for such tensors.
    """
    given: dict[str, Any] = {
        "batch": batch,
        "seq_q": seq_q,
        "heads_q": heads_q,
        "dim": dim,
        "seq_k": seq_q if seq_k is None else seq_k,
        "heads_kv": heads_q if heads_kv is None else heads_kv,
        "dim_v": dim if dim_v is None else dim_v,
    }
    batch, seq_q, heads_q, dim, seq_k, heads_kv, dim_v = (
        parse_extent(name, extent, 2**63, "0 to 2^63 - 1") for name, extent in given.items()
    )

    def shape(seq: int, heads: int, last: int) -> Sequence[int]:
        return (batch, heads, seq, last) if layout == "bhsd" else (batch, seq, heads, last)

    shapes = (
        shape(seq_q, heads_q, dim),
        shape(seq_k, heads_kv, dim),
        shape(seq_k, heads_kv, dim_v),
    )
    numbers = parse_dtype(dtype)
    fields = _core.attention_plan_for(
        *shapes,
        dtypes=[numbers] * 3,
        device=parse_device(device),
        causal=causal,
        window=window,
        scale=None,
        softcap=softcap,
        layout=layout,
        kernel=kernel,
        return_lse=parse_flag("return_lse", return_lse),
    )
    return AttentionPlan(**fields)
