"""cmake/strict_nvcc.sh: a kernel that ptxas has given up making fast does not build."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "cmake" / "strict_nvcc.sh"

# A chain of wgmma; what is put in for BETWEEN may touch accumulators that are still under way, and
# then ptxas serialises.
KERNEL = """
__global__ void kernel(float* to, unsigned long long a, unsigned long long b) {
  float d[4] = {};
  for (int i = 0; i < 4; ++i) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
                 "{%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b + i));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    BETWEEN
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(d[j]) :: "memory");
  }
  to[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}
"""


def _run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(SCRIPT), *map(str, command)],
        capture_output=True, text=True, timeout=300, check=False, cwd=cwd,
    )  # fmt: skip


def _compiler(folder: Path, body: str) -> Path:
    script = folder / "compiler"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return script


def test_passes_on_what_the_compiler_says_and_returns(tmp_path: Path) -> None:
    quiet = _run(_compiler(tmp_path, 'for a in "$@"; do echo "<$a>" >> words; done'),
                 "-DNAME=a b;c", "x*.cu", cwd=tmp_path)  # fmt: skip
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, "", "")
    assert (tmp_path / "words").read_text() == "<-DNAME=a b;c>\n<x*.cu>\n"
    warned = _run(_compiler(tmp_path, "echo one; echo two >&2"))
    assert (warned.returncode, warned.stderr) == (0, "one\ntwo\n")
    failed = _run(_compiler(tmp_path, "echo wrong >&2; exit 7"))
    assert (failed.returncode, failed.stderr) == (7, "wrong\n")


@pytest.mark.parametrize(
    "said",
    [
        "ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are "
        "serialized due to ill formed pipeline stage in the function 'f'",
        "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain "
        "minimum register requirements.",
    ],
)
def test_fails_on_a_loss_of_performance(tmp_path: Path, said: str) -> None:
    done = _run(_compiler(tmp_path, f'echo "{said}" >&2'))
    assert done.returncode == 1
    assert said in done.stderr
    assert "error: ptxas expects a loss of performance" in done.stderr


def _nvcc() -> str | None:
    candidates = [os.environ.get("CUDACXX"), shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        candidates += sorted(map(str, Path(root).glob("cu*/bin/nvcc")))
    return next((found for found in candidates if found and Path(found).exists()), None)


@pytest.mark.parametrize(("between", "code"), [("", 0), ("d[0] += 1;", 1)])
def test_with_nvcc(tmp_path: Path, between: str, code: int) -> None:
    nvcc = _nvcc()
    if nvcc is None:
        pytest.skip("needs nvcc")
    source = tmp_path / "kernel.cu"
    source.write_text(KERNEL.replace("BETWEEN", between))
    done = _run(nvcc, "-gencode", "arch=compute_90a,code=sm_90a", "-Xptxas=--warning-as-error",
                "-cubin", source, "-o", tmp_path / "kernel.cubin")  # fmt: skip
    assert done.returncode == code, done.stderr
    assert ("serialized" in done.stderr) == bool(code)
