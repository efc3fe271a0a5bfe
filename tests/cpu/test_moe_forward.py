"""The layer on the CPU against float64, for every instruction set, dtype and layout of weights."""

from __future__ import annotations

import ctypes
import itertools

import capi
import capi_moe
import moe_oracle
import numpy as np
import pytest
from guarded import between_guards
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_layers import (
    ORIENTATIONS,
    make_layer,
    matrix,
    random_routing,
    routing_of,
    rows_apart,
    run_forward,
)

GATES = tuple(capi_moe.GATES)
ACTIVATIONS = tuple(capi_moe.ACTIVATIONS)
# Multiples of the ordinary computation's error. In fp32 both are off by a few roundings, and chance
# decides by which.
TIMES = {kind: 4 if name == "fp32" else 2 for name, kind in capi_moe.DTYPES.items()}


def run_and_check(x, layer, routing, *, lib=None, before=True, **options) -> np.ndarray:
    made = run_forward(x, layer, routing, lib=lib, before=before, **options)
    # In the C ABI 0 stands for what the option's absence means.
    how = layer.experts | options
    how |= {"alpha": float(np.float32(how.get("alpha") or 1.0)), "limit": how.get("limit") or None}
    exact = moe_oracle.forward_float64(x, routing=routing, **how)
    plain = moe_oracle.forward_plain(x, routing=routing, dtype=x.dtype, **how)
    moe_oracle.assert_near("out", made.out, exact.out, plain.out, x.dtype, TIMES[x.dtype])
    idle = (routing.ids < 0).all(axis=1)
    assert (made.out[idle] == 0).all()
    if made.before is not None and made.before.size:
        before = exact.pre_activation[: len(made.before)]
        narrow = 2.0**-8 if x.dtype == capi.BF16 else 2.0**-11
        eps = {2: narrow, 4: 4e-6, 8: 1e-14}[x.dtype.itemsize]
        least = min(eps, 2e-6) * np.abs(before).max()
        np.testing.assert_allclose(made.before.astype(np.float64), before, rtol=2 * eps, atol=least)
    return made.out


@pytest.mark.parametrize("dtype", capi_moe.DTYPES)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("orientation", list(itertools.product(ORIENTATIONS[:4], ORIENTATIONS[:2])))
def test_layouts(
    isa_library: ctypes.CDLL, dtype: str, gate: str, orientation: tuple[str, str]
) -> None:
    rng = np.random.default_rng([GATES.index(gate), ORIENTATIONS.index(orientation[0])])
    # Few and many rows of an expert, which are computed in two ways.
    for tokens, experts, hidden, inner in ((7, 5, 72, 40), (60, 3, 104, 136)):
        layer = make_layer(rng, experts, hidden, inner, capi_moe.DTYPES[dtype], gate=gate,
                           orientation=orientation, bias="fp32")  # fmt: skip
        x = rows_apart(capi.normal(rng, (tokens, hidden), capi_moe.DTYPES[dtype]), 8)
        routing = random_routing(rng, tokens, experts, 2, missing=0.1)
        run_and_check(x, layer, routing, lib=isa_library)


@pytest.mark.parametrize("dtype", capi_moe.DTYPES)
@pytest.mark.parametrize("columns", ["w_gate_up", "w_up"])
def test_gate_and_up_that_lie_differently(
    isa_library: ctypes.CDLL, dtype: str, columns: str
) -> None:
    rng = np.random.default_rng(30)
    # Several blocks of depth: what is packed for one matrix is not what the other takes.
    layer = make_layer(rng, 3, 1032, 136, capi_moe.DTYPES[dtype], gate="separate")
    layer.arguments[columns] = matrix(layer.arguments[columns], "columns", rng)
    for tokens in (5, 60):
        x = capi.normal(rng, (tokens, 1032), capi_moe.DTYPES[dtype])
        run_and_check(x, layer, random_routing(rng, tokens, 3, 2), lib=isa_library)


@pytest.mark.parametrize("dtype", capi_moe.DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gate", ["gate_up", "no_gate"])
@pytest.mark.parametrize("bias", [None, "same", "fp32"])
def test_activations(
    isa_library: ctypes.CDLL, dtype: str, activation: str, gate: str, bias: str | None
) -> None:
    rng = np.random.default_rng(ACTIVATIONS.index(activation))
    layer = make_layer(rng, 4, 64, 48, capi_moe.DTYPES[dtype], gate=gate, bias=bias)
    x = capi.normal(rng, (33, 64), capi_moe.DTYPES[dtype])
    far = 6 if activation == "relu2" else 40  # in fp16
    x[:8] *= np.float64(far).astype(x.dtype)  # to the ends of sigmoid, erf and tanh
    routing = random_routing(rng, 33, 4, 3)
    run_and_check(x, layer, routing, lib=isa_library, activation=activation)
    run_and_check(
        x, layer, routing, lib=isa_library, activation=activation, limit=0.75, weight_on_input=1,
        up_offset=1.0 if gate == "gate_up" else 0.0,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", capi_moe.DTYPES)
@pytest.mark.parametrize("alpha", [-1.0, 0.25])
def test_any_alpha(isa_library: ctypes.CDLL, dtype: str, alpha: float) -> None:
    rng = np.random.default_rng(21)
    layer = make_layer(rng, 4, 64, 48, capi_moe.DTYPES[dtype])
    x = capi.normal(rng, (33, 64), capi_moe.DTYPES[dtype])
    run_and_check(x, layer, random_routing(rng, 33, 4, 2), lib=isa_library, alpha=alpha)


@pytest.mark.parametrize("dtype", capi_moe.DTYPES)
def test_gpt_oss(isa_library: ctypes.CDLL, dtype: str) -> None:
    rng = np.random.default_rng(20)
    layer = make_layer(rng, 5, 96, 72, capi_moe.DTYPES[dtype], gate="interleaved",
                       orientation=("columns", "columns"), bias="same")  # fmt: skip
    options = {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
    for tokens in (2, 70):
        x = capi.normal(rng, (tokens, 96), capi_moe.DTYPES[dtype])
        x *= np.float64(6).astype(x.dtype)
        run_and_check(x, layer, random_routing(rng, tokens, 5, 4), lib=isa_library, **options)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("hidden", "inner"), [(8, 8), (2056, 16), (16, 2056), (1024, 264), (520, 520)]
)
@pytest.mark.parametrize("orientation", ["rows", "columns"])
def test_depths_around_the_blocks(
    isa_library: ctypes.CDLL, dtype: str, hidden: int, inner: int, orientation: str
) -> None:
    rng = np.random.default_rng(hidden)
    layer = make_layer(
        rng, 2, hidden, inner, capi_moe.DTYPES[dtype], orientation=(orientation,) * 2
    )
    for tokens in (1, 15):
        x = capi.normal(rng, (tokens, hidden), capi_moe.DTYPES[dtype])
        run_and_check(x, layer, random_routing(rng, tokens, 2, 2), lib=isa_library)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("hidden", "inner"), [(2104, 40), (40, 2104), (72, 600)])
@pytest.mark.parametrize("rows", [250, 288, 384])  # the latter two are the most that tiles have
@pytest.mark.parametrize("orientation", ["rows", "columns"])
def test_tiles_of_many_rows(
    isa_library: ctypes.CDLL, dtype: str, hidden: int, inner: int, rows: int, orientation: str
) -> None:
    """More of depth than is packed at a time, and more columns than have sums at a time."""
    rng = np.random.default_rng(inner)
    for gate in ("interleaved", "no_gate"):
        layer = make_layer(rng, 2, hidden, inner, capi_moe.DTYPES[dtype], gate=gate, bias="fp32",
                           orientation=(orientation,) * 2)  # fmt: skip
        x = capi.normal(rng, (rows + 20, hidden), capi_moe.DTYPES[dtype])
        ids = rng.permutation(np.repeat([0, 1], [rows, 20])).astype(np.int32)[:, None]
        routing = routing_of(ids, 2, rng.standard_normal((rows + 20, 1)).astype(np.float32))
        run_and_check(x, layer, routing, lib=isa_library, weight_on_input=1)


@pytest.mark.parametrize("dtype", capi_moe.DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 17, 24, 25, 191, 193, 601])
@pytest.mark.parametrize("orientation", ["rows", "columns"])
def test_all_tokens_to_one_expert(dtype: str, tokens: int, orientation: str) -> None:
    rng = np.random.default_rng(tokens)
    layer = make_layer(rng, 6, 48, 40, capi_moe.DTYPES[dtype], orientation=(orientation,) * 2)
    x = capi.normal(rng, (tokens, 48), capi_moe.DTYPES[dtype])
    ids = np.full((tokens, 1), 4, np.int32)
    weights = rng.standard_normal((tokens, 1)).astype(np.float32)
    run_and_check(x, layer, routing_of(ids, 6, weights))


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(1, 1, 1), (9, 1, 1), (13, 6, 6), (5, 40, 32), (50, 100, 1), (3, 7, 5), (40, 13, 8)],
)
@pytest.mark.parametrize("missing", [0.0, 0.6, 1.0])
def test_routings(tokens: int, experts: int, top_k: int, missing: float) -> None:
    rng = np.random.default_rng([tokens, experts])
    layer = make_layer(rng, experts, 40, 24, capi.BF16, bias="fp32")
    x = capi.normal(rng, (tokens, 40), capi.BF16)
    run_and_check(x, layer, random_routing(rng, tokens, experts, top_k, missing=missing))


def test_no_tokens() -> None:
    rng = np.random.default_rng(0)
    layer = make_layer(rng, 3, 16, 8, capi.BF16)
    x = capi.normal(rng, (0, 16), capi.BF16)
    assert run_forward(x, layer, random_routing(rng, 0, 3, 2), before=True).out.shape == (0, 16)


def test_the_routing_of_the_library_serves() -> None:
    rng = np.random.default_rng(4)
    layer = make_layer(rng, 12, 64, 32, capi_moe.DTYPES["fp32"])
    x = capi.normal(rng, (37, 64), capi_moe.DTYPES["fp32"])
    logits = rng.standard_normal((37, 12)).astype(np.float32)
    run_and_check(x, layer, capi_moe.route(logits, top_k=3, renormalize=1))
    given_ids = rng.integers(-4, 20, (37, 5))
    run_and_check(x, layer, capi_moe.route(given_ids=given_ids, experts=12, top_k=5))


@pytest.mark.parametrize("dtype", capi_moe.DTYPES)
@pytest.mark.parametrize("orientation", ["rows", "columns"])
@pytest.mark.parametrize("tokens", [9, 150])
def test_threads_and_runs_change_nothing(dtype: str, orientation: str, tokens: int) -> None:
    rng = np.random.default_rng(9)
    layer = make_layer(rng, 4, 264, 520, capi_moe.DTYPES[dtype], orientation=(orientation,) * 2)
    x = capi.normal(rng, (tokens, 264), capi_moe.DTYPES[dtype])
    routing = random_routing(rng, tokens, 4, 2, missing=0.1)
    lib = capi.load()
    made = []
    try:
        for threads, poison in ((1, 0xFF), (2, 0x00), (3, 0x7F), (7, 0xFF)):
            capi.check(lib.flashmoe_set_num_threads(threads), lib)
            done = run_forward(x, layer, routing, before=True, poison=poison)
            assert done.before is not None
            made.append((done.out.tobytes(), done.before.tobytes()))
    finally:
        capi.check(lib.flashmoe_set_num_threads(0), lib)
    assert len(set(made)) == 1


@pytest.mark.parametrize("dtype", capi_moe.DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("tokens", [4, 60])
def test_bad_numbers_reach_those_that_meet_them(
    isa_library: ctypes.CDLL, dtype: str, bad: float, tokens: int
) -> None:
    rng = np.random.default_rng(11)
    for orientation in ("rows", "columns"):
        layer = make_layer(rng, 5, 40, 24, capi_moe.DTYPES[dtype], orientation=(orientation,) * 2)
        x = capi.normal(rng, (tokens, 40), capi_moe.DTYPES[dtype])
        routing = random_routing(rng, tokens, 5, 2)
        clean = run_forward(x, layer, routing, lib=isa_library).out
        x[1, 7] = bad
        layer.arguments["w_down"][3, 5, 6] = bad
        made = run_forward(x, layer, routing, lib=isa_library).out
        for t in range(tokens):
            if t == 1:
                assert not np.isfinite(made[t].astype(np.float32)).any()
            elif 3 in routing.ids[t]:
                assert not np.isfinite(made[t, 5].astype(np.float32))
                np.testing.assert_array_equal(np.delete(made[t], 5), np.delete(clean[t], 5))
            else:
                np.testing.assert_array_equal(made[t], clean[t])


@pytest.mark.parametrize("dtype", capi_moe.DTYPES)
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7FFF8000, 0xFFC00001])
def test_a_nan_stays_one_when_it_is_rounded(
    isa_library: ctypes.CDLL, dtype: str, bits: int
) -> None:
    """Whatever its payload: as a number it would round to the next, and to 0 from the last."""
    rng = np.random.default_rng(14)
    layer = make_layer(rng, 3, 40, 24, capi_moe.DTYPES[dtype], bias="fp32")
    layer.arguments["b_down"].view(np.uint32)[:, 5] = bits
    for tokens in (4, 60):
        x = capi.normal(rng, (tokens, 40), capi_moe.DTYPES[dtype])
        made = run_forward(x, layer, random_routing(rng, tokens, 3, 2), lib=isa_library).out
        nan = np.isnan(made.astype(np.float32))
        assert nan[:, 5].all() and not np.delete(nan, 5, axis=1).any()


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("weight_on_input", [0, 1])
def test_weights_of_fp64(gate: str, weight_on_input: int) -> None:
    """Which no fp32 number is: of the layer's own routing, in every bit that fp64 has."""
    rng = np.random.default_rng(15)
    layer = make_layer(rng, 6, 72, 40, np.dtype(np.float64), gate=gate, bias="same")
    x = rng.standard_normal((37, 72))
    routing = capi_moe.route(rng.standard_normal((37, 6)), top_k=3, renormalize=1)
    assert routing.weights.dtype == np.float64
    run_and_check(x, layer, routing, weight_on_input=weight_on_input)


def test_a_weight_of_a_pair_that_is_not_mine_is_not_read() -> None:
    rng = np.random.default_rng(12)
    layer = make_layer(rng, 3, 16, 8, capi_moe.DTYPES["fp32"])
    x = capi.normal(rng, (6, 16), capi_moe.DTYPES["fp32"])
    routing = random_routing(rng, 6, 3, 2, missing=0.5)
    clean = run_forward(x, layer, routing).out
    routing.weights[routing.ids < 0] = np.nan
    np.testing.assert_array_equal(run_forward(x, layer, routing).out, clean)


@pytest.mark.parametrize("dtype", capi_moe.DTYPES)
@pytest.mark.parametrize("gate", ["gate_up", "interleaved", "separate", "no_gate"])
@pytest.mark.parametrize("orientation", ["rows", "columns"])
@pytest.mark.parametrize("at_end", [False, True])
def test_touches_no_memory_outside(
    isa_library: ctypes.CDLL, dtype: str, gate: str, orientation: str, at_end: bool
) -> None:
    """One byte read beyond any tensor would end the process."""
    rng = np.random.default_rng(13)
    for hidden, inner in ((24, 40), (72, 16), (104, 88)):
        layer = make_layer(rng, 2, hidden, inner, capi_moe.DTYPES[dtype], gate=gate, bias="same",
                           orientation=(orientation,) * 2)  # fmt: skip
        for name, value in layer.arguments.items():
            if isinstance(value, np.ndarray):
                layer.arguments[name] = between_guards(value, at_end)
        for tokens in (1, 5, 45):
            x = between_guards(capi.normal(rng, (tokens, hidden), capi_moe.DTYPES[dtype]), at_end)
            run_and_check(x, layer, random_routing(rng, tokens, 2, 2), lib=isa_library)


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
@pytest.mark.parametrize("seed", range(30))
def test_whatever_the_routing_holds_nothing_outside_is_touched(seed: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    tokens, experts, top_k = 12, 5, 3
    layer = make_layer(rng, experts, 24, 16, capi_moe.DTYPES[dtype])
    x = capi.normal(rng, (tokens, 24), capi_moe.DTYPES[dtype])
    routing = random_routing(rng, tokens, experts, top_k)
    for name in ("offsets", "pairs", "slots"):
        array = getattr(routing, name).reshape(-1)
        many = rng.integers(0, array.size + 1)
        places = rng.choice(array.size, many, replace=False)
        near = rng.integers(-3, tokens * top_k + 3, many)
        far = rng.choice(np.array([-(2**31), 2**31 - 1, -1, 2**30]), many)
        array[places] = np.where(rng.random(many) < 0.5, near, far)
    made = []
    for poison in (0x00, 0xFF):
        routing.offsets = routing.offsets.copy()
        done = run_forward_unchecked(x, layer, routing, poison)
        made.append(done.tobytes())
    assert made[0] == made[1], "the workspace's content came out"


def run_forward_unchecked(x, layer, routing, poison: int) -> np.ndarray:
    """Without the claim that pre_activation ends at offsets[-1]."""
    out = capi.aligned_empty(x.shape, x.dtype)
    names = ("weights", "offsets", "pairs", "slots")
    arrays = {name: getattr(routing, name) for name in names}
    capi_moe.run(
        capi_moe.make_params(capi_moe.ForwardParams, x=x, out=out, **layer.arguments, **arrays),
        poison=poison,
    )
    return out


@settings(max_examples=80)
@given(st.data())
def test_any_problem(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    dtype = capi_moe.DTYPES[data.draw(st.sampled_from(list(capi_moe.DTYPES)))]
    experts = data.draw(st.integers(1, 12))
    top_k = data.draw(st.integers(1, min(experts, 6)))
    tokens = data.draw(st.integers(0, 40))
    hidden, inner = (8 * data.draw(st.integers(1, 20)) for _ in range(2))
    gate = data.draw(st.sampled_from(GATES))
    activation = data.draw(st.sampled_from(ACTIVATIONS))
    layer = make_layer(
        rng,
        experts,
        hidden,
        inner,
        dtype,
        gate=gate,
        orientation=tuple(data.draw(st.sampled_from(ORIENTATIONS)) for _ in range(2)),
        bias=data.draw(st.sampled_from([None, "same", "fp32"])),
    )
    options = {
        "activation": activation,
        "limit": data.draw(st.sampled_from([0.0, 1.5])),
        "weight_on_input": data.draw(st.integers(0, 1)),
    }
    if activation == "silu":
        options["alpha"] = data.draw(st.sampled_from([0.0, 1.702, -0.5]))
    if gate != "no_gate":
        options["up_offset"] = data.draw(st.sampled_from([0.0, 1.0]))
    x = rows_apart(capi.normal(rng, (tokens, hidden), dtype), 8 * data.draw(st.integers(0, 2)))
    missing = data.draw(st.sampled_from([0.0, 0.3]))
    routing = random_routing(rng, tokens, experts, top_k, missing=missing)
    run_and_check(x, layer, routing, before=data.draw(st.booleans()), **options)
