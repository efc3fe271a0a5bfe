"""Importing is quick and brings in nothing that was not asked for."""

from __future__ import annotations

import subprocess
import sys

LIMIT_SECONDS = 0.1

_IMPORT = """
import sys, time
begin = time.perf_counter()
import flashmoe_science
print(time.perf_counter() - begin)
brought = {"numpy", "torch", "jax", "cupy", "flashmoe_science._core"} & set(sys.modules)
assert not brought, brought
"""

_NUMPY_CALL = """
import sys
import numpy as np
import flashmoe_science as fm
q = np.zeros((1, 4, 2, 16), np.float32)
assert (fm.flash_attention(q, q, q) == 0).all()
fm.attention_plan(q, q, q), fm.build_info(), fm.device_info(), fm.last_launch()
brought = {"torch", "jax", "cupy"} & set(sys.modules)
assert not brought, brought
"""

_ERROR = """
import flashmoe_science as fm
try:
    fm.flash_attention(1, 2, 3)
except TypeError as error:
    assert "q: got int" in str(error), error
"""


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_quick_and_alone() -> None:
    assert min(float(run(_IMPORT)) for _ in range(5)) < LIMIT_SECONDS


def test_a_numpy_call_imports_no_framework() -> None:
    run(_NUMPY_CALL)


def test_a_bad_call_imports_no_framework() -> None:
    run(_ERROR)
