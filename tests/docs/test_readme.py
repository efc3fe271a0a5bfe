"""The programs in README.md and of docs run, their links and the docs' lead somewhere."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


def programs(language: str, page: Path = README) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def framework(program: str) -> str:
    return next(n for n in ("torch", "jax", "numpy") if re.search(rf"^import {n}", program, re.M))


MOE = ROOT / "docs" / "moe.md"
JAX = ROOT / "docs" / "jax.md"
TORCH = ROOT / "docs" / "torch.md"
ALL = [p for page in (README, MOE, JAX, TORCH) for p in programs("python", page)]


@pytest.mark.parametrize("program", ALL, ids=framework)
def test_a_python_program_runs(program: str, tmp_path: Path) -> None:
    pytest.importorskip(framework(program))
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_every_python_program_is_found() -> None:
    assert [framework(p) for p in programs("python")] == ["torch", "numpy", "jax"]
    of_moe = [framework(p) for p in programs("python", MOE)]
    assert of_moe == ["torch", "numpy", "torch", "numpy", "numpy"]
    assert [framework(p) for p in programs("python", JAX)] == ["jax"]
    assert [framework(p) for p in programs("python", TORCH)] == ["torch"] * 3


def test_the_c_program_runs(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (source,) = programs("c")
    (tmp_path / "attend.c").write_text(source)
    config = [sys.executable, "-m", "flashmoe_science", "config", "--cflags", "--libs"]
    found = subprocess.run(config, capture_output=True, text=True, check=False)
    if found.returncode != 0:
        pytest.skip(f"the C library is not inside the package here: {found.stderr.strip()}")
    flags = found.stdout.split()
    warnings = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    build = [compiler, *warnings, "attend.c", *flags, "-o", "attend"]
    subprocess.run(build, cwd=tmp_path, check=True)
    subprocess.run([tmp_path / "attend"], check=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_map_of_the_sources_is_true() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    folders = "core|cpu|cuda|cmake|bindings|python|include|tests"
    named = re.findall(rf"(?<![\w/.])((?:{folders})/[\w./]*\w)", text)
    missing = [path for path in named if not (ROOT / path).exists()]
    assert missing == []
