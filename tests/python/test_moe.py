"""The mixture of experts from Python: every framework, dtype and layout, outputs and plans."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from typing import Any

import flashmoe_science as fm
import moe_oracle
import numpy as np
import producers
import pytest
from moe_cases import CASES, Case, make, rounded
from producers import Producer

EVERY_PRODUCER = pytest.mark.parametrize(
    ("producer", "dtype"),
    [(p, dtype) for p in producers.ON_CPU for dtype in p.dtypes],
    ids=lambda v: str(v),
)
PRODUCERS = pytest.mark.parametrize("producer", producers.ON_CPU, ids=str)
WITH_OUT = pytest.mark.parametrize("producer", [p for p in producers.ON_CPU if p.takes_out],
                                   ids=str)  # fmt: skip


def host(result: Any) -> Any:
    """Results as something the reference reads."""
    if isinstance(result, fm.MoeRouting):
        return fm.MoeRouting(*(None if part is None else host(part) for part in result))
    root = type(result).__module__.partition(".")[0]
    return np.asarray(result) if root in ("producers", "array_api_strict") else result


def logits_of(tokens: int = 37, experts: int = 6, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, experts), np.float32)


ROUTES: list[dict[str, Any]] = [
    {"top_k": 2},
    {"top_k": 3, "renormalize": True, "scale": 2.5},
    {"top_k": 6},
    {"top_k": 2, "scoring": "topk_softmax"},
    {"top_k": 1, "scoring": "sigmoid"},
    {"top_k": 3, "scoring": "sigmoid", "renormalize": True},
]


@EVERY_PRODUCER
@pytest.mark.parametrize("options", ROUTES, ids=str)
def test_route(producer: Producer, dtype: str, options: dict[str, Any]) -> None:
    logits = producers.cast(logits_of(), dtype)
    got = fm.moe_route(producer.as_is(logits) if dtype != "bf16" else producer.make(logits, dtype),
                       **options, return_lse=True)  # fmt: skip
    assert type(got) is fm.MoeRouting
    assert all(isinstance(part, producer.kind) for part in got)
    moe_oracle.assert_routed(host(got), moe_oracle.route(logits, **options))
    assert fm.moe_route(producer.make(logits, dtype), **options).lse is None


@PRODUCERS
def test_route_by_groups_with_a_selection_bias(producer: Producer) -> None:
    logits = logits_of(50, 32)
    bias = np.random.default_rng(1).standard_normal(32, np.float32)
    options: dict[str, Any] = {
        "top_k": 5, "scoring": "sigmoid", "num_groups": 8, "top_groups": 3, "renormalize": True,
        "scale": 2.5,
    }  # fmt: skip
    want = moe_oracle.route(logits, selection_bias=bias, **options)
    assert moe_oracle.closest_choices(logits, selection_bias=bias, **options) > 1e-6
    got = fm.moe_route(producer.as_is(logits), selection_bias=producer.as_is(bias), **options)
    moe_oracle.assert_routed(host(got), want)
    assert not np.array_equal(want.ids, moe_oracle.route(logits, **options).ids)


@PRODUCERS
def test_counts(producer: Producer) -> None:
    got = fm.moe_route(producer.as_is(logits_of()), 2)
    counts = np.asarray(got.counts)
    np.testing.assert_array_equal(counts, np.bincount(np.asarray(got.ids).ravel(), minlength=6))
    assert counts.sum() == 2 * 37


@PRODUCERS
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize("options", [{}, {"renormalize": True, "scale": 2.5}], ids=str)
def test_route_given(producer: Producer, mapped: bool, kind: type, options: dict[str, Any]) -> None:
    if producer.name == "jax" and kind is np.int64:
        pytest.skip("JAX has no int64 unless it is asked for")
    rng = np.random.default_rng(2)
    ids = rng.integers(-2, 12, (41, 4)).astype(kind)
    weights = rng.random((41, 4), np.float32)
    expert_map = rng.integers(-3, 8, 10).astype(np.int32) if mapped else None
    chosen = {"num_experts": 5, "expert_map": expert_map} | options
    want = moe_oracle.route_given(ids, weights, **chosen)
    assert (want.ids == -1).any() and (want.ids >= 0).any()
    given: dict[str, Any] = {"num_experts": 5} | options
    if mapped:
        given["expert_map"] = producer.as_is(expert_map)
    got = fm.moe_route_given(producer.as_is(ids), producer.as_is(weights), **given)
    assert type(got) is fm.MoeRouting
    assert all(isinstance(part, producer.kind) for part in got[:5])
    assert got.lse is None
    moe_oracle.assert_routed(host(got), want)
    without = fm.moe_route_given(producer.as_is(ids), **given)
    moe_oracle.assert_routed(host(without), moe_oracle.route_given(ids, **chosen))


def test_ids_of_great_size_are_not_mine() -> None:
    ids = np.array([[2**62, 2**32 + 1], [-(2**40), 1]], np.int64)
    got = fm.moe_route_given(ids, num_experts=3)
    np.testing.assert_array_equal(got.ids, [[-1, -1], [-1, 1]])
    moe_oracle.assert_routed(got, moe_oracle.route_given(ids, num_experts=3))


@EVERY_PRODUCER
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(producer: Producer, dtype: str, case: Case) -> None:
    arguments = make(case, producer, dtype)
    out, pre = fm.moe_forward(**arguments, **case.options, return_pre_activation=True)
    assert isinstance(out, producer.kind) and isinstance(pre, producer.kind)
    moe_oracle.assert_forward(
        host(out), **rounded(case, dtype), **case.options, pre_activation=host(pre)
    )
    again = fm.moe_forward(**arguments, **case.options)
    np.testing.assert_array_equal(bits(host(again)), bits(host(out)))


def bits(tensor: Any) -> np.ndarray:
    if type(tensor).__module__.startswith("torch"):
        import torch

        return tensor.contiguous().view(torch.uint8).numpy()
    return np.ascontiguousarray(np.asarray(tensor)).view(np.uint8)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_gelu_keeps_its_digits(activation: str) -> None:
    """Each value of itself: a tensor's greatest error would hide that of the others."""
    z = np.linspace(-20, 20, 4001, dtype=np.float32)
    z = np.concatenate([z, np.float32([-3e38, -1e5, -100, -1e-30, 0, 1e-30, 100, 1e5, 3e38])])
    x = np.zeros((z.size, 8), np.float32)
    x[:, 0] = z
    itself = np.eye(8, dtype=np.float32)[None]
    routing = fm.moe_route_given(np.zeros((z.size, 1), np.int32), num_experts=1)
    out = fm.moe_forward(x, itself, itself, routing, gate="none", activation=activation)
    arithmetic = moe_oracle.exact(moe_oracle.NUMPY)
    want = moe_oracle.activate(arithmetic, z.astype(np.float64), activation, 1.0)
    assert (np.abs(out[:, 0] - want) <= 1.8e-7 * np.abs(z)).all()
    assert (out[:, 1:] == 0).all()


@EVERY_PRODUCER
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_grouped_product(producer: Producer, dtype: str, transposed: bool, masked: bool) -> None:
    rng = np.random.default_rng(3)
    shape = (5, 40, 24) if transposed else (5, 24, 40)
    w = rng.standard_normal(shape, np.float32)
    w = w.swapaxes(1, 2) if transposed else w
    bias = rng.standard_normal((5, 24), np.float32)
    counts = np.array([3, 0, 9, 1, 7], np.int32)
    bounds = {"counts": counts}
    x = rng.standard_normal((5, 9, 40), np.float32)
    if not masked:
        x = x.reshape(45, 40)
        bounds = {"offsets": np.array([2, 2, 13, 13, 30, 41], np.int32)}
    given = {name: producer.as_is(value) for name, value in bounds.items()}
    tensors = {"x": x, "w": w}
    made = {name: producer.make(value, dtype) for name, value in tensors.items()}
    for row in (None, bias):
        b = {} if row is None else {"bias": producer.make(row, dtype)}
        out = fm.grouped_product(**made, **given, **b)
        assert isinstance(out, producer.kind)
        values = {name: producers.cast(value, dtype) for name, value in tensors.items()}
        b = {} if row is None else {"bias": producers.cast(row, dtype)}
        moe_oracle.assert_grouped_product(host(out), **values, **bounds, **b)


ROUTER_CASES = (Case(experts=16, top_k=3), *(dataclasses.replace(c, experts=8) for c in CASES))
ROUTING: dict[str, Any] = {"renormalize": True, "scale": 1.5}


def fused_arguments(case: Case, producer: Producer, dtype: str) -> dict[str, Any]:
    """Arguments of fused_moe, with a router with small weights and a bias, for tokens [3, 5, H]."""
    rng = np.random.default_rng(4)
    made = make(case, producer, dtype)
    del made["routing"], made["x"]
    made["tokens"] = producer.make(rng.standard_normal((3, 5, case.hidden), np.float32), dtype)
    router = rng.standard_normal((case.experts, case.hidden), np.float32) * np.float32(0.3)
    made["router_weights"] = producer.make(router, dtype)
    made["router_bias"] = producer.make(rng.standard_normal(case.experts, np.float32), dtype)
    return made | {"top_k": case.top_k}


def steps(arguments: dict[str, Any], case: Case) -> np.ndarray:
    """What fused_moe gives for arguments of NumPy, one step after the other."""
    given = dict(arguments)
    x = given.pop("tokens").reshape(15, -1)
    router, bias = given.pop("router_weights")[None], given.pop("router_bias")[None]
    logits = fm.grouped_product(x, router, offsets=np.array([0, 15], np.int32), bias=bias)
    routing = fm.moe_route(logits, given.pop("top_k"), **ROUTING)
    return fm.moe_forward(x, routing=routing, **given, **case.options).reshape(3, 5, -1)


@EVERY_PRODUCER
@pytest.mark.parametrize("case", ROUTER_CASES, ids=str)
def test_fused_is_the_steps(producer: Producer, dtype: str, case: Case) -> None:
    got = fm.fused_moe(**fused_arguments(case, producer, dtype), **ROUTING, **case.options)
    assert isinstance(got, producer.kind)
    given = fused_arguments(case, Producer(), dtype)
    if producer.name == "jax":  # its arrays are contiguous; matrices turned round sum otherwise
        given = {n: np.ascontiguousarray(v) if n != "top_k" else v for n, v in given.items()}
    want = steps(given, case)
    assert tuple(np.asarray(host(got).shape)) == want.shape
    np.testing.assert_array_equal(bits(host(got)).ravel(), bits(want).ravel())


@EVERY_PRODUCER
def test_fused_from_logits(producer: Producer, dtype: str) -> None:
    case = Case(experts=7, top_k=3)
    arguments = fused_arguments(case, producer, dtype)
    del arguments["router_weights"], arguments["router_bias"]
    logits = logits_of(15, 7)
    got = fm.fused_moe(router_weights=None, **arguments, scoring="sigmoid",
                       logits=producer.as_is(logits.reshape(3, 5, 7)))  # fmt: skip
    values = fused_arguments(case, Producer(), dtype)
    want = fm.moe_forward(values["tokens"].reshape(15, -1), values["w_gate_up"], values["w_down"],
                          fm.moe_route(logits, 3, scoring="sigmoid"))  # fmt: skip
    np.testing.assert_array_equal(bits(host(got)).ravel(), bits(want).ravel())


@pytest.mark.parametrize("producer", [p for p in producers.ON_CPU if p.name != "array-api"],
                         ids=str)  # fmt: skip
def test_a_number_of_experts_that_is_no_multiple_of_eight(producer: Producer) -> None:
    """The router's product is then the framework's own."""
    case = Case(experts=6)
    arguments = fused_arguments(case, producer, "fp32")
    got = fm.fused_moe(**arguments, **ROUTING)
    assert isinstance(got, producer.kind)
    values = fused_arguments(case, Producer(), "fp32")
    x = values["tokens"].reshape(15, -1)
    logits = x @ values["router_weights"].T + values["router_bias"]
    want = fm.fused_moe(x, None, values["w_gate_up"], values["w_down"], 2, logits=logits, **ROUTING)
    np.testing.assert_allclose(np.asarray(got).reshape(15, -1), want, rtol=1e-4, atol=1e-5)


def test_fused_against_float64() -> None:
    case = Case(experts=16, top_k=3)
    given = fused_arguments(case, Producer(), "fp32")
    x = given["tokens"].reshape(15, -1)
    logits = x.astype(np.float64) @ given["router_weights"].astype(np.float64).T
    routing = moe_oracle.route(logits + given["router_bias"], 3, **ROUTING)
    want = moe_oracle.forward_float64(x, given["w_gate_up"], given["w_down"], routing)
    got = fm.fused_moe(**given, **ROUTING)
    np.testing.assert_allclose(got.reshape(15, -1), want.out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(40,), (1, 40), (0, 40), (2, 0, 3, 40), (2, 1, 3, 1, 40)])
@pytest.mark.parametrize("producer", [p for p in producers.ON_CPU if p.name != "array-api"],
                         ids=str)  # fmt: skip
def test_fused_takes_any_leading_dimensions(producer: Producer, shape: tuple[int, ...]) -> None:
    case = Case(experts=8)
    arguments = fused_arguments(case, producer, "fp32")
    tokens = np.random.default_rng(5).standard_normal(shape, np.float32)
    arguments["tokens"] = producer.as_is(tokens)
    got = np.asarray(fm.fused_moe(**arguments))
    assert got.shape == shape
    arguments = fused_arguments(case, Producer(), "fp32") | {"tokens": tokens.reshape(-1, 40)}
    np.testing.assert_array_equal(got.reshape(-1, 40), fm.fused_moe(**arguments))


@pytest.mark.parametrize("producer", [p for p in producers.ON_CPU if p.name in
                                      ("numpy", "torch-cpu")], ids=str)  # fmt: skip
def test_fused_reads_rows_in_place_or_says_why_not(producer: Producer) -> None:
    case = Case(experts=8)
    arguments = fused_arguments(case, producer, "fp32")
    room = np.random.default_rng(5).standard_normal((3, 5, 48), np.float32)
    arguments["tokens"] = producer.as_is(room)[..., :40]
    want = fused_arguments(case, Producer(), "fp32") | {"tokens": room[..., :40].copy()}
    out = producer.as_is(np.full((3, 5, 44), 7, np.float32))
    assert fm.fused_moe(**arguments, out=out[..., 4:]) is not None
    np.testing.assert_array_equal(np.asarray(out)[..., 4:], fm.fused_moe(**want))
    assert (np.asarray(out)[..., :4] == 7).all()
    match = r"^tokens: its 3 dimensions are not rows at one distance, accepted are tensors of which"
    for apart in (producer.as_is(room.swapaxes(0, 1)), producer.as_is(room)[:, :4]):
        arguments["tokens"] = apart[..., :40]
        with pytest.raises(ValueError, match=match):
            fm.fused_moe(**arguments)


@WITH_OUT
def test_outputs_are_the_callers(producer: Producer) -> None:
    logits = logits_of()
    blank = [
        producer.as_is(np.full(part.shape, -7, np.int32))
        for part in (np.empty((37, 2)), np.empty(7), np.empty(74), np.empty((37, 2)))
    ]
    weights = producer.poisoned((37, 2), "fp32")
    lse = producer.poisoned((37,), "fp32")
    routing = fm.MoeRouting(blank[0], weights, *blank[1:], lse)
    got = fm.moe_route(producer.as_is(logits), 2, out=routing, return_lse=True)
    assert got is routing
    moe_oracle.assert_routed(host(routing), moe_oracle.route(logits, 2))

    case = Case(gate="separate")
    arguments = make(case, producer, "fp32")
    out, pre = producer.poisoned((37, 40), "fp32"), producer.poisoned((74, 48), "fp32")
    assert fm.moe_forward(**arguments, **case.options, out=out, pre_activation=pre) is out
    both = fm.moe_forward(**arguments, **case.options, out=out, pre_activation=pre,
                          return_pre_activation=True)  # fmt: skip
    assert both[0] is out and both[1] is pre
    moe_oracle.assert_forward(host(out), **rounded(case, "fp32"), **case.options,
                                 pre_activation=host(pre))  # fmt: skip

    tokens = fused_arguments(Case(experts=8), producer, "fp32")
    out = producer.poisoned((3, 5, 40), "fp32")
    assert fm.fused_moe(**tokens, out=out) is out
    np.testing.assert_array_equal(bits(host(out)), bits(host(fm.fused_moe(**tokens))))


def test_out_of_given_ids() -> None:
    ids = np.array([[0, 1], [2, 9]], np.int32)
    first = fm.moe_route_given(ids, num_experts=3)
    for part in first[:5]:
        part.fill(-7)
    assert fm.moe_route_given(ids, num_experts=3, out=first) is first
    moe_oracle.assert_routed(first, moe_oracle.route_given(ids, num_experts=3))


def test_rows_that_no_expert_has_are_not_written() -> None:
    x = np.ones((10, 16), np.float32)
    w = np.ones((2, 8, 16), np.float32)
    out = np.full((10, 8), 7, np.float32)
    assert fm.grouped_product(x, w, offsets=np.array([2, 5, 6], np.int32), out=out) is out
    assert (out[2:6] == 16).all() and (out[:2] == 7).all() and (out[6:] == 7).all()
    x, out = x.reshape(2, 5, 16), np.full((2, 5, 8), 7, np.float32)
    fm.grouped_product(x, w, counts=np.array([1, 4], np.int32), out=out)
    assert (out[0, :1] == 16).all() and (out[1, :4] == 16).all()
    assert (out[0, 1:] == 7).all() and (out[1, 4:] == 7).all()


def test_offsets_and_counts_that_lie_are_cut_to_the_rows() -> None:
    """What fused_moe relies on: one group that has all rows, whatever their number."""
    x = np.random.default_rng(0).standard_normal((10, 16), np.float32)
    w = np.random.default_rng(1).standard_normal((1, 8, 16), np.float32)
    want = fm.grouped_product(x, w, offsets=np.array([0, 10], np.int32))
    most = 2**31 - 1
    np.testing.assert_array_equal(
        fm.grouped_product(x, w, offsets=np.array([0, most], np.int32)), want
    )
    got = fm.grouped_product(x[None], w, counts=np.array([most], np.int32))
    np.testing.assert_array_equal(got[0], want)
    out = np.full((10, 8), 7, np.float32)
    fm.grouped_product(x, w, offsets=np.array([-5, 3], np.int32), out=out)
    np.testing.assert_array_equal(out[:3], want[:3])
    assert (out[3:] == 7).all()


def test_pairs_without_an_expert_count_nothing() -> None:
    case = Case()
    arguments = rounded(case, "fp32")
    ids = np.asarray(arguments["routing"].ids).copy()
    ids[::3] = -1
    ids[1::3, 1] = 77
    weights = np.random.default_rng(0).random(ids.shape, np.float32)
    arguments["routing"] = fm.moe_route_given(ids, weights, num_experts=6)
    out, pre = fm.moe_forward(**arguments, return_pre_activation=True)
    assert (out[::3] == 0).all()
    moe_oracle.assert_forward(out, **arguments, pre_activation=pre)


def test_halves_of_the_experts_add_up_to_all() -> None:
    """Expert parallelism: each half computes its own experts of every token."""
    case = Case(experts=8, top_k=4)
    arguments = rounded(case, "fp32")
    whole = fm.moe_forward(**arguments)
    ids = np.asarray(arguments["routing"].ids)
    total = np.zeros_like(whole)
    for half in range(2):
        expert_map = np.full(8, -1, np.int32)
        expert_map[4 * half : 4 * half + 4] = range(4)
        mine = dict(arguments)
        mine["routing"] = fm.moe_route_given(
            ids, arguments["routing"].weights, num_experts=4, expert_map=expert_map
        )
        for name in ("w_gate_up", "w_down"):
            mine[name] = arguments[name][4 * half : 4 * half + 4]
        total += fm.moe_forward(**mine)
    np.testing.assert_allclose(total, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["x", "w_gate_up", "w_down", "w_up", "b_gate_up", "routing"])
def test_read_only_inputs_are_accepted(name: str) -> None:
    case = Case(gate="separate", bias="fp32")
    for dtype in ("fp32", "bf16"):
        arguments = rounded(case, dtype)
        want = fm.moe_forward(**arguments, **case.options)
        for array in arguments[name][:5] if name == "routing" else [arguments[name]]:
            array.setflags(write=False)
        np.testing.assert_array_equal(fm.moe_forward(**arguments, **case.options), want)
    logits = logits_of()
    logits.setflags(write=False)
    moe_oracle.assert_routed(fm.moe_route(logits, 2), moe_oracle.route(logits, 2))


def test_views_are_read_in_place() -> None:
    """Rows of x further apart, experts further apart, a slice of the experts, one expert for all,
    logits in a wider tensor."""
    case = Case()
    plain = rounded(case, "fp32")
    want = fm.moe_forward(**plain)
    rng = np.random.default_rng(0)

    def inside(values: np.ndarray, *margins: tuple[int, int]) -> np.ndarray:
        room = rng.standard_normal(
            [a + n + b for n, (a, b) in zip(values.shape, margins, strict=True)]
        ).astype(values.dtype)
        view = room[tuple(slice(a, a + n) for n, (a, b) in zip(values.shape, margins, strict=True))]
        view[...] = values
        return view

    moved = plain | {
        "x": inside(plain["x"], (1, 2), (4, 8)),
        "w_gate_up": inside(plain["w_gate_up"], (2, 1), (3, 5), (0, 4)),
        "w_down": inside(plain["w_down"], (0, 3), (1, 0), (4, 4)),
    }
    np.testing.assert_array_equal(fm.moe_forward(**moved), want)
    shared = plain | {"w_down": np.broadcast_to(plain["w_down"][:1], plain["w_down"].shape)}
    copied = plain | {"w_down": shared["w_down"].copy()}
    np.testing.assert_array_equal(fm.moe_forward(**shared), fm.moe_forward(**copied))
    logits = logits_of(37, 9)[:, 1:7]
    moe_oracle.assert_routed(fm.moe_route(logits, 2), moe_oracle.route(logits, 2))


@pytest.mark.parametrize("gate", ["gate_up", "interleaved", "separate", "none"])
def test_matrices_are_transposed_one_by_one(gate: str) -> None:
    arguments = make(Case(gate=gate), Producer(), "fp32") | {"gate": gate}
    names = [name for name in ("w_gate_up", "w_up", "w_down") if name in arguments]
    want = fm.moe_forward(**arguments)
    for turned in itertools.product((False, True), repeat=len(names)):
        given = dict(arguments)
        for name, turn in zip(names, turned, strict=True):
            if turn:
                given[name] = np.ascontiguousarray(given[name].swapaxes(1, 2)).swapaxes(1, 2)
        np.testing.assert_allclose(fm.moe_forward(**given), want, rtol=1e-5, atol=1e-6)


def test_transposed_weights_of_torch() -> None:
    """As gpt-oss and Llama 4 store them: [E, H, 2I] and [E, I, H], passed as transposed views."""
    torch = pytest.importorskip("torch")
    case = Case(gate="interleaved")
    arguments = make(case, producers.Torch(), "bf16")
    want = fm.moe_forward(**arguments, **case.options)
    for name in ("w_gate_up", "w_down"):
        arguments[name] = arguments[name].transpose(1, 2).contiguous().transpose(1, 2)
        assert not arguments[name].is_contiguous()
    got = fm.moe_forward(**arguments, **case.options)
    moe_oracle.assert_forward(got, **arguments, **case.options)
    assert torch.allclose(got.float(), want.float(), atol=0.05)


EMPTY = [Case(tokens=0), Case(tokens=1, top_k=1), Case(experts=1, top_k=1), Case(top_k=6),
         Case(tokens=3, experts=200, top_k=32), Case(hidden=8, inner=8)]  # fmt: skip


@PRODUCERS
@pytest.mark.parametrize("case", EMPTY, ids=str)
def test_edges(producer: Producer, case: Case) -> None:
    arguments = make(case, producer, "fp32")
    out, pre = fm.moe_forward(**arguments, return_pre_activation=True)
    moe_oracle.assert_forward(host(out), **rounded(case, "fp32"), pre_activation=host(pre))
    logits = logits_of(case.tokens, case.experts)
    got = fm.moe_route(producer.as_is(logits), case.top_k, return_lse=True)
    moe_oracle.assert_routed(host(got), moe_oracle.route(logits, case.top_k))


def test_torch_parameters_and_grad_mode() -> None:
    """Gradients are recorded where torch records them; what is computed is the same in any mode."""
    torch = pytest.importorskip("torch")
    case = Case(experts=8, gate="separate", bias="fp32")
    arguments = make(case, producers.Torch(), "fp32")
    want = fm.moe_forward(**arguments, **case.options)
    for name, value in arguments.items():
        if name == "routing":
            continue
        given = arguments | {name: torch.nn.Parameter(value)}
        made = fm.moe_forward(**given, **case.options)
        assert made.requires_grad
        assert torch.equal(made, want)
        with pytest.raises(
            ValueError, match=r"^out: got one in a call that gradients are recorded"
        ):
            fm.moe_forward(**given, **case.options, out=torch.empty_like(want))
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                made = fm.moe_forward(**given, **case.options)
                assert torch.equal(made, want)
                assert not made.requires_grad
    logits = torch.nn.Parameter(torch.randn(5, 8))
    assert fm.moe_route(logits, 2).weights.requires_grad
    with torch.no_grad():
        assert not fm.moe_route(logits, 2).weights.requires_grad
    routing = arguments["routing"]
    graded = routing._replace(weights=routing.weights.clone().requires_grad_())
    assert fm.moe_forward(**arguments | {"routing": graded}, **case.options).requires_grad
    tokens = fused_arguments(Case(experts=8), producers.Torch(), "fp32")
    want = fm.fused_moe(**tokens)
    for name in ("tokens", "router_weights", "router_bias", "w_gate_up", "w_down"):
        made = fm.fused_moe(**tokens | {name: tokens[name].clone().requires_grad_()})
        assert made.requires_grad
        assert torch.equal(made, want)


def test_torch_without_the_exchange_api(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch older than 2.10."""
    torch = pytest.importorskip("torch")
    from flashmoe_science import _moe

    case = Case(experts=8)
    arguments = make(case, producers.Torch(), "bf16")
    tensors = {n: x for n, x in arguments.items() if n != "routing" and x is not None}
    options = case.options | {"return_pre_activation": False}
    got = _moe.moe_forward(tensors, arguments["routing"], options, {}, None)
    assert type(got) is torch.Tensor
    assert torch.equal(got, fm.moe_forward(**arguments))
    logits = torch.from_numpy(logits_of())
    routed = _moe.moe_route({"logits": logits}, {"top_k": 2, "return_lse": True}, None, None)
    assert all(type(part) is torch.Tensor for part in routed)
    for part, want in zip(routed, fm.moe_route(logits, 2, return_lse=True), strict=True):
        assert torch.equal(part, want)
    given = fused_arguments(case, producers.Torch(), "bf16")
    tensors = {n: x for n, x in given.items() if isinstance(x, torch.Tensor)}
    options = {n: x for n, x in given.items() if n not in tensors and x is not None}
    fused = _moe.fused_moe(tensors, options, None, None)
    assert torch.equal(fused, fm.fused_moe(**given))
    with pytest.raises(
        ValueError, match=r"^logits: requires grad, but .* with torch 2.10 or newer"
    ):
        _moe.moe_route({"logits": logits.requires_grad_()}, {"top_k": 2}, None, None)


def test_signatures_are_those_of_the_python_functions() -> None:
    for function, first in ((fm.moe_route, "logits"), (fm.moe_forward, "x"),
                            (fm.grouped_product, "x"), (fm.fused_moe, "tokens")):  # fmt: skip
        assert function.__module__ == "flashmoe_science.moe"
        assert next(iter(inspect.signature(function).parameters)) == first
        assert "Args:" in (inspect.getdoc(function) or "")


def test_launches_are_the_planned_ones() -> None:
    case = Case()
    arguments = rounded(case, "fp32")
    plan = fm.moe_plan(**arguments)
    assert plan.family == "cpu"
    fm.moe_forward(**arguments)
    assert len(plan.launches) == 3
    assert fm.last_launches() == plan.launches
    assert fm.last_launch() == plan.launches[-1]
    up, down, combine = plan.launches
    assert (up.tile_rows, up.tile_tokens) == (up.tile_m, up.tile_n)
    assert (down.tile_rows > 0, combine.tile_rows) == (True, 0)
    assert isinstance(plan, fm.MoePlan)
    assert isinstance(plan, fm.Plan)
    assert plan.operation == "moe_forward"
    assert plan.flops == 6.0 * 37 * 2 * 40 * 24
    described = fm.moe_plan_for(tokens=37, hidden=40, inner=24, experts=6, top_k=2, dtype="fp32")
    assert described == plan
    logits = logits_of()
    assert fm.moe_route_plan(logits, 2) == fm.moe_route_plan_for(
        tokens=37, experts=6, top_k=2, dtype="fp32"
    )
    x, w = np.ones((10, 16), np.float32), np.ones((2, 8, 16), np.float32)
    product = fm.grouped_product_plan(x, w, offsets=np.array([0, 5, 10], np.int32))
    assert product.flops == 2.0 * 10 * 16 * 8
    assert [type(launch) for launch in product.launches] == [fm.MoeLaunch] * len(product.launches)


@PRODUCERS
def test_plans_of_every_framework(producer: Producer) -> None:
    case = Case(gate="separate", transposed=True, bias="x")
    plan = fm.moe_plan(**make(case, producer, "fp32"), **case.options, return_pre_activation=True)
    described = fm.moe_plan_for(
        tokens=37, hidden=40, inner=24, experts=6, top_k=2, dtype="fp32", gate="separate",
        bias=True, transposed=producer.name != "jax", return_pre_activation=True,
    )  # fmt: skip
    assert plan == described
    assert fm.moe_route_plan(producer.as_is(logits_of()), 2).family == "cpu"


@pytest.mark.parametrize("producer", producers.ON_CPU, ids=str)
def test_plans_of_fused_calls(producer: Producer) -> None:
    case = Case(experts=8, gate="interleaved", bias="fp32")
    given = fused_arguments(case, producer, "fp32")
    plan = fm.fused_moe_plan(**given, **ROUTING, **case.options)
    assert (plan.operation, plan.family) == ("fused_moe", "cpu")
    names = [launch.kernel.partition("_cpu")[0] for launch in plan.launches]
    steps = ["moe_route", "moe_up", "moe_down", "moe_combine"]
    assert names == ["grouped_product", *steps]
    # As many experts as are no product of the library's.
    few = fused_arguments(Case(), producer, "fp32")
    plan = fm.fused_moe_plan(**few, **ROUTING)
    assert [launch.kernel.partition("_cpu")[0] for launch in plan.launches] == steps
    logits = producer.as_is(np.zeros((3, 5, 6), np.float32))
    few |= {"router_weights": None, "router_bias": None, "logits": logits}
    assert len(fm.fused_moe_plan(**few, **ROUTING).launches) == 4
    with pytest.raises(ValueError, match=r"^kernel: got \"sm12\", built in are "):
        fm.fused_moe_plan(**few, **ROUTING, kernel="sm12")


def test_plans_of_fused_calls_are_those_of_what_is_launched() -> None:
    case = Case(experts=8)
    given = fused_arguments(case, Producer(), "bf16")
    out = np.zeros_like(given["tokens"])
    plan = fm.fused_moe_plan(**given, **ROUTING, out=out)
    fm.fused_moe(**given, **ROUTING, out=out)
    assert [launch.kernel for launch in fm.last_launches()] == [
        launch.kernel for launch in plan.launches
    ]
    assert plan.workspace_bytes > 0 and plan.flops > 0
    for changed, sentence in (
        ({"router_weights": given["router_weights"][:, :32]}, "router_weights: its number of col"),
        ({"router_weights": given["router_weights"][:6], "router_bias": None},
         "router_weights: its number of experts is 6, but w_gate_up has 8"),
        ({"out": out[:2]}, "out: got another shape"),
        ({"w_down": 3}, "w_down: got int"),
    ):  # fmt: skip
        with pytest.raises(fm.FlashMoEError) as caught:
            fm.fused_moe_plan(**(given | {"out": out} | changed), **ROUTING)
        assert str(caught.value).startswith(sentence)


def test_nothing_leaks() -> None:
    import gc
    import sys

    case = Case(experts=8)
    for producer in producers.ON_CPU:
        if producer.name not in ("numpy", "torch-cpu"):
            continue
        arguments = make(case, producer, "fp32")
        fused = fused_arguments(case, producer, "fp32")
        logits = producer.as_is(logits_of())
        given = [*arguments.values(), *fused.values(), logits, *arguments["routing"]]
        # None, strings and small integers belong to anybody.
        held = [thing for thing in given if not isinstance(thing, (int, str, type(None)))]

        def calls() -> None:
            fm.moe_forward(**arguments)  # noqa: B023
            fm.fused_moe(**fused)  # noqa: B023
            fm.moe_route(logits, 2)  # noqa: B023
            with pytest.raises(ValueError, match=r"^top_k: "):
                fm.moe_route(logits, 7)  # noqa: B023

        calls()
        gc.collect()
        before = [sys.getrefcount(thing) for thing in held]
        for _ in range(30):
            calls()
        gc.collect()
        assert [sys.getrefcount(thing) for thing in held] == before


def backward_case() -> Any:
    rng = np.random.default_rng(4)
    x, dout = rng.standard_normal((2, 9, 32), np.float32)
    w_gate_up = rng.standard_normal((4, 48, 32), np.float32)
    w_down = rng.standard_normal((4, 32, 24), np.float32)
    routing = fm.moe_route(rng.standard_normal((9, 4), np.float32), 2)
    _, before = fm.moe_forward(x, w_gate_up, w_down, routing, return_pre_activation=True)
    return (dout, x, w_gate_up, w_down, routing), before


def test_gradients_that_overwrite_pre_activation() -> None:
    call, before = backward_case()
    held = before.copy()
    want = fm.moe_backward(*call, pre_activation=before)
    plans = [fm.moe_backward_plan(*call, pre_activation=before, overwrite_pre_activation=flag)
             for flag in (False, True)]  # fmt: skip
    assert plans[0].workspace_bytes - plans[1].workspace_bytes == before.nbytes
    assert np.array_equal(before, held)
    made = fm.moe_backward(*call, pre_activation=before, overwrite_pre_activation=True)
    for ours, gradient in zip(made, want, strict=True):
        assert np.array_equal(ours, gradient)
    assert not np.array_equal(before, held)
    held.flags.writeable = False
    with pytest.raises((TypeError, ValueError), match=r"^pre_activation: .*read-only"):
        fm.moe_backward(*call, pre_activation=held, overwrite_pre_activation=True)
    with pytest.raises(ValueError, match=r"^overwrite_pre_activation: got 1, accepted without"):
        fm.moe_backward(*call, overwrite_pre_activation=True)


def test_torch_is_told_that_pre_activation_was_overwritten() -> None:
    torch = pytest.importorskip("torch")
    (dout, x, w_gate_up, w_down, routing), before = backward_case()
    given = [torch.from_numpy(a) for a in (dout, x, w_gate_up, w_down)]
    order = fm.MoeRouting(*(None if a is None else torch.from_numpy(a) for a in routing))
    saved = torch.from_numpy(before)
    version = saved._version
    fm.moe_backward(*given, order, pre_activation=saved)
    assert saved._version == version
    fm.moe_backward(*given, order, pre_activation=saved, overwrite_pre_activation=True)
    assert saved._version > version


def test_jax_arrays_are_not_overwritten() -> None:
    jnp = pytest.importorskip("jax.numpy")
    (dout, x, w_gate_up, w_down, routing), before = backward_case()
    given = [jnp.asarray(a) for a in (dout, x, w_gate_up, w_down)]
    order = fm.MoeRouting(*(None if a is None else jnp.asarray(a) for a in routing))
    with pytest.raises(
        ValueError, match=r"^overwrite_pre_activation: JAX arrays cannot be written"
    ):
        fm.moe_backward(
            *given, order, pre_activation=jnp.asarray(before), overwrite_pre_activation=True
        )
