"""The list of pictures, whether a record has one, and drawing one as a file's bytes."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

from flashmoe_science.cli.plotting import record as rec
from flashmoe_science.cli.plotting.ratio import ratio
from flashmoe_science.cli.plotting.record import Record
from flashmoe_science.cli.plotting.sheet import FONT, Figure, module
from flashmoe_science.cli.plotting.speed import ceilings, roofline, speed
from flashmoe_science.cli.plotting.theme import Theme

CHARTS: dict[str, Callable[[Record, Theme], Figure]] = {
    "speed": speed,
    "ratio": ratio,
    "roofline": roofline,
}
FORMATS = ("svg", "png")
_DPI = 200  # of PNGs
# An SVG is laid out in one font and shown in the reader's own, which is narrower.
_SVG_FONTS = f"system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, '{FONT}', sans-serif"


class NothingToDraw(Exception):
    """The record has no such picture; the message says why."""


def why_not(record: Record, chart: str) -> str:
    """Why a record has no such picture, "" if it has one; needs no matplotlib."""
    if not any(rec.contenders(c) for c in record.cells):
        return "no row was timed"
    if chart == "speed" and not rec.is_grid(record.cells):
        return f"the rows are not lines over the {rec.place_name(record.cells)[1]}"
    if chart == "ratio" and not rec.peer_names(record.cells):
        return "no peer was timed beside us"
    copied = (record.document.get("ceilings") or {}).get("copy_bytes_per_s")
    if chart == "roofline" and not (copied or ceilings(record)):
        return "the record has no ceilings: none were measured in that run"
    if chart == "roofline" and not (copied and ceilings(record)):
        lacking = "matrix product of its element types" if copied else "copy"
        return f"the record has no ceiling of a {lacking}"
    return ""


def _settings(name: str) -> dict[str, Any]:
    return {
        "font.family": [FONT],
        "svg.fonttype": "none",  # words stay words
        "svg.hashsalt": name,  # otherwise ids are random, and a rerun must give the same bytes
        "text.parse_math": False,  # a dollar in a name is a dollar
        "axes.unicode_minus": False,
    }


def draw(record: Record, chart: str, theme: Theme, file_format: str) -> bytes:
    """One picture of a record, as a file's bytes.

    The same record, matplotlib and theme give the same bytes. The file names its record and the
    record's SHA-256. Raises NothingToDraw where the record has no such picture, and
    MissingMatplotlib where there is no matplotlib.
    """
    reason = why_not(record, chart)
    if reason:
        raise NothingToDraw(reason)
    matplotlib = module("matplotlib")
    stream = io.BytesIO()
    with matplotlib.rc_context(_settings(f"{record.name}-{chart}-{theme.name}")):
        figure = CHARTS[chart](record, theme)
        if file_format == "png":
            metadata: dict[str, Any] = {"Software": None, "Source": record.source}
            figure.savefig(stream, format="png", dpi=_DPI, metadata=metadata)
            return stream.getvalue()
        metadata = {"Date": None, "Creator": "flashmoe plot", "Source": record.source}
        metadata["Title"] = f"{record.document['title']}: {chart}"
        figure.savefig(stream, format="svg", metadata=metadata)
    svg = stream.getvalue().decode("utf-8").replace(f"'{FONT}'", _SVG_FONTS)
    return re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE).encode("utf-8")
