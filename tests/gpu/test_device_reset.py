"""Calls go on after cudaDeviceReset and cuDevicePrimaryCtxReset: kernels are loaded again in the
context that the device has then. Each case is a process of its own (device_reset.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import kernels
import pytest
from gpu import device_reset, families, moe_layers

pytestmark = pytest.mark.gpu

PROGRAM = Path(device_reset.__file__)


@pytest.mark.parametrize("thread", device_reset.THREADS)
@pytest.mark.parametrize("by", device_reset.RESETS)
def test_calls_go_on_after_a_reset(by: str, thread: str) -> None:
    command = [sys.executable, str(PROGRAM), by, thread]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=device_reset.LIMIT_S + 30, check=False
        )
    except subprocess.TimeoutExpired as expired:
        pytest.fail(f"$ {' '.join(command)}\nno end\n{expired.stdout}\n{expired.stderr}")
    said = f"$ {' '.join(command)}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, said
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("after the resets:"), said
    for family in families.serving():
        assert f"attention_forward_{kernels.stem(family)}_" in last, said
    for family in moe_layers.serving():
        assert f"_{family}_" in last.replace("attention_forward_", ""), said
