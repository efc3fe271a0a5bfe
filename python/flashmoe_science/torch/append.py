"""The operators of kv_append, and the public function on top of them: see operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from flashmoe_science import _core
from flashmoe_science._append import WORDS
from flashmoe_science.errors import _TransformedError
from flashmoe_science.torch.operators import (
    _define,
    _described,
    _is_plain,
    _leaves_graph,
    _refuse_outputs,
)

_TENSORS = (
    "k", "v", "k_cache", "v_cache", "slots", "cache_seqlens", "cu_seqlens", "seqused",
    "batch_index", "page_table", "positions", "rotary_cos", "rotary_sin", "k_scale", "v_scale", "q",
)  # fmt: skip
_OPTIONS = ("interleaved", "q_stays", "layout", "kernel")


def _fake(*arguments: Any) -> Any:
    """q_out, a new tensor."""
    q = arguments[_TENSORS.index("q")]
    return None if q is None else q.new_empty(q.shape)


def _kernel(*arguments: Any) -> Any:
    tensors, options = arguments[: len(_TENSORS)], arguments[len(_TENSORS) :]
    call: Callable[..., Any] = _core.kv_append  # takes the tuple's arguments
    interleaved, q_stays, layout, kernel = options
    *others, k_scale, v_scale, q = tensors
    return call(
        *others, interleaved, q, q_stays, layout, None, kernel, None, k_scale, v_scale
    )  # fmt: skip


def _check(*arguments: Any) -> None:
    described = {
        name: _described(tensor)
        for name, tensor in zip(_TENSORS, arguments, strict=False)
        if tensor is not None
    }
    options = dict(zip(_OPTIONS, arguments[len(_TENSORS) :], strict=True))
    _core.plan("kv_append", described, options)


def _without_q(function: Callable[..., Any]) -> Callable[..., None]:
    at = _TENSORS.index("q")

    def call(*arguments: Any) -> None:
        function(*arguments[:at], None, *arguments[at:])

    return call


def _schema(q: str, result: str) -> str:
    return (
        "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? slots, "
        "Tensor? cache_seqlens, Tensor? cu_seqlens, Tensor? seqused, Tensor? batch_index, "
        "Tensor? page_table, Tensor? positions, Tensor? rotary_cos, Tensor? rotary_sin, "
        f"Tensor? k_scale, Tensor? v_scale, {q}bool interleaved, bool q_stays, str layout, "
        f"str? kernel) -> {result}"
    )


_kv_append = _define(
    "kv_append", WORDS, _schema("", "()"), _without_q(_kernel), _without_q(_fake),
    check=_without_q(_check),
)  # fmt: skip
_kv_append_with_q = _define(
    "kv_append_with_q", WORDS, _schema("Tensor q, ", "Tensor"), _kernel, _fake, check=_check
)


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
    """Like flashmoe_science.kv_append. In a graph, q_out and stream are None."""
    tensors = (
        k, v, k_cache, v_cache, slots, cache_seqlens, cu_seqlens, seqused, batch_index, page_table,
        positions, rotary_cos, rotary_sin,
    )  # fmt: skip
    if _is_plain(k) or _leaves_graph(k, q_out=q_out, stream=stream):
        try:
            return _core.kv_append(
                *tensors, interleaved, q, q_stays, layout, q_out, kernel, stream, k_scale, v_scale
            )  # fmt: skip
        except _TransformedError:
            _refuse_outputs(q_out=q_out, stream=stream)
    if q is None:
        return _kv_append(*tensors, k_scale, v_scale, interleaved, q_stays, layout, kernel)
    return _kv_append_with_q(*tensors, k_scale, v_scale, q, interleaved, q_stays, layout, kernel)
