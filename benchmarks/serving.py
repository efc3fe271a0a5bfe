"""Ragged prefill, paged decode and mixed batches beside vLLM's FlashAttention-3, in one process.

    python benchmarks/serving.py --fa3 _vllm_fa3_C.abi3.so --json serving.json

The library of vLLM's FlashAttention-3 lies in its wheel, in vllm/vllm_flash_attn; torch must be of
the version that it was built for. Without --fa3 it is no peer.

FlashInfer is one where it can be imported, by its wrappers for ragged and paged batches. These are
planned on the host before they run, from lengths that are copied there: a plan serves all layers of
a step, so that it is timed by itself, as plan_s, and not in the calls. Its wheel is 62 MB of
sources, needs 16 packages beside torch, and is compiled by nvcc when it is first used, unless its
modules have been built ahead (FLASHINFER_DISABLE_JIT).

Calls are replayed from CUDA graphs, whose calls take turns through copies of the keys that exceed
the L2 cache together. Graphs of all contenders alternate in random order. What is compared is the
better of FlashAttention-3's two ways: with the splits of its own choice, and without. Before a case
is timed, each contender's output is held to the accuracy rule (docs/accuracy.md) on some sequences.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib
import importlib.util
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flashmoe_science as fm
from flashmoe_science.cli import environment
from flashmoe_science.cli.stats import compare, summary, verdicts

torch: Any = importlib.import_module("torch")

OURS, BEST = "flashmoe", "fa3"
_BEYOND_L2 = 160 << 20  # bytes of keys and values that calls take turns through
_MOST_COPIES = 8
_GRAPH_S = 0.002  # what a graph takes, about
_CHECKED = 6  # sequences of a case
_FLASHINFER_BYTES = 128 << 20  # of a wrapper's workspace
_PLANS = 7  # timed
_ROOM = 24 << 30  # bytes of keys and values at most
_KINDS = ("ragged", "decode", "several", "mixed")


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of sequences.

    Attributes:
        kind: "ragged", whose keys are packed as its queries are; "decode", "several" or "mixed",
            whose keys are in pages.
        name: For people.
        heads_q, heads_kv, dim: Extents of the bf16 tensors.
        queries, keys: Numbers per sequence.
        page: Rows of a page; None without pages.
    """

    kind: str
    name: str
    heads_q: int
    heads_kv: int
    dim: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    page: int | None = None

    @property
    def bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(self.keys) * self.heads_kv * self.dim * 2 * 2

    @property
    def flops(self) -> float:
        """FLOPs of both products, for the pairs that the causal mask leaves."""
        pairs = sum(q * k - q * (q - 1) // 2 for q, k in zip(self.queries, self.keys, strict=True))
        return 4.0 * pairs * self.heads_q * self.dim


def _lognormal(count: int, seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [min(8192, max(16, round(drawn.lognormvariate(6.0, 0.9)))) for _ in range(count)]


def cases() -> Iterator[Case]:
    """Documents of equal, of log-normal, of short lengths and one long one beside short ones;
    decoding from contexts of one length and of many; several queries a sequence, as speculation
    and short chunks of prompts have; prompts in chunks beside decoding, and speculation of four
    tokens."""
    of_heads = ((32, 8, 128), (64, 8, 64), (16, 8, 256))
    lengths = {
        "equal": [2048] * 16,
        "lognormal": _lognormal(64, 1),
        "many_short": [128] * 256,
        "one_long": [16384] + [256] * 64,
    }
    for heads_q, heads_kv, dim in of_heads:
        for name, each in lengths.items():
            text = f"{heads_q}/{heads_kv} d{dim} {name}"
            yield Case("ragged", text, heads_q, heads_kv, dim, tuple(each), tuple(each))
    of_contexts = {
        f"b{batch} ctx{context}": [context] * batch
        for batch, context in ((1, 1024), (1, 8192), (1, 131072), (8, 8192), (32, 2048),
                               (64, 4096), (128, 1024), (128, 4096))
    }  # fmt: skip
    drawn = random.Random(2)
    of_contexts["b64 ctxmixed"] = [round(2 ** drawn.uniform(7, 14)) for _ in range(64)]
    for heads_q, heads_kv, dim in ((32, 8, 128), (64, 8, 128), (8, 1, 128), *of_heads[1:]):
        pages = (1, 8, 16, 64, 256) if (heads_q, dim) == (32, 128) else (64,)
        for page in pages:
            for name, keys in of_contexts.items():
                text = f"{heads_q}/{heads_kv} d{dim} {name} page{page}"
                ones = (1,) * len(keys)
                yield Case("decode", text, heads_q, heads_kv, dim, ones, tuple(keys), page)
    for heads_q, heads_kv, dim in ((32, 8, 128), (64, 8, 128), (28, 4, 128), *of_heads[1:]):
        for each, batch, context in ((2, 64, 4096), (3, 32, 4096), (4, 200, 700), (4, 16, 8192),
                                     (8, 128, 1024), (16, 32, 4096), (64, 8, 4000)):  # fmt: skip
            text = f"{heads_q}/{heads_kv} d{dim} b{batch} ctx{context} q{each} page64"
            yield Case(
                "several", text, heads_q, heads_kv, dim, (each,) * batch, (context,) * batch, 64
            )
    mixed = {
        "chunk2048+64dec": ([2048] + [1] * 64, [10240] + [4096] * 64),
        "4xchunk512+128dec": ([512] * 4 + [1] * 128, [8192] * 4 + [2048] * 128),
        "spec4_b64": ([4] * 64, [4096] * 64),
    }
    for name, (queries, keys) in mixed.items():
        text = f"32/8 d128 {name} page64"
        yield Case("mixed", text, 32, 8, 128, tuple(queries), tuple(keys), 64)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Packed q [rows, heads, dim] and out; keys and values of all copies, packed or in pages; of
    each copy its page table, or its part of the packed keys."""

    q: Any
    k: tuple[Any, ...]
    v: tuple[Any, ...]
    tables: tuple[Any, ...]
    begins_q: Any
    begins_k: Any
    used: Any


def _begins(lengths: tuple[int, ...]) -> Any:
    ends = torch.tensor(lengths).cumsum(0)
    return torch.nn.functional.pad(ends, (1, 0)).to("cuda", torch.int32)


def make_inputs(case: Case, seed: int) -> Inputs:
    made = torch.Generator(device="cuda").manual_seed(seed)

    def normal(*shape: int) -> Any:
        """In parts: fp32 of all would take twice the room of the result."""
        out = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        for part in out.flatten().split(1 << 28):
            part.copy_(torch.randn(part.shape, generator=made, device="cuda"))
        return out

    copies = min(_MOST_COPIES, max(1, -(-_BEYOND_L2 // case.bytes)))
    q = normal(sum(case.queries), case.heads_q, case.dim)
    begins_q, begins_k = _begins(case.queries), _begins(case.keys)
    used = torch.tensor(case.keys, dtype=torch.int32, device="cuda")
    if case.page is None:
        rows = (sum(case.keys), case.heads_kv, case.dim)
        k, v = (tuple(normal(*rows) for _ in range(copies)) for _ in range(2))
        return Inputs(q, k, v, (None,) * copies, begins_q, begins_k, used)
    columns = -(-max(case.keys) // case.page)
    each = sum(-(-keys // case.page) for keys in case.keys)
    pages = (copies * each, case.page, case.heads_kv, case.dim)
    pool_k, pool_v = normal(*pages), normal(*pages)
    places = torch.randperm(pages[0], generator=made, device="cuda").to(torch.int32)
    tables = []
    for copy in range(copies):
        table = torch.zeros(len(case.keys), columns, dtype=torch.int32, device="cuda")
        taken = copy * each
        for row, keys in enumerate(case.keys):
            count = -(-keys // case.page)
            table[row, :count] = places[taken : taken + count]
            taken += count
        tables.append(table)
    return Inputs(
        q, (pool_k,) * copies, (pool_v,) * copies, tuple(tables), begins_q, begins_k, used
    )


def our_call(case: Case, inputs: Inputs, copy: int, out: Any, **options: Any) -> Any:
    sequences: dict[str, Any] = {"cu_seqlens_q": inputs.begins_q}
    if case.page is None:
        k, v = inputs.k[copy][None], inputs.v[copy][None]
        sequences["cu_seqlens_k"] = inputs.begins_k
    else:
        k, v = inputs.k[copy], inputs.v[copy]
        sequences |= {"page_table": inputs.tables[copy], "seqused_k": inputs.used}
    return fm.flash_attention(
        inputs.q[None], k, v, causal=True, out=out[None], **sequences,
        max_seqlen_q=max(case.queries), max_seqlen_k=max(case.keys), **options,
    )  # fmt: skip


def fa3_call(case: Case, inputs: Inputs, copy: int, out: Any, splits: int) -> Any:
    paged = case.page is not None
    return torch.ops._vllm_fa3_C.fwd(
        inputs.q, inputs.k[copy], inputs.v[copy], None, None, None, out,
        inputs.begins_q, None if paged else inputs.begins_k, None, None,
        inputs.used if paged else None, max(case.queries), max(case.keys), inputs.tables[copy],
        None, None, None, None, None, None, None, None, 1.0 / math.sqrt(case.dim), True, -1, 0,
        0.0, True, None, splits, None, 0, None, 1, 0, None,
    )  # fmt: skip


Calls = dict[str, Callable[[int, Any], Any]]


def contenders(case: Case, inputs: Inputs, fa3: bool) -> Calls:
    """By name; each takes the number of a copy and where to write."""
    made: Calls = {OURS: functools.partial(our_call, case, inputs)}
    if case.page is not None:
        made["flashmoe split_size=1024"] = functools.partial(
            our_call, case, inputs, split_size=1024
        )
    if fa3:
        made["fa3 own splits"] = functools.partial(fa3_call, case, inputs, splits=0)
        made["fa3 no splits"] = functools.partial(fa3_call, case, inputs, splits=1)
    return made


class FlashInfer:
    """Its wrapper for the batch of one copy, planned; and how long a plan takes."""

    def __init__(self, case: Case, inputs: Inputs, copy: int) -> None:
        flashinfer = importlib.import_module("flashinfer")
        self._cache = (inputs.k[copy], inputs.v[copy])
        workspace = torch.empty(_FLASHINFER_BYTES, dtype=torch.uint8, device=inputs.q.device)
        heads = (case.heads_q, case.heads_kv, case.dim)
        dtypes = {"q_data_type": inputs.q.dtype, "kv_data_type": inputs.q.dtype}
        self._plan: Callable[[], Any]
        if case.page is None:
            self._wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
            tables: tuple[Any, ...] = (inputs.begins_q, inputs.begins_k)
            self._plan = functools.partial(
                self._wrapper.plan, *tables, *heads, causal=True, **dtypes
            )
            return
        # The pages of all sequences one behind the other, and how full each one's last is.
        counts = (inputs.used + case.page - 1) // case.page
        table = inputs.tables[copy]
        taken = torch.arange(table.shape[1], device=table.device) < counts[:, None]
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        tables = (starts, table[taken], inputs.used - (counts - 1) * case.page)
        if max(case.queries) == 1:
            # Groups of query heads share what is read by its tensor cores.
            self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=case.heads_q != case.heads_kv
            )
            self._plan = functools.partial(self._wrapper.plan, *tables, *heads, case.page, **dtypes)
            return
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self._plan = functools.partial(
            self._wrapper.plan, inputs.begins_q, *tables, *heads, case.page, causal=True, **dtypes
        )

    def plan(self) -> float:
        """Seconds, until the host and the device have done it."""
        begin = time.perf_counter()
        self._plan()
        if self._cache[0].is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    def run(self, q: Any, out: Any) -> None:
        if self._cache[0].dim() == 3:  # packed rows
            self._wrapper.run(q, *self._cache, out=out)
        else:
            self._wrapper.run(q, self._cache, out=out)


def flashinfer_call(case: Case, inputs: Inputs) -> tuple[Callable[[int, Any], Any], float]:
    """Calls of a planned wrapper for each copy, and the median time of a plan."""
    wrappers = [FlashInfer(case, inputs, copy) for copy in range(len(inputs.k))]
    for wrapper in wrappers:
        wrapper.plan()
    planned = statistics.median(wrappers[0].plan() for _ in range(_PLANS))
    return lambda copy, out: wrappers[copy].run(inputs.q, out), planned


def _rounded(x: Any) -> Any:
    return x.to(torch.bfloat16).float()


def check(case: Case, inputs: Inputs, calls: Calls) -> dict[str, dict[str, Any]]:
    """Each contender's greatest error on some sequences, and what the accuracy rule allows."""
    outs = {name: torch.full_like(inputs.q, math.nan) for name in calls}
    for name, call in calls.items():
        call(0, outs[name])
    torch.cuda.synchronize()
    count = len(case.keys)
    chosen = sorted({round(i * (count - 1) / (_CHECKED - 1)) for i in range(_CHECKED)})
    errors = dict.fromkeys(calls, 0.0)
    plain_error = greatest = 0.0
    group = case.heads_q // case.heads_kv
    for at in chosen:
        begin, queries, keys = int(inputs.begins_q[at]), case.queries[at], case.keys[at]
        rows = torch.arange(max(0, queries - 64), queries, device="cuda")  # the last of many
        if case.page is None:
            first = int(inputs.begins_k[at])
            k, v = (x[0][first : first + keys] for x in (inputs.k, inputs.v))
        else:
            table = inputs.tables[0][at].long()
            k, v = (x[0][table].flatten(0, 1)[:keys] for x in (inputs.k, inputs.v))
        q = inputs.q[begin : begin + queries][rows]
        hidden = torch.arange(keys, device="cuda") > (rows + keys - queries)[:, None]

        def attend(dtype: Any, rounded: Callable[[Any], Any], q: Any = q, k: Any = k, v: Any = v,
                   hidden: Any = hidden) -> Any:  # fmt: skip
            found = []
            for head in range(case.heads_q):
                q1, k1, v1 = (
                    x.to(dtype) for x in (q[:, head], k[:, head // group], v[:, head // group])
                )
                scores = rounded(q1 @ k1.T / math.sqrt(case.dim)).masked_fill(hidden, -math.inf)
                found.append(rounded(rounded(scores.softmax(-1)) @ v1))
            return torch.stack(found, 1)

        ref = attend(torch.float64, lambda x: x)
        greatest = max(greatest, float(ref.abs().max()))
        plain_error = max(plain_error, float((attend(torch.float32, _rounded) - ref).abs().max()))
        for name, out in outs.items():
            error = (out[begin : begin + queries][rows].double() - ref).abs().max()
            errors[name] = max(errors[name], float("inf") if error.isnan() else float(error))
    bound = 2 * plain_error + 2.0 ** (math.floor(math.log2(greatest)) - 7)
    finite = {name: bool(out.isfinite().all()) for name, out in outs.items()}
    return {
        name: {
            "error": errors[name],
            "bound": bound,
            "passed": finite[name] and errors[name] <= bound,
        }
        for name in calls
    }


def capture(call: Callable[[int, Any], Any], inputs: Inputs) -> tuple[Any, int]:
    """A graph of calls that take turns through the copies, and how many it has."""
    out = torch.empty_like(inputs.q)
    copies = len(inputs.k)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call(0, out)
    torch.cuda.synchronize()
    start.record()
    call(0, out)
    end.record()
    end.synchronize()
    rounds = max(1, min(20, round(_GRAPH_S * 1e3 / max(start.elapsed_time(end), 1e-3) / copies)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for copy in range(copies):
                call(copy, out)
    graph.replay()
    torch.cuda.synchronize()
    return graph, rounds * copies


def measure(case: Case, fa3: bool, samples: int, seed: int) -> dict[str, Any]:
    inputs = make_inputs(case, seed)
    calls = contenders(case, inputs, fa3)
    planned: dict[str, float] = {}
    if importlib.util.find_spec("flashinfer") is not None:
        calls["flashinfer"], planned["flashinfer"] = flashinfer_call(case, inputs)
    accuracy = check(case, inputs, calls)
    launches = []
    our_call(case, inputs, 0, torch.empty_like(inputs.q))
    launches = [launch.kernel for launch in fm.last_launches()]
    row: dict[str, Any] = dataclasses.asdict(case) | {
        "bytes": case.bytes, "flops": case.flops, "launches": launches, "contenders": {}
    }  # fmt: skip
    failed = [name for name, found in accuracy.items() if not found["passed"]]
    if OURS in failed:
        return row | {"status": "void", "reason": f"accuracy: {accuracy[OURS]}"}
    timed = {name: call for name, call in calls.items() if name not in failed}
    graphs = {name: capture(call, inputs) for name, call in timed.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    shuffled = random.Random(seed)
    for _ in range(samples):
        order = list(graphs)
        shuffled.shuffle(order)
        for name in order:
            graph, count = graphs[name]
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e-3 / count)
    for name in calls:
        entry: dict[str, Any] = {"accuracy": accuracy[name]}
        if name in planned:
            entry["plan_s"] = planned[name]
        if name in times:
            entry |= summary(times[name])
            entry["tb_per_s"] = case.bytes / entry["median_s"] * 1e-12
            entry["tflops"] = case.flops / entry["median_s"] * 1e-12
            if name != OURS:
                entry["against"] = compare(times[OURS], times[name], seed)
        row["contenders"][name] = entry
    theirs = [e for n, e in row["contenders"].items() if n.startswith(BEST) and "against" in e]
    if theirs:
        row["best"] = min(theirs, key=lambda entry: float(entry["median_s"]))["against"]
    return row | {"status": "ok"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fa3", type=Path, metavar="LIBRARY", help="vLLM's FlashAttention-3")
    parser.add_argument("--kind", action="append", choices=_KINDS)
    parser.add_argument("--only", metavar="TEXT", help="cases whose name has this in it")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the record there")
    options = parser.parse_args(argv)
    if options.fa3 is not None:
        torch.ops.load_library(str(options.fa3))
    document: dict[str, Any] = {
        "operation": "serving",
        "title": "Ragged prefill, paged decode and mixed batches, beside vLLM's FlashAttention-3",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": environment.git_commit(),
        "device": {"device": "cuda:0", "name": fm.device_info("cuda:0").name},
        "environment": environment.for_record(),
        "samples": options.samples,
        "rows": [],
    }
    for case in cases():
        if options.kind and case.kind not in options.kind:
            continue
        if (options.only and options.only not in case.name) or case.bytes > _ROOM:
            continue
        try:
            row = measure(case, options.fa3 is not None, options.samples, options.seed)
        except (RuntimeError, ValueError) as error:  # such as no memory
            row = dataclasses.asdict(case) | {"status": "void", "reason": str(error)[:500]}
        row["queries"], row["keys"] = (
            [len(row[x]), min(row[x]), max(row[x]), sum(row[x])] for x in ("queries", "keys")
        )
        document["rows"].append(row)
        words = [f"{case.name:36s}", row["status"], row.get("reason", "")]
        for name, entry in row.get("contenders", {}).items():
            if "median_s" not in entry:
                words.append(f"{name}: {entry['accuracy']}")
                continue
            rate = (
                f"{entry['tflops']:.0f} TFLOP/s"
                if case.kind == "ragged"
                else f"{entry['tb_per_s']:.2f} TB/s"
            )
            ratio = f" ({entry['against']['ratio']:.3f})" if "against" in entry else ""
            if "plan_s" in entry:
                ratio += f" beside a plan of {entry['plan_s'] * 1e6:.0f} us"
            words.append(f"{name} {entry['median_s'] * 1e6:.1f} us {rate}{ratio}")
        print("  ".join(words), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    document["summary"] = {
        kind: verdicts(
            [row["best"] for row in document["rows"] if row["kind"] == kind and "best" in row]
        )
        for kind in _KINDS
    }
    print(json.dumps(document["summary"], indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["status"] == "ok" for row in document["rows"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
