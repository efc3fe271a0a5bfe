"""vLLM's fused experts: its routing kernel, then its Triton products with its tuned settings."""

from __future__ import annotations

import importlib
from typing import Any

from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.moe_inputs import MoeInputs
from flashmoe_science.cli.moe_shapes import MoeShape
from flashmoe_science.cli.peers.peer import Peer
from flashmoe_science.cli.suites import MOE
from flashmoe_science.cli.timing import Contender


def _prepare(arrays: Arrays, shape: MoeShape, inputs: MoeInputs) -> Contender:
    layers = importlib.import_module("vllm.model_executor.layers.fused_moe")

    def call(logits: Any) -> Any:
        weights, ids, *_ = layers.fused_topk(inputs.x, logits, shape.top_k, renormalize=True)
        return layers.fused_experts(
            inputs.x, inputs.w_gate_up, inputs.w_down, weights, ids, inplace=False
        )

    return Contender("", inputs.rotation(call))


PEERS = (
    Peer(
        "vllm-triton",
        ("cuda",),
        ("vllm.model_executor.layers.fused_moe",),
        "vllm",
        "pip install vllm",
        _prepare,
        MOE,
    ),
)
