"""Which memory the gradients of layers and of products read and write on the CPU: that of tensors
alone, whatever a routing holds, and that of pre_activation where it may be overwritten."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import capi
import capi_moe
import numpy as np
import pytest
from guarded import between_guards
from moe_layers import Layer, make_layer, random_routing, rows_apart, run_forward

GATES = tuple(capi_moe.GATES)
PARTS = ("weights", "offsets", "pairs", "slots")
HOSTILE = (-(2**31), -1, 0, 1, 7, 39, 40, 41, 2**30, 2**31 - 1)


def of_layer(layer: Layer, tokens: int, top_k: int, dtype: Any) -> dict[str, np.ndarray]:
    """Gradients of everything, full of NaN."""
    given = layer.arguments
    hidden = given["w_down"].shape[1]
    made = {"dx": (tokens, hidden), "dweights": (tokens, top_k)}
    for name in ("w_gate_up", "w_up", "w_down"):
        if given.get(name) is not None:
            shape = given[name].shape
            made |= {f"d{name}": shape, f"db{name[1:]}": shape[:2]}
    arrays = {}
    for name, extents in made.items():
        kind = np.dtype(np.float32) if name == "dweights" else dtype
        arrays[name] = capi.aligned_empty(extents, kind)
        arrays[name][...] = np.nan
    return arrays


def backward(
    layer: Layer, tensors: dict[str, np.ndarray], lib: ctypes.CDLL | None = None, **options: Any
) -> int:
    """Writes the gradients among the tensors, and returns the bytes of workspace."""
    params = capi_moe.make_params(
        capi_moe.BackwardParams, activation=capi_moe.ACTIVATIONS["silu"],
        **layer.arguments | tensors, **options,
    )  # fmt: skip
    capi_moe.run(params, lib)
    size: int = capi_moe.plan_of(params, lib).workspace_bytes
    return size


# ---- pre_activation as workspace ----


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", capi.DTYPES)
def test_gradients_that_overwrite_pre_activation(
    isa_library: ctypes.CDLL, gate: str, dtype: str
) -> None:
    """Have the same bits, in a workspace that is smaller by its bytes; what lies between its rows,
    and rows without a pair, stay."""
    rng = np.random.default_rng(GATES.index(gate))
    kind = capi.DTYPES[dtype]
    layer = make_layer(rng, 3, 264, 520, kind, gate=gate, bias="fp32")
    x, dout = (capi.normal(rng, (30, 264), kind) for _ in range(2))
    routing = random_routing(rng, 30, 3, 2, missing=0.2)
    given = {"x": x, "dout": dout} | {name: getattr(routing, name) for name in PARTS}
    for on_input, bounded, alone in itertools.product((0, 1), (False, True), (False, True)):
        saved = run_forward(x, layer, routing, before=True, weight_on_input=on_input).before
        assert saved is not None
        before = rows_apart(np.full((routing.pairs.size, saved.shape[1]), 3, kind), 8)
        before[: len(saved)] = saved
        options: dict[str, Any] = {"weight_on_input": on_input, "lib": isa_library}
        outputs = of_layer(layer, 30, 2, kind)
        if alone:  # without dx, of which rows of dz are whole in any case
            outputs = {name: x for name, x in outputs.items() if name.startswith(("dw_", "db_"))}
        want = {name: x.copy() for name, x in outputs.items()}
        free = backward(layer, given | want | {"pre_activation": before}, **options)
        if bounded:
            options["max_workspace_bytes"] = free * 3 // 4
        made = {name: x.copy() for name, x in outputs.items()}
        base = before.base
        assert base is not None
        untouched = base.copy()
        size = backward(
            layer, given | made | {"pre_activation": before}, overwrite_pre_activation=1, **options
        )
        for name, gradient in want.items():
            assert made[name].tobytes() == gradient.tobytes(), (on_input, bounded, alone, name)
        in_place = gate != "interleaved"
        if not bounded:
            assert free - size == (before.size * kind.itemsize if in_place else 0)
        assert (before[: len(saved)].tobytes() != saved.tobytes()) == in_place
        before[: len(saved)] = saved
        assert base.tobytes() == untouched.tobytes()


def test_what_is_overwritten_overlaps_nothing(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(3)
    kind = np.dtype(np.float32)
    layer = make_layer(rng, 3, 64, 32, kind)
    routing = random_routing(rng, 8, 3, 2)
    both = capi.normal(rng, (16, 64), kind)
    given: dict[str, Any] = {name: getattr(routing, name) for name in PARTS}
    given |= {"x": both[:8], "dout": capi.normal(rng, (8, 64), kind), "pre_activation": both}
    given |= of_layer(layer, 8, 2, kind)
    backward(layer, given)
    with pytest.raises(capi.FlashmoeError, match=r"pre_activation: it shares memory with x, "):
        backward(layer, given, overwrite_pre_activation=1)


# ---- hostile routings ----


def hit(rng: np.random.Generator, array: np.ndarray) -> None:
    """Values of any size in some places."""
    places = rng.random(array.shape) < 0.3
    array[places] = rng.choice(HOSTILE, array.shape)[places]


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("at_end", [False, True])
def test_hostile_routings_of_layers(library: ctypes.CDLL, gate: str, at_end: bool) -> None:
    """No byte outside of any tensor is touched: it would fault."""
    rng = np.random.default_rng(GATES.index(gate))
    kind = np.dtype(np.float32)
    layer = make_layer(rng, 4, 264, 264, kind, gate=gate, bias="fp32")
    weights = {name: between_guards(x, at_end) for name, x in layer.arguments.items()
               if isinstance(x, np.ndarray)}  # fmt: skip
    x, dout = (between_guards(capi.normal(rng, (20, 264), kind), at_end) for _ in range(2))
    width = 264 if gate == "no_gate" else 2 * 264
    for round_, on_input in itertools.product(range(6), (0, 1)):
        routing = random_routing(rng, 20, 4, 2)
        for array in (routing.offsets, routing.pairs, routing.slots):
            hit(rng, array)
        tensors = weights | {"x": x, "dout": dout}
        tensors |= {name: between_guards(getattr(routing, name), at_end) for name in PARTS}
        tensors |= {name: between_guards(x, at_end)
                    for name, x in of_layer(layer, 20, 2, kind).items()}  # fmt: skip
        options: dict[str, Any] = {"weight_on_input": on_input}
        if round_ % 2:
            before = capi.normal(rng, (40, width), kind)
            tensors["pre_activation"] = between_guards(before, at_end)
            options["overwrite_pre_activation"] = int(round_ > 3)
        else:
            size = backward(layer, tensors, **options)
            options["max_workspace_bytes"] = size * 3 // 4
        backward(layer, tensors, **options)
        for name, gradient in tensors.items():
            if name.startswith("d"):
                assert np.isfinite(gradient).all(), name


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("at_end", [False, True])
def test_hostile_bounds_of_products(library: ctypes.CDLL, counted: bool, at_end: bool) -> None:
    rng = np.random.default_rng(int(counted))
    kind = np.dtype(np.float32)
    lead = (4, 9) if counted else (40,)

    def normal(*shape: int) -> np.ndarray:
        return between_guards(capi.normal(rng, shape, kind), at_end)

    x, dout, w = normal(*lead, 72), normal(*lead, 40), normal(4, 40, 72)
    for _ in range(30):
        bounds = rng.integers(0, 9, 4 if counted else 5).astype(np.int32)
        if not counted:
            bounds = np.cumsum(bounds, dtype=np.int32)
        hit(rng, bounds)
        shapes = {"dx": x.shape, "dw": w.shape, "dbias": (4, 40)}
        made = {name: between_guards(np.full(shape, np.nan, kind), at_end)
                for name, shape in shapes.items()}  # fmt: skip
        params = capi_moe.make_params(
            capi_moe.ProductBackwardParams, dout=dout, x=x, w=w,
            **{"counts" if counted else "offsets": between_guards(bounds, at_end)}, **made,
        )  # fmt: skip
        capi_moe.run(params)
        for name, gradient in made.items():
            assert np.isfinite(gradient).all(), name
