"""check_sequences: what is wrong with the tables of ragged, padded and paged batches."""

from __future__ import annotations

import enum
from typing import Any, Literal

from flashmoe_science import _core
from flashmoe_science._tracing import is_traced
from flashmoe_science.plan import Plan


class SequenceFault(enum.IntFlag):
    """What is wrong with the tables of a sequence, of which check_sequences gives the bits: each of
    the argument of its name."""

    CU_SEQLENS_Q = 1
    SEQUSED_Q = 2
    CU_SEQLENS_K = 4
    SEQUSED_K = 8
    K_BEGIN = 16
    BATCH_INDEX = 32
    PAGE_TABLE = 64
    MAX_SEQLEN_Q = 128
    MAX_SEQLEN_K = 256


def check_sequences(
    q: Any,
    k: Any,
    *,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    k_begin: Any = None,
    batch_index: Any = None,
    page_table: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    layout: Literal["bshd", "bhsd"] = "bshd",
    status: Any = None,
    kernel: str | None = None,
    stream: object = None,
) -> Any:
    """Finds what is out of range in the tables of a call of flash_attention, which counts it as no
    query and no key, and says nothing.

    It reads the tables alone, and on a GPU waits for nothing: what it finds stays on the device
    until it is asked for, as by `status.any()`. A CUDA graph can have it.

    Args:
        q, k: As of the call, of any dtype: their extents alone are looked at. Of kv_gather, and of
            kv_append with seqused_k of cache_seqlens and the new rows, k is the cache.
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: As of the call.
        k_begin, batch_index, page_table: As of the call.
        max_seqlen_q, max_seqlen_k, layout: As of the call.
        status: Where to write the result, [sequences] of int32. Not for JAX.
        kernel, stream: As of flash_attention.

    Returns:
        Of each sequence bits of SequenceFault, 0 where nothing is wrong. A page number counts if
        the sequence has a key in that page.

    Raises: What flash_attention raises. A message names the argument.
    """
    if is_traced():
        from flashmoe_science.torch import check

        return check.check_sequences(
            q, k, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q,
            seqused_k=seqused_k, k_begin=k_begin, batch_index=batch_index, page_table=page_table,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, layout=layout, status=status,
            kernel=kernel, stream=stream,
        )  # fmt: skip
    sequences = (
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, k_begin, batch_index, page_table, None,
        None, None, max_seqlen_q, max_seqlen_k, None,
    )  # fmt: skip
    return _core.check_sequences(q, k, sequences, layout, status, kernel, stream)


def check_sequences_plan(
    q: Any,
    k: Any,
    *,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    k_begin: Any = None,
    batch_index: Any = None,
    page_table: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    layout: Literal["bshd", "bhsd"] = "bshd",
    status: Any = None,
    kernel: str | None = None,
) -> Plan:
    """What check_sequences would do with these arguments. Reads no data and launches nothing.

    Raises what check_sequences would raise for its arguments.
    """
    from flashmoe_science import _dispatch

    tensors = {
        "q": q, "k": k, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
        "seqused_q": seqused_q, "seqused_k": seqused_k, "k_begin": k_begin,
        "batch_index": batch_index, "page_table": page_table, "status": status,
    }  # fmt: skip
    options: dict[str, Any] = {"layout": layout, "kernel": kernel}
    options |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    if any(_dispatch.is_jax(tensor) for tensor in given.values()):
        from flashmoe_science import jax

        return Plan.of(jax.plan("check_sequences", given, options))
    return Plan.of(_core.plan("check_sequences", given, options))
