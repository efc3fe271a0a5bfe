"""Tensors of the backward of a mixture of experts, and the checked part of its gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.moe_inputs import MoeInputs, make_moe_inputs
from flashmoe_science.cli.moe_reference import counts_of
from flashmoe_science.cli.moe_shapes import MoeBackwardShape
from flashmoe_science.cli.reference import sample

NAMES = ("dx", "dlogits", "dw_gate_up", "dw_down")

Gradients = tuple[Any, Any, Any, Any]  # in the order of NAMES


@dataclasses.dataclass(frozen=True)
class MoeGradientInputs:
    """One layer's tensors and the gradient of its output.

    Attributes:
        layer: With only one logits, since a backward reads what one forward saved.
        dout: [T, H], standard normal.
        held: Experts whose gradients of weights are checked, from the one with the fewest tokens to
            the one with the most. All gradients would take as much memory as the weights, for every
            contender.
    """

    layer: MoeInputs
    dout: Any
    held: list[int]

    @property
    def leaves(self) -> Gradients:
        """The differentiated tensors as torch tensors that require grad, in the same memory."""
        layer = self.layer
        tensors = (layer.x, layer.logits[0], layer.w_gate_up, layer.w_down)
        x, logits, w_gate_up, w_down = (t.detach().requires_grad_() for t in tensors)
        return x, logits, w_gate_up, w_down

    def checked(self, gradients: Gradients) -> Gradients:
        """The checked part of the gradients of all `leaves`: for weights, a copy of a part."""
        dx, dlogits, dw_gate_up, dw_down = gradients
        return dx, dlogits, dw_gate_up[self.held], dw_down[self.held]


def make_moe_gradient_inputs(
    arrays: Arrays, shape: MoeBackwardShape, seed: int = 0
) -> MoeGradientInputs:
    """The same inputs for the same seed; the layer's equal those of its forward."""
    layer = make_moe_inputs(arrays, shape, seed)
    layer = dataclasses.replace(layer, logits=layer.logits[:1])
    # Seeds of the forward's tensors lie below those of its logits, which begin at 2^20.
    dout = arrays.normal((shape.tokens, shape.hidden), shape.dtype, 2**19 + seed)
    counts = counts_of(arrays, shape, layer.logits[0])
    by_load = sorted(range(shape.experts), key=lambda expert: counts[expert])
    held = [by_load[i] for i in sample(shape.experts, shape.held_experts)]
    return MoeGradientInputs(layer, dout, held)
