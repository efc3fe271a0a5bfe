"""The stub of the native module, and types of the whole package."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("_core.pyi.ref")


def installed(name: str) -> Path:
    spec = importlib.util.find_spec("flashmoe_science")
    assert spec is not None
    for folder in spec.submodule_search_locations or []:
        if (Path(folder) / name).exists():
            return Path(folder) / name
    raise AssertionError(f"flashmoe_science is installed without {name}")


def test_stub_is_the_golden_one() -> None:
    """To accept a change: copy the installed _core.pyi over _core.pyi.ref, and read the diff."""
    assert installed("_core.pyi").read_text() == GOLDEN.read_text()


def test_stub_names_what_the_module_has() -> None:
    from flashmoe_science import _core

    text = installed("_core.pyi").read_text()
    for name in vars(_core):
        assert name.startswith("_") or f"def {name}(" in text


def test_package_is_typed() -> None:
    assert installed("py.typed").exists()


_USER = """
import numpy as np
import flashmoe_science as fm

x = np.zeros((1, 8, 2, 16), np.float32)
alone: np.ndarray = fm.flash_attention(x, x, x, causal="top_left")
both: tuple[np.ndarray, np.ndarray] = fm.flash_attention(x, x, x, return_lse=True)
old: np.ndarray = fm.flash_attention_forward(x, x, x, True)
kernel: str = fm.attention_plan(x, x, x).kernel
error: type[ValueError] = fm.InvalidArgumentError
"""
_WRONG = {
    'fm.flash_attention(x, x, x, layout="sbhd")': "call-overload",
    "fm.flash_attention(x, x)": "call-overload",
    "fm.attention_plan(x, x, x).tiles": "attr-defined",
    'fm.set_num_threads("2")': "arg-type",
    "fm.flash_attention_backward(x)": "attr-defined",
}


def run_mypy(*arguments: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("mypy")
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={"MYPYPATH": str(installed("py.typed").parents[1]), "PATH": ""},
    )


def test_users_code_is_checked(tmp_path: Path) -> None:
    good = tmp_path / "good.py"
    good.write_text(_USER)
    wrong = tmp_path / "wrong.py"
    wrong.write_text(_USER + "\n".join(_WRONG) + "\n")
    cache = f"--cache-dir={tmp_path / 'cache'}"
    quiet = "--follow-imports=silent"
    done = run_mypy(cache, quiet, "--ignore-missing-imports", str(good))
    assert done.returncode == 0, done.stdout + done.stderr
    done = run_mypy(cache, quiet, "--ignore-missing-imports", str(wrong))
    first = len(_USER.splitlines()) + 1
    for line, code in enumerate(_WRONG.values(), first):
        assert f"wrong.py:{line}: error:" in done.stdout, done.stdout
        assert f"[{code}]" in done.stdout


def test_package_passes_mypy_strict() -> None:
    pytest.importorskip("mypy")
    site = installed("py.typed").parents[1]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            f"--config-file={ROOT / 'pyproject.toml'}",
            "--package=flashmoe_science",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=site,
        env={"MYPYPATH": str(site), "PATH": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
