"""The peers' time over ours: a map if the rows form a grid, else points with their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flashmoe_science.cli.plotting import record as rec
from flashmoe_science.cli.plotting.record import Record
from flashmoe_science.cli.plotting.sheet import (
    EDGE,
    SMALL,
    TEXT,
    Axes,
    Figure,
    Sheet,
    inches,
    module,
    short,
)
from flashmoe_science.cli.plotting.theme import Style, Theme, styles
from flashmoe_science.cli.records import withheld_words

_ROOM = 9.4  # inches for panels beside each other
_LEAST_WIDTH = 6.0
_END = 2.0  # where the colours of the map end, and its inverse
_BEYOND = 4.0  # a ratio above it, or under its inverse, may lie beyond the axis of points
_TICKS = (0.25, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 3.0, 4.0)
_TICK_GAP = 0.34  # inches between ticks, at least


def ratio(record: Record, theme: Theme) -> Figure:
    """A map per peer if the rows form a grid, else a column of points per peer."""
    return _map(record, theme) if rec.is_grid(record.cells) else _points(record, theme)


def _text(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def _mean(record: Record, peer: str) -> str:
    summary = record.document["summary"].get(peer)
    return f"mean {_text(summary['geometric_mean'])}" if summary and summary["rows"] else ""


def _noisy_words(record: Record, peers: Sequence[str]) -> str:
    """How many ratios have no verdict, "" if all have one."""
    summaries = [record.document["summary"].get(peer, {}) for peer in peers]
    number = sum(summary.get("withheld", 0) for summary in summaries)
    return f" Noisy: {withheld_words(number)}." if number else ""


def _heading_width(record: Record, peers: Sequence[str]) -> float:
    """Inches that the widest heading of a panel needs."""
    return max(inches(f"over {p}", bold=True) + 0.15 + inches(_mean(record, p)) for p in peers)


def arrange(panels: int, panel: float) -> tuple[int, int]:
    """Columns and rows of panels of this width in inches, with rows as equal as possible."""
    rows = -(-panels // max(1, int(_ROOM / panel)))
    return -(-panels // rows), rows


# ---- the map ---------------------------------------------------------------------------------


def _map(record: Record, theme: Theme) -> Figure:
    """Element type, mask and dimension down, sequence length across; or routing and tokens."""
    scale = module("matplotlib.colors").LinearSegmentedColormap.from_list("ratio", theme.diverging)
    peers = rec.peer_names(record.cells)
    keys = list(dict.fromkeys(rec.panel_key(c["shape"]) for c in record.cells))
    names = [rec.panel_name(key, {k[0] for k in keys}) for key in keys]
    lengths = sorted({rec.place(c["shape"]) for c in record.cells})
    by_place = {(rec.panel_key(c["shape"]), rec.place(c["shape"])): c for c in record.cells}

    gap, panel_h = 0.3, 0.29 * len(keys)
    left = EDGE + 0.1 + max(map(inches, names))
    panel_w = max(0.5 * len(lengths), _heading_width(record, peers))
    columns, rows = arrange(len(peers), panel_w + gap)
    width = max(left + columns * (panel_w + gap) - gap + EDGE, _LEAST_WIDTH)
    step = panel_h + 0.66
    words = [
        "The peer's time over ours. Blue, above 1: ours is faster; orange, below 1: slower; full "
        f"colour from {_END:g} and {1 / _END:g}. Framed: a tie, its 95 % interval holds 1. Means "
        f"are geometric.{_noisy_words(record, peers)}",
        rec.provenance(record.document),
    ]
    sheet = Sheet(theme, record.document["title"], words, width, 0.22 + rows * step)
    for index, peer in enumerate(peers):
        row, column = divmod(index, columns)
        axes = sheet.axes(left + column * (panel_w + gap), 0.3 + row * step, panel_w, panel_h)
        axes.spines["bottom"].set_visible(False)
        axes.set_xlim(0, len(lengths))
        axes.set_ylim(len(keys), 0)
        axes.set_xticks([i + 0.5 for i in range(len(lengths))], [short(n) for n in lengths])
        axes.set_yticks([i + 0.5 for i in range(len(keys))], names)
        axes.tick_params(axis="y", labelsize=TEXT, labelcolor=theme.ink, labelleft=column == 0)
        sheet.heading(axes, f"over {peer}", _mean(record, peer))
        for i, key in enumerate(keys):
            for j, length in enumerate(lengths):
                _square(axes, scale, theme, (j, i), by_place.get((key, length)), peer)
    return sheet.figure


def _square(
    axes: Axes,
    scale: Any,
    theme: Theme,
    place: tuple[int, int],
    cell: dict[str, Any] | None,
    peer: str,
) -> None:
    """One square of the map, with its number, or why there is none."""
    rectangle = module("matplotlib.patches").Rectangle
    x, y = place
    middle = {"ha": "center", "va": "center_baseline", "size": SMALL}
    entry = rec.against(cell, peer) if cell else None
    if cell is None or entry is None:
        void = cell is not None and cell["status"] != "ok"
        words = "void" if void else "-"
        axes.text(x + 0.5, y + 0.5, words, color=theme.muted, style="italic", **middle)
        return
    if entry["verdict"] == "withheld":
        axes.text(x + 0.5, y + 0.5, "noisy", color=theme.muted, style="italic", **middle)
        return
    position = math.log(entry["ratio"]) / math.log(_END)
    colour = scale(0.5 + 0.5 * min(1.0, max(-1.0, position)))
    axes.add_patch(rectangle((x, y), 1, 1, facecolor=colour, edgecolor=theme.surface, lw=1.6))
    ink = readable(colour)
    if entry["verdict"] == "tie":
        frame = {"fill": False, "edgecolor": ink, "lw": 0.9}
        axes.add_patch(rectangle((x + 0.09, y + 0.15), 0.82, 0.7, **frame))
    axes.text(x + 0.5, y + 0.5, _text(entry["ratio"]), color=ink, **middle)


def readable(colour: Sequence[float]) -> str:
    """Black or white, whichever has more contrast on that colour (by WCAG's luminance)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#10151b" if luminance > 0.18 else "#ffffff"


# ---- points ----------------------------------------------------------------------------------


def _row_words(cells: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """What all rows share, and what differs in each, in words."""
    fields = [rec.extents(c["shape"]) for c in cells]
    shared = {k: v for k, v in fields[0].items() if all(f[k] == v for f in fields)}
    own = [{k: v for k, v in f.items() if k not in shared} for f in fields]
    if not any(own):
        return "", [rec.extents_text(f) for f in fields]
    return rec.extents_text(shared), [rec.extents_text(f) for f in own]


def _limits(cells: list[dict[str, Any]], peers: Sequence[str]) -> tuple[float, float]:
    """The ends of the axis: all intervals except those of ratios far from 1."""
    entries = [rec.contenders(c).get(p, {}) for c in cells for p in peers]
    found = [a for e in entries for a in (e.get("against"), e.get("graph_against")) if a]
    near = [a for a in found if 1 / _BEYOND <= a["ratio"] <= _BEYOND]
    low, high = (a["low"] / 1.06 for a in near), (a["high"] * 1.06 for a in near)
    return min([0.82, *low]), max([1.22, *high])


def ticks(low: float, high: float, width: float) -> list[float]:
    """Round ratios from 1 outward on a logarithmic axis `width` inches long, as many as fit."""
    scale = width / math.log(high / low)
    kept = [1.0]
    for down in (True, False):
        last = 1.0
        for tick in sorted((t for t in _TICKS if (t < 1) is down), reverse=down):
            if low <= tick <= high and abs(math.log(tick / last)) * scale >= _TICK_GAP:
                kept.append(tick)
                last = tick
    return kept


def _points(record: Record, theme: Theme) -> Figure:
    """A column for each peer, a line for each row: the ratio with its 95 % interval."""
    cells = record.cells
    peers = rec.peer_names(cells)
    look = styles(rec.timed_names(cells), theme)
    shared, names = _row_words(cells)
    graphs = any("graph_against" in e for c in cells for e in rec.contenders(c).values())
    low, high = _limits(cells, peers)

    gap, panel_h = 0.55, (0.4 if graphs else 0.3) * len(cells)
    left = EDGE + 0.14 + max(map(inches, names))
    panel_w = max(2.25, _heading_width(record, peers))
    columns, rows = arrange(len(peers), panel_w + gap)
    width = max(left + columns * (panel_w + gap) + EDGE / 2, _LEAST_WIDTH)
    step = panel_h + 0.68
    sign = "The peer's time over ours with its 95 % interval; right of the line, ours is faster."
    sign += " Hollow: in a CUDA graph." if graphs else ""
    sign += f" Means are geometric.{_noisy_words(record, peers)}"
    words = [sign, f"All rows: {shared}." if shared else ""]
    words.append(rec.provenance(record.document))
    sheet = Sheet(theme, record.document["title"], words, width, 0.24 + rows * step)
    marked = ticks(low, high, panel_w)
    for index, peer in enumerate(peers):
        row, column = divmod(index, columns)
        axes = sheet.axes(left + column * (panel_w + gap), 0.32 + row * step, panel_w, panel_h)
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        axes.set_ylim(len(cells) - 0.5, -0.5)
        axes.minorticks_off()
        axes.set_xticks(marked, [f"{t:g}" for t in marked])
        axes.set_yticks(range(len(cells)), names)
        axes.tick_params(
            axis="y", labelsize=TEXT, labelcolor=theme.ink, pad=8, labelleft=column == 0
        )
        axes.grid(axis="y", color=theme.rule, lw=0.7)
        axes.axvline(1, color=theme.muted, lw=1.1, zorder=1)
        sheet.heading(axes, f"over {peer}", _mean(record, peer), look[peer].colour)
        for i, cell in enumerate(cells):
            _row(axes, theme, look[peer], i, cell, peer)
    return sheet.figure


def _row(axes: Axes, theme: Theme, style: Style, y: float, cell: dict[str, Any], peer: str) -> None:
    """The point or points of one row, each with its number; a row without says why."""
    edge = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center",
            "xytext": (4, 0), "size": SMALL}  # fmt: skip
    entry = rec.contenders(cell).get(peer, {})
    if "against" not in entry:
        given = cell.get("contenders", {}).get(peer, {"status": "not timed"})
        words = "void" if cell["status"] != "ok" else given["status"]
        axes.annotate(words, (1, y), color=theme.muted, style="italic", **edge)
        return
    points = [(entry["against"], y, style.colour)]
    if "graph_against" in entry:
        points = [(entry["against"], y - 0.17, style.colour)]
        points.append((entry["graph_against"], y + 0.17, theme.surface))
    low, high = axes.get_xlim()
    for found, at, fill in points:
        value = found["ratio"]
        note = {"tie": " tie", "withheld": " noisy"}.get(found["verdict"], "")
        words = f"{_text(value)}{note}"
        axes.annotate(words, (1, at), color=theme.muted if note else theme.ink, **edge)
        if not low <= value <= high:  # beyond the axis: an arrow at its end, the number beside it
            mark, x = (">", 0.98) if value > high else ("<", 0.02)
            axes.plot([x], [at], mark, color=style.colour, markersize=6, zorder=3,
                      transform=axes.get_yaxis_transform())  # fmt: skip
            continue
        axes.plot([found["low"], found["high"]], [at, at], color=style.colour, lw=2.2, zorder=3,
                  solid_capstyle="round")  # fmt: skip
        axes.plot([value], [at], "o", color=fill, markeredgecolor=style.colour, markersize=5.5,
                  markeredgewidth=1.3, zorder=4)  # fmt: skip
