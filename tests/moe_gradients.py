"""Gradients of the mixture of experts by torch's autograd, and the rule that ours are held to.

In float64 they are the reference, in a call's own dtype the ordinary computation: a loop over
experts, as models have it. The layer is written out here once more, from include/flashmoe/moe.h and
from nothing else, and torch differentiates it.
"""

from __future__ import annotations

from typing import Any

import moe_oracle
import numpy as np
import torch
from reference import remembering, to_numpy

ORDERS = {"float32": 8, "float16": 1, "bfloat16": 1}
"""In how many orders of its sums the ordinary computation is made, of which the error is the
largest. In fp32 all there is to an error is the order, and a gradient of an expert with few rows
has few sums: one order tells chance, by factors of 3, not how near such a computation comes."""

_FLOATS = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def tensor(values: Any, dtype: torch.dtype) -> torch.Tensor:
    """A leaf that gradients are recorded of."""
    made = torch.from_numpy(np.ascontiguousarray(to_numpy(values)))
    return made.to(dtype).requires_grad_()


def activate(z: torch.Tensor, activation: str, alpha: float) -> torch.Tensor:
    if activation == "silu":
        return z * torch.sigmoid(alpha * z)
    if activation == "relu2":
        return torch.relu(z) ** 2
    if activation == "relu":
        return torch.relu(z)
    return torch.nn.functional.gelu(z, approximate="tanh" if "tanh" in activation else "none")


def cut_above(z: torch.Tensor, limit: float) -> torch.Tensor:
    """With a gradient at the limit, whatever torch's clamp has there."""
    return torch.where(z > limit, limit, z)


def layer(
    x: torch.Tensor,
    ids: np.ndarray,
    weights: torch.Tensor,
    w: dict[str, torch.Tensor],
    *,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    weight_on_input: bool = False,
) -> torch.Tensor:
    """w: w_gate and b_gate (without a gate absent), w_up, b_up, w_down, b_down."""
    out = torch.zeros_like(x)
    experts = torch.from_numpy(ids.astype(np.int64)).to(x.device)
    for e in range(len(w["w_down"])):
        token, k = torch.where(experts == e)
        rows, factor = x[token], weights[token, k].to(x.dtype)[:, None]
        if weight_on_input:
            rows = rows * factor

        def linear(rows: torch.Tensor, name: str, e: int = e) -> torch.Tensor:
            made = rows @ w[f"w_{name}"][e].T
            bias = w.get(f"b_{name}")
            return made if bias is None else made + bias[e]

        u = linear(rows, "up")
        g = linear(rows, "gate") if "w_gate" in w else None
        if limit is not None:
            u = torch.where(u < -limit, -limit, cut_above(u, limit))
            g = None if g is None else cut_above(g, limit)
        if g is None:
            a = activate(u, activation, alpha)
        else:
            a = activate(g, activation, alpha) * (u + up_offset)
        y = linear(a, "down")
        out = out.index_add(0, token, y if weight_on_input else y * factor)
    return out


def of_layer(
    x: Any, ids: np.ndarray, weights: Any, w: dict[str, Any], dout: Any, dtype: torch.dtype,
    **options: Any,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Gradients by "x", "weights" and the names of w, in float64."""
    given = {name: tensor(values, dtype) for name, values in w.items() if values is not None}
    leaves = {"x": tensor(x, dtype), "weights": tensor(weights, max_of(dtype))} | given
    out = layer(leaves["x"], ids, leaves["weights"], given, **options)
    out.backward(tensor(dout, dtype).detach())
    return {
        name: np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.double().numpy()
        for name, leaf in leaves.items()
    }


def max_of(dtype: torch.dtype) -> torch.dtype:
    """Weights are fp32 beside tensors of fewer bits."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def reordered(
    seed: int, x: Any, ids: np.ndarray, weights: Any, w: dict[str, Any], dout: Any,
    dtype: torch.dtype, **options: Any,
) -> dict[str, np.ndarray]:  # fmt: skip
    """of_layer, with its sums over hidden states, over what experts work on, and over tokens in
    orders of their own."""
    rng = np.random.default_rng(seed)
    tokens, hidden = x.shape
    t, h, i = (rng.permutation(n) for n in (tokens, hidden, w["w_down"].shape[2]))
    axes = {"w_gate": (None, i, h), "w_up": (None, i, h), "w_down": (None, h, i),
            "b_gate": (None, i), "b_up": (None, i), "b_down": (None, h), "x": (t, h),
            "weights": (t,)}  # fmt: skip
    given = {name: turned(values, axes[name]) for name, values in w.items() if values is not None}
    rows = axes["x"]
    made = of_layer(
        turned(x, rows), ids[t], weights[t], given, turned(dout, rows), dtype, **options
    )
    return {name: turned(values, axes[name], back=True) for name, values in made.items()}


def turned(values: Any, orders: Any, back: bool = False) -> Any:
    """With each axis in an order, None being the one that it has; or back from that."""
    for axis, order in enumerate(orders):
        if order is not None:
            values = values.take(np.argsort(order) if back else order, axis)
    return values


def furthest(ref: dict[str, Any], made: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """For each number, the one of two that is further off."""

    def pick(name: str) -> Any:
        is_other = np.abs(other[name] - ref[name]) > np.abs(made[name] - ref[name])
        return np.where(is_other, other[name], made[name])

    return {name: pick(name) for name in made}


@remembering
def both(x: Any, *arguments: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The reference, and the ordinary computation in x's dtype: in several orders as far off, of
    each number, as it is at most."""
    with np.errstate(all="ignore"):
        low = _FLOATS[str(x.dtype)]
        ref = of_layer(x, *arguments, torch.float64, **options)
        plain = of_layer(x, *arguments, low, **options)
        for seed in range(1, ORDERS.get(str(x.dtype), 1)):
            plain = furthest(ref, plain, reordered(seed, x, *arguments, low, **options))
        return ref, plain


def assert_near(
    name: str, got: Any, ref: np.ndarray, plain: np.ndarray, dtype: np.dtype[Any]
) -> None:
    """The rule; of gradients of matrices also expert by expert. `dtype` is that of the inputs."""
    wide = to_numpy(got)
    if dtype == np.float64:
        dtype = got.dtype

    def check(name: str, got: np.ndarray, ref: np.ndarray, plain: np.ndarray) -> None:
        if ref.size == 0:
            return
        # As near as their own rounding, whatever the gradient's dtype; or as that of fp32 of fp64.
        moe_oracle.assert_near(name, got.astype(dtype), ref, plain, dtype, 2)

    if wide.ndim == 3:
        for e in range(len(wide)):
            check(f"{name}, expert {e}", wide[e], ref[e], plain[e])
    check(name, wide, ref, plain)
