"""What a call costs the host: at most 6 us on torch CUDA tensors. Torch's own cost is recorded
beside it, since hosts differ."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import flashmoe_science as fm
import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

LIMIT_US = 6.0
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_host_cost_of_a_call(
    dtype: torch.dtype,
    causal: bool,
    family: str,
    record_testsuite_property: Callable[[str, object], None],
) -> None:
    q, k, v = (torch.randn(1, 64, 2, 64, device="cuda:0").to(dtype) for _ in range(3))

    kernel = None if family == "short" else family  # to which such a call goes by itself

    def call() -> object:
        return fm.flash_attention(q, k, v, causal=causal, kernel=kernel)

    def torch_call() -> object:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    call()
    assert f"_{family}_" in fm.last_launch().kernel
    for _ in range(_ATTEMPTS):
        ours, torchs = _median_us(call), _median_us(torch_call)
        if ours <= LIMIT_US:
            break
    record_testsuite_property(f"host_us_{family}_{dtype}_{causal}", round(ours, 2))
    record_testsuite_property(f"torch_host_us_{family}_{dtype}_{causal}", round(torchs, 2))
    assert ours <= LIMIT_US, f"{ours:.2f} us, torch {torchs:.2f} us"
