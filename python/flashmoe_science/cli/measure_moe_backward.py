"""One measured backward of a mixture of experts: gradients checked, the planned kernels proved to
run, then timed beside peers, alone from a saved forward or together with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.environment import last_launches, plan_as_dict
from flashmoe_science.cli.measure import Procedure, describe, measure_row
from flashmoe_science.cli.measure_moe import bounds, with_bound
from flashmoe_science.cli.moe_gradient_inputs import (
    NAMES,
    Gradients,
    MoeGradientInputs,
    make_moe_gradient_inputs,
)
from flashmoe_science.cli.moe_gradient_reference import judge_moe_gradients
from flashmoe_science.cli.moe_reference import loads, routing_fault
from flashmoe_science.cli.moe_shapes import MoeBackwardShape, MoeTrainingShape
from flashmoe_science.cli.peers.peer import Missing, Peer
from flashmoe_science.cli.reference import fault
from flashmoe_science.cli.timing import Sampling


@dataclasses.dataclass
class Saved:
    """What a backward reads of its forward."""

    routing: Any
    pre_activation: Any


@dataclasses.dataclass
class OurCall:
    """Our call on poisoned gradients, with its plan and the launches read back.

    Attributes:
        out: The checked part of the gradients. The gradients take as much memory as the weights,
            and are already freed.
        unwritten: What holds an unwritten value, as a sentence; "" if nothing does.
    """

    out: Gradients
    saved: Saved
    unwritten: str
    plan: dict[str, Any]
    launches: list[dict[str, Any]]


def backward(
    flashmoe: Any,
    inputs: MoeGradientInputs,
    saved: Saved,
    kernel: str | None,
    into: dict[str, Any] | None = None,
    after: Callable[[], None] = lambda: None,
) -> Gradients:
    """All gradients, of the layer and, through it, of the routing: two calls of the library, each
    followed by `after`."""
    layer, into = inputs.layer, dict(into or {})
    dlogits = into.pop("dlogits", None)
    made = flashmoe.moe_backward(
        inputs.dout, layer.x, layer.w_gate_up, layer.w_down, saved.routing,
        pre_activation=saved.pre_activation, kernel=kernel, **into,
    )  # fmt: skip
    after()
    dlogits = flashmoe.moe_route_backward(
        made.weights, saved.routing, logits=layer.logits[0], renormalize=True, dlogits=dlogits
    )
    after()
    return made.x, dlogits, made.w_gate_up, made.w_down


def call_ours(
    flashmoe: Any,
    arrays: Arrays,
    shape: MoeBackwardShape,
    inputs: MoeGradientInputs,
    kernel: str | None,
) -> OurCall:
    """Computes into gradients full of NaN, so that missing writes show.

    For a MoeTrainingShape, plan and launches also include those of the routing and the layer, which
    come first.
    """
    layer = inputs.layer
    tensors, logits = (layer.x, layer.w_gate_up, layer.w_down), layer.logits[0]
    options = {"renormalize": True}
    launches: list[dict[str, Any]] = []

    def read_back() -> None:
        launches.extend(last_launches(flashmoe))

    routing = flashmoe.moe_route(logits, shape.top_k, **options)
    read_back()
    plans = [flashmoe.moe_route_plan(logits, shape.top_k, **options)]
    plans.append(flashmoe.moe_plan(*tensors, routing, return_pre_activation=True))
    _, pre_activation = flashmoe.moe_forward(*tensors, routing, return_pre_activation=True)
    read_back()
    if not isinstance(shape, MoeTrainingShape):
        plans.clear()
        launches.clear()
    extents = (layer.x.shape, logits.shape, layer.w_gate_up.shape, layer.w_down.shape)
    into = {
        name: arrays.poisoned(tuple(of), shape.dtype)
        for name, of in zip(NAMES, extents, strict=True)
    }
    dweights = arrays.poisoned((shape.tokens, shape.top_k), "fp32")
    saved = Saved(routing, pre_activation)
    plans.append(
        flashmoe.moe_backward_plan(
            inputs.dout, *tensors, routing, pre_activation=pre_activation, kernel=kernel
        )
    )
    plans.append(flashmoe.moe_route_backward_plan(dweights, routing, logits=logits, **options))
    backward(flashmoe, inputs, saved, kernel, into | {"dweights": dweights}, read_back)
    arrays.synchronize()
    out = inputs.checked((into["dx"], into["dlogits"], into["dw_gate_up"], into["dw_down"]))
    plan = one_after_the_other([plan_as_dict(p) for p in plans], shape.operation)
    return OurCall(out, saved, _unwritten(arrays, into), plan, launches)


def _unwritten(arrays: Arrays, gradients: dict[str, Any]) -> str:
    for name, tensor in gradients.items():
        # Expert by expert: flags for all weights at once would take half as much memory again.
        parts = tensor if len(tensor.shape) == 3 else [tensor]
        if not all(bool(arrays.xp.isfinite(part).all()) for part in parts):
            return fault(0.0, 0.0, None, False, name)
    return ""


def one_after_the_other(plans: Sequence[dict[str, Any]], operation: str) -> dict[str, Any]:
    """The plan of several calls: that of the layer's backward, the second to last, with the
    launches of all."""

    def of_all(name: str) -> list[Any]:
        return [plan[name] for plan in plans]

    return plans[-2] | {
        "operation": operation,
        "flops": sum(of_all("flops")),
        "bytes": sum(of_all("bytes")),
        "microseconds": sum(of_all("microseconds")),
        "workspace_bytes": max(of_all("workspace_bytes")),
        "launches": [launch for launches in of_all("launches") for launch in launches],
    }


def measure_moe_backward(
    flashmoe: Any,
    arrays: Arrays,
    shape: MoeBackwardShape,
    peers: Sequence[Peer | Missing],
    sampling: Sampling,
    kernel: str | None = None,
    ceiling: float | None = None,
) -> dict[str, Any]:
    """The record of one shape: see measure_row. It also has the loads of experts and, for many
    tokens, the time of plain products with the same FLOPs.

    For a MoeTrainingShape a forward and a backward by torch's autograd are timed. Their gradients
    must have the bits of the checked ones, which come from the functions without autograd.
    """
    record = describe(shape)
    inputs = make_moe_gradient_inputs(arrays, shape, sampling.seed)
    logits = inputs.layer.logits[0]
    record["routing"] = loads(arrays, shape, logits)
    record["bytes"] = shape.traffic(record["routing"]["active_experts"])
    both = isinstance(shape, MoeTrainingShape)
    leaves: Any = inputs.leaves if both else ()
    saved: list[Saved] = []
    launches: list[dict[str, Any]] = []

    def check() -> OurCall:
        ours = call_ours(flashmoe, arrays, shape, inputs, kernel)
        saved[:] = [] if both else [ours.saved]
        return ours

    def alone(after: Callable[[], None] = lambda: None) -> Gradients:
        return backward(flashmoe, inputs, saved[0], kernel, after=after)

    def training() -> Gradients:
        x, chosen_by, w_gate_up, w_down = leaves
        routing = flashmoe.moe_route(chosen_by, shape.top_k, renormalize=True)
        out = flashmoe.moe_forward(x, w_gate_up, w_down, routing)
        gradients: Gradients = arrays.xp.autograd.grad(out, leaves, inputs.dout)
        return gradients

    def again() -> Gradients:
        launches.clear()
        if both:
            return inputs.checked(training())
        return inputs.checked(alone(lambda: launches.extend(last_launches(flashmoe))))

    def fault_of(ours: OurCall) -> str:
        return routing_fault(arrays, shape, logits, ours.saved.routing) or ours.unwritten

    procedure = Procedure(
        inputs,
        checked=check,
        judge=lambda ours, outputs: judge_moe_gradients(arrays, shape, inputs, outputs),
        again=again,
        timed=training if both else alone,
        fault=fault_of,
        beside=lambda: bounds(arrays, shape, sampling.seed),
        read_back=not both,
        launched=lambda: launches,
    )
    return with_bound(
        measure_row(flashmoe, arrays, shape, peers, sampling, ceiling, procedure, record)
    )
