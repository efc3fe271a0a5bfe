"""The mixture of experts on JAX arrays on the GPU: eager, under jit, in loops, by every family."""

from __future__ import annotations

from typing import Any

import flashmoe_science as fm
import moe_oracle
import numpy as np
import pytest
import reference
from gpu import moe_layers
from moe_cases import CASES, Case, arrays_of

pytestmark = pytest.mark.gpu


def arguments_of(case: Case, dtype: str, where: Any) -> dict[str, Any]:
    """moe_forward's tensors on a device, rounded to dtype; on None NumPy's own."""
    import jax

    def placed(values: np.ndarray) -> Any:
        values = np.ascontiguousarray(values)
        return values if where is None else jax.device_put(values, where)

    made: dict[str, Any] = {}
    for name, values in arrays_of(case).items():
        if name == "routing":
            made[name] = fm.MoeRouting(*(None if p is None else placed(p) for p in values))
        else:
            single = name.startswith("b_") and case.bias == "fp32"
            made[name] = placed(values.astype(np.float32 if single else reference.DTYPES[dtype]))
    return made


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(jax_gpu: Any, case: Case, dtype: str) -> None:
    import jax

    given = arguments_of(case, dtype, jax_gpu)
    layer = jax.jit(lambda a: fm.moe_forward(**a, **case.options, return_pre_activation=True))
    out, before = layer(given)
    assert out.devices() == before.devices() == {jax_gpu}
    moe_oracle.assert_forward(
        np.asarray(out), **arguments_of(case, dtype, None), **case.options,
        pre_activation=np.asarray(before),
    )  # fmt: skip
    eager = fm.moe_forward(**given, **case.options)
    assert (np.asarray(eager) == np.asarray(out)).all()


def test_every_family_by_name(jax_gpu: Any) -> None:
    case = Case(tokens=64, hidden=256, inner=128, experts=8)
    given = arguments_of(case, "bf16", jax_gpu)
    want = arguments_of(case, "bf16", None)
    families = moe_layers.serving()
    assert families
    for family in families:
        out = fm.moe_forward(**given, kernel=family)
        moe_oracle.assert_forward(np.asarray(out), **want)
    with pytest.raises(NotImplementedError, match="kernel: cannot be served: cpu"):
        fm.moe_forward(**given, kernel="cpu")
    with pytest.raises(NotImplementedError, match="fp32, accepted on a GPU are fp16 and bf16"):
        fm.moe_forward(**arguments_of(case, "fp32", jax_gpu))


def test_route(jax_gpu: Any) -> None:
    import jax

    rng = np.random.default_rng(0)
    logits = rng.standard_normal((3000, 128), np.float32)
    bias = rng.standard_normal(128, np.float32)
    softmax: dict[str, Any] = {"top_k": 8, "renormalize": True}
    routed = jax.jit(lambda z: fm.moe_route(z, **softmax, return_lse=True))(
        jax.device_put(logits, jax_gpu)
    )
    assert routed.ids.devices() == {jax_gpu}
    moe_oracle.assert_routed(jax.tree.map(np.asarray, routed), moe_oracle.route(logits, **softmax))
    groups: dict[str, Any] = {"top_k": 8, "scoring": "sigmoid", "num_groups": 8, "top_groups": 4}
    if moe_oracle.closest_choices(logits, selection_bias=bias, **groups) > 1e-6:
        routed = fm.moe_route(
            jax.device_put(logits, jax_gpu), selection_bias=jax.device_put(bias, jax_gpu), **groups
        )
        want = moe_oracle.route(logits, selection_bias=bias, **groups)
        moe_oracle.assert_routed(jax.tree.map(np.asarray, routed), want)
    ids = rng.integers(-1, 20, (500, 4)).astype(np.int32)
    given = fm.moe_route_given(jax.device_put(ids, jax_gpu), num_experts=16)
    want = moe_oracle.route_given(ids, None, num_experts=16)
    moe_oracle.assert_routed(jax.tree.map(np.asarray, given), want)


def test_grouped_product(jax_gpu: Any) -> None:
    import jax

    rng = np.random.default_rng(0)
    half = reference.DTYPES["bf16"]
    w = rng.standard_normal((5, 64, 128), np.float32).astype(half)
    x = rng.standard_normal((300, 128), np.float32).astype(half)
    offsets = np.array([0, 100, 100, 101, 290, 300], np.int32)
    put = lambda value: jax.device_put(value, jax_gpu)  # noqa: E731
    out = jax.jit(lambda x, w, o: fm.grouped_product(x, w, offsets=o))(put(x), put(w), put(offsets))
    moe_oracle.assert_grouped_product(np.asarray(out), x, w, offsets=offsets)
    rows = rng.standard_normal((5, 40, 128), np.float32).astype(half)
    counts = np.array([40, 0, 7, 39, 1], np.int32)
    out = fm.grouped_product(put(rows), put(w), counts=put(counts))
    moe_oracle.assert_grouped_product(np.asarray(out), rows, w, counts=counts)


@pytest.mark.parametrize("experts", [16, 12])  # by our product, and by JAX's own
def test_fused_moe_inside_a_larger_program(jax_gpu: Any, experts: int) -> None:
    """In a loop, whose body XLA may run as a CUDA graph: the same bits every time, and those of
    the three operations one by one."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        values = rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5
        return jax.device_put(values.astype(reference.DTYPES["bf16"]), jax_gpu)

    x, router = normal(2, 100, 256), normal(experts, 256)
    w_gate_up, w_down = normal(experts, 256, 256), normal(experts, 256, 128)

    def layer(x: Any) -> Any:
        return fm.fused_moe(x, router, w_gate_up, w_down, 4, renormalize=True)

    @jax.jit
    def program(x: Any) -> Any:
        def step(x: Any, _: Any) -> tuple[Any, Any]:
            return (x + layer(x)).astype(jnp.bfloat16), None

        return jax.lax.scan(step, x, None, length=4)[0]

    first = np.asarray(program(x))
    assert np.isfinite(first.astype(np.float32)).all()
    assert all((np.asarray(program(x)) == first).all() for _ in range(20))
    step_by_step = x
    for _ in range(4):
        step_by_step = (step_by_step + layer(step_by_step)).astype(jnp.bfloat16)
    assert (np.asarray(step_by_step) == first).all()
    folded = jax.vmap(layer)(x)
    assert (np.asarray(folded) == np.asarray(layer(x))).all()


def test_no_tokens(jax_gpu: Any) -> None:
    import jax
    import jax.numpy as jnp

    with jax.default_device(jax_gpu):
        routing = fm.moe_route(jnp.zeros((0, 8)), 2)
        assert routing.offsets.tolist() == [0] * 9
        half = jnp.bfloat16
        out = fm.moe_forward(
            jnp.zeros((0, 64), half), jnp.zeros((8, 64, 64), half), jnp.zeros((8, 64, 32), half),
            routing,
        )  # fmt: skip
    assert out.shape == (0, 64)
