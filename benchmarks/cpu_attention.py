"""Our CPU attention beside torch's scaled_dot_product_attention.

Both run in one process on the same number of threads and the same tensors, in pairs of random
order: a shared or throttled machine slows both, so the ratio of a pair says more than the times.
Before each timed short call the same library runs once untimed, after a pause, so that neither
meets the other's threads still spinning. Every cell's result is checked against float64 first.

    python benchmarks/cpu_attention.py --output benchmarks/results/cpu_attention_<cpu>.json
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import capi  # noqa: E402

BATCH, HEADS = 1, 8
SEQUENCES = (128, 512, 1024, 2048, 4096)
HEAD_DIMS = (64, 128)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PAUSE_S = 0.005
LONG_S = 0.05  # a call beside which waking threads is nothing: no untimed call, fewer pairs
CELL_FLOOR = 0.8


def as_array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(capi.BF16)
    return tensor.numpy()


def our_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[Callable[[], torch.Tensor], str]:
    """The call as a framework would make it: fresh output, workspace asked for and allocated."""
    lib = capi.load()
    size = capi.c.c_size_t()

    def call() -> torch.Tensor:
        out = torch.empty_like(q)
        params.out.contents.data = out.data_ptr()
        capi.check(lib.flashmoe_attention_forward_workspace_size(params, size), lib)
        workspace = torch.empty(size.value, dtype=torch.uint8)
        capi.check(
            lib.flashmoe_attention_forward(params, workspace.data_ptr(), size.value, None), lib
        )
        return out

    params = capi.attention_params(
        as_array(q),
        as_array(k),
        as_array(v),
        as_array(torch.empty_like(q)),
        layout="bhsd",
        causal="top_left" if causal else "none",
    )
    return call, capi.attention_plan(params).kernel.decode()


def check_against_float64(
    ours: torch.Tensor,
    theirs: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
) -> dict[str, float]:
    """One head in float64; the accuracy rule is max|ours - ref| <= 2 max|torch - ref| + ulp."""
    reference = F.scaled_dot_product_attention(
        q[:, :1].double(), k[:, :1].double(), v[:, :1].double(), is_causal=causal
    )
    our_error = (ours[:, :1].double() - reference).abs().max().item()
    their_error = (theirs[:, :1].double() - reference).abs().max().item()
    ulp = torch.finfo(ours.dtype).eps * reference.abs().max().item()
    if not our_error <= 2 * their_error + ulp:
        raise AssertionError(f"error {our_error:.3g}, torch's {their_error:.3g}")
    return {"ours": our_error, "torch": their_error}


def seconds(call: Callable[[], torch.Tensor], repeats: int, warm: bool) -> float:
    time.sleep(PAUSE_S)
    if warm:
        call()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


def quantile(values: list[float], q: float) -> float:
    return float(np.quantile(values, q))


def measure_cell(
    threads: int, dtype: str, dim: int, seq: int, causal: bool, pairs: int, order: random.Random
) -> dict[str, object]:
    shape = (BATCH, HEADS, seq, dim)
    q, k, v = (torch.randn(shape).to(DTYPES[dtype]) for _ in range(3))
    ours, kernel = our_call(q, k, v, causal)

    def theirs() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    error = check_against_float64(ours(), theirs(), q, k, v, causal)
    begin = time.perf_counter()
    theirs()
    once = time.perf_counter() - begin
    repeats = max(1, int(0.005 / once))  # short calls are timed several at once
    long = once > LONG_S
    times: dict[str, list[float]] = {"ours": [], "torch": []}
    for _ in range(max(7, pairs // 3) if long else pairs):
        turns = [("ours", ours), ("torch", theirs)]
        order.shuffle(turns)
        for name, call in turns:
            times[name].append(seconds(call, repeats, warm=not long))
    ratios = [b / a for a, b in zip(times["ours"], times["torch"], strict=True)]
    flops = 4.0 * BATCH * HEADS * seq * seq * dim * ((seq + 1) / (2 * seq) if causal else 1.0)
    ours_s = statistics.median(times["ours"])
    return {
        "threads": threads,
        "dtype": dtype,
        "dim": dim,
        "seq": seq,
        "causal": causal,
        "kernel": kernel,
        "ours_ms": ours_s * 1e3,
        "torch_ms": statistics.median(times["torch"]) * 1e3,
        "ours_gflops": flops / ours_s / 1e9,
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [quantile(ratios, 0.25), quantile(ratios, 0.75)],
        "pairs": len(ratios),
        "max_error": error,
    }


def environment() -> dict[str, object]:
    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    info = capi.DeviceInfo(struct_size=capi.c.sizeof(capi.DeviceInfo))
    lib = capi.load()
    capi.check(lib.flashmoe_get_device_info(capi.Device(capi.CPU, 0), info), lib)
    return {
        "cpu": info.name.decode(),
        "isa": info.isa.decode(),
        "processors": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "commit": git("rev-parse", "HEAD"),
        "cpu_sources_modified": bool(git("status", "--porcelain", "--", "cpu", "core", "include")),
        "load_average_before": os.getloadavg()[0],
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--threads",
        nargs="+",
        type=int,
        default=sorted({1, len(os.sched_getaffinity(0))}),
        help="thread counts to measure with, each on the whole grid",
    )
    parser.add_argument("--pairs", type=int, default=25, help="pairs of timings per cell")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--seq", nargs="+", type=int, default=list(SEQUENCES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file; <cpu> becomes the processor's name")
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Every cell of the grid, printed as it comes."""
    order = random.Random(arguments.seed)
    lib = capi.load()
    cells = []
    grid = itertools.product(
        arguments.threads, arguments.dtypes, HEAD_DIMS, arguments.seq, (False, True)
    )
    print("threads dtype  dim   seq causal |  ours ms  torch ms  GFLOP/s | torch/ours [quartiles]")
    for threads, dtype, dim, seq, causal in grid:
        torch.set_num_threads(threads)
        capi.check(lib.flashmoe_set_num_threads(threads), lib)
        cell = measure_cell(threads, dtype, dim, seq, causal, arguments.pairs, order)
        cells.append(cell)
        low, high = cell["ratio_quartiles"]
        print(
            f"{threads:7} {dtype:>5} {dim:4} {seq:5} {'yes' if causal else 'no':>6} | "
            f"{cell['ours_ms']:8.3f} {cell['torch_ms']:9.3f} {cell['ours_gflops']:8.1f} | "
            f"{cell['ratio']:.2f} [{low:.2f}, {high:.2f}]",
            flush=True,
        )
    return cells


def summarise(cells: list[dict[str, object]]) -> dict[str, object]:
    ratios = [cell["ratio"] for cell in cells]
    dtypes = sorted({cell["dtype"] for cell in cells})
    return {
        "geometric_mean": statistics.geometric_mean(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "geometric_mean_by_dtype": {
            dtype: statistics.geometric_mean(c["ratio"] for c in cells if c["dtype"] == dtype)
            for dtype in dtypes
        },
    }


def main() -> int:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    env = environment()
    print(f"{env['cpu']}, torch {torch.__version__}, batch {BATCH}, {HEADS} heads")
    cells = measure(arguments)
    summary = {
        str(threads): summarise([cell for cell in cells if cell["threads"] == threads])
        for threads in arguments.threads
    }
    for threads, of in summary.items():
        print(
            f"{threads} threads: geometric mean {of['geometric_mean']:.2f}, lowest "
            f"{of['lowest']:.2f}, highest {of['highest']:.2f}"
        )
    if arguments.output is not None:
        slug = re.sub(r"[^a-z0-9]+", "_", str(env["cpu"]).lower()).strip("_")
        path = Path(str(arguments.output).replace("<cpu>", slug))
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "what": "attention forward on the CPU, ours against torch SDPA; ratio = torch / ours",
            "batch": BATCH,
            "heads": HEADS,
            "environment": {**env, "load_average_after": os.getloadavg()[0]},
            "summary_by_threads": summary,
            "cells": cells,
        }
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"wrote {path}")
    met = all(s["geometric_mean"] >= 1.0 and s["lowest"] >= CELL_FLOOR for s in summary.values())
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
