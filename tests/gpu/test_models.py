"""A model's plans are those of the device: the table of facts against the driver."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import flashmoe_science as fm
import pytest

pytestmark = pytest.mark.gpu

MODELS = {
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA L4": "l4",
    "NVIDIA GeForce RTX 4090": "rtx4090",
}


@pytest.fixture
def model() -> str:
    name = fm.device_info("cuda").name
    if name not in MODELS:
        pytest.skip(f"{name} is in no table")
    return MODELS[name]


def test_facts(model: str) -> None:
    here, told = fm.device_info("cuda"), fm.device_info(model)
    assert told.memory_bytes == pytest.approx(here.memory_bytes, rel=0.02)
    own = {"memory_bytes": 0, "driver_version": 0}
    assert dataclasses.replace(told, **own) == dataclasses.replace(here, **own)


def _anywhere(plan: Any) -> Any:
    """A plan less the name of the device it is for."""
    launches = tuple(dataclasses.replace(launch, device="") for launch in plan.launches)
    rejected = re.sub(r"the tensors are on [\w:]+", "the tensors are there", plan.rejected)
    rejected = re.sub(r"[\d.]+ us", "some us", rejected)
    return dataclasses.replace(plan, launches=launches, rejected=rejected, microseconds=0)


def _assert_alike(here: Any, told: Any) -> None:
    """Memory clocks of one model's devices differ a little, and with them estimates of times."""
    assert _anywhere(here) == _anywhere(told)
    assert here.microseconds == pytest.approx(told.microseconds, rel=0.03)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_attention(model: str, dim: int, dtype: str) -> None:
    for batch in (1, 3, 64):
        for heads_q, heads_kv in ((1, 1), (32, 8), (24, 1)):
            for seq_q, seq_k in ((1, 77), (1, 8192), (1, 65536), (9, 4096), (300, 300)):
                for causal in (False, True):
                    plans = [
                        fm.attention_plan_for(
                            batch=batch, seq_q=seq_q, seq_k=seq_k, heads_q=heads_q,
                            heads_kv=heads_kv, dim=dim, dtype=dtype, causal=causal, device=device,
                        )
                        for device in ("cuda", model)
                    ]  # fmt: skip
                    _assert_alike(*plans)


@pytest.mark.parametrize("tokens", [1, 3, 16, 100, 1000, 20000])
def test_experts(model: str, tokens: int) -> None:
    for experts, top_k, hidden, inner in (
        (128, 8, 2048, 768),
        (8, 2, 4096, 14336),
        (64, 6, 512, 8),
    ):
        routes = [
            fm.moe_route_plan_for(tokens=tokens, experts=experts, top_k=top_k, device=device)
            for device in ("cuda", model)
        ]
        _assert_alike(*routes)
        for gate in ("gate_up", "interleaved", "none"):
            layers = [
                fm.moe_plan_for(
                    tokens=tokens, hidden=hidden, inner=inner, experts=experts, top_k=top_k,
                    gate=gate, device=device,
                )
                for device in ("cuda", model)
            ]  # fmt: skip
            _assert_alike(*layers)
