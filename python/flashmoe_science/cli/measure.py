"""One measured shape: our kernel checked, proved to be the planned one, then timed beside peers.

measure_row does this for every operation; a Procedure holds an operation's own steps. Attention's
Procedure is in this file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.environment import last_launches, plan_as_dict
from flashmoe_science.cli.peers.peer import Inputs, Missing, Peer, Refused
from flashmoe_science.cli.reference import Accuracy, judge
from flashmoe_science.cli.shapes import Shape
from flashmoe_science.cli.stats import compare, summary
from flashmoe_science.cli.suites import AnyShape
from flashmoe_science.cli.sustained import sustain
from flashmoe_science.cli.timing import Contender, Sampling, interleave, make_clock

OURS = "flashmoe"
_FROM_CODE = ("registers", "local_bytes", "binary_arch")  # fields of a launch that plans lack


def launch_mismatch(plan: dict[str, Any], launches: list[dict[str, Any]]) -> str:
    """How the launches read back differ from the plan's, "" if they do not."""
    planned = plan["launches"]
    if len(planned) != len(launches):
        names = (", ".join(launch["kernel"] for launch in those) for those in (planned, launches))
        return "planned {}, launched {}".format(*names)
    return "; ".join(
        f"{field}: planned {of_plan[field]}, launched {launch[field]}"
        for of_plan, launch in zip(planned, launches, strict=True)
        for field in of_plan
        if field not in _FROM_CODE and of_plan[field] != launch[field]
    )


def describe(shape: AnyShape) -> dict[str, Any]:
    """What a record says about a shape before anything is measured."""
    return {
        "shape": vars(shape),
        "flops": shape.flops,
        "bytes": shape.bytes,
        "tokens": shape.tokens,
        "status": "ok",
    }


class Checked(Protocol):
    """Our call on poisoned outputs, with its plan and the launches read back. With several outputs
    `out` is a tuple."""

    out: Any
    plan: dict[str, Any]
    launches: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Procedure:
    """An operation's own steps in measuring one shape.

    Attributes:
        inputs: What peers take.
        checked: Our call, to be checked: its outputs were full of NaN.
        judge: Checks outputs, by name and ours first, against the accuracy rule. Also takes our
            call.
        again: Makes the timed call on the checked tensors; returns its output.
        timed: The call that is timed.
        fault: What else is wrong with our call, "" if nothing.
        beside: Makes what is also timed but is no peer.
        read_back: Whether the launches of the timed call can be read back. Those of torch's
            autograd cannot: on a GPU its backward runs in another thread.
        launched: What `again` launched, if it makes several calls of the library; None reads those
            of the last call.
    """

    inputs: Any
    checked: Callable[[], Any]
    judge: Callable[[Any, dict[str, Any]], dict[str, Accuracy]]
    again: Callable[[], Any]
    timed: Callable[[], Any]
    fault: Callable[[Any], str] = lambda ours: ""
    beside: Callable[[], list[Contender]] = list
    read_back: bool = True
    launched: Callable[[], list[dict[str, Any]]] | None = None


class _Void(Exception):
    """Why our row has no times."""


def measure_row(
    flashmoe: Any,
    arrays: Arrays,
    shape: AnyShape,
    peers: Sequence[Peer | Missing],
    sampling: Sampling,
    ceiling: float | None,
    procedure: Procedure,
    record: dict[str, Any],
) -> dict[str, Any]:
    """Returns `record`, which describes the shape, with the measurements.

    A void row has a reason and no times at all. `ceiling` is what a matrix product of the shape's
    dtype reaches here, in FLOP/s.
    """
    record = dict(record)
    try:
        verdicts, others, contenders = _check(flashmoe, arrays, shape, peers, procedure, record)
    except _Void as void:
        return record | {"status": "void", "reason": str(void)}
    timed = time_contenders(arrays, shape, [*contenders, *procedure.beside()], sampling, ceiling)
    for name, entry in timed.items():
        if name != OURS and name in verdicts:
            entry["accuracy"] = dataclasses.asdict(verdicts[name])
    versions = {p.name: p.version() for p in peers if isinstance(p, Peer)}
    versions[OURS] = str(flashmoe.__version__)
    record["contenders"] = timed | others
    for name, entry in record["contenders"].items():
        entry |= {"version": versions[name]} if versions.get(name) else {}
    return record


def _check(
    flashmoe: Any,
    arrays: Arrays,
    shape: AnyShape,
    peers: Sequence[Peer | Missing],
    procedure: Procedure,
    record: dict[str, Any],
) -> tuple[dict[str, Accuracy], dict[str, dict[str, Any]], list[Contender]]:
    """Verdicts by name, entries of peers without times, and what is to be timed, ours first."""
    try:
        ours: Checked = procedure.checked()
    except (flashmoe.FlashMoEError, ValueError, TypeError, RuntimeError) as error:
        raise _Void(f"the call failed: {error}") from error
    record |= {"plan": ours.plan, "launches": ours.launches}
    if mismatch := launch_mismatch(ours.plan, ours.launches):
        raise _Void(f"the launched kernel is not the planned one: {mismatch}")
    if fault := procedure.fault(ours):
        raise _Void(fault)

    contenders: list[Contender] = []
    outputs = {OURS: ours.out}
    others: dict[str, dict[str, Any]] = {}
    for peer in peers:
        if isinstance(peer, Missing):
            others[peer.name] = {"status": "missing", "reason": peer.reason}
            continue
        try:
            contender, outputs[peer.name] = peer.contender(arrays, shape, procedure.inputs)
            contenders.append(contender)
        except Refused as refusal:
            others[peer.name] = {"status": "refused", "reason": str(refusal)}

    verdicts = procedure.judge(ours, outputs)
    record["accuracy"] = dataclasses.asdict(verdicts[OURS])
    if not verdicts[OURS].passed:
        raise _Void(verdicts[OURS].reason)
    if reason := _another_call(flashmoe, arrays, procedure, ours):
        raise _Void(reason)
    for name in [c.name for c in contenders if not verdicts[c.name].passed]:
        others[name] = {"status": "void", "reason": verdicts[name].reason}
    timed = Contender(OURS, procedure.timed)
    return verdicts, others, [timed, *(c for c in contenders if c.name not in others)]


def _another_call(flashmoe: Any, arrays: Arrays, procedure: Procedure, checked: Checked) -> str:
    """How the call to time differs from the checked one, "" if it does not.

    The first writes into a new output, the other into ours; both must be launched as planned and
    give the same bits.
    """
    out = procedure.again()
    mismatch = ""
    if procedure.read_back:
        launches = procedure.launched() if procedure.launched else last_launches(flashmoe)
        mismatch = launch_mismatch(checked.plan, launches)
    arrays.synchronize()
    if mismatch:
        return f"the kernel launched by the timed call is not the planned one: {mismatch}"
    if not _same_bits(out, checked.out):
        return "the timed call gives other values than the one that was checked"
    return ""


def _same_bits(a: Any, b: Any) -> bool:
    """Whether one output, or each of several, has the same bits."""
    if isinstance(a, tuple):
        return all(map(_same_bits, a, b))
    return bool((a == b).all())


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
    if sampling.sustained:
        found = sustain(
            arrays.xp, arrays.device, contenders, medians, shape.flops, sampling.sustained
        )
        for name, entry in found.items():
            timed[name]["sustained"] = entry
    graphs = {n: e["graph_samples_s"] for n, e in timed.items() if "graph_samples_s" in e}
    for name, entry in timed.items():
        if name != OURS:
            entry["against"] = compare(samples[OURS], samples[name], sampling.seed)
            if OURS in graphs and name in graphs:
                entry["graph_against"] = compare(graphs[OURS], graphs[name], sampling.seed)
    return timed


# ---- attention -------------------------------------------------------------------------------


def make_inputs(arrays: Arrays, shape: Shape, seed: int = 0) -> Inputs:
    """q, k, v of standard normal values, [batch, seq, heads, dim]."""
    q = (shape.batch, shape.seq_q, shape.heads_q, shape.dim)
    k = (shape.batch, shape.seq_k, shape.heads_kv, shape.dim)
    v = (shape.batch, shape.seq_k, shape.heads_kv, shape.dim_v)
    extents = enumerate((q, k, v))
    made = [arrays.normal(e, shape.dtype, 3 * seed + i) for i, e in extents]
    return made[0], made[1], made[2]


@dataclasses.dataclass
class OurCall:
    """Our call on poisoned outputs, with its plan and the launches read back."""

    out: Any
    lse: Any
    plan: dict[str, Any]
    launches: list[dict[str, Any]]


def call_ours(
    flashmoe: Any,
    arrays: Arrays,
    shape: Shape,
    inputs: Inputs,
    kernel: str | None,
    sinks: Any = None,
) -> OurCall:
    """Computes into outputs full of NaN, so that missing writes show."""
    out = arrays.poisoned((shape.batch, shape.seq_q, shape.heads_q, shape.dim_v), shape.dtype)
    lse = arrays.poisoned((shape.batch, shape.heads_q, shape.seq_q), "fp32")
    options = shape.options | {"layout": "bshd", "kernel": kernel, "sinks": sinks}
    plan = plan_as_dict(flashmoe.attention_plan(*inputs, **options))
    out, lse = flashmoe.flash_attention(*inputs, **options, out=out, lse=lse, return_lse=True)
    launches = last_launches(flashmoe)
    arrays.synchronize()
    return OurCall(out, lse, plan, launches)


def measure(
    flashmoe: Any,
    arrays: Arrays,
    shape: Shape,
    peers: Sequence[Peer | Missing],
    sampling: Sampling,
    kernel: str | None = None,
    ceiling: float | None = None,
) -> dict[str, Any]:
    """The record of one shape of attention: see measure_row."""
    inputs = make_inputs(arrays, shape, sampling.seed)
    options: Mapping[str, Any] = shape.options | {"layout": "bshd", "kernel": kernel}

    def call() -> Any:
        return flashmoe.flash_attention(*inputs, **options)

    procedure = Procedure(
        inputs,
        checked=lambda: call_ours(flashmoe, arrays, shape, inputs, kernel),
        judge=lambda ours, outputs: judge(arrays, shape, inputs, outputs, ours.lse),
        again=call,
        timed=call,
    )
    return measure_row(
        flashmoe, arrays, shape, peers, sampling, ceiling, procedure, describe(shape)
    )
