"""The back ends of torch's scaled_dot_product_attention."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.peers.peer import (
    Inputs,
    Peer,
    is_causal,
    refuse_softcap,
    refuse_window,
)
from flashmoe_science.cli.shapes import Shape
from flashmoe_science.cli.timing import Contender

# Our name, torch's name in SDPBackend.
_BACKENDS = {
    "torch-flash": "FLASH_ATTENTION",
    "torch-cudnn": "CUDNN_ATTENTION",
    "torch-efficient": "EFFICIENT_ATTENTION",
    "torch-math": "MATH",
}


def _prepare(backend: str | None, arrays: Arrays, shape: Shape, inputs: Inputs) -> Contender:
    torch = arrays.xp
    refuse_window(shape, "torch's scaled_dot_product_attention")
    refuse_softcap(shape, "torch's scaled_dot_product_attention")

    def swapped(x: Any) -> Any:
        return torch.swapaxes(x, 1, 2)

    sdpa = functools.partial(
        torch.nn.functional.scaled_dot_product_attention,
        *map(swapped, inputs),
        is_causal=is_causal(shape, "top_left", "torch"),
        enable_gqa=shape.heads_q != shape.heads_kv,
    )
    if backend is None:
        return Contender("", sdpa, output=swapped)
    attention = importlib.import_module("torch.nn.attention")
    context = functools.partial(attention.sdpa_kernel, [getattr(attention.SDPBackend, backend)])
    return Contender("", sdpa, context, output=swapped)


def _peer(name: str, device: str, backend: str | None) -> Peer:
    prepare = functools.partial(_prepare, backend)
    return Peer(name, (device,), ("torch",), "torch", "pip install torch", prepare)


PEERS = (
    _peer("torch-sdpa", "cpu", None),
    *(_peer(name, "cuda", backend) for name, backend in _BACKENDS.items()),
)
