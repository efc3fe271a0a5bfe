"""Attention backward on the GPU, through the C ABI: right, deterministic, launched as planned."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import capi
import flashmoe_science as fm
import kernels
import pytest
import torch
from gpu import backward, cases, families, gradient_digests, memory, oracle
from gpu.backward import GRADIENTS, Call, Case
from gpu.memory import Placed, Placement
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
ELEMENTS = {"fp16": "__half", "bf16": "__nv_bfloat16"}
CASES = [
    Case(batch=2, seq_q=1000, seq_k=1000, heads_q=8, heads_kv=2, causal="top_left"),
    Case(dtype="fp16", batch=2, seq_q=777, seq_k=1023, heads_q=4, heads_kv=4, dim=128, dim_v=128,
         dlse=True),
    Case(seq_q=1700, seq_k=1900, heads_q=8, heads_kv=1, dim=128, dim_v=96, causal="bottom_right"),
    Case(dtype="fp16", batch=3, seq_q=300, seq_k=300, heads_q=5, heads_kv=5, dim=40, dim_v=88,
         window=(90, 20), softcap=5.0),
    Case(batch=2, seq_q=1100, seq_k=900, heads_q=6, heads_kv=3, dim=192, dim_v=128,
         causal="bottom_right", dlse=True),
    Case(batch=2, seq_q=800, seq_k=800, heads_q=4, heads_kv=1, dim=256, dim_v=256,
         causal="top_left"),
]  # fmt: skip


def _cases(family: str) -> list[Case]:
    """Those that it serves."""
    of_family = [dataclasses.replace(case, kernel=family) for case in CASES]
    return [case for case in of_family if max(case.dim, case.dim_v) in backward.dims(family)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests are of each family that computes the gradients, those with `dims` of all that its
    kernels are compiled for, those with a `case` of all that it serves."""
    if "kernel" not in metafunc.fixturenames:
        return
    every = backward.FAMILIES
    if "dims" in metafunc.fixturenames:
        with_dims = [(family, dims) for family in every for dims in backward.COMPILED[family]]
        metafunc.parametrize(("kernel", "dims"), with_dims, indirect=["kernel"], ids=str)
    elif "case" in metafunc.fixturenames:
        with_cases = [(family, case) for family in every for case in _cases(family)]
        metafunc.parametrize(("kernel", "case"), with_cases, indirect=True, ids=str)
    else:
        metafunc.parametrize("kernel", every, indirect=True)


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> str:
    """The family that calls name."""
    name: str = request.param
    reason = families.why_not("sm90_whole_tiles" if name == "sm90" else name)
    if reason is not None:
        pytest.skip(reason)
    return name


@pytest.fixture
def case(request: pytest.FixtureRequest, kernel: str) -> Case:
    return dataclasses.replace(request.param, kernel=kernel)


def _same_bits(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return got.keys() == want.keys() and all(
        torch.equal(memory.bits(got[name].contiguous()), memory.bits(want[name].contiguous()))
        for name in want
    )


def _checked(case: Case) -> tuple[dict[str, Placed], dict[str, torch.Tensor]]:
    """Inputs and gradients, which are right."""
    inputs = backward.make_inputs(case, DEVICE)
    got = backward.gradients(case, inputs)
    backward.assert_accurate(got, backward.logical(inputs), case)
    return inputs, got


# ---- right -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(300))
def test_random_calls(kernel: str, seed: int) -> None:
    backward.check_case(backward.random_case(seed, kernel), DEVICE)


def _ada(case: Case) -> Case:
    """By the kernel that a multiprocessor of 100 KiB takes for it. Larger ones take it by name."""
    dim, dim_v = kernels.least_padding("sm89_backward", case.dim, case.dim_v)
    name = f"attention_backward_sm89_{case.dtype}_d{dim}_dv{dim_v}_ada"
    return dataclasses.replace(case, kernel=name)


@pytest.mark.parametrize("seed", range(100))
def test_random_calls_of_kernels_for_ada(seed: int) -> None:
    case = _ada(backward.random_case(seed, "sm89"))
    backward.check_case(case, DEVICE)
    if case.batch * case.seq_q * case.seq_k > 0:
        assert capi.last_launches()[1].kernel.decode() == case.kernel


@pytest.mark.parametrize("causal", cases.CAUSAL)
@pytest.mark.parametrize("dims", backward.COMPILED["sm89"], ids=str)
def test_kernels_for_ada_give_the_same_bits(dims: tuple[int, int], causal: str) -> None:
    case = _ada(Case(batch=2, seq_q=1100, seq_k=1300, heads_q=6, heads_kv=3, dim=dims[0],
                     dim_v=dims[1], causal=causal, dlse=True))  # fmt: skip
    inputs, want = _checked(case)
    for _ in range(20):
        assert _same_bits(backward.gradients(case, inputs), want)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_every_head_dimension(kernel: str, dtype: str) -> None:
    each = backward.dims(kernel)
    for dim in each:
        for dim_v in {dim, each[-1] + 8 - dim}:
            case = Case(kernel=kernel, dtype=dtype, seq_q=200, seq_k=190, heads_q=4, heads_kv=2,
                        dim=dim, dim_v=dim_v, causal="bottom_right")  # fmt: skip
            backward.check_case(case, DEVICE)


_EDGES = (1, 2, 63, 64, 65, 127, 128, 129, 255, 257, 385)


@pytest.mark.parametrize("causal", cases.CAUSAL)
def test_lengths_around_those_of_tiles(kernel: str, dims: tuple[int, int], causal: str) -> None:
    for seq_q, seq_k in itertools.product(_EDGES, _EDGES):
        case = Case(
            kernel=kernel,
            seq_q=seq_q,
            seq_k=seq_k,
            heads_q=2,
            dim=dims[0],
            dim_v=dims[1],
            causal=causal,
        )
        backward.check_case(case, DEVICE)


@pytest.mark.parametrize("window", [(0, 0), (63, 0), (128, None), (None, 65), (200, 300), (1, 1)])
def test_windows(kernel: str, dims: tuple[int, int], window: tuple[int | None, int | None]) -> None:
    for seq_q, seq_k in ((700, 700), (300, 900), (900, 300)):
        case = Case(
            kernel=kernel,
            seq_q=seq_q,
            seq_k=seq_k,
            heads_q=3,
            dim=dims[0],
            dim_v=dims[1],
            window=window,
        )
        backward.check_case(case, DEVICE)


@pytest.mark.parametrize(("heads_q", "heads_kv"), [(8, 8), (8, 2), (9, 3), (16, 1), (71, 1)])
def test_query_heads_of_a_kv_head(
    kernel: str, dims: tuple[int, int], heads_q: int, heads_kv: int
) -> None:
    case = Case(kernel=kernel, batch=2, seq_q=333, seq_k=400, heads_q=heads_q, heads_kv=heads_kv,
                dim=dims[0], dim_v=dims[1], causal="bottom_right")  # fmt: skip
    backward.check_case(case, DEVICE)


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_softcaps(kernel: str, dims: tuple[int, int], dtype: str, softcap: float) -> None:
    for values in ("normal", "peaked"):
        case = Case(kernel=kernel, dtype=dtype, seq_q=500, seq_k=450, heads_q=4, heads_kv=2,
                    dim=dims[0], dim_v=dims[1], causal="top_left", values=values,
                    softcap=softcap)  # fmt: skip
        backward.check_case(case, DEVICE)


@pytest.mark.parametrize("values", sorted({*backward.VALUES, "buried", "separated"}))
def test_kinds_of_values(kernel: str, dims: tuple[int, int], values: str) -> None:
    case = Case(
        kernel=kernel,
        seq_q=600,
        seq_k=700,
        heads_q=2,
        dim=dims[0],
        dim_v=dims[1],
        values=values,
        dlse=True,
    )
    backward.check_case(case, DEVICE)


@pytest.mark.parametrize("causal", ["none", "bottom_right"])
def test_many_tiles_of_keys(kernel: str, dims: tuple[int, int], causal: str) -> None:
    """Whose parts of dQ go round among all blocks, more of them than run at a time."""
    case = Case(
        kernel=kernel,
        seq_q=4100,
        seq_k=9000,
        heads_q=4,
        heads_kv=2,
        dim=dims[0],
        dim_v=dims[1],
        causal=causal,
    )
    backward.check_case(case, DEVICE)


def test_what_no_pair_is_seen_of_is_zero(kernel: str, dims: tuple[int, int]) -> None:
    """Rows that see no key, keys that no row sees, and all of both."""
    for causal, seq_q, seq_k, window in (
        ("bottom_right", 700, 300, None),
        ("top_left", 300, 700, None),
        ("none", 700, 300, (10, 10)),
        ("none", 900, 300, (None, 0)),
    ):
        case = Case(kernel=kernel, seq_q=seq_q, seq_k=seq_k, heads_q=2, dim=dims[0], dim_v=dims[1],
                    causal=causal, window=window)  # fmt: skip
        _, got = _checked(case)  # which holds them to it
        zeros = [bool((got[name] == 0).all(-1).any()) for name in GRADIENTS]
        assert any(zeros), case


def test_tensors_without_rows(kernel: str, dims: tuple[int, int]) -> None:
    for seq_q, seq_k in ((0, 300), (300, 0)):
        case = Case(
            kernel=kernel,
            batch=2,
            seq_q=seq_q,
            seq_k=seq_k,
            heads_q=4,
            heads_kv=2,
            dim=dims[0],
            dim_v=dims[1],
        )
        for wanted in (GRADIENTS, ("dq",), ("dk", "dv")):
            backward.check_case(dataclasses.replace(case, wanted=wanted), DEVICE)
    for batch, seq in ((0, 64), (2, 0)):
        case = Case(kernel=kernel, batch=batch, seq_q=seq, seq_k=seq, dim=dims[0], dim_v=dims[1])
        backward.check_case(case, DEVICE)


@pytest.mark.alone  # it takes much memory
@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "out", *GRADIENTS])
def test_offsets_beyond_32_bits(kernel: str, name: str) -> None:
    case = Case(
        kernel=kernel, batch=2, seq_q=200, seq_k=300, heads_q=2, heads_kv=2, causal="bottom_right"
    )
    row = 2 * 64
    rows = 300 if name in ("k", "v", "dk", "dv") else 200
    gap = 2**31 + 8 - rows * row  # behind a batch
    far = Placement((0, 1, 2, 3), (0, gap, 0, 0))
    backward.check_case(dataclasses.replace(case, where={name: far}), DEVICE)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("fp32", [(), ("dk",), ("dq", "dv"), GRADIENTS], ids=str)
def test_gradients_of_fp32_and_added_to(
    kernel: str, dims: tuple[int, int], fp32: tuple[str, ...], accumulate: bool
) -> None:
    for seq_q, seq_k, causal in (
        (500, 700, "none"), (700, 300, "bottom_right"), (300, 700, "top_left"), (0, 70, "none"),
        (70, 0, "none"),
    ):  # fmt: skip
        case = Case(kernel=kernel, seq_q=seq_q, seq_k=seq_k, heads_q=6, heads_kv=3, dim=dims[0],
                    dim_v=dims[1], causal=causal, fp32=fp32, accumulate=accumulate)  # fmt: skip
        backward.check_case(case, DEVICE)


def _check_what_stays(case: Case, name: str, value: float, late: bool = False) -> None:
    """Non-finite numbers stay with what touched them. The rest is as accurate as without them, and
    other heads have the same bits; a second call gives the same bits. `late`: in one of the last
    columns, which in a cluster is the second block's half of dQ."""
    inputs = backward.make_inputs(case, DEVICE)
    clean = {key: x.clone() for key, x in backward.logical(inputs).items()}
    usual = backward.gradients(case, inputs)
    place = (40 if late else 70) if name in ("k", "v") else (250 if late else 130)
    at = (1, place, 1, inputs[name].view.shape[3] - 4 if late else 3)
    inputs[name].view[at] = value
    q, k, v = (inputs[key].view for key in ("q", "k", "v"))
    out, lse = fm.flash_attention(q, k, v, **case.mask, return_lse=True)
    inputs["out"].view.copy_(out)
    inputs["lse"].view.copy_(lse)
    outputs = backward.make_gradients(case, DEVICE)
    before = backward.add_to(case, outputs) if case.accumulate else None
    Call(case, {**inputs, **outputs}).run()
    got = backward.logical(outputs)
    assert _same_bits(backward.gradients(case, inputs), got)

    is_nan = value != value
    touched = _touched_by_nan(case, name, at)
    exact = backward.float64(clean, case)
    for key, x in got.items():
        if is_nan:
            assert x[touched[key]].isnan().all(), key
        elif key == "dq" and name != "q":  # of Q, a logit may be -inf
            assert not x[touched[key]].isfinite().all()
        # Rows that a NaN in V touches have their lse from the forward's plain arithmetic, so dV of
        # the keys that they see has other last bits, though V itself does not touch it.
        of_other_heads = ~touched["dq" if key == "dq" else "dk"].any(3).any(1)
        assert torch.equal(*(y.transpose(1, 2)[of_other_heads] for y in (x, usual[key]))), key
        want = exact[key].transpose(1, 2)
        if before is not None:
            want = want + before[key]
        x.copy_(torch.where(touched[key], want.to(x.dtype), x))
    backward.assert_accurate(got, clean, case, before)


def _touched_by_nan(
    case: Case, name: str, at: tuple[int, int, int, int]
) -> dict[str, torch.Tensor]:
    """The elements of the gradients that a NaN in one element of an input makes NaN: a query's, of
    the keys that it sees; a key's, of the queries that see it and of all keys that these see."""
    batch, place, head, column = at
    rows = torch.arange(case.seq_q, device=DEVICE)
    seen = oracle.visible(rows, case.seq_q, case.seq_k, case.causal, case.window)
    of_key = name in ("k", "v")
    of_rows = seen[:, place] if of_key else (rows == place) & seen.any(1)
    of_keys = seen[of_rows].any(0)
    group = case.heads_q // case.heads_kv
    heads = slice(head * group, (head + 1) * group) if of_key else slice(head, head + 1)
    head_kv = head if of_key else head // group
    touched = {
        key: torch.zeros(case.shape_of(key), dtype=torch.bool, device=DEVICE) for key in GRADIENTS
    }
    touched["dq"][batch, :, heads] = of_rows[:, None, None]
    touched["dk"][batch, :, head_kv] = of_keys[:, None]
    if name in ("q", "k"):
        touched["dv"][batch, :, head_kv] = of_keys[:, None]
    elif name == "dout":
        touched["dv"][batch, :, head_kv, column] = of_keys
    return touched


_BOUNDED: tuple[dict[str, Any], ...] = (
    {"causal": "bottom_right"},
    {"causal": "bottom_right", "seq_k": 420, "dtype": "fp16", "fp32": ("dq", "dv")},
    {"causal": "top_left", "seq_k": 270, "heads_kv": 4, "dtype": "fp16"},
    {"window": (40, 10)},
    {"window": (None, 33), "fp32": ("dk",), "accumulate": True},
    {"window": (60, 0), "accumulate": True},
    {"causal": "bottom_right", "fp32": GRADIENTS, "accumulate": True},
    {"causal": "top_left", "seq_k": 420, "dtype": "fp16", "accumulate": True},
)


def _bounded_cases(kernel: str, dims: tuple[int, int]) -> list[Case]:
    shape = {"batch": 2, "seq_q": 300, "seq_k": 300, "heads_q": 4, "heads_kv": 2}
    return [
        Case(kernel=kernel, dim=dims[0], dim_v=dims[1], dlse=True, softcap=softcap,
             **(shape | options))
        for softcap in (None, 20.0)
        for options in _BOUNDED
    ]  # fmt: skip


def _is_late(number: int) -> bool:
    """Selects every bounded case either without a softcap or with one."""
    return (number + number // len(_BOUNDED)) % 2 == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_what_is_not_finite_stays_with_the_rows_and_keys_that_touched_it(
    kernel: str, dims: tuple[int, int], name: str, value: float
) -> None:
    for number, case in enumerate(_bounded_cases(kernel, dims)):
        _check_what_stays(case, name, value, _is_late(number))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("dims", backward.COMPILED["sm89"], ids=str)
def test_what_is_not_finite_stays_there_by_kernels_for_ada(
    dims: tuple[int, int], name: str, value: float
) -> None:
    for number, case in enumerate(_bounded_cases("sm89", dims)):
        _check_what_stays(_ada(case), name, value, _is_late(number))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("name", ["q", "k", "dout"])
def test_what_is_not_finite_stays_there_of_many_heads(
    kernel: str, dims: tuple[int, int], name: str, accumulate: bool
) -> None:
    """Most of which descend; a block has several items, and parts of dQ from several blocks."""
    case = Case(kernel=kernel, batch=2, seq_q=700, seq_k=800, heads_q=80, heads_kv=80, dim=dims[0],
                dim_v=dims[1], causal="bottom_right", accumulate=accumulate)  # fmt: skip
    _check_what_stays(case, name, float("nan"), late=name == "k")


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_what_is_nan_everywhere_stays_so(
    kernel: str, dims: tuple[int, int], softcap: float | None
) -> None:
    """And takes no longer than a test may: sums that are NaN are not summed on."""
    case = Case(kernel=kernel, seq_q=2000, seq_k=2000, heads_q=16, heads_kv=16, dim=dims[0],
                dim_v=dims[1], causal="bottom_right", softcap=softcap)  # fmt: skip
    inputs = backward.make_inputs(case, DEVICE)
    for name in ("q", "out", "lse"):
        inputs[name].view.fill_(float("nan"))
    assert all(x.isnan().all() for x in backward.gradients(case, inputs).values())


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_of_sinks(case: Case, accumulate: bool, fp32: bool) -> None:
    """By the formula in float64 from the same out and lse. The other gradients do not change."""
    inputs, want = _checked(dataclasses.replace(case, accumulate=False))
    sinks = torch.randn(2 * case.heads_q, device=DEVICE).to(cases.DTYPES[case.dtype])[::2]
    sinks[0], sinks[1] = -torch.inf, 2.0
    dtype = torch.float32 if fp32 else sinks.dtype
    start = 0.5 if accumulate else float("nan")
    dsinks = torch.full((case.heads_q,), start, dtype=dtype, device=DEVICE)
    rows = torch.arange(case.seq_q, device=DEVICE)
    seen = oracle.visible(rows, case.seq_q, case.seq_k, case.causal, case.window).any(1)
    lse = torch.where(seen, inputs["lse"].logical, sinks.float()[:, None])  # as a forward with them
    inputs = {**inputs, "lse": memory.place_values(lse)}
    outputs = backward.make_gradients(case, DEVICE)
    of_sinks = {"sinks": memory.place_values(sinks), "dsinks": memory.place_values(dsinks)}
    adding = dataclasses.replace(case, accumulate=accumulate)
    for placed in outputs.values():
        placed.view.zero_()
    call = Call(adding, {**inputs, **outputs, **of_sinks})
    assert call.plan().launch_count == 3
    call.run()
    if not accumulate:
        assert _same_bits(backward.logical(outputs), want)
    given = {name: x.double() for name, x in backward.logical(inputs).items()}
    out, dout = (oracle.heads_first(given[name], case.layout) for name in ("out", "dout"))
    delta = (out * dout).sum(-1) - given.get("dlse", torch.zeros_like(given["lse"]))
    sink = sinks.double()[:, None]
    weight = torch.where(sink == given["lse"], 1.0, (sink - given["lse"]).exp())
    terms = torch.where(sink == -torch.inf, 0.0, weight * delta)  # out is 0 where no key is seen
    expected = -terms.sum((0, 2)) + (start if accumulate else 0.0)
    got = of_sinks["dsinks"].logical
    allowed = 1e-5 * terms.abs().sum((0, 2)) + 1e-6
    allowed = allowed + expected.abs() * (0.0 if fp32 else torch.finfo(dtype).eps)
    assert ((got.double() - expected).abs() <= allowed).all(), (got, expected)
    assert got[0] == (start if accumulate else 0.0)
    again = {**of_sinks, "dsinks": memory.place_values(dsinks)}
    Call(adding, {**inputs, **outputs, **again}).run()
    assert torch.equal(again["dsinks"].logical, got)


# ---- the same every time -----------------------------------------------------------------------


RUNS = 1000


def test_a_thousand_runs_give_the_same_bits(case: Case) -> None:
    """On other streams, and beside other work that takes some of the GPU away."""
    inputs, want = _checked(case)
    other, noise = torch.cuda.Stream(), torch.cuda.Stream()
    for run in range(RUNS):
        if run % 3 == 1:
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                got = backward.gradients(case, inputs)
            torch.cuda.current_stream().wait_stream(other)
        else:
            if run % 3 == 2:
                with torch.cuda.stream(noise):
                    a = torch.randn(1024, 1024, device=DEVICE)
                    for _ in range(5):
                        a = a @ a * 1e-3
            got = backward.gradients(case, inputs)
        assert _same_bits(got, want), f"run {run}"


def test_items_of_many_query_heads_run_in_waves(kernel: str, dims: tuple[int, int]) -> None:
    """Down from the last query, then upwards, where the family has waves: right, and the same
    beside a kernel that takes multiprocessors away."""
    case = Case(kernel=kernel, batch=2, seq_q=2050, seq_k=2100, heads_q=64, heads_kv=8,
                dim=dims[0], dim_v=dims[1], causal="bottom_right")  # fmt: skip
    inputs, want = _checked(case)
    other, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device=DEVICE)
    for _ in range(20):
        with torch.cuda.stream(other):
            noise @ noise
        assert _same_bits(backward.gradients(case, inputs), want)


@pytest.mark.skipif("CUDA_MPS_PIPE_DIRECTORY" not in os.environ, reason="needs NVIDIA's MPS")
@pytest.mark.parametrize("percent", [20, 60])
def test_fewer_multiprocessors_give_the_same_bits(kernel: str, percent: int) -> None:
    """MPS gives a process fewer. tests/cuda/host checks what kernels are told."""
    command = [sys.executable, gradient_digests.__file__, kernel]
    some = os.environ | {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(percent)}
    done = subprocess.run(command, capture_output=True, text=True, env=some, timeout=200,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    by_some, by_all = json.loads(done.stdout), gradient_digests.report(kernel)
    assert by_some["digests"] == by_all["digests"]
    assert by_some["blocks"] < by_all["blocks"], "MPS gave all multiprocessors"


@pytest.mark.parametrize("causal", ["none", "bottom_right"])
def test_a_thousand_runs_of_several_items_a_block_give_the_same_bits(
    kernel: str, dims: tuple[int, int], causal: str
) -> None:
    """Beside a kernel that takes another number of multiprocessors each time, for another time: in
    which order blocks come to their items, and to a tile of dQ, is left to chance."""
    case = Case(kernel=kernel, dtype="bf16", batch=2, seq_q=1100, seq_k=1100, heads_q=40,
                heads_kv=40, dim=dims[0], dim_v=dims[1], causal=causal)  # fmt: skip
    inputs = backward.make_inputs(case, DEVICE)
    outputs = backward.make_gradients(case, DEVICE)
    call = Call(case, {**inputs, **outputs})
    workspace = call.workspace()
    call.run(workspace)
    want = {name: x.clone() for name, x in backward.logical(outputs).items()}
    noise = torch.cuda.Stream()
    sides = torch.randint(1, 24, (RUNS,), generator=torch.Generator().manual_seed(0)).tolist()
    a = torch.randn(128 * 24, 128 * 24, device=DEVICE, dtype=torch.bfloat16)
    differ = torch.zeros((), dtype=torch.bool, device=DEVICE)
    for side in sides:
        with torch.cuda.stream(noise):
            torch.mm(a[: 128 * side, : 128 * side], a[: 128 * side, : 128 * side])
        for placed in outputs.values():
            placed.view.fill_(float("nan"))
        call.run(workspace)
        for name, x in backward.logical(outputs).items():
            differ |= (memory.bits(x) != memory.bits(want[name])).any()
    assert not differ.item()
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_other_heads_make_no_difference_to_the_bits(
    kernel: str, dtype: str, dims: tuple[int, int]
) -> None:
    """Which blocks take an item and which heads alternate depend on all heads. Here all ascend
    and no item is split: where many heads descend or items are, sums have another order."""
    case = Case(kernel=kernel, dtype=dtype, batch=3, seq_q=1100, seq_k=1100, heads_q=12,
                heads_kv=6, dim=dims[0], dim_v=dims[1], causal="bottom_right")  # fmt: skip
    inputs, want = _checked(case)
    alone = dataclasses.replace(case, batch=1, heads_q=2, heads_kv=1)
    for batch, head in ((0, 0), (1, 3), (2, 5)):
        one = {}
        for name, placed in inputs.items():
            of_q = slice(2 * head, 2 * head + 2)
            heads = slice(head, head + 1) if name in ("k", "v") else of_q
            batches = slice(batch, batch + 1)
            x = placed.view[batches, heads] if name == "lse" else placed.view[batches, :, heads]
            one[name] = memory.place_values(x)
        got = backward.gradients(alone, one)
        assert torch.equal(got["dq"], want["dq"][batch : batch + 1, :, 2 * head : 2 * head + 2])
        for name in ("dk", "dv"):
            assert torch.equal(got[name], want[name][batch : batch + 1, :, head : head + 1])


def test_strides_make_no_difference_to_the_bits(case: Case) -> None:
    inputs, want = _checked(case)
    turned = {
        name: memory.place_values(
            placed.view if placed.view.dim() == 3 else placed.view.transpose(1, 2).contiguous()
        )
        for name, placed in inputs.items()
    }
    got = backward.gradients(dataclasses.replace(case, layout="bhsd"), turned)
    assert _same_bits({name: x.transpose(1, 2) for name, x in got.items()}, want)


def test_absent_gradients_make_no_difference_to_the_others(case: Case) -> None:
    inputs, want = _checked(case)
    for count in (1, 2):
        for wanted in itertools.combinations(GRADIENTS, count):
            got = backward.gradients(dataclasses.replace(case, wanted=wanted), inputs)
            assert _same_bits(got, {name: want[name] for name in wanted})


def test_no_dlse_is_one_of_zeros(case: Case) -> None:
    without = dataclasses.replace(case, dlse=False)
    inputs, want = _checked(without)
    zeros = memory.place_values(torch.zeros(case.shape_of("dlse"), device=DEVICE))
    assert _same_bits(backward.gradients(case, {**inputs, "dlse": zeros}), want)


def test_what_the_workspace_held_makes_no_difference(kernel: str, case: Case) -> None:
    """Calls of other shapes take turns in one, and leave theirs behind."""
    every = [case, *_cases(kernel)]
    made = [(one, *_checked(one)) for one in every]
    most = max(Call(one, {**inputs, **backward.make_gradients(one, DEVICE)}).plan().workspace_bytes
               for one, inputs, _ in made)  # fmt: skip
    workspace = torch.full((most,), 255, dtype=torch.uint8, device=DEVICE)
    for _ in range(3):
        for one, inputs, want in made:
            assert _same_bits(backward.gradients(one, inputs, workspace), want)
    workspace.random_(0, 256)
    assert _same_bits(backward.gradients(case, made[0][1], workspace), made[0][2])


@pytest.mark.parametrize("lse", ["normal", "zero", "huge", "infinite", "nan"])
def test_an_lse_of_something_else_harms_nobody(lse: str, case: Case) -> None:
    inputs, want = _checked(case)
    values = torch.randn(case.shape_of("lse"), device=DEVICE) * 5
    if lse != "normal":
        values.fill_(
            {"zero": 0.0, "huge": 1e30, "infinite": float("inf"), "nan": float("nan")}[lse]
        )
    wrong = {**inputs, "lse": memory.place_values(values)}
    outputs = backward.make_gradients(case, DEVICE)
    Call(case, {**wrong, **outputs}).run()
    torch.cuda.synchronize()
    assert all(placed.intact() for placed in outputs.values())
    assert _same_bits(backward.gradients(case, inputs), want)


# ---- how calls run -----------------------------------------------------------------------------


def test_graph_replays_follow_the_inputs(case: Case) -> None:
    inputs, _ = _checked(case)
    outputs = backward.make_gradients(case, DEVICE)
    call = Call(case, {**inputs, **outputs})
    workspace = call.workspace()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call.run(workspace)
    for seed in range(1, 4):
        fresh, want = _checked(dataclasses.replace(case, seed=seed))
        for name, placed in inputs.items():
            placed.view.copy_(fresh[name].view)
        for placed in outputs.values():
            placed.view.fill_(float("nan"))
        workspace.fill_(255)
        graph.replay()
        assert _same_bits(backward.logical(outputs), want)


def test_runs_on_the_given_stream_and_waits_for_nothing(case: Case) -> None:
    inputs, want = _checked(case)
    outputs = backward.make_gradients(case, DEVICE)
    call = Call(case, {**inputs, **outputs})
    workspace = call.workspace()
    late = {name: placed.view.clone() for name, placed in inputs.items()}
    for placed in inputs.values():
        placed.view.fill_(float("nan"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for name, placed in inputs.items():
            placed.view.copy_(late[name])
    call.run(workspace, stream.cuda_stream)
    assert not stream.query()
    stream.synchronize()
    assert _same_bits(backward.logical(outputs), want)


def test_calls_that_follow_one_another(case: Case) -> None:
    """Each may begin before the one ahead has ended, and uses the same workspace and outputs."""
    inputs, want = _checked(case)
    outputs = backward.make_gradients(case, DEVICE)
    call = Call(case, {**inputs, **outputs})
    workspace = call.workspace()
    copies = []
    for _ in range(20):
        call.run(workspace)
        copies.append({name: x.clone() for name, x in backward.logical(outputs).items()})
        call.run(workspace)
    assert all(_same_bits(copy, want) for copy in copies)
    assert _same_bits(backward.logical(outputs), want)


def test_behind_the_forward_that_it_is_of(case: Case) -> None:
    """Which may not have ended when the prologue starts."""
    _, want = _checked(case)
    for _ in range(20):
        again = backward.make_inputs(case, DEVICE)
        assert _same_bits(backward.gradients(case, again), want)


# ---- the plan is the launch --------------------------------------------------------------------


def _planned(case: Case) -> tuple[Call, capi.Plan]:
    inputs = backward.make_inputs(case, DEVICE)
    call = Call(case, {**inputs, **backward.make_gradients(case, DEVICE)})
    return call, call.plan()


def _suffix(kernel: str, softcap: float | None) -> str:
    """The suffix of the kernel's name that this GPU takes for calls with such a softcap."""
    if kernel == "sm90":
        return "" if softcap is None else "_softcap"
    shared = torch.cuda.get_device_properties(0).shared_memory_per_multiprocessor
    return "" if shared > 200 * 1024 else "_ada"


@pytest.mark.parametrize("padding", [(0, 0), (56, 24), (8, 56)])
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_the_plan_is_the_launch(
    kernel: str, dtype: str, dims: tuple[int, int], padding: tuple[int, int], softcap: float | None
) -> None:
    case = Case(kernel=kernel, dtype=dtype, batch=2, seq_q=333, seq_k=444, heads_q=6, heads_kv=2,
                dim=dims[0] - padding[0], dim_v=dims[1] - padding[1], causal="bottom_right",
                softcap=softcap)  # fmt: skip
    call, plan = _planned(case)
    call.run()
    launches = capi.last_launches()
    assert capi.is_planned(plan, launches)
    assert (plan.family.decode(), plan.operation) == (kernel, b"attention_backward")
    assert plan.isa.startswith(b"sm_") and (plan.isa == b"sm_90a") == (kernel == "sm90")
    compiled = kernels.least_padding(f"{kernel}_backward", case.dim, case.dim_v)
    name = f"{kernel}_{dtype}_d{compiled[0]}_dv{compiled[1]}{_suffix(kernel, softcap)}"
    assert [launch.kernel.decode() for launch in launches] == [
        f"attention_backward_prologue_{name}",
        f"attention_backward_{name}",
        *([f"attention_backward_behind_{name}"] if kernel == "sm90" else []),
    ]
    prologue, main = launches[:2]
    tiles_q = -(-case.seq_q // main.tile_m) * case.batch * case.heads_q
    assert prologue.grid[0] == tiles_q * main.tile_m // prologue.tile_m
    items = -(-case.seq_k // main.tile_n) * case.batch * case.heads_kv
    resident = torch.cuda.get_device_properties(0).multi_processor_count
    blocks = max(1, main.cluster)  # that share an item
    assert main.grid[0] == blocks * min(items, resident // blocks)
    assert main.block[0] in {"sm90": (384, 512), "sm89": (128, 256)}[kernel]
    assert main.shared_bytes <= families.SHARED_BYTES["sm90_whole_tiles"]
    assert all(launch.local_bytes == 0 for launch in launches)
    for launch in launches:
        assert launch.device.device_id == 0
        assert 0 < launch.registers * launch.block[0] <= families.REGISTERS
    assert plan.microseconds > 0
    rows = tiles_q * main.tile_m
    assert plan.workspace_bytes <= rows * (4 * compiled[0] + 3 * 4) + 4096


def test_a_call_that_adds_has_a_repair_and_little_more_workspace(
    kernel: str, dims: tuple[int, int]
) -> None:
    if kernel != "sm90":
        pytest.skip("has no launch that repairs")
    case = Case(kernel=kernel, batch=2, seq_q=333, seq_k=444, heads_q=6, heads_kv=2, dim=dims[0],
                dim_v=dims[1], causal="bottom_right")  # fmt: skip
    adding = dataclasses.replace(case, accumulate=True)
    (_, plan), (call, more) = _planned(case), _planned(adding)
    assert more.launch_count == plan.launch_count == 3
    # A bit for each row and warp's lane, of parts of 32 columns at least.
    rows = 2 * (6 * 384 + 2 * 2 * 512)
    assert 0 < more.workspace_bytes - plan.workspace_bytes <= rows * dims[0] // 32
    call.run()
    assert capi.is_planned(more, capi.last_launches())
    unbounded = dataclasses.replace(adding, causal="none")
    assert _planned(unbounded)[1].launch_count == 2


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("dim", [8, 64, 128, 200, 256])
def test_a_call_that_names_no_family_is_served(dim: int, softcap: float | None) -> None:
    """By Hopper's kernels where they serve it."""
    for where in ({}, {"q": Placement((0, 1, 2, 3), (0, 0, 0, 0), flipped=(1,))}):
        case = Case(kernel=None, seq_q=333, seq_k=444, heads_q=4, heads_kv=2, dim=dim, dim_v=dim,
                    softcap=softcap, where=where)  # fmt: skip
        _, plan = _planned(case)
        by_sm90 = families.why_not("sm90_whole_tiles") is None and not where
        by_sm90 = by_sm90 and dim in backward.dims("sm90")
        assert plan.family.decode() == ("sm90" if by_sm90 else "sm89")
        backward.check_case(case, DEVICE)


@pytest.fixture(scope="module")
def _profiler_is_warm() -> None:
    """The first profile of a process starts the profiler's machinery; it sees less."""
    with profile(activities=[ProfilerActivity.CUDA]):
        torch.zeros(8, device=DEVICE).add_(1)
        torch.cuda.synchronize()


def _profiled_work(path: Path, call: Call, workspace: torch.Tensor) -> list[dict[str, Any]]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call.run(workspace)
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    work = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return sorted(work, key=lambda event: event["ts"])


@pytest.mark.usefixtures("_profiler_is_warm")
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_a_profiler_sees_the_planned_kernels_and_nothing_else(
    kernel: str, dtype: str, dims: tuple[int, int], tmp_path: Path
) -> None:
    case = Case(kernel=kernel, dtype=dtype, seq_q=333, seq_k=444, heads_q=2, dim=dims[0],
                dim_v=dims[1])  # fmt: skip
    call, _ = _planned(case)
    workspace = call.workspace()
    call.run(workspace)
    torch.cuda.synchronize()
    work = _profiled_work(tmp_path / "trace.json", call, workspace)
    launches = capi.last_launches()
    assert [event["cat"] for event in work] == ["kernel"] * 2
    for event, launch, function in zip(work, launches, ("prologue", "kernel"), strict=True):
        arguments = event["args"]
        assert tuple(arguments["grid"]) == tuple(launch.grid)
        assert tuple(arguments["block"]) == tuple(launch.block)
        assert arguments["shared memory"] == launch.shared_bytes
        space = f"{kernel}_backward" if function == "kernel" else "attention_backward"
        assert f"flashmoe::{space}::attention_backward_{function}<" in event["name"]
        assert f"{kernel}_backward::" in event["name"]
        traits = re.search(
            r"Traits<\s*(\w+),\s*(?:\(int\))?(\d+),\s*(?:\(int\))?(\d+)", event["name"]
        )
        assert traits is not None, event["name"]
        assert traits.groups() == (ELEMENTS[dtype], *map(str, dims))


@pytest.mark.usefixtures("sm90")
def test_what_sm90_does_not_compute_is_refused_and_leaves_the_outputs() -> None:
    case = Case(where={"q": Placement((0, 1, 2, 3), (0, 0, 0, 0), flipped=(1,))})
    inputs = backward.make_inputs(case, DEVICE)
    outputs = backward.make_gradients(case, DEVICE)
    call = Call(case, {**inputs, **outputs})
    workspace = torch.empty(1 << 24, dtype=torch.uint8, device=DEVICE)
    for make in (call.plan, lambda: call.run(workspace)):
        with pytest.raises(capi.FlashmoeError, match="a stride that is negative") as caught:
            make()
        assert caught.value.status == capi.UNSUPPORTED
        assert caught.value.sentence.startswith("kernel: cannot be served: sm90: ")
    torch.cuda.synchronize()
    assert all(placed.intact(inside=True) for placed in outputs.values())
