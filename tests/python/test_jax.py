"""JAX: the XLA custom call, eager and under jit."""

from __future__ import annotations

import flashmoe_science as fm
import numpy as np
import pytest
from reference import assert_accurate

jax = pytest.importorskip("jax")
jnp = jax.numpy


@pytest.fixture
def qkv() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = ((2, 21, 4, 32), (2, 33, 2, 32), (2, 33, 2, 48))
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_under_jit(qkv: list[np.ndarray], layout: str, dtype: str) -> None:
    arrays = [x if layout == "bshd" else x.swapaxes(1, 2) for x in qkv]
    tensors = [jnp.asarray(x, dtype) for x in arrays]

    @jax.jit
    def attend(q, k, v):  # type: ignore[no-untyped-def]
        return fm.flash_attention(q, k, v, causal=True, layout=layout, return_lse=True)

    out, lse = attend(*tensors)
    assert_accurate(out, lse, *tensors, causal=True, layout=layout)
    eager = fm.flash_attention(*tensors, causal=True, layout=layout)
    np.testing.assert_array_equal(eager, out)


@pytest.mark.parametrize("window", [(3, None), (None, 2), (0, 0), (7, 5), (10**12, 1)])
def test_windows_and_softcaps_under_jit(
    qkv: list[np.ndarray], window: tuple[int | None, int | None]
) -> None:
    tensors = [jnp.asarray(x) for x in qkv]
    options = {"window": window, "softcap": 0.7}

    @jax.jit
    def attend(q, k, v):  # type: ignore[no-untyped-def]
        return fm.flash_attention(q, k, v, **options, return_lse=True)

    out, lse = attend(*tensors)
    assert_accurate(out, lse, *tensors, **options)
    eager = fm.flash_attention(*tensors, window=list(window), softcap=np.float64(0.7))
    np.testing.assert_array_equal(eager, out)


def test_a_kernel_named_under_jit(qkv: list[np.ndarray]) -> None:
    q, k, v = map(jnp.asarray, qkv)
    attend = jax.jit(lambda *x: fm.flash_attention(*x, kernel="cpu"))
    np.testing.assert_array_equal(attend(q, k, v), fm.flash_attention(q, k, v))
    unknown = jax.jit(lambda *x: fm.flash_attention(*x, kernel="sm12"))  # known when it runs
    with pytest.raises(Exception, match='kernel: got "sm12", built in are'):
        jax.block_until_ready(unknown(q, k, v))


def test_inside_a_larger_program(qkv: list[np.ndarray]) -> None:
    def program(q, k, v):  # type: ignore[no-untyped-def]
        return jnp.tanh(fm.flash_attention(q * 2, k + 1, v.astype(jnp.float32))).sum(-1)

    q, k, v = map(jnp.asarray, qkv)
    got = jax.jit(program)(q, k, v)
    expected = np.tanh(fm.flash_attention(qkv[0] * 2, qkv[1] + 1, qkv[2])).sum(-1)
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_scan_and_threads_of_xla(qkv: list[np.ndarray]) -> None:
    q, k, v = map(jnp.asarray, qkv)

    def step(carry, _):  # type: ignore[no-untyped-def]
        return fm.flash_attention(carry, k, v[..., :32]), None

    got, _ = jax.lax.scan(step, q, None, length=3)
    expected = qkv[0]
    for _ in range(3):
        expected = fm.flash_attention(expected, qkv[1], np.ascontiguousarray(qkv[2][..., :32]))
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_wrong_calls_fail_while_tracing(qkv: list[np.ndarray]) -> None:
    q, k, v = map(jnp.asarray, qkv)
    attend = jax.jit(fm.flash_attention)
    with pytest.raises(ValueError, match="k: its head dimension is 16, but q has 32"):
        attend(q, k[..., :16], v)
    with pytest.raises(ValueError, match="causal: got 'left'"):
        jax.jit(lambda *x: fm.flash_attention(*x, causal="left"))(q, k, v)


def test_arrays_cannot_be_written_to(qkv: list[np.ndarray]) -> None:
    q, k, v = map(jnp.asarray, qkv)
    with pytest.raises(ValueError, match=r"^out: JAX arrays cannot be written to; leave it None$"):
        fm.flash_attention(q, k, v, out=q)
    with pytest.raises(ValueError, match=r"^lse: JAX arrays cannot be written to; leave it None$"):
        fm.flash_attention(q, k, v, lse=q)


def test_there_is_no_derivative_yet(qkv: list[np.ndarray]) -> None:
    q, k, v = map(jnp.asarray, qkv)
    sentence = "a derivative of attention is asked for, but it has no backward pass yet"
    for function in (fm.flash_attention, jax.jit(fm.flash_attention)):
        with pytest.raises(ValueError, match=sentence):
            jax.grad(lambda q: function(q, k, v).sum())(q)  # noqa: B023
    stop = jax.lax.stop_gradient
    np.testing.assert_array_equal(
        jax.grad(lambda x: (x + fm.flash_attention(stop(q), k, v).sum()).sum())(jnp.ones(3)),
        np.ones(3),
    )


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("in_axes", [(0, 0, 0), (1, None, None), (None, 0, 2)])
def test_vmap_folds_its_axis_into_the_batch(
    layout: str, in_axes: tuple[int | None, int | None, int | None]
) -> None:
    rng = np.random.default_rng(0)
    shapes = ((2, 21, 4, 32), (2, 33, 2, 32), (2, 33, 2, 48))
    arrays = []
    for shape, axis in zip(shapes, in_axes, strict=True):
        many = rng.standard_normal((3 if axis is not None else 1, *shape), np.float32)
        many = many if layout == "bshd" else many.swapaxes(2, 3)
        arrays.append(jnp.asarray(many[0] if axis is None else np.moveaxis(many, 0, axis)))

    def attend(q, k, v):  # type: ignore[no-untyped-def]
        return fm.flash_attention(q, k, v, causal=True, layout=layout, return_lse=True)

    mapped = jax.vmap(attend, in_axes=in_axes)
    out, lse = jax.jit(mapped)(*arrays)
    for i in range(3):
        one = (x if a is None else x.take(i, a) for x, a in zip(arrays, in_axes, strict=True))
        want_out, want_lse = attend(*one)
        np.testing.assert_array_equal(out[i], want_out)
        np.testing.assert_array_equal(lse[i], want_lse)
    assert "scan" not in str(jax.make_jaxpr(mapped)(*arrays))


def test_a_foreign_use_of_the_target_is_refused(qkv: list[np.ndarray]) -> None:
    fm.flash_attention(*map(jnp.asarray, qkv))  # registers it
    call = jax.ffi.ffi_call("flashmoe_attention_forward_v1", jax.typeof(jnp.asarray(qkv[0])))
    with pytest.raises(Exception, match="call this target through flashmoe_science"):
        jax.block_until_ready(call(*map(jnp.asarray, qkv)))


def test_what_the_plan_cannot_see_fails_with_the_librarys_sentence() -> None:
    """A NaN scale that reaches the handler all the same."""
    q = jnp.zeros((1, 8, 2, 16))
    fm.flash_attention(q, q, q)
    call = jax.ffi.ffi_call("flashmoe_attention_forward_v1", jax.typeof(q))
    with pytest.raises(Exception, match="scale: got nan, accepted is a finite positive number"):
        jax.block_until_ready(
            call(
                q,
                q,
                q,
                causal=np.int32(0),
                window=np.int32(0),
                window_left=np.int64(0),
                window_right=np.int64(0),
                scale=np.float32("nan"),
                softcap=np.float32(0),
                layout=np.int32(0),
                kernel="",
            )
        )
