"""One measured mixture of experts: routing and output checked, the planned kernels proved to run,
then timed beside peers, from the router's logits to the output."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.environment import last_launches, plan_as_dict
from flashmoe_science.cli.measure import Procedure, describe, measure_row
from flashmoe_science.cli.moe_inputs import MoeInputs, make_moe_inputs
from flashmoe_science.cli.moe_reference import judge_moe, loads, routing_fault
from flashmoe_science.cli.moe_shapes import MOE_BACKWARD, MoeShape
from flashmoe_science.cli.peers.peer import Missing, Peer
from flashmoe_science.cli.timing import Contender, Sampling

BOUND = "dense"
_BOUND_TOKENS = 512  # from here on products, not reads of weights, bound the time


@dataclasses.dataclass
class OurCall:
    """Our call on a poisoned output, with the plan of its layer and the launches read back."""

    routing: Any
    out: Any
    plan: dict[str, Any]
    launches: list[dict[str, Any]]


def our_call(
    flashmoe: Any, shape: MoeShape, inputs: MoeInputs, kernel: str | None
) -> Callable[[Any], Any]:
    """The timed call on one logits: routing and layer, into a new output."""

    def call(logits: Any) -> Any:
        routing = flashmoe.moe_route(logits, shape.top_k, renormalize=True)
        return flashmoe.moe_forward(
            inputs.x, inputs.w_gate_up, inputs.w_down, routing, kernel=kernel
        )

    return call


def call_ours(
    flashmoe: Any, arrays: Arrays, shape: MoeShape, inputs: MoeInputs, kernel: str | None
) -> OurCall:
    """Computes into an output full of NaN, so that missing writes show."""
    out = arrays.poisoned(shape.output_extents, shape.dtype)
    layer = (inputs.x, inputs.w_gate_up, inputs.w_down)
    routing = flashmoe.moe_route(inputs.logits[0], shape.top_k, renormalize=True)
    plan = plan_as_dict(flashmoe.moe_plan(*layer, routing, kernel=kernel))
    out = flashmoe.moe_forward(*layer, routing, out=out, kernel=kernel)
    launches = last_launches(flashmoe)
    arrays.synchronize()
    return OurCall(routing, out, plan, launches)


def dense_bound(arrays: Arrays, shape: MoeShape, seed: int) -> Contender:
    """The layer's products as plain ones with the same FLOPs, two for its forward and four for its
    backward: no routing, one expert for all.

    No implementation of the layer with the same library's products can be faster. It computes
    something else, so it is no peer.
    """
    matmul = arrays.xp.matmul
    rows = arrays.normal((shape.pairs, shape.hidden), shape.dtype, seed)
    w_up = arrays.normal((shape.hidden, 2 * shape.inner), shape.dtype, seed + 1)
    inner = arrays.normal((shape.pairs, shape.inner), shape.dtype, seed + 2)
    w_down = arrays.normal((shape.inner, shape.hidden), shape.dtype, seed + 3)
    products = []
    if shape.operation != MOE_BACKWARD:
        products += [(rows, w_up), (inner, w_down)]
    if shape.gradients:
        both = arrays.normal((shape.pairs, 2 * shape.inner), shape.dtype, seed + 4)
        products += [(rows, w_down.T), (inner.T, rows), (both, w_up.T), (rows.T, both)]
    outputs = [matmul(a, b) for a, b in products]

    def call() -> None:
        for (a, b), out in zip(products, outputs, strict=True):
            matmul(a, b, out=out)

    return Contender(BOUND, call)


def bounds(arrays: Arrays, shape: MoeShape, seed: int) -> list[Contender]:
    """What is timed besides the peers: for many tokens, the bound of their products."""
    return [] if shape.tokens < _BOUND_TOKENS else [dense_bound(arrays, shape, seed)]


def with_bound(made: dict[str, Any]) -> dict[str, Any]:
    """A row with its bound, if any, separated from its contenders."""
    bound = made.get("contenders", {}).pop(BOUND, None)
    if bound is None:
        return made
    for entry in made["contenders"].values():
        if entry["status"] == "ok":
            entry["bound_fraction"] = bound["median_s"] / entry["median_s"]
    kept = ("median_s", "q1_s", "q3_s", "samples_s", "tflops")
    return made | {"bound": {key: bound[key] for key in kept}}


def measure_moe(
    flashmoe: Any,
    arrays: Arrays,
    shape: MoeShape,
    peers: Sequence[Peer | Missing],
    sampling: Sampling,
    kernel: str | None = None,
    ceiling: float | None = None,
) -> dict[str, Any]:
    """The record of one mixture of experts: see measure_row.

    It also has the loads of experts, the rate at which their weights are read and, for many tokens,
    the time of plain products with the same FLOPs.
    """
    record = describe(shape)
    inputs = make_moe_inputs(arrays, shape, sampling.seed)
    record["routing"] = loads(arrays, shape, inputs.logits[0])
    active = sum(loads(arrays, shape, x)["active_experts"] for x in inputs.logits)
    active_mean = active / len(inputs.logits)
    record["bytes"] = shape.traffic(round(active_mean))
    call = our_call(flashmoe, shape, inputs, kernel)

    procedure = Procedure(
        inputs,
        checked=lambda: call_ours(flashmoe, arrays, shape, inputs, kernel),
        judge=lambda ours, outputs: judge_moe(arrays, shape, inputs, outputs),
        again=lambda: call(inputs.logits[0]),
        timed=inputs.rotation(call),
        fault=lambda ours: routing_fault(arrays, shape, inputs.logits[0], ours.routing),
        beside=lambda: bounds(arrays, shape, sampling.seed),
    )
    made = with_bound(
        measure_row(flashmoe, arrays, shape, peers, sampling, ceiling, procedure, record)
    )
    for entry in made.get("contenders", {}).values():
        if entry["status"] == "ok":
            seconds = entry.get("graph_s") or entry["median_s"]
            entry["weight_bytes_per_s"] = active_mean * shape.expert_bytes / seconds
    return made
