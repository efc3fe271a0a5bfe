"""Gradients of ragged batches beside those of dense ones: times in microseconds, as JSON.

    python benchmarks/attention_ragged_backward.py times.json [family ...]

Equal lengths packed one behind the other, beside our dense backward of the same (`dense`, of the
plan's choice, and `same`, by the kernel of the same family); and documents of other lengths, whose
time is beside that of a dense batch of as much work. Medians of rounds in which all take turns.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from typing import Any

import flashmoe_science as fm
import torch

TOKENS = 16384
ROUNDS = 12
DEVICE = "cuda"


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def starts(lengths: list[int]) -> torch.Tensor:
    return int32([sum(lengths[:b]) for b in range(len(lengths) + 1)])


class Batch:
    """Packed tensors, out and lse of the forward."""

    def __init__(self, lengths: list[int], heads: int, heads_kv: int, dim: int, causal: bool):
        total = sum(lengths)
        self.lengths, self.causal = lengths, causal

        def normal(heads: int) -> torch.Tensor:
            return torch.randn(1, total, heads, dim, device=DEVICE, dtype=torch.bfloat16)

        self.q, self.dout = normal(heads), normal(heads)
        self.k, self.v = normal(heads_kv), normal(heads_kv)
        offsets = starts(lengths)
        self.tables = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets,
                       "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}  # fmt: skip
        self.out, self.lse = fm.flash_attention(
            self.q, self.k, self.v, causal=causal, return_lse=True, **self.tables
        )

    def ragged(self, family: str | None) -> Callable[[], Any]:
        return lambda: fm.flash_attention_backward(
            self.dout, self.q, self.k, self.v, self.out, self.lse, causal=self.causal,
            kernel=family, **self.tables,
        )  # fmt: skip

    def dense(self, family: str | None) -> Callable[[], Any]:
        """The dense batch, for equal lengths."""
        count, length = len(self.lengths), self.lengths[0]
        dout, q, k, v = (
            x[0].unflatten(0, (count, length)) for x in (self.dout, self.q, self.k, self.v)
        )
        out, lse = fm.flash_attention(q, k, v, causal=self.causal, return_lse=True)
        return lambda: fm.flash_attention_backward(
            dout, q, k, v, out, lse, causal=self.causal, kernel=family
        )


def times(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    each: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS + 2):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(200_000)  # what the host does is done before the work begins
            begin.record()
            call()
            end.record()
            end.synchronize()
            each[name].append(1e3 * begin.elapsed_time(end))
    return {name: statistics.median(x[2:]) for name, x in each.items()}


def dense_name(ragged: str) -> str:
    return ragged.replace("_ragged", "")


def main() -> None:
    path, *named = sys.argv[1:]
    families: list[str | None] = [*named] or [None]
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for dim in (64, 128):
        heads = 2048 // dim
        for causal in (False, True):
            for length in (512, 2048, 8192):
                batch = Batch([length] * (TOKENS // length), heads, heads, dim, causal)
                calls = {"dense": batch.dense(None)}
                for family in families:
                    call = batch.ragged(family)
                    call()
                    own = next(
                        x.kernel for x in fm.last_launches() if "_ragged" in x.kernel
                        and "prologue" not in x.kernel and "sinks" not in x.kernel
                    )  # fmt: skip
                    calls[f"ragged {own}"] = call
                    calls[f"same {own}"] = batch.dense(dense_name(own))
                made = times(calls)
                rows.append({"dim": dim, "causal": causal, "length": length, "us": made})
                print(dim, "causal" if causal else "full", length, *(
                    f"{name.replace('attention_backward_', '')}: {us:.0f}"
                    for name, us in made.items()
                ), flush=True)  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "many_short": torch.randint(16, 257, (240,), generator=generator).tolist(),
        "tiny": [8] * 4096,
        "mixed": torch.randint(100, 4097, (16,), generator=generator).tolist(),
        "one_long": [16384] + [64] * 128,
    }
    for name, lengths in shapes.items():
        for heads_kv in (16, 4):
            batch = Batch(lengths, 16, heads_kv, 128, True)
            made = times({str(family): batch.ragged(family) for family in families})
            rows.append({"shape": name, "tokens": sum(lengths), "heads_kv": heads_kv, "us": made})
            print(name, sum(lengths), f"16/{heads_kv}", {n: round(x) for n, x in made.items()},
                  flush=True)  # fmt: skip
    with open(path, "w") as file:
        json.dump({"device": torch.cuda.get_device_name(), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
