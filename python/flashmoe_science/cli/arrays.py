"""The arrays that `check` and `bench` work on: NumPy, torch or CuPy behind one small face.

torch and CuPy accept NumPy's argument names (axis, keepdims), so the reference mathematics is
written once, against `Arrays.xp`.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from typing import Any

from flashmoe_science.cli.output import CommandError


class Arrays:
    """Arrays of one library on one device."""

    name = "numpy"
    dtypes: tuple[str, ...] = ("fp32", "fp16")

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.xp: Any = importlib.import_module(self.name)
        if self.name == "numpy" and importlib.util.find_spec("ml_dtypes") is not None:
            self.dtypes = ("fp32", "fp16", "bf16")

    def normal(self, extents: tuple[int, ...], dtype: str, seed: int) -> Any:
        """Standard normal values, the same for the same seed."""
        values = self.xp.random.default_rng(seed).standard_normal(extents, dtype="float32")
        return self.cast(values, dtype)

    def gumbel(self, extents: tuple[int, ...], seed: int) -> Any:
        """Values of the standard Gumbel distribution in fp32, the same for the same seed."""
        return self.cast(self.xp.random.default_rng(seed).gumbel(size=extents), "fp32")

    def array(self, values: Any) -> Any:
        """An array on the device from numbers on the host."""
        return self.xp.asarray(values)

    def sorted_down(self, values: Any) -> Any:
        """Sorts the last axis in descending order."""
        return self.xp.sort(values, axis=-1)[..., ::-1]

    def stable_order(self, values: Any) -> Any:
        """Indices that sort the last axis in descending order; ties keep their order."""
        return self.xp.argsort(-values, axis=-1, kind="stable")

    def poisoned(self, extents: tuple[int, ...], dtype: str) -> Any:
        """An output full of NaN, so that elements that are not written show."""
        return self.xp.full(extents, self.xp.nan, dtype=self._dtype(dtype))

    def _dtype(self, dtype: str) -> Any:
        if dtype == "bf16":  # NumPy lacks it; ml_dtypes adds it
            return importlib.import_module("ml_dtypes").bfloat16
        return {"fp64": "float64", "fp32": "float32", "fp16": "float16"}[dtype]

    def cast(self, values: Any, dtype: str) -> Any:
        return values.astype(self._dtype(dtype))

    def rounded(self, values: Any, dtype: str) -> Any:
        """fp32 values after a round trip through dtype."""
        if dtype == "bf16" and self.name == "numpy":  # works without ml_dtypes: bits, to even
            bits = values.view("uint32")
            even = (bits >> 16) & 1
            return ((bits + 0x7FFF + even) & 0xFFFF0000).astype("uint32").view("float32")
        return self.cast(self.cast(values, dtype), "fp32")

    def to_host(self, values: Any) -> Any:
        """A NumPy array of the same values in fp32, which holds fp16 and bf16 exactly."""
        return self.cast(values, "fp32")

    def arange(self, n: int) -> Any:
        return self.xp.arange(n)

    def synchronize(self) -> None:
        """Waits until the device has done all its work."""


class CupyArrays(Arrays):
    """CuPy has no bf16 of its own, and the GPU kernels take no fp32."""

    name = "cupy"
    dtypes = ("fp16",)

    def to_host(self, values: Any) -> Any:
        return self.xp.asnumpy(self.cast(values, "fp32"))

    def synchronize(self) -> None:
        self.xp.cuda.get_current_stream().synchronize()


class TorchArrays(Arrays):
    name = "torch"

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.dtypes = ("fp32", "fp16", "bf16")
        if device != "cpu":
            self.dtypes = ("fp16", "bf16")
            self.xp.cuda.set_device(device)  # events, graphs and streams belong to this device

    def normal(self, extents: tuple[int, ...], dtype: str, seed: int) -> Any:
        generator = self.xp.Generator(device=self.device).manual_seed(seed)
        values = self.xp.randn(extents, generator=generator, device=self.device)
        return self.cast(values, dtype)

    def gumbel(self, extents: tuple[int, ...], seed: int) -> Any:
        generator = self.xp.Generator(device=self.device).manual_seed(seed)
        drawn = self.xp.empty(extents, device=self.device).exponential_(generator=generator)
        return -drawn.log()

    def array(self, values: Any) -> Any:
        return self.xp.asarray(values, device=self.device)

    def sorted_down(self, values: Any) -> Any:
        return self.xp.sort(values, dim=-1, descending=True).values

    def stable_order(self, values: Any) -> Any:
        return self.xp.argsort(values, dim=-1, descending=True, stable=True)

    def poisoned(self, extents: tuple[int, ...], dtype: str) -> Any:
        return self.xp.full(extents, float("nan"), dtype=self._dtype(dtype), device=self.device)

    def _dtype(self, dtype: str) -> Any:
        names = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
        return getattr(self.xp, names[dtype])

    def cast(self, values: Any, dtype: str) -> Any:
        return values.to(self._dtype(dtype))

    def to_host(self, values: Any) -> Any:
        return self.cast(values, "fp32").cpu().numpy()

    def arange(self, n: int) -> Any:
        return self.xp.arange(n, device=self.device)

    def synchronize(self) -> None:
        if self.device != "cpu":
            self.xp.cuda.synchronize(self.device)


def _torch_sees(device: str) -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    torch = importlib.import_module("torch")
    return device == "cpu" or bool(torch.cuda.is_available())


def normal_device(name: str) -> str:
    """ "cpu" or "cuda:N" for a name given by a person."""
    match = re.fullmatch(r"(cpu)|cuda(?::(\d+))?", name)
    if match is None:
        raise CommandError(f"--device: got {name}, accepted are cpu, cuda and cuda:N")
    return "cpu" if match[1] else f"cuda:{match[2] or 0}"


def choose_arrays(device: str) -> Arrays:
    """torch if it can use the device, else CuPy for a GPU and NumPy for the CPU."""
    if _torch_sees(device):
        return TorchArrays(device)
    if device == "cpu":
        return Arrays()
    if importlib.util.find_spec("cupy") is not None:
        return CupyArrays(device)
    raise CommandError(
        f"--device: {device} needs torch with CUDA or CuPy to make tensors there; neither is "
        "installed"
    )


def usable_device(flashmoe: Any) -> tuple[str, str]:
    """The default device, and a sentence that says why."""
    if flashmoe.cuda_device_count() == 0:
        return "cpu", "No GPU that this build can use here: running on the CPU backend."
    if _torch_sees("cuda:0") or importlib.util.find_spec("cupy") is not None:
        return "cuda:0", "Running on the first GPU."
    return "cpu", (
        "There is a GPU, but neither torch with CUDA nor CuPy to make tensors on it: running on "
        "the CPU backend."
    )
