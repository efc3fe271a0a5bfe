"""The C and C++ tests, the fuzz of invalid calls among them, under AddressSanitizer and UBSan."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from installations import ROOT, checked, cmake_build, require_tool

FUZZ_CALLS = 20000


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("sanitized")
    cmake_build(
        ROOT,
        build,
        "-DFLASHMOE_CUDA=OFF",
        "-DFLASHMOE_TESTS=ON",
        "-DFLASHMOE_SANITIZE=address,undefined",
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
    )
    return build


def test_ctest(sanitized: Path) -> None:
    output = checked([require_tool("ctest"), "--output-on-failure"], cwd=sanitized)
    assert "100% tests passed" in output


def test_fuzz_of_invalid_calls(sanitized: Path) -> None:
    """At least ten thousand invalid calls, under a seed that is new on every run and printed."""
    output = checked([sanitized / "tests/c/fuzz_invalid", str(FUZZ_CALLS)])
    print(output)
    counts = re.search(r"(\d+) calls: (\d+) invalid, (\d+) valid", output)
    assert counts is not None
    assert int(counts[2]) >= 10000
    assert int(counts[3]) >= 1000
