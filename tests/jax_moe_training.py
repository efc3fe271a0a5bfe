"""Layers of experts by operations that JAX differentiates, and the rule that ours are held to.

In float64 they are the reference, in a call's own dtype the ordinary computation. The layer is
written out here once more, from include/flashmoe/moe.h and from nothing else: every expert computes
every token.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import moe_oracle
import numpy as np

Arrays = dict[str, Any]

_FP32_SUMS = 1e-5  # of the largest value: both are of one precision and differ by the sums' order


def x64() -> Any:
    """A context in which arrays may be fp64."""
    return (jax if hasattr(jax, "enable_x64") else jax.experimental).enable_x64(True)


def _activate(z: Any, activation: str, alpha: float) -> Any:
    if activation == "silu":
        return z * jax.nn.sigmoid(alpha * z)
    if activation == "relu2":
        return jnp.where(z > 0, z, 0) ** 2
    if activation == "relu":
        return jnp.where(z > 0, z, 0)  # which at 0 has no gradient
    return jax.nn.gelu(z, approximate="tanh" in activation)


def _gate_and_up(a: Arrays, gate: str) -> tuple[Any, Any]:
    """Gate and up from rows of matrices or of biases: the last axis except the hidden one."""
    both, up = a
    if gate == "none":
        return None, both
    if gate == "separate":
        return both, up
    if gate == "interleaved":
        return both[:, 0::2], both[:, 1::2]
    half = both.shape[1] // 2
    first, second = both[:, :half], both[:, half:]
    return (first, second) if gate == "gate_up" else (second, first)


def _linear(rows: Any, w: Any, bias: Any) -> Any:
    """[E, T or one of each, columns] of rows [T, H] or [E, T, H]."""
    made = jnp.einsum("th,enh->etn" if rows.ndim == 2 else "eth,enh->etn", rows, w,
                      precision="highest")  # fmt: skip
    return made if bias is None else made + bias[:, None].astype(made.dtype)


def experts(
    a: Arrays, ids: Any, *, gate: str = "gate_up", activation: str = "silu", alpha: float = 1.0,
    limit: float | None = None, up_offset: float = 0.0, weight_on_input: bool = False,
) -> Any:  # fmt: skip
    """moe_forward's out. `a`: its tensors by name, and `weights` [T, K]."""
    x, count = a["x"], len(a["w_down"])
    chosen = jax.nn.one_hot(ids, count, axis=0, dtype=a["weights"].dtype)  # [E, T, K]
    factor = (chosen * a["weights"]).sum(-1)[..., None].astype(x.dtype)  # [E, T, 1]
    taken = chosen.sum(-1)[..., None] > 0
    rows = x * factor if weight_on_input else x
    w_gate, w_up = _gate_and_up((a["w_gate_up"], a.get("w_up")), gate)
    b_gate, b_up = None, None
    if "b_gate_up" in a:
        b_gate, b_up = _gate_and_up((a["b_gate_up"], a.get("b_up")), gate)
    u = _linear(rows, w_up, b_up)
    g = None if w_gate is None else _linear(rows, w_gate, b_gate)
    if limit is not None:
        u = jnp.where(u < -limit, -limit, jnp.where(u > limit, limit, u))
        g = None if g is None else jnp.where(g > limit, limit, g)
    if g is None:
        act = _activate(u, activation, alpha)
    else:
        act = _activate(g, activation, alpha) * (u + up_offset)
    y = _linear(act.astype(x.dtype), a["w_down"], a.get("b_down"))
    return jnp.where(taken, y if weight_on_input else y * factor, 0).sum(0).astype(x.dtype)


def weights_of(
    logits: Any, ids: Any, scoring: str = "softmax", renormalize: bool = False, scale: float = 1.0
) -> Any:
    """A routing's weights, for the experts that were chosen; fp32 or wider."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    if scoring == "softmax":
        made = jnp.take_along_axis(jax.nn.softmax(logits), ids, 1)
    else:
        chosen = jnp.take_along_axis(logits, ids, 1)
        made = jax.nn.softmax(chosen) if scoring == "topk_softmax" else jax.nn.sigmoid(chosen)
    return (made / made.sum(-1, keepdims=True) if renormalize else made) * scale


def fused(a: Arrays, ids: Any, routing: dict[str, Any], **options: Any) -> Any:
    """fused_moe's out, for the experts that were chosen. `a`: its tensors by name."""
    rows = a["tokens"].reshape(-1, a["tokens"].shape[-1])
    logits = jnp.einsum("th,jh->tj", rows, a["router_weights"], precision="highest")
    if "router_bias" in a:
        logits = (logits + a["router_bias"]).astype(rows.dtype)
    layer = {name: x for name, x in a.items() if name[:2] in ("w_", "b_")}
    layer |= {"x": rows, "weights": weights_of(logits, ids, **routing)}
    return experts(layer, ids, **options).reshape(a["tokens"].shape)


def gradients(function: Any, arrays: Arrays, dout: Any, dtype: Any) -> Arrays:
    """Gradients of function(arrays) in that dtype, as NumPy arrays in float64; weights and biases
    that are fp32 next to fewer bits stay fp32."""

    def cast(x: Any) -> Any:
        kept = dtype != np.float64 and np.asarray(x).dtype == np.float32
        return jnp.asarray(np.asarray(x).astype(np.float32 if kept else dtype))

    def pulled(given: Arrays, dout: Any) -> Any:
        _, pull = jax.vjp(function, given)
        return pull(dout)[0]

    with x64(), jax.default_device(jax.devices("cpu")[0]):
        made = jax.jit(pulled)({n: cast(x) for n, x in arrays.items()}, cast(dout))
        return {name: np.asarray(x).astype(np.float64) for name, x in made.items()}


def assert_gradients(function: Any, arrays: Arrays, dout: Any, got: Arrays) -> None:
    """The accuracy rule for each of `got`; of gradients of matrices also expert by expert."""
    dtype = np.asarray(dout).dtype
    ref = gradients(function, arrays, dout, np.float64)
    plain = gradients(function, arrays, dout, dtype)
    for name, gradient in got.items():
        assert gradient.dtype == arrays[name].dtype, name
        assert gradient.shape == arrays[name].shape, name
        low = np.asarray(gradient).astype(dtype)
        if dtype == np.float32:
            largest = np.abs(ref[name]).max(initial=0)
            np.testing.assert_allclose(low, ref[name], rtol=0, atol=_FP32_SUMS * largest)
            continue
        pieces = [(name, low, ref[name], plain[name])]
        if low.ndim == 3 and name != "tokens":
            each = zip(low, ref[name], plain[name], strict=True)
            pieces += [(f"{name}, expert {e}", *of) for e, of in enumerate(each)]
        for words, a, b, c in pieces:
            moe_oracle.assert_near(words, a, b, c, dtype)
