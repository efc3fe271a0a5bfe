"""A mixture of experts in torch: with its grouped product, and with a loop over experts."""

from __future__ import annotations

import dataclasses
from typing import Any

from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.moe_inputs import MoeInputs
from flashmoe_science.cli.moe_shapes import MoeShape
from flashmoe_science.cli.peers.peer import Peer, Refused
from flashmoe_science.cli.suites import MOE
from flashmoe_science.cli.timing import Contender


def _route(torch: Any, logits: Any, top_k: int) -> tuple[Any, Any]:
    """Weights [T, K] in the logits' dtype, and ids [T, K], as models in torch compute them."""
    weights, ids = logits.softmax(-1, dtype=torch.float32).topk(top_k, dim=-1)
    return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), ids


def _grouped_product(torch: Any) -> Any:
    product = getattr(torch.nn.functional, "grouped_mm", None) or getattr(
        torch, "_grouped_mm", None
    )
    if product is None:
        raise Refused(f"torch {torch.__version__} has no grouped_mm")
    return product


def _by_expert(torch: Any, ids: Any, experts: int) -> tuple[Any, Any]:
    """The order of the pairs by expert, and the end of each expert in it."""
    chosen, order = ids.flatten().sort()
    counts = torch.zeros(experts, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32))
    return order, counts.cumsum(0, dtype=torch.int32)


def _grouped(arrays: Arrays, shape: MoeShape, inputs: MoeInputs) -> Contender:
    """Top-k, sort, gather, two grouped products with SwiGLU between, weighted index_add: no step
    of it waits for the host."""
    torch = arrays.xp
    product = _grouped_product(torch)
    silu = torch.nn.functional.silu
    w_up, w_down = inputs.w_gate_up.transpose(1, 2), inputs.w_down.transpose(1, 2)

    def call(logits: Any) -> Any:
        weights, ids = _route(torch, logits, shape.top_k)
        order, ends = _by_expert(torch, ids, shape.experts)
        tokens = order // shape.top_k
        gate, up = product(inputs.x[tokens], w_up, offs=ends).chunk(2, dim=-1)
        y = product(silu(gate) * up, w_down, offs=ends)
        y *= weights.flatten()[order, None]
        return torch.zeros_like(inputs.x).index_add_(0, tokens, y)

    return Contender("", inputs.rotation(call))


def _grouped_to_differentiate(arrays: Arrays, shape: MoeShape, inputs: MoeInputs) -> Contender:
    """The same, with the steps whose gradients torch computes fastest: the gradient of index_select
    adds rows, that of indexing sorts first; an in-place product copies its factor."""
    torch = arrays.xp
    product = _grouped_product(torch)
    silu = torch.nn.functional.silu
    w_up, w_down = inputs.w_gate_up.transpose(1, 2), inputs.w_down.transpose(1, 2)

    def call(logits: Any) -> Any:
        weights, ids = _route(torch, logits, shape.top_k)
        order, ends = _by_expert(torch, ids, shape.experts)
        tokens = order // shape.top_k
        rows = inputs.x.index_select(0, tokens)
        gate, up = product(rows, w_up, offs=ends).chunk(2, dim=-1)
        y = product(silu(gate) * up, w_down, offs=ends)
        y = y * weights.flatten().index_select(0, order)[:, None]
        return torch.zeros_like(inputs.x).index_add_(0, tokens, y)

    return Contender("", inputs.rotation(call))


def _loop(arrays: Arrays, shape: MoeShape, inputs: MoeInputs) -> Contender:
    """A loop of torch's products over the experts that have tokens."""
    torch = arrays.xp
    linear, silu = torch.nn.functional.linear, torch.nn.functional.silu
    # Unbound once, so that the gradient of all weights is stacked once.
    w_up, w_down = inputs.w_gate_up.unbind(), inputs.w_down.unbind()

    def call(logits: Any) -> Any:
        weights, ids = _route(torch, logits, shape.top_k)
        experts, order = ids.flatten().sort()
        tokens = order // shape.top_k
        scales = weights.flatten()[order, None]
        out = torch.zeros_like(inputs.x)
        begin = 0
        for expert, count in enumerate(experts.bincount(minlength=shape.experts).tolist()):
            if count == 0:
                continue
            rows = slice(begin, begin + count)
            begin += count
            gate, up = linear(inputs.x[tokens[rows]], w_up[expert]).chunk(2, dim=-1)
            y = linear(silu(gate) * up, w_down[expert])
            out.index_add_(0, tokens[rows], y * scales[rows])
        return out

    return Contender("", inputs.rotation(call))


PEERS = (
    Peer("torch-grouped", ("cuda",), ("torch",), "torch", "pip install torch", _grouped, MOE),
    Peer("torch-loop", ("cpu",), ("torch",), "torch", "pip install torch", _loop, MOE),
)
# Their forwards as peers/moe_gradients.py differentiates them.
TO_DIFFERENTIATE = (
    dataclasses.replace(PEERS[0], prepare=_grouped_to_differentiate),
    PEERS[1],
)
