"""flashmoe_kv_gather and flashmoe_check_sequences by ctypes and NumPy."""

from __future__ import annotations

import ctypes as c
from typing import Any

import capi
import capi_moe
import numpy as np
from capi_moe import TensorPointer

_GATHER_TENSORS = (
    "k_cache", "v_cache", "cu_seqlens_k", "seqused_k", "k_begin", "batch_index", "page_table",
    "k_scale", "v_scale", "k", "v",
)  # fmt: skip


class GatherParams(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        *((name, TensorPointer) for name in _GATHER_TENSORS),
        ("kernel", c.c_char_p),
        ("layout", c.c_int32),
        ("reserved", c.c_uint32),
    ]


class CheckParams(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("q", TensorPointer),
        ("k", TensorPointer),
        ("sequences", c.POINTER(capi.AttentionSequences)),
        ("status", TensorPointer),
        ("kernel", c.c_char_p),
        ("layout", c.c_int32),
        ("reserved", c.c_uint32),
    ]


capi_moe.FUNCTIONS |= {
    GatherParams: "flashmoe_kv_gather",
    CheckParams: "flashmoe_check_sequences",
}


def _by_name(params: Any, arrays: dict[str, np.ndarray]) -> Any:
    params.keep = dict(zip(arrays, params.keep, strict=True))
    return params


def gather_params(arrays: dict[str, np.ndarray], layout: str = "bshd") -> GatherParams:
    """`arrays` by their names in the C ABI."""
    made: GatherParams = _by_name(
        capi_moe.make_params(GatherParams, **arrays, layout=capi.LAYOUTS[layout]), arrays
    )
    return made


def check_params(
    q: np.ndarray, k: np.ndarray, status: np.ndarray, tables: dict[str, Any]
) -> CheckParams:
    sequences = capi.sequences(tables)
    arrays = {"q": q, "k": k, "status": status}
    made: CheckParams = _by_name(
        capi_moe.make_params(CheckParams, **arrays, sequences=c.pointer(sequences)), arrays
    )
    made.keep |= sequences.keep
    made.keep_sequences = sequences
    return made
