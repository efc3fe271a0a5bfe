"""The C ABI by ctypes and NumPy: no bindings, no framework.

The library is the file named by FLASHMOE_LIBRARY, else the one inside the installed
flashmoe_science package. bf16 arrays are ml_dtypes.bfloat16.
"""

from __future__ import annotations

import ctypes as c
import functools
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

OK = 0
INVALID_ARGUMENT = 1
UNSUPPORTED = 2
WORKSPACE_TOO_SMALL = 5

CPU = 1
CUDA = 2

LAYOUTS = {"bshd": 0, "bhsd": 1}
CAUSAL = {"none": 0, "bottom_right": 1, "top_left": 2}
BF16 = np.dtype(ml_dtypes.bfloat16)
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
DTYPES = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16), "bf16": BF16}
_DLPACK_TYPES = {BF16: (4, 16), FP8: (10, 8)}  # code and bits of those that NumPy does not have


class Device(c.Structure):
    _fields_ = [("device_type", c.c_int32), ("device_id", c.c_int32)]


class DType(c.Structure):
    _fields_ = [("code", c.c_uint8), ("bits", c.c_uint8), ("lanes", c.c_uint16)]


class Tensor(c.Structure):
    """flashmoe_tensor. Build one with `tensor()`, which keeps the array alive."""

    _fields_ = [
        ("data", c.c_void_p),
        ("device", Device),
        ("ndim", c.c_int32),
        ("dtype", DType),
        ("shape", c.POINTER(c.c_int64)),
        ("strides", c.POINTER(c.c_int64)),
        ("byte_offset", c.c_uint64),
    ]


SEQUENCE_TENSORS = (
    "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "k_begin", "batch_index", "page_table"
)  # fmt: skip


class AttentionSequences(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        *((name, c.POINTER(Tensor)) for name in SEQUENCE_TENSORS),
        ("max_seqlen_q", c.c_int64),
        ("max_seqlen_k", c.c_int64),
        ("split_size", c.c_int64),
        ("q_offset", c.POINTER(Tensor)),
    ]


class AttentionForwardParams(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("q", c.POINTER(Tensor)),
        ("k", c.POINTER(Tensor)),
        ("v", c.POINTER(Tensor)),
        ("out", c.POINTER(Tensor)),
        ("lse", c.POINTER(Tensor)),
        ("layout", c.c_int32),
        ("causal", c.c_int32),
        ("scale", c.c_float),
        ("reserved", c.c_uint32),
        ("kernel", c.c_char_p),
        ("window", c.c_uint32),
        ("softcap", c.c_float),
        ("window_left", c.c_int64),
        ("window_right", c.c_int64),
        ("q_scale", c.POINTER(Tensor)),
        ("k_scale", c.POINTER(Tensor)),
        ("v_scale", c.POINTER(Tensor)),
        ("sequences", c.POINTER(AttentionSequences)),
        ("sinks", c.POINTER(Tensor)),
        ("attn_bias", c.POINTER(Tensor)),
        ("attn_mask", c.POINTER(Tensor)),
        ("prior_out", c.POINTER(Tensor)),
        ("prior_lse", c.POINTER(Tensor)),
    ]


class AttentionBackwardParams(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("dout", c.POINTER(Tensor)),
        ("q", c.POINTER(Tensor)),
        ("k", c.POINTER(Tensor)),
        ("v", c.POINTER(Tensor)),
        ("out", c.POINTER(Tensor)),
        ("lse", c.POINTER(Tensor)),
        ("dlse", c.POINTER(Tensor)),
        ("sinks", c.POINTER(Tensor)),
        ("dq", c.POINTER(Tensor)),
        ("dk", c.POINTER(Tensor)),
        ("dv", c.POINTER(Tensor)),
        ("dsinks", c.POINTER(Tensor)),
        ("layout", c.c_int32),
        ("causal", c.c_int32),
        ("scale", c.c_float),
        ("softcap", c.c_float),
        ("window", c.c_uint32),
        ("accumulate", c.c_int32),
        ("window_left", c.c_int64),
        ("window_right", c.c_int64),
        ("kernel", c.c_char_p),
        ("sequences", c.POINTER(AttentionSequences)),
        ("attn_bias", c.POINTER(Tensor)),
        ("attn_mask", c.POINTER(Tensor)),
    ]


MAX_LAUNCHES = 16


class Launch(c.Structure):
    _fields_ = [
        ("kernel", c.c_char * 64),
        ("device", Device),
        ("grid", c.c_uint32 * 3),
        ("block", c.c_uint32 * 3),
        ("cluster", c.c_int32),
        ("stages", c.c_int32),
        ("shared_bytes", c.c_uint64),
        ("tile_m", c.c_int32),
        ("tile_n", c.c_int32),
        ("dim", c.c_int32),
        ("dim_v", c.c_int32),
        ("registers", c.c_int32),
        ("local_bytes", c.c_int32),
        ("binary_arch", c.c_int32),
        ("repeats", c.c_int32),
        ("reserved", c.c_int32 * 2),
    ]

    def planned(self) -> bytes:
        """Without what is read back from the loaded code, which no plan has."""
        copy = Launch.from_buffer_copy(self)
        copy.registers = copy.local_bytes = copy.binary_arch = 0
        return bytes(copy)


class Plan(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("operation", c.c_char * 32),
        ("family", c.c_char * 16),
        ("isa", c.c_char * 16),
        ("microseconds", c.c_double),
        ("flops", c.c_double),
        ("bytes", c.c_double),
        ("workspace_bytes", c.c_uint64),
        ("launch_count", c.c_int32),
        ("reserved", c.c_int32),
        ("rejected", c.c_char * 512),
        ("all_launches", Launch * MAX_LAUNCHES),
    ]

    @property
    def launches(self) -> list[Launch]:
        return list(self.all_launches[: self.launch_count])


class DeviceInfo(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("name", c.c_char * 256),
        ("isa", c.c_char * 32),
        ("kernel_family", c.c_char * 32),
        ("compute_capability", c.c_int32),
        ("multiprocessors", c.c_int32),
        ("driver_version", c.c_int32),
        ("reserved", c.c_int32),
        ("shared_bytes_per_block", c.c_uint64),
        ("l2_bytes", c.c_uint64),
        ("memory_bytes", c.c_uint64),
    ]


class BuildInfo(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("version", c.c_char_p),
        ("cuda_architectures", c.c_char_p),
        ("cuda_compiler", c.c_char_p),
        ("host_compiler", c.c_char_p),
        ("kernel_families", c.c_char_p),
        ("cuda_runtime_version", c.c_int32),
    ]


class FlashmoeError(RuntimeError):
    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(f"status {status}: {sentence}")
        self.status = status
        self.sentence = sentence


def library_path() -> Path:
    """The shared library under test."""
    named = os.environ.get("FLASHMOE_LIBRARY")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("flashmoe_science")
    for root in (spec.submodule_search_locations or []) if spec else []:
        found = sorted(Path(root).rglob("libflashmoe.so*"))
        if found:
            return found[0]
    raise FileNotFoundError(
        "no libflashmoe: set FLASHMOE_LIBRARY to the shared library or install flashmoe-science"
    )


def _declare(lib: c.CDLL) -> c.CDLL:
    params = c.POINTER(AttentionForwardParams)
    backward = c.POINTER(AttentionBackwardParams)
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "flashmoe_last_error": (c.c_char_p, []),
        "flashmoe_status_name": (c.c_char_p, [c.c_int]),
        "flashmoe_version": (c.c_uint32, []),
        "flashmoe_get_build_info": (c.c_int, [c.POINTER(BuildInfo)]),
        "flashmoe_get_device_info": (c.c_int, [Device, c.POINTER(DeviceInfo)]),
        "flashmoe_cuda_device_count": (c.c_int32, []),
        "flashmoe_set_num_threads": (c.c_int, [c.c_int32]),
        "flashmoe_get_num_threads": (c.c_int32, []),
        "flashmoe_attention_forward_plan": (c.c_int, [params, c.POINTER(Plan)]),
        "flashmoe_attention_forward_workspace_size": (c.c_int, [params, c.POINTER(c.c_size_t)]),
        "flashmoe_attention_forward": (c.c_int, [params, c.c_void_p, c.c_size_t, c.c_void_p]),
        "flashmoe_attention_backward_plan": (c.c_int, [backward, c.POINTER(Plan)]),
        "flashmoe_attention_backward_workspace_size": (c.c_int, [backward, c.POINTER(c.c_size_t)]),
        "flashmoe_attention_backward": (c.c_int, [backward, c.c_void_p, c.c_size_t, c.c_void_p]),
        "flashmoe_last_launches": (c.c_int, [c.POINTER(Launch), c.POINTER(c.c_int32)]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments
    return lib


@functools.cache
def load() -> c.CDLL:
    """The library, its functions declared."""
    return _declare(c.CDLL(str(library_path())))


def load_fresh(**environment: str) -> c.CDLL:
    """A second instance with its own static state, whose first calls see `environment`.

    The loader keeps one instance per file, so this loads a copy.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "libflashmoe.so"
        shutil.copy(library_path(), copy)
        lib = _declare(c.CDLL(str(copy)))
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        info = DeviceInfo(struct_size=c.sizeof(DeviceInfo))
        lib.flashmoe_get_device_info(Device(CPU, 0), info)
        lib.flashmoe_get_num_threads()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return lib


def tensor(array: np.ndarray) -> Tensor:
    """A view of `array`, strides and all."""
    code, bits = _DLPACK_TYPES.get(array.dtype, (2, 8 * array.dtype.itemsize))
    code = {"i": 0, "u": 1, "b": 6}.get(array.dtype.kind, code)
    made = Tensor()
    made.shape = (c.c_int64 * array.ndim)(*array.shape)
    made.strides = (c.c_int64 * array.ndim)(*(s // array.itemsize for s in array.strides))
    made.data = array.ctypes.data
    made.device = Device(CPU, 0)
    made.ndim = array.ndim
    made.dtype = DType(code, bits, 1)
    made.keep = array
    return made


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype, alignment: int = 64) -> np.ndarray:
    """A C-contiguous array whose data begins on a multiple of `alignment` bytes."""
    count = int(np.prod(shape))
    raw = np.empty(count * dtype.itemsize + alignment, np.uint8)
    begin = -raw.ctypes.data % alignment
    return raw[begin : begin + count * dtype.itemsize].view(dtype).reshape(shape)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Standard normal numbers, contiguous and aligned."""
    array = aligned_empty(shape, dtype)
    drawn: Any = np.float64 if dtype == np.float64 else np.float32
    array[...] = rng.standard_normal(shape, dtype=drawn).astype(dtype)
    return array


def set_window(
    params: AttentionForwardParams | AttentionBackwardParams,
    window: tuple[int | None, int | None] | None,
) -> None:
    """(left, right), None for no bound."""
    left, right = window or (None, None)
    params.window = (left is not None) | (right is not None) << 1
    params.window_left = left or 0
    params.window_right = right or 0


def sequences(tables: Mapping[str, Any]) -> AttentionSequences:
    """Tensors and bounds by their names in the C ABI."""
    made = AttentionSequences(struct_size=c.sizeof(AttentionSequences))
    made.keep = {name: tensor(x) for name, x in tables.items() if isinstance(x, np.ndarray)}
    for name, given in tables.items():
        setattr(made, name, c.pointer(made.keep[name]) if name in made.keep else given)
    return made


def attention_params(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray | None = None,
    *,
    layout: str = "bshd",
    causal: str = "none",
    window: tuple[int | None, int | None] | None = None,
    scale: float = 0.0,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    attn_bias: np.ndarray | None = None,
    attn_mask: np.ndarray | None = None,
    tables: Mapping[str, Any] | None = None,
    kernel: bytes | None = None,
) -> AttentionForwardParams:
    views = {"q": tensor(q), "k": tensor(k), "v": tensor(v), "out": tensor(out)}
    for name, given in (("sinks", sinks), ("attn_bias", attn_bias), ("attn_mask", attn_mask)):
        if given is not None:
            views[name] = tensor(given)
    if lse is not None:
        views["lse"] = tensor(lse)
    params = AttentionForwardParams(struct_size=c.sizeof(AttentionForwardParams))
    for name, view in views.items():
        setattr(params, name, c.pointer(view))
    params.layout = LAYOUTS[layout]
    params.causal = CAUSAL[causal]
    set_window(params, window)
    params.scale = scale
    params.softcap = softcap or 0.0
    params.kernel = kernel
    params.keep = views
    if tables is not None:
        params.keep_sequences = sequences(tables)
        params.sequences = c.pointer(params.keep_sequences)
    return params


def check(status: int, lib: c.CDLL) -> None:
    if status != OK:
        raise FlashmoeError(status, lib.flashmoe_last_error().decode())


def last_launches(lib: c.CDLL | None = None) -> list[Launch]:
    """The launches of this thread's last call that launched something."""
    lib = lib or load()
    launches, count = (Launch * MAX_LAUNCHES)(), c.c_int32()
    check(lib.flashmoe_last_launches(launches, count), lib)
    return list(launches[: count.value])


def is_planned(plan: Plan, launches: list[Launch]) -> bool:
    """Whether these launches are the plan's."""
    return [one.planned() for one in launches] == [one.planned() for one in plan.launches]


def attention_plan(params: AttentionForwardParams, lib: c.CDLL | None = None) -> Plan:
    lib = lib or load()
    plan = Plan(struct_size=c.sizeof(Plan))
    check(lib.flashmoe_attention_forward_plan(params, plan), lib)
    return plan


def run_attention(
    params: AttentionForwardParams,
    lib: c.CDLL | None = None,
    workspace: np.ndarray | None = None,
) -> None:
    """Calls flashmoe_attention_forward, with a workspace of its own unless one is given."""
    lib = lib or load()
    if workspace is None:
        size = c.c_size_t()
        check(lib.flashmoe_attention_forward_workspace_size(params, size), lib)
        workspace = aligned_empty((size.value,), np.dtype(np.uint8))
    check(
        lib.flashmoe_attention_forward(params, workspace.ctypes.data, workspace.nbytes, None), lib
    )


def sums_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype of lse and of sums, with tensors of `dtype`."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    layout: str = "bshd",
    causal: str = "none",
    window: tuple[int | None, int | None] | None = None,
    scale: float = 0.0,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    attn_bias: np.ndarray | None = None,
    attn_mask: np.ndarray | None = None,
    lib: c.CDLL | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(out, lse) of one call on fresh outputs, poisoned with NaN beforehand."""
    batch, seq_q, heads = q.shape[:3] if layout == "bshd" else (q.shape[0], q.shape[2], q.shape[1])
    out = aligned_empty((*q.shape[:3], v.shape[3]), q.dtype)
    out[...] = np.nan
    lse = np.full((batch, heads, seq_q), np.nan, sums_dtype(q.dtype))
    run_attention(
        attention_params(
            q, k, v, out, lse, layout=layout, causal=causal, window=window, scale=scale,
            softcap=softcap, sinks=sinks, attn_bias=attn_bias, attn_mask=attn_mask,
        ),
        lib,
    )  # fmt: skip
    return out, lse


GRADIENTS = ("dq", "dk", "dv", "dsinks")


class Gradients(NamedTuple):
    dq: np.ndarray | None
    dk: np.ndarray | None
    dv: np.ndarray | None
    dsinks: np.ndarray | None = None


def attention_backward_params(
    tensors: Mapping[str, np.ndarray | Tensor | None],
    *,
    layout: str = "bshd",
    causal: str = "none",
    window: tuple[int | None, int | None] | None = None,
    scale: float = 0.0,
    softcap: float | None = None,
    accumulate: bool = False,
    tables: Mapping[str, Any] | None = None,
    kernel: bytes | None = None,
) -> AttentionBackwardParams:
    """`tensors` by their names in the C ABI; None are absent."""
    params = AttentionBackwardParams(struct_size=c.sizeof(AttentionBackwardParams))
    params.keep = {
        name: given if isinstance(given, Tensor) else tensor(given)
        for name, given in tensors.items()
        if given is not None
    }
    for name, view in params.keep.items():
        setattr(params, name, c.pointer(view))
    params.layout = LAYOUTS[layout]
    params.causal = CAUSAL[causal]
    set_window(params, window)
    params.scale = scale
    params.softcap = softcap or 0.0
    params.accumulate = accumulate
    params.kernel = kernel
    if tables is not None:
        params.keep_sequences = sequences(tables)
        params.sequences = c.pointer(params.keep_sequences)
    return params


def attention_backward_plan(params: AttentionBackwardParams, lib: c.CDLL | None = None) -> Plan:
    lib = lib or load()
    plan = Plan(struct_size=c.sizeof(Plan))
    check(lib.flashmoe_attention_backward_plan(params, plan), lib)
    return plan


def run_attention_backward(
    params: AttentionBackwardParams,
    lib: c.CDLL | None = None,
    workspace: np.ndarray | None = None,
) -> None:
    """Calls flashmoe_attention_backward, in a workspace of bytes 0xff unless one is given."""
    lib = lib or load()
    if workspace is None:
        size = c.c_size_t()
        check(lib.flashmoe_attention_backward_workspace_size(params, size), lib)
        workspace = aligned_empty((size.value,), np.dtype(np.uint8))
        workspace[...] = 0xFF
    check(
        lib.flashmoe_attention_backward(params, workspace.ctypes.data, workspace.nbytes, None), lib
    )


def attention_backward(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    dlse: np.ndarray | None = None,
    *,
    sinks: np.ndarray | None = None,
    attn_bias: np.ndarray | None = None,
    attn_mask: np.ndarray | None = None,
    wanted: tuple[str, ...] = GRADIENTS,
    dtype: np.dtype | None = None,
    lib: c.CDLL | None = None,
    **options: Any,
) -> Gradients:
    """The wanted gradients of one call, of `dtype` or q's, poisoned with NaN beforehand."""
    tensors = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    if dlse is not None:
        tensors["dlse"] = dlse
    for name, given in (("sinks", sinks), ("attn_bias", attn_bias), ("attn_mask", attn_mask)):
        if given is not None:
            tensors[name] = given
    gradients = {}
    for name, of in zip(GRADIENTS, (q, k, v, sinks), strict=True):
        if name in wanted and of is not None:
            gradients[name] = aligned_empty(of.shape, dtype or of.dtype)
            gradients[name][...] = np.nan
    run_attention_backward(attention_backward_params(tensors | gradients, **options), lib)
    return Gradients(*(gradients.get(name) for name in GRADIENTS))
