"""The project's description on a package index, where README.md stands without the repository.

No file of the repository is beside it there, nor has a heading an anchor: of a link that is not to
another site the text is left. The tables and pictures of measurements are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SECTION = re.compile(r"^## Measured\n.*?(?=^## )", re.MULTILINE | re.DOTALL)
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^\]]*)\]\((?!https:)[^)]*\)")


def description(readme: str) -> str:
    """README.md's text for an index."""
    parts = _FENCED.split(_SECTION.sub("", readme))
    return "".join(part if part.startswith("```") else _LINK.sub(r"\1", part) for part in parts)


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """scikit-build-core asks for it as pyproject.toml says."""
    text = description(Path("README.md").read_text(encoding="utf-8"))
    return {"readme": {"content-type": "text/markdown", "text": text}}
