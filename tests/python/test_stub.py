"""The stub of the native module, and types of the whole package."""

from __future__ import annotations

import importlib.util
import shutil
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
banded: np.ndarray = fm.flash_attention(x, x, x, window=(4, None), softcap=30)
old: np.ndarray = fm.flash_attention_forward(x, x, x, True)
kernel: str = fm.attention_plan(x, x, x).kernel
error: type[ValueError] = fm.InvalidArgumentError
"""
_WRONG = {
    'fm.flash_attention(x, x, x, layout="sbhd")': "call-overload",
    "fm.flash_attention(x, x)": "call-overload",
    "fm.flash_attention(x, x, x, window=4)": "call-overload",
    "fm.attention_plan(x, x, x).tiles": "attr-defined",
    'fm.set_num_threads("2")': "arg-type",
    "fm.flash_attention_backward(x)": "attr-defined",
}


@pytest.fixture(scope="module")
def mypy_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package's types: mypy is silent about errors in site-packages."""
    pytest.importorskip("mypy")
    root = tmp_path_factory.mktemp("types")
    shutil.copytree(
        installed("py.typed").parent,
        root / "flashmoe_science",
        ignore=shutil.ignore_patterns("*.so*", "__pycache__", "include", "lib"),
    )
    return root


def run_mypy(root: Path, cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", f"--cache-dir={cache}", *arguments]
    environment = {"MYPYPATH": str(root), "PATH": ""}
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_users_code_is_checked(mypy_root: Path) -> None:
    options = ("--strict", "--config-file=", "--follow-imports=silent", "--ignore-missing-imports")
    (mypy_root / "good.py").write_text(_USER)
    cache = mypy_root / "cache"
    done = run_mypy(mypy_root, cache, *options, "good.py")
    assert done.returncode == 0, done.stdout + done.stderr
    (mypy_root / "wrong.py").write_text(_USER + "\n".join(_WRONG) + "\n")
    done = run_mypy(mypy_root, cache, *options, "wrong.py")
    first = len(_USER.splitlines()) + 1
    for line, code in enumerate(_WRONG.values(), first):
        assert f"wrong.py:{line}: error:" in done.stdout, done.stdout
        assert f"[{code}]" in done.stdout


def test_package_passes_mypy_strict(mypy_root: Path) -> None:
    config = ROOT / "pyproject.toml"
    # Frameworks are most of the work: where the checkout's own check has done it, it need not be
    # done again.
    cache = ROOT / ".mypy_cache"
    cache = cache if cache.exists() else mypy_root / "cache"
    done = run_mypy(mypy_root, cache, f"--config-file={config}", "--package=flashmoe_science")
    assert done.returncode == 0, done.stdout + done.stderr
