"""Gradients of grouped products on the GPU, for every family that computes them, against
float64."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from gpu import memory
from gpu.moe_calls import Call
from gpu.moe_gradient_calls import (
    FAMILIES,
    POISONS,
    assert_near,
    assert_same,
    product_call,
    product_reference,
    serving,
)
from gpu.moe_layers import DEVICE, DTYPES

pytestmark = pytest.mark.gpu

COUNTS = (0, 1, 15, 16, 17, 127, 128, 129)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return serving(request.param, "product")


def outputs_of(call: Call) -> dict[str, torch.Tensor]:
    return {n: call.placed[n].view for n in ("dx", "dw", "dbias") if n in call.placed}


def run(call: Call, poisons: Iterable[int] = POISONS[:1]) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    for poison in poisons:
        call.check_launch(poison, tuple(outputs_of(call)))
        made = {name: view.clone() for name, view in outputs_of(call).items()}
    return made


def check(dtype: str, family: str, **options: Any) -> Call:
    call = product_call(dtype, family, **options)
    made = run(call, POISONS)
    ref, plain = product_reference(call, torch.float64), product_reference(call, DTYPES[dtype])
    for name, gradient in made.items():
        assert_near(name, gradient, ref[name], plain[name], dtype)
        if gradient.dtype == torch.float32:  # and no less exact than fp32 sums are
            scale = float(ref[name].abs().max()) + 1e-30
            assert float((gradient - ref[name]).abs().max()) < 2e-5 * max(scale, 1.0), name
    return call


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_layouts(family: str, dtype: str, transposed: bool, turned: bool, wide: bool) -> None:
    for columns, out_columns in ((72, 40), (136, 264), (8, 520)):
        options: dict[str, Any] = {
            "columns": columns, "out_columns": out_columns, "transposed": transposed,
            "turned": turned, "out": "fp32" if wide else dtype,
        }  # fmt: skip
        # Rows before the first expert's and behind the last's are nobody's.
        check(dtype, family, rows=75, experts=4, offsets=[3, 3, 20, 41, 70], **options)
        check(dtype, family, rows=37, experts=4, counts=[37, 0, 5, 16], **options)


@pytest.mark.parametrize("wide", [False, True])
def test_numbers_of_rows(family: str, wide: bool) -> None:
    offsets = [0]
    for count in (*COUNTS, 700):
        offsets.append(offsets[-1] + count)
    out = "fp32" if wide else None
    check("bf16", family, rows=offsets[-1], experts=9, offsets=offsets, columns=136,
          out_columns=144, out=out)  # fmt: skip
    check("bf16", family, rows=130, experts=8, counts=COUNTS, columns=136, out_columns=144,
          out=out)  # fmt: skip


def test_a_large_product(family: str) -> None:
    check("bf16", family, rows=6000, experts=7, columns=1024, out_columns=520,
          offsets=[0, 100, 100, 3000, 3300, 5000, 5999, 6000])  # fmt: skip


def test_bounds_beyond_the_rows(family: str) -> None:
    call = product_call("bf16", family, rows=50, experts=1, offsets=[0, 2**31 - 1])
    want = run(product_call("bf16", family, rows=50, experts=1, offsets=[0, 50]))
    assert_same(run(call), want)
    call = product_call("bf16", family, rows=20, experts=3, counts=[2**31 - 1, -5, 20])
    want = run(product_call("bf16", family, rows=20, experts=3, counts=[20, 0, 20]))
    assert_same(run(call), want)


@pytest.mark.parametrize("counted", [False, True])
def test_each_alone(family: str, counted: bool) -> None:
    bounds: dict[str, Any] = {"counts": [9, 40, 0]} if counted else {"offsets": [2, 30, 31, 40]}
    given: dict[str, Any] = {"rows": 40, "experts": 3} | bounds
    want = run(product_call("bf16", family, **given))
    for name in want:
        assert_same(run(product_call("bf16", family, wanted=[name], **given)), want, [name])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_accumulated_twice_is_twice(family: str, dtype: str, wide: bool, transposed: bool) -> None:
    given: dict[str, Any] = {
        "rows": 90, "experts": 3, "offsets": [4, 50, 51, 80], "out": "fp32" if wide else dtype,
        "transposed": transposed, "turned": not transposed,
    }  # fmt: skip
    once = run(product_call(dtype, family, **given))
    call = product_call(dtype, family, accumulate=True, **given)
    for view in outputs_of(call).values():
        view.zero_()
    for name, gradient in run(call).items():
        assert torch.equal(gradient, once[name]), name
    for name, gradient in run(call).items():
        assert torch.equal(gradient.double(), 2 * once[name].double()), name


def test_nan_stays_with_its_row_and_expert(family: str) -> None:
    for where in ("x", "dout"):
        call = product_call("bf16", family, rows=70, experts=4, offsets=[0, 17, 33, 50, 70])
        clean = run(call)
        call.placed[where].view[20] = torch.nan
        made = run(call)
        row = torch.arange(70, device=DEVICE) == 20
        mine = torch.arange(4, device=DEVICE) == 1
        for name, gradient in made.items():
            whose = row if name == "dx" else mine
            touched = gradient.isnan().flatten(1).any(1)
            if where == "x" and name != "dw":
                whose = torch.zeros_like(whose)
            assert torch.equal(touched, whose), (where, name)
            rest = ~whose
            assert torch.equal(memory.bits(gradient[rest]), memory.bits(clean[name][rest])), name


def test_no_rows(family: str) -> None:
    for bounds in ({"offsets": [0, 0, 0]}, {"counts": [0, 0]}):
        for rows in (0, 16):
            made = run(product_call("bf16", family, rows=rows, experts=2, **bounds))
            for name, gradient in made.items():
                assert (gradient == 0).all(), name


def test_bits_and_a_captured_call(family: str) -> None:
    call = product_call("bf16", family, rows=500, experts=5, columns=264, out_columns=136,
                        offsets=[0, 100, 300, 310, 444, 500])  # fmt: skip
    want = run(call)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        call.launch()
    for _ in range(100):
        graph.replay()
        torch.cuda.synchronize()
        assert_same(outputs_of(call), want)
    other = [0, 0, 1, 17, 400, 480]
    call.placed["offsets"].view.copy_(torch.tensor(other))
    graph.replay()
    torch.cuda.synchronize()
    again = product_call("bf16", family, rows=500, experts=5, columns=264, out_columns=136,
                         offsets=other)  # fmt: skip
    assert_same(outputs_of(call), run(again))


def test_the_plan_names_the_family(family: str) -> None:
    plan = product_call("bf16", family, rows=64, experts=2).plan
    assert plan.family.decode() == family
    assert plan.microseconds > 0
    default = product_call("bf16", None, rows=64, experts=2).plan
    assert default.family.decode() in FAMILIES
