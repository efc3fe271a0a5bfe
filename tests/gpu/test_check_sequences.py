"""check_sequences on a GPU has what the CPU finds, and is in one graph with attention."""

from __future__ import annotations

from typing import Any

import flashmoe_science as fm
import numpy as np
import pytest
import torch
from flashmoe_science import SequenceFault

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"


def case(rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Random tables, sane and hostile numbers in turn."""
    batch, rows, keys = (int(rng.integers(1, n)) for n in (60, 40, 300))

    def numbers(*shape: int, most: int) -> torch.Tensor:
        made = rng.integers(0, most + 1, shape)
        strange = rng.choice([-(2**31), -1, most + 1, 2**31 - 1], shape)
        made = np.where(rng.random(shape) < 0.05, strange, made)
        return torch.from_numpy(made.astype(np.int32))

    given: dict[str, Any] = {}
    packed = bool(rng.integers(2))
    if packed:
        starts = np.sort(rng.integers(0, rows + 1, batch + 1))
        given["cu_seqlens_q"] = torch.from_numpy(starts.astype(np.int32))
        if rng.integers(2):
            given["cu_seqlens_q"] = numbers(batch + 1, most=rows)
    q = torch.zeros(1 if packed else batch, rows, 2, 16)
    way = rng.integers(4)
    pages = int(rng.integers(1, 90))
    if way == 0:
        k = torch.zeros(batch, keys, 1, 16)
    elif way == 1:
        k = torch.zeros(7, keys, 1, 16)
        given["batch_index"] = numbers(batch, most=6)
    elif way == 2:
        k = torch.zeros(1, keys, 1, 16)
        given["cu_seqlens_k"] = numbers(batch + 1, most=keys)
    else:
        size = int(rng.integers(1, 9))
        k, keys = torch.zeros(11, size, 1, 16), pages * size
        given["page_table"] = torch.randint(0, 11, (batch, pages), dtype=torch.int32)
        for _ in range(int(rng.integers(0, 9))):
            at = rng.integers(batch), rng.integers(pages)
            given["page_table"][at] = int(rng.choice([-1, 11, 2**31 - 1]))
    for name, most in (("seqused_q", rows), ("seqused_k", keys), ("k_begin", keys // 2)):
        if rng.integers(2):
            given[name] = numbers(batch, most=most)
    if not given:  # there is nothing to check then
        given["seqused_k"] = numbers(batch, most=keys)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        if rng.integers(3) == 0:
            given[name] = int(rng.integers(1, 50))
    return q, k, given


def test_it_finds_what_the_cpu_finds() -> None:
    rng = np.random.default_rng(0)
    every = SequenceFault(0)
    for _ in range(150):
        q, k, given = case(rng)
        want = fm.check_sequences(q, k, **given)
        there = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
        got = fm.check_sequences(q.to(DEVICE), k.to(DEVICE), **there)
        assert [x.kernel for x in fm.last_launches()] == ["check_sequences_sm89"]
        assert torch.equal(got.cpu(), want)
        for faults in want.tolist():
            every |= SequenceFault(faults)
    assert every == sum(SequenceFault)  # the cases have all of them


def test_one_graph_with_attention_tells_of_every_replay() -> None:
    q = torch.randn(4, 1, 8, 64, device=DEVICE).bfloat16()
    pages = torch.randn(30, 16, 2, 64, device=DEVICE).bfloat16()
    table = torch.arange(28, dtype=torch.int32, device=DEVICE).view(4, 7)
    used = torch.full((4,), 112, dtype=torch.int32, device=DEVICE)
    status = torch.full((4,), 77, dtype=torch.int32, device=DEVICE)
    given = {"page_table": table, "seqused_k": used}

    def step() -> torch.Tensor:
        fm.check_sequences(q, pages, **given, status=status)
        return fm.flash_attention(q, pages, pages, **given)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    graph.replay()
    assert status.tolist() == [0] * 4
    want = out.clone()
    table[2, 6] = 30
    used[1] = 113
    graph.replay()
    assert status.tolist() == [0, SequenceFault.SEQUSED_K, SequenceFault.PAGE_TABLE, 0]
    assert torch.equal(out[:2], want[:2]) and torch.equal(out[3], want[3])  # counts as no key
    assert not torch.equal(out[2], want[2]) and bool(out.isfinite().all())
