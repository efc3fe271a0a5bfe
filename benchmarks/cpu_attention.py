"""Our CPU attention beside torch's scaled_dot_product_attention.

See cpu_pairs.py for how they are timed. Every cell's result is checked against float64 first.

    python benchmarks/cpu_attention.py --output 'benchmarks/results/cpu_attention_<cpu>.json'
    python benchmarks/cpu_attention.py --decode --output 'benchmarks/results/cpu_decode_<cpu>.json'
    python benchmarks/cpu_attention.py --backward \
        --output 'benchmarks/results/cpu_backward_<cpu>.json'
    python benchmarks/cpu_attention.py --padded --dtypes fp32 --add \
        --output 'benchmarks/results/cpu_padded_fp32_<cpu>.json'

Decoding is one query a sequence. torch gets the heads of a group as queries of one head, so that it
reads keys and values once, as we do.

Backward is dq, dk and dv of an output that is there: torch's autograd of one forward, again and
again.

Padded batches are as transformers makes them: on the right of an encoder's input, with a mask of
keys, [batch, 1, 1, seq]; on the left of prompts, causal, with a mask of pairs, [batch, 1, seq,
seq]. We get lengths, or where keys begin. Beside encoders torch's jagged tensors are timed, too,
which are not padded, for the smaller batch: there they take long. --add keeps what a record of the
same processor and commit has beside what is measured now.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
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
    seconds,
    set_threads,
    time_pairs,
)

BATCH, HEADS = 1, 8
SEQUENCES = (128, 512, 1024, 2048, 4096)
HEAD_DIMS = (64, 128)
DECODE_SEQUENCES = (512, 4096, 16384)
DECODE_HEADS = ((8, 8), (32, 8), (64, 8), (8, 1))  # query and KV heads
PADDED_BATCHES = (8, 32)
PADDED_SEQUENCES = (256, 1024)
SIDES = ("right", "left")  # which side padding is on


def our_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: str,
    tables: dict[str, np.ndarray] | None = None,
) -> tuple[Call, str]:
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
        causal=causal,
        tables=tables,
    )
    return call, capi.attention_plan(params).launches[0].kernel.decode()


def our_backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: str
) -> tuple[Callable[[], tuple[torch.Tensor, ...]], str]:
    """Likewise, of dq, dk and dv."""
    lib = capi.load()
    size = capi.c.c_size_t()
    out, lse = capi.attention(
        as_array(q), as_array(k), as_array(v), layout="bhsd", causal=causal, lib=lib
    )

    def call() -> tuple[torch.Tensor, ...]:
        made = tuple(torch.empty_like(x) for x in (q, k, v))
        for name, x in zip(("dq", "dk", "dv"), made, strict=True):
            getattr(params, name).contents.data = x.data_ptr()
        capi.check(lib.flashmoe_attention_backward_workspace_size(params, size), lib)
        workspace = torch.empty(size.value, dtype=torch.uint8)
        capi.check(
            lib.flashmoe_attention_backward(params, workspace.data_ptr(), size.value, None), lib
        )
        return made

    tensors = {name: as_array(x) for name, x in (("dout", dout), ("q", q), ("k", k), ("v", v))}
    gradients = {f"d{name}": np.empty_like(tensors[name]) for name in "qkv"}
    params = capi.attention_backward_params(
        {**tensors, "out": out, "lse": lse, **gradients}, layout="bhsd", causal=causal
    )
    return call, capi.attention_backward_plan(params).launches[0].kernel.decode()


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


def place_of(
    threads: int, dtype: str, dim: int, seqs: tuple[int, int], heads: tuple[int, int], causal: bool
) -> dict[str, object]:
    """What a cell is of, in its record."""
    return {
        "threads": threads, "dtype": dtype, "dim": dim, "seq": seqs[1], "causal": causal,
        "heads_q": heads[0], "heads_kv": heads[1],
    }  # fmt: skip


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
    ours, kernel = our_call(q, k, v, "top_left" if causal else "none")
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
        **place_of(threads, dtype, dim, seqs, heads, causal),
        "kernel": kernel,
        **timed,
        "ours_gflops": flops / timed["ours_ms"] / 1e6,
        "ours_gbytes_per_s": read / timed["ours_ms"] / 1e6,
        "max_error": error,
    }


def measure_backward_cell(
    threads: int,
    dtype: str,
    dim: int,
    seqs: tuple[int, int],
    heads: tuple[int, int],
    causal: bool,
    pairs: int,
    order: random.Random,
) -> dict[str, object]:
    q, k, v = (
        torch.randn(BATCH, n, seq, dim).to(DTYPES[dtype])
        for n, seq in zip((heads[0], *heads[1:] * 2), (seqs[0], *seqs[1:] * 2), strict=True)
    )
    dout = torch.randn(q.shape).to(q.dtype)
    ours, kernel = our_backward(dout, q, k, v, "top_left" if causal else "none")

    def of_torch(*tensors: torch.Tensor, dout: torch.Tensor) -> Callable[[], Any]:
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
        return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    theirs = of_torch(q, k, v, dout=dout)
    one = (x[:, :1].double() for x in (q, k, v))
    exact = of_torch(*one, dout=dout[:, :1].double())()
    errors = [
        check_error(mine[:, :1], other[:, :1], right)
        for mine, other, right in zip(ours(), theirs(), exact, strict=True)
    ]
    timed = time_pairs(ours, theirs, pairs, order)
    flops = 10.0 * BATCH * heads[0] * seqs[0] * seqs[1] * dim
    if causal:
        flops *= (seqs[1] + 1) / (2 * seqs[1])
    return {
        **place_of(threads, dtype, dim, seqs, heads, causal),
        "kernel": kernel,
        **timed,
        "ours_gflops": flops / timed["ours_ms"] / 1e6,
        "max_error": {name: max(e[name] for e in errors) for name in errors[0]},
    }


def measure_padded_cell(
    threads: int,
    dtype: str,
    dim: int,
    batch: int,
    seq: int,
    side: str,
    pairs: int,
    order: random.Random,
) -> dict[str, object]:
    """Lengths are uniform from a quarter of seq to seq, one of them seq."""
    lengths = torch.randint(seq // 4, seq + 1, (batch,))
    lengths[0] = seq
    q, k, v = (torch.randn(batch, HEADS, seq, dim).to(DTYPES[dtype]) for _ in range(3))
    at = torch.arange(seq)
    if side == "right":
        held = at < lengths[:, None]  # [batch, seq]
        mask = held[:, None, None]
        tables = {"seqused_q": lengths.int().numpy(), "seqused_k": lengths.int().numpy()}
        seen = int((lengths**2).sum())
    else:
        held = at >= seq - lengths[:, None]
        mask = held[:, None, None] & (at <= at[:, None])
        tables = {"k_begin": (seq - lengths).int().numpy()}
        seen = int((lengths * (lengths + 1) // 2).sum())
    ours, kernel = our_call(q, k, v, "none" if side == "right" else "bottom_right", tables)

    def theirs() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    reference = F.scaled_dot_product_attention(
        q[:, :1].double(), k[:, :1].double(), v[:, :1].double(), attn_mask=mask
    )
    rows = [x[:, 0][held] for x in (ours(), theirs(), reference)]
    error = check_error(*rows)
    timed = time_pairs(ours, theirs, pairs, order)
    cell = {
        "threads": threads, "dtype": dtype, "dim": dim, "batch": batch, "seq": seq, "side": side,
        "causal": side == "left", "kernel": kernel, **timed,
        "ours_gflops": 4.0 * HEADS * dim * seen / float(str(timed["ours_ms"])) / 1e6,
        "max_error": error,
    }  # fmt: skip
    if side == "right" and batch == PADDED_BATCHES[0]:
        offsets = F.pad(lengths.cumsum(0), (1, 0))
        jagged = [
            torch.nested.nested_tensor_from_jagged(
                x.transpose(1, 2)[held], offsets, min_seqlen=int(lengths.min()), max_seqlen=seq
            ).transpose(1, 2)
            for x in (q, k, v)
        ]

        def nested() -> torch.Tensor:
            return F.scaled_dot_product_attention(*jagged)

        nested()
        cell["nested_ms"] = 1e3 * statistics.median(seconds(nested, 1, False) for _ in range(3))
    return cell


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
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--decode", action="store_true", help="one query a sequence")
    kinds.add_argument("--backward", action="store_true", help="gradients")
    kinds.add_argument("--padded", action="store_true", help="batches of different lengths")
    parser.add_argument("--batch", nargs="+", type=int, help="sequences, of --padded")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, help="of --padded")
    parser.add_argument("--dims", nargs="+", type=int, default=HEAD_DIMS, help="head dimensions")
    parser.add_argument("--add", action="store_true", help="keep what the output has of others")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file; <cpu> becomes the processor's name")
    return parser.parse_args()


def grid(arguments: argparse.Namespace) -> Iterator[tuple[Any, ...]]:
    """Threads, dtype, head dimension, queries and keys, query and KV heads, causal."""
    over = (arguments.threads, arguments.dtypes, arguments.dims)
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
        measure_one = measure_backward_cell if arguments.backward else measure_cell
        cell = measure_one(threads, *what, arguments.pairs, order)
        cells.append(cell)
        low, high = cell["ratio_quartiles"]
        heads = f"{cell['heads_q']}/{cell['heads_kv']}"
        print(
            f"{threads:7} {cell['dtype']:>5} {cell['dim']:4} {heads:>5} {cell['seq']:5} "
            f"{'yes' if cell['causal'] else 'no':>6} | "
            f"{cell['ours_ms']:8.3f} {cell['torch_ms']:9.3f} {cell['ours_gflops']:8.1f} "
            f"{cell.get('ours_gbytes_per_s', float('nan')):6.1f} | "
            f"{cell['ratio']:.2f} [{low:.2f}, {high:.2f}]",
            flush=True,
        )
    return cells


def measure_padded(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Likewise, of batches of different lengths."""
    cells = []
    print(
        "threads dtype  dim batch  seq  side |  ours ms  torch ms nested ms "
        "| torch/ours [quartiles]"
    )
    for what in itertools.product(
        arguments.threads, arguments.dtypes, arguments.dims, arguments.batch or PADDED_BATCHES,
        arguments.seq or PADDED_SEQUENCES, arguments.sides,
    ):  # fmt: skip
        set_threads(what[0])
        torch.manual_seed(arguments.seed)  # lengths of a shape are the same for all
        order = random.Random(arguments.seed)
        cell = measure_padded_cell(*what, arguments.pairs, order)
        cells.append(cell)
        low, high = cell["ratio_quartiles"]
        print(
            "{:7} {:>5} {:4} {:5} {:4} {:>5}".format(*what)
            + f" | {cell['ours_ms']:8.3f} {cell['torch_ms']:9.3f} "
            f"{cell.get('nested_ms', float('nan')):9.1f} | "
            f"{cell['ratio']:.2f} [{low:.2f}, {high:.2f}]",
            flush=True,
        )
    return cells


def main() -> int:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    env = environment()
    batch: Any = BATCH
    if arguments.padded:
        kind, batch = "padded", list(PADDED_BATCHES)
    else:
        kind = "decoding, one query" if arguments.decode else f"{HEADS} heads"
    print(f"{env['cpu']}, torch {torch.__version__}, batch {batch}, {kind}")
    cells = measure_padded(arguments) if arguments.padded else measure(arguments)
    detail = {"decoding, one query": ", one query a sequence", "padded": ", of padded batches"}
    what: dict[str, object] = {
        "what": f"attention {'backward' if arguments.backward else 'forward'} on the CPU, "
        "ours against torch SDPA; ratio = torch / ours" + detail.get(kind, ""),
        "batch": batch,
    }
    if not arguments.decode:
        what["heads"] = HEADS
    return conclude(cells, env, what, arguments.output, arguments.add)


if __name__ == "__main__":
    sys.exit(main())
