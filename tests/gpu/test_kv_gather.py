"""kv_gather on a GPU: what goes where, to the bit beside a loop and the CPU; nothing else is
touched, whatever the tables hold."""

from __future__ import annotations

from typing import Any

import flashmoe_science as fm
import numpy as np
import pytest
import torch
from gather_cases import POISON, WAYS, Case, assert_right
from gpu import memory
from gpu.memory import to_numpy, to_torch

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
LARGE = {"most_batch": 40, "most_seq": 60, "most_heads": 9, "most_dim": 256}


def gathered(case: Case) -> list[np.ndarray]:
    """By the GPU, each tensor in a buffer of poison."""
    axes = memory.contiguous(4)
    place = lambda x: memory.place_values(to_torch(x), axes)  # noqa: E731
    caches, results = list(map(place, case.given_caches())), list(map(place, case.results()))
    tables = {
        name: memory.place_values(to_torch(x), memory.contiguous(x.ndim))
        for name, x in case.given.items()
    }
    inputs = [*caches, *tables.values()]
    for each in (*inputs, *results):
        each.remember()
    fm.kv_gather(
        *(x.view for x in caches), layout=case.layout,
        **{name: x.view for name, x in tables.items()},
        **{name: x.view for name, x in zip("kv", results, strict=False)},
    )  # fmt: skip
    torch.cuda.synchronize()
    assert all(x.intact(inside=True) for x in inputs)
    assert all(x.intact() for x in results)
    return [to_numpy(x.view, case.dtype) for x in results]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_goes_where(dtype: str, way: str, packed: bool) -> None:
    rng = np.random.default_rng([len(dtype), len(way), packed])
    for _ in range(20):
        case = Case(rng, dtype, way=way, packed=packed)
        assert_right(case, gathered(case))
        if case.seq:
            kernels = [x.kernel for x in fm.last_launches()]
            assert kernels == [f"kv_gather_sm89_{DTYPES[dtype]}"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_many_rows_of_many_heads(way: str, packed: bool) -> None:
    rng = np.random.default_rng([len(way), packed])
    for i in range(8):
        case = Case(rng, tuple(DTYPES)[i % 3], way=way, packed=packed, **LARGE)
        assert_right(case, gathered(case))


def test_rows_of_many_parts() -> None:
    """One row goes to many blocks."""
    rng = np.random.default_rng(8)
    for _ in range(3):
        case = Case(rng, "bfloat16", most_heads=128, dim=1024, most_seq=20, most_batch=6)
        assert_right(case, gathered(case))


@pytest.mark.parametrize("batch", [3, 40, 700])
def test_offsets_in_no_order(batch: int) -> None:
    rng = np.random.default_rng(batch)
    for _ in range(5):
        case = Case(rng, "bfloat16", packed=True, overlapping=True, most_batch=batch, most_seq=20)
        assert_right(case, gathered(case))


@pytest.mark.parametrize("scales", ["none", "one", "heads", "pages"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_fp8_has_the_bits_of_the_cpu(dtype: Any, scales: str) -> None:
    """Every number of e4m3; of a NaN only that it is one."""
    bits = torch.arange(256, dtype=torch.uint8).repeat(40 * 16 * 4 * 128 // 256)
    cache = bits.view(torch.float8_e4m3fn).view(40, 16, 4, 128)
    rng = torch.Generator().manual_seed(len(scales))
    table = torch.randint(-2, 42, (5, 9), generator=rng, dtype=torch.int32)
    used = torch.randint(-1, 160, (5,), generator=rng, dtype=torch.int32)
    shape = {"one": (), "heads": (4,), "pages": (40, 4)}.get(scales)
    scale = None if shape is None else torch.rand(shape, generator=rng) + 0.3
    given = {"page_table": table, "seqused_k": used, "k_scale": scale, "v_scale": scale}
    made = []
    for device in ("cpu", DEVICE):
        k, v = (torch.full((5, 144, 4, 128), POISON, dtype=dtype, device=device) for _ in "kv")
        there = {n: None if x is None else x.to(device) for n, x in given.items()}
        fm.kv_gather(cache.to(device), cache.to(device), **there, k=k, v=v)
        made.append((k.cpu(), v.cpu()))
    for cpu, gpu in zip(*made, strict=True):
        assert torch.equal(cpu.isnan(), gpu.isnan())
        assert torch.equal(cpu.nan_to_num(), gpu.nan_to_num())
    name = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    assert fm.last_launches()[0].kernel == f"kv_gather_sm89_{name}_fp8"


def test_one_graph_serves_any_lengths() -> None:
    """The tables are read when the graph runs, and what no key goes to stays as it is."""
    rng = np.random.default_rng(6)
    pages = torch.randn(64, 16, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    table = torch.zeros(4, 8, dtype=torch.int32, device=DEVICE)
    used = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    starts = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    k = torch.empty(1, 512, 2, 64, device=DEVICE, dtype=torch.bfloat16)
    v = torch.empty_like(k)
    call = lambda: fm.kv_gather(  # noqa: E731
        pages, pages, page_table=table, seqused_k=used, cu_seqlens_k=starts, k=k, v=v
    )
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(5):
        lengths = rng.integers(0, 129, 4)
        places = rng.permutation(64)[:32].reshape(4, 8)
        table.copy_(torch.from_numpy(places))
        used.copy_(torch.from_numpy(lengths))
        starts.copy_(torch.from_numpy(np.cumsum([0, *lengths])))
        k.fill_(POISON)
        v.fill_(POISON)
        graph.replay()
        want = [pages[places[b]].flatten(0, 1)[:n] for b, n in enumerate(lengths)]
        want = torch.cat([*want, torch.full_like(k[0, int(lengths.sum()) :], POISON)])
        assert torch.equal(k[0], want) and torch.equal(v[0], want)


def test_attention_over_what_is_gathered_has_the_bits_of_attention_over_packed_rows() -> None:
    """On one stream, without a synchronisation between them."""
    rng = torch.Generator(device=DEVICE).manual_seed(1)
    pages = [torch.randn(80, 16, 2, 64, device=DEVICE, generator=rng).half() for _ in "kv"]
    table = torch.randperm(80, generator=rng, device=DEVICE).view(4, 20).int()
    used = torch.tensor([320, 1, 33, 200], dtype=torch.int32, device=DEVICE)
    starts = torch.nn.functional.pad(used.cumsum(0), (1, 0)).int()
    q = torch.randn(1, 554, 4, 64, device=DEVICE, generator=rng).half()
    rows = [torch.cat([x[table[b]].flatten(0, 1)[: used[b]] for b in range(4)])[None]
            for x in pages]  # fmt: skip
    own = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "causal": True}
    want = fm.flash_attention(q, *rows, **own)
    k, v = fm.kv_gather(*pages, page_table=table, seqused_k=used, cu_seqlens_k=starts, rows=554)
    assert torch.equal(k, rows[0]) and torch.equal(v, rows[1])
    assert torch.equal(fm.flash_attention(q, k, v, **own), want)
