from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import capi

ISAS = ("scalar", "avx2", "avx512", "avx512bf16")


@functools.cache
def _library_of(isa: str) -> ctypes.CDLL:
    return capi.load_fresh(FLASHMOE_CPU_ISA=isa)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist looks at groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each case for all instruction sets in a row, and in one process: they share its reference,
    which reference.py remembers and which takes longer than they do."""
    cases: dict[str, int] = {}
    order = {}
    for item in items:
        case = item.nodeid
        parameters = getattr(item, "callspec", None)
        if parameters is not None and "isa_library" in parameters.params:
            case = case.replace(f"{parameters.params['isa_library']}", "", 1)
            item.add_marker(pytest.mark.xdist_group(case))
        order[item] = cases.setdefault(case, len(cases))
    items.sort(key=order.__getitem__)


@pytest.fixture(params=ISAS)
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
