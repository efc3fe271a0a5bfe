"""What the device can do at best, measured in the run that is judged by it.

Two ceilings: bytes a second of a copy, and FLOP/s of one large matrix product, both by the arrays'
own library (on a GPU torch, and so cuBLAS), each the fastest of its samples: what slows one down
is no part of a ceiling. They are no theoretical peaks: clocks, power and cooling are those of the
run.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import flashmoe_science as fm
from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.timing import Contender, Sampling, interleave, make_clock

# Extents of the square product, and bytes of the array that is copied: far beyond every cache, and
# long beside a launch.
_MATMUL_EXTENT = {"cpu": 2048, "cuda": 8192}
_COPY_BYTES = {"cpu": 2**27, "cuda": 2**29}

_LEAST_SAMPLES = 3

# With these a CPU multiplies bf16. Without, torch's product takes seconds to minutes and is no
# ceiling, as its product of fp16 is on any, and NumPy's of either.
_NATIVE_BF16 = ("avx512bf16", "amx")


def measure_ceilings(arrays: Arrays, dtypes: Iterable[str], sampling: Sampling) -> dict[str, Any]:
    """Bytes/s of a copy and FLOP/s of a product for each dtype; null where one fails."""
    kind = "cpu" if arrays.device == "cpu" else "cuda"
    sampling = dataclasses.replace(sampling, least=_LEAST_SAMPLES)
    served = _cpu_products(arrays) if kind == "cpu" else arrays.dtypes
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


def _cpu_products(arrays: Arrays) -> tuple[str, ...]:
    native = arrays.name == "torch" and fm.device_info("cpu").isa in _NATIVE_BF16
    return ("fp32", "bf16") if native else ("fp32",)


def _rate(
    work: float, arrays: Arrays, make: Callable[[], Callable[[], Any]], sampling: Sampling
) -> float | None:
    try:
        contender = Contender("ceiling", make())
        samples = interleave([contender], make_clock(arrays), sampling)[contender.name]
    except (RuntimeError, MemoryError, TypeError):  # no memory for it, or no such product here
        return None
    rate = work / min(samples)
    return rate if math.isfinite(rate) else None


def _copy(arrays: Arrays, size: int) -> Callable[[], Any]:
    """Copies `size` bytes; that many are read and as many written."""
    source, target = (arrays.poisoned((size // 4,), "fp32") for _ in range(2))  # all pages touched
    if arrays.name == "numpy":
        return functools.partial(arrays.xp.copyto, target, source)
    return functools.partial(target.copy_, source)


def _matmul(arrays: Arrays, extent: int, dtype: str) -> Callable[[], Any]:
    a, b = (arrays.normal((extent, extent), dtype, seed) for seed in (0, 1))
    return functools.partial(arrays.xp.matmul, a, b)
