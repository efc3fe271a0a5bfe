"""The backward of torch's and SonicMoE's mixture of experts, and forward and backward together, by
torch's autograd: each from what its own forward saved."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.moe_gradient_inputs import Gradients, MoeGradientInputs
from flashmoe_science.cli.moe_inputs import MoeInputs
from flashmoe_science.cli.moe_shapes import MoeShape
from flashmoe_science.cli.peers import sonicmoe, torch_moe
from flashmoe_science.cli.suites import MOE_BACKWARD, MOE_TRAINING
from flashmoe_science.cli.timing import Contender

Prepare = Callable[[Arrays, MoeShape, MoeInputs], Contender]


def _forward(
    prepare: Prepare, arrays: Arrays, shape: MoeShape, inputs: MoeGradientInputs
) -> tuple[Gradients, Contender]:
    """The differentiated tensors, and the forward that `prepare` gives on them."""
    leaves = inputs.leaves
    x, logits, w_gate_up, w_down = leaves
    return leaves, prepare(arrays, shape, MoeInputs(x, w_gate_up, w_down, (logits,)))


def prepare_backward(
    prepare: Prepare, arrays: Arrays, shape: MoeShape, inputs: MoeGradientInputs
) -> Contender:
    """Only the backward of that forward, which runs once and is not timed."""
    leaves, forward = _forward(prepare, arrays, shape, inputs)
    out = forward.call()

    def call() -> Any:
        return arrays.xp.autograd.grad(out, leaves, inputs.dout, retain_graph=True)

    return Contender("", call, output=inputs.checked, capturable=False)


def prepare_training(
    prepare: Prepare, arrays: Arrays, shape: MoeShape, inputs: MoeGradientInputs
) -> Contender:
    """That forward, then its backward."""
    leaves, forward = _forward(prepare, arrays, shape, inputs)

    def call() -> Any:
        return arrays.xp.autograd.grad(forward.call(), leaves, inputs.dout)

    return Contender("", call, output=inputs.checked)


PEERS = tuple(
    dataclasses.replace(peer, prepare=functools.partial(way, peer.prepare), operation=operation)
    for operation, way in ((MOE_BACKWARD, prepare_backward), (MOE_TRAINING, prepare_training))
    for peer in (*torch_moe.TO_DIFFERENTIATE, *sonicmoe.TO_DIFFERENTIATE)
)
