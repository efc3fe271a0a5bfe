"""Doxygen's input filter: the headers' plain comments, marked as the documentation that they are.

    python doxygen_filter.py include/flashmoe/flashmoe.h

A comment before a declaration documents it, one behind a field that field. Lines that are indented
within a comment (formulas, tables) stay as they are. The inline namespaces of flashmoe.hpp, which
no user spells, are left out.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

_FORMULA = re.compile(r"^(\s*(?:\*|///) {2,}\S)")


def _verbatim(lines: Iterable[str]) -> Iterator[str]:
    """Wraps indented lines of comments in \\verbatim."""
    inside = False
    for line in lines:
        indented = _FORMULA.match(line) is not None and "/**<" not in line
        if indented and not inside:
            yield "* \\verbatim" if line.lstrip().startswith("*") else "/// \\verbatim"
        elif inside and not indented:
            ends = line.lstrip()
            yield "* \\endverbatim" if ends.startswith("*") else "/// \\endverbatim"
        inside = indented
        # Within \verbatim doxygen would show the comment's own marks.
        yield re.sub(r"^\s*(\*|///) ", "", line) if indented else line


def c_header(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if re.match(r"^/\* -{20,}", line):  # the rule above the words of a section
            yield line
        elif re.match(r"^\s*/\* ", line):
            yield line.replace("/* ", "/** ", 1)
        else:  # behind a field, or an enumerator
            yield re.sub(r"(?<=[;,\w)])(\s+)/\* ", r"\1/**< ", line, count=1)


def cpp_header(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if re.match(r"^\s*//", line):
            yield re.sub(r"//(?=( |$))", "///", line, count=1) if "// ----" not in line else ""
        elif re.match(r"^inline namespace ", line) or line == "}  // inline namespace":
            yield ""
        else:
            yield re.sub(r"(?<=[;,\w)}]) +// (?!NOLINT)", " ///< ", line, count=1)


def main(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = cpp_header(text) if path.suffix == ".hpp" else c_header(text)
    sys.stdout.write("\n".join(_verbatim(lines)) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
