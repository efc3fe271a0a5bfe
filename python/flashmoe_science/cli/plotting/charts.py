"""Draws a record: speed against sequence length, roofline, and ratios over the peers.

Each chart is a function of a record and a theme that returns a matplotlib figure, laid out in
inches; `why_not` says first whether a record has one, for which matplotlib is not needed. The words
are set in the font that comes with matplotlib, so every machine lays a picture out alike; an SVG
keeps them as text.
"""

from __future__ import annotations

import importlib
import io
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from flashmoe_science.cli.measure import OURS
from flashmoe_science.cli.output import CommandError
from flashmoe_science.cli.plotting import record as rec
from flashmoe_science.cli.plotting.record import Record
from flashmoe_science.cli.plotting.theme import Style, Theme, styles

Figure = Any  # matplotlib's, which is imported when something is drawn
Axes = Any

FORMATS = ("svg", "png")
_DPI = 200  # of PNGs
_TITLE, _TEXT, _SMALL = 12.5, 8.5, 7.5  # points
_LINE = 1.45 / 72  # inches of a line of text, for each of its points
_EDGE = 0.22  # inches between anything and the edge of the picture
_LAYOUT_FONT = "DejaVu Sans"
_SVG_FONTS = (
    "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, 'DejaVu Sans', sans-serif"
)
_RATIO_END = 2.0  # where the colours and axes of ratios end, and its inverse
_RATIO_TICKS = (0.25, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 3.0, 4.0)
_TICK_GAP = 0.34  # inches between ticks, at least


class NothingToDraw(Exception):
    """The record has no such picture; the message says why."""


class MissingMatplotlib(CommandError):
    """Nothing can be drawn here; the message says what to install."""


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingMatplotlib(
            "pictures need matplotlib: pip install 'flashmoe-science[bench]'"
        ) from error


# ---- layout ----------------------------------------------------------------------------------


class _Sheet:
    """A figure measured in inches from its top left corner, with title and words at its head."""

    def __init__(
        self, theme: Theme, title: str, words: Sequence[str], width: float, body: float
    ) -> None:
        self.theme = theme
        self.width = width
        # A letter is at most 0.62 of its size wide on average in the layout font.
        inside = width - 2 * _EDGE
        titles = textwrap.wrap(title, int(inside * 72 / (_TITLE * 0.66)))
        lines = [
            line for text in words for line in textwrap.wrap(text, int(inside * 72 / (_TEXT * 0.6)))
        ]
        self.top = _EDGE + _LINE * (_TITLE * len(titles) + _TEXT * len(lines)) + 0.12
        self.height = self.top + body
        self.figure = _module("matplotlib.figure").Figure(
            figsize=(width, self.height), facecolor=theme.surface
        )
        y = _EDGE
        for line in titles:
            self.text(_EDGE, y, line, size=_TITLE, weight="bold")
            y += _LINE * _TITLE
        y += 0.04
        for line in lines:
            self.text(_EDGE, y, line, color=theme.muted)
            y += _LINE * _TEXT

    def text(self, x: float, y: float, words: str, **look: Any) -> None:
        """Words whose top left corner, or as `look` says, is x, y inches from the sheet's."""
        given: dict[str, Any] = {"color": self.theme.ink, "size": _TEXT, "va": "top"}
        self.figure.text(x / self.width, 1 - y / self.height, words, **(given | look))

    def axes(self, x: float, y: float, width: float, height: float, **given: Any) -> Axes:
        """Axes whose top left corner is x, y inches from that of the sheet's body."""
        bottom = 1 - (self.top + y + height) / self.height
        box = (x / self.width, bottom, width / self.width, height / self.height)
        axes = self.figure.add_axes(box, facecolor="none", **given)
        for side in ("top", "left", "right"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(self.theme.rule)
        axes.tick_params(length=0, labelsize=_SMALL, labelcolor=self.theme.muted, pad=4)
        axes.tick_params(which="minor", length=0)
        axes.set_axisbelow(True)
        return axes


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Places in the order of `wanted`, at least `gap` apart, nearest to it by least squares."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    blocks: list[list[float]] = []  # mean and number of places that have been pushed together
    for rank, i in enumerate(order):
        blocks.append([wanted[i] - rank * gap, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, n), (b, m) = blocks[-2:]
            blocks[-2:] = [[(a * n + b * m) / (n + m), n + m]]
    means = [mean for mean, number in blocks for _ in range(int(number))]
    placed = [0.0] * len(wanted)
    for rank, i in enumerate(order):
        placed[i] = means[rank] + rank * gap
    return placed


def _short(length: int) -> str:
    """512, 1k, 16k: as an axis has room for."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else f"{length}"


def _drawn(style: Style, theme: Theme) -> dict[str, Any]:
    return {
        "color": style.colour,
        "marker": style.mark,
        "markeredgecolor": theme.surface if style.mark != "x" else style.colour,
        "markeredgewidth": 0.6 if style.mark != "x" else 1.2,
        "zorder": style.order,
    }


def _key(sheet: _Sheet, axes: Axes, named: Sequence[Style], x: float) -> None:
    """Marks and names in a row above the axes, `x` inches from the left of the sheet."""
    for style in named:
        at = (x - axes.get_position().x0 * sheet.width) / (axes.get_position().width * sheet.width)
        y = 1 + 0.16 / (axes.get_position().height * sheet.height)
        look = _drawn(style, sheet.theme) | {"markersize": 6, "linestyle": "none"}
        axes.plot([at], [y], transform=axes.transAxes, clip_on=False, **look)
        words = {"color": style.colour, "size": _TEXT, "va": "center"}
        if style.order == 4:
            words["weight"] = "bold"
        shift = 0.1 / (axes.get_position().width * sheet.width)
        axes.text(at + shift, y, style.label, transform=axes.transAxes, **words)
        x += 0.36 + len(style.label) * _TEXT * 0.62 / 72


# ---- speed against sequence length -----------------------------------------------------------


def _end_labels(axes: Axes, ends: dict[str, float], look: dict[str, Style], high: float) -> None:
    """Each line's name right of its end, moved apart where they would lie on each other."""
    height = axes.get_position().height * axes.figure.get_figheight()
    gap = _TEXT * 1.25 / 72 / height * high
    places = spread(list(ends.values()), gap)
    lift = max(0.0, gap * 0.2 - min(places, default=0.0))
    x = axes.get_xlim()[1]
    for (name, end), place in zip(ends.items(), places, strict=True):
        style = look[name]
        axes.annotate(
            style.label,
            (x, end),
            xytext=(x * 1.12, place + lift),
            annotation_clip=False,
            va="center",
            size=_TEXT,
            color=style.colour,
            weight="bold" if name == OURS else "normal",
        )


def _speed_lines(
    axes: Axes, cells: list[dict[str, Any]], look: dict[str, Style], per_tera: float, theme: Theme
) -> dict[str, float]:
    """Draws a panel's lines, each with the spread between quartiles; returns where they end."""
    ends: dict[str, float] = {}
    unit = 1e-12 * per_tera
    cells = sorted(cells, key=lambda c: c["shape"]["seq_q"])
    for name, style in look.items():
        # A row without this contender breaks its line: nothing is drawn through what was not run.
        timed = [(c["shape"]["seq_q"], c["flops"], rec.contenders(c).get(name)) for c in cells]
        nothing = float("nan")
        x = [length for length, _, _ in timed]
        y = [e["tflops"] * per_tera if e else nothing for _, _, e in timed]
        edges = [
            [f * unit / e[quartile] if e and e[quartile] else nothing for _, f, e in timed]
            for quartile in ("q3_s", "q1_s")
        ]
        axes.fill_between(x, *edges, color=style.colour, alpha=0.18, lw=0, zorder=style.order)
        axes.plot(x, y, lw=style.width, markersize=5, **_drawn(style, theme))
        measured = [value for value in y if not math.isnan(value)]
        if measured:
            ends[name] = measured[-1]
    return ends


def _ceiling(record: Record, dtype: str) -> float | None:
    """TFLOP/s of a plain matrix product in the same run, None where it was not measured."""
    measured = (record.document.get("ceilings") or {}).get("matmul_flops_per_s") or {}
    value = measured.get(dtype)
    return value * 1e-12 if value else None


def _ceilings(record: Record) -> dict[str, float]:
    dtypes = dict.fromkeys(c["shape"]["dtype"] for c in record.cells)
    return {dtype: top for dtype in dtypes if (top := _ceiling(record, dtype))}


def speed(record: Record, theme: Theme) -> Figure:
    """A panel for each element type, mask and head dimension: ours, the peers, the ceiling."""
    cells = [c for c in record.cells if rec.contenders(c)]
    unit, per_tera = rec.unit(record.document)
    keys = list(dict.fromkeys(rec.panel_key(c["shape"]) for c in record.cells))
    across = sorted({key[2:] for key in keys})
    down = list(dict.fromkeys(key[:2] for key in keys))
    look = styles(rec.timed_names(cells), theme)
    lengths = sorted({c["shape"]["seq_q"] for c in record.cells})
    ceilings = _ceilings(record)
    fastest = max(e["tflops"] for c in cells for n, e in rec.contenders(c).items() if n in look)
    high = 1.13 * per_tera * max([fastest, *ceilings.values()])

    panel_w, panel_h, gap_x, gap_y = 2.3, 1.75, 0.22, 0.52
    left = 0.62
    names_w = 0.3 + max(len(s.label) for s in look.values()) * _TEXT * 0.62 / 72
    width = max(left + len(across) * (panel_w + gap_x) - gap_x + names_w + _EDGE / 2, 6.4)
    panel_w = (width - left - names_w - _EDGE / 2 + gap_x) / len(across) - gap_x
    body = 0.3 + len(down) * (panel_h + gap_y) - 0.02
    words = [f"{unit} against sequence length; the band is between quartiles", _where(record)]
    sheet = _Sheet(theme, record.document["title"], words, width, body)
    for row, (dtype, causal) in enumerate(down):
        for column, (dim, dim_v) in enumerate(across):
            of = [
                c for c in record.cells
                if rec.panel_key(c["shape"]) == (dtype, causal, dim, dim_v)
            ]  # fmt: skip
            if not of:
                continue
            x, y = left + column * (panel_w + gap_x), 0.3 + row * (panel_h + gap_y)
            axes = sheet.axes(x, y, panel_w, panel_h)
            axes.set_xscale("log", base=2)
            axes.set_xlim(lengths[0] / 1.15, lengths[-1] * 1.15)
            axes.set_xticks(lengths, [_short(n) for n in lengths])
            axes.minorticks_off()
            axes.set_ylim(0, high)
            axes.grid(axis="y", color=theme.rule, lw=0.7)
            dims = f"D {dim}" if dim == dim_v else f"D {dim}/{dim_v}"
            name = f"{dims}, {rec.mask_name(causal)}"
            name = f"{dtype} {name}" if len({d for d, _ in down}) > 1 else name
            axes.set_title(name, loc="left", size=_TEXT, color=theme.ink, weight="bold", pad=5)
            if column:
                axes.tick_params(labelleft=False)
            ends = _speed_lines(axes, of, look, per_tera, theme)
            if dtype in ceilings:
                level = ceilings[dtype] * per_tera
                axes.axhline(level, color=theme.muted, lw=1.1, ls=(0, (4, 3)), zorder=1)
                if column == 0:
                    axes.annotate(
                        f"matrix product {rec.number(level)}", (0, level), xytext=(0, 2),
                        xycoords=axes.get_yaxis_transform(), textcoords="offset points",
                        size=_SMALL, color=theme.muted,
                        bbox={"facecolor": theme.surface, "edgecolor": "none", "pad": 0.4},
                    )  # fmt: skip
            if column == len(across) - 1:
                _end_labels(axes, ends, look, high)
    return sheet.figure


def _where(record: Record) -> str:
    return rec.provenance(record.document)


# ---- roofline --------------------------------------------------------------------------------


def roofline(record: Record, theme: Theme) -> Figure:
    """Speed against arithmetic intensity, under what copies and matrix products reach here."""
    copy = record.document["ceilings"]["copy_bytes_per_s"]
    tops = _ceilings(record)
    cells = [c for c in record.cells if rec.contenders(c)]
    unit, per_tera = rec.unit(record.document)
    look = styles(rec.timed_names(cells), theme)
    points = {
        name: [
            (c["flops"] / c["bytes"], rec.contenders(c)[name]["tflops"] * per_tera)
            for c in cells
            if name in rec.contenders(c)
        ]
        for name in look
    }
    xs = [x for of in points.values() for x, _ in of]
    ys = [y for of in points.values() for _, y in of]
    copy_slope = copy * 1e-12 * per_tera  # speed for each operation a byte
    knees = {dtype: top / (copy * 1e-12) for dtype, top in tops.items()}
    x_low = 10 ** math.floor(math.log10(min(*xs, min(knees.values()) / 4)))
    x_high = max(*xs, max(knees.values()) * 4) * 2
    y_high = max(*ys, *(t * per_tera for t in tops.values())) * 2
    y_low = min(ys) / 2

    width, height = 7.4, 4.0
    sheet = _Sheet(
        theme,
        record.document["title"],
        [
            f"{unit} against arithmetic intensity (operations for each byte of q, k, v, output and "
            "LSE); lines: copy and matrix product measured in the same run",
            _where(record),
        ],
        width,
        height + 0.95,
    )
    axes = sheet.axes(0.72, 0.36, width - 0.72 - _EDGE, height)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(x_low, x_high)
    axes.set_ylim(y_low, y_high)
    axes.grid(color=theme.rule, lw=0.6)
    ticker = _module("matplotlib.ticker")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("FLOP / byte", size=_TEXT, color=theme.muted, loc="right")

    line = {"color": theme.muted, "lw": 1.3, "zorder": 1}
    knee = max(knees.values())
    axes.plot([x_low, knee], [x_low * copy_slope, knee * copy_slope], **line)
    rise = math.log10(y_high / y_low) / height
    run = math.log10(x_high / x_low) / (width - 0.72 - _EDGE)
    at = max(x_low, y_low / copy_slope) * 1.5
    axes.annotate(
        f"copy {copy * 1e-12:.2g} TB/s" if copy >= 1e12 else f"copy {copy * 1e-9:.3g} GB/s",
        (at, at * copy_slope), xytext=(-4, 5), textcoords="offset points", size=_TEXT,
        color=theme.muted, rotation=math.degrees(math.atan(run / rise)),
        rotation_mode="anchor",
    )  # fmt: skip
    for dtype, top in tops.items():
        level = top * per_tera
        axes.plot([knees[dtype], x_high], [level, level], **line)
        axes.annotate(
            f"{dtype} matrix product {rec.number(level)} {unit}", (x_high, level), xytext=(-2, 4),
            textcoords="offset points", ha="right", size=_TEXT, color=theme.muted,
        )  # fmt: skip
    for name, of in points.items():
        if of:
            axes.plot(
                [x for x, _ in of], [y for _, y in of], linestyle="none",
                markersize=6.5 if name == OURS else 5, alpha=0.9, **_drawn(look[name], theme),
            )  # fmt: skip
    _key(sheet, axes, list(look.values()), 0.8)
    return sheet.figure


# ---- ratios ----------------------------------------------------------------------------------


def ratio(record: Record, theme: Theme) -> Figure:
    """The peers' time over ours: a map where the rows are a grid, else points with intervals."""
    return _ratio_map(record, theme) if rec.is_grid(record.cells) else _ratio_points(record, theme)


def _mean_text(record: Record, peer: str) -> str:
    summary = record.document["summary"].get(peer)
    return f"mean {_ratio_text(summary['geometric_mean'])}" if summary else ""


def _arrange(panels: int, room: float) -> tuple[int, int]:
    """Columns and rows of panels, where `room` fit beside each other: rows as equal as can be."""
    rows = -(-panels // max(1, int(room)))
    return -(-panels // rows), rows


def _ticks(low: float, high: float, width: float) -> list[float]:
    """Round ratios from 1 outward on a logarithmic axis `width` inches long, as there is room."""
    inches = width / math.log(high / low)
    kept = [1.0]
    for down in (True, False):
        last = 1.0
        for tick in sorted((t for t in _RATIO_TICKS if (t < 1) is down), reverse=down):
            if low <= tick <= high and abs(math.log(tick / last)) * inches >= _TICK_GAP:
                kept.append(tick)
                last = tick
    return kept


def _ratio_map(record: Record, theme: Theme) -> Figure:
    """A map for each peer: element type, mask and dimension down, sequence length across."""
    colors = _module("matplotlib.colors")
    patches = _module("matplotlib.patches")
    scale = colors.LinearSegmentedColormap.from_list("ratio", theme.diverging)
    peers = rec.peer_names(record.cells)
    keys = list(dict.fromkeys(rec.panel_key(c["shape"]) for c in record.cells))
    lengths = sorted({c["shape"]["seq_q"] for c in record.cells})
    by_place = {(rec.panel_key(c["shape"]), c["shape"]["seq_q"]): c for c in record.cells}
    dtypes = {key[0] for key in keys}

    def row_name(key: tuple[str, str, int, int]) -> str:
        dtype, causal, dim, dim_v = key
        dims = f"D {dim}" if dim == dim_v else f"D {dim}/{dim_v}"
        words = f"{dims} {rec.mask_name(causal)}"
        return f"{dtype} {words}" if len(dtypes) > 1 else words

    cell_w, cell_h, gap = 0.5, 0.29, 0.3
    left = _EDGE + 0.1 + max(len(row_name(k)) for k in keys) * _TEXT * 0.6 / 72
    panel_w, panel_h = cell_w * len(lengths), cell_h * len(keys)
    columns, rows = _arrange(len(peers), (9.4 - left) / (panel_w + gap))
    width = max(left + columns * (panel_w + gap) - gap + _EDGE, 6.0)
    step = panel_h + 0.66
    words = [
        "The peer's time over ours. Blue, above 1: ours is faster; orange, below 1: slower; full "
        f"colour from {_RATIO_END:g} and {1 / _RATIO_END:g}. Framed: a tie, its 95 % interval "
        "holds 1. Means are geometric.",
        _where(record),
    ]
    sheet = _Sheet(theme, record.document["title"], words, width, 0.22 + rows * step)
    for index, peer in enumerate(peers):
        row, column = divmod(index, columns)
        axes = sheet.axes(left + column * (panel_w + gap), 0.3 + row * step, panel_w, panel_h)
        axes.spines["bottom"].set_visible(False)
        axes.set_xlim(0, len(lengths))
        axes.set_ylim(len(keys), 0)
        axes.set_xticks([i + 0.5 for i in range(len(lengths))], [_short(n) for n in lengths])
        names = [row_name(key) for key in keys] if column == 0 else []
        axes.set_yticks([i + 0.5 for i in range(len(names))], names)
        axes.tick_params(axis="y", labelsize=_TEXT, labelcolor=theme.ink)
        axes.set_title(
            f"over {peer}", loc="left", size=_TEXT + 0.5, color=theme.ink, weight="bold", pad=5
        )
        axes.set_title(_mean_text(record, peer), loc="right", size=_SMALL, color=theme.muted, pad=5)
        for i, key in enumerate(keys):
            for j, length in enumerate(lengths):
                cell = by_place.get((key, length))
                _ratio_square(axes, patches, scale, theme, (j, i), cell, peer)
    return sheet.figure


def _ratio_square(
    axes: Axes,
    patches: Any,
    scale: Any,
    theme: Theme,
    place: tuple[int, int],
    cell: dict[str, Any] | None,
    peer: str,
) -> None:
    """One square of the map, with its number, or why there is none."""
    x, y = place
    middle = {"ha": "center", "va": "center_baseline", "size": _SMALL}
    entry = rec.against(cell, peer) if cell else None
    if cell is None or entry is None:
        void = cell is not None and cell["status"] != "ok"
        words = "void" if void else "-"
        axes.text(x + 0.5, y + 0.5, words, color=theme.muted, style="italic", **middle)
        return
    position = math.log(entry["ratio"]) / math.log(_RATIO_END)
    colour = scale(0.5 + 0.5 * min(1.0, max(-1.0, position)))
    axes.add_patch(
        patches.Rectangle((x, y), 1, 1, facecolor=colour, edgecolor=theme.surface, lw=1.6)
    )
    ink = _readable(colour)
    if entry["verdict"] == "tie":
        axes.add_patch(
            patches.Rectangle((x + 0.09, y + 0.15), 0.82, 0.7, fill=False, edgecolor=ink, lw=0.9)
        )
    axes.text(x + 0.5, y + 0.5, _ratio_text(entry["ratio"]), color=ink, **middle)


def _ratio_text(value: float) -> str:
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def _readable(colour: Sequence[float]) -> str:
    """Black or white, whichever has more contrast on that colour (by WCAG's luminance)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#10151b" if luminance > 0.18 else "#ffffff"


def _row_words(cells: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """What all rows share, and what each has of its own, in words."""
    fields = [rec.extents(c["shape"]) for c in cells]
    shared = {k: v for k, v in fields[0].items() if all(f[k] == v for f in fields)}
    own = [{k: v for k, v in f.items() if k not in shared} for f in fields]
    if not any(own):
        return "", [rec.extents_text(f) for f in fields]
    return rec.extents_text(shared), [rec.extents_text(f) for f in own]


def _ratio_points(record: Record, theme: Theme) -> Figure:
    """A column for each peer, a line for each row: the ratio with its 95 % interval."""
    cells = record.cells
    peers = rec.peer_names(cells)
    look = styles(rec.timed_names(cells), theme)
    shared, names = _row_words(cells)
    entries = [rec.contenders(c).get(p, {}) for c in cells for p in peers]
    graphs = any("graph_against" in e for e in entries)
    inside = [
        edge for e in entries for a in (e.get("against"), e.get("graph_against")) if a
        for edge in (a["low"], a["high"]) if 1 / _RATIO_END**2 <= a["ratio"] <= _RATIO_END**2
    ]  # fmt: skip
    low = min([0.82, *(edge / 1.06 for edge in inside)])
    high = max([1.22, *(edge * 1.06 for edge in inside)])

    row_h, gap = (0.4 if graphs else 0.3), 0.5
    left = _EDGE + 0.12 + max(map(len, names)) * _TEXT * 0.6 / 72
    panel_w, panel_h = 2.25, row_h * len(cells)
    columns, rows = _arrange(len(peers), (9.4 - left) / (panel_w + gap))
    width = max(left + columns * (panel_w + gap) + _EDGE / 2, 6.0)
    step = panel_h + 0.68
    sign = "The peer's time over ours with its 95 % interval; right of the line, ours is faster."
    if graphs:
        sign += " Hollow: in a CUDA graph."
    sign += " Means are geometric."
    sheet = _Sheet(
        theme,
        record.document["title"],
        list(filter(None, [sign, f"All rows: {shared}." if shared else "", _where(record)])),
        width,
        0.24 + rows * step,
    )
    ticks = _ticks(low, high, panel_w)
    for index, peer in enumerate(peers):
        row, column = divmod(index, columns)
        axes = sheet.axes(left + column * (panel_w + gap), 0.32 + row * step, panel_w, panel_h)
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        axes.set_ylim(len(cells) - 0.5, -0.5)
        axes.minorticks_off()
        axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axes.set_yticks(range(len(cells)), names if column == 0 else [""] * len(cells))
        axes.tick_params(axis="y", labelsize=_TEXT, labelcolor=theme.ink, pad=8)
        axes.grid(axis="y", color=theme.rule, lw=0.7)
        axes.axvline(1, color=theme.muted, lw=1.1, zorder=1)
        style = look[peer]
        axes.set_title(
            f"over {peer}", loc="left", size=_TEXT + 0.5, color=style.colour, weight="bold", pad=6
        )
        axes.set_title(_mean_text(record, peer), loc="right", size=_SMALL, color=theme.muted, pad=6)
        for i, cell in enumerate(cells):
            _ratio_row(axes, theme, style, i, cell, peer, 0.17 if graphs else 0.0)
    return sheet.figure


def _ratio_row(
    axes: Axes, theme: Theme, style: Style, y: float, cell: dict[str, Any], peer: str, dodge: float
) -> None:
    """The point or points of one row, each with its number; a row without says why."""
    edge = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
    entry = rec.contenders(cell).get(peer, {})
    if "against" not in entry:
        given = cell.get("contenders", {}).get(peer, {"status": "not timed"})
        words = "void" if cell["status"] != "ok" else given["status"]
        axes.annotate(
            words, (1, y), xytext=(4, 0), size=_SMALL, color=theme.muted, style="italic", **edge
        )
        return
    points = [(entry["against"], y - dodge, style.colour)]
    if "graph_against" in entry:
        points.append((entry["graph_against"], y + dodge, theme.surface))
    low, high = axes.get_xlim()
    for found, at, fill in points:
        value = found["ratio"]
        tie = " tie" if found["verdict"] == "tie" else ""
        axes.annotate(
            _ratio_text(value) + tie, (1, at), xytext=(4, 0), size=_SMALL,
            color=theme.muted if tie else theme.ink, **edge,
        )  # fmt: skip
        if not low <= value <= high:  # beyond the axis: an arrow at its end, the number beside it
            mark, x = (">", 0.98) if value > high else ("<", 0.02)
            axes.plot([x], [at], mark, color=style.colour, markersize=6, zorder=3,
                      transform=axes.get_yaxis_transform())  # fmt: skip
            continue
        axes.plot([found["low"], found["high"]], [at, at], color=style.colour, lw=2.2, zorder=3,
                  solid_capstyle="round")  # fmt: skip
        axes.plot([value], [at], "o", color=fill, markeredgecolor=style.colour, markersize=5.5,
                  markeredgewidth=1.3, zorder=4)  # fmt: skip


# ---- files -----------------------------------------------------------------------------------

CHARTS: dict[str, Callable[[Record, Theme], Figure]] = {
    "speed": speed,
    "ratio": ratio,
    "roofline": roofline,
}


def why_not(record: Record, chart: str) -> str:
    """Why a record has no such picture, "" when it has one."""
    if not any(rec.contenders(c) for c in record.cells):
        return "no row was timed"
    if chart == "speed" and not rec.is_grid(record.cells):
        return "the rows are not lines over the sequence length"
    if chart == "ratio" and not rec.peer_names(record.cells):
        return "no peer was timed beside us"
    copied = (record.document.get("ceilings") or {}).get("copy_bytes_per_s")
    if chart == "roofline" and not (copied and _ceilings(record)):
        return "the record has no ceilings: none were measured in that run"
    return ""


def _settings(name: str) -> dict[str, Any]:
    return {
        "font.family": [_LAYOUT_FONT],
        "svg.fonttype": "none",
        "svg.hashsalt": name,  # else ids are random: a rerun must give the same bytes
        "axes.unicode_minus": False,
    }


def draw(record: Record, chart: str, theme: Theme, file_format: str) -> bytes:
    """One picture of a record, as a file's bytes.

    The same record, matplotlib and theme give the same bytes. The file names its record and the
    record's SHA-256. Raises NothingToDraw where the record has no such picture, and CommandError
    where there is no matplotlib.
    """
    reason = why_not(record, chart)
    if reason:
        raise NothingToDraw(reason)
    matplotlib = _module("matplotlib")
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
    # Laid out in one font, shown in the reader's own, which is narrower.
    svg = stream.getvalue().decode("utf-8").replace(f"'{_LAYOUT_FONT}'", _SVG_FONTS)
    return re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE).encode("utf-8")
