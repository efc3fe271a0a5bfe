"""Names of dtypes and devices as the C ABI's numbers."""

from __future__ import annotations

import operator
import re
from typing import Any, NamedTuple

from flashmoe_science.errors import ArgumentTypeError, InvalidArgumentError

CPU = 1  # DLPack's device types
CUDA = 2
CUDA_HOST = 3
GPU_MODEL = 256  # the C ABI's own; the ordinal is the model's

GPU_MODELS = ("h100", "h200", "l4", "rtx4090")  # in the order of flashmoe_gpu_model


class Dtype(NamedTuple):
    """DLPack's type code and width."""

    code: int
    bits: int


class Device(NamedTuple):
    """DLPack's device type, and the ordinal."""

    type: int
    id: int


_DTYPES = {
    "fp64": Dtype(2, 64),
    "float64": Dtype(2, 64),
    "fp32": Dtype(2, 32),
    "float32": Dtype(2, 32),
    "fp16": Dtype(2, 16),
    "float16": Dtype(2, 16),
    "half": Dtype(2, 16),
    "bf16": Dtype(4, 16),
    "bfloat16": Dtype(4, 16),
}


FP8_E4M3 = Dtype(10, 8)
"""For caches of keys and values."""


def parse_dtype(dtype: object, name: str = "dtype") -> Dtype:
    """Parses "bf16", "bfloat16", or an object that prints as one, such as torch.bfloat16."""
    found = _DTYPES.get(str(dtype).rpartition(".")[2])
    if found is None:
        given = printable(str(dtype))
        raise ArgumentTypeError(
            f"{name}: got dtype {given}, accepted are fp16, bf16, fp32 and fp64"
        )
    return found


def parse_device(device: object) -> Device:
    """Parses "cpu", "cuda", "cuda:1", a GPU model such as "h200", or an object that prints as one,
    such as a torch.device."""
    text = str(device)
    if text in ("cpu", "cpu:0"):
        return Device(CPU, 0)
    if text in GPU_MODELS:
        return Device(GPU_MODEL, GPU_MODELS.index(text))
    match = re.fullmatch(r"(?:cuda|gpu)(?::([0-9]{1,4}))?", text)
    if match is None:
        raise InvalidArgumentError(
            f"device: got {device!r}, accepted are 'cpu', 'cuda', 'cuda:N' and the models of GPUs "
            f"{', '.join(map(repr, GPU_MODELS))}"
        )
    return Device(CUDA, int(match[1] or 0))


def printable(text: str) -> str:
    """Escapes surrogates, which no encoding supports."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def parse_extent(name: str, extent: Any, end: int, accepted: str, *, first: int = 0) -> int:
    """Parses an int, or an object that stands for one, from `first` to end - 1; `accepted` says so
    in words."""
    if isinstance(extent, bool) or not hasattr(type(extent), "__index__"):
        raise ArgumentTypeError(
            f"{name}: got {extent!r} of type {type(extent).__name__}, accepted are {accepted}"
        )
    number = operator.index(extent)
    if not first <= number < end:
        raise InvalidArgumentError(f"{name}: got {number}, accepted are {accepted}")
    return number


def parse_flag(name: str, flag: Any) -> bool:
    if not isinstance(flag, bool):
        raise ArgumentTypeError(
            f"{name}: got {flag!r} of type {type(flag).__name__}, accepted are False and True"
        )
    return flag


def device_name(device: Device) -> str:
    """The name that parse_device parses."""
    if device.type == GPU_MODEL:
        return GPU_MODELS[device.id]
    return f"cuda:{device.id}" if device.type == CUDA else "cpu"
