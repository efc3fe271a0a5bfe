"""Decoding of multi-head latent attention, absorbed queries over a paged cache, beside FlashMLA.

    python benchmarks/mla.py --flashmla _flashmla_C.abi3.so --json mla_decode.json

The library of FlashMLA lies in vLLM's wheel; torch must be of the version that it was built for.
Without --flashmla there is no peer.

Calls are replayed from CUDA graphs, whose calls take turns through copies of the cache that exceed
the L2 together. Graphs of both alternate. FlashMLA is given its schedule, which it makes of the
lengths by a kernel of its own: that one is not timed. Ours reads the lengths in each call. Before a
case is timed, both outputs are held to the accuracy rule (docs/accuracy.md) on some sequences.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flashmoe_science as fm
from flashmoe_science.cli import environment
from flashmoe_science.cli.stats import compare, summary

torch: Any = importlib.import_module("torch")

OURS, PEER = "flashmoe", "flashmla"
DIM, DIM_V, PAGE = 576, 512, 64
_BEYOND_L2 = 160 << 20  # bytes of keys that calls take turns through
_MOST_COPIES = 8
_GRAPH_S = 0.003  # what a graph takes, about
_CHECKED = 3  # sequences of a case


@dataclasses.dataclass(frozen=True)
class Case:
    """Sequences with the same number of queries each, and contexts of their own."""

    name: str
    heads: int
    queries: int
    keys: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Bytes of keys, which are read once."""
        return sum(self.keys) * DIM * 2

    @property
    def flops(self) -> float:
        """FLOPs of both products, for the pairs that the causal mask leaves."""
        pairs = sum(self.queries * n - self.queries * (self.queries - 1) // 2 for n in self.keys)
        return 2.0 * pairs * self.heads * (DIM + DIM_V)


def cases() -> Iterator[Case]:
    shapes = ((1, 1024), (1, 4096), (1, 16384), (16, 1024), (16, 4096), (16, 16384), (64, 1024),
              (64, 4096), (64, 16384), (128, 1024), (128, 4096))  # fmt: skip
    drawn = random.Random(2)
    mixed = tuple(round(2 ** drawn.uniform(8, 14)) for _ in range(64))
    for heads, queries in ((128, 1), (128, 2), (128, 4), (64, 1), (16, 1), (16, 4)):
        for batch, context in shapes:
            name = f"h{heads} sq{queries} b{batch} ctx{context}"
            yield Case(name, heads, queries, (context,) * batch)
        yield Case(f"h{heads} sq{queries} b64 ctxmixed", heads, queries, mixed)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """q [batch, queries, heads, 576], pages [pages, 64, 1, 576], tables of copies, lengths."""

    q: Any
    pages: Any
    tables: tuple[Any, ...]
    used: Any


def make_inputs(case: Case, seed: int) -> Inputs:
    made = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> Any:
        out = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        for part in out.flatten().split(1 << 28):
            part.copy_(torch.randn(part.shape, generator=made, device="cuda"))
        return out

    copies = min(_MOST_COPIES, max(1, -(-_BEYOND_L2 // case.bytes)))
    each = [-(-n // PAGE) for n in case.keys]
    pages = normal(copies * sum(each), PAGE, 1, DIM)
    places = torch.randperm(len(pages), generator=made, device="cuda").to(torch.int32)
    tables, taken = [], 0
    for _ in range(copies):
        table = torch.zeros(len(each), max(each), dtype=torch.int32, device="cuda")
        for row, count in enumerate(each):
            table[row, :count] = places[taken : taken + count]
            taken += count
        tables.append(table)
    used = torch.tensor(case.keys, dtype=torch.int32, device="cuda")
    q = normal(len(case.keys), case.queries, case.heads, DIM)
    return Inputs(q, pages, tuple(tables), used)


def contenders(case: Case, inputs: Inputs, peer: bool) -> dict[str, Callable[[int], Any]]:
    """By name; each takes the number of a copy and returns the output."""

    def ours(copy: int) -> Any:
        return fm.flash_attention(
            inputs.q, inputs.pages, inputs.pages[..., :DIM_V], causal=True,
            page_table=inputs.tables[copy], seqused_k=inputs.used, max_seqlen_k=max(case.keys),
        )  # fmt: skip

    made: dict[str, Callable[[int], Any]] = {OURS: ours}
    if not peer:
        return made
    forward = torch.ops._flashmla_C.dense_decode_fwd

    def theirs(copy: int, *schedule: Any) -> Any:
        return forward(
            inputs.q, inputs.pages, DIM_V, inputs.used, inputs.tables[copy], DIM**-0.5,
            case.queries > 1, *(schedule or (None, None)), None,
        )  # fmt: skip

    schedule = theirs(0)[2:]
    made[PEER] = lambda copy: theirs(copy, *schedule)[0]
    return made


def check(case: Case, inputs: Inputs, calls: dict[str, Callable[[int], Any]]) -> dict[str, Any]:
    """Each contender's greatest error on some sequences, and what the accuracy rule allows."""
    outs = {name: call(0) for name, call in calls.items()}
    errors = dict.fromkeys(calls, 0.0)
    plain = greatest = 0.0
    count = len(case.keys)
    for at in sorted({round(i * (count - 1) / (_CHECKED - 1)) for i in range(_CHECKED)}):
        keys = case.keys[at]
        k = inputs.pages[inputs.tables[0][at].long()].reshape(-1, DIM)[:keys]
        seen = torch.arange(keys, device="cuda")
        last = keys - case.queries + torch.arange(case.queries, device="cuda")

        def attend(dtype: Any, at: int = at, k: Any = k, hidden: Any = None) -> Any:
            q = inputs.q[at].transpose(0, 1).to(dtype)  # heads first
            scores = (q @ k.to(dtype).T * DIM**-0.5).masked_fill(hidden, -math.inf)
            if dtype == torch.float64:
                return scores.softmax(-1) @ k[:, :DIM_V].to(dtype)
            weights = scores.bfloat16().float().softmax(-1).bfloat16().float()
            return (weights @ k[:, :DIM_V].float()).bfloat16().float()

        hidden = seen > last[:, None]
        ref = attend(torch.float64, hidden=hidden)
        greatest = max(greatest, float(ref.abs().max()))
        plain = max(plain, float((attend(torch.float32, hidden=hidden) - ref).abs().max()))
        for name, out in outs.items():
            error = (out[at].transpose(0, 1).double() - ref).abs().max()
            errors[name] = max(errors[name], math.inf if error.isnan() else float(error))
    bound = 2 * plain + 2.0 ** (math.floor(math.log2(greatest)) - 7)
    return {
        name: {"error": error, "bound": bound, "passed": error <= bound}
        for name, error in errors.items()
    }


def capture(call: Callable[[int], Any], copies: int) -> tuple[Any, int]:
    """A graph of calls that take turns through the copies, and how many it has."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call(0)
    torch.cuda.synchronize()
    start.record()
    call(0)
    end.record()
    end.synchronize()
    rounds = max(1, min(20, round(_GRAPH_S * 1e3 / max(start.elapsed_time(end), 1e-3) / copies)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for copy in range(copies):
                call(copy)
    graph.replay()
    torch.cuda.synchronize()
    return graph, rounds * copies


def measure(case: Case, peer: bool, samples: int, seed: int) -> dict[str, Any]:
    inputs = make_inputs(case, seed)
    calls = contenders(case, inputs, peer)
    accuracy = check(case, inputs, calls)
    calls[OURS](0)
    row: dict[str, Any] = {
        "name": case.name, "heads": case.heads, "queries": case.queries,
        "keys": [len(case.keys), min(case.keys), max(case.keys), sum(case.keys)],
        "bytes": case.bytes, "flops": case.flops,
        "launches": [launch.kernel for launch in fm.last_launches()], "contenders": {},
    }  # fmt: skip
    if not accuracy[OURS]["passed"]:
        return row | {"status": "void", "reason": f"accuracy: {accuracy[OURS]}"}
    graphs = {name: capture(call, len(inputs.tables)) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for sample in range(samples):
        order = list(graphs.items())
        for name, (graph, count) in order if sample % 2 == 0 else reversed(order):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e-3 / count)
    for name in calls:
        entry = {"accuracy": accuracy[name]} | summary(times[name])
        entry["tb_per_s"] = case.bytes / entry["median_s"] * 1e-12
        entry["tflops"] = case.flops / entry["median_s"] * 1e-12
        if name != OURS:
            entry["against"] = compare(times[OURS], times[name], seed)
        row["contenders"][name] = entry
    return row | {"status": "ok"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--flashmla", type=Path, metavar="LIBRARY", help="FlashMLA, of vLLM")
    parser.add_argument("--only", metavar="TEXT", help="cases whose name has this in it")
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the record there")
    options = parser.parse_args(argv)
    if options.flashmla is not None:
        torch.ops.load_library(str(options.flashmla))
    rows: list[dict[str, Any]] = []
    document = {
        "operation": "mla_decode",
        "title": "Decoding of multi-head latent attention, beside FlashMLA",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": environment.git_commit(),
        "device": {"device": "cuda:0", "name": fm.device_info("cuda:0").name},
        "environment": environment.for_record(),
        "samples": options.samples,
        "rows": rows,
    }
    for case in cases():
        if options.only and options.only not in case.name:
            continue
        row = measure(case, options.flashmla is not None, options.samples, options.seed)
        rows.append(row)
        words = [f"{case.name:26s}", row["status"], row.get("reason", "")]
        for name, entry in row["contenders"].items():
            ratio = f" ({entry['against']['ratio']:.3f})" if "against" in entry else ""
            words.append(
                f"{name} {entry['median_s'] * 1e6:.1f} us {entry['tflops']:.0f} TFLOP/s "
                f"{entry['tb_per_s']:.2f} TB/s{ratio}"
            )
        print("  ".join(words), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["status"] == "ok" for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
