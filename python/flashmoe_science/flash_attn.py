"""FlashAttention 2's functions by FlashMoE: its names, arguments, defaults and results.

    from flashmoe_science.flash_attn import flash_attn_func

in place of `from flash_attn import flash_attn_func` is all that a program changes. The functions
have gradients where flashmoe_science.flash_attention has. Beyond FlashAttention's they have fp32
and fp64 on the CPU, a head dimension of v's own, and a gradient of the log-sum-exp. Backward is
always deterministic: `deterministic` is accepted and changes nothing.

`merge_attn_states` is vLLM's function of that name, which merges what two calls returned.

The functions of variable lengths have gradients, but for keys in blocks.

What is not there: dropout and ALiBi, which are refused.
"""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.append import kv_append
from flashmoe_science.attention import flash_attention
from flashmoe_science.errors import ArgumentTypeError, InvalidArgumentError, UnsupportedError
from flashmoe_science.merge import merge_states

_CHUNK = 1024  # keys, of num_splits=1

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "merge_attn_states",
]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """FlashAttention's flash_attn_func.

    Args:
        q: [batch, seq_q, heads_q, dim]. fp16 or bf16; on the CPU also fp32 and fp64. dim is a
            multiple of 8, at most 256: FlashAttention pads others by a copy. Nothing is copied
            here: the last dimension is contiguous, and rows begin on 16-byte boundaries.
        k: [batch, seq_k, heads_k, dim], same dtype; heads_k divides heads_q.
        v: [batch, seq_k, heads_k, dim_v], same dtype.
        dropout_p: 0.
        softmax_scale: Factor of the logits; None is 1 / sqrt(dim).
        causal: Query i sees the keys up to i + seq_k - seq_q: the mask ends bottom-right.
        window_size: (left, right): query i sees the keys from i + seq_k - seq_q - left to
            i + seq_k - seq_q + right. A negative number is no bound; with causal right is 0,
            whatever is given.
        softcap: Logits become softcap * tanh(logit / softcap); 0 or less is no cap.
        alibi_slopes: None.
        deterministic: Whether gradients are to be the same bits on every run. They always are.
        return_attn_probs: Also return the log-sum-exp, and what stands for the probabilities.

    Returns:
        out, [batch, seq_q, heads_q, dim_v], or (out, softmax_lse, S_dmask) with return_attn_probs.
        softmax_lse is [batch, heads_q, seq_q], fp32 (of fp64 fp64), a natural logarithm, and -inf
        for a query that sees no key, where FlashAttention has +inf. S_dmask is an empty tensor of
        q's dtype, as FlashAttention from 2.7 on returns it without dropout.

    Raises:
        NotImplementedError: There is dropout, or ALiBi, or no kernel serves the call.
        ValueError, TypeError: As flashmoe_science.flash_attention.
    """
    window = _refuse_or_window(dropout_p, alibi_slopes, window_size, causal)
    how: dict[str, Any] = {
        "causal": bool(causal), "window": window, "scale": softmax_scale,
        "softcap": softcap if softcap > 0 else None,
    }  # fmt: skip
    if not return_attn_probs:
        return flash_attention(q, k, v, **how)
    out, lse = flash_attention(q, k, v, **how, return_lse=True)
    return out, lse, q.new_empty(0)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """FlashAttention's flash_attn_qkvpacked_func.

    Args:
        qkv: [batch, seq, 3, heads, dim]: q, k and v, which are read where they lie. Its gradient
            has the same form.
        dropout_p: As of flash_attn_func, and so are all that follow.

    Returns:
        As flash_attn_func.

    Raises: What flash_attn_func raises.
    """
    q, k, v = _unpacked("qkv", qkv, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """FlashAttention's flash_attn_kvpacked_func.

    Args:
        q: [batch, seq_q, heads_q, dim].
        kv: [batch, seq_k, 2, heads_k, dim]: k and v, which are read where they lie. Its gradient
            has the same form.
        dropout_p: As of flash_attn_func, and so are all that follow.

    Returns:
        As flash_attn_func.

    Raises: What flash_attn_func raises.
    """
    k, v = _unpacked("kv", kv, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """FlashAttention's flash_attn_varlen_func: sequences of any lengths, one behind the other.

    Args:
        q: [total_q, heads_q, dim], all sequences' rows; dtypes and rows as of flash_attn_func.
        k: [total_k, heads_k, dim]. With block_table [blocks, block_size, heads_k, dim], of any
            block size.
        v: [total_k, heads_k, dim_v], or [blocks, block_size, heads_k, dim_v].
        cu_seqlens_q: [batch + 1], int32: sequence b has q's rows from cu_seqlens_q[b] to before
            cu_seqlens_q[b + 1].
        cu_seqlens_k: [batch + 1], int32: the same of k and v. With block_table only the
            differences count, which are the lengths.
        max_seqlen_q, max_seqlen_k: The most rows of a sequence. They may be more than that; of a
            longer sequence those behind are left out.
        dropout_p: As of flash_attn_func, and so are those that follow. causal and window_size
            count by each sequence's own lengths.
        block_table: [batch, blocks of a sequence], int32: which blocks of k and v have the keys of
            each sequence, in their order.

    Returns:
        out, [total_q, heads_q, dim_v], or (out, softmax_lse, S_dmask) with return_attn_probs, as
        flash_attn_func; softmax_lse is [heads_q, total_q]. Rows that no sequence has may hold
        anything.

    Raises: What flash_attn_func raises.
    """
    window = _refuse_or_window(dropout_p, alibi_slopes, window_size, causal)
    _check_rank(3, q=q)
    _check_rank(3 if block_table is None else 4, k=k, v=v)
    _check_rank(1, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    how: dict[str, Any] = {
        "causal": bool(causal), "window": window, "scale": softmax_scale,
        "softcap": softcap if softcap > 0 else None,
        "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k,
    }  # fmt: skip
    if block_table is None:
        k, v = k[None], v[None]
        how["cu_seqlens_k"] = cu_seqlens_k
    else:
        _check_rank(2, block_table=block_table)
        how |= {"seqused_k": cu_seqlens_k.diff(), "page_table": block_table}
    if not return_attn_probs:
        return flash_attention(q[None], k, v, **how)[0]
    out, lse = flash_attention(q[None], k, v, **how, return_lse=True)
    return out[0], lse[0], q.new_empty(0)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """FlashAttention's flash_attn_varlen_qkvpacked_func.

    Args:
        qkv: [total, 3, heads, dim]: q, k and v of all sequences, which are read where they lie.
        cu_seqlens: [batch + 1], int32: sequence b has the rows from cu_seqlens[b] to before
            cu_seqlens[b + 1].
        max_seqlen: The most rows of a sequence, or more.
        dropout_p: As of flash_attn_func, and so are all that follow.

    Returns:
        As flash_attn_varlen_func.

    Raises: What flash_attn_func raises.
    """
    q, k, v = _unpacked("qkv", qkv, 3, "total")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """FlashAttention's flash_attn_varlen_kvpacked_func.

    Args:
        q: [total_q, heads_q, dim].
        kv: [total_k, 2, heads_k, dim]: k and v of all sequences, which are read where they lie.
        cu_seqlens_q: As of flash_attn_varlen_func, and so are all that follow.

    Returns:
        As flash_attn_varlen_func.

    Raises: What flash_attn_func raises.
    """
    k, v = _unpacked("kv", kv, 2, "total_k")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """FlashAttention's flash_attn_with_kvcache: attention over a cache, which new keys and values
    are written to first.

    What is written has no gradients, nor have keys in blocks and by cache_batch_idx: tensors that
    require grad are refused there.

    Args:
        q: [batch, seq_q, heads_q, dim]; dtypes and rows as of flash_attn_func.
        k_cache: [batch_cache, rows, heads_k, dim]. With block_table [blocks, block_size, heads_k,
            dim], of any block size. k is written to it.
        v_cache: [batch_cache, rows, heads_k, dim_v], or [blocks, block_size, heads_k, dim_v].
        k: [batch, seq_new, heads_k, dim]: its row i of sequence b becomes row cache_seqlens[b] + i
            of the cache, and is seen by the queries. None is no new keys.
        v: [batch, seq_new, heads_k, dim_v], with k.
        rotary_cos: [positions, rotary_dim / 2], of q's dtype or fp32: k, and q, are rotated at the
            positions from cache_seqlens on; q without causal and window_size at cache_seqlens
            alone. With k.
        rotary_sin: The same, with rotary_cos.
        cache_seqlens: [batch], int32, or a number: how many keys the cache has of each sequence,
            new ones not counted. None is all of its rows, without k.
        cache_batch_idx: [batch], int32: which row of the cache's batch each sequence has. Without
            block_table.
        cache_leftpad: [batch], int32: how many keys of each sequence are padding before the first.
            They count as rows, and for rotary_cos as positions.
        block_table: [batch, blocks of a sequence], int32: which blocks have the keys of each
            sequence, in their order.
        softmax_scale: As of flash_attn_func, and so are causal, which ends bottom-right at the last
            key of each sequence, window_size and softcap.
        rotary_interleaved: Pairs are numbers 2 i and 2 i + 1 of a head, else (NeoX) i and
            i + rotary_dim / 2.
        alibi_slopes: None.
        num_splits: How many parts FlashAttention cuts the keys into. 1 has bits that depend on each
            sequence alone, by flash_attention's split_size=1024; others are equal shares of all
            keys.
        return_softmax_lse: Also return the log-sum-exp.

    Returns:
        out, [batch, seq_q, heads_q, dim_v], or (out, softmax_lse) with return_softmax_lse, as
        flash_attn_func. New keys for which the cache has no room are not written and not seen;
        what rows of q give that rotary_cos has no position for is undefined.

    Raises: What flash_attn_func raises.
    """
    window = _refuse_or_window(0.0, alibi_slopes, window_size, causal)
    _check_rank(4, q=q, k_cache=k_cache, v_cache=v_cache)
    rows = k_cache.shape[1]
    if block_table is not None:
        _check_rank(2, block_table=block_table)
        rows *= block_table.shape[1]
    lengths = _cache_lengths(cache_seqlens, q)
    if (k is None) != (v is None):
        name, other = ("v", "k") if v is None else ("k", "v")
        raise InvalidArgumentError(f"{name}: got None with {other}, accepted are both or none")
    if k is None and rotary_cos is not None:
        raise InvalidArgumentError(
            "rotary_cos: got one without k, accepted is None: FlashAttention rotates as it appends"
        )
    used = lengths
    if k is not None and v is not None:
        _check_rank(4, k=k, v=v)
        if lengths is None:
            raise InvalidArgumentError(
                "cache_seqlens: got None with k, accepted are lengths: where k is to be written"
            )
        rotated: dict[str, Any] = {}
        if rotary_cos is not None:
            rotated = {
                "q": q, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin,
                "interleaved": rotary_interleaved, "q_stays": not causal and window is None,
            }  # fmt: skip
        elif rotary_sin is not None:
            raise InvalidArgumentError("rotary_sin: got one, accepted is None without rotary_cos")
        turned = kv_append(
            k, v, k_cache, v_cache, cache_seqlens=lengths, batch_index=cache_batch_idx,
            page_table=block_table, **rotated,
        )  # fmt: skip
        q = turned if rotated else q
        used = (lengths + k.shape[1]).clamp(max=rows)
    tables: dict[str, Any] = {
        "seqused_k": used, "batch_index": cache_batch_idx, "page_table": block_table,
        "k_begin": cache_leftpad, "split_size": _CHUNK if num_splits == 1 else None,
    }  # fmt: skip
    attend: Any = flash_attention  # of either kind of result
    return attend(
        q, k_cache, v_cache, causal=bool(causal), window=window, scale=softmax_scale,
        softcap=softcap if softcap > 0 else None, return_lse=return_softmax_lse, **tables,
    )  # fmt: skip


def _cache_lengths(given: Any, q: torch.Tensor) -> torch.Tensor | None:
    if isinstance(given, int) and not isinstance(given, bool):
        return torch.full((q.shape[0],), given, dtype=torch.int32, device=q.device)
    if given is not None:
        _check_rank(1, cache_seqlens=given)
    lengths: torch.Tensor | None = given
    return lengths


def merge_attn_states(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor | None = None,
) -> None:
    """vLLM's merge_attn_states: attention over a prefix and a suffix, from that over each.

    This version computes it on the CPU: tensors on a GPU are refused.

    Args:
        output: [tokens, heads, dim]: where to write. It may be prefix_output. fp16, bf16 or fp32,
            whichever the partials are; of fp64 fp64. dim is a multiple of 8. Here and below the
            last dimension is contiguous, and rows begin on 16-byte boundaries.
        prefix_output, suffix_output: [tokens, heads, dim].
        prefix_lse, suffix_lse: [heads, tokens], fp32 (of fp64 fp64): natural log-sum-exps. A token
            that saw no key has -inf, as of FlashAttention 3, or +inf, as of FlashAttention 2: its
            output is not read. flashmoe_science.merge_states takes +inf for what it is.
        output_lse: [heads, tokens]: where to write the merged one, -inf where neither part has a
            key; None if it is not wanted. It may be prefix_lse.

    Raises:
        NotImplementedError: The tensors are on a GPU.
        ValueError, TypeError: As flashmoe_science.merge_states.
    """
    _check_rank(3, output=output, prefix_output=prefix_output, suffix_output=suffix_output)
    _check_rank(2, prefix_lse=prefix_lse, suffix_lse=suffix_lse)
    merge_states(
        (prefix_output[None], suffix_output[None]),
        (_empty_is_negative(prefix_lse), _empty_is_negative(suffix_lse)),
        out=output[None],
        lse=None if output_lse is None else output_lse[None],
    )


def _empty_is_negative(lse: torch.Tensor) -> torch.Tensor:
    """[1, heads, tokens] with -inf in the place of +inf, in memory of its own: FlashAttention 2's
    word for a row without a key."""
    return torch.where(lse == torch.inf, -torch.inf, lse)[None]


def _refuse_or_window(
    dropout_p: float, alibi_slopes: Any, window_size: tuple[int, int], causal: bool
) -> tuple[int | None, int | None] | None:
    """The window as flash_attention has it, unless something is asked for that is not there."""
    if dropout_p != 0.0:
        raise UnsupportedError(
            f"dropout_p: got {dropout_p}, accepted is 0.0: attention has no dropout; "
            "train without it, or keep flash_attn's own function where it is needed"
        )
    if alibi_slopes is not None:
        raise UnsupportedError(
            "alibi_slopes: got slopes, accepted is None: attention has no ALiBi; keep flash_attn's "
            "own function where it is needed"
        )
    left, right = (None if extent < 0 else extent for extent in window_size)
    if causal:
        right = None
    return None if left is None and right is None else (left, right)


def _unpacked(
    name: str, packed: Any, parts: int, rows: str = "batch, seq"
) -> tuple[torch.Tensor, ...]:
    """Views of the parts, which are behind `rows`. By unbind: its gradient is one stack, where that
    of an index is zeros of the whole for each part, and their sum."""
    _check_tensor(name, packed)
    axis = 1 + rows.count(",")
    if packed.dim() != axis + 3 or packed.shape[axis] != parts:
        raise InvalidArgumentError(
            f"{name}: got shape {tuple(packed.shape)}, accepted is [{rows}, {parts}, heads, dim]"
        )
    parts_of: tuple[torch.Tensor, ...] = packed.unbind(axis)
    return parts_of


def _check_tensor(name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(f"{name}: got {type(tensor).__name__}, accepted is a torch.Tensor")


def _check_rank(rank: int, **tensors: Any) -> None:
    for name, tensor in tensors.items():
        _check_tensor(name, tensor)
        if tensor.dim() != rank:
            verb = "is" if rank == 1 else "are"
            raise InvalidArgumentError(
                f"{name}: got {tensor.dim()} dimensions, accepted {verb} {rank}"
            )
