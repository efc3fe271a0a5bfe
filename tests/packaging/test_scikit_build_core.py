"""A scikit-build-core project finds the library in the installed wheel without being told where."""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from installations import ROOT, checked, require_tool

pytest.importorskip("scikit_build_core")

PROJECT = ROOT / "examples/scikit_build_core"

PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import attend
import numpy as np

rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 2, 9, 3, 16), dtype=np.float32)
logits = np.einsum("bihd,bjhd->bhij", q, k, dtype=np.float64) / 4
logits[..., np.triu(np.ones((9, 9), bool), 1)] = -np.inf
weights = np.exp(logits - logits.max(-1, keepdims=True))
expected = np.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdims=True), v)
assert np.allclose(attend.attend(q, k, v), expected, atol=1e-5)
try:
    attend.attend(*(x[..., :4].copy() for x in (q, k, v)))
except ValueError as error:
    assert str(error).startswith("q: "), error
else:
    raise AssertionError("a head dimension of 4 was not refused")
"""


@pytest.fixture(scope="module")
def wheel(wheel_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("scikit_build_core")
    require_tool("cmake")
    shutil.copytree(PROJECT, scratch / "project")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    checked([*pip, "--wheel-dir", scratch, scratch / "project"])
    [wheel] = scratch.glob("attend-*.whl")
    return wheel


def test_the_package_computes(wheel: Path, wheel_root: Path, tmp_path: Path) -> None:
    """Beside ours, as in site-packages, where its run path leads to our library."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    (tmp_path / "flashmoe_science").symlink_to(wheel_root)
    dynamic = checked([require_tool("readelf"), "-d", tmp_path / "attend/libattend.so"])
    assert "$ORIGIN/../flashmoe_science/lib" in dynamic
    checked([sys.executable, "-c", PROGRAM, tmp_path])
