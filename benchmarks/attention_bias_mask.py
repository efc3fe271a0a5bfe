"""Attention with a boolean mask or an additive bias beside torch's SDPA with the same.

    python benchmarks/attention_bias_mask.py benchmarks/results/attention_bias_mask_h200.json

Calls alternate; each time is the median of so many rounds by CUDA events. torch's choice of a
kernel is its own; keys and values of fewer heads are repeated for it ahead of the timing, since the
kernels that take masks know no groups. `b1qk` is [batch, 1, queries, keys], `b11k` [batch, 1, 1,
keys], `bhqk` has every head's. `plain` is the same family without either.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flashmoe_science as fm
import torch
from torch.nn import functional as F

SHAPES = [(4, 16, 16, 2048), (2, 32, 8, 4096), (8, 16, 16, 512)]  # batch, heads, KV heads, length
DIMS = (64, 128, 256)
OURS = ("mask_b1qk", "mask_b11k", "bias_b1qk_bf16", "bias_bhqk_fp32", "plain")
PEERS = ("mask_b1qk", "bias_b1qk_bf16")
KERNEL = "sm89"
Call = Callable[[], Any]


def calls_of(
    dim: int, batch: int, heads: int, heads_kv: int, seq: int
) -> dict[str, dict[str, Call]]:
    """Forward and backward by name; our outputs are held against torch's."""

    def normal(heads: int) -> torch.Tensor:
        return torch.randn(batch, seq, heads, dim, device="cuda", dtype=torch.bfloat16)

    q, k, v, dout = normal(heads), normal(heads_kv), normal(heads_kv), normal(heads)
    mask = torch.rand(batch, 1, seq, seq, device="cuda") < 0.9
    bias = torch.randn(batch, 1, seq, seq, device="cuda", dtype=torch.bfloat16)
    given: dict[str, dict[str, Any]] = {
        "mask_b1qk": {"attn_mask": mask},
        "mask_b11k": {"attn_mask": mask[:, :, :1]},
        "bias_b1qk_bf16": {"attn_bias": bias},
        "bias_bhqk_fp32": {"attn_bias": torch.randn(batch, heads, seq, seq, device="cuda")},
        "plain": {},
    }
    forward: dict[str, Call] = {}
    backward: dict[str, Call] = {}
    results = {}
    for name in OURS:
        options = given[name] | {"kernel": KERNEL}

        def ours(options: Any = options) -> Any:
            return fm.flash_attention(q, k, v, return_lse=True, **options)

        out, lse = results[name] = ours()

        def ours_back(options: Any = options, out: Any = out, lse: Any = lse) -> Any:
            return fm.flash_attention_backward(dout, q, k, v, out, lse, **options)

        forward[name], backward[name] = ours, ours_back
    repeated = [x.repeat_interleave(heads // heads_kv, 2) for x in (k, v)]
    tensors = [x.transpose(1, 2).detach().requires_grad_() for x in (q, *repeated)]
    for name in PEERS:
        options = given[name]
        pairs = options.get("attn_mask", options.get("attn_bias"))

        def peers(pairs: Any = pairs) -> Any:
            with torch.no_grad():
                return F.scaled_dot_product_attention(*tensors, pairs)

        out = F.scaled_dot_product_attention(*tensors, pairs)
        torch.testing.assert_close(
            results[name][0], out.transpose(1, 2).detach(), atol=3e-2, rtol=3e-2
        )

        def peers_back(out: Any = out) -> Any:
            return torch.autograd.grad(out, tensors, dout.transpose(1, 2), retain_graph=True)

        forward[f"torch_{name}"], backward[f"torch_{name}"] = peers, peers_back
    return {"fwd_us": forward, "bwd_us": backward}


def medians(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for each in calls.values():
        each()
    for _ in range(rounds):
        for name, each in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(400_000)  # so that the host is ahead
            begin.record()
            each()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) * 1e3)
    return {name: round(statistics.median(values), 1) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    rows = []
    for dim in DIMS:
        for batch, heads, heads_kv, seq in SHAPES:
            torch.manual_seed(0)
            calls = calls_of(dim, batch, heads, heads_kv, seq)
            row: dict[str, Any] = {"d": dim, "b": batch, "h": heads, "hk": heads_kv, "s": seq}
            row |= {which: medians(each, arguments.rounds) for which, each in calls.items()}
            print(json.dumps(row), flush=True)
            rows.append(row)
            del calls
            torch.cuda.empty_cache()
    record = {
        "what": "attention with a boolean mask or an additive bias, bf16, by the kernels of sm89 "
        "for these, beside torch's SDPA with the same and sm89 without; microseconds, forward "
        f"and backward, medians of {arguments.rounds}",
        "command": "python benchmarks/attention_bias_mask.py",
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
