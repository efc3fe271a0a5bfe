"""Renders the tables of README.md from the recorded results, or checks that they match.

A table stands between two marker lines that name its kind and its file:

    <!-- results: attention benchmarks/results/attention_forward_h200.json -->
    <!-- results: end -->

    python benchmarks/report.py            # rewrite README.md
    python benchmarks/report.py --check    # exit 1 when README.md does not match the files

A marker whose file does not exist has nothing between its lines: no numbers without a record.
"""

from __future__ import annotations

import argparse
import json
import math
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


def _table(headers: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, the first column to the left and numbers to the right."""
    rule = ["---", *("---:" for _ in headers[1:])]
    return "\n".join("| " + " | ".join(row) + " |" for row in [headers, rule, *rows])


def _geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _ratio(against: dict[str, Any]) -> str:
    tie = " (tie)" if against["verdict"] == "tie" else ""
    return f"{against['ratio']:.2f}{tie}"


def _peers(cells: list[dict[str, Any]]) -> list[str]:
    names = [n for c in cells for n, e in c.get("contenders", {}).items() if "against" in e]
    return list(dict.fromkeys(names))


def _shape_cells(shape: dict[str, Any]) -> list[str]:
    heads = str(shape["heads_q"])
    if shape["heads_kv"] != shape["heads_q"]:
        heads += f"/{shape['heads_kv']}"
    seq = str(shape["seq_q"])
    if shape["seq_k"] != shape["seq_q"]:
        seq += f"/{shape['seq_k']}"
    return [str(shape["dim"]), shape["causal"].replace("_", " "), seq, str(shape["batch"]), heads]


def render_attention(document: dict[str, Any], file: str) -> str:
    """The table of a `flashmoe bench` record: our speed, and each peer's ratio."""
    cells = document["cells"]
    peers = _peers(cells)
    unit, factor = ("GFLOP/s", 1e3) if document["device"]["device"] == "cpu" else ("TFLOP/s", 1.0)
    rows = []
    for cell in cells:
        shape = [cell["shape"]["dtype"], *_shape_cells(cell["shape"])]
        if cell["status"] != "ok":
            rows.append([*shape, f"void: {cell['reason']}", *("" for _ in peers)])
            continue
        contenders = cell["contenders"]
        ratios = [
            _ratio(contenders[n]["against"]) if "against" in contenders.get(n, {}) else "-"
            for n in peers
        ]
        rows.append([*shape, f"{contenders[_OURS]['tflops'] * factor:.0f}", *ratios])
    headers = ["dtype", "D", "causal", "S", "B", "heads", unit, *(f"vs {p}" for p in peers)]
    means = [
        f"{document['summary'][p]['geometric_mean']:.2f} over {p}" for p in document["summary"]
    ]
    device = document["device"]["name"]
    lines = [
        f"{document['title']}; {device}, {document['date'][:10]}, commit "
        f"{document['commit'][:12] or 'unknown'}, from `{file}`. A ratio is the peer's median time "
        "over ours: above 1, ours is faster. Ties are within the 95 % interval.",
        "",
        _table(headers, rows),
    ]
    if means:
        lines += ["", "Geometric mean of the ratios: " + "; ".join(means) + "."]
    return "\n".join(lines)


RENDERERS: dict[str, Callable[[dict[str, Any], str], str]] = {"attention": render_attention}


def _load(file: str, root: Path) -> dict[str, Any] | None:
    path = root / file
    if not path.exists():
        return None
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def render(text: str, root: Path = ROOT) -> str:
    """`text` with every marked table made anew from its file."""

    def replace(match: re.Match[str]) -> str:
        kind, file = match["kind"], match["file"]
        if kind not in RENDERERS:
            raise SystemExit(f"README.md: table kind {kind}, known are {', '.join(RENDERERS)}")
        document = _load(file, root)
        body = "" if document is None else f"\n{RENDERERS[kind](document, file)}\n\n"
        return f"<!-- results: {kind} {file} -->\n{body}<!-- results: end -->"

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
