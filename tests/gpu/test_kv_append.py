"""kv_append on a GPU: what it writes where, beside float64 and to the bit beside the CPU; nothing
else is touched, whatever the tables hold."""

from __future__ import annotations

import itertools
from typing import Any

import flashmoe_science as fm
import numpy as np
import pytest
import torch
from append_cases import POISON, Case, check
from gpu import memory
from gpu.memory import to_numpy, to_torch

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
WAYS = ("plain", "indexed", "paged", "slots")
ROTARIES = ("", "neox", "interleaved")
LARGE = {"most_batch": 40, "most_seq": 60, "most_heads": 9, "most_dim": 256}


class Placed:
    """A case's tensors on the GPU, each in a buffer of poison."""

    def __init__(self, case: Case) -> None:
        self.case = case
        axes = memory.contiguous(4)
        rows = lambda x: memory.place_values(to_torch(x), axes)  # noqa: E731
        self.k, self.v, *self.caches = map(rows, (case.k, case.v, *case.caches))
        self.given: dict[str, Any] = {}
        self.inputs = [self.k, self.v]
        for name, x in case.given.items():
            if not isinstance(x, np.ndarray):
                self.given[name] = x
                continue
            placed = memory.place_values(to_torch(x), memory.contiguous(x.ndim))
            self.inputs.append(placed)
            self.given[name] = placed.view
        self.q_out = None
        if "q" in case.given:
            self.q_out = rows(np.full(case.given["q"].shape, POISON).astype(case.dtype))
        self.outputs = [*self.caches, *([self.q_out] if self.q_out else [])]

    def call(self) -> list[np.ndarray]:
        for each in (*self.inputs, *self.outputs):
            each.remember()
        out = None if self.q_out is None else self.q_out.view
        made = fm.kv_append(
            self.k.view, self.v.view, *(x.view for x in self.caches), layout=self.case.layout,
            q_out=out, **self.given,
        )  # fmt: skip
        assert made is out
        torch.cuda.synchronize()
        assert all(x.intact(inside=True) for x in self.inputs)
        assert all(x.intact() for x in self.outputs)
        return [to_numpy(x.view, self.case.dtype) for x in self.outputs]


def by_cpu(case: Case) -> list[np.ndarray]:
    rotated = case.call()
    return [*case.caches, *([] if rotated is None else [rotated])]


def assert_as_cpu(case: Case) -> None:
    got = Placed(case).call()
    for ours, cpu in zip(got, by_cpu(case), strict=True):
        assert ours.tobytes() == cpu.tobytes()


@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_goes_where(dtype: str, way: str, rotary: str) -> None:
    rng = np.random.default_rng([len(dtype), len(way), len(rotary)])
    for _ in range(20):
        case = Case(rng, dtype, way=way, rotary=rotary)
        got = Placed(case).call()
        check(case, got[:2], got[2] if len(got) > 2 else None)
        launches = fm.last_launches()
        if case.batch and case.k.size:
            packed = "packed_" if "cu_seqlens" in case.given else ""
            assert [x.kernel for x in launches] == [f"kv_append_sm89_{packed}{_name(dtype)}"]
        for ours, cpu in zip(got, by_cpu(case), strict=True):
            assert ours.tobytes() == cpu.tobytes()


def _name(dtype: str) -> str:
    return {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}[dtype]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("way", WAYS)
def test_many_rows_of_many_heads(way: str, rotary: str, packed: bool) -> None:
    if packed and way == "slots":
        pytest.skip("slots say where each row goes")
    rng = np.random.default_rng([len(way), len(rotary), packed])
    for i in range(12):
        dtype = tuple(DTYPES)[i % 3]
        assert_as_cpu(Case(rng, dtype, way=way, rotary=rotary, packed=packed, **LARGE))


@pytest.mark.parametrize("rotary", ["neox", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_rotated_dimensions(dtype: str, rotary: str) -> None:
    rng = np.random.default_rng(3)
    for pairs, wide in itertools.product(range(1, 33), (False, True)):
        assert_as_cpu(Case(rng, dtype, rotary=rotary, wide=wide, dim=64, pairs=pairs, way="plain"))


@pytest.mark.parametrize("rotary", ["neox", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_on_any_address(dtype: str, rotary: str) -> None:
    """Rows of cosines and sines need not begin on a boundary."""
    rng = np.random.default_rng(4)
    for offset, gap in itertools.product((0, 1, 3), (0, 1, 8)):
        case = Case(rng, dtype, rotary=rotary, dim=24, pairs=8, way="paged")
        placed = Placed(case)
        for name in ("rotary_cos", "rotary_sin"):
            how = memory.Placement((0, 1), (0, gap), offset)
            placed.given[name] = memory.place_values(to_torch(case.given[name]), how).view
        got = placed.call()
        for ours, cpu in zip(got, by_cpu(case), strict=True):
            assert ours.tobytes() == cpu.tobytes()


@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("batch", [3, 40, 700])
def test_offsets_in_no_order(batch: int, rotary: str) -> None:
    """Rows that several sequences have go to the places of each."""
    rng = np.random.default_rng([batch, len(rotary)])
    for _ in range(5):
        case = Case(rng, "bfloat16", way="paged", packed=True, rotary=rotary, overlapping=True,
                    queries=False, most_batch=batch, most_seq=20)  # fmt: skip
        # Pages of their own, so that no two rows go to one place.
        case.given["page_table"] = _distinct_pages(case, rng)
        assert_as_cpu(case)


def _distinct_pages(case: Case, rng: np.random.Generator) -> np.ndarray:
    pages = case.bshd(case.caches[0]).shape[0]
    table = rng.permutation(np.arange(-2, pages + 3))[: 7 * case.batch]
    return table.reshape(case.batch, 7).astype(np.int32)


_EXTREME = np.array([-(2**31), -1, 0, 1, 3, 5, 1000, 2**31 - 2, 2**31 - 1])


@pytest.mark.parametrize("way", WAYS)
def test_numbers_that_lead_nowhere(way: str) -> None:
    """Nothing outside of the tensors is written, and what is read there would be NaN."""
    rng = np.random.default_rng(6)
    for i in range(20):
        case = Case(rng, tuple(DTYPES)[i % 3], way=way, most_batch=9, most_heads=2)
        for name, x in case.given.items():
            if isinstance(x, np.ndarray) and x.dtype.kind == "i":
                numbers = _EXTREME if x.dtype == np.int32 else np.append(
                    _EXTREME, [-(2**63), 2**63 - 1, 2**40]
                )  # fmt: skip
                case.given[name] = rng.choice(numbers, x.shape).astype(x.dtype)
        for out in Placed(case).call():
            assert np.isfinite(out.astype(np.float64)).all()


def test_queries_in_place() -> None:
    rng = np.random.default_rng(2)
    for rotary, pairs in itertools.product(("neox", "interleaved"), (3, 8)):
        how = {"rotary": rotary, "way": "slots", "layout": "bshd", "dim": 32, "pairs": pairs}
        case = Case(rng, "bfloat16", **how)
        while case.given["q"].size == 0:
            case = Case(rng, "bfloat16", **how)
        want = Placed(case).call()[2]
        placed = Placed(case)
        placed.inputs = [x for x in placed.inputs if x.view is not placed.given["q"]]
        q = placed.given["q"]
        kept = np.where(want.astype(np.float32) == POISON, case.given["q"], want)
        out = fm.kv_append(placed.k.view, placed.v.view, *(x.view for x in placed.caches),
                           **placed.given, q_out=q)  # fmt: skip
        assert out is q and to_numpy(q, case.dtype).tobytes() == kept.tobytes()


def test_slots_and_rows_beyond_2_to_the_31() -> None:
    """In a cache whose offsets do not fit in 32 bits."""
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of GPU memory")
    rows, dim = (1 << 23) + 64, 256
    k_cache = torch.empty(rows // 16, 16, 1, dim, dtype=torch.bfloat16, device=DEVICE)
    v_cache = torch.empty(rows // 16, 16, 1, 8, dtype=torch.bfloat16, device=DEVICE)
    k = torch.randn(1, 5, 1, dim, device=DEVICE).bfloat16()
    v = torch.randn(1, 5, 1, 8, device=DEVICE).bfloat16()
    at = torch.tensor([[rows - 1, (1 << 23) + 3, 7, rows, -1]], device=DEVICE)
    k_cache.flatten(0, 1)[at[0, :3]] = 0
    fm.kv_append(k, v, k_cache, v_cache, slots=at)
    assert torch.equal(k_cache.flatten(0, 1)[at[0, :3]], k[0, :3])
    assert torch.equal(v_cache.flatten(0, 1)[at[0, :3]], v[0, :3])
    table = torch.arange(rows // 16, dtype=torch.int32, device=DEVICE)[None]
    lengths = torch.tensor([rows - 5], dtype=torch.int32, device=DEVICE)
    fm.kv_append(k, v, k_cache, v_cache, page_table=table, cache_seqlens=lengths)
    assert torch.equal(k_cache.flatten(0, 1)[-5:], k[0])
    one = k_cache.view(1, rows, 1, dim), v_cache.view(1, rows, 1, 8)
    fm.kv_append(-k, v, *one, cache_seqlens=lengths)
    assert torch.equal(one[0][0, -5:], -k[0])


def test_one_graph_serves_any_numbers() -> None:
    rng = np.random.default_rng(7)
    options = {"way": "paged", "packed": True, "rotary": "neox", "layout": "bshd", "used": True}
    case = Case(rng, "bfloat16", **options, most_batch=6, most_seq=30, most_dim=64)
    while case.k.size == 0 or "positions" in case.given:
        case = Case(rng, "bfloat16", **options, most_batch=6, most_seq=30, most_dim=64)
    placed = Placed(case)
    placed.call()  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fm.kv_append(placed.k.view, placed.v.view, *(x.view for x in placed.caches),
                     **placed.given, q_out=placed.q_out.view)  # fmt: skip
    for _ in range(5):
        total = case.k.shape[1]
        case.given["cu_seqlens"] = np.sort(rng.integers(0, total + 1, case.batch + 1)).astype(
            np.int32
        )
        lengths = rng.integers(-1, 20, case.batch)
        case.given["cache_seqlens"] = lengths.astype(np.int32)
        case.given["seqused"] = rng.integers(0, 30, case.batch).astype(np.int32)
        case.given["page_table"] = _distinct_pages(case, rng)
        for name in ("cu_seqlens", "cache_seqlens", "seqused", "page_table"):
            placed.given[name].copy_(to_torch(case.given[name]))
        for x, out in zip(placed.outputs, (*case.caches, case.given["q"]), strict=True):
            x.view.fill_(POISON)
            if out is not case.given["q"]:
                out[...] = POISON
        graph.replay()
        torch.cuda.synchronize()
        for x, cpu in zip(placed.outputs, by_cpu(case), strict=True):
            assert to_numpy(x.view, case.dtype).tobytes() == cpu.tobytes()


def test_every_run_has_the_same_bits_and_is_one_launch() -> None:
    torch.manual_seed(0)
    make = lambda *shape: torch.randn(shape, device=DEVICE).half()  # noqa: E731
    k, v, q = make(4, 700, 4, 128), make(4, 700, 4, 128), make(4, 700, 16, 128)
    cos, sin = torch.randn(900, 64, device=DEVICE), torch.randn(900, 64, device=DEVICE)
    lengths = torch.tensor([200, 0, 7, 100], dtype=torch.int32, device=DEVICE)
    made = []
    for _ in range(3):
        caches = [torch.zeros(4, 900, 4, 128, dtype=torch.half, device=DEVICE) for _ in "kv"]
        given = {"cache_seqlens": lengths, "rotary_cos": cos, "rotary_sin": sin, "q": q}
        plan = fm.kv_append_plan(k, v, *caches, **given)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            out = fm.kv_append(k, v, *caches, **given)
        torch.cuda.synchronize()
        (launch,) = fm.last_launches()
        (planned,) = plan.launches
        assert plan.family == "sm89" and plan.workspace_bytes == 0
        assert (launch.kernel, launch.grid, launch.block) == (
            planned.kernel, planned.grid, planned.block,
        )  # fmt: skip
        assert launch.local_bytes == 0  # nothing spills
        made.append([*caches, out])
    for others in made[1:]:
        assert all(torch.equal(a, b) for a, b in zip(made[0], others, strict=True))


def test_what_is_refused_is_named() -> None:
    make = lambda *shape: torch.zeros(shape, device=DEVICE, dtype=torch.float64)  # noqa: E731
    given = [make(1, 2, 1, 16), make(1, 2, 1, 16), make(1, 9, 1, 16), make(1, 9, 1, 16)]
    with pytest.raises(fm.UnsupportedError, match=r"^k: it is on cuda:0 and of dtype fp64"):
        fm.kv_append(*given)
    halves = [x.half() for x in given]
    with pytest.raises(ValueError, match=r"^cache_seqlens: .*device"):
        fm.kv_append(*halves, cache_seqlens=torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"^kernel: "):
        fm.kv_append(*halves, kernel="sm90")
    fm.kv_append(*halves, kernel="sm89")


# ---- what appends and attends -------------------------------------------------------------------


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_flash_attn_with_kvcache(dtype: torch.dtype, causal: bool, paged: bool) -> None:
    """The cache to the bit as by the CPU, and attention over it."""
    from flashmoe_science.flash_attn import flash_attn_with_kvcache

    torch.manual_seed(1)
    batch, new, heads, heads_kv, dim = 5, 3, 8, 2, 64
    make = lambda *shape: torch.randn(shape).to(dtype)  # noqa: E731
    q, k, v = make(batch, new, heads, dim), *(make(batch, new, heads_kv, dim) for _ in "kv")
    lengths = torch.tensor([0, 5, 90, 33, 64], dtype=torch.int32)
    given: dict[str, Any] = {"rotary_interleaved": False, "causal": causal}
    angles = torch.outer(torch.arange(160), 10000.0 ** (-torch.arange(32) / 32))
    given |= {"rotary_cos": angles.cos().to(dtype), "rotary_sin": angles.sin().to(dtype)}
    if paged:
        caches = [make(40, 16, heads_kv, dim) for _ in "kv"]
        given["block_table"] = torch.randperm(40)[: 7 * batch].view(batch, 7).to(torch.int32)
    else:
        caches = [make(batch, 110, heads_kv, dim) for _ in "kv"]
    there = [x.to(DEVICE) for x in caches]
    on_gpu = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in given.items()}
    out, lse = flash_attn_with_kvcache(
        q.to(DEVICE), *there, k.to(DEVICE), v.to(DEVICE), cache_seqlens=lengths.to(DEVICE),
        return_softmax_lse=True, **on_gpu,
    )  # fmt: skip
    table = given.get("block_table")
    rotated = fm.kv_append(
        k, v, *caches, cache_seqlens=lengths, page_table=table, q=q, q_stays=not causal,
        rotary_cos=given["rotary_cos"], rotary_sin=given["rotary_sin"],
    )  # fmt: skip
    for ours, cpu in zip(there, caches, strict=True):
        assert torch.equal(memory.bits(ours.cpu()), memory.bits(cpu))
    rest = {"cache_seqlens": (lengths + new).clamp(max=110), "causal": causal}
    usual = flash_attn_with_kvcache(rotated, *caches, block_table=table, **rest)
    want, want_lse = flash_attn_with_kvcache(
        rotated.double(), *(x.double() for x in caches), block_table=table,
        return_softmax_lse=True, **rest,
    )  # fmt: skip
    ulp = torch.finfo(dtype).eps * want.abs().max()
    assert (out.cpu() - want).abs().max() <= 2 * (usual - want).abs().max() + ulp
    assert (lse.cpu() - want_lse).abs().max() <= 1e-3


@pytest.mark.parametrize("q", [False, True])
def test_operators_and_compiled(q: bool) -> None:
    import flashmoe_science.torch  # noqa: F401

    torch._dynamo.reset()
    torch.manual_seed(2)
    make = lambda *shape: torch.randn(shape, device=DEVICE).bfloat16()  # noqa: E731
    given = {
        "k": make(2, 3, 2, 64), "v": make(2, 3, 2, 64), "k_cache": make(6, 4, 2, 64),
        "v_cache": make(6, 4, 2, 64), "cache_seqlens": torch.tensor([2, 5], dtype=torch.int32),
        "page_table": torch.tensor([[3, 0], [5, 2]], dtype=torch.int32),
        "rotary_cos": make(16, 32), "rotary_sin": make(16, 32),
    }  # fmt: skip
    if q:
        given["q"] = make(2, 3, 4, 64)
    given = {name: x.to(DEVICE) for name, x in given.items()}
    eager = {name: x.clone() for name, x in given.items()}
    want = fm.kv_append(**eager)
    step = torch.compile(lambda given: fm.kv_append(**given), backend="aot_eager", fullgraph=True)
    made = step(given)
    assert (made is None) == (not q)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(given[name], eager[name])
    assert not q or torch.equal(made, want)
    names = ("k", "v", "k_cache", "v_cache", "slots", "cache_seqlens", "cu_seqlens", "seqused",
             "batch_index", "page_table", "positions", "rotary_cos", "rotary_sin", "k_scale",
             "v_scale")  # fmt: skip
    operator = torch.ops.flashmoe.kv_append_with_q if q else torch.ops.flashmoe.kv_append
    tensors = [given.get(name) for name in names] + ([given["q"]] if q else [])
    torch.library.opcheck(operator.default, (*tensors, True, False, "bshd", None))


def test_cupy(cupy: Any) -> None:
    rng = np.random.default_rng(8)
    case = Case(rng, "float16", way="slots", rotary="neox", layout="bshd")
    while case.given["q"].size == 0:
        case = Case(rng, "float16", way="slots", rotary="neox", layout="bshd")
    there = {n: cupy.asarray(x) if isinstance(x, np.ndarray) else x for n, x in case.given.items()}
    caches = [cupy.asarray(x) for x in case.caches]
    out = cupy.full(there["q"].shape, POISON, np.float16)
    fm.kv_append(cupy.asarray(case.k), cupy.asarray(case.v), *caches, **there, q_out=out)
    for ours, cpu in zip((*caches, out), by_cpu(case), strict=True):
        assert cupy.asnumpy(ours).tobytes() == cpu.tobytes()
