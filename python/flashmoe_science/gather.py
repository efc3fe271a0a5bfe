"""kv_gather: keys and values out of a cache into consecutive rows."""

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
    """Copies the keys and values of each sequence out of a cache into consecutive rows. They are
    the rows that flash_attention reads with the same tables.

    Each row is read once and written once. Takes tensors as flash_attention does, and returns the
    same kind. It has no derivative: torch tensors that require grad and JAX's derivatives are
    refused.

    Args:
        k_cache: [batch, rows, heads_kv, dim], or with page_table [pages, page_size, heads_kv, dim],
            in layout "bhsd" with the second and third extents exchanged: fp16, bf16, fp32 or
            float8_e4m3fn, on the CPU also fp64. dim is a multiple of 8 up to 1024. Here and below
            the last dimension is contiguous and rows begin on 16-byte boundaries.
        v_cache: The same with dim_v; None gathers keys only.
        cu_seqlens_k: [batch + 1], int32: sequence b goes to rows cu_seqlens_k[b] to before
            cu_seqlens_k[b + 1] of results of [1, total, heads_kv, dim]. Without it, to row b of the
            batch, from its first row on. A row that several sequences share (offsets that decrease)
            goes to the first one.
        seqused_k: [batch], int32: sequence b has only its first seqused_k[b] keys.
        k_begin: [batch], int32: skips the first k_begin[b] of these.
        batch_index: [batch], int32: sequence b has its keys in k_cache[batch_index[b]].
        page_table: [batch, pages of a sequence], int32: it has them in the pages that page_table[b]
            names, in order.
        k_scale, v_scale: Scales of float8_e4m3fn caches, as flash_attention takes them. A number of
            the cache is widened, multiplied by its scale in fp32 and rounded once. None is 1.
        layout: "bshd" or "bhsd".
        rows: Rows of new results: keys per sequence, or with cu_seqlens_k of all together. None is
            as many as the cache holds. Keys beyond are left out.
        dtype: Dtype of new results from a float8_e4m3fn cache: fp16, bf16 or fp32. None is
            k_cache's.
        k, v: Where to write the results, which then decide rows and dtype. Not for JAX.
        kernel, stream: As in flash_attention.

    Returns:
        (k, v), or k without v_cache. Rows that get no key are not written: in new results they may
        hold anything. flash_attention's rules for tables apply: an entry out of range is no key,
        and a row of a page that does not exist keeps its place and becomes zeros. Nothing outside
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
    """Plans what kv_gather would do with these arguments. Reads no data and launches nothing.

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
