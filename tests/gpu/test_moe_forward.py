"""Layers and grouped products on the GPU, for every family that serves them, against float64."""

from __future__ import annotations

import ctypes as c
import dataclasses
import itertools
from typing import Any

import capi
import capi_moe
import flashmoe_science as fm
import moe_oracle
import pytest
import torch
from gpu import memory, moe_layers
from gpu.memory import Placement
from gpu.moe_layers import (
    DEVICE,
    DTYPES,
    Layer,
    check,
    generator,
    make,
    place_weights,
    random_ids,
    routing_of,
)
from moe_cases import CASES, Case

pytestmark = pytest.mark.gpu

# Token counts about the ends of tiles, of few and of many tokens an expert.
TOKENS = (1, 2, 3, 5, 8, 17, 64, 100, 257, 1000)
BASE = Case(tokens=100, hidden=256, inner=192, experts=8, top_k=2)
# Rows that the copy engine brings for few tokens on Hopper and that are not whole lines.
LONG = {"hidden": 520, "inner": 776}


@pytest.fixture(params=moe_layers.FAMILIES)
def moe_family(request: pytest.FixtureRequest) -> str:
    """Each kernel family that computes layers on this GPU, to be asked for by name."""
    reason = moe_layers.why_not(request.param)
    if reason is not None:
        pytest.skip(reason)
    return request.param


def must_serve(family: str) -> bool:
    """Families of which no call may be refused."""
    return family == "sm89"


def may_refuse(family: str, case: Case) -> bool:
    """Layouts of weights that a family has no kernels for."""
    return family == "sm89_few_tokens" and (case.transposed or case.turns_down)


def judge(family: str, said: list[bool]) -> None:
    assert any(said), "the family serves none of these"
    assert all(said) or not must_serve(family)


def test_a_family_serves_here() -> None:
    assert "sm89" in moe_layers.serving()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("pre_activation", [False, True])
def test_models(moe_family: str, case: Case, dtype: str, pre_activation: bool) -> None:
    """What models do, at extents that fill tiles and at such as do not."""
    said = []
    for extents in ({}, {"hidden": 512, "inner": 256, "experts": 16, "top_k": min(case.top_k, 4)},
                    {"hidden": 200, "inner": 136, "experts": 5}):  # fmt: skip
        for tokens in (1, 7, 130):
            one = dataclasses.replace(case, **extents, tokens=tokens)
            said.append(check(make(one, dtype), moe_family, pre_activation=pre_activation))
    assert any(said) or may_refuse(moe_family, case)
    assert all(said) or not must_serve(moe_family)


EVERYTHING = list(itertools.product(moe_oracle.GATES, (False, True), moe_oracle.ACTIVATIONS))


@pytest.mark.parametrize(("gate", "transposed", "activation"), EVERYTHING)
def test_every_layout_and_activation(
    moe_family: str, gate: str, transposed: bool, activation: str
) -> None:
    """The second matrix as the first and, of a family that takes both, the other way round."""
    for dtype, bias, weight_on_input in (("bf16", None, False), ("fp16", "fp32", True),
                                         ("bf16", "x", False)):  # fmt: skip
        case = dataclasses.replace(BASE, gate=gate, transposed=transposed, activation=activation,
                                   bias=bias, weight_on_input=weight_on_input,
                                   tokens=13)  # fmt: skip
        if bias == "fp32" and moe_family != "sm89_few_tokens":
            case = dataclasses.replace(case, down_transposed=not transposed)
        served = check(make(case, dtype), moe_family)
        assert served or not must_serve(moe_family)
        limited = dataclasses.replace(case, limit=0.8, tokens=90, hidden=136,
                                      up_offset=0.0 if gate == "none" else 1.0,
                                      alpha=1.702 if activation == "silu" else 1.0)  # fmt: skip
        before = bias == "x"
        served = check(make(limited, dtype, gap=8), moe_family, pre_activation=before)
        assert served or not must_serve(moe_family)
        if moe_family == "sm89_few_tokens":  # the kernels of long rows, on Hopper
            few = dataclasses.replace(limited, tokens=5, **LONG)
            assert check(make(few, dtype), moe_family, pre_activation=before) == served


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("skew", [0.0, 3.0])
def test_numbers_of_tokens(moe_family: str, tokens: int, skew: float) -> None:
    for experts, top_k in ((8, 2), (64, 8), (60, 4)):
        case = Case(tokens=tokens, hidden=512, inner=128, experts=experts, top_k=top_k)
        served = check(make(case, "bf16", skew=skew), moe_family)
        assert served or not must_serve(moe_family)


@pytest.mark.parametrize("hidden", [8, 16, 40, 64, 120, 192, 320, 1024, 2880])
@pytest.mark.parametrize("inner", [8, 24, 64, 136, 256, 704])
def test_extents(moe_family: str, hidden: int, inner: int) -> None:
    for transposed, tokens in ((False, 9), (True, 77), (False, 300)):
        case = Case(tokens=tokens, hidden=hidden, inner=inner, experts=4, top_k=2,
                    transposed=transposed)  # fmt: skip
        served = check(make(case, "bf16"), moe_family)
        assert served or not must_serve(moe_family)


@pytest.mark.parametrize("hidden", [512, 520, 1000, 2880])
@pytest.mark.parametrize("inner", [512, 776, 1032, 1544])
def test_extents_of_few_tokens(moe_family: str, hidden: int, inner: int) -> None:
    for tokens, gate, bias, dtype in (
        (1, "gate_up", None, "bf16"), (3, "interleaved", "x", "fp16"), (5, "none", None, "bf16"),
        (8, "separate", "fp32", "bf16"),
    ):  # fmt: skip
        case = Case(tokens=tokens, hidden=hidden, inner=inner, experts=6, top_k=2, gate=gate,
                    bias=bias)  # fmt: skip
        for skew in (0.0, 3.0):
            served = check(make(case, dtype, skew=skew), moe_family)
            assert served or not must_serve(moe_family)


@pytest.mark.parametrize("inner", [40, 64, 72])
def test_many_tiles_of_few_columns(moe_family: str, inner: int) -> None:
    """Tiles that end sooner than what became of the ones before is written."""
    case = Case(tokens=600, hidden=2880, inner=inner, experts=96, top_k=4)
    served = check(make(case, "bf16"), moe_family)
    assert served or not must_serve(moe_family)


@pytest.mark.parametrize("hidden", [24, 64, 128, 192, 256])
def test_many_tiles_of_few_columns_of_x(moe_family: str, hidden: int) -> None:
    """Tiles of `up` that are over before their output is, wide and narrow."""
    for case in (
        Case(tokens=8000, hidden=hidden, inner=2048, experts=4, top_k=2),
        Case(tokens=900, hidden=hidden, inner=4096, experts=96, top_k=4),
        Case(tokens=8000, hidden=hidden, inner=2048, experts=4, top_k=2, bias="x", limit=1.0),
    ):
        for _ in range(3):
            served = check(make(case, "bf16"), moe_family)
            assert served or not must_serve(moe_family)


@pytest.mark.parametrize("hidden", [8, 136, 520, 1536])
@pytest.mark.parametrize("inner", [200, 256, 456, 512])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_many_tokens_of_few_columns(moe_family: str, dtype: str, inner: int, hidden: int) -> None:
    """Runs of tiles of one expert, some of many tokens and some of few."""
    for tokens, experts, skew in ((2000, 9, 0.0), (2500, 7, 3.0), (5000, 4, 0.0)):
        case = Case(tokens=tokens, hidden=hidden, inner=inner, experts=experts, top_k=2)
        served = check(make(case, dtype, skew=skew), moe_family)
        assert served or not must_serve(moe_family)


@pytest.mark.parametrize("skew", [0.0, 3.0])
@pytest.mark.parametrize("inner", [256, 512])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_many_tokens_and_rows_of_few_columns(
    moe_family: str, dtype: str, inner: int, skew: float
) -> None:
    """So many tiles that runs of them are as long as they get."""
    case = Case(tokens=6000, hidden=6144, inner=inner, experts=3, top_k=1)
    served = check(make(case, dtype, skew=skew), moe_family)
    assert served or not must_serve(moe_family)


@pytest.mark.parametrize("inner", [256, 512])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_experts_of_every_width_of_tiles(moe_family: str, dtype: str, inner: int) -> None:
    """None, as many tokens as fill a tile of each width, one less, and so many of the last expert
    that they have enough on average."""
    counts = [0, *(16 * units - less for units in range(1, 13) for less in (0, 1))]
    counts.append(384 * (len(counts) + 1) - sum(counts))
    ids = torch.repeat_interleave(
        torch.arange(len(counts), device=DEVICE), torch.tensor(counts, device=DEVICE)
    )
    ids = ids[torch.randperm(ids.numel(), generator=generator(0), device=DEVICE)]
    case = Case(tokens=ids.numel(), hidden=264, inner=inner, experts=len(counts), top_k=1)
    served = check(make(case, dtype, ids=ids.int()[:, None].contiguous()), moe_family)
    assert served or not must_serve(moe_family)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_layer_of_a_model(moe_family: str, dtype: str) -> None:
    """Qwen3-30B-A3B and Mixtral's proportions."""
    said = []
    for tokens in (1, 4, 8, 64, 700):
        case = Case(tokens=tokens, hidden=2048, inner=768, experts=128, top_k=8)
        said.append(check(make(case, dtype), moe_family))
        case = Case(tokens=tokens, hidden=1024, inner=3584, experts=8, top_k=2)
        said.append(check(make(case, dtype), moe_family))
    judge(moe_family, said)


@pytest.mark.parametrize("gate", ["gate_up", "separate", "none"])
def test_matrices_are_transposed_one_by_one(moe_family: str, gate: str) -> None:
    """A family serves what it has a kernel for, rightly, and names what it has none for."""
    layer = make(dataclasses.replace(BASE, gate=gate, tokens=6), "bf16")
    names = [name for name in ("w_gate_up", "w_up", "w_down") if name in layer.values]
    for turned in itertools.product((False, True), repeat=len(names)):
        arguments = dict(layer.arguments)
        for name, turn in zip(names, turned, strict=True):
            if turn:
                w = arguments[name]
                arguments[name] = w.transpose(1, 2).contiguous().transpose(1, 2)
        is_turned = dict(zip(names, turned, strict=True))
        differ = gate == "separate" and is_turned["w_gate_up"] != is_turned["w_up"]
        serves = not any(turned) if moe_family == "sm89_few_tokens" else not differ
        if serves:
            out = fm.moe_forward(**arguments, kernel=moe_family)
            moe_oracle.assert_forward(out, **arguments)
        else:
            first = (
                next(n for n in names if is_turned[n])
                if moe_family == "sm89_few_tokens"
                else "w_up"
            )
            sentence = f"kernel: cannot be served: {moe_family}: {first}: got "
            with pytest.raises(NotImplementedError, match=f"^{sentence}"):
                fm.moe_forward(**arguments, kernel=moe_family)


EDGES: dict[str, tuple[Case, Any]] = {
    "no tokens": (dataclasses.replace(BASE, tokens=0), None),
    "one expert": (dataclasses.replace(BASE, experts=1, top_k=1), None),
    "every expert": (dataclasses.replace(BASE, experts=6, top_k=6), None),
    "K of one": (dataclasses.replace(BASE, top_k=1), None),
    "K of 32": (dataclasses.replace(BASE, experts=40, top_k=32, tokens=20), None),
    "1024 experts": (Case(tokens=50, hidden=64, inner=32, experts=1024, top_k=8), None),
    "all to one": (dataclasses.replace(BASE, top_k=1, tokens=700), "one"),
    "all to the last": (dataclasses.replace(BASE, top_k=1, tokens=3), "last"),
    "nobody's": (BASE, "none"),
    "some nobody's": (dataclasses.replace(BASE, tokens=333), "some"),
    "twice the same": (BASE, "twice"),
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("tokens", [None, 4, 7])
def test_edges(moe_family: str, edge: str, tokens: int | None) -> None:
    case, ids_of = EDGES[edge]
    if tokens is not None and case.tokens:
        case = dataclasses.replace(case, tokens=tokens)
        if case.experts <= 64:
            case = dataclasses.replace(case, **LONG)
    ids = moe_layers.random_ids(case)
    if ids_of == "one":
        ids.fill_(3)
    elif ids_of == "last":
        ids.fill_(case.experts - 1)
    elif ids_of == "none":
        ids.fill_(-1)
    elif ids_of == "some":
        ids[torch.rand(ids.shape, generator=generator(5), device=DEVICE) < 0.4] = -1
    elif ids_of == "twice":
        ids[:, 1] = ids[:, 0]
    served = check(make(case, "bf16", ids), moe_family)
    assert served or not must_serve(moe_family)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["x", "w_gate_up", "w_down", "weights"])
def test_a_nan_or_inf_reaches_what_it_meets_and_nothing_else(
    moe_family: str, where: str, number: float
) -> None:
    for tokens, extents in ((6, {}), (6, LONG), (150, {})):
        case = dataclasses.replace(BASE, tokens=tokens, **extents)
        layer = make(case, "bf16")
        if moe_layers.plan_or_none(layer, moe_family) is None:
            continue
        if where == "weights":
            layer.routing.weights[3, 1] = number
            touched = torch.tensor([3], device=DEVICE)
        elif where == "x":
            layer.values["x"][3, 77] = number
            touched = torch.tensor([3], device=DEVICE)
        else:
            layer.values[where][2, 9, 31] = number
            touched = (layer.routing.ids == 2).any(1).nonzero().flatten()
        out = fm.moe_forward(**layer.arguments, kernel=moe_family)
        got = (~out.isfinite()).any(1).nonzero().flatten()
        assert torch.equal(got, touched)
        if where != "weights":
            moe_oracle.assert_forward(out, **layer.arguments)


WILD = ("offsets", "pairs", "slots", "everything")


@pytest.mark.parametrize("what", WILD)
@pytest.mark.parametrize("seed", range(4))
def test_wild_routings_touch_nothing_outside(moe_family: str, what: str, seed: int) -> None:
    """Whatever offsets, pairs and slots hold, nothing outside of the tensors is read or written;
    what is read within may be anything."""
    for tokens, extents in ((5, {}), (5, LONG), (200, {})):
        case = dataclasses.replace(BASE, tokens=tokens, seed=seed, **extents)
        layer = make(case, "bf16")
        if moe_layers.plan_or_none(layer, moe_family) is None:
            continue
        g = generator(seed)

        def wild(x: torch.Tensor) -> torch.Tensor:
            ends = (-(2**31), 2**31 - 1) if seed % 2 else (-5 * x.numel(), 5 * x.numel())
            return torch.randint(*ends, x.shape, generator=g, device=DEVICE).int()  # noqa: B023

        names = ("offsets", "pairs", "slots") if what == "everything" else (what,)
        routing = layer.routing._replace(**{n: wild(getattr(layer.routing, n)) for n in names})
        out = memory.place((tokens, case.hidden), torch.bfloat16, DEVICE)
        pre = memory.place((tokens * 2, 2 * case.inner), torch.bfloat16, DEVICE)
        out.remember()
        pre.remember()
        for placed in layer.placed.values():
            placed.remember()
        arguments = layer.arguments | {"routing": routing}
        fm.moe_forward(**arguments, out=out.view, kernel=moe_family)
        try:
            fm.moe_forward(**arguments, out=out.view, pre_activation=pre.view, kernel=moe_family)
        except fm.UnsupportedError:
            assert not must_serve(moe_family)
        torch.cuda.synchronize()
        for name, placed in {**layer.placed, "out": out, "pre": pre}.items():
            assert placed.intact(inside=name in layer.placed), f"around {name}"
        assert check(layer, moe_family), "and the GPU is as it was"


@pytest.mark.parametrize("tokens", [8, 128])
def test_offsets_that_go_back_and_forth_touch_nothing_outside(moe_family: str, tokens: int) -> None:
    """By which half of the experts has all pairs: more products than 32 bits can count."""
    case = Case(tokens=tokens, hidden=8, inner=262160, experts=1024, top_k=32)
    ids = random_ids(case)
    layer = Layer(case, "bf16", place_weights(case, "bf16", shared=True), routing_of(ids, case))
    if moe_layers.plan_or_none(layer, moe_family) is None:
        assert not must_serve(moe_family)
        return
    offsets = torch.zeros(1025, dtype=torch.int32, device=DEVICE)
    offsets[1::2] = tokens * 32
    out = memory.place((tokens, 8), torch.bfloat16, DEVICE)
    for placed in (out, *layer.placed.values()):
        placed.remember()
    routing = layer.routing._replace(offsets=offsets)
    fm.moe_forward(**layer.arguments | {"routing": routing}, out=out.view, kernel=moe_family)
    torch.cuda.synchronize()
    for name, placed in {**layer.placed, "out": out}.items():
        assert placed.intact(inside=name in layer.placed), f"around {name}"


@pytest.mark.parametrize("bias", [None, "fp32", "x"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_grouped_products(moe_family: str, dtype: str, transposed: bool, bias: str | None) -> None:
    if not moe_layers.multiplies(moe_family):
        pytest.skip("computes layers alone")
    g = generator(0)
    said = []
    for experts, n, k, most in ((5, 64, 128, 40), (8, 200, 72, 3), (3, 1024, 512, 300),
                                (64, 128, 256, 1), (1, 128, 2048, 500),
                                (4, 136, 248, 2000), (4, 136, 504, 1000)):  # fmt: skip
        counts = torch.randint(0, most + 1, (experts,), generator=g, device=DEVICE).int()
        low = DTYPES[dtype]
        values = torch.randn(experts, n, k, generator=g, device=DEVICE).to(low) * k**-0.5
        w = memory.place_values(values, Placement((0, 2, 1) if transposed else (0, 1, 2),
                                                  (8, 0, 8))).view  # fmt: skip
        b = {}
        if bias is not None:
            row = torch.randn(experts, n, generator=g, device=DEVICE)
            b = {"bias": row.to(low) if bias == "x" else row}
        x = torch.randn(experts, most, k, generator=g, device=DEVICE).to(low)
        sorted_rows = torch.cat([x[e, : counts[e]] for e in range(experts)]
                                + [x.new_full((3, k), torch.nan)])  # fmt: skip
        offsets = torch.zeros(experts + 1, dtype=torch.int32, device=DEVICE)
        offsets[1:] = counts.cumsum(0)
        for rows, bounds in ((x, {"counts": counts}), (sorted_rows, {"offsets": offsets})):
            out = memory.place((*rows.shape[:-1], n), low, DEVICE,
                               Placement(tuple(range(rows.ndim)), (8,) * rows.ndim))  # fmt: skip
            out.remember()
            try:
                plan = fm.grouped_product_plan(rows, w, **bounds, **b, kernel=moe_family)
            except fm.UnsupportedError:
                said.append(False)
                continue
            moe_layers.poison_free_memory(plan.workspace_bytes)
            fm.grouped_product(rows, w, **bounds, **b, out=out.view, kernel=moe_family)
            torch.cuda.synchronize()
            assert out.intact(), "memory around out was written to"
            has = moe_oracle.rows_of_experts(
                tuple(rows.shape[:-1]),
                *(
                    None if t is None else t.cpu().numpy()
                    for t in (bounds.get("offsets"), bounds.get("counts"))
                ),
            )
            untouched = out.view[~torch.from_numpy(has).to(DEVICE)]
            poison = memory.bits(memory.poisoned(1, low, DEVICE))[0]
            assert (memory.bits(untouched) == poison).all(), "rows of no expert were written"
            moe_oracle.assert_grouped_product(out.view, rows, w, **bounds, **b)
            said.append(True)
    assert any(said) or (transposed and moe_family != "sm89")
    assert all(said) or not must_serve(moe_family)


def test_offsets_and_counts_that_lie_are_cut_to_the_rows(moe_family: str) -> None:
    """What fused_moe relies on: one group that has all rows, whatever their number."""
    if not moe_layers.multiplies(moe_family):
        pytest.skip("computes layers alone")
    most = 2**31 - 1
    for rows in (1, 100):
        x = torch.randn(rows, 512, generator=generator(0), device=DEVICE).bfloat16()
        w = torch.randn(1, 128, 512, generator=generator(1), device=DEVICE).bfloat16()
        bounds = torch.tensor([0, rows], dtype=torch.int32, device=DEVICE)
        try:
            want = fm.grouped_product(x, w, offsets=bounds, kernel=moe_family)
        except fm.UnsupportedError:
            assert not must_serve(moe_family)
            continue
        bounds[1] = most
        out = memory.place((rows, 128), torch.bfloat16, DEVICE)
        out.remember()
        fm.grouped_product(x, w, offsets=bounds, out=out.view, kernel=moe_family)
        torch.cuda.synchronize()
        assert out.intact()
        assert torch.equal(out.view, want)
        got = fm.grouped_product(x[None], w, counts=bounds[1:], kernel=moe_family)
        assert torch.equal(got[0], want)


@pytest.mark.alone  # 15 GB
def test_weights_beyond_2_to_the_31_elements(moe_family: str) -> None:
    experts, hidden, inner = 70, 4096, 4096
    w_gate_up = torch.zeros(experts, 2 * inner, hidden, dtype=torch.bfloat16, device=DEVICE)
    w_down = torch.zeros(experts, hidden, 2 * inner, dtype=torch.bfloat16, device=DEVICE)
    assert w_gate_up.numel() > 2**31 and w_down.numel() > 2**31
    w_down = w_down[..., :inner]
    last = (0, experts - 2, experts - 1)
    for e in last:
        w_gate_up[e].normal_(generator=generator(e)).mul_(hidden**-0.5)
        w_down[e].normal_(generator=generator(e + 1)).mul_(inner**-0.5)
    for tokens in (2, 90):
        case = Case(tokens=tokens, hidden=hidden, inner=inner, experts=experts, top_k=2)
        ids = torch.tensor(last, dtype=torch.int32, device=DEVICE)
        ids = ids[torch.rand(tokens, 3, generator=generator(9), device=DEVICE).argsort(1)[:, :2]]
        x = torch.randn(tokens, hidden, generator=generator(3), device=DEVICE).bfloat16()
        routing = moe_layers.routing_of(ids.contiguous(), case)
        try:
            out = fm.moe_forward(x, w_gate_up, w_down, routing, kernel=moe_family)
        except fm.UnsupportedError:
            assert not must_serve(moe_family)
            continue
        moe_oracle.assert_forward(out, x, w_gate_up, w_down, routing)


@pytest.mark.parametrize("tokens", [4, 100, 129])
def test_rows_of_x_that_run_backwards(tokens: int) -> None:
    """Few-token kernels alone read these, and so serve as many tokens as they have room for, where
    others would be faster if they could."""
    layer = make(dataclasses.replace(BASE, tokens=tokens), "bf16")
    tensors: dict[str, torch.Tensor] = layer.values | {
        name: getattr(layer.routing, name) for name in ("weights", "offsets", "pairs", "slots")
    }
    backwards = memory.place_values(layer.values["x"], Placement((0, 1), (0, 0), flipped=(0,)))
    out = torch.full_like(layer.values["x"], torch.nan)
    lib = capi.load()
    params = capi_moe.ForwardParams(struct_size=c.sizeof(capi_moe.ForwardParams))
    views = {"x": backwards.raw(), "out": memory.Placed(out, out, ()).raw()}
    for name, tensor in tensors.items():
        if name == "x":
            continue
        made = capi.Tensor(data=tensor.data_ptr(), ndim=tensor.ndim)
        made.shape = (c.c_int64 * tensor.ndim)(*tensor.shape)
        made.strides = (c.c_int64 * tensor.ndim)(*tensor.stride())
        code = {torch.int32: 0, torch.float32: 2, torch.bfloat16: 4}[tensor.dtype]
        made.dtype = capi.DType(code, 8 * tensor.element_size(), 1)
        made.device = capi.Device(capi.CUDA, tensor.device.index)
        views[name] = made
    for name, view in views.items():
        setattr(params, name, c.pointer(view))
    run, plan_of, size_of = capi_moe.functions(params, lib)
    plan = capi.Plan(struct_size=c.sizeof(capi.Plan))
    status = plan_of(params, plan)
    if tokens > 128 or moe_layers.why_not("sm89_few_tokens") is not None:
        assert status != 0
        return
    capi.check(status, lib)
    assert plan.family == b"sm89_few_tokens"
    size = c.c_size_t()
    capi.check(size_of(params, size), lib)
    workspace = torch.empty(size.value, dtype=torch.uint8, device=DEVICE)
    stream = torch.cuda.current_stream().cuda_stream
    capi.check(run(params, workspace.data_ptr(), size.value, stream), lib)
    moe_oracle.assert_forward(out, **layer.arguments)


def test_calls_that_name_no_kernel() -> None:
    """The best family for few and for many tokens, right for all."""
    families = set()
    for tokens in (1, 4, 30, 300, 3000):
        for experts, top_k in ((8, 2), (128, 8)):
            case = Case(tokens=tokens, hidden=1024, inner=512, experts=experts, top_k=top_k)
            layer = make(case, "bf16")
            assert check(layer, None)
            plan = fm.moe_plan(**layer.arguments)
            families.add(plan.family)
            for line in plan.rejected.splitlines():
                family, _, reason = line.partition(": ")
                assert family in fm.build_info().kernel_families.split() and reason
    assert families <= set(moe_layers.serving())


@pytest.mark.parametrize("tokens", [1, 40, 64, 65])
def test_few_tokens_of_weights_that_sm90_cannot_walk(tokens: int) -> None:
    """Those of one expert for all: they go to whichever of the others takes less time."""
    x = torch.randn(tokens, 256, generator=generator(1), device=DEVICE).bfloat16()
    w_gate_up = torch.randn(1, 256, 256, generator=generator(2), device=DEVICE).mul_(256**-0.5)
    w_down = torch.randn(1, 256, 128, generator=generator(3), device=DEVICE).mul_(128**-0.5)
    w_gate_up, w_down = (w.bfloat16().expand(64, -1, -1) for w in (w_gate_up, w_down))
    routing = fm.moe_route(torch.randn(tokens, 64, generator=generator(4), device=DEVICE), 4)
    plan = fm.moe_plan(x, w_gate_up, w_down, routing)
    others = [
        fm.moe_plan(x, w_gate_up, w_down, routing, kernel=family)
        for family in ("sm89_few_tokens", "sm89")
    ]
    assert plan.family == min(others, key=lambda other: other.microseconds).family
    out = fm.moe_forward(x, w_gate_up, w_down, routing)
    moe_oracle.assert_forward(out, x, w_gate_up, w_down, routing)
    packed = w_gate_up.contiguous(), w_down.contiguous()
    if "sm90" in moe_layers.serving():
        others.append(fm.moe_plan(x, *packed, routing, kernel="sm90"))
    best = min(others, key=lambda other: other.microseconds)
    assert fm.moe_plan(x, *packed, routing).family == best.family


FUSED = [
    (Case(experts=8, top_k=2, hidden=256, inner=128), {"renormalize": True}),
    (Case(experts=128, top_k=8, hidden=512, inner=128), {"renormalize": True}),
    (Case(experts=64, top_k=6, hidden=256, inner=136),
     {"scoring": "sigmoid", "renormalize": True, "scale": 2.5, "num_groups": 8, "top_groups": 3}),
    (Case(experts=16, top_k=1, hidden=256, inner=128, weight_on_input=True, transposed=True),
     {"scoring": "sigmoid"}),
    (Case(experts=32, top_k=4, hidden=192, inner=192, gate="interleaved", bias="x", limit=7.0,
          alpha=1.702, up_offset=1.0, transposed=True), {"scoring": "topk_softmax"}),
    (Case(experts=60, top_k=4, hidden=256, inner=128), {}),
]  # fmt: skip


@pytest.mark.parametrize(("case", "route"), FUSED, ids=lambda v: str(v))
@pytest.mark.parametrize("tokens", [1, 5, 64, 700])
def test_fused(case: Case, route: dict[str, Any], tokens: int) -> None:
    case = dataclasses.replace(case, tokens=tokens)
    layer = make(case, "bf16")
    values = dict(layer.values)
    x = values.pop("x")
    router = torch.randn(case.experts, case.hidden, generator=generator(4), device=DEVICE)
    router = (router * case.hidden**-0.5 * 2).bfloat16()
    bias = torch.randn(case.experts, generator=generator(5), device=DEVICE).bfloat16()
    got = fm.fused_moe(x, router, top_k=case.top_k, router_bias=bias, **values, **route,
                       **case.options)  # fmt: skip
    if case.experts % 8 == 0:
        offsets = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)
        logits = fm.grouped_product(x, router[None], offsets=offsets, bias=bias[None])
    else:
        logits = x @ router.T + bias
    routing = fm.moe_route(logits, case.top_k, **route)
    want = fm.moe_forward(x, routing=routing, **values, **case.options)
    assert torch.equal(memory.bits(got), memory.bits(want))
    moe_oracle.assert_forward(got, x, routing=routing, **values, **case.options)
    shaped = x.reshape(1, tokens, 1, -1)
    again = fm.fused_moe(shaped, None, top_k=case.top_k, logits=logits.view(1, tokens, 1, -1),
                         **values, **route, **case.options)  # fmt: skip
    assert again.shape == shaped.shape
    assert torch.equal(memory.bits(again.view(tokens, -1)), memory.bits(want))
