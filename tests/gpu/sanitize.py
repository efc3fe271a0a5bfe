"""What the programs for compute-sanitizer share: memory of exactly its size, calls on it, their
command line.

Memory comes from the CUDA driver, one allocation for each tensor and no framework in between, so
that the first byte past an end is known to be one.
"""

from __future__ import annotations

import argparse
import ctypes as c
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import capi
import numpy as np

_Kernel = TypeVar("_Kernel")


class Driver:
    """The few functions of the CUDA driver that are needed."""

    def __init__(self) -> None:
        self._lib = c.CDLL("libcuda.so.1")
        device, context = c.c_int(), c.c_void_p()
        self._do("cuInit", c.c_uint(0))
        self._do("cuDeviceGet", c.byref(device), c.c_int(0))
        self._do("cuDevicePrimaryCtxRetain", c.byref(context), device)
        self._do("cuCtxSetCurrent", context)

    def _do(self, name: str, *arguments: object) -> None:
        status = getattr(self._lib, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name}: CUDA driver error {status}")

    def allocate(self, like: np.ndarray) -> int:
        """Memory for the array, and not one byte more."""
        address = c.c_uint64()
        self._do("cuMemAlloc_v2", c.byref(address), c.c_size_t(like.nbytes))
        return address.value

    def upload(self, array: np.ndarray) -> int:
        """A copy of the array."""
        address = self.allocate(array)
        self._do("cuMemcpyHtoD_v2", c.c_uint64(address), c.c_void_p(array.ctypes.data),
                 c.c_size_t(array.nbytes))  # fmt: skip
        return address

    def download(self, address: int, like: np.ndarray) -> np.ndarray:
        array = np.empty_like(like)
        self._do("cuMemcpyDtoH_v2", c.c_void_p(array.ctypes.data), c.c_uint64(address),
                 c.c_size_t(array.nbytes))  # fmt: skip
        return array

    def free(self, address: int) -> None:
        self._do("cuMemFree_v2", c.c_uint64(address))

    def synchronize(self) -> None:
        self._do("cuCtxSynchronize")


def on_gpu(params: Any) -> Any:
    """The parameters of a call, with all tensors on cuda:0."""
    for view in params.keep.values():
        view.device = capi.Device(capi.CUDA, 0)
    return params


def serves(params: Any, plan: Callable[[Any], object]) -> bool:
    """Whether such a call is served on this GPU."""
    try:
        plan(on_gpu(params))
    except capi.FlashmoeError:
        return False
    return True


def run(
    driver: Driver, arrays: dict[str, np.ndarray], outputs: Iterable[str], params: Any,
    plan: Callable[[Any], capi.Plan], function: str,
) -> list[str]:  # fmt: skip
    """Computes on the GPU, brings outputs back into `arrays`; the kernels' names.

    An array that is the first columns of another is so there, too.
    """
    owners = {
        name: other for name, array in arrays.items() for other, of in arrays.items()
        if array.ctypes.data == of.ctypes.data and array.nbytes < of.nbytes
    }  # fmt: skip
    addresses = {name: driver.upload(array) for name, array in arrays.items() if name not in owners}
    for name, view in on_gpu(params).keep.items():
        view.data = addresses[owners.get(name, name)]
    lib = capi.load()
    planned = plan(params)
    # Poisoned, and of exactly the bytes that the plan asks for.
    scratch = driver.upload(np.full(max(planned.workspace_bytes, 1), 0xFF, np.uint8))
    size = c.c_size_t(planned.workspace_bytes)
    capi.check(getattr(lib, function)(params, c.c_void_p(scratch), size, None), lib)
    driver.synchronize()
    driver.free(scratch)
    for name in outputs:
        arrays[name][...] = driver.download(addresses[name], arrays[name])
    for address in addresses.values():
        driver.free(address)
    return [planned.launches[i].kernel.decode() for i in range(planned.launch_count)]


def part_of(kernels: list[_Kernel], share: tuple[int, int]) -> list[_Kernel]:
    """Every so many, beginning with one of them."""
    index, count = share
    return kernels[index::count]


def _share(text: str) -> tuple[int, int]:
    index, count = map(int, text.split("/"))
    if not 0 <= index < count:
        raise ValueError
    return index, count


def main(
    program: str,
    families: Iterable[str],
    serves: Callable[[str], bool],
    run_family: Callable[[Driver, str, bool, tuple[int, int]], set[str]],
) -> None:
    """The command line of a program; its docstring begins with what it does."""
    parser = argparse.ArgumentParser(description=program.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="FAMILY", help=", ".join(families))
    parser.add_argument("--small", action="store_true", help="each kernel on one small call")
    parser.add_argument("--share", type=_share, default=(0, 1), metavar="I/N",
                        help="every N-th kernel from the I-th on: N processes run all")  # fmt: skip
    given = parser.parse_args()
    begin = time.monotonic()
    driver = Driver()
    seen: set[str] = set()
    for family in given.parts or families:
        if serves(family):
            seen |= run_family(driver, family, given.small, given.share)
    print("\n".join(sorted(seen)))
    print(f"{time.monotonic() - begin:.1f} s", file=sys.stderr)
