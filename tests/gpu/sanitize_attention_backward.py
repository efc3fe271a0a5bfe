"""Small calls of attention backward on memory of exactly their size, for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize_attention_backward.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize_attention_backward.py --small sm89

As sanitize_attention.py, whose memory it has. Output and log-sum-exp are the CPU's. Prints the
kernels that ran.
"""

from __future__ import annotations

import argparse
import ctypes as c
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import capi
import kernels
import numpy as np
import reference_backward
from gpu.sanitize_attention import Driver
from kernels import Kernel

FAMILIES = ("sm90", "sm89")


class Options(NamedTuple):
    seq_q: int
    seq_k: int
    heads_q: int
    heads_kv: int
    causal: str = "none"
    layout: str = "bshd"
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    fp32: bool = False


_SMALL = Options(130, 200, 2, 1, "bottom_right")
_OPTIONS = (
    _SMALL,
    Options(33, 17, 1, 1, "top_left", "bhsd", fp32=True),
    Options(1, 65, 2, 2, softcap=2.0),
    Options(150, 330, 3, 1, window=(40, 20)),
)
_SUFFIXES = {"TableTuning": "", "CappedTuning": "_softcap", "AdaTuning": "_ada"}


def kernel_name(family: str, kernel: Kernel) -> str:
    return (
        f"attention_backward_{family}_{kernel.dtype}_d{kernel.dim}_dv{kernel.dim_v}"
        f"{_SUFFIXES[kernel.tuning]}"
    )


def _for_kernel(family: str, kernel: Kernel, options: Options) -> Options:
    """With a softcap where the kernel is for calls that have one, without where another is."""
    if family == "sm90":
        return options._replace(softcap=2.0 if kernel.capped else None)
    return options


def _run(
    driver: Driver, arrays: dict[str, np.ndarray], outputs: tuple[str, ...], **options: object
) -> set[str]:
    """Computes on the GPU, brings outputs back into `arrays`; the kernels' names."""
    params = capi.attention_backward_params(arrays, **options)
    addresses = {name: driver.upload(array) for name, array in arrays.items()}
    for name, view in params.keep.items():
        view.data = addresses[name]
        view.device = capi.Device(capi.CUDA, 0)
    lib = capi.load()
    plan = capi.attention_backward_plan(params)
    # Poisoned, and of exactly the bytes that the plan asks for.
    scratch = driver.upload(np.full(plan.workspace_bytes, 0xFF, np.uint8))
    size = c.c_size_t(plan.workspace_bytes)
    capi.check(lib.flashmoe_attention_backward(params, c.c_void_p(scratch), size, None), lib)
    driver.synchronize()
    driver.free(scratch)
    for name in outputs:
        arrays[name][...] = driver.download(addresses[name], arrays[name])
    for address in addresses.values():
        driver.free(address)
    return {plan.launches[i].kernel.decode() for i in range(plan.launch_count)}


def serves(family: str) -> bool:
    """Whether the family computes on this GPU: a plan of a small call tells."""
    shape = (1, 8, 1, 64)
    names = ("dout", "q", "k", "v", "out", "dq", "dk", "dv")
    arrays = {name: capi.aligned_empty(shape, capi.DTYPES["fp16"]) for name in names}
    arrays["lse"] = np.zeros((1, 1, 8), np.float32)
    params = capi.attention_backward_params(arrays, kernel=family.encode())
    for view in params.keep.values():
        view.device = capi.Device(capi.CUDA, 0)
    try:
        capi.attention_backward_plan(params)
    except capi.FlashmoeError:
        return False
    return True


def check_call(
    driver: Driver, family: str, kernel: Kernel, dim: int, dim_v: int, options: Options
) -> set[str]:
    """One call of the kernel; the names of the kernels that ran."""
    dtype = capi.DTYPES[kernel.dtype]
    seq_q, seq_k, heads_q, heads_kv, causal, layout, window, softcap, fp32 = options
    rng = np.random.default_rng(dim + seq_k)

    def shape(seq: int, heads: int, last: int) -> tuple[int, int, int, int]:
        return (1, seq, heads, last) if layout == "bshd" else (1, heads, seq, last)

    q = capi.normal(rng, shape(seq_q, heads_q, dim), dtype)
    k = capi.normal(rng, shape(seq_k, heads_kv, dim), dtype)
    v = capi.normal(rng, shape(seq_k, heads_kv, dim_v), dtype)
    dout = capi.normal(rng, shape(seq_q, heads_q, dim_v), dtype)
    dlse = rng.standard_normal((1, heads_q, seq_q)).astype(np.float32)
    sinks = rng.standard_normal(heads_q).astype(np.float32)
    settings = {"layout": layout, "causal": causal, "window": window, "softcap": softcap}
    out, lse = capi.attention(q, k, v, sinks=sinks, **settings)
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse,
              "sinks": sinks}  # fmt: skip
    for name, like in (("dq", q), ("dk", k), ("dv", v)):
        arrays[name] = capi.aligned_empty(like.shape, np.dtype(np.float32) if fp32 else dtype)
        arrays[name][...] = np.nan
    arrays["dsinks"] = np.full(heads_q, np.nan, np.float32)
    name = kernel_name(family, kernel)
    ran = _run(driver, arrays, capi.GRADIENTS, **settings, kernel=name.encode())
    got = tuple(arrays[gradient] for gradient in capi.GRADIENTS)
    reference_backward.assert_gradients_accurate(got, dout, q, k, v, dlse, sinks, **settings)
    return ran


def run_family(driver: Driver, family: str, small: bool) -> set[str]:
    seen = set()
    for kernel in sorted(kernels.attention(f"{family}_backward")):
        dims = {(kernel.dim, kernel.dim_v), (kernel.dim - 8, kernel.dim_v - 16)}
        for dim, dim_v in list(dims)[:1] if small else dims:
            for options in (_SMALL,) if small else _OPTIONS:
                given = _for_kernel(family, kernel, options)
                seen |= check_call(driver, family, kernel, dim, dim_v, given)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--small", action="store_true", help="each kernel on one small call")
    given = parser.parse_args()
    begin = time.monotonic()
    driver = Driver()
    seen: set[str] = set()
    for family in given.parts or FAMILIES:
        if serves(family):
            seen |= run_family(driver, family, given.small)
    print("\n".join(sorted(seen)))
    print(f"{time.monotonic() - begin:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
