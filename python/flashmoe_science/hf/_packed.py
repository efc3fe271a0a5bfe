"""Sequences that transformers passes one behind the other, with their offsets: what FlashAttention
is passed, by data collators and by continuous batching, whose cache may be in pages."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import flashmoe_science
from flashmoe_science.torch import operators


class Pages(NamedTuple):
    """A cache that the new keys and values are to be written to first.

    Attributes:
        k, v: [pages, page size, heads, dim].
        table: [sequences, pages of a sequence].
        lengths: Keys of each sequence that are there; negative where a graph's sequence is none.
    """

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor


class Packed(NamedTuple):
    """Where each sequence is.

    Attributes:
        starts_q, starts_k: cu_seqlens.
        most_q, most_k: Bounds of the lengths, None where nobody said.
        pages: Where the keys are in pages; new ones are then one of each sequence.
        served: By continuous batching, whose mask is none: rows may be there that are nobody's.
    """

    starts_q: torch.Tensor
    starts_k: torch.Tensor
    most_q: int | None
    most_k: int | None
    pages: Pages | None
    served: bool


def packed(
    module: torch.nn.Module, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, Packed | None]:
    """What a call's options say of the sequences of its one row, and the keys and values, which an
    older transformers leaves to the attention to write to the cache of continuous batching."""
    starts_q, starts_k = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    if starts_q is None or starts_k is None or key.shape[0] != 1:
        return key, value, None
    most_q, most_k = (options.get(f"max_length_{x}", options.get(f"max_seqlen_{x}")) for x in "qk")
    cache, table = options.pop("cache", None), options.get("block_table")
    k_pages, v_pages = options.get("k_cache"), options.get("v_cache")
    if cache is not None:
        windowed = getattr(module, "sliding_window", None)
        kind = "sliding_attention" if windowed else "full_attention"
        starts_k = starts_k[kind] if isinstance(starts_k, dict) else starts_k
        most_k = most_k[kind] if isinstance(most_k, dict) else most_k
        if table is not None:
            group, index = cache.layer_index_to_group_indices[module.layer_idx]
            shape = (-1, cache.block_size, *key.shape[1::2])
            k_pages, v_pages = (x[index].view(shape) for x in (cache.key_cache, cache.value_cache))
            table = table[group]
        else:
            where = {"read_index": options["read_index"], "write_index": options["write_index"]}
            key, value = (
                x.transpose(0, 1)[None] for x in cache.update(key, value, module.layer_idx, **where)
            )
    pages = None
    if table is not None and k_pages is not None and v_pages is not None:
        pages = Pages(*_apart(k_pages, v_pages, table), starts_k.diff() - 1)
    served = cache is not None or options.get("write_index") is not None
    return key, value, Packed(starts_q, starts_k, most_q, most_k, pages, served)


def _apart(
    k: torch.Tensor, v: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The pages of keys and those of values as views that share no memory, and their table.

    Where transformers keeps them by turns, in one tensor, either view has all: those of keys are at
    even numbers of one, those of values at even numbers of the other.
    """
    between = (v.data_ptr() - k.data_ptr()) // k.element_size()
    if between != k.stride(0):
        return k, v, table
    return k[::2], v[::2], table // 2


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    where: Packed,
    recorded: bool,
    call: dict[str, Any],
) -> torch.Tensor:
    """Attention of packed rows, [batch, seq, heads, dim], by ours."""
    if where.pages is not None:
        return _attend_to_pages(q, k, v, where.pages, call)  # type: ignore[no-any-return]
    ours: Any = operators if torch.compiler.is_compiling() else flashmoe_science
    # What is nobody's is zeros in a batch of continuous batching, which goes on with it.
    zeros = where.served and not recorded and not torch.compiler.is_compiling()
    out: torch.Tensor = ours.flash_attention(
        q, k, v, **call, cu_seqlens_q=where.starts_q, cu_seqlens_k=where.starts_k,
        max_seqlen_q=where.most_q, max_seqlen_k=where.most_k,
        **({"out": q.new_zeros((*q.shape[:3], v.shape[3]))} if zeros else {}),
    )  # fmt: skip
    return out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_to_pages(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages: Pages, call: dict[str, Any]
) -> torch.Tensor:
    """Of one new token for each sequence, which is written to its page first."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [sequences, 1, heads, dim]
    flashmoe_science.kv_append(
        k, v, pages.k, pages.v, cache_seqlens=pages.lengths, page_table=pages.table
    )
    out: torch.Tensor = flashmoe_science.flash_attention(
        q, pages.k, pages.v, **call, seqused_k=pages.lengths + 1, page_table=pages.table
    )
    return out.transpose(0, 1)
