"""kv_gather on a GPU beside torch's copy_ of as many bytes: benchmarks/kv_gather.py [out.json]

Calls are captured in CUDA graphs, on sets of tensors in turn that together are larger than the L2,
but for the cases that say otherwise. Times are medians of rounds, in microseconds, each of all in
turn; `ratio` is the copy's time over ours, and `indexed` that of torch's indexing of whole pages by
the page table, which is what gathers without a kernel of its own, over ours. A copy of a cache of
fp8 writes twice what it reads, too: it is torch's conversion.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import flashmoe_science as fm
import torch
from kv_append import CALLS, DEVICE, L2_BYTES, ROUNDS, captured, timed


class Case(NamedTuple):
    name: str
    sequences: int
    keys: int  # of a sequence
    heads: int = 8
    dim: int = 128
    page: int = 16
    packed: bool = False
    fp8: bool = False
    keys_alone: bool = False
    cold: bool = True
    dtype: torch.dtype = torch.bfloat16


CASES = [
    Case("8 x 1024", 8, 1024),
    Case("8 x 1024 packed", 8, 1024, packed=True),
    Case("4 x 8192", 4, 8192),
    Case("4 x 8192 packed", 4, 8192, packed=True),
    Case("64 x 2048 packed", 64, 2048, packed=True),
    Case("1024 x 128 packed", 1024, 128, packed=True),
    Case("4 x 8192, page 1", 4, 8192, page=1),
    Case("4 x 8192, page 64", 4, 8192, page=64),
    Case("4 x 8192, d64", 4, 8192, 8, 64),
    Case("4 x 8192, d256", 4, 8192, 4, 256),
    Case("4 x 8192, fp32", 4, 8192, dtype=torch.float32),
    Case("4 x 8192, latents of 576", 4, 8192, 1, 576, keys_alone=True, page=64),
    Case("4 x 8192, fp8", 4, 8192, fp8=True),
    Case("4 x 8192 packed, fp8", 4, 8192, fp8=True, packed=True),
    Case("16 x 64", 16, 64, cold=False),
    Case("64 x 16 packed", 64, 16, packed=True, cold=False),
    Case("1 x 1", 1, 1, cold=False),
]


class Prepared(NamedTuple):
    ours: Callable[[], None]
    copy: Callable[[], None]
    indexed: Callable[[], None]
    read: int  # bytes
    written: int
    check: Callable[[], None]


def prepare(case: Case) -> Prepared:
    of_sequence = -(-case.keys // case.page)
    pages = case.sequences * of_sequence
    shape = (pages, case.page, case.heads, case.dim)
    caches = [torch.randn(shape, device=DEVICE).to(case.dtype) for _ in "kv"]
    caches = caches[:1] if case.keys_alone else caches
    given: dict[str, Any] = {}
    if case.fp8:
        caches = [x.to(torch.float8_e4m3fn) for x in caches]
        scale = torch.rand(case.heads, device=DEVICE)
        given = {"k_scale": scale} | ({} if case.keys_alone else {"v_scale": scale})
    table = torch.randperm(pages, device=DEVICE).view(case.sequences, -1).int()
    used = torch.full((case.sequences,), case.keys, dtype=torch.int32, device=DEVICE)
    given |= {"page_table": table, "seqused_k": used}
    rows = (case.sequences, case.keys)
    if case.packed:
        rows = (1, case.sequences * case.keys)
        starts = torch.arange(case.sequences + 1, device=DEVICE) * case.keys
        given["cu_seqlens_k"] = starts.int()
    results = [torch.empty(*rows, case.heads, case.dim, dtype=case.dtype, device=DEVICE)
               for _ in caches]  # fmt: skip
    outputs = dict(zip("kv", results, strict=False))
    count = sum(x.numel() for x in results)
    source = torch.empty(count, dtype=case.dtype, device=DEVICE).to(caches[0].dtype)
    target = torch.empty(count, dtype=case.dtype, device=DEVICE)
    flat = table.flatten().long()

    def indexed() -> None:
        for cache in caches:
            whole = cache.view(torch.uint8)[flat].view(cache.dtype) if case.fp8 else cache[flat]
            if case.fp8:
                whole.to(case.dtype)

    def call() -> None:
        fm.kv_gather(*caches, **given, **outputs)

    def check() -> None:
        for got, cache in zip(results, caches, strict=True):
            want = cache.float()[flat].view(case.sequences, -1, case.heads, case.dim)
            want = want[:, : case.keys] * (scale[:, None] if case.fp8 else 1)
            assert torch.equal(got.view(want.shape), want.to(case.dtype)), case

    return Prepared(
        call, lambda: target.copy_(source), indexed, count * source.element_size(),
        count * target.element_size(), check,
    )  # fmt: skip


def measure(case: Case) -> dict[str, Any]:
    sets: list[Prepared] = []
    while not sets or (
        case.cold and len(sets) * (sets[0].read + sets[0].written) < L2_BYTES and len(sets) < CALLS
    ):
        sets.append(prepare(case))
    graphs = [captured([getattr(x, name) for x in sets]) for name in ("ours", "copy", "indexed")]
    sets[0].check()
    rounds = [[timed(graph) for graph in graphs] for _ in range(ROUNDS + 2)][2:]
    gather, copy, indexed = (statistics.median(times) for times in zip(*rounds, strict=True))
    moved = sets[0].read + sets[0].written
    return {
        "case": case.name, "mib": sets[0].written / 2**20, "gather_us": gather, "copy_us": copy,
        "indexed_us": indexed, "ratio": copy / gather, "indexed": indexed / gather,
        "tb_per_s": 1e-6 * moved / gather, "sets": len(sets),
    }  # fmt: skip


def main() -> None:
    torch.manual_seed(0)
    made = []
    for case in CASES:
        made.append(measure(case))
        m = made[-1]
        print(f"{m['case']:28} {m['mib']:8.2f} MiB  gather {m['gather_us']:8.2f} us  copy "
              f"{m['copy_us']:8.2f} us  ratio {m['ratio']:.3f}  indexed {m['indexed']:.2f}  "
              f"{m['tb_per_s']:.2f} TB/s", flush=True)  # fmt: skip
        torch.cuda.empty_cache()
    if len(sys.argv) > 1:
        record = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__,
                  "library": fm.__version__, "cases": made}  # fmt: skip
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
