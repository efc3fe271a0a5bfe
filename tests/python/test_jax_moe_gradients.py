"""JAX: gradients of the mixture of experts, held to plain JAX in float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import flashmoe_science as fm
import numpy as np
import producers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_cases import CASES, Case, make

jax = pytest.importorskip("jax")
jnp = jax.numpy
export = pytest.importorskip("jax.export")

import jax_moe_training as plain  # noqa: E402
from flashmoe_science import _jax_moe  # noqa: E402

T, H, INNER, E, K = 45, 32, 24, 8, 3
JAX = next((p for p in producers.ON_CPU if p.name == "jax"), None)
LAYER = ("x", "w_gate_up", "w_up", "w_down", "b_gate_up", "b_up", "b_down", "weights")


def assert_equal(got: Any, want: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, got, want)


def assert_close(got: Any, want: Any, atol: float = 2e-5) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol, rtol=1e-4), got, want)


def normal(*shape: int, seed: int = 0, dtype: Any = "float32") -> Any:
    values = np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32)
    return jnp.asarray(values * np.float32(shape[-1] ** -0.5 if len(shape) > 1 else 1), dtype)


def leaves(dtype: Any = "float32", *, tokens: tuple[int, ...] = (T,), experts: int = E) -> Any:
    return {
        "tokens": 4 * normal(*tokens, H, dtype=dtype),
        "router_weights": normal(experts, H, dtype=dtype),
        "router_bias": normal(experts, dtype=dtype),
        "w_gate_up": normal(experts, 2 * INNER, H, dtype=dtype),
        "w_down": normal(experts, H, INNER, dtype=dtype),
        "b_gate_up": normal(experts, 2 * INNER, dtype=dtype),
        "b_down": normal(experts, H, dtype=dtype),
    }


def call(a: Any, top_k: int = K, **options: Any) -> Any:
    return fm.fused_moe(**a, top_k=top_k, **options)


def loss(a: Any, **options: Any) -> Any:
    out = call(a, **options)
    return (out * normal(*out.shape, seed=9)).sum()


def text_of(function: Any, *arrays: Any) -> str:
    text: str = jax.jit(function).lower(*arrays).as_text()
    return text


def outputs_of(text: str, operation: str) -> list[str]:
    """The outputs of each call of that operation in a program."""
    lines = [x for x in text.splitlines() if f"custom_call @flashmoe_{operation}_v1" in x]
    return [x.partition('outputs = "')[2].partition('"')[0] for x in lines]


# ---- accuracy ----


def coarse(arrays: dict[str, Any]) -> dict[str, Any]:
    """The same of so few bits that what a limit cuts is so in any dtype."""
    made = {}
    for name, x in arrays.items():
        step = {"x": 1.0, "weights": 0.5}.get(name, 0.125)
        made[name] = (jnp.rint(x.astype(jnp.float32).clip(-3, 3) / step) * step).astype(x.dtype)
    return made


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for case in CASES for dtype in ("fp32", "bf16")] + [(CASES[0], "fp16")],
    ids=str,
)
def test_layer(case: Case, dtype: str) -> None:
    assert JAX is not None
    arguments = make(case, JAX, dtype)
    routing = arguments.pop("routing")
    arrays = arguments | {"weights": routing.weights}
    if case.limit is not None:
        arrays = coarse(arrays)
        arguments = {name: arrays[name] for name in arguments}
        routing = routing._replace(weights=arrays["weights"])

    def layer(a: Any) -> Any:
        rest = {name: x for name, x in a.items() if name != "weights"}
        return fm.moe_forward(
            **rest, routing=routing._replace(weights=a["weights"]), **case.options
        )

    out, pull = jax.vjp(layer, arrays)
    dout = normal(*out.shape, seed=3, dtype=out.dtype)
    (got,) = pull(dout)
    assert_equal(out, layer(arrays))
    reference = lambda a: plain.experts(a, routing.ids, **case.options)  # noqa: E731
    plain.assert_gradients(reference, arrays, dout, got)
    assert_equal(jax.jit(pull)(dout), (got,))
    functional = fm.moe_backward(
        dout, **arguments, routing=routing, **case.options,
        wanted=[name in arrays for name in LAYER],
    )  # fmt: skip
    for name, gradient in got.items():
        np.testing.assert_array_equal(getattr(functional, name), gradient)


@pytest.mark.parametrize(
    ("dtype", "scoring", "experts"),  # experts by our product, and by JAX's own
    [("float32", "softmax", 8), ("bfloat16", "softmax", 6), ("float16", "topk_softmax", 8),
     ("bfloat16", "sigmoid", 8), ("float32", "sigmoid", 6)],
)  # fmt: skip
def test_fused(dtype: str, scoring: str, experts: int) -> None:
    a = leaves(dtype, tokens=(3, 15), experts=experts)
    options: dict[str, Any] = {"scoring": scoring, "renormalize": True, "scale": 1.5}
    layer = lambda a: call(a, **options)  # noqa: E731
    out, pull = jax.vjp(layer, a)
    assert_equal(out, layer(a))
    dout = normal(*out.shape, seed=3, dtype=dtype)
    (got,) = jax.jit(pull)(dout)
    rows = a["tokens"].reshape(-1, H)
    if experts % 8:
        logits = rows @ a["router_weights"].T + a["router_bias"]
    else:
        every = jnp.asarray([0, len(rows)], jnp.int32)
        router, bias = a["router_weights"][None], a["router_bias"][None]
        logits = fm.grouped_product(rows, router, offsets=every, bias=bias)
    ids = fm.moe_route(logits, K, **options).ids
    plain.assert_gradients(lambda a: plain.fused(a, ids, options), a, dout, got)
    made = fm.fused_moe_backward(dout, **a, top_k=K, **options)
    for name, gradient in got.items():
        np.testing.assert_array_equal(getattr(made, name), gradient)
    assert made.logits is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [{}, {"renormalize": True, "scale": 2.5}, {"scoring": "topk_softmax"},
     {"scoring": "sigmoid", "renormalize": True}],
    ids=str,
)  # fmt: skip
def test_routing(dtype: str, options: dict[str, Any]) -> None:
    """Through the weights, and through the log-sum-exp of an auxiliary loss."""
    logits = 3 * normal(T, E, dtype=dtype)
    ids = fm.moe_route(logits, K, **options).ids

    def ours(a: Any) -> Any:
        made = fm.moe_route(a["logits"], K, return_lse=True, **options)
        return jnp.concatenate([made.weights, made.lse[:, None]], 1).astype(dtype)

    def reference(a: Any) -> Any:
        wide = a["logits"].astype(jnp.promote_types(a["logits"].dtype, jnp.float32))
        lse = jax.nn.logsumexp(wide, -1, keepdims=True)
        weights = plain.weights_of(a["logits"], ids, **options)
        return jnp.concatenate([weights, lse], 1).astype(a["logits"].dtype)

    out, pull = jax.vjp(ours, {"logits": logits})
    dout = normal(*out.shape, seed=3, dtype=dtype)
    (got,) = pull(dout)
    plain.assert_gradients(reference, {"logits": logits}, dout, got)
    for column in (slice(K), -1):  # one of the two alone
        part = jax.grad(lambda a, column=column: ours(a)[:, column].sum())({"logits": logits})
        want = jax.grad(lambda a, column=column: reference(a)[:, column].sum())({"logits": logits})
        if dtype == "float32":
            assert_close(part, want)


def test_weights_that_are_given() -> None:
    weights = jnp.asarray(np.random.default_rng(0).random((T, K), np.float32))
    ids = np.random.default_rng(1).integers(-1, E, (T, K)).astype(np.int32)
    factor = normal(T, K, seed=2)

    def ours(weights: Any) -> Any:
        made = fm.moe_route_given(ids, weights, num_experts=E, renormalize=True, scale=2.0)
        return (made.weights * factor).sum()

    def reference(weights: Any) -> Any:
        made = weights / weights.sum(-1, keepdims=True) * 2.0 * (ids >= 0)
        return (made * factor).sum()

    assert_close(jax.jit(jax.grad(ours))(weights), jax.grad(reference)(weights))


def test_a_selection_bias_decides_and_has_no_gradient() -> None:
    logits, bias = normal(T, E), normal(E)
    routed = lambda z, b: fm.moe_route(  # noqa: E731
        z, K, scoring="sigmoid", selection_bias=b
    ).weights.sum()
    got = jax.grad(routed, (0, 1))(logits, bias)
    assert np.asarray(got[0]).any()
    assert not np.asarray(got[1]).any()


# ---- products ----


def product(counted: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    bounds = {"counts": [3, 0, 7]} if counted else {"offsets": [1, 4, 4, 11]}
    rows = (3, 7) if counted else (12,)
    arrays = {
        "x": normal(*rows, 24), "w": normal(3, 16, 24), "bias": normal(3, 16),
    }  # fmt: skip
    return arrays, {name: jnp.asarray(x, jnp.int32) for name, x in bounds.items()}


def plain_product(a: Any, bounds: Any) -> Any:
    """With zeros in the rows of no expert."""
    x, w = a["x"], a["w"]
    if "counts" in bounds:
        taken = jnp.arange(x.shape[1]) < bounds["counts"][:, None]  # [E, M]
        made = jnp.einsum("emk,enk->emn", x, w, precision="highest")
        made = made + (a["bias"][:, None] if "bias" in a else 0)
        return jnp.where(taken[..., None], made, 0).astype(x.dtype)
    row, ends = jnp.arange(len(x)), bounds["offsets"]
    taken = (row >= ends[:-1, None]) & (row < ends[1:, None])  # [E, rows]
    made = jnp.einsum("mk,enk->emn", x, w, precision="highest")
    made = made + (a["bias"][:, None] if "bias" in a else 0)
    return jnp.where(taken[..., None], made, 0).sum(0).astype(x.dtype)


def ours_of(bounds: Any) -> Callable[[Any], Any]:
    """Ours, with the rows of no expert, which are undefined, put to 0."""

    def function(a: Any) -> Any:
        out = fm.grouped_product(**a, **bounds)
        like = jnp.ones_like(out[..., :1])
        taken = plain_product({"x": like, "w": jnp.ones((len(a["w"]), 1, 1))}, bounds)
        return jnp.where(taken > 0, out, 0)

    return function


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bias", [None, "float32", "as x"])
def test_products(counted: bool, dtype: str, bias: str | None) -> None:
    arrays, bounds = product(counted)
    arrays = {name: x.astype(dtype) for name, x in arrays.items()}
    if bias is None:
        del arrays["bias"]
    elif bias == "float32":
        arrays["bias"] = arrays["bias"].astype(bias)
    out, pull = jax.vjp(lambda a: fm.grouped_product(**a, **bounds), arrays)
    dout = normal(*out.shape, seed=3, dtype=dtype)
    (got,) = pull(dout)
    plain.assert_gradients(lambda a: plain_product(a, bounds), arrays, dout, got)
    assert_equal(jax.jit(pull)(dout), (got,))
    functional = fm.grouped_product_backward(
        dout, arrays["x"], arrays["w"], **bounds, wanted=(True, True, bias == "as x")
    )
    np.testing.assert_array_equal(functional.x, got["x"])
    np.testing.assert_array_equal(functional.w, got["w"])
    if bias == "as x":
        np.testing.assert_array_equal(functional.bias, got["bias"])


def scalar(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda a: jnp.sin(f(a)).sum()


def steepness(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The square of f's gradient, whose gradient is of one order more."""
    return lambda a: sum((x**2).sum() for x in jax.tree.leaves(jax.grad(f)(a)))


@pytest.mark.parametrize("counted", [False, True])
def test_products_have_derivatives_of_every_order_in_both_modes(counted: bool) -> None:
    arrays, bounds = product(counted)
    del arrays["bias"]
    ours, reference = ours_of(bounds), lambda a: plain_product(a, bounds)
    directions = jax.tree.map(lambda x: normal(*x.shape, seed=7), arrays)
    for transform in (
        lambda f: jax.jvp(f, (arrays,), (directions,))[1],
        lambda f: jax.jit(jax.grad(steepness(scalar(f))))(arrays),
        lambda f: jax.jvp(jax.grad(scalar(f)), (arrays,), (directions,))[1],
        lambda f: jax.jit(jax.grad(steepness(steepness(scalar(f)))))(arrays),
        lambda f: jax.linearize(f, arrays)[1](directions),
    ):
        got, want = transform(ours), transform(reference)
        largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(want))
        assert_close(got, want, 1e-5 * max(largest, 1))


@pytest.mark.parametrize("counted", [False, True])
def test_a_gradient_of_sums_over_rows(counted: bool) -> None:
    """The gradient of dbias in dout, which only the functional call can ask for."""
    arrays, bounds = product(counted)
    dout = normal(*arrays["x"].shape[:-1], 16, seed=3)
    factor = normal(3, 16, seed=4)

    def ours(dout: Any) -> Any:
        made = fm.grouped_product_backward(dout, None, None, **bounds, wanted=(False, False, True))
        return (made.bias * factor).sum()

    def reference(dout: Any) -> Any:
        return (plain_product({"x": dout, "w": factor[:, None]}, bounds)).sum()

    assert_close(jax.grad(ours)(dout), jax.grad(reference)(dout))


# ---- transformations ----


def _in_layers(f: Any) -> Any:
    def function(a: Any) -> Any:
        def step(x: Any, _: Any) -> Any:
            return jnp.tanh(x + f(a | {"tokens": x})), None

        return jax.lax.scan(step, a["tokens"], None, length=3)[0].sum()

    return function


TRANSFORMED: dict[str, Callable[[Any], Any]] = {
    "jit": lambda f: jax.jit(lambda a: f(a).sum()),
    "jit of jit": lambda f: jax.jit(lambda a: jax.jit(f)(a).sum()),
    "checkpoint": lambda f: jax.checkpoint(lambda a: f(a).sum()),
    "checkpoint of jit": lambda f: jax.checkpoint(jax.jit(lambda a: f(a).sum())),
    "saving nothing": lambda f: jax.checkpoint(
        lambda a: f(a).sum(), policy=jax.checkpoint_policies.nothing_saveable
    ),
    "saving everything": lambda f: jax.checkpoint(
        lambda a: f(a).sum(), policy=jax.checkpoint_policies.everything_saveable
    ),
    "scan": _in_layers,
    "scan of checkpoint": lambda f: _in_layers(jax.checkpoint(f)),
    "cond": lambda f: (
        lambda a: jax.lax.cond(
            a["tokens"].sum() < 1e9, lambda a: f(a).sum(), lambda a: a["tokens"].sum(), a
        )
    ),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformed(name: str) -> None:
    a, transform = leaves(), TRANSFORMED[name]
    layer = lambda a: call(a, renormalize=True)  # noqa: E731

    def reference(a: Any) -> Any:
        logits = a["tokens"] @ a["router_weights"].T + a["router_bias"]
        ids = jax.lax.top_k(logits, K)[1]
        return plain.fused(a, ids, {"renormalize": True})

    value, got = jax.value_and_grad(transform(layer))(a)
    want_value, want = jax.value_and_grad(transform(reference))(a)
    np.testing.assert_allclose(value, want_value, rtol=1e-4)
    assert_close(got, want, 2e-4)
    assert_equal(jax.jit(jax.grad(transform(layer)))(a), got)
    if "scan" not in name:
        assert_equal(got, jax.grad(lambda a: layer(a).sum())(a))


def test_grad_of_vmap_is_one_call_for_all_tokens() -> None:
    a = leaves(tokens=(4, 11))
    shared = dict.fromkeys(a) | {"tokens": 0}
    mapped = lambda a: jax.vmap(loss, (shared,))(a).sum()  # noqa: E731
    grad = jax.grad(mapped)
    got = jax.jit(grad)(a)
    text = text_of(grad, a)
    assert "while" not in text
    (made,) = outputs_of(text, "moe_backward")
    assert made == "dx dw_gate_up dw_down db_gate_up db_down dweights "
    each = [jax.grad(loss)(a | {"tokens": x}) for x in a["tokens"]]
    assert_close(got["tokens"], jnp.stack([x["tokens"] for x in each]))
    for name in a:
        if name != "tokens":
            assert_close(got[name], sum(x[name] for x in each), 1e-4)


@pytest.mark.parametrize(
    "batched", [("tokens",), ("w_down",), ("tokens", "w_down"), "all"], ids=str
)
def test_vmap_of_grad(batched: Any) -> None:
    """One call after another: the same bits as in a loop."""
    a = leaves()
    batched = tuple(a) if batched == "all" else batched
    many = {n: jnp.stack([x, 2 * x, -x]) if n in batched else x for n, x in a.items()}
    axes = {name: 0 if name in batched else None for name in a}
    got = jax.vmap(jax.grad(loss), (axes,))(many)
    assert_equal(jax.jit(jax.vmap(jax.grad(loss), (axes,)))(many), got)
    for i in range(3):
        one = {name: x[i] if name in batched else x for name, x in many.items()}
        assert_equal({name: x[i] for name, x in got.items()}, jax.grad(loss)(one))


def test_grad_of_vmap_over_layers() -> None:
    """With different weights, and with the parts of a layer, which are not folded."""
    a = leaves()
    many = jnp.stack([a["w_down"], 2 * a["w_down"]])

    def parts(a: Any, w_down: Any) -> Any:
        logits = a["tokens"] @ a["router_weights"].T
        routing = fm.moe_route(logits, K)
        return fm.moe_forward(a["tokens"], a["w_gate_up"], w_down, routing).sum()

    mapped = lambda a, w: jax.vmap(parts, (None, 0))(a, w).sum()  # noqa: E731
    got = jax.jit(jax.grad(mapped, (0, 1)))(a, many)
    each = [jax.grad(parts, (0, 1))(a, w) for w in many]
    assert_close(got[1], jnp.stack([x[1] for x in each]))
    assert_close(got[0], jax.tree.map(jnp.add, each[0][0], each[1][0]), 1e-4)


def test_frozen_experts_cost_nothing() -> None:
    a = leaves()
    everything = jax.jit(jax.grad(loss))(a)
    expected = {
        ("tokens",): (["dx dweights "], ["dx "]),
        ("router_weights",): (["dweights "], ["dw "]),
        ("router_bias",): (["dweights "], ["dbias "]),
        ("w_down",): (["dw_down "], []),
        ("b_gate_up", "b_down"): (["db_gate_up db_down "], []),
        ("w_gate_up", "w_down"): (["dw_gate_up dw_down "], []),
    }
    for names, (layer, product) in expected.items():

        def alone(given: Any, names: Any = names) -> Any:
            return loss({n: given.get(n, jax.lax.stop_gradient(x)) for n, x in a.items()})

        given = {name: a[name] for name in names}
        for transformed in (alone, jax.jit(alone), jax.checkpoint(alone)):
            text = text_of(jax.grad(transformed), given)
            assert outputs_of(text, "moe_backward") == layer, names
            assert outputs_of(text, "grouped_product_backward") == product, names
            route = outputs_of(text, "moe_route_backward")
            assert route == (["dlogits "] if "dweights" in layer[0] else []), names
            assert_equal(jax.grad(transformed)(given), {n: everything[n] for n in names})


def test_what_was_asked_for_before_does_not_matter() -> None:
    """JAX keeps traces of a forward pass, whatever of it was differentiated."""
    a = leaves()
    want = jax.grad(loss)(a)
    layer = jax.jit(loss)
    for names in (("tokens",), ("w_down", "b_down"), tuple(a), ("router_bias",)):
        rest = {name: x for name, x in a.items() if name not in names}
        given = {name: a[name] for name in names}
        got = jax.grad(lambda given, rest: layer(given | rest))(given, rest)
        assert_equal(got, {name: want[name] for name in names})


def test_what_the_activation_is_applied_to_has_no_gradient() -> None:
    a = leaves()
    routing = fm.moe_route(normal(T, E), K)

    def both(x: Any) -> Any:
        return fm.moe_forward(x, a["w_gate_up"], a["w_down"], routing, return_pre_activation=True)

    assert not np.asarray(jax.grad(lambda x: both(x)[1].sum())(a["tokens"])).any()
    alone = jax.grad(lambda x: fm.moe_forward(x, a["w_gate_up"], a["w_down"], routing).sum())
    assert_equal(jax.grad(lambda x: both(x)[0].sum())(a["tokens"]), alone(a["tokens"]))


def residuals(a: Any, **options: Any) -> tuple[Any, int]:
    """A gradient, and the bytes that it is computed from."""
    _, pull = jax.vjp(lambda a: call(a, **options), a)
    return pull(jnp.ones((T, H)))[0], sum(x.nbytes for x in jax.tree.leaves(pull))


def test_recomputed_gradients_save_less() -> None:
    """By the pre-activations alone, and have the same bits."""
    a = leaves()
    want, saved = residuals(a)
    got, less = residuals(a, recompute=True)
    assert saved - less == 2 * INNER * T * K * 4
    assert_equal(got, want)
    text = text_of(jax.grad(lambda a: loss(a, recompute=True)), a)
    assert "pre_activation" not in "".join(outputs_of(text, "moe_forward"))
    assert_equal(jax.jit(jax.grad(lambda a: loss(a, recompute=True)))(a), jax.grad(loss)(a))
    both = jax.vmap(lambda x: residuals(a | {"tokens": x}, recompute=True)[0])
    assert_equal(both(a["tokens"][None]), jax.tree.map(lambda x: x[None], want))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_workspace_of_gradients_is_bounded(compiled: bool) -> None:
    """To the same bits, of the functional call, too; one that is too low is told of."""
    a = {"tokens": normal(20, 264), "router_weights": normal(8, 264),
         "w_gate_up": normal(8, 1040, 264), "w_down": normal(8, 264, 520)}  # fmt: skip
    dout = normal(20, 264, seed=3)

    def gradients(bound: int | None) -> Any:
        def pulled(a: Any) -> Any:
            return jax.vjp(lambda a: call(a, 2, max_workspace_bytes=bound), a)[1](dout)[0]

        return (jax.jit(pulled) if compiled else pulled)(a)

    want = gradients(None)
    with pytest.raises(Exception, match="max_workspace_bytes: got 1, acc") as refusal:
        jax.block_until_ready(gradients(1))
    told = re.search(r"and from (\d+) on", str(refusal.value))
    assert told is not None
    bound = int(told[1])
    assert_equal(gradients(bound), want)
    made = fm.fused_moe_backward(dout, **a, top_k=2, max_workspace_bytes=bound)
    assert_equal({name: getattr(made, name) for name in a}, want)
    with pytest.raises(Exception, match="max_workspace_bytes: got 1, acc"):
        jax.block_until_ready(fm.fused_moe_backward(dout, **a, top_k=2, max_workspace_bytes=1))
    with pytest.raises(ValueError, match=r"^max_workspace_bytes: got 0, accepted are 1 to 2"):
        call(a, 2, max_workspace_bytes=0)


def test_no_tokens_and_empty_experts() -> None:
    a = leaves(tokens=(0,))
    got = jax.grad(loss)(a)
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, a)
    assert not any(np.asarray(x).any() for x in got.values())
    a = leaves(tokens=(1,))
    got = jax.grad(loss)(a)["w_down"]
    assert sum(bool(np.asarray(x).any()) for x in got) == K


def test_a_step_of_training() -> None:
    a, target = leaves(), normal(T, H, seed=5)

    def error(a: Any) -> Any:
        return jnp.square(call(a, renormalize=True) - target).mean()

    @jax.jit
    def step(a: Any, _: Any) -> Any:
        value, made = jax.value_and_grad(error)(a)
        weights = {n: x - (0.0 if n == "tokens" else 0.5) * made[n] for n, x in a.items()}
        return weights, value

    _, values = jax.lax.scan(step, a, None, length=40)
    assert values[-1] < 0.5 * values[0]


def test_without_jit() -> None:
    a = leaves()
    want = jax.grad(loss)(a)
    with jax.disable_jit():
        assert_close(jax.grad(loss)(a), want)


# ---- what is refused ----

_FORWARD_MODE = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "jvp of jit": lambda f, x: jax.jvp(jax.jit(f), (x,), (x,)),
    "jacfwd": lambda f, x: jax.jacfwd(f)(x),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "hessian": lambda f, x: jax.hessian(f)(x),
}
_SECOND = {
    "grad of grad": lambda f, x: jax.grad(lambda x: jax.grad(f)(x).sum())(x),
    "jit": lambda f, x: jax.jit(jax.grad(lambda x: jax.grad(jax.jit(f))(x).sum()))(x),
}


@pytest.mark.parametrize("name", _FORWARD_MODE)
def test_forward_mode_is_refused(name: str) -> None:
    a = leaves()
    one = lambda x: loss(a | {"tokens": x})  # noqa: E731
    with pytest.raises(
        ValueError, match=r"^a derivative of forward mode of the mixture of experts"
    ):
        _FORWARD_MODE[name](one, a["tokens"])


@pytest.mark.parametrize("name", _SECOND)
def test_second_derivatives_are_refused(name: str) -> None:
    a = leaves()
    one = lambda x: loss(a | {"tokens": x})  # noqa: E731
    with pytest.raises(
        ValueError, match=r"^a second derivative of the mixture of experts is asked"
    ):
        _SECOND[name](one, a["tokens"])


def test_what_the_functional_calls_refuse() -> None:
    x, w = normal(10, 16), normal(3, 8, 16)
    dout, offsets = normal(10, 8), jnp.asarray([0, 4, 4, 10], jnp.int32)
    backward = lambda **given: fm.grouped_product_backward(  # noqa: E731
        dout, x, w, **({"offsets": offsets} | given)
    )
    with pytest.raises(ValueError, match=r"^dx: JAX arrays cannot be written to; leave it None$"):
        backward(dx=x)
    with pytest.raises(ValueError, match=r"^stream: XLA chooses the stream of JAX arrays"):
        backward(stream=1)
    with pytest.raises(ValueError, match=r"^accumulate: JAX arrays cannot be added to"):
        backward(accumulate=True)
    with pytest.raises(ValueError, match=r"^dx: got a null tensor"):
        backward(wanted=(False, False, False))
    with pytest.raises(ValueError, match=r"^offsets: got a null tensor"):
        backward(offsets=None)
    with pytest.raises(ValueError, match=r"^w: got 2 dimensions"):
        jax.jit(lambda w: fm.grouped_product_backward(dout, x, w, offsets=offsets))(w[0])
    with pytest.raises(ValueError, match=r"^w: its number of rows is 8, but dout's columns"):
        jax.jit(lambda d: fm.grouped_product_backward(d, x, w, offsets=offsets))(x)
    routing = fm.moe_route(normal(10, 8), 2)
    with pytest.raises(ValueError, match=r"^weights: its number of tokens is 10"):
        fm.moe_backward(x[:5], x[:5], normal(8, 16, 16), normal(8, 16, 8), routing)
    with pytest.raises(ValueError, match=r"^ids: its number of experts of a token is 2, but"):
        fm.moe_route_backward(dout[:, :1], routing, logits=normal(10, 8))


# ---- random shapes ----


@settings(max_examples=12)
@given(data=st.data())
def test_random_layers(data: Any) -> None:
    pick = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    experts = pick(1, 12)
    case = Case(
        tokens=pick(0, 40), hidden=8 * pick(1, 5), inner=8 * pick(1, 4), experts=experts,
        top_k=pick(1, min(experts, 4)), seed=pick(0, 99),
        gate=data.draw(st.sampled_from(["gate_up", "up_gate", "interleaved", "separate", "none"])),
        activation=data.draw(st.sampled_from(["silu", "gelu", "gelu_tanh"])),
        bias=data.draw(st.sampled_from([None, "x"])),
        weight_on_input=data.draw(st.booleans()),
    )  # fmt: skip
    assert JAX is not None
    arguments = make(case, JAX, "fp32")
    routing = arguments.pop("routing")
    arrays = arguments | {"weights": routing.weights}

    def layer(a: Any) -> Any:
        rest = {name: x for name, x in a.items() if name != "weights"}
        return fm.moe_forward(
            **rest, routing=routing._replace(weights=a["weights"]), **case.options
        )

    out, pull = jax.vjp(layer, arrays)
    dout = normal(*out.shape, seed=3)
    reference = lambda a: plain.experts(a, routing.ids, **case.options)  # noqa: E731
    plain.assert_gradients(reference, arrays, dout, pull(dout)[0])


# ---- jax.export ----

_ALLOWED = [
    export.DisabledSafetyCheck.custom_call(f"flashmoe_{name}_v1")
    for name in ("fused_moe", "moe_route", "moe_route_backward", "moe_forward", "moe_backward",
                 "grouped_product", "grouped_product_backward")
]  # fmt: skip


@pytest.mark.parametrize("dims", [None, "t"])
def test_exported_gradient(dims: str | None) -> None:
    a, grad = leaves(), jax.grad(lambda a: call(a).sum())
    types = a
    if dims is not None:
        shape = export.symbolic_shape(f"{dims}, {H}")
        types = a | {"tokens": jax.ShapeDtypeStruct(shape, np.float32)}
    made = export.export(jax.jit(grad), disabled_checks=_ALLOWED, platforms=("cpu",))(types)
    assert_equal(made.call(a), grad(a))


@pytest.mark.parametrize("scoring", ["softmax", "topk_softmax", "sigmoid"])
def test_in_float64(scoring: str) -> None:
    """With x64 calls and gradients of fp64 are computed as such."""
    how: dict[str, Any] = {"scoring": scoring, "renormalize": scoring != "topk_softmax"}
    with plain.x64():
        given = leaves("float64", tokens=(7,))
        logits = given["tokens"] @ given["router_weights"].T + given["router_bias"]
        ids = np.asarray(jax.lax.top_k(logits, K)[1])
        out = jax.jit(lambda a: call(a, **how))(given)
        made = jax.jit(jax.grad(lambda a: loss(a, **how)))(given)

        def reference(a: Any) -> Any:
            return plain.fused(a, ids, how)

        def weighed(a: Any) -> Any:
            return (reference(a) * normal(*out.shape, seed=9)).sum()

        np.testing.assert_allclose(out, reference(given), rtol=0, atol=1e-12)
        want = jax.grad(weighed)(given)
        for name, gradient in made.items():
            assert gradient.dtype == np.float64, name
            largest = np.abs(want[name]).max()
            np.testing.assert_allclose(gradient, want[name], rtol=0, atol=1e-12 * largest)


@pytest.mark.parametrize("bounds", [{"counts": [3, 0, 5]}, {"offsets": [1, 4, 4, 5]}], ids=str)
def test_ranks_need_no_promotion(bounds: dict[str, Any]) -> None:
    tables = {name: jnp.asarray(x, jnp.int32) for name, x in bounds.items()}
    rows = (3, 5, 8) if "counts" in bounds else (5, 8)
    with jax.numpy_rank_promotion("raise"):
        made = _jax_moe._rows_of(jnp.ones((3, 8)), tables, jnp.zeros(rows))
    assert made.shape == rows
    assert made.sum() == 8 * (8 if "counts" in bounds else 4)
