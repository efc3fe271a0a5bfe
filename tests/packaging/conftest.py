"""Installations of libflashmoe to test: a system prefix built here, and the installed wheel.

The prefix is built without CUDA, by the preset whose warnings are errors, and moved before anything
uses it, so that whatever passes here holds for a relocated tree.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from installations import Installation, checked, cmake_preset, require_tool


@pytest.fixture(scope="session")
def system_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build by the preset cpu-only, with the C and C++ tests."""
    scratch = tmp_path_factory.mktemp("system")
    build = scratch / "build"
    prefix = scratch / "first"
    cmake_preset(
        "cpu-only",
        build,
        f"-DCMAKE_INSTALL_PREFIX={prefix}",
        "-DCMAKE_INSTALL_LIBDIR=lib/nested",
    )
    return build


@pytest.fixture(scope="session")
def system_installation(system_build: Path) -> Installation:
    scratch = system_build.parent
    checked([require_tool("cmake"), "--install", system_build])
    prefix = (scratch / "first").rename(scratch / "moved")
    lib = prefix / "lib" / "nested"
    return Installation(
        "system", lib / "cmake" / "flashmoe", lib / "pkgconfig", lib, lib / "libflashmoe.so"
    )


@pytest.fixture(scope="session")
def wheel_root() -> Path:
    """The folder of the installed package, which holds the library, headers and CMake files."""
    spec = importlib.util.find_spec("flashmoe_science")
    root = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    if root is None or not (root / "lib" / "libflashmoe.so.1").exists():
        pytest.skip("flashmoe-science is not installed as a wheel in this environment")
    return root


@pytest.fixture(scope="session")
def wheel_installation(wheel_root: Path) -> Installation:
    lib = wheel_root / "lib"
    return Installation(
        "wheel", lib / "cmake" / "flashmoe", lib / "pkgconfig", lib, lib / "libflashmoe.so.1"
    )


@pytest.fixture(params=["system", "wheel"])
def installation(request: pytest.FixtureRequest) -> Installation:
    found = request.getfixturevalue(f"{request.param}_installation")
    assert isinstance(found, Installation)
    return found


@pytest.fixture(scope="session")
def flashmoe_config() -> Callable[..., list[str]]:
    """`flashmoe config ...` of this environment, split into words."""
    command = Path(sysconfig.get_path("scripts")) / "flashmoe"
    if not command.exists():
        pytest.skip("the flashmoe command is not installed in this environment")

    def run(*options: str) -> list[str]:
        return checked([command, "config", *options]).split()

    return run
