"""Gradients of the mixture of experts on JAX arrays on the GPU, and ragged_dot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flashmoe_science as fm
import numpy as np
import pytest
from gpu.jax_steps import assert_steps_repeat
from moe_cases import CASES, Case, arrays_of
from reference import DTYPES

pytestmark = pytest.mark.gpu

HALVES = pytest.mark.parametrize("dtype", ["fp16", "bf16"])


def normal(device: Any, dtype: str, *shape: int, seed: int = 0) -> Any:
    import jax

    values = np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32)
    return jax.device_put((values * np.float32(shape[-1] ** -0.5)).astype(DTYPES[dtype]), device)


def assert_equal(got: Any, want: Any) -> None:
    import jax

    jax.tree.map(np.testing.assert_array_equal, got, want)


def assert_near(got: Any, want: Any) -> None:
    """As near as roundings of halves are."""
    got, want = (np.asarray(x).astype(np.float32) for x in (got, want))
    np.testing.assert_allclose(got, want, rtol=2.0**-7, atol=2.0**-7 * np.abs(want).max())


def on_host(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(x) for name, x in arrays.items()}


def layer_arrays(case: Case, dtype: str, device: Any) -> tuple[dict[str, Any], Any]:
    """moe_forward's arrays and the routing's weights by name, and the routing. With a limit,
    numbers have so few bits that every dtype clamps the same ones."""
    import jax

    made = {}
    arrays = arrays_of(case)
    routing = arrays.pop("routing")
    for name, values in (arrays | {"weights": routing.weights}).items():
        if case.limit is not None:
            step = {"x": 1.0, "weights": 0.5}.get(name, 0.125)
            values = np.rint(values.clip(-3, 3) / step) * step
        single = name == "weights" or (name.startswith("b_") and case.bias == "fp32")
        kind = np.float32 if single else DTYPES[dtype]
        made[name] = jax.device_put(np.ascontiguousarray(values).astype(kind), device)
    parts = (None if x is None else jax.device_put(x, device) for x in routing)
    return made, fm.MoeRouting(*parts)


@HALVES
@pytest.mark.parametrize(
    "case", [*CASES, Case(tokens=300, hidden=256, inner=128, top_k=3)], ids=str
)
def test_layer(jax_gpu: Any, case: Case, dtype: str) -> None:
    import jax
    import jax_moe_training as plain

    arrays, routing = layer_arrays(case, dtype, jax_gpu)

    def layer(a: Any) -> Any:
        rest = {name: x for name, x in a.items() if name != "weights"}
        return fm.moe_forward(
            **rest, routing=routing._replace(weights=a["weights"]), **case.options
        )

    out, pull = jax.jit(lambda a: jax.vjp(layer, a))(arrays)
    dout = normal(jax_gpu, dtype, *out.shape, seed=3)
    compiled = jax.jit(pull)
    (got,) = compiled(dout)
    assert all(x.devices() == {jax_gpu} for x in got.values())
    ids = np.asarray(routing.ids)
    reference = lambda a: plain.experts(a, ids, **case.options)  # noqa: E731
    plain.assert_gradients(reference, on_host(arrays), np.asarray(dout), got)
    for _ in range(3):
        assert_equal(compiled(dout), (got,))


@HALVES
@pytest.mark.parametrize("experts", [16, 12])  # by our product, and by JAX's own
def test_fused(jax_gpu: Any, dtype: str, experts: int) -> None:
    import jax
    import jax_moe_training as plain

    a = {
        "tokens": 8 * normal(jax_gpu, dtype, 2, 100, 128),
        "router_weights": normal(jax_gpu, dtype, experts, 128),
        "w_gate_up": normal(jax_gpu, dtype, experts, 192, 128),
        "w_down": normal(jax_gpu, dtype, experts, 128, 96),
    }
    options: dict[str, Any] = {"renormalize": True, "scale": 1.5}
    layer = lambda a: fm.fused_moe(**a, top_k=3, **options)  # noqa: E731
    out, pull = jax.vjp(layer, a)
    assert_near(out, layer(a))  # by a kernel that does not write what the activation is applied to
    dout = normal(jax_gpu, dtype, *out.shape, seed=3)
    (got,) = jax.jit(pull)(dout)
    rows = a["tokens"].reshape(-1, 128)
    if experts % 8:
        logits = rows @ a["router_weights"].T
    else:
        every = jax.device_put(np.array([0, len(rows)], np.int32), jax_gpu)
        logits = fm.grouped_product(rows, a["router_weights"][None], offsets=every)
    routing = fm.moe_route(logits, 3, **options)
    ids = np.asarray(routing.ids)
    same = assert_near if experts % 8 else assert_equal  # XLA chooses products of its own
    parts = (rows, a["w_gate_up"], a["w_down"], routing)
    in_parts, _ = fm.moe_forward(*parts, return_pre_activation=True)
    same(out.reshape(in_parts.shape), in_parts)
    plain.assert_gradients(
        lambda a: plain.fused(a, ids, options), on_host(a), np.asarray(dout), got
    )
    made = fm.fused_moe_backward(dout, **a, top_k=3, **options)
    for name, gradient in got.items():
        same(getattr(made, name), gradient)
    # vmap folds its axis into the tokens, in gradients too.
    mapped = jax.vmap(layer, ({name: 0 if name == "tokens" else None for name in a},))
    folded, pull = jax.vjp(mapped, a)
    same(folded, out)
    jax.tree.map(same, jax.jit(pull)(dout), (got,))


@HALVES
@pytest.mark.parametrize("sizes", [(100, 0, 1, 189, 7), (0, 0, 297, 0, 0), (0,) * 5], ids=str)
def test_ragged_dot(jax_gpu: Any, dtype: str, sizes: tuple[int, ...]) -> None:
    """With zeros behind the last group, as JAX has it, in gradients too."""
    import jax
    import jax_moe_training as plain
    from flashmoe_science.jax import ragged_dot

    count = np.array(sizes, np.int32)
    ends = np.cumsum(count)
    row = np.arange(300)
    mine = (row >= (ends - count)[:, None]) & (row < ends[:, None])

    def reference(a: Any) -> Any:
        import jax.numpy as jnp

        every = jnp.einsum("mk,gkn->gmn", a["lhs"], a["rhs"], precision="highest")
        return jnp.where(mine[..., None], every, 0).sum(0).astype(a["lhs"].dtype)

    a = {
        "lhs": normal(jax_gpu, dtype, 300, 136), "rhs": normal(jax_gpu, dtype, 5, 136, 72),
    }  # fmt: skip
    given = jax.device_put(count, jax_gpu)
    out, pull = jax.jit(lambda a, sizes: jax.vjp(lambda a: ragged_dot(*a.values(), sizes), a))(
        a, given
    )
    dout = normal(jax_gpu, dtype, *out.shape, seed=3)
    (got,) = jax.jit(pull)(dout)
    plain.assert_gradients(reference, on_host(a), np.asarray(dout), got)
    assert not np.asarray(out[ends[-1] :]).any()
    assert not np.asarray(got["lhs"][ends[-1] :]).any()
    again = fm.grouped_product(
        a["lhs"],
        np.asarray(a["rhs"]).swapaxes(1, 2).copy(),
        offsets=np.append(0, ends).astype("i4"),
    )
    np.testing.assert_allclose(
        np.asarray(again[: ends[-1]], np.float32), np.asarray(out[: ends[-1]], np.float32),
        rtol=2.0**-7, atol=2.0**-7,
    )  # fmt: skip


def test_what_is_frozen_is_not_computed(jax_gpu: Any) -> None:
    import jax

    x, up = normal(jax_gpu, "bf16", 64, 64), normal(jax_gpu, "bf16", 8, 64, 64)
    down, router = normal(jax_gpu, "bf16", 8, 64, 32), normal(jax_gpu, "bf16", 8, 64)
    text = (
        jax.jit(jax.grad(lambda x: fm.fused_moe(x, router, up, down, 2).astype("float32").sum()))
        .lower(x)
        .as_text()
    )
    (call,) = [x for x in text.splitlines() if "custom_call @flashmoe_moe_backward" in x]
    assert 'outputs = "dx dweights workspace "' in call


def test_fp32_is_refused(jax_gpu: Any) -> None:
    import jax
    from flashmoe_science.jax import ragged_dot

    x = jax.device_put(np.ones((8, 8), np.float32), jax_gpu)
    sizes = jax.device_put(np.array([8], np.int32), jax_gpu)
    with pytest.raises(NotImplementedError, match="fp32, accepted on a GPU are fp16 and bf16"):
        ragged_dot(x, x[None], sizes)


_STEPS = """
from flashmoe_science.jax import ragged_dot

keys = jax.random.split(jax.random.key(0), 6)
x = jax.random.normal(keys[0], (4, 256, 256), jnp.bfloat16)
shapes = ((16, 256), (16, 256, 256), (16, 256, 128), (16, 256, 64))
weights = [jax.random.normal(key, s) * s[-1] ** -0.5 for key, s in zip(keys[1:], shapes)]
sizes = jnp.full(16, 60, jnp.int32)
rate = 0.2

def loss(weights, x):
    router, up, down, head = (w.astype(x.dtype) for w in weights)
    for _ in range(2):
        x = x + fm.fused_moe(x, router, up, down, 4, renormalize=True)
    out = ragged_dot(x.reshape(-1, 256), head, sizes)
    return jnp.square(out.astype(jnp.float32) - 1).mean()
"""


@pytest.mark.parametrize("graphs", [False, True])
def test_steps_of_training(jax_gpu: Any, tmp_path: Path, graphs: bool) -> None:
    assert_steps_repeat(_STEPS, tmp_path, graphs)
