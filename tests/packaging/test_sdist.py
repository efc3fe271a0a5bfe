"""The source distribution holds what a build needs: every source that git has, and nothing else."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from installations import ROOT, checked, require_tool
from pages import link_targets

pytest.importorskip("scikit_build_core")

# Left out on purpose: sdist.exclude in pyproject.toml.
EXCLUDED = (".ci/", "benchmarks/results/")
# Written by the build backend.
ADDED = {"PKG-INFO"}
MAX_BYTES = 4 * 2**20


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("sdist")
    code = (
        "import sys; sys.path.insert(0, 'cmake'); import flashmoe_build as b; b.build_sdist({!r})"
    )
    checked([sys.executable, "-c", code.format(str(scratch))], cwd=ROOT)
    [archive] = scratch.glob("flashmoe_science-*.tar.gz")
    return archive


def members(archive: Path) -> set[str]:
    with tarfile.open(archive) as tar:
        return {name.split("/", 1)[1] for name in tar.getnames() if "/" in name}


def test_holds_what_git_holds(archive: Path) -> None:
    git = require_tool("git")
    listing = subprocess.run(
        [git, "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(ROOT.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    tracked = {path for path in listing.stdout.splitlines() if (ROOT / path).is_file()}
    wanted = {path for path in tracked if not path.startswith(EXCLUDED)}
    assert members(archive) - ADDED == wanted


def test_holds_what_the_build_reads(archive: Path) -> None:
    found = members(archive)
    for path in (
        "CMakeLists.txt",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "SECURITY.md",
        "CITATION.cff",
        "cmake/flashmoe_description.py",
        "cmake/flashmoe_build.py",
        "cmake/strict_nvcc.sh",
        "include/flashmoe/flashmoe.h",
        "include/flashmoe/flashmoe.hpp",
    ):
        assert path in found


def test_has_the_description_of_the_wheel(archive: Path) -> None:
    with tarfile.open(archive) as tar:
        [name] = [name for name in tar.getnames() if name.count("/") == 1 and "PKG-INFO" in name]
        file = tar.extractfile(name)
        assert file is not None
        metadata = email.message_from_bytes(file.read())
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = str(metadata.get_payload())
    assert "fm.flash_attention(" in text
    assert [target for target in link_targets(text) if not target.startswith("https://")] == []


def header_version() -> tuple[str, ...]:
    header = (ROOT / "include/flashmoe/flashmoe.h").read_text(encoding="utf-8")
    return tuple(re.findall(r"#define FLASHMOE_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header))


def test_the_citation_is_of_this_version() -> None:
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    # What the format requires, and of what it allows the kinds that are used.
    assert citation["cff-version"] == "1.2.0"
    assert citation["message"] and citation["title"].startswith("FlashMoE")
    assert citation["type"] == "software"
    assert all(set(author) == {"name"} for author in citation["authors"])
    assert citation["version"] == ".".join(header_version())
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'license = "{citation["license"]}"' in pyproject


def test_fixes_are_promised_for_this_version() -> None:
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert f"| {'.'.join(header_version()[:2])} | yes" in page


def test_is_small(archive: Path) -> None:
    assert archive.stat().st_size <= MAX_BYTES
