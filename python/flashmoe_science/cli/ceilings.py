"""The best that the device can do, measured in the run that it judges.

Two ceilings: bytes per second of a copy, and FLOP/s of one large matrix product. The arrays' own
library computes both (on a GPU torch, and so cuBLAS). Each is its fastest sample, since
disturbances are no part of a ceiling. They are not theoretical peaks: clocks, power and cooling are
those of the run. If one call takes longer than the time for all samples, it is the only one.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import flashmoe_science as fm
from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.timing import CpuClock, CudaClock, Sampling, make_clock

# Extents of the square product, and bytes of the copied array: far beyond every cache, and long
# compared to a launch.
_MATMUL_EXTENT = {"cpu": 2048, "cuda": 8192}
_COPY_BYTES = {"cpu": 2**27, "cuda": 2**29}

_LEAST_SAMPLES = 3  # if they take at most:
_BUDGET_S = 2.0

# CPUs with these multiply bf16. On others torch's product takes seconds to minutes and is no
# ceiling; nor is its fp16 product on any CPU, or NumPy's of either.
_NATIVE_BF16 = ("avx512bf16", "amx")


def native_dtypes(device: str, served: Sequence[str]) -> tuple[str, ...]:
    """The element types that kernels on a device multiply without widening to fp32."""
    if device != "cpu":
        return tuple(served)
    native = ("fp32", "bf16") if fm.device_info("cpu").isa in _NATIVE_BF16 else ("fp32",)
    return tuple(dtype for dtype in native if dtype in served)


def measure_ceilings(arrays: Arrays, dtypes: Iterable[str], sampling: Sampling) -> dict[str, Any]:
    """Bytes/s of a copy and FLOP/s of a product for each dtype; null where one fails."""
    kind = "cpu" if arrays.device == "cpu" else "cuda"
    served = native_dtypes(arrays.device, ("fp32",) if arrays.name == "numpy" else arrays.dtypes)
    size, extent = _COPY_BYTES[kind], _MATMUL_EXTENT[kind]
    return {
        "copy_bytes_per_s": _rate(2.0 * size, arrays, lambda: _copy(arrays, size), sampling),
        "matmul_flops_per_s": {
            dtype: _rate(
                2.0 * extent**3, arrays, functools.partial(_matmul, arrays, extent, dtype), sampling
            )
            if dtype in served
            else None
            for dtype in sorted(set(dtypes))
        },
    }


def _rate(
    work: float, arrays: Arrays, make: Callable[[], Callable[[], Any]], sampling: Sampling
) -> float | None:
    try:
        fastest = _fastest(make(), make_clock(arrays), sampling)
    except (RuntimeError, MemoryError, TypeError):  # no memory for it, or no such product here
        return None
    rate = work / fastest
    return rate if math.isfinite(rate) else None


def _fastest(call: Callable[[], Any], clock: CpuClock | CudaClock, sampling: Sampling) -> float:
    """The least of as many samples as one contender's time allows, or of a few."""
    begin = time.monotonic()
    samples: list[float] = []
    while len(samples) < sampling.most:
        samples.append(clock.time(call))
        passed = time.monotonic() - begin
        enough = len(samples) >= _LEAST_SAMPLES and passed >= sampling.seconds
        if enough or passed >= max(_BUDGET_S, sampling.seconds):
            break
    return min(samples)


def _copy(arrays: Arrays, size: int) -> Callable[[], Any]:
    """Copies `size` bytes, which reads and writes that many."""
    source, target = (arrays.poisoned((size // 4,), "fp32") for _ in range(2))  # all pages touched
    if arrays.name == "numpy":
        return functools.partial(arrays.xp.copyto, target, source)
    return functools.partial(target.copy_, source)


def _matmul(arrays: Arrays, extent: int, dtype: str) -> Callable[[], Any]:
    a, b = (arrays.normal((extent, extent), dtype, seed) for seed in (0, 1))
    return functools.partial(arrays.xp.matmul, a, b)
