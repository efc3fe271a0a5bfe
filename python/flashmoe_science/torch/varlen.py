"""torch.nn.attention.varlen by FlashMoE: packed sequences of any lengths."""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science import _flash_attn as arguments
from flashmoe_science._dtypes import parse_flag
from flashmoe_science.errors import ArgumentTypeError, InvalidArgumentError, _naming
from flashmoe_science.torch.operators import flash_attention

_NAMES = {
    "q": "query", "k": "key", "v": "value", "cu_seqlens_q": "cu_seq_q", "cu_seqlens_k": "cu_seq_k",
    "max_seqlen_q": "max_q", "max_seqlen_k": "max_k", "page_table": "block_table",
}  # fmt: skip


@_naming(_NAMES)
def varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """torch.nn.attention.varlen.varlen_attn, computed only by FlashMoE.

    Unlike torch's, it also runs on the CPU, takes blocks of any size and a separate head dimension
    of value, and has gradients with seqused_k.

    Args:
        query: [total_q, heads_q, dim]. fp16, bf16, on the CPU also fp32 and fp64.
        key, value: [total_k, heads_kv, dim], [total_k, heads_kv, dim_v]; with block_table [blocks,
            block_size, heads_kv, ...].
        cu_seq_q, cu_seq_k: [batch + 1], int32: the beginning of each sequence, and the end of the
            last. With block_table, cu_seq_k is not read.
        max_q, max_k: Bounds of a sequence's rows. They may be loose, such as the most there will
            ever be, so that one graph serves all batches.
        return_aux: torch's AuxRequest: with lse=True the log-sum-exp is returned, too.
        scale: Factor of the logits, positive; None is 1 / sqrt(dim).
        window_size: (left, right): query i sees the keys from i + A - left to i + A + right, where
            A is the sequence's number of keys minus that of its queries. -1 is no bound, (-1, 0) is
            causal.
        enable_gqa: Whether heads_kv may be a divisor of heads_q.
        seqused_k: [batch], int32: how many of the first keys of each sequence count.
        block_table: [batch, blocks of a sequence], int32: the blocks with each sequence's keys.
            Keys that may be shared have no gradients.
        num_splits: With 1 the bits depend only on each sequence, by flash_attention's
            split_size=1024; other values give equal shares of all keys.

    Returns:
        [total_q, heads_q, dim_v], with return_aux.lse also the log-sum-exp, [heads_q, total_q].

    Raises:
        NotImplementedError: No kernel serves the call or, where gradients are recorded, its
            backward.
        ValueError, TypeError: A shape, a dtype or an option is wrong.
    """
    how = _how(
        query, key, value, cu_seq_k, window_size, enable_gqa, seqused_k, block_table, num_splits
    )
    return _attend(query, key, value, cu_seq_q, max_q, max_k, scale, return_aux, None, how)


@_naming(_NAMES)
def varlen_attn_out(
    out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """torch.nn.attention.varlen.varlen_attn_out: varlen_attn that writes to `out` and returns it.
    Not while gradients are recorded, nor in a graph of torch.compile.

    Args:
        out: [total_q, heads_q, dim_v], query's dtype. Rows of no sequence stay as they are.
        query: As in varlen_attn, like all that follow.

    Returns:
        As varlen_attn.

    Raises: What varlen_attn raises.
    """
    how = _how(
        query, key, value, cu_seq_k, window_size, enable_gqa, seqused_k, block_table, num_splits
    )
    return _attend(query, key, value, cu_seq_q, max_q, max_k, scale, return_aux, out, how)


def _how(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    num_splits: int | None,
) -> dict[str, Any]:
    """The options in the form of flash_attention."""
    arguments.check_rank(3, query=query)
    arguments.check_rank(3 if block_table is None else 4, key=key, value=value)
    if not parse_flag("enable_gqa", enable_gqa) and query.shape[1] != key.shape[-2]:
        raise InvalidArgumentError(
            f"key: got {key.shape[-2]} heads, but query has {query.shape[1]}; with enable_gqa=True "
            "they may be a divisor"
        )
    if block_table is None and cu_seq_k is None:
        raise InvalidArgumentError("cu_seq_k: got None without block_table, accepted are offsets")
    if block_table is not None and seqused_k is None:
        raise InvalidArgumentError("seqused_k: got None with block_table, accepted are lengths")
    left, right = arguments.window(window_size)
    causal = right == 0
    right = None if causal else right
    return {
        "causal": causal,
        "window": None if left is None and right is None else (left, right),
        "cu_seqlens_k": cu_seq_k if block_table is None else None,
        "seqused_k": seqused_k,
        "page_table": block_table,
        "split_size": None if num_splits is None else arguments.split_size(num_splits),
    }


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    max_q: int,
    max_k: int,
    scale: float | None,
    return_aux: Any,
    out: torch.Tensor | None,
    how: dict[str, Any],
) -> Any:
    if return_aux is not None and not isinstance(getattr(return_aux, "lse", None), bool):
        raise ArgumentTypeError(
            f"return_aux: got {return_aux!r}, accepted are None and an AuxRequest, whose lse is a "
            "bool"
        )
    wants_lse = return_aux is not None and return_aux.lse
    k, v = (key, value) if how["page_table"] is not None else (key[None], value[None])
    made = flash_attention(
        query[None], k, v, **how, scale=scale, return_lse=wants_lse, cu_seqlens_q=cu_seq_q,
        max_seqlen_q=max_q, max_seqlen_k=max_k, out=arguments.with_batch("out", out),
    )  # fmt: skip
    if not wants_lse:
        return made[0] if out is None else out
    return (made[0][0] if out is None else out), made[1][0]
