"""Bad calls of the mixture of experts: the kind of the exception, the sentence, nothing written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import flashmoe_science as fm
import numpy as np
import producers
import pytest
from moe_cases import Case, make
from producers import DlpackOnly, Producer

TENSOR = "accepted is a tensor of NumPy, torch, JAX or CuPy, or an object with __dlpack__"
ROUTING = "accepted is a MoeRouting, which moe_route and moe_route_given return"
FRAMEWORKS = [p for p in producers.ON_CPU if p.name in ("numpy", "torch-cpu")]
LOGITS = np.random.default_rng(0).standard_normal((5, 8), np.float32)
IDS = np.array([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]], np.int32)

Bad = tuple[dict[str, Any], type[Exception], str]


def zeros(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def wide(array: np.ndarray, rows: int) -> np.ndarray:
    """More rows than any memory has, all of them the first."""
    return np.lib.stride_tricks.as_strided(array, (rows, *array.shape[1:]), (0, *array.strides[1:]))


def tensors_of(producer: Producer, arguments: dict[str, Any]) -> dict[str, Any]:
    """NumPy arrays among the arguments as tensors of the framework."""
    return {
        name: producer.as_is(value) if isinstance(value, np.ndarray) else value
        for name, value in arguments.items()
    }


ROUTE: list[Bad] = [
    ({"top_k": 0}, ValueError, "top_k: got 0, accepted are 1 to 32, and no more than experts"),
    ({"top_k": 33}, ValueError, "top_k: got 33, accepted are 1 to 32, and no more than experts"),
    ({"top_k": 9}, ValueError,
     "top_k: got 9, accepted are 1 to 32, and no more than the 8 experts"),
    ({"top_k": True}, TypeError, "top_k: got True of type bool, accepted are 1 to 32"),
    ({"top_k": 2.0}, TypeError, "top_k: got 2.0 of type float, accepted are 1 to 32"),
    ({"logits": LOGITS[0]}, ValueError, "logits: got 1 dimensions, accepted are 2"),
    ({"logits": LOGITS.astype(np.int32)}, TypeError, "logits: got dtype int32"),
    ({"logits": [1.0]}, TypeError, f"logits: got list, {TENSOR}"),
    ({"logits": zeros(5, 1025)}, ValueError, "logits: got 1025 experts, accepted are 1 to 1024"),
    ({"logits": zeros(5, 0)}, ValueError, "logits: got 0 experts, accepted are 1 to 1024"),
    ({"logits": LOGITS[:, ::2]}, ValueError, "logits: its last dimension has stride 2"),
    ({"logits": wide(LOGITS, 2**30)}, ValueError,
     "logits: got 1073741824 tokens with 2 experts each, accepted are at most 2^31 - 2^16 pairs"),
    ({"scoring": "soft"}, ValueError,
     "scoring: got 'soft', accepted are 'softmax', 'topk_softmax' and 'sigmoid'"),
    ({"scoring": None}, TypeError, "scoring: got None of type NoneType, accepted are"),
    ({"renormalize": 1}, TypeError, "renormalize: got 1 of type int, accepted are False and True"),
    ({"selection_bias": zeros(8)}, ValueError,
     "selection_bias: got a tensor, accepted is none unless scoring is"),
    ({"selection_bias": zeros(7), "scoring": "sigmoid"}, ValueError,
     "selection_bias: its number of experts is 7, but logits has 8"),
    ({"selection_bias": zeros(8, dtype=np.float16), "scoring": "sigmoid"}, TypeError,
     "selection_bias: got dtype fp16"),
    ({"num_groups": 0, "scoring": "sigmoid"}, ValueError, "num_groups: got 0, accepted are 1"),
    ({"num_groups": 3, "top_groups": 1, "scoring": "sigmoid"}, ValueError,
     "num_groups: got 3, accepted are divisors of the 8 experts"),
    ({"num_groups": 2, "scoring": "sigmoid"}, ValueError, "top_groups: got 0, accepted with"),
    ({"num_groups": 2, "top_groups": 3, "scoring": "sigmoid"}, ValueError,
     "top_groups: got 3, accepted with num_groups 2 are 1 to 2"),
    ({"num_groups": 2, "top_groups": 1, "scoring": "sigmoid", "top_k": 5}, ValueError,
     "top_groups: got 1 groups of 4 experts, too few to choose the 5 of a token from"),
    ({"num_groups": 2, "top_groups": 1}, ValueError, "num_groups: got 2 with scoring 0"),
    ({"scale": 0.0}, ValueError, "scale: got 0.0, accepted is a finite number other than 0"),
    ({"scale": float("nan")}, ValueError, "scale: got nan, accepted is a finite number"),
    ({"scale": "1"}, TypeError, "scale: got '1' of type str, accepted is a finite number"),
    ({"return_lse": 1}, TypeError, "return_lse: got 1 of type int, accepted are False and True"),
    ({"out": 3}, TypeError, f"out: got int, {ROUTING}"),
    ({"out": (1, 2)}, TypeError, f"out: got tuple, {ROUTING}"),
    ({"stream": "x"}, TypeError, "stream: got 'x' of type str, accepted is a cudaStream_t"),
]  # fmt: skip


@pytest.mark.parametrize("bad", ROUTE, ids=lambda b: b[2][:40])
@pytest.mark.parametrize("producer", FRAMEWORKS, ids=str)
def test_route(producer: Producer, bad: Bad) -> None:
    changed, kind, sentence = bad
    arguments = tensors_of(producer, {"logits": LOGITS, "top_k": 2} | changed)
    with pytest.raises(kind) as caught:
        fm.moe_route(**arguments)
    assert isinstance(caught.value, fm.FlashMoEError)
    assert str(caught.value).startswith(sentence)


OUT: list[tuple[str, Callable[[Any], Any], type[Exception], str]] = [
    ("ids", lambda x: x.astype(np.int64), TypeError, "ids: got dtype int64"),
    ("ids", lambda x: x[:, :1].copy(), ValueError, "top_k: got 2, but ids has room for 1"),
    ("ids", lambda x: np.repeat(x, 2, 1)[:, ::2], ValueError, "ids: got strides [4, 2]"),
    ("weights", lambda x: x.astype(np.float16), TypeError, "weights: got dtype fp16"),
    ("offsets", lambda x: x[:5].copy(), ValueError, "offsets: "),
    ("pairs", lambda x: x[:5].copy(), ValueError, "pairs: its number of pairs is 5"),
    ("slots", lambda x: x[:3].copy(), ValueError, "slots: "),
    ("lse", lambda x: x[:3].copy(), ValueError, "lse: "),
    ("lse", lambda _: None, ValueError, "out: its lse is None, accepted with return_lse is a"),
]


@pytest.mark.parametrize("bad", OUT, ids=lambda b: b[3])
@pytest.mark.parametrize("producer", FRAMEWORKS, ids=str)
def test_outputs_of_a_routing(producer: Producer, bad: Any) -> None:
    name, change, kind, sentence = bad
    made = fm.moe_route(LOGITS, 2, return_lse=True)
    poisoned = {n: np.full_like(part, -77) for n, part in made._asdict().items()}
    poisoned[name] = change(poisoned[name])
    given = fm.MoeRouting(**tensors_of(producer, poisoned))
    with pytest.raises(kind) as caught:
        fm.moe_route(producer.as_is(LOGITS), 2, out=given, return_lse=True)
    assert str(caught.value).startswith(sentence)
    for part in given:
        assert part is None or (np.asarray(part) == -77).all()


def test_a_read_only_output() -> None:
    made = fm.moe_route(LOGITS, 2)
    made.weights.setflags(write=False)
    with pytest.raises(ValueError, match=r"^weights: it is read-only, accepted is a writable"):
        fm.moe_route(LOGITS, 2, out=made)


def shares(name: str, other: str) -> Any:
    sentence = (
        f"{name}: it shares memory with {other}, accepted is memory that overlaps no other tensor "
        "of the call"
    )
    return pytest.raises(ValueError, match=f"^{re.escape(sentence)}$")


@pytest.mark.parametrize("producer", FRAMEWORKS, ids=str)
def test_outputs_of_a_routing_that_overlap(producer: Producer) -> None:
    """One another, in every pair, and the logits."""
    memory = np.full(400, -77, np.int32)
    rows = memory[:40].reshape(5, 8).view(np.float32)
    shapes = {"ids": (5, 2), "weights": (5, 2), "offsets": (9,), "pairs": (10,), "slots": (5, 2),
              "lse": (5,)}  # fmt: skip
    for i, name in enumerate(shapes):
        for other in ("logits", *list(shapes)[:i]):
            places = {"logits": 0} | {each: 40 + 50 * at for at, each in enumerate(shapes)}
            places[name] = places[other]
            made = {}
            for each, shape in shapes.items():
                part = memory[places[each] : places[each] + np.prod(shape)].reshape(shape)
                made[each] = part.view(np.float32) if each in ("weights", "lse") else part
            out = fm.MoeRouting(**tensors_of(producer, made))
            with shares(name, other):
                fm.moe_route(producer.as_is(rows), 2, out=out, return_lse=True)
    assert (memory == -77).all()


@pytest.mark.parametrize("producer", FRAMEWORKS, ids=str)
def test_given_weights_are_not_written_to(producer: Producer) -> None:
    weights = np.ones((5, 2), np.float32)
    made = fm.moe_route_given(IDS, weights, num_experts=3)
    out = fm.MoeRouting(**tensors_of(producer, made._asdict() | {"weights": weights}))
    with shares("weights", "given_weights"):
        fm.moe_route_given(producer.as_is(IDS), producer.as_is(weights), num_experts=3, out=out)
    assert (weights == 1).all()


@pytest.mark.parametrize("producer", FRAMEWORKS, ids=str)
def test_outputs_of_a_layer_that_overlap(producer: Producer) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 16), np.float32)
    w_gate_up = rng.standard_normal((8, 16, 16), np.float32)
    w_down = rng.standard_normal((8, 16, 8), np.float32)
    routing = fm.moe_route(LOGITS, 2)
    given = fm.MoeRouting(**tensors_of(producer, routing._asdict()))
    views = {"x": x, "w_gate_up": w_gate_up, "w_down": w_down}
    tensors = tensors_of(producer, views)
    before = {name: array.copy() for name, array in (views | routing._asdict()).items()
              if array is not None}  # fmt: skip

    def forward(**outputs: np.ndarray) -> None:
        fm.moe_forward(tensors["x"], tensors["w_gate_up"], tensors["w_down"], given,
                       **tensors_of(producer, outputs))  # fmt: skip

    room = np.full((10, 16), np.nan, np.float32)
    with shares("out", "x"):
        forward(out=x)
    with shares("out", "w_down"):
        forward(out=w_down.reshape(-1)[-80:].reshape(5, 16))
    with shares("pre_activation", "w_gate_up"):
        forward(pre_activation=w_gate_up.reshape(-1)[160:320].reshape(10, 16))
    with shares("pre_activation", "out"):
        forward(out=room[5:], pre_activation=room)
    assert np.isnan(room).all()
    if producer.name == "numpy":  # torch has no other view of integers
        out = np.zeros((5, 16), np.float32)
        slots = out.reshape(-1).view(np.int32)[:10].reshape(5, 2)
        slots[...] = routing.slots
        with shares("out", "slots"):
            fm.moe_forward(x, w_gate_up, w_down, routing._replace(slots=slots), out=out)
        assert (slots == routing.slots).all()
    for name, array in (views | routing._asdict()).items():
        if array is not None:
            np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("producer", FRAMEWORKS, ids=str)
def test_columns_of_one_array_do_not_overlap(producer: Producer) -> None:
    rng = np.random.default_rng(0)
    both = rng.standard_normal((5, 32), np.float32)
    x, w = both[:, :16], rng.standard_normal((2, 16, 16), np.float32)
    offsets = np.array([0, 3, 5], np.int32)
    wanted = fm.grouped_product(x, w, offsets=offsets)
    arguments = tensors_of(producer, {"x": x, "w": w, "offsets": offsets, "out": both[:, 16:]})
    fm.grouped_product(**arguments)
    np.testing.assert_array_equal(both[:, 16:], wanted)
    arguments = tensors_of(producer, {"x": x, "w": w, "offsets": offsets, "out": both[:, 12:28]})
    with shares("out", "x"):
        fm.grouped_product(**arguments)


@pytest.mark.parametrize("producer", FRAMEWORKS, ids=str)
def test_fused_moe_is_not_in_place(producer: Producer) -> None:
    tokens = np.ones((5, 16), np.float32)
    arguments = tensors_of(producer, {
        "tokens": tokens, "router_weights": zeros(8, 16), "w_gate_up": zeros(8, 16, 16),
        "w_down": zeros(8, 16, 8), "out": tokens,
    })  # fmt: skip
    with shares("out", "tokens"):
        fm.fused_moe(**arguments, top_k=2)
    assert (tokens == 1).all()


GIVEN: list[Bad] = [
    ({"num_experts": 0}, ValueError, "num_experts: got 0, accepted are 1 to 1024"),
    ({"num_experts": 1025}, ValueError, "num_experts: got 1025, accepted are 1 to 1024"),
    ({"num_experts": 2.5}, TypeError, "num_experts: got 2.5 of type float, accepted are 1 to"),
    ({"given_ids": IDS.astype(np.float32)}, TypeError, "given_ids: got dtype fp32"),
    ({"given_ids": IDS.astype(np.int16)}, TypeError, "given_ids: got dtype int16"),
    ({"given_ids": IDS[0]}, ValueError, "given_ids: got 1 dimensions, accepted are 2"),
    ({"given_ids": zeros(5, 33, dtype=np.int32)}, ValueError,
     "given_ids: got 33 experts of a token"),
    ({"given_ids": zeros(5, 0, dtype=np.int32)}, ValueError, "given_ids: got 0 experts of a token"),
    ({"given_ids": None}, TypeError, f"given_ids: got NoneType, {TENSOR}"),
    ({"given_ids": wide(IDS, 2**30)}, ValueError,
     "given_ids: got 1073741824 tokens with 2 experts each"),
    ({"given_weights": zeros(5, 3)}, ValueError,
     "given_weights: its number of experts of a token is 3, but given_ids has 2"),
    ({"given_weights": zeros(4, 2)}, ValueError,
     "given_weights: its number of tokens is 4, but given_ids has 5"),
    ({"given_weights": zeros(5, 2, dtype=np.int32)}, TypeError, "given_weights: got dtype int32"),
    ({"renormalize": 2}, TypeError, "renormalize: got 2"),
    ({"scale": 0}, ValueError, "scale: got 0"),
    ({"scale": "1"}, TypeError, "scale: got '1'"),
    ({"expert_map": zeros(3, dtype=np.int64)}, TypeError, "expert_map: got dtype int64"),
    ({"expert_map": zeros(3, 1, dtype=np.int32)}, ValueError, "expert_map: got 2 dimensions"),
    ({"out": fm.moe_route(LOGITS, 2)}, ValueError,
     "num_experts: got 3, but offsets has room for 8"),
]  # fmt: skip


@pytest.mark.parametrize("bad", GIVEN, ids=lambda b: b[2][:40])
@pytest.mark.parametrize("producer", FRAMEWORKS, ids=str)
def test_route_given(producer: Producer, bad: Bad) -> None:
    changed, kind, sentence = bad
    arguments = tensors_of(producer, {"given_ids": IDS, "num_experts": 3} | changed)
    if isinstance(changed.get("out"), fm.MoeRouting):
        arguments["out"] = fm.MoeRouting(**tensors_of(producer, changed["out"]._asdict()))
    with pytest.raises(kind) as caught:
        fm.moe_route_given(**arguments)
    assert isinstance(caught.value, fm.FlashMoEError)
    assert str(caught.value).startswith(sentence)


def misaligned(x: np.ndarray) -> np.ndarray:
    room = np.zeros(x.size + 8, x.dtype)
    at = next(i for i in range(4) if (room.ctypes.data + 4 * i) % 16 == 4)
    return room[at : at + x.size].reshape(x.shape)


# What is done to a call of the case: another tensor or option.
FORWARD: list[tuple[Case, dict[str, Any], type[Exception], str]] = [
    (Case(), {"x": lambda x: x[0]}, ValueError, "x: got 1 dimensions, accepted are 2"),
    (Case(), {"x": lambda x: x.astype(np.float64)}, TypeError,
     "w_gate_up: got dtype fp32, accepted is fp64 as x's"),
    (Case(), {"x": lambda x: x[:, :36]}, ValueError, "x: its hidden size is 36"),
    (Case(), {"x": lambda x: x[:, :32]}, ValueError,
     "w_gate_up: its number of columns is 40, but x has 32"),
    (Case(), {"x": lambda x: x[:5]}, ValueError,
     "weights: its number of tokens is 37, but x has 5"),
    (Case(), {"x": misaligned}, ValueError, "x: its data begins at"),
    (Case(), {"x": None}, TypeError, f"x: got NoneType, {TENSOR}"),
    (Case(), {"w_gate_up": lambda w: w[0]}, ValueError, "w_gate_up: got 2 dimensions"),
    (Case(), {"w_gate_up": lambda w: w.astype(np.float16)}, TypeError,
     "w_gate_up: got dtype fp16, accepted is fp32 as x's"),
    (Case(), {"w_gate_up": lambda w: w[:, :40]}, ValueError, "w_gate_up: its number of rows is 40"),
    (Case(), {"w_gate_up": misaligned}, ValueError, "w_gate_up: its data begins at"),
    (Case(), {"w_gate_up": lambda w: np.repeat(np.repeat(w, 2, 1), 2, 2)[:, ::2, ::2]},
     ValueError, "w_gate_up: its last two dimensions have strides 160 and 2"),
    (Case(), {"w_gate_up": lambda w: np.concatenate([w, w[..., :2]], 2)[..., :40]}, ValueError,
     "w_gate_up: dimension 1 has stride 42 elements"),
    (Case(), {"w_down": lambda w: w[:5]}, ValueError,
     "w_down: its number of experts is 5, but w_gate_up has 6"),
    (Case(), {"w_down": lambda w: w[:, :32]}, ValueError,
     "w_down: its number of rows is 32, but x has 40"),
    (Case(), {"w_down": lambda w: w[..., :16]}, ValueError, "w_down: its number of columns is 16"),
    (Case(), {"w_up": zeros(6, 24, 40)}, ValueError, "w_up: got a tensor, accepted is none"),
    (Case(gate="separate"), {"w_up": None}, ValueError, "w_up: "),
    (Case(gate="separate"), {"w_up": lambda w: w[:, :16]}, ValueError,
     "w_up: its number of rows is 16, but w_gate_up has 24"),
    (Case(), {"b_gate_up": zeros(6, 24)}, ValueError,
     "b_gate_up: its number of rows is 24, but w_gate_up has 48"),
    (Case(), {"b_gate_up": zeros(5, 48)}, ValueError, "b_gate_up: its number of experts is 5"),
    (Case(), {"b_gate_up": zeros(6, 48, dtype=np.float16)}, TypeError, "b_gate_up: got dtype fp16"),
    (Case(), {"b_up": zeros(6, 24)}, ValueError, "b_up: got a tensor, accepted is none unless"),
    (Case(), {"b_down": zeros(6, 48)}, ValueError, "b_down: its number of rows is 48"),
    (Case(), {"gate": "both"}, ValueError, "gate: got 'both', accepted are 'gate_up', 'up_gate'"),
    (Case(), {"gate": None}, TypeError, "gate: got None of type NoneType, accepted are"),
    (Case(), {"activation": "swish"}, ValueError, "activation: got 'swish', accepted are 'silu'"),
    (Case(), {"alpha": 0.0}, ValueError, "alpha: got 0.0, accepted is a finite number other"),
    (Case(), {"alpha": float("inf")}, ValueError, "alpha: got inf, accepted is a finite number"),
    (Case(), {"alpha": 1e39}, ValueError,
     "alpha: got 1e+39, accepted is a finite number other than 0 that fp32 holds"),
    (Case(activation="gelu"), {"alpha": 2.0}, ValueError,
     "alpha: got 2, accepted is the default unless activation is silu"),
    (Case(), {"limit": 0.0}, ValueError, "limit: got 0.0, accepted is a finite positive number"),
    (Case(), {"limit": -0.5}, ValueError, "limit: got -0.5, accepted is a finite positive number"),
    (Case(), {"limit": "1"}, TypeError, "limit: got '1' of type str, accepted is a number"),
    (Case(), {"up_offset": float("nan")}, ValueError, "up_offset: got nan, accepted is a finite"),
    (Case(), {"up_offset": None}, TypeError, "up_offset: got None of type NoneType, accepted is"),
    (Case(gate="none"), {"up_offset": 1.0}, ValueError, "up_offset: got 1, accepted without a"),
    (Case(), {"weight_on_input": 1}, TypeError, "weight_on_input: got 1 of type int, accepted are"),
    (Case(), {"kernel": "sm12"}, ValueError, 'kernel: got "sm12", built in are '),
    (Case(), {"kernel": 3}, TypeError, "kernel: got 3 of type int, accepted is the name of a"),
    (Case(), {"routing": 3}, TypeError, f"routing: got int, {ROUTING}"),
    (Case(), {"out": zeros(36, 40)}, ValueError, "out: its number of tokens is 36, but x has 37"),
    (Case(), {"out": zeros(37, 48)}, ValueError, "out: its hidden size is 48, but x has 40"),
    (Case(), {"out": zeros(37, 40, dtype=np.float16)}, TypeError, "out: got dtype fp16"),
    (Case(), {"out": wide(zeros(1, 40), 37)}, ValueError, "out: "),
    (Case(), {"pre_activation": zeros(74, 24)}, ValueError, "pre_activation: its number of col"),
    (Case(), {"pre_activation": zeros(37, 48)}, ValueError, "pre_activation: its number of pairs"),
    (Case(), {"return_pre_activation": 3}, TypeError, "return_pre_activation: got 3 of type int"),
]  # fmt: skip


@pytest.mark.parametrize("bad", FORWARD, ids=lambda b: b[3][:40])
@pytest.mark.parametrize("producer", FRAMEWORKS, ids=str)
def test_forward(producer: Producer, bad: Any) -> None:
    case, changed, kind, sentence = bad
    numpy_s = make(case, Producer(), "fp32")
    routing = fm.MoeRouting(**tensors_of(producer, numpy_s.pop("routing")._asdict()))
    out = np.full((37, 40), 7, np.float32)
    arguments: dict[str, Any] = {**numpy_s, **case.options, "out": out}
    for name, change in changed.items():
        value = arguments.get(name)
        arguments[name] = change(value) if callable(change) else change
    arguments = {"routing": routing} | tensors_of(producer, arguments)
    with pytest.raises(kind) as caught:
        fm.moe_forward(**arguments)
    assert isinstance(caught.value, fm.FlashMoEError)
    text = str(caught.value)
    if producer.name == "torch-cpu" and ": got NoneType" in sentence:
        sentence = sentence.partition(", ")[0]
    assert text.startswith(sentence), text
    assert (out == 7).all()
    if "out" not in changed:
        arguments.pop("out")  # and where a new one would have been made
        with pytest.raises(kind) as caught:
            fm.moe_forward(**arguments)
        assert str(caught.value) == text
    described = {"out", "pre_activation", "return_pre_activation"}.isdisjoint(changed)
    if described and arguments["x"] is not None:
        with pytest.raises(kind) as caught:
            fm.moe_plan(**arguments)
        assert str(caught.value).startswith(sentence)


ROUTINGS: list[tuple[str, Callable[[Any], Any], type[Exception], str]] = [
    ("weights", lambda x: x[:5], ValueError, "weights: its number of tokens is 5, but x"),
    ("weights", lambda x: x.astype(np.float16), TypeError, "weights: got dtype fp16"),
    ("offsets", lambda x: x[:5], ValueError, "offsets: "),
    ("pairs", lambda x: x[:5], ValueError,
     "pairs: its number of pairs is 5, but weights has 74"),
    ("slots", lambda x: x[:, :1], ValueError, "slots: "),
    ("slots", lambda x: x.astype(np.int64), TypeError, "slots: got dtype int64"),
    ("slots", lambda _: None, TypeError, "slots: got NoneType"),
]  # fmt: skip


@pytest.mark.parametrize("bad", ROUTINGS, ids=lambda b: b[3][:40])
@pytest.mark.parametrize("producer", FRAMEWORKS, ids=str)
def test_routing(producer: Producer, bad: Any) -> None:
    name, change, kind, sentence = bad
    numpy_s = make(Case(), Producer(), "fp32")
    parts = numpy_s.pop("routing")._asdict()
    parts[name] = change(parts[name])
    routing = fm.MoeRouting(**tensors_of(producer, parts))
    with pytest.raises(kind) as caught:
        fm.moe_forward(**tensors_of(producer, numpy_s), routing=routing)
    assert str(caught.value).startswith(sentence)


X, W = zeros(10, 16), zeros(2, 8, 16)
OFFSETS = zeros(3, dtype=np.int32)
PRODUCTS: list[Bad] = [
    ({"offsets": None}, ValueError, "offsets: "),
    ({"counts": OFFSETS[:2]}, ValueError, "counts: got a tensor, accepted is none with a rank 2 x"),
    ({"x": X[None], "offsets": None, "counts": OFFSETS[:2]}, ValueError,
     "x: its number of experts is 1, but w has 2"),
    ({"x": X.reshape(2, 5, 16)}, ValueError, "offsets: got a tensor, accepted is none with"),
    ({"offsets": OFFSETS[:2]}, ValueError, "offsets: its number of experts and one more is 2"),
    ({"offsets": OFFSETS.astype(np.int64)}, TypeError, "offsets: got dtype int64"),
    ({"offsets": [0, 1, 2]}, TypeError, "offsets: got list"),
    ({"x": zeros(10, 12)}, ValueError, "x: its number of columns is 12, accepted are multiples"),
    ({"x": X[0]}, ValueError, "x: got 1 dimensions, accepted are 2 (with offsets) and 3 (with"),
    ({"w": W[:, :4]}, ValueError, "w: its number of rows is 4, accepted are multiples of 8"),
    ({"w": W[0]}, ValueError, "w: got 2 dimensions, accepted are 3"),
    ({"w": zeros(2, 8, 24)}, ValueError, "w: its number of columns is 24, but x has 16"),
    ({"bias": zeros(2, 9)}, ValueError, "bias: its number of rows is 9, but w has 8"),
    ({"out": zeros(10, 16)}, ValueError, "out: its number of columns is 16"),
    ({"out": zeros(9, 8)}, ValueError, "out: its number of rows is 9, but x has 10"),
    ({"kernel": "sm12"}, ValueError, 'kernel: got "sm12", built in are '),
]  # fmt: skip


@pytest.mark.parametrize("bad", PRODUCTS, ids=lambda b: b[2][:40])
@pytest.mark.parametrize("producer", FRAMEWORKS, ids=str)
def test_grouped_product(producer: Producer, bad: Bad) -> None:
    changed, kind, sentence = bad
    arguments = tensors_of(producer, {"x": X, "w": W, "offsets": OFFSETS} | changed)
    with pytest.raises(kind) as caught:
        fm.grouped_product(**arguments)
    assert isinstance(caught.value, fm.FlashMoEError)
    assert str(caught.value).startswith(sentence)


ROUTER = zeros(8, 40)
FUSED: list[Bad] = [
    ({"router_weights": None}, ValueError, "router_weights: got neither it nor logits, accepted"),
    ({"logits": zeros(37, 8)}, ValueError, "router_weights: got both it and logits, accepted is"),
    ({"router_weights": None, "logits": zeros(36, 8)}, ValueError,
     "logits: its number of tokens is 36, but tokens has 37"),
    ({"router_weights": None, "logits": zeros(38, 8)}, ValueError,
     "logits: its number of tokens is 38, but tokens has 37"),
    ({"router_weights": None, "logits": zeros(37, 7)}, ValueError,
     "logits: its number of experts is 7, but w_gate_up has 8"),
    ({"router_weights": None, "logits": zeros(37, 9)}, ValueError,
     "logits: its number of experts is 9, but w_gate_up has 8"),
    ({"router_weights": zeros(8, 32)}, ValueError,
     "router_weights: its number of columns is 32, but tokens has 40"),
    ({"router_weights": zeros(40)}, ValueError, "router_weights: got 1 dimensions, accepted are 2"),
    ({"router_weights": zeros(16, 40)}, ValueError,
     "router_weights: its number of experts is 16, but w_gate_up has 8"),
    ({"router_weights": zeros(12, 40)}, ValueError,
     "router_weights: its number of experts is 12, but w_gate_up has 8"),
    ({"router_weights": zeros(1032, 40)}, ValueError, "router_weights: got 1032 experts"),
    ({"router_weights": zeros(1030, 40)}, ValueError, "router_weights: got 1030 experts"),
    ({"router_weights": zeros(6, 32)}, ValueError,
     "router_weights: its number of columns is 32, but tokens has 40"),
    ({"router_weights": zeros(6, 40), "w_gate_up": zeros(6, 32, 40), "router_bias": zeros(1, 6)},
     ValueError, "router_bias: got 2 dimensions, accepted are 1"),
    ({"router_weights": zeros(6, 40), "w_gate_up": zeros(6, 32, 40), "router_bias": zeros(1)},
     ValueError, "router_bias: its number of experts is 1, but router_weights has 6"),
    ({"router_weights": zeros(0, 40)}, ValueError, "router_weights: got 0 experts"),
    ({"router_weights": zeros(8, 40, dtype=np.float16)}, TypeError,
     "router_weights: got dtype fp16, accepted is fp32"),
    ({"router_bias": zeros(7)}, ValueError,
     "router_bias: its number of experts is 7, but router_weights has 8"),
    ({"router_bias": zeros(1, 8)}, ValueError, "router_bias: got 2 dimensions, accepted are 1"),
    ({"router_weights": None, "logits": zeros(37, 8), "router_bias": zeros(8)}, ValueError,
     "router_bias: got a tensor, accepted is none with logits"),
    ({"top_k": 9}, ValueError, "top_k: got 9, accepted are 1 to 32, and no more than the 8"),
    ({"top_k": None}, TypeError, "top_k: got None of type NoneType"),
    ({"tokens": zeros(37, 36)}, ValueError, "tokens: its hidden size is 36"),
    ({"tokens": zeros(37, 48)}, ValueError,
     "router_weights: its number of columns is 40, but tokens has 48"),
    ({"tokens": zeros()}, ValueError, "tokens: its 0 dimensions are not rows at one distance"),
    ({"tokens": zeros(3, 40, dtype=np.float64)}, TypeError,
     "router_weights: got dtype fp32, accepted is fp64 as tokens's"),
    ({"out": zeros(36, 40)}, ValueError, "out: got another shape than that of tokens, accepted is"),
    ({"out": zeros(37, 40, dtype=np.float16)}, TypeError, "out: got dtype fp16, accepted is fp32"),
    ({"w_down": 3}, TypeError, "w_down: got int"),
    ({"w_down": zeros(8, 40, 16)}, ValueError, "w_down: its number of columns is 16"),
    ({"gate": "both"}, ValueError, "gate: got 'both', accepted are"),
    ({"scoring": "hard"}, ValueError, "scoring: got 'hard', accepted are"),
    ({"num_groups": 2}, ValueError, "num_groups: got 2 with scoring 0"),
]  # fmt: skip


@pytest.mark.parametrize("bad", FUSED, ids=lambda b: b[2][:40])
@pytest.mark.parametrize("producer", FRAMEWORKS, ids=str)
def test_fused(producer: Producer, bad: Bad) -> None:
    changed, kind, sentence = bad
    values = make(Case(experts=8), Producer(), "fp32")
    arguments = {
        "tokens": values["x"], "router_weights": ROUTER, "w_gate_up": values["w_gate_up"],
        "w_down": values["w_down"], "top_k": 2,
    }  # fmt: skip
    with pytest.raises(kind) as caught:
        fm.fused_moe(**tensors_of(producer, arguments | changed))
    assert isinstance(caught.value, fm.FlashMoEError)
    assert str(caught.value).startswith(sentence)


def test_frameworks_do_not_mix() -> None:
    torch = pytest.importorskip("torch")
    values = make(Case(), Producer(), "fp32")
    given = values | {"x": torch.from_numpy(values["x"])}
    match = (
        r"^w_gate_up: got numpy.ndarray, but x is torch.Tensor; all tensors of a call must come "
        "from one framework$"
    )
    with pytest.raises(TypeError, match=match):
        fm.moe_forward(**given)
    given = values | {"w_down": torch.from_numpy(values["w_down"])}
    with pytest.raises(TypeError, match=r"^w_down: got torch.Tensor, but x is numpy.ndarray; all"):
        fm.moe_forward(**given)
    routing = values["routing"]._replace(slots=torch.from_numpy(values["routing"].slots))
    with pytest.raises(TypeError, match=r"^slots: got torch.Tensor, but x is numpy"):
        fm.moe_forward(**values | {"routing": routing})


def test_dlpack_alone_on_a_gpu_needs_outputs() -> None:
    class OnGpu(DlpackOnly):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 0)

        def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
            return super().__dlpack__()

    x, w = OnGpu(X), OnGpu(W)
    match = r"^out: .*OnGpu offers no way to make a tensor on its device; pass out$"
    with pytest.raises(TypeError, match=match):
        fm.grouped_product(x, w, offsets=OnGpu(OFFSETS))


def test_the_library_names_what_cannot_be_served() -> None:
    families = set(fm.build_info().kernel_families.split())
    values = make(Case(), Producer(), "fp32")
    for family in families & {"stream", "sm90", "sm89"}:
        with pytest.raises(NotImplementedError, match=r"^kernel: cannot be served: "):
            fm.moe_forward(**values, kernel=family)


def test_accumulate_of_routing() -> None:
    routing = fm.moe_route(LOGITS, 2)
    for accumulate, error, sentence in (
        (1, TypeError, "accumulate: got 1 of type int, accepted are False and True"),
        (True, ValueError, "dlogits: got None, with accumulate accepted is what to add to"),
    ):
        with pytest.raises(error, match=f"^{sentence}$"):
            fm.moe_route_backward(routing.weights, routing, logits=LOGITS, accumulate=accumulate)


@pytest.mark.parametrize("wanted", ["nnn", (1, 0, 1), (True, False), [True, False, None]])
def test_flags_of_gradients_are_flags(wanted: Any) -> None:
    x, w, dout = zeros(4, 16), zeros(2, 8, 16), zeros(4, 8)
    offsets = np.array([0, 2, 4], np.int32)
    with pytest.raises(fm.ArgumentTypeError, match=r"^wanted: got .*, accepted is a flag for each"):
        fm.grouped_product_backward(dout, x, w, offsets=offsets, wanted=wanted)
