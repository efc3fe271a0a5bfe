"""kv_append on a GPU beside torch's copy_ of as many bytes: benchmarks/kv_append.py [out.json]

Calls are captured in CUDA graphs, on sets of tensors in turn that together are larger than the L2,
but for the cases that say otherwise. Times are medians of rounds, in microseconds, each of both in
turn; `ratio` is the copy's time over ours.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import flashmoe_science as fm
import torch

DEVICE = "cuda:0"
L2_BYTES = 160 << 20  # what sets of tensors have together
CALLS = 24
ROUNDS = 9


class Case(NamedTuple):
    name: str
    sequences: int
    rows: int  # of a sequence
    heads: tuple[int, int]  # of q, 0 for none, and of k
    dim: int = 128
    rotary: int = 128  # rotated numbers; 0: none
    interleaved: bool = False
    packed: bool = False
    page: int = 16
    cold: bool = True
    dtype: torch.dtype = torch.bfloat16


CASES = [
    Case("prefill 8k, rotary, q", 4, 2048, (32, 8)),
    Case("prefill 8k packed, rotary, q", 8, 1024, (32, 8), packed=True),
    Case("prefill 8k packed of 512, rotary, q", 512, 16, (32, 8), packed=True),
    Case("prefill 8k, interleaved, q", 4, 2048, (32, 8), interleaved=True),
    Case("prefill 8k, rotary, no q", 4, 2048, (0, 8)),
    Case("prefill 8k, no rotary", 4, 2048, (0, 8), rotary=0),
    Case("prefill 32k, rotary, q", 4, 8192, (32, 8)),
    Case("prefill 32k, no rotary", 4, 8192, (0, 8), rotary=0),
    Case("prefill 8k, d64, rotary, q", 4, 2048, (64, 8), 64, 64),
    Case("prefill 8k, d256, half of it, q", 4, 2048, (16, 4), 256, 128),
    Case("prefill 8k, fp32, rotary, q", 4, 2048, (32, 8), dtype=torch.float32),
    Case("prefill 8k, odd halves, q", 4, 2048, (32, 8), rotary=100),
    Case("prefill 8k, page 1, rotary, q", 4, 2048, (32, 8), page=1),
    Case("decode 1, rotary, q", 1, 1, (32, 8), cold=False),
    Case("decode 64, rotary, q", 64, 1, (32, 8), cold=False),
    Case("decode 256, rotary, q", 256, 1, (32, 8), cold=False),
    Case("decode 256 packed, rotary, q", 256, 1, (32, 8), packed=True, cold=False),
    Case("decode 4096 packed, rotary, q", 4096, 1, (32, 8), packed=True),
    Case("decode 16384 packed, rotary, q", 16384, 1, (32, 8), packed=True),
]


def prepare(case: Case) -> tuple[Callable[[], None], Callable[[], None], int]:
    """A call, a copy of as many bytes, and the bytes that each reads."""
    heads_q, heads_kv = case.heads
    rows = (1, case.sequences * case.rows) if case.packed else (case.sequences, case.rows)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE).to(case.dtype)

    k, v = (make(*rows, heads_kv, case.dim) for _ in "kv")
    of_sequence = -(-(case.rows + 40) // case.page)
    pages = case.sequences * of_sequence
    caches = [torch.zeros(pages, case.page, heads_kv, case.dim, dtype=case.dtype, device=DEVICE)
              for _ in "kv"]  # fmt: skip
    int32 = {"dtype": torch.int32, "device": DEVICE}
    given: dict[str, Any] = {
        "page_table": torch.randperm(pages, device=DEVICE).view(case.sequences, -1).int(),
        "cache_seqlens": torch.randint(0, 40, (case.sequences,), **int32),
    }
    if case.packed:
        given["cu_seqlens"] = torch.arange(case.sequences + 1, **int32) * case.rows
    if case.rotary:
        angles = torch.randn(case.rows + 40, case.rotary // 2, device=DEVICE)
        given |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(),
                  "interleaved": case.interleaved}  # fmt: skip
    if heads_q:
        given["q"] = make(*rows, heads_q, case.dim)
        given["q_out"] = torch.empty_like(given["q"])
    count = k.numel() + v.numel() + (given["q"].numel() if heads_q else 0)
    source, target = (torch.empty(count, dtype=case.dtype, device=DEVICE) for _ in range(2))
    return (
        lambda: fm.kv_append(k, v, *caches, **given),
        lambda: target.copy_(source),
        count * k.element_size(),
    )


def captured(calls: list[Callable[[], None]]) -> torch.cuda.CUDAGraph:
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            calls[i % len(calls)]()
    return graph


def timed(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / CALLS


def measure(case: Case) -> dict[str, Any]:
    ours, copies = [], []
    total = 0
    while not ours or (case.cold and total < L2_BYTES and len(ours) < CALLS):
        call, copy, count = prepare(case)
        ours.append(call)
        copies.append(copy)
        total += 2 * count
    graphs = captured(ours), captured(copies)
    rounds = [[timed(graph) for graph in graphs] for _ in range(ROUNDS + 2)][2:]
    append, copy = (statistics.median(times) for times in zip(*rounds, strict=True))
    return {
        "case": case.name, "mib": count / 2**20, "append_us": append, "copy_us": copy,
        "ratio": copy / append, "tb_per_s": 2e-6 * count / append, "sets": len(ours),
    }  # fmt: skip


def main() -> None:
    torch.manual_seed(0)
    made = []
    for case in CASES:
        made.append(measure(case))
        m = made[-1]
        print(f"{m['case']:38} {m['mib']:8.2f} MiB  append {m['append_us']:8.2f} us  copy "
              f"{m['copy_us']:8.2f} us  ratio {m['ratio']:.3f}  {m['tb_per_s']:.2f} TB/s",
              flush=True)  # fmt: skip
        torch.cuda.empty_cache()
    if len(sys.argv) > 1:
        record = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__,
                  "library": fm.__version__, "cases": made}  # fmt: skip
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
