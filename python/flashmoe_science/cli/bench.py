"""`flashmoe bench`: our kernels beside others, checked first, interleaved, with intervals."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import time
from collections.abc import Sequence
from typing import Any

from flashmoe_science.cli import environment, peers
from flashmoe_science.cli.arrays import Arrays, choose_arrays, normal_device, usable_device
from flashmoe_science.cli.bench_table import BenchTable, print_summary
from flashmoe_science.cli.ceilings import measure_ceilings, native_dtypes
from flashmoe_science.cli.compare import failures_below, print_gate, run_compare
from flashmoe_science.cli.measure import describe, measure
from flashmoe_science.cli.measure_backward import measure_backward
from flashmoe_science.cli.measure_moe import measure_moe
from flashmoe_science.cli.measure_moe_backward import measure_moe_backward
from flashmoe_science.cli.moe_shapes import (
    MoeBackwardShape,
    MoeShape,
    add_moe_shape_options,
    given_moe_options,
    moe_shape_from_options,
)
from flashmoe_science.cli.output import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    CommandError,
    Output,
    add_json_option,
    at_least,
    check_writable,
    is_stream,
    positive,
    write_json,
)
from flashmoe_science.cli.records import SCHEMA, ratio_of
from flashmoe_science.cli.resume import Kept, kept_rows
from flashmoe_science.cli.shapes import (
    BackwardShape,
    add_pass_options,
    add_shape_options,
    given_pass_options,
    given_shape_options,
    of_pass,
    shape_from_options,
)
from flashmoe_science.cli.stats import verdicts
from flashmoe_science.cli.suites import (
    ATTENTION,
    BACKWARD,
    MOE,
    MOE_BACKWARD,
    MOE_TRAINING,
    TRAINING,
    AnyShape,
    Suite,
    load_suite,
    operation_of,
    suite_names,
)
from flashmoe_science.cli.timing import Sampling

_DESCRIPTION = """\
Times our attention or our mixture of experts from the router's logits on, their backward, or both
as a training step has them, beside other implementations that are installed here, its peers, on the
same tensors in the same run: a suite of shapes, or one shape from flags.

For every shape, before anything is timed: our call writes into poisoned outputs, the launch is
read back and must be the planned one, and every output must hold the accuracy rule against
float64 (docs/accuracy.md). A row of ours that fails is void: it has a reason and no times. Then
calls alternate in random order. On a GPU the L2 cache is flushed before each call and time is
taken between CUDA events; for short calls the time in a CUDA graph and the host's time stand
beside it. A ratio is the peer's median over ours (above 1: ours is faster) with its 95 %
bootstrap interval; an interval that holds 1 is a tie. Where quartiles spread too far there is no
verdict, and the row is in no mean.

  flashmoe bench --suite attention-forward --json results.json
  flashmoe bench --compare before.json results.json --fail-below 0.97
  flashmoe bench --seq 4096 --heads 32 --kv-heads 8 --dim 128 --causal --peer torch-flash
  flashmoe bench --seq 4096 --heads 16 --dim 128 --causal --backward
  flashmoe bench --tokens 64 --hidden 2048 --inner 768 --experts 128 --top-k 8 --skew 1
  flashmoe bench --tokens 4096 --hidden 2048 --inner 768 --experts 128 --top-k 8 --training
"""
_TITLES = {
    ATTENTION: "Attention forward, one shape",
    BACKWARD: "Attention backward, one shape",
    TRAINING: "Attention forward and backward by autograd, one shape",
    MOE: "Mixture of experts forward, one shape",
    MOE_BACKWARD: "Mixture of experts backward, one shape",
    MOE_TRAINING: "Mixture of experts forward and backward by autograd, one shape",
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="our kernels beside others: checked, interleaved, with intervals",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--suite", metavar="NAME", help=f"one of {', '.join(suite_names())}")
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="with --suite: measure those shapes alone whose model or name as it is printed holds "
        'this, such as qwen3 or "zipf 1"; may be repeated, for any of them',
    )
    add_shape_options(parser, required=False)
    add_pass_options(parser, training=True)
    add_moe_shape_options(parser)
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N")
    parser.add_argument("--kernel", metavar="FAMILY", help="time this kernel family of ours")
    parser.add_argument(
        "--peer",
        action="append",
        metavar="NAME",
        help="time beside this one only, such as torch-flash, fa3 or torch-grouped, or none; may "
        "be repeated (default: all that are installed)",
    )
    parser.add_argument(
        "--threads", type=positive(int), metavar="N", help="threads on the CPU, ours and torch's"
    )
    sampling = Sampling()
    parser.add_argument(
        "--seconds",
        type=positive(float),
        default=sampling.seconds,
        metavar="S",
        help=f"time for each contender of a shape (default {sampling.seconds})",
    )
    parser.add_argument(
        "--samples",
        type=at_least(sampling.least),
        default=sampling.most,
        metavar="N",
        help=f"at most so many samples of each, {sampling.least} or more (default {sampling.most})",
    )
    parser.add_argument(
        "--sustained",
        type=positive(float),
        metavar="S",
        help="on a GPU also call each contender for S seconds without a pause, twice, and record "
        "speed, power and joules per TFLOP (default: as the suite has it, mostly not)",
    )
    parser.add_argument(
        "--seed",
        type=at_least(0),
        default=sampling.seed,
        metavar="N",
        help="of the tensors, the order of calls and the intervals (default 0)",
    )
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("A.json", "B.json"),
        help="measure nothing; show which shapes moved beyond noise from one record to the other",
    )
    parser.add_argument(
        "--fail-below",
        type=positive(float),
        metavar="RATIO",
        help="exit with 1 when the ratio of a shape over its fastest peer, or with --compare of B "
        "over A, is below this with its whole interval",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="with --suite and --json FILE: keep the rows of FILE that were measured of these "
        "kernels on this device beside the same peers, and measure the others; a FILE that is of "
        "something else is refused",
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def _choose_device(flashmoe: Any, arguments: argparse.Namespace, suite: Suite | None) -> str:
    if arguments.device is not None:
        return normal_device(arguments.device)
    if suite is not None and suite.device == "cpu":
        return "cpu"
    return usable_device(flashmoe)[0]


def _given(arguments: argparse.Namespace) -> list[str]:
    """The given flags of a shape, for any operation."""
    of_attention = [*given_shape_options(arguments), *given_pass_options(arguments)]
    return [*of_attention, *given_moe_options(arguments)]


def _one_shape(arguments: argparse.Namespace, dtype: str) -> AnyShape:
    of_moe = given_moe_options(arguments)
    if not of_moe:
        return of_pass(shape_from_options(arguments, dtype), arguments)
    foreign = [name for name in given_shape_options(arguments) if name != "--dtype"]
    if foreign:
        raise CommandError(
            f"{foreign[0]}: it is of attention, and {of_moe[0]} of a mixture of experts; give the "
            "shape of one of them"
        )
    return moe_shape_from_options(arguments, dtype)


def _shapes(
    arguments: argparse.Namespace, suite: Suite | None, device: str
) -> tuple[AnyShape, ...]:
    given = _given(arguments)
    if suite is None:
        if not given:
            raise CommandError(
                f"--suite: give one of {', '.join(suite_names())}, or a shape by --seq, --heads "
                "and --dim, or by --tokens, --hidden, --inner, --experts and --top-k"
            )
        return (_one_shape(arguments, "fp32" if device == "cpu" else "bf16"),)
    if given := [name for name in given if name != "--dtype"]:
        raise CommandError(
            f"--suite: a suite has its own shapes; give either it or {' '.join(given)}"
        )
    if suite.device == "cuda" and device == "cpu":
        raise CommandError(
            f"--suite: {suite.name} is for a GPU and would take hours on the CPU; there the suites "
            f"are {', '.join(n for n in suite_names() if load_suite(n).device != 'cuda')}"
        )
    if arguments.dtype is None:
        return suite.shapes
    shapes = tuple(s for s in suite.shapes if s.dtype == arguments.dtype)
    if not shapes:
        raise CommandError(
            f"--dtype: got {arguments.dtype}, accepted for the suite {suite.name} are "
            f"{', '.join(sorted({s.dtype for s in suite.shapes}))}"
        )
    return shapes


def _only(arguments: argparse.Namespace, shapes: Sequence[AnyShape]) -> frozenset[AnyShape]:
    """The shapes of a suite to measure."""
    if arguments.only is None:
        return frozenset(shapes)
    if arguments.suite is None:
        raise CommandError("--only: it chooses among the shapes of a suite; give --suite")
    names = {shape: f"{getattr(shape, 'model', '')} {shape}".strip() for shape in shapes}
    for text in arguments.only:
        if not any(text in name for name in names.values()):
            raise CommandError(
                f"--only: got {text}, which none of the suite's shapes holds: "
                f"{', '.join(names.values())}"
            )
    return frozenset(s for s, name in names.items() if any(t in name for t in arguments.only))


def _skip_emulated(
    shapes: tuple[AnyShape, ...], native: Sequence[str], arguments: argparse.Namespace
) -> tuple[tuple[AnyShape, ...], dict[str, Any] | None]:
    """The shapes to measure, and what a record says about those left out: element types that the
    device does not multiply, unless asked for by name or there are no others."""
    kept = tuple(s for s in shapes if s.dtype in native)
    if arguments.dtype is not None or not kept or len(kept) == len(shapes):
        return shapes, None
    dtypes = sorted({s.dtype for s in shapes} - set(native))
    return kept, {
        "rows": len(shapes) - len(kept),
        "dtypes": dtypes,
        "reason": f"the kernels of this device multiply {' and '.join(dtypes)} as fp32",
    }


def _set_threads(flashmoe: Any, arrays: Arrays, threads: int | None) -> None:
    """One number of threads for us and for torch."""
    if arrays.device != "cpu":
        return
    try:
        flashmoe.set_num_threads(threads or 0)
    except ValueError as error:  # it names its own argument, n
        raise CommandError(f"--threads: {str(error).partition(': ')[2]}") from error
    if arrays.name == "torch":
        arrays.xp.set_num_threads(flashmoe.get_num_threads())


def summarise(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric mean, extremes and verdicts per peer, for the ratio that counts for the row's
    operation, over all valid rows whose verdict is not withheld."""
    ratios: dict[str, list[dict[str, Any]]] = {}
    for cell in cells:
        for name, entry in cell.get("contenders", {}).items():
            against = ratio_of(cell, entry)
            if against is not None:
                ratios.setdefault(name, []).append(against)
    return {
        name: verdicts(found)
        | {
            "least": min((a["ratio"] for a in found if a["verdict"] != "withheld"), default=None),
            "most": max((a["ratio"] for a in found if a["verdict"] != "withheld"), default=None),
        }
        for name, found in ratios.items()
    }


def _command(argv: list[str]) -> list[str]:
    """The command that repeats this run, without the place of its record and what was kept."""
    kept = ["flashmoe"]
    words = iter(argv)
    for word in words:
        if word == "--json":
            following = next(words, "-")
            kept += [following] if following.startswith("--") else []
        elif word != "--resume" and not word.startswith("--json="):
            kept.append(word)
    return kept


def _source(commit: Any, operation: str, device: str) -> dict[str, Any]:
    """What is measured: the commit, all sources of the library, and the kernels' sources."""
    kind = "cpu" if device == "cpu" else "cuda"
    return {
        "commit": commit,
        "hash": environment.guarded(environment.source_hash),
        "kernels": environment.guarded(lambda: environment.kernels_hash(operation, kind)),
    }


def _document(
    flashmoe: Any,
    arrays: Arrays,
    suite: Suite | None,
    shapes: Sequence[AnyShape],
    chosen: Sequence[peers.Peer | peers.Missing],
    sampling: Sampling,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    device = arrays.device
    commit = environment.guarded(environment.git_commit)
    operation = operation_of(shapes[0])
    return {
        "schema": SCHEMA,
        "operation": operation,
        "suite": suite.name if suite else None,
        "title": suite.title if suite else _TITLES[operation],
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": _command(arguments.argv),
        "commit": commit,
        "source": _source(commit, operation, device),
        "device": {"device": device} | environment.as_dict(flashmoe.device_info(device)),
        "kernel": arguments.kernel,
        "load_average": os.getloadavg()[0],
        "sampling": dataclasses.asdict(sampling),
        "environment": environment.for_record(),
        "peers": peers.describe(chosen),
        "machine_before": environment.guarded(environment.nvidia_smi),
        "complete": False,
        "cells": [],
        "summary": {},
    }


def _measure(flashmoe: Any, arrays: Arrays, shape: AnyShape, *rest: Any) -> dict[str, Any]:
    """The cell of a shape; one that cannot be measured is void and does not affect the others."""
    try:
        if isinstance(shape, MoeBackwardShape):
            return measure_moe_backward(flashmoe, arrays, shape, *rest)
        if isinstance(shape, MoeShape):
            return measure_moe(flashmoe, arrays, shape, *rest)
        if isinstance(shape, BackwardShape):
            return measure_backward(flashmoe, arrays, shape, *rest)
        return measure(flashmoe, arrays, shape, *rest)
    except Exception as error:  # such as running out of memory
        reason = f"measuring failed: {type(error).__name__}: {error}"
        return describe(shape) | {"status": "void", "reason": reason}


def run(arguments: argparse.Namespace) -> int:
    if arguments.compare is not None:
        if arguments.suite is not None or _given(arguments):
            raise CommandError("--compare: it measures nothing; give neither a suite nor a shape")
        return run_compare(arguments)
    flashmoe = environment.package()
    suite = load_suite(arguments.suite) if arguments.suite else None
    device = _choose_device(flashmoe, arguments, suite)
    shapes = _shapes(arguments, suite, device)
    arrays = choose_arrays(device)
    if arrays.name == "cupy":
        raise CommandError(
            "--device: timing on a GPU needs torch with CUDA; CuPy alone is not enough"
        )
    if operation_of(shapes[0]) in (TRAINING, MOE_TRAINING):
        if arrays.name != "torch":
            raise CommandError("--training: forward and backward by autograd need torch")
        if arguments.kernel is not None:
            raise CommandError("--kernel: a family is of one operation, and autograd calls several")
    if arguments.sustained and device == "cpu":
        raise CommandError("--sustained: it is of a GPU, whose driver counts energy; got cpu")
    empty = [s for s in shapes if s.empty]
    if empty:
        raise CommandError(f"there is nothing to time in {empty[0]}: every extent is 1 or more")
    unknown = sorted({s.dtype for s in shapes} - set(arrays.dtypes))
    if unknown:
        raise CommandError(
            f"--dtype: got {', '.join(unknown)}, accepted for {arrays.name} arrays on {device} are "
            f"{', '.join(arrays.dtypes)}"
        )
    stream = arguments.json is not None and is_stream(arguments.json)
    if arguments.resume and (suite is None or arguments.json is None or stream):
        raise CommandError("--resume: it is of a suite's record; give --suite and --json FILE")
    if arguments.json is not None:
        check_writable(arguments.json)
    _set_threads(flashmoe, arrays, arguments.threads)
    shapes, skipped = _skip_emulated(shapes, native_dtypes(arrays.device, arrays.dtypes), arguments)
    wanted = _only(arguments, shapes)
    output = Output(silent=arguments.json == "-")
    title = suite.title if suite else _TITLES[operation_of(shapes[0])]
    output.heading(f"{title}, on {device} ({flashmoe.device_info(device).name})")
    if device == "cpu":
        output.line(f"On the CPU backend, {flashmoe.get_num_threads()} threads.")
    if skipped:
        output.line(
            f"{skipped['rows']} rows of {' and '.join(skipped['dtypes'])} are left out: "
            f"{skipped['reason']}. --dtype {skipped['dtypes'][0]} measures those of that type."
        )
    chosen = peers.choose_peers(arrays, arguments.peer, operation_of(shapes[0]))
    # A peer asked for by name is shown in every row, even if missing.
    shown = [p for p in chosen if arguments.peer or isinstance(p, peers.Peer)]
    names = [p.name for p in shown]
    sampling = Sampling(
        seconds=arguments.seconds,
        most=arguments.samples,
        seed=arguments.seed,
        sustained=arguments.sustained or (suite.sustained if suite else 0.0),
    )

    document = _document(flashmoe, arrays, suite, shapes, chosen, sampling, arguments)
    document |= {"skipped": skipped} if skipped else {}
    # Before anything is measured: it may refuse.
    kept = kept_rows(arguments.json, document, shapes, wanted) if arguments.resume else Kept({})
    if device == "cpu" and document["load_average"] > 0.5:
        output.line(
            f"The load average is {document['load_average']:.1f}: other programs are running, "
            "and the times are of a shared machine."
        )
    output.line("First the ceilings: a copy, and a matrix product of each element type.")
    document["ceilings"] = measure_ceilings(arrays, {s.dtype for s in shapes}, sampling)
    if not names:
        output.line("No peer is timed: none is installed here, or --peer leaves none.")
    if kept.rows:
        document["kept"] = kept.describe()
        output.line(f"{len(kept.rows)} of {len(shapes)} rows are kept, from {kept.since} on.")
    labels = [str(s) for s in shapes]
    table = BenchTable(
        output,
        device,
        names,
        document["ceilings"],
        labels,
        document["operation"],
        sustained=sampling.sustained > 0,
    )
    begin = time.monotonic()
    code = EXIT_OK
    cells = [kept.rows.get(shape) for shape in shapes]
    # Rows that --only leaves out and no earlier record has are not in this one.
    rows = [i for i, shape in enumerate(shapes) if shape in wanted or cells[i] is not None]
    done = 0
    try:
        with output.progress(len(rows)) as show:
            for done, i in enumerate(rows):
                shape, cell = shapes[i], cells[i]
                show(done, str(shape))
                if cell is None:
                    ceiling = document["ceilings"]["matmul_flops_per_s"][shape.dtype]
                    cell = cells[i] = _measure(
                        flashmoe, arrays, shape, shown, sampling, arguments.kernel, ceiling
                    )
                    document["cells"] = [c for c in cells if c is not None]
                    document["summary"] = summarise(document["cells"])
                    if arguments.json is not None and not stream:  # so that measurements survive
                        write_json(document, arguments.json)
                table.cell(str(shape), cell)
                if cell["status"] != "ok":
                    code = EXIT_FAILED
        document["complete"] = None not in cells
    except KeyboardInterrupt:
        output.line(f"interrupted after {done} of {len(rows)} shapes")
        code = EXIT_INTERRUPTED
    document["cells"] = [cell for cell in cells if cell is not None]
    document["summary"] = summarise(document["cells"])
    document["seconds"] = round(time.monotonic() - begin, 1)
    document["machine_after"] = environment.guarded(environment.nvidia_smi)
    print_summary(document, output)
    try:
        if arguments.fail_below is not None:
            document["gate"] = failures_below(arguments.fail_below, document["cells"])
            print_gate(document["gate"], output)
            code = code or (EXIT_FAILED if document["gate"]["failed"] else EXIT_OK)
    finally:
        if arguments.json is not None:
            write_json(document, arguments.json)
    return code
