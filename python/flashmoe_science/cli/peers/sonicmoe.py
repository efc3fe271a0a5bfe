"""SonicMoE, from the router's logits on: what its moe_TC_softmax_topk_layer does after them."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.moe_inputs import MoeInputs
from flashmoe_science.cli.moe_shapes import MoeShape
from flashmoe_science.cli.peers.peer import Peer, Refused
from flashmoe_science.cli.peers.quack_ahead import compile_ahead
from flashmoe_science.cli.suites import MOE
from flashmoe_science.cli.timing import Contender


def _layer(
    arrays: Arrays, shape: MoeShape, inputs: MoeInputs, *, inference: bool
) -> Callable[[Any], Any]:
    """Its layer on one logits. Inference saves nothing for a backward."""
    if shape.dtype != "bf16":
        raise Refused("SonicMoE is tested in bf16 only")
    compile_ahead(str(inputs.x.device))
    torch = arrays.xp
    functional = importlib.import_module("sonicmoe.functional")
    swiglu = importlib.import_module("sonicmoe.enums").ActivationType.SWIGLU
    # Its weights have the expert last, [2I, H, E] and [H, I, E], in any strides: views.
    w_up, w_down = inputs.w_gate_up.permute(1, 2, 0), inputs.w_down.permute(1, 2, 0)
    tokens, experts, top_k, pairs = shape.tokens, shape.experts, shape.top_k, shape.pairs

    def integers(count: int) -> Any:
        return torch.empty(count, dtype=torch.int32, device=inputs.x.device)

    def call(logits: Any) -> Any:
        # Softmax of the chosen logits: the same weights as renormalising.
        route = functional.TC_Softmax_Topk_Router_Function.apply
        scores, ids = route(logits, experts, top_k, True, False)
        counts, offsets = integers(experts), integers(experts + 1)
        gather, scatter, reverse = (integers(pairs) for _ in range(3))
        functional.TC_topk_router_metadata_triton(
            ids, experts, counts, offsets, gather, scatter, reverse
        )
        maps = (gather, scatter, reverse, None, False)
        inner, saved = functional._UpProjection.apply(
            inputs.x, w_up, None, offsets, pairs, top_k, *maps, swiglu, inference, True
        )
        return functional._DownProjection.apply(
            inner, saved, w_down, None, scores, offsets, tokens, top_k, *maps, swiglu
        )

    return call


def _prepare(arrays: Arrays, shape: MoeShape, inputs: MoeInputs) -> Contender:
    layer = _layer(arrays, shape, inputs, inference=True)

    def without_gradients(logits: Any) -> Any:
        with arrays.xp.no_grad():
            return layer(logits)

    return Contender("", inputs.rotation(without_gradients))


def prepare_to_differentiate(arrays: Arrays, shape: MoeShape, inputs: MoeInputs) -> Contender:
    return Contender("", inputs.rotation(_layer(arrays, shape, inputs, inference=False)))


PEERS = (
    Peer(
        "sonicmoe",
        ("cuda",),
        ("sonicmoe",),
        "sonic-moe",
        "pip install sonic-moe (Hopper, Python 3.12)",
        _prepare,
        MOE,
    ),
)
# Its forward as peers/moe_gradients.py differentiates it.
TO_DIFFERENTIATE = (dataclasses.replace(PEERS[0], prepare=prepare_to_differentiate),)
