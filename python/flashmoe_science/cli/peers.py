"""What we are measured against: the back ends of torch's scaled_dot_product_attention."""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.shapes import Shape
from flashmoe_science.cli.timing import Contender

# Our name, torch's name in SDPBackend (None: torch chooses).
_CUDA_PEERS = {
    "torch-flash": "FLASH_ATTENTION",
    "torch-cudnn": "CUDNN_ATTENTION",
    "torch-efficient": "EFFICIENT_ATTENTION",
    "torch-math": "MATH",
}
_CPU_PEERS: dict[str, str | None] = {"torch-sdpa": None}

PEER_NAMES = (*_CPU_PEERS, *_CUDA_PEERS)


class Refused(Exception):
    """A peer that does not serve a shape; the message is its reason."""


def peer_names(arrays: Arrays) -> list[str]:
    """The peers there are for these arrays, [] without torch."""
    if arrays.name != "torch":
        return []
    return list(_CPU_PEERS if arrays.device == "cpu" else _CUDA_PEERS)


def make_peer(arrays: Arrays, shape: Shape, name: str, inputs: tuple[Any, Any, Any]) -> Contender:
    """A contender on views of the same memory; its output is [batch, heads, seq, dim]."""
    if shape.causal == "bottom_right" and shape.seq_q != shape.seq_k:
        raise Refused("torch's is_causal is aligned top left; this mask is bottom right")
    torch = arrays.xp
    q, k, v = (torch.swapaxes(x, 1, 2) for x in inputs)
    sdpa = functools.partial(
        torch.nn.functional.scaled_dot_product_attention,
        q,
        k,
        v,
        is_causal=shape.causal != "none",
        enable_gqa=shape.heads_q != shape.heads_kv,
    )
    backend = _CUDA_PEERS.get(name)
    if backend is None:
        return Contender(name, sdpa)
    attention = importlib.import_module("torch.nn.attention")
    context = functools.partial(attention.sdpa_kernel, [getattr(attention.SDPBackend, backend)])
    return Contender(name, sdpa, context)


def first_output(arrays: Arrays, peer: Contender) -> Any:
    """The peer's output as [batch, seq, heads, dim]; raises Refused when it has none to give."""
    with warnings.catch_warnings(record=True) as caught, peer.context():
        warnings.simplefilter("always")
        try:
            out = peer.call()
            arrays.synchronize()
        except (RuntimeError, ValueError, TypeError) as error:  # out of memory included
            reasons = [str(w.message).split(" (Triggered internally")[0] for w in caught]
            raise Refused("; ".join(dict.fromkeys([str(error), *reasons]))[:500]) from error
    return arrays.xp.swapaxes(out, 1, 2)
