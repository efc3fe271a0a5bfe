from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import capi

ISAS = ("scalar", "avx2", "avx512", "avx512bf16")


@pytest.fixture(scope="session", params=ISAS)
def isa_library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """One instance of the library per instruction set of this processor."""
    lib = capi.load_fresh(FLASHMOE_CPU_ISA=request.param)
    info = capi.DeviceInfo(struct_size=ctypes.sizeof(capi.DeviceInfo))
    if lib.flashmoe_get_device_info(capi.Device(capi.CPU, 0), info) == capi.UNSUPPORTED:
        pytest.skip(lib.flashmoe_last_error().decode())
    return lib


@pytest.fixture
def library() -> ctypes.CDLL:
    return capi.load()
