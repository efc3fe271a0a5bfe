"""Layers and attention under shard_map: a program of its own, since JAX's devices are counted once.

    python tests/jax_apart.py fp32      on the first two devices of JAX's default platform

Tokens apart with the same weights, experts apart with the outputs added up, groups of ragged_dot
apart, heads apart, with sinks and without, keys apart from queries that all devices have: as
without shard_map, and nothing but the sum of outputs is exchanged; gradients likewise, where they
are computed. Then arrays that are apart without shard_map, pmap, and arrays of one device or no
device yet.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import flashmoe_science as fm
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flashmoe_science.jax import ragged_dot
from jax.sharding import PartitionSpec as P

if hasattr(jax, "shard_map"):
    from jax import shard_map
else:
    from jax.experimental.shard_map import shard_map

DEVICES = 2
EXPERTS = 8
TYPES = {"fp32": (jnp.float32, 1e-5), "bf16": (jnp.bfloat16, 2e-2), "fp16": (jnp.float16, 3e-3)}


def has_gradients(q: Any, device: Any) -> bool:
    """Whether the library computes them there."""
    batch, seq, heads, dim = q.shape
    try:
        fm.attention_backward_plan_for(
            batch=batch, seq_q=seq, heads_q=heads, dim=dim, dtype=str(q.dtype), causal=True,
            device="cpu" if device.platform == "cpu" else f"cuda:{device.id}",
        )  # fmt: skip
    except fm.UnsupportedError:
        return False
    return True


def main(dtype: str) -> None:
    kind, tolerance = TYPES[dtype]
    devices = jax.devices()[:DEVICES]
    assert len(devices) == DEVICES, devices
    mesh = jax.sharding.Mesh(np.array(devices), ("d",))
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        values = rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5
        return jnp.asarray(values).astype(kind)

    def close(got: Any, want: Any, times: int = 1) -> None:
        assert {shard.device for shard in got.addressable_shards} == set(devices)
        np.testing.assert_allclose(
            np.asarray(got, np.float64), np.asarray(want, np.float64), atol=times * tolerance
        )

    x, up, down = 6 * normal(32, 32), normal(EXPERTS, 48, 32), normal(EXPERTS, 32, 24)
    # The logits are columns of x: the same bits however many rows a matrix product has.
    router = jnp.eye(EXPERTS, 32, dtype=kind)
    want = fm.fused_moe(x, router, up, down, 2)
    assert float(jnp.abs(want).max()) > 10 * tolerance

    tokens_apart = jax.jit(
        shard_map(
            lambda x, r, u, d: fm.fused_moe(x, r, u, d, 2), mesh=mesh,
            in_specs=(P("d"), P(), P(), P()), out_specs=P("d"),
        )
    )  # fmt: skip
    close(tokens_apart(x, router, up, down), want)
    assert "all-" not in tokens_apart.lower(x, router, up, down).compile().as_text()

    def of_mine(x: Any, router: Any, up: Any, down: Any) -> Any:
        routing = fm.moe_route(x @ router.T, 2)
        share = EXPERTS // DEVICES
        mine = jax.lax.axis_index("d") * share + jnp.arange(share)
        expert_map = (
            jnp.full(EXPERTS, -1, jnp.int32).at[mine].set(jnp.arange(share, dtype=jnp.int32))
        )
        here = fm.moe_route_given(
            routing.ids, routing.weights, num_experts=share, expert_map=expert_map
        )
        return jax.lax.psum(fm.moe_forward(x, up, down, here), "d")

    experts_apart = shard_map(
        of_mine, mesh=mesh, in_specs=(P(), P(), P("d"), P("d")), out_specs=P()
    )
    close(jax.jit(experts_apart)(x, router, up, down), want)

    arrays, dout = (x, router, up, down), 3 * normal(32, 32)

    def gradients(layer: Any) -> Any:
        loss = lambda *arrays: (layer(*arrays) * dout).astype(jnp.float32).sum()  # noqa: E731
        return jax.grad(loss, (0, 1, 2, 3))(*arrays)

    undivided = gradients(lambda x, r, u, d: fm.fused_moe(x, r, u, d, 2))
    for layer in (tokens_apart, experts_apart, jax.checkpoint(experts_apart)):
        for got, whole in zip(jax.jit(gradients, static_argnums=0)(layer), undivided, strict=True):
            assert float(jnp.abs(whole).max()) > 3 * tolerance
            close(got, whole, 4)  # of sums that were rounded on each device

    rows_of = jnp.asarray([9, 0, 3, 4, 1, 5, 6, 4], jnp.int32)  # half of 32 to either device
    weights = normal(EXPERTS, 32, 48)
    groups_apart = shard_map(
        ragged_dot, mesh=mesh, in_specs=(P("d"), P("d"), P("d")), out_specs=P("d")
    )
    products = jax.jit(groups_apart)(x, weights, rows_of)
    close(products, ragged_dot(x, weights, rows_of))
    for got, whole in zip(
        *(
            jax.jit(jax.grad(lambda x, w, f=f: jnp.sin(f(x, w, rows_of)).sum(), (0, 1)))(x, weights)
            for f in (groups_apart, ragged_dot)
        ),
        strict=True,
    ):
        close(got, whole)

    q = normal(4, 9, 2, 16)
    heads_apart = shard_map(
        lambda q: fm.flash_attention(q, q, q, causal=True), mesh=mesh,
        in_specs=P(None, None, "d"), out_specs=P(None, None, "d"),
    )  # fmt: skip
    whole = fm.flash_attention(q, q, q, causal=True)
    close(jax.jit(heads_apart)(q), whole)

    # One sequence of queries to every device's keys: results differ although q does not.
    def of_one(q: Any, k: Any) -> Any:
        return fm.flash_attention(q, k, k, causal=True)

    keys_apart = functools.partial(shard_map, of_one, mesh=mesh, in_specs=(P(), P("d")))
    got = jax.jit(keys_apart(out_specs=P("d")))(q[:2], q)
    close(got, jnp.concatenate([of_one(q[:2], q[:2]), of_one(q[:2], q[2:])]))
    with pytest.raises(ValueError, match="out_specs"):
        jax.jit(keys_apart(out_specs=P())).lower(q[:2], q)

    if has_gradients(q, devices[0]):
        weights = 3 * normal(*whole.shape)

        def loss(attend: Any) -> Any:
            return lambda *arrays: (attend(*arrays) * weights).astype(jnp.float32).sum()

        undivided = jax.grad(loss(lambda q: fm.flash_attention(q, q, q, causal=True)))(q)
        for transform in (lambda f: f, jax.checkpoint):
            got = jax.jit(jax.grad(loss(transform(heads_apart))))(q)
            close(got, undivided)
        # Every device has a share of the gradient of what all of them have.
        gradients = jax.jit(jax.grad(loss(keys_apart(out_specs=P("d"))), (0, 1)))(q[:2], q)
        in_turn = loss(lambda q, k: jnp.concatenate([of_one(q, k[:2]), of_one(q, k[2:])]))
        for got, summed in zip(gradients, jax.grad(in_turn, (0, 1))(q[:2], q), strict=True):
            assert float(jnp.abs(summed).max()) > 3 * tolerance
            close(got, summed)

        # Sinks are apart with their heads; of sequences apart each device has a share of dsinks.
        sinks = jnp.asarray([0.5, -1.0], jnp.float32)

        def with_sinks(q: Any, sinks: Any) -> Any:
            return fm.flash_attention(q, q, q, causal=True, sinks=sinks)

        undivided = jax.grad(loss(with_sinks), (0, 1))(q, sinks)
        assert float(jnp.abs(undivided[1]).max()) > 3 * tolerance
        for part, of_sinks in ((P(None, None, "d"), P("d")), (P("d"), P())):
            parted = shard_map(with_sinks, mesh=mesh, in_specs=(part, of_sinks), out_specs=part)
            for transform in (lambda f: f, jax.checkpoint):
                made = jax.jit(jax.grad(loss(transform(parted)), (0, 1)))(q, sinks)
                assert made[1].dtype == jnp.float32
                for got, summed in zip(made, undivided, strict=True):
                    close(got, summed)

    # XLA gathers what it knows no way to part.
    for spec in (P("d"), P(None, None, "d"), P()):
        apart = jax.device_put(q, jax.sharding.NamedSharding(mesh, spec))
        close(fm.flash_attention(apart, apart, apart, causal=True), whole)
        close(jax.jit(fm.flash_attention)(apart, apart, apart), fm.flash_attention(q, q, q))
    apart = jax.device_put(x, jax.sharding.NamedSharding(mesh, P("d")))
    close(fm.fused_moe(apart, router, up, down, 2), want)

    halves = q.reshape(DEVICES, -1, *q.shape[1:])
    close(
        jax.pmap(lambda q: fm.flash_attention(q, q, q, causal=True), devices=devices)(halves),
        whole.reshape(DEVICES, -1, *q.shape[1:]),
    )

    # The array that was put somewhere says where.
    there = jax.device_put(q, devices[-1])
    for k in (there, np.asarray(q)):
        got = fm.flash_attention(q, there, k, causal=True)
        assert got.devices() == {devices[-1]}
        np.testing.assert_array_equal(np.asarray(got), np.asarray(whole))


if __name__ == "__main__":
    main(*sys.argv[1:])
