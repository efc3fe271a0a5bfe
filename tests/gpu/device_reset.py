"""Calls before and after the device is reset, beside the library: a program, since nothing of a
process that has used the GPU survives that.

    python tests/gpu/device_reset.py driver same
    python tests/gpu/device_reset.py runtime old

Who resets: "driver", cuDevicePrimaryCtxReset; "runtime", cudaDeviceReset of the copy of CUDA's
runtime that torch has loaded, and has used. The library is linked with a copy of its own.

Which thread calls: "same", that which resets the device and allocates memory anew; "new", one that
has not used CUDA yet; "old", another one that has called before the reset, and so knows the calls
and has the context that goes.

Memory comes from the driver. Every result is held to float64. Prints the kernels that ran.
"""

from __future__ import annotations

import argparse
import ctypes as c
import faulthandler
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import capi
import kernels
from gpu import sanitize_attention, sanitize_moe
from gpu.sanitize import Driver
from gpu.sanitize_attention import Options
from gpu.sanitize_moe import Runner
from moe_cases import Case
from moe_chains import RouteChain, once, twice

RESETS = ("driver", "runtime")
THREADS = ("same", "new", "old")
LIMIT_S = 200

# Each by a kernel that needs more shared memory than blocks have without asking, where the family
# has one; that of split KV has a second kernel.
ATTENTION = {
    "sm89": Options(70, 330, 2, 1, "bottom_right"),
    "sm90_whole_tiles": Options(130, 330, 2, 1, "bottom_right"),
    "sm89_few_rows": Options(1, 1100, 8, 2, "bottom_right", "bhsd"),
    "sm90_split_kv": Options(5, 9000, 4, 1, "bottom_right"),
}
LAYER = Case(tokens=24, hidden=392, inner=392, experts=8, top_k=2)
FEW = Case(tokens=3, hidden=456, inner=456, experts=4, top_k=2)
ROUTES = (
    RouteChain(20, 126, 5, once("key32_e128"), "bf16"),
    RouteChain(513, 126, 5, twice("key32_e128"), "bf16"),
)


class _Function:
    """A function of the library that another thread calls."""

    def __init__(self, function: Any, thread: ThreadPoolExecutor) -> None:
        self.__dict__.update(function=function, thread=thread)

    def __call__(self, *arguments: Any) -> Any:
        return self.thread.submit(self.function, *arguments).result()

    def __setattr__(self, name: str, value: Any) -> None:  # argtypes
        setattr(self.function, name, value)


class Library:
    """The library, all of whose functions one other thread calls."""

    def __init__(self, lib: c.CDLL, thread: ThreadPoolExecutor) -> None:
        self._lib = lib
        self._thread = thread

    def __getattr__(self, name: str) -> _Function:
        return _Function(getattr(self._lib, name), self._thread)


def torchs_runtime() -> c.CDLL:
    """torch's copy of CUDA's runtime, once torch has used the GPU."""
    import torch

    assert float(torch.ones(8, device="cuda").sum()) == 8
    paths = re.findall(r"/\S*libcudart[^/\s]*\.so\S*", Path("/proc/self/maps").read_text())
    assert paths, "torch has loaded no libcudart.so"
    return c.CDLL(paths[0])


def reset_by_driver() -> None:
    driver = c.CDLL("libcuda.so.1")
    device = c.c_int()
    assert driver.cuDeviceGet(c.byref(device), 0) == 0
    status = driver.cuDevicePrimaryCtxReset_v2(device)
    assert status == 0, f"cuDevicePrimaryCtxReset: CUDA driver error {status}"


def reset_by_runtime(runtime: c.CDLL) -> None:
    status = runtime.cudaSetDevice(0) or runtime.cudaDeviceReset()
    assert status == 0, f"cudaDeviceReset: CUDA runtime error {status}"


def attend(driver: Driver, family: str) -> str:
    dim = 128
    kernel = min(
        kernel
        for kernel in kernels.plain_attention(family)
        if (kernel.dtype, kernel.dim, kernel.dim_v) == ("bf16", dim, dim)
        and not (kernel.capped or kernel.ragged)
    )
    return sanitize_attention.check_call(driver, kernel, dim, dim, ATTENTION[family])


def calls(driver: Driver, lib: Any) -> list[str]:
    """Every family on this GPU, in attention, in layers of experts and in products, and routing."""
    ran = []
    with mock.patch.object(capi, "load", return_value=lib):
        runner = Runner(driver)
        for family in kernels.FAMILIES:
            if sanitize_attention.serves(family):
                ran.append(attend(driver, family))
        built = capi.BuildInfo(struct_size=c.sizeof(capi.BuildInfo))
        capi.check(lib.flashmoe_get_build_info(built), lib)
        for family in sanitize_moe.FAMILIES:
            if family not in built.kernel_families.decode().split():
                continue
            case = FEW if family == sanitize_moe.LAYERS_ALONE else LAYER
            ran += sanitize_moe.check_layer(runner, family, case, "bf16")
            if family != sanitize_moe.LAYERS_ALONE:
                ran += sanitize_moe.check_product(runner, family, "bf16", masked=True)
        for route in ROUTES:
            ran += sanitize_moe.check_route(runner, route)
    return ran


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("by", choices=RESETS)
    parser.add_argument("thread", choices=THREADS)
    given = parser.parse_args()
    faulthandler.enable()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    real = capi.load()
    runtime = torchs_runtime() if given.by == "runtime" else None
    driver = Driver()
    with ThreadPoolExecutor(1) as old, ThreadPoolExecutor(1) as new:
        before = calls(driver, real)
        if given.thread == "old":
            assert calls(driver, Library(real, old)) == before
        print("before the reset:", *before, flush=True)
        for round_ in range(2):
            if runtime is None:
                reset_by_driver()
            else:
                reset_by_runtime(runtime)
            driver = Driver()  # the context that memory is to be in
            lib = {"same": real, "old": Library(real, old), "new": Library(real, new)}[given.thread]
            after = calls(driver, lib)
            assert after == before, f"reset {round_}: {after}"
            assert calls(driver, lib) == before, f"reset {round_}: the second time"
    print("after the resets:", *after, flush=True)
    os._exit(0)  # or torch would give back memory that is gone


if __name__ == "__main__":
    main()
