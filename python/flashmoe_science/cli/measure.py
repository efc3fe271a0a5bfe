"""One measured shape: our kernel checked, proved to be the planned one, then timed beside peers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.environment import as_dict
from flashmoe_science.cli.peers.peer import Inputs, Missing, Peer, Refused
from flashmoe_science.cli.reference import judge
from flashmoe_science.cli.shapes import Shape
from flashmoe_science.cli.stats import compare, summary
from flashmoe_science.cli.suites import AnyShape
from flashmoe_science.cli.timing import Contender, Sampling, interleave, make_clock

OURS = "flashmoe"
_LAUNCH_FIELDS = ("kernel", "grid", "block", "shared_bytes")


def make_inputs(arrays: Arrays, shape: Shape, seed: int = 0) -> Inputs:
    """q, k, v of standard normal values, [batch, seq, heads, dim]."""
    q = (shape.batch, shape.seq_q, shape.heads_q, shape.dim)
    k = (shape.batch, shape.seq_k, shape.heads_kv, shape.dim)
    v = (shape.batch, shape.seq_k, shape.heads_kv, shape.dim_v)
    extents = enumerate((q, k, v))
    made = [arrays.normal(e, shape.dtype, 3 * seed + i) for i, e in extents]
    return made[0], made[1], made[2]


def launch_mismatch(plan: dict[str, Any], launch: dict[str, Any]) -> str:
    """How the launch that was read back differs from the plan, "" when it does not."""
    differing = [f for f in _LAUNCH_FIELDS if plan[f] != launch[f]]
    return "; ".join(f"{f}: planned {plan[f]}, launched {launch[f]}" for f in differing)


def describe(shape: AnyShape) -> dict[str, Any]:
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
    options = shape.options | {"layout": "bshd", "kernel": kernel}
    plan = as_dict(flashmoe.attention_plan(*inputs, **options))
    out, lse = flashmoe.flash_attention(*inputs, **options, out=out, lse=lse, return_lse=True)
    launch = as_dict(flashmoe.last_launch())
    arrays.synchronize()
    return OurCall(out, lse, plan, launch)


def measure(
    flashmoe: Any,
    arrays: Arrays,
    shape: Shape,
    peers: Sequence[Peer | Missing],
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
    others: dict[str, dict[str, Any]] = {}  # peers without times
    versions = {OURS: str(flashmoe.__version__)}
    for peer in peers:
        if isinstance(peer, Missing):
            others[peer.name] = {"status": "missing", "reason": peer.reason}
            continue
        versions[peer.name] = peer.version()
        try:
            contender, outputs[peer.name] = peer.contender(arrays, shape, inputs)
            contenders.append(contender)
        except Refused as refusal:
            others[peer.name] = {"status": "refused", "reason": str(refusal)}

    verdicts = judge(arrays, shape, inputs, outputs, ours.lse)
    record["accuracy"] = dataclasses.asdict(verdicts[OURS])
    if not verdicts[OURS].passed:
        return void(verdicts[OURS].reason)
    options = shape.options | {"layout": "bshd", "kernel": kernel}
    timed_call = Contender(OURS, lambda: flashmoe.flash_attention(*inputs, **options))
    reason = _another_call(flashmoe, arrays, timed_call, ours)
    if reason:
        return void(reason)
    for name in [c.name for c in contenders if not verdicts[c.name].passed]:
        others[name] = {"status": "void", "reason": verdicts[name].reason}
    contenders = [timed_call, *(c for c in contenders if c.name not in others)]
    del outputs, ours

    timed = time_contenders(arrays, shape, contenders, sampling, ceiling)
    for name, entry in timed.items():
        if name != OURS:
            entry["accuracy"] = dataclasses.asdict(verdicts[name])
    record["contenders"] = timed | others
    for name, entry in record["contenders"].items():
        entry |= {"version": versions[name]} if versions.get(name) else {}
    return record


def _another_call(flashmoe: Any, arrays: Arrays, timed: Contender, checked: OurCall) -> str:
    """How the call that is to be timed differs from the one that was checked, "" when it does not.

    The one writes into an output of its own making, the other into ours; both must be the planned
    launch, and give the same bits.
    """
    out = timed.call()
    mismatch = launch_mismatch(checked.plan, as_dict(flashmoe.last_launch()))
    arrays.synchronize()
    if mismatch:
        return f"the kernel launched by the timed call is not the planned one: {mismatch}"
    if not bool((out == checked.out).all()):
        return "the timed call gives other values than the one that was checked"
    return ""


def time_contenders(
    arrays: Arrays,
    shape: AnyShape,
    contenders: list[Contender],
    sampling: Sampling,
    ceiling: float | None,
) -> dict[str, dict[str, Any]]:
    """Every contender's times, rates and memory, and its ratio to ours, the first of them."""
    clock = make_clock(arrays)
    samples = interleave(contenders, clock, sampling)
    timed = {name: {"status": "ok"} | summary(s) for name, s in samples.items()}
    medians = {name: float(entry["median_s"]) for name, entry in timed.items()}
    details = clock.details(contenders, medians, sampling.seed)
    for name, entry in timed.items():
        entry |= details[name]
        entry["tflops"] = shape.flops / medians[name] * 1e-12
        entry["tokens_per_s"] = shape.tokens / medians[name]
        if ceiling:
            entry["ceiling_fraction"] = entry["tflops"] * 1e12 / ceiling
    graphs = {n: e["graph_samples_s"] for n, e in timed.items() if "graph_samples_s" in e}
    for name, entry in timed.items():
        if name != OURS:
            entry["against"] = compare(samples[OURS], samples[name], sampling.seed)
            if OURS in graphs and name in graphs:
                entry["graph_against"] = compare(graphs[OURS], graphs[name], sampling.seed)
    return timed
