"""Two builds of the package beside each other, such as one with other compiler options, or of two
commits.

    pip install --no-deps --target build/plain . -Ccmake.define.FLASHMOE_HARDEN=OFF
    pip install --no-deps --target build/hardened .
    python benchmarks/two_builds.py build/plain build/hardened [--output PATH]
    python benchmarks/two_builds.py build/before build/after --gpu [--output PATH]

Each has a process of its own. They take turns, in random order, and time the same calls. A ratio is
the second's time over the first's, the median of the pairs; its interval is the middle half of
them.

On the CPU they have one thread and time large problems, and empty and small ones, which are host
code. Times are the processor's, so that what else runs on the machine counts for little. With
--gpu, which needs torch, they time experts' gradients between CUDA events, and list what each
kernel takes, too.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PAIRS = 41
SECONDS_A_TURN = 0.05

# T, H, I, E and K, of layers that are trained.
LAYERS = {
    "olmoe": (32768, 2048, 1024, 64, 8),
    "qwen3-30b": (32768, 2048, 768, 128, 8),
    "sonic-7b-fine": (32768, 1536, 256, 128, 8),
    "mixtral": (8192, 4096, 14336, 8, 2),
}


def gpu_calls() -> dict[str, Callable[[], object]]:
    """Gradients of layers in bf16 from what a forward saved, of all but biases."""
    import flashmoe_science as fm
    import torch

    generator = torch.Generator("cuda").manual_seed(0)
    wanted = (True, True, False, True, False, False, False, True)

    def normal(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)
        return made * shape[-1] ** -0.5 if len(shape) == 3 else made

    def layer(t: int, h: int, i: int, e: int, k: int) -> Callable[[], object]:
        x, dout, w_gate_up, w_down = (
            normal(t, h),
            normal(t, h),
            normal(e, 2 * i, h),
            normal(e, h, i),
        )
        routing = fm.moe_route(normal(t, e), k, renormalize=True)
        _, saved = fm.moe_forward(x, w_gate_up, w_down, routing, return_pre_activation=True)
        return lambda: fm.moe_backward(
            dout, x, w_gate_up, w_down, routing, pre_activation=saved, wanted=wanted
        )

    return {f"experts' gradients, {name}": layer(*extents) for name, extents in LAYERS.items()}


def gpu_seconds(call: Callable[[], object], repeats: int) -> float:
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def gpu_kernels(call: Callable[[], object], repeats: int) -> dict[str, float]:
    """Microseconds of a call's kernels, in the order of their launches."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    made: dict[str, float] = {}
    for event in sorted(profile.events(), key=lambda event: event.time_range.start):
        if event.device_type == torch.autograd.DeviceType.CUDA:
            made[event.name] = made.get(event.name, 0.0) + event.device_time / repeats
    return made


def cpu_calls() -> dict[str, Callable[[], object]]:
    """What is timed, on tensors of NumPy."""
    import flashmoe_science as fm

    def attention(batch: int, seq: int, heads: int, dtype: str) -> Callable[[], object]:
        q, k, v = np.random.default_rng(0).standard_normal((3, batch, seq, heads, 64)).astype(dtype)
        out = np.empty_like(q)
        return lambda: fm.flash_attention(q, k, v, causal=True, out=out)

    def experts(tokens: int, hidden: int) -> Callable[[], object]:
        normal = np.random.default_rng(0).standard_normal
        x, router, w_gate_up, w_down = (
            normal(shape).astype("float32")
            for shape in (
                (tokens, hidden),
                (8, hidden),
                (8, 2 * hidden, hidden),
                (8, hidden, hidden),
            )
        )
        out = np.empty_like(x)
        return lambda: fm.fused_moe(x, router, w_gate_up, w_down, top_k=2, out=out)

    return {
        "attention fp32, 1024 keys, 8 heads": attention(1, 1024, 8, "float32"),
        "attention fp16, 1024 keys, 8 heads": attention(1, 1024, 8, "float16"),
        "experts fp32, 256 tokens of 512": experts(256, 512),
        "experts fp32, 4 tokens of 512": experts(4, 512),
        "attention fp32, 8 keys, 1 head": attention(1, 8, 1, "float32"),
        "attention fp32, empty": attention(0, 16, 2, "float32"),
        "experts fp32, empty": experts(0, 64),
    }


def cpu_seconds(call: Callable[[], object], repeats: int) -> float:
    call()
    begin = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - begin) / repeats


def serve(gpu: bool) -> None:
    """In a build's process: a line with a call's name and a number asks for its time so often; a
    negative number for what its kernels take."""
    import flashmoe_science as fm

    known = gpu_calls() if gpu else cpu_calls()
    cpu = fm.device_info("cpu")
    about = {"cpu": cpu.name, "isa": cpu.isa, "compiler": fm.build_info().host_compiler}
    if gpu:
        about["gpu"] = fm.device_info("cuda").name
    print(json.dumps([about, list(known)]), flush=True)
    for line in sys.stdin:
        name, repeats = json.loads(line)
        answer = gpu_kernels if repeats < 0 else gpu_seconds if gpu else cpu_seconds
        print(json.dumps(answer(known[name], abs(repeats))), flush=True)


class Build:
    """A folder that pip has installed the package into, and its process."""

    def __init__(self, folder: Path, gpu: bool) -> None:
        path = os.pathsep.join([str(folder.resolve()), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", "--gpu" if gpu else "--cpu"],
            env={**os.environ, "FLASHMOE_NUM_THREADS": "1", "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.about, self.names = self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def _ask(self, name: str, repeats: int) -> Any:
        assert self.process.stdin is not None
        print(json.dumps([name, repeats]), file=self.process.stdin, flush=True)
        return self._answer()

    def seconds(self, name: str, repeats: int) -> float:
        return float(self._ask(name, repeats))

    def kernels(self, name: str, repeats: int) -> Any:
        return self._ask(name, -repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("builds", nargs=2, type=Path, metavar="FOLDER")
    parser.add_argument("--gpu", action="store_true", help="experts' gradients on the GPU")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"of times (default {PAIRS})")
    parser.add_argument("--output", type=Path, help="write the record here")
    arguments = parser.parse_args()

    first, second = (Build(folder, arguments.gpu) for folder in arguments.builds)
    order = random.Random(0)
    cells = []
    for name in first.names:
        repeats = max(1, int(SECONDS_A_TURN / first.seconds(name, 1)))
        times: dict[Build, list[float]] = {first: [], second: []}
        for _ in range(arguments.pairs):
            for build in order.sample((first, second), 2):
                times[build].append(build.seconds(name, repeats))
        ratios = [b / a for a, b in zip(times[first], times[second], strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        microseconds = [statistics.median(times[build]) * 1e6 for build in (first, second)]
        cell = {"call": name, "us": microseconds, "ratio": ratio, "ratio_quartiles": [low, high]}
        if arguments.gpu:
            cell["kernels_us"] = [build.kernels(name, repeats) for build in (first, second)]
        cells.append(cell)
        print(
            f"{name:36} {microseconds[0]:10.2f} us {microseconds[1]:10.2f} us  "
            f"{ratio:.3f} ({low:.3f} to {high:.3f})"
        )
    mean = statistics.geometric_mean(cell["ratio"] for cell in cells)
    print(f"geometric mean {mean:.3f}")
    if arguments.output:
        record = {
            "builds": [folder.name for folder in arguments.builds],
            "date": datetime.date.today().isoformat(),
            "environment": second.about,
            "pairs": arguments.pairs,
            "geometric_mean": mean,
            "cells": cells,
        }
        arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    serve("--gpu" in sys.argv) if "--serve" in sys.argv else main()
