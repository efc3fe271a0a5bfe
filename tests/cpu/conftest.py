from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import capi
import parallel


@functools.cache
def _library_of(isa: str) -> ctypes.CDLL:
    return capi.load_fresh(FLASHMOE_CPU_ISA=isa)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each case for all instruction sets in a row: they share its reference, which reference.py
    remembers and which takes longer than they do."""
    cases: dict[str, int] = {}
    order = {item: cases.setdefault(parallel.case_of(item.nodeid), len(cases)) for item in items}
    items.sort(key=order.__getitem__)


@pytest.fixture(params=parallel.ISAS)
def isa_library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """One instance of the library per instruction set of this processor."""
    lib = _library_of(request.param)
    info = capi.DeviceInfo(struct_size=ctypes.sizeof(capi.DeviceInfo))
    if lib.flashmoe_get_device_info(capi.Device(capi.CPU, 0), info) == capi.UNSUPPORTED:
        pytest.skip(lib.flashmoe_last_error().decode())
    return lib


@pytest.fixture
def library() -> ctypes.CDLL:
    return capi.load()
