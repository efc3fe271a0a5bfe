"""The mixture of experts for any shape, order, layout, dtype and option, against float64."""

from __future__ import annotations

from typing import Any

import flashmoe_science as fm
import moe_oracle
import numpy as np
import producers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from moe_cases import routing_of
from producers import Producer
from reference import DTYPES

FRAMEWORKS = [p for p in producers.ON_CPU if p.name in ("numpy", "torch-cpu")]
EXAMPLES = 120
CHOICE_DISTANCE = 1e-6  # of sums of fp32 sigmoids and biases that arithmetic keeps apart


@st.composite
def rows(draw: st.DrawFn, shape: tuple[int, int], dtype: str) -> np.ndarray:
    """Standard normal values whose rows are contiguous, and may lie in wider ones."""
    per_row = 16 // DTYPES[dtype].itemsize
    seed = draw(st.integers(0, 2**32 - 1))
    wide = shape[1] + per_row * draw(st.integers(0, 2))
    begin = per_row * draw(st.integers(0, (wide - shape[1]) // per_row))
    values = np.random.default_rng(seed).standard_normal((shape[0], wide), np.float32)
    return producers.cast(values, dtype)[:, begin : begin + shape[1]]


@st.composite
def matrices(draw: st.DrawFn, shape: tuple[int, int, int], dtype: str) -> np.ndarray:
    """Weights of every expert, stored either way round, in a larger tensor, or one for all."""
    experts, n, k = shape
    turned = draw(st.booleans())
    stored = (k, n) if turned else (n, k)
    values = draw(rows((experts * stored[0], stored[1]), dtype)) * DTYPES[dtype].type(k**-0.5)
    made = values.reshape(experts, *stored)
    if draw(st.booleans()):  # experts further apart
        room = np.zeros((experts + 1, stored[0] + 1, stored[1]), made.dtype)
        room[1:, 1:] = made
        made = room[1:, 1:]
    if draw(st.integers(0, 7)) == 0:
        made = np.broadcast_to(made[:1], made.shape)
    return made.swapaxes(1, 2) if turned else made


@st.composite
def logits(draw: st.DrawFn, tokens: int, experts: int) -> np.ndarray:
    """Few different values, so that many are equal; now and then NaN and infinities."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    if draw(st.booleans()):
        values = rng.standard_normal((tokens, experts), np.float32)
    else:
        values = rng.integers(-3, 4, (tokens, experts)).astype(np.float32)
    if draw(st.integers(0, 3)) == 0:
        wild = np.array([np.nan, np.inf, -np.inf], np.float32)
        at = rng.random((tokens, experts)) < draw(st.sampled_from((0.05, 0.5, 1.0)))
        values = np.where(at, wild[rng.integers(0, 3, values.shape)], values)
    return values


@st.composite
def routes(draw: st.DrawFn) -> dict[str, Any]:
    scoring = draw(st.sampled_from(moe_oracle.SCORINGS))
    groups, top_groups = 1, None
    experts = draw(st.integers(1, 70))
    if scoring == "sigmoid" and draw(st.booleans()):
        groups = draw(st.integers(2, 8))
        experts = groups * draw(st.integers(2, 8))
        top_groups = draw(st.integers(1, groups))
    most = experts if top_groups is None else top_groups * experts // groups
    top_k = draw(st.integers(1, min(most, 32)))
    tokens = draw(st.integers(0, 60))
    values = draw(logits(tokens, experts))
    bias = None
    if scoring == "sigmoid" and draw(st.booleans()):
        bias = np.random.default_rng(draw(st.integers(0, 99))).integers(-2, 3, experts)
        bias = bias.astype(np.float32) / 4
    return {
        "logits": values, "top_k": top_k, "scoring": scoring,
        "renormalize": draw(st.booleans()), "selection_bias": bias,
        "num_groups": groups, "top_groups": top_groups,
        "scale": draw(st.sampled_from((1.0, 2.5, -0.5))),
    }  # fmt: skip


@settings(max_examples=EXAMPLES)
@given(routes(), st.sampled_from(FRAMEWORKS), st.sampled_from(("fp32", "fp16", "bf16")))
def test_any_route(options: dict[str, Any], producer: Producer, dtype: str) -> None:
    options["logits"] = producers.cast(options["logits"], dtype)
    assume(moe_oracle.closest_choices(**options) > CHOICE_DISTANCE)
    want = moe_oracle.route(**options)
    tensors = {"logits": producer.make(options["logits"], dtype)}
    if options["selection_bias"] is not None:
        tensors["selection_bias"] = producer.as_is(options["selection_bias"])
    got = fm.moe_route(**options | tensors, return_lse=True)
    check_routed(got, want)


def check_routed(got: fm.MoeRouting, want: moe_oracle.Routing) -> None:
    """As assert_routed has it, where logits are finite; whatever they are, experts are distinct and
    what is not finite is not finite."""
    moe_oracle.assert_routed(got._replace(weights=as_fp32(want.weights), lse=None), want)
    ids = np.asarray(got.ids)
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    for name in ("weights", "lse"):
        values, ref = np.asarray(getattr(got, name), np.float64), getattr(want, name)
        wild = ~np.isfinite(ref)
        assert not np.isfinite(values[wild]).any(), name
        tolerance = {"rtol": 2e-5, "atol": 2e-5 if name == "lse" else 1e-30}
        np.testing.assert_allclose(values[~wild], ref[~wild], **tolerance, err_msg=name)


def as_fp32(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32)


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_any_given_ids(data: st.DataObject) -> None:
    draw = data.draw
    tokens, top_k = draw(st.integers(0, 60)), draw(st.integers(1, 32))
    experts = draw(st.integers(1, 50))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from((np.int32, np.int64)))
    ends = np.iinfo(kind)
    ids = rng.integers(-3, experts + 3, (tokens, top_k)).astype(kind)
    ids = np.where(rng.random(ids.shape) < 0.05, ends.max, ids)
    ids = np.where(rng.random(ids.shape) < 0.05, ends.min, ids).astype(kind)
    expert_map = None
    if draw(st.booleans()):
        expert_map = rng.integers(-2, experts + 2, draw(st.integers(0, 60))).astype(np.int32)
    weights = draw(st.sampled_from((None, "fp32", "fp16", "bf16")))
    options = {"renormalize": draw(st.booleans()), "scale": draw(st.sampled_from((1.0, -2.5)))}
    producer = draw(st.sampled_from(FRAMEWORKS))
    if weights is not None:
        # Weights of one sign if they are divided by their sum, which otherwise may consist of
        # rounding errors.
        values = rng.random if options["renormalize"] else rng.standard_normal
        weights = producers.cast(values(ids.shape, np.float32), weights)
    want = moe_oracle.route_given(
        ids, weights, num_experts=experts, expert_map=expert_map, **options
    )
    got = fm.moe_route_given(
        producer.as_is(ids),
        None if weights is None else producer.make(weights, name_of(weights)),
        num_experts=experts,
        expert_map=None if expert_map is None else producer.as_is(expert_map),
        **options,
    )
    moe_oracle.assert_routed(got, want)


def name_of(array: np.ndarray) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype == array.dtype)


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_any_layer(data: st.DataObject) -> None:
    draw = data.draw
    producer = draw(st.sampled_from(FRAMEWORKS))
    dtype = draw(st.sampled_from(("fp32", "fp16", "bf16")))
    tokens, experts = draw(st.integers(0, 40)), draw(st.integers(1, 12))
    hidden, inner = 8 * draw(st.integers(1, 9)), 8 * draw(st.integers(1, 9))
    top_k = draw(st.integers(1, min(experts, 6)))
    gate = draw(st.sampled_from(moe_oracle.GATES))
    activation = draw(st.sampled_from(moe_oracle.ACTIVATIONS))
    first = inner if gate in ("separate", "none") else 2 * inner
    tensors = {
        "x": draw(rows((tokens, hidden), dtype)),
        "w_gate_up": draw(matrices((experts, first, hidden), dtype)),
        "w_down": draw(matrices((experts, hidden, inner), dtype)),
    }
    if gate == "separate":
        tensors["w_up"] = draw(matrices((experts, inner, hidden), dtype))
    for name, width in (("b_gate_up", first), ("b_up", inner), ("b_down", hidden)):
        if draw(st.booleans()) and (name != "b_up" or gate == "separate"):
            tensors[name] = draw(rows((experts, width), draw(st.sampled_from(("fp32", dtype)))))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    skew = rng.random(experts) ** 8 if draw(st.booleans()) else 0.0
    ids = (rng.random((tokens, experts)) + skew).argsort(1)[:, :top_k].astype(np.int32)
    if draw(st.booleans()):
        ids = np.where(rng.random(ids.shape) < 0.3, -1, ids).astype(np.int32)
    weights = rng.standard_normal(ids.shape).astype(np.float32)
    weights = np.where(ids < 0, np.float32(0), weights)
    routing = routing_of(np.ascontiguousarray(ids), weights, experts)
    options = {
        "gate": gate,
        "activation": activation,
        "alpha": draw(st.sampled_from((1.0, 1.702))) if activation == "silu" else 1.0,
        "limit": draw(st.sampled_from((None, 0.7))),
        "up_offset": 0.0 if gate == "none" else draw(st.sampled_from((0.0, 1.0))),
        "weight_on_input": draw(st.booleans()),
    }
    made = {name: producer.make(value, name_of(value)) for name, value in tensors.items()}
    given_routing = fm.MoeRouting(*(None if p is None else producer.as_is(p) for p in routing))
    out, pre = fm.moe_forward(**made, **options, routing=given_routing, return_pre_activation=True)
    moe_oracle.assert_forward(out, **tensors, **options, routing=routing, pre_activation=pre)


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_any_grouped_product(data: st.DataObject) -> None:
    draw = data.draw
    producer = draw(st.sampled_from(FRAMEWORKS))
    dtype = draw(st.sampled_from(("fp32", "fp16", "bf16")))
    experts = draw(st.integers(1, 9))
    n, k = 8 * draw(st.integers(1, 9)), 8 * draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    bounds: dict[str, np.ndarray]
    if draw(st.booleans()):
        most = draw(st.integers(0, 12))
        bounds = {"counts": rng.integers(0, most + 1, experts).astype(np.int32)}
        x = draw(rows((experts * most, k), dtype)).reshape(experts, most, k)
    else:
        total = draw(st.integers(0, 60))
        ends = np.sort(rng.integers(0, total + 1, experts + 1)).astype(np.int32)
        bounds = {"offsets": ends}
        x = draw(rows((total, k), dtype))
    tensors = {"x": x, "w": draw(matrices((experts, n, k), dtype))}
    if draw(st.booleans()):
        tensors["bias"] = draw(rows((experts, n), draw(st.sampled_from(("fp32", dtype)))))
    made = {name: producer.make(value, name_of(value)) for name, value in tensors.items()}
    given_bounds = {name: producer.as_is(value) for name, value in bounds.items()}
    out = producer.poisoned((*x.shape[:-1], n), dtype)
    fm.grouped_product(**made, **given_bounds, out=out)
    moe_oracle.assert_grouped_product(out, **tensors, **bounds)
    shape = x.shape[:-1]
    untouched = ~moe_oracle.rows_of_experts(shape, bounds.get("offsets"), bounds.get("counts"))
    assert np.isnan(moe_oracle.to_numpy(out)[untouched]).all()
