"""Support for transformers' continuous batching. It knows by name which attentions need no mask and
read pages, so this module adds ours."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from flashmoe_science.hf import _packed
from flashmoe_science.hf._limits import EXTENT_MULTIPLE, MOST_DIM
from flashmoe_science.hf._models import NAMES

_PACKAGE = "transformers.generation.continuous_batching"

# The place of FlashAttention's paged function among the functions that transformers loads by an
# attention's name. Our own attention calls ours.
_LOADED = {
    "lazy_import_flash_attention": ((None, None, NotImplemented), None),
    "lazy_import_paged_flash_attention": (None, NotImplemented),
}


def take_part() -> None:
    """Makes continuous batching, if loaded, treat our attention like FlashAttention."""
    for part in ("continuous_api", "initialization", "cache"):
        module = sys.modules.get(f"{_PACKAGE}.{part}")
        _replace(module, "is_flash_attention_requested", _or_ours)
        for name, ours in _LOADED.items():
            _replace(module, name, functools.partial(_loading, ours))
        _replace(getattr(module, "PagedAttentionCache", None), "update", _staying_in_pages)


def _replace(module: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    theirs = getattr(module, name, None)
    if theirs is not None and not hasattr(theirs, "_flashmoe"):
        ours = functools.wraps(theirs)(make(theirs))
        ours._flashmoe = True  # type: ignore[attr-defined]
        setattr(module, name, ours)


def _or_ours(theirs: Callable[..., bool]) -> Callable[..., bool]:
    def requested(
        config: Any = None,
        requested_attention_implementation: str | None = None,
        version: int | list[int] | None = None,
    ) -> bool:
        name = requested_attention_implementation
        name = name if config is None else config._attn_implementation
        if name in NAMES:  # asked for pages by its version
            return version is None or (config is not None and _reads_pages(config))
        return theirs(config, requested_attention_implementation, version)

    return requested


def _reads_pages(config: Any) -> bool:
    """Whether the GPU kernels take a model's heads, and each layer has pages."""
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fits = dim % EXTENT_MULTIPLE == 0 and dim <= MOST_DIM
    halves = (torch.float16, torch.bfloat16)
    return fits and config.dtype in halves and not _packed.shares_keys(config)


def _loading(ours: Any, theirs: Callable[..., Any]) -> Callable[..., Any]:
    def load(name: str | None, *arguments: Any, **options: Any) -> Any:
        return ours if name in NAMES else theirs(name, *arguments, **options)

    return load


def _staying_in_pages(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A cache update that leaves keys in their pages if our attention reads them there. In older
    transformers the attention updates the cache."""

    def update(
        cache: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: int,
        kwargs: dict[str, Any] | None = None,
        **others: Any,
    ) -> Any:
        if kwargs is None:
            return theirs(cache, key, value, layer, **others)
        allocator = cache.layer_to_allocator[layer]
        if cache.config._attn_implementation not in NAMES:
            return theirs(cache, key, value, layer, kwargs=kwargs)
        read, group = kwargs["read_index"], allocator.index
        in_table = kwargs.get("block_table") is not None
        stays = (
            not in_table
            and allocator.supports_block_table
            and _packed.is_read_in_pages(cache.config, key, value, read[group])
        )
        if not stays:
            made = theirs(cache, key, value, layer, kwargs=kwargs)
            if in_table:
                kwargs[_packed.RETURNED] = made
            return made
        # A batch that reads nothing only writes.
        kwargs["read_index"] = [x[:0] for x in read]
        made = theirs(cache, key, value, layer, kwargs=kwargs)
        kwargs["read_index"] = read
        k, v = allocator.get_cache_for_block_table(layer)
        kwargs[_packed.WRITTEN] = _packed.written_pages(
            cache, group, layer == allocator.layer_indices[0], k, v, read[group],
            kwargs["cu_seq_lens_k"], kwargs["max_length_k"],
        )  # fmt: skip
        kwargs[_packed.RETURNED] = made
        return made

    return torch.compiler.disable(update)  # type: ignore[no-any-return, no-untyped-call]
