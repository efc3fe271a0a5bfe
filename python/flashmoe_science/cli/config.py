"""`flashmoe config`: where the C library of this installation is, for compilers and CMake."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from flashmoe_science.cli import environment
from flashmoe_science.cli.output import (
    EXIT_OK,
    CommandError,
    Output,
    add_json_option,
    write_json,
)

_DESCRIPTION = """\
Prints where the C header and library of this installation are, one answer a line in the order
below. With no option, all of them by name. Nothing is loaded: it only looks for files.

  cc program.c $(flashmoe config --cflags --libs) -o program
  cmake -B build -DCMAKE_PREFIX_PATH="$(flashmoe config --cmakedir)"
"""

_LIBRARY = "libflashmoe.so"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "config",
        help="paths and flags for building C and C++ programs against this installation",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="the version of the header")
    parser.add_argument(
        "--cmakedir",
        action="store_true",
        help="folder of flashmoe-config.cmake, for CMAKE_PREFIX_PATH",
    )
    parser.add_argument(
        "--pkgconfigdir", action="store_true", help="folder of flashmoe.pc, for PKG_CONFIG_PATH"
    )
    parser.add_argument("--includedir", action="store_true", help="folder of flashmoe/flashmoe.h")
    parser.add_argument("--libdir", action="store_true", help="folder of the shared library")
    parser.add_argument("--cflags", action="store_true", help="flags to compile with")
    parser.add_argument(
        "--libs", action="store_true", help="flags to link with; they also set the run path"
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def _find(pattern: str, what: str) -> Path:
    directories = environment.package_directories()
    for directory in directories:
        found = sorted(directory.glob(pattern))
        if found:
            return found[0]
    places = ", ".join(map(str, directories)) or "no package folder"
    raise CommandError(f"this installation has no {what}: looked for {pattern} in {places}")


def header_version(header: Path) -> str:
    """The version that the header's macros state."""
    text = header.read_text(encoding="utf-8")
    parts = [
        re.search(rf"^#define FLASHMOE_VERSION_{name} (\d+)$", text, re.MULTILINE)
        for name in ("MAJOR", "MINOR", "PATCH")
    ]
    if not all(parts):
        raise CommandError(f"{header} states no FLASHMOE_VERSION")
    return ".".join(part.group(1) for part in parts if part)


def collect() -> dict[str, str]:
    """Every answer, by the name of its option."""
    header = _find("include/flashmoe/flashmoe.h", "header")
    library = _find(f"lib/{_LIBRARY}*", "shared library")
    cmake = _find("lib/cmake/flashmoe/flashmoe-config.cmake", "CMake package")
    include = header.parent.parent
    answers = {
        "version": header_version(header),
        "cmakedir": str(cmake.parent),
        "includedir": str(include),
        "libdir": str(library.parent),
        "cflags": f"-I{include}",
        # A wheel holds no symlinks, so the library is named whole: -lflashmoe would not find it.
        "libs": f"-L{library.parent} -l:{library.name} -Wl,-rpath,{library.parent}",
    }
    for directory in environment.package_directories():
        for found in directory.glob("lib/pkgconfig/flashmoe.pc"):
            answers["pkgconfigdir"] = str(found.parent)
    return answers


def run(arguments: argparse.Namespace) -> int:
    answers = collect()
    if arguments.pkgconfigdir and "pkgconfigdir" not in answers:
        raise CommandError("--pkgconfigdir: this installation has no flashmoe.pc")
    wanted = [name for name in answers if getattr(arguments, name)]
    if arguments.json is not None:
        write_json({n: answers[n] for n in wanted} if wanted else dict(answers), arguments.json)
    if arguments.json == "-":
        return EXIT_OK
    output = Output()
    if wanted:
        for name in wanted:
            output.line(answers[name])
    else:
        output.pairs(list(answers.items()), indent=0)
    return EXIT_OK
