"""kv_gather of NumPy, torch and its operators, JAX, other DLPack objects, and what is refused. What
goes where is in tests/cpu/test_kv_gather.py."""

from __future__ import annotations

from typing import Any

import flashmoe_science as fm
import numpy as np
import pytest
from producers import ON_CPU
from reference import to_numpy

PAGES, PAGE, ROWS = 6, 4, 11


def arguments(values: bool = True, packed: bool = True) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    given = {
        "k_cache": normal(PAGES, PAGE, 2, 16), "v_cache": normal(PAGES, PAGE, 2, 24),
        "page_table": np.array([[3, 0], [5, 9]], np.int32),
        "seqused_k": np.array([7, 6], np.int32), "k_begin": np.array([2, 0], np.int32),
    }  # fmt: skip
    if packed:
        given["cu_seqlens_k"] = np.array([0, 5, ROWS], np.int32)
    if not values:
        del given["v_cache"]
    return given


def options(packed: bool) -> dict[str, Any]:
    return {"rows": ROWS} if packed else {}


def expected(values: bool = True, packed: bool = True) -> list[np.ndarray]:
    """Every row of the packed results; of padded ones those that are written."""
    given, made = arguments(), []
    for name in ("k_cache", "v_cache")[: 1 + values]:
        cache = given[name]
        first = cache[[3, 0]].reshape(8, 2, -1)[2:7]
        second = np.concatenate([cache[5], np.zeros_like(cache[5, :2])])
        made.append(
            np.concatenate([first, second])[None] if packed else np.stack([first, second[:5]])
        )
    return made


def assert_expected(made: Any, values: bool, packed: bool) -> None:
    made = made if values else (made,)
    assert isinstance(made, tuple)
    for got, want in zip(made, expected(values, packed), strict=True):
        got = np.asarray(got)
        if not packed:
            assert got.shape[:2] == (2, PAGE * 2)
            got = got[:, :5]
        np.testing.assert_array_equal(got, want)


def host(result: Any) -> np.ndarray:
    root = type(result).__module__.partition(".")[0]
    return np.asarray(result) if root in ("producers", "array_api_strict") else to_numpy(result)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("producer", ON_CPU, ids=str)
def test_every_framework(producer: Any, values: bool, packed: bool) -> None:
    given = {
        name: producer.as_is(x) if x.dtype == np.int32 else producer.make(x, "fp32")
        for name, x in arguments(values, packed).items()
    }
    made = fm.kv_gather(**given, **options(packed))
    assert all(isinstance(x, producer.kind) for x in (made if values else (made,)))
    assert_expected(tuple(map(host, made)) if values else host(made), values, packed)


def test_into_results_that_are_given() -> None:
    given = arguments()
    k, v = np.full((1, 13, 2, 16), 9, np.float32), np.full((1, 13, 2, 24), 9, np.float32)
    made = fm.kv_gather(**given, k=k, v=v)
    assert made[0] is k and made[1] is v
    assert_expected((k[:, :ROWS], v[:, :ROWS]), True, True)
    assert (k[:, ROWS:] == 9).all() and (v[:, ROWS:] == 9).all()


def test_a_plan_reads_nothing() -> None:
    given = arguments()
    plan = fm.kv_gather_plan(**given, rows=ROWS)
    assert (plan.operation, plan.family, plan.flops) == ("kv_gather", "cpu", 0)
    fm.kv_gather(**given, rows=ROWS)
    assert plan.launches == fm.last_launches()


def test_rows_and_dtype_are_asked_for_where_nothing_tells_them() -> None:
    given = arguments()
    for call in (fm.kv_gather, fm.kv_gather_plan):
        with pytest.raises(TypeError, match=r"^rows: got None"):
            call(**given)
        with pytest.raises(ValueError, match=r"^rows: got -1"):
            call(**given, rows=-1)
    torch = pytest.importorskip("torch")
    cache = torch.zeros(2, 4, 2, 16).to(torch.float8_e4m3fn)
    for call in (fm.kv_gather, fm.kv_gather_plan):
        with pytest.raises(ValueError, match=r"^dtype: got None, accepted beside a k_cache of 8 b"):
            call(cache)
    k = fm.kv_gather(cache, dtype=torch.bfloat16)
    assert k.dtype == torch.bfloat16 and k.shape == (2, 4, 2, 16)
    for wide in (torch.float64, "fp64"):
        with pytest.raises(fm.FlashMoEError, match="fp64"):
            fm.kv_gather(cache, dtype=wide)


def test_nothing_is_written_that_may_not_be() -> None:
    given = arguments()
    k, v = np.zeros((1, ROWS, 2, 16), np.float32), np.zeros((1, ROWS, 2, 24), np.float32)
    v.flags.writeable = False
    with pytest.raises(ValueError, match=r"^v: "):
        fm.kv_gather(**given, k=k, v=v)


MODEL = (256, 1)  # of GPUs: an H200


@pytest.mark.skipif("sm89" not in fm.build_info().kernel_families, reason="built without CUDA")
@pytest.mark.parametrize(("bits", "dtype"), [(16, "fp16"), (32, "fp32")])
def test_a_plan_of_a_gpu(bits: int, dtype: str) -> None:
    from flashmoe_science import _core

    given = {
        name: (x.shape, (0, 32) if x.dtype == np.int32 else (2, bits), MODEL, None)
        for name, x in arguments().items()
    }
    plan = fm.Plan.of(_core.plan("kv_gather", given, {"rows": ROWS}))
    assert (plan.family, plan.workspace_bytes) == ("sm89", 0)
    (launch,) = plan.launches
    assert launch.kernel == f"kv_gather_sm89_{dtype}"
    assert launch.shared_bytes > 0 and plan.microseconds > 0


class TestJax:
    @pytest.fixture(autouse=True)
    def _jax(self) -> None:
        self.jax = pytest.importorskip("jax")

    def arguments(self, values: bool = True, packed: bool = True) -> dict[str, Any]:
        return {n: self.jax.numpy.asarray(x) for n, x in arguments(values, packed).items()}

    @pytest.mark.parametrize("jitted", [False, True])
    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("values", [False, True])
    def test_bits_are_those_of_numpy(self, values: bool, packed: bool, jitted: bool) -> None:
        call = lambda given: fm.kv_gather(**given, **options(packed))  # noqa: E731
        made = (self.jax.jit(call) if jitted else call)(self.arguments(values, packed))
        assert_expected(made, values, packed)

    def test_fp8(self) -> None:
        jnp = self.jax.numpy
        cache = jnp.arange(2 * 4 * 2 * 16).reshape(2, 4, 2, 16).astype(jnp.float8_e4m3fn)
        scale = jnp.float32(0.5)
        k = self.jax.jit(lambda x: fm.kv_gather(x, k_scale=scale, dtype=jnp.bfloat16))(cache)
        assert k.dtype == jnp.bfloat16
        np.testing.assert_array_equal(k, (cache.astype(jnp.float32) * 0.5).astype(jnp.bfloat16))

    def test_vmap_is_one_call_after_another(self) -> None:
        twice = {n: self.jax.numpy.stack([x, x]) for n, x in self.arguments().items()}
        made = self.jax.vmap(lambda given: fm.kv_gather(**given, rows=ROWS))(twice)
        for got, want in zip(made, expected(), strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.stack([want, want]))

    def test_what_is_wrong_is_raised_while_it_is_traced(self) -> None:
        given = self.arguments()
        call = self.jax.jit(lambda given: fm.kv_gather(**given, rows=ROWS))
        with pytest.raises(ValueError, match=r"^seqused_k: got 1 numbers"):
            call(given | {"seqused_k": given["seqused_k"][:1]})
        with pytest.raises(TypeError, match=r"^rows: got None"):
            fm.kv_gather(**given)
        with pytest.raises(ValueError, match=r"^k: JAX arrays cannot be written to"):
            fm.kv_gather(**given, k=given["k_cache"])

    def test_derivatives_are_refused(self) -> None:
        given = self.arguments()

        def loss(k_cache: Any) -> Any:
            return fm.kv_gather(**(given | {"k_cache": k_cache}), rows=ROWS)[0].sum()

        with pytest.raises(ValueError, match="a derivative of gathering from a cache is asked for"):
            self.jax.grad(loss)(given["k_cache"])


class TestTorch:
    @pytest.fixture(autouse=True)
    def _torch(self) -> None:
        self.torch = pytest.importorskip("torch", minversion="2.6")

    def arguments(self, values: bool = True, packed: bool = True) -> dict[str, Any]:
        return {n: self.torch.from_numpy(x) for n, x in arguments(values, packed).items()}

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("values", [False, True])
    def test_compiled(self, values: bool, packed: bool, backend: str) -> None:
        self.torch._dynamo.reset()
        step = self.torch.compile(
            lambda given: fm.kv_gather(**given, **options(packed)), backend=backend, fullgraph=True
        )
        assert_expected(step(self.arguments(values, packed)), values, packed)

    @pytest.mark.parametrize("values", [False, True])
    def test_operators(self, values: bool) -> None:
        import flashmoe_science.torch

        assert flashmoe_science.torch.kv_gather is not fm.kv_gather
        given = self.arguments(values)
        names = ("k_cache", "v_cache", "cu_seqlens_k", "seqused_k", "k_begin", "batch_index",
                 "page_table", "k_scale", "v_scale")  # fmt: skip
        keys_alone = ("v_cache", "v_scale")
        tensors = [given.get(name) for name in names if values or name not in keys_alone]
        operators = self.torch.ops.flashmoe
        operator = operators.kv_gather if values else operators.kv_gather_keys
        self.torch.library.opcheck(operator.default, (*tensors, "bshd", ROWS, None, None))

    def test_one_graph_of_any_extents(self) -> None:
        self.torch._dynamo.reset()
        counted = self.torch._dynamo.testing.CompileCounter()
        step = self.torch.compile(
            lambda given, rows: fm.kv_gather(**given, rows=rows), backend=counted, dynamic=True
        )
        for rows in (ROWS, 13, 40):
            made = step(self.arguments(), rows)
            assert made[0].shape[1] == rows
            assert_expected(tuple(x[:, :ROWS] for x in made), True, True)
        assert counted.frame_count == 1

    def test_wrong_calls_have_the_librarys_sentence(self) -> None:
        given = self.arguments()
        step = self.torch.compile(lambda given: fm.kv_gather(**given, rows=ROWS), backend="eager")
        with pytest.raises(Exception, match="seqused_k: got 1 numbers"):
            step(given | {"seqused_k": given["seqused_k"][:1]})
        step = self.torch.compile(lambda given: fm.kv_gather(**given), backend="eager")
        with pytest.raises(Exception, match="rows: got None"):
            step(given)

    @pytest.mark.parametrize("name", ["k_cache", "v_cache"])
    def test_gradients_are_refused(self, name: str) -> None:
        given = self.arguments()
        given[name] = given[name].clone().requires_grad_()
        with pytest.raises(ValueError, match=f"^{name}: requires grad, but gathering from a cache"):
            fm.kv_gather(**given, rows=ROWS)
        with self.torch.no_grad():
            fm.kv_gather(**given, rows=ROWS)

    def test_tables_are_of_the_same_library(self) -> None:
        given = self.arguments() | {"seqused_k": arguments()["seqused_k"]}
        with pytest.raises(TypeError, match="seqused_k"):
            fm.kv_gather(**given, rows=ROWS)
