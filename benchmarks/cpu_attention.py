"""Our CPU attention beside torch's scaled_dot_product_attention.

See cpu_pairs.py for how they are timed. Every cell's result is checked against float64 first.

    python benchmarks/cpu_attention.py --output 'benchmarks/results/cpu_attention_<cpu>.json'
    python benchmarks/cpu_attention.py --decode --output 'benchmarks/results/cpu_decode_<cpu>.json'

Decoding is one query a sequence. torch gets the heads of a group as queries of one head, so that it
reads keys and values once, as we do.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
DECODE_SEQUENCES = (512, 4096, 16384)
DECODE_HEADS = ((8, 8), (32, 8), (64, 8), (8, 1))  # query and KV heads


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
    return call, capi.attention_plan(params).launches[0].kernel.decode()


def check_against_float64(
    ours: torch.Tensor,
    theirs: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
) -> dict[str, float]:
    """One KV head in float64, as torch is asked."""
    reference = F.scaled_dot_product_attention(
        q[:, :1].double(), k[:, :1].double(), v[:, :1].double(), is_causal=causal
    )
    return check_error(ours.view_as(theirs)[:, :1], theirs[:, :1], reference)


def measure_cell(
    threads: int,
    dtype: str,
    dim: int,
    seqs: tuple[int, int],
    heads: tuple[int, int],
    causal: bool,
    pairs: int,
    order: random.Random,
) -> dict[str, object]:
    seq_q, seq_k = seqs
    heads_q, heads_kv = heads
    q = torch.randn(BATCH, heads_q, seq_q, dim).to(DTYPES[dtype])
    k, v = (torch.randn(BATCH, heads_kv, seq_k, dim).to(DTYPES[dtype]) for _ in range(2))
    ours, kernel = our_call(q, k, v, causal)
    # One query's heads of a group are as many queries of one head.
    folded = q.view(BATCH, heads_kv, -1, dim)

    def theirs() -> torch.Tensor:
        return F.scaled_dot_product_attention(folded, k, v, is_causal=causal)

    error = check_against_float64(ours(), theirs(), folded, k, v, causal)
    timed = time_pairs(ours, theirs, pairs, order)
    flops = 4.0 * BATCH * heads_q * seq_q * seq_k * dim
    if causal:
        flops *= (seq_k + 1) / (2 * seq_k)
    read = 2 * BATCH * heads_kv * seq_k * dim * q.element_size()  # keys and values
    return {
        "threads": threads,
        "dtype": dtype,
        "dim": dim,
        "seq": seq_k,
        "causal": causal,
        "heads_q": heads_q,
        "heads_kv": heads_kv,
        "kernel": kernel,
        **timed,
        "ours_gflops": flops / timed["ours_ms"] / 1e6,
        "ours_gbytes_per_s": read / timed["ours_ms"] / 1e6,
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
    parser.add_argument("--seq", nargs="+", type=int, help="keys of a sequence")
    parser.add_argument("--decode", action="store_true", help="one query a sequence")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file; <cpu> becomes the processor's name")
    return parser.parse_args()


def grid(arguments: argparse.Namespace) -> Iterator[tuple[Any, ...]]:
    """Threads, dtype, head dimension, queries and keys, query and KV heads, causal."""
    over = (arguments.threads, arguments.dtypes, HEAD_DIMS)
    if arguments.decode:
        for *first, heads, seq in itertools.product(
            *over, DECODE_HEADS, arguments.seq or DECODE_SEQUENCES
        ):
            yield *first, (1, seq), heads, False
    else:
        for *first, seq, causal in itertools.product(
            *over, arguments.seq or SEQUENCES, (False, True)
        ):
            yield *first, (seq, seq), (HEADS, HEADS), causal


def measure(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Every cell of the grid, printed as it comes."""
    order = random.Random(arguments.seed)
    cells = []
    print(
        "threads dtype  dim heads   seq causal |  ours ms  torch ms  GFLOP/s   GB/s "
        "| torch/ours [quartiles]"
    )
    for threads, *what in grid(arguments):
        set_threads(threads)
        cell = measure_cell(threads, *what, arguments.pairs, order)
        cells.append(cell)
        low, high = cell["ratio_quartiles"]
        heads = f"{cell['heads_q']}/{cell['heads_kv']}"
        print(
            f"{threads:7} {cell['dtype']:>5} {cell['dim']:4} {heads:>5} {cell['seq']:5} "
            f"{'yes' if cell['causal'] else 'no':>6} | "
            f"{cell['ours_ms']:8.3f} {cell['torch_ms']:9.3f} {cell['ours_gflops']:8.1f} "
            f"{cell['ours_gbytes_per_s']:6.1f} | {cell['ratio']:.2f} [{low:.2f}, {high:.2f}]",
            flush=True,
        )
    return cells


def main() -> int:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    env = environment()
    kind = "decoding, one query" if arguments.decode else f"{HEADS} heads"
    print(f"{env['cpu']}, torch {torch.__version__}, batch {BATCH}, {kind}")
    cells = measure(arguments)
    what = {
        "what": "attention forward on the CPU, ours against torch SDPA; ratio = torch / ours"
        + (", one query a sequence" if arguments.decode else ""),
        "batch": BATCH,
    }
    if not arguments.decode:
        what["heads"] = HEADS
    return conclude(cells, env, what, arguments.output)


if __name__ == "__main__":
    sys.exit(main())
