"""transformers' mask function: no mask if ours needs none, and a note on other masks."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from flashmoe_science.hf._limits import is_traced_by_jit

_NOTE = "_flashmoe_note"  # an attribute of masks

_COMPILED = "there is a mask, and what that hides a compiled graph cannot know"
_UNKNOWN = "there is a mask that the model or its caller made"
_BETWEEN = "there is padding between tokens"
_SHORT = "the padding mask is shorter than the keys"
_STATIC = "a static cache has a mask for every token that follows the prompt"
_UNTOLD_WINDOW = "the model has its sliding window in masks alone"
OTHER_MASK = "there is a mask of another kind than causal or a sliding window"


class Padding(NamedTuple):
    """Which rows of each sequence of a batch are tokens, as flash_attention's arguments.

    Attributes:
        seqused_q: None: all rows are computed.
        seqused_k, k_begin: None: there is no padding on that side.
        from_start: Query n stands at key n of every sequence. A causal call that counts from there
            can also compute rows of padding.
    """

    seqused_q: torch.Tensor | None
    seqused_k: torch.Tensor | None
    k_begin: torch.Tensor | None
    from_start: bool


class Note(NamedTuple):
    """What is known about a mask.

    Attributes:
        reason: Why ours needs it, "" if it does not.
        filled: If ours needs no mask but must leave out the keys from this number on: the unused
            room of a static cache.
        padding: If ours leaves out padding, besides those keys.
        packed: If each row of the batch has several packed sequences, each causal by itself: their
            offsets, cu_seqlens of each row.
        causal: Whether the keys are causal; None if the layer tells.
    """

    reason: str
    filled: int | None = None
    padding: Padding | None = None
    packed: tuple[torch.Tensor, ...] | None = None
    causal: bool | None = None


def note_of(mask: torch.Tensor) -> Note:
    """The note of `attention_mask` on a mask. In a graph, tensors have no attributes."""
    if torch.compiler.is_compiling():
        return Note(_COMPILED)
    note: Note = getattr(mask, _NOTE, Note(_UNKNOWN))
    return note


def is_unknown(note: Note) -> bool:
    """Whether the mask is not one that `attention_mask` made, or was changed since."""
    return note.reason == _UNKNOWN


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
    """transformers' mask function: None if `attention` masks by itself, else SDPA's mask.

    Without a mask, `attention` assumes causal keys, if it is causal, and the layer's window, both
    counted back from the last query and key. So it gets no mask only if that holds and nothing is
    padded. For masks of padding and of packed rows, the note says where tokens are. Layers that do
    not tell whether they are causal always get a mask, in the form of their own attention, which
    they may extend; its note tells it.
    """
    # A trace of torch.jit serves other lengths and other padding, too, so it needs the mask.
    known = not is_traced_by_jit() and (
        local_size is None or kv_length < local_size or _is_window(local_size, config)
    )
    filled: int | None = None
    reason = "" if known else _masked_alone(local_size, config)
    if allow_is_causal_skip and known:
        filled = _filled(q_offset, q_length, kv_offset, kv_length)
    elif allow_is_bidirectional_skip and known:
        windowed = local_size is not None and kv_length >= local_size
        aligned = q_length == kv_length and mask_function is not bidirectional_mask_function
        if not windowed or aligned:
            filled = kv_length
    one_more = False
    if filled is None and q_length == 1 and known and _is_plain(mask_function, local_size):
        reason = _STATIC
        if not allow_is_causal_skip and _may_be_read(options):
            filled = _filled(q_offset, q_length, kv_offset, kv_length)
            one_more = filled is not None
    padding: Padding | None = None
    if filled is not None:
        lengths = (kv_offset, filled, q_length)
        # A query's position matters only under a causal mask or in a window.
        placed = allow_is_causal_skip or local_size is not None or one_more
        reason, padding = _padding(attention_mask, lengths, placed)
        filled = None if reason else filled
    told = layers_tell_causality(config)
    if filled == kv_length and padding is None and not one_more and told:
        return None  # and no cache holds more
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
    # Only the function's name told that nothing else hides keys.
    if (
        mask is not None
        and one_more
        and filled is not None
        and not _hides_as_told(mask, attention_mask, kv_offset, filled, local_size)
    ):
        filled, padding, reason = None, None, _STATIC
    note: Note | None = None
    if mask is not None and not torch.compiler.is_compiling():
        if filled is not None or q_length == 1:  # and is small
            # Contiguous, as in generate(): a later copy would lack the attribute.
            mask = mask.contiguous()
        if filled is not None:
            note = Note("", filled, padding, causal=None if told else allow_is_causal_skip)
        elif not reason and (packed := _packed(mask, local_size)):
            note = Note("", kv_length, None, packed, causal=None if told else True)
        else:
            note = Note(reason or OTHER_MASK)
    if mask is not None and not told:
        mask = added(mask, options.get("dtype", torch.float32))
    if note is not None:
        setattr(mask, _NOTE, note)
    return mask


def _is_plain(mask_function: Callable[..., Any], local_size: int | None) -> bool:
    """Whether nothing but causality or a window hides keys, as far as can be seen.

    Such a mask of one query is made only for caches that may be compiled.
    """
    return mask_function is causal_mask_function or local_size is not None


def _may_be_read(options: dict[str, Any]) -> bool:
    """Whether the fill of a static cache may be read: traced or captured code has no numbers yet.
    This waits for the GPU once per token, not once per layer."""
    device = options.get("device")
    if torch.compiler.is_compiling() or device is None:
        return False
    return torch.device(device).type == "cpu" or not torch.cuda.is_current_stream_capturing()


def _hides_as_told(
    mask: torch.Tensor,
    padding: torch.Tensor | None,
    kv_offset: int,
    filled: int,
    window: int | None,
) -> bool:
    """Whether the mask of one query equals what `attention` makes from these."""
    keys = mask.shape[-1]
    at = torch.arange(keys, device=mask.device)
    seen = at < filled
    if window is not None:
        seen &= at >= filled - window
    if padding is not None:
        shown = padding[:, kv_offset : kv_offset + keys] != 0
        seen = seen & torch.nn.functional.pad(shown, (0, keys - shown.shape[1]))
    return bool((mask[:, 0, 0] == seen).all())


def _filled(q_offset: Any, q_length: int, kv_offset: int, kv_length: int) -> int | None:
    """The number of keys up to the last query, if it can be known."""
    if torch.compiler.is_compiling():
        # A static cache counts in a tensor, and in a graph tensors have no attributes.
        together = (
            not isinstance(q_offset, torch.Tensor) and q_offset + q_length == kv_offset + kv_length
        )
        return kv_length if together else None
    filled = int(q_offset) + q_length - kv_offset
    return filled if q_length <= filled <= kv_length else None


def _masked_alone(local_size: int | None, config: Any) -> str:
    """Why a mask of this size, which `attention` does not know, must stay."""
    chunk = getattr(config, "attention_chunk_size", None)
    window = getattr(config, "sliding_window", None)
    return _UNTOLD_WINDOW if local_size == window != chunk else OTHER_MASK


def _is_window(local_size: int | None, config: Any) -> bool:
    """Whether a mask of this size is a sliding window, not a chunk, that `attention` knows."""
    return (
        local_size == getattr(config, "sliding_window", None)
        and local_size != getattr(config, "attention_chunk_size", None)
        and _passes_windows(type(config).__module__)
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _passes_windows(configuration: str) -> bool:
    """Whether the models of a configuration's module pass their windows to attention functions.

    A few have them only in masks. So this searches the source, as transformers does to find the
    implementations that its models take.
    """
    return _source_passes_windows(configuration)


@functools.cache
def _source_passes_windows(configuration: str) -> bool:
    model = _models_of(configuration)
    if model is None:
        return False
    try:
        source = inspect.getsource(model)
    except (OSError, TypeError):
        return False
    return re.search(r"^ +sliding_window=", source, re.MULTILINE) is not None


def _models_of(configuration: str) -> ModuleType | None:
    """The module of the models that a configuration's module belongs to."""
    package, _, name = configuration.rpartition(".")
    return sys.modules.get(f"{package}.{name.replace('configuration_', 'modeling_', 1)}")


def added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask in the form of models' own functions: added to the logits."""
    if mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)


def layers_tell_causality(config: Any) -> bool:
    """Whether the layers of a configuration's models tell, without a mask, if they are causal, as
    SDPA and flash attentions ask them.

    Models that support neither may tell nothing, or a wrong answer: their own attention reads only
    masks, and without one it sees all keys.
    """
    supported: bool = _supports_any(type(config).__module__)
    return supported


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _supports_any(configuration: str) -> bool:
    return _class_supports_any(configuration)


@functools.cache
def _class_supports_any(configuration: str) -> bool:
    model = _models_of(configuration)
    kinds = [
        kind
        for kind in vars(model or object).values()
        if inspect.isclass(kind)
        and issubclass(kind, PreTrainedModel)
        and kind.__module__ == getattr(model, "__name__", None)
    ]
    asks = ("_supports_sdpa", "_supports_flash_attn")
    return not kinds or any(getattr(kind, name, False) for kind in kinds for name in asks)


def _padding(
    mask: torch.Tensor | None, lengths: tuple[int, int, int], placed: bool
) -> tuple[str, Padding | None]:
    """Why a padding mask is needed, "" if it hides no key or ours can leave out what it hides.
    `lengths` are the offset and number of the keys, and the number of queries. `placed`: the last
    query stands at the last key.
    """
    kv_offset, keys, queries = lengths
    if mask is None or keys == 0:
        return "", None
    end = kv_offset + keys
    if torch.compiler.is_compiling():  # a graph cannot know its content
        return _COMPILED, None
    if mask.shape[-1] < end:
        return _SHORT, None
    seen = mask[:, kv_offset:end] != 0
    count = seen.sum(-1)
    at = torch.arange(keys, device=mask.device)
    begins = torch.where(seen, at, keys).amin(-1).where(count > 0, 0)
    ends = begins + count
    used = (ends - (keys - queries)).clamp(min=0)
    whole = seen == ((at >= begins[:, None]) & (at < ends[:, None]))
    # Reads them together, since each read waits for the GPU.
    apart, on_left, on_right, unused = torch.stack(
        [~whole.all(), (begins > 0).any(), (ends < keys).any(), (used < queries).any()]
    ).tolist()
    if apart:
        return _BETWEEN, None
    if not on_left and not on_right:
        return "", None
    return "", Padding(
        used.int() if placed and unused else None,
        ends.int() if on_right else None,
        begins.int() if on_left else None,
        from_start=queries == keys and not on_left,
    )


def _packed(mask: torch.Tensor, window: int | None) -> tuple[torch.Tensor, ...] | None:
    """cu_seqlens of each row of the batch, if this masks packed sequences, each causal by itself
    and within the window."""
    rows, keys = mask.shape[-2:]
    if mask.dtype != torch.bool or rows != keys or rows == 0:
        return None
    seen = mask[:, 0]
    at = torch.arange(rows, device=mask.device)
    # A query that sees no key before its own begins a sequence.
    begins = seen.to(torch.uint8).argmax(-1) == at  # [batch, rows]
    first = torch.where(begins, at, 0).cummax(-1).values
    if window is not None:
        first = torch.maximum(first, at - window + 1)
    if not torch.equal(seen, (at <= at[:, None]) & (at >= first[..., None])):
        return None
    end = torch.tensor([rows], device=mask.device)
    return tuple(torch.cat([row.nonzero()[:, 0], end]).int() for row in begins)
