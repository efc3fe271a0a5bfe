"""JAX's dot_product_attention by ours, beside its own in fp64."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np
import pytest
import reference

jax = pytest.importorskip("jax")
jnp = jax.numpy

from flashmoe_science.jax import dot_product_attention  # noqa: E402

SHAPES = ((3, 21, 4, 32), (3, 33, 2, 32), (3, 33, 2, 32))
USED_Q = np.array([21, 0, 7], np.int32)
USED_K = np.array([12, 5, 33], np.int32)
LENGTHS = {
    "none": {},
    "queries": {"query_seq_lengths": USED_Q},
    "keys": {"key_value_seq_lengths": USED_K},
    "both": {"query_seq_lengths": USED_Q, "key_value_seq_lengths": USED_K},
    "longer": {"query_seq_lengths": USED_Q + 100, "key_value_seq_lengths": USED_K + 100},
}
OPTIONS = [
    {},
    {"is_causal": True},
    {"is_causal": True, "local_window_size": (4, 2), "scale": 0.3},
    {"is_causal": True, "local_window_size": 3},
]
plain_stock = functools.partial(jax.nn.dot_product_attention, implementation="xla")


def seen_keys(lengths: dict[str, Any], options: dict[str, Any]) -> np.ndarray:
    """[batch, seq_q, seq_k]"""
    at, key = np.arange(21)[:, None], np.arange(33)
    seen = np.ones((3, 21, 33), bool)
    if options.get("is_causal"):
        seen &= key <= at
    if (window := options.get("local_window_size")) is not None:
        left, right = (window, window) if isinstance(window, int) else window
        seen &= (key >= at - left) & (key <= at + right)
    if (used := lengths.get("key_value_seq_lengths")) is not None:
        seen &= key < used[:, None, None]
    return seen


def stock(q: Any, k: Any, v: Any, **given: Any) -> Any:
    """JAX's, but for rows that see no key: those are 0, and not the mean of all values."""
    out = plain_stock(q, k, v, **given)
    return jnp.where(seen_keys(given, given).any(-1)[..., None, None], out, 0)


def arrays(dtype: str = "float32", shapes: Any = SHAPES) -> list[Any]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in shapes]


def exactly(tensors: Any, function: Any, **given: Any) -> Any:
    """`function` of the same numbers in fp64. JAX's softmax is of fp32 in any case."""
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        made = function(*(jnp.asarray(np.asarray(x, np.float64)) for x in tensors), **given)
        return jax.tree.map(np.asarray, made)


def assert_rule(got: Any, plain: Any, ref: Any, dtype: str) -> None:
    """max|ours - ref| <= 2 max|JAX's - ref| + ulp"""
    got, plain = (np.asarray(x, np.float64) for x in (got, plain))
    ulp = reference.ulp(np.dtype(jnp.dtype(dtype)), float(np.abs(ref).max()))
    bound = 2 * np.abs(plain - ref).max() + ulp
    assert np.isfinite(got).all()
    assert np.abs(got - ref).max() <= bound
    assert np.abs(ref).max() > 10 * bound


def assert_gradients(options: dict[str, Any], of_stock: dict[str, Any]) -> None:
    """JAX's error is the largest of several orders of its sums over dimensions: in fp32 all there
    is to an error is the order, and a row that sees few keys has few chances."""
    tensors = arrays()
    dout = np.cos(np.arange(np.prod(SHAPES[0]), dtype=np.float32)).reshape(SHAPES[0])

    def gradients(function: Any, given: Any, q: Any, k: Any, v: Any, dout: Any) -> Any:
        return jax.grad(lambda *x: (function(*x, **given) * dout).sum(), (0, 1, 2))(q, k, v)

    def in_order(seed: int) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        of_q, of_v = (rng.permutation(32) if seed else np.arange(32) for _ in range(2))
        orders = (of_q, of_q, of_v)
        turned = (x[..., order] for x, order in zip(tensors, orders, strict=True))
        made = gradients(stock, of_stock, *turned, dout[..., of_v])
        return [np.asarray(x)[..., np.argsort(o)] for x, o in zip(made, orders, strict=True)]

    of_ours = functools.partial(gradients, dot_product_attention, options)
    got = of_ours(*tensors, dout)
    ref = exactly(tensors, lambda *x: gradients(stock, of_stock, *x, dout))
    for ours, exact, *plain in zip(got, ref, *map(in_order, range(8)), strict=True):
        assert_rule(ours, max(plain, key=lambda x: np.abs(x - exact).max()), exact, "float32")
    jax.tree.map(np.testing.assert_array_equal, jax.jit(of_ours)(*tensors, dout), got)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_as_jax(dtype: str, lengths: dict[str, Any], options: dict[str, Any]) -> None:
    tensors = arrays(dtype)
    call = functools.partial(dot_product_attention, **options)
    got = call(*tensors, **lengths)
    assert (got.shape, got.dtype) == (SHAPES[0], tensors[0].dtype)
    ref = exactly(tensors, stock, **lengths, **options)
    assert_rule(got, stock(*tensors, **lengths, **options), ref, dtype)
    np.testing.assert_array_equal(jax.jit(call)(*tensors, **lengths), got)
    _, residual = call(*tensors, **lengths, return_residual=True)
    assert (residual.shape, residual.dtype) == (SHAPES[0][:3], tensors[0].dtype)
    used = np.minimum(lengths.get("query_seq_lengths", np.full(3, 21)), 21)
    seen = np.arange(21) < used[:, None]
    want = np.asarray(residual_of(tensors, lengths, options))
    np.testing.assert_allclose(
        np.asarray(residual, np.float32)[seen], want[seen],
        atol=1e-3, rtol=float(jnp.finfo(dtype).eps),
    )  # fmt: skip
    assert (np.asarray(residual, np.float32)[~seen] == -np.inf).all()


def residual_of(tensors: Any, lengths: Any, options: Any) -> Any:
    """The log-sum-exp, from the logits."""
    q, k, _ = (np.asarray(x, np.float64) for x in tensors)
    k = k.repeat(2, axis=2)
    logits = np.einsum("bthd,bshd->bths", q, k) * options.get("scale", 32**-0.5)
    seen = seen_keys(lengths, options)
    with np.errstate(divide="ignore"):
        return np.log(np.where(seen[:, :, None], np.exp(logits), 0).sum(-1))


@pytest.mark.parametrize("size", [(3, 5), 4, (0, 0)], ids=str)
def test_windows_to_both_sides(size: Any) -> None:
    shapes = [(2, 21, heads, 16) for heads in (4, 2, 2)]
    tensors = arrays(shapes=shapes)
    got = dot_product_attention(*tensors, local_window_size=size)
    # JAX 0.7 has windows beside a mask alone.
    given = {"local_window_size": size, "mask": np.ones((1, 1, 21, 21), bool)}
    plain, ref = plain_stock(*tensors, **given), exactly(tensors, plain_stock, **given)
    assert_rule(got, plain, ref, "float32")


@pytest.mark.parametrize("size", [(3, 5), 4, (1, 0)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_windows_stand_at_the_first_key(lengths: dict[str, Any], size: Any) -> None:
    tensors, options = arrays(), {"local_window_size": size, **lengths}
    given = options | {"mask": np.ones((1, 1, 21, 33), bool)}  # as above
    got = jax.jit(functools.partial(dot_product_attention, **options))(*tensors)
    assert_rule(got, stock(*tensors, **given), exactly(tensors, stock, **given), "float32")
    assert_gradients(options, given)


@pytest.mark.parametrize("shape", [(4, 1, 33), (21, 33), (33,), (1, 21, 1)], ids=str)
def test_first_axes_of_masks_may_be_left_out(shape: Any) -> None:
    tensors, rng = arrays(), np.random.default_rng(1)
    mask, bias = rng.random(shape) < 0.7, rng.standard_normal(shape).astype(np.float32)
    whole = (np.broadcast_to(x, (3, 4, 21, 33)) for x in (bias, mask))
    got = dot_product_attention(*tensors, bias, mask)
    np.testing.assert_array_equal(got, dot_product_attention(*tensors, *whole))
    one = dot_product_attention(*(x[0] for x in tensors), bias, mask)
    np.testing.assert_array_equal(got[0], one)


def test_without_a_batch() -> None:
    tensors = [x[0] for x in arrays()]
    options = {"is_causal": True, "key_value_seq_lengths": USED_K[:1]}
    got, residual = dot_product_attention(*tensors, **options, return_residual=True)
    batch = dot_product_attention(*(x[None] for x in tensors), **options, return_residual=True)
    np.testing.assert_array_equal(got, batch[0][0])
    np.testing.assert_array_equal(residual, batch[1][0])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_gradients_as_jax(lengths: dict[str, Any], options: dict[str, Any]) -> None:
    assert_gradients(lengths | options, lengths | options)


def test_one_program_has_all_lengths() -> None:
    tensors, traced = arrays(), []

    @jax.jit
    def attend(used_q: Any, used_k: Any) -> Any:
        traced.append(used_q)
        return dot_product_attention(
            *tensors, query_seq_lengths=used_q, key_value_seq_lengths=used_k, is_causal=True
        )

    for used in (USED_Q, USED_Q * 0, USED_Q // 2):
        want = dot_product_attention(
            *tensors, query_seq_lengths=used, key_value_seq_lengths=USED_K, is_causal=True
        )
        np.testing.assert_array_equal(attend(used, USED_K), want)
    assert len(traced) == 1


def test_a_row_without_keys_is_zero() -> None:
    none = np.zeros(3, np.int32)
    out, residual = dot_product_attention(
        *arrays(), key_value_seq_lengths=none, return_residual=True
    )
    assert (np.asarray(out) == 0).all()
    assert (np.asarray(residual) == -np.inf).all()


def test_arguments_are_those_of_jax() -> None:
    of = lambda f: {  # noqa: E731
        (x.name, x.kind, x.default) for x in inspect.signature(f).parameters.values()
    }
    assert of(jax.nn.dot_product_attention) <= of(dot_product_attention)


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ({"implementation": "cudnn"}, ValueError, "implementation: got 'cudnn', accepted is None"),
        ({"local_window_size": (4, -1), "is_causal": True}, ValueError, "local_window_size: got"),
        ({"local_window_size": (-1, 4)}, ValueError, "local_window_size: got (-1, 4), accepted ar"),
        ({"local_window_size": "4"}, ValueError, "local_window_size: got '4', accepted are a num"),
        ({"mask": np.ones((2, 33), bool)}, ValueError, "mask: got shape [2, 33], accepted is one"),
        ({"value": np.ones((3, 5, 2, 32), np.float32)}, ValueError, "value: its sequence length"),
        ({"query_seq_lengths": USED_Q[:2]}, ValueError, "query_seq_lengths: got shape [2], accept"),
        (
            {"key_value_seq_lengths": USED_K / 2},
            TypeError,
            "key_value_seq_lengths: got dtype float",
        ),
        ({"key": np.ones((33, 2, 32), np.float32)}, ValueError, "key: got 3 dimensions, accepted"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_what_is_refused(given: dict[str, Any], error: Any, sentence: str) -> None:
    tensors = dict(zip(("query", "key", "value"), arrays(), strict=True))
    with pytest.raises(error) as caught:
        dot_product_attention(**tensors | given)
    assert str(caught.value).startswith(sentence)


def test_ranks_need_no_promotion() -> None:
    q, k, v = arrays()
    with jax.numpy_rank_promotion("raise"):
        for given in (LENGTHS["queries"], LENGTHS["both"] | {"is_causal": True}):
            dot_product_attention(q, k, v, **given)
            jax.grad(lambda q, given=given: dot_product_attention(q, k, v, **given).sum())(q)


def test_rows_that_are_not_written_are_no_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """As jax.debug_nans sees them, which looks at the results of every program of its own."""
    from flashmoe_science import jax as calls

    q, k, v = arrays()
    traced = []
    original = calls.flash_attention

    def flash_attention(tensors: Any, *others: Any) -> Any:
        traced.append(isinstance(tensors["q"], jax.core.Tracer))
        return original(tensors, *others)

    monkeypatch.setattr(calls, "flash_attention", flash_attention)
    for scale in (0.2718, np.float32(0.2718), jnp.float32(0.2718)):
        dot_product_attention(q, k, v, query_seq_lengths=USED_Q, scale=scale)
    assert traced and all(traced)
    poison = [jnp.full(q.shape, jnp.nan) + 0 for _ in range(16)]  # memory to be taken again
    jax.block_until_ready(poison)
    del poison
    with jax.debug_nans(True):
        out, residual = dot_product_attention(
            q, k, v, query_seq_lengths=USED_Q, return_residual=True
        )
    assert not np.isnan(out).any() and not np.isnan(residual).any()
    with pytest.raises(TypeError, match=r"scale: got \[1\] of type list"):
        dot_product_attention(q, k, v, query_seq_lengths=USED_Q, scale=[1])  # type: ignore[arg-type]
