"""A layer of experts with its router through torch's autograd, on any device, beside a loop over
experts."""

from __future__ import annotations

from typing import Any, NamedTuple

import moe_gradients
import torch


class Extents(NamedTuple):
    tokens: int
    hidden: int
    inner: int
    experts: int


def leaves(
    extents: Extents,
    dtype: torch.dtype,
    device: Any = "cpu",
    transposed: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of fused_moe, each of which has a gradient."""
    t, h, inner, e = extents
    g = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=g, device=device) * scale).to(dtype)

    def matrix(e: int, n: int, k: int) -> torch.Tensor:
        if transposed:
            return normal(e, k, n, scale=k**-0.5).transpose(1, 2)
        return normal(e, n, k, scale=k**-0.5)

    made = {
        "tokens": normal(t, h), "router_weights": normal(e, h, scale=0.2),
        "router_bias": normal(e), "w_gate_up": matrix(e, 2 * inner, h),
        "w_down": matrix(e, h, inner), "b_gate_up": normal(e, 2 * inner), "b_down": normal(e, h),
    }  # fmt: skip
    return {name: x.requires_grad_() for name, x in made.items()}


def fresh(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
            for name, x in given.items()}  # fmt: skip


def reference(
    given: dict[str, Any], dout: Any, ids: Any, scoring: str, dtype: torch.dtype
) -> dict[str, Any]:
    """Gradients by a loop over experts, for the experts that ours chose."""
    w = {name: x.detach().to(dtype).requires_grad_() for name, x in given.items()}
    logits = w["tokens"] @ w["router_weights"].T + w["router_bias"]
    wide = logits.to(moe_gradients.max_of(dtype))
    chosen = wide.gather(1, ids)
    if scoring == "softmax":
        weights = wide.softmax(-1).gather(1, ids)
    else:
        weights = chosen.softmax(-1) if scoring == "topk_softmax" else chosen.sigmoid()
    weights = weights / weights.sum(-1, keepdim=True) * 1.5
    inner = w["w_down"].shape[2]
    names = {"w_gate": w["w_gate_up"][:, :inner], "w_up": w["w_gate_up"][:, inner:],
             "b_gate": w["b_gate_up"][:, :inner], "b_up": w["b_gate_up"][:, inner:],
             "w_down": w["w_down"], "b_down": w["b_down"]}  # fmt: skip
    out = moe_gradients.layer(w["tokens"], ids.cpu().numpy(), weights, names)
    out.backward(dout.to(dtype))
    return {name: x.grad.double().cpu().numpy() for name, x in w.items()}
