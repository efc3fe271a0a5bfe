"""Random layers of experts in every layout of their weights, for the tests of the C ABI."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import capi
import capi_moe
import moe_oracle
import numpy as np

STACKED = ("gate_up", "up_gate", "interleaved")


def matrix(array: np.ndarray, orientation: str, rng: np.random.Generator) -> np.ndarray:
    """The same [experts, rows, columns] otherwise in memory, with NaN in the gaps.

    "rows": contiguous; "columns": as a transposed view; "padded": rows and experts apart;
    "padded columns": both; "backwards": the experts in falling order.
    """
    experts, rows, columns = array.shape
    if orientation == "backwards":
        made = capi.aligned_empty(array.shape, array.dtype)[::-1]
        made[...] = array
        return made
    if orientation.endswith("columns"):
        padded = "padded" in orientation
        flipped = matrix(array.transpose(0, 2, 1), "padded" if padded else "rows", rng)
        return flipped.transpose(0, 2, 1)
    gap = 8 * int(rng.integers(1, 4)) if orientation == "padded" else 0
    wide = capi.aligned_empty((experts, rows + (gap > 0), columns + gap), array.dtype)
    wide[...] = np.nan
    view = wide[:, :rows, :columns]
    view[...] = array
    return view


ORIENTATIONS = ("rows", "columns", "padded", "padded columns", "backwards")


@dataclasses.dataclass
class Layer:
    """One layer: its experts as the oracle takes them, gate and up apart, and the library's
    arguments."""

    experts: dict[str, Any]
    arguments: dict[str, Any]

    @property
    def gated(self) -> bool:
        return bool(self.experts["gate"] == "separate")

    @property
    def inner(self) -> int:
        return int(self.experts["w_down"].shape[2])


def make_layer(
    rng: np.random.Generator,
    experts: int,
    hidden: int,
    inner: int,
    dtype: np.dtype,
    *,
    gate: str = "gate_up",
    orientation: tuple[str, str] = ("rows", "rows"),
    bias: str | None = None,
) -> Layer:
    """`bias` is None, "fp32" or "same" (as the weights)."""

    def weights(rows: int, columns: int) -> np.ndarray:
        values = rng.standard_normal((experts, rows, columns)) / np.sqrt(columns)
        return values.astype(dtype)

    def biases(rows: int) -> np.ndarray | None:
        if bias is None:
            return None
        wide = np.full((experts, rows + 3), np.nan, np.float32 if bias == "fp32" else dtype)
        wide[:, :rows] = rng.standard_normal((experts, rows)).astype(wide.dtype)
        return wide[:, :rows]

    g, u, d = weights(inner, hidden), weights(inner, hidden), weights(hidden, inner)
    bg, b_up, bd = biases(inner), biases(inner), biases(hidden)
    arguments: dict[str, Any] = {"gate": capi_moe.GATES[gate]}
    if gate in STACKED:
        arguments["w_gate_up"] = matrix(stack(g, u, gate), orientation[0], rng)
        if bg is not None and b_up is not None:
            arguments["b_gate_up"] = stack(bg, b_up, gate)
    elif gate == "separate":
        arguments["w_gate_up"] = matrix(g, orientation[0], rng)
        # Two tensors need not be laid out alike.
        arguments["w_up"] = matrix(u, orientation[1], rng)
        arguments |= {"b_gate_up": bg, "b_up": b_up}
    else:
        arguments["w_gate_up"] = matrix(u, orientation[0], rng)
        arguments["b_gate_up"] = b_up
    arguments["w_down"] = matrix(d, orientation[1], rng)
    arguments["b_down"] = bd
    if gate == "no_gate":
        of_up = {"gate": "none", "w_gate_up": u, "b_gate_up": b_up}
    else:
        of_up = {"gate": "separate", "w_gate_up": g, "w_up": u, "b_gate_up": bg, "b_up": b_up}
    return Layer(of_up | {"w_down": d, "b_down": bd}, arguments)


def stack(gate: np.ndarray, up: np.ndarray, order: str) -> np.ndarray:
    if order == "interleaved":
        both = np.stack([gate, up], 2)
        return both.reshape(gate.shape[0], 2 * gate.shape[1], *gate.shape[2:])
    return np.concatenate([gate, up] if order == "gate_up" else [up, gate], 1)


def rows_apart(array: np.ndarray, gap: int) -> np.ndarray:
    """The same [rows, columns], `gap` elements between the rows."""
    wide = capi.aligned_empty((array.shape[0], array.shape[1] + gap), array.dtype)
    wide[...] = np.nan
    wide[:, : array.shape[1]] = array
    return wide[:, : array.shape[1]]


def random_routing(
    rng: np.random.Generator, tokens: int, experts: int, top_k: int, *, missing: float = 0.0
) -> capi_moe.Routing:
    """Each token's experts are distinct, some of them not mine; weights of either sign."""
    ids = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)] or [[]])
    ids = ids.reshape(tokens, top_k).astype(np.int32)
    ids[rng.random(ids.shape) < missing] = -1
    return routing_of(ids, experts, rng.standard_normal((tokens, top_k)).astype(np.float32))


def routing_of(ids: np.ndarray, experts: int, weights: np.ndarray) -> capi_moe.Routing:
    offsets, pairs, slots = moe_oracle.sort_pairs(ids, experts)
    weights = np.where(ids >= 0, weights, np.float32(0))
    return capi_moe.Routing(ids, weights, offsets, pairs, slots)


@dataclasses.dataclass
class Computed:
    out: np.ndarray
    before: np.ndarray | None


def run_forward(
    x: np.ndarray,
    layer: Layer,
    routing: capi_moe.Routing,
    *,
    lib: ctypes.CDLL | None = None,
    before: bool = False,
    poison: int = 0xFF,
    activation: str = "silu",
    **options: Any,
) -> Computed:
    """One call on poisoned outputs with gaps, which must stay as they are."""
    poisoned = np.float64(7).astype(x.dtype)
    gap = 16
    tokens, hidden = x.shape
    columns = (2 if layer.gated else 1) * layer.inner
    out = capi.aligned_empty((tokens, hidden + gap), x.dtype)
    out[...] = poisoned
    pre = capi.aligned_empty((routing.pairs.size, columns + gap), x.dtype)
    pre[...] = poisoned
    arrays = {name: getattr(routing, name) for name in ("weights", "offsets", "pairs", "slots")}
    params = capi_moe.make_params(
        capi_moe.ForwardParams,
        x=x,
        out=out[:, :hidden],
        pre_activation=pre[:, :columns] if before else None,
        activation=capi_moe.ACTIVATIONS[activation],
        **layer.arguments,
        **arrays,
        **options,
    )
    capi_moe.run(params, lib, poison)
    assert (out[:, hidden:] == poisoned).all(), "wrote between the rows of out"
    assert (pre[:, columns:] == poisoned).all(), "wrote between the rows of pre_activation"
    served = int(routing.offsets[-1])
    assert (pre[served:] == poisoned).all(), "wrote rows of pre_activation that have no pair"
    return Computed(out[:, :hidden], pre[:served, :columns] if before else None)
