"""transformers' mask function: no mask where ours needs none, and a note on the others."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

_NOTE = "_flashmoe_note"  # an attribute of masks

_COMPILED = "there is a mask, and what that hides a compiled graph cannot know"
_UNKNOWN = "there is a mask that the model or its caller made"
_PADDING = "there is padding"
_SHORT = "the padding mask is shorter than the keys"
_STATIC = "a static cache has a mask for every token that follows the prompt"
_UNTOLD_WINDOW = "the model has its sliding window in masks alone"
_OTHER = "there is a mask of another kind than causal or a sliding window"


class Note(NamedTuple):
    """What is known of a mask.

    Attributes:
        reason: Why ours needs it, "" where it does not.
        filled: Where ours needs no mask but for the keys from this number on, which it has to leave
            out: those that a static cache has room for.
    """

    reason: str
    filled: int | None = None


def note_of(mask: torch.Tensor) -> Note:
    """What `attention_mask` noted of a mask; a graph knows no attributes of its tensors."""
    if torch.compiler.is_compiling():
        return Note(_COMPILED)
    note: Note = getattr(mask, _NOTE, Note(_UNKNOWN))
    return note


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,  # a tensor with a static cache
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **options: Any,
) -> torch.Tensor | None:
    """transformers' mask function: None where `attention` masks by itself, else SDPA's mask.

    Without a mask `attention` takes the keys to be causal, if it is causal, and within the layer's
    window, both from the last query and key backwards. So there is none only where that is so and
    nothing is padded.
    """
    known = local_size is None or kv_length < local_size or _is_window(local_size, config)
    filled: int | None = None
    reason = "" if known else _masked_alone(local_size, config)
    if allow_is_causal_skip and known:
        filled = _filled(q_offset, q_length, kv_offset, kv_length)
    elif allow_is_bidirectional_skip and known:
        windowed = local_size is not None and kv_length >= local_size
        aligned = q_length == kv_length and mask_function is not bidirectional_mask_function
        if not windowed or aligned:
            filled = kv_length
    elif q_length == 1 and known and _is_plain(mask_function, local_size):
        reason = _STATIC
    if filled is not None:
        reason = _padding(attention_mask, kv_offset, filled)
        filled = None if reason else filled
    if filled == kv_length:  # and no cache has room for more
        return None
    mask: torch.Tensor | None = sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        config=config,
        **options,
    )
    if mask is not None and not torch.compiler.is_compiling():
        if filled is not None or q_length == 1:  # and is small
            # As generate() has it: another tensor would lack the attribute.
            mask = mask.contiguous()
        setattr(mask, _NOTE, Note("", filled) if filled is not None else Note(reason or _OTHER))
    return mask


def _is_plain(mask_function: Callable[..., Any], local_size: int | None) -> bool:
    """Whether nothing but causality or a window hides keys, as far as can be seen.

    Such a mask of one query is made for caches alone that may be compiled.
    """
    return mask_function is causal_mask_function or local_size is not None


def _filled(q_offset: Any, q_length: int, kv_offset: int, kv_length: int) -> int | None:
    """How many of the keys there are up to the last query, where that can be known."""
    if torch.compiler.is_compiling():
        # A static cache counts in a tensor, and a graph knows no attributes of its tensors.
        together = (
            not isinstance(q_offset, torch.Tensor) and q_offset + q_length == kv_offset + kv_length
        )
        return kv_length if together else None
    filled = int(q_offset) + q_length - kv_offset
    return filled if q_length <= filled <= kv_length else None


def _masked_alone(local_size: int | None, config: Any) -> str:
    """Why a mask of this size, which `attention` is not told, stays one."""
    chunk = getattr(config, "attention_chunk_size", None)
    window = getattr(config, "sliding_window", None)
    return _UNTOLD_WINDOW if local_size == window != chunk else _OTHER


def _is_window(local_size: int | None, config: Any) -> bool:
    """Whether a mask of this size is a sliding window, and no chunk, that `attention` is told."""
    return (
        local_size == getattr(config, "sliding_window", None)
        and local_size != getattr(config, "attention_chunk_size", None)
        and _passes_windows(type(config).__module__)
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _passes_windows(configuration: str) -> bool:
    """Whether the models of a configuration's module tell attention functions their windows.

    A few have them in masks alone. So it is looked up in the source, where transformers looks for
    what implementations its models take.
    """
    return _source_passes_windows(configuration)


@functools.cache
def _source_passes_windows(configuration: str) -> bool:
    package, _, name = configuration.rpartition(".")
    model = sys.modules.get(f"{package}.{name.replace('configuration_', 'modeling_', 1)}")
    if model is None:
        return False
    try:
        source = inspect.getsource(model)
    except (OSError, TypeError):
        return False
    return re.search(r"^ +sliding_window=", source, re.MULTILINE) is not None


def _padding(mask: torch.Tensor | None, kv_offset: int, kv_length: int) -> str:
    """Why a padding mask is needed for these keys, "" where it hides none of them."""
    if mask is None:
        return ""
    end = kv_offset + kv_length
    if torch.compiler.is_compiling():  # what it holds a graph cannot know
        return _COMPILED
    if mask.shape[-1] < end:
        return _SHORT
    return "" if bool(mask[:, kv_offset:end].all()) else _PADDING
