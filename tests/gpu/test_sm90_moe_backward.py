"""Gradients of grouped products and of layers by the sm90 family: float64, every layout, experts of
all sizes, and nothing but the outputs written."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flashmoe_science as fm
import ml_dtypes
import moe_gradients
import moe_oracle
import numpy as np
import pytest
import torch
from gpu import memory, moe_gradient_calls, moe_layers
from gpu.memory import Placement
from gpu.moe_gradient_calls import Gradients
from gpu.moe_layers import DEVICE, DTYPES
from moe_cases import Case
from reference import to_numpy

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _served() -> None:
    reason = moe_layers.why_not("sm90")
    if reason is not None:
        pytest.skip(reason)


KINDS = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
SIZES = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 0, 300, 33)
"""Tokens of experts: steps of 64 rows, four of which are loaded ahead."""
LARGE_SIZES = (0, 1, 15, 16, 17, 31, 33, 127, 0, 128, 129, 300, 6400)
"""So many on average that blocks share rows that are gathered."""


def generator(seed: int) -> torch.Generator:
    return torch.Generator(device=DEVICE).manual_seed(seed)


def normal(shape: Sequence[int], dtype: torch.dtype, g: torch.Generator, scale: float = 1.0) -> Any:
    return (torch.randn(*shape, generator=g, device=DEVICE) * scale).to(dtype)


def matrix_place(turned: bool, gap: int) -> Placement:
    return Placement((0, 2, 1) if turned else (0, 1, 2), (gap, gap, gap))


# ---- the grouped product


@dataclass(frozen=True)
class ProductCase:
    columns: int
    out_columns: int
    sizes: tuple[int, ...] = SIZES
    counted: bool = False
    turned: bool = False  # w
    turned_dw: bool = False
    gap: int = 8


PRODUCTS = {
    "small": ProductCase(72, 104),
    "edges": ProductCase(264, 520),
    "turned": ProductCase(264, 136, turned=True, turned_dw=True),
    "turned-dw": ProductCase(520, 264, turned_dw=True),
    "counts": ProductCase(136, 264, counted=True),
    "counts-turned": ProductCase(136, 264, counted=True, turned=True, turned_dw=True),
    "odd-tiles": ProductCase(448, 776),
    "odd-tiles-turned": ProductCase(776, 448, turned_dw=True),
    "no-rows": ProductCase(64, 64, sizes=(0, 0, 0)),
    "one-expert": ProductCase(256, 128, sizes=(2000,), gap=0),
    "many-tiles": ProductCase(1024, 768, sizes=(0, 700, 3, 1200, 64), gap=0),
    "least": ProductCase(8, 8),
}


class Product:
    def __init__(self, case: ProductCase, dtype: str, wide: bool = False) -> None:
        g = generator(len(case.sizes) + case.columns)
        low = DTYPES[dtype]
        self.case, self.kind, self.dtype = case, dtype, low
        experts = len(case.sizes)
        before = 5  # rows that nobody has, in front and behind
        if case.counted:
            lead: tuple[int, ...] = (experts, max(case.sizes) + before)
            self.bounds = {"counts": torch.tensor(case.sizes, dtype=torch.int32, device=DEVICE)}
        else:
            lead = (sum(case.sizes) + 2 * before,) if sum(case.sizes) else (0,)
            first = before if sum(case.sizes) else 0
            ends = first + np.cumsum((0, *case.sizes))
            self.bounds = {"offsets": torch.tensor(ends, dtype=torch.int32, device=DEVICE)}
        order = tuple(range(len(lead) + 1))
        rows = Placement(order, (case.gap,) * len(order))
        self.parts = self._parts()
        self.dout = self._rows(normal((*lead, case.out_columns), low, g), rows)
        self.x = self._rows(normal((*lead, case.columns), low, g), rows)
        w = normal((experts, case.out_columns, case.columns), low, g, case.columns**-0.5)
        self.w = memory.place_values(w, matrix_place(case.turned, case.gap))
        out = torch.float32 if wide else low
        self.dx = memory.place((*lead, case.columns), low, DEVICE, rows)
        self.dw = memory.place(w.shape, out, DEVICE, matrix_place(case.turned_dw, case.gap))
        self.dbias = memory.place(w.shape[:2], out, DEVICE)

    def _parts(self) -> list[Any]:
        if self.case.counted:
            return [(e, slice(0, n)) for e, n in enumerate(self.case.sizes)]
        ends = self.bounds["offsets"].tolist()
        return [slice(a, b) for a, b in itertools.pairwise(ends)]

    def _rows(self, values: torch.Tensor, place: Placement) -> memory.Placed:
        """Rows that no expert has hold NaN, which must reach nothing."""
        taken = torch.zeros(values.shape[:-1], dtype=torch.bool, device=DEVICE)
        for part in self.parts:
            taken[part] = True
        values[~taken] = float("nan")
        return memory.place_values(values, place)

    def gradients(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        x, w = (t.view.to(dtype) for t in (self.x, self.w))
        dout = self.dout.view.to(dtype)
        made = {"dx": torch.zeros_like(x), "dw": torch.zeros_like(w),
                "dbias": torch.zeros(w.shape[:2], dtype=dtype, device=DEVICE)}  # fmt: skip
        for e, part in enumerate(self.parts):
            made["dx"][part] = dout[part] @ w[e]
            made["dw"][e] = dout[part].T @ x[part]
            made["dbias"][e] = dout[part].sum(0)
        return made

    def run(self, wanted: Sequence[str], **options: Any) -> None:
        outputs = {name: getattr(self, name) for name in wanted}
        inputs = (self.dout, self.x, self.w)
        for placed in (*inputs, *outputs.values()):
            placed.remember()
        fm.grouped_product_backward(
            self.dout.view, self.x.view, self.w.view, **self.bounds,
            wanted=[name in wanted for name in ("dx", "dw", "dbias")],
            **{name: placed.view for name, placed in outputs.items()}, kernel="sm90", **options,
        )  # fmt: skip
        torch.cuda.synchronize()
        for placed in inputs:
            assert placed.intact(inside=True)
        for name, placed in outputs.items():
            assert placed.intact(), f"memory around {name} was written to"

    def check(self, wanted: Sequence[str]) -> None:
        ref, plain = self.gradients(torch.float64), self.gradients(self.dtype)
        for name in wanted:
            assert_near(name, getattr(self, name).view, ref[name], plain[name], self.kind)


def assert_near(name: str, got: Any, ref: Any, plain: Any, dtype: str) -> None:
    moe_gradients.assert_near(
        name, to_numpy(got.cpu()), ref.double().cpu().numpy(), plain.double().cpu().numpy(),
        KINDS[dtype],
    )  # fmt: skip


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_product(name: str, dtype: str) -> None:
    product = Product(PRODUCTS[name], dtype)
    product.run(("dx", "dw", "dbias"))
    product.check(("dx", "dw", "dbias"))
    kernels = [launch.kernel for launch in fm.last_launches()]
    assert kernels[0] == f"moe_backward_sm90_{dtype}_weight_gradient", kernels
    first = {n: memory.bits(getattr(product, n).view).clone() for n in ("dx", "dw", "dbias")}
    for wanted in (("dw",), ("dx",), ("dbias",), ("dx", "dw", "dbias")):
        product.run(wanted)
        for n in wanted:
            assert torch.equal(memory.bits(getattr(product, n).view), first[n]), n


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("wide", [False, True], ids=["low", "fp32"])
@pytest.mark.parametrize("name", ["edges", "turned-dw", "counts", "no-rows"])
def test_product_is_added_to(name: str, wide: bool, dtype: str) -> None:
    product = Product(PRODUCTS[name], dtype, wide)
    wanted = ("dw", "dbias")
    product.run(wanted)
    product.check(wanted)
    once = {n: getattr(product, n).view.float().clone() for n in wanted}
    product.run(wanted, accumulate=True)
    for n in wanted:
        assert torch.equal(getattr(product, n).view.float(), 2 * once[n]), n


def test_nan_stays_with_its_expert() -> None:
    product = Product(PRODUCTS["edges"], "bf16")
    expert = SIZES.index(65)
    row = int(product.bounds["offsets"][expert]) + 64  # the last, in a step of its own
    product.dout.view[row, 3] = float("nan")
    product.x.view[row, 5] = float("inf")
    product.run(("dx", "dw", "dbias"))
    finite = torch.isfinite(product.dw.view)
    assert finite[:expert].all() and finite[expert + 1 :].all()
    assert not finite[expert, 3].any() and not finite[expert, :, 5].any()
    assert torch.isfinite(product.dx.view[:row]).all()
    assert torch.isfinite(product.dx.view[row + 1 :]).all()


def test_hostile_offsets() -> None:
    product = Product(PRODUCTS["edges"], "bf16")
    for placed in (product.dout, product.x):
        placed.view[...] = 1
    g = torch.Generator().manual_seed(3)
    wild = [torch.randint(-(2**31), 2**31 - 1, (len(SIZES) + 1,), generator=g) for _ in range(20)]
    # An end so far below the beginning that their difference does not fit 32 bits.
    far = torch.zeros(len(SIZES) + 1, dtype=torch.int64)
    far[1:3] = torch.tensor([8, -(2**31)])
    for offsets in (*wild, far):
        product.bounds["offsets"].copy_(offsets.int())
        product.run(("dx", "dw", "dbias"))


def test_captured() -> None:
    """One graph serves any numbers of rows."""
    product = Product(PRODUCTS["many-tiles"], "bf16")
    arguments = (product.dout.view, product.x.view, product.w.view)
    outputs = {"dx": product.dx.view, "dw": product.dw.view}
    call = lambda: fm.grouped_product_backward(  # noqa: E731
        *arguments, **product.bounds, **outputs, kernel="sm90", stream=stream.cuda_stream
    )
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    ends = product.bounds["offsets"]
    ends.copy_(torch.tensor([5, 5, 900, 1000, 1001, 1972], device=DEVICE, dtype=torch.int32))
    product.parts = product._parts()
    for placed in (product.dout, product.x):
        placed.view[...] = torch.nan_to_num(placed.view)
    graph.replay()
    torch.cuda.synchronize()
    product.check(("dx", "dw"))


# ---- the layer


@dataclass(frozen=True)
class LayerCase:
    tokens: int = 150
    hidden: int = 136
    inner: int = 72
    experts: int = 6
    top_k: int = 2
    gate: str = "gate_up"
    activation: str = "silu"
    bias: bool = False
    turned: bool = False
    turned_down: bool = False
    limit: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0
    weight_on_input: bool = False
    saved: bool = True  # what the activation is applied to
    missing: float = 0.0  # share of ids that are -1
    skew: float = 0.0
    sizes: tuple[int, ...] = ()  # tokens of each expert, which then have one expert each
    seed: int = 0

    @property
    def options(self) -> dict[str, Any]:
        return {"gate": self.gate, "activation": self.activation, "limit": self.limit,
                "alpha": self.alpha, "up_offset": self.up_offset,
                "weight_on_input": self.weight_on_input}  # fmt: skip


LAYERS = {
    "plain": LayerCase(),
    "computed-again": LayerCase(saved=False),
    "up-gate": LayerCase(gate="up_gate", bias=True),
    "interleaved": LayerCase(gate="interleaved", bias=True, saved=False),
    "separate": LayerCase(gate="separate", bias=True),
    "separate-again": LayerCase(gate="separate", saved=False, weight_on_input=True),
    "no-gate": LayerCase(gate="none", activation="relu2", bias=True),
    "gpt-oss": LayerCase(gate="interleaved", turned=True, turned_down=True, bias=True, limit=1.5,
                         alpha=1.702, up_offset=1.0, saved=False),
    "turned": LayerCase(turned=True, turned_down=True),
    "gelu": LayerCase(activation="gelu", gate="none", saved=False),
    "gelu-tanh": LayerCase(activation="gelu_tanh"),
    "relu": LayerCase(activation="relu", bias=True),
    "on-input": LayerCase(weight_on_input=True, bias=True),
    "missing": LayerCase(missing=0.4, bias=True),
    "skewed": LayerCase(skew=3.0, tokens=400),
    "one-expert": LayerCase(experts=1, top_k=1, tokens=300),
    "one-token": LayerCase(tokens=1, experts=8),
    "no-tokens": LayerCase(tokens=0),
    "wide": LayerCase(tokens=700, hidden=520, inner=264, experts=8, top_k=4, saved=False),
    "up-gate-alone": LayerCase(gate="up_gate", skew=0.5),
    "separate-alone": LayerCase(gate="separate", turned_down=True),
    "many-tiles": LayerCase(tokens=1500, hidden=72, inner=784, experts=4, top_k=2),
    # More tiles than clusters, of experts with very many rows and with none.
    "many-experts": LayerCase(tokens=900, hidden=264, inner=256, experts=96, top_k=4, skew=3.0),
    # Pairs of tiles of which the last is beyond.
    "odd-tiles": LayerCase(tokens=300, hidden=72, inner=1048, experts=4),
    # Rows that blocks share, of experts that end anywhere in a step.
    "sizes": LayerCase(tokens=sum(LARGE_SIZES), hidden=392, inner=520, experts=len(LARGE_SIZES),
                       top_k=1, sizes=LARGE_SIZES),
}  # fmt: skip
FUSED = ("plain", "computed-again", "turned", "skewed", "wide", "up-gate-alone", "separate-alone",
         "many-tiles", "many-experts", "odd-tiles", "sizes")  # fmt: skip
"""Whose da goes through the activation in the product that gives it."""


class Layer:
    def __init__(self, case: LayerCase, dtype: str, wide: bool = False) -> None:
        g = generator(case.seed + 7)
        low = DTYPES[dtype]
        self.case, self.kind, self.dtype = case, dtype, low
        noise = torch.rand(case.tokens, case.experts, generator=g, device=DEVICE)
        place = torch.arange(case.experts, device=DEVICE) / case.experts
        ids = (noise + case.skew * place).argsort(1)[:, : case.top_k].int()
        if case.sizes:
            each = torch.tensor(case.sizes, device=DEVICE)
            ids = torch.arange(case.experts, device=DEVICE, dtype=torch.int32)
            ids = ids.repeat_interleave(each)[noise[:, 0].argsort()][:, None]
        lost = torch.rand(ids.shape, generator=g, device=DEVICE) < case.missing
        ids = torch.where(lost, -1, ids).contiguous()
        weights = torch.rand(ids.shape, generator=g, device=DEVICE) + 0.1
        weights = torch.where(ids < 0, 0, weights)
        self.routing = fm.MoeRouting(ids, weights, *moe_oracle.sort_pairs(ids, case.experts))
        hidden, inner, experts = case.hidden, case.inner, case.experts
        two = case.gate == "separate"
        rows = inner if two or case.gate == "none" else 2 * inner
        first = (experts, rows, hidden)

        def matrix(shape: Any, turned: bool) -> memory.Placed:
            return memory.place_values(
                normal(shape, low, g, shape[2] ** -0.5), matrix_place(turned, 8)
            )

        placed = {
            "x": memory.place_values(
                normal((case.tokens, hidden), low, g), Placement((0, 1), (8, 8))
            ),
            "w_gate_up": matrix(first, case.turned),
            "w_down": matrix((experts, hidden, inner), case.turned_down),
        }
        if two:
            placed["w_up"] = matrix(first, case.turned)
        if case.bias:
            kinds = {"b_gate_up": rows, "b_down": hidden} | ({"b_up": inner} if two else {})
            for name, count in kinds.items():
                placed[name] = memory.place_values(normal((experts, count), low, g, 0.5))
        self.placed = placed
        self.dout = memory.place_values(
            normal((case.tokens, hidden), low, g), Placement((0, 1), (0, 16))
        )
        out = torch.float32 if wide else low
        self.outputs = {
            "dx": memory.place((case.tokens, hidden), out, DEVICE, Placement((0, 1), (8, 8))),
            "dw_gate_up": memory.place(first, out, DEVICE, matrix_place(case.turned, 8)),
            "dw_down": memory.place(
                (experts, hidden, inner), out, DEVICE, matrix_place(case.turned_down, 8)
            ),
            "db_gate_up": memory.place((experts, rows), out, DEVICE),
            "db_down": memory.place((experts, hidden), out, DEVICE),
            "dweights": memory.place(ids.shape, torch.float32, DEVICE),
        }
        if two:
            self.outputs["dw_up"] = memory.place(first, out, DEVICE, matrix_place(case.turned, 8))
            self.outputs["db_up"] = memory.place((experts, inner), out, DEVICE)
        self.saved = None
        if case.saved and case.tokens:
            _, self.saved = fm.moe_forward(
                **self.values, routing=self.routing, **case.options, return_pre_activation=True
            )

    @property
    def values(self) -> dict[str, torch.Tensor]:
        return {name: placed.view for name, placed in self.placed.items()}

    def run(self, wanted: Sequence[str] | None = None, **options: Any) -> None:
        names = [n for n in self.outputs if wanted is None or n in wanted]
        inputs = [*self.placed.values(), self.dout]
        for placed in (*inputs, *(self.outputs[n] for n in names)):
            placed.remember()
        # What the workspace will hold: NaN.
        torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE).fill_(0xFF)
        fm.moe_backward(
            self.dout.view, **self.values, routing=self.routing, **self.case.options,
            pre_activation=self.saved, wanted=[False] * 8, kernel="sm90",
            **{n: self.outputs[n].view for n in names}, **options,
        )  # fmt: skip
        torch.cuda.synchronize()
        for placed in inputs:
            assert placed.intact(inside=True)
        for n in names:
            assert self.outputs[n].intact(), f"memory around {n} was written to"

    def reference(self, dtype: torch.dtype) -> dict[str, np.ndarray]:
        case = self.case
        ids = self.routing.ids.cpu().numpy()
        values = {name: t.cpu() for name, t in self.values.items()}
        inner = case.inner
        pick = {
            "gate_up": (slice(0, inner), slice(inner, None)),
            "up_gate": (slice(inner, None), slice(0, inner)),
            "interleaved": (slice(0, None, 2), slice(1, None, 2)),
        }
        w: dict[str, torch.Tensor] = {}
        biases = {
            name: values.get(name, torch.zeros(tuple(self.outputs[f"d{name}"].view.shape)))
            for name in ("b_gate_up", "b_down", *(("b_up",) if case.gate == "separate" else ()))
        }
        given = values | biases
        for kind in ("w", "b"):
            stacked = given[f"{kind}_gate_up"]
            if case.gate in pick:
                gate, up = pick[case.gate]
                w[f"{kind}_gate"], w[f"{kind}_up"] = stacked[:, gate], stacked[:, up]
            elif case.gate == "separate":
                w[f"{kind}_gate"], w[f"{kind}_up"] = stacked, given[f"{kind}_up"]
            else:
                w[f"{kind}_up"] = stacked
            w[f"{kind}_down"] = given[f"{kind}_down"]
        options = {n: v for n, v in case.options.items() if n != "gate"}
        leaf = lambda t, kind: t.detach().to(kind).clone().requires_grad_()  # noqa: E731
        leaves = {name: leaf(t, dtype) for name, t in w.items()}
        x = leaf(values["x"], dtype)
        weights = leaf(self.routing.weights.cpu(), moe_gradients.max_of(dtype))
        out = moe_gradients.layer(x, ids, weights, leaves, **options)
        out.backward(self.dout.view.cpu().to(dtype))
        g = {
            n: (torch.zeros_like(t) if t.grad is None else t.grad).double().numpy()
            for n, t in (leaves | {"x": x, "weights": weights}).items()
        }
        made = {"dx": g["x"], "dweights": g["weights"], "dw_down": g["w_down"],
                "db_down": g["b_down"]}  # fmt: skip
        for kind in ("w", "b"):
            if case.gate in pick:
                whole = np.zeros(self.outputs[f"d{kind}_gate_up"].view.shape)
                gate, up = pick[case.gate]
                whole[:, gate], whole[:, up] = g[f"{kind}_gate"], g[f"{kind}_up"]
                made[f"d{kind}_gate_up"] = whole
            elif case.gate == "separate":
                made |= {f"d{kind}_gate_up": g[f"{kind}_gate"], f"d{kind}_up": g[f"{kind}_up"]}
            else:
                made[f"d{kind}_gate_up"] = g[f"{kind}_up"]
        return made

    def check(self) -> None:
        ref, plain = self.reference(torch.float64), self.reference(self.dtype)
        kind = KINDS[self.kind]
        for name, placed in self.outputs.items():
            got = to_numpy(placed.view.cpu())
            moe_gradients.assert_near(name, got, ref[name], plain[name], kind)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("name", LAYERS)
def test_layer(name: str, dtype: str) -> None:
    layer = Layer(LAYERS[name], dtype)
    layer.run()
    layer.check()
    names = [launch.kernel for launch in fm.last_launches()]
    assert f"moe_backward_sm90_{dtype}_weight_gradient" in names, names
    fused = f"grouped_product_sm90_{dtype}_up_gradient"
    assert name not in FUSED or fused in {n.removesuffix("_trans") for n in names}, names
    first = {n: memory.bits(p.view).clone() for n, p in layer.outputs.items()}
    for wanted in (("dx", "dweights"), ("dw_gate_up", "dw_up", "dw_down"), ("db_down",), None):
        layer.run(wanted)
        for n in layer.outputs if wanted is None else wanted:
            if n in layer.outputs:
                assert torch.equal(memory.bits(layer.outputs[n].view), first[n]), n


@pytest.mark.parametrize("wide", [False, True], ids=["low", "fp32"])
@pytest.mark.parametrize("name", ["plain", "separate", "gpt-oss", "on-input", "missing"])
def test_layer_is_added_to(name: str, wide: bool) -> None:
    layer = Layer(LAYERS[name], "bf16", wide)
    layer.run()
    layer.check()
    once = {n: p.view.float().clone() for n, p in layer.outputs.items()}
    layer.run(accumulate=True)
    for n, placed in layer.outputs.items():
        assert torch.equal(placed.view.float(), 2 * once[n]), n


def test_rows_that_repeat() -> None:
    """Rows of x and of dout that are one in memory: the bits of rows that are as many."""
    layer = Layer(LAYERS["sizes"], "bf16")
    repeated = {"x": layer.placed["x"].view, "dout": layer.dout.view}
    for name, rows in repeated.items():
        rows.copy_(rows[:1].clone())
        repeated[name] = rows[:1].expand_as(rows)
    layer.run()
    names = ("dx", "dw_gate_up", "dw_down", "dweights")
    made = fm.moe_backward(
        **(layer.values | repeated), routing=layer.routing, **layer.case.options,
        pre_activation=layer.saved, wanted=(True, True, False, True, False, False, False, True),
        kernel="sm90",
    )  # fmt: skip
    got = [one for one in made if one is not None]
    for name, one in zip(names, got, strict=True):
        assert torch.equal(memory.bits(one), memory.bits(layer.outputs[name].view)), name


@pytest.mark.parametrize("name", ["plain", "wide", "on-input", "sizes"])
def test_nan_of_a_token(name: str) -> None:
    layer = Layer(LAYERS[name], "bf16")
    token = 11
    layer.dout.view[token, 5] = float("nan")
    layer.run()
    ids = set(layer.routing.ids[token].tolist())
    others = torch.tensor([e not in ids for e in range(layer.case.experts)], device=DEVICE)
    for n, placed in layer.outputs.items():
        finite = torch.isfinite(placed.view)
        if n in ("dx", "dweights"):
            assert not finite[token].any()
            finite[token] = True
            assert finite.all(), n
        else:
            assert finite[others].all(), n
            assert not finite[~others].flatten(1).all(1).any(), n


@pytest.mark.parametrize("name", ["wide", "sizes"])
def test_hostile_routing(name: str) -> None:
    layer = Layer(LAYERS[name], "bf16")
    g = torch.Generator().manual_seed(5)
    for i in range(12):
        for t in (layer.routing.offsets, layer.routing.pairs, layer.routing.slots):
            low, high = (-(2**31), 2**31 - 1) if i % 2 else (-10, 3000)
            t.copy_(torch.randint(low, high, t.shape, generator=g).int())
        layer.run()


# ---- where what lies between the stages has its place


@pytest.mark.parametrize("gate", ["gate_up", "interleaved", "separate"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("out", ["bf16", "fp32"])
def test_a_gradient_has_room_for_another_stage(gate: str, turned: bool, out: str) -> None:
    """da, and then a, lie where dw_gate_up will, if that has no gaps and is not added to: same bits
    in a smaller workspace."""
    case = Case(tokens=300, hidden=264, inner=520, experts=5, top_k=2, gate=gate, bias="x")
    wanted = tuple(name for name in moe_gradient_calls.ALL if name not in ("dx", "dweights"))
    apart = Gradients.of(case, "bf16", "sm90", missing=0.1, wanted=wanted, out=out, turned=turned)
    want = apart.run()
    inputs = {name: x for name, x in apart.call.placed.items() if name not in apart.names}
    for accumulate, saved in ((False, False), (False, True), (True, False)):
        dense = Gradients.of(case, "bf16", "sm90", ids=apart.ids, inputs=inputs, wanted=wanted,
                             out=out, turned=turned, gap=0, accumulate=accumulate,
                             saved=saved)  # fmt: skip
        poison = 0.0 if accumulate else torch.nan
        for view in dense.outputs.values():
            view.fill_(poison)
        moe_gradient_calls.assert_same(dense.run(poisons=moe_gradient_calls.POISONS[:1]), want)
        if not saved:
            a = case.tokens * case.top_k * case.inner * 2
            less = apart.call.plan.workspace_bytes - dense.call.plan.workspace_bytes
            assert less == (0 if accumulate else -(-a // 256) * 256)


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("has_room", [False, True])
@pytest.mark.parametrize("gate", ["gate_up", "separate"])
def test_many_rows_of_dx_go_by_halves(on_input: bool, has_room: bool, gate: str) -> None:
    """Same bits as all at once, in half the room."""
    two = gate == "separate"
    tokens = (8192 if two else 4096) + (0 if has_room else 8)
    case = Case(tokens=tokens, hidden=1024, inner=264, experts=32 if two else 16,
                top_k=4 if two else 8, gate=gate, weight_on_input=on_input, bias="x")  # fmt: skip
    halves = Gradients.of(case, "bf16", "sm90", saved=True, missing=0.05, gap=0)
    inputs = {name: x for name, x in halves.call.placed.items() if name not in halves.names}
    again = functools.partial(Gradients.of, case, "bf16", "sm90", ids=halves.ids, inputs=inputs,
                              saved=True)  # fmt: skip
    whole = again(max_workspace_bytes=1 << 40, gap=0)
    plans = [one.call.plan for one in (halves, whole)]
    repeats = [[p.launches[i].repeats for i in range(p.launch_count)] for p in plans]
    of_dx = 3 if two else 2
    assert repeats[0] == [0] * (plans[0].launch_count - of_dx) + [2] * of_dx
    assert not any(repeats[1])
    y = case.tokens * case.top_k * case.hidden * 2 * (2 if two else 1)
    less = plans[1].workspace_bytes - plans[0].workspace_bytes
    assert less == y // 2 if has_room and not on_input else less > 0
    want = whole.run()
    for poison in moe_gradient_calls.POISONS:
        moe_gradient_calls.assert_same(halves.run(poisons=(poison,)), want)
    # What is added to, and what has gaps, has no room for others.
    moe_gradient_calls.assert_same(again(gap=8).run(), want)


def test_bits_of_calls_right_behind_each_other() -> None:
    """Over and over, with all that the call is to write poisoned before, and what lies between its
    stages where a gradient will: what one call reads last the next one writes."""
    case = Case(tokens=4096, hidden=1024, inner=264, experts=16, top_k=8)
    one = Gradients.of(case, "bf16", "sm90", saved=True, gap=0)
    want = one.run()
    differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for i in range(300):
        if i % 10 == 0:
            one.call.workspace[4096:-4096] = 0xFF
            for view in one.outputs.values():
                view.fill_(torch.nan)
        one.call.launch()
        one.call.launch()
        for name, view in one.outputs.items():
            differ += (memory.bits(view) != memory.bits(want[name])).sum()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        one.call.launch()
    for _ in range(20):
        for view in one.outputs.values():
            view.fill_(torch.nan)
        graph.replay()
        for name, view in one.outputs.items():
            differ += (memory.bits(view) != memory.bits(want[name])).sum()
    assert differ == 0
