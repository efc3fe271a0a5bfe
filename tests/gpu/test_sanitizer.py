"""compute-sanitizer over every kernel: memory errors, races, uninitialised reads, barriers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import capi
import kernels
import pytest
from gpu import families

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).with_name("sanitize_attention.py")
ERROR_CODE = 86
LIMIT_S = 600


@pytest.fixture(scope="module")
def sanitizer() -> str:
    """compute-sanitizer, if it can watch a GPU here."""
    for candidate in (shutil.which("compute-sanitizer"), "/usr/local/cuda/bin/compute-sanitizer"):
        if candidate and Path(candidate).exists():
            return candidate
    pytest.skip("needs compute-sanitizer, which is part of the CUDA toolkit")


@pytest.fixture(autouse=True, scope="module")
def _the_program_passes_on_its_own() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran = set(done.stdout.split())
    wanted = {kernel.table_name for family in families.serving()
              for kernel in kernels.attention(family)}  # fmt: skip
    assert {name.removesuffix("_w8") for name in ran} == wanted


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_compute_sanitizer_finds_nothing(sanitizer: str, tool: str) -> None:
    options = ["--tool", tool, "--error-exitcode", str(ERROR_CODE), "--print-limit", "20"]
    if tool == "racecheck":
        options += ["--racecheck-report", "all"]
    done = subprocess.run(
        [sanitizer, *options, sys.executable, str(PROGRAM)],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    text = done.stdout + done.stderr
    if "Device not supported" in text:
        pytest.skip("compute-sanitizer does not support this device or driver")
    assert done.returncode == 0, f"{capi.library_path()}\n{text[-6000:]}"
    assert "ERROR SUMMARY: 0 errors" in text or "0 hazards displayed (0 errors, 0 warnings)" in text
