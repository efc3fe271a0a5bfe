"""The paper that charts are drawn on: a matplotlib figure laid out in inches.

Words are set and measured in matplotlib's own font, so that every machine lays a picture out alike.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

from flashmoe_science.cli.output import CommandError
from flashmoe_science.cli.plotting.theme import Style, Theme

Figure = Any  # matplotlib's, which is imported when something is drawn
Axes = Any

TITLE, TEXT, SMALL = 12.5, 8.5, 7.5  # points
EDGE = 0.22  # inches between anything and the edge of the picture
FONT = "DejaVu Sans"
_LINE = 1.45 / 72  # inches of a line of text, for each of its points
_KEY_LINE = 0.24  # inches of a line of the key


class MissingMatplotlib(CommandError):
    """Nothing can be drawn here; the message says what to install."""


def module(name: str) -> Any:
    """A module of matplotlib, which is imported when something is drawn and not before."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingMatplotlib(
            "pictures need matplotlib: pip install 'flashmoe-science[bench]'"
        ) from error


def inches(words: str, size: float = TEXT, bold: bool = False) -> float:
    """How wide `words` are when set in `size` points."""
    font = module("matplotlib.font_manager").FontProperties(
        family=FONT, size=size, weight="bold" if bold else "normal"
    )
    measure = module("matplotlib.textpath").text_to_path.get_text_width_height_descent
    return float(measure(words, font, ismath=False)[0]) / 72


def wrap(words: str, width: float, size: float = TEXT, bold: bool = False) -> list[str]:
    """`words` in lines of at most this width in inches, or of one word."""
    lines: list[str] = []
    for word in words.split():
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and inches(longer, size, bold) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


class Sheet:
    """A figure measured in inches from its top left corner, with title and words at its head."""

    def __init__(
        self, theme: Theme, title: str, words: Sequence[str], width: float, body: float
    ) -> None:
        self.theme = theme
        self.width = width
        room = width - 2 * EDGE
        titles = wrap(title, room, TITLE, bold=True)
        lines = [line for text in words for line in wrap(text, room)]
        self.top = EDGE + _LINE * (TITLE * len(titles) + TEXT * len(lines)) + 0.12
        self.height = self.top + body
        self.figure: Figure = module("matplotlib.figure").Figure(
            figsize=(width, self.height), facecolor=theme.surface
        )
        y = EDGE
        for line in titles:
            self.text(EDGE, y, line, size=TITLE, weight="bold", va="top")
            y += _LINE * TITLE
        y += 0.04
        for line in lines:
            self.text(EDGE, y, line, color=theme.muted, va="top")
            y += _LINE * TEXT

    def text(self, x: float, y: float, words: str, **look: Any) -> None:
        """Words that are anchored, as `look` says, x, y inches from the sheet's top left corner."""
        given = {"color": self.theme.ink, "size": TEXT} | look
        self.figure.text(x / self.width, 1 - y / self.height, words, **given)

    def axes(self, x: float, y: float, width: float, height: float) -> Axes:
        """Axes whose top left corner is x, y inches from that of the sheet's body."""
        bottom = 1 - (self.top + y + height) / self.height
        box = (x / self.width, bottom, width / self.width, height / self.height)
        axes = self.figure.add_axes(box, facecolor="none")
        for side in ("top", "left", "right"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(self.theme.rule)
        axes.tick_params(length=0, labelsize=SMALL, labelcolor=self.theme.muted, pad=4)
        axes.tick_params(which="minor", length=0)
        axes.set_axisbelow(True)
        return axes

    def heading(self, axes: Axes, words: str, aside: str = "", colour: str = "") -> None:
        """The name of a panel, and something quieter at its right end."""
        colour = colour or self.theme.ink
        axes.set_title(words, loc="left", size=TEXT, color=colour, weight="bold", pad=5)
        if aside:
            axes.set_title(aside, loc="right", size=SMALL, color=self.theme.muted, pad=5)

    def key(self, named: Sequence[Style], x: float) -> None:
        """Marks and names at the top of the body, `x` inches from the left, in `key_lines`."""
        line2d = module("matplotlib.lines").Line2D
        for row, styles in enumerate(key_lines(named, self.width - x - EDGE)):
            at, y = x, self.top + (row + 0.5) * _KEY_LINE
            for style in styles:
                look = drawn(style, self.theme) | {"markersize": 6, "linestyle": "none"}
                place = ([at / self.width], [1 - y / self.height])
                self.figure.add_artist(line2d(*place, **look))
                bold = style.ours
                weight = "bold" if bold else "normal"
                self.text(at + 0.1, y, style.label, color=style.colour, weight=weight, va="center")
                at += inches(style.label, bold=bold) + 0.36


def key_lines(named: Sequence[Style], width: float) -> list[list[Style]]:
    """The entries of a key in lines at most so many inches wide."""
    lines: list[list[Style]] = [[]]
    used = 0.0
    for style in named:
        needed = inches(style.label, bold=style.ours) + 0.36
        if lines[-1] and used + needed > width:
            lines.append([])
            used = 0.0
        lines[-1].append(style)
        used += needed
    return lines


def key_height(named: Sequence[Style], width: float) -> float:
    return len(key_lines(named, width)) * _KEY_LINE


def drawn(style: Style, theme: Theme) -> dict[str, Any]:
    """How a contender's points are drawn: filled with a rim, or outline only."""
    thin = style.mark in "x+"
    return {
        "color": style.colour,
        "marker": style.mark,
        "markeredgecolor": style.colour if thin else theme.surface,
        "markeredgewidth": 1.2 if thin else 0.6,
        "zorder": style.order,
    }


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


def short(length: int) -> str:
    """512, 1k, 16k: short enough for an axis."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else f"{length}"


def decade_ticks(low: float, high: float) -> list[float]:
    """Round numbers for a logarithmic axis: powers of ten, and 2 and 5 of each where few fit."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if math.log10(high / low) < 2.5 else (1,)
    found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    return [tick for tick in found if low <= tick <= high]
