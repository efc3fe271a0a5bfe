"""flashmoe_kv_append by ctypes and NumPy."""

from __future__ import annotations

import ctypes as c
from typing import Any

import capi_moe
from append_cases import Case
from capi_moe import TensorPointer

TENSORS = (
    "k", "v", "k_cache", "v_cache", "slots", "cache_seqlens", "cu_seqlens", "seqused",
    "batch_index", "page_table", "positions", "rotary_cos", "rotary_sin", "q", "q_out",
)  # fmt: skip


class AppendParams(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        *((name, TensorPointer) for name in TENSORS),
        ("kernel", c.c_char_p),
        ("layout", c.c_int32),
        ("rotary", c.c_int32),
        ("q_stays", c.c_int32),
        ("reserved", c.c_uint32),
    ]


capi_moe.FUNCTIONS[AppendParams] = "flashmoe_kv_append"


def make_params(**values: Any) -> AppendParams:
    made: AppendParams = capi_moe.make_params(AppendParams, **values)
    return made


def options_of(case: Case) -> dict[str, int]:
    return {
        "layout": 0 if case.layout == "bshd" else 1,
        "rotary": int(case.given.get("interleaved", False)),
        "q_stays": int(case.given.get("q_stays", False)),
    }
