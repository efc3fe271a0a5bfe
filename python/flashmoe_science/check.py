"""check_sequences: what is wrong with the tables of ragged, padded and paged batches."""

from __future__ import annotations

import enum
from typing import Any, Literal

from flashmoe_science import _core
from flashmoe_science._tracing import is_traced
from flashmoe_science.plan import Plan


class SequenceFault(enum.IntFlag):
    """What is wrong with the tables of a sequence, as bits from check_sequences. Each names the
    argument at fault."""

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
    """Finds entries that are out of range in the tables of a flash_attention call, which silently
    counts them as no query and no key.

    It reads only the tables and does not wait for the GPU: the findings stay on the device until
    they are read, for example by `status.any()`. It can be captured in a CUDA graph.

    Args:
        q, k: As in the call, of any dtype: only their extents are used. For kv_gather, k is the
            cache; also for kv_append, with seqused_k = cache_seqlens plus the new rows.
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: As in the call.
        k_begin, batch_index, page_table: As in the call.
        max_seqlen_q, max_seqlen_k, layout: As in the call.
        status: Where to write the result, [sequences] int32. Not for JAX.
        kernel, stream: As in flash_attention.

    Returns:
        Bits of SequenceFault for each sequence, 0 if nothing is wrong. A page number is checked if
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
    """Plans what check_sequences would do with these arguments. Reads no data and launches nothing.

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
