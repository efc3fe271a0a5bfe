"""What the CPU benchmarks share: pairs of timings beside torch, and the record of a run.

Both sides run in one process on the same number of threads and the same tensors, in pairs of random
order: a shared or throttled machine slows both, so the ratio of a pair says more than the times.
Before each timed short call the same library runs once untimed, after a pause, so that neither
meets the other's threads still spinning.
"""

from __future__ import annotations

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
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import capi  # noqa: E402

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PAUSE_S = 0.005
LONG_S = 0.05  # a call beside which waking threads is nothing: no untimed call, fewer pairs
CELL_FLOOR = 0.8
CELL_KEY = (
    "threads", "layer", "dtype", "transposed", "dim", "heads_q", "heads_kv", "causal", "batch",
    "seq", "side", "tokens",
)  # fmt: skip

Call = Callable[[], torch.Tensor]


def as_array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(capi.BF16)
    return tensor.numpy()


def set_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    lib = capi.load()
    capi.check(lib.flashmoe_set_num_threads(threads), lib)


def seconds(call: Call, repeats: int, warm: bool) -> float:
    time.sleep(PAUSE_S)
    if warm:
        call()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


def time_pairs(ours: Call, theirs: Call, pairs: int, order: random.Random) -> dict[str, object]:
    """Medians of both, and the median and quartiles of torch's time over ours."""
    begin = time.perf_counter()
    theirs()
    once = time.perf_counter() - begin
    repeats = max(1, int(0.005 / once))  # short calls are timed several at once
    long = once > LONG_S
    times: dict[str, list[float]] = {"ours": [], "torch": []}
    for _ in range(max(7, pairs // 3) if long else pairs):
        turns = [("ours", ours), ("torch", theirs)]
        order.shuffle(turns)
        for name, call in turns:
            times[name].append(seconds(call, repeats, warm=not long))
    ratios = [b / a for a, b in zip(times["ours"], times["torch"], strict=True)]
    return {
        "ours_ms": statistics.median(times["ours"]) * 1e3,
        "torch_ms": statistics.median(times["torch"]) * 1e3,
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [float(np.quantile(ratios, q)) for q in (0.25, 0.75)],
        "pairs": len(ratios),
    }


def check_error(ours: torch.Tensor, theirs: torch.Tensor, ref: torch.Tensor) -> dict[str, float]:
    """The accuracy rule is max|ours - ref| <= 2 max|torch - ref| + ulp, ref being float64's."""
    our_error = (ours.double() - ref).abs().max().item()
    their_error = (theirs.double() - ref).abs().max().item()
    ulp = torch.finfo(ours.dtype).eps * ref.abs().max().item()
    if not our_error <= 2 * their_error + ulp:
        raise AssertionError(f"error {our_error:.3g}, torch's {their_error:.3g}")
    return {"ours": our_error, "torch": their_error}


def environment() -> dict[str, object]:
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
        "processors": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "commit": git("rev-parse", "HEAD"),
        "cpu_sources_modified": bool(git("status", "--porcelain", "--", "cpu", "core", "include")),
        "load_average_before": os.getloadavg()[0],
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def summarise(cells: list[dict[str, object]]) -> dict[str, object]:
    ratios = [cell["ratio"] for cell in cells]
    dtypes = sorted({cell["dtype"] for cell in cells})
    return {
        "geometric_mean": statistics.geometric_mean(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "geometric_mean_by_dtype": {
            dtype: statistics.geometric_mean(c["ratio"] for c in cells if c["dtype"] == dtype)
            for dtype in dtypes
        },
    }


def joined(
    record: dict[str, Any],
    cells: list[dict[str, Any]],
    env: dict[str, object],
    what: dict[str, Any],
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The cells of a record and these, in the order of what they are of."""
    for name in ("commit", "cpu", "isa", "torch", "cpu_sources_modified"):
        if record["environment"][name] != env[name]:
            raise SystemExit(
                f"{name}: the record has {record['environment'][name]!r}, not {env[name]!r}"
            )

    def key(cell: dict[str, Any]) -> tuple[object, ...]:
        return tuple(cell[name] for name in CELL_KEY if name in cell)

    both = {key(cell): cell for cell in [*record["cells"], *cells]}
    layers = {**record.get("layers", {}), **what.get("layers", {})}
    return [both[k] for k in sorted(both)], {**what, "layers": layers} if layers else what


def conclude(
    cells: list[dict[str, object]],
    env: dict[str, object],
    what: dict[str, object],
    output: Path | None,
    add: bool = False,
) -> int:
    """Prints the means of each thread count, writes the record; the exit status.

    With `add` the record's cells are kept but for those measured anew."""
    path = None
    if output is not None:
        slug = re.sub(r"[^a-z0-9]+", "_", str(env["cpu"]).lower()).strip("_")
        path = Path(str(output).replace("<cpu>", slug))
        if add and path.exists():
            cells, what = joined(json.loads(path.read_text()), cells, env, what)
    threads = sorted({cell["threads"] for cell in cells})
    summary = {str(n): summarise([cell for cell in cells if cell["threads"] == n]) for n in threads}
    for count, of in summary.items():
        print(
            f"{count} threads: geometric mean {of['geometric_mean']:.2f}, lowest "
            f"{of['lowest']:.2f}, highest {of['highest']:.2f}"
        )
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {
            **what,
            "environment": {**env, "load_average_after": os.getloadavg()[0]},
            "summary_by_threads": summary,
            "cells": cells,
        }
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"wrote {path}")
    met = all(s["geometric_mean"] >= 1.0 and s["lowest"] >= CELL_FLOOR for s in summary.values())
    return 0 if met else 1
