"""compute-sanitizer over every kernel: memory errors, races, uninitialised reads, barriers.

Families apart, since a run takes as long as the tool does with each kernel's code: memcheck is
given every call of the programs, the others each kernel on a small one.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import capi
import kernels
import pytest
from gpu import families, moe_layers, sanitize_attention_backward, sanitize_moe

pytestmark = pytest.mark.gpu

ATTENTION = Path(__file__).with_name("sanitize_attention.py")
BACKWARD = Path(__file__).with_name("sanitize_attention_backward.py")
MOE = Path(__file__).with_name("sanitize_moe.py")
PARTS = [*((ATTENTION, family) for family in kernels.FAMILIES),
         *((BACKWARD, family) for family in sanitize_attention_backward.FAMILIES),
         *((MOE, part) for part in sanitize_moe.PARTS)]  # fmt: skip
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
ERROR_CODE = 86
LIMIT_S = 240


@pytest.fixture(scope="module")
def sanitizer() -> str:
    """compute-sanitizer, if it can watch a GPU here."""
    for candidate in (shutil.which("compute-sanitizer"), "/usr/local/cuda/bin/compute-sanitizer"):
        if candidate and Path(candidate).exists():
            return candidate
    pytest.skip("needs compute-sanitizer, which is part of the CUDA toolkit")


def _skip_unless_served(program: Path, part: str) -> None:
    why_not = moe_layers.why_not if program == MOE else families.why_not
    name = "sm90_whole_tiles" if (program, part) == (BACKWARD, "sm90") else part
    reason = why_not(name) if part != "route" else None
    if reason is not None:
        pytest.skip(reason)


def _kernels(program: Path, part: str) -> set[str]:
    """That the part is to run, on any of its calls."""
    if program == ATTENTION:
        return {kernel.table_name for kernel in kernels.attention(part)}
    if program == BACKWARD:
        compiled = kernels.attention(f"{part}_backward")
        return {sanitize_attention_backward.kernel_name(part, kernel) for kernel in compiled}
    return sanitize_moe.stated_kernels(part) if moe_layers.is_as_stated() else set()


def _options(program: Path, tool: str) -> list[str]:
    if tool == "memcheck":
        return []
    # Of the experts' calls it is known that they write what they read.
    unwritten = tool == "initcheck" and program == MOE
    return ["--small", "--unwritten"] if unwritten else ["--small"]


@pytest.mark.parametrize(("program", "part"), PARTS, ids=lambda v: getattr(v, "stem", v))
def test_the_programs_pass_on_their_own(program: Path, part: str) -> None:
    _skip_unless_served(program, part)
    done = subprocess.run([sys.executable, str(program), part], capture_output=True, text=True,
                          timeout=LIMIT_S, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ran = {name.removesuffix("_w8") for name in done.stdout.split()}
    assert ran and ran >= _kernels(program, part)


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(("program", "part"), PARTS, ids=lambda v: getattr(v, "stem", v))
def test_compute_sanitizer_finds_nothing(
    sanitizer: str, tool: str, program: Path, part: str
) -> None:
    _skip_unless_served(program, part)
    options = ["--tool", tool, "--error-exitcode", str(ERROR_CODE), "--print-limit", "20"]
    if tool == "racecheck":
        options += ["--racecheck-report", "all"]
    done = subprocess.run(
        [sanitizer, *options, sys.executable, str(program), *_options(program, tool), part],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    text = done.stdout + done.stderr
    if "Device not supported" in text:
        pytest.skip("compute-sanitizer does not support this device or driver")
    assert done.returncode == 0, f"{capi.library_path()}\n{text[-6000:]}"
    assert "ERROR SUMMARY: 0 errors" in text or "0 hazards displayed (0 errors, 0 warnings)" in text
    ran = {name.removesuffix("_w8") for name in done.stdout.split()}
    assert ran >= _kernels(program, part), "not every kernel was watched"
