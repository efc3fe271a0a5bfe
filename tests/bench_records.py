"""Records of `flashmoe bench` that tests make up, whole enough to hold the schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def shape(seq: int, causal: str = "none", **given: Any) -> dict[str, Any]:
    """A shape of bf16, dim 64, with whatever fields are given."""
    extents = {"batch": 1, "seq_q": seq, "seq_k": seq, "heads_q": 8, "heads_kv": 2, "dim": 64,
               "dim_v": 64, "dtype": "bf16", "causal": causal}  # fmt: skip
    return extents | given


def against(ratio: float, low: float, high: float) -> dict[str, Any]:
    verdict = "faster" if low > 1 else "slower" if high < 1 else "tie"
    return {"ratio": ratio, "low": low, "high": high, "verdict": verdict}


def _work(of: dict[str, Any]) -> dict[str, Any]:
    flops = 4.0 * of["batch"] * of["heads_q"] * of["seq_q"] * of["seq_k"] * of["dim"]
    return {"shape": of, "flops": flops, "bytes": 2**20, "tokens": of["batch"] * of["seq_q"]}


def _timed(flops: float, tflops: float, **given: Any) -> dict[str, Any]:
    median = flops / tflops * 1e-12
    return {"status": "ok", "median_s": median, "q1_s": median * 0.98, "q3_s": median * 1.03,
            "samples_s": [median] * 7, "tflops": tflops, "tokens_per_s": 1e6} | given  # fmt: skip


def cell(
    of: dict[str, Any], tflops: float, ratio: dict[str, Any], refused: str = "no such kernel"
) -> dict[str, Any]:
    """A row of ours beside torch-flash, with torch-cudnn refused."""
    work = _work(of)
    accuracy = {"passed": True, "error": 1e-3, "plain_error": 2e-3, "bound": 4e-3,
                "lse_error": 1e-6, "checked": "8 of 8 heads", "reason": ""}  # fmt: skip
    launch = {"kernel": "attention_forward_sm89_bf16_d64_dv64", "grid": [4, 1, 1],
              "block": [128, 1, 1], "shared_bytes": 1024}  # fmt: skip
    contenders = {
        "flashmoe": _timed(work["flops"], tflops, peak_bytes=3 * 2**20, graph_s=5e-6, host_s=7e-6),
        "torch-flash": _timed(work["flops"], tflops / ratio["ratio"], against=ratio,
                              accuracy=accuracy, version="2.13.0"),
        "torch-cudnn": {"status": "refused", "reason": refused},
    }  # fmt: skip
    return work | {"status": "ok", "plan": dict(launch), "launches": [launch], "accuracy": accuracy,
                   "contenders": contenders}  # fmt: skip


def void(of: dict[str, Any], reason: str) -> dict[str, Any]:
    return _work(of) | {"status": "void", "reason": reason}


def document(cells: list[dict[str, Any]], **given: Any) -> dict[str, Any]:
    """A record of these rows, of schema 2."""
    ratios = [c["contenders"]["torch-flash"]["against"] for c in cells if c["status"] == "ok"]
    verdicts = [r["verdict"] for r in ratios]
    summary = {
        "rows": len(ratios),
        "geometric_mean": 1.1,
        "least": min(r["ratio"] for r in ratios),
        "most": max(r["ratio"] for r in ratios),
        **{v: verdicts.count(v) for v in ("faster", "tie", "slower")},
    }
    return {
        "schema": 2,
        "operation": "attention_forward",
        "suite": "grid",
        "title": "Attention",
        "date": "2026-11-21T10:00:00+00:00",
        "command": ["flashmoe", "bench", "--suite", "grid", "--device", "cuda"],
        "commit": COMMIT,
        "source": {"commit": COMMIT, "hash": "0" * 64},
        "device": {"device": "cuda:0", "name": "NVIDIA H200"},
        "kernel": None,
        "load_average": 0.1,
        "sampling": {"seconds": 0.25, "least": 7, "most": 30, "seed": 0},
        "environment": {"packages": {"torch": "2.13.0"}, "threads": 2},
        "peers": {},
        "ceilings": {"copy_bytes_per_s": 4e12, "matmul_flops_per_s": {"bf16": 7e14}},
        "machine_before": [{"clocks.sm": "1980 MHz"}],
        "machine_after": [{"clocks.sm": "1755 MHz"}],
        "complete": True,
        "cells": cells,
        "summary": {"torch-flash": summary},
    } | given


def grid(**given: Any) -> dict[str, Any]:
    """A grid of two lengths and two masks; one row is void, another a tie."""
    rows = [
        cell(shape(32), 400.4, against(1.21, 1.1, 1.3)),
        void(shape(64), "the launched kernel is not the planned one"),
        cell(shape(32, "bottom_right"), 300.0, against(1.0, 0.9, 1.1)),
        cell(shape(64, "bottom_right"), 310.0, against(0.83, 0.8, 0.9)),
    ]
    return document(rows, **given)


def a_list(**given: Any) -> dict[str, Any]:
    """Rows that are no grid; one ratio is beyond any axis, one has a graph's beside it."""
    rows = [
        cell(shape(32), 400.4, against(1.21, 1.1, 1.3)),
        cell(shape(32, batch=4), 300.0, against(25.5, 25.0, 26.0)),
        cell(shape(1, seq_k=8192), 2.5, against(1.02, 0.98, 1.05)),
    ]
    rows[0]["contenders"]["torch-flash"]["graph_against"] = against(0.87, 0.8, 0.9)
    return document(rows, **given)


def _sustained(tflops: float, watts: float | None) -> dict[str, Any]:
    runs = [{"calls": 100, "seconds": 1.0, "watts": watts}] * 2
    joules = None if watts is None else watts / tflops
    return {"tflops": tflops, "watts": watts, "joules_per_tflop": joules, "runs": runs}


def sustained(**given: Any) -> dict[str, Any]:
    """Two rows of calls without a pause; of the second no energy is known."""
    rows = [
        cell(shape(4096), 400.4, against(1.21, 1.1, 1.3)),
        cell(shape(4096, "bottom_right"), 300.0, against(1.0, 0.9, 1.1)),
    ]
    for row, watts in zip(rows, (650.0, None), strict=True):
        row["contenders"]["flashmoe"]["sustained"] = _sustained(380.0, watts)
        row["contenders"]["torch-flash"]["sustained"] = _sustained(325.0, watts)
    sampling = {"seconds": 0.25, "least": 7, "most": 30, "seed": 0, "sustained": 1.0}
    return document(rows, sampling=sampling, **given)


def moe_shape(tokens: int, skew: float = 0, **given: Any) -> dict[str, Any]:
    """A mixture of experts of bf16, with whatever fields are given."""
    return {"tokens": tokens, "hidden": 256, "inner": 128, "experts": 16, "top_k": 2,
            "dtype": "bf16", "skew": skew, "model": "tiny"} | given  # fmt: skip


def moe_cell(
    of: dict[str, Any], tflops: float, ratio: dict[str, Any], in_graph: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A row of ours beside torch-grouped; with `in_graph` it is a short one: in a graph ours takes
    half its time."""
    flops = 6.0 * of["tokens"] * of["top_k"] * of["hidden"] * of["inner"]
    work = {"shape": of, "flops": flops, "bytes": 2**20, "tokens": of["tokens"]}
    accuracy = {"passed": True, "error": 1e-3, "plain_error": 2e-3, "bound": 4e-3,
                "lse_error": None, "checked": "8 of 8 tokens", "reason": ""}  # fmt: skip
    launch = {"kernel": "moe_combine_sm90_bf16", "grid": [4, 1, 1], "block": [128, 1, 1],
              "shared_bytes": 1024}  # fmt: skip
    ours = _timed(flops, tflops, peak_bytes=3 * 2**20, weight_bytes_per_s=3.5e12)
    peer = _timed(flops, tflops / ratio["ratio"], against=ratio, accuracy=accuracy,
                  version="2.13.0", weight_bytes_per_s=1e12)  # fmt: skip
    row = work | {"status": "ok", "plan": {"launches": [launch]}, "launches": [launch],
                  "accuracy": accuracy, "routing": {"active_experts": 16, "most_tokens": 9},
                  "contenders": {"flashmoe": ours, "torch-grouped": peer}}  # fmt: skip
    if in_graph is None:
        bound = _timed(flops, 700.0)
        row["bound"] = {key: bound[key] for key in ("median_s", "samples_s", "tflops")}
        ours["bound_fraction"] = tflops / 700.0
    else:
        peer["graph_against"] = in_graph
        for entry, ahead in ((ours, 1.0), (peer, in_graph["ratio"])):
            half = ours["median_s"] / 2 * ahead
            entry |= {"graph_s": half, "graph_samples_s": [half] * 7, "host_s": 7e-6}
    return row


def moe_record(cells: list[dict[str, Any]], **given: Any) -> dict[str, Any]:
    """A record of these rows of mixtures of experts."""
    of = {"operation": "moe_forward", "suite": "moe-tiny", "title": "Experts"}
    command = ["flashmoe", "bench", "--suite", "moe-tiny", "--device", "cuda"]
    as_flash = [
        c | {"contenders": {"torch-flash": c["contenders"]["torch-grouped"]}} for c in cells
    ]
    made = document(as_flash, **of | {"command": command} | given)
    summary = {"torch-grouped": made["summary"]["torch-flash"]}
    return made | {"cells": cells, "summary": summary}


def moe_grid(**given: Any) -> dict[str, Any]:
    """Two numbers of tokens, evenly spread and skewed; one row is short."""
    rows = [
        moe_cell(moe_shape(tokens, skew), speed, against(1.5, 1.4, 1.6), graph)
        for skew in (0, 1)
        for tokens, speed, graph in (
            (8, 4.0, against(1.25, 1.2, 1.3)),
            (4096, 560.0, None),
        )
    ]
    return moe_record(rows, **given)


def host_cost(**given: Any) -> dict[str, Any]:
    """A record of benchmarks/host_cost.py, of two calls."""
    figures = {
        name: {"median_us": median, "quartile1_us": median - 0.14, "quartile3_us": median + 0.26,
               "samples_us": [median] * 3}
        for name, median in {"fused_moe": 15.21, "torch linear": 8.0}.items()
    }  # fmt: skip
    return {
        "operation": "host_cost",
        "title": "What one call costs the host",
        "date": "2026-11-21T10:00:00+00:00",
        "command": ["python", "benchmarks/host_cost.py", "--device", "cuda:0"],
        "commit": COMMIT,
        "source": {"hash": "0" * 64},
        "device": {"device": "cuda:0", "name": "NVIDIA H200"},
        "kernel": None,
        "load_average": 0.1,
        "environment": {"packages": {"torch": "2.13.0"}},
        "calls_per_round": 100,
        "rounds": 3,
        "host_cost": figures,
    } | given


def cpu_moe(**given: Any) -> dict[str, Any]:
    """A record of benchmarks/cpu_moe.py, of one layer and two numbers of tokens."""
    cells = [
        {"threads": 1, "layer": "thin", "tokens": tokens, "dtype": "bf16", "transposed": transposed,
         "ours_gflops": 10.4 * tokens, "ratio": 1.5 - 0.2 * transposed}
        for tokens, transposed in ((1, False), (16, False), (16, True))
    ]  # fmt: skip
    return {
        "layers": {"thin": [2048, 768, 32, 4]},
        "environment": {"cpu": "AMD EPYC", "isa": "avx512", "torch": "2.13.0", "commit": COMMIT,
                        "time": "2026-11-21T10:00:00+00:00"},
        "summary_by_threads": {"1": {"geometric_mean": 1.4, "lowest": 1.3, "highest": 1.5}},
        "cells": cells,
    } | given  # fmt: skip


def write(path: Path, content: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return path
