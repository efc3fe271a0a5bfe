"""Small attention calls on memory of exactly their size: a program for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize_attention.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize_attention.py --small sm89

Memory comes from the CUDA driver, one allocation for each tensor and no framework in between, so
that the first byte past an end is known to be one. Every result is checked as well. Prints the
kernels that ran.
"""

from __future__ import annotations

import argparse
import ctypes as c
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import capi
import kernels
import numpy as np
import reference
from kernels import Kernel


class Options(NamedTuple):
    seq_q: int
    seq_k: int
    heads_q: int
    heads_kv: int
    causal: str = "none"
    layout: str = "bshd"
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None


_OPTIONS = (
    Options(130, 200, 2, 1, "bottom_right"),
    Options(33, 17, 1, 1, "top_left", "bhsd", softcap=2.0),
    Options(1, 65, 2, 2),
    Options(150, 330, 1, 1, window=(40, 20)),
    Options(1, 1100, 8, 2, "bottom_right", "bhsd"),  # keys that blocks may share
    Options(5, 9000, 4, 1, "bottom_right"),  # that they may share through the workspace
)
# Each kernel once: some tiles of each family, of keys too, and keys that blocks share.
_SMALL = {
    "sm89": Options(70, 330, 2, 1, "bottom_right"),
    "sm90_whole_tiles": Options(130, 330, 2, 1, "bottom_right"),
    "sm89_few_rows": Options(1, 1100, 8, 2, "bottom_right", "bhsd"),
    "sm90_split_kv": Options(5, 1100, 4, 1, "bottom_right"),
}
_RARE = Options(100, 100, 1, 1, "top_left", window=(25, None))


def _for_kernel(kernel: Kernel, options: Options) -> Options:
    """With a softcap where the kernel is for calls that have one, without where another is."""
    if kernel.family in kernels.COPY_ENGINE:
        return options._replace(softcap=2.0 if kernel.capped else None)
    return options


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


def _run(driver: Driver, arrays: dict[str, np.ndarray], **options: Any) -> str:
    """Computes on the GPU, brings out and lse back into `arrays`; the kernel's name."""
    params = capi.attention_params(**arrays, **options)
    addresses = {name: driver.upload(array) for name, array in arrays.items()}
    for name, view in params.keep.items():
        view.data = addresses[name]
        view.device = capi.Device(capi.CUDA, 0)
    lib = capi.load()
    plan = capi.attention_plan(params)
    # Poisoned, and of exactly the bytes that the plan asks for.
    scratch = driver.upload(np.full(max(plan.workspace_bytes, 1), 0xFF, np.uint8))
    size = c.c_size_t(plan.workspace_bytes)
    capi.check(lib.flashmoe_attention_forward(params, c.c_void_p(scratch), size, None), lib)
    driver.synchronize()
    driver.free(scratch)
    for name in ("out", "lse"):
        arrays[name][...] = driver.download(addresses[name], arrays[name])
    for address in addresses.values():
        driver.free(address)
    return plan.launches[0].kernel.decode()


def serves(family: str) -> bool:
    """Whether the family computes on this GPU: a plan of a small call tells."""
    shape = (1, 8, 1, 64)
    arrays = {
        name: capi.aligned_empty(shape, capi.DTYPES["fp16"]) for name in ("q", "k", "v", "out")
    }
    params = capi.attention_params(**arrays, kernel=family.encode())
    for view in params.keep.values():
        view.device = capi.Device(capi.CUDA, 0)
    try:
        capi.attention_plan(params)
    except capi.FlashmoeError:
        return False
    return True


def check_call(
    driver: Driver, kernel: Kernel, dim: int, dim_v: int,
    options: Options, bad_key: int | None = None,
) -> str:  # fmt: skip
    """One call of the kernel's family; the name of the kernel that ran."""
    dtype = kernel.dtype
    seq_q, seq_k, heads_q, heads_kv, causal, layout, window, softcap = options
    rng = np.random.default_rng(dim + seq_k)

    def shape(seq: int, heads: int, last: int) -> tuple[int, int, int, int]:
        return (1, seq, heads, last) if layout == "bshd" else (1, heads, seq, last)

    arrays = {
        "q": capi.normal(rng, shape(seq_q, heads_q, dim), capi.DTYPES[dtype]),
        "k": capi.normal(rng, shape(seq_k, heads_kv, dim), capi.DTYPES[dtype]),
        "v": capi.normal(rng, shape(seq_k, heads_kv, dim_v), capi.DTYPES[dtype]),
        "out": capi.aligned_empty(shape(seq_q, heads_q, dim_v), capi.DTYPES[dtype]),
        "lse": np.full((1, heads_q, seq_q), np.nan, np.float32),
    }
    arrays["out"][...] = np.nan
    if bad_key is not None:
        arrays["v"][0, bad_key] = np.nan
    mask = {"causal": causal, "window": window}
    # Any rows of a tile serve a call of this family; of the others the dimensions tell the kernel.
    wanted = kernel.table_name if kernel.family == "sm89_few_rows" else kernel.family
    ran = _run(driver, arrays, layout=layout, **mask, softcap=softcap,
               kernel=wanted.encode())  # fmt: skip
    out, lse, q, k, v = (arrays[name] for name in ("out", "lse", "q", "k", "v"))
    if bad_key is None:
        reference.assert_accurate(out, lse, q, k, v, **mask, softcap=softcap, layout=layout)
    else:
        seen = reference.visible(seq_q, seq_k, **mask)[:, bad_key]
        assert np.isnan(out[0, seen].astype(np.float32)).all()
        assert np.isfinite(out[0, ~seen].astype(np.float32)).all()
    return ran


def run_family(driver: Driver, family: str, small: bool) -> set[str]:
    seen = set()
    for kernel in sorted(kernels.attention(family)):
        if small:
            options = _for_kernel(kernel, _SMALL[family])
            seen.add(check_call(driver, kernel, kernel.dim, kernel.dim_v, options))
            continue
        for dim, dim_v in {(kernel.dim, kernel.dim_v), (kernel.dim - 8, kernel.dim_v - 16)}:
            for options in _OPTIONS:
                seen.add(check_call(driver, kernel, dim, dim_v, _for_kernel(kernel, options)))
        # The rare path: a NaN of V that lies right of some rows of a tile and left of others.
        seen.add(check_call(driver, kernel, kernel.dim, kernel.dim_v,
                            _for_kernel(kernel, _RARE), bad_key=60))  # fmt: skip
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="FAMILY", help=", ".join(kernels.FAMILIES))
    parser.add_argument("--small", action="store_true", help="each kernel on one small call")
    given = parser.parse_args()
    begin = time.monotonic()
    driver = Driver()
    seen: set[str] = set()
    for family in given.parts or kernels.FAMILIES:
        if serves(family):
            seen |= run_family(driver, family, given.small)
    print("\n".join(sorted(seen)))
    print(f"{time.monotonic() - begin:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
