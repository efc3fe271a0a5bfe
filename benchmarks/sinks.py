"""Attention with sinks, beside the same calls without and vLLM's FlashAttention-3.

    python benchmarks/sinks.py --json benchmarks/results/sinks_h200.json --fa3 _vllm_fa3_C.abi3.so

The heads are gpt-oss's: 64 query heads on 8, D 64. The library of vLLM's FlashAttention-3 lies in
its wheel as vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so; torch must be of the version that it was
built for. Without --fa3 there is no peer. Both are held to the accuracy rule, and calls alternate
and are timed, as by `flashmoe bench`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flashmoe_science as fm
import torch
from flashmoe_science.cli import environment
from flashmoe_science.cli.arrays import Arrays, choose_arrays
from flashmoe_science.cli.measure import Procedure, call_ours, describe, make_inputs, measure_row
from flashmoe_science.cli.peers.peer import Inputs, Peer
from flashmoe_science.cli.reference import judge
from flashmoe_science.cli.shapes import Shape
from flashmoe_science.cli.timing import Contender, Sampling

PEER = "fa3"
WITHOUT = "without sinks"
HEADS_Q, HEADS_KV, DIM = 64, 8, 64


def shapes() -> list[Shape]:
    """Prompts with and without a window of 128 keys, a short and a chunked prompt, decoding."""
    made = [
        (2, 8192, 8192, None),
        (2, 8192, 8192, 127),
        (1, 8192, 8192, None),
        (1, 8192, 8192, 127),
        (8, 512, 512, None),
        (1, 64, 16384, None),
        (1, 1, 8192, None),
        (32, 1, 4096, None),
        (32, 1, 4096, 127),
    ]
    return [
        Shape(batch, q, k, HEADS_Q, HEADS_KV, DIM, DIM, "bf16", "bottom_right", left)
        for batch, q, k, left in made
    ]


def peer_call(shape: Shape, inputs: tuple[Any, Any, Any], sinks: Any) -> Callable[[], Any]:
    """It takes sequences of any lengths, one behind the other: here all have the same."""
    q, k, v = (x.flatten(0, 1) for x in inputs)

    def begins(length: int) -> Any:
        return torch.arange(shape.batch + 1, dtype=torch.int32, device=q.device) * length

    begins_q, begins_k = begins(shape.seq_q), begins(shape.seq_k)
    left = -1 if shape.window_left is None else shape.window_left
    scale = 1.0 / math.sqrt(shape.dim)

    def call() -> Any:
        return torch.ops._vllm_fa3_C.fwd(
            q, k, v, None, None, None, None,  # new keys and values, q_v, out
            begins_q, begins_k, None, None, None, shape.seq_q, shape.seq_k,
            None, None, None, None, None, None, None, None, None,  # pages to descaling
            scale, True, left, 0, 0.0, True, None, 0, None, 0, sinks, 1, 0, None,
        )[0].unflatten(0, (shape.batch, shape.seq_q))  # fmt: skip

    return call


def measure(arrays: Arrays, shape: Shape, sampling: Sampling, *, peer: bool) -> dict[str, Any]:
    """One shape, as `flashmoe bench` records it."""
    inputs = make_inputs(arrays, shape, sampling.seed)
    sinks = arrays.normal((shape.heads_q,), shape.dtype, 7)
    without = functools.partial(fm.flash_attention, *inputs, **shape.options, layout="bshd")
    call = functools.partial(without, sinks=sinks)
    procedure = Procedure(
        inputs,
        checked=lambda: call_ours(fm, arrays, shape, inputs, None, sinks),
        judge=lambda ours, outputs: judge(arrays, shape, inputs, outputs, ours.lse, sinks=sinks),
        again=call,
        timed=call,
        beside=lambda: [Contender(WITHOUT, without)],
    )

    def prepare(arrays: Arrays, shape: Shape, inputs: Inputs) -> Contender:
        return Contender(PEER, peer_call(shape, inputs, sinks))

    peers = [Peer(PEER, ("cuda",), (), "vllm", "", prepare)] if peer else []
    row = describe(shape) | {"case": str(shape)}
    return measure_row(fm, arrays, shape, peers, sampling, None, procedure, row)


def record(device: str, seconds: float, fa3: Path | None) -> dict[str, Any]:
    """All of it, as a document."""
    if fa3 is not None:
        torch.ops.load_library(str(fa3))
    arrays, sampling = choose_arrays(device), Sampling(seconds=seconds)
    rows = [measure(arrays, shape, sampling, peer=fa3 is not None) for shape in shapes()]
    return {
        "operation": "sinks",
        "title": "Attention with sinks, beside calls without and vLLM's FlashAttention-3",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": environment.git_commit(),
        "device": {"device": device, "name": fm.device_info(device).name},
        "environment": environment.for_record(),
        "sampling": dataclasses.asdict(sampling),
        "rows": rows,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=0.25, help="for each call of a shape")
    parser.add_argument("--fa3", type=Path, metavar="LIBRARY", help="vLLM's FlashAttention-3")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the record there")
    options = parser.parse_args(argv)
    document = record(options.device, options.seconds, options.fa3)
    for row in document["rows"]:
        if row["status"] != "ok":
            print(f"{row['case']}: {row['status']}: {row['reason']}")
            continue
        words = []
        for name, entry in row["contenders"].items():
            if entry["status"] == "ok":
                words.append(f"{name} {entry['median_s'] * 1e6:.1f} us")
            else:
                words.append(f"{name} {entry['status']}: {entry['reason']}")
            if name == PEER and "against" in entry:
                words.append(f"ratio {entry['against']['ratio']:.2f}")
        print(f"{row['case']}: {', '.join(words)}")
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["status"] == "ok" for row in document["rows"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
