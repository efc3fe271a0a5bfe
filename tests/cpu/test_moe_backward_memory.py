"""Gradients of layers on the CPU that may overwrite what the activation was applied to."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import capi
import capi_moe
import numpy as np
import pytest
from moe_layers import Layer, make_layer, random_routing, rows_apart, run_forward

GATES = tuple(capi_moe.GATES)
PARTS = ("weights", "offsets", "pairs", "slots")


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
