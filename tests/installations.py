"""What the packaging tests share: running tools, CMake builds, and where an installation is."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def require_tool(name: str) -> str:
    """Its path: on the PATH, or beside the running Python, where `pip install` put it."""
    path = shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))
    if path is None:
        pytest.skip(f"needs {name} on the PATH")
    return path


def require_cuda_headers() -> Path:
    """The folder of CUDA's headers: beside nvcc, or of its package."""
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    candidates = [Path(nvcc).resolve().parents[1]] if nvcc else []
    candidates += [Path("/usr/local/cuda"), Path("/opt/cuda")]
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        candidates += sorted(Path(root).glob("cu*"))
    for headers in (root / "include" for root in candidates):
        if (headers / "cuda_runtime_api.h").exists():
            return headers
    pytest.skip("needs CUDA's headers, which come with nvcc")


def checked(
    command: Sequence[str | Path],
    *,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    timeout: int = 600,
) -> str:
    """Standard output of a command that must succeed; fails with all it said."""
    result = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        env={**os.environ, **(env or {})},
        cwd=cwd,
        timeout=timeout,
        check=False,
    )
    text = f"$ {' '.join(map(str, command))}\n{result.stdout}{result.stderr}"
    assert result.returncode == 0, text
    return result.stdout


def cmake_build(source: Path, build: Path, *options: str) -> None:
    cmake = require_tool("cmake")
    checked([cmake, "-S", source, "-B", build, *options])
    checked([cmake, "--build", build, "--parallel", "2"], timeout=1200)


def cmake_preset(name: str, build: Path, *options: str) -> None:
    """A build of this checkout by one of CMakePresets.json's."""
    cmake, ninja = require_tool("cmake"), require_tool("ninja")
    with_ninja = (f"-DCMAKE_MAKE_PROGRAM={ninja}", *options)
    checked([cmake, "-S", ROOT, "-B", build, "--preset", name, *with_ninja])
    checked([cmake, "--build", build, "--parallel", "2"], timeout=1200)


@dataclass(frozen=True)
class Installation:
    """Where a consumer finds the library."""

    name: str
    cmakedir: Path
    pkgconfigdir: Path
    libdir: Path
    library: Path


# What manylinux_2_28 does not have, by kind: glibc after 2.28, and GCC after 8.
TOO_NEW = {"GLIBC": (2, 29), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 12), "GCC": (8,)}


def required_versions(library: Path) -> dict[str, tuple[int, ...]]:
    """The newest version that a library requires of each kind: of GLIBC, GLIBCXX and so on."""
    text = checked([require_tool("readelf"), "-VW", library])
    needs = text.partition("Version needs section")[2]
    newest: dict[str, tuple[int, ...]] = {}
    for kind, numbers in re.findall(r"Name: ([A-Z]+)_([\d.]+)", needs):
        version = tuple(map(int, numbers.split(".")))
        newest[kind] = max(version, newest.get(kind, version))
    assert newest
    return newest
