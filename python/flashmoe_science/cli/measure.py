"""One measured shape: our kernel checked, proved to be the planned one, then timed beside peers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from flashmoe_science.cli import peers as torch_peers
from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.environment import as_dict
from flashmoe_science.cli.reference import judge
from flashmoe_science.cli.shapes import Shape
from flashmoe_science.cli.stats import compare, summary
from flashmoe_science.cli.timing import Contender, Sampling, interleave, make_clock

OURS = "flashmoe"
Inputs = tuple[Any, Any, Any]  # q, k, v, [batch, seq, heads, dim]
_LAUNCH_FIELDS = ("kernel", "grid", "block", "shared_bytes")


def make_inputs(arrays: Arrays, shape: Shape, seed: int = 0) -> Inputs:
    """q, k, v of standard normal values, [batch, seq, heads, dim]."""
    q = (shape.batch, shape.seq_q, shape.heads_q, shape.dim)
    k = (shape.batch, shape.seq_k, shape.heads_kv, shape.dim)
    v = (shape.batch, shape.seq_k, shape.heads_kv, shape.dim_v)
    extents = enumerate((q, k, v))
    made = [arrays.normal(e, shape.dtype, 3 * seed + i) for i, e in extents]
    return made[0], made[1], made[2]


def causal_argument(shape: Shape) -> bool | str:
    return False if shape.causal == "none" else shape.causal


def launch_mismatch(plan: dict[str, Any], launch: dict[str, Any]) -> str:
    """How the launch that was read back differs from the plan, "" when it does not."""
    differing = [f for f in _LAUNCH_FIELDS if plan[f] != launch[f]]
    return "; ".join(f"{f}: planned {plan[f]}, launched {launch[f]}" for f in differing)


def describe(shape: Shape) -> dict[str, Any]:
    """What a record says of a shape before anything is measured."""
    return {
        "shape": vars(shape),
        "flops": shape.flops,
        "bytes": shape.bytes,
        "tokens": shape.tokens,
        "status": "ok",
    }


@dataclasses.dataclass
class OurCall:
    """Our call on poisoned outputs, with its plan and the launch read back."""

    out: Any
    lse: Any
    plan: dict[str, Any]
    launch: dict[str, Any]


def call_ours(
    flashmoe: Any, arrays: Arrays, shape: Shape, inputs: Inputs, kernel: str | None
) -> OurCall:
    """Computes into outputs full of NaN, so that what is not written shows."""
    out = arrays.poisoned((shape.batch, shape.seq_q, shape.heads_q, shape.dim_v), shape.dtype)
    lse = arrays.poisoned((shape.batch, shape.heads_q, shape.seq_q), "fp32")
    options = {"causal": causal_argument(shape), "layout": "bshd", "kernel": kernel}
    plan = as_dict(flashmoe.attention_plan(*inputs, **options))
    out, lse = flashmoe.flash_attention(*inputs, **options, out=out, lse=lse, return_lse=True)
    launch = as_dict(flashmoe.last_launch())
    arrays.synchronize()
    return OurCall(out, lse, plan, launch)


def measure(
    flashmoe: Any,
    arrays: Arrays,
    shape: Shape,
    peers: Sequence[str],
    sampling: Sampling,
    kernel: str | None = None,
    ceiling: float | None = None,
) -> dict[str, Any]:
    """The record of one shape. A void row has a reason and no times at all.

    `ceiling` is what a matrix product of the shape's dtype reaches here, in FLOP/s.
    """
    record = describe(shape)

    def void(reason: str) -> dict[str, Any]:
        return record | {"status": "void", "reason": reason}

    inputs = make_inputs(arrays, shape, sampling.seed)
    try:
        ours = call_ours(flashmoe, arrays, shape, inputs, kernel)
    except (flashmoe.FlashMoEError, ValueError, TypeError, RuntimeError) as error:
        return void(f"the call failed: {error}")
    record |= {"plan": ours.plan, "launch": ours.launch}
    mismatch = launch_mismatch(ours.plan, ours.launch)
    if mismatch:
        return void(f"the launched kernel is not the planned one: {mismatch}")

    contenders: list[Contender] = []
    outputs = {OURS: ours.out}
    refused: dict[str, dict[str, Any]] = {}
    for name in peers:
        try:
            peer = torch_peers.make_peer(arrays, shape, name, inputs)
            outputs[name] = torch_peers.first_output(arrays, peer)
            contenders.append(peer)
        except torch_peers.Refused as reason:
            refused[name] = {"status": "refused", "reason": str(reason)}

    verdicts = judge(arrays, shape, inputs, outputs, ours.lse)
    record["accuracy"] = dataclasses.asdict(verdicts[OURS])
    if not verdicts[OURS].passed:
        return void(verdicts[OURS].reason)
    for name in [c.name for c in contenders if not verdicts[c.name].passed]:
        refused[name] = {"status": "void", "reason": verdicts[name].reason}
    contenders = [c for c in contenders if c.name not in refused]
    del outputs, ours

    options = {"causal": causal_argument(shape), "layout": "bshd", "kernel": kernel}
    contenders.insert(0, Contender(OURS, lambda: flashmoe.flash_attention(*inputs, **options)))
    clock = make_clock(arrays)
    samples = interleave(contenders, clock, sampling)
    timed: dict[str, Any] = {}
    for contender in contenders:
        entry = summary(samples[contender.name])
        entry |= clock.extra(contender, entry["median_s"])
        entry["tflops"] = shape.flops / entry["median_s"] * 1e-12
        entry["tokens_per_s"] = shape.tokens / entry["median_s"]
        peak = clock.peak_bytes(contender)
        entry |= {} if peak is None else {"peak_bytes": peak}
        if ceiling:
            entry["ceiling_fraction"] = entry["tflops"] * 1e12 / ceiling
        timed[contender.name] = {"status": "ok"} | entry
    for name in timed:
        if name != OURS:
            timed[name]["against"] = compare(samples[OURS], samples[name], sampling.seed)
            timed[name]["accuracy"] = dataclasses.asdict(verdicts[name])
    record["contenders"] = timed | refused
    return record
