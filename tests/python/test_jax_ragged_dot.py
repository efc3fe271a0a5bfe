"""JAX: ragged_dot beside JAX's own, with its derivatives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

jax = pytest.importorskip("jax")
jnp = jax.numpy

import jax_moe_training as plain  # noqa: E402
from flashmoe_science.jax import ragged_dot  # noqa: E402

SIZES = np.array([5, 0, 9, 1], np.int32)  # of 20 rows


def normal(*shape: int, seed: int = 0, dtype: Any = "float32") -> Any:
    values = np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32)
    return jnp.asarray(values, dtype)


def factors(dtype: Any = "float32", m: int = 20, k: int = 16, n: int = 24, groups: int = 4) -> Any:
    return {"lhs": normal(m, k, dtype=dtype), "rhs": normal(groups, k, n, dtype=dtype)}


def reference(a: Any, sizes: Any) -> Any:
    """What every group would make of every row, and of it the group's own rows."""
    ends = jnp.cumsum(jnp.asarray(sizes))
    row = jnp.arange(len(a["lhs"]))
    mine = (row >= (ends - sizes)[:, None]) & (row < ends[:, None])
    every = jnp.einsum("mk,gkn->gmn", a["lhs"], a["rhs"], precision="highest")
    return jnp.where(mine[..., None], every, 0).sum(0).astype(a["lhs"].dtype)


def ours(a: Any, sizes: Any = SIZES) -> Any:
    return ragged_dot(a["lhs"], a["rhs"], sizes)


def assert_close(got: Any, want: Any, atol: float = 1e-5) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol, rtol=1e-5), got, want)


def assert_equal(got: Any, want: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sizes", [SIZES, [20, 0, 0, 0], [0, 0, 0, 0], [4, 4, 4, 8]], ids=str)
def test_with_gradients(dtype: str, sizes: Any) -> None:
    a, sizes = factors(dtype), jnp.asarray(sizes, jnp.int32)
    out, pull = jax.vjp(lambda a: ours(a, sizes), a)
    assert out.dtype == dtype
    dout = normal(*out.shape, seed=3, dtype=dtype)
    plain.assert_gradients(lambda a: reference(a, sizes), a, dout, pull(dout)[0])
    want = np.asarray(jax.lax.ragged_dot(a["lhs"], a["rhs"], sizes), np.float32)
    spacing = {"float32": 1e-6, "bfloat16": 2.0**-7, "float16": 2.0**-10}[dtype]
    np.testing.assert_allclose(np.asarray(out, np.float32), want, rtol=0, atol=spacing * 20)
    assert not np.asarray(out[int(sizes.sum()) :]).any()
    assert_equal(jax.jit(ours)(a, sizes), out)
    assert_equal(jax.jit(pull)(dout), pull(dout))


@settings(max_examples=12)
@given(data=st.data())
def test_random_shapes(data: Any) -> None:
    pick = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    sizes = jnp.asarray(data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=9)), jnp.int32)
    a = factors(m=int(sizes.sum()) + pick(0, 5), k=8 * pick(1, 4), n=8 * pick(1, 4),
                groups=len(sizes))  # fmt: skip
    out, pull = jax.vjp(lambda a: ours(a, sizes), a)
    assert_close(out, reference(a, sizes))
    dout = normal(*out.shape, seed=3)
    plain.assert_gradients(lambda a: reference(a, sizes), a, dout, pull(dout)[0])


@pytest.mark.parametrize("sizes", [[30, 30, 0, 1], [-5, 9, 3, 2], [2**31 - 1] * 4], ids=str)
def test_sizes_beyond_the_rows_reach_nothing_else(sizes: Any) -> None:
    a, sizes = factors(), jnp.asarray(sizes, jnp.int32)
    out = ours(a, sizes)
    assert out.shape == (20, 24)
    if sizes[0] == 30:  # all rows are the first group's
        assert_close(out, a["lhs"] @ a["rhs"][0])
    jax.block_until_ready(jax.grad(lambda a: ours(a, sizes).sum())(a))


TRANSFORMED: dict[str, Callable[[Any], Any]] = {
    "grad": lambda f: jax.grad(lambda a: jnp.sin(f(a)).sum()),
    "jit of grad": lambda f: jax.jit(jax.grad(lambda a: jnp.sin(f(a)).sum())),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(lambda a: jnp.sin(f(a)).sum())),
    "jvp": lambda f: lambda a: jax.jvp(f, (a,), (jax.tree.map(jnp.cos, a),))[1],
    "jvp of grad": lambda f: (
        lambda a: jax.jvp(
            jax.grad(lambda a: jnp.sin(f(a)).sum()), (a,), (jax.tree.map(jnp.cos, a),)
        )[1]
    ),
    "grad of grad": lambda f: jax.grad(
        lambda a: sum(
            (x**2).sum() for x in jax.tree.leaves(jax.grad(lambda a: jnp.sin(f(a)).sum())(a))
        )
    ),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformed(name: str) -> None:
    a, transform = factors(), TRANSFORMED[name]
    got = transform(ours)(a)
    want = transform(lambda a: reference(a, SIZES))(a)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(want))
    assert_close(got, want, 1e-5 * max(largest, 1))


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (1, 2, 0), (None, None, 0)])
def test_vmap(axes: tuple[int | None, ...]) -> None:
    """One call after another, and of gradients likewise."""
    lhs, rhs = factors().values()
    arrays = []
    for axis, x in zip(axes, (lhs, rhs, jnp.asarray(SIZES)), strict=True):
        moved = x if axis is None else jnp.stack([x, 2 * x, x // 2], axis)
        arrays.append(moved.astype(x.dtype))
    one = lambda *x: jax.value_and_grad(  # noqa: E731
        lambda *x: jnp.sin(ragged_dot(*x)).sum(), (0, 1)
    )(*x)
    got = jax.vmap(one, axes)(*arrays)
    for i in range(3):
        rows = (
            x if axis is None else x.take(i, axis) for x, axis in zip(arrays, axes, strict=True)
        )
        assert_close(jax.tree.map(lambda x: x[i], got), one(*rows))  # noqa: B023


def test_nothing_is_transposed_and_what_is_frozen_costs_nothing() -> None:
    a = factors()

    def calls(wanted: tuple[str, ...]) -> list[str]:
        def loss(given: Any) -> Any:
            return jnp.sin(ours(a | given)).sum()

        text = jax.jit(jax.grad(loss)).lower({n: a[n] for n in wanted}).as_text()
        assert "transpose" not in text
        return [
            x.partition('inputs = "')[2].partition('"')[0] + "-> "
            + x.partition('outputs = "')[2].partition('"')[0]
            for x in text.splitlines()
            if "custom_call @flashmoe" in x
        ]  # fmt: skip

    forward, by_lhs = "dout w offsets -> dx ", "dout w.T offsets -> dx "
    by_rhs = "dout x offsets -> dw "
    assert calls(("lhs",)) == [forward, by_lhs]
    assert calls(("rhs",)) == [forward, by_rhs]
    assert sorted(calls(("lhs", "rhs"))) == sorted([forward, by_lhs, by_rhs])


@pytest.mark.parametrize(
    "precision",
    [None, "highest", "float32", "bfloat16", jax.lax.Precision.HIGH, ("default", "highest")],
    ids=str,
)
def test_any_precision_is_there(precision: Any) -> None:
    a = factors()
    got = ragged_dot(a["lhs"], a["rhs"], SIZES, precision, jnp.float32)
    assert_equal(got, ours(a))


def test_numpy_arrays_and_other_integers() -> None:
    a = factors()
    got = ragged_dot(np.asarray(a["lhs"]), np.asarray(a["rhs"]), SIZES.astype(np.uint8))
    assert isinstance(got, jax.Array)
    assert_equal(got, ours(a))


def test_what_is_refused() -> None:
    lhs, rhs = factors().values()
    sizes = jnp.asarray(SIZES)

    def refused(error: type[Exception], match: str, *arrays: Any, **options: Any) -> None:
        for function in (ragged_dot, jax.jit(lambda *x: ragged_dot(*x, **options))):
            with pytest.raises(error, match=match):
                function(*arrays, **options) if function is ragged_dot else function(*arrays)

    refused(ValueError, r"^lhs: got 3 dimensions, accepted are 2", lhs[None], rhs, sizes)
    refused(ValueError, r"^rhs: got 2 dimensions, accepted are 3", lhs, rhs[0], sizes)
    refused(ValueError, r"^group_sizes: got 0 dimensions", lhs, rhs, sizes[0])
    refused(TypeError, r"^lhs: got dtype int32, accepted are fp16, bf16", sizes[None], rhs, sizes)
    refused(TypeError, r"^rhs: got dtype bfloat16, but lhs has float32", lhs,
            rhs.astype(jnp.bfloat16), sizes)  # fmt: skip
    refused(TypeError, r"^group_sizes: got dtype float32, accepted", lhs, rhs, sizes * 1.0)
    refused(ValueError, r"^rhs: its number of rows is 16, but lhs has 8", lhs[:, :8], rhs, sizes)
    refused(ValueError, r"^group_sizes: got 3 groups, but rhs has 4", lhs, rhs, sizes[:3])
    refused(ValueError, r"^rhs: got 0 groups, accepted are 1 to 1024", lhs, rhs[:0], sizes[:0])
    refused(ValueError, r"^rhs: its number of columns is 20, accepted are multiples of 8 ", lhs,
            rhs[..., :20], sizes)  # fmt: skip
    refused(ValueError, r"^lhs: its number of columns is 12, accepted are", lhs[:, :12],
            rhs[:, :12], sizes)  # fmt: skip
    refused(ValueError, r"^rhs: its number of columns is 0, accepted are", lhs, rhs[..., :0], sizes)
    refused(ValueError, r"^lhs: its number of columns is 0, accepted are", lhs[:, :0],
            rhs[:, :0], sizes)  # fmt: skip
    refused(NotImplementedError, r"^preferred_element_type: got float64, accepted are None", lhs,
            rhs, sizes, preferred_element_type=jnp.float64)  # fmt: skip
    refused(NotImplementedError, r"^group_offset: got one, accepted is None", lhs, rhs, sizes,
            group_offset=np.zeros(1, np.int32))  # fmt: skip
    for precision in (jax.lax.DotAlgorithmPreset.TF32_TF32_F32, "much", ("high", "much")):
        refused(NotImplementedError, r"^precision: got .* accepted are None and jax\.lax",
                lhs, rhs, sizes, precision=precision)  # fmt: skip
