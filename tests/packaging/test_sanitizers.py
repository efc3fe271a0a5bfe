"""The C and C++ tests, as they are and, with the fuzz of invalid calls, under AddressSanitizer and
UBSan."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from installations import checked, cmake_preset, require_tool

FUZZ_CALLS = os.environ.get("FLASHMOE_FUZZ_CALLS", "20000")


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("sanitized")
    cmake_preset("asan", build)
    return build


def run_ctest(build: Path) -> None:
    output = checked([require_tool("ctest"), "--output-on-failure"], cwd=build)
    assert "100% tests passed" in output


def test_ctest(system_build: Path) -> None:
    run_ctest(system_build)


def test_ctest_sanitized(sanitized: Path) -> None:
    run_ctest(sanitized)


def test_fuzz_of_invalid_calls(sanitized: Path) -> None:
    """At least ten thousand invalid calls, under a seed that is new on every run and printed."""
    output = checked([sanitized / "tests/c/fuzz_invalid", FUZZ_CALLS])
    print(output)
    counts = re.search(r"(\d+) calls: (\d+) invalid, (\d+) valid", output)
    assert counts is not None
    assert int(counts[2]) >= 10000
    assert int(counts[3]) >= 1000
