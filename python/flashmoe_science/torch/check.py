"""The operator of check_sequences, and the public function on top of it: see operators."""

from __future__ import annotations

from typing import Any, Literal

import torch

from flashmoe_science import _core
from flashmoe_science._check import WORDS
from flashmoe_science.errors import _TransformedError
from flashmoe_science.torch.operators import (
    _check_rank,
    _define,
    _described,
    _is_plain,
    _leaves_graph,
    _refuse_outputs,
)

_TENSORS = (
    "q", "k", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "k_begin", "batch_index",
    "page_table",
)  # fmt: skip
_OPTIONS = ("max_seqlen_q", "max_seqlen_k", "layout", "kernel")


def _fake(q: Any, k: Any, cu_seqlens_q: Any, *_: Any) -> Any:
    _check_rank("q", q, 4)
    count = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    return q.new_empty((count,), dtype=torch.int32)


def _kernel(q: Any, k: Any, *others: Any) -> Any:
    *tables, max_seqlen_q, max_seqlen_k, layout, kernel = others
    sequences = (*tables, *[None] * 3, max_seqlen_q, max_seqlen_k, None)
    return _core.check_sequences(q, k, sequences, layout, None, kernel, None)


def _check(*arguments: Any) -> None:
    described = {
        name: _described(tensor)
        for name, tensor in zip(_TENSORS, arguments, strict=False)
        if tensor is not None
    }
    options = dict(zip(_OPTIONS, arguments[len(_TENSORS) :], strict=True))
    _core.plan("check_sequences", described, options)


_check_sequences = _define(
    "check_sequences", WORDS,
    "(Tensor q, Tensor k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, "
    "Tensor? seqused_k, Tensor? k_begin, Tensor? batch_index, Tensor? page_table, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, str layout, str? kernel) -> Tensor",
    _kernel, _fake, check=_check,
)  # fmt: skip


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
    """Like flashmoe_science.check_sequences. In a graph, status and stream are None."""
    tables = (
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, k_begin, batch_index, page_table,
    )  # fmt: skip
    if _is_plain(q) or _leaves_graph(q, status=status, stream=stream):
        sequences = (*tables, *[None] * 3, max_seqlen_q, max_seqlen_k, None)
        try:
            return _core.check_sequences(q, k, sequences, layout, status, kernel, stream)
        except _TransformedError:
            _refuse_outputs(status=status, stream=stream)
    # Only the extents of q and k are read, so gradients do not involve them.
    return _check_sequences(
        q.detach(), k.detach(), *tables, max_seqlen_q, max_seqlen_k, layout, kernel
    )
