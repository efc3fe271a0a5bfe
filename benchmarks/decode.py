"""Decoding from pages, and mixed batches: times in CUDA graphs, and bytes of keys and values read a
second. Calls of a graph take turns through copies of the keys that exceed the L2 together.

    python benchmarks/decode.py [--quick] [--output FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import flashmoe_science as fm
import torch

HEADS, HEADS_KV, DIM = 32, 8, 128
BATCHES, KEYS, PAGES = (1, 4, 16, 32, 128), (2048, 8192, 65536), (1, 16, 64, 256)
KEY_BYTES = 2 * DIM * 2
BEYOND_L2 = 160 << 20
ROUNDS = 5


def measure(calls: list[Callable[[], Any]]) -> float:
    """Microseconds of one of the calls, in a graph of all."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    calls[0]()
    end.record()
    end.synchronize()
    about = max(start.elapsed_time(end), 0.01)
    times = max(1, min(30, round(4 / about / len(calls))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            for call in calls:
                call()
    graph.replay()
    taken = []
    for _ in range(ROUNDS):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(start.elapsed_time(end) * 1e3 / (times * len(calls)))
    return statistics.median(taken)


def tables_of(batch: int, lengths: list[int], size: int, pages: int, copies: int) -> list[Any]:
    """Page tables of as many batches, of pages in random places."""
    columns = -(-max(lengths) // size)
    places = torch.randperm(pages, device="cuda", dtype=torch.int32)
    return [
        places[i * batch * columns : (i + 1) * batch * columns].reshape(batch, columns)
        for i in range(copies)
    ]


def decode(
    batch: int, keys: int, size: int, pool: Any, variants: dict[str, Any],
    heads: tuple[int, int] = (HEADS, HEADS_KV), dim: int = DIM,
) -> dict[str, float]:  # fmt: skip
    bytes_ = batch * keys * heads[1] * dim * 4
    copies = max(1, min(8, -(-BEYOND_L2 // bytes_)))
    shape = (-1, size, heads[1], dim)
    of_pool = pool[:, : copies * batch * keys * heads[1] * dim]
    k, v = (x.view(shape) for x in of_pool)
    q = torch.randn(batch, 1, heads[0], dim, device="cuda").bfloat16()
    out = torch.empty_like(q)
    used = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    tables = tables_of(batch, [keys] * batch, size, k.shape[0], copies)
    result = {}
    for name, options in variants.items():
        try:
            calls = [
                lambda t=t, o=options: fm.flash_attention(
                    q, k, v, seqused_k=used, page_table=t, out=out, **o
                )
                for t in tables
            ]
            result[name] = measure(calls)
        except Exception as error:
            print(name, error)
    return result


def dense(batch: int, keys: int, pool: Any) -> float:
    bytes_ = batch * keys * HEADS_KV * KEY_BYTES
    copies = max(1, min(8, -(-BEYOND_L2 // bytes_)))
    k, v = (x[: copies * batch * keys * HEADS_KV * DIM].view(copies, batch, keys, HEADS_KV, DIM)
            for x in pool)  # fmt: skip
    q = torch.randn(batch, 1, HEADS, DIM, device="cuda").bfloat16()
    out = torch.empty_like(q)
    return measure([lambda i=i: fm.flash_attention(q, k[i], v[i], out=out) for i in range(copies)])


def mixed(queries: list[int], keys: list[int], size: int, pool: Any,
          variants: dict[str, Any]) -> dict[str, float]:  # fmt: skip
    """Sequences of so many queries and keys each, packed."""
    batch = len(queries)
    context = max(keys)
    starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32, device="cuda")
    columns = context // size
    k, v = (x[: 2 * batch * context * HEADS_KV * DIM].view(-1, size, HEADS_KV, DIM) for x in pool)
    places = torch.randperm(k.shape[0], device="cuda", dtype=torch.int32)
    tables = [places[i * batch * columns : (i + 1) * batch * columns].reshape(batch, columns)
              for i in range(2)]  # fmt: skip
    used = torch.tensor(keys, dtype=torch.int32, device="cuda")
    q = torch.randn(1, sum(queries), HEADS, DIM, device="cuda").bfloat16()
    out = torch.empty_like(q)
    result = {}
    for name, options in variants.items():
        try:
            result[name] = measure([
                lambda t=t, o=options: fm.flash_attention(
                    q, k, v, cu_seqlens_q=starts, seqused_k=used, page_table=t, out=out,
                    causal=True, max_seqlen_q=max(queries), **o
                )
                for t in tables
            ])  # fmt: skip
        except Exception as error:
            print(name, error)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--output")
    given = parser.parse_args()
    variants = {"decode": {"kernel": "sm89_decode"},
                "split 1024": {"kernel": "sm89_decode", "split_size": 1024},
                "sm89": {"kernel": "sm89"}, "choice": {}}  # fmt: skip
    records = []

    def note(case: str, bytes_: float, times: dict[str, float]) -> None:
        records.append({"case": case, "bytes": bytes_, "us": times})
        text = "  ".join(f"{n} {t:8.1f} us {bytes_ / t * 1e-6:5.2f} TB/s" for n, t in times.items())
        print(f"{case:26s} {text}", flush=True)

    free = torch.cuda.mem_get_info()[0]
    room = min(int(free * 0.8) // 2, 18 << 30) // 2  # elements
    pool = torch.empty(2, room, dtype=torch.bfloat16, device="cuda").uniform_(-1, 1)
    print(torch.cuda.get_device_name(), fm.__version__)
    for keys, batch in itertools.product(KEYS, BATCHES):
        if batch * keys * HEADS_KV * DIM > room or (given.quick and keys == 65536 and batch > 32):
            continue
        bytes_ = batch * keys * HEADS_KV * KEY_BYTES
        note(f"b{batch} k{keys} dense", bytes_, {"dense": dense(batch, keys, pool)})
        for size in PAGES:
            some = variants
            if given.quick and size != 16:
                some = {"decode": variants["decode"]}
            note(f"b{batch} k{keys} p{size}", bytes_, decode(batch, keys, size, pool, some))
    some = {n: variants[n] for n in ("decode", "split 1024")}
    for heads, dim in (((64, 8), 128), ((8, 1), 128), ((64, 8), 64), ((16, 8), 256)):
        for batch, keys in ((1, 8192), (1, 131072), (8, 8192), (32, 2048), (64, 4096), (128, 1024)):
            times = decode(batch, keys, 64, pool, some, heads, dim)
            case = f"h{heads[0]}/{heads[1]} d{dim} b{batch} k{keys}"
            note(case, batch * keys * heads[1] * dim * 4, times)
    everything = {"choice": {}, "sm90": {"kernel": "sm90_whole_tiles"}, "sm89": {"kernel": "sm89"}}
    for name, queries, keys in (
        ("chunk2048+64dec", [2048] + [1] * 64, [10240] + [4096] * 64),
        ("4xchunk512+128dec", [512] * 4 + [1] * 128, [8192] * 4 + [2048] * 128),
        ("spec4_b64", [4] * 64, [4096] * 64),
        ("64dec mixed", [1] * 64, [128 * 4 ** (i % 5) + 100 for i in range(64)]),
    ):
        some = everything | (
            {"decode": variants["decode"]} if max(queries) < 8 else
            {"mixed": {"kernel": "mixed"}, "mixed split": {"split_size": 1024}}
        )  # fmt: skip
        note(name, sum(keys) * HEADS_KV * KEY_BYTES, mixed(queries, keys, 64, pool, some))
    if given.output:
        with open(given.output, "w", encoding="utf-8") as file:
            json.dump({"device": torch.cuda.get_device_name(), "records": records}, file, indent=1)


if __name__ == "__main__":
    sys.exit(main())
