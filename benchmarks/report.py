"""Makes the tables and pictures of README.md and docs/ from the recorded results, or checks them.

A table or picture stands between two marker lines that name its kind and its file, or a pattern of
files, or several of either with commas between them, from the root of the checkout:

    <!-- results: attention-grid benchmarks/results/attention_forward_*.json -->
    <!-- results: end -->

    python benchmarks/report.py            # rewrite the documents and draw docs/pictures/ anew
    python benchmarks/report.py --check    # change nothing; exit 1 where something does not match

What is between the lines holds the commands that measure it again. Where kernels have changed since
the measurement it says "measured at" with the commit: by the hash of the kernels' sources that the
record carries, and for older records by the history. A marker that no file matches has nothing
between its lines: no numbers without a record.

The package must be installed, and for drawing its `bench` extra.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import html
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flashmoe_science.cli import environment
from flashmoe_science.cli.measure import OURS
from flashmoe_science.cli.output import CommandError
from flashmoe_science.cli.plotting import charts
from flashmoe_science.cli.plotting import record as rec
from flashmoe_science.cli.plotting.record import Record
from flashmoe_science.cli.plotting.theme import THEMES, Theme
from flashmoe_science.cli.records import withheld_words
from flashmoe_science.cli.suites import ATTENTION, MOE

ROOT = Path(__file__).resolve().parents[1]
_PICTURES = Path("docs") / "pictures"
_BLOCK = re.compile(
    r"^<!-- results: (?P<kind>[\w-]+) (?P<file>\S+) -->\n(?P<body>.*?)^<!-- results: end -->$",
    re.MULTILINE | re.DOTALL,
)
_DIGEST = re.compile(rb"\bsha256:([0-9a-f]{64})\b")
_NOT_IN_GRID = ("torch-math", "torch-efficient")  # far slower: their means say enough
_HOST_COST = "host_cost"  # the operation of a record of benchmarks/host_cost.py
# What a call runs through on the host before its kernels do.
_HOST_CODE = (
    "include",
    "core",
    "bindings",
    "cuda/launch.cpp",
    "cuda/launch.h",
    ":(glob)python/flashmoe_science/*.py",
    "python/flashmoe_science/torch",
)


# ---- is it still so? -------------------------------------------------------------------------


def _differs_from_commit(commit: str, names: list[str], root: Path) -> bool | None:
    """Whether files differ from what they were at a commit, None where no one can tell."""

    def git(*words: str) -> int:
        run = subprocess.run(["git", *words], cwd=root, capture_output=True, check=False)
        return run.returncode

    try:
        # Outside a checkout `git diff` compares files, so the commit is asked for first.
        if git("cat-file", "-e", f"{commit}^{{commit}}") != 0:
            return None
        return {0: False, 1: True}.get(git("diff", "--quiet", commit, "--", *names))
    except OSError:
        return None


def outdated(document: dict[str, Any], root: Path) -> bool | None:
    """Whether the kernels are others than those measured, None where no one can tell.

    Kernels are environment.kernel_sources; of what a call costs the host they are the host's code.
    Records from before there was a hash of them have one of all sources, which tells only that
    nothing has changed; the history tells the rest.
    """
    operation = document.get("operation", MOE if "layers" in document else ATTENTION)
    kind = "cpu" if "device" not in document or rec.on_cpu(document) else "cuda"
    source = document.get("source", {})
    if _is_hash(source.get("kernels")):
        return bool(source["kernels"] != environment.kernels_hash(operation, kind, root))
    if _is_hash(source.get("hash")) and source["hash"] == environment.source_hash(root):
        return False
    env = document["environment"]
    commit = document.get("commit", env.get("commit"))
    if not isinstance(commit, str) or not commit:
        return None
    if "+" in commit or env.get("cpu_sources_modified"):  # measured with changes of no commit
        return True
    if operation == _HOST_COST:
        return _differs_from_commit(commit, list(_HOST_CODE), root)
    return _differs_from_commit(commit, environment.kernel_sources(operation, kind, root), root)


def _is_hash(value: Any) -> bool:
    """Not "", as outside a checkout, and not a probe that failed."""
    return isinstance(value, str) and value != ""


# ---- tables ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Source:
    """One recorded file as a block shows it."""

    path: Path
    document: dict[str, Any]
    link: str  # to the file, from the document that the block is in
    outdated: bool


def _table(headers: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, the first column to the left and numbers to the right."""
    rule = ["---", *("---:" for _ in headers[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in [headers, rule, *rows])


def _caption(source: Source) -> str:
    return (
        f"{source.document['title']}. {rec.provenance(source.document, source.outdated)}; every "
        f"sample is in [{source.path.name}]({source.link}). A ratio is the peer's median time over "
        "ours: above 1, ours is faster; a tie is within its 95 % interval."
    )


def _means(document: dict[str, Any]) -> str:
    means = []
    for peer, s in document["summary"].items():
        withheld = f"; {withheld_words(s['withheld'])}" if s.get("withheld") else ""
        if s["rows"]:
            means.append(
                f"{s['geometric_mean']:.2f} over {peer} (from {s['least']:.2f} to {s['most']:.2f}; "
                f"faster in {s['faster']}, tied in {s['tie']}, slower in {s['slower']} of "
                f"{s['rows']}{withheld})"
            )
        else:
            means.append(f"none over {peer}{withheld}")
    return f"Geometric mean of the ratios: {'; '.join(means)}." if means else ""


def _commands(*commands: str) -> str:
    lines = "\n".join(filter(None, commands))
    words = "all or one row" if "\n" in lines else "all of it"
    return f"To measure it again, {words}:\n\n```sh\n{lines}\n```"


def _repeat(document: dict[str, Any]) -> str:
    """The commands that measure all of a record, and the row in the middle of its list."""
    cells = document["cells"]
    return _commands(rec.command(document), rec.row_command(document, cells[len(cells) // 2]))


def _ratio_cell(cell: dict[str, Any], peer: str) -> str:
    against = rec.against(cell, peer)
    if against is None:
        return "-"
    note = {"tie": " (tie)", "withheld": " (noisy)"}.get(against["verdict"], "")
    return f"{against['ratio']:.2f}{note}"


def _of_ours(cell: dict[str, Any], words: Callable[[dict[str, Any]], str]) -> str:
    ours = rec.contenders(cell).get(OURS)
    return "void" if ours is None else words(ours)


def _share(entry: dict[str, Any]) -> str:
    share = entry.get("ceiling_fraction")
    return "-" if share is None else f"{share:.0%}"


def _speed_of(cell: dict[str, Any], other: dict[str, Any]) -> str:
    """Our speed in one cell as a share of that in another, from medians."""
    ours, others = (rec.contenders(c).get(OURS) for c in (cell, other))
    return f"{ours['tflops'] / others['tflops']:.1%}" if ours and others else "-"


def render_grid(source: Source) -> str:
    """Table of a suite that forms a grid: head dimension and mask down, sequence length across."""
    document = source.document
    cells = document["cells"]
    peers = [p for p in rec.peer_names(cells) if p not in _NOT_IN_GRID]
    unit, factor = rec.unit(document)
    lengths = sorted({rec.place(c["shape"]) for c in cells})
    groups = dict.fromkeys(rec.panel_key(c["shape"]) for c in cells)
    shares = any("ceiling_fraction" in e for c in cells for e in rec.contenders(c).values())

    def line(group: rec.PanelKey) -> list[dict[str, Any]]:
        of = {rec.place(c["shape"]): c for c in cells if rec.panel_key(c["shape"]) == group}
        return [of.get(n, {"status": "void"}) for n in lengths]

    rows = []
    for group in groups:
        across = line(group)
        dtype, mask, dim, dim_v = group
        dims = f"D={dim}" if dim == dim_v else f"D={dim}/{dim_v}"
        speeds = [_of_ours(c, lambda e: rec.number(e["tflops"] * factor)) for c in across]
        rows.append([f"{dtype} {dims} {mask}", unit, *speeds])
        if shares:
            rows.append(["", "of a matrix product", *(_of_ours(c, _share) for c in across)])
        rows += [["", f"over {p}", *(_ratio_cell(c, p) for c in across)] for p in peers]
        in_bf16 = ("bf16", mask, dim, dim_v)
        if dtype == "fp16" and in_bf16 in groups:
            rows.append(["", "of bf16", *map(_speed_of, across, line(in_bf16))])
    table = _table(["", "", *(f"S={n}" for n in lengths)], rows)
    parts = [_caption(source), table, _means(document), _repeat(document)]
    return "\n\n".join(filter(None, parts))


def _mean_cell(of_peer: dict[str, Any] | None, cells: int) -> str:
    """The mean over one peer, and in how many of a record's rows where these are not all."""
    if of_peer is None or not of_peer["rows"]:
        return "-"
    slower = f" ({of_peer['slower']} slower)" if of_peer["slower"] else ""
    fewer = f" in {of_peer['rows']}" if of_peer["rows"] < cells else ""
    return f"{of_peer['geometric_mean']:.2f}{fewer}{slower}"


def render_summary(sources: list[Source]) -> str:
    """Table of several suites: one row per record, with the geometric mean over each peer."""
    summaries = [source.document["summary"] for source in sources]
    peers = [p for p in dict.fromkeys(p for s in summaries for p in s) if p not in _NOT_IN_GRID]
    rows = [
        [
            f"[{source.document['title']}]({source.link})",
            str(len(source.document["cells"])),
            *(_mean_cell(summary.get(peer), len(source.document["cells"])) for peer in peers),
        ]
        for source, summary in zip(sources, summaries, strict=True)
    ]
    measured = dict.fromkeys(rec.provenance(s.document, s.outdated) for s in sources)
    caption = (
        "The peer's median time over ours, geometric mean of all shapes: above 1, ours is faster. "
        "*in 5*: of 5 of them, as the peer does not serve the others or their times have no "
        "verdict. In brackets: the shapes in which ours is slower. A dash: the peer does not "
        f"serve them, or was not in the run. {'; '.join(measured)}."
    )
    return f"{caption}\n\n{_table(['', 'shapes', *(f'over {p}' for p in peers)], rows)}"


def render_list(source: Source) -> str:
    """Table of any suite: one row per shape."""
    document = source.document
    cells = document["cells"]
    peers = rec.peer_names(cells)
    unit, factor = rec.unit(document)
    timed = [rec.contenders(c).get(OURS, {}) for c in cells]
    graphs = any("graph_s" in ours for ours in timed)
    rows = []
    for cell in cells:
        shape = rec.extents(cell["shape"])
        numbers = [_of_ours(cell, lambda e: f"{e['median_s'] * 1e6:.1f}")]
        if graphs:
            numbers.append(
                _of_ours(cell, lambda e: f"{e['graph_s'] * 1e6:.1f}" if "graph_s" in e else "-")
            )
        numbers.append(_of_ours(cell, lambda e: rec.number(e["tflops"] * factor)))
        rows.append([*shape.values(), *numbers, *(_ratio_cell(cell, p) for p in peers)])
    names = rec.extents(cells[0]["shape"]) if cells else {}
    times = ["us", "us in a graph"] if graphs else ["us"]
    table = _table([*names, *times, unit, *(f"over {p}" for p in peers)], rows)
    parts = [_caption(source), table, _means(document), _repeat(document)]
    return "\n\n".join(filter(None, parts))


def render_sustained(source: Source) -> str:
    """Table of calls without pauses: one row per shape, with speed, power and energy of every
    contender."""
    document = source.document
    cells = document["cells"]
    names = rec.timed_names(cells)
    shapes = [rec.extents(c["shape"]) for c in cells]
    rows = []
    for cell, shape in zip(cells, shapes, strict=True):
        found = {n: e.get("sustained") for n, e in rec.contenders(cell).items()}
        numbers = [words for name in names for words in _sustained_words(found.get(name))]
        rows.append([*shape.values(), *numbers])
    columns = [f"{name} {what}" for name in names for what in ("TFLOP/s", "W", "J/TFLOP")]
    seconds = document["sampling"]["sustained"]
    words = (
        f"{document['title']}. {rec.provenance(document, source.outdated)}; from "
        f"[{source.path.name}]({source.link}). Everyone is called for {seconds:g} s on end, twice, "
        "in one order and in the reverse of it; energy is that of the whole GPU, by the driver's "
        "counter."
    )
    table = _table([*(shapes[0] if shapes else {}), *columns], rows)
    return "\n\n".join([words, table, _repeat(document)])


def _sustained_words(entry: dict[str, Any] | None) -> list[str]:
    if entry is None:
        return ["-"] * 3
    watts, joules = entry["watts"], entry["joules_per_tflop"]
    return [
        rec.number(entry["tflops"]),
        "-" if watts is None else f"{watts:.0f}",
        "-" if joules is None else f"{joules:.2f}",
    ]


def render_memory(source: Source) -> str:
    """Table of a suite that forms a grid: memory that a call adds at its peak, head dimension and
    mask down, contenders across."""
    document = source.document
    cells = document["cells"]
    names = [n for n in rec.timed_names(cells) if n != "torch-math"]  # all scores at once
    groups: dict[Any, list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault(rec.panel_key(cell["shape"]), []).append(rec.contenders(cell))
    dtypes = {c["shape"]["dtype"] for c in cells}
    rows = [
        [rec.panel_name(key, dtypes), *(_peaks([c.get(name, {}) for c in of]) for name in names)]
        for key, of in groups.items()
    ]
    words = (
        "Memory in MiB that one call adds at its peak: results, workspace and temporaries, from "
        "the least to the most of all sequence lengths. "
        f"{rec.provenance(document, source.outdated)}; from [{source.path.name}]({source.link})."
    )
    return f"{words}\n\n{_table(['', *names], rows)}"


def _peaks(entries: list[dict[str, Any]]) -> str:
    found = sorted(e["peak_bytes"] for e in entries if "peak_bytes" in e)
    if not found:
        return "-"
    least, most = (f"{peak / 2**20:.0f}" for peak in (found[0], found[-1]))
    return least if least == most else f"{least} to {most}"


def _varying(cells: list[dict[str, Any]]) -> tuple[str, list[dict[str, str]]]:
    """What all rows share, in words, and the fields of each that differ between rows."""
    fields = [rec.extents(c["shape"]) for c in cells]
    shared = {k: v for k, v in fields[0].items() if all(f.get(k) == v for f in fields)}
    return rec.extents_text(shared), [
        {k: v for k, v in f.items() if k not in shared} or f for f in fields
    ]


def _fraction(entry: dict[str, Any]) -> str:
    share = entry.get("bound_fraction")
    return "-" if share is None else f"{share:.0%}"


def _mebibytes(entry: dict[str, Any], name: str = "peak_bytes") -> str:
    found = entry.get(name)
    return "-" if found is None else f"{found / 2**20:.0f}"


_GRADIENTS_OF_EXPERTS = ("moe_backward", "moe_training")


def _saved_bytes(shape: dict[str, Any]) -> int:
    """What a forward saves for its gradients of what the activation is applied to."""
    numbers = 2 * shape["inner"] * shape["tokens"] * shape["top_k"]
    return int(numbers * (4 if shape["dtype"] == "fp32" else 2))


def render_moe(source: Source) -> str:
    """Table of mixtures of experts: one row per shape, with what they share before the table."""
    document = source.document
    cells = document["cells"]
    if not cells:
        return _caption(source)
    peers = rec.peer_names(cells)
    unit, factor = rec.unit(document)
    rate = "weights GB/s" if rec.on_cpu(document) else "weights TB/s"
    shared, own = _varying(cells)
    # A backward writes gradients beside reading weights, and has no such rate.
    rates = any("weight_bytes_per_s" in rec.contenders(c).get(OURS, {}) for c in cells)
    measured = [
        p for p in peers if any("peak_bytes" in rec.contenders(c).get(p, {}) for c in cells)
    ]
    planned = any("workspace_bytes" in (c.get("plan") or {}) for c in cells)
    saves = document["operation"] in _GRADIENTS_OF_EXPERTS
    rows = []
    for cell, fields in zip(cells, own, strict=True):

        def of_ours(words: Callable[[dict[str, Any]], str], of: dict[str, Any] = cell) -> str:
            return _of_ours(of, lambda entry: words(entry | rec.times(of, entry)))

        numbers = [
            of_ours(lambda e: f"{e['median_s'] * 1e6:.1f}"),
            of_ours(lambda e: rec.number(e["tflops"] * factor)),
            of_ours(_fraction),
            of_ours(_mebibytes),
        ]
        if rates:
            of_weights = of_ours(lambda e: f"{e['weight_bytes_per_s'] * 1e-12 * factor:.2f}")
            numbers.insert(2, of_weights)
        numbers += [_mebibytes(rec.contenders(cell).get(peer, {})) for peer in measured]
        if planned:
            numbers.append(_mebibytes(cell.get("plan") or {}, "workspace_bytes"))
        if saves:
            numbers.append(_mebibytes({"saved": _saved_bytes(cell["shape"])}, "saved"))
        rows.append([*fields.values(), *numbers, *(_ratio_cell(cell, p) for p in peers)])
    of_rates = [rate] if rates else []
    of_memory = ["MiB", *(f"{p} MiB" for p in measured)]
    of_memory += ["workspace"] * planned + ["saved"] * saves
    headers = [
        *own[0],
        "us",
        unit,
        *of_rates,
        "of dense",
        *of_memory,
        *(f"over {p}" for p in peers),
    ]
    words = (
        f"All rows: {shared}. Times are of calls in a CUDA graph where they are under a "
        "millisecond, else between events. *of dense*: the time of plain matrix products of the "
        "same FLOPs, without routing, over ours, both between events. *MiB*: memory that a call "
        "adds at its peak."
    )
    if rec.on_cpu(document):
        words = f"All rows: {shared}."
    if planned:
        words += " *workspace*: of that ours, in MiB."
    if saves:
        words += " *saved*: what the activation is applied to, which the forward keeps, in MiB."
    table = _table(headers, rows)
    parts = [_caption(source), words, table, _means(document), _repeat(document)]
    return "\n\n".join(filter(None, parts))


def _cpu_table(
    cells: list[dict[str, Any]], row: Callable[[dict[str, Any]], str], column: str, symbol: str
) -> str:
    """Speeds and, in brackets, ratios: one row for what `row` calls alike."""
    across = sorted({c[column] for c in cells})
    groups: dict[str, dict[int, dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault(row(cell), {})[cell[column]] = cell
    rows = []
    for name, of in groups.items():
        numbers = [
            f"{of[n]['ours_gflops']:.0f} ({of[n]['ratio']:.2f})" if n in of else "-" for n in across
        ]
        rows.append([name, *numbers])
    return _table(["", *(f"{symbol}={n}" for n in across)], rows)


def _cpu_provenance(source: Source) -> str:
    env = source.document["environment"]
    at = f"commit {rec.commit(env)}"
    if source.outdated:
        at = f"measured at {rec.commit(env)} (the kernels have changed since)"
    return (
        f"{env['cpu']} ({env['isa']}), {env['time'][:10]}, {at}, torch {env['torch']}; from "
        f"[{source.path.name}]({source.link})."
    )


def _cpu_threads(threads: str, summary: dict[str, Any]) -> str:
    number = "One thread" if threads == "1" else f"{threads} threads"
    return (
        f"{number}; geometric mean of the ratios {summary['geometric_mean']:.2f}, from "
        f"{summary['lowest']:.2f} to {summary['highest']:.2f}:"
    )


def render_cpu(source: Source) -> str:
    """Table of a record of benchmarks/cpu_attention.py: GFLOP/s, and torch's time over ours."""
    document = source.document
    backward = document["what"].startswith("attention backward")
    parts = [
        f"{'Attention backward' if backward else 'Attention forward'} on the CPU, batch "
        f"{document['batch']}, {document['heads']} heads: "
        "GFLOP/s, and in brackets torch's time over ours (above 1, ours is faster). "
        f"{_cpu_provenance(source)}"
    ]

    def row(cell: dict[str, Any]) -> str:
        return f"{cell['dtype']} D={cell['dim']} {'causal' if cell['causal'] else 'full'}"

    for threads, summary in document["summary_by_threads"].items():
        cells = [c for c in document["cells"] if c["threads"] == int(threads)]
        parts += [_cpu_threads(threads, summary), _cpu_table(cells, row, "seq", "S")]
    one = document["cells"][len(document["cells"]) // 2]
    script = f"python benchmarks/cpu_attention.py{' --backward' if backward else ''} --threads"
    parts.append(
        _commands(
            f"{script} {' '.join(document['summary_by_threads'])}",
            f"{script} {one['threads']} --dtypes {one['dtype']} --seq {one['seq']}",
        )
    )
    return "\n\n".join(parts)


def render_cpu_padded(source: Source) -> str:
    """Table of a record of benchmarks/cpu_attention.py --padded."""
    document = source.document
    parts = [
        f"Padded batches on the CPU, {document['heads']} heads, lengths uniform from S/4 to S: "
        "GFLOP/s of what is not padding, and in brackets the time of torch's "
        "scaled_dot_product_attention with a boolean mask over ours. *right*: an encoder's batch; "
        "*left*: prompts, causal; "
        "*jagged*: the time of torch's on jagged tensors over ours, where it was measured. "
        f"{_cpu_provenance(source)}"
    ]
    across = sorted({(cell["batch"], cell["seq"]) for cell in document["cells"]})
    headers = ["", *(f"B={batch} S={seq}" for batch, seq in across)]
    for threads, summary in document["summary_by_threads"].items():
        cells = [c for c in document["cells"] if c["threads"] == int(threads)]
        rows: dict[str, dict[tuple[int, int], str]] = {}
        for cell in cells:
            shown = f"{cell['ours_gflops']:.0f} ({cell['ratio']:.2f})"
            if "nested_ms" in cell:
                shown += f", jagged {cell['nested_ms'] / cell['ours_ms']:.0f}"
            name = f"{cell['dtype']} D={cell['dim']} {cell['side']}"
            rows.setdefault(name, {})[cell["batch"], cell["seq"]] = shown
        table = _table(headers, [[n, *(of.get(p, "-") for p in across)] for n, of in rows.items()])
        parts += [_cpu_threads(threads, summary), table]
    one = document["cells"][0]
    script = "python benchmarks/cpu_attention.py --padded --threads"
    parts.append(
        _commands(
            f"{script} {' '.join(document['summary_by_threads'])} --dtypes {one['dtype']}",
            f"{script} {one['threads']} --dtypes {one['dtype']} --batch {one['batch']} "
            f"--seq {one['seq']} --dims {one['dim']}",
        )
    )
    return "\n\n".join(parts)


def render_cpu_moe(source: Source) -> str:
    """Table of a record of benchmarks/cpu_moe.py, likewise."""
    document = source.document
    layers = (
        f"*{name}*: H {hidden}, I {inner}, {experts} experts, {top_k} of a token"
        for name, (hidden, inner, experts, top_k) in document["layers"].items()
    )
    training = document.get("training", False)
    what = (
        "Training layers of experts on the CPU, forward and backward of T tokens"
        if training
        else "Layers of experts on the CPU, T tokens"
    )
    of_torch = "products over experts, with autograd," if training else "products over experts"
    words = [f"{'; '.join(layers)}."]
    if any(cell["transposed"] for cell in document["cells"]):
        words.append("*transposed*: weights stored [experts, in, out].")
    if training:
        words.append("Freed memory stays with the process.")
    parts = [
        f"{what}: GFLOP/s, and in brackets the time of a loop of torch's matrix {of_torch} over "
        f"ours (above 1, ours is faster). {_cpu_provenance(source)}",
        " ".join(words),
    ]

    def row(cell: dict[str, Any]) -> str:
        return f"{cell['layer']} {cell['dtype']}{' transposed' if cell['transposed'] else ''}"

    for threads, summary in document["summary_by_threads"].items():
        cells = [c for c in document["cells"] if c["threads"] == int(threads)]
        parts += [_cpu_threads(threads, summary), _cpu_table(cells, row, "tokens", "T")]
    script = f"python benchmarks/cpu_moe.py{' --training' if training else ''} --threads"
    parts.append(_commands(f"{script} {' '.join(document['summary_by_threads'])}"))
    return "\n\n".join(parts)


def render_host_cost(source: Source) -> str:
    """Table of a record of benchmarks/host_cost.py: one row per call."""
    document = source.document
    where = rec.provenance(document, source.outdated).replace("the kernels", "the host's code")
    where = where.replace("code have changed", "code has changed")
    rows = [
        [name, f"{row['median_us']:.1f}", f"{row['quartile1_us']:.1f} to {row['quartile3_us']:.1f}"]
        for name, row in document["host_cost"].items()
    ]
    parts = [
        f"{document['title']}, medians of {document['rounds']} rounds of "
        f"{document['calls_per_round']} calls. {where}; from [{source.path.name}]({source.link}).",
        _table(["call", "us", "quartiles"], rows),
        _commands(shlex.join(document["command"])),
    ]
    return "\n\n".join(parts)


TABLES: dict[str, Callable[[Source], str]] = {
    "attention-grid": render_grid,
    "attention-list": render_list,
    "attention-memory": render_memory,
    "cpu-attention": render_cpu,
    "cpu-moe": render_cpu_moe,
    "cpu-padded": render_cpu_padded,
    "host-cost": render_host_cost,
    "moe-list": render_moe,
    "sustained": render_sustained,
}

SUMMARY = "summary"  # one table of all files of a block; the others make one of each


# ---- pictures --------------------------------------------------------------------------------

PICTURES = {
    "speed-picture": ("speed", "speed against {place}, with every peer"),
    "ratio-picture": ("ratio", "the time of every peer over ours"),
    "roofline-picture": ("roofline", "speed against arithmetic intensity"),
}


@dataclasses.dataclass(frozen=True)
class Picture:
    """A file in docs/pictures/ that some document shows."""

    path: Path
    record: Record
    chart: str
    theme: Theme

    def complaint(self) -> str:
        """What is wrong with the file, "" when it shows this very record."""
        if not self.path.exists():
            return "is missing"
        found = _DIGEST.search(self.path.read_bytes())
        if found is None or found.group(1).decode() != self.record.digest:
            return f"was not made from {self.record.path.name} as it is now"
        return ""


def pictures_of(source: Source, kind: str, root: Path) -> list[Picture]:
    """The files of one block, light and dark; none where the record has no such picture."""
    record = rec.read_record(source.path)
    chart, _ = PICTURES[kind]
    if charts.why_not(record, chart):
        return []
    folder = root / _PICTURES
    return [
        Picture(folder / f"{record.name}-{chart}-{theme.name}.svg", record, chart, theme)
        for theme in THEMES.values()
    ]


def render_picture(source: Source, kind: str, pictures: list[Picture], folder: Path) -> str:
    """Shows the picture that fits the reader's setting, to a document in `folder`."""
    chart, words = PICTURES[kind]
    words = words.format(place=rec.place_name(source.document["cells"])[1])
    title = source.document["title"]
    if not pictures:
        reason = charts.why_not(rec.read_record(source.path), chart)
        return f"No {chart} picture of [{source.path.name}]({source.link}): {reason}."
    links = {p.theme.name: os.path.relpath(p.path, folder) for p in pictures}
    alt = html.escape(f"{title}, {rec.machine(source.document)}: {words}")
    shown = (
        "<picture>\n"
        f'  <source media="(prefers-color-scheme: dark)" srcset="{links["dark"]}">\n'
        f'  <img alt="{alt}" src="{links["light"]}">\n'
        "</picture>"
    )
    if not source.outdated:
        return shown
    return f"{shown}\n\n{rec.provenance(source.document, outdated=True)}."


# ---- documents -------------------------------------------------------------------------------


def documents(root: Path) -> Iterator[Path]:
    """README.md and what is under docs/, where something stands between markers."""
    for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        if path.exists() and _BLOCK.search(path.read_text(encoding="utf-8")):
            yield path


def _commit_of(document: dict[str, Any]) -> str:
    return rec.commit(document if "commit" in document else document["environment"])


class Report:
    """All blocks of all documents as their records say they should be."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.texts: dict[Path, str] = {}  # of each document, as it should be
        self.pictures: dict[Path, Picture] = {}
        self.complaints: list[str] = []
        for path in documents(root):
            text = path.read_text(encoding="utf-8")
            self.texts[path] = _BLOCK.sub(functools.partial(self._block, path), text)
        for picture in self.pictures.values():
            if complaint := picture.complaint():
                self.complaints.append(f"{self._name(picture.path)} {complaint}")
        self.unused = sorted(set((root / _PICTURES).glob("*.svg")) - set(self.pictures))
        self.complaints += [f"{self._name(path)} is shown nowhere" for path in self.unused]

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _block(self, path: Path, match: re.Match[str]) -> str:
        kind, pattern, body = match["kind"], match["file"], match["body"]
        if kind not in TABLES and kind not in PICTURES and kind != SUMMARY:
            known = ", ".join([*TABLES, *PICTURES, SUMMARY])
            raise CommandError(f"{self._name(path)}: results of kind {kind}, known are {known}")
        files = [file for one in pattern.split(",") for file in sorted(self.root.glob(one))]
        sources = [self._source(file, path.parent, body) for file in files]
        unsaid = ""
        for source in sources:
            said = f"measured at {_commit_of(source.document)}"
            if source.outdated and said not in body:
                unsaid = f": the kernels have changed and it does not say {said}"
        if kind == SUMMARY:
            parts = [render_summary(sources)] if sources else []
        else:
            parts = [self._part(source, kind, path.parent) for source in sources]
        made = "".join(f"\n{part}\n" for part in parts) + ("\n" if parts else "")
        if made != body:
            self.complaints.append(
                f"{self._name(path)}: {kind} {pattern} does not match its record{unsaid}"
            )
        return f"<!-- results: {kind} {pattern} -->\n{made}<!-- results: end -->"

    def _source(self, file: Path, folder: Path, body: str) -> Source:
        """A record; where no one can tell whether it is outdated, it is what the block says."""
        document = json.loads(file.read_text(encoding="utf-8"))
        if "schema" in document:  # held to its schema where jsonschema is installed
            rec.read_record(file)
        changed = outdated(document, self.root)
        if changed is None:
            changed = f"measured at {_commit_of(document)}" in body
        return Source(file, document, os.path.relpath(file, folder), changed)

    def _part(self, source: Source, kind: str, folder: Path) -> str:
        if kind in TABLES:
            return TABLES[kind](source)
        pictures = pictures_of(source, kind, self.root)
        self.pictures |= {picture.path: picture for picture in pictures}
        return render_picture(source, kind, pictures, folder)

    def write(self) -> None:
        """Draws every picture anew, removes those shown nowhere, rewrites the documents."""
        for picture in self.pictures.values():
            drawn = charts.draw(picture.record, picture.chart, picture.theme, "svg")
            picture.path.parent.mkdir(parents=True, exist_ok=True)
            picture.path.write_bytes(drawn)
            print(self._name(picture.path))
        for path in self.unused:
            path.unlink()
        for path, text in self.texts.items():
            if path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")
                print(self._name(path))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 on a mismatch")
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="another checkout")
    arguments = parser.parse_args(argv)
    try:
        report = Report(arguments.root.resolve())
        if not arguments.check:
            report.write()
            return 0
    except CommandError as error:
        print(error, file=sys.stderr)
        return 1
    for complaint in report.complaints:
        print(complaint, file=sys.stderr)
    if report.complaints:
        print("run python benchmarks/report.py", file=sys.stderr)
    return 1 if report.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
