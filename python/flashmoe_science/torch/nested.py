"""torch's jagged nested tensors in scaled_dot_product_attention: sequences of any lengths."""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.torch.operators import flash_attention

_SEQ_AXIS = 2  # of [batch, heads, seq, dim]


def is_nested(*tensors: torch.Tensor) -> bool:
    """Whether one of these is a nested tensor."""
    return any(x.is_nested for x in tensors)


def mismatch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> str:
    """Why nested tensors are not ours, "" where they are."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not tensor.is_nested or tensor.layout != torch.jagged:
            kind = "a nested tensor of another layout" if tensor.is_nested else "a dense tensor"
            return f"{name}: got {kind} beside nested ones, accepted are jagged ones"
        ragged: Any = tensor
        if tensor.dim() != _SEQ_AXIS + 2 or ragged._ragged_idx != _SEQ_AXIS:
            return (
                f"{name}: got a nested tensor of {tensor.dim()} dimensions, of which dimension "
                f"{ragged._ragged_idx} is jagged, accepted are [batch, heads, seq, dim] and seq"
            )
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return "key: it has another number of sequences than query"
    if apart := _apart(key, value):
        return apart
    if key.shape[-1] != query.shape[-1]:
        return f"key: its head dimension is {key.shape[-1]}, but query has {query.shape[-1]}"
    heads, heads_k, heads_v = query.shape[1], key.shape[1], value.shape[1]
    if heads_k != heads_v:
        return f"value: got {heads_v} heads, but key has {heads_k}"
    if heads != heads_k and not (enable_gqa and heads_k and heads % heads_k == 0):
        return (
            f"key: got {heads_k} heads, but query has {heads}; with enable_gqa=True they may be a "
            "divisor"
        )
    return ""


def _apart(key: Any, value: Any) -> str:
    """Why the sequences of value are not at the rows of those of key, "" where they are."""
    starts, starts_v, used, used_v = key.offsets(), value.offsets(), key.lengths(), value.lengths()
    # Torch knows the lengths of two tensors to be the same where they come from one tensor. With
    # holes the offsets are apart from them.
    same = key.shape[_SEQ_AXIS] == value.shape[_SEQ_AXIS] and used is None and used_v is None
    if same or (starts is starts_v and used is used_v):
        return ""
    if key.device != value.device:
        return f"value: it is on {value.device}, but key is on {key.device}"
    captured = key.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or captured:  # there are no numbers to compare
        return "value: its offsets or lengths are not key's, accepted in a graph are the very same"
    counts, counts_v = (
        (starts.diff() if used is None else used).long()
        for starts, used in ((starts, used), (starts_v, used_v))
    )
    if not torch.equal(counts, counts_v):
        return "value: its sequences have other lengths than those of key"
    if not torch.equal(starts.long(), starts_v.long()):
        return "value: its sequences begin at other rows than those of key"
    return ""


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """All of [batch, heads, seq, dim] as [total, heads, dim]; its gradient is nested again."""
    packed: torch.Tensor = tensor.transpose(1, _SEQ_AXIS).values()
    return packed


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Of tensors that go together: one call for all sequences, as they lie in memory."""
    q: Any = query.transpose(1, _SEQ_AXIS)
    k: Any = key.transpose(1, _SEQ_AXIS)
    # Holes, as narrow() leaves them, are rows that no sequence has.
    used_q, used_k = (x if x is None else x.int() for x in (q.lengths(), k.lengths()))
    out = flash_attention(
        rows(query)[None], rows(key)[None], rows(value)[None],
        causal="top_left" if is_causal else False, scale=scale,
        cu_seqlens_q=q.offsets().int(), cu_seqlens_k=k.offsets().int(),
        seqused_q=used_q, seqused_k=used_k,
    )  # fmt: skip
    made: torch.Tensor = torch.nested.nested_tensor_from_jagged(
        out[0], q.offsets(), lengths=q.lengths()
    )
    return made.transpose(1, _SEQ_AXIS)
