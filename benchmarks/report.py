"""Renders the tables of README.md from the recorded results, or checks that they match.

A table stands between two marker lines that name its kind and its file, or a pattern of files:

    <!-- results: attention-grid benchmarks/results/attention_forward_*.json -->
    <!-- results: end -->

    python benchmarks/report.py            # rewrite README.md
    python benchmarks/report.py --check    # exit 1 when README.md does not match the files

A marker that no file matches has nothing between its lines: no numbers without a record.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(
    r"^<!-- results: (?P<kind>[\w-]+) (?P<file>\S+) -->\n(?P<body>.*?)^<!-- results: end -->$",
    re.MULTILINE | re.DOTALL,
)
_OURS = "flashmoe"
_NOT_IN_GRID = ("torch-math", "torch-efficient")  # far slower: their means say enough


def _table(headers: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, the first column to the left and numbers to the right."""
    rule = ["---", *("---:" for _ in headers[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in [headers, rule, *rows])


def _ratio(against: dict[str, Any]) -> str:
    tie = " (tie)" if against["verdict"] == "tie" else ""
    return f"{against['ratio']:.2f}{tie}"


def _peers(cells: list[dict[str, Any]]) -> list[str]:
    names = [n for c in cells for n, e in c.get("contenders", {}).items() if "against" in e]
    return list(dict.fromkeys(names))


def _caption(document: dict[str, Any], file: str) -> str:
    device = document["device"]["name"]
    if document["device"]["device"] == "cpu":
        device += f" (CPU, {document['environment']['threads']} threads)"
    date, commit = document["date"][:10], document["commit"][:12] or "unknown"
    versions = document["environment"]["packages"]
    torch = f", torch {versions['torch']}" if "torch" in versions else ""
    return (
        f"{document['title']}. {device}, {date}, commit {commit}{torch}; every sample is in "
        f"[{Path(file).name}]({file}). A ratio is the peer's median time over ours: above 1, ours "
        "is faster; a tie is within its 95 % interval."
    )


def _means(document: dict[str, Any]) -> str:
    means = [
        f"{s['geometric_mean']:.2f} over {peer} (from {s['least']:.2f} to {s['most']:.2f}; faster "
        f"in {s['faster']}, tied in {s['tie']}, slower in {s['slower']} of {s['rows']})"
        for peer, s in document["summary"].items()
    ]
    return f"Geometric mean of the ratios: {'; '.join(means)}." if means else ""


def _unit(document: dict[str, Any]) -> tuple[str, float]:
    return ("GFLOP/s", 1e3) if document["device"]["device"] == "cpu" else ("TFLOP/s", 1.0)


def _ratio_cell(cell: dict[str, Any], peer: str) -> str:
    entry = cell.get("contenders", {}).get(peer, {})
    return _ratio(entry["against"]) if "against" in entry else "-"


def _speed_cell(cell: dict[str, Any], factor: float) -> str:
    if cell["status"] != "ok":
        return "void"
    return f"{cell['contenders'][_OURS]['tflops'] * factor:.0f}"


def _mask(causal: str) -> str:
    return {"none": "full", "bottom_right": "causal"}.get(causal, causal)


def render_grid(document: dict[str, Any], file: str) -> str:
    """Of a suite that is a grid: head dimension and mask down, sequence length across."""
    cells = document["cells"]
    peers = [p for p in _peers(cells) if p not in _NOT_IN_GRID]
    unit, factor = _unit(document)
    lengths = sorted({c["shape"]["seq_q"] for c in cells})
    groups = dict.fromkeys(
        (c["shape"]["dtype"], c["shape"]["dim"], c["shape"]["causal"]) for c in cells
    )
    rows = []
    for group in groups:
        of = {
            c["shape"]["seq_q"]: c
            for c in cells
            if (c["shape"]["dtype"], c["shape"]["dim"], c["shape"]["causal"]) == group
        }
        label = [f"{group[0]} D={group[1]} {_mask(group[2])}"]
        across = [of.get(n, {"status": "void"}) for n in lengths]
        rows.append([*label, unit, *(_speed_cell(c, factor) for c in across)])
        rows += [["", f"over {p}", *(_ratio_cell(c, p) for c in across)] for p in peers]
    table = _table(["", "", *(f"S={n}" for n in lengths)], rows)
    return "\n\n".join(filter(None, [_caption(document, file), table, _means(document)]))


def render_list(document: dict[str, Any], file: str) -> str:
    """Of any suite: one row a shape."""
    cells = document["cells"]
    peers = _peers(cells)
    unit, factor = _unit(document)
    rows = []
    for cell in cells:
        shape = cell["shape"]
        pairs = [("seq_q", "seq_k"), ("heads_q", "heads_kv"), ("dim", "dim_v")]
        extents = [
            str(shape[a]) if shape[a] == shape[b] else f"{shape[a]}/{shape[b]}" for a, b in pairs
        ]
        described = [shape["dtype"], _mask(shape["causal"]), str(shape["batch"]), *extents]
        rows.append([*described, _speed_cell(cell, factor), *(_ratio_cell(cell, p) for p in peers)])
    headers = ["dtype", "mask", "B", "S", "H", "D", unit, *(f"over {p}" for p in peers)]
    parts = [_caption(document, file), _table(headers, rows), _means(document)]
    return "\n\n".join(filter(None, parts))


def _cpu_table(cells: list[dict[str, Any]]) -> str:
    lengths = sorted({c["seq"] for c in cells})
    by_group: dict[tuple[str, int, bool], dict[int, dict[str, Any]]] = {}
    for cell in cells:
        group = by_group.setdefault((cell["dtype"], cell["dim"], cell["causal"]), {})
        group[cell["seq"]] = cell
    rows = []
    for (dtype, dim, causal), of in by_group.items():
        across = [
            f"{of[n]['ours_gflops']:.0f} ({of[n]['ratio']:.2f})" if n in of else "-"
            for n in lengths
        ]
        rows.append([f"{dtype} D={dim} {'causal' if causal else 'full'}", *across])
    return _table(["", *(f"S={n}" for n in lengths)], rows)


def render_cpu(document: dict[str, Any], file: str) -> str:
    """Of a record of benchmarks/cpu_attention.py: GFLOP/s, and torch's time over ours."""
    env = document["environment"]
    parts = [
        f"Attention forward on the CPU, batch {document['batch']}, {document['heads']} heads: "
        f"GFLOP/s, and in brackets torch's time over ours (above 1, ours is faster). {env['cpu']} "
        f"({env['isa']}), {env['time'][:10]}, commit {env['commit'][:12] or 'unknown'}, torch "
        f"{env['torch']}; from [{Path(file).name}]({file})."
    ]
    for threads, summary in document["summary_by_threads"].items():
        cells = [c for c in document["cells"] if c["threads"] == int(threads)]
        number = "One thread" if threads == "1" else f"{threads} threads"
        parts += [
            f"{number}; geometric mean of the ratios {summary['geometric_mean']:.2f}, from "
            f"{summary['lowest']:.2f} to {summary['highest']:.2f}:",
            _cpu_table(cells),
        ]
    return "\n\n".join(parts)


RENDERERS: dict[str, Callable[[dict[str, Any], str], str]] = {
    "attention-grid": render_grid,
    "attention-list": render_list,
    "cpu-attention": render_cpu,
}


def render(text: str, root: Path = ROOT) -> str:
    """`text` with every marked table made anew from its files."""

    def replace(match: re.Match[str]) -> str:
        kind, pattern = match["kind"], match["file"]
        if kind not in RENDERERS:
            raise SystemExit(f"README.md: table kind {kind}, known are {', '.join(RENDERERS)}")
        tables = [
            RENDERERS[kind](
                json.loads(path.read_text(encoding="utf-8")), str(path.relative_to(root))
            )
            for path in sorted(root.glob(pattern))
        ]
        body = "".join(f"\n{table}\n" for table in tables) + ("\n" if tables else "")
        return f"<!-- results: {kind} {pattern} -->\n{body}<!-- results: end -->"

    return _BLOCK.sub(replace, text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 on a mismatch")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", metavar="FILE")
    arguments = parser.parse_args(argv)
    text = arguments.readme.read_text(encoding="utf-8")
    rendered = render(text, arguments.readme.resolve().parent)
    if rendered == text:
        return 0
    if arguments.check:
        print(f"{arguments.readme} does not match its results: run python benchmarks/report.py",
              file=sys.stderr)  # fmt: skip
        return 1
    arguments.readme.write_text(rendered, encoding="utf-8")
    print(f"{arguments.readme}: tables rewritten")
    return 0


if __name__ == "__main__":
    sys.exit(main())
