"""Host cost of one call: Python and launch, not the kernel. Ours beside torch's own attention.

    python benchmarks/host_cost.py [--device cuda] [--json PATH]

On a GPU the shape is so small that the kernel ends before the next call begins, so that the time a
call takes the host is all there is; the queue is emptied between rounds. On the CPU the kernel runs
inside the call: there batch is 0, where both do all of their host work and no attention.

The contenders take turns, a round of each at a time; the figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import flashmoe_science as fm
import flashmoe_science.torch as fmt
import torch

ROUNDS = 41
CALLS_PER_ROUND = 200  # far below the launches a GPU's queue takes before it makes the host wait


def contenders(device: str, kernel: str | None) -> dict[str, Callable[[], object]]:
    batch = 0 if device == "cpu" else 1
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(batch, 16, 2, 64, device=device, dtype=dtype) for _ in range(3))
    out = torch.empty_like(q)
    bhsd = [x.transpose(1, 2) for x in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    asked: dict[str, Any] = {} if kernel is None else {"kernel": kernel}
    return {
        "flash_attention": lambda: fm.flash_attention(q, k, v, **asked),
        "flash_attention, causal": lambda: fm.flash_attention(q, k, v, causal=True, **asked),
        "flash_attention, out": lambda: fm.flash_attention(q, k, v, out=out, **asked),
        "flash_attention of flashmoe_science.torch": lambda: fmt.flash_attention(q, k, v, **asked),
        "flash_attention, lse": lambda: fm.flash_attention(q, k, v, return_lse=True, **asked),
        "torch scaled_dot_product_attention": lambda: sdpa(*bhsd),
        "torch empty_like": lambda: torch.empty_like(q),
    }


def one_round(call: Callable[[], object], wait: Callable[[], None]) -> float:
    """Microseconds a call."""
    wait()
    begin = time.perf_counter_ns()
    for _ in range(CALLS_PER_ROUND):
        call()
    end = time.perf_counter_ns()
    wait()
    return (end - begin) / CALLS_PER_ROUND / 1e3


def measure(device: str, kernel: str | None = None) -> dict[str, dict[str, float]]:
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    calls = contenders(device, kernel)
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for call in calls.values():  # warm: kernels are loaded at their first launch
            for _ in range(3):
                one_round(call, wait)
        for _ in range(ROUNDS):
            for name, call in calls.items():
                times[name].append(one_round(call, wait))
    result = {}
    for name, samples in times.items():
        low, median, high = statistics.quantiles(samples, n=4)
        result[name] = {"median_us": median, "quartile1_us": low, "quartile3_us": high}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernel", metavar="FAMILY", help="ask for this kernel family")
    parser.add_argument("--json", metavar="PATH", help="also write the figures there")
    options = parser.parse_args()
    figures = measure(options.device, options.kernel)
    print(f"{'us per call':42s} {'median':>8s} {'quartiles':>15s}")
    for name, row in figures.items():
        spread = f"{row['quartile1_us']:.2f}..{row['quartile3_us']:.2f}"
        print(f"{name:42s} {row['median_us']:8.2f} {spread:>15s}")
    if options.json is not None:
        document: dict[str, Any] = {
            "device": fm.device_info(options.device).name,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "flashmoe": fm.__version__,
            "calls_per_round": CALLS_PER_ROUND,
            "rounds": ROUNDS,
            "host_cost": figures,
        }
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
