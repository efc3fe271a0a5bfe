"""Gradients of the layer on the CPU against float64, for every instruction set, dtype and
layout."""

from __future__ import annotations

import ctypes
import itertools
import re
from typing import Any

import capi
import capi_moe
import moe_gradients
import numpy as np
import pytest
from moe_layers import (
    Layer,
    make_layer,
    matrix,
    random_routing,
    routing_of,
    rows_apart,
    run_forward,
    stack,
)

GATES = tuple(capi_moe.GATES)
ACTIVATIONS = tuple(capi_moe.ACTIVATIONS)
ALL = capi_moe.GRADIENTS
POISON = 7.0


def outputs_of(
    layer: Layer, x: np.ndarray, routing: capi_moe.Routing, wanted: Any, dtype: Any,
    orientation: str, fill: float, rng: np.random.Generator, bias_gap: int = 0,
) -> dict[str, np.ndarray]:  # fmt: skip
    """The gradients' tensors, full of `fill`, of matrices laid out anew."""
    given = layer.arguments
    made: dict[str, np.ndarray] = {}
    for name in wanted:
        if name in ("dw_up", "db_up") and given["gate"] != capi_moe.GATES["separate"]:
            continue
        if name == "dx":
            made[name] = rows_apart(np.zeros(x.shape, dtype), 16)
        elif name == "dweights":
            made[name] = np.zeros(routing.weights.shape, routing.weights.dtype)
        elif name.startswith("dw"):
            made[name] = matrix(np.zeros(given[name[1:]].shape, dtype), orientation, rng)
        else:
            of = given["w_" + name[3:]]
            wide = np.full((of.shape[0], of.shape[1] + bias_gap), np.nan, dtype)
            made[name] = wide[:, : of.shape[1]]
        made[name][...] = np.float64(fill).astype(made[name].dtype)
    return made


def run_backward(
    dout: np.ndarray,
    x: np.ndarray,
    layer: Layer,
    routing: capi_moe.Routing,
    *,
    lib: ctypes.CDLL | None = None,
    wanted: Any = ALL,
    dtype: Any = None,
    orientation: str = "rows",
    fill: float = POISON,
    activation: str = "silu",
    poison: int = 0xFF,
    bias_gap: int = 0,
    **options: Any,
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    outputs = outputs_of(
        layer, x, routing, wanted, dtype or x.dtype, orientation, fill, rng, bias_gap
    )
    arrays = {name: getattr(routing, name) for name in ("weights", "offsets", "pairs", "slots")}
    params = capi_moe.make_params(
        capi_moe.BackwardParams, dout=dout, x=x, activation=capi_moe.ACTIVATIONS[activation],
        **layer.arguments, **arrays, **outputs, **options,
    )  # fmt: skip
    capi_moe.run(params, lib, poison)
    return outputs


def reference(
    dout: np.ndarray, x: np.ndarray, layer: Layer, routing: capi_moe.Routing, **options: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """By the C ABI's names: the reference and the ordinary computation."""
    how = {n: value for n, value in options.items() if n not in ("pre_activation", "bias_gap")}
    how |= {"alpha": float(np.float32(how.get("alpha") or 1.0)), "limit": how.get("limit") or None}
    how["weight_on_input"] = bool(how.get("weight_on_input"))
    of = layer.experts
    gated = of["gate"] != "none"
    experts, inner = of["w_down"].shape[0], of["w_down"].shape[2]

    def bias(given: Any, rows: int) -> np.ndarray:
        """Their gradients are there without them."""
        return np.zeros((experts, rows), np.float32) if given is None else given

    w = {
        "w_up": of["w_up"] if gated else of["w_gate_up"],
        "b_up": bias(of["b_up"] if gated else of["b_gate_up"], inner),
        "w_down": of["w_down"],
        "b_down": bias(of["b_down"], x.shape[1]),
    }
    if gated:
        w |= {"w_gate": of["w_gate_up"], "b_gate": bias(of["b_gate_up"], inner)}

    order = next(n for n, code in capi_moe.GATES.items() if code == layer.arguments["gate"])

    def named(g: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        made = {"dx": g["x"], "dweights": g["weights"], "dw_down": g["w_down"],
                "db_down": g["b_down"]}  # fmt: skip
        for kind in ("w", "b"):
            if order == "separate":
                made |= {f"d{kind}_gate_up": g[f"{kind}_gate"], f"d{kind}_up": g[f"{kind}_up"]}
            elif order == "no_gate":
                made[f"d{kind}_gate_up"] = g[f"{kind}_up"]
            else:
                made[f"d{kind}_gate_up"] = stack(g[f"{kind}_gate"], g[f"{kind}_up"], order)
        return made

    ref, plain = moe_gradients.both(x, routing.ids, routing.weights, w, dout, **how)
    return named(ref), named(plain)


def check(
    made: dict[str, np.ndarray], ref: dict[str, Any], plain: dict[str, Any], dtype: Any
) -> None:
    for name, gradient in made.items():
        moe_gradients.assert_near(name, gradient, ref[name], plain[name], dtype)


def run_and_check(
    x: np.ndarray, layer: Layer, routing: capi_moe.Routing, *, seed: int = 5,
    lib: ctypes.CDLL | None = None, dtype: Any = None, orientation: str = "rows", **options: Any,
) -> dict[str, np.ndarray]:  # fmt: skip
    dout = capi.normal(np.random.default_rng(seed), x.shape, x.dtype)
    made = run_backward(dout, x, layer, routing, lib=lib, dtype=dtype, orientation=orientation,
                        **options)  # fmt: skip
    ref, plain = reference(dout, x, layer, routing, **options)
    check(made, ref, plain, x.dtype)
    return made


@pytest.mark.parametrize("dtype", capi_moe.DTYPES)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    "orientation", [("rows", "columns"), ("columns", "rows"), ("columns", "columns")]
)
def test_layouts(
    isa_library: ctypes.CDLL, dtype: str, gate: str, orientation: tuple[str, str]
) -> None:
    rng = np.random.default_rng(GATES.index(gate))
    for tokens, experts, hidden, inner in ((7, 5, 72, 40), (60, 3, 104, 136)):
        layer = make_layer(rng, experts, hidden, inner, capi_moe.DTYPES[dtype], gate=gate,
                           orientation=orientation, bias="fp32")  # fmt: skip
        x = rows_apart(capi.normal(rng, (tokens, hidden), capi_moe.DTYPES[dtype]), 8)
        routing = random_routing(rng, tokens, experts, 2, missing=0.1)
        run_and_check(x, layer, routing, lib=isa_library, orientation=orientation[1])
        run_and_check(x, layer, routing, lib=isa_library, orientation=orientation[0],
                      weight_on_input=1, dtype=np.dtype(np.float32))  # fmt: skip


def with_gaps(gradient: np.ndarray) -> np.ndarray:
    """All of what a gradient of outputs_of lies in, of experts in rising order."""
    item = gradient.itemsize
    if gradient.ndim == 2:
        shape: tuple[int, ...] = (len(gradient), gradient.strides[0] // item)
        return np.lib.stride_tricks.as_strided(gradient, shape, gradient.strides)
    rows = gradient if gradient.strides[2] == item else gradient.swapaxes(1, 2)
    shape = (len(rows), rows.strides[0] // rows.strides[1], rows.strides[1] // item)
    return np.lib.stride_tricks.as_strided(rows, shape, rows.strides)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "orientation",
    [("padded", "padded columns"), ("padded columns", "backwards"), ("backwards", "padded")],
)
def test_matrices_apart(isa_library: ctypes.CDLL, dtype: str, orientation: tuple[str, str]) -> None:
    """Weights, their gradients and those of biases with gaps between rows and experts, or experts
    in falling order: nothing is read from a gap, which holds NaN, or written to one."""
    rng = np.random.default_rng(15)
    for gate, own in (("gate_up", 0), ("separate", 1)):
        layer = make_layer(rng, 5, 72, 40, capi_moe.DTYPES[dtype], gate=gate, bias="fp32",
                           orientation=orientation)  # fmt: skip
        x = rows_apart(capi.normal(rng, (37, 72), capi_moe.DTYPES[dtype]), 8)
        routing = random_routing(rng, 37, 5, 2)
        made = run_and_check(x, layer, routing, lib=isa_library, orientation=orientation[own],
                             bias_gap=5)  # fmt: skip
        for name, gradient in made.items():
            if not name.startswith(("dw_", "db_")) or gradient.strides[0] < 0:
                continue
            gaps = np.isnan(with_gaps(gradient).astype(np.float32))
            assert 0 < gaps.sum() == gaps.size - gradient.size, name


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bits_of_a_thousand_runs(library: ctypes.CDLL, dtype: str) -> None:
    rng = np.random.default_rng(16)
    layer = make_layer(rng, 4, 72, 40, capi_moe.DTYPES[dtype], bias="fp32")
    x = capi.normal(rng, (33, 72), capi_moe.DTYPES[dtype])
    dout = capi.normal(rng, (33, 72), capi_moe.DTYPES[dtype])
    routing = random_routing(rng, 33, 4, 2)
    first = {n: g.tobytes() for n, g in run_backward(dout, x, layer, routing).items()}
    try:
        for i in range(1000):
            capi.check(library.flashmoe_set_num_threads(1 + i % 4), library)
            made = run_backward(dout, x, layer, routing)
            assert {n: g.tobytes() for n, g in made.items()} == first, i
    finally:
        capi.check(library.flashmoe_set_num_threads(0), library)


def coarse(
    x: np.ndarray, layer: Layer, routing: capi_moe.Routing
) -> tuple[np.ndarray, Layer, capi_moe.Routing]:
    """The same of so few bits that what a limit cuts, and what lies at it, is so in any dtype."""

    def to_steps(values: Any, step: float) -> None:
        if isinstance(values, np.ndarray):
            values[...] = (np.rint(values.astype(np.float64) / step) * step).astype(values.dtype)

    x[...] = np.clip(x.astype(np.float64), -3, 3).astype(x.dtype)
    to_steps(x, 1.0)
    for arrays in (layer.experts, layer.arguments):
        for values in arrays.values():
            to_steps(values, 0.125)
    signs = np.where(np.arange(routing.weights.size) % 3 == 0, -0.5, 1.0)
    weights = np.where(routing.ids >= 0, signs.reshape(routing.weights.shape), 0.0)
    return x, layer, routing_of(routing.ids, layer.experts["w_down"].shape[0],
                                weights.astype(np.float32))  # fmt: skip


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
    x[:8] *= np.float64(6).astype(x.dtype)
    routing = random_routing(rng, 33, 4, 3)
    run_and_check(x, layer, routing, lib=isa_library, activation=activation)
    x, layer, routing = coarse(x, layer, routing)
    run_and_check(
        x, layer, routing, lib=isa_library, activation=activation, limit=0.75, weight_on_input=1,
        up_offset=1.0 if gate == "gate_up" else 0.0,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", capi_moe.DTYPES)
def test_gpt_oss(isa_library: ctypes.CDLL, dtype: str) -> None:
    rng = np.random.default_rng(20)
    layer = make_layer(rng, 5, 96, 72, capi_moe.DTYPES[dtype], gate="interleaved",
                       orientation=("columns", "columns"), bias="same")  # fmt: skip
    options = {"alpha": 1.702, "limit": 1.0, "up_offset": 1.0}
    for tokens in (2, 70):
        x = capi.normal(rng, (tokens, 96), capi_moe.DTYPES[dtype])
        x, layer, routing = coarse(x, layer, random_routing(rng, tokens, 5, 4))
        run_and_check(x, layer, routing, lib=isa_library, orientation="columns", **options)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_numbers_of_rows(isa_library: ctypes.CDLL, dtype: str) -> None:
    """Experts with 0, 1, 15 to 17 and 127 to 129 rows, and one that every token takes."""
    counts = [0, 1, 15, 16, 17, 127, 128, 129]
    tokens = 140
    rng = np.random.default_rng(2)
    ids = np.full((tokens, 9), -1, np.int32)
    for e, count in enumerate(counts):
        ids[rng.permutation(tokens)[:count], e] = e
    ids[:, 8] = 8
    routing = routing_of(ids, 9, rng.standard_normal(ids.shape).astype(np.float32))
    layer = make_layer(rng, 9, 64, 40, capi_moe.DTYPES[dtype], bias="fp32")
    x = capi.normal(rng, (tokens, 64), capi_moe.DTYPES[dtype])
    made = run_and_check(x, layer, routing, lib=isa_library)
    for name in ("dw_gate_up", "dw_down", "db_gate_up", "db_down"):
        assert (made[name][0] == 0).all(), name
    assert (made["dweights"][ids < 0] == 0).all()


@pytest.mark.parametrize("dtype", capi_moe.DTYPES)
def test_several_blocks_of_rows(isa_library: ctypes.CDLL, dtype: str) -> None:
    """More rows of an expert, and more columns, than a product takes at a time."""
    rng = np.random.default_rng(3)
    layer = make_layer(rng, 2, 648, 304, capi_moe.DTYPES[dtype], gate="separate")
    x = capi.normal(rng, (701, 648), capi_moe.DTYPES[dtype])
    run_and_check(x, layer, random_routing(rng, 701, 2, 1), lib=isa_library)


def test_several_blocks_of_pairs_of_rows(isa_library: ctypes.CDLL) -> None:
    """A whole number of blocks and an odd rest, added to sums that wait in memory."""
    rng = np.random.default_rng(17)
    layer = make_layer(rng, 2, 72, 40, capi.BF16)
    ids = np.zeros((2050, 1), np.int32)
    ids[2049] = 1
    routing = routing_of(ids, 2, rng.standard_normal(ids.shape).astype(np.float32))
    x = capi.normal(rng, (2050, 72), capi.BF16)
    made = run_and_check(x, layer, routing, lib=isa_library)
    turned = run_and_check(x, layer, routing, lib=isa_library, orientation="columns")
    for name in ("dw_gate_up", "dw_down"):
        assert (made[name] == turned[name]).all(), name


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("weight_on_input", [0, 1])
def test_weights_of_fp64(gate: str, weight_on_input: int) -> None:
    """Whose gradients are fp64, added to as such."""
    rng = np.random.default_rng(16)
    layer = make_layer(rng, 6, 72, 40, np.dtype(np.float64), gate=gate, bias="same")
    x = rng.standard_normal((37, 72))
    routing = capi_moe.route(rng.standard_normal((37, 6)), top_k=3, renormalize=1)
    made = run_and_check(x, layer, routing, weight_on_input=weight_on_input)
    assert made["dweights"].dtype == np.float64
    dout = capi.normal(np.random.default_rng(0), x.shape, x.dtype)
    once = run_backward(dout, x, layer, routing, weight_on_input=weight_on_input)["dweights"]
    more = run_backward(dout, x, layer, routing, weight_on_input=weight_on_input, accumulate=1,
                        fill=0.1, wanted=["dweights"])["dweights"]  # fmt: skip
    assert (more == 0.1 + once).all()


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_each_alone(library: ctypes.CDLL, gate: str, dtype: str) -> None:
    """What is wanted beside a gradient changes none of its bits, and neither does saving."""
    rng = np.random.default_rng(4)
    layer = make_layer(rng, 4, 72, 40, capi_moe.DTYPES[dtype], gate=gate, bias="same")
    x = capi.normal(rng, (50, 72), capi_moe.DTYPES[dtype])
    dout = capi.normal(rng, (50, 72), capi_moe.DTYPES[dtype])
    routing = random_routing(rng, 50, 4, 2, missing=0.2)
    for options in ({}, {"weight_on_input": 1}):
        whole = run_backward(dout, x, layer, routing, **options)
        for name, gradient in whole.items():
            alone = run_backward(dout, x, layer, routing, wanted=[name], **options)
            assert alone[name].tobytes() == gradient.tobytes(), name
        saved = run_forward(x, layer, routing, before=True, **options).before
        assert saved is not None
        pre = capi.aligned_empty((routing.pairs.size, saved.shape[1]), x.dtype)
        pre[...] = np.nan
        pre[: len(saved)] = saved
        again = run_backward(dout, x, layer, routing, pre_activation=pre, poison=0xA5, **options)
        for name, gradient in whole.items():
            assert again[name].tobytes() == gradient.tobytes(), name


@pytest.mark.parametrize("dtype", capi_moe.DTYPES)
def test_accumulated_twice_is_twice(isa_library: ctypes.CDLL, dtype: str) -> None:
    rng = np.random.default_rng(5)
    layer = make_layer(rng, 3, 64, 40, capi_moe.DTYPES[dtype], gate="separate",
                       orientation=("columns", "rows"), bias="same")  # fmt: skip
    x = capi.normal(rng, (40, 64), capi_moe.DTYPES[dtype])
    dout = capi.normal(rng, (40, 64), capi_moe.DTYPES[dtype])
    routing = random_routing(rng, 40, 3, 2)
    for kind in (x.dtype, np.dtype(np.float32)):
        options: dict[str, Any] = {"lib": isa_library, "dtype": kind, "orientation": "columns"}
        once = run_backward(dout, x, layer, routing, **options)
        zero = run_backward(dout, x, layer, routing, accumulate=1, fill=0.0, **options)
        for name, gradient in once.items():
            assert (zero[name] == gradient).all(), name
        outputs = {name: gradient.copy(order="K") for name, gradient in once.items()}
        arrays = {n: getattr(routing, n) for n in ("weights", "offsets", "pairs", "slots")}
        aligned = {n: _aligned_like(once[n], outputs[n]) for n in outputs}
        params = capi_moe.make_params(
            capi_moe.BackwardParams, dout=dout, x=x, accumulate=1, **layer.arguments, **arrays,
            **aligned,
        )  # fmt: skip
        capi_moe.run(params, isa_library)
        for name, gradient in once.items():
            twice = gradient.astype(np.float64) * 2
            assert (aligned[name].astype(np.float64) == twice).all(), name


def _aligned_like(like: np.ndarray, values: np.ndarray) -> np.ndarray:
    if like.ndim == 3 and like.strides[1] < like.strides[2]:
        turned = capi.aligned_empty((like.shape[0], like.shape[2], like.shape[1]), like.dtype)
        made = turned.swapaxes(1, 2)
    else:
        made = capi.aligned_empty(like.shape, like.dtype)
    made[...] = values
    return made


@pytest.mark.parametrize("dtype", capi_moe.DTYPES)
def test_nan_of_one_token_stays_with_its_experts(isa_library: ctypes.CDLL, dtype: str) -> None:
    rng = np.random.default_rng(6)
    for where in ("x", "dout"):
        for gate in ("gate_up", "no_gate"):
            layer = make_layer(rng, 6, 64, 40, capi_moe.DTYPES[dtype], gate=gate)
            x = capi.normal(rng, (47, 64), capi_moe.DTYPES[dtype])
            dout = capi.normal(rng, (47, 64), capi_moe.DTYPES[dtype])
            routing = random_routing(rng, 47, 6, 2)
            clean = run_backward(dout, x, layer, routing, lib=isa_library)
            (x if where == "x" else dout)[11] = np.nan
            made = run_backward(dout, x, layer, routing, lib=isa_library)
            mine = np.isin(np.arange(6), routing.ids[11])
            for name in ("dx", "dweights"):
                touched = np.isnan(made[name].astype(np.float32)).any(axis=1)
                assert touched.tolist() == (np.arange(47) == 11).tolist(), (where, gate, name)
            for name in ("dw_gate_up", "dw_down", "db_gate_up", "db_down"):
                if where == "x" and name == "db_down":
                    continue  # which is a sum of dout
                wide = made[name].astype(np.float32)
                touched = np.isnan(wide).any(axis=tuple(range(1, wide.ndim)))
                assert touched.tolist() == mine.tolist(), (where, gate, name)
            for name, gradient in made.items():
                rest = ~mine if name.startswith(("dw_", "db_")) else np.arange(47) != 11
                assert gradient[rest].tobytes() == clean[name][rest].tobytes(), name


@pytest.mark.parametrize("dtype", capi_moe.DTYPES)
def test_bits_with_any_number_of_threads(isa_library: ctypes.CDLL, dtype: str) -> None:
    rng = np.random.default_rng(7)
    layer = make_layer(rng, 5, 264, 136, capi_moe.DTYPES[dtype], gate="interleaved", bias="fp32")
    x = capi.normal(rng, (150, 264), capi_moe.DTYPES[dtype])
    dout = capi.normal(rng, (150, 264), capi_moe.DTYPES[dtype])
    routing = random_routing(rng, 150, 5, 3, missing=0.1)
    made = []
    try:
        for threads in (1, 2, 3, 7):
            capi.check(isa_library.flashmoe_set_num_threads(threads), isa_library)
            made.append(run_backward(dout, x, layer, routing, lib=isa_library))
    finally:
        capi.check(isa_library.flashmoe_set_num_threads(0), isa_library)
    for other in made[1:]:
        for name, gradient in made[0].items():
            assert other[name].tobytes() == gradient.tobytes(), name


def least_bound(*arguments: Any, **options: Any) -> int:
    """The smallest max_workspace_bytes that such a call may have, which the refusal tells."""
    with pytest.raises(capi.FlashmoeError, match="max_workspace_bytes: got 1, acc") as refusal:
        run_backward(*arguments, max_workspace_bytes=1, **options)
    told = re.search(r"and from (\d+) on, which chunks of 256 columns take$", str(refusal.value))
    assert told is not None
    return int(told[1])


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", capi_moe.DTYPES)
def test_bits_with_any_bound(isa_library: ctypes.CDLL, dtype: str, gate: str) -> None:
    """Chunks of I and of H, the last of which are no whole ones: of all gradients, of each alone,
    and added to what there is."""
    rng = np.random.default_rng(11)
    layer = make_layer(rng, 3, 264, 520, capi_moe.DTYPES[dtype], gate=gate, bias="fp32")
    x = capi.normal(rng, (20, 264), capi_moe.DTYPES[dtype])
    dout = capi.normal(rng, (20, 264), capi_moe.DTYPES[dtype])
    routing = random_routing(rng, 20, 3, 2, missing=0.1)
    call = (dout, x, layer, routing)
    of_weights = ["dw_gate_up", "dw_down", "db_gate_up"]
    for on_input, wanted in itertools.product((0, 1), (ALL, of_weights, ["dweights"], ["db_down"])):
        of: dict[str, Any] = {"lib": isa_library, "weight_on_input": on_input, "wanted": wanted,
                              "accumulate": len(wanted) % 2}  # fmt: skip
        whole = run_backward(*call, **of)
        repeats = [launch.repeats for launch in capi.last_launches(isa_library)]
        assert set(repeats) == {0}
        least = least_bound(*call, **of)
        for bound in (least, least * 6 // 5, 1 << 40):
            made = run_backward(*call, max_workspace_bytes=bound, **of)
            for name, gradient in whole.items():
                assert made[name].tobytes() == gradient.tobytes(), (wanted, bound, name)
            again = [launch.repeats for launch in capi.last_launches(isa_library)]
            if bound == least and wanted is ALL:
                assert set(again) == {2, 3}  # 264 and 520 columns
            if bound == 1 << 40:
                assert again == repeats


def test_workspaces_stay_within_their_bound(library: ctypes.CDLL) -> None:
    """With any number of threads, and in no more than a bound that is large enough."""
    rng = np.random.default_rng(12)
    layer = make_layer(rng, 4, 1024, 1024, capi_moe.DTYPES["bf16"])
    x = capi.normal(rng, (256, 1024), capi_moe.DTYPES["bf16"])
    routing = random_routing(rng, 256, 4, 4)
    arrays = {name: getattr(routing, name) for name in ("weights", "offsets", "pairs", "slots")}
    outputs = outputs_of(layer, x, routing, ALL, x.dtype, "rows", 0.0, rng)
    params = capi_moe.make_params(
        capi_moe.BackwardParams, dout=x, x=x, **layer.arguments, **arrays, **outputs
    )
    free = capi_moe.plan_of(params).workspace_bytes
    params.max_workspace_bytes = 1 << 20
    with pytest.raises(capi.FlashmoeError, match="max_workspace_bytes: got 1048576"):
        capi_moe.plan_of(params)
    sizes = []
    for share in (1.0, 0.9, 0.8, 0.7, 0.6):
        params.max_workspace_bytes = int(free * share)
        plan = capi_moe.plan_of(params)
        assert plan.workspace_bytes <= params.max_workspace_bytes
        sizes.append(sum(max(launch.repeats, 1) for launch in plan.launches[: plan.launch_count]))
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_limits_at_the_kink(isa_library: ctypes.CDLL) -> None:
    """A g or u at the limit has its gradient, one beyond it has none, however dout is."""
    hidden, inner = 8, 8
    w = np.zeros((1, 2 * inner, hidden), np.float32)
    w[0, :inner, 0] = [0.5, 1.0, 1.0 + 2**-20, 2.0, -3.0, -1.0, 0.0, 5.0]
    w[0, inner:, 0] = [0.5, 1.0, 1.0 + 2**-20, -2.0, -1.0, -1.0 - 2**-20, 0.0, 1.0]
    w_gate_up = capi.aligned_empty(w.shape, w.dtype)
    w_gate_up[...] = w
    w_down = capi.aligned_empty((1, hidden, inner), np.dtype(np.float32))
    w_down[...] = 1.0
    x = capi.aligned_empty((1, hidden), np.dtype(np.float32))
    x[...] = 0.0
    x[0, 0] = 1.0
    dout = capi.aligned_empty((1, hidden), np.dtype(np.float32))
    dout[...] = 1.0
    experts = {"gate": "separate", "w_gate_up": w[:, :inner], "w_up": w[:, inner:],
               "b_gate_up": None, "b_up": None, "w_down": np.ones_like(w_down),
               "b_down": None}  # fmt: skip
    layer = Layer(experts, {"gate": 0, "w_gate_up": w_gate_up, "w_down": w_down})
    routing = routing_of(np.zeros((1, 1), np.int32), 1, np.ones((1, 1), np.float32))
    made = run_backward(dout, x, layer, routing, lib=isa_library, limit=1.0)
    db = made["db_gate_up"][0]
    assert (db[:inner] == 0).tolist() == [False, False, True, True, False, False, True, True]
    assert (db[inner:] == 0).tolist() == [False, False, True, True, False, True, True, False]
    ref, plain = reference(dout, x, layer, routing, limit=1.0)
    check(made, ref, plain, x.dtype)


def test_hostile_routing_stays_inside(library: ctypes.CDLL) -> None:
    """Whatever the routing holds: guards around tensors and workspace stay, and nothing raises."""
    rng = np.random.default_rng(8)
    layer = make_layer(rng, 4, 64, 40, capi_moe.DTYPES["fp32"])
    x = capi.normal(rng, (20, 64), capi_moe.DTYPES["fp32"])
    dout = capi.normal(rng, (20, 64), capi_moe.DTYPES["fp32"])
    for _ in range(50):
        routing = random_routing(rng, 20, 4, 2)
        for array in (routing.offsets, routing.pairs, routing.slots):
            hit = rng.random(array.shape) < 0.3
            array[hit] = rng.integers(-(2**31), 2**31 - 1, array.shape)[hit]
        made = run_backward(dout, x, layer, routing)
        assert all(np.isfinite(gradient).all() for gradient in made.values())


def test_two_slots_of_one_pair(library: ctypes.CDLL) -> None:
    """The one that `slots` names counts, and the other does not: as in the forward."""
    rng = np.random.default_rng(10)
    layer = make_layer(rng, 3, 64, 40, capi_moe.DTYPES["fp32"])
    x = capi.normal(rng, (12, 64), capi_moe.DTYPES["fp32"])
    dout = capi.normal(rng, (12, 64), capi_moe.DTYPES["fp32"])
    ids = np.full((12, 2), -1, np.int32)
    ids[:, 0] = np.arange(12) % 3
    routing = routing_of(ids, 3, rng.standard_normal((12, 2)).astype(np.float32))
    want = run_backward(dout, x, layer, routing)
    last = int(routing.offsets[-1])
    routing.pairs[last] = routing.pairs[0]  # once more, as a row of the last expert
    routing.offsets[-1] += 1
    made = run_backward(dout, x, layer, routing)
    for name, gradient in want.items():
        assert made[name].tobytes() == gradient.tobytes(), name


def test_no_tokens(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(9)
    layer = make_layer(rng, 3, 64, 40, capi_moe.DTYPES["bf16"], bias="fp32")
    x = capi.aligned_empty((0, 64), capi.BF16)
    routing = random_routing(rng, 0, 3, 2)
    made = run_backward(x, x, layer, routing)
    for name in ("dw_gate_up", "dw_down", "db_gate_up", "db_down"):
        assert (made[name] == 0).all(), name
    kept = run_backward(x, x, layer, routing, accumulate=1)
    for name in ("dw_gate_up", "dw_down", "db_gate_up", "db_down"):
        assert (kept[name] == POISON).all(), name
