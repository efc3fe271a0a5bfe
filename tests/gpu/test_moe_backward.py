"""Gradients of layers on the GPU, for every family that computes them, against float64."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re

import capi
import moe_oracle
import pytest
import torch
from gpu import memory, moe_gradient_calls
from gpu.memory import Placement
from gpu.moe_gradient_calls import FAMILIES, Gradients, assert_same, routing_of, serving
from gpu.moe_layers import DEVICE, generator
from moe_cases import CASES, Case

pytestmark = pytest.mark.gpu

BASE = Case(tokens=70, hidden=136, inner=72, experts=5, top_k=2)
LAYOUTS = list(itertools.product((False, True), (False, True)))
DTYPES = ("bf16", "fp16")


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Each kernel family that has gradients of layers on this GPU, to be asked for by name."""
    return serving(request.param, "layer")


def of_gate(gate: str) -> float:
    return 0.0 if gate == "none" else 1.0


def test_a_family_serves_here() -> None:
    assert moe_gradient_calls.why_not("sm89", "layer") is None


@pytest.mark.parametrize("gate", moe_oracle.GATES)
@pytest.mark.parametrize(("transposed", "down_transposed"), LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts(
    family: str, gate: str, transposed: bool, down_transposed: bool, dtype: str
) -> None:
    """Layouts of the weights and, separately, of their gradients; in the dtype of x and in fp32."""
    case = dataclasses.replace(BASE, gate=gate, transposed=transposed, bias="fp32",
                               down_transposed=down_transposed)  # fmt: skip
    for out, turned, on_input, saved in ((dtype, transposed, False, True),
                                         (dtype, not transposed, True, False),
                                         ("fp32", True, False, False),
                                         ("fp32", False, True, True)):  # fmt: skip
        one = dataclasses.replace(case, weight_on_input=on_input)
        Gradients.of(one, dtype, family, missing=0.1, out=out, turned=turned, saved=saved).check()


@pytest.mark.parametrize("activation", moe_oracle.ACTIVATIONS)
@pytest.mark.parametrize("gate", ["gate_up", "none"])
@pytest.mark.parametrize("bias", [None, "x", "fp32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(family: str, activation: str, gate: str, bias: str | None, dtype: str) -> None:
    case = dataclasses.replace(BASE, activation=activation, gate=gate, bias=bias, top_k=3)
    Gradients.of(case, dtype, family, saved=True).check()
    limited = dataclasses.replace(
        case, limit=0.75, up_offset=of_gate(gate), alpha=1.702 if activation == "silu" else 1.0
    )
    for on_input in (False, True):
        one = dataclasses.replace(limited, weight_on_input=on_input)
        Gradients.of(one, dtype, family, coarse=True, saved=not on_input).check()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_models(family: str, case: Case, dtype: str) -> None:
    """What models do, at extents that fill tiles and at such as do not."""
    for extents in ({"hidden": 512, "inner": 256, "experts": 16, "top_k": min(case.top_k, 4)},
                    {"hidden": 200, "inner": 136, "experts": 5}):  # fmt: skip
        for tokens in (1, 7, 130):
            one = dataclasses.replace(case, **extents, tokens=tokens)
            coarse = one.limit is not None
            Gradients.of(one, dtype, family, coarse=coarse, saved=tokens > 7).check()


@pytest.mark.parametrize("hidden", [8, 16, 120, 264, 1032])
@pytest.mark.parametrize("inner", [8, 24, 128, 136, 520])
def test_extents(family: str, hidden: int, inner: int) -> None:
    for gate, transposed, tokens in (("gate_up", False, 33), ("interleaved", True, 300)):
        case = Case(tokens=tokens, hidden=hidden, inner=inner, experts=3, top_k=2, gate=gate,
                    transposed=transposed)  # fmt: skip
        Gradients.of(case, "bf16", family, saved=True).check(poisons=(0xFF,))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", ["gate_up", "separate"])
def test_numbers_of_rows(family: str, dtype: str, gate: str) -> None:
    """Experts with 0, 1, 15 to 17 and 127 to 129 rows, and one that every token takes."""
    counts = [0, 1, 15, 16, 17, 127, 128, 129]
    tokens = 300
    ids = torch.full((tokens, 9), -1, dtype=torch.int32, device=DEVICE)
    g = generator(3)
    for e, count in enumerate(counts):
        ids[torch.randperm(tokens, generator=g, device=DEVICE)[:count], e] = e
    ids[:, 8] = 8
    case = Case(tokens=tokens, hidden=192, inner=136, experts=9, top_k=9, gate=gate, bias="fp32")
    made = Gradients.of(case, dtype, family, ids=ids, saved=True).check()
    for name, gradient in made.items():
        if name[:2] in ("dw", "db") and name != "dweights":
            assert (gradient[0] == 0).all(), name
    assert (made["dweights"][ids < 0] == 0).all()


@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_a_large_layer(family: str, top_k: int) -> None:
    case = Case(tokens=4100, hidden=1024, inner=384, experts=16, top_k=top_k)
    Gradients.of(case, "bf16", family, saved=True).check(poisons=(0xFF,))


@pytest.mark.parametrize("gate", moe_oracle.GATES)
def test_each_alone(family: str, gate: str) -> None:
    """What is wanted beside a gradient changes none of its bits, and neither does saving."""
    for on_input in (False, True):
        case = dataclasses.replace(BASE, gate=gate, bias="x", weight_on_input=on_input)
        whole = Gradients.of(case, "bf16", family, missing=0.2)
        want = whole.run()
        for name in whole.names:
            alone = Gradients.of(case, "bf16", family, ids=whole.ids, wanted=[name])
            assert_same(alone.run(), want, [name])
        saved = Gradients.of(case, "bf16", family, ids=whole.ids, saved=True)
        assert_same(saved.run(), want)
        assert saved.call.plan.launch_count == whole.call.plan.launch_count - 1


@pytest.mark.parametrize("gate", moe_oracle.GATES)
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("saved", [False, True])
def test_bits_with_any_bound(family: str, gate: str, on_input: bool, saved: bool) -> None:
    """In chunks of I and of H, the last of which are no whole ones: of all gradients, and of such
    as need no dz of all columns."""
    case = dataclasses.replace(BASE, hidden=776, inner=1040, gate=gate, bias="x",
                               weight_on_input=on_input, tokens=150)  # fmt: skip
    of_weights = tuple(name for name in moe_gradient_calls.ALL if name not in ("dx", "dweights"))
    for wanted in (moe_gradient_calls.ALL, of_weights, ("dx",), ("dweights",)):
        whole = Gradients.of(case, "bf16", family, missing=0.2, saved=saved, wanted=wanted)
        want, most = whole.run(), whole.call.plan.workspace_bytes
        inputs = {name: x for name, x in whole.call.placed.items() if name not in whole.names}
        inputs.pop("pre_activation", None)
        again = functools.partial(Gradients.of, case, "bf16", family, ids=whole.ids, saved=saved,
                                  wanted=wanted, inputs=inputs)  # fmt: skip
        with pytest.raises(capi.FlashmoeError, match="max_workspace_bytes: got 1") as refusal:
            again(max_workspace_bytes=1)
        told = re.search(r"max_workspace_bytes:.*? and from (\d+) on", str(refusal.value))
        assert told is not None, refusal.value
        least = int(told[1])
        for bound in (least, least * 5 // 4, most):
            made = again(max_workspace_bytes=bound)
            plan = made.call.plan
            assert plan.workspace_bytes <= bound
            repeats = {launch.repeats for launch in plan.launches[: plan.launch_count]}
            assert repeats == {0} or bound < most
            if bound == least and wanted is moe_gradient_calls.ALL:
                assert max(repeats) >= 4  # of 776 or of 1040 columns, whichever need the room
            assert_same(made.run(), want)


@pytest.mark.parametrize("gate", moe_oracle.GATES)
@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_that_overwrite_pre_activation(
    family: str, gate: str, on_input: bool, dtype: str
) -> None:
    """In a workspace that is smaller by its bytes; what lies between its rows stays. Rows are read
    by warps of which each has several, and longer than what a warp reads of one at a time."""
    of_weights = tuple(name for name in moe_gradient_calls.ALL if name not in ("dx", "dweights"))
    for (inner, tokens), wanted in itertools.product(
        ((520, 150), (72, 16000)), (moe_gradient_calls.ALL, of_weights, ("dx",), ("dw_down",))
    ):
        has_dz = gate != "interleaved" and wanted != ("dw_down",)
        case = dataclasses.replace(BASE, hidden=264, inner=inner, gate=gate, bias="x",
                                   weight_on_input=on_input, tokens=tokens)  # fmt: skip
        whole = Gradients.of(case, dtype, family, missing=0.2, saved=True, wanted=wanted)
        want, free = whole.run(), whole.call.plan.workspace_bytes
        inputs = {name: x for name, x in whole.call.placed.items() if name not in whole.names}
        again = functools.partial(Gradients.of, case, dtype, family, ids=whole.ids, wanted=wanted,
                                  saved=True, overwrites=True, inputs=inputs)  # fmt: skip
        made = again()
        saved = made.call.placed["pre_activation"].view
        size = made.call.plan.workspace_bytes
        rounding = 256
        bytes_saved = saved.numel() * saved.element_size() if has_dz else 0
        assert abs(free - size - bytes_saved) < rounding
        # A little less than all, which is as much as chunks of 256 may have, or more.
        less = 9_000 if gate == "separate" else 100_000
        in_chunks = [again(max_workspace_bytes=size - less)] if inner > 256 else []
        for one in (made, *in_chunks):
            assert_same(one.run(poisons=moe_gradient_calls.POISONS), want)
            saved = one.call.placed["pre_activation"].view
            assert one.overwritten is not None
            changed = memory.bits(saved) != memory.bits(one.overwritten)
            assert bool(changed.any()) == has_dz
            # Rows without an expert stay.
            assert not changed[int(one.call.placed["offsets"].view[-1]) :].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
def test_accumulated_twice_is_twice(family: str, dtype: str, wide: bool) -> None:
    case = dataclasses.replace(BASE, gate="separate", bias="x", transposed=True)
    out = "fp32" if wide else dtype
    for turned in (False, True):
        first = Gradients.of(case, dtype, family, out=out, turned=turned)
        once = first.run()
        more = Gradients.of(case, dtype, family, ids=first.ids, out=out, turned=turned,
                            accumulate=True)  # fmt: skip
        for view in more.outputs.values():
            view.zero_()
        for name, gradient in more.run().items():
            assert torch.equal(gradient, once[name]), name
        for name, gradient in more.run().items():
            assert torch.equal(gradient.double(), 2 * once[name].double()), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", ["gate_up", "none"])
@pytest.mark.parametrize("where", ["x", "dout"])
@pytest.mark.parametrize("on_input", [False, True])
def test_nan_of_one_token_stays_with_its_experts(
    family: str, dtype: str, gate: str, where: str, on_input: bool
) -> None:
    """The experts have rows that end within steps and tiles, beside those of their neighbours."""
    case = dataclasses.replace(BASE, gate=gate, tokens=77, experts=7, weight_on_input=on_input)
    gradients = Gradients.of(case, dtype, family)
    clean = gradients.run()
    gradients.call.placed[where].view[11] = torch.nan
    made = gradients.run()
    token = torch.arange(case.tokens, device=DEVICE) == 11
    mine = torch.isin(torch.arange(case.experts, device=DEVICE), gradients.ids[11])
    for name, gradient in made.items():
        touched = gradient.isnan().flatten(1).any(1)
        of_experts = name != "dweights" and name[:2] in ("dw", "db")
        whose = mine if of_experts else token
        if not (where == "x" and name == "db_down"):  # which is a sum of dout
            assert torch.equal(touched, whose), name
        rest = ~whose
        assert torch.equal(memory.bits(gradient[rest]), memory.bits(clean[name][rest])), name


def test_bits_of_every_run(family: str) -> None:
    case = Case(tokens=900, hidden=520, inner=264, experts=12, top_k=3, gate="separate", bias="x")
    gradients = Gradients.of(case, "bf16", family, missing=0.1)
    want = gradients.run()
    differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for i in range(1000):
        gradients.call.workspace[4096:-4096] = i % 256
        with torch.cuda.stream(torch.cuda.Stream() if i % 50 == 1 else torch.cuda.current_stream()):
            torch.cuda.synchronize()
            gradients.call.launch()
            torch.cuda.synchronize()
        for name, view in gradients.outputs.items():
            differ += (memory.bits(view) != memory.bits(want[name])).sum()
    assert differ == 0


def test_bits_of_calls_at_a_time(family: str) -> None:
    """On as many streams, each with its own workspace and outputs."""
    case = Case(tokens=700, hidden=520, inner=264, experts=12, top_k=3, bias="x")
    first = Gradients.of(case, "bf16", family, missing=0.1)
    want = first.run()
    inputs = {name: x for name, x in first.call.placed.items() if name not in first.names}
    calls = [first] + [
        Gradients.of(case, "bf16", family, ids=first.ids, inputs=inputs) for _ in range(3)
    ]
    streams = [torch.cuda.Stream() for _ in calls]
    differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for i in range(250):
        for one in calls:
            one.call.workspace[4096:-4096] = i % 256
            for view in one.outputs.values():
                view.fill_(torch.nan)
        torch.cuda.synchronize()
        for one, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                one.call.launch()
        torch.cuda.synchronize()
        for one in calls:
            for name, view in one.outputs.items():
                differ += (memory.bits(view) != memory.bits(want[name])).sum()
    assert differ == 0


def test_a_captured_call_takes_another_routing(family: str) -> None:
    case = dataclasses.replace(BASE, tokens=200, experts=6, bias="x")
    one = Gradients.of(case, "bf16", family)
    want = one.run()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        one.call.launch()
    graph.replay()
    torch.cuda.synchronize()
    assert_same(one.outputs, want)
    # All tokens to the last two experts.
    other = torch.tensor([4, 5], dtype=torch.int32, device=DEVICE).repeat(case.tokens, 1)
    for name, values in routing_of(other, case).items():
        one.call.placed[name].view.copy_(values)
    graph.replay()
    torch.cuda.synchronize()
    replayed = {name: view.clone() for name, view in one.outputs.items()}
    one.ids = other
    assert_same(one.check(), replayed)


def test_hostile_routing_stays_inside(family: str) -> None:
    """Whatever the routing holds: nothing but the gradients is written."""
    g = torch.Generator().manual_seed(8)
    for case in (BASE, dataclasses.replace(BASE, weight_on_input=True, gate="separate")):
        gradients = Gradients.of(case, "bf16", family)
        good = {n: gradients.call.placed[n].view.clone() for n in ("offsets", "pairs", "slots")}
        for _ in range(20):
            for name, values in good.items():
                wild = torch.randint(-(2**31), 2**31 - 1, values.shape, generator=g).int()
                near = torch.randint(-5, 200, values.shape, generator=g).int()
                wild = torch.where(torch.rand(values.shape, generator=g) < 0.5, wild, near)
                hit = torch.rand(values.shape, generator=g) < 0.3
                mixed = torch.where(hit.to(DEVICE), wild.to(DEVICE), values)
                gradients.call.placed[name].view.copy_(mixed)
            gradients.run()
        # An end so far below the beginning that their difference does not fit 32 bits.
        gradients.call.placed["offsets"].view[1:3] = torch.tensor([8, -(2**31)], device=DEVICE)
        gradients.run()


@pytest.mark.parametrize("bias", [None, "fp32"])
def test_two_slots_of_one_pair(family: str, bias: str | None) -> None:
    """The one that `slots` names counts, and the other does not, whatever was saved of it."""
    case = dataclasses.replace(BASE, bias=bias)
    ids = torch.full((case.tokens, 2), -1, dtype=torch.int32, device=DEVICE)
    ids[:, 0] = torch.arange(case.tokens, device=DEVICE) % case.experts
    for saved in (False, True):
        gradients = Gradients.of(case, "bf16", family, ids=ids, saved=saved)
        want = gradients.run()
        placed = gradients.call.placed
        last = int(placed["offsets"].view[-1])
        placed["pairs"].view[last] = placed["pairs"].view[0]
        placed["offsets"].view[-1] += 1
        if saved:
            placed["pre_activation"].view[last] = torch.nan
        assert_same(gradients.run(), want)


def test_no_tokens(family: str) -> None:
    case = dataclasses.replace(BASE, tokens=0, bias="fp32")
    made = Gradients.of(case, "bf16", family).run()
    for name, gradient in made.items():
        assert (gradient == 0).all(), name
    adds = Gradients.of(case, "bf16", family, accumulate=True)
    for view in adds.outputs.values():
        view.fill_(7)
    for name, gradient in adds.run().items():
        assert (gradient == 7).all(), name


def test_limits_at_the_kink(family: str) -> None:
    """A g or u at the limit has its gradient, one beyond it has none."""
    case = Case(tokens=1, hidden=8, inner=8, experts=1, top_k=1, limit=1.0)
    gradients = Gradients.of(case, "fp16", family, ids=torch.zeros(1, 1, device=DEVICE).int())
    given = {name: placed.view for name, placed in gradients.call.placed.items()}
    above = 1.0 + 2**-10
    given["w_gate_up"].zero_()
    given["w_gate_up"][0, :8, 0] = torch.tensor([0.5, 1.0, above, 2.0, -3.0, -1.0, 0.0, 5.0])
    given["w_gate_up"][0, 8:, 0] = torch.tensor([0.5, 1.0, above, -2.0, -1.0, -above, 0.0, 1.0])
    given["x"].zero_()
    given["x"][0, 0] = 1
    for name in ("w_down", "dout", "weights"):
        given[name].fill_(1)
    db = gradients.run()["db_gate_up"][0]
    assert (db[:8] == 0).tolist() == [False, False, True, True, False, False, True, True]
    assert (db[8:] == 0).tolist() == [False, False, True, True, False, True, True, False]


def test_rows_of_x_and_dout_that_repeat(family: str) -> None:
    """Strides of 0, as in an expanded gradient."""
    case = dataclasses.replace(BASE, bias="x")
    ids = moe_gradient_calls.random_ids(case, 0.0)
    repeated = Gradients.inputs_of(case, "bf16", ids)
    whole = dict(repeated)
    for name in ("x", "dout"):
        values = repeated[name].view.clone()
        repeated[name] = memory.place_values(values, Placement((0, 1), (0, 0), broadcast=(0,)))
        whole[name] = memory.place_values(repeated[name].view.contiguous())
    want = Gradients.of(case, "bf16", family, ids=ids, inputs=whole).run()
    assert_same(Gradients.of(case, "bf16", family, ids=ids, inputs=repeated).run(), want)


def test_what_the_family_is_asked(family: str) -> None:
    """The plan is that of the family, with a time and every launch; one by default is as well."""
    named = Gradients.of(BASE, "bf16", family).call.plan
    assert named.family.decode() == family
    assert named.microseconds > 0
    assert Gradients.of(BASE, "bf16", None).call.plan.family.decode() in FAMILIES
    mixed = dataclasses.replace(BASE, gate="separate")
    ids = moe_gradient_calls.random_ids(mixed, 0.0)
    inputs = Gradients.inputs_of(mixed, "bf16", ids)
    turned = Placement((0, 2, 1), (0, 0, 0))
    inputs["w_up"] = memory.place_values(inputs["w_up"].view.clone(), turned)
    with pytest.raises(capi.FlashmoeError, match="w_up: got transposed"):
        Gradients.of(mixed, "bf16", family, ids=ids, inputs=inputs)
