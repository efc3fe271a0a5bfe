"""Attention with sinks, beside the same calls without and vLLM's FlashAttention-3.

    python benchmarks/sinks.py --json benchmarks/results/sinks_h200.json --fa3 _vllm_fa3_C.abi3.so

The heads are gpt-oss's: 64 query heads on 8, D 64. The library of vLLM's FlashAttention-3 lies in
its wheel as vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so; torch must be of the version that it was
built for. Without --fa3 there is no peer. Calls alternate and are timed as by `flashmoe bench`; the
peer's output must agree with ours.
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
from flashmoe_science.cli.measure import OURS, make_inputs, time_contenders
from flashmoe_science.cli.shapes import Shape
from flashmoe_science.cli.timing import Contender, Sampling

PEER = "fa3"
WITHOUT = "without sinks"
_TOLERANCE = 0.02  # between bf16 outputs of standard normal values
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


def our_calls(
    arrays: Arrays, shape: Shape, inputs: tuple[Any, Any, Any], sinks: Any
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """With sinks and without."""
    options = shape.options | {"layout": "bshd"}
    call = functools.partial(fm.flash_attention, *inputs, **options)
    return functools.partial(call, sinks=sinks), call


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
    """One shape: kernels, and times of every contender as `flashmoe bench` records them."""
    inputs = make_inputs(arrays, shape, sampling.seed)
    sinks = arrays.normal((shape.heads_q,), shape.dtype, 7)
    with_sinks, without = our_calls(arrays, shape, inputs, sinks)
    out = with_sinks()
    kernels = [launch.kernel for launch in fm.last_launches()]
    contenders = [Contender(OURS, with_sinks), Contender(WITHOUT, without)]
    row: dict[str, Any] = {"case": str(shape), "shape": dataclasses.asdict(shape)}
    if peer:
        call = peer_call(shape, inputs, sinks)
        row["difference"] = apart = float((call().float() - out.float()).abs().max())
        if apart <= _TOLERANCE:
            contenders.append(Contender(PEER, call))
    timed = time_contenders(arrays, shape, contenders, sampling, None)
    return row | {"kernels": kernels, "contenders": timed}


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
        times = row["contenders"]
        words = [f"{name} {times[name]['median_s'] * 1e6:.1f} us" for name in times]
        if PEER in times:
            words.append(f"ratio {times[PEER]['against']['ratio']:.2f}")
        elif "difference" in row:
            words.append(f"{PEER} differs by {row['difference']:.3g}")
        print(f"{row['case']}: {', '.join(words)}")
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
