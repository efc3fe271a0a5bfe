"""Gradients of attention on JAX arrays on the GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flashmoe_science as fm
import numpy as np
import pytest
from gpu.jax_steps import assert_steps_repeat
from reference import DTYPES
from reference_backward import assert_gradients_accurate

pytestmark = pytest.mark.gpu

SHAPES = ((2, 130, 8, 64), (2, 257, 2, 64), (2, 257, 2, 96))
OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "layout": "bhsd"},
    {"causal": "top_left", "window": (90, None), "softcap": 2.0},
    {"scale": 0.3, "window": (30, 40)},
]
HALVES = pytest.mark.parametrize("dtype", ["fp16", "bf16"])


@pytest.fixture(autouse=True)
def _gradients_are_computed_here(jax_gpu: Any) -> None:
    try:
        fm.attention_backward_plan_for(
            batch=2, seq_q=130, seq_k=257, heads_q=8, heads_kv=2, dim=64, dim_v=96, device="cuda"
        )
    except fm.UnsupportedError as refusal:
        pytest.skip(f"gradients: {refusal}")


def qkv(device: Any, dtype: str, layout: str = "bshd", outer: tuple[int, ...] = ()) -> list[Any]:
    import jax

    rng = np.random.default_rng(0)
    arrays = (rng.standard_normal((*outer, *shape), np.float32) for shape in SHAPES)
    turned = (x if layout == "bshd" else x.swapaxes(-2, -3) for x in arrays)
    return [jax.device_put(x.astype(DTYPES[dtype]), device) for x in turned]


def assert_equal(got: Any, want: Any) -> None:
    import jax

    jax.tree.map(np.testing.assert_array_equal, got, want)


def assert_close(got: Any, want: Any) -> None:
    got, want = (np.asarray(x).astype(np.float32) for x in (got, want))
    np.testing.assert_allclose(got, want, rtol=0.02, atol=0.01 * np.abs(want).max())


@HALVES
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_of_both_outputs(jax_gpu: Any, dtype: str, options: dict[str, Any]) -> None:
    import jax
    from jax_training import attention_of, weights

    tensors = qkv(jax_gpu, dtype, options.get("layout", "bshd"))
    (out, lse), pull = jax.vjp(attention_of(**options), *tensors)
    dout, dlse = weights(out), weights(lse, 2)
    got = pull((dout, dlse))
    assert [(x.dtype, x.devices()) for x in got] == [(x.dtype, {jax_gpu}) for x in tensors]
    assert_gradients_accurate([*got, None], dout, *tensors, dlse, **options)
    compiled = jax.jit(pull)
    for _ in range(3):
        assert_equal(compiled((dout, dlse)), got)
    functional = fm.flash_attention_backward(dout, *tensors, out, lse, dlse=dlse, **options)
    assert_equal(tuple(functional)[:3], got)


@HALVES
def test_sinks(jax_gpu: Any, dtype: str) -> None:
    import jax
    from jax_training import weights

    tensors = qkv(jax_gpu, dtype)
    sinks = jax.device_put(np.linspace(-1, 2, 8, dtype=np.float32), jax_gpu)

    def attend(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return fm.flash_attention(q, k, v, causal=True, sinks=sinks)

    out, pull = jax.vjp(attend, *tensors, sinks)
    dout = weights(out)
    got = pull(dout)
    assert_gradients_accurate(got, dout, *tensors, None, sinks, causal=True)
    assert_equal(jax.jit(pull)(dout), got)


def _names() -> list[str]:
    """Without JAX there are none, and the tests of them are not there."""
    try:
        from jax_training import LOSSES
    except ImportError:
        return []
    return list(LOSSES)


@pytest.mark.parametrize("name", _names())
def test_transformed(jax_gpu: Any, name: str) -> None:
    """As JAX differentiates the same program of its own operations, in fp32 and in bf16."""
    import jax
    import jax.numpy as jnp
    from jax_training import LOSSES, attention_of, loss_of, plain

    tensors = qkv(jax_gpu, "bf16")
    tensors[2] = tensors[2][..., :64]
    ours, make = attention_of(causal=True), LOSSES[name]
    value, got = jax.value_and_grad(make(ours), (0, 1, 2))(*tensors)
    if "scan" not in name:
        assert_equal(jax.jit(jax.grad(make(ours), (0, 1, 2)))(*tensors), got)
        assert_equal(got, jax.grad(loss_of(ours), (0, 1, 2))(*tensors))
    exact = jax.grad(make(plain), (0, 1, 2))(*(x.astype(jnp.float32) for x in tensors))
    usual = jax.grad(make(plain), (0, 1, 2))(*tensors)
    assert np.isfinite(float(value))
    for x, y, want in zip(got, usual, exact, strict=True):
        error, allowed = (float(jnp.abs(a.astype(jnp.float32) - want).max()) for a in (x, y))
        assert error <= 2 * allowed + 2 * 2.0**-8 * float(jnp.abs(want).max())


@pytest.mark.parametrize("in_axes", [(0, 0, 0), (1, None, None), (None, 0, 2)], ids=str)
def test_vmap_of_grad(jax_gpu: Any, in_axes: tuple[int | None, ...]) -> None:
    import jax
    import jax.numpy as jnp
    from jax_training import attention_of, loss_of

    outer = qkv(jax_gpu, "bf16", outer=(3,))
    arrays = [
        x[0] if axis is None else jnp.moveaxis(x, 0, axis)
        for x, axis in zip(outer, in_axes, strict=True)
    ]
    one = jax.grad(loss_of(attention_of(causal=True)), (0, 1, 2))
    got = jax.jit(jax.vmap(one, in_axes))(*arrays)
    for i in range(3):
        given = [x[0] if axis is None else x[i] for x, axis in zip(outer, in_axes, strict=True)]
        # How parts of dq are added depends on how many heads there are.
        jax.tree.map(assert_close, [x[i] for x in got], list(one(*given)))


_STEPS = """
keys = jax.random.split(jax.random.key(0), 3)
x = jax.random.normal(keys[0], (4, 512, 256), jnp.bfloat16)
weights = [jax.random.normal(key, (256, n)) / 16 for key, n in zip(keys[1:], (768, 256))]
rate = 0.1

def loss(weights, x):
    for _ in range(2):
        q, k, v = jnp.split((x @ weights[0].astype(x.dtype)).reshape(4, 512, 12, 64), 3, axis=2)
        out = fm.flash_attention(q, k, v, causal=True).reshape(x.shape)
        x = x + out @ weights[1].astype(x.dtype)
    return jnp.square(x.astype(jnp.float32)).mean()
"""


@pytest.mark.parametrize("graphs", [False, True])
def test_steps_of_training(jax_gpu: Any, tmp_path: Path, graphs: bool) -> None:
    assert_steps_repeat(_STEPS, tmp_path, graphs)


def test_the_workspace_is_the_programs(jax_gpu: Any) -> None:
    import jax
    from jax_training import attention_of, loss_of

    grad = jax.jit(jax.grad(loss_of(attention_of(causal=True)), (0, 1, 2)))
    (call,) = [
        line
        for line in grad.lower(*qkv(jax_gpu, "bf16")).as_text().splitlines()
        if "custom_call @flashmoe_attention_backward" in line
    ]
    assert 'outputs = "dq dk dv workspace "' in call
