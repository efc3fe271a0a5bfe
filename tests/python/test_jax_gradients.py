"""JAX: gradients of attention, by custom_vjp and by flash_attention_backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flashmoe_science as fm
import numpy as np
import pytest
from reference_backward import assert_gradients_accurate

jax = pytest.importorskip("jax")
jnp = jax.numpy
export = pytest.importorskip("jax.export")

SHAPES = ((2, 21, 4, 32), (2, 33, 2, 32), (2, 33, 2, 48))
OPTIONS = [
    {},
    {"causal": True, "layout": "bhsd"},
    {"causal": "top_left", "window": (9, None), "softcap": 2.0},
    {"scale": 0.3, "window": (3, 4)},
]


def qkv(dtype: Any = "float32", layout: str = "bshd", outer: tuple[int, ...] = ()) -> list[Any]:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((*outer, *shape), np.float32) for shape in SHAPES]
    return [jnp.asarray(x if layout == "bshd" else x.swapaxes(-2, -3), dtype) for x in arrays]


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


def assert_equal(got: Any, want: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, want)


def assert_close(got: Any, want: Any, atol: float = 2e-5) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol, rtol=1e-4), got, want)


ours = attention_of(causal=True)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gradients_of_both_outputs(dtype: str, options: dict[str, Any]) -> None:
    tensors = qkv(dtype, options.get("layout", "bshd"))
    (out, lse), pull = jax.vjp(attention_of(**options), *tensors)
    dout, dlse = weights(out), weights(lse, 2)
    got = pull((dout, dlse))
    assert [x.dtype for x in got] == [x.dtype for x in tensors]
    assert_gradients_accurate(got, dout, *tensors, dlse, **options)
    assert_equal(jax.jit(pull)((dout, dlse)), got)
    functional = fm.flash_attention_backward(dout, *tensors, out, lse, dlse=dlse, **options)
    assert_equal(tuple(functional)[:3], got)
    assert_equal(jax.jit(lambda *x: jax.vjp(attention_of(**options), *x)[0])(*tensors), (out, lse))


def test_fp64() -> None:
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        tensors = [x.astype(jnp.float64) for x in qkv()]
        out, lse = ours(*tensors)
        assert (out.dtype, lse.dtype) == (jnp.float64, jnp.float64)
        for transformed in (lambda f: f, jax.jit):
            got = transformed(jax.grad(loss_of(ours), (0, 1, 2)))(*tensors)
            assert_close(got, jax.grad(loss_of(plain), (0, 1, 2))(*tensors), 1e-12)


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


@pytest.mark.parametrize("name", LOSSES)
def test_transformed(name: str) -> None:
    tensors, make = qkv(), LOSSES[name]
    want = jax.value_and_grad(make(plain), (0, 1, 2))(*tensors)
    got = jax.value_and_grad(make(ours), (0, 1, 2))(*tensors)
    assert_close(got, want, 1e-4)
    assert_equal(jax.jit(jax.value_and_grad(make(ours), (0, 1, 2)))(*tensors)[1], got[1])
    if "scan" not in name:
        assert_equal(got[1], jax.grad(loss_of(ours), (0, 1, 2))(*tensors))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(
    "in_axes", [(0, 0, 0), (1, None, None), (None, 0, 2), (-1, -5, 3), (None, None, -2)]
)
def test_vmap_of_grad(layout: str, in_axes: tuple[int | None, ...]) -> None:
    outer = qkv("float32", layout, (3,))
    arrays = [
        x[0] if axis is None else jnp.moveaxis(x, 0, axis)
        for x, axis in zip(outer, in_axes, strict=True)
    ]
    one = jax.grad(loss_of(attention_of(causal=True, layout=layout)), (0, 1, 2))
    mapped = jax.vmap(one, in_axes)
    for got in (mapped(*arrays), jax.jit(mapped)(*arrays)):
        for i in range(3):
            given = (
                x if axis is None else x.take(i, axis)
                for x, axis in zip(arrays, in_axes, strict=True)
            )
            assert_equal([x[i] for x in got], list(one(*given)))
    assert "scan" not in str(jax.make_jaxpr(mapped)(*arrays))


def test_grad_of_vmap_adds_up_what_is_shared() -> None:
    q, k, v = qkv(outer=(3,))[0], *qkv()[1:]
    one = loss_of(ours)
    loss = lambda q, k, v: jax.vmap(one, (0, None, None))(q, k, v).sum()  # noqa: E731
    got = jax.grad(loss, (0, 1, 2))(q, k, v)
    each = [jax.grad(one, (0, 1, 2))(x, k, v) for x in q]
    assert_equal(got[0], jnp.stack([x[0] for x in each]))
    assert_close(got[1:], tuple(sum(x[i] for x in each) for i in (1, 2)))


def _backward_calls(function: Any, *arrays: Any) -> list[str]:
    """Lines of the program with a backward call."""
    text = jax.jit(function).lower(*arrays).as_text()
    return [x for x in text.splitlines() if "custom_call @flashmoe_attention_backward" in x]


@pytest.mark.parametrize("jitted", [False, True])
def test_what_was_asked_for_before_does_not_matter(jitted: bool) -> None:
    """JAX keeps traces of a forward pass, whatever of it was differentiated."""
    tensors = qkv()
    transform = jax.jit if jitted else lambda f: f
    alone = jax.grad(lambda *x: ours(*x)[0].sum(), (0, 1, 2))
    want, want_alone = jax.grad(loss_of(ours), (0, 1, 2))(*tensors), alone(*tensors)
    jax.clear_caches()
    for _ in range(2):
        assert_equal(transform(alone)(*tensors), want_alone)
        for wanted in ((0,), (1, 2), (2,), (0, 1, 2), (1,), (0, 2)):
            got = transform(jax.grad(loss_of(ours), wanted))(*tensors)
            assert_equal(got, tuple(want[i] for i in wanted))


@pytest.mark.parametrize("jitted", [False, True])
def test_an_unused_lse_costs_nothing(jitted: bool) -> None:
    tensors = qkv()
    attend = jax.jit(ours) if jitted else ours
    grad = jax.grad(lambda *x: attend(*x)[0].sum(), (0, 1, 2))
    (call,) = _backward_calls(grad, *tensors)
    assert 'inputs = "q k v out lse dout "' in call
    alone = jax.grad(lambda *x: fm.flash_attention(*x, causal=True).sum(), (0, 1, 2))
    assert_equal(alone(*tensors), grad(*tensors))
    assert_close(grad(*tensors), jax.grad(lambda *x: plain(*x)[0].sum(), (0, 1, 2))(*tensors))


def test_lse_alone() -> None:
    tensors = qkv()
    got = jax.grad(lambda *x: ours(*x)[1].sum(), (0, 1, 2))(*tensors)
    assert_close(got, jax.grad(lambda *x: plain(*x)[1].sum(), (0, 1, 2))(*tensors))
    assert not np.asarray(got[2]).any()


@pytest.mark.parametrize("wanted", [(3,), (0, 1, 2, 3), (0, 3)])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_sinks(layout: str, wanted: tuple[int, ...]) -> None:
    inputs = [*qkv(), jnp.asarray([-1.0, 0.5, 3.0, -jnp.inf])]

    def attend(*inputs: Any) -> Any:
        *tensors, sinks = inputs
        tensors = [x if layout == "bshd" else x.swapaxes(1, 2) for x in tensors]
        out, lse = fm.flash_attention(
            *tensors, sinks=sinks, causal=True, layout=layout, return_lse=True
        )
        return (out if layout == "bshd" else out.swapaxes(1, 2)), lse

    want = jax.grad(loss_of(plain), wanted)(*inputs)
    got = jax.grad(loss_of(attend), wanted)(*inputs)
    assert_close(got, want, 1e-4)
    assert float(got[-1][3]) == 0
    # One after another, each with its own sinks; and shared, where each entry has a gradient.
    for axis in (0, None):
        sinks = jnp.stack([inputs[3], inputs[3] + 1]) if axis == 0 else inputs[3]
        many = [jnp.stack([x, x * 2]) for x in inputs[:3]]
        mapped = jax.vmap(jax.grad(loss_of(attend), wanted), (0, 0, 0, axis))(*many, sinks)
        assert_close([x[0] for x in mapped], list(got), 1e-4)


def test_rows_and_keys_that_see_nothing_have_zeros() -> None:
    q, k, v = qkv()
    got = jax.grad(loss_of(attention_of(causal="top_left")), (0, 1, 2))(q, k, v)
    assert not np.asarray(got[1][:, 21:]).any()
    assert not np.asarray(got[2][:, 21:]).any()
    assert np.asarray(got[2][:, :21]).any()


def test_a_sum_over_empty_batches() -> None:
    tensors = [x[:0] for x in qkv()]
    got = jax.grad(loss_of(ours), (0, 1, 2))(*tensors)
    assert [x.shape for x in got] == [x.shape for x in tensors]


# ---- what is refused ----

_FORWARD_MODE = {
    "jvp": lambda f, q: jax.jvp(f, (q,), (q,)),
    "jacfwd": lambda f, q: jax.jacfwd(f)(q),
    "jvp of jit": lambda f, q: jax.jvp(jax.jit(f), (q,), (q,)),
    "jvp of grad": lambda f, q: jax.jvp(jax.grad(f), (q,), (q,)),
    "hessian": lambda f, q: jax.hessian(f)(q),
}
_SECOND = {
    "grad of grad": lambda f, q: jax.grad(lambda q: jax.grad(f)(q).sum())(q),
    "jacrev of grad": lambda f, q: jax.jacrev(jax.grad(f))(q),
    "jit": lambda f, q: jax.jit(jax.grad(lambda q: jax.grad(jax.jit(f))(q).sum()))(q),
}


def _of_one(q: Any) -> Any:
    return fm.flash_attention(q, q, q).sum()


@pytest.mark.parametrize("name", _FORWARD_MODE)
def test_forward_mode_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=r"forward-mode .*custom_vjp"):
        _FORWARD_MODE[name](_of_one, jnp.ones((1, 8, 2, 16)))


@pytest.mark.parametrize("name", _SECOND)
def test_second_derivatives_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"^a second derivative of attention is asked for"):
        _SECOND[name](_of_one, jnp.ones((1, 8, 2, 16)))


def test_the_gradient_for_gpus_is_refused_while_it_is_compiled() -> None:
    q, k, v = qkv("bfloat16")
    out, lse = ours(q, k, v)
    traced = jax.jit(fm.flash_attention_backward).trace(out, q, k, v, out, lse)
    sentence = r"^attention backward is compiled for cuda, but has kernels for cpu alone$"
    with pytest.raises(NotImplementedError, match=sentence):
        traced.lower(lowering_platforms=("cuda",))


# ---- flash_attention_backward ----


def test_functional() -> None:
    q, k, v = qkv()
    out, lse = ours(q, k, v)
    dout = weights(out)
    every = fm.flash_attention_backward(dout, q, k, v, out, lse, causal=True)
    assert all(isinstance(x, jax.Array) for x in every[:3])
    assert every.dsinks is None
    assert_gradients_accurate(every[:3], dout, q, k, v, causal=True)
    some = jax.jit(
        lambda *x: fm.flash_attention_backward(*x, causal=True, wanted=(False, True, False, False))
    )(dout, q, k, v, out, lse)
    assert [x is None for x in some] == [True, False, True, True]
    assert_equal(some[1], every[1])
    beside = fm.flash_attention_backward(np.asarray(dout), q, k, v, out, lse, causal=True)
    assert_equal(tuple(beside), tuple(every))


def test_functional_under_vmap() -> None:
    q, k, v = qkv(outer=(3,))
    out, lse = jax.vmap(ours)(q, k, v)
    dout = weights(out)
    call = lambda *x: tuple(fm.flash_attention_backward(*x, causal=True))[:3]  # noqa: E731
    got = jax.vmap(call, (0, 0, None, 0, 0, 0))(dout, q, k[0], v, out, lse)
    for i in range(3):
        assert_equal([x[i] for x in got], list(call(dout[i], q[i], k[0], v[i], out[i], lse[i])))


def test_what_the_functional_call_refuses() -> None:
    q, k, v = qkv()
    out, lse = ours(q, k, v)
    call = lambda **given: fm.flash_attention_backward(out, q, k, v, out, lse, **given)  # noqa: E731
    with pytest.raises(ValueError, match=r"^dq: JAX arrays cannot be written to; leave it None$"):
        call(dq=q)
    with pytest.raises(ValueError, match=r"^stream: XLA chooses the stream of JAX arrays"):
        call(stream=1)
    with pytest.raises(ValueError, match=r"^accumulate: JAX arrays cannot be added to"):
        call(accumulate=True)
    with pytest.raises(ValueError, match=r"^dq: got a null tensor"):
        call(wanted=(False, False, False, False))
    with pytest.raises(ValueError, match=r"^dlse: "):
        call(dlse=lse[:, :1])
    with pytest.raises(ValueError, match=r"^lse: "):
        jax.jit(fm.flash_attention_backward)(out, q, k, v, out, lse[:, :1])


# ---- jax.export ----

_ALLOWED = [
    export.DisabledSafetyCheck.custom_call(f"flashmoe_attention_{which}_v1")
    for which in ("forward", "backward")
]


@pytest.mark.parametrize("dims", [None, "b, s"])
def test_exported_gradient(dims: str | None) -> None:
    grad = jax.grad(lambda *x: fm.flash_attention(*x, causal=True).sum(), (0, 1, 2))
    tensors, types = qkv(), qkv()
    if dims is not None:
        scope = export.SymbolicScope()
        types = [
            jax.ShapeDtypeStruct(
                export.symbolic_shape(f"b, {s}, {x.shape[2]}, {x.shape[3]}", scope=scope), x.dtype
            )
            for s, x in zip("sll", tensors, strict=True)
        ]
    made = export.export(jax.jit(grad), disabled_checks=_ALLOWED, platforms=("cpu",))(*types)
    assert_equal(made.call(*tensors), grad(*tensors))


def test_an_exported_programs_own_gradient() -> None:
    made = export.export(
        jax.jit(lambda *x: fm.flash_attention(*x, causal=True)),
        disabled_checks=_ALLOWED, platforms=("cpu",),
    )(*qkv())  # fmt: skip
    from_export = export.deserialize(made.serialize(vjp_order=1))
    got = jax.grad(lambda *x: from_export.call(*x).sum(), (0, 1, 2))(*qkv())
    want = jax.grad(lambda *x: fm.flash_attention(*x, causal=True).sum(), (0, 1, 2))(*qkv())
    assert_equal(got, want)
