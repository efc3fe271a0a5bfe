"""What is built with FLASHMOE_MANYLINUX asks for nothing that glibc 2.28 and GCC 8 do not have."""

from __future__ import annotations

import ctypes
import platform
import re
from pathlib import Path

import pytest
from installations import ROOT, TOO_NEW, checked, cmake_build, require_tool, required_versions

if (platform.system(), platform.machine(), platform.libc_ver()[0]) != ("Linux", "x86_64", "glibc"):
    pytest.skip("the versions are those of glibc on x86_64", allow_module_level=True)

# At least one function of every library that is newer, or whose newest version is.
SOURCE = r"""
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <cmath>
#include <vector>

extern "C" double use(double x, std::size_t n) {
  cpu_set_t set;
  pthread_t thread;
  void* result = nullptr;
  const auto body = [](void* p) -> void* { return p; };
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  if (pthread_setaffinity_np(pthread_self(), sizeof set, &set) != 0) return 2;
  if (pthread_create(&thread, nullptr, body, &x) != 0) return 3;
  if (pthread_join(thread, &result) != 0 || result != &x) return 4;
  if (dlsym(dlopen(nullptr, RTLD_LAZY), "pthread_create") == nullptr) return 5;
  if (shm_unlink("/flashmoe-no-such-object") != -1) return 6;
  const std::vector<double*> all(n, &x);
  return std::exp2(std::log2(*all.back())) + std::pow(x, 2) - std::exp(std::log(x * x)) - x;
}
"""

PROJECT = """\
cmake_minimum_required(VERSION 3.24)
project(probe C CXX)
list(APPEND CMAKE_MODULE_PATH "{root}/cmake")
include(FlashmoeManylinux)
add_library(probe SHARED probe.cpp ${{FLASHMOE_MANYLINUX_SOURCES}})
target_link_options(probe PRIVATE LINKER:--no-undefined)
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("manylinux")
    (folder / "probe.cpp").write_text(SOURCE)
    (folder / "CMakeLists.txt").write_text(PROJECT.format(root=ROOT))
    cmake_build(folder, folder / "build", "-DCMAKE_BUILD_TYPE=Debug")  # nothing is optimised away
    return folder / "build" / "libprobe.so"


def test_asks_for_nothing_newer(probe: Path) -> None:
    for kind, version in required_versions(probe).items():
        assert version < TOO_NEW[kind], f"{kind} {version}"


def test_names_the_libraries_of_old(probe: Path) -> None:
    """Which are empty files where the functions are in libc."""
    dynamic = checked([require_tool("readelf"), "-dW", probe])
    assert {"libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6", "libc.so.6"} <= set(
        re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    )


def test_runs_here(probe: Path) -> None:
    use = ctypes.CDLL(str(probe)).use
    use.restype, use.argtypes = ctypes.c_double, [ctypes.c_double, ctypes.c_size_t]
    assert use(1.5, 3) == pytest.approx(0, abs=1e-12)


def test_every_version_is_glibcs_own() -> None:
    """A wrong one would be found by auditwheel alone, and not if it is an older one."""
    module = (ROOT / "cmake/FlashmoeManylinux.cmake").read_text(encoding="utf-8")
    lines = module.replace("\\\n", "")
    wanted = [
        (name, line[1], line[0])
        for line in (text.split() for text in re.findall(r'^  "(lib[^"]*)"', lines, re.MULTILINE))
        for name in line[2:]
    ]
    header = (ROOT / "cmake/manylinux_libm.h").read_text(encoding="utf-8")
    wanted += [
        (name, version, "libm.so.6") for name, version in re.findall(r"(\w+)@(\w+\.[\d.]+)", header)
    ]
    assert len(wanted) > 40
    find = ctypes.CDLL(None).dlvsym
    find.restype, find.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p],
    )
    for name, version, library in wanted:
        handle = ctypes.CDLL(library)._handle
        assert find(handle, name.encode(), version.encode()), f"{library}: {name}@{version}"
