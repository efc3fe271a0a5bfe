"""The backward of torch's and FlashAttention's attention, and forward and backward together, by
torch's autograd: each from what its own forward saved."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.peers import flash_attention, torch_sdpa
from flashmoe_science.cli.peers.peer import BackwardInputs, Inputs
from flashmoe_science.cli.shapes import Shape
from flashmoe_science.cli.suites import BACKWARD, TRAINING
from flashmoe_science.cli.timing import Contender

Prepare = Callable[[Arrays, Shape, Inputs], Contender]


def leaves_of(inputs: BackwardInputs) -> Inputs:
    """q, k and v on the same memory, as tensors that require grad."""
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    return q, k, v


def prepare_backward(
    prepare: Prepare, arrays: Arrays, shape: Shape, inputs: BackwardInputs
) -> Contender:
    """Only the backward of the forward that `prepare` gives; that forward runs once and is not
    timed."""
    leaves, dout = leaves_of(inputs), inputs[3]
    forward = prepare(arrays, shape, leaves)
    with forward.context():
        out = forward.output(forward.call())

    def call() -> Any:
        return arrays.xp.autograd.grad(out, leaves, dout, retain_graph=True)

    return Contender("", call, capturable=False)


def prepare_training(
    prepare: Prepare, arrays: Arrays, shape: Shape, inputs: BackwardInputs
) -> Contender:
    """The forward that `prepare` gives, then its backward."""
    leaves, dout = leaves_of(inputs), inputs[3]
    forward = prepare(arrays, shape, leaves)

    def call() -> Any:
        return arrays.xp.autograd.grad(forward.output(forward.call()), leaves, dout)

    return Contender("", call, forward.context)


PEERS = tuple(
    dataclasses.replace(peer, prepare=functools.partial(way, peer.prepare), operation=operation)
    for operation, way in ((BACKWARD, prepare_backward), (TRAINING, prepare_training))
    for peer in (*torch_sdpa.PEERS, *flash_attention.TO_DIFFERENTIATE)
)
