"""One measured backward of attention: gradients checked, the planned kernels proved to run, then
timed beside peers, alone from a saved forward or together with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.environment import last_launches, plan_as_dict
from flashmoe_science.cli.gradient_reference import NAMES, judge_gradients
from flashmoe_science.cli.measure import Procedure, describe, make_inputs, measure_row
from flashmoe_science.cli.peers.gradients import leaves_of
from flashmoe_science.cli.peers.peer import BackwardInputs, Missing, Peer
from flashmoe_science.cli.shapes import BackwardShape, TrainingShape
from flashmoe_science.cli.timing import Sampling


def make_backward_inputs(arrays: Arrays, shape: BackwardShape, seed: int = 0) -> BackwardInputs:
    """q, k, v and dout of standard normal values, [batch, seq, heads, dim]."""
    q, k, v = make_inputs(arrays, shape, seed)
    extents = (shape.batch, shape.seq_q, shape.heads_q, shape.dim_v)
    return q, k, v, arrays.normal(extents, shape.dtype, 3 * seed + 3)


@dataclasses.dataclass
class OurCall:
    """Our call on poisoned gradients, with its plan and the launches read back; `saved` is out and
    lse of the forward before it."""

    out: tuple[Any, Any, Any]
    saved: tuple[Any, Any]
    plan: dict[str, Any]
    launches: list[dict[str, Any]]


def call_ours(
    flashmoe: Any,
    arrays: Arrays,
    shape: BackwardShape,
    inputs: BackwardInputs,
    kernel: str | None,
) -> OurCall:
    """Computes into gradients full of NaN, so that missing writes show.

    For a TrainingShape, plan and launches also include the forward's, which come first.
    """
    q, k, v, dout = inputs
    options = shape.options | {"layout": "bshd"}
    saved = flashmoe.flash_attention(q, k, v, **options, return_lse=True)
    of_forward = last_launches(flashmoe)
    extents = dict(zip(NAMES, shape.output_extents, strict=True))
    into = {name: arrays.poisoned(extents[name], shape.dtype) for name in NAMES}
    tensors = (dout, q, k, v, *saved)
    options["kernel"] = kernel
    plan = plan_as_dict(flashmoe.attention_backward_plan(*tensors, **options))
    flashmoe.flash_attention_backward(*tensors, **options, **into)
    launches = last_launches(flashmoe)
    arrays.synchronize()
    if isinstance(shape, TrainingShape):
        del options["kernel"]
        forward = plan_as_dict(flashmoe.attention_plan(q, k, v, **options, return_lse=True))
        plan = one_after_the_other(forward, plan)
        launches = of_forward + launches
    return OurCall((into["dq"], into["dk"], into["dv"]), saved, plan, launches)


def one_after_the_other(forward: dict[str, Any], backward: dict[str, Any]) -> dict[str, Any]:
    """The plan of a forward and its backward: the backward's, with the launches of both."""
    return backward | {
        "operation": TrainingShape.operation,
        "flops": forward["flops"] + backward["flops"],
        "bytes": forward["bytes"] + backward["bytes"],
        "microseconds": forward["microseconds"] + backward["microseconds"],
        "workspace_bytes": max(forward["workspace_bytes"], backward["workspace_bytes"]),
        "launches": forward["launches"] + backward["launches"],
    }


def measure_backward(
    flashmoe: Any,
    arrays: Arrays,
    shape: BackwardShape,
    peers: Sequence[Peer | Missing],
    sampling: Sampling,
    kernel: str | None = None,
    ceiling: float | None = None,
) -> dict[str, Any]:
    """The record of one shape: see measure_row.

    For a TrainingShape a forward and a backward by torch's autograd are timed. Their gradients must
    have the bits of the checked ones, which come from the functions without autograd.
    """
    inputs = make_backward_inputs(arrays, shape, sampling.seed)
    options = shape.options | {"layout": "bshd"}
    checked: list[OurCall] = []

    def check() -> OurCall:
        checked[:] = [call_ours(flashmoe, arrays, shape, inputs, kernel)]
        return checked[0]

    def backward() -> Any:
        q, k, v, dout = inputs
        tensors = (dout, q, k, v, *checked[0].saved)
        return tuple(flashmoe.flash_attention_backward(*tensors, **options, kernel=kernel))[:3]

    def training() -> Any:
        out = flashmoe.flash_attention(*leaves, **options)
        return arrays.xp.autograd.grad(out, leaves, inputs[3])

    both = isinstance(shape, TrainingShape)
    leaves = leaves_of(inputs) if both else ()
    call = training if both else backward
    procedure = Procedure(
        inputs,
        checked=check,
        judge=lambda ours, outputs: judge_gradients(arrays, shape, inputs, outputs),
        again=call,
        timed=call,
        read_back=not both,
    )
    return measure_row(
        flashmoe, arrays, shape, peers, sampling, ceiling, procedure, describe(shape)
    )
