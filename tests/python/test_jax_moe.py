"""JAX: the mixture of experts as XLA custom calls, under jit, vmap and shard_map."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flashmoe_science as fm
import moe_oracle
import numpy as np
import producers
import pytest
from flashmoe_science import _core
from moe_cases import CASES, Case, make, rounded

jax = pytest.importorskip("jax")
jnp = jax.numpy

JAX = next((p for p in producers.ON_CPU if p.name == "jax"), None)


def host(result: Any) -> Any:
    return jax.tree.map(np.asarray, result)


def logits_of(tokens: int = 37, experts: int = 6, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, experts), np.float32)


def assert_same_bits(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# ---- under jit ----


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 2},
        {"top_k": 3, "renormalize": True, "scale": 2.5},
        {"top_k": 6, "scoring": "topk_softmax"},
        {"top_k": 3, "scoring": "sigmoid", "num_groups": 2, "top_groups": 2},
    ],
    ids=str,
)
def test_route(dtype: str, options: dict[str, Any]) -> None:
    logits = producers.cast(logits_of(), dtype)
    routed = jax.jit(lambda z: fm.moe_route(z, **options, return_lse=True))(jnp.asarray(logits))
    assert type(routed) is fm.MoeRouting
    moe_oracle.assert_routed(host(routed), moe_oracle.route(logits, **options))
    assert_same_bits(routed, fm.moe_route(jnp.asarray(logits), **options, return_lse=True))
    assert jax.jit(lambda z: fm.moe_route(z, **options))(logits).lse is None


def test_a_selection_bias_is_a_tensor_of_the_call() -> None:
    logits, bias = logits_of(50, 32), logits_of(1, 32, seed=1)[0]
    options: dict[str, Any] = {"top_k": 5, "scoring": "sigmoid", "renormalize": True}
    routed = jax.jit(lambda z, b: fm.moe_route(z, selection_bias=b, **options))(logits, bias)
    want = moe_oracle.route(logits, selection_bias=bias, **options)
    moe_oracle.assert_routed(host(routed), want)
    assert not np.array_equal(want.ids, moe_oracle.route(logits, **options).ids)


def test_route_given() -> None:
    ids = np.array([[3, 0], [1, 7], [-1, 2]], np.int32)
    weights = np.array([[0.5, 0.25], [1, 2], [3, 4]], np.float32)
    expert_map = np.array([-1, 0, 1, 2], np.int32)

    @jax.jit
    def route(ids: Any, weights: Any, expert_map: Any) -> Any:
        return fm.moe_route_given(ids, weights, num_experts=3, expert_map=expert_map, **options)

    options = {"renormalize": True, "scale": 0.5}
    want = moe_oracle.route_given(ids, weights, num_experts=3, expert_map=expert_map, **options)
    moe_oracle.assert_routed(host(route(ids, weights, expert_map)), want)
    plain = jax.jit(lambda ids: fm.moe_route_given(ids, num_experts=4))(ids)
    moe_oracle.assert_routed(host(plain), moe_oracle.route_given(ids, None, num_experts=4))


def test_route_given_by_int64() -> None:
    where = jax if hasattr(jax, "enable_x64") else jax.experimental  # before JAX 0.8
    with where.enable_x64(True):
        ids = jax.numpy.asarray(np.array([[3, 0], [2**32, 2**32 + 1], [-1, 2]], np.int64))
        assert ids.dtype == np.int64
        routed = host(jax.jit(lambda ids: fm.moe_route_given(ids, num_experts=4))(ids))
    want = moe_oracle.route_given(np.asarray(ids), None, num_experts=4)
    moe_oracle.assert_routed(routed, want)
    assert (routed.ids[1] == -1).all()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case: Case, dtype: str) -> None:
    assert JAX is not None
    arguments = make(case, JAX, dtype)

    @jax.jit
    def layer(arguments: Any) -> Any:
        return fm.moe_forward(**arguments, **case.options, return_pre_activation=True)

    out, before = layer(arguments)
    moe_oracle.assert_forward(out, **rounded(case, dtype), **case.options, pre_activation=before)
    np.testing.assert_array_equal(out, fm.moe_forward(**arguments, **case.options))


@pytest.mark.parametrize("bias", [False, True])
def test_grouped_product(bias: bool) -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((3, 8, 16), np.float32)
    b = rng.standard_normal((3, 8), np.float32) if bias else None
    rows = rng.standard_normal((10, 16), np.float32)
    offsets = np.array([0, 4, 4, 10], np.int32)
    given = None if b is None else jnp.asarray(b)
    got = jax.jit(lambda x, w, o: fm.grouped_product(x, w, offsets=o, bias=given))(rows, w, offsets)
    moe_oracle.assert_grouped_product(np.asarray(got), rows, w, offsets=offsets, bias=b)
    padded = rng.standard_normal((3, 5, 16), np.float32)
    counts = np.array([5, 0, 2], np.int32)
    got = jax.jit(lambda x, w, c: fm.grouped_product(x, w, counts=c, bias=given))(padded, w, counts)
    moe_oracle.assert_grouped_product(np.asarray(got), padded, w, counts=counts, bias=b)


def fused(experts: int = 8, tokens: tuple[int, ...] = (2, 13), seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5)

    return {
        "tokens": normal(*tokens, 32),
        "router_weights": normal(experts, 32),
        "w_gate_up": normal(experts, 48, 32),
        "w_down": normal(experts, 32, 24),
    }


def in_two_steps(arguments: dict[str, Any], top_k: int, **options: Any) -> np.ndarray:
    """The same by NumPy arrays."""
    tokens = np.asarray(arguments["tokens"])
    rows = tokens.reshape(-1, tokens.shape[-1])
    logits = rows @ np.asarray(arguments["router_weights"]).T
    routing = fm.moe_route(logits, top_k, **options)
    out = fm.moe_forward(
        rows, np.asarray(arguments["w_gate_up"]), np.asarray(arguments["w_down"]), routing
    )
    return out.reshape(tokens.shape)


@pytest.mark.parametrize("experts", [8, 6])  # by our product, and by JAX's own
def test_fused_moe(experts: int) -> None:
    arguments = fused(experts)
    layer = jax.jit(lambda a: fm.fused_moe(**a, top_k=2, renormalize=True))
    got = layer(arguments)
    want = in_two_steps(arguments, 2, renormalize=True)
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_array_equal(got, fm.fused_moe(**arguments, top_k=2, renormalize=True))
    logits = arguments["tokens"] @ arguments.pop("router_weights").T
    given = jax.jit(
        lambda a, z: fm.fused_moe(a["tokens"], None, a["w_gate_up"], a["w_down"], 2, logits=z,
                                  renormalize=True)
    )(arguments, logits)  # fmt: skip
    np.testing.assert_allclose(given, want, atol=1e-5)


def test_no_tokens() -> None:
    arguments = fused(tokens=(0,))
    assert jax.jit(lambda a: fm.fused_moe(**a, top_k=2))(arguments).shape == (0, 32)
    routing = fm.moe_route(jnp.zeros((0, 4)), 2)
    assert routing.offsets.tolist() == [0] * 5


def test_inside_a_larger_program() -> None:
    arguments = fused()

    @jax.jit
    def program(tokens: Any) -> Any:
        def step(x: Any, _: Any) -> tuple[Any, Any]:
            return x + fm.fused_moe(**(arguments | {"tokens": x}), top_k=2), None

        return jax.lax.scan(step, tokens, None, length=3)[0]

    x = np.asarray(arguments["tokens"])
    for _ in range(3):
        x = x + in_two_steps(arguments | {"tokens": x}, 2)
    np.testing.assert_allclose(program(arguments["tokens"]), x, atol=1e-5)


def test_a_kernel_named_under_jit() -> None:
    arguments = fused()
    named = jax.jit(lambda a: fm.fused_moe(**a, top_k=2, kernel="cpu"))(arguments)
    np.testing.assert_array_equal(named, fm.fused_moe(**arguments, top_k=2))
    with pytest.raises(ValueError, match=r'^kernel: got "sm12", built in are'):
        fm.fused_moe(**arguments, top_k=2, kernel="sm12")


def test_equal_options_are_compiled_once() -> None:
    from flashmoe_science import jax as ours

    z = jnp.asarray(logits_of())
    fm.moe_route(z, 2, scale=2.5)
    before = ours._compiled.cache_info().misses
    fm.moe_route(z, np.int64(2), scale=np.float64(2.5))
    fm.moe_route(z + 1, 2, scale=2.5)
    assert ours._compiled.cache_info().misses == before


# ---- what is wrong with a call ----


def test_wrong_calls_fail_while_tracing() -> None:
    a = fused()
    routing = fm.moe_route(jnp.asarray(logits_of(26, 8)), 2)
    rows = a["tokens"].reshape(-1, 32)

    def layer(**changed: Any) -> Any:
        given = {"x": rows, "w_gate_up": a["w_gate_up"], "w_down": a["w_down"]} | changed
        return jax.jit(lambda g: fm.moe_forward(**g, routing=routing))(given)

    with pytest.raises(ValueError, match=r"^w_down: "):
        layer(w_down=a["w_down"][:, :, :16])
    with pytest.raises(TypeError, match=r"^w_gate_up: got dtype "):
        layer(w_gate_up=a["w_gate_up"].astype(jnp.bfloat16))
    with pytest.raises(TypeError, match=r"^x: got dtype "):
        layer(x=rows.astype(jnp.int32))
    with pytest.raises(ValueError, match=r"^weights: its number of tokens is 26"):
        layer(x=rows[:5])
    with pytest.raises(ValueError, match=r"^top_k: got 9, accepted are 1 to 32, and no more than"):
        jax.jit(lambda z: fm.moe_route(z, 9))(logits_of(4, 8))
    with pytest.raises(ValueError, match=r"^scoring: got 'tanh'"):
        jax.jit(lambda z: fm.moe_route(z, 2, scoring="tanh"))(logits_of(4, 8))
    with pytest.raises(
        ValueError, match=r"^router_weights: its number of columns is 32, but tokens"
    ):
        jax.jit(lambda a: fm.fused_moe(**a, top_k=2))(a | {"tokens": a["tokens"][..., :24]})
    with pytest.raises(ValueError, match=r"^w: "):
        jax.jit(lambda x, w: fm.grouped_product(x, w, counts=jnp.zeros(3, jnp.int32)))(
            jnp.ones((3, 5, 16)), jnp.ones((3, 8, 24))
        )


def test_arrays_cannot_be_written_to() -> None:
    z = jnp.asarray(logits_of())
    with pytest.raises(ValueError, match=r"^ids: JAX arrays cannot be written to"):
        fm.moe_route(z, 2, out=fm.moe_route(z, 2))
    with pytest.raises(ValueError, match=r"^stream: XLA chooses the stream of JAX arrays"):
        fm.moe_route(z, 2, stream=0)
    a = fused()
    with pytest.raises(ValueError, match=r"^out: JAX arrays cannot be written to"):
        fm.fused_moe(**a, top_k=2, out=a["tokens"])


def test_tensors_of_another_library_are_refused() -> None:
    torch = pytest.importorskip("torch")
    a = fused()
    for tokens, name in ((a["tokens"], "jaxlib"), (np.asarray(a["tokens"]), "numpy")):
        given = a | {"tokens": tokens, "w_down": torch.zeros(8, 32, 24)}
        with pytest.raises(TypeError, match=rf"^w_down: got torch\.Tensor, but tokens is {name}"):
            fm.fused_moe(**given, top_k=2)


@pytest.mark.parametrize(
    "given", [("tokens",), ("router_weights",), ("router_weights", "w_gate_up", "w_down")], ids=str
)
def test_numpy_arrays_beside_jax_are_constants(given: tuple[str, ...]) -> None:
    """Eagerly, and closed over under jit."""
    a = fused()
    constants = {name: np.asarray(a.pop(name)) for name in given}
    layer = lambda a: fm.fused_moe(**(a | constants), top_k=2)  # noqa: E731
    want = fm.fused_moe(**(a | {n: jnp.asarray(x) for n, x in constants.items()}), top_k=2)
    for got in (layer(a), jax.jit(layer)(a)):
        assert isinstance(got, jax.Array)
        np.testing.assert_array_equal(got, want)


def test_numpy_arrays_beside_those_of_the_steps() -> None:
    a = {name: np.asarray(x) for name, x in fused(tokens=(13,)).items()}
    logits = a["tokens"] @ a["router_weights"].T
    bias = np.linspace(-1, 1, 8, dtype=np.float32)
    chosen = fm.moe_route(logits, 2, scoring="sigmoid", selection_bias=bias)

    @jax.jit
    def route(z: Any) -> Any:
        return fm.moe_route(z, 2, scoring="sigmoid", selection_bias=bias)

    moe_oracle.assert_routed(host(route(logits)), chosen)
    want = fm.moe_forward(a["tokens"], a["w_gate_up"], a["w_down"], chosen)
    for names in (("tokens",), ("w_gate_up", "w_down")):
        given = a | {name: jnp.asarray(a[name]) for name in names}
        got = fm.moe_forward(given["tokens"], given["w_gate_up"], given["w_down"], chosen)
        assert isinstance(got, jax.Array)
        np.testing.assert_array_equal(got, want)
        plan = fm.moe_plan(given["tokens"], given["w_gate_up"], given["w_down"], chosen)
        assert plan.family == "cpu"
    rows = np.asarray(chosen.offsets)
    assert rows[-1] == 26
    x = np.repeat(a["tokens"], 2, 0)
    got = fm.grouped_product(x, jnp.asarray(a["w_gate_up"]), offsets=rows)
    np.testing.assert_array_equal(got, fm.grouped_product(x, a["w_gate_up"], offsets=rows))


def test_plans_under_jit() -> None:
    a = fused(tokens=(13,))
    plans: list[Any] = []

    @jax.jit
    def layer(a: Any) -> Any:
        routing = fm.moe_route(a["tokens"] @ a["router_weights"].T, 2)
        plans.append(fm.moe_plan(a["tokens"], a["w_gate_up"], a["w_down"], routing, kernel="sm90"))
        plans.append(fm.moe_route_plan(a["tokens"], 2))
        return a["tokens"]

    layer(a)
    assert [plan.family for plan in plans] == ["cpu", "cpu"]  # as on the CPU: it is not known yet


def test_without_jit() -> None:
    a = fused()
    want = fm.fused_moe(**a, top_k=2)
    with jax.disable_jit():
        np.testing.assert_array_equal(fm.fused_moe(**a, top_k=2), want)


def test_a_foreign_use_of_the_targets_is_refused() -> None:
    z = jnp.asarray(logits_of())
    fm.moe_route(z, 2)  # registers them
    packed = _core.pack_options("moe_route", {})
    attributes = {
        "inputs": "logits ", "outputs": "ids weights offsets pairs slots ", "options": packed,
    }  # fmt: skip
    like = jax.eval_shape(lambda z: tuple(fm.moe_route(z, 2))[:5], z)

    def call(changed: dict[str, Any]) -> Any:
        given = {name: x for name, x in (attributes | changed).items() if x is not None}
        return jax.block_until_ready(jax.ffi.ffi_call("flashmoe_moe_route_v1", like)(z, **given))

    assert_same_bits(tuple(call({})), tuple(fm.moe_route(z, 2))[:5])
    # What an older version packed, whose parameters end earlier.
    assert_same_bits(tuple(call({"options": packed.replace("00" * 8 + " ", " ")})), tuple(call({})))
    for changed in (
        {"inputs": "logits"}, {"inputs": "logit "}, {"inputs": "ids "}, {"inputs": ""},
        {"inputs": "logits selection_bias "}, {"outputs": "ids "}, {"options": np.int32(7)},
        {"inputs": ".T "}, {"inputs": "logit.T "},
        {"outputs": "ids.T weights offsets pairs slots "},
        {"inputs": None}, {"outputs": None}, {"options": None}, {"options": ""},
        {"options": packed[1:]}, {"options": f"{packed}sm90"}, {"options": f"00{packed}"},
        {"options": packed.replace("0", "g", 1)}, {"options": packed[:14] + " "},
    ):  # fmt: skip
        with pytest.raises(Exception, match="call this target through flashmoe_science"):
            call(changed)


# ---- vmap and shard_map ----


def test_vmap_folds_its_axis_into_the_tokens_of_fused_moe() -> None:
    a = fused(tokens=(4, 5, 13))
    layer = lambda x: fm.fused_moe(**(a | {"tokens": x}), top_k=2)  # noqa: E731
    mapped = jax.vmap(layer)
    np.testing.assert_allclose(mapped(a["tokens"]), layer(a["tokens"]), atol=1e-6)
    assert str(jax.make_jaxpr(mapped)(a["tokens"])).count("scan") == 0
    inner = jax.vmap(jax.vmap(layer), in_axes=1, out_axes=1)(a["tokens"])
    np.testing.assert_allclose(inner, layer(a["tokens"]), atol=1e-6)


def test_vmap_over_weights_makes_calls_one_after_another() -> None:
    layers = [fused(seed=seed) for seed in range(3)]
    tokens = layers[0]["tokens"]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *({**a, "tokens": tokens} for a in layers))
    got = jax.vmap(
        lambda a, x: fm.fused_moe(**(a | {"tokens": x}), top_k=2), in_axes=(0, None)
    )(stacked, tokens)  # fmt: skip
    for row, a in zip(got, layers, strict=True):
        np.testing.assert_array_equal(row, fm.fused_moe(**(a | {"tokens": tokens}), top_k=2))


Step = tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]
"""A function of arrays, and their shapes."""

STEPS: dict[str, Step] = {
    "moe_route": (lambda z: fm.moe_route(z, 2, return_lse=True), ((26, 8),)),
    "moe_route, a bias": (
        lambda z, b: fm.moe_route(z, 2, scoring="sigmoid", selection_bias=b), ((26, 8), (8,)),
    ),
    "moe_route_given": (
        lambda i, w: fm.moe_route_given((i * 9).astype(jnp.int32), w, num_experts=8),
        ((26, 2), (26, 2)),
    ),
    "moe_forward": (
        lambda x, up, down: fm.moe_forward(x, up, down, fm.moe_route(x[:, :8], 2)),
        ((26, 32), (8, 48, 32), (8, 32, 24)),
    ),
    "grouped_product": (
        lambda x, w: fm.grouped_product(x, w, offsets=jnp.asarray([0, 3, 3, 10], jnp.int32)),
        ((10, 16), (3, 8, 16)),
    ),
    "fused_moe": (
        lambda x, r, up, down: fm.fused_moe(x, r, up, down, 2),
        ((2, 13, 32), (8, 32), (8, 48, 32), (8, 32, 24)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", [0, 3])
@pytest.mark.parametrize("name", STEPS)
def test_vmap_of_every_function(name: str, size: int) -> None:
    """Over all arrays, over the first from behind, over all but the first; as a loop does it."""
    function, shapes = STEPS[name]
    rng = np.random.default_rng(0)
    others = (None,) * (len(shapes) - 1)
    for axes in ((0,) * len(shapes), (-1, *others), (None, *(1 for _ in others))):
        if axes == (None,):
            continue
        arrays = []
        for axis, shape in zip(axes, shapes, strict=True):
            many = rng.standard_normal((size, *shape) if axis is not None else shape, np.float32)
            many *= np.float32(shape[-1] ** -0.5)
            arrays.append(jnp.asarray(many if axis is None else np.moveaxis(many, 0, axis)))
        mapped = jax.vmap(function, axes)
        for got in (mapped(*arrays), jax.jit(mapped)(*arrays)):
            if size == 0:
                like = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
                one = jax.eval_shape(function, *like)
                assert jax.tree.map(lambda x: (0, *x.shape), one) == jax.tree.map(jnp.shape, got)
                continue
            want = []
            for i in range(size):
                ones = (
                    x if axis is None else x.take(i, axis)
                    for x, axis in zip(arrays, axes, strict=True)
                )  # fmt: skip
                want.append(function(*ones))
            stacked = jax.tree.map(lambda *x: jnp.stack(x), *want)
            if name == "fused_moe" and axes[1:] == others:  # folded: more tokens, other tiles
                np.testing.assert_allclose(got, stacked, atol=1e-5)
            else:
                assert_same_bits(got, stacked)


def test_vmap_in_vmap() -> None:
    a = fused(tokens=(2, 3, 13))
    many = jnp.stack([a["w_down"], 2 * a["w_down"], -a["w_down"]])
    layer = lambda x, down: fm.fused_moe(**(a | {"tokens": x, "w_down": down}), top_k=2)  # noqa: E731
    got = jax.vmap(jax.vmap(layer), (0, None))(a["tokens"], many)
    for i, j in np.ndindex(2, 3):
        np.testing.assert_array_equal(got[i, j], layer(a["tokens"][i, j], many[j]))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_arrays_on_two_devices(dtype: str) -> None:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    program = Path(__file__).parents[1] / "jax_apart.py"
    done = subprocess.run(
        [sys.executable, program, dtype], capture_output=True, text=True, timeout=300,
        check=False, env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="explicit meshes are newer than this JAX")
def test_arrays_sharded_over_an_explicit_mesh() -> None:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    program = Path(__file__).parents[1] / "jax_explicit.py"
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=300,
        check=False, env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
