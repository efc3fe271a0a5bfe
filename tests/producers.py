"""Tensors of every framework that is installed, for tests that run one case on all of them.

    @pytest.mark.parametrize("producer", producers.ALL, ids=str)

`make` gives a tensor with the given values; strides and layout of the NumPy array are kept where
the framework can (JAX cannot).
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
from reference import DTYPES


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


class Producer:
    """NumPy itself; base of the others."""

    name = "numpy"
    dtypes: tuple[str, ...] = ("fp32", "fp16", "bf16")
    takes_out = True

    def __str__(self) -> str:
        return self.name

    def make(self, values: np.ndarray, dtype: str) -> Any:
        return cast(values, dtype)

    def as_is(self, values: np.ndarray) -> Any:
        """A tensor of the array's own dtype, for integers among others."""
        return values

    def poisoned(self, shape: tuple[int, ...], dtype: str) -> Any:
        """An output in which every element that is not written shows."""
        return self.make(np.full(shape, np.nan, np.float32), dtype)

    @property
    def kind(self) -> type:
        """Type of the results."""
        return np.ndarray


def cast(values: np.ndarray, dtype: str) -> np.ndarray:
    """The dtype asked for, the strides (in elements) of `values`."""
    if values.dtype == DTYPES[dtype]:
        return values
    return values.astype(DTYPES[dtype], order="K")


class Torch(Producer):
    name = "torch"

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.name = f"torch-{device.partition(':')[0]}"
        if device != "cpu":
            self.dtypes = ("fp16", "bf16")

    def make(self, values: np.ndarray, dtype: str) -> Any:
        torch = importlib.import_module("torch")
        if dtype == "bf16":  # NumPy and torch share no bf16: pass its bits
            bits = torch.from_numpy(cast(values, dtype).view(np.int16))
            return bits.view(torch.bfloat16).to(self.device)
        return torch.from_numpy(cast(values, dtype)).to(self.device)

    def as_is(self, values: np.ndarray) -> Any:
        return importlib.import_module("torch").from_numpy(values).to(self.device)

    @property
    def kind(self) -> type:
        return importlib.import_module("torch").Tensor


class Jax(Producer):
    name = "jax"
    takes_out = False

    def make(self, values: np.ndarray, dtype: str) -> Any:
        return self.as_is(cast(values, dtype))

    def as_is(self, values: np.ndarray) -> Any:
        return importlib.import_module("jax.numpy").asarray(values)

    @property
    def kind(self) -> type:
        return importlib.import_module("jax").Array


class CuPy(Producer):
    name = "cupy"
    dtypes = ("fp16",)

    def make(self, values: np.ndarray, dtype: str) -> Any:
        return self.as_is(cast(values, dtype))

    def as_is(self, values: np.ndarray) -> Any:
        return importlib.import_module("cupy").asarray(values)

    @property
    def kind(self) -> type:
        return importlib.import_module("cupy").ndarray


class Paddle(Producer):
    """PaddlePaddle, on the CPU. Its from_dlpack takes no negative strides."""

    name = "paddle"

    def make(self, values: np.ndarray, dtype: str) -> Any:
        values = cast(values, dtype)
        if dtype == "bf16":
            return self.as_is(values.view(np.int16)).view("bfloat16")
        return self.as_is(values)

    def as_is(self, values: np.ndarray) -> Any:
        paddle = importlib.import_module("paddle")
        if values.size == 0 or min(values.strides, default=0) < 0:
            return paddle.to_tensor(values)
        return paddle.from_dlpack(values)

    @property
    def kind(self) -> type:
        return importlib.import_module("paddle").Tensor


class Strict(Producer):
    """The array API standard and nothing beside it."""

    name = "array-api-strict"
    dtypes = ("fp32",)

    def make(self, values: np.ndarray, dtype: str) -> Any:
        return self.as_is(cast(values, dtype))

    def as_is(self, values: np.ndarray) -> Any:
        return importlib.import_module("array_api_strict").asarray(values, copy=False)

    @property
    def kind(self) -> type:
        return type(self.as_is(np.zeros(1, np.float32)))


class DlpackOnly:
    """An object with the two methods of DLPack's Python protocol, and nothing else."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


class StandardArray(DlpackOnly):
    """As much of the Python array API standard as a call needs to make its outputs."""

    float32 = np.float32
    float16 = np.float16
    int32 = np.int32

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    @property
    def dtype(self) -> Any:
        return self._array.dtype

    @property
    def device(self) -> str:
        return "here"

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._array

    def __array_namespace__(self) -> Any:
        return StandardArray

    def __getitem__(self, index: Any) -> StandardArray:
        return StandardArray(self._array[index])

    def __sub__(self, other: StandardArray) -> StandardArray:
        return StandardArray(self._array - other._array)

    @staticmethod
    def empty(shape: tuple[int, ...], *, dtype: Any, device: str) -> StandardArray:
        assert device == "here"
        return StandardArray(np.empty(shape, dtype))

    @staticmethod
    def asarray(values: Any, *, dtype: Any, device: str) -> StandardArray:
        assert device == "here"
        return StandardArray(np.asarray(values, dtype))

    @staticmethod
    def reshape(array: StandardArray, shape: tuple[int, ...], *, copy: bool) -> StandardArray:
        made = array._array.reshape(shape)
        if not copy and made.size and not np.may_share_memory(made, array._array):
            raise ValueError("a copy is needed")
        return StandardArray(made)


class Dlpack(Producer):
    name = "dlpack"
    dtypes = ("fp32", "fp16")
    takes_out = False  # the object shows no values to compare; results are NumPy's

    def make(self, values: np.ndarray, dtype: str) -> Any:
        return self.as_is(cast(values, dtype))

    def as_is(self, values: np.ndarray) -> Any:
        return DlpackOnly(values)


class TvmFfi(Dlpack):
    """Apache TVM FFI's tensors, which have DLPack and no function that makes one."""

    name = "tvm-ffi"

    def as_is(self, values: np.ndarray) -> Any:
        return importlib.import_module("tvm_ffi").from_dlpack(values)


class Standard(Producer):
    name = "array-api"
    dtypes = ("fp32", "fp16")

    def make(self, values: np.ndarray, dtype: str) -> Any:
        return self.as_is(cast(values, dtype))

    def as_is(self, values: np.ndarray) -> Any:
        return StandardArray(values)

    @property
    def kind(self) -> type:
        return StandardArray


ON_CPU: list[Producer] = [Producer(), Dlpack(), Standard()]
if installed("torch"):
    ON_CPU.append(Torch())
if installed("jax"):
    ON_CPU.append(Jax())
if installed("paddle"):
    ON_CPU.append(Paddle())
if installed("array_api_strict"):
    ON_CPU.append(Strict())
if installed("tvm_ffi"):
    ON_CPU.append(TvmFfi())
