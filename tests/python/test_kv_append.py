"""kv_append of NumPy, torch and its operators, other DLPack objects, and what is refused. What it
writes where is in tests/cpu/test_kv_append.py."""

from __future__ import annotations

from typing import Any

import flashmoe_science as fm
import numpy as np
import pytest

PAGES, PAGE = 6, 4


def arguments(q: bool = True) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    given = {
        "k": normal(2, 3, 2, 16), "v": normal(2, 3, 2, 24), "k_cache": normal(PAGES, PAGE, 2, 16),
        "v_cache": normal(PAGES, PAGE, 2, 24), "rotary_cos": normal(16, 4),
        "rotary_sin": normal(16, 4), "cache_seqlens": np.array([2, 5], np.int32),
        "page_table": np.array([[3, 0], [5, 2]], np.int32),
    }  # fmt: skip
    return given | ({"q": normal(2, 3, 4, 16)} if q else {})


def expected(q: bool = True) -> list[np.ndarray]:
    """By NumPy: caches, and the rotated queries if there are any."""
    given = arguments(q)
    rotated = fm.kv_append(**given)
    made = [given["k_cache"], given["v_cache"]]
    return [*made, rotated] if q else made


def test_numpy() -> None:
    given, before = arguments(), arguments()
    rotated = fm.kv_append(**given)
    assert isinstance(rotated, np.ndarray) and rotated.shape == given["q"].shape
    cos, sin = (given[f"rotary_{n}"].astype(np.float64)[5:8, None] for n in ("cos", "sin"))
    x = before["k"].astype(np.float64)[1]
    want = x.copy()
    want[..., :4] = x[..., :4] * cos - x[..., 4:8] * sin
    want[..., 4:8] = x[..., 4:8] * cos + x[..., :4] * sin
    np.testing.assert_allclose(given["k_cache"][2, 1:4], want, atol=1e-6)
    assert (given["v_cache"][2, 1:4] == before["v"][1]).all()
    assert (given["v_cache"][5] == before["v_cache"][5]).all()
    assert fm.kv_append(**arguments(q=False)) is None


def test_a_plan_reads_nothing() -> None:
    given = arguments()
    plan = fm.kv_append_plan(**given)
    assert (plan.operation, plan.family, plan.flops) == ("kv_append", "cpu", 0)
    assert (given["k_cache"] == arguments()["k_cache"]).all()
    fm.kv_append(**given)
    assert plan.launches == fm.last_launches()
    assert plan.launches[0].kernel == f"kv_append_cpu_{plan.isa}_fp32_rotary_neox"


def test_nothing_is_written_that_may_not_be() -> None:
    given = arguments()
    given["v_cache"].flags.writeable = False
    with pytest.raises(ValueError, match=r"^v_cache: "):
        fm.kv_append(**given)


def _there(array: np.ndarray, device: tuple[int, int], bits: int = 32) -> Any:
    """A description of a tensor on a device, as plans by name take it."""
    floats = array.dtype == np.float32
    return array.shape, (2, bits) if floats else (0, 32), device, None


MODEL = (256, 1)  # of GPUs: an H200


@pytest.mark.skipif("sm89" not in fm.build_info().kernel_families, reason="built without CUDA")
@pytest.mark.parametrize(("bits", "dtype"), [(16, "fp16"), (32, "fp32")])
def test_a_plan_of_a_gpu(bits: int, dtype: str) -> None:
    from flashmoe_science import _core

    given = {name: _there(x, MODEL, bits) for name, x in arguments().items()}
    plan = fm.Plan.of(_core.plan("kv_append", given, {}))
    assert (plan.family, plan.workspace_bytes) == ("sm89", 0)
    (launch,) = plan.launches
    assert launch.kernel == f"kv_append_sm89_{dtype}" and launch.block[1:] == (1, 1)
    assert launch.shared_bytes == 0 and plan.microseconds > 0


def test_gpus_refuse_fp64_and_builds_without_cuda_gpus() -> None:
    from flashmoe_science import _core

    wide = {name: _there(x, (2, 0), 64) for name, x in arguments().items()}
    with pytest.raises(fm.UnsupportedError, match=r"^k: it is on cuda:0 and of dtype fp64, acc"):
        _core.plan("kv_append", wide, {})
    if "sm89" in fm.build_info().kernel_families:
        return
    given = {name: _there(x, (2, 0)) for name, x in arguments().items()}
    with pytest.raises(fm.UnsupportedError, match="built without CUDA"):
        _core.plan("kv_append", given, {})


class TestJax:
    """New caches, in the memory of the old ones where these are donated."""

    @pytest.fixture(autouse=True)
    def _jax(self) -> None:
        self.jax = pytest.importorskip("jax")

    def arguments(self, q: bool = True) -> dict[str, Any]:
        return {name: self.jax.numpy.asarray(x) for name, x in arguments(q).items()}

    @pytest.mark.parametrize("q", [False, True])
    @pytest.mark.parametrize("jitted", [False, True])
    def test_bits_are_those_of_numpy(self, jitted: bool, q: bool) -> None:
        given = self.arguments(q)
        call = lambda given: fm.kv_append(**given)  # noqa: E731
        made = (self.jax.jit(call) if jitted else call)(given)
        assert isinstance(made, tuple)
        for got, want in zip(made, expected(q), strict=True):
            np.testing.assert_array_equal(np.asarray(got), want)
        for name, x in arguments(q).items():  # which nothing was written to
            np.testing.assert_array_equal(np.asarray(given[name]), x)

    def test_donated_caches_are_written_in_place(self) -> None:
        given = self.arguments()
        caches = given.pop("k_cache"), given.pop("v_cache")
        where = [x.unsafe_buffer_pointer() for x in caches]

        def step(k_cache: Any, v_cache: Any, rest: dict[str, Any]) -> Any:
            return fm.kv_append(k_cache=k_cache, v_cache=v_cache, **rest)

        made = self.jax.jit(step, donate_argnums=(0, 1))(*caches, given)
        assert [x.unsafe_buffer_pointer() for x in made[:2]] == where
        assert all(x.is_deleted() for x in caches)
        for got, want in zip(made, expected(), strict=True):
            np.testing.assert_array_equal(np.asarray(got), want)

    def test_a_loop_over_tokens(self) -> None:
        """As a program that generates has it: the cache is a loop's state."""
        jax, given = self.jax, self.arguments(q=False)
        lengths = given.pop("cache_seqlens")
        k, v = given.pop("k"), given.pop("v")

        def step(i: Any, caches: Any) -> Any:
            one = (jax.lax.dynamic_slice_in_dim(x, i, 1, axis=1) for x in (k, v))
            return fm.kv_append(*one, *caches, cache_seqlens=lengths + i, **rest)

        rest = {name: x for name, x in given.items() if name not in ("k_cache", "v_cache")}
        made = jax.jit(lambda caches: jax.lax.fori_loop(0, 3, step, caches))(
            (given["k_cache"], given["v_cache"])
        )
        for got, want in zip(made, expected(q=False), strict=True):
            np.testing.assert_array_equal(np.asarray(got), want)

    def test_vmap_is_one_call_after_another(self) -> None:
        given = self.arguments()
        twice = {name: self.jax.numpy.stack([x, x]) for name, x in given.items()}
        made = self.jax.vmap(lambda given: fm.kv_append(**given))(twice)
        for got, want in zip(made, expected(), strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.stack([want, want]))

    def test_what_is_wrong_is_raised_while_it_is_traced(self) -> None:
        given = self.arguments()
        with pytest.raises(ValueError, match="v: its sequence length is 2, but k has 3"):
            self.jax.jit(lambda given: fm.kv_append(**given))(given | {"v": given["v"][:, :2]})
        with pytest.raises(ValueError, match=r"^q_out: JAX arrays cannot be written to"):
            fm.kv_append(**given, q_out=given["q"])

    def test_a_call_is_refused_whose_caches_are_not_where_they_were(self) -> None:
        """A program that this package did not make has XLA put them elsewhere."""
        from flashmoe_science import _core

        jax, given = self.jax, self.arguments(q=False)
        names = ("k", "v", "k_cache", "v_cache")
        arrays = [given[name] for name in names]
        made = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[2:]]
        options = _core.pack_options("kv_append", {})

        def call(outputs: str, inputs: str = "k v k_cache v_cache ", **how: Any) -> Any:
            make = jax.ffi.ffi_call("flashmoe_kv_append_v1", made, **how)
            return make(*arrays, inputs=inputs, outputs=outputs, options=options)

        import flashmoe_science.jax  # noqa: F401

        both, aliases = "k_cache v_cache ", {"input_output_aliases": {2: 0, 3: 1}}
        arrays[2:] = [jax.numpy.zeros((2, 9, 2, n)) for n in (16, 24)]
        made = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[2:]]
        np.testing.assert_array_equal(call(both, **aliases)[0][:, :3], given["k"])
        others = ((both, {}), ("v_cache k_cache ", aliases), ("k_cache q_out ", aliases))
        for outputs, how in others:
            with pytest.raises(Exception, match="call this target through flashmoe_science"):
                jax.block_until_ready(call(outputs, **how))

    def test_derivatives_are_refused(self) -> None:
        given = self.arguments(q=False)

        def loss(k: Any) -> Any:
            return fm.kv_append(**(given | {"k": k}))[0].sum()

        with pytest.raises(ValueError, match="a derivative of appending to a cache is asked for"):
            self.jax.grad(loss)(given["k"])


class TestTorch:
    @pytest.fixture(autouse=True)
    def _torch(self) -> None:
        self.torch = pytest.importorskip("torch", minversion="2.6")

    def arguments(self, q: bool = True) -> dict[str, Any]:
        return {name: self.torch.from_numpy(x) for name, x in arguments(q).items()}

    @pytest.mark.parametrize("q", [False, True])
    def test_bits_are_those_of_numpy(self, q: bool) -> None:
        given = self.arguments(q)
        version = given["k_cache"]._version
        rotated = fm.kv_append(**given)
        made = [given["k_cache"], given["v_cache"], *([rotated] if q else [])]
        for got, want in zip(made, expected(q), strict=True):
            np.testing.assert_array_equal(got.numpy(), want)
        assert given["k_cache"]._version > version

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    @pytest.mark.parametrize("q", [False, True])
    def test_compiled(self, q: bool, backend: str) -> None:
        self.torch._dynamo.reset()
        given = self.arguments(q)
        step = self.torch.compile(
            lambda given: fm.kv_append(**given), backend=backend, fullgraph=True
        )
        rotated = step(given)
        made = [given["k_cache"], given["v_cache"], *([rotated] if q else [])]
        for got, want in zip(made, expected(q), strict=True):
            np.testing.assert_array_equal(got.numpy(), want)

    @pytest.mark.parametrize("q", [False, True])
    def test_operators(self, q: bool) -> None:
        import flashmoe_science.torch

        assert flashmoe_science.torch.kv_append is not fm.kv_append
        given = self.arguments(q)
        tensors = [given.get(name) for name in (
            "k", "v", "k_cache", "v_cache", "slots", "cache_seqlens", "cu_seqlens", "seqused",
            "batch_index", "page_table", "positions", "rotary_cos", "rotary_sin", "k_scale",
            "v_scale",
        )]  # fmt: skip
        operator = self.torch.ops.flashmoe.kv_append_with_q if q else (
            self.torch.ops.flashmoe.kv_append
        )  # fmt: skip
        queries = [given["q"]] if q else []
        self.torch.library.opcheck(
            operator.default, (*tensors, *queries, True, False, "bshd", None),
        )  # fmt: skip

    def test_wrong_calls_have_the_librarys_sentence(self) -> None:
        given = self.arguments()
        step = self.torch.compile(lambda given: fm.kv_append(**given), backend="eager")
        with pytest.raises(Exception, match="v: its sequence length is 2, but k has 3"):
            step(given | {"v": given["v"][:, :2]})

    @pytest.mark.parametrize("name", ["k", "v", "k_cache", "q"])
    def test_gradients_are_refused(self, name: str) -> None:
        given = self.arguments()
        given[name] = given[name].clone().requires_grad_()
        with pytest.raises(ValueError, match=f"^{name}: requires grad, but appending to a cache"):
            fm.kv_append(**given)
        with self.torch.no_grad():
            fm.kv_append(**given)

    def test_tables_are_of_the_same_library(self) -> None:
        given = self.arguments() | {"cache_seqlens": arguments()["cache_seqlens"]}
        with pytest.raises(TypeError, match="cache_seqlens"):
            fm.kv_append(**given)
