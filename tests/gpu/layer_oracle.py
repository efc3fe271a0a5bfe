"""tests/moe_oracle.py in torch, on the device of the tensors, fast enough for large calls.

Routing is exact; products are held to max|ours - ref| <= 2 max|plain - ref| + ulp, ref float64 and
plain the same steps rounded to the inputs' dtype. tests/gpu/test_moe_oracle.py holds the two files
to each other.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import moe_oracle as on_host
import torch
from gpu.oracle import ulp

_BLOCK = 2**26  # float64 numbers of a product of one step
_ROWS_OF_WEIGHTS = 2**13  # of an expert's matrix at a time


class Routing(NamedTuple):
    ids: torch.Tensor
    weights: torch.Tensor  # float64
    offsets: torch.Tensor
    pairs: torch.Tensor
    slots: torch.Tensor
    lse: torch.Tensor | None


def sort_pairs(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    """offsets, pairs and slots for ids of which -1 is no expert."""
    flat = ids.flatten().long()
    key = torch.where(flat < 0, num_experts, flat)
    order = torch.sort(key, stable=True).indices
    counts = torch.bincount(key, minlength=num_experts + 1)[:num_experts]
    offsets = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    offsets[1:] = counts.cumsum(0)
    place = torch.arange(len(flat), device=ids.device)
    there = place < offsets[-1]
    pairs = torch.where(there, order, -1)
    slots = torch.full_like(flat, -1)
    slots[order[there]] = place[there]
    return offsets.int(), pairs.int(), slots.int().view_as(ids)


def _ordered(choice: torch.Tensor) -> torch.Tensor:
    """Indices along the last axis from the greatest down, equal ones by index, NaN as -inf."""
    clean = torch.where(choice.isnan(), -torch.inf, choice)
    return torch.sort(clean, dim=-1, descending=True, stable=True).indices


def route(
    logits: torch.Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = False,
    selection_bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int | None = None,
    scale: float = 1.0,
) -> Routing:
    z = logits.double()
    tokens, experts = z.shape
    bias = None if selection_bias is None else selection_bias.double()
    choice = z.sigmoid() + bias if scoring == "sigmoid" and bias is not None else z
    order = _ordered(choice)
    if num_groups > 1:
        sums = z.sigmoid() + (0 if bias is None else bias)
        sums = torch.where(sums.isnan(), -torch.inf, sums)
        sums = sums.view(tokens, num_groups, experts // num_groups)
        best = _ordered(sums.topk(2, -1).values.sum(-1))[:, :top_groups]
        open_ = torch.zeros(tokens, num_groups, dtype=torch.bool, device=z.device)
        open_.scatter_(1, best, True)
        inside = open_.repeat_interleave(experts // num_groups, 1).gather(1, order)
        order = order.gather(1, torch.sort((~inside).int(), dim=1, stable=True).indices)
    ids = order[:, :top_k]
    chosen = z.gather(1, ids)
    if scoring == "sigmoid":
        weights = chosen.sigmoid()
    else:
        over = z if scoring == "softmax" else chosen
        top = over.amax(1, keepdim=True)
        weights = (chosen - top).exp() / (over - top).exp().sum(1, keepdim=True)
    if renormalize:
        total = weights.sum(1, keepdim=True)
        weights = torch.where(total == 0, weights, weights / total)
    lse = torch.logsumexp(z, 1)
    return Routing(ids.int(), weights * scale, *sort_pairs(ids.int(), experts), lse)


def route_given(
    ids: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
) -> Routing:
    wide = ids.long()
    if expert_map is not None:
        known = (wide >= 0) & (wide < len(expert_map))
        mapped = torch.cat([expert_map.long(), expert_map.new_full((1,), -1).long()])
        wide = mapped[torch.where(known, wide, len(expert_map))]
    mine = (wide >= 0) & (wide < num_experts)
    made = torch.where(mine, wide, -1).int()
    given = torch.ones(ids.shape, device=ids.device) if weights is None else weights
    return Routing(made, torch.where(mine, given.double(), 0), *sort_pairs(made, num_experts), None)


def assert_routed(got: Any, want: Routing) -> None:
    for name in ("ids", "offsets", "pairs", "slots"):
        ours, ref = getattr(got, name), getattr(want, name)
        assert ours.dtype == torch.int32 and ours.shape == ref.shape, name
        if not torch.equal(ours, ref):
            at = (ours != ref).nonzero()
            first = tuple(at[0].tolist())
            raise AssertionError(
                f"{name}{list(first)} is {int(ours[first])}, the reference {int(ref[first])}; "
                f"wrong in {len(at)} of {ref.numel()} places"
            )
    pairs = [("weights", got.weights, want.weights, on_host.WEIGHT_TOLERANCE)]
    if got.lse is not None and want.lse is not None:
        pairs.append(("lse", got.lse, want.lse, on_host.LSE_TOLERANCE))
    for name, ours, ref, tolerance in pairs:
        assert ours.dtype == torch.float32 and ours.shape == ref.shape, name
        wild = ~torch.isfinite(ref)
        assert not torch.isfinite(ours[wild]).any(), f"{name}: finite where the reference is not"
        slack = tolerance if name == "lse" else 1e-37
        near = (ours.double() - ref).abs() <= tolerance * ref.abs() + slack
        assert (near | wild).all(), f"{name}: {(~(near | wild)).nonzero()[:3].tolist()}"


# ---- products ------------------------------------------------------------------------------------


class _Arithmetic(NamedTuple):
    compute: torch.dtype
    rounded: torch.dtype

    def round(self, x: torch.Tensor) -> torch.Tensor:
        if self.compute == self.rounded:
            return x
        low = x.to(self.rounded).to(self.compute)
        return torch.where(torch.isinf(low), x, low)  # fp16 ends at 65504: no error to allow for

    def product(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [n, k] times w [m, k], plus a row. Weights are widened some rows at a time."""
        parts = [x @ some.to(self.compute).T for some in w.split(_ROWS_OF_WEIGHTS)]
        out = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        return out if bias is None else out + bias.to(self.compute)


EXACT = _Arithmetic(torch.float64, torch.float64)


def activate(z: torch.Tensor, activation: str, alpha: float) -> torch.Tensor:
    if activation == "silu":
        return z * torch.sigmoid(alpha * z)
    if activation == "gelu":
        return z * 0.5 * (1 + torch.erf(z / math.sqrt(2)))
    if activation == "gelu_tanh":
        return z * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))
    positive = torch.relu(z)
    return positive if activation == "relu" else positive * positive


class Layer(NamedTuple):
    out: torch.Tensor
    pre_activation: torch.Tensor | None


def _layer(
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    routing: Any,
    a: _Arithmetic,
    *,
    w_up: torch.Tensor | None = None,
    gate: str = "gate_up",
    activation: str = "silu",
    b_gate_up: torch.Tensor | None = None,
    b_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    weight_on_input: bool = False,
    want_pre: bool = False,
) -> Layer:
    w_gate, w_other = on_host.split_rows(w_gate_up, w_up, gate)
    b_gate, b_other = (None, None)
    if b_gate_up is not None:
        b_gate, b_other = on_host.split_rows(b_gate_up, b_up, gate)
    if gate == "separate":
        b_gate, b_other = b_gate_up, b_up
    weights = routing.weights.to(a.compute)
    tokens, top_k = weights.shape
    bounds = routing.offsets.tolist()
    out = torch.zeros(tokens, top_k, x.shape[1], dtype=a.compute, device=x.device)
    flat = out.view(tokens * top_k, x.shape[1])
    width = w_other.shape[1] * (1 if w_gate is None else 2)
    pre = None
    if want_pre:
        pre = torch.full((tokens * top_k, width), torch.nan, dtype=a.compute, device=x.device)
    at_once = max(1, _BLOCK // max(width, x.shape[1]))

    def row(bias: torch.Tensor | None, e: int) -> torch.Tensor | None:
        return None if bias is None else bias[e]

    for e in range(len(w_down)):
        for begin in range(bounds[e], bounds[e + 1], at_once):
            end = min(begin + at_once, bounds[e + 1])
            of = routing.pairs[begin:end].long()
            rows = x[of // top_k].to(a.compute)
            factor = weights.flatten()[of][:, None]
            if weight_on_input:
                rows = a.round(rows * factor)
            u = a.round(a.product(rows, w_other[e], row(b_other, e)))
            g = None
            if w_gate is not None:
                g = a.round(a.product(rows, w_gate[e], row(b_gate, e)))
            if pre is not None:
                pre[begin:end] = u if g is None else torch.cat([g, u], 1)
            if limit is not None:
                u = u.clamp(-limit, limit)
                g = None if g is None else g.clamp(max=limit)
            acted = a.round(activate(u if g is None else g, activation, alpha))
            if g is not None:
                acted = a.round(acted * (u + up_offset))
            y = a.round(a.product(acted, w_down[e], row(b_down, e)))
            flat[of] = y if weight_on_input else a.round(y * factor)
    total = out[:, 0].clone()
    for k in range(1, top_k):
        total += out[:, k]
    return Layer(a.round(total), pre)


def _largest(x: torch.Tensor) -> float:
    return float(x.abs().amax()) if x.numel() else 0.0


def assert_near(name: str, got: torch.Tensor, ref: torch.Tensor, plain: torch.Tensor) -> None:
    """The accuracy rule; not finite where, and only where, the reference is not."""
    assert got.shape == ref.shape, name
    if ref.numel() == 0:
        return
    dtype = got.dtype
    ours, plain = got.double(), plain.double()
    finite = torch.isfinite(ref)
    limit = torch.finfo(dtype).max
    wrong = torch.isfinite(ours) != (finite & (ref.abs() <= limit))
    if not wrong.any():
        both = finite & torch.isfinite(plain) & (ref.abs() <= limit)
        times = 4 if ref.numel() < on_host.FEW else 2
        allowed = times * _largest((plain - ref)[both]) + ulp(dtype, _largest(ref[both]))
        wrong = finite & ((ours - ref).abs() > allowed) & (ref.abs() <= limit)
    else:
        allowed = 0.0
    if wrong.any():
        first = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}{list(first)} is {float(ours[first])!r}, the reference {float(ref[first])!r}; "
            f"wrong in {int(wrong.sum())} of {ref.numel()} places; allowed {allowed:.3g}"
        )


def assert_forward(
    out: torch.Tensor,
    x: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    routing: Any,
    *,
    pre_activation: torch.Tensor | None = None,
    **options: Any,
) -> None:
    assert out.dtype == x.dtype
    want_pre = pre_activation is not None
    ref = _layer(x, w_gate_up, w_down, routing, EXACT, **options, want_pre=want_pre)
    usual = _Arithmetic(torch.float32, x.dtype)
    plain = _layer(x, w_gate_up, w_down, routing, usual, **options, want_pre=want_pre)
    assert_near("out", out, ref.out, plain.out)
    if pre_activation is not None:
        taken = int(routing.offsets[-1])
        assert ref.pre_activation is not None and plain.pre_activation is not None
        assert_near("pre_activation", pre_activation[:taken], ref.pre_activation[:taken],
                    plain.pre_activation[:taken])  # fmt: skip


def assert_grouped_product(
    out: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    offsets: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    assert out.dtype == x.dtype
    ours, ref, plain = [], [], []
    usual = _Arithmetic(torch.float32, x.dtype)
    for e in range(len(w)):
        at: Any = (e, slice(0, int(counts[e]))) if counts is not None else (
            slice(int(offsets[e]), int(offsets[e + 1])) if offsets is not None else None
        )  # fmt: skip
        row = None if bias is None else bias[e]
        ours.append(out[at])
        ref.append(EXACT.product(x[at].double(), w[e], row))
        plain.append(usual.round(usual.product(x[at].float(), w[e], row)))
    assert_near("out", torch.cat(ours), torch.cat(ref), torch.cat(plain))
