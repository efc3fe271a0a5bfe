"""FlashAttention 2's functions by FlashMoE: its names, arguments, defaults and results.

    from flashmoe_science.flash_attn import flash_attn_func

instead of `from flash_attn import flash_attn_func` is all that a program changes. The functions
have gradients where flashmoe_science.flash_attention has. Unlike FlashAttention's, they also have
fp32 and fp64 on the CPU, a separate head dimension of v, and a gradient of the log-sum-exp.
Backward is always deterministic: `deterministic` is accepted and changes nothing.

`merge_attn_states` is vLLM's function of that name. It merges the results of two calls.

The functions for variable lengths have gradients, except with keys in blocks.

flash_attn_func, flash_attn_varlen_func and flash_attn_with_kvcache also have the arguments of
FlashAttention 3 and of vLLM's edition of both, by keyword only; positional arguments are
FlashAttention 2's. Arguments that only guide its kernels change nothing: pack_gqa, sm_margin,
scheduler_metadata.

Dropout, ALiBi, qv and attention_chunk are missing and refused.
"""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science import _flash_attn as arguments
from flashmoe_science.append import kv_append
from flashmoe_science.attention import flash_attention
from flashmoe_science.errors import InvalidArgumentError, _naming
from flashmoe_science.merge import merge_states

_LEAST_DIM = 8  # of heads

_NAMES = {
    "scale": "softmax_scale", "window": "window_size", "sinks": "s_aux", "k_scale": "k_descale",
    "v_scale": "v_descale", "page_table": "block_table",
}  # fmt: skip
_SECOND_NAMES = {"s_aux": "learnable_sink", "block_table": "page_table"}
_OF_CACHE = _NAMES | {
    "k_begin": "cache_leftpad", "batch_index": "cache_batch_idx", "seqused_k": "cache_seqlens",
    "cu_seqlens": "cu_seqlens_k_new", "positions": "rotary_seqlens",
    "interleaved": "rotary_interleaved", "return_lse": "return_softmax_lse",
}  # fmt: skip
_OF_KEYS_AND_VALUES = {"k": "kv", "v": "kv"}
_OF_ONE = {"q": "qkv", "k": "qkv", "v": "qkv"}
_OF_ONE_VARLEN = _OF_ONE | {
    "cu_seqlens_q": "cu_seqlens", "cu_seqlens_k": "cu_seqlens", "max_seqlen_q": "max_seqlen",
    "max_seqlen_k": "max_seqlen",
}  # fmt: skip
_OF_PARTIALS = {
    "outs": "suffix_output", "lses": "suffix_lse", "prior_out": "prefix_output",
    "prior_lse": "prefix_lse", "out": "output", "lse": "output_lse",
}  # fmt: skip

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


@_naming(_NAMES, _SECOND_NAMES)
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
    *,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    s_aux: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
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
            i + seq_k - seq_q + right. A negative number is no bound; with causal, right is always
            0.
        softcap: Logits become softcap * tanh(logit / softcap); 0 or less is no cap.
        alibi_slopes: None.
        deterministic: Whether gradients have the same bits on every run. They always have.
        return_attn_probs: Also return the log-sum-exp, and a placeholder for the probabilities.
        qv: None.
        q_descale: Not used: q is never fp8.
        k_descale, v_descale: fp32, [batch, heads_k], or [1, heads_k], or one number: factors of
            float8_e4m3fn k and v. They are not read for other dtypes.
        attention_chunk: 0.
        num_splits: How many parts FlashAttention cuts the keys into. With 1 the bits depend only on
            each sequence, by flash_attention's split_size=1024; other values give equal shares of
            all keys.
        pack_gqa, sm_margin: Accepted, and change nothing.
        s_aux, learnable_sink: [heads_q], one of the two: one logit per head that takes part in
            every softmax and has no value.
        return_softmax_lse: Return (out, softmax_lse), as FlashAttention 3 does.
        out: Where to write the result. Not while gradients are recorded, nor in a graph of
            torch.compile.

    Returns:
        out, [batch, seq_q, heads_q, dim_v], or (out, softmax_lse, S_dmask) with return_attn_probs.
        softmax_lse is [batch, heads_q, seq_q], fp32 (for fp64 fp64), a natural logarithm. For a
        query that sees no key it is -inf; FlashAttention has +inf. S_dmask is an empty tensor of
        q's dtype, as FlashAttention from 2.7 on returns without dropout.

    Raises:
        NotImplementedError: Dropout, ALiBi, qv or attention_chunk is asked for, or no kernel serves
            the call.
        ValueError, TypeError: As flashmoe_science.flash_attention.
    """
    how = arguments.options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, qv, attention_chunk,
        num_splits, s_aux, learnable_sink,
    )  # fmt: skip
    how |= arguments.scales(k, k_descale, v_descale, of_sequences=True)
    if not return_attn_probs and not return_softmax_lse:
        made: torch.Tensor = flash_attention(q, k, v, **how, out=out)
        return made
    made, lse = flash_attention(q, k, v, **how, out=out, return_lse=True)
    return (made, lse) if return_softmax_lse else (made, lse, q.new_empty(0))


@_naming(_OF_ONE)
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
        qkv: [batch, seq, 3, heads, dim]: q, k and v, read in place. Its gradient has the same form.
        dropout_p: As in flash_attn_func, like all that follow.

    Returns:
        As flash_attn_func.

    Raises: What flash_attn_func raises.
    """
    q, k, v = arguments.unpacked("qkv", qkv, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


@_naming(_OF_KEYS_AND_VALUES)
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
        kv: [batch, seq_k, 2, heads_k, dim]: k and v, read in place. Its gradient has the same form.
        dropout_p: As in flash_attn_func, like all that follow.

    Returns:
        As flash_attn_func.

    Raises: What flash_attn_func raises.
    """
    k, v = arguments.unpacked("kv", kv, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


@_naming(_NAMES, _SECOND_NAMES)
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    *,
    page_table: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    scheduler_metadata: torch.Tensor | None = None,
    fa_version: int | None = None,
    s_aux: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
) -> Any:
    """FlashAttention's flash_attn_varlen_func: packed sequences of any lengths.

    Args:
        q: [total_q, heads_q, dim], the rows of all sequences; dtypes and rows as in
            flash_attn_func.
        k: [total_k, heads_k, dim], or with block_table [blocks, block_size, heads_k, dim] with any
            block size.
        v: [total_k, heads_k, dim_v], or [blocks, block_size, heads_k, dim_v].
        cu_seqlens_q: [batch + 1], int32: sequence b has q's rows from cu_seqlens_q[b] to before
            cu_seqlens_q[b + 1].
        cu_seqlens_k: [batch + 1], int32: the same for k and v. With block_table only the
            differences count: the lengths. With block_table and seqused_k it is not read and may be
            None.
        max_seqlen_q, max_seqlen_k: Bounds of a sequence's rows, which may be loose. Rows beyond
            them are left out. None is no bound.
        dropout_p: As in flash_attn_func, like those that follow. causal and window_size use each
            sequence's own lengths.
        block_table: [batch, blocks of a sequence], int32: the blocks of k and v with the keys of
            each sequence, in order. page_table is another name for it.
        seqused_q, seqused_k: [batch], int32: each sequence has only this many of its first rows.
        qv: As in flash_attn_func, like those that follow, except that k_descale and v_descale per
            sequence are refused.
        scheduler_metadata, fa_version: Accepted, and change nothing.

    Returns:
        out, [total_q, heads_q, dim_v], or (out, softmax_lse, S_dmask) with return_attn_probs, as
        flash_attn_func; softmax_lse is [heads_q, total_q]. Rows of no sequence may hold anything.

    Raises: What flash_attn_func raises.
    """
    how = arguments.options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, qv, attention_chunk,
        num_splits, s_aux, learnable_sink,
    )  # fmt: skip
    table = arguments.one_of(block_table=block_table, page_table=page_table)
    arguments.check_rank(3, q=q)
    arguments.check_rank(3 if table is None else 4, k=k, v=v)
    arguments.check_rank(1, cu_seqlens_q=cu_seqlens_q)
    if cu_seqlens_k is not None:
        arguments.check_rank(1, cu_seqlens_k=cu_seqlens_k)
    elif table is None or seqused_k is None:
        raise InvalidArgumentError(
            "cu_seqlens_k: got None, accepted are offsets, or seqused_k with block_table"
        )
    how |= arguments.scales(k, k_descale, v_descale, of_sequences=False)
    how |= {
        "cu_seqlens_q": cu_seqlens_q, "seqused_q": seqused_q, "seqused_k": seqused_k,
        "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k,
    }  # fmt: skip
    if table is None:
        k, v = k[None], v[None]
        how["cu_seqlens_k"] = cu_seqlens_k
    else:
        arguments.check_rank(2, block_table=table)
        how["page_table"] = table
        if seqused_k is None and cu_seqlens_k is not None:
            how["seqused_k"] = cu_seqlens_k.diff()
    into = arguments.with_batch("out", out)
    if not return_attn_probs and not return_softmax_lse:
        made: torch.Tensor = flash_attention(q[None], k, v, **how, out=into)
        return made[0] if out is None else out
    made, lse = flash_attention(q[None], k, v, **how, out=into, return_lse=True)
    rows = made[0] if out is None else out
    return (rows, lse[0]) if return_softmax_lse else (rows, lse[0], q.new_empty(0))


@_naming(_OF_ONE_VARLEN)
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
        qkv: [total, 3, heads, dim]: q, k and v of all sequences, read in place.
        cu_seqlens: [batch + 1], int32: sequence b has the rows from cu_seqlens[b] to before
            cu_seqlens[b + 1].
        max_seqlen: The most rows of a sequence, or more.
        dropout_p: As in flash_attn_func, like all that follow.

    Returns:
        As flash_attn_varlen_func.

    Raises: What flash_attn_func raises.
    """
    q, k, v = arguments.unpacked("qkv", qkv, 3, "total")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@_naming(_OF_KEYS_AND_VALUES)
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
        kv: [total_k, 2, heads_k, dim]: k and v of all sequences, read in place.
        cu_seqlens_q: As in flash_attn_varlen_func, like all that follow.

    Returns:
        As flash_attn_varlen_func.

    Raises: What flash_attn_func raises.
    """
    k, v = arguments.unpacked("kv", kv, 2, "total_k")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


@_naming(_OF_CACHE, _SECOND_NAMES)
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
    *,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    attention_chunk: int = 0,
    scheduler_metadata: torch.Tensor | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    s_aux: torch.Tensor | None = None,
    learnable_sink: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> Any:
    """FlashAttention's flash_attn_with_kvcache: attention over a cache, after writing new keys and
    values to it.

    Written keys and values have no gradients, nor have keys in blocks or by cache_batch_idx:
    tensors that require grad are refused there.

    Args:
        q: [batch, seq_q, heads_q, dim], or with cu_seqlens_q [total_q, heads_q, dim]; dtypes and
            rows as in flash_attn_func.
        k_cache: [batch_cache, rows, heads_k, dim], or with block_table [blocks, block_size,
            heads_k, dim] with any block size. k is written to it. q's dtype, or float8_e4m3fn.
        v_cache: [batch_cache, rows, heads_k, dim_v], or [blocks, block_size, heads_k, dim_v].
        k: [batch, seq_new, heads_k, dim]: row i of sequence b becomes row cache_seqlens[b] + i of
            the cache, which the queries see. With cu_seqlens_k_new [total_new, heads_k, dim]. None
            is no new keys. In an fp8 cache numbers are rounded to nearest.
        v: [batch, seq_new, heads_k, dim_v], with k.
        rotary_cos: [positions, rotary_dim / 2], q's dtype or fp32, for fp64 fp64: they rotate k
            and q at the positions from cache_seqlens on; without causal and window_size, all of q
            at cache_seqlens. With k.
        rotary_sin: The same, with rotary_cos.
        cache_seqlens: [batch], int32, or a number: the keys of each sequence in the cache, without
            new ones. None is all of its rows, without k.
        cache_batch_idx: [batch], int32: the row of the cache's batch for each sequence. Without
            block_table.
        cache_leftpad: [batch], int32: the padding keys before the first key of each sequence. They
            count as rows, and for rotary_cos as positions.
        block_table: [batch, blocks of a sequence], int32: the blocks with the keys of each
            sequence, in order. page_table is another name for it.
        softmax_scale: As in flash_attn_func, like causal, which ends bottom-right at the last key
            of each sequence, window_size and softcap.
        rotary_interleaved: Pairs are numbers 2 i and 2 i + 1 of a head; otherwise (NeoX) i and i +
            rotary_dim / 2.
        alibi_slopes: None.
        num_splits: How many parts FlashAttention cuts the keys into. With 1 the bits depend only on
            each sequence, by flash_attention's split_size=1024; other values give equal shares of
            all keys.
        return_softmax_lse: Also return the log-sum-exp.
        cu_seqlens_q, cu_seqlens_k_new: [batch + 1], int32: the rows of each sequence in q, and in k
            and v.
        max_seqlen_q: With cu_seqlens_q, a bound of a sequence's rows; None is no bound.
        rotary_seqlens: [batch], int32: the first positions at which k and q are rotated. None is
            cache_seqlens.
        k_descale, v_descale: As in flash_attn_func, also for new keys. Values per sequence are
            refused with block_table and with cache_batch_idx.
        qv, q_descale, attention_chunk, pack_gqa, sm_margin, s_aux, learnable_sink, out: As of
            flash_attn_func.
        scheduler_metadata: Accepted, and changes nothing.

    Returns:
        out, [batch, seq_q, heads_q, dim_v], or (out, softmax_lse) with return_softmax_lse, as
        flash_attn_func; with cu_seqlens_q [total_q, heads_q, dim_v] and [heads_q, total_q]. New
        keys for which the cache has no room are neither written nor seen. Rows of q for which
        rotary_cos has no position give undefined results.

    Raises: What flash_attn_func raises.
    """
    how = arguments.options(
        0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, qv, attention_chunk,
        num_splits, s_aux, learnable_sink,
    )  # fmt: skip
    table = arguments.one_of(block_table=block_table, page_table=page_table)
    arguments.check_rank(4 if cu_seqlens_q is None else 3, q=q)
    arguments.check_rank(4, k_cache=k_cache, v_cache=v_cache)
    arguments.check_tensors(
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, s_aux=s_aux,
        learnable_sink=learnable_sink, rotary_cos=rotary_cos, rotary_sin=rotary_sin, out=out,
    )  # fmt: skip
    rows, batch = k_cache.shape[1], q.shape[0]
    if table is not None:
        arguments.check_rank(2, block_table=table)
        rows *= table.shape[1]
    if cu_seqlens_q is not None:
        arguments.check_rank(1, cu_seqlens_q=cu_seqlens_q)
        if cu_seqlens_q.shape[0] == 0:
            raise InvalidArgumentError(
                "cu_seqlens_q: got 0 numbers, accepted is one more than there are sequences"
            )
        q, batch = q[None], cu_seqlens_q.shape[0] - 1
    scales = arguments.scales(
        k_cache, k_descale, v_descale, of_sequences=table is None and cache_batch_idx is None
    )
    lengths = arguments.lengths("cache_seqlens", cache_seqlens, batch, q.device)
    how |= {
        **scales, "cu_seqlens_q": cu_seqlens_q, "seqused_k": lengths,
        "batch_index": cache_batch_idx, "page_table": table, "k_begin": cache_leftpad,
        "max_seqlen_q": None if cu_seqlens_q is None else max_seqlen_q,
    }  # fmt: skip
    into = out if cu_seqlens_q is None else arguments.with_batch("out", out)
    if (k is None) != (v is None):
        name, other = ("v", "k") if v is None else ("k", "v")
        raise InvalidArgumentError(f"{name}: got None with {other}, accepted are both or none")
    if k is None and rotary_cos is not None:
        raise InvalidArgumentError(
            "rotary_cos: got one without k, accepted is None: FlashAttention rotates as it appends"
        )
    if k is not None and v is not None:
        arguments.check_rank(4 if cu_seqlens_k_new is None else 3, k=k, v=v)
        if lengths is None:
            raise InvalidArgumentError(
                "cache_seqlens: got None with k, accepted are lengths: where k is to be written"
            )
        if cu_seqlens_k_new is None:
            new: Any = k.shape[1]
        else:
            arguments.check_rank(1, cu_seqlens_k_new=cu_seqlens_k_new)
            if cu_seqlens_k_new.shape[0] != batch + 1:
                raise InvalidArgumentError(
                    f"cu_seqlens_k_new: got {cu_seqlens_k_new.shape[0]} numbers, accepted are "
                    f"{batch + 1}, one more than there are sequences"
                )
            k, v, new = k[None], v[None], cu_seqlens_k_new.diff()
        rotation: dict[str, Any] = {}
        if rotary_cos is not None:
            rotation = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin,
                        "interleaved": rotary_interleaved}  # fmt: skip
            stays = not causal and how["window"] is None
            if rotary_seqlens is cu_seqlens_q is cu_seqlens_k_new is None:
                rotation |= {"q": q, "q_stays": stays}
            else:
                # An index of positions() beyond these would be an error of the device.
                arguments.check_count("cache_seqlens", lengths, batch)
                at = lengths
                if rotary_seqlens is not None:
                    arguments.check_rank(1, rotary_seqlens=rotary_seqlens)
                    arguments.check_count("rotary_seqlens", rotary_seqlens, batch)
                    at = rotary_seqlens
                positions = arguments.positions(at, cu_seqlens_q, q.shape[1], stays)
                q = _rotated(q, positions, **rotation)
                rotation["positions"] = arguments.positions(at, cu_seqlens_k_new, k.shape[1])
        elif rotary_sin is not None:
            raise InvalidArgumentError("rotary_sin: got one, accepted is None without rotary_cos")
        arguments.check_before_append(q, k_cache, v_cache, how, return_softmax_lse, into)
        turned = kv_append(
            k, v, k_cache, v_cache, cache_seqlens=lengths, cu_seqlens=cu_seqlens_k_new,
            batch_index=cache_batch_idx, page_table=table, **rotation, **scales,
        )  # fmt: skip
        q = turned if "q" in rotation else q
        how["seqused_k"] = (lengths + new).clamp(max=rows)
    made = arguments.attend_to_cache(
        q, k_cache, v_cache, **how, return_lse=return_softmax_lse, out=into
    )
    if cu_seqlens_q is None:
        return made
    first = made[0][0] if return_softmax_lse else made[0]
    first = first if out is None else out
    return (first, made[1][0]) if return_softmax_lse else first


def _rotated(q: torch.Tensor, positions: torch.Tensor, **rotation: Any) -> torch.Tensor:
    """q, [batch, seq, heads, dim], rotated at positions [batch, seq] by appending q to itself."""
    turned, few = torch.empty_like(q), q[..., :_LEAST_DIM]
    slots = torch.arange(positions.numel(), device=q.device).view_as(positions)
    _rotate(q, few, turned, torch.empty_like(few), slots=slots, positions=positions, **rotation)
    return turned


_rotate = _naming({"k": "q", "k_cache": "q"})(kv_append)  # its tensors are q


@_naming(_OF_PARTIALS)
def merge_attn_states(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: torch.Tensor | None = None,
) -> None:
    """vLLM's merge_attn_states: merges attention over a prefix and over a suffix.

    Args:
        output: [tokens, heads, dim]: where to write; may be prefix_output. fp16, bf16 or fp32,
            whatever the partials are; for fp64 fp64. dim is a multiple of 8. Here and below the
            last dimension is contiguous, and rows begin on 16-byte boundaries.
        prefix_output, suffix_output: [tokens, heads, dim].
        prefix_lse, suffix_lse: [heads, tokens], fp32 (for fp64 fp64): natural log-sum-exps. A token
            that saw no key has -inf, as in FlashAttention 3, or +inf, as in FlashAttention 2: its
            output is not read. flashmoe_science.merge_states takes +inf literally.
        output_lse: [heads, tokens]: where to write the merged one, -inf if neither part has a key;
            None if not wanted. May be prefix_lse.
        prefill_tokens_with_context: How many tokens, the first ones, have a prefix; for the others
            it is not read. None is all.
        output_scale: One fp32 number, if output is float8_e4m3fn: output gets the result divided by
            this, rounded to nearest and saturated at 448.

    Raises:
        ValueError, TypeError: As flashmoe_science.merge_states.
    """
    arguments.check_rank(3, output=output, prefix_output=prefix_output, suffix_output=suffix_output)
    arguments.check_rank(2, prefix_lse=prefix_lse, suffix_lse=suffix_lse)
    if output_lse is not None:
        arguments.check_rank(2, output_lse=output_lse)
    if output_scale is not None:
        arguments.check_tensor("output_scale", output_scale)
    if (output.dtype == torch.float8_e4m3fn) != (output_scale is not None):
        given = "None" if output_scale is None else "one"
        raise InvalidArgumentError(
            f"output_scale: got {given} with an output of {output.dtype}, accepted is a number "
            "with torch.float8_e4m3fn, and None with other dtypes"
        )
    prefix_lse, suffix_lse = (_empty_is_negative(x) for x in (prefix_lse, suffix_lse))
    if prefill_tokens_with_context is not None:
        tokens = arguments.integer(
            "prefill_tokens_with_context", prefill_tokens_with_context, "a number of tokens"
        )
        prefix_lse[..., tokens:] = -torch.inf
    wide = output if output_scale is None else torch.empty_like(output, dtype=torch.float32)
    merge_states(
        (prefix_output[None], suffix_output[None]),
        (prefix_lse, suffix_lse),
        out=wide[None],
        lse=None if output_lse is None else output_lse[None],
    )
    if output_scale is not None:
        largest = torch.finfo(output.dtype).max
        output.copy_((wide / output_scale).clamp(-largest, largest))


def _empty_is_negative(lse: torch.Tensor) -> torch.Tensor:
    """[1, heads, tokens] with -inf instead of +inf, in new memory. FlashAttention 2 marks rows
    without a key by +inf."""
    return torch.where(lse == torch.inf, -torch.inf, lse)[None]
