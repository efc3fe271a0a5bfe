"""Our CPU attention beside torch's scaled_dot_product_attention.

See cpu_pairs.py for how they are timed. Every cell's result is checked against float64 first.

    python benchmarks/cpu_attention.py --output benchmarks/results/cpu_attention_<cpu>.json
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from cpu_pairs import (
    DTYPES,
    Call,
    as_array,
    capi,
    check_error,
    conclude,
    environment,
    set_threads,
    time_pairs,
)

BATCH, HEADS = 1, 8
SEQUENCES = (128, 512, 1024, 2048, 4096)
HEAD_DIMS = (64, 128)


def our_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> tuple[Call, str]:
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
    """One head in float64."""
    reference = F.scaled_dot_product_attention(
        q[:, :1].double(), k[:, :1].double(), v[:, :1].double(), is_causal=causal
    )
    return check_error(ours[:, :1], theirs[:, :1], reference)


def measure_cell(
    threads: int, dtype: str, dim: int, seq: int, causal: bool, pairs: int, order: random.Random
) -> dict[str, object]:
    shape = (BATCH, HEADS, seq, dim)
    q, k, v = (torch.randn(shape).to(DTYPES[dtype]) for _ in range(3))
    ours, kernel = our_call(q, k, v, causal)

    def theirs() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    error = check_against_float64(ours(), theirs(), q, k, v, causal)
    timed = time_pairs(ours, theirs, pairs, order)
    flops = 4.0 * BATCH * HEADS * seq * seq * dim * ((seq + 1) / (2 * seq) if causal else 1.0)
    return {
        "threads": threads,
        "dtype": dtype,
        "dim": dim,
        "seq": seq,
        "causal": causal,
        "kernel": kernel,
        **timed,
        "ours_gflops": flops / timed["ours_ms"] / 1e6,
        "max_error": error,
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
    cells = []
    grid = itertools.product(
        arguments.threads, arguments.dtypes, HEAD_DIMS, arguments.seq, (False, True)
    )
    print("threads dtype  dim   seq causal |  ours ms  torch ms  GFLOP/s | torch/ours [quartiles]")
    for threads, dtype, dim, seq, causal in grid:
        set_threads(threads)
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


def main() -> int:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    env = environment()
    print(f"{env['cpu']}, torch {torch.__version__}, batch {BATCH}, {HEADS} heads")
    cells = measure(arguments)
    what = {
        "what": "attention forward on the CPU, ours against torch SDPA; ratio = torch / ours",
        "batch": BATCH,
        "heads": HEADS,
    }
    return conclude(cells, env, what, arguments.output)


if __name__ == "__main__":
    sys.exit(main())
