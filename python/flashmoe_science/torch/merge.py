"""The operators of merge_states, and the public function on top of them: see operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashmoe_science import _core
from flashmoe_science._merge import WORDS
from flashmoe_science.errors import _TransformedError
from flashmoe_science.merge import Partials, one_after_another, parse_name, parse_partials
from flashmoe_science.torch.operators import (
    _check_rank,
    _define,
    _described,
    _is_plain,
    _leaves_graph,
    _refuse_outputs,
)

_TENSORS = ("outs", "lses", "prior_out", "prior_lse")


def _empty(outs: Any, prior_out: Any, layout: str, dtype: str | None) -> tuple[Any, Any]:
    """out and lse."""
    _check_rank("outs", outs, 4, 5)
    shape = outs.shape[-4:]
    first = outs if prior_out is None else prior_out
    of_out = first.dtype if dtype is None else getattr(torch, dtype)
    batch, seq, heads = shape[:3]
    if layout == "bhsd":
        seq, heads = heads, seq
    sums = torch.float64 if outs.dtype == torch.float64 else torch.float32
    return outs.new_empty(shape, dtype=of_out), outs.new_empty((batch, heads, seq), dtype=sums)


def _fake(return_lse: bool) -> Callable[..., Any]:
    def fake(
        outs: Any, lses: Any, prior_out: Any, prior_lse: Any, layout: str, dtype: Any, kernel: Any
    ) -> Any:
        out, lse = _empty(outs, prior_out, layout, dtype)
        return (out, lse) if return_lse else out

    return fake


def _kernel(return_lse: bool) -> Callable[..., Any]:
    def call(
        outs: Any, lses: Any, prior_out: Any, prior_lse: Any, layout: Any, dtype: Any, kernel: Any
    ) -> Any:
        return _core.merge_states(
            outs, lses, prior_out, prior_lse, layout, dtype, return_lse, None, None, kernel, None
        )

    return call


def _check(return_lse: bool) -> Callable[..., None]:
    def check(*arguments: Any) -> None:
        described = {
            name: _described(tensor)
            for name, tensor in zip(_TENSORS, arguments[:4], strict=True)
            if tensor is not None
        }
        layout, dtype, kernel = arguments[4:]
        options = {"layout": layout, "dtype": dtype, "kernel": kernel, "return_lse": return_lse}
        _core.plan("merge_states", described, options)

    return check


_SCHEMA = (
    "(Tensor outs, Tensor lses, Tensor? prior_out, Tensor? prior_lse, str layout, str? dtype, "
    "str? kernel) -> "
)
_merge_states = _define(
    "merge_states", WORDS, _SCHEMA + "Tensor", _kernel(False), _fake(False), check=_check(False)
)
_merge_states_with_lse = _define(
    "merge_states_with_lse", WORDS, _SCHEMA + "(Tensor, Tensor)", _kernel(True), _fake(True),
    check=_check(True),
)  # fmt: skip


def merge_states(
    outs: torch.Tensor | Sequence[torch.Tensor],
    lses: torch.Tensor | Sequence[torch.Tensor],
    *,
    layout: str = "bshd",
    dtype: object = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    kernel: str | None = None,
    stream: object = None,
) -> Any:
    """Like flashmoe_science.merge_states. In a graph, out, lse and stream are None."""
    partials, behind = parse_partials(outs, lses)

    def merge(
        number: int, partials: Partials, dtype: str | None, return_lse: bool, out: Any, lse: Any
    ) -> Any:
        if _is_plain(partials.outs) or _leaves_graph(
            partials.outs, out=out, lse=lse, stream=stream
        ):
            try:
                return _core.merge_states(
                    *partials, layout, dtype, return_lse, out, lse, kernel, stream
                )
            except _TransformedError:
                _refuse_outputs(out=out, lse=lse, stream=stream)
        call = _merge_states_with_lse if return_lse else _merge_states
        return call(*partials, layout, dtype, kernel)

    return one_after_another(merge, partials, behind, parse_name(dtype), return_lse, out, lse)
