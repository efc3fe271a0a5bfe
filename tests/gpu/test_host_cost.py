"""What a call costs the host on torch CUDA tensors. Most of it are launches by the driver, 2.7 us
each, and torch's allocations, 1.2 us each with giving them back. Torch's own cost is recorded
beside ours, since hosts differ."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import flashmoe_science as fm
import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

Record = Callable[[str, object], None]

LIMIT_US = 5.7
_CALLS = 100  # fewer than a launch queue holds, so that no call waits for the GPU
_ROUNDS = 60
_ATTEMPTS = 5  # the machine may be busy with something else


def _median_us(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        for _ in range(_CALLS):
            call()
        times.append((time.perf_counter_ns() - begin) / _CALLS / 1e3)
    torch.cuda.synchronize()
    return statistics.median(times)


def _check(name: str, call: Callable[[], object], limit_us: float, record: Record) -> None:
    for _ in range(_ATTEMPTS):
        us = _median_us(call)
        if us <= limit_us:
            break
    record(f"host_us_{name}", round(us, 2))
    assert us <= limit_us, f"{name}: {us:.2f} us"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_host_cost_of_attention(
    dtype: torch.dtype, causal: bool, family: str, record_testsuite_property: Record
) -> None:
    q, k, v = (torch.randn(1, 64, 2, 64, device="cuda:0").to(dtype) for _ in range(3))

    kernel = None if family == "short" else family  # to which such a call goes by itself

    def call() -> object:
        return fm.flash_attention(q, k, v, causal=causal, kernel=kernel)

    def torch_call() -> object:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    call()
    assert f"_{family}_" in fm.last_launch().kernel
    name = f"{family}_{dtype}_{causal}"
    record_testsuite_property(f"torch_host_us_{name}", round(_median_us(torch_call), 2))
    _check(name, call, LIMIT_US, record_testsuite_property)


# Of one token: two launches of the experts, one of routing, one of the router's product.
@pytest.mark.parametrize(
    ("operation", "limit_us"),
    [("moe_forward", 11.0), ("moe_route", 11.0), ("fused_moe", 17.5), ("grouped_product", 6.5)],
)
def test_host_cost_of_experts(
    operation: str, limit_us: float, record_testsuite_property: Record
) -> None:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda:0").to(torch.bfloat16)

    x, router, w_gate_up, w_down = (
        normal(1, 256), normal(8, 256), normal(8, 128, 256), normal(8, 256, 64)
    )  # fmt: skip
    logits = x @ router.T
    routing = fm.moe_route(logits, 2)
    calls: dict[str, Callable[[], object]] = {
        "moe_forward": lambda: fm.moe_forward(x, w_gate_up, w_down, routing),
        "moe_route": lambda: fm.moe_route(logits, 2),
        "fused_moe": lambda: fm.fused_moe(x, router, w_gate_up, w_down, 2),
        "grouped_product": lambda: fm.grouped_product(x, w_gate_up, offsets=routing.offsets),
    }
    with torch.inference_mode():
        _check(operation, calls[operation], limit_us, record_testsuite_property)
