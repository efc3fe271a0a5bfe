"""Two themes, light and dark, and one colour and one mark per contender in both."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from flashmoe_science.cli.measure import OURS


@dataclasses.dataclass(frozen=True)
class Theme:
    """Colours of one look. The diverging ones lead from slower over even to faster."""

    name: str
    surface: str
    ink: str
    muted: str
    rule: str
    ours: str
    peers: tuple[str, ...]
    plain: str
    diverging: tuple[str, str, str, str, str]


# The hues are those of Okabe and Ito, which stay apart for every common kind of colour blindness,
# darkened or lightened until text in them has a contrast of at least 4.5 to the surface.
LIGHT = Theme(
    name="light",
    surface="#ffffff",
    ink="#1f2328",
    muted="#59636e",
    rule="#d8dee4",
    ours="#0a5cc2",
    peers=("#b84a00", "#00785a", "#a83c84", "#8a6100", "#0f7a9e", "#8f4a3c", "#5a5f00", "#6a4bb8"),
    plain="#6a727b",
    diverging=("#ad4a06", "#efb389", "#f1f3f5", "#94bde9", "#155aa6"),
)
DARK = Theme(
    name="dark",
    surface="#0d1117",
    ink="#e6edf3",
    muted="#9aa4af",
    rule="#2b323b",
    ours="#62aeff",
    peers=("#ff9a5c", "#3fcf9f", "#e691cc", "#e3b341", "#7fd3ee", "#e0a596", "#c9cf5a", "#b9a3f5"),
    plain="#98a1ab",
    diverging=("#b5560f", "#6e4222", "#262c34", "#28517f", "#1f6ec5"),
)
THEMES = {theme.name: theme for theme in (LIGHT, DARK)}

# A peer keeps its colour and mark in every picture of every record. Others take what is left; when
# none is left, they reuse a colour with a mark of their own.
_KNOWN = (
    "torch-flash", "torch-cudnn", "torch-efficient", "fa3", "flashinfer", "jax-cudnn", "fa4", "fa2",
)  # fmt: skip
# Peers of a mixture of experts, which no picture shows together with the others.
_KNOWN_OF_MOE = {"torch-grouped": 0, "sonicmoe": 1, "vllm-triton": 2, "torch-loop": 3}
_PLAIN = "torch-math"  # the arithmetic written out: a backdrop
_MARKS = ("s", "^", "D", "v", "P", "X", "p", "h", "<", ">", "*", "d", "8", "H")


@dataclasses.dataclass(frozen=True)
class Style:
    """How one contender is drawn, above (`order`) or below the others, and whether it is ours."""

    label: str
    colour: str
    mark: str
    width: float
    order: int
    ours: bool = False


def styles(names: Sequence[str], theme: Theme) -> dict[str, Style]:
    """A style for each name, in the order of the names."""
    slots = {name: _KNOWN.index(name) for name in names if name in _KNOWN}
    slots |= {name: slot for name, slot in _KNOWN_OF_MOE.items() if name in names}
    strangers = sorted(set(names) - {OURS, _PLAIN, *_KNOWN, *_KNOWN_OF_MOE})
    free = [slot for slot in range(len(_MARKS)) if slot not in slots.values()]
    slots |= {name: free[i % len(free)] for i, name in enumerate(strangers)}
    made = {
        name: Style(name, theme.peers[slot % len(theme.peers)], _MARKS[slot], 1.5, 3)
        for name, slot in slots.items()
    }
    made[_PLAIN] = Style(_PLAIN, theme.plain, "x", 1.1, 2)
    made[OURS] = Style("FlashMoE", theme.ours, "o", 2.6, 4, ours=True)
    return {name: made[name] for name in names}
