"""Biases and masks in JAX: flash_attention and dot_product_attention beside JAX's own in fp64."""

from __future__ import annotations

from typing import Any

import flashmoe_science as fm
import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from flashmoe_science.jax import dot_product_attention  # noqa: E402

BATCH, SEQ_Q, SEQ_K, HEADS = 2, 13, 21, 4
FULL = (BATCH, HEADS, SEQ_Q, SEQ_K)
ONES = [(), (0,), (1,), (0, 1), (0, 1, 2), (3,), (0, 2)]
"""Axes along which one number stands for all."""


def arrays(dtype: str = "float32") -> list[Any]:
    rng = np.random.default_rng(0)
    shapes = ((BATCH, SEQ_Q, HEADS, 16), (BATCH, SEQ_K, 2, 16), (BATCH, SEQ_K, 2, 16))
    return [jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes]


def pairs(ones: tuple[int, ...], dtype: str = "float32") -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    shape = tuple(1 if axis in ones else n for axis, n in enumerate(FULL))
    return (jnp.asarray(rng.standard_normal(shape, np.float32), dtype),
            jnp.asarray(rng.random(shape) < 0.7))  # fmt: skip


def stock(*given: Any, **options: Any) -> Any:
    """JAX's own, but for queries that see no key: 0, and not the mean of all values."""
    out = jax.nn.dot_product_attention(*given, **options, implementation="xla")
    seen = jnp.ones(FULL, bool) if options.get("mask") is None else options["mask"]
    if options.get("is_causal"):
        seen = seen & (jnp.arange(SEQ_K) <= jnp.arange(SEQ_Q)[:, None])
    blind = ~jnp.broadcast_to(seen, FULL).any(-1)
    return jnp.where(jnp.swapaxes(blind, 1, 2)[..., None], 0, out)


@pytest.mark.parametrize("ones", ONES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_beside_jaxs_own(ones: tuple[int, ...], is_causal: bool) -> None:
    bias, mask = pairs(ones)
    for given in ({"bias": bias}, {"mask": mask}, {"bias": bias, "mask": mask}):
        given = given | {"is_causal": is_causal, "scale": 0.3}
        got = jax.jit(lambda *x, given=given: dot_product_attention(*x, **given))(*arrays())
        np.testing.assert_allclose(got, stock(*arrays(), **given), atol=2e-6)


@pytest.mark.parametrize("of", ["float32", "bfloat16"])
def test_bf16(of: str) -> None:
    bias, mask = pairs((1,), of)
    got = dot_product_attention(*arrays("bfloat16"), bias=bias, mask=mask)
    assert got.dtype == jnp.bfloat16
    wide = [x.astype(jnp.float32) for x in arrays("bfloat16")]
    want = stock(*wide, bias=bias.astype(jnp.float32), mask=mask)
    np.testing.assert_allclose(got.astype(jnp.float32), want, atol=2e-2)


def test_without_a_batch() -> None:
    q, k, v = (x[0] for x in arrays())
    bias, mask = (x[0] for x in pairs((0,)))
    got = dot_product_attention(q, k, v, bias=bias, mask=mask)
    want = dot_product_attention(q[None], k[None], v[None], bias=bias[None], mask=mask[None])
    np.testing.assert_array_equal(got, want[0])


@pytest.mark.parametrize("jit", [False, True])
def test_gradients(jit: bool) -> None:
    bias, mask = pairs((1,))
    mask = mask.at[..., 0].set(True)

    def loss(function: Any) -> Any:
        return lambda *x: jnp.sum(jnp.square(function(*x, bias=bias, mask=mask)))

    def gradients(function: Any) -> Any:
        made = jax.grad(loss(function), (0, 1, 2))
        return (jax.jit(made) if jit else made)(*arrays())

    for got, want in zip(gradients(dot_product_attention), gradients(stock), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("jit", [False, True])
def test_no_gradient_of_a_bias(jit: bool) -> None:
    bias, _ = pairs((0,))

    def loss(bias: Any, q: Any) -> Any:
        return jnp.sum(dot_product_attention(q, *arrays()[1:], bias=bias))

    def direct(bias: Any, q: Any) -> Any:
        return jnp.sum(fm.flash_attention(q, *arrays()[1:], attn_bias=bias))

    for function, name in ((loss, "bias"), (direct, "attn_bias")):
        of_q = jax.grad(function, 1)
        (jax.jit(of_q) if jit else of_q)(bias, arrays()[0])  # which is served, before and after
        of_bias = jax.grad(function)
        with pytest.raises(fm.UnsupportedError, match=f"^{name}: got one that is differentiated"):
            (jax.jit(of_bias) if jit else of_bias)(bias, arrays()[0])
        (jax.jit(of_q) if jit else of_q)(bias, arrays()[0])
        jax.grad(lambda b, q, f=function: f(jax.lax.stop_gradient(b), q), 1)(bias, arrays()[0])


@pytest.mark.parametrize("ones", ONES, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_beside_lengths(ones: tuple[int, ...], is_causal: bool) -> None:
    bias, mask = pairs(ones)
    q, k, v = arrays()
    used_q, used_k = jnp.asarray([9, 13], "int32"), jnp.asarray([21, 6], "int32")
    for lengths in ({"query_seq_lengths": used_q}, {"key_value_seq_lengths": used_k},
                    {"query_seq_lengths": used_q, "key_value_seq_lengths": used_k}):  # fmt: skip
        given = {"bias": bias, "mask": mask, "is_causal": is_causal} | lengths
        got = jax.jit(lambda *x, given=given: dot_product_attention(*x, **given))(q, k, v)
        rows = jnp.arange(SEQ_Q) < lengths.get("query_seq_lengths", jnp.full(2, 13))[:, None]
        keys = jnp.arange(SEQ_K) < lengths.get("key_value_seq_lengths", jnp.full(2, 21))[:, None]
        seen = mask & keys[:, None, None] & rows[:, None, :, None]
        want = stock(q, k, v, bias=bias, mask=seen, is_causal=is_causal)
        np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.parametrize("jit", [False, True])
def test_gradients_beside_lengths(jit: bool) -> None:
    bias, mask = pairs((1,))
    mask = mask.at[..., 0].set(True)
    used = jnp.asarray([SEQ_K, 6], "int32")
    seen = mask & (jnp.arange(SEQ_K) < used[:, None])[:, None, None]
    ours = {"bias": bias, "mask": mask, "key_value_seq_lengths": used}

    def gradients(function: Any, given: dict[str, Any]) -> Any:
        made = jax.grad(lambda *x: jnp.sum(jnp.square(function(*x, **given))), (0, 1, 2))
        return (jax.jit(made) if jit else made)(*arrays())

    want = gradients(stock, {"bias": bias, "mask": seen})
    for got, one in zip(gradients(dot_product_attention, ours), want, strict=True):
        np.testing.assert_allclose(got, one, atol=1e-4)


def test_vmap_beside_lengths() -> None:
    q, k, v = (jnp.stack([x, 2 * x, -x]) for x in arrays())
    _, mask = pairs((1,))
    used = jnp.asarray([[3, 21], [21, 0], [7, 8]], "int32")

    def attend(q: Any, k: Any, v: Any, used: Any) -> Any:
        return dot_product_attention(q, k, v, mask=mask, key_value_seq_lengths=used)

    got = jax.vmap(attend)(q, k, v, used)
    for i in range(3):
        np.testing.assert_array_equal(got[i], attend(q[i], k[i], v[i], used[i]))


@pytest.mark.parametrize("with_mask", [False, True])
def test_vmap(with_mask: bool) -> None:
    q, k, v = (jnp.stack([x, 2 * x, -x]) for x in arrays())
    _, mask = pairs((1,))
    masks = jnp.stack([mask, ~mask, mask]) if with_mask else mask
    call = jax.vmap(
        lambda q, k, v, m: dot_product_attention(q, k, v, mask=m),
        in_axes=(0, 0, 0, 0 if with_mask else None),
    )
    got = call(q, k, v, masks)
    for i in range(3):
        one = dot_product_attention(q[i], k[i], v[i], mask=masks[i] if with_mask else mask)
        np.testing.assert_allclose(got[i], one, atol=1e-6)


def test_uint8_mask_and_lse() -> None:
    _, mask = pairs(())
    mask = mask.at[0, :, 0].set(False)
    out, lse = fm.flash_attention(*arrays(), attn_mask=mask.astype(jnp.uint8), return_lse=True)
    assert (out[0, 0] == 0).all() and np.isneginf(lse[0, :, 0]).all()
    np.testing.assert_array_equal(out, fm.flash_attention(*arrays(), attn_mask=mask))


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ({"mask": np.ones((1, 1, 13, 20), bool)}, fm.InvalidArgumentError,
         r"mask: got shape \[1, 1, 13, 20\], accepted is one that broadcasts to \[2, 4, 13, 21\]"),
        ({"bias": np.ones((1, 1, 1, 13, 21), np.float32)}, fm.InvalidArgumentError,
         r"bias: got shape \[1, 1, 1, 13, 21\], accepted is one that broadcasts to"),
        ({"mask": np.ones((1, 1, 1, 1), np.int32)}, fm.ArgumentTypeError,
         "mask: got dtype int32, accepted is bool"),
        ({"mask": np.ones((1, 1, 13, 4), bool),
          "key_value_seq_lengths": np.array([3, 4], np.int32)},
         fm.InvalidArgumentError, r"mask: got shape \[1, 1, 13, 4\], accepted is one that"),
    ],
    ids=["shape", "rank", "dtype", "lengths"],
)  # fmt: skip
def test_errors(given: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=f"^{sentence}"):
        dot_product_attention(*arrays(), **given)
