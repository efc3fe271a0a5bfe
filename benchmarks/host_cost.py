"""Host cost of one call: Python and launches, not the kernels. Ours beside torch's.

    python benchmarks/host_cost.py [--device cuda] [--json PATH]

On a GPU shapes are so small that the kernels end before the next call begins, so that the time a
call takes the host is all there is; the queue is emptied between rounds. On the CPU the kernel runs
inside the call: there batches and tokens are none, where all do their host work and nothing else.

The contenders take turns, a round of each at a time; the figures are medians over rounds. With
--json they are a record, whose table `python benchmarks/report.py` makes.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flashmoe_science as fm
import flashmoe_science.torch as fmt
import torch
from flashmoe_science.cli import environment

ROUNDS = 41
CALLS_PER_ROUND = 100  # of up to eight launches: fewer than a GPU's queue takes without a wait

SEQ, HEADS, DIM = 16, 2, 64
HIDDEN, INNER, EXPERTS, TOP_K = 256, 64, 8, 2

Calls = dict[str, Callable[[], object]]


def attention(device: str, kernel: str | None) -> Calls:
    on_cpu = device == "cpu"
    shape = (0 if on_cpu else 1, SEQ, HEADS, DIM)
    dtype = torch.float32 if on_cpu else torch.bfloat16
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    out = torch.empty_like(q)
    bhsd = [x.transpose(1, 2) for x in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    asked: dict[str, Any] = {} if kernel is None else {"kernel": kernel}
    return {
        "flash_attention": lambda: fm.flash_attention(q, k, v, **asked),
        "flash_attention, causal": lambda: fm.flash_attention(q, k, v, causal=True, **asked),
        "flash_attention, out": lambda: fm.flash_attention(q, k, v, out=out, **asked),
        "flash_attention, lse": lambda: fm.flash_attention(q, k, v, return_lse=True, **asked),
        "flash_attention of flashmoe_science.torch": lambda: fmt.flash_attention(q, k, v, **asked),
        "torch scaled_dot_product_attention": lambda: sdpa(*bhsd),
        "torch empty_like": lambda: torch.empty_like(q),
    }


def attention_backward(device: str) -> Calls:
    on_cpu = device == "cpu"
    shape = (0 if on_cpu else 1, SEQ, HEADS, DIM)
    dtype = torch.float32 if on_cpu else torch.bfloat16
    q, k, v, dout = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    out, lse = fm.flash_attention(q, k, v, return_lse=True)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    # Torch's, whose call has nothing but autograd's own work beside.
    with torch.inference_mode(False), torch.enable_grad():
        bhsd = [torch.randn(shape, device=device, dtype=dtype).transpose(1, 2).requires_grad_()
                for _ in range(3)]  # fmt: skip
        made = torch.nn.functional.scaled_dot_product_attention(*bhsd)
        like = torch.randn_like(made)

    def torchs() -> object:
        return torch.autograd.grad(made, bhsd, like, retain_graph=True)

    return {
        "flash_attention_backward": lambda: fm.flash_attention_backward(dout, q, k, v, out, lse),
        "flash_attention_backward, out": lambda: fm.flash_attention_backward(
            dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv
        ),
        "torch gradients of scaled_dot_product_attention": torchs,
    }


def sequences(device: str) -> Calls:
    """Two sequences, packed, and decoding over pages of a cache."""
    on_cpu = device == "cpu"
    count, pages = (0, 0) if on_cpu else (2, 4)
    dtype = torch.float32 if on_cpu else torch.bfloat16

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    def int32(values: list[Any], *shape: int) -> torch.Tensor:
        return torch.tensor(values, device=device, dtype=torch.int32).reshape(shape)

    packed = [normal(1, count * SEQ, HEADS, DIM) for _ in range(3)]
    starts = int32([SEQ * i for i in range(count + 1)], count + 1)
    k_pages, v_pages = normal(pages, SEQ, HEADS, DIM), normal(pages, SEQ, HEADS, DIM)
    table, used = int32(list(range(pages)), count, 2), int32([SEQ] * count, count)
    q, new = normal(count, 1, HEADS, DIM), normal(count, 1, HEADS, DIM)
    out = torch.empty_like(q)
    paged: dict[str, Any] = {"page_table": table, "seqused_k": used}
    ragged: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    made, lse = fm.flash_attention(*packed, **ragged, return_lse=True)
    dout = torch.randn_like(made)
    status = fm.check_sequences(q, k_pages, **paged)
    return {
        "flash_attention, packed": lambda: fm.flash_attention(*packed, **ragged),
        "flash_attention, decoding": lambda: fm.flash_attention(q, k_pages, v_pages, **paged),
        "flash_attention, decoding, out": lambda: fm.flash_attention(
            q, k_pages, v_pages, **paged, out=out
        ),
        "flash_attention_backward, packed": lambda: fm.flash_attention_backward(
            dout, *packed, made, lse, **ragged
        ),
        "kv_append": lambda: fm.kv_append(
            new, new, k_pages, v_pages, page_table=table, cache_seqlens=used
        ),
        "kv_gather": lambda: fm.kv_gather(k_pages, v_pages, page_table=table, seqused_k=used),
        "check_sequences, status": lambda: fm.check_sequences(q, k_pages, **paged, status=status),
    }


def experts(device: str) -> Calls:
    """One token, 2 of 8 experts."""
    on_cpu = device == "cpu"
    dtype = torch.float32 if on_cpu else torch.bfloat16

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    x, router = normal(0 if on_cpu else 1, HIDDEN), normal(EXPERTS, HIDDEN)
    w_gate_up, w_down = normal(EXPERTS, 2 * INNER, HIDDEN), normal(EXPERTS, HIDDEN, INNER)
    logits = x @ router.T
    routing = fm.moe_route(logits, TOP_K)
    out = torch.empty_like(x)
    layer = (x, router, w_gate_up, w_down, TOP_K)
    dweights = torch.empty_like(routing.weights)
    rows = torch.randn(routing.pairs.numel(), HIDDEN, device=device, dtype=dtype)
    drows = torch.randn(rows.shape[0], 2 * INNER, device=device, dtype=dtype)
    return {
        "moe_route": lambda: fm.moe_route(logits, TOP_K),
        "moe_route, out": lambda: fm.moe_route(logits, TOP_K, out=routing),
        "moe_forward": lambda: fm.moe_forward(x, w_gate_up, w_down, routing),
        "moe_forward, out": lambda: fm.moe_forward(x, w_gate_up, w_down, routing, out=out),
        "grouped_product": lambda: fm.grouped_product(x, w_gate_up, offsets=routing.offsets),
        "fused_moe": lambda: fm.fused_moe(*layer),
        "fused_moe, logits": lambda: fm.fused_moe(x, None, w_gate_up, w_down, TOP_K, logits=logits),
        "fused_moe of flashmoe_science.torch": lambda: fmt.fused_moe(*layer),
        "moe_backward": lambda: fm.moe_backward(out, x, w_gate_up, w_down, routing),
        "moe_route_backward": lambda: fm.moe_route_backward(dweights, routing, logits=logits),
        "grouped_product_backward": lambda: fm.grouped_product_backward(
            drows, rows, w_gate_up, offsets=routing.offsets
        ),
        "torch linear": lambda: torch.nn.functional.linear(x, router),
        "torch softmax and topk": lambda: torch.topk(torch.softmax(logits, -1), TOP_K),
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


def measure(calls: Calls, wait: Callable[[], None]) -> dict[str, dict[str, Any]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():  # warm: kernels are loaded at their first launch
        for _ in range(3):
            one_round(call, wait)
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(one_round(call, wait))
    result: dict[str, dict[str, Any]] = {}
    for name, samples in times.items():
        low, median, high = (round(x, 3) for x in statistics.quantiles(samples, n=4))
        result[name] = {
            "median_us": median,
            "quartile1_us": low,
            "quartile3_us": high,
            "samples_us": [round(x, 3) for x in samples],
        }
    return result


def record(device: str, kernel: str | None) -> dict[str, Any]:
    """All of it, as a document."""
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    load = os.getloadavg()[0]
    described = environment.for_record()
    with torch.inference_mode():
        calls = attention(device, kernel) | attention_backward(device)
        figures = measure(calls | sequences(device) | experts(device), wait)
    script = f"benchmarks/{Path(__file__).name}"
    return {
        "operation": "host_cost",
        "title": "What one call costs the host",
        "date": date,
        "command": [
            "python",
            script,
            "--device",
            device,
            *(["--kernel", kernel] if kernel else []),
        ],
        "commit": environment.git_commit(),
        "source": {"hash": environment.source_hash()},
        "device": {"device": device, "name": fm.device_info(device).name},
        "kernel": kernel,
        "load_average": load,
        "environment": described,
        "calls_per_round": CALLS_PER_ROUND,
        "rounds": ROUNDS,
        "host_cost": figures,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--kernel", metavar="FAMILY", help="of attention ask for this kernel family"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the record there")
    options = parser.parse_args(argv)
    document = record(options.device, options.kernel)
    print(f"{'us per call':42s} {'median':>8s} {'quartiles':>15s}")
    for name, row in document["host_cost"].items():
        spread = f"{row['quartile1_us']:.2f}..{row['quartile3_us']:.2f}"
        print(f"{name:42s} {row['median_us']:8.2f} {spread:>15s}")
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
