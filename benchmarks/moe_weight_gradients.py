"""Gradients of experts' weights alone, dw[e] = sum of dout[r] x[r]^T over the rows r of expert e:
ours beside torch's grouped product and DeepGEMM's of groups along K, where that is installed.

    python benchmarks/moe_weight_gradients.py --json moe_weight_gradients_h200.json

Rows are those of models' layers, sorted by expert, each with as many as chance gives it. DeepGEMM
takes multiples of 128 rows of an expert: its rows are padded before, which is not timed, and its
speed is that of the rows that there are. Every contender is held to the accuracy rule first, for
the expert with the most rows and two others. Calls take turns in random order, with the L2 flushed
ahead of each, as in `flashmoe bench`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import flashmoe_science as fm
import torch
from flashmoe_science.cli import environment
from flashmoe_science.cli.arrays import choose_arrays
from flashmoe_science.cli.stats import compare, summary
from flashmoe_science.cli.timing import Contender, Sampling, interleave, make_clock

OURS, TORCH, DEEP_GEMM = "flashmoe", "torch._grouped_mm", "deep_gemm"
_DEEP_GEMM_ROWS = 128  # of an expert, a multiple
_FP32_SUMS = 1e-5  # of the largest value: what the order of a sum in fp32 may change


class Shape(NamedTuple):
    model: str
    product: str
    rows: int
    m: int
    """Columns of dout: rows of a gradient."""
    n: int
    experts: int

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.m * self.n

    def __str__(self) -> str:
        return f"{self.model} {self.product}, {self.rows} x {self.m} x {self.n}, {self.experts}"


def shapes() -> list[Shape]:
    made = []
    for model, tokens, hidden, inner, experts, top_k in (
        ("olmoe", 32768, 2048, 1024, 64, 8),
        ("qwen3-30b", 32768, 2048, 768, 128, 8),
        ("sonic-7b-fine", 32768, 1536, 256, 128, 8),
        ("mixtral", 8192, 4096, 14336, 8, 2),
        ("deepseek-v3", 8192, 7168, 2048, 256, 8),
    ):
        rows = tokens * top_k
        made.append(Shape(model, "gate and up", rows, 2 * inner, hidden, experts))
        made.append(Shape(model, "down", rows, hidden, inner, experts))
    return made


class Inputs(NamedTuple):
    dout: torch.Tensor
    x: torch.Tensor
    counts: list[int]
    offsets: torch.Tensor


def inputs_of(shape: Shape, device: str, dtype: torch.dtype) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(shape.experts, (shape.rows,), generator=generator)
    counts = torch.bincount(chosen, minlength=shape.experts)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int().to(device)
    on_device = torch.Generator(device).manual_seed(0)

    def normal(columns: int) -> torch.Tensor:
        return torch.randn((shape.rows, columns), device=device, dtype=dtype, generator=on_device)

    return Inputs(normal(shape.m), normal(shape.n), counts.tolist(), offsets)


def ours(given: Inputs, shape: Shape) -> Callable[[], Any]:
    w = given.x.new_empty((shape.experts, shape.m, shape.n))  # of which the shape alone is read
    return lambda: (
        fm.grouped_product_backward(
            given.dout, given.x, w, offsets=given.offsets, wanted=(False, True, False)
        ).w
    )


def torchs(given: Inputs, shape: Shape) -> Callable[[], Any]:
    ends = given.offsets[1:].contiguous()
    return lambda: torch._grouped_mm(given.dout.T, given.x, offs=ends)


def deep_gemms(given: Inputs, shape: Shape) -> Callable[[], Any]:
    """Its sums are fp32, and are added to what is there: zeros."""
    deep_gemm = importlib.import_module("deep_gemm")
    padded = [math.ceil(n / _DEEP_GEMM_ROWS) * _DEEP_GEMM_ROWS for n in given.counts]

    def spread(rows: torch.Tensor) -> torch.Tensor:
        made = rows.new_zeros((sum(padded), rows.shape[1]))
        for source, target, n in zip(
            given.offsets.tolist(), _starts(padded), given.counts, strict=False
        ):
            made[target : target + n] = rows[source : source + n]
        return made

    dout, x = spread(given.dout), spread(given.x)
    counts = torch.tensor(padded, dtype=torch.int32, device=x.device)
    dw = torch.zeros((shape.experts, shape.m, shape.n), dtype=torch.float32, device=x.device)

    def call() -> torch.Tensor:
        deep_gemm.k_grouped_bf16_gemm_tn_contiguous(dout, x, dw, padded, counts, dw)
        return dw

    return call


def _starts(counts: list[int]) -> list[int]:
    starts = [0]
    for n in counts:
        starts.append(starts[-1] + n)
    return starts[:-1]


CONTENDERS = {OURS: ours, TORCH: torchs, DEEP_GEMM: deep_gemms}


def error_of_allowed(made: torch.Tensor, given: Inputs) -> float:
    """The greatest error over what is allowed, of the expert with the most rows and two others."""
    worst = 0.0
    starts = given.offsets.tolist()
    for e in sorted({max(range(len(given.counts)), key=given.counts.__getitem__), 0,
                     len(given.counts) - 1}):  # fmt: skip
        rows = slice(starts[e], starts[e + 1])
        want = given.dout[rows].double().T @ given.x[rows].double()
        if want.numel() == 0:
            continue
        rounded = float((want.to(given.x.dtype).double() - want).abs().max())
        spacing = max(torch.finfo(given.x.dtype).eps, _FP32_SUMS) * float(want.abs().max())
        error = float((made[e].double() - want).abs().max())
        worst = max(worst, error / (2 * rounded + spacing) if spacing else error)
    return worst


def measure(shape: Shape, device: str, dtype: torch.dtype, sampling: Sampling) -> dict[str, Any]:
    given = inputs_of(shape, device, dtype)
    row: dict[str, Any] = {"case": str(shape)} | shape._asdict() | {"contenders": {}}
    timed = []
    for name, prepare in CONTENDERS.items():
        entry: dict[str, Any] = {"status": "ok"}
        row["contenders"][name] = entry
        if name == DEEP_GEMM and importlib.util.find_spec(DEEP_GEMM) is None:
            entry |= {"status": "missing", "reason": "not installed"}
            continue
        try:
            call = prepare(given, shape)
            entry["error_of_allowed"] = error_of_allowed(call(), given)
        except Exception as error:  # others' code
            entry |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"[:300]}
            continue
        if not entry["error_of_allowed"] <= 1:
            entry |= {"status": "void", "reason": "wrong by more than is allowed"}
            continue
        timed.append(Contender(name, call))
    samples = interleave(timed, make_clock(choose_arrays(device)), sampling)
    for name, seconds in samples.items():
        times = summary(seconds)
        row["contenders"][name] |= times | {"tflops": shape.flops / times["median_s"] / 1e12}
        if name != OURS:
            row["contenders"][name]["over_ours"] = compare(samples[OURS], seconds, sampling.seed)
    return row


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=0.25, help="of each contender of a shape")
    parser.add_argument("--model", action="append", help="those alone; may be repeated")
    parser.add_argument("--json", type=Path, help="write the record here")
    arguments = parser.parse_args(argv)
    dtype = torch.float32 if arguments.device == "cpu" else torch.bfloat16
    sampling = Sampling(seconds=arguments.seconds)
    document: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "environment": environment.for_record(),
        "dtype": str(dtype),
        "rows": [],
    }
    failed = False
    for shape in shapes():
        if arguments.model and shape.model not in arguments.model:
            continue
        row = measure(shape, arguments.device, dtype, sampling)
        document["rows"].append(row)
        failed |= row["contenders"][OURS]["status"] != "ok"
        texts = [
            f"{name} {entry['tflops']:.0f}" if "tflops" in entry else f"{name} {entry['status']}"
            for name, entry in row["contenders"].items()
        ]
        print(f"{row['case']:60} TFLOP/s: {', '.join(texts)}", flush=True)
        if arguments.json:  # what is measured survives
            arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
