"""Our CPU attention beside torch's scaled_dot_product_attention.

Both run in one process on the same number of threads and the same tensors, in pairs of random
order: a shared or throttled machine slows both, so the ratio of a pair says more than the times.
Before each timed call the same library runs once untimed, after a pause, so that neither meets the
other's threads still spinning. Every cell's result is checked against float64 first.

    python benchmarks/cpu_attention.py --output benchmarks/results/cpu_attention_<cpu>.json
"""

from __future__ import annotations

import argparse
import datetime
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


def seconds(call: Callable[[], torch.Tensor], repeats: int) -> float:
    time.sleep(PAUSE_S)
    call()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


def quantile(values: list[float], q: float) -> float:
    return float(np.quantile(values, q))


def measure_cell(
    dtype: str, dim: int, seq: int, causal: bool, pairs: int, order: random.Random
) -> dict[str, object]:
    shape = (BATCH, HEADS, seq, dim)
    q, k, v = (torch.randn(shape).to(DTYPES[dtype]) for _ in range(3))
    ours, kernel = our_call(q, k, v, causal)

    def theirs() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    error = check_against_float64(ours(), theirs(), q, k, v, causal)
    begin = time.perf_counter()
    theirs()
    # Short calls are timed several at once; long ones in fewer pairs.
    once = time.perf_counter() - begin
    repeats = max(1, int(0.005 / once))
    times: dict[str, list[float]] = {"ours": [], "torch": []}
    for _ in range(pairs if once < 0.1 else max(7, pairs // 2)):
        turns = [("ours", ours), ("torch", theirs)]
        order.shuffle(turns)
        for name, call in turns:
            times[name].append(seconds(call, repeats))
    ratios = [b / a for a, b in zip(times["ours"], times["torch"], strict=True)]
    flops = 4.0 * BATCH * HEADS * seq * seq * dim * ((seq + 1) / (2 * seq) if causal else 1.0)
    ours_s = statistics.median(times["ours"])
    return {
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


def environment(threads: int) -> dict[str, object]:
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
        "threads": threads,
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
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--pairs", type=int, default=25, help="pairs of timings per cell")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"])
    parser.add_argument("--seq", nargs="+", type=int, default=list(SEQUENCES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file; <cpu> becomes the processor's name")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    lib = capi.load()
    capi.check(lib.flashmoe_set_num_threads(arguments.threads), lib)
    env = environment(arguments.threads)
    print(
        f"{env['cpu']}, {arguments.threads} threads, torch {torch.__version__}, "
        f"batch {BATCH}, {HEADS} heads"
    )
    print("dtype  dim   seq causal |  ours ms  torch ms  GFLOP/s | torch/ours [quartiles]")
    order = random.Random(arguments.seed)
    cells = []
    for dtype in arguments.dtypes:
        for dim in HEAD_DIMS:
            for seq in arguments.seq:
                for causal in (False, True):
                    cell = measure_cell(dtype, dim, seq, causal, arguments.pairs, order)
                    cells.append(cell)
                    low, high = cell["ratio_quartiles"]
                    print(
                        f"{dtype:>5} {dim:4} {seq:5} {'yes' if causal else 'no':>6} | "
                        f"{cell['ours_ms']:8.3f} {cell['torch_ms']:9.3f} "
                        f"{cell['ours_gflops']:8.1f} | {cell['ratio']:.2f} "
                        f"[{low:.2f}, {high:.2f}]",
                        flush=True,
                    )
    ratios = [cell["ratio"] for cell in cells]
    summary = {
        "geometric_mean": statistics.geometric_mean(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "by_dtype": {
            dtype: statistics.geometric_mean(
                cell["ratio"] for cell in cells if cell["dtype"] == dtype
            )
            for dtype in arguments.dtypes
        },
    }
    print(
        f"geometric mean {summary['geometric_mean']:.2f}, lowest {summary['lowest']:.2f}, "
        f"highest {summary['highest']:.2f}"
    )
    if arguments.output is not None:
        slug = re.sub(r"[^a-z0-9]+", "_", str(env["cpu"]).lower()).strip("_")
        path = Path(str(arguments.output).replace("<cpu>", slug))
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "what": "attention forward on the CPU, ours against torch SDPA; ratio = torch / ours",
            "batch": BATCH,
            "heads": HEADS,
            "environment": env,
            "summary": summary,
            "cells": cells,
        }
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"wrote {path}")
    return 0 if summary["geometric_mean"] >= 1.0 and summary["lowest"] >= CELL_FLOOR else 1


if __name__ == "__main__":
    sys.exit(main())
