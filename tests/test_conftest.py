"""A run that may not skip what it came to test fails where it would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from installations import ROOT

SKIPS = """
import pytest

def test_there():
    assert True

def test_elsewhere():
    pytest.skip("needs another machine")

@pytest.mark.skipif(True, reason="needs a year of time")
def test_slow():
    raise AssertionError

@pytest.mark.xfail(reason="needs what nobody has")
def test_not_yet():
    raise AssertionError
"""
MODULE = 'import pytest\npytest.importorskip("flashmoe_nowhere")\n'


def outcomes(folder: Path, *options: str, **environment: str) -> str:
    """The last line of a run of these tests, with our conftest.py."""
    (folder / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    (folder / "parallel.py").write_text((ROOT / "tests/parallel.py").read_text())
    (folder / "test_skips.py").write_text(SKIPS)
    (folder / "test_module.py").write_text(MODULE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    command += ["-o", "pythonpath=.", "-o", "markers=gpu", "--rootdir", str(folder), str(folder)]
    result = subprocess.run(
        command, cwd=folder, env={"PATH": "", **environment}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    return (result.stdout + result.stderr).strip()


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one", "several"])
def test_a_reason_that_is_not_accepted_fails(tmp_path: Path, options: tuple[str, ...]) -> None:
    if options:
        pytest.importorskip("xdist")
    accepted = "another machine$\nflashmoe_nowhere"
    said = outcomes(tmp_path, *options, FLASHMOE_TEST_MAY_SKIP=accepted)
    assert "lacks: needs a year of time" in said
    assert said.splitlines()[-1].startswith("1 passed, 2 skipped, 1 xfailed, 1 error")


def test_nor_may_a_module(tmp_path: Path) -> None:
    said = outcomes(tmp_path, FLASHMOE_TEST_MAY_SKIP="another machine\na year")
    assert "lacks: could not import 'flashmoe_nowhere'" in said
    assert "1 error" in said.splitlines()[-1]


def test_elsewhere_every_reason_will_do(tmp_path: Path) -> None:
    assert outcomes(tmp_path).splitlines()[-1].startswith("1 passed, 3 skipped, 1 xfailed")


def test_what_is_required_must_be_there(tmp_path: Path) -> None:
    said = outcomes(tmp_path, FLASHMOE_TEST_REQUIRE="pytest,flashmoe_nowhere")
    assert "FLASHMOE_TEST_REQUIRE: not installed: flashmoe_nowhere" in said
    assert (
        outcomes(tmp_path, FLASHMOE_TEST_REQUIRE="pytest").splitlines()[-1].startswith("1 passed")
    )
