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


def _is_here(isa: str) -> bool:
    info = capi.DeviceInfo(struct_size=ctypes.sizeof(capi.DeviceInfo))
    status = _library_of(isa).flashmoe_get_device_info(capi.Device(capi.CPU, 0), info)
    return status != capi.UNSUPPORTED


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests are of the instruction sets that are here. One test says of each of the others that it
    is not, test_plan.py's, and not one in five of all."""
    if "isa_library" in metafunc.fixturenames:
        here = [isa for isa in parallel.ISAS if _is_here(isa)]
        metafunc.parametrize("isa_library", here, indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each case for all instruction sets in a row: they share its reference, which reference.py
    remembers and which takes longer than they do."""
    cases: dict[str, int] = {}
    order = {item: cases.setdefault(parallel.case_of(item.nodeid), len(cases)) for item in items}
    items.sort(key=order.__getitem__)


@pytest.fixture
def isa_library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    """One instance of the library per instruction set of this processor."""
    return _library_of(request.param)


@pytest.fixture
def library() -> ctypes.CDLL:
    return capi.load()
