"""Attention on JAX arrays on the GPU, beside jax.nn.dot_product_attention: eager, under jit and
vmap, inside larger programs, donated, exported, and refused."""

from __future__ import annotations

from typing import Any

import flashmoe_science as fm
import numpy as np
import pytest
import reference
from jax_reference import CASES, Case, assert_as_jax

pytestmark = pytest.mark.gpu

TARGET = "flashmoe_attention_forward_v1"
GROUPED = Case(heads_q=8, heads_kv=2, causal=True)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_jaxs_own(jax_gpu: Any, case: Case, dtype: str) -> None:
    import jax

    qkv = case.arrays(dtype, jax_gpu)
    eager = fm.flash_attention(*qkv, **case.ours)
    assert_as_jax(eager, *qkv, case)
    compiled = jax.jit(lambda *qkv: fm.flash_attention(*qkv, **case.ours))
    for _ in range(3):
        np.testing.assert_array_equal(compiled(*qkv), eager)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("case", [GROUPED, Case(heads_kv=1, window=(20, 5))], ids=str)
def test_the_log_sum_exp_under_jit(jax_gpu: Any, case: Case, dtype: str) -> None:
    import jax

    qkv = case.arrays(dtype, jax_gpu)
    attend = jax.jit(lambda *qkv: fm.flash_attention(*qkv, **case.ours, return_lse=True))
    out, lse = attend(*qkv)
    reference.assert_accurate(
        np.asarray(out), np.asarray(lse), *map(np.asarray, qkv), case.ours["causal"] or "none",
        window=case.window,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("in_axes", [(0, 0, 0), (1, None, None), (None, 0, 2), (-1, -5, 3)])
def test_vmap(jax_gpu: Any, in_axes: tuple[int | None, ...], dtype: str) -> None:
    import jax
    import jax.numpy as jnp

    many = GROUPED.arrays(dtype, jax_gpu, 3)
    arrays = [
        x[0] if axis is None else jnp.moveaxis(x, 0, axis)
        for x, axis in zip(many, in_axes, strict=True)
    ]
    mapped = jax.vmap(lambda *qkv: fm.flash_attention(*qkv, **GROUPED.ours), in_axes)
    for out in (mapped(*arrays), jax.jit(mapped)(*arrays)):
        for i in range(3):
            qkv = [x[0] if axis is None else x[i] for x, axis in zip(many, in_axes, strict=True)]
            assert_as_jax(out[i], *qkv, GROUPED)


def test_vmap_over_none_and_in_vmap(jax_gpu: Any) -> None:
    import jax

    attend = lambda *qkv: fm.flash_attention(*qkv, causal=True)  # noqa: E731
    none = [x[:, :0] for x in GROUPED.arrays("bf16", jax_gpu, 3, 2)]
    assert jax.jit(jax.vmap(jax.vmap(attend)))(*none).shape == none[0].shape
    nested = GROUPED.arrays("bf16", jax_gpu, 3, 2)
    out = jax.jit(jax.vmap(jax.vmap(attend), in_axes=1, out_axes=1))(*nested)
    for i, j in np.ndindex(3, 2):
        assert_as_jax(out[i, j], *(x[i, j] for x in nested), GROUPED)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_inside_a_larger_program(jax_gpu: Any, dtype: str) -> None:
    """Between products, norms and a loop: as the same program with JAX's own attention."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    heads, dim, width = 8, 64, 512

    def normal(*shape: int) -> Any:
        values = rng.standard_normal(shape, np.float32) * shape[-2] ** -0.5
        return jax.device_put(values.astype(reference.DTYPES[dtype]), jax_gpu)

    given = normal(2, 200, width) * 14, normal(width, 3 * width), normal(width, width)

    def program(attention: Any) -> Any:
        def layer(x: Any, w_qkv: Any, w_out: Any) -> Any:
            root = jnp.sqrt((x.astype(jnp.float32) ** 2).mean(-1, keepdims=True) + 1e-6)
            qkv = (x / root).astype(x.dtype) @ w_qkv
            q, k, v = jnp.split(qkv.reshape(2, 200, 3 * heads, dim), 3, axis=2)
            return x + jnp.tanh(attention(q, k, v).reshape(x.shape) @ w_out)

        def layers(x: Any, w_qkv: Any, w_out: Any) -> Any:
            return jax.lax.scan(lambda x, _: (layer(x, w_qkv, w_out), None), x, None, length=3)[0]

        return jax.jit(layers)

    jaxs = program(
        lambda *qkv: jax.nn.dot_product_attention(*qkv, is_causal=True, implementation="xla")
    )
    ours = program(lambda *qkv: fm.flash_attention(*qkv, causal="top_left"))
    with jax.default_matmul_precision("highest"):
        ref = np.asarray(jaxs(*(x.astype(jnp.float32) for x in given)))
    plain = np.asarray(jaxs(*given)).astype(np.float32)
    got = np.asarray(ours(*given))
    error = np.abs(got.astype(np.float32) - ref).max()
    allowed = 2 * np.abs(plain - ref).max() + reference.ulp(got.dtype, float(np.abs(ref).max()))
    assert error <= allowed < 0.1 * np.abs(ref).max()
    assert all((np.asarray(ours(*given)) == got).all() for _ in range(10))


def test_numpy_arrays_beside_those_of_the_gpu(jax_gpu: Any) -> None:
    import jax

    q, k, v = GROUPED.arrays("bf16", jax_gpu)
    host_k, host_v = np.asarray(k), np.asarray(v)
    attend = lambda q: fm.flash_attention(q, host_k, host_v, **GROUPED.ours)  # noqa: E731
    for out in (attend(q), jax.jit(attend)(q)):
        assert_as_jax(out, q, k, v, GROUPED)


def test_donated_arrays(jax_gpu: Any) -> None:
    import jax

    q, k, v = GROUPED.arrays("bf16", jax_gpu)
    attend = jax.jit(lambda *qkv: fm.flash_attention(*qkv, **GROUPED.ours), donate_argnums=0)
    for _ in range(3):
        given = q + 0
        out = attend(given, k, v)
        assert given.is_deleted()
        assert_as_jax(out, q, k, v, GROUPED)


# ---- what a program is compiled for ----


def test_fp32_is_refused_for_the_gpu_when_it_is_compiled_and_not_for_the_cpu(jax_gpu: Any) -> None:
    import jax

    qkv = GROUPED.arrays("fp32", jax_gpu)
    attend = jax.jit(lambda *qkv: fm.flash_attention(*qkv, **GROUPED.ours))
    sentence = "dtype fp32, accepted on a GPU are fp16 and bf16"
    with pytest.raises(NotImplementedError, match=sentence):
        attend.lower(*qkv)
    with pytest.raises(NotImplementedError, match=sentence):
        attend(*qkv)
    with pytest.raises(NotImplementedError, match=sentence):
        fm.flash_attention(*qkv)
    on_cpu = [jax.device_put(x, jax.devices("cpu")[0]) for x in qkv]
    assert_as_jax(attend(*on_cpu), *on_cpu, GROUPED)
    assert_as_jax(fm.flash_attention(*on_cpu, **GROUPED.ours), *on_cpu, GROUPED)


def test_kernels_are_looked_for_when_a_program_is_compiled(jax_gpu: Any, family: str) -> None:
    import jax

    def named(kernel: str) -> Any:
        return jax.jit(lambda *qkv: fm.flash_attention(*qkv, **GROUPED.ours, kernel=kernel))

    qkv = GROUPED.arrays("bf16", jax_gpu)
    assert_as_jax(named(family)(*qkv), *qkv, GROUPED)
    with pytest.raises(NotImplementedError, match="kernel: cannot be served: cpu"):
        named("cpu").lower(*qkv)
    with pytest.raises(ValueError, match='kernel: got "sm12", built in are'):
        named("sm12").lower(*qkv)


@pytest.mark.parametrize("symbolic", [False, True])
def test_exported(jax_gpu: Any, symbolic: bool) -> None:
    """For the GPU and the CPU, whichever it is called on."""
    import jax

    export = pytest.importorskip("jax.export")
    qkv = types = GROUPED.arrays("bf16", jax_gpu)
    if symbolic:
        scope = export.SymbolicScope()
        types = [export.symbolic_args_specs(x, "b, s, ...", scope=scope) for x in qkv]
    made = export.export(
        jax.jit(lambda *qkv: fm.flash_attention(*qkv, **GROUPED.ours)),
        platforms=("cuda", "cpu"),
        disabled_checks=[export.DisabledSafetyCheck.custom_call(TARGET)],
    )(*types)
    for case in (GROUPED, GROUPED._replace(batch=3, seq_q=77, seq_k=77))[: 1 + symbolic]:
        for device in (jax_gpu, jax.devices("cpu")[0]):
            arrays = case.arrays("bf16", device)
            assert_as_jax(jax.jit(made.call)(*arrays), *arrays, case)
