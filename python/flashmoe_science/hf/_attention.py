"""transformers' attention function, computed by ours; transformers' own serves what ours does not
cover."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import flashmoe_science
from flashmoe_science._autograd import autocast, graph_lacks_gradients, is_recorded
from flashmoe_science.errors import _without_addresses
from flashmoe_science.hf import _packed, _report
from flashmoe_science.hf._limits import EXTENT_MULTIPLE, MOST_DIM, REFUSALS, not_ours
from flashmoe_science.hf._masks import Note, added, is_unknown, layers_tell_causality, note_of
from flashmoe_science.torch import operators

# Options of attention functions that change the result and that ours lacks.
_FOREIGN_OPTIONS = (
    "sinks",
    "cache",
    "block_mask",
    "indices",
    "block_indices",
)
# Those that torch's SDPA lacks, too.
_BEYOND_SDPA = ("softcap", "s_aux", "sinks", "block_mask", "indices", "block_indices")


class _Visible(NamedTuple):
    """The keys that queries see if transformers passes no mask, as flash_attention's arguments."""

    causal: bool
    window: tuple[int, int | None] | None

    @property
    def whole(self) -> bool:
        return not self.causal and self.window is None


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """transformers' attention function: query [batch, heads, seq, dim], key and value likewise with
    the key heads, to [batch, seq, heads, dim]."""
    note = None if attention_mask is None else note_of(attention_mask)
    key, value, where = _packed.packed(module, key, value, options)
    causal = _is_causal(module, note, where) if is_causal is None else bool(is_causal)
    if where is not None and where.served and note is not None and is_unknown(note):
        raise _packed.not_served(module, "makes a mask, which continuous batching has no place for")
    if where is not None and (where.served or note is None or note.packed is not None):
        attention_mask = note = None  # the offsets tell all that a mask would
    else:
        where = None
    filled = None if note is None else note.filled
    k, v = (key, value) if filled is None else (x[:, :, :filled] for x in (key, value))
    q, k, v = autocast(query, k, v)
    visible = _visible(module, q, k, causal, options, where)
    bias = options.get("position_bias")
    pairs: dict[str, Any] = {}
    masked = ""
    # With a bias, a padding mask becomes one of pairs, too, so that both are read in one way.
    all_told = note is None or (bias is None and not _is_needed(note, visible))
    if attention_mask is not None and not all_told:
        masked, pairs = _pairs(attention_mask, q, k)
        note, visible = None, _Visible(False, None)  # a mask tells everything
    if bias is not None and not masked:
        masked = _add_bias(bias, pairs, q, k, where)
    recorded = is_recorded(q, k, v, options.get("s_aux"))
    reason = (
        not_ours((q, k, v))
        or masked
        or _attention_refusal(q, k, v, visible, where, dropout, options)
        or (recorded and torch.compiler.is_compiling() and graph_lacks_gradients(q, v))
    )
    if not reason:
        call: dict[str, Any] = {
            "causal": "bottom_right" if visible.causal else False,
            "window": visible.window,
            "scale": scaling,
            "softcap": options.get("softcap"),
            "sinks": options.get("s_aux"),
            **pairs,
        }
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if torch.compiler.is_compiling() and where is None:
            _report.note_ours(module, "attention")
            return operators.flash_attention(q, k, v, **call), None
        try:
            if where is None:
                out = _attend(q, k, v, note, recorded, call)
            else:
                out = _packed.attend(q, k, v, where, recorded, call)
            _report.note_ours(module, "attention")
            return out, None
        except REFUSALS as error:
            if where is not None and where.pages is not None and where.pages.rows is None:
                raise
            reason = _without_addresses(error)
    _report.note_stock(module, "attention", reason)
    if where is not None and where.pages is not None and where.pages.rows is not None:
        key, value = where.pages.gathered()
    options |= {"dropout": dropout, "scaling": scaling}
    eager = _eager_attention(module, options)
    # torch's SDPA can mask causally if there are as many keys as queries; a model's own function
    # cannot.
    known = eager is None and visible.window is None and query.shape[2] >= key.shape[2]
    if where is not None or (attention_mask is None and not visible.whole and not known):
        attention_mask = _mask_of(visible, query, key, where)
    answer: tuple[torch.Tensor, torch.Tensor | None]
    if eager is None:
        answer = sdpa_attention_forward(
            module, query, key, value, attention_mask, is_causal=causal, **options
        )
    else:
        if attention_mask is not None:
            attention_mask = added(attention_mask, query.dtype)
        answer = eager(module, query, key, value, attention_mask, **options)
    return answer


def _is_causal(module: torch.nn.Module, note: Note | None, where: _packed.Packed | None) -> bool:
    """Whether a call without a mask of pairs is causal."""
    told = layers_tell_causality(getattr(module, "config", None))
    if told or (note is None and where is not None):  # like a flash attention, which gets offsets
        return bool(getattr(module, "is_causal", True))
    return note is not None and bool(note.causal)


def _is_needed(note: Note, visible: _Visible) -> bool:
    """Whether the mask, not lengths, tells a call what is visible."""
    return note.filled is None or (note.packed is not None and not visible.causal)


def _pairs(
    mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> tuple[str, dict[str, torch.Tensor]]:
    """Why ours does not take a mask of pairs, or "" and the arguments of flash_attention for it."""
    if mask.dim() != 4:
        return f"the mask has {mask.dim()} dimensions", {}
    if mask.requires_grad and torch.is_grad_enabled():
        return "gradients of the mask are recorded", {}
    # Some models make masks for all keys that their caches can hold.
    mask = mask[..., : key.shape[2]] if mask.shape[3] > key.shape[2] else mask
    if mask.dtype == torch.bool:
        return "", {"attn_mask": mask}
    if not mask.is_floating_point():
        return f"the mask is of {str(mask.dtype).removeprefix('torch.')}", {}
    return "", {"attn_bias": _as_bias(mask, query)}


def _as_bias(numbers: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """The numbers in a dtype that flash_attention takes with the query's."""
    same = numbers.dtype in (torch.float32, query.dtype)
    return numbers if same else numbers.to(query.dtype)


def _add_bias(
    bias: Any,
    pairs: dict[str, torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    where: _packed.Packed | None,
) -> str:
    """Adds a position bias to the pairs and returns "", or returns why ours does not take it."""
    if where is not None:
        return "the model passes position_bias beside packed rows"
    if bias.requires_grad and torch.is_grad_enabled():
        return "gradients of position_bias are recorded"
    if bias.dim() != 4:
        return f"position_bias has {bias.dim()} dimensions"
    bias = bias[..., : key.shape[2]] if bias.shape[3] > key.shape[2] else bias
    mask = pairs.get("attn_bias")
    pairs["attn_bias"] = _as_bias(bias if mask is None else bias + mask, query)
    return ""


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    note: Note | None,
    recorded: bool,
    call: dict[str, Any],
) -> torch.Tensor:
    """Computes with ours, token by token in memory as the next layer reads it. Padding rows that
    are not computed are zeros."""
    # Outputs cannot be given while gradients are recorded.
    shape = (*q.shape[:3], v.shape[3])
    made: Any
    if note is not None and note.packed is not None:
        out = None if recorded else q.new_empty(shape)
        rows = []
        for b, starts in enumerate(note.packed):
            row = slice(b, b + 1)
            rows.append(flashmoe_science.flash_attention(
                q[row], k[row], v[row], **call, out=None if out is None else out[row],
                cu_seqlens_q=starts, cu_seqlens_k=starts,
            ))  # fmt: skip
        made = torch.cat(rows) if out is None else out
        return made  # type: ignore[no-any-return]
    padding = None if note is None else note.padding
    if padding is None:
        out = None if recorded else q.new_empty(shape)
        made = flashmoe_science.flash_attention(q, k, v, **call, out=out)
        return made  # type: ignore[no-any-return]
    used = padding.seqused_q
    if padding.from_start and call["causal"]:
        # Rows after a sequence see its keys, as in transformers' own attention.
        call, used = call | {"causal": "top_left"}, None
    out = None if recorded else q.new_empty(shape) if used is None else q.new_zeros(shape)
    made = flashmoe_science.flash_attention(
        q, k, v, **call, out=out,
        seqused_q=used, seqused_k=padding.seqused_k, k_begin=padding.k_begin,
    )  # fmt: skip
    if recorded and used is not None:
        spare = torch.arange(shape[1], device=used.device) >= used[:, None]
        made = made.masked_fill(spare[..., None, None], 0.0)
    return made  # type: ignore[no-any-return]


def _visible(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    causal: bool,
    options: dict[str, Any],
    where: _packed.Packed | None = None,
) -> _Visible:
    """The meaning of a call without a mask."""
    size = options.get("sliding_window")
    keys = key.shape[2]
    if where is not None and where.served:
        size = size or _packed.window_of(module)
    if where is not None and where.pages is not None:
        keys = where.pages.table.shape[1] * where.pages.k.shape[1]
    if size is None:
        window = None
    elif causal:
        window = None if size >= keys else (size - 1, None)
    else:
        # The size follows flash attention's convention, which takes one key less on either side. A
        # few models pass their configuration's value unchanged, which transformers masks by.
        configured = getattr(getattr(module, "config", None), "sliding_window", None)
        reach = size if size == configured else size - 1
        window = None if reach + 1 >= keys else (reach, reach)
    return _Visible(causal and query.shape[2] > 1, window)


def _mask_of(
    visible: _Visible, query: torch.Tensor, key: torch.Tensor, where: _packed.Packed | None = None
) -> torch.Tensor:
    """SDPA's mask of these keys, [1, 1, queries, keys]."""

    def places(count: int, starts: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Places counted from the end of each sequence, and the sequence of each."""
        at = torch.arange(count, device=query.device)
        if starts is None:
            return at - count, torch.zeros_like(at)
        of = torch.searchsorted(starts[1:], at, right=True)
        return at - starts[1:][of.clamp(max=starts.shape[0] - 2)], of

    starts = (None, None) if where is None else (where.starts_q, where.starts_k)
    at, of = (x[:, None] for x in places(query.shape[2], starts[0]))
    keys_at, keys_of = places(key.shape[2], starts[1])
    seen = keys_of == of
    if visible.causal:
        seen &= keys_at <= at
    if visible.window is not None:
        left, right = visible.window
        seen &= keys_at >= at - left
        if right is not None:
            seen &= keys_at <= at + right
    return seen[None, None]


def _attention_refusal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: _Visible,
    where: _packed.Packed | None,
    dropout: float,
    options: dict[str, Any],
) -> str:
    """What of the call our attention lacks, "" if nothing."""
    if options.get("output_attentions"):
        return "the weights of attention are asked for"
    if dropout != 0.0:
        return "there is dropout"
    dims = (query.shape[3], value.shape[3])
    if any(d % EXTENT_MULTIPLE != 0 or d > MOST_DIM for d in dims):
        return f"head dimensions are {dims[0]} and {dims[1]}"
    for name in _FOREIGN_OPTIONS:
        if options.get(name) is not None:
            return f"the model passes {name}"
    if where is None and visible.causal and key.shape[2] < query.shape[2]:
        return "there are fewer keys than queries"
    return ""


def _eager_attention(module: torch.nn.Module, options: dict[str, Any]) -> Callable[..., Any] | None:
    """The model's own function, for calls that SDPA cannot compute."""
    beyond = options.get("output_attentions") or any(
        options.get(name) is not None for name in _BEYOND_SDPA
    )
    if not beyond:
        return None
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
