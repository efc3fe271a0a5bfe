"""compute-sanitizer over the kernels that docs/testing.md lists: memory errors, races,
uninitialised reads, barriers.

Families apart, and some processes for each of attention's, since a run takes as long as the tool
does with each kernel's code: memcheck is given every call of the programs, the others each kernel
on a small one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import capi
import kernels
import pytest
from gpu import (
    families,
    moe_layers,
    sanitize_attention,
    sanitize_attention_backward,
    sanitize_kv_append,
    sanitize_merge,
    sanitize_moe,
    sanitize_sequences,
)
from gpu import sanitize_moe_backward as moe_gradients

pytestmark = pytest.mark.gpu

ATTENTION = Path(__file__).with_name("sanitize_attention.py")
BACKWARD = Path(__file__).with_name("sanitize_attention_backward.py")
APPEND = Path(__file__).with_name("sanitize_kv_append.py")
MERGE = Path(__file__).with_name("sanitize_merge.py")
SEQUENCES = Path(__file__).with_name("sanitize_sequences.py")
MOE = Path(__file__).with_name("sanitize_moe.py")
MOE_BACKWARD = Path(__file__).with_name("sanitize_moe_backward.py")
PARTS = [*((ATTENTION, family) for family in sanitize_attention.FAMILIES),
         *((BACKWARD, family) for family in sanitize_attention_backward.FAMILIES),
         *((APPEND, dtype) for dtype in sanitize_kv_append.PARTS),
         *((MERGE, dtype) for dtype in sanitize_merge.PARTS),
         *((SEQUENCES, part) for part in sanitize_sequences.PARTS),
         *((MOE, part) for part in sanitize_moe.PARTS),
         *((MOE_BACKWARD, part) for part in moe_gradients.PARTS)]  # fmt: skip
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
ERROR_CODE = 86
CLEAN = ("ERROR SUMMARY: 0 errors", "0 hazards displayed (0 errors, 0 warnings)")
LIMIT_S = 240
SHARES = 4  # processes, where a program can be given a share of a family's kernels


@pytest.fixture(scope="module")
def sanitizer() -> str:
    """compute-sanitizer, if it can watch a GPU here."""
    for candidate in (shutil.which("compute-sanitizer"), "/usr/local/cuda/bin/compute-sanitizer"):
        if candidate and Path(candidate).exists():
            return candidate
    pytest.skip("needs compute-sanitizer, which is part of the CUDA toolkit")


def _skip_unless_served(program: Path, part: str) -> None:
    of_experts = program in (MOE, MOE_BACKWARD)
    why_not = moe_layers.why_not if of_experts else families.why_not
    name = "sm90_whole_tiles" if (program, part) == (BACKWARD, "sm90") else part
    any_gpu = part == "route" or program in (APPEND, MERGE, SEQUENCES)
    reason = None if any_gpu else why_not(name)
    if reason is not None:
        pytest.skip(reason)


def _kernels(program: Path, part: str) -> set[str]:
    """The kernels that the part must run, in any of its calls."""
    if program == ATTENTION:
        return set(map(sanitize_attention.kernel_name, sanitize_attention.compiled(part)))
    if program == BACKWARD:
        compiled = kernels.attention(f"{part}_backward")
        return {sanitize_attention_backward.kernel_name(part, kernel) for kernel in compiled}
    if program == APPEND:
        return {f"kv_append_sm89_{part}", f"kv_append_sm89_packed_{part}"}
    if program == MERGE:
        return sanitize_merge.kernels_of(part)
    if program == SEQUENCES:
        return sanitize_sequences.stated_kernels(part)
    if program == MOE_BACKWARD:
        return moe_gradients.stated_kernels(part)
    return sanitize_moe.stated_kernels(part) if moe_layers.is_as_stated() else set()


def _options(program: Path, tool: str) -> list[str]:
    if tool == "memcheck":
        return []
    # The experts' calls are known to write what they read.
    unwritten = tool == "initcheck" and program in (MOE, MOE_BACKWARD)
    return ["--small", "--unwritten"] if unwritten else ["--small"]


@pytest.mark.parametrize(("program", "part"), PARTS, ids=lambda v: getattr(v, "stem", v))
def test_the_programs_pass_on_their_own(program: Path, part: str) -> None:
    _skip_unless_served(program, part)
    done = subprocess.run([sys.executable, str(program), part], capture_output=True, text=True,
                          timeout=LIMIT_S, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    ran = {name.removesuffix("_w8") for name in done.stdout.split()}
    assert ran and ran >= _kernels(program, part)


def _watch(command: list[str], shares: int) -> list[subprocess.CompletedProcess[str]]:
    """Runs the command, or one for each share of the kernels side by side. Not by way of MPS, with
    which the tool has not been tried."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_MPS_")}

    def run(share: int) -> subprocess.CompletedProcess[str]:
        of_share = [] if shares == 1 else [f"--share={share}/{shares}"]
        return subprocess.run([*command, *of_share], capture_output=True, text=True, env=given,
                              timeout=LIMIT_S, check=False)  # fmt: skip

    with ThreadPoolExecutor(shares) as pool:
        return list(pool.map(run, range(shares)))


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize(("program", "part"), PARTS, ids=lambda v: getattr(v, "stem", v))
def test_compute_sanitizer_finds_nothing(
    sanitizer: str, tool: str, program: Path, part: str
) -> None:
    _skip_unless_served(program, part)
    options = ["--tool", tool, "--error-exitcode", str(ERROR_CODE), "--print-limit", "20"]
    if tool == "racecheck":
        options += ["--racecheck-report", "all"]
    command = [sanitizer, *options, sys.executable, str(program), *_options(program, tool), part]
    ran = set()
    for done in _watch(command, 1 if program in (MOE, MOE_BACKWARD) else SHARES):
        text = done.stdout + done.stderr
        if "Device not supported" in text:
            pytest.skip("compute-sanitizer does not support this device or driver")
        assert done.returncode == 0, f"{capi.library_path()}\n{text[-6000:]}"
        assert any(verdict in text for verdict in CLEAN), text[-6000:]
        ran |= {name.removesuffix("_w8") for name in done.stdout.split()}
    assert ran >= _kernels(program, part), "not every kernel was watched"
