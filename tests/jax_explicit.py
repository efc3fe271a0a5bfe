"""Arrays sharded over an explicit mesh, whose types tell how: a program of its own, as jax_apart.

    python tests/jax_explicit.py        on four devices of the CPU

Gradients, a loop that carries caches, and vmap over a sharded axis, each eager and under jit: as of
arrays of one device, and of the arrays' own types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flashmoe_science as fm
import jax
import jax.numpy as jnp
import numpy as np
from flashmoe_science.jax import dot_product_attention, ragged_dot
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

MESH = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
FIRST, HEADS, WHOLE = P("d"), P(None, None, "d"), P()
RNG = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return jnp.asarray(RNG.standard_normal(shape, np.float32) * shape[-1] ** -0.5)


def gradient(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    """By the first `count` arrays."""

    def of(*arrays: Any) -> Any:
        def loss(*some: Any) -> Any:
            return jnp.sin(3 * function(*some, *arrays[count:])).sum()

        return jax.grad(loss, tuple(range(count)))(*arrays[:count])

    return of


def same(
    function: Callable[..., Any], arrays: list[Any], specs: list[Any], results: list[Any]
) -> None:
    """As of arrays of one device; the results are sharded like the arrays at these places."""
    want = jax.tree.leaves(function(*arrays))
    with jax.set_mesh(MESH):
        apart = [
            jax.device_put(x, NamedSharding(MESH, spec))
            for x, spec in zip(arrays, specs, strict=True)
        ]
        for call in (function, jax.jit(function)):
            got = jax.tree.leaves(call(*apart))
            for x, y, place in zip(got, want, results, strict=True):
                np.testing.assert_allclose(np.asarray(x), np.asarray(y), atol=2e-5)
                assert float(jnp.abs(y).max()) > 1e-3
                assert jax.typeof(x).sharding.spec == jax.typeof(apart[place]).sharding.spec


def main() -> None:
    q, k = normal(4, 16, 4, 16), normal(4, 16, 4, 16)
    attend = gradient(lambda q, k, v: fm.flash_attention(q, k, v, causal=True), 3)
    same(attend, [q, k, 2 * q], [FIRST, WHOLE, HEADS], [0, 1, 2])
    lengths = jnp.asarray([16, 3, 9, 0], jnp.int32)
    stock = gradient(
        lambda q, k, used: dot_product_attention(
            q, k, k, query_seq_lengths=used, key_value_seq_lengths=used
        ),
        2,
    )
    same(stock, [q, k, lengths], [FIRST, HEADS, FIRST], [0, 1])

    x, router, up, down = 4 * normal(16, 16), normal(4, 16), normal(4, 32, 16), normal(4, 16, 16)
    layer = gradient(lambda x, r, u, d: fm.fused_moe(x, r, u, d, 2), 4)
    same(layer, [x, router, up, down], [FIRST, WHOLE, FIRST, P(None, "d")], [0, 1, 2, 3])
    same(layer, [x, router, up, down], [FIRST, FIRST, WHOLE, WHOLE], [0, 1, 2, 3])
    right, sizes = normal(4, 16, 24), jnp.asarray([5, 0, 8, 3], jnp.int32)
    product = gradient(ragged_dot, 2)
    same(product, [x, right, sizes], [FIRST, HEADS, FIRST], [0, 1])
    same(product, [x, right, sizes], [P(None, "d"), FIRST, WHOLE], [0, 1])
    offsets = jnp.asarray([0, 5, 5, 13, 16], jnp.int32)
    grouped = gradient(lambda x, w, offsets: fm.grouped_product(x, w, offsets=offsets), 2)
    same(grouped, [x, right.swapaxes(1, 2), offsets], [FIRST, FIRST, WHOLE], [0, 1])

    def append(k_cache: Any, v_cache: Any, k: Any) -> Any:
        def step(caches: Any, i: Any) -> Any:
            ends = jnp.full(4, i, jnp.int32)
            return fm.kv_append(k + i, k, *caches, cache_seqlens=ends), ()

        return jax.lax.scan(step, (k_cache, v_cache), jnp.arange(3))[0]

    cache = jnp.zeros((4, 8, 4, 16))
    same(append, [cache, cache, k[:, :1]], [FIRST, HEADS, FIRST], [0, 1])

    # Folded into one call; and one after another, since offsets and weights cannot be folded.
    many = normal(4, 1, 16, 4, 16)
    same(gradient(jax.vmap(lambda q: fm.flash_attention(q, q, q)), 1), [many], [FIRST], [0])
    bounds = jnp.asarray([0, 7, 16], jnp.int32)

    def ragged(q: Any) -> Any:
        return fm.flash_attention(
            q, q, q, cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=9, max_seqlen_k=9
        )

    same(jax.vmap(ragged), [many], [FIRST], [0])
    same(gradient(jax.vmap(ragged), 1), [many], [FIRST], [0])
    same(jax.vmap(gradient(ragged, 1)), [many], [FIRST], [0])
    tokens, ups = 4 * normal(4, 16, 16), normal(4, 4, 32, 16)
    each = jax.vmap(lambda x, u: fm.fused_moe(x, router, u, down, 2))
    same(gradient(each, 2), [tokens, ups], [FIRST, FIRST], [0, 1])


if __name__ == "__main__":
    main()
