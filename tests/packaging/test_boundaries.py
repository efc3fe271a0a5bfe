"""The boundary rule of CONTRIBUTING.md, read off the sources: what includes what, and that no
kernel family names another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from installations import ROOT

# The boxes that each box may include: itself and those below it. The CPU's and the GPU's kernels
# take problems and plans, which belong to the core.
BELOW = {
    "include": {"flashmoe"},
    "core": {"core", "flashmoe"},
    "cpu": {"cpu", "core", "flashmoe"},
    "cuda": {"cuda", "core", "flashmoe"},
    "bindings": {"bindings", "flashmoe"},
}
_SOURCES = {".h", ".hpp", ".cpp", ".cu", ".cuh", ".in"}
_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"/]+)/', re.MULTILINE)
_FAMILY = re.compile(r"^extern const \w*Family (k\w+);", re.MULTILINE)


def sources(box: str) -> dict[str, str]:
    files = sorted(path for path in (ROOT / box).rglob("*") if path.suffix in _SOURCES)
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}


@pytest.mark.parametrize("box", BELOW)
def test_arrows_point_down(box: str) -> None:
    found = {name: set(_INCLUDE.findall(text)) - BELOW[box] for name, text in sources(box).items()}
    assert {name: beyond for name, beyond in found.items() if beyond} == {}


def test_no_family_names_another() -> None:
    """A family stands in one folder, and those that choose among families are in the core."""
    families = _FAMILY.findall((ROOT / "core/backends.h").read_text(encoding="utf-8"))
    assert len(families) > 20
    backends = sources("cuda") | sources("cpu")
    for family in families:
        named = re.compile(rf"\b{family}\b")
        folders = {Path(name).parent.as_posix() for name, text in backends.items()
                   if named.search(text)}  # fmt: skip
        assert len(folders) == 1, (family, folders)
