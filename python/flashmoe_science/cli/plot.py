"""`flashmoe plot`: pictures and one HTML page of what `flashmoe bench` recorded."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from flashmoe_science.cli.output import (
    EXIT_FAILED,
    EXIT_OK,
    CommandError,
    Output,
    add_json_option,
    write_json,
)
from flashmoe_science.cli.plotting import charts
from flashmoe_science.cli.plotting.page import page
from flashmoe_science.cli.plotting.record import Record, read_record
from flashmoe_science.cli.plotting.sheet import MissingMatplotlib
from flashmoe_science.cli.plotting.theme import THEMES

_DESCRIPTION = """\
Draws records of `flashmoe bench --json FILE`. With --out, a file for each picture, theme and
format, named RECORD-PICTURE-THEME.FORMAT; with --html, one page that holds the records whole and
needs nothing from anywhere. Pictures need matplotlib; a page can be made without it.

  speed      TFLOP/s against sequence length, a panel for each head dimension and mask, under what
             a matrix product reached in the same run; for suites that are grids
  ratio      the peers' time over ours: a map of a grid, else each ratio with its 95 % interval
  roofline   speed against arithmetic intensity under the ceilings of the same run

  flashmoe plot results.json --out pictures
  flashmoe plot attention.json gqa.json --html report.html
"""


def _formats(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(text.split(",")))
    if not set(found) <= set(charts.FORMATS):
        raise argparse.ArgumentTypeError(
            f"got {text}, accepted are {', '.join(charts.FORMATS)}, with a comma between them"
        )
    return found


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plot",
        help="pictures and an HTML page of what bench recorded",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "records", nargs="+", type=Path, metavar="RECORD", help="a file that bench --json wrote"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the pictures")
    parser.add_argument(
        "--picture",
        action="append",
        choices=tuple(charts.CHARTS),
        help="draw this one only; may be repeated (default: all that the records have)",
    )
    parser.add_argument(
        "--theme",
        choices=(*THEMES, "both"),
        default="both",
        help="of the files in --out; a page always has both (default both)",
    )
    parser.add_argument(
        "--format",
        type=_formats,
        default=charts.FORMATS,
        metavar="LIST",
        help="svg, png or svg,png (default both)",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page here")
    add_json_option(parser)
    parser.set_defaults(run=run)


def _read(paths: list[Path]) -> list[Record]:
    records = [read_record(path) for path in paths]
    names = [record.name for record in records]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise CommandError(
            f"RECORD: two files are named {twice[0]}, and their pictures would be too; rename one"
        )
    return records


def _write(path: Path, data: bytes, option: str) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise CommandError(f"{option}: {path} cannot be written: {error.strerror}") from error
    return str(path)


def run(arguments: argparse.Namespace) -> int:
    if arguments.out is None and arguments.html is None:
        raise CommandError("--out: give a folder for pictures, or --html a file for a page")
    records = _read(arguments.records)
    output = Output(silent=arguments.json == "-")
    themes = [t for t in THEMES.values() if arguments.theme in (t.name, "both")]
    written: list[str] = []
    pictures: dict[str, dict[str, dict[str, bytes]]] = {}
    missing: dict[str, dict[str, str]] = {}
    for record in records:
        for chart in arguments.picture or charts.CHARTS:
            try:
                if arguments.html is not None:
                    looks = {t.name: charts.draw(record, chart, t, "svg") for t in THEMES.values()}
                    pictures.setdefault(record.name, {})[chart] = looks
                if arguments.out is None:
                    continue
                for theme in themes:
                    for kind in arguments.format:
                        file = arguments.out / f"{record.name}-{chart}-{theme.name}.{kind}"
                        data = charts.draw(record, chart, theme, kind)
                        written.append(_write(file, data, "--out"))
                        output.line(written[-1])
            except charts.NothingToDraw as reason:
                missing.setdefault(record.name, {})[chart] = str(reason)
                output.line(f"{record.name}: no {chart} picture: {reason}")
            except MissingMatplotlib as error:
                if arguments.out is not None:
                    raise
                missing.setdefault(record.name, {})[chart] = str(error)
                output.line(f"{record.name}: no {chart} picture: {error}")
    if arguments.html is not None:
        text = page(records, pictures, missing)
        written.append(_write(arguments.html, text.encode("utf-8"), "--html"))
        output.line(written[-1])
    if arguments.json is not None:
        write_json({"written": written, "not_drawn": missing}, arguments.json)
    return EXIT_OK if written else EXIT_FAILED
