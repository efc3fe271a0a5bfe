"""`flashmoe bench --compare A B`: which shapes moved beyond noise; and the gate of --fail-below.

Two runs differ in more than the kernel: clocks, cooling, the machine itself. So our speed is
relative to a peer that both records timed in the same version: the fastest such in A.

    ratio = (ours in A / peer in A) / (ours in B / peer in B)        above 1, B is faster

The peer's own change, A's time over B's, is shown as the machine's drift. Without such a peer the
ratio is A's time over B's, which is meaningful only on one machine.

Every ratio has a bootstrap interval over the samples of all its terms. The intervals hold for all
shapes at once with 95 % confidence (Bonferroni's), so that none of many shapes appears to have
moved by chance. If quartiles spread too far (stats.MOST_SPREAD) there is no verdict: such a row is
in no mean, and no gate judges it.
"""

from __future__ import annotations

import argparse
from typing import Any

from flashmoe_science.cli.bench_table import ratio_text
from flashmoe_science.cli.measure import OURS
from flashmoe_science.cli.output import (
    EXIT_FAILED,
    EXIT_OK,
    CommandError,
    Output,
    Table,
    write_json,
)
from flashmoe_science.cli.records import is_moe, ratio_of, read_record, withheld_words
from flashmoe_science.cli.stats import ratio_of_medians, verdicts
from flashmoe_science.cli.suites import ATTENTION, AnyShape, shape_of

_CONFIDENCE = 0.95
_RESAMPLES = 10_000  # the tails of an interval for dozens of shapes are thin
_PROVENANCE = ("date", "commit", "suite", "complete")


def best_peer(cell: dict[str, Any], wanted: list[str] | None = None) -> str | None:
    """The fastest peer with times in a cell, among those wanted; None without any."""
    timed = {
        name: float(entry["median_s"])
        for name, entry in cell.get("contenders", {}).items()
        if name != OURS and entry["status"] == "ok" and (not wanted or name in wanted)
    }
    return min(timed, key=lambda name: timed[name]) if timed else None


def failures_below(least: float, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """The gate of one run: shapes whose ratio over their fastest peer is below `least` with the
    whole interval. Raises CommandError if there is no peer to judge any by."""
    judged: list[dict[str, Any]] = []
    for cell in cells:
        peer = best_peer(cell)
        if peer is not None:
            against = ratio_of(cell, cell["contenders"][peer])
            judged.append({"shape": cell["shape"], "peer": peer, "ratio": against})
    if not judged and any(cell["status"] == "ok" for cell in cells):
        raise CommandError("--fail-below: no shape has a peer with times to judge it by")
    return _gate(least, judged)


def _gate(least: float, entries: list[dict[str, Any]]) -> dict[str, Any]:
    """A ratio whose whole interval is below fails, however noisy. Raises CommandError if nothing
    fails and all verdicts are withheld: nothing judged is nothing passed."""
    failed = [entry for entry in entries if entry["ratio"]["high"] < least]
    judged = [e for e in entries if e in failed or e["ratio"]["verdict"] != "withheld"]
    withheld = len(entries) - len(judged)
    if entries and not judged:
        raise CommandError(f"--fail-below: nothing can be judged, {withheld_words(withheld)}")
    gate = {"fail_below": least, "judged": len(judged), "withheld": withheld, "failed": failed}
    return gate


def print_gate(gate: dict[str, Any], output: Output) -> None:
    for entry in gate["failed"]:
        peer = f" beside {entry['peer']}" if entry["peer"] else ""
        text = f"{shape_of(entry['shape'])}: {ratio_text(entry['ratio'])}{peer}"
        output.line(f"below {gate['fail_below']:g}: {text}", style="bold red")
    output.line(
        f"{len(gate['failed'])} of {gate['judged']} shapes are below {gate['fail_below']:g} with "
        "their whole interval"
    )
    if gate["withheld"]:
        output.line(withheld_words(gate["withheld"]))


def _clock(entries: list[dict[str, Any]], moe: bool) -> str:
    """Which samples are compared: for a mixture of experts those in a CUDA graph, if all have
    them."""
    in_graphs = moe and all("graph_samples_s" in entry for entry in entries)
    return "graph_samples_s" if in_graphs else "samples_s"


def _yardstick(a: dict[str, Any], b: dict[str, Any], wanted: list[str] | None) -> str | None:
    """The fastest peer of A that B timed too, in the same version if that is known."""
    common = []
    for name, entry in a["contenders"].items():
        other = b["contenders"].get(name, {})
        versions = {e["version"] for e in (entry, other) if "version" in e}
        if other.get("status") == "ok" and len(versions) < 2 and (not wanted or name in wanted):
            common.append(name)
    return best_peer(a, common) if common else None


def _moved(
    a: dict[str, Any], b: dict[str, Any], wanted: list[str] | None, confidence: float
) -> dict[str, Any]:
    """How one shape, timed in both records, moved from A to B."""

    def ratio(numerators: list[Any], denominators: list[Any]) -> dict[str, Any]:
        return ratio_of_medians(numerators, denominators, confidence, _RESAMPLES)

    peer = _yardstick(a, b, wanted)
    names = [OURS] if peer is None else [OURS, peer]
    entries = [record["contenders"][name] for name in names for record in (a, b)]
    clock = _clock(entries, is_moe(a["shape"]))
    ours_a, ours_b, *of_peer = (of[clock] for of in entries)
    entry: dict[str, Any] = {"shape": a["shape"], "status": "ok", "time": ratio([ours_a], [ours_b])}
    entry |= {"peer": peer, "ratio": entry["time"]}
    if of_peer:
        peer_a, peer_b = of_peer
        entry["ratio"] = ratio([ours_a, peer_b], [peer_a, ours_b])
        entry["drift"] = ratio([peer_a], [peer_b])
    return entry


def compare_records(
    a: dict[str, Any], b: dict[str, Any], wanted: list[str] | None = None
) -> dict[str, Any]:
    """What moved between two records, as a document; raises CommandError if they share nothing.

    `wanted` names the peers that may be the yardstick; None is all.
    """

    def shape_in(record: dict[str, Any], cell: dict[str, Any]) -> AnyShape:
        return shape_of(cell["shape"], record.get("operation", ATTENTION))

    shapes_b = {shape_in(b, cell): cell for cell in b["cells"]}
    pairs = [(cell, shapes_b.pop(shape_in(a, cell), None)) for cell in a["cells"]]
    both = sum(c["status"] == "ok" and d is not None and d["status"] == "ok" for c, d in pairs)
    if both == 0:
        raise CommandError("--compare: no shape has times in both records")
    cells = []
    for cell, other in pairs:
        status = _status(cell, other)
        if other is not None and status == "ok":
            cells.append(_moved(cell, other, wanted, 1 - (1 - _CONFIDENCE) / both))
        else:
            cells.append({"shape": cell["shape"], "status": status})
    cells += [{"shape": cell["shape"], "status": "only in B"} for cell in shapes_b.values()]
    moved = [cell for cell in cells if cell["status"] == "ok"]
    if wanted and all(cell["peer"] is None for cell in moved):
        raise CommandError(f"--peer: no shape has times of {' or '.join(wanted)} in both records")
    same_machine = a["device"]["name"] == b["device"]["name"]
    if not same_machine and any(cell["peer"] is None for cell in moved):
        raise CommandError(
            f"--compare: {a['device']['name']} and {b['device']['name']} can be compared beside a "
            "peer only, and some shapes have none in common"
        )
    return {
        "operation": "compare",
        "records": [
            {key: record.get(key) for key in _PROVENANCE} | {"device": record["device"]["name"]}
            for record in (a, b)
        ],
        "confidence": _CONFIDENCE,
        "cells": cells,
        "summary": verdicts([cell["ratio"] for cell in moved]),
    }


def _status(cell: dict[str, Any], other: dict[str, Any] | None) -> str:
    if other is None:
        return "only in A"
    void = [name for name, c in (("A", cell), ("B", other)) if c["status"] != "ok"]
    return f"void in {' and '.join(void)}" if void else "ok"


def _print(document: dict[str, Any], files: list[str], output: Output) -> None:
    for name, file, record in zip("AB", files, document["records"], strict=True):
        commit = str(record["commit"])[:12] or "unknown"
        output.line(f"{name}: {file}, {record['device']}, {record['date']}, commit {commit}")
    output.line(
        "Ours in B over ours in A, each beside the same peer: above 1, B is faster; intervals of "
        "95 %\nover all shapes together. Drift is the peer's own, A's time over B's."
    )
    headers = ["shape", "B over A", "verdict", "beside", "drift", "time alone"]
    table = Table(output, headers, [36, 16, 8, 15, 16, 16])
    for cell in document["cells"]:
        label = str(shape_of(cell["shape"]))
        if cell["status"] != "ok":
            output.line(f"{label:<36}  {cell['status']}")
            continue
        verdict = cell["ratio"]["verdict"]
        style = {"faster": "green", "slower": "red"}.get(verdict, "")
        numbers = [_plain(cell.get(key)) for key in ("ratio", "drift", "time")]
        beside = cell["peer"] or "-"
        verdict = {"tie": "same", "withheld": "-"}.get(verdict, verdict)
        table.row([label, numbers[0], verdict, beside, *numbers[1:]], style=style)
    s = document["summary"]
    if s["rows"]:
        output.line(
            f"geometric mean {s['geometric_mean']:.3f}; faster in {s['faster']}, slower in "
            f"{s['slower']}, the same in {s['tie']} of {s['rows']}"
        )
    if s["withheld"]:
        output.line(withheld_words(s["withheld"]))


def _plain(ratio: dict[str, Any] | None) -> str:
    return "-" if ratio is None else ratio_text(ratio).removesuffix(" tie")


def run_compare(arguments: argparse.Namespace) -> int:
    """`flashmoe bench --compare A B [--peer NAME] [--fail-below RATIO] [--json]`."""
    a, b = (read_record(file) for file in arguments.compare)
    document = compare_records(a, b, arguments.peer)
    output = Output(silent=arguments.json == "-")
    _print(document, arguments.compare, output)
    code = EXIT_OK
    if arguments.fail_below is not None:
        judged = [cell for cell in document["cells"] if cell["status"] == "ok"]
        document["gate"] = _gate(arguments.fail_below, judged)
        print_gate(document["gate"], output)
        # A row measured in A but void in B is worse than slower.
        lost = [c for c in document["cells"] if c["status"] == "void in B"]
        code = EXIT_FAILED if lost or document["gate"]["failed"] else EXIT_OK
    if arguments.json is not None:
        write_json(document, arguments.json)
    return code
