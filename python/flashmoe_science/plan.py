"""Plans of calls, without computing them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from flashmoe_science import _core
from flashmoe_science._dtypes import (
    Device,
    device_name,
    parse_device,
    parse_dtype,
    parse_extent,
    parse_flag,
)
from flashmoe_science.attention import BOUNDS, SEQUENCES, parse_wanted

Causal = bool | Literal["bottom_right", "top_left"]
Window = tuple[int | None, int | None]
Layout = Literal["bshd", "bhsd"]

_AnyPlan = TypeVar("_AnyPlan", bound="Plan")


@dataclass(frozen=True)
class Launch:
    """One launch, planned or read back.

    Launches are equal if they differ only in what is read from the loaded code: `plan.launches ==
    last_launches()` means that the planned launches ran.
    """

    kernel: str
    """Such as "attention_forward_sm90_bf16_d128_dv128"."""
    device: str
    """"cpu", "cuda:N", or in plans a model of GPUs, such as "h200"."""
    grid: tuple[int, int, int]
    """Blocks; sm90 launches no more than are resident. On the CPU grid[0] counts independent
    tiles."""
    block: tuple[int, int, int]
    """Threads per block; on the CPU block[0] counts the threads that share the tiles."""
    cluster: int
    """Blocks per cluster, which share a tile; 0 or 1: no clusters."""
    stages: int
    """Pipeline depth of the main loop's loads; 0 if it has none."""
    shared_bytes: int
    """Shared memory of one block, static and dynamic."""
    tile_m: int
    """Tile of a block, or of a cluster that shares one; 0 where this does not apply. Attention:
    query rows ("sm89_few_rows" and split KV: of all query heads that share keys). Products of
    experts: rows of an expert's weights."""
    tile_n: int
    """Attention: keys per step ("sm89_few_rows": per warp). Products of experts: the most
    tokens."""
    dim: int
    """Attention: head dimensions the kernel was compiled for; the call's are padded to them."""
    dim_v: int
    registers: int = field(compare=False)
    """Registers per thread, from the loaded code; 0 in plans and on the CPU."""
    local_bytes: int = field(compare=False)
    """Local memory per thread, including spills; 0 in plans and on the CPU."""
    binary_arch: int = field(compare=False)
    """Architecture of the loaded code, 90 for sm_90; 0 in plans and on the CPU."""
    repeats: int = 1
    """How often the call launches it when a bounded workspace makes the call go in chunks.
    Neighbours with the same number take turns."""

    @property
    def tile_rows(self) -> int:
        """tile_m, of products of experts."""
        return self.tile_m

    @property
    def tile_tokens(self) -> int:
        """tile_n, of products of experts."""
        return self.tile_n


def launches_of(described: Sequence[dict[str, Any]]) -> tuple[Launch, ...]:
    """Launches from their fields, where a device is DLPack's two numbers."""
    return tuple(
        Launch(**(fields | {"device": device_name(Device(*fields["device"]))}))
        for fields in described
    )


@dataclass(frozen=True)
class Plan:
    """How one call is computed. Its launches are made from this very plan."""

    operation: str
    """Such as "attention_forward"."""
    family: str
    """Kernel family: "sm89_few_rows", "sm89_few_tokens", "sm90", "sm89", "cpu"."""
    isa: str
    """The code that runs: "sm_90a", "avx512"."""
    microseconds: float
    """The family's estimate, which decides the choice; 0: it has none."""
    flops: float
    """FLOPs of the products, a multiply-add counting as two. Attention: pairs that the mask hides
    do not count. Experts: every pair counts as if its expert were here. 0 if lengths are in
    tensors, which plans do not read."""
    bytes: float
    """Bytes of the tensors that the call reads and writes, each counted once."""
    workspace_bytes: int
    launches: tuple[Launch, ...]
    """All launches of the call, in order."""
    rejected: str
    """Why the other families do not serve the call: lines of "family: reason"."""

    @classmethod
    def of(cls: type[_AnyPlan], fields: dict[str, Any]) -> _AnyPlan:
        """A plan from _core's description."""
        return cls(**(fields | {"launches": launches_of(fields["launches"])}))


@dataclass(frozen=True)
class AttentionPlan(Plan):
    """The plan of one attention call. It has the attributes of the launch that computes the
    products; other launches prepare or add up what is in the workspace."""

    @property
    def _main(self) -> Launch:
        name = f"{self.operation}_{self.family}_"
        return next((x for x in self.launches if x.kernel.startswith(name)), self.launches[0])

    @property
    def kernel(self) -> str:
        """Such as "attention_forward_sm90_bf16_d128_dv128"."""
        return self._main.kernel

    @property
    def grid(self) -> tuple[int, int, int]:
        return self._main.grid

    @property
    def block(self) -> tuple[int, int, int]:
        return self._main.block

    @property
    def shared_bytes(self) -> int:
        return self._main.shared_bytes

    @property
    def cluster(self) -> int:
        return self._main.cluster

    @property
    def stages(self) -> int:
        return self._main.stages

    @property
    def tile_q(self) -> int:
        """Query rows of one tile. A block computes it alone, one tile after another, or with others
        of a cluster."""
        return self._main.tile_m

    @property
    def tile_k(self) -> int:
        """Keys of one step of the main loop."""
        return self._main.tile_n

    @property
    def dim(self) -> int:
        return self._main.dim

    @property
    def dim_v(self) -> int:
        return self._main.dim_v


def _tables_and_bounds(sequences: tuple[Any, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tables and bounds among the arguments of ragged, padded and paged batches."""
    named = dict(zip(SEQUENCES, sequences, strict=True))
    bounds = {name: named.pop(name) for name in SEQUENCES[-BOUNDS:]}
    return named, bounds


def attention_plan(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Causal = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    attn_bias: Any = None,
    attn_mask: Any = None,
    layout: Layout = "bshd",
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    kernel: str | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    k_begin: Any = None,
    batch_index: Any = None,
    page_table: Any = None,
    q_offset: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    split_size: int | None = None,
    prior_out: Any = None,
    prior_lse: Any = None,
) -> AttentionPlan:
    """Plans what flash_attention would do with these arguments. Reads no data and launches nothing.

    Raises what flash_attention would raise for its arguments.
    """
    sequences = (
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, k_begin, batch_index, page_table,
        q_offset, k_scale, v_scale, max_seqlen_q, max_seqlen_k, split_size,
    )  # fmt: skip
    tables, bounds = _tables_and_bounds(sequences)
    tensors = {
        "q": q, "k": k, "v": v, "sinks": sinks, "attn_bias": attn_bias, "attn_mask": attn_mask,
        "prior_out": prior_out, "prior_lse": prior_lse, "out": out, "lse": lse,
    } | tables  # fmt: skip
    options = {
        "layout": layout, "causal": causal, "window": window, "scale": scale, "softcap": softcap,
        "kernel": kernel, "return_lse": parse_flag("return_lse", return_lse),
    }  # fmt: skip
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    from flashmoe_science import _dispatch

    if any(_dispatch.is_jax(tensor) for tensor in given.values()):
        inputs = {name: tensor for name, tensor in given.items() if name not in ("out", "lse")}
        _dispatch.common_framework(inputs)
        from flashmoe_science import jax

        return AttentionPlan.of(jax.plan("attention_forward", inputs, options | bounds))
    return AttentionPlan.of(_core.plan("attention_forward", tensors, options | bounds))


def attention_backward_plan(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    sinks: Any = None,
    attn_bias: Any = None,
    attn_mask: Any = None,
    causal: Causal = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    layout: Layout = "bshd",
    wanted: tuple[bool, bool, bool, bool] = (True, True, True, True),
    accumulate: bool = False,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    dsinks: Any = None,
    kernel: str | None = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    k_begin: Any = None,
    batch_index: Any = None,
    page_table: Any = None,
    q_offset: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    split_size: int | None = None,
) -> AttentionPlan:
    """Plans what flash_attention_backward would do with these arguments. Reads no data and launches
    nothing.

    Raises what flash_attention_backward would raise for its arguments.
    """
    sequences = (
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, k_begin, batch_index, page_table,
        q_offset, None, None, max_seqlen_q, max_seqlen_k, split_size,
    )  # fmt: skip
    tables, bounds = _tables_and_bounds(sequences)
    tensors = {
        "dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse, "sinks": sinks,
        "attn_bias": attn_bias, "attn_mask": attn_mask, "dq": dq, "dk": dk, "dv": dv,
        "dsinks": dsinks,
    } | tables  # fmt: skip
    options = {
        "layout": layout, "causal": causal, "window": window, "scale": scale, "softcap": softcap,
        "wanted": parse_wanted(wanted), "accumulate": accumulate,
        "kernel": kernel,
    }  # fmt: skip
    return AttentionPlan.of(_core.plan("attention_backward", tensors, options | bounds))


Tensor = tuple[tuple[int, ...], Any, Any, None]  # shape, dtype, device, strides: contiguous


def _tensors_for(
    extents: dict[str, int | None], dtype: object, device: object, layout: Layout
) -> dict[str, Tensor]:
    """q, k and v, and out as the forward gives it; only their extents are known."""
    given = dict(extents)
    for name, other in (("seq_k", "seq_q"), ("heads_kv", "heads_q"), ("dim_v", "dim")):
        given[name] = given[other] if given[name] is None else given[name]
    parsed = {
        name: parse_extent(name, extent, 2**63, "0 to 2^63 - 1") for name, extent in given.items()
    }
    numbers, where = parse_dtype(dtype), parse_device(device)

    def tensor(seq: str, heads: str, last: str) -> Tensor:
        rows = (heads, seq) if layout == "bhsd" else (seq, heads)
        return tuple(parsed[name] for name in ("batch", *rows, last)), numbers, where, None

    return {
        "q": tensor("seq_q", "heads_q", "dim"),
        "k": tensor("seq_k", "heads_kv", "dim"),
        "v": tensor("seq_k", "heads_kv", "dim_v"),
        "out": tensor("seq_q", "heads_q", "dim_v"),
    }


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
    """Plans a call on contiguous tensors of these extents, which need not exist.

    Args:
        seq_k, heads_kv, dim_v: seq_q, heads_q and dim when None.
        dtype: "fp16", "bf16", on the CPU also "fp32" and "fp64", or an object that prints as one
            (torch.bfloat16).
        device: "cpu", "cuda", "cuda:N", an object that prints as one (a torch.device), or a model
            of GPUs that need not be here: "h100", "h200", "l4", "rtx4090".

    Raises what flash_attention would raise for such tensors.
    """
    extents = {
        "batch": batch, "seq_q": seq_q, "heads_q": heads_q, "dim": dim, "seq_k": seq_k,
        "heads_kv": heads_kv, "dim_v": dim_v,
    }  # fmt: skip
    of = _tensors_for(extents, dtype, device, layout)
    return attention_plan(
        of["q"],
        of["k"],
        of["v"],
        causal=causal,
        window=window,
        softcap=softcap,
        layout=layout,
        return_lse=return_lse,
        kernel=kernel,
    )


def attention_backward_plan_for(
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
    wanted: tuple[bool, bool, bool, bool] = (True, True, True, True),
    kernel: str | None = None,
) -> AttentionPlan:
    """Plans a backward call on contiguous tensors of these extents, which need not exist.

    The arguments are those of attention_plan_for, and `wanted` that of flash_attention_backward.
    Raises what flash_attention_backward would raise for such tensors.
    """
    extents = {
        "batch": batch, "seq_q": seq_q, "heads_q": heads_q, "dim": dim, "seq_k": seq_k,
        "heads_kv": heads_kv, "dim_v": dim_v,
    }  # fmt: skip
    of = _tensors_for(extents, dtype, device, layout)
    shape, numbers, where, _ = of["q"]
    sums = numbers if numbers == parse_dtype("fp64") else parse_dtype("fp32")
    rows = (shape[1], shape[2]) if layout == "bhsd" else (shape[2], shape[1])
    return attention_backward_plan(
        of["out"],
        of["q"],
        of["k"],
        of["v"],
        of["out"],
        ((shape[0], *rows), sums, where, None),
        causal=causal,
        window=window,
        softcap=softcap,
        layout=layout,
        wanted=wanted,
        kernel=kernel,
    )
