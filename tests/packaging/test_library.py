"""The shared library as a file: what it exports, needs and carries."""

from __future__ import annotations

import re
from pathlib import Path

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


def test_needs_nothing_but_the_runtimes(installation: Installation) -> None:
    needed = set(dynamic_section(installation)["NEEDED"])
    assert needed <= RUNTIMES, needed - RUNTIMES


def test_soname_is_the_abi_and_no_path_is_baked_in(installation: Installation) -> None:
    section = dynamic_section(installation)
    assert section["SONAME"] == ["libflashmoe.so.0"]
    assert "RPATH" not in section and "RUNPATH" not in section


def test_stripped_and_without_executable_stack(installation: Installation) -> None:
    readelf = require_tool("readelf")
    assert ".symtab" not in checked([readelf, "-SW", installation.library])
    segments = checked([readelf, "-lW", installation.library])
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


def test_system_links(system_installation: Installation) -> None:
    lib = system_installation.libdir
    version = re.sub(r".*libflashmoe\.so\.", "", str((lib / "libflashmoe.so").resolve()))
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert (lib / "libflashmoe.so").is_symlink() and (lib / "libflashmoe.so.0").is_symlink()
    assert (lib / "libflashmoe.a").is_file()


def test_wheel_holds_one_library_file(wheel_installation: Installation) -> None:
    files = sorted(path.name for path in wheel_installation.libdir.glob("libflashmoe*"))
    assert files == ["libflashmoe.so.0"]
