"""JAX: the XLA custom call, eager and under jit."""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections.abc import Callable
from typing import Any

import capi
import flashmoe_science as fm
import numpy as np
import pytest
from flashmoe_science import _core
from jax_reference import CASES, Case, assert_as_jax
from reference import assert_accurate

jax = pytest.importorskip("jax")
jnp = jax.numpy

from flashmoe_science import jax as calls  # noqa: E402

SHAPES = ((2, 21, 4, 32), (2, 33, 2, 32), (2, 33, 2, 48))


@pytest.fixture
def qkv() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, np.float32) for shape in SHAPES]


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


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_jaxs_own(case: Case, dtype: str) -> None:
    cpu = jax.devices("cpu")[0]
    tensors = case.arrays(dtype, cpu)
    assert_as_jax(fm.flash_attention(*tensors, **case.ours), *tensors, case)


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


def test_sinks_under_jit_and_vmap(qkv: list[np.ndarray]) -> None:
    tensors = [jnp.asarray(x) for x in qkv]
    heads = tensors[0].shape[2]
    sinks = jnp.linspace(-1.0, 2.0, heads)

    @jax.jit
    def attend(q, k, v, sinks):  # type: ignore[no-untyped-def]
        return fm.flash_attention(q, k, v, sinks=sinks, causal=True, return_lse=True)

    out, lse = attend(*tensors, sinks)
    assert_accurate(out, lse, *tensors, causal=True, sinks=sinks)
    # Shared by the entries, or one of each.
    shared = jax.vmap(attend, in_axes=(0, 0, 0, None))(*(x[None] for x in tensors), sinks)
    own = jax.vmap(attend)(*(x[None] for x in tensors), sinks[None])
    for made in (shared, own):
        np.testing.assert_array_equal(made[0][0], out)
        np.testing.assert_array_equal(made[1][0], lse)


def test_a_kernel_named_under_jit(qkv: list[np.ndarray]) -> None:
    q, k, v = map(jnp.asarray, qkv)
    attend = jax.jit(lambda *x: fm.flash_attention(*x, kernel="cpu"))
    np.testing.assert_array_equal(attend(q, k, v), fm.flash_attention(q, k, v))


@pytest.mark.parametrize("given", ["q", "k", "qv", "kv"])
def test_numpy_arrays_beside_jax_are_constants(qkv: list[np.ndarray], given: str) -> None:
    """Eagerly, and closed over under jit."""
    want = fm.flash_attention(*map(jnp.asarray, qkv), causal=True)
    arrays = dict(zip("qkv", qkv, strict=True))
    tensors = {name: jnp.asarray(x) for name, x in arrays.items() if name not in given}
    attend = lambda rest: fm.flash_attention(**(arrays | rest), causal=True)  # noqa: E731
    for got in (attend(tensors), jax.jit(attend)(tensors)):
        assert isinstance(got, jax.Array)
        np.testing.assert_array_equal(got, want)
    lowered = jax.jit(attend).lower(tensors).as_text()
    assert lowered.count("stablehlo.custom_call @flashmoe_attention") == 1
    assert fm.attention_plan(**(arrays | tensors)).family == "cpu"


def test_numpy_arrays_alone_under_jit_are_computed_while_tracing(qkv: list[np.ndarray]) -> None:
    got = jax.jit(lambda x: x + fm.flash_attention(*qkv))(jnp.zeros(()))
    np.testing.assert_array_equal(got, fm.flash_attention(*qkv))


def test_doubles_of_numpy_are_singles_as_in_jax(qkv: list[np.ndarray]) -> None:
    q, k, v = qkv
    got = fm.flash_attention(jnp.asarray(q), k.astype(np.float64), v)
    np.testing.assert_array_equal(got, fm.flash_attention(q, k, v))


def test_tensors_of_another_library_are_refused(qkv: list[np.ndarray]) -> None:
    torch = pytest.importorskip("torch")
    q, k, v = qkv
    for first, name in ((jnp.asarray(q), "jaxlib"), (q, "numpy")):
        with pytest.raises(TypeError, match=rf"^v: got torch\.Tensor, but q is {name}"):
            fm.flash_attention(first, jnp.asarray(k), torch.from_numpy(v))
    with pytest.raises(TypeError, match=r"^k: got list, accepted is a tensor"):
        fm.flash_attention(jnp.asarray(q), k.tolist(), v)


def test_without_jit(qkv: list[np.ndarray]) -> None:
    q, k, v = map(jnp.asarray, qkv)
    want = fm.flash_attention(q, k, v)
    with jax.disable_jit():
        np.testing.assert_array_equal(fm.flash_attention(q, k, v), want)


def test_a_donated_array_is_not_written_over_while_it_is_read(qkv: list[np.ndarray]) -> None:
    q, k, v = map(jnp.asarray, (qkv[0], qkv[1], qkv[2][..., :32]))
    want = np.asarray(fm.flash_attention(q, k, v))
    given = q + 0
    got = jax.jit(fm.flash_attention, donate_argnums=0)(given, k, v)
    assert given.is_deleted()
    np.testing.assert_array_equal(got, want)


def test_an_old_jax_is_refused_when_its_module_is_imported(monkeypatch: Any) -> None:
    monkeypatch.setattr(jax, "__version__", "0.5.3")
    monkeypatch.setattr(jax, "__version_info__", (0, 5, 3))
    monkeypatch.delitem(sys.modules, "flashmoe_science.jax", raising=False)
    sentence = r"^got a JAX array of JAX 0\.5\.3, accepted is 0\.6 or newer$"
    with pytest.raises(TypeError, match=sentence):
        importlib.import_module("flashmoe_science.jax")


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


def test_derivatives_of_what_is_beside_it(qkv: list[np.ndarray]) -> None:
    q, k, v = map(jnp.asarray, qkv)
    stop = jax.lax.stop_gradient
    for made in (lambda: fm.flash_attention(q, k, v), lambda: fm.flash_attention(stop(q), k, v)):
        loss = lambda x: (x * made().sum()).sum()  # noqa: B023, E731
        for transformed in (loss, jax.checkpoint(loss)):
            np.testing.assert_array_equal(
                jax.grad(transformed)(jnp.ones(3)), np.full(3, made().sum())
            )


def test_a_derivative_of_the_callers_own(qkv: list[np.ndarray]) -> None:
    q = jnp.asarray(qkv[0])
    attend = jax.custom_vjp(lambda q: fm.flash_attention(q, q, q))
    attend.defvjp(lambda q: (attend(q), q), lambda q, g: (3 * q * g,))
    np.testing.assert_array_equal(jax.grad(lambda q: attend(q).sum())(q), 3 * q)


# ---- vmap ----

Axes = tuple[int | None, int | None, int | None]


def _one(x: Any, axis: int | None, i: int) -> Any:
    return x if axis is None else x.take(i, axis)


def _attend(layout: str) -> Callable[..., Any]:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return fm.flash_attention(q, k, v, causal=True, layout=layout, return_lse=True)

    return attend


def _batch_of(size: int, in_axes: Axes, layout: str = "bshd") -> list[Any]:
    """Random q, k and v with an axis of that size where in_axes has it."""
    rng = np.random.default_rng(0)
    arrays = []
    for shape, axis in zip(SHAPES, in_axes, strict=True):
        many = rng.standard_normal((size if axis is not None else 1, *shape), np.float32)
        many = many if layout == "bshd" else many.swapaxes(2, 3)
        arrays.append(jnp.asarray(many[0] if axis is None else np.moveaxis(many, 0, axis)))
    return arrays


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize(
    "in_axes", [(0, 0, 0), (1, None, None), (None, 0, 2), (-1, -5, 3), (None, None, -2)]
)
def test_vmap_folds_its_axis_into_the_batch(layout: str, in_axes: Axes) -> None:
    arrays, attend = _batch_of(3, in_axes, layout), _attend(layout)
    mapped = jax.vmap(attend, in_axes=in_axes)
    for out, lse in (mapped(*arrays), jax.jit(mapped)(*arrays)):
        for i in range(3):
            want_out, want_lse = attend(*map(_one, arrays, in_axes, (i, i, i)))
            np.testing.assert_array_equal(out[i], want_out)
            np.testing.assert_array_equal(lse[i], want_lse)
    assert "scan" not in str(jax.make_jaxpr(mapped)(*arrays))


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("in_axes", [(0, 0, 0), (1, None, None), (None, -5, -5)])
def test_vmap_over_one_and_over_none(size: int, in_axes: Axes) -> None:
    arrays, attend = _batch_of(size, in_axes), _attend("bshd")
    mapped = jax.vmap(attend, in_axes=in_axes, out_axes=(2, -1))
    for out, lse in (mapped(*arrays), jax.jit(mapped)(*arrays)):
        assert (out.shape, lse.shape) == ((2, 21, size, 4, 48), (2, 4, 21, size))
        for i in range(size):
            want_out, want_lse = attend(*map(_one, arrays, in_axes, (i, i, i)))
            np.testing.assert_array_equal(out[:, :, i], want_out)
            np.testing.assert_array_equal(lse[..., i], want_lse)


@pytest.mark.parametrize("sizes", [(2, 3), (0, 3), (2, 0)])
def test_vmap_in_vmap(sizes: tuple[int, int]) -> None:
    """Over different axes of different arguments."""
    rng, (outer, inner), attend = np.random.default_rng(0), sizes, _attend("bshd")
    shapes = ((outer, 2, inner, 21, 4, 32), (outer, inner, 2, 33, 2, 32), (inner, 2, 33, 2, 48))
    q, k, v = (jnp.asarray(rng.standard_normal(shape, np.float32)) for shape in shapes)
    mapped = jax.vmap(jax.vmap(attend, (1, 0, 0)), (0, 0, None))
    for out, lse in (mapped(q, k, v), jax.jit(mapped)(q, k, v)):
        assert (out.shape, lse.shape) == ((*sizes, 2, 21, 4, 48), (*sizes, 2, 4, 21))
        for i, j in np.ndindex(*sizes):
            want_out, want_lse = attend(q[i, :, j], k[i, j], v[j])
            np.testing.assert_array_equal(out[i, j], want_out)
            np.testing.assert_array_equal(lse[i, j], want_lse)


def test_a_foreign_use_of_the_target_is_refused(qkv: list[np.ndarray]) -> None:
    fm.flash_attention(*map(jnp.asarray, qkv))  # registers it
    call = jax.ffi.ffi_call("flashmoe_attention_forward_v1", jax.typeof(jnp.asarray(qkv[0])))
    with pytest.raises(Exception, match="call this target through flashmoe_science"):
        jax.block_until_ready(call(*map(jnp.asarray, qkv)))


def test_options_that_hold_an_address_are_foreign() -> None:
    """A program's text may come from anywhere: no pointer is taken from it."""
    q = jnp.zeros((1, 8, 2, 16))
    fm.flash_attention(q, q, q)
    call = jax.ffi.ffi_call("flashmoe_attention_forward_v1", jax.typeof(q))
    packed = bytes.fromhex(_core.pack_options("attention_forward", {}).split(" ")[0])
    for field in ("q_scale", "sequences"):
        at = getattr(capi.AttentionForwardParams, field).offset
        hostile = packed[:at] + b"\x08" + packed[at + 1 :]
        with pytest.raises(Exception, match="call this target through flashmoe_science"):
            jax.block_until_ready(
                call(q, q, q, inputs="q k v ", outputs="out ", options=f"{hostile.hex()} ")
            )


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
                inputs="q k v ",
                outputs="out ",
                options=_core.pack_options("attention_forward", {"scale": math.nan}),
            )
        )


_NO_NUMBERS = {
    "key": lambda: jax.random.split(jax.random.key(0), 256).reshape(1, 16, 1, 16),
    "float0": lambda: np.zeros((1, 16, 1, 16), jax.dtypes.float0),
    "description": lambda: jax.ShapeDtypeStruct((1, 16, 1, 16), jnp.float32),
}


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("key", "got dtype key<fry>, accepted are arrays of numbers"),
        ("float0", "got dtype float0, accepted are arrays of numbers"),
        ("description", "got a jax.ShapeDtypeStruct, accepted are arrays"),
    ],
)
def test_arrays_without_numbers_are_refused(kind: str, sentence: str) -> None:
    q, wrong = jnp.zeros((1, 16, 1, 16)), _NO_NUMBERS[kind]()
    for call in (
        lambda q, k: fm.flash_attention(q, k, q),
        lambda q, k: calls.dot_product_attention(q, k, q),
    ):
        for function in (call, jax.jit(lambda q, call=call: call(q, wrong))):
            with pytest.raises(fm.ArgumentTypeError) as caught:
                function(q, wrong) if function is call else function(q)
            assert re.match(f"(k|key): {re.escape(sentence)}", str(caught.value))
    if kind != "float0":  # NumPy's own, when no array of JAX's is there
        with pytest.raises(fm.ArgumentTypeError, match=re.escape(f"logits: {sentence}")):
            fm.moe_route(wrong, 2)


@pytest.mark.parametrize(
    ("dtype", "named"),
    [
        ("complex64", "complex64 (code 5, 1 lanes)"),
        ("float8_e5m2", "float8_e5m2"),
        ("int4", "int4"),
    ],
)
def test_dtypes_are_named(dtype: str, named: str) -> None:
    q = jnp.zeros((1, 16, 1, 16))
    wrong = q.astype(dtype)
    for call in (fm.flash_attention, jax.jit(fm.flash_attention)):
        with pytest.raises(fm.ArgumentTypeError, match=f"^q: got dtype {re.escape(named)}, acc"):
            call(wrong, wrong, wrong)
        with pytest.raises(fm.ArgumentTypeError, match=f"^v: got dtype {re.escape(named)}, acc"):
            call(q, q, wrong)


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k", "split_size"])
def test_traced_bounds_are_refused(name: str) -> None:
    q = jnp.zeros((1, 16, 1, 16))
    with pytest.raises(fm.ArgumentTypeError, match=f"^{name}: got .* known when the call is trac"):
        jax.jit(lambda bound: fm.flash_attention(q, q, q, **{name: bound}))(8)
