"""transformers' attention function by ours; what ours does not cover by transformers' own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import flashmoe_science
from flashmoe_science._autograd import autocast, is_recorded, lacks_gradients
from flashmoe_science.errors import _without_addresses
from flashmoe_science.hf import _report
from flashmoe_science.hf._limits import EXTENT_MULTIPLE, REFUSALS, not_ours
from flashmoe_science.hf._masks import Note, note_of
from flashmoe_science.torch import operators

# Options of attention functions that change what is computed, and that ours does not have.
_FOREIGN_OPTIONS = (
    "sinks",
    "position_bias",
    "cache",
    "block_mask",
    "indices",
    "block_indices",
)
# Those that torch's SDPA does not have either.
_BEYOND_SDPA = ("softcap", "s_aux", "sinks", "block_mask", "indices", "block_indices")
_MOST_DIM = 256


class _Visible(NamedTuple):
    """The keys that queries see where transformers passes no mask; as flash_attention has it."""

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
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    note = None if attention_mask is None else note_of(attention_mask)
    filled = None if note is None else note.filled
    k, v = (key, value) if filled is None else (x[:, :, :filled] for x in (key, value))
    q, k, v = autocast(query, k, v)
    visible = _visible(module, q, k, causal, options)
    recorded = is_recorded(q, k, v, options.get("s_aux"))
    reason = (
        not_ours((q, k, v))
        or (recorded and lacks_gradients("query", q))
        or _attention_refusal(q, k, v, note, visible, dropout, options)
    )
    if not reason:
        call: dict[str, Any] = {
            "causal": "bottom_right" if visible.causal else False,
            "window": visible.window,
            "scale": scaling,
            "softcap": options.get("softcap"),
            "sinks": options.get("s_aux"),
        }
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if torch.compiler.is_compiling():
            _report.note_ours(module, "attention")
            return operators.flash_attention(q, k, v, **call), None
        # Token by token, as what follows reads it. Where gradients are recorded it has no place.
        out = None if recorded else q.new_empty((*q.shape[:3], v.shape[3]))
        try:
            out = flashmoe_science.flash_attention(q, k, v, **call, out=out)
            _report.note_ours(module, "attention")
            return out, None
        except REFUSALS as error:
            reason = _without_addresses(error)
    _report.note_stock(module, "attention", reason)
    options |= {"dropout": dropout, "scaling": scaling}
    eager = _eager_attention(module, options)
    # torch's SDPA knows a causal mask of as many keys as queries, a model's own function none.
    known = eager is None and visible.window is None and query.shape[2] >= key.shape[2]
    if attention_mask is None and not visible.whole and not known:
        attention_mask = _mask_of(visible, query, key)
    answer: tuple[torch.Tensor, torch.Tensor | None]
    if eager is None:
        answer = sdpa_attention_forward(
            module, query, key, value, attention_mask, is_causal=is_causal, **options
        )
    else:
        added = _added(attention_mask, query.dtype)
        answer = eager(module, query, key, value, added, **options)
    return answer


def _visible(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    causal: bool,
    options: dict[str, Any],
) -> _Visible:
    """What a call without a mask means."""
    size = options.get("sliding_window")
    if size is None:
        window = None
    elif causal:
        window = None if size >= key.shape[2] else (size - 1, None)
    else:
        # The size is that of a flash attention, which takes it for one key less on either side. A
        # few models pass their configuration's, by which transformers masks, as it is.
        configured = getattr(getattr(module, "config", None), "sliding_window", None)
        reach = size if size == configured else size - 1
        window = None if reach + 1 >= key.shape[2] else (reach, reach)
    return _Visible(causal and query.shape[2] > 1, window)


def _mask_of(visible: _Visible, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """SDPA's mask of these keys, [1, 1, queries, keys]."""
    rows, keys = query.shape[2], key.shape[2]
    at = torch.arange(rows, device=query.device)[:, None] + (keys - rows)
    keys_at = torch.arange(keys, device=query.device)[None, :]
    seen = keys_at <= at if visible.causal else torch.ones_like(keys_at <= at)
    if visible.window is not None:
        left, right = visible.window
        seen &= keys_at >= at - left
        if right is not None:
            seen &= keys_at <= at + right
    return seen[None, None]


def _added(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """The mask in the form that models' own functions know: added to the logits."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, torch.finfo(dtype).min)


def _attention_refusal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    note: Note | None,
    visible: _Visible,
    dropout: float,
    options: dict[str, Any],
) -> str:
    """What of the call our attention does not have, "" when it has all."""
    if note is not None and note.filled is None:
        return note.reason
    if options.get("output_attentions"):
        return "the weights of attention are asked for"
    if dropout != 0.0:
        return "there is dropout"
    dims = (query.shape[3], value.shape[3])
    if any(d % EXTENT_MULTIPLE != 0 or d > _MOST_DIM for d in dims):
        return f"head dimensions are {dims[0]} and {dims[1]}"
    for name in _FOREIGN_OPTIONS:
        if options.get(name) is not None:
            return f"the model passes {name}"
    if visible.causal and key.shape[2] < query.shape[2]:
        return "there are fewer keys than queries"
    return ""


def _eager_attention(module: torch.nn.Module, options: dict[str, Any]) -> Callable[..., Any] | None:
    """The model's own function, where SDPA does not compute what is asked."""
    beyond = options.get("output_attentions") or any(
        options.get(name) is not None for name in _BEYOND_SDPA
    )
    if not beyond:
        return None
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
