"""Gradients of layers and of products for any shape, layout, dtype and option, against float64."""

from __future__ import annotations

import re
from typing import Any

import flashmoe_science as fm
import moe_oracle
import numpy as np
import producers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import routing_of
from reference import DTYPES

torch = pytest.importorskip("torch")

import moe_gradients  # noqa: E402

EXAMPLES = 40
POISON = 3.0
FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
UNITS = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}
LIMIT = 0.7  # no multiple of the steps below, so that rounding takes nothing across it


@st.composite
def arrays(
    draw: st.DrawFn, shape: tuple[int, ...], dtype: str, step: float, turns: bool = False
) -> np.ndarray:
    """Multiples of `step` in rows that are contiguous, and may lie in wider ones; matrices also
    turned round, with experts further apart or in falling order."""
    per_row = 16 // DTYPES[dtype].itemsize
    turned = turns and draw(st.booleans())
    stored = (*shape[:-2], shape[-1], shape[-2]) if turned else shape
    wide = stored[-1] + per_row * draw(st.integers(0, 2))
    begin = per_row * draw(st.integers(0, (wide - stored[-1]) // per_row))
    room = [*stored[:-1], wide]
    if turns and draw(st.booleans()):
        room[0] += 1
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = rng.integers(-8, 9, room) * np.float32(step)
    made = producers.cast(values, dtype)[: stored[0], ..., begin : begin + stored[-1]]
    if turns and draw(st.booleans()):
        made = made[::-1]
    return made.swapaxes(-1, -2) if turned else made


@st.composite
def gradients(
    draw: st.DrawFn, of: np.ndarray, dtype: str, accumulate: bool, turns: bool = False
) -> np.ndarray:
    """Where to write that of a tensor, in a layout of its own: full of what is to be added to."""
    kind = draw(st.sampled_from(("fp32", dtype)))
    made = draw(arrays(of.shape, kind, 0.5, turns))
    made[...] = POISON if accumulate else np.nan
    return made


def around(array: np.ndarray) -> np.ndarray:
    """The memory that an array is a view of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def assert_near(
    name: str, got: np.ndarray, ref: np.ndarray, plain: np.ndarray, dtype: str, base: float = 0.0
) -> None:
    want = ref + base
    # With few numbers the ordinary computation may be right by chance.
    largest, ordinary = np.abs(want).max(), np.abs(plain - ref).max()
    units = (64 if dtype == "fp32" else 8) * UNITS[dtype]
    error = np.abs(got.astype(np.float64) - want).max()
    assert error <= 4 * ordinary + units * largest, (name, error, ordinary, largest)


class Written:
    """Gradients in memory around which nothing may change."""

    def __init__(self, made: dict[str, np.ndarray], accumulate: bool) -> None:
        self.made = made
        self.base = POISON if accumulate else 0.0
        self.before = {name: around(x).copy() for name, x in made.items()}

    def check(self, ref: dict[str, Any], plain: dict[str, Any], dtype: str) -> None:
        for name, got in self.made.items():
            assert_near(name, got, ref[name], plain[name], dtype, self.base)
            # Everything else is as it was.
            got[...] = POISON if self.base else np.nan
            assert around(got).tobytes() == self.before[name].tobytes(), name


def parts_of(tensors: dict[str, Any], gate: str) -> dict[str, Any]:
    """Gate and up, apart, of matrices and biases that are there."""
    made = {name: tensors[name] for name in ("w_down", "b_down") if name in tensors}
    for kind in ("w", "b"):
        both = tensors.get(f"{kind}_gate_up")
        if both is not None:
            half = both.shape[1] // 2
            slices: dict[str, Any] = {
                "gate_up": (slice(half), slice(half, None)),
                "up_gate": (slice(half, None), slice(half)),
                "interleaved": (slice(0, None, 2), slice(1, None, 2)),
            }
            if gate in slices:
                of_gate, of_up = slices[gate]
                made |= {f"{kind}_gate": both[:, of_gate], f"{kind}_up": both[:, of_up]}
            else:
                made[f"{kind}_gate" if gate == "separate" else f"{kind}_up"] = both
        if f"{kind}_up" in tensors:
            made[f"{kind}_up"] = tensors[f"{kind}_up"]
    return made


def as_given(parts: dict[str, Any], gate: str) -> dict[str, Any]:
    """Gradients of such parts by the names of ours."""
    made = {"dx": parts["x"], "dweights": parts["weights"]}
    made |= {f"d{name}": parts[name] for name in ("w_down", "b_down") if name in parts}
    for kind in ("w", "b"):
        g, u = parts.get(f"{kind}_gate"), parts.get(f"{kind}_up")
        if gate == "separate":
            made |= {f"d{kind}_gate_up": g, f"d{kind}_up": u}
        elif gate == "none":
            made[f"d{kind}_gate_up"] = u
        elif gate == "interleaved" and g is not None:
            made[f"d{kind}_gate_up"] = np.stack([g, u], 2).reshape(len(g), -1, *g.shape[2:])
        elif g is not None:
            made[f"d{kind}_gate_up"] = np.concatenate([g, u] if gate == "gate_up" else [u, g], 1)
    return made


def bounded(call: Any, share: float | None) -> None:
    """Within that share of the workspace, or the least that there is."""
    if share is None:
        call(None)
        return
    try:
        call(1)
    except fm.UnsupportedError as refusal:
        told = re.search(r"and from (\d+) on", str(refusal))
        assert told is not None
        call(int(int(told[1]) * share))


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_any_gradients_of_a_layer(data: st.DataObject) -> None:
    draw = data.draw
    dtype = draw(st.sampled_from(("fp32", "fp16", "bf16")))
    tokens, experts = draw(st.integers(1, 24)), draw(st.integers(1, 6))
    hidden, inner = (8 * draw(st.sampled_from((1, 2, 4, 9, 33))) for _ in range(2))
    top_k = draw(st.integers(1, min(experts, 4)))
    gate = draw(st.sampled_from(moe_oracle.GATES))
    activation = draw(st.sampled_from(moe_oracle.ACTIVATIONS))
    accumulate = draw(st.booleans())
    first = inner if gate in ("separate", "none") else 2 * inner
    x = draw(arrays((tokens, hidden), dtype, 0.125))
    dout = draw(arrays((tokens, hidden), dtype, 0.125))
    tensors = {"w_gate_up": draw(arrays((experts, first, hidden), dtype, 0.0625, True)),
               "w_down": draw(arrays((experts, hidden, inner), dtype, 0.0625, True))}  # fmt: skip
    if gate == "separate":
        tensors["w_up"] = draw(arrays((experts, inner, hidden), dtype, 0.0625, True))
    biased = draw(st.booleans())
    for name in [name for name in tensors if biased]:
        kind = draw(st.sampled_from(("fp32", dtype)))
        tensors[f"b{name[1:]}"] = draw(arrays(tensors[name].shape[:2], kind, 0.25))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ids = rng.random((tokens, experts)).argsort(1)[:, :top_k].astype(np.int32)
    if draw(st.booleans()):
        ids = np.where(rng.random(ids.shape) < 0.3, -1, ids).astype(np.int32)
    weights = (rng.integers(1, 5, ids.shape) * 0.5).astype(np.float32)
    routing = routing_of(np.ascontiguousarray(ids), weights, experts)
    options = {
        "activation": activation,
        "alpha": draw(st.sampled_from((1.0, 1.702))) if activation == "silu" else 1.0,
        "limit": draw(st.sampled_from((None, LIMIT))),
        "up_offset": 0.0 if gate == "none" else draw(st.sampled_from((0.0, 1.0))),
        "weight_on_input": draw(st.booleans()),
    }
    ref, plain = (
        as_given(
            moe_gradients.of_layer(x, ids, weights, parts_of(tensors, gate), dout, kind, **options),
            gate,
        )
        for kind in (torch.float64, FLOATS[dtype])
    )
    order = fm.MoeRouting(*routing)
    saved = None
    if draw(st.booleans()):
        made = fm.moe_forward(
            x, **tensors, routing=order, gate=gate, return_pre_activation=True, **options
        )
        saved = made[1]
    share = draw(st.sampled_from((None, 1.0, 1.3)))
    outputs: dict[str, np.ndarray] = {}
    for name, of in {"x": x, **tensors}.items():
        if draw(st.integers(0, 3)) > 0:
            turns = name.startswith("w")
            outputs[f"d{name}"] = draw(gradients(of, dtype, accumulate, turns))
    if not outputs or draw(st.booleans()):
        outputs["dweights"] = np.full(ids.shape, POISON if accumulate else np.nan, np.float32)
    written = Written(outputs, accumulate)
    bounded(
        lambda bound: fm.moe_backward(
            dout, x, **tensors, routing=order, gate=gate, pre_activation=saved,
            accumulate=accumulate, max_workspace_bytes=bound, wanted=(False,) * 8,
            overwrite_pre_activation=saved is not None, **outputs, **options,
        ),
        share,
    )  # fmt: skip
    written.check(ref, plain, dtype)


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_any_gradients_of_a_grouped_product(data: st.DataObject) -> None:
    draw = data.draw
    dtype = draw(st.sampled_from(("fp32", "fp16", "bf16")))
    experts = draw(st.integers(1, 9))
    n, k = 8 * draw(st.integers(1, 9)), 8 * draw(st.integers(1, 9))
    accumulate = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    bounds: dict[str, np.ndarray]
    lead: tuple[int, ...]
    parts: list[Any]
    if draw(st.booleans()):
        most = draw(st.integers(1, 12))
        lead = (experts, most)
        counts = rng.integers(0, most + 1, experts).astype(np.int32)
        bounds = {"counts": counts}
        parts = [(e, slice(0, counts[e])) for e in range(experts)]
    else:
        total = draw(st.integers(1, 60))
        lead = (total,)
        ends = np.sort(rng.integers(0, total + 1, experts + 1)).astype(np.int32)
        bounds = {"offsets": ends}
        parts = [slice(*ends[e : e + 2]) for e in range(experts)]
    x, dout = (draw(arrays((*lead, columns), dtype, 0.125)) for columns in (k, n))
    w = draw(arrays((experts, n, k), dtype, 0.125, True))

    def by_loops(kind: Any) -> dict[str, np.ndarray]:
        a, b, c = (t.astype(kind) for t in (x, dout, w))
        made = {"dx": np.zeros(x.shape, kind), "dw": np.zeros(w.shape, kind),
                "dbias": np.zeros((experts, n), kind)}  # fmt: skip
        for e, part in enumerate(parts):
            made["dx"][part] = b[part] @ c[e]
            made["dw"][e] = b[part].T @ a[part]
            made["dbias"][e] = b[part].sum(0)
        return made

    ref = by_loops(np.float64)
    plain = {name: t.astype(DTYPES[dtype]).astype(np.float64)
             for name, t in by_loops(np.float32).items()}  # fmt: skip
    outputs: dict[str, np.ndarray] = {}
    for name, of, turns in (("dx", x, False), ("dw", w, True), ("dbias", ref["dbias"], False)):
        if draw(st.integers(0, 3)) > 0 or (name == "dbias" and not outputs):
            outputs[name] = draw(gradients(of, dtype, accumulate, turns))
    written = Written(outputs, accumulate)
    fm.grouped_product_backward(
        dout, x, w, **bounds, accumulate=accumulate, wanted=(False,) * 3, **outputs
    )
    written.check(ref, plain, dtype)
    # What one gradient is made of alone, which then says of what shape it is.
    one = {"dx": {"x": None, "w": w}, "dw": {"x": x, "w": None}, "dbias": {"x": None, "w": None}}
    for i, (name, factors) in enumerate(one.items()):
        wanted = [j == i for j in range(3)]
        made = fm.grouped_product_backward(dout, **factors, **bounds, wanted=wanted)
        assert [y is not None for y in made] == wanted
        assert made[i].dtype == dout.dtype
        assert_near(name, made[i], ref[name], plain[name], dtype)
