"""merge_states on a GPU beside torch: benchmarks/merge_states.py [--compile] [out.json]

Beside a copy_ of as many bytes as are read and written, and the same in torch's operations: eager,
and with --compile by torch.compile. Calls are captured in CUDA graphs, on sets of tensors in turn
that together are larger than the L2, but for the cases that say otherwise. Times are medians of
rounds, in microseconds, each of all in turn; `ratio` is the copy's time over ours.
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

BF16, FP32 = torch.bfloat16, torch.float32


class Case(NamedTuple):
    name: str
    partials: int
    tokens: int
    heads: int = 32
    dim: int = 128
    dtype: torch.dtype = BF16
    prior: torch.dtype | None = None  # out is of its dtype, and in its place
    cold: bool = True
    empty: float = 0.0  # share of rows without a key, of each partial
    heads_first: bool = False


CASES = [
    Case("2 of 8192 tokens", 2, 8192),
    Case("2 of 8192 tokens, bhsd", 2, 8192, heads_first=True),
    Case("2 of 8192 tokens, d64", 2, 8192, dim=64),
    Case("2 of 8192 tokens, d256", 2, 8192, 16, 256),
    Case("2 of 8192 tokens, fp32", 2, 8192, dtype=FP32),
    Case("ring: bf16 into fp32, 8192 tokens", 1, 8192, prior=FP32),
    Case("ring: bf16 into bf16, 8192 tokens", 1, 8192, prior=BF16),
    Case("ring: bf16 into fp32, 32768 tokens", 1, 32768, prior=FP32),
    Case("4 of 8192 tokens", 4, 8192),
    Case("8 of 8192 tokens", 8, 8192),
    Case("32 of 2048 tokens", 32, 2048),
    Case("8 of 8192 tokens, half empty", 8, 8192, empty=0.5),
    Case("2 of 256 tokens", 2, 256),
    Case("2 of 64 tokens, warm", 2, 64, cold=False),
    Case("8 of 64 tokens, warm", 8, 64, cold=False),
    Case("64 of 16 tokens, warm", 64, 16, cold=False),
    Case("2 of 1 token, warm", 2, 1, cold=False),
]


def in_torch(
    outs: torch.Tensor, lses: torch.Tensor, heads_first: bool, dtype: torch.dtype
) -> torch.Tensor:
    largest = lses.amax(0)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    powers = (lses - largest).exp()
    weights = powers / powers.sum(0)
    weights = weights if heads_first else weights.transpose(2, 3)
    return (weights[..., None] * outs).sum(0).to(dtype)


def pair_in_torch(
    first: torch.Tensor, first_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    merged = torch.logaddexp(first_lse, lse)
    by_row = lambda x: (x - merged).exp().transpose(1, 2)[..., None]  # noqa: E731
    return (first * by_row(first_lse) + out * by_row(lse)).to(first.dtype), merged


class Prepared(NamedTuple):
    ours: Callable[[], Any]
    copy: Callable[[], Any]
    eager: Callable[[], Any]
    compiled: Callable[[], Any]
    bytes: int


def prepare(case: Case, compiled: tuple[Any, Any]) -> Prepared:
    rows = (case.heads, case.tokens) if case.heads_first else (case.tokens, case.heads)
    outs = torch.randn(case.partials, 1, *rows, case.dim, device=DEVICE).to(case.dtype)
    lses = torch.randn(case.partials, 1, case.heads, case.tokens, device=DEVICE) * 3
    if case.empty:
        lses[1:][torch.rand_like(lses[1:]) < case.empty] = -torch.inf
    out = torch.empty(outs.shape[1:], dtype=case.prior or case.dtype, device=DEVICE)
    lse = torch.empty(lses.shape[1:], device=DEVICE)
    layout = "bhsd" if case.heads_first else "bshd"
    moved = sum(x.numel() * x.element_size() for x in (lses, lse, out))
    moved += int(outs.numel() * outs.element_size() * (1 - case.empty))
    if case.prior is None:
        ours = lambda: fm.merge_states(outs, lses, layout=layout, out=out, lse=lse)  # noqa: E731
        arguments: tuple[Any, ...] = (outs, lses, case.heads_first, case.dtype)
        eager, other = in_torch, compiled[0]
        want = in_torch(outs, lses, case.heads_first, FP32)
    else:
        out.copy_(torch.randn_like(out))
        lse.copy_(torch.randn_like(lse))
        moved += sum(x.numel() * x.element_size() for x in (out, lse))
        arguments = (out, lse, outs[0], lses[0])
        want = pair_in_torch(out.float(), *arguments[1:])[0]
        ours = lambda: fm.merge_states(  # noqa: E731
            (out, outs[0]), (lse, lses[0]), out=out, lse=lse
        )
        eager, other = pair_in_torch, compiled[1]
    ours()
    close = {"rtol": 1e-5, "atol": 1e-5} if out.dtype == FP32 else {"rtol": 2**-7, "atol": 1e-4}
    torch.testing.assert_close(out.float(), want, **close)
    source = torch.empty(moved // 2, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return Prepared(
        ours, lambda: target.copy_(source), lambda: eager(*arguments), lambda: other(*arguments),
        moved,
    )  # fmt: skip


def measure(case: Case, compiled: tuple[Any, Any]) -> dict[str, Any]:
    sets: list[Prepared] = []
    while not sets or (case.cold and len(sets) * sets[0].bytes < L2_BYTES and len(sets) < CALLS):
        sets.append(prepare(case, compiled))
    names = ["ours", "copy", "eager"] + (["compiled"] if compiled[0] is not None else [])
    graphs = [captured([getattr(x, name) for x in sets]) for name in names]
    rounds = [[timed(graph) for graph in graphs] for _ in range(ROUNDS + 2)][2:]
    times = dict(zip(names, map(statistics.median, zip(*rounds, strict=True)), strict=True))
    return {
        "case": case.name, "mib": sets[0].bytes / 2**20,
        **{f"{name}_us": time for name, time in times.items()},
        "ratio": times["copy"] / times["ours"], "tb_per_s": 1e-6 * sets[0].bytes / times["ours"],
        "sets": len(sets),
    }  # fmt: skip


def main() -> None:
    torch.manual_seed(0)
    arguments = [x for x in sys.argv[1:] if x != "--compile"]
    compiled: tuple[Any, Any] = (None, None)
    if "--compile" in sys.argv:
        compiled = tuple(torch.compile(f, dynamic=False) for f in (in_torch, pair_in_torch))
        torch._dynamo.config.recompile_limit = 64
    made = []
    for case in CASES:
        m = measure(case, compiled)
        made.append(m)
        others = "  ".join(
            f"{name} {m[f'{name}_us']:8.2f} us" for name in ("eager", "compiled")
            if f"{name}_us" in m
        )  # fmt: skip
        print(f"{m['case']:36} {m['mib']:8.2f} MiB  ours {m['ours_us']:8.2f} us  copy "
              f"{m['copy_us']:8.2f} us  ratio {m['ratio']:.3f}  {others}  "
              f"{m['tb_per_s']:.2f} TB/s", flush=True)  # fmt: skip
        torch.cuda.empty_cache()
    if arguments:
        record = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__,
                  "library": fm.__version__, "cases": made}  # fmt: skip
        with open(arguments[0], "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
