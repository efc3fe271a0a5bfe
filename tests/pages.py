"""The pages that people read, and the code and commands on them."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted(DOCS.rglob("*.md")),
]

_BLOCK = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    """What stands behind the fence, "" for nothing."""
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def complaint(self, output: str) -> str:
        """What the program says that it prints, `# prints …`, and did not; "" when it did. There
        "…" stands for anything."""
        for said in re.findall(r"(?:#|//|/\*) prints (.*?)(?: \*/)?$", self.text, re.MULTILINE):
            words = ".*".join(re.escape(piece) for piece in said.split("…"))
            if not re.search(f"^{words}$", output, re.MULTILINE):
                return f"{self} prints no {said}: {output}"
        return ""

    @property
    def commands(self) -> list[str]:
        """The lines of a shell block, without comments; what ends in && goes on in the next."""
        text = re.sub(r"&&\n\s*", "&& ", self.text)
        lines = (re.sub(r"(^|\s+)#.*", "", line).strip() for line in text.splitlines())
        return [line for line in lines if line]


def blocks(*languages: str, page: Path | None = None) -> list[Block]:
    """The blocks of every page or of one, in every language or in some."""
    found = []
    for path in PAGES if page is None else [page]:
        text = path.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(path, line, match[1].strip(), match[2]))
    return [block for block in found if not languages or block.language in languages]


def link_targets(text: str) -> list[str]:
    """The targets of Markdown's links, of its link definitions, and of HTML in it."""
    return [
        *re.findall(r"\]\(([^)\s]+)\)", text),
        *re.findall(r"^\[[^]\n]+\]: (\S+)", text, re.MULTILINE),
        *re.findall(r'(?:href|src|srcset)="([^"\s]+)"', text),
    ]


def _needs(program: str) -> None:
    """Skips where what it imports is not here."""
    for name in re.findall(r"^\s*(?:import|from) (\w+)", program, re.MULTILINE):
        if name != "flashmoe_science":
            module = pytest.importorskip(name)
            if name == "cupy" and not module.is_available():
                pytest.skip("CuPy has no GPU")


def run(program: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python program in a process of its own; skips where what it imports is not here."""
    _needs(program)
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


# An interpreter that has imported torch and forks for every program, which runs and ends as it
# would in one of its own.
_FORKS = """
import os, signal, sys
import torch
for folder in map(str.rstrip, sys.stdin):
    process = os.fork()
    if process == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
else:
    sys.exit()
signal.alarm(300)
os.chdir(folder)
for number, name in enumerate(("/dev/null", ".out", ".err")):
    os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), number)
exec(compile(open(".program").read(), "<string>", "exec"), {"__name__": "__main__"})
"""


@functools.cache
def _forking() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _FORKS]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run_behind_torch(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The same, but that torch is there already where it is imported, which takes most of the time
    of most programs. It comes before flashmoe_science, whichever the program imports first."""
    if not re.search(r"^(import|from) torch", program, re.MULTILINE):
        return run(program, folder)
    _needs(program)
    (folder / ".program").write_text(program, encoding="utf-8")
    process = _forking()
    assert process.stdin is not None and process.stdout is not None
    print(folder, file=process.stdin, flush=True)
    code = int(process.stdout.readline())
    out, err = ((folder / name).read_text(encoding="utf-8") for name in (".out", ".err"))
    return subprocess.CompletedProcess([program], code, out, err)


def sentences() -> dict[str, str]:
    """Errors that are headings of troubleshooting.md, and the programs that show them or ""."""
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
    found = {}
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        program = re.search(r"^```python\n(.*?)^```$", body, re.MULTILINE | re.DOTALL)
        if title.startswith("`"):
            found[title.strip("`")] = program[1] if program else ""
    return found


def says(result: subprocess.CompletedProcess[str], sentence: str) -> bool:
    """Whether a program ended with that error of ours; "…" stands for anything."""
    # Behind it JAX and PEP 678 may add notes.
    raised = re.findall(r"^\s*flashmoe_science\.errors\.\w+: (.*)$", result.stderr, re.MULTILINE)
    words = ".*".join(re.escape(piece) for piece in sentence.split("…"))
    return result.returncode != 0 and re.fullmatch(words, "".join(raised[-1:])) is not None


# Commands that build a program: they run against both kinds of installation, in tests/packaging.
BUILDS_A_PROGRAM = re.compile(
    r"(cc|c\+\+|nvcc|cmake -B build -D|cmake --build build( &&|$)|(export )?PKG_CONFIG_PATH=)"
)
