"""The shared library as a file: what it exports, needs and carries."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import subprocess
from pathlib import Path

import pytest
from installations import ROOT, Installation, checked, require_tool

# The C and C++ runtimes. glibc before 2.34 keeps threads, dlopen and clocks in files of their own.
RUNTIMES = {
    "libstdc++.so.6",
    "libgcc_s.so.1",
    "libc.so.6",
    "libm.so.6",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
    "libpthread.so.0",
    "libdl.so.2",
    "librt.so.1",
}

ENDBR64 = b"\xf3\x0f\x1e\xfa"  # where indirect calls may lead


def dynamic_section(installation: Installation) -> dict[str, list[str]]:
    text = checked([require_tool("readelf"), "-dW", installation.library])
    entries: dict[str, list[str]] = {}
    for tag, value in re.findall(r"\((\w+)\)\s+.*?\[(.*?)\]", text):
        entries.setdefault(tag, []).append(value)
    return entries


def listed_symbols() -> list[str]:
    return (Path(__file__).parent / "exported_symbols.txt").read_text().split()


def test_exports_what_is_listed(installation: Installation) -> None:
    text = checked([require_tool("nm"), "-D", "--defined-only", installation.library])
    assert sorted(line.split()[-1] for line in text.splitlines()) == listed_symbols()


def test_header_declares_what_is_listed() -> None:
    headers = "".join(path.read_text() for path in (ROOT / "include/flashmoe").glob("*.h"))
    declared = re.findall(r"^FLASHMOE_API [^;(]*?\b(flashmoe_\w+)\(", headers, re.MULTILINE)
    assert sorted(declared) == listed_symbols()


@pytest.mark.parametrize("program", ["header_c99.c", "header_cpp17.cpp"])
def test_programs_of_the_header_know_every_struct(program: str) -> None:
    headers = "".join(path.read_text() for path in (ROOT / "include/flashmoe").glob("*.h"))
    structs = re.findall(r"^typedef struct (\w+) \{\s+size_t struct_size;", headers, re.MULTILINE)
    assert len(structs) >= 17
    known = set(re.findall(r"\bflashmoe_\w+", (ROOT / "tests/c" / program).read_text()))
    assert set(structs) - known == set()


def test_structs_that_callers_fill_have_no_padding(tmp_path: Path) -> None:
    """A field that is appended later would lie in it, where an older caller may have anything."""
    source = tmp_path / "header.c"
    source.write_text("#include <flashmoe/moe.h>\n")
    made = subprocess.run(
        [require_tool("gcc"), "-std=c99", "-fsyntax-only", "-Wpadded", f"-I{ROOT}/include", source],
        capture_output=True, text=True, env=os.environ | {"LC_ALL": "C"}, check=True,
    )  # fmt: skip
    padded = re.findall(r"\bpadding struct\b.*\n.*\|\s*(.+)", made.stderr)
    assert padded == ["} flashmoe_build_info;"], made.stderr  # the library fills it


def test_needs_nothing_but_the_runtimes(installation: Installation) -> None:
    needed = set(dynamic_section(installation)["NEEDED"])
    assert needed <= RUNTIMES, needed - RUNTIMES


def test_soname_is_the_abi_and_no_path_is_baked_in(installation: Installation) -> None:
    section = dynamic_section(installation)
    assert section["SONAME"] == ["libflashmoe.so.1"]
    assert "RPATH" not in section and "RUNPATH" not in section


def test_is_stripped(installation: Installation) -> None:
    assert ".symtab" not in checked([require_tool("readelf"), "-SW", installation.library])


@pytest.fixture(params=["system library", "wheel library", "wheel extension"])
def loaded(request: pytest.FixtureRequest) -> Path:
    """A file of ours that is loaded into a process of somebody else."""
    kind, _, part = request.param.partition(" ")
    found: Installation = request.getfixturevalue(f"{kind}_installation")
    return found.library if part == "library" else found.libdir.parent / "_core.abi3.so"


def imported_symbols(library: Path) -> set[str]:
    text = checked([require_tool("nm"), "-D", "--undefined-only", library])
    return {line.split()[-1].partition("@")[0] for line in text.splitlines()}


def test_relocations_are_read_only(loaded: Path) -> None:
    """Full RELRO: everything is bound when the file is loaded, and then protected."""
    readelf = require_tool("readelf")
    assert "GNU_RELRO" in checked([readelf, "-lW", loaded])
    flags = re.findall(r"\((FLAGS(?:_1)?)\)\s+(.*)", checked([readelf, "-dW", loaded]))
    assert any("BIND_NOW" in value or "NOW" in value.split() for _, value in flags), flags


def test_stack_is_protected_and_not_executable(loaded: Path) -> None:
    assert "__stack_chk_fail" in imported_symbols(loaded)
    segments = checked([require_tool("readelf"), "-lW", loaded])
    [stack] = [line for line in segments.splitlines() if "GNU_STACK" in line]
    assert "RWE" not in stack


# Thread-local storage lies on the stack of every thread of a program that links the library. CUDA's
# runtime has a page of its own, aligned to pages.
MOST_THREAD_LOCAL_BYTES = 512
CUDA_RUNTIME_BYTES = 2 * 4096


def test_thread_local_storage_is_small(installation: Installation) -> None:
    segments = checked([require_tool("readelf"), "-lW", installation.library])
    sizes = [
        int(line.split()[5], 16) for line in segments.splitlines() if line.split()[:1] == ["TLS"]
    ]
    most = MOST_THREAD_LOCAL_BYTES
    if b"cudaLaunchKernelExC" in installation.library.read_bytes():
        most += CUDA_RUNTIME_BYTES
    assert sum(sizes) <= most


def test_copies_are_checked(installation: Installation) -> None:
    """In the extension's calls the compiler knows that all copies fit, or does not know how much
    fits."""
    checks = {name for name in imported_symbols(installation.library) if name.endswith("_chk")}
    assert "__vsnprintf_chk" in checks or "__snprintf_chk" in checks, checks


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 knows these")
def test_functions_may_be_called_indirectly(installation: Installation) -> None:
    library = ctypes.CDLL(str(installation.library))
    for name in listed_symbols():
        address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        assert address is not None
        assert ctypes.string_at(address, 4) == ENDBR64, name


def test_system_links(system_installation: Installation) -> None:
    lib = system_installation.libdir
    version = re.sub(r".*libflashmoe\.so\.", "", str((lib / "libflashmoe.so").resolve()))
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert (lib / "libflashmoe.so").is_symlink() and (lib / "libflashmoe.so.1").is_symlink()
    assert (lib / "libflashmoe.a").is_file()


def test_wheel_holds_one_library_file(wheel_installation: Installation) -> None:
    files = sorted(path.name for path in wheel_installation.libdir.glob("libflashmoe*"))
    assert files == ["libflashmoe.so.1"]
