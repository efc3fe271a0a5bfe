"""torch's jagged nested tensors, sequences of any lengths, in scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.torch.operators import flash_attention

_SEQ_AXIS = 2  # of [batch, heads, seq, dim]


def is_nested(*tensors: torch.Tensor) -> bool:
    """Whether one of these is a nested tensor."""
    return any(x.is_nested for x in tensors)


def mismatch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> str:
    """Why ours does not take these nested tensors, "" if it does."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if reason := _is_no_sequences(name, tensor):
            return reason
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape[0] != query.shape[0]:
            return f"{name}: it has {tensor.shape[0]} sequences, but query has {query.shape[0]}"
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


def _is_no_sequences(name: str, tensor: Any) -> str:
    """Why it is not jagged along seq of [batch, heads, seq, dim], "" if it is."""
    if not tensor.is_nested:
        return (
            f"{name}: got a dense tensor beside nested ones, accepted are jagged ones; "
            "torch.nested.as_nested_tensor(..., layout=torch.jagged) makes them"
        )
    if tensor.layout != torch.jagged:
        return (
            f"{name}: got a nested tensor of layout {tensor.layout}, accepted is torch.jagged; "
            "torch.nested.nested_tensor(..., layout=torch.jagged) makes such"
        )
    dims, jagged_axis = tensor.dim(), tensor._ragged_idx
    if dims == _SEQ_AXIS + 2 and jagged_axis == _SEQ_AXIS:
        return ""
    pass_instead = ""
    if jagged_axis == 1 and dims in (3, 4):
        one_head = ".unsqueeze(2)" if dims == 3 else ""
        pass_instead = f"; pass {name}{one_head}.transpose(1, 2)"
    return (
        f"{name}: got a nested tensor of {dims} dimensions, of which dimension {jagged_axis} is "
        f"jagged, accepted are [batch, heads, seq, dim] and seq{pass_instead}"
    )


def _apart(key: Any, value: Any) -> str:
    """Why the sequences of value are not at the rows of key's, "" if they are."""
    starts, starts_v, used, used_v = key.offsets(), value.offsets(), key.lengths(), value.lengths()
    # Torch knows that two tensors have the same lengths if these come from one tensor. With holes,
    # offsets are separate from lengths.
    same = key.shape[_SEQ_AXIS] == value.shape[_SEQ_AXIS] and used is None and used_v is None
    if same or (starts is starts_v and used is used_v):
        return ""
    if key.device != value.device:
        return f"value: it is on {value.device}, but key is on {key.device}"
    captured = key.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if torch.compiler.is_compiling() or captured:  # no numbers to compare yet
        return (
            "value: its offsets or lengths are not key's, accepted in a graph are the very same; "
            "pass torch.nested.nested_tensor_from_jagged(values, key.offsets(), key.lengths())"
        )
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
    """Computes matching tensors: one call for all sequences, in place."""
    q: Any = query.transpose(1, _SEQ_AXIS)
    k: Any = key.transpose(1, _SEQ_AXIS)
    # Holes, such as narrow() leaves, are rows of no sequence.
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
