"""The C, C++, CUDA and CMake programs on the pages, built by the commands that the pages give."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from installations import ROOT, Installation, checked, cmake_build, require_tool
from pages import BUILDS_A_PROGRAM, DOCS, Block, blocks

# The programs that the commands on all pages call program.c, program.cpp and program.cu.
PROGRAMS = {
    "program.c": blocks("c", page=DOCS / "start/c.md")[0],
    "program.cpp": blocks("cpp", page=DOCS / "start/cpp.md")[0],
    "program.cu": blocks("cuda", page=DOCS / "start/cpp.md")[0],
}
SUFFIXES = {"c": "c", "cpp": "cpp", "cuda": "cu"}
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"]


def lists_file(block: Block) -> str:
    """A whole CMakeLists.txt; a page leaves out what is the same everywhere."""
    begin = "cmake_minimum_required(VERSION 3.18)\nproject(page LANGUAGES C)\n"
    program = "add_executable(program program.c)\n"
    return (
        ("" if "project(" in block.text else begin)
        + ("" if "add_executable(" in block.text else program)
        + block.text
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Holds the programs, a project, and the `flashmoe` command in bin/."""
    for name, block in PROGRAMS.items():
        (tmp_path / name).write_text(block.text)
    [shared] = blocks("cmake", page=DOCS / "start/c.md")
    (tmp_path / "CMakeLists.txt").write_text(lists_file(shared))
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin/flashmoe"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m flashmoe_science "$@"\n')
    command.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("block", blocks("c", "cpp", "cuda"), ids=str)
def test_a_program_runs(block: Block, wheel_root: Path, folder: Path) -> None:
    source = folder / f"shown.{SUFFIXES[block.language]}"
    source.write_text(block.text)
    config = [sys.executable, "-m", "flashmoe_science", "config", "--cflags", "--libs"]
    flags = checked(config).split()
    if block.language == "c":
        compiler = [require_tool("cc"), "-std=c99", *STRICT]
    elif block.language == "cpp":
        compiler = [require_tool("c++"), "-std=c++17", *STRICT]
    else:
        compiler = [require_tool("nvcc"), "-std=c++17", "-arch=sm_89"]
        compiler += ["-Werror", "all-warnings", "-forward-unknown-to-host-compiler"]
    checked([*compiler, source, *flags, "-lm", "-o", folder / "shown"])
    assert block.complaint(checked([folder / "shown"])) == ""


COMMANDS = [b for b in blocks("sh") if any(map(BUILDS_A_PROGRAM.match, b.commands))]


@pytest.mark.parametrize("block", COMMANDS, ids=str)
def test_commands_build_a_program(
    block: Block,
    system_installation: Installation,
    wheel_installation: Installation,
    folder: Path,
) -> None:
    for tool in ("nvcc", "cmake", "pkg-config"):
        if re.search(rf"\b{tool} ", block.text):
            require_tool(tool)
    script = "\n".join(line for line in block.commands if not line.startswith("flashmoe "))
    env = {
        **os.environ,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PKG_CONFIG_PATH": str(system_installation.pkgconfigdir),
    }
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, f"{script}\n{result.stdout}{result.stderr}"
    built = [path for path in (folder / "program", folder / "build/program") if path.exists()]
    assert built, "no command made the program"
    checked([built[0]])


@pytest.mark.parametrize("block", blocks("cmake"), ids=str)
def test_a_project_builds(block: Block, system_installation: Installation, folder: Path) -> None:
    (folder / "CMakeLists.txt").write_text(lists_file(block))
    if "target_link_libraries(program PRIVATE flashmoe::flashmoe)" in block.text:
        # Words on how to link: with a program that needs nothing else.
        (folder / "program.c").write_text(blocks("c", page=ROOT / "README.md")[0].text)
    cmake_build(folder, folder / "build", f"-Dflashmoe_DIR={system_installation.cmakedir}")
    checked([folder / "build/program"])
