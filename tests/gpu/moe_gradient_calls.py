"""Gradients of the mixture of experts on the GPU, by the C ABI: every tensor in poisoned memory,
workspaces of exactly the bytes that were asked for, and what ran read back.

Beside tests/moe_gradients.py, whose layer torch differentiates here on the GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import capi
import capi_moe
import flashmoe_science as fm
import moe_gradients
import moe_oracle
import numpy as np
import pytest
import torch
from gpu import memory, moe_layers
from gpu.memory import Placed, Placement
from gpu.moe_calls import Call
from gpu.moe_layers import DEVICE, DTYPES, generator
from moe_cases import Case

FAMILIES = ("sm89", "sm90")  # of GPU kernels that compute gradients
ALL = capi_moe.GRADIENTS
POISONS = (0xFF, 0x5A)  # of workspaces: NaN and -1; numbers that look like any other


@functools.cache
def why_not(family: str, operation: str) -> str | None:
    """None where the family computes the operation's gradients on cuda:0, else the reason."""
    if family not in fm.build_info().kernel_families.split():
        return f"built without the {family} kernels"
    try:
        if operation == "layer":
            Gradients.of(Case(), "bf16", family)
        else:
            product_call("bf16", family, rows=16, experts=2)
    except capi.FlashmoeError as error:
        return str(error)
    return None


def serving(family: str, operation: str) -> str:
    reason = why_not(family, operation)
    if reason is not None:
        pytest.skip(reason)
    return family


# ---- layers --------------------------------------------------------------------------------------


def stack(gate: torch.Tensor, up: torch.Tensor, order: str) -> torch.Tensor:
    if order == "interleaved":
        return torch.stack([gate, up], 2).flatten(1, 2)
    return torch.cat([gate, up] if order == "gate_up" else [up, gate], 1)


def apart(both: torch.Tensor, order: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate and the up of w_gate_up, or of a bias."""
    if order == "interleaved":
        return both[:, ::2], both[:, 1::2]
    first, second = both.chunk(2, 1)
    return (first, second) if order == "gate_up" else (second, first)


def coarse_(layer: dict[str, Placed]) -> None:
    """Rounds to so few bits that a limit clamps the same numbers, and the same ones lie at it, in
    any dtype."""
    for name, placed in layer.items():
        step = 1.0 if name == "x" else 0.125
        wide = placed.view.double()
        if name == "x":
            wide = wide.clamp(-3, 3)
        placed.view.copy_((wide / step).round() * step)


def random_ids(case: Case, missing: float) -> torch.Tensor:
    ids = moe_layers.random_ids(case)
    drop = torch.rand(ids.shape, generator=generator(case.seed + 5), device=DEVICE) < missing
    return torch.where(drop, -1, ids).int()


def routing_of(ids: torch.Tensor, case: Case, *, coarse: bool = False) -> dict[str, torch.Tensor]:
    """With weights of either sign."""
    weights = torch.randn(ids.shape, generator=generator(case.seed + 1), device=DEVICE)
    if coarse:
        third = torch.arange(ids.numel(), device=DEVICE).view(ids.shape) % 3 == 0
        weights = torch.where(third, -0.5, 1.0)
    offsets, pairs, slots = moe_oracle.sort_pairs(ids, case.experts)
    weights = torch.where(ids < 0, 0.0, weights)
    return {"weights": weights, "offsets": offsets, "pairs": pairs, "slots": slots}


@dataclass
class Gradients:
    """One call, and what it was made of."""

    case: Case
    dtype: str
    ids: torch.Tensor
    call: Call
    names: tuple[str, ...]  # of gradients
    overwritten: torch.Tensor | None = None  # what pre_activation holds before a run

    @classmethod
    def of(
        cls, case: Case, dtype: str, family: str | None, *, ids: torch.Tensor | None = None,
        missing: float = 0.0, wanted: Iterable[str] = ALL, out: str | None = None,
        turned: bool = False, gap: int = 8, saved: bool = False, coarse: bool = False,
        accumulate: bool = False, inputs: dict[str, Placed] | None = None,
        max_workspace_bytes: int = 0, overwrites: bool = False,
    ) -> Gradients:  # fmt: skip
        """`out`: dtype of gradients. `turned`: those of matrices are transposed views. `saved`:
        what the activation is applied to is given, which the call also `overwrites`. `inputs`: of
        another call, in their places."""
        ids = random_ids(case, missing) if ids is None else ids
        if inputs is None:
            inputs = cls.inputs_of(case, dtype, ids, gap=gap, coarse=coarse)
        if saved:
            inputs = inputs | {"pre_activation": before(case, dtype, inputs, family)}
        outputs = cls.outputs_of(case, dtype, inputs, wanted, out or dtype, turned, gap)
        values = {
            "gate": capi_moe.GATES[{"none": "no_gate"}.get(case.gate, case.gate)],
            "activation": capi_moe.ACTIVATIONS[case.activation],
            "limit": case.limit or 0.0, "alpha": 0.0 if case.alpha == 1.0 else case.alpha,
            "up_offset": case.up_offset, "weight_on_input": int(case.weight_on_input),
            "accumulate": int(accumulate), "kernel": family.encode() if family else None,
            "max_workspace_bytes": max_workspace_bytes,
            "overwrite_pre_activation": int(overwrites),
        }  # fmt: skip
        call = Call(capi_moe.BackwardParams, inputs | outputs, **values)
        kept = inputs["pre_activation"].view.clone() if overwrites else None
        return cls(case, dtype, ids, call, tuple(outputs), kept)

    @staticmethod
    def inputs_of(
        case: Case, dtype: str, ids: torch.Tensor, *, gap: int = 8, coarse: bool = False
    ) -> dict[str, Placed]:
        made = moe_layers.place_weights(case, dtype, gap=gap)
        if coarse:
            coarse_(made)
        g = generator(case.seed + 2)
        dout = torch.randn(case.tokens, case.hidden, generator=g, device=DEVICE)
        made["dout"] = memory.place_values(dout.to(DTYPES[dtype]), Placement((0, 1), (8, 8)))
        for name, values in routing_of(ids, case, coarse=coarse).items():
            made[name] = memory.place_values(values)
        return made

    @staticmethod
    def outputs_of(
        case: Case, dtype: str, inputs: dict[str, Placed], wanted: Iterable[str], out: str,
        turned: bool, gap: int,
    ) -> dict[str, Placed]:  # fmt: skip
        made = {}
        for name in wanted:
            if name in ("dw_up", "db_up") and case.gate != "separate":
                continue
            if name == "dweights":
                made[name] = memory.place((case.tokens, case.top_k), torch.float32, DEVICE)
                continue
            if name == "dx":
                shape: tuple[int, ...] = (case.tokens, case.hidden)
                where = Placement((0, 1), (gap, gap))
            elif name.startswith("dw"):
                shape = tuple(inputs[name[1:]].view.shape)
                where = Placement((0, 2, 1) if turned else (0, 1, 2), (gap,) * 3)
            else:
                shape = tuple(inputs["w_" + name[3:]].view.shape[:2])
                where = Placement((0, 1), (3, 0))
            made[name] = memory.place(shape, DTYPES[out], DEVICE, where)
        return made

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        return {name: self.call.placed[name].view for name in self.names}

    def run(self, *, poisons: Iterable[int] = POISONS[:1]) -> dict[str, torch.Tensor]:
        """What is planned ran, and touched nothing but the gradients, and what it overwrites; their
        values."""
        made: list[dict[str, torch.Tensor]] = []
        written = self.names if self.overwritten is None else (*self.names, "pre_activation")
        for poison in poisons:
            if self.overwritten is not None:
                self.call.placed["pre_activation"].view.copy_(self.overwritten)
            self.call.check_launch(poison, written)
            made.append({name: view.clone() for name, view in self.outputs.items()})
        for other in made[1:]:
            assert_same(other, made[0])
        return made[0]

    def check(self, *, poisons: Iterable[int] = POISONS) -> dict[str, torch.Tensor]:
        """Right, whatever the workspace held."""
        made = self.run(poisons=poisons)
        ref, plain = self.reference(torch.float64), self.reference(DTYPES[self.dtype])
        for name, gradient in made.items():
            assert_near(name, gradient, ref[name], plain[name], self.dtype)
        return made

    def reference(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """By autograd, of a loop over experts in that dtype; by name, in float64."""
        case = self.case
        given = {name: placed.view for name, placed in self.call.placed.items()}
        experts = case.experts

        def bias(name: str, rows: int) -> torch.Tensor:
            """Their gradients are there without them."""
            made = given.get(name)
            return torch.zeros(experts, rows, device=DEVICE) if made is None else made

        w = {"w_down": given["w_down"], "b_down": bias("b_down", case.hidden)}
        whole = {"w": given["w_gate_up"], "b": bias("b_gate_up", case.rows)}
        for kind, matrix in whole.items():
            if case.gate == "none":
                w[f"{kind}_up"] = matrix
            elif case.gate == "separate":
                w[f"{kind}_gate"] = matrix
                w[f"{kind}_up"] = given["w_up"] if kind == "w" else bias("b_up", case.inner)
            else:
                w[f"{kind}_gate"], w[f"{kind}_up"] = apart(matrix, case.gate)

        def leaf(values: torch.Tensor, kind: torch.dtype = dtype) -> torch.Tensor:
            return values.detach().to(kind).contiguous().clone().requires_grad_()

        leaves = {name: leaf(values) for name, values in w.items()}
        x, weights = leaf(given["x"]), leaf(given["weights"], moe_gradients.max_of(dtype))
        out = moe_gradients.layer(
            x, self.ids.cpu().numpy(), weights, leaves, activation=case.activation,
            alpha=case.alpha, limit=case.limit, up_offset=case.up_offset,
            weight_on_input=case.weight_on_input,
        )  # fmt: skip
        out.backward(given["dout"].to(dtype))

        def gradient(of: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(of).double() if of.grad is None else of.grad.double()

        made = {"dx": gradient(x), "dweights": gradient(weights)}
        made |= {f"d{kind}_down": gradient(leaves[f"{kind}_down"]) for kind in "wb"}
        for kind in "wb":
            up = gradient(leaves[f"{kind}_up"])
            if case.gate == "none":
                made[f"d{kind}_gate_up"] = up
            elif case.gate == "separate":
                made |= {f"d{kind}_gate_up": gradient(leaves[f"{kind}_gate"]), f"d{kind}_up": up}
            else:
                gate = gradient(leaves[f"{kind}_gate"])
                made[f"d{kind}_gate_up"] = stack(gate, up, case.gate)
        return made


def before(case: Case, dtype: str, inputs: dict[str, Placed], family: str | None) -> Placed:
    """What the forward saves, by the family that would compute it again; rows without a pair stay
    poisoned."""
    width = case.inner if case.gate == "none" else 2 * case.inner
    shape = (case.tokens * case.top_k, width)
    made = memory.place(shape, DTYPES[dtype], DEVICE, Placement((0, 1), (0, 16)))
    given = {
        name: placed.view
        for name, placed in inputs.items()
        if name.startswith(("w_", "b_")) or name == "x"
    }
    routing = fm.MoeRouting(None, *(inputs[n].view for n in ROUTED))
    fm.moe_forward(**given, **case.options, routing=routing, pre_activation=made.view,
                   kernel=family)  # fmt: skip
    return made


ROUTED = ("weights", "offsets", "pairs", "slots")


def assert_near(
    name: str, got: torch.Tensor, ref: torch.Tensor, plain: torch.Tensor, dtype: str
) -> None:
    def wide(values: torch.Tensor) -> np.ndarray:
        return values.double().cpu().numpy()

    moe_gradients.assert_near(name, wide(got), wide(ref), wide(plain), capi.DTYPES[dtype])


def assert_same(
    made: dict[str, torch.Tensor], want: dict[str, torch.Tensor], names: Iterable[str] | None = None
) -> None:
    """To the bit."""
    for name in made if names is None else names:
        one, other = memory.bits(made[name]), memory.bits(want[name])
        assert torch.equal(one, other), f"{name}: other bits"


# ---- grouped products ----------------------------------------------------------------------------


def product_call(
    dtype: str,
    family: str | None,
    *,
    rows: int,
    experts: int,
    columns: int = 72,
    out_columns: int = 40,
    offsets: Iterable[int] | None = None,
    counts: Iterable[int] | None = None,
    transposed: bool = False,
    turned: bool = False,
    wanted: Iterable[str] = ("dx", "dw", "dbias"),
    out: str | None = None,
    accumulate: bool = False,
    seed: int = 0,
) -> Call:
    """Without either, offsets that are even."""
    g = generator(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=g, device=DEVICE) * scale).to(DTYPES[dtype])

    counted = counts is not None
    of = (experts, rows) if counted else (rows,)
    apart = Placement((0, 1, 2), (8, 8, 8)) if counted else Placement((0, 1), (8, 8))
    if offsets is None and not counted:
        offsets = [rows * e // experts for e in range(experts + 1)]
    bounds = torch.tensor(list(counts if counts is not None else offsets or ()), device=DEVICE)
    order = (0, 2, 1) if transposed else (0, 1, 2)
    placed = {
        "dout": memory.place_values(normal(*of, out_columns), apart),
        "x": memory.place_values(normal(*of, columns), apart),
        "w": memory.place_values(
            normal(experts, out_columns, columns, scale=out_columns**-0.5),
            Placement(order, (8, 8, 8)),
        ),
        "counts" if counted else "offsets": memory.place_values(bounds.int()),
    }
    low = DTYPES[out or dtype]
    shapes = {
        "dx": ((*of, columns), apart),
        "dw": (
            (experts, out_columns, columns),
            Placement((0, 2, 1) if turned else (0, 1, 2), (8, 8, 8)),
        ),
        "dbias": ((experts, out_columns), Placement((0, 1), (3, 0))),
    }
    for name in wanted:
        shape, where = shapes[name]
        placed[name] = memory.place(shape, low, DEVICE, where)
    return Call(
        capi_moe.ProductBackwardParams, placed, accumulate=int(accumulate),
        kernel=family.encode() if family else None,
    )  # fmt: skip


def product_reference(call: Call, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """In that dtype, returned in float64."""
    given = {name: placed.view for name, placed in call.placed.items()}
    dout, x, w = (given[name].to(dtype) for name in ("dout", "x", "w"))
    counted = "counts" in given
    dx = torch.zeros_like(x)
    dw = torch.zeros(w.shape, dtype=dtype, device=DEVICE)
    dbias = torch.zeros(w.shape[:2], dtype=dtype, device=DEVICE)
    bounds = given["counts" if counted else "offsets"].tolist()
    rows = x.shape[-2]
    for e in range(len(w)):
        if counted:
            at: Any = (e, slice(0, min(max(bounds[e], 0), rows)))
        else:
            at = slice(min(bounds[e], rows), min(bounds[e + 1], rows))
        dx[at] = dout[at] @ w[e]
        dw[e] = dout[at].T @ x[at]
        dbias[e] = dout[at].sum(0)
    return {"dx": dx.double(), "dw": dw.double(), "dbias": dbias.double()}
