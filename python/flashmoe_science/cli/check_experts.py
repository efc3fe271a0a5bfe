"""The part of `flashmoe check` for the mixture of experts: every kernel family that computes layers
on the device, in every layout of weights, against float64."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.environment import last_launches, plan_as_dict
from flashmoe_science.cli.measure import launch_mismatch
from flashmoe_science.cli.moe_inputs import MoeInputs, make_moe_inputs
from flashmoe_science.cli.moe_reference import judge_moe, routing_fault
from flashmoe_science.cli.moe_shapes import MoeShape

# One token and many, evenly spread and concentrated on one expert, empty experts and token counts
# that fill no tile, K = 1 and K = E, E that is no multiple of 8; each with a different layout.
SHAPES = (
    (MoeShape(1, 256, 128, 16, 4), "gate_up"),
    (MoeShape(13, 136, 72, 6, 2, skew=1.0), "interleaved"),
    (MoeShape(64, 256, 64, 8, 2), "transposed"),
    (MoeShape(33, 128, 192, 40, 8), "separate"),
    (MoeShape(200, 264, 136, 5, 1, skew=2.0), "up_gate"),
    (MoeShape(300, 128, 256, 4, 4), "transposed"),
)


@dataclasses.dataclass
class Case:
    """The result of one call. `kernel` is the requested family, "" for the best."""

    shape: MoeShape
    layout: str
    kernel: str
    family: str
    error: float
    bound: float
    reason: str


@dataclasses.dataclass
class Experts:
    """The results of all calls, by family, and why some built-in families were not asked."""

    cases: list[Case]
    refused: dict[str, str]

    @property
    def failed(self) -> list[Case]:
        return [case for case in self.cases if case.reason]

    @property
    def families(self) -> list[str]:
        return sorted({case.family for case in self.cases})

    @property
    def margin(self) -> float:
        """The largest error as a fraction of what is allowed."""
        return max(case.error / case.bound for case in self.cases)


def check_experts(flashmoe: Any, arrays: Arrays, kernel: str | None) -> Experts:
    """Calls the layer as users do, and by each family's name; with `kernel` only by that name."""
    found = Experts([], {})
    names = [kernel] if kernel else ["", *flashmoe.build_info().kernel_families.split()]
    seed = 0
    for dtype in arrays.dtypes:
        for base, layout in SHAPES:
            shape = dataclasses.replace(base, dtype=dtype)
            seed += 1
            inputs = make_moe_inputs(arrays, shape, seed)
            inputs = dataclasses.replace(inputs, logits=inputs.logits[:1])
            calls: dict[str, _Call] = {}
            routing = flashmoe.moe_route(inputs.logits[0], shape.top_k, renormalize=True)
            for name in names:
                try:
                    calls[name] = _call(flashmoe, arrays, shape, layout, inputs, routing, name)
                except (flashmoe.UnsupportedError, flashmoe.InvalidArgumentError) as error:
                    # The latter for a family that computes only attention.
                    if not str(error).startswith("kernel: "):
                        raise
                    found.refused.setdefault(name, str(error))
            if calls:
                found.cases += _judge(arrays, shape, layout, inputs, routing, calls)
    return found


def _on_host(arrays: Arrays, inputs: MoeInputs) -> MoeInputs:
    host = arrays.to_host
    logits = tuple(host(x) for x in inputs.logits)
    return MoeInputs(host(inputs.x), host(inputs.w_gate_up), host(inputs.w_down), logits)


@dataclasses.dataclass
class _Call:
    out: Any
    family: str
    mismatch: str


def _call(
    flashmoe: Any,
    arrays: Arrays,
    shape: MoeShape,
    layout: str,
    inputs: MoeInputs,
    routing: Any,
    kernel: str,
) -> _Call:
    """One call into a poisoned output."""
    weights, options = _stored(arrays.xp, inputs, layout)
    options["kernel"] = kernel or None
    out = arrays.poisoned(shape.output_extents, shape.dtype)
    plan = plan_as_dict(flashmoe.moe_plan(inputs.x, *weights, routing, **options))
    flashmoe.moe_forward(inputs.x, *weights, routing, **options, out=out)
    launches = last_launches(flashmoe)
    arrays.synchronize()
    return _Call(out, plan["family"], launch_mismatch(plan, launches))


def _judge(
    arrays: Arrays,
    shape: MoeShape,
    layout: str,
    inputs: MoeInputs,
    routing: Any,
    calls: dict[str, _Call],
) -> list[Case]:
    """Judges with NumPy, whatever the arrays, so that verdicts do not depend on the library that
    made them."""
    numpy, on_host = Arrays(), _on_host(arrays, inputs)
    parts = ("ids", "weights", "offsets", "pairs", "slots")
    seen = types.SimpleNamespace(**{n: arrays.to_host(getattr(routing, n)) for n in parts})
    fault = routing_fault(numpy, shape, on_host.logits[0], seen)
    outputs = {name: arrays.to_host(call.out) for name, call in calls.items()}
    verdicts = judge_moe(numpy, shape, on_host, outputs)
    cases = []
    for name, call in calls.items():
        reason = fault or verdicts[name].reason
        if call.mismatch:
            reason = f"the launched kernel is not the planned one: {call.mismatch}"
        verdict = verdicts[name]
        case = Case(shape, layout, name, call.family, verdict.error, verdict.bound, reason)
        cases.append(case)
    return cases


def _stored(xp: Any, inputs: MoeInputs, layout: str) -> tuple[tuple[Any, Any], dict[str, Any]]:
    """The weights, gate rows first, as another model stores them: (w_gate_up, w_down), options."""
    both, down = inputs.w_gate_up, inputs.w_down
    inner = both.shape[1] // 2
    gate, up = both[:, :inner], both[:, inner:]
    if layout == "up_gate":
        return (xp.concatenate((up, gate), 1), down), {"gate": layout}
    if layout == "interleaved":
        return (xp.stack((gate, up), 2).reshape(both.shape), down), {"gate": layout}
    if layout == "separate":  # views of one tensor: experts are not adjacent
        return (gate, down), {"gate": layout, "w_up": up}
    if layout == "transposed":
        return (_turned(xp, both), _turned(xp, down)), {}
    return (both, down), {}


def _turned(xp: Any, matrices: Any) -> Any:
    """The same values, in memory column by column."""
    experts, rows, columns = matrices.shape
    stored = xp.empty_like(matrices).reshape((experts, columns, rows))
    stored[...] = matrices.swapaxes(1, 2)
    return stored.swapaxes(1, 2)
