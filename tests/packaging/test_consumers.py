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
SOURCES = {"c": ROOT / "examples/c/attention.c", "cpp": ROOT / "examples/cpp/attention.cpp"}


def compiler(language: str) -> list[str]:
    if language == "c":
        return [os.environ.get("CC") or require_tool("cc"), "-std=c99", *STRICT.split()]
    return [os.environ.get("CXX") or require_tool("c++"), "-std=c++17", *STRICT.split()]


def run_program(program: Path, env: dict[str, str] | None = None) -> str:
    output = checked([program], env=env)
    assert re.search(r"flashmoe \d+: attention_forward_cpu_\w+,.* largest difference", output)
    return output


def pkg_config(installation: Installation, *options: str) -> list[str]:
    env = {"PKG_CONFIG_PATH": str(installation.pkgconfigdir)}
    return checked([require_tool("pkg-config"), *options, "flashmoe"], env=env).split()


def needs_no_library(program: Path) -> None:
    dynamic = checked([require_tool("readelf"), "-d", program])
    assert "libflashmoe" not in dynamic


@pytest.mark.parametrize("language", ["c", "cpp"])
def test_cmake(installation: Installation, language: str, tmp_path: Path) -> None:
    flags = "CMAKE_C_FLAGS" if language == "c" else "CMAKE_CXX_FLAGS"
    cmake_build(
        ROOT / "examples" / language,
        tmp_path,
        f"-Dflashmoe_DIR={installation.cmakedir}",
        f"-D{flags}={STRICT}",
    )
    run_program(tmp_path / "attention")
    if language == "c" and installation.name == "system":
        run_program(tmp_path / "attention_static")
        needs_no_library(tmp_path / "attention_static")


def test_cmake_by_the_command(
    flashmoe_config: Callable[..., list[str]], wheel_installation: Installation, tmp_path: Path
) -> None:
    [cmakedir] = flashmoe_config("--cmakedir")
    assert Path(cmakedir).samefile(wheel_installation.cmakedir)
    cmake_build(ROOT / "examples/c", tmp_path, f"-DCMAKE_PREFIX_PATH={cmakedir}")
    run_program(tmp_path / "attention")


@pytest.mark.parametrize("language", ["c", "cpp"])
def test_pkg_config(installation: Installation, language: str, tmp_path: Path) -> None:
    program = tmp_path / "attention"
    flags = pkg_config(installation, "--cflags", "--libs")
    checked([*compiler(language), SOURCES[language], *flags, "-lm", "-o", program])
    # The wheel's flags set a run path; a system library is found by the loader's configuration.
    system = {"LD_LIBRARY_PATH": str(installation.libdir)}
    run_program(program, env=system if installation.name == "system" else None)


def test_pkg_config_static(system_installation: Installation, tmp_path: Path) -> None:
    program = tmp_path / "attention"
    flags = pkg_config(system_installation, "--static", "--cflags", "--libs")
    archive = system_installation.libdir / "libflashmoe.a"
    flags = [str(archive) if flag == "-lflashmoe" else flag for flag in flags]
    checked([*compiler("c"), SOURCES["c"], *flags, "-lm", "-o", program])
    run_program(program)
    needs_no_library(program)


@pytest.mark.parametrize("language", ["c", "cpp"])
def test_flashmoe_config(
    flashmoe_config: Callable[..., list[str]], language: str, tmp_path: Path
) -> None:
    program = tmp_path / "attention"
    flags = flashmoe_config("--cflags", "--libs")
    checked([*compiler(language), SOURCES[language], *flags, "-lm", "-o", program])
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
    status, text = configure("find_package(flashmoe 0.2 REQUIRED)", tmp_path, installation)
    assert status != 0
    assert 'compatible with requested version "0.2"' in text


def test_static_component(
    system_installation: Installation, wheel_installation: Installation, tmp_path: Path
) -> None:
    request = "find_package(flashmoe REQUIRED COMPONENTS static)"
    status, text = configure(request, tmp_path, system_installation)
    assert status == 0, text
    status, text = configure(request, tmp_path, wheel_installation)
    assert status != 0
    assert "this installation holds no static library (a wheel never does)" in text
