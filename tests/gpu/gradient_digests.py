"""What gradients are, as digests, and how many multiprocessors made them.

    CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25 python tests/gpu/gradient_digests.py sm90

A program of its own, since a process keeps the multiprocessors that NVIDIA's MPS has given it.
Inputs come from the CPU: what torch or the forward makes on a GPU may have other last bits there.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import capi
import torch
from gpu import backward, memory
from gpu.backward import Call, Case

DEVICE = "cuda:0"


def _cases(family: str) -> list[Case]:
    """More items than multiprocessors, of heads that descend and that ascend, and a call whose
    items run in waves by sm90."""
    each = [
        Case(kernel=family, seq_q=700, seq_k=700, heads_q=40, heads_kv=40, dim=dim, dim_v=dim_v,
             causal=causal)
        for dim, dim_v in backward.COMPILED[family]
        for causal in ("none", "bottom_right")
    ]  # fmt: skip
    waves = Case(kernel=family, batch=2, seq_q=2100, seq_k=2100, heads_q=64, heads_kv=8, dim=128,
                 dim_v=128, causal="bottom_right")  # fmt: skip
    return [*each, waves]


def _inputs(case: Case) -> dict[str, memory.Placed]:
    """`out` and `lse` are of nothing, but no gradient of these is infinite."""
    generator = torch.Generator().manual_seed(case.dim + case.heads_kv)
    placed = {}
    for name in ("q", "k", "v", "dout", "out", "lse"):
        dtype = torch.float32 if name == "lse" else torch.bfloat16
        values = torch.randn(case.shape_of(name), generator=generator)
        values = (values + 8.0 if name == "lse" else values).to(dtype)
        placed[name] = memory.place_values(values.to(DEVICE))
    return placed


def digests(family: str) -> dict[str, str]:
    """The digest of each case."""
    made = {}
    for case in _cases(family):
        outputs = backward.make_gradients(case, DEVICE)
        Call(case, {**_inputs(case), **outputs}).run()
        sums = hashlib.sha256()
        for name, x in backward.logical(outputs).items():
            assert x.isfinite().all(), f"{case}: {name}"
            sums.update(memory.bits(x.contiguous()).cpu().numpy().tobytes())
        made[str(case)] = sums.hexdigest()
    return made


def report(family: str) -> dict[str, Any]:
    made = digests(family)
    blocks = capi.last_launches()[1].grid[0]  # of the last case
    return {"blocks": blocks, "digests": made}


if __name__ == "__main__":
    print(json.dumps(report(sys.argv[1])))
