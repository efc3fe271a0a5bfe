"""kv_append: new keys and values into a cache, rotated on the way."""

from __future__ import annotations

from typing import Any, Literal

from flashmoe_science import _core
from flashmoe_science._dtypes import parse_flag
from flashmoe_science._tracing import is_traced
from flashmoe_science.plan import Plan


def kv_append(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    slots: Any = None,
    cache_seqlens: Any = None,
    cu_seqlens: Any = None,
    seqused: Any = None,
    batch_index: Any = None,
    page_table: Any = None,
    positions: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    interleaved: bool = False,
    q: Any = None,
    q_stays: bool = False,
    layout: Literal["bshd", "bhsd"] = "bshd",
    q_out: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kernel: str | None = None,
    stream: object = None,
) -> Any:
    """Writes new keys and values to rows of a cache, and rotates keys and queries on the way.

    Each row is read once and written once. flash_attention reads what it wrote with the same
    tables; seqused_k is then cache_seqlens plus the new rows.

    Takes tensors as flash_attention does. JAX arrays cannot be written, so it makes new caches from
    them, in the memory of the old ones where XLA may: under jit, for donated arrays and what a loop
    carries. It has no derivative.

    Args:
        k: [batch, seq, heads_kv, dim] in layout "bshd", [batch, heads_kv, seq, dim] in "bhsd": new
            keys. fp16, bf16 or fp32, on the CPU also fp64. dim is a multiple of 8 up to 1024. Here
            and below the last dimension is contiguous and rows begin on 16-byte boundaries.
        v: [batch, seq, heads_kv, dim_v]: new values, k's dtype.
        k_cache: [batch, rows, heads_kv, dim], or with page_table or slots [pages, page_size,
            heads_kv, dim], in the same layout, k's dtype or float8_e4m3fn; written in place. Other
            rows stay as they are.
        v_cache: The same with dim_v.
        slots: [batch, seq], int32 or int64, any strides: row i of k[b] becomes row slots[b, i] %
            page_size of page slots[b, i] // page_size; a row with a negative slot is not written.
            Excludes the next five.
        cache_seqlens: [batch], int32: the i-th new row of sequence b becomes row
            cache_seqlens[b] + i of its keys. None is 0 for each.
        cu_seqlens: [batch + 1], int32: sequence b has the new rows from cu_seqlens[b] to before
            cu_seqlens[b + 1] of a k of [1, total, heads_kv, dim].
        seqused: [batch], int32: sequence b has only the first seqused[b] of its new rows.
        batch_index: [batch], int32: sequence b has its keys in k_cache[batch_index[b]].
        page_table: [batch, pages of a sequence], int32: it has them in the pages that page_table[b]
            names, in order.
        positions: [batch, seq], int32 or int64: the position of each row of k and of q. None is
            cache_seqlens[b] + i for row i.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2], k's dtype or fp32, for fp64 fp64: they
            rotate the first rotary_dim numbers of each head of k and of q, in fp32 (fp64). None is
            no rotation.
        interleaved: Pairs are numbers 2 i and 2 i + 1, else (NeoX) i and i + rotary_dim / 2.
        q: [batch, seq_q, heads_q, dim]: queries to rotate in the same call, with rotary_cos. With
            cu_seqlens or positions, seq_q is seq.
        q_stays: All queries of a sequence stand where its first does.
        layout: "bshd" or "bhsd".
        q_out: Where to write the rotated queries; may be q.
        k_scale, v_scale: Scales of float8_e4m3fn caches, as flash_attention takes them. Each new
            number (rotated, in k's dtype) is divided by its scale in fp32, rounded to nearest and
            saturated at 448. None is 1.
        kernel, stream: As in flash_attention.

    Returns:
        q_out, or None without q; for JAX arrays (k_cache, v_cache) or (k_cache, v_cache, q_out). A
        row is not written if the cache has no such place, if the tables have no such position, or
        if its sequence's cache_seqlens is negative: nothing outside the tensors is read or written.
        If two new rows go to the same place, its content is undefined.

    Raises: What flash_attention raises. A message names the argument.
    """
    if is_traced():
        from flashmoe_science.torch import append

        return append.kv_append(
            k, v, k_cache, v_cache, slots=slots, cache_seqlens=cache_seqlens,
            cu_seqlens=cu_seqlens, seqused=seqused, batch_index=batch_index, page_table=page_table,
            positions=positions, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
            interleaved=interleaved, q=q, q_stays=q_stays, layout=layout, q_out=q_out,
            k_scale=k_scale, v_scale=v_scale, kernel=kernel, stream=stream,
        )  # fmt: skip
    return _core.kv_append(
        k, v, k_cache, v_cache, slots, cache_seqlens, cu_seqlens, seqused, batch_index, page_table,
        positions, rotary_cos, rotary_sin, interleaved, q, q_stays, layout, q_out, kernel, stream,
        k_scale, v_scale,
    )  # fmt: skip


def kv_append_plan(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    slots: Any = None,
    cache_seqlens: Any = None,
    cu_seqlens: Any = None,
    seqused: Any = None,
    batch_index: Any = None,
    page_table: Any = None,
    positions: Any = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    interleaved: bool = False,
    q: Any = None,
    q_stays: bool = False,
    layout: Literal["bshd", "bhsd"] = "bshd",
    q_out: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kernel: str | None = None,
) -> Plan:
    """Plans what kv_append would do with these arguments. Reads no data and launches nothing.

    Raises what kv_append would raise for its arguments.
    """
    tensors = {
        "k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slots": slots,
        "cache_seqlens": cache_seqlens, "cu_seqlens": cu_seqlens, "seqused": seqused,
        "batch_index": batch_index, "page_table": page_table, "positions": positions,
        "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "q": q, "q_out": q_out,
        "k_scale": k_scale, "v_scale": v_scale,
    }  # fmt: skip
    options = {
        "layout": layout, "kernel": kernel, "interleaved": parse_flag("interleaved", interleaved),
        "q_stays": parse_flag("q_stays", q_stays),
    }  # fmt: skip
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return Plan.of(_core.plan("kv_append", given, options))
