"""C and C++ projects against the installed library, by every way in: they build, run and are right.

The programs are those of examples/; each checks its own result and fails if it is wrong.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from installations import ROOT, Installation, checked, cmake_build, require_tool

STRICT = "-Wall -Wextra -Wpedantic -Wconversion -Werror"
STRICT_CUDA = "-Werror all-warnings -Xcompiler=-Wall,-Wextra,-Wconversion,-Werror"
LANGUAGES = ["c", "cpp", "cuda"]
PROGRAMS = {
    "c": ["attention", "experts", "serve"],
    "cpp": ["attention", "experts", "serve"],
    "cuda": ["attention", "experts"],
}

# What an example for GPUs says, and how it ends, where there is none.
NO_GPU = "there is no CUDA device, or this libflashmoe was built without CUDA"
SKIPPED = 77


def sources(language: str) -> list[Path]:
    if language == "cuda":  # nvcc is slow; the other program is built by CMake
        return [ROOT / "examples/cuda/attention.cu"]
    return [
        ROOT / "examples" / language / f"{program}.{language}" for program in PROGRAMS[language]
    ]


def compiler(language: str) -> list[str]:
    if language == "c":
        return [os.environ.get("CC") or require_tool("cc"), "-std=c99", *STRICT.split()]
    if language == "cpp":
        return [os.environ.get("CXX") or require_tool("c++"), "-std=c++17", *STRICT.split()]
    # What pkg-config says is for the compiler of the host, which links in the end.
    return [require_nvcc(), "-std=c++17", "-arch=sm_89", "-forward-unknown-to-host-compiler"]


def require_nvcc() -> str:
    return os.environ.get("CUDACXX") or require_tool("nvcc")


def run_program(program: Path, env: dict[str, str] | None = None) -> None:
    """It must say what it computed by, or that there is no GPU for it."""
    result = subprocess.run(
        [str(program)],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = f"{program}: exit {result.returncode}\n{result.stdout}{result.stderr}"
    if result.returncode == SKIPPED:
        assert NO_GPU in result.stdout, said
        return
    assert result.returncode == 0, said
    assert re.search(r"flashmoe \d+: .*, largest difference", result.stdout), said


def pkg_config(installation: Installation, *options: str, package: str = "flashmoe") -> list[str]:
    env = {"PKG_CONFIG_PATH": str(installation.pkgconfigdir)}
    return checked([require_tool("pkg-config"), *options, package], env=env).split()


def needs_no_library(program: Path) -> None:
    dynamic = checked([require_tool("readelf"), "-d", program])
    assert "libflashmoe" not in dynamic


@pytest.mark.parametrize("language", LANGUAGES)
def test_cmake(installation: Installation, language: str, tmp_path: Path) -> None:
    options = [f"-Dflashmoe_DIR={installation.cmakedir}"]
    if language == "cuda":
        options += [f"-DCMAKE_CUDA_COMPILER={require_nvcc()}", f"-DCMAKE_CUDA_FLAGS={STRICT_CUDA}"]
    else:
        name = {"c": "CMAKE_C_FLAGS", "cpp": "CMAKE_CXX_FLAGS"}[language]
        options.append(f"-D{name}={STRICT}")
    cmake_build(ROOT / "examples" / language, tmp_path, *options)
    for program in PROGRAMS[language]:
        run_program(tmp_path / program)
        if (tmp_path / f"{program}_static").exists():
            run_program(tmp_path / f"{program}_static")
            needs_no_library(tmp_path / f"{program}_static")
    built = {path.stem for path in tmp_path.glob("*_static")}
    wanted = ["attention"] if language == "cuda" else PROGRAMS[language]
    assert built == ({f"{p}_static" for p in wanted} if installation.name == "system" else set())


def test_cmake_by_the_command(
    flashmoe_config: Callable[..., list[str]], wheel_installation: Installation, tmp_path: Path
) -> None:
    [cmakedir] = flashmoe_config("--cmakedir")
    assert Path(cmakedir).samefile(wheel_installation.cmakedir)
    cmake_build(ROOT / "examples/c", tmp_path, f"-DCMAKE_PREFIX_PATH={cmakedir}")
    run_program(tmp_path / "attention")


@pytest.mark.parametrize("language", LANGUAGES)
def test_pkg_config(installation: Installation, language: str, tmp_path: Path) -> None:
    flags = pkg_config(installation, "--cflags", "--libs")
    # The wheel's flags set a run path; a system library is found by the loader's configuration.
    system = {"LD_LIBRARY_PATH": str(installation.libdir)}
    for source in sources(language):
        program = tmp_path / source.stem
        checked([*compiler(language), source, *flags, "-lm", "-o", program])
        run_program(program, env=system if installation.name == "system" else None)


@pytest.mark.parametrize("language", ["c", "cpp"])
def test_pkg_config_static(
    system_installation: Installation, language: str, tmp_path: Path
) -> None:
    flags = pkg_config(system_installation, "--cflags", "--libs", package="flashmoe-static")
    for source in sources(language):
        program = tmp_path / source.stem
        checked([*compiler(language), source, *flags, "-lm", "-o", program])
        run_program(program)
        needs_no_library(program)


def test_whole_program_static(system_installation: Installation, tmp_path: Path) -> None:
    """No shared library at all, not even the C runtime."""
    program = tmp_path / "attention"
    flags = pkg_config(
        system_installation, "--static", "--cflags", "--libs", package="flashmoe-static"
    )
    [source] = [source for source in sources("c") if source.stem == program.name]
    checked([*compiler("c"), "-static", source, *flags, "-lm", "-o", program])
    run_program(program)
    assert "NEEDED" not in checked([require_tool("readelf"), "-d", program])


def test_static_asks_for_the_cuda_runtime(tmp_path: Path) -> None:
    """The package of a library with CUDA, rendered as CMake renders it."""
    text = (ROOT / "cmake/flashmoe-static.pc.in").read_text()
    library = (ROOT / "cmake/FlashmoeLibrary.cmake").read_text()
    [private] = re.findall(r'"(-L.*-lcudart_static.*)"', library)
    values = {
        "FLASHMOE_PC_PREFIX": "../..",
        "FLASHMOE_PC_LIBDIR": "lib",
        "FLASHMOE_PC_INCLUDEDIR": "include",
        "FLASHMOE_PC_LIBS_PRIVATE": private.replace("\\$", "$") + "-lstdc++",
        "PROJECT_DESCRIPTION": "words",
        "PROJECT_VERSION": "0.0.0",
    }
    (tmp_path / "flashmoe-static.pc").write_text(
        re.sub(r"@(\w+)@", lambda match: values[match[1]], text)
    )
    env = {"PKG_CONFIG_PATH": str(tmp_path)}
    tool = require_tool("pkg-config")
    default = checked([tool, "--libs", "flashmoe-static"], env=env).split()
    assert "-L/usr/local/cuda/lib64" in default
    assert default.index("-lcudart_static") < default.index("-lstdc++")
    chosen = checked([tool, "--define-variable=cudadir=/a", "--libs", "flashmoe-static"], env=env)
    assert "-L/a/lib64" in chosen.split() and "/usr/local" not in chosen


@pytest.mark.parametrize("language", LANGUAGES)
def test_flashmoe_config(
    flashmoe_config: Callable[..., list[str]], language: str, tmp_path: Path
) -> None:
    flags = flashmoe_config("--cflags", "--libs")
    for source in sources(language):
        program = tmp_path / source.stem
        checked([*compiler(language), source, *flags, "-lm", "-o", program])
        run_program(program)


def test_pkg_config_version(installation: Installation) -> None:
    header = (ROOT / "include/flashmoe/flashmoe.h").read_text()
    numbers = re.findall(r"#define FLASHMOE_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header)
    assert pkg_config(installation, "--modversion") == [".".join(numbers)]


def configure(source: str, directory: Path, installation: Installation) -> tuple[int, str]:
    """Configures a project of one find_package line; exit status and all it said."""
    (directory / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.18)\nproject(consumer C)\n{source}\n"
    )
    build = directory / "build"
    shutil.rmtree(build, ignore_errors=True)
    package = f"-Dflashmoe_DIR={installation.cmakedir}"
    result = subprocess.run(
        [require_tool("cmake"), "-S", directory, "-B", build, package],
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode, " ".join((result.stdout + result.stderr).split())


def test_other_minor_version_is_refused(installation: Installation, tmp_path: Path) -> None:
    status, text = configure("find_package(flashmoe 0.3 REQUIRED)", tmp_path, installation)
    assert status != 0
    assert 'compatible with requested version "0.3"' in text


def test_static_component(
    system_installation: Installation, wheel_installation: Installation, tmp_path: Path
) -> None:
    request = "find_package(flashmoe REQUIRED COMPONENTS static)"
    status, text = configure(request, tmp_path, system_installation)
    assert status == 0, text
    status, text = configure(request, tmp_path, wheel_installation)
    assert status != 0
    assert "this installation holds no static library (a wheel never does)" in text
