"""kv_gather: keys and values out of a cache, one behind the other."""

from __future__ import annotations

from typing import Any, Literal

from flashmoe_science import _core
from flashmoe_science._tracing import is_traced
from flashmoe_science.merge import parse_name
from flashmoe_science.plan import Plan


def kv_gather(
    k_cache: Any,
    v_cache: Any = None,
    *,
    cu_seqlens_k: Any = None,
    seqused_k: Any = None,
    k_begin: Any = None,
    batch_index: Any = None,
    page_table: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    layout: Literal["bshd", "bhsd"] = "bshd",
    rows: int | None = None,
    dtype: object = None,
    k: Any = None,
    v: Any = None,
    kernel: str | None = None,
    stream: object = None,
) -> Any:
    """Copies the keys and values of each sequence out of a cache, to where they are one behind the
    other: what flash_attention reads by the same tables.

    Each row is read once and written once. Takes tensors as flash_attention does, and returns the
    same kind. It has no derivative: torch's tensors that require grad and JAX's derivatives are
    refused.

    Args:
        k_cache: [batch, rows, heads_kv, dim], or with page_table [pages, page_size, heads_kv, dim],
            in layout "bhsd" with the second and third extents exchanged: fp16, bf16, fp32 or
            float8_e4m3fn, on the CPU also fp64. dim is a multiple of 8 up to 1024. Here and below
            the last dimension is contiguous and rows begin on 16-byte boundaries.
        v_cache: The same with dim_v; None gathers keys alone.
        cu_seqlens_k: [batch + 1], int32: sequence b goes to rows cu_seqlens_k[b] to before
            cu_seqlens_k[b + 1] of results of [1, total, heads_kv, dim]. Without, to row b of the
            batch, from its first row on. A row that several sequences have, as of offsets that
            decrease, is the first one's alone.
        seqused_k: [batch], int32: sequence b has its first seqused_k[b] keys.
        k_begin: [batch], int32: without the first k_begin[b] of these.
        batch_index: [batch], int32: sequence b has its keys in k_cache[batch_index[b]].
        page_table: [batch, pages of a sequence], int32: it has them in the pages that
            page_table[b] names, one behind the other.
        k_scale, v_scale: Of caches of float8_e4m3fn, as flash_attention takes them. A number of the
            cache is widened, multiplied by its scale in fp32 and rounded once. None is 1.
        layout: "bshd" or "bhsd".
        rows: Of new results: keys of each sequence, or with cu_seqlens_k of all, where it is
            needed. None is what the cache has room for. Keys beyond are left out.
        dtype: Of new results of a cache of float8_e4m3fn: fp16, bf16 or fp32. None is k_cache's.
        k, v: Where to write the results, which then say rows and dtype. Not for JAX.
        kernel, stream: As of flash_attention.

    Returns:
        (k, v), or k without v_cache. Rows that no key goes to are not written: in new results they
        hold anything. Tables count as flash_attention counts them: what is out of range is no key,
        and a row of a page that there is none of keeps its place and is zeros. Nothing outside of
        the tensors is read or written.

    Raises: What flash_attention raises. A message names the argument.
    """
    if is_traced():
        from flashmoe_science.torch import gather

        return gather.kv_gather(
            k_cache, v_cache, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k, k_begin=k_begin,
            batch_index=batch_index, page_table=page_table, k_scale=k_scale, v_scale=v_scale,
            layout=layout, rows=rows, dtype=dtype, k=k, v=v, kernel=kernel, stream=stream,
        )  # fmt: skip
    return _core.kv_gather(
        k_cache, v_cache, cu_seqlens_k, seqused_k, k_begin, batch_index, page_table, k_scale,
        v_scale, layout, rows, parse_name(dtype), k, v, kernel, stream,
    )  # fmt: skip


def kv_gather_plan(
    k_cache: Any,
    v_cache: Any = None,
    *,
    cu_seqlens_k: Any = None,
    seqused_k: Any = None,
    k_begin: Any = None,
    batch_index: Any = None,
    page_table: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    layout: Literal["bshd", "bhsd"] = "bshd",
    rows: int | None = None,
    dtype: object = None,
    k: Any = None,
    v: Any = None,
    kernel: str | None = None,
) -> Plan:
    """What kv_gather would do with these arguments. Reads no data and launches nothing.

    Raises what kv_gather would raise for its arguments.
    """
    from flashmoe_science import _dispatch

    tensors = {
        "k_cache": k_cache, "v_cache": v_cache, "cu_seqlens_k": cu_seqlens_k,
        "seqused_k": seqused_k, "k_begin": k_begin, "batch_index": batch_index,
        "page_table": page_table, "k_scale": k_scale, "v_scale": v_scale, "k": k, "v": v,
    }  # fmt: skip
    options = {"layout": layout, "kernel": kernel, "rows": rows, "dtype": parse_name(dtype)}
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if any(_dispatch.is_jax(tensor) for tensor in given.values()):
        from flashmoe_science import jax

        return Plan.of(jax.plan("kv_gather", given, options))
    return Plan.of(_core.plan("kv_gather", given, options))
