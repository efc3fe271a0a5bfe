"""FlashInfer: its batch decode kernels for one query per sequence, its batch prefill for more."""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any

from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.peers.peer import Inputs, Peer, Refused, is_causal, window_of
from flashmoe_science.cli.shapes import Shape
from flashmoe_science.cli.timing import Contender

_WORKSPACE_BYTES = 2**28  # twice what its documentation advises
_PAGE = 16  # keys, the usual size in serving


def _steps(arrays: Arrays, count: int, step: int) -> Any:
    """0, step, ..., count * step as int32, as their index pointers are."""
    torch = arrays.xp
    return torch.arange(count + 1, dtype=torch.int32, device=arrays.device) * step


def _prepare(arrays: Arrays, shape: Shape, inputs: Inputs) -> Contender:
    causal = is_causal(shape, "bottom_right", "FlashInfer")
    options = _options(shape)
    flashinfer = importlib.import_module("flashinfer")
    torch = arrays.xp
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=arrays.device)
    if shape.seq_q == 1 and shape.dim == shape.dim_v and shape.causal != "top_left":
        return _decode(flashinfer, workspace, arrays, shape, inputs, options)
    return _prefill(flashinfer, workspace, arrays, shape, inputs, options | {"causal": causal})


def _options(shape: Shape) -> dict[str, Any]:
    """Window and softcap as its plans take them: a window has no right end except causal's."""
    options: dict[str, Any] = {}
    window = window_of(shape, "bottom_right", "FlashInfer")
    if window is not None:
        left, right = window
        if right is not None and shape.causal == "none":
            raise Refused("FlashInfer takes no window to the right")
        options["window_left"] = -1 if left is None else left
    if shape.softcap is not None:
        options["logits_soft_cap"] = shape.softcap
    return options


def _prefill(
    flashinfer: Any,
    workspace: Any,
    arrays: Arrays,
    shape: Shape,
    inputs: Inputs,
    options: dict[str, Any],
) -> Contender:
    q, k, v = (x.flatten(0, 1) for x in inputs)  # [batch * seq, heads, dim]
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        _steps(arrays, shape.batch, shape.seq_q),
        _steps(arrays, shape.batch, shape.seq_k),
        shape.heads_q,
        shape.heads_kv,
        shape.dim,
        head_dim_vo=shape.dim_v,
        q_data_type=q.dtype,
        **options,
    )

    def output(out: Any) -> Any:
        return out.unflatten(0, (shape.batch, shape.seq_q))

    return Contender("", functools.partial(wrapper.run, q, k, v), output=output)


def _decode(
    flashinfer: Any,
    workspace: Any,
    arrays: Arrays,
    shape: Shape,
    inputs: Inputs,
    options: dict[str, Any],
) -> Contender:
    """Its decode takes pages; for contiguous keys these are consecutive views."""
    q, k, v = inputs
    page = math.gcd(shape.seq_k, _PAGE)
    pages = shape.seq_k // page
    cache = tuple(x.flatten(0, 1).unflatten(0, (-1, page)) for x in (k, v))
    torch = arrays.xp
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        "NHD",
        # As its documentation advises for groups of query heads; without groups they would mostly
        # pad.
        use_tensor_cores=shape.heads_q != shape.heads_kv,
    )
    wrapper.plan(
        _steps(arrays, shape.batch, pages),
        _steps(arrays, shape.batch * pages, 1)[:-1],
        torch.full((shape.batch,), page, dtype=torch.int32, device=arrays.device),
        shape.heads_q,
        shape.heads_kv,
        shape.dim,
        page,
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
        **options,
    )
    call = functools.partial(wrapper.run, q.squeeze(1), cache)
    return Contender("", call, output=lambda out: out.unsqueeze(1))


PEERS = (
    Peer(
        "flashinfer",
        ("cuda",),
        ("flashinfer",),
        "flashinfer-python",
        "pip install flashinfer-python",
        _prepare,
    ),
)
