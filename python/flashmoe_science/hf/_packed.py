"""Packed sequences with offsets, as transformers passes them to FlashAttention: from data collators
and from continuous batching, whose cache may be in pages."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import flashmoe_science
from flashmoe_science.errors import UnsupportedError
from flashmoe_science.hf._limits import EXTENT_MULTIPLE, MOST_DIM, not_ours
from flashmoe_science.torch import operators

# The options that our own cache update leaves for the following attention: the pages, and the keys
# and values that it returned.
WRITTEN = "flashmoe_pages"
RETURNED = "flashmoe_returned"


class Pages(NamedTuple):
    """A cache to read keys and values from.

    Attributes:
        k, v: [pages, page size, heads, dim].
        table: [sequences, pages of a sequence].
        lengths: Existing keys of each sequence; negative for an unused sequence of a graph.
        rows: The row of each of these keys among the rows of all pages, sequence after sequence;
            None if the new keys and values, one per sequence, must be written first.
    """

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    rows: torch.Tensor | None = None

    def gathered(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, sequence after sequence, [1, heads, keys, dim]."""
        k, v = (x.flatten(0, 1)[self.rows].transpose(0, 1)[None] for x in (self.k, self.v))
        return k, v


class Packed(NamedTuple):
    """The place of each sequence.

    Attributes:
        starts_q, starts_k: cu_seqlens.
        most_q, most_k: Bounds of the lengths, None if unknown.
        pages: The pages of the keys, if any.
        served: Whether it is for continuous batching, which has no mask: some rows may belong to no
            sequence.
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
    """The sequences of a call's single row, from its options, and the keys and values. In older
    transformers the attention must write these to the cache of continuous batching."""
    starts_q, starts_k = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    if starts_q is None or starts_k is None or key.shape[0] != 1:
        return key, value, None
    most_q, most_k = (options.get(f"max_length_{x}", options.get(f"max_seqlen_{x}")) for x in "qk")
    cache, table = options.pop("cache", None), options.get("block_table")
    k_pages, v_pages = options.get("k_cache"), options.get("v_cache")
    if isinstance(starts_k, dict):
        # A cache update chooses by the layer's kind. In older transformers it has yet to come, and
        # layers that take keys and values from another layer have none.
        kind = "sliding_attention" if window_of(module) else "full_attention"
        starts_k = starts_k[kind].to(torch.int32)
        most_k = most_k[kind] if isinstance(most_k, dict) else most_k
    if cache is not None:
        if table is not None:
            group, index = cache.layer_index_to_group_indices[module.layer_idx]
            shape = (-1, cache.block_size, *key.shape[1::2])
            k_pages, v_pages = (x[index].view(shape) for x in (cache.key_cache, cache.value_cache))
            table = table[group]
        else:
            key, value = _update(cache, module.layer_idx, key, value, starts_k, most_k, options)
    pages, returned = options.pop(WRITTEN, None), options.pop(RETURNED, None)
    if pages is None and table is not None:
        if k_pages is None or v_pages is None:
            raise not_served(module, "takes keys and values from another layer")
        pages = Pages(*_apart(k_pages, v_pages, table), starts_k.diff() - 1)
    # Pages hold what was cached, so what the layer made of it would be lost.
    if pages is not None and returned is not None and not _are(returned, key, value):
        raise not_served(module, "changes keys or values after they are cached")
    served = cache is not None or options.get("write_index") is not None
    return key, value, Packed(starts_q, starts_k, most_q, most_k, pages, served)


def _are(returned: Any, key: torch.Tensor, value: torch.Tensor) -> bool:
    return returned[0] is key and returned[1] is value


def not_served(module: torch.nn.Module, reason: str) -> UnsupportedError:
    """The error of continuous batching for a layer that would get a wrong result."""
    return UnsupportedError(
        f'attn_implementation: got "flashmoe" for continuous batching, but {type(module).__name__} '
        f'{reason}; set another one for it, such as "sdpa"'
    )


def window_of(module: torch.nn.Module) -> int | None:
    """The window of a layer in continuous batching, which has no masks.

    The cache keeps keys by the configuration, so that tells. A layer may have its model's window as
    an attribute and not use it, or have no such attribute.
    """
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    if config is None or layer is None:
        return getattr(module, "sliding_window", None) or None
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None) or None


def shares_keys(config: Any) -> bool:
    """Whether some layers of a model take keys and values from others and have none cached."""
    return bool(getattr(config, "num_kv_shared_layers", None))


def _update(
    cache: Any,
    layer: Any,
    key: torch.Tensor,
    value: torch.Tensor,
    starts_k: torch.Tensor,
    most_k: int | None,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes new keys and values to the cache of an older transformers, and gathers the sequences
    if they are not read from their pages."""
    read, write = options["read_index"], options["write_index"]
    group, index = cache.layer_index_to_group_indices[layer]
    config = getattr(cache, "config", None)
    stays = is_read_in_pages(config, key, value, read[group]) and cache.sliding_windows[layer] == 1
    if stays:
        # A batch that reads nothing only writes.
        cache.update(key, value, layer, read_index=[x[:0] for x in read], write_index=write)
        shape = (-1, cache.block_size, *key.shape[1::2])
        k, v = (x[index].view(shape) for x in (cache.key_cache, cache.value_cache))
        options[WRITTEN] = written_pages(
            cache, group, index == 0, k, v, read[group], starts_k, most_k
        )
        return key, value
    made = cache.update(key, value, layer, read_index=read, write_index=write)
    k, v = (x.transpose(0, 1)[None] for x in made)
    return k, v


def is_read_in_pages(
    config: Any, key: torch.Tensor, value: torch.Tensor, rows: torch.Tensor
) -> bool:
    """Whether a batch of prompts and decoding requests is read from its cache in place. A batch
    with nothing in the cache is not, nor one whose keys another layer reads, too."""
    dims = (key.shape[3], value.shape[3])
    fit = all(dim % EXTENT_MULTIPLE == 0 and dim <= MOST_DIM for dim in dims)
    return rows.numel() > 0 and fit and not shares_keys(config) and not not_ours((key, value))


def written_pages(
    owner: Any,
    group: int,
    first: bool,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    most: int | None,
) -> Pages:
    """The pages of a cache that knows the place of each key. Layers of a group share the result of
    the first, which their owner keeps."""
    found = owner.__dict__.setdefault("_flashmoe_tables", {})
    if first or group not in found:
        size = k.shape[1]
        most = rows.shape[0] if most is None else most
        begins = starts[:-1, None] + torch.arange(0, most, size, device=starts.device)
        pages = rows[begins.clamp(max=rows.shape[0] - 1)].div(size, rounding_mode="floor")
        found[group] = pages.int(), starts.diff()
    table, lengths = found[group]
    return Pages(k, v, table, lengths, rows)


def _apart(
    k: torch.Tensor, v: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The pages of keys and of values as views without shared memory, and their table.

    If transformers alternates them in one tensor, each view spans all of it: keys are at even
    numbers of one view, values at even numbers of the other.
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
    """Attention of packed rows, [batch, seq, heads, dim], computed by ours."""
    if where.pages is not None and where.pages.rows is None:
        return _attend_to_pages(q, k, v, where.pages, call)  # type: ignore[no-any-return]
    if where.pages is not None:
        return _attend_to_written_pages(q, where, call)  # type: ignore[no-any-return]
    ours: Any = operators if torch.compiler.is_compiling() else flashmoe_science
    # Continuous batching also uses rows of no sequence, so they must be zeros.
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
    """Attention of one new token per sequence, which is first written to its page."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [sequences, 1, heads, dim]
    flashmoe_science.kv_append(
        k, v, pages.k, pages.v, cache_seqlens=pages.lengths, page_table=pages.table
    )
    out: torch.Tensor = flashmoe_science.flash_attention(
        q, pages.k, pages.v, **call, seqused_k=pages.lengths + 1, page_table=pages.table
    )
    return out.transpose(0, 1)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_to_written_pages(q: torch.Tensor, where: Packed, call: dict[str, Any]) -> torch.Tensor:
    """Attention of prompts, their chunks and decoding tokens, whose keys are all written."""
    pages = where.pages
    assert pages is not None
    # Continuous batching also uses rows of no sequence, so they must be zeros.
    out: torch.Tensor = flashmoe_science.flash_attention(
        q, pages.k, pages.v, **call, cu_seqlens_q=where.starts_q, max_seqlen_q=where.most_q,
        seqused_k=pages.lengths, page_table=pages.table,
        out=q.new_zeros((*q.shape[:3], pages.v.shape[3])),
    )  # fmt: skip
    return out
