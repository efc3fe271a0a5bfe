"""Exact attention and mixture of experts for NVIDIA GPUs and CPUs, on the tensors you already have.

    import flashmoe_science as fm

    out = fm.flash_attention(q, k, v, causal=True)
    out = fm.fused_moe(tokens, router_weights, w_gate_up, w_down, top_k=8, renormalize=True)

takes NumPy, torch, JAX and CuPy tensors, or any with DLPack, and returns the same kind. Names load
when first used: importing this package loads neither the library nor a framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashmoe_science._core import cuda_device_count, get_num_threads, set_num_threads
    from flashmoe_science.append import kv_append, kv_append_plan
    from flashmoe_science.attention import (
        AttentionGradients,
        flash_attention,
        flash_attention_backward,
    )
    from flashmoe_science.check import SequenceFault, check_sequences, check_sequences_plan
    from flashmoe_science.compat import flash_attention_forward, flash_attention_warp_specialized
    from flashmoe_science.errors import (
        ArgumentTypeError,
        DeviceError,
        FlashMoEError,
        InternalError,
        InvalidArgumentError,
        OutOfMemoryError,
        UnsupportedError,
    )
    from flashmoe_science.gather import kv_gather, kv_gather_plan
    from flashmoe_science.info import (
        BuildInfo,
        DeviceInfo,
        build_info,
        device_info,
        last_launch,
        last_launches,
        set_log,
    )
    from flashmoe_science.merge import merge_states, merge_states_plan
    from flashmoe_science.moe import (
        MoeRouting,
        fused_moe,
        grouped_product,
        moe_forward,
        moe_route,
        moe_route_given,
    )
    from flashmoe_science.moe_gradients import (
        FusedMoeGradients,
        MoeGradients,
        ProductGradients,
        fused_moe_backward,
        grouped_product_backward,
        moe_backward,
        moe_route_backward,
    )
    from flashmoe_science.moe_plans import (
        MoeLaunch,
        MoePlan,
        fused_moe_plan,
        grouped_product_plan,
        moe_backward_plan,
        moe_backward_plan_for,
        moe_plan,
        moe_plan_for,
        moe_route_backward_plan,
        moe_route_backward_plan_for,
        moe_route_plan,
        moe_route_plan_for,
    )
    from flashmoe_science.plan import (
        AttentionPlan,
        Launch,
        Plan,
        attention_backward_plan,
        attention_backward_plan_for,
        attention_plan,
        attention_plan_for,
    )

    __version__: str

__all__ = [
    "ArgumentTypeError",
    "AttentionGradients",
    "AttentionPlan",
    "BuildInfo",
    "DeviceError",
    "DeviceInfo",
    "FlashMoEError",
    "FusedMoeGradients",
    "InternalError",
    "InvalidArgumentError",
    "Launch",
    "MoeGradients",
    "MoeLaunch",
    "MoePlan",
    "MoeRouting",
    "OutOfMemoryError",
    "Plan",
    "ProductGradients",
    "SequenceFault",
    "UnsupportedError",
    "__version__",
    "attention_backward_plan",
    "attention_backward_plan_for",
    "attention_plan",
    "attention_plan_for",
    "build_info",
    "check_sequences",
    "check_sequences_plan",
    "cuda_device_count",
    "device_info",
    "flash_attention",
    "flash_attention_backward",
    "flash_attention_forward",
    "flash_attention_warp_specialized",
    "fused_moe",
    "fused_moe_backward",
    "fused_moe_plan",
    "get_num_threads",
    "grouped_product",
    "grouped_product_backward",
    "grouped_product_plan",
    "kv_append",
    "kv_append_plan",
    "kv_gather",
    "kv_gather_plan",
    "last_launch",
    "last_launches",
    "merge_states",
    "merge_states_plan",
    "moe_backward",
    "moe_backward_plan",
    "moe_backward_plan_for",
    "moe_forward",
    "moe_plan",
    "moe_plan_for",
    "moe_route",
    "moe_route_backward",
    "moe_route_backward_plan",
    "moe_route_backward_plan_for",
    "moe_route_given",
    "moe_route_plan",
    "moe_route_plan_for",
    "set_log",
    "set_num_threads",
]

_MODULES = {
    "flashmoe_science._core": ("cuda_device_count", "get_num_threads", "set_num_threads"),
    "flashmoe_science.attention": (
        "AttentionGradients",
        "flash_attention",
        "flash_attention_backward",
    ),
    "flashmoe_science.compat": ("flash_attention_forward", "flash_attention_warp_specialized"),
    "flashmoe_science.errors": (
        "ArgumentTypeError",
        "DeviceError",
        "FlashMoEError",
        "InternalError",
        "InvalidArgumentError",
        "OutOfMemoryError",
        "UnsupportedError",
    ),
    "flashmoe_science.info": (
        "BuildInfo",
        "DeviceInfo",
        "build_info",
        "device_info",
        "last_launch",
        "last_launches",
        "set_log",
    ),
    "flashmoe_science.append": ("kv_append", "kv_append_plan"),
    "flashmoe_science.check": ("SequenceFault", "check_sequences", "check_sequences_plan"),
    "flashmoe_science.gather": ("kv_gather", "kv_gather_plan"),
    "flashmoe_science.merge": ("merge_states", "merge_states_plan"),
    "flashmoe_science.moe": (
        "MoeRouting",
        "fused_moe",
        "grouped_product",
        "moe_forward",
        "moe_route",
        "moe_route_given",
    ),
    "flashmoe_science.moe_gradients": (
        "FusedMoeGradients",
        "MoeGradients",
        "ProductGradients",
        "fused_moe_backward",
        "grouped_product_backward",
        "moe_backward",
        "moe_route_backward",
    ),
    "flashmoe_science.moe_plans": (
        "MoeLaunch",
        "MoePlan",
        "fused_moe_plan",
        "grouped_product_plan",
        "moe_backward_plan",
        "moe_backward_plan_for",
        "moe_plan",
        "moe_plan_for",
        "moe_route_backward_plan",
        "moe_route_backward_plan_for",
        "moe_route_plan",
        "moe_route_plan_for",
    ),
    "flashmoe_science.plan": (
        "AttentionPlan",
        "Launch",
        "Plan",
        "attention_backward_plan",
        "attention_backward_plan_for",
        "attention_plan",
        "attention_plan_for",
    ),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


if not TYPE_CHECKING:  # type checkers would otherwise see every name in this module

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            value = importlib.import_module("flashmoe_science.info").build_info().version
        elif name in _MODULE_OF:
            value = getattr(importlib.import_module(_MODULE_OF[name]), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
