"""The output of `flashmoe bench` for people: a few lines per shape as it is measured, then the
summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashmoe_science.cli.measure import OURS
from flashmoe_science.cli.output import Output, Table
from flashmoe_science.cli.records import summary_words
from flashmoe_science.cli.stats import MOST_SPREAD, summary
from flashmoe_science.cli.suites import (
    ATTENTION,
    BACKWARD,
    MOE,
    MOE_BACKWARD,
    MOE_TRAINING,
    TRAINING,
)

_SHAPE_WIDTH = 36  # at least
_PEER_WIDTH = 20
_RATIO_LEGEND = f"""\
A peer's column is its time over ours, with the 95 % interval: above 1, ours is faster. noisy:
the quartiles of one of the two spread over more than {MOST_SPREAD * 100:g} % of its median."""
_ROOF_LEGEND = """\
of roof: the least time that its products and its traffic take at the speed of the matrix product
and the copy measured in this run, over the time it took."""
_CLOCK_LEGEND = """\
events: a call that finds the L2 cache flushed; graph: calls in a CUDA graph, without launches and
with a warm cache; eager: one call that finds the GPU idle, from event to event; host: how long one
call keeps the host, ours and each peer's."""


_SUSTAINED_LEGEND = """\
busy: calls without a pause; behind the speed joules per 10^12 FLOPs, in a peer's column its
time and its joules over ours."""
_MOE_CLOCK_LEGEND = """\
events: a call that finds the L2 cache flushed; graph: calls in a CUDA graph, without launches, each
with other tokens' experts; eager: one call that finds the GPU idle, from event to event; host: how
long one call keeps the host, ours and each peer's."""
_DENSE_LEGEND = """\
of dense: the time of plain matrix products of the same FLOPs, without routing, over ours."""
_WEIGHTS_LEGEND = """\
weights: those of experts that have tokens, over the time (in a graph where there is one)."""
_WORK_LEGENDS = {
    BACKWARD: """\
Speeds count five products: 2.5 times the forward's FLOPs, where value heads are as wide as key
heads. Each peer's backward is of its own saved forward.""",
    TRAINING: """\
Speeds count the forward's two products and the backward's five. A call is a forward and a backward
by torch's autograd.""",
    MOE_BACKWARD: """\
Speeds count two products for each of the forward's, 12 T K H I. Gradients are of tokens, logits and
weights; each peer's backward is of its own saved forward.""",
    MOE_TRAINING: """\
Speeds count the forward's products and two for each in the backward, 18 T K H I. A call is a
forward, from the router's logits on, and a backward by torch's autograd.""",
}


def ratio_text(against: dict[str, Any]) -> str:
    """A ratio with its interval, and whether it is a tie; with a withheld verdict only the
    ratio."""
    if against["verdict"] == "withheld":
        return f"{against['ratio']:.2f} noisy"
    tie = " tie" if against["verdict"] == "tie" else ""
    return f"{against['ratio']:.2f} ({against['low']:.2f}-{against['high']:.2f}){tie}"


def sustained_ratios(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """A peer's time over ours in calls without pauses, and its energy over ours."""
    text = f"{ours['tflops'] / theirs['tflops']:.2f}"
    if ours["joules_per_tflop"] is None or theirs["joules_per_tflop"] is None:
        return text
    return f"{text}, {theirs['joules_per_tflop'] / ours['joules_per_tflop']:.2f} J"


def _spread(times: dict[str, Any]) -> str:
    return f"{(times['q3_s'] - times['q1_s']) / times['median_s'] * 100:.1f} %"


class BenchTable:
    """Rows of shapes. On a GPU one per way to take time: events, graph, host."""

    def __init__(
        self,
        output: Output,
        device: str,
        peers: list[str],
        ceilings: dict[str, Any],
        labels: Sequence[str] = (),
        operation: str = ATTENTION,
        *,
        sustained: bool = False,
    ) -> None:
        """`labels` are those of the coming rows, all of one operation."""
        self._moe = operation in (MOE, MOE_BACKWARD, MOE_TRAINING)
        self._weights = operation == MOE
        self._width = max([_SHAPE_WIDTH, *map(len, labels)])
        self._ceilings = ceilings
        self._output = output
        self._peers = peers
        output.line(_RATIO_LEGEND)
        output.line(_ROOF_LEGEND)
        if device != "cpu":
            output.line(_MOE_CLOCK_LEGEND if self._weights else _CLOCK_LEGEND)
        if self._moe:
            output.line(_DENSE_LEGEND)
        if self._weights:
            output.line(_WEIGHTS_LEGEND)
        if operation in _WORK_LEGENDS:
            output.line(_WORK_LEGENDS[operation])
        if sustained:
            output.line(_SUSTAINED_LEGEND)
        self._clock = "wall" if device == "cpu" else "events"
        unit, self._per_tera = ("GFLOP/s", 1e3) if device == "cpu" else ("TFLOP/s", 1.0)
        headers = ["shape", "clock", "median us", "quartiles", unit, "of roof"]
        widths = [self._width, 6, 10, 9, 8, 7]
        if self._moe:
            headers.append("of dense")
            widths.append(8)
        if self._weights:
            headers.append("weights")
            widths.append(9)
        widths += [_PEER_WIDTH for _ in peers]
        self._table = Table(output, [*headers, *peers], widths)

    def cell(self, label: str, cell: dict[str, Any]) -> None:
        """One shape; a void one has its reason and no time."""
        if cell["status"] != "ok":
            self._output.line(f"{label:<{self._width}}  VOID: {cell['reason']}", style="bold red")
            return
        entries = cell["contenders"]
        ours = entries[OURS]
        fraction = self._of_roof(cell, ours["median_s"])
        self._row(
            label,
            self._clock,
            ours["median_s"],
            _spread(ours),
            f"{ours['tflops'] * self._per_tera:.4g}",
            "-" if fraction is None else f"{fraction * 100:.0f} %",
            {n: self._against(e) for n, e in entries.items()},
            self._of_moe(ours),
        )
        if ours.get("graph_s") is not None:
            tflops = ours["tflops"] * ours["median_s"] / ours["graph_s"]
            ratios = {n: ratio_text(e["graph_against"]) for n, e in entries.items()
                      if "graph_against" in e}  # fmt: skip
            spread = _spread(summary(ours["graph_samples_s"]))
            speed = f"{tflops * self._per_tera:.4g}"
            self._row("", "graph", ours["graph_s"], spread, speed, "", ratios)
        for clock in ("eager", "host"):
            key = f"{clock}_s"
            if key in ours:
                theirs = {n: f"{e[key] * 1e6:.1f} us" for n, e in entries.items() if key in e}
                self._row("", clock, ours[key], "", "", "", theirs)
        if "sustained" in ours:
            self._sustained(ours["sustained"], cell["flops"], entries)

    def _sustained(
        self, ours: dict[str, Any], flops: float, entries: dict[str, dict[str, Any]]
    ) -> None:
        theirs = {
            n: sustained_ratios(ours, e["sustained"])
            for n, e in entries.items()
            if "sustained" in e
        }
        joules = ours["joules_per_tflop"]
        self._row(
            "",
            "busy",
            flops * 1e-12 / ours["tflops"],
            "",
            f"{ours['tflops']:.4g}",
            "" if joules is None else f"{joules:.2f} J",
            theirs,
        )

    def _row(
        self,
        label: str,
        clock: str,
        seconds: float,
        spread: str,
        speed: str,
        fraction: str,
        peers: dict[str, str],
        of_moe: tuple[str, str] = ("", ""),
    ) -> None:
        ours = [label, clock, f"{seconds * 1e6:.1f}", spread, speed, fraction]
        own = of_moe[: self._moe + self._weights]
        self._table.row([*ours, *own, *(peers.get(name, "-") for name in self._peers)])

    def _of_moe(self, ours: dict[str, Any]) -> tuple[str, str]:
        """The fraction of the dense bound and, for a forward, of reading the weights from
        memory."""
        share, rate = ours.get("bound_fraction"), ours.get("weight_bytes_per_s", 0.0)
        unit = "TB/s" if self._per_tera == 1 else "GB/s"
        return (
            "-" if share is None else f"{share * 100:.0f} %",
            f"{rate * 1e-12 * self._per_tera:.2f} {unit}",
        )

    def _of_roof(self, cell: dict[str, Any], seconds: float) -> float | None:
        """The least time that the measured ceilings allow, over `seconds`."""
        flops = self._ceilings["matmul_flops_per_s"].get(cell["shape"]["dtype"])
        traffic = self._ceilings["copy_bytes_per_s"]
        if not flops or not traffic:
            return None
        return float(max(cell["flops"] / flops, cell["bytes"] / traffic) / seconds)

    @staticmethod
    def _against(entry: dict[str, Any]) -> str:
        return ratio_text(entry["against"]) if "against" in entry else str(entry["status"])


def print_summary(document: dict[str, Any], output: Output) -> None:
    """Means over all rows, and why a peer is not in them."""
    for name, s in document["summary"].items():
        output.line(f"{name}: {summary_words(s)}")
    reasons: dict[str, set[str]] = {}
    for cell in document["cells"]:
        for name, entry in cell.get("contenders", {}).items():
            if entry["status"] != "ok":
                reasons.setdefault(f"{name} {entry['status']}", set()).add(entry["reason"])
    for name, peer in document["peers"].items():
        if peer["status"] == "missing":
            reasons.setdefault(f"{name} missing", set()).add(peer["reason"])
    for name, found in reasons.items():
        output.line(f"{name}: {sorted(found)[0]}")
