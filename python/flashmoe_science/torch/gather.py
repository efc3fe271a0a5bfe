"""The operators of kv_gather, and the public function on top of them: see operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from flashmoe_science import _core
from flashmoe_science._gather import WORDS
from flashmoe_science.errors import ArgumentTypeError, _TransformedError
from flashmoe_science.merge import parse_name
from flashmoe_science.torch.operators import (
    _check_rank,
    _define,
    _described,
    _is_plain,
    _leaves_graph,
    _refuse_outputs,
)

_TENSORS = (
    "k_cache", "v_cache", "cu_seqlens_k", "seqused_k", "k_begin", "batch_index", "page_table",
    "k_scale", "v_scale",
)  # fmt: skip
_OPTIONS = ("layout", "rows", "dtype", "kernel")


def _fake(*arguments: Any) -> Any:
    """k, or k and v."""
    given = dict(zip(_TENSORS + _OPTIONS, arguments, strict=True))
    cache, table = given["k_cache"], given["page_table"]
    _check_rank("k_cache", cache, 4)
    axis = 2 if given["layout"] == "bhsd" else 1
    rows = given["rows"]
    if given["cu_seqlens_k"] is not None:
        batch = 1
        if rows is None:
            raise ArgumentTypeError(
                "rows: got None, accepted with cu_seqlens_k is a number of 0 or more"
            )
    elif table is not None:
        _check_rank("page_table", table, 2)
        batch = table.shape[0]
    else:
        batch = (cache if given["batch_index"] is None else given["batch_index"]).shape[0]
    if rows is None:
        rows = cache.shape[axis] * (1 if table is None else table.shape[1])
    dtype = cache.dtype if given["dtype"] is None else getattr(torch, given["dtype"])

    def like(x: Any) -> Any:
        shape = [batch, *x.shape[1:]]
        shape[axis] = rows
        return x.new_empty(shape, dtype=dtype)

    v_cache = given["v_cache"]
    return like(cache) if v_cache is None else (like(cache), like(v_cache))


def _kernel(*arguments: Any) -> Any:
    *tensors, layout, rows, dtype, kernel = arguments
    call: Callable[..., Any] = _core.kv_gather  # takes the tuple's arguments
    return call(*tensors, layout, rows, dtype, None, None, kernel, None)


def _check(*arguments: Any) -> None:
    described = {
        name: _described(tensor)
        for name, tensor in zip(_TENSORS, arguments, strict=False)
        if tensor is not None
    }
    options = dict(zip(_OPTIONS, arguments[len(_TENSORS) :], strict=True))
    _core.plan("kv_gather", described, options)


def _of_keys(function: Callable[..., Any]) -> Callable[..., Any]:
    """The arguments of the operator without v_cache and v_scale."""

    def call(k_cache: Any, *others: Any) -> Any:
        at = _TENSORS.index("v_scale") - 2
        return function(k_cache, None, *others[:at], None, *others[at:])

    return call


def _schema(v_cache: str, v_scale: str, result: str) -> str:
    return (
        f"(Tensor k_cache, {v_cache}Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? k_begin, "
        f"Tensor? batch_index, Tensor? page_table, Tensor? k_scale, {v_scale}str layout, "
        f"SymInt? rows, str? dtype, str? kernel) -> {result}"
    )


_kv_gather = _define(
    "kv_gather", WORDS, _schema("Tensor v_cache, ", "Tensor? v_scale, ", "(Tensor, Tensor)"),
    _kernel, _fake, check=_check,
)  # fmt: skip
_k_gather = _define(
    "kv_gather_keys", WORDS, _schema("", "", "Tensor"), _of_keys(_kernel), _of_keys(_fake),
    check=_of_keys(_check),
)  # fmt: skip


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
    """Like flashmoe_science.kv_gather. In a graph, k, v and stream are None."""
    name = parse_name(dtype)
    tables = (cu_seqlens_k, seqused_k, k_begin, batch_index, page_table)
    if _is_plain(k_cache) or _leaves_graph(k_cache, k=k, v=v, stream=stream):
        try:
            return _core.kv_gather(
                k_cache, v_cache, *tables, k_scale, v_scale, layout, rows, name, k, v, kernel,
                stream,
            )  # fmt: skip
        except _TransformedError:
            _refuse_outputs(k=k, v=v, stream=stream)
    if v_cache is None:
        return _k_gather(k_cache, *tables, k_scale, layout, rows, name, kernel)
    return _kv_gather(k_cache, v_cache, *tables, k_scale, v_scale, layout, rows, name, kernel)
