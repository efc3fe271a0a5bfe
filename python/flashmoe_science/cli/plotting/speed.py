"""Speed against sequence length, and against arithmetic intensity under the roof of the machine."""

from __future__ import annotations

import math
from typing import Any

from flashmoe_science.cli.measure import OURS
from flashmoe_science.cli.plotting import record as rec
from flashmoe_science.cli.plotting.record import Record
from flashmoe_science.cli.plotting.sheet import (
    EDGE,
    SMALL,
    TEXT,
    Axes,
    Figure,
    Sheet,
    decade_ticks,
    drawn,
    inches,
    key_height,
    short,
    spread,
)
from flashmoe_science.cli.plotting.theme import Style, Theme, styles
from flashmoe_science.cli.suites import (
    ATTENTION,
    BACKWARD,
    MOE,
    MOE_BACKWARD,
    MOE_TRAINING,
    TRAINING,
)

_PANEL_W, _PANEL_H, _GAP_X, _GAP_Y = 2.3, 1.75, 0.22, 0.52  # inches
_LEFT = 0.62  # for the numbers of the axis
_MOST_LABELS = 9  # of ticks beside each other


def ceilings(record: Record) -> dict[str, float]:
    """TFLOP/s of a plain matrix product in the same run, for the element types measured."""
    measured = (record.document.get("ceilings") or {}).get("matmul_flops_per_s") or {}
    dtypes = dict.fromkeys(c["shape"]["dtype"] for c in record.cells)
    return {dtype: measured[dtype] * 1e-12 for dtype in dtypes if measured.get(dtype)}


def _end_labels(axes: Axes, ends: dict[str, float], look: dict[str, Style], high: float) -> None:
    """Each line's name right of its end, moved apart where they would overlap."""
    gap = TEXT * 1.25 / 72 / _PANEL_H * high
    places = spread(list(ends.values()), gap)
    lift = max(0.0, gap * 0.2 - min(places, default=0.0))
    x = axes.get_xlim()[1]
    for name, place in zip(ends, places, strict=True):
        style = look[name]
        axes.annotate(
            style.label, (x, place + lift), xytext=(6, 0), textcoords="offset points",
            annotation_clip=False, va="center", size=TEXT, color=style.colour,
            weight="bold" if style.ours else "normal",
        )  # fmt: skip


def _lines(
    axes: Axes, cells: list[dict[str, Any]], look: dict[str, Style], per_tera: float, theme: Theme
) -> dict[str, float]:
    """Draws a panel's lines, each with the spread between quartiles; returns where they end."""

    def entry(cell: dict[str, Any], name: str) -> dict[str, Any] | None:
        found = rec.contenders(cell).get(name)
        return found and rec.times(cell, found)

    ends: dict[str, float] = {}
    unit = 1e-12 * per_tera
    cells = sorted(cells, key=lambda c: rec.place(c["shape"]))
    for name, style in look.items():
        # A row without this contender breaks its line: nothing is drawn through points that were
        # not run.
        timed = [(rec.place(c["shape"]), c["flops"], entry(c, name)) for c in cells]
        nothing = float("nan")
        x = [length for length, _, _ in timed]
        y = [e["tflops"] * per_tera if e else nothing for _, _, e in timed]
        edges = [
            [f * unit / e[quartile] if e and e[quartile] else nothing for _, f, e in timed]
            for quartile in ("q3_s", "q1_s")
        ]
        axes.fill_between(x, *edges, color=style.colour, alpha=0.18, lw=0, zorder=style.order)
        axes.plot(x, y, lw=style.width, markersize=5, **drawn(style, theme))
        measured = [value for value in y if not math.isnan(value)]
        if measured:
            ends[name] = measured[-1]
    return ends


def _ceiling_line(axes: Axes, level: float, theme: Theme, named: bool) -> None:
    axes.axhline(level, color=theme.muted, lw=1.1, ls=(0, (4, 3)), zorder=1)
    if named:
        axes.annotate(
            f"matrix product {rec.number(level)}", (0, level), xytext=(0, 1.5), va="bottom",
            xycoords=axes.get_yaxis_transform(), textcoords="offset points",
            size=SMALL, color=theme.muted,
            bbox={"facecolor": theme.surface, "edgecolor": "none", "pad": 0},
        )  # fmt: skip


def speed(record: Record, theme: Theme) -> Figure:
    """A panel for each element type, mask and head dimension, or routing and layer: ours, the
    peers, the ceiling.

    Panels of one element type have one scale.
    """
    cells = [c for c in record.cells if rec.contenders(c)]
    unit, per_tera = rec.unit(record.document)
    keys = list(dict.fromkeys(rec.panel_key(c["shape"]) for c in record.cells))
    across = sorted({key[2:] for key in keys})
    down = list(dict.fromkeys(key[:2] for key in keys))
    look = styles(rec.timed_names(cells), theme)
    lengths = sorted({rec.place(c["shape"]) for c in record.cells})
    tops = ceilings(record)
    fastest = dict(tops)
    for cell in cells:
        dtype = cell["shape"]["dtype"]
        speeds = [rec.times(cell, e)["tflops"] for e in rec.contenders(cell).values()]
        fastest[dtype] = max([fastest.get(dtype, 0.0), *speeds])

    names_w = 0.2 + max(inches(s.label, bold=s.ours) for s in look.values()) + EDGE / 2
    panel_w = max(_PANEL_W, (6.4 - _LEFT - names_w + _GAP_X) / len(across) - _GAP_X)
    width = _LEFT + len(across) * (panel_w + _GAP_X) - _GAP_X + names_w
    body = 0.3 + len(down) * (_PANEL_H + _GAP_Y) - 0.02
    words = [
        f"{unit} against {rec.place_name(record.cells)[1]}; the band is between quartiles",
        rec.provenance(record.document),
    ]
    sheet = Sheet(theme, record.document["title"], words, width, body)
    for row, (dtype, mask) in enumerate(down):
        high = 1.13 * per_tera * fastest.get(dtype, 1.0)
        for column, dims in enumerate(across):
            key = (dtype, mask, *dims)
            of = [c for c in record.cells if rec.panel_key(c["shape"]) == key]
            if not of:
                continue
            x, y = _LEFT + column * (panel_w + _GAP_X), 0.3 + row * (_PANEL_H + _GAP_Y)
            axes = sheet.axes(x, y, panel_w, _PANEL_H)
            axes.set_xscale("log", base=2)
            axes.set_xlim(lengths[0] / 1.15, lengths[-1] * 1.15)
            axes.set_xticks(lengths, _labels(lengths))
            axes.minorticks_off()
            axes.set_ylim(0, high)
            axes.grid(axis="y", color=theme.rule, lw=0.7)
            axes.tick_params(labelleft=column == 0)
            sheet.heading(axes, rec.panel_name(key, {d for d, _ in down}))
            ends = _lines(axes, of, look, per_tera, theme)
            if dtype in tops:
                _ceiling_line(axes, tops[dtype] * per_tera, theme, named=column == 0)
            if column == len(across) - 1:
                _end_labels(axes, ends, look, high)
    return sheet.figure


def _labels(lengths: list[int]) -> list[str]:
    """One label per tick; with many ticks every other one, including the last."""
    every = 1 if len(lengths) <= _MOST_LABELS else 2
    last = len(lengths) - 1
    return [short(n) if (last - i) % every == 0 else "" for i, n in enumerate(lengths)]


_TRAFFIC = {
    MOE: "tokens, logits, output and weights of experts that have tokens",
    BACKWARD: "q, k, v, output, their gradients and LSE",
    TRAINING: "both calls' tensors",
    MOE_BACKWARD: "what was saved, tokens, logits, weights and all gradients",
    MOE_TRAINING: "both calls' tensors",
}


def _traffic(document: dict[str, Any]) -> str:
    """The bytes that must be read and written once."""
    return _TRAFFIC.get(document.get("operation", ATTENTION), "q, k, v, output and LSE")


# ---- roofline --------------------------------------------------------------------------------


def roofline(record: Record, theme: Theme) -> Figure:
    """Speed against arithmetic intensity, under the measured roof of copies and matrix products."""
    unit, per_tera = rec.unit(record.document)
    copy = record.document["ceilings"]["copy_bytes_per_s"]
    slope = copy * 1e-12 * per_tera  # speed for each operation a byte
    tops = {dtype: top * per_tera for dtype, top in ceilings(record).items()}
    knees = {dtype: top / slope for dtype, top in tops.items()}
    cells = [c for c in record.cells if rec.contenders(c)]
    look = styles(rec.timed_names(cells), theme)
    points = {
        name: [
            (c["flops"] / c["bytes"], rec.times(c, rec.contenders(c)[name])["tflops"] * per_tera)
            for c in cells
            if name in rec.contenders(c)
        ]
        for name in look
    }
    xs = [*knees.values(), *(x for of in points.values() for x, _ in of)]
    ys = [*tops.values(), *(y for of in points.values() for _, y in of)]
    x_low, x_high = min([*xs, min(knees.values()) / 8]) / 1.6, max(xs) * 2
    y_low, y_high = min(ys) / 1.6, max(ys) * 1.8

    width, height, left = 7.4, 4.0, 0.72
    axes_w = width - left - EDGE
    key_h = key_height(list(look.values()), axes_w)
    traffic = _traffic(record.document)
    words = [
        f"{unit} against arithmetic intensity (operations for each byte of {traffic}); "
        "lines: copy and matrix product measured in the same run",
        rec.provenance(record.document),
    ]
    sheet = Sheet(theme, record.document["title"], words, width, key_h + height + 0.72)
    axes = sheet.axes(left, key_h + 0.1, axes_w, height)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(x_low, x_high)
    axes.set_ylim(y_low, y_high)
    axes.minorticks_off()
    for axis, ends in ((axes.xaxis, (x_low, x_high)), (axes.yaxis, (y_low, y_high))):
        ticks = decade_ticks(*ends)
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.grid(color=theme.rule, lw=0.6)
    axes.set_xlabel("FLOP / byte", size=TEXT, color=theme.muted, loc="right")
    sheet.key(list(look.values()), left + 0.08)

    line = {"color": theme.muted, "lw": 1.3, "zorder": 1}
    knee = max(knees.values())
    axes.plot([x_low, knee], [x_low * slope, knee * slope], **line)
    rise = math.log10(y_high / y_low) / height
    run = math.log10(x_high / x_low) / axes_w
    at = max(x_low, y_low / slope) * 1.3
    words_look = {"textcoords": "offset points", "size": TEXT, "color": theme.muted, "zorder": 5}
    axes.annotate(
        f"copy {copy * 1e-12:.2g} TB/s" if copy >= 1e12 else f"copy {copy * 1e-9:.3g} GB/s",
        (at, at * slope), xytext=(-4, 5), rotation=math.degrees(math.atan(run / rise)),
        rotation_mode="anchor", **words_look,
    )  # fmt: skip
    for dtype, level in tops.items():
        axes.plot([knees[dtype], x_high], [level, level], **line)
        axes.annotate(
            f"{dtype} matrix product {rec.number(level)} {unit}", (knees[dtype], level),
            xytext=(14, 4), **words_look,
        )  # fmt: skip
    for name, of in points.items():
        axes.plot(
            [x for x, _ in of], [y for _, y in of], linestyle="none", alpha=0.9,
            markersize=6.5 if name == OURS else 5, **drawn(look[name], theme),
        )  # fmt: skip
    return sheet.figure
