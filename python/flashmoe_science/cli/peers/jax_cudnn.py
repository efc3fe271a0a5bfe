"""JAX's attention by cuDNN, on the memory of torch's tensors."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.peers.peer import Inputs, Peer, is_causal, refuse_softcap, window_of
from flashmoe_science.cli.shapes import Shape
from flashmoe_science.cli.timing import Contender


def prepare(implementation: str, arrays: Arrays, shape: Shape, inputs: Inputs) -> Contender:
    """A compiled jax.nn.dot_product_attention.

    JAX has its own stream. Passing q through DLPack makes that stream wait for torch's, and taking
    the result makes torch's stream wait for it, so events on torch's stream enclose the whole call.
    The price is more host time than other peers have.
    """
    causal = is_causal(shape, "top_left", "JAX")
    window = window_of(shape, "top_left", "JAX")
    refuse_softcap(shape, "JAX's dot_product_attention")
    # It cannot express an absent end, so pass as many keys as there are.
    every = max(shape.seq_q, shape.seq_k)
    local = None if window is None else tuple(every if end is None else end for end in window)
    # Must be set before JAX starts, or it reserves three quarters of the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = importlib.import_module("jax")
    from_torch = importlib.import_module("jax.dlpack").from_dlpack
    attend = jax.jit(
        functools.partial(
            jax.nn.dot_product_attention,
            is_causal=causal,
            local_window_size=local,
            implementation=implementation,
        )
    )
    q, k, v = inputs
    key, value = from_torch(k), from_torch(v)

    def call() -> Any:
        return arrays.xp.from_dlpack(attend(from_torch(q), key, value))

    return Contender("", call, of_torch=False)


PEERS = (
    Peer(
        "jax-cudnn",
        ("cuda",),
        ("jax_cuda13_plugin", "jax_cuda12_plugin"),
        "jax",
        'pip install "jax[cuda13]"',
        functools.partial(prepare, "cudnn"),
    ),
)
