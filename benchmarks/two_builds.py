"""Two builds of the package beside each other on the CPU, such as one with other compiler options.

    pip install --no-deps --target build/plain . -Ccmake.define.FLASHMOE_HARDEN=OFF
    pip install --no-deps --target build/hardened .
    python benchmarks/two_builds.py build/plain build/hardened [--output PATH]

Each has a process of its own, of one thread. They take turns, in random order, and time the same
calls: of large problems, and of empty and of small ones, which are host code. Times are the
processor's, so that what else runs on the machine counts for little. A ratio is the second's time
over the first's, the median of the pairs; its interval is the middle half of them.
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


def calls() -> dict[str, Callable[[], object]]:
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


def serve() -> None:
    """In a build's process: a line with a call's name and a number asks for its time so often."""
    import flashmoe_science as fm

    known = calls()
    cpu = fm.device_info("cpu")
    about = {"cpu": cpu.name, "isa": cpu.isa, "compiler": fm.build_info().host_compiler}
    print(json.dumps([about, list(known)]), flush=True)
    for line in sys.stdin:
        name, repeats = json.loads(line)
        call = known[name]
        call()
        begin = time.process_time()
        for _ in range(repeats):
            call()
        print((time.process_time() - begin) / repeats, flush=True)


class Build:
    """A folder that pip has installed the package into, and its process."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            env={**os.environ, "FLASHMOE_NUM_THREADS": "1", "PYTHONPATH": str(folder.resolve())},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.about, self.names = self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def seconds(self, name: str, repeats: int) -> float:
        assert self.process.stdin is not None
        print(json.dumps([name, repeats]), file=self.process.stdin, flush=True)
        return float(self._answer())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("builds", nargs=2, type=Path, metavar="FOLDER")
    parser.add_argument("--output", type=Path, help="write the record here")
    arguments = parser.parse_args()

    first, second = (Build(folder) for folder in arguments.builds)
    order = random.Random(0)
    cells = []
    for name in first.names:
        repeats = max(1, int(SECONDS_A_TURN / first.seconds(name, 1)))
        times: dict[Build, list[float]] = {first: [], second: []}
        for _ in range(PAIRS):
            for build in order.sample((first, second), 2):
                times[build].append(build.seconds(name, repeats))
        ratios = [b / a for a, b in zip(times[first], times[second], strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4)
        microseconds = [statistics.median(times[build]) * 1e6 for build in (first, second)]
        cells.append(
            {"call": name, "us": microseconds, "ratio": ratio, "ratio_quartiles": [low, high]}
        )
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
            "pairs": PAIRS,
            "geometric_mean": mean,
            "cells": cells,
        }
        arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--serve"] else main()
