"""merge_states on a GPU: float64, the CPU, and attention over all keys; in poison, wherever the
tensors lie."""

from __future__ import annotations

import ctypes as c
import itertools
from typing import Any

import capi
import capi_moe
import flashmoe_science as fm
import numpy as np
import pytest
import torch
from capi_merge import assert_special, make_params, merged, partials, special_partials
from flashmoe_science.flash_attn import merge_attn_states
from gpu import memory
from gpu.memory import Placed, Placement, to_torch

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
FP32 = np.dtype(np.float32)
# Half a unit in the last place, and what fp32 makes of it.
UNITS = {"fp32": 1e-6, "fp16": 2.0**-11 * 1.02, "bf16": 2.0**-8 * 1.02}
TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LAYOUT = {"bshd": 0, "bhsd": 1}
EVERY_DTYPE = list(itertools.product(TORCH, repeat=3))
NAMES = ("outs", "lses", "prior_out", "prior_lse", "out", "lse")


def kernel_of(dtype: str, *others: str) -> str:
    beside = "_beside_fp32" if dtype != "fp32" and "fp32" in others else ""
    return f"merge_states_sm89_{dtype}{beside}"


def run(tensors: dict[str, Placed | None], layout: str = "bshd") -> None:
    """By the C ABI: strides may be negative. What is read stays as it is, and nothing around."""
    there = {name: x for name, x in tensors.items() if x is not None}
    for each in there.values():
        each.remember()
    params = make_params(layout=LAYOUT[layout])
    views = {name: x.raw() for name, x in there.items()}
    for name, view in views.items():
        setattr(params, name, c.pointer(view))
    lib = capi.load()
    call, *_ = capi_moe.functions(params, lib)
    capi.check(call(params, None, 0, torch.cuda.current_stream().cuda_stream), lib)
    torch.cuda.synchronize()
    written = {id(there[name]) for name in ("out", "lse") if name in there}
    for name, each in there.items():
        assert each.intact(inside=id(each) not in written), name


def merge(
    outs: np.ndarray,
    lses: np.ndarray,
    *,
    layout: str = "bshd",
    prior: tuple[np.ndarray, np.ndarray] | None = None,
    dtype: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    given = dict(zip(NAMES, (outs, lses, *(prior or (None, None))), strict=False))
    tensors: dict[str, Any] = {
        name: None if x is None else memory.place_values(to_torch(x)) for name, x in given.items()
    }
    batch, seq, heads = outs.shape[-4:-1]
    seq, heads = (seq, heads) if layout == "bshd" else (heads, seq)
    kind = TORCH[dtype] if dtype else tensors["outs"].view.dtype
    tensors["out"] = memory.place(outs.shape[-4:], kind, DEVICE)
    tensors["lse"] = memory.place((batch, heads, seq), torch.float32, DEVICE)
    run(tensors, layout)
    return tensors["out"].logical, tensors["lse"].logical


def assert_merged(got: Any, want: tuple[np.ndarray, np.ndarray], unit: float) -> None:
    out, lse = (x.double().cpu().numpy() for x in got)
    np.testing.assert_allclose(out, want[0], rtol=unit, atol=2e-6)
    np.testing.assert_allclose(lse, want[1], rtol=2e-7, atol=2e-6)


def bits(*tensors: torch.Tensor) -> list[bytes]:
    return [memory.bits(x.contiguous()).cpu().numpy().tobytes() for x in tensors]


# As many as a batch of loads, as threads have of a row, and those around.
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8, 9, 13, 31, 32, 33, 127, 128, 129, 300])
@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("layout", LAYOUT)
def test_stacked(dtype: str, layout: str, count: int) -> None:
    rng = np.random.default_rng(count)
    outs, lses = partials(rng, (count, 2, 7, 3, 40), capi.DTYPES[dtype], layout)
    assert_merged(merge(outs, lses, layout=layout), merged(outs, lses, layout), UNITS[dtype])


@pytest.mark.parametrize(("of_prior", "of_outs", "of_out"), EVERY_DTYPE)
@pytest.mark.parametrize("count", [0, 1, 2, 11])
def test_prior(of_prior: str, of_outs: str, of_out: str, count: int) -> None:
    """Each tensor is of a dtype of its own, and the prior partial comes first."""
    rng = np.random.default_rng(count)
    shape = (2, 5, 3, 24)
    outs, lses = partials(rng, (count, *shape), capi.DTYPES[of_outs])
    first, first_lse = partials(rng, (1, *shape), capi.DTYPES[of_prior])
    got = merge(outs, lses, prior=(first[0], first_lse[0]), dtype=of_out)
    every = np.concatenate([first.astype(np.float64), outs.astype(np.float64)])
    assert_merged(got, merged(every, np.concatenate([first_lse, lses])), UNITS[of_out])


@pytest.mark.parametrize("of_out", TORCH)
@pytest.mark.parametrize("dtype", TORCH)
def test_the_planned_kernel_runs(dtype: str, of_out: str) -> None:
    outs = torch.randn(2, 1, 3, 4, 64, device=DEVICE).to(TORCH[dtype])
    lses = torch.randn(2, 1, 4, 3, device=DEVICE)
    plan = fm.merge_states_plan(outs, lses, dtype=of_out)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        out = fm.merge_states(outs, lses, dtype=of_out)
        torch.cuda.synchronize()
    assert fm.last_launches() == plan.launches and plan.workspace_bytes == 0
    assert [x.kernel for x in plan.launches] == [kernel_of(dtype, of_out)]
    assert plan.family == "sm89" and plan.microseconds > 0
    both = outs.numel() * outs.element_size() + out.numel() * out.element_size()
    assert plan.bytes == both + 4 * lses.numel()
    names = [event.name for event in profile.events() if "merge_states" in event.name]
    assert len(names) == 1, names
    again = fm.merge_states(outs, lses, dtype=of_out, kernel=kernel_of(dtype, of_out))
    assert bits(again) == bits(out)
    assert bits(fm.merge_states(outs, lses, dtype=of_out, kernel="sm89")) == bits(out)


@pytest.mark.parametrize("dtype", TORCH)
def test_a_partial_beside_empty_ones_is_the_result(dtype: str) -> None:
    """All of its bits, those of -0 among them; and nothing of theirs is read."""
    rng = np.random.default_rng(5)
    outs, lses = partials(rng, (3, 1, 6, 2, 24), capi.DTYPES[dtype])
    outs[1, 0, 0, 0, :] = np.float32(-0.0)
    lses[[0, 2]] = -np.inf
    outs[[0, 2]] = np.nan
    want = bits(to_torch(outs[1]), to_torch(lses[1]))
    assert bits(*merge(outs, lses)) == want
    assert bits(*merge(outs[1:2], lses[1:2], prior=(outs[0], lses[0]))) == want
    assert bits(*merge(outs[2:], lses[2:], prior=(outs[1], lses[1]))) == want
    assert bits(*merge(outs[1], lses[1])) == want


@pytest.mark.parametrize("count", [0, 1, 2, 40])
@pytest.mark.parametrize("prior", [False, True])
def test_rows_that_saw_no_key(count: int, prior: bool) -> None:
    outs = np.full((count, 1, 3, 2, 16), np.nan, np.float32)
    lses = np.full((count, 1, 2, 3), -np.inf, np.float32)
    first = (np.full((1, 3, 2, 16), np.nan, np.float32), np.full((1, 2, 3), -np.inf, np.float32))
    out, lse = merge(outs, lses, prior=first if prior else None)
    assert not memory.bits(out).any() and torch.isneginf(lse).all()


@pytest.mark.parametrize("at", [0, 1, 2, 37])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_special_numbers(dtype: str, at: int) -> None:
    """In the one row that has them, as flashmoe.h says; other rows are as they were."""
    outs, lses = special_partials(capi.DTYPES[dtype], at)
    got = merge(outs, lses)
    out, lse = (x.double().cpu().numpy() for x in got)
    assert_special(out, lse, outs, at, rtol=UNITS[dtype], atol=2e-6)
    want = merged(outs[:, :, 7:], lses[..., 7:])
    assert_merged((got[0][:, 7:], got[1][..., 7:]), want, UNITS[dtype])


@pytest.mark.parametrize("at", [0, 1, 20])
def test_a_nan_reaches_its_row_however_small_its_weight(at: int) -> None:
    rng = np.random.default_rng(7)
    outs, lses = partials(rng, (21, 1, 2, 1, 8), FP32)
    lses[:], lses[(at + 1) % 21] = -1e30, 1.0
    outs[at, 0, 0, 0, 5] = np.nan
    out, _ = merge(outs, lses)
    assert torch.nonzero(out.isnan().flatten()).flatten().tolist() == [5]


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4, 1e30, -1e30, 3e38, -3e38])
def test_far_from_zero(shift: float) -> None:
    rng = np.random.default_rng(11)
    outs, lses = partials(rng, (5, 1, 4, 3, 16), FP32)
    lses = (lses + np.float32(shift)).astype(np.float32)
    lses[4] = np.finfo(np.float32).min  # weighs nothing, if not all are so
    assert_merged(merge(outs, lses), merged(outs, lses), UNITS["fp32"])


@pytest.mark.parametrize("dim", [8, 16, 72, 136, 512, 1032, 2056, 4104])
@pytest.mark.parametrize("dtype", TORCH)
def test_dims(dtype: str, dim: int) -> None:
    """Also rows with more units than a block has threads, and in place."""
    rng = np.random.default_rng(dim)
    outs, lses = partials(rng, (3, 1, 5, 2, dim), capi.DTYPES[dtype])
    first = (np.asarray(outs[0], FP32) * 2, lses[0] + np.float32(1))
    got = merge(outs[1:], lses[1:], prior=first, dtype="fp32")
    every = np.concatenate([first[0][None], outs[1:].astype(FP32)])
    want = merged(every, np.concatenate([first[1][None], lses[1:]]))
    assert_merged(got, want, UNITS["fp32"])
    state = {"prior_out": memory.place_values(to_torch(first[0])),
             "prior_lse": memory.place_values(to_torch(first[1]))}  # fmt: skip
    given = {"outs": outs[1:], "lses": lses[1:]}
    tensors = {name: memory.place_values(to_torch(x)) for name, x in given.items()}
    run({**tensors, **state, "out": state["prior_out"], "lse": state["prior_lse"]})
    assert bits(state["prior_out"].view, state["prior_lse"].view) == bits(*got)


@pytest.mark.parametrize("dtype", TORCH)
def test_more_partials_than_a_block_keeps_weights_of(dtype: str) -> None:
    rng = np.random.default_rng(1)
    outs, lses = partials(rng, (4101, 1, 2, 2, 16), capi.DTYPES[dtype])
    lses[rng.random(lses.shape) < 0.3] = -np.inf
    first, first_lse = partials(rng, (1, 1, 2, 2, 16), FP32)
    got = merge(outs, lses, prior=(first[0], first_lse[0]))
    every = np.concatenate([first.astype(np.float64), outs.astype(np.float64)])
    want = merged(every, np.concatenate([first_lse, lses]))
    out, lse = (x.double().cpu().numpy() for x in got)
    np.testing.assert_allclose(out, want[0], rtol=UNITS[dtype], atol=2e-6)
    np.testing.assert_allclose(lse, want[1], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("empty", ["batch", "seq", "heads"])
def test_nothing_to_do(empty: str) -> None:
    shape = {"batch": 2, "seq": 3, "heads": 2} | {empty: 0}
    outs = torch.empty(2, *shape.values(), 8, device=DEVICE)
    lses = torch.empty(2, shape["batch"], shape["heads"], shape["seq"], device=DEVICE)
    assert fm.merge_states(outs, lses).numel() == 0


def _placement(rng: np.random.Generator, rank: int, rows: bool) -> Placement:
    """Any order of the axes, with gaps, some backwards; of rows the last is innermost, and all
    begin on 16-byte boundaries."""
    free = rank - 1 if rows else rank
    order = [*map(int, rng.permutation(free)), *([rank - 1] if rows else [])]
    step = 8 if rows else 1
    gaps = [step * int(rng.integers(0, 3)) for _ in order]
    flipped = tuple(axis for axis in range(free) if rng.random() < 0.3)
    return Placement(tuple(order), tuple(gaps), step * int(rng.integers(0, 4)), (), flipped)


@pytest.mark.parametrize("seed", range(60))
def test_any_strides(seed: int) -> None:
    rng = np.random.default_rng([seed, 3])
    kinds = [str(rng.choice(list(TORCH))) for _ in range(3)]
    layout = str(rng.choice(list(LAYOUT)))
    n, batch, seq, heads = (int(rng.integers(1, high)) for high in (12, 4, 40, 7))
    dim = 8 * int(rng.integers(1, 20))
    outs, lses = partials(rng, (n, batch, seq, heads, dim), capi.DTYPES[kinds[0]], layout)
    first, first_lse = partials(rng, (1, batch, seq, heads, dim), capi.DTYPES[kinds[1]], layout)
    lses[rng.random(lses.shape) < 0.2] = -np.inf
    given = {"outs": outs, "lses": lses}
    every, sums = outs.astype(np.float64), lses
    if rng.random() < 0.5:
        given |= {"prior_out": first[0], "prior_lse": first_lse[0]}
        every = np.concatenate([first.astype(np.float64), every])
        sums = np.concatenate([first_lse, lses])
    tensors = {
        name: memory.place_values(to_torch(x), _placement(rng, x.ndim, "lse" not in name))
        for name, x in given.items()
    }
    tensors["out"] = memory.place(
        outs.shape[1:], TORCH[kinds[2]], DEVICE, _placement(rng, 4, rows=True)
    )
    tensors["lse"] = memory.place(
        lses.shape[1:], torch.float32, DEVICE, _placement(rng, 3, rows=False)
    )
    run(tensors, layout)
    got = tensors["out"].logical, tensors["lse"].logical
    assert_merged(got, merged(every, sums, layout), UNITS[kinds[2]])


@pytest.mark.parametrize("layout", LAYOUT)
def test_one_partial_many_times(layout: str) -> None:
    """Along strides of 0."""
    rng = np.random.default_rng(2)
    outs, lses = partials(rng, (5, 2, 9, 3, 64), FP32, layout)
    tensors: dict[str, Any] = {
        "outs": memory.place_values(to_torch(outs), Placement((0, 1, 2, 3, 4), (0,) * 5, 0, (0,))),
        "lses": memory.place_values(to_torch(lses), Placement((0, 1, 2, 3), (0,) * 4, 0, (0,))),
        "out": memory.place(outs.shape[1:], torch.float32, DEVICE),
        "lse": memory.place(lses.shape[1:], torch.float32, DEVICE),
    }
    run(tensors, layout)
    want = outs[0].astype(np.float64), lses[0].astype(np.float64) + np.log(5)
    assert_merged((tensors["out"].view, tensors["lse"].view), want, UNITS["fp32"])


@pytest.mark.parametrize("dtype", TORCH)
@pytest.mark.parametrize("layout", LAYOUT)
@pytest.mark.parametrize("count", [1, 2, 12])
def test_many_rows(dtype: str, layout: str, count: int) -> None:
    """More blocks than run at a time, each with several units of a thread."""
    generator = torch.Generator(DEVICE).manual_seed(count)
    shape = (2, 1500, 24, 72) if layout == "bshd" else (2, 24, 1500, 72)
    outs = torch.randn(count, *shape, device=DEVICE, generator=generator).to(TORCH[dtype])
    lses = torch.randn(count, 2, 24, 1500, device=DEVICE, generator=generator) * 3
    first = torch.randn(*shape, device=DEVICE, generator=generator)
    first_lse = torch.randn(2, 24, 1500, device=DEVICE, generator=generator) * 3
    every, sums = (
        torch.cat([first[None], outs.float()]).double(),
        torch.cat([first_lse[None], lses]),
    )
    want_lse = sums.double().logsumexp(0)
    weights = (sums.double() - want_lse).exp()
    weights = weights if layout == "bhsd" else weights.transpose(2, 3)
    want = (weights[..., None] * every).sum(0)
    del every
    given = (first, outs[0]), (first_lse, lses[0])
    if count > 1:
        params = {"outs": outs, "lses": lses, "prior_out": first, "prior_lse": first_lse}
        tensors = {name: memory.place_values(x) for name, x in params.items()}
        tensors["out"] = memory.place(shape, torch.float32, DEVICE)
        tensors["lse"] = memory.place(first_lse.shape, torch.float32, DEVICE)
        run(tensors, layout)
        got = tensors["out"].view, tensors["lse"].view
    else:
        got = fm.merge_states(*given, layout=layout, return_lse=True)
    torch.testing.assert_close(got[0].double(), want, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(got[1].double(), want_lse, rtol=2e-7, atol=2e-6)
    if count > 1:
        return
    again = [fm.merge_states(*given, layout=layout, return_lse=True) for _ in range(3)]
    assert all(bits(*x) == bits(*got) for x in again)
    if layout == "bshd":  # the bits of a row depend on nothing but its partials
        part = fm.merge_states([x[:, 3:5] for x in given[0]], [x[..., 3:5] for x in given[1]])
        assert bits(part) == bits(got[0][:, 3:5])


def test_offsets_beyond_31_bits() -> None:
    """By strides: of partials, of rows of the batch, and of log-sum-exps, in bytes and elements."""
    free, _ = torch.cuda.mem_get_info()
    far = 2**31 + 32  # elements
    if free < 13 * far:
        pytest.skip("needs 26 GiB of memory")
    rng = np.random.default_rng(1)
    outs, lses = partials(rng, (2, 2, 3, 2, 16), capi.DTYPES["bf16"])
    own = outs.shape[1:]
    memory_of_outs = torch.full((2 * far,), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    x = memory_of_outs.as_strided(outs.shape, (far, far // 2, 32, 16, 1))
    x.copy_(to_torch(outs))
    memory_of_lses = torch.full((far + 64,), float("nan"), device=DEVICE)
    sums = memory_of_lses.as_strided(lses.shape, (far, 12, 3, 1))
    sums.copy_(to_torch(lses))
    memory_of_out = torch.empty(2 * far, dtype=torch.bfloat16, device=DEVICE)
    result = memory_of_out.as_strided(own, (far, far // 4, 16, 1))
    out = fm.merge_states(x, sums, out=result)
    want = merged(outs, lses)
    assert_merged((out, to_torch(want[1])), want, UNITS["bf16"])
    out, lse = fm.merge_states(x, sums, return_lse=True)
    assert_merged((out, lse), want, UNITS["bf16"])


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_within_twice_the_error_of_plain_arithmetic(dtype: str) -> None:
    generator = torch.Generator(DEVICE).manual_seed(0)
    outs = torch.randn(6, 2, 300, 8, 128, device=DEVICE, generator=generator).to(TORCH[dtype])
    lses = torch.randn(6, 2, 8, 300, device=DEVICE, generator=generator) * 3
    weights = lses.double().softmax(0).transpose(2, 3)[..., None]
    want = (weights * outs.double()).sum(0)
    plain = (weights.to(outs.dtype) * outs).sum(0)
    ours = fm.merge_states(outs, lses)
    error = (ours.double() - want).abs().max()
    assert error <= 2 * (plain.double() - want).abs().max() + torch.finfo(outs.dtype).eps


def test_parts_of_attention() -> None:
    """Slices of one array are the outs of attention, and its partials."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    q, k, v = (
        torch.randn(2, n, heads, 64, device=DEVICE, generator=generator).bfloat16()
        for n, heads in ((33, 8), (500, 2), (500, 2))
    )
    outs = torch.empty(3, *q.shape, dtype=q.dtype, device=DEVICE)
    lses = torch.empty(3, 2, 8, 33, device=DEVICE)
    for i, part in enumerate((slice(0, 64), slice(64, 65), slice(65, 500))):
        fm.flash_attention(q, k[:, part], v[:, part], return_lse=True, out=outs[i], lse=lses[i])
    out, lse = fm.merge_states(outs, lses, return_lse=True, dtype="fp32")
    want, want_lse = fm.flash_attention(q, k, v, return_lse=True)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out, want.float(), rtol=2**-6, atol=2**-9)


def test_one_graph_on_a_stream_of_its_own() -> None:
    """A ring in place: the graph adds to the state what is in the partial when it runs."""
    state = torch.zeros(1, 200, 4, 64, device=DEVICE)
    sums = torch.full((1, 4, 200), float("-inf"), device=DEVICE)
    out = torch.zeros(1, 200, 4, 64, device=DEVICE, dtype=torch.float16)
    lse = torch.zeros(1, 4, 200, device=DEVICE)
    call = lambda: fm.merge_states((state, out), (sums, lse), out=state, lse=sums)  # noqa: E731
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call()
        with torch.cuda.graph(graph, stream=stream):
            call()
    stream.synchronize()
    state.zero_()
    sums.fill_(float("-inf"))
    rng = np.random.default_rng(0)
    outs, lses = partials(rng, (5, 1, 200, 4, 64), capi.DTYPES["fp16"])
    for i in range(5):
        out.copy_(to_torch(outs[i]))
        lse.copy_(to_torch(lses[i]))
        graph.replay()
    torch.cuda.synchronize()
    assert_merged((state, sums), merged(outs, lses), 3e-6)


def test_behind_a_launch_of_ours_without_a_synchronisation() -> None:
    """The kernel may begin before the attention ahead of it has ended, and waits for it."""
    q, k, v = (torch.randn(4, 1024, 8, 64, device=DEVICE).half() for _ in range(3))
    outs = torch.empty(2, *q.shape, dtype=q.dtype, device=DEVICE)
    lses = torch.empty(2, 4, 8, 1024, device=DEVICE)
    seen = []
    for _ in range(10):
        outs.fill_(float("nan"))
        lses.fill_(float("nan"))
        for i in range(2):
            part = slice(512 * i, 512 * i + 512)
            fm.flash_attention(q, k[:, part], v[:, part], out=outs[i], lse=lses[i], return_lse=True)
        seen.append(fm.merge_states(outs, lses))
    torch.cuda.synchronize()
    assert not seen[0].isnan().any() and all(bits(x) == bits(seen[0]) for x in seen)


@pytest.mark.parametrize("fp8", [False, True])
def test_vllms_function(fp8: bool) -> None:
    """As on the CPU: +inf is no key, tokens behind have no prefix."""
    rng = np.random.default_rng(3)
    outs, lses = partials(rng, (2, 1, 37, 4, 64), capi.DTYPES["fp16"])
    lses[0, 0, :, 3], lses[1, 0, :, 5] = np.inf, -np.inf
    made = []
    for device in ("cpu", DEVICE):
        first, second = (to_torch(x[0], device) for x in outs)
        lse, second_lse = (to_torch(x[0], device) for x in lses)
        out = torch.empty_like(first, dtype=torch.float8_e4m3fn if fp8 else None)
        merged_lse = torch.empty_like(lse)
        scale = torch.tensor(0.25, device=device) if fp8 else None
        merge_attn_states(out, first, lse, second, second_lse, merged_lse, 30, scale)
        made.append((out.float().cpu(), merged_lse.cpu()))
    tolerance = 2**-3 if fp8 else 2**-10
    torch.testing.assert_close(made[1][0], made[0][0], rtol=tolerance, atol=1e-3)
    torch.testing.assert_close(made[1][1], made[0][1], rtol=1e-6, atol=1e-6)


def test_jax(jax_gpu: Any) -> None:
    import jax

    rng = np.random.default_rng(4)
    outs, lses = partials(rng, (4, 2, 50, 3, 64), capi.DTYPES["bf16"])
    x, sums = (jax.device_put(y, jax_gpu) for y in (outs, lses))
    want = merged(outs, lses)
    compiled = jax.jit(lambda x, s: fm.merge_states(x, s, return_lse=True, dtype="float32"))
    for call in (compiled, lambda x, s: fm.merge_states(x, s, return_lse=True, dtype="float32")):
        out, lse = call(x, sums)
        assert out.devices() == {jax_gpu}
        np.testing.assert_allclose(np.asarray(out), want[0], rtol=1e-6, atol=2e-6)
        np.testing.assert_allclose(np.asarray(lse), want[1], rtol=2e-7, atol=2e-6)


def test_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    rng = np.random.default_rng(4)
    outs, lses = partials(rng, (4, 2, 50, 3, 64), capi.DTYPES["fp16"])
    out, lse = fm.merge_states(cupy.asarray(outs), cupy.asarray(lses), return_lse=True)
    assert isinstance(out, cupy.ndarray)
    want = merged(outs, lses)
    np.testing.assert_allclose(cupy.asnumpy(out), want[0], rtol=UNITS["fp16"], atol=2e-6)
    np.testing.assert_allclose(cupy.asnumpy(lse), want[1], rtol=2e-7, atol=2e-6)


def test_refusals() -> None:
    outs = torch.zeros(2, 1, 3, 4, 16, dtype=torch.float64, device=DEVICE)
    lses = torch.zeros(2, 1, 4, 3, device=DEVICE)
    with pytest.raises(TypeError, match="outs: got dtype fp64, accepted are fp16, bf16 and fp32"):
        fm.merge_states(outs, lses.double())
    outs = outs.float()
    with pytest.raises(ValueError, match="lses: it is on cpu but outs is on cuda:0"):
        fm.merge_states(outs, lses.cpu())
    with pytest.raises(ValueError, match="out: it shares memory with outs"):
        fm.merge_states(outs, lses, out=outs[0])


@pytest.mark.parametrize("dtype", TORCH)
def test_more_than_two_tensors(dtype: str) -> None:
    """From Python, by launches one after another: checked against float64 and the bits of pairs
    with a state."""
    outs, lses = partials(np.random.default_rng(5), (5, 2, 33, 4, 64), FP32)
    lses[1, 0, 1] = -np.inf
    x = [torch.from_numpy(part).to(DEVICE, TORCH[dtype]) for part in outs]
    sums = [torch.from_numpy(part).to(DEVICE) for part in lses]
    got = fm.merge_states(x, sums, return_lse=True)
    assert got[0].dtype == TORCH[dtype]
    rounded = np.stack([part.double().cpu().numpy() for part in x])
    assert_merged(got, merged(rounded, lses, "bshd"), UNITS[dtype])
    state = x[0], sums[0]
    for i in range(1, 5):
        of_state = dtype if i == 4 else "fp32"
        state = fm.merge_states(
            (state[0], x[i]), (state[1], sums[i]), dtype=of_state, return_lse=True
        )
    assert bits(*state) == bits(*got)
    into = fm.merge_states(x, sums, out=x[0], lse=sums[0], return_lse=True)
    assert into[0] is x[0] and bits(*into) == bits(*got)
