"""The attention kernels that the build instantiates, read from where they are listed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

CMAKE = Path(__file__).resolve().parents[1] / "cmake"
DTYPES = ("fp16", "bf16")
# Families of GPU kernels as a call may ask for them, in the order it finds them; of sm90 both
# schedules.
FAMILIES = ("sm89_few_rows", "sm90_split_kv", "sm90_whole_tiles", "sm89")
# Those that compute ragged, padded and paged batches alone.
OF_SEQUENCES = ("sm89_decode", "mixed", "sm90_mla")
# Those of sm_90a alone, whose tiles come by TMA.
COPY_ENGINE = ("sm90_split_kv", "sm90_whole_tiles")


def family_of(name: str) -> str:
    """The family of one of these."""
    return "sm90" if name in COPY_ENGINE else name


def stem(name: str) -> str:
    """How the names of its kernels begin, behind the operation's."""
    return name.removesuffix("_whole_tiles")


class Kernel(NamedTuple):
    family: str
    dtype: str
    dim: int
    dim_v: int
    tuning: str  # of the families of few rows the query rows of a tile, with _fp8 of such keys

    @property
    def capped(self) -> bool:
        """Whether it serves calls with a softcap and no others; an sm89 kernel serves both."""
        return self.tuning.startswith("Capped")

    @property
    def ragged(self) -> bool:
        """Whether it serves ragged, padded and paged batches and no others."""
        return "Ragged" in self.tuning

    @property
    def windowed(self) -> bool:
        """Whether it serves short windows and no others."""
        return "Window" in self.tuning

    @property
    def rows(self) -> int:
        """For the families of few rows, the query rows of a tile."""
        return int(self.tuning.removesuffix("_fp8"))

    @property
    def fp8(self) -> bool:
        """Whether it serves keys and values of fp8 and no others."""
        return self.tuning.endswith("_fp8")

    @property
    def large(self) -> bool:
        """For sm89's gradients, whether it takes more shared memory than Ada has."""
        return "Ada" not in self.tuning

    @property
    def biased(self) -> bool:
        """Whether it serves calls with a bias or a mask and no others."""
        return "Biased" in self.tuning

    @property
    def table_name(self) -> str:
        """The library's name for the kernel of these dimensions with the table's tuning."""
        name = f"attention_forward_{stem(self.family)}_{self.dtype}_d{self.dim}_dv{self.dim_v}"
        if self.family in ("sm89_few_rows", "sm89_decode"):
            return f"{name}_r{self.tuning}"
        name = f"{name}_ragged" if self.ragged else name
        name = f"{name}_packed" if self.tuning.startswith("Packed") else name
        name = f"{name}_biased" if self.biased else name
        name = f"{name}_window" if self.windowed else name
        return f"{name}_softcap" if self.capped else name


def list_of(file: str, variable: str) -> list[str]:
    text = (CMAKE / file).read_text(encoding="utf-8")
    found = re.search(rf"set\({variable}\s+(.*?)\)", text, re.DOTALL)
    assert found is not None, f"{file} has no list {variable}"
    return re.findall(r'"([^"]+)"', found[1])


def plain_attention(family: str) -> set[Kernel]:
    """Those of calls without a bias or a mask."""
    return {kernel for kernel in attention(family) if not kernel.biased}


def attention(family: str) -> set[Kernel]:
    kernels = set()
    variable = f"FLASHMOE_ATTENTION_{family_of(family).upper()}_KERNELS"
    for entry in list_of("FlashmoeInstantiate.cmake", variable):
        dim, dim_v, *rest = entry.split(",")
        tuning = rest[0] if rest else "TableTuning"
        if rest[2:] == ["true"]:
            tuning += "_fp8"
        if family in COPY_ENGINE and ("Split" in tuning) != (family == "sm90_split_kv"):
            continue
        kernels |= {Kernel(family, dtype, int(dim), int(dim_v), tuning) for dtype in DTYPES}
    return kernels


def shipped_architectures() -> list[str]:
    """Such as ["89-real", "90a-real", "89-virtual"]."""
    return list_of("FlashmoeCuda.cmake", "CMAKE_CUDA_ARCHITECTURES")[0].split(";")


def least_padding(family: str, dim: int, dim_v: int) -> tuple[int, int]:
    """Dimensions of the family's kernel that serves these."""
    fitting = {
        (kernel.dim, kernel.dim_v)
        for kernel in attention(family)
        if kernel.dim >= dim and kernel.dim_v >= dim_v
    }
    return min(fitting, key=sum)
