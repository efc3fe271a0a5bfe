"""Decoding over a cache of fp8 beside our call over one of the dtype of q, in pages: times in CUDA
graphs that alternate, with scales of every shape, and whether bits are those of the widened cache.

    python benchmarks/fp8_cache.py [--only TEXT] [--json FILE]

Calls of a graph take turns through copies of the keys that exceed the L2 together.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flashmoe_science as fm
from flashmoe_science.cli import environment

torch: Any = importlib.import_module("torch")

_BEYOND_L2 = 160 << 20  # bytes of keys and values that calls take turns through
_GRAPH_S = 0.003  # what a graph takes, about

# dtype of q, query and KV heads, dimension, sequences, keys of each, rows of a page
CASES = (
    *(("bfloat16", 32, 8, 128, batch, 8192, 16) for batch in (16, 32, 64, 128)),
    ("bfloat16", 32, 8, 128, 64, 8192, 64),
    ("bfloat16", 64, 8, 128, 32, 8192, 64),
    ("bfloat16", 128, 8, 128, 32, 8192, 64),
    ("float16", 32, 8, 128, 32, 8192, 16),
    ("float16", 128, 8, 128, 32, 8192, 64),
    ("bfloat16", 64, 8, 64, 32, 8192, 16),
    ("bfloat16", 128, 8, 64, 32, 8192, 16),
    ("bfloat16", 32, 8, 96, 32, 8192, 16),
    ("bfloat16", 16, 4, 256, 32, 8192, 16),
    ("bfloat16", 32, 8, 128, 64, 2048, 16),
    ("bfloat16", 32, 8, 128, 1, 8192, 16),
)


def capture(call: Callable[[Any], Any], tables: list[Any]) -> tuple[Any, int]:
    """A graph of calls that take turns through the tables, and how many it has."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call(tables[0])
    torch.cuda.synchronize()
    start.record()
    call(tables[0])
    end.record()
    end.synchronize()
    about = max(start.elapsed_time(end), 1e-3) * len(tables)
    rounds = max(1, min(20, round(_GRAPH_S * 1e3 / about)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for table in tables:
                call(table)
    graph.replay()
    torch.cuda.synchronize()
    return graph, rounds * len(tables)


def measure(case: tuple[Any, ...], samples: int) -> dict[str, Any]:
    name, heads, heads_kv, dim, batch, keys, page = case
    dtype = getattr(torch, name)
    of_a_copy = batch * keys * heads_kv * dim * 2  # bytes of fp8
    copies = max(1, min(8, -(-_BEYOND_L2 // of_a_copy)))
    columns = keys // page
    pages = copies * batch * columns
    shape = (pages, page, heads_kv, dim)
    cache = [torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda") for _ in range(2)]
    for tensor in cache:
        for part in tensor.flatten().split(1 << 28):
            part.copy_(torch.randn(part.shape, device="cuda"))
    wide = [tensor.to(dtype) for tensor in cache]
    tables = list(torch.randperm(pages, device="cuda").int().view(copies, batch, columns))
    q = torch.randn(batch, 1, heads, dim, device="cuda").to(dtype)
    out = torch.empty_like(q)
    used = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    scale = torch.ones(1, device="cuda")
    of_pages = torch.ones(pages, 1, device="cuda")

    def call(k: Any, v: Any, **scales: Any) -> Callable[[Any], Any]:
        return lambda table: fm.flash_attention(
            q, k, v, seqused_k=used, page_table=table, out=out, **scales
        )  # fmt: skip

    calls = {
        "16": call(*wide),
        "8": call(*cache),
        "8 tensor": call(*cache, k_scale=scale, v_scale=scale),
        "8 page": call(*cache, k_scale=of_pages, v_scale=of_pages),
    }
    bits = {}
    for kind, made in calls.items():
        out.fill_(torch.nan)
        made(tables[0])
        bits[kind] = out.view(torch.int16).clone()
    same = all(torch.equal(bits["16"], others) for others in bits.values())
    graphs = {kind: capture(made, tables) for kind, made in calls.items()}
    times: dict[str, list[float]] = {kind: [] for kind in graphs}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    shuffled = random.Random(0)
    for _ in range(samples):
        for kind in shuffled.sample(list(graphs), len(graphs)):
            graph, count = graphs[kind]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[kind].append(start.elapsed_time(end) * 1e3 / count)
    us = {kind: round(statistics.median(taken), 2) for kind, taken in times.items()}
    return {
        "dtype": name, "heads": f"{heads}/{heads_kv}", "dim": dim, "batch": batch, "keys": keys,
        "page": page, "same_bits": same, **us,
        "tbps16": round(2 * of_a_copy / us["16"] * 1e-6, 3),
        "tbps8": round(of_a_copy / us["8"] * 1e-6, 3),
        "ratio": round(us["16"] / us["8"], 3),
        "ratio_tensor": round(us["16"] / us["8 tensor"], 3),
        "ratio_page": round(us["16"] / us["8 page"], 3),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", metavar="TEXT", help="cases whose record has this in it")
    parser.add_argument("--samples", type=int, default=11)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the record there")
    options = parser.parse_args()
    document: dict[str, Any] = {
        "what": "decoding over a cache of fp8 beside our call over one of q's dtype, microseconds",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": environment.git_commit(),
        "device": torch.cuda.get_device_name(),
        "rows": [],
    }
    for case in CASES:
        if options.only and options.only not in " ".join(map(str, case)):
            continue
        row = measure(case, options.samples)
        torch.cuda.empty_cache()
        document["rows"].append(row)
        print(json.dumps(row), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["same_bits"] for row in document["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
