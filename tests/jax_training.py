"""Losses of attention on JAX arrays, and the same by operations that JAX differentiates itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flashmoe_science as fm
import jax
import jax.numpy as jnp
import numpy as np


def weights(like: Any, seed: int = 1) -> Any:
    values = np.random.default_rng(seed).standard_normal(like.shape)
    return jnp.asarray(values, like.dtype)


def attention_of(**options: Any) -> Callable[..., Any]:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return fm.flash_attention(q, k, v, return_lse=True, **options)

    return attend


def plain(q: Any, k: Any, v: Any, sinks: Any = None, causal: bool = True) -> Any:
    """(out, lse) in layout bshd by operations of JAX, which it differentiates itself."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    logits = jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest") * q.shape[-1] ** -0.5
    if causal:
        reach = jnp.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        logits = jnp.where(jnp.arange(k.shape[1]) <= reach, logits, -jnp.inf)
    seen = logits
    if sinks is not None:
        column = jnp.broadcast_to(sinks[None, :, None, None], (*logits.shape[:3], 1))
        seen = jnp.concatenate([logits, column], axis=-1)
    lse = jax.nn.logsumexp(seen, axis=-1)
    probabilities = jnp.exp(logits - lse[..., None])
    return jnp.einsum("bhij,bjhd->bihd", probabilities, v, precision="highest"), lse


def loss_of(attend: Callable[..., Any]) -> Callable[..., Any]:
    """A number of both outputs, each with random weights."""

    def loss(*inputs: Any) -> Any:
        out, lse = attend(*inputs)
        return (out * weights(out)).sum() + (lse * weights(lse, 2)).sum()

    return loss


def _mapped(f: Any) -> Any:
    return lambda *x: jax.vmap(f)(*(y[None] for y in x))[0]


def _in_layers(attend: Any) -> Any:
    def loss(q: Any, k: Any, v: Any) -> Any:
        def layer(x: Any, _: Any) -> Any:
            out, lse = attend(x, k, v)
            return jnp.tanh(out[..., : x.shape[-1]]), lse.sum()

        x, sums = jax.lax.scan(layer, q, None, length=3)
        return x.sum() + sums.sum()

    return loss


LOSSES = {
    "jit": lambda attend: jax.jit(loss_of(attend)),
    "jit of jit": lambda attend: jax.jit(loss_of(jax.jit(attend))),
    "checkpoint": lambda attend: jax.checkpoint(loss_of(attend)),
    "checkpoint of jit": lambda attend: jax.checkpoint(jax.jit(loss_of(attend))),
    "checkpoint of attention": lambda attend: loss_of(jax.checkpoint(attend)),
    "saving nothing": lambda attend: jax.checkpoint(
        loss_of(attend), policy=jax.checkpoint_policies.nothing_saveable
    ),
    "vmap": lambda attend: _mapped(loss_of(attend)),
    "scan": _in_layers,
    "scan of checkpoint": lambda attend: _in_layers(jax.checkpoint(attend)),
}
