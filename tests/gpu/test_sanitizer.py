"""compute-sanitizer over every kernel: memory errors, races, uninitialised reads, barriers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import capi
import kernels
import pytest
from gpu import families, moe_layers

pytestmark = pytest.mark.gpu

ATTENTION = Path(__file__).with_name("sanitize_attention.py")
MOE = Path(__file__).with_name("sanitize_moe.py")
ERROR_CODE = 86
LIMIT_S = 600


@pytest.fixture(scope="module")
def sanitizer() -> str:
    """compute-sanitizer, if it can watch a GPU here."""
    for candidate in (shutil.which("compute-sanitizer"), "/usr/local/cuda/bin/compute-sanitizer"):
        if candidate and Path(candidate).exists():
            return candidate
    pytest.skip("needs compute-sanitizer, which is part of the CUDA toolkit")


def kernels_of(program: Path) -> set[str]:
    """What the program runs on its own, where it passes."""
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return set(done.stdout.split())


@pytest.fixture(autouse=True, scope="module")
def _the_programs_pass_on_their_own() -> None:
    ran = kernels_of(ATTENTION)
    wanted = {kernel.table_name for family in families.serving()
              for kernel in kernels.attention(family)}  # fmt: skip
    assert {name.removesuffix("_w8") for name in ran} == wanted
    ran = kernels_of(MOE)
    for family in moe_layers.serving():
        assert any(f"_{family}_" in name for name in ran), f"no kernel of {family} ran"


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
@pytest.mark.parametrize("program", [ATTENTION, MOE], ids=lambda p: p.stem)
def test_compute_sanitizer_finds_nothing(sanitizer: str, tool: str, program: Path) -> None:
    options = ["--tool", tool, "--error-exitcode", str(ERROR_CODE), "--print-limit", "20"]
    if tool == "racecheck":
        options += ["--racecheck-report", "all"]
    done = subprocess.run(
        [sanitizer, *options, sys.executable, str(program)],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    text = done.stdout + done.stderr
    if "Device not supported" in text:
        pytest.skip("compute-sanitizer does not support this device or driver")
    assert done.returncode == 0, f"{capi.library_path()}\n{text[-6000:]}"
    assert "ERROR SUMMARY: 0 errors" in text or "0 hazards displayed (0 errors, 0 warnings)" in text
