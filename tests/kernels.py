"""The attention kernels that the build instantiates, read from where they are listed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_CMAKE = Path(__file__).resolve().parents[1] / "cmake"
DTYPES = ("fp16", "bf16")


class Kernel(NamedTuple):
    dtype: str
    dim: int
    dim_v: int
    tuning: str


def _list_of(file: str, variable: str) -> list[str]:
    text = (_CMAKE / file).read_text(encoding="utf-8")
    found = re.search(rf"set\({variable}\s+(.*?)\)", text, re.DOTALL)
    assert found is not None, f"{file} has no list {variable}"
    return re.findall(r'"([^"]+)"', found[1])


def attention_sm89() -> set[Kernel]:
    kernels = set()
    for entry in _list_of("FlashmoeInstantiate.cmake", "FLASHMOE_ATTENTION_SM89_KERNELS"):
        dim, dim_v, *rest = entry.split(",")
        tuning = rest[0] if rest else "TableTuning"
        kernels |= {Kernel(dtype, int(dim), int(dim_v), tuning) for dtype in DTYPES}
    return kernels


def shipped_architectures() -> list[str]:
    """Such as ["89-real", "90a-real", "89-virtual"]."""
    return _list_of("FlashmoeCuda.cmake", "CMAKE_CUDA_ARCHITECTURES")[0].split(";")


def least_padding(dim: int, dim_v: int) -> tuple[int, int]:
    """Dimensions of the kernel that serves these."""
    fitting = {
        (kernel.dim, kernel.dim_v)
        for kernel in attention_sm89()
        if kernel.dim >= dim and kernel.dim_v >= dim_v
    }
    return min(fitting, key=sum)
