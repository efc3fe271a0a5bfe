"""kv_append of JAX arrays on the GPU: new caches, in the memory of the old ones where these are
donated."""

from __future__ import annotations

from typing import Any

import flashmoe_science as fm
import numpy as np
import pytest
from append_cases import Case

pytestmark = pytest.mark.gpu


def _case(dtype: str, **fixed: Any) -> Case:
    rng = np.random.default_rng(9)
    while True:
        case = Case(rng, dtype, layout="bshd", wide=False, most_heads=4, most_dim=128, **fixed)
        if case.k.size and case.bshd(case.given["q"]).size:
            return case


def _wanted(case: Case) -> list[np.ndarray]:
    """By the CPU; rows of q that stand nowhere are anything."""
    rotated = case.call()
    return [*case.caches, rotated]


def _assert_same(made: Any, want: list[np.ndarray], case: Case) -> None:
    assert len(made) == len(want)
    for got, cpu in zip(made[:2], want, strict=False):
        assert np.asarray(got).tobytes() == cpu.tobytes()
    q_out = case.expected()[2]
    written = q_out != -77.0
    got = np.asarray(made[2]).astype(np.float64)
    np.testing.assert_array_equal(got[written], want[2].astype(np.float64)[written])


@pytest.mark.parametrize("way", ["plain", "paged", "slots"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_bits_are_those_of_the_cpu(jax_gpu: Any, dtype: str, way: str) -> None:
    import jax

    case = _case(dtype, way=way, rotary="neox")
    there = {n: jax.device_put(x.copy(), jax_gpu) if isinstance(x, np.ndarray) else x
             for n, x in case.given.items()}  # fmt: skip
    arrays = [jax.device_put(x.copy(), jax_gpu) for x in (case.k, case.v, *case.caches)]
    want = _wanted(case)
    call = lambda *arrays: fm.kv_append(*arrays, **there)  # noqa: E731
    for made in (call(*arrays), jax.jit(call)(*arrays)):
        _assert_same(made, want, case)


def test_donated_caches_are_written_in_place(jax_gpu: Any) -> None:
    import jax

    case = _case("bfloat16", way="paged", rotary="interleaved", packed=True)
    there = {n: jax.device_put(x.copy(), jax_gpu) if isinstance(x, np.ndarray) else x
             for n, x in case.given.items()}  # fmt: skip
    k, v = (jax.device_put(x.copy(), jax_gpu) for x in (case.k, case.v))
    caches = [jax.device_put(x.copy(), jax_gpu) for x in case.caches]
    where = [x.unsafe_buffer_pointer() for x in caches]

    def step(k_cache: Any, v_cache: Any, k: Any, v: Any) -> Any:
        return fm.kv_append(k, v, k_cache, v_cache, **there)

    compiled = jax.jit(step, donate_argnums=(0, 1))
    made = compiled(*caches, k, v)
    assert [x.unsafe_buffer_pointer() for x in made[:2]] == where
    want = _wanted(case)
    _assert_same(made, want, case)
    for _ in range(3):  # XLA may make a CUDA graph of it
        made = compiled(*made[:2], k, v)
    _assert_same(made, want, case)


def test_a_loop_that_generates(jax_gpu: Any) -> None:
    """Append and attend, token by token; the cache is the loop's state."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    batch, tokens, heads, heads_kv, dim = 3, 9, 4, 2, 64
    normal = lambda *shape: jax.device_put(  # noqa: E731
        rng.standard_normal(shape, np.float32).astype(jnp.bfloat16), jax_gpu
    )
    q, k, v = (normal(batch, tokens, n, dim) for n in (heads, heads_kv, heads_kv))
    caches = [jnp.zeros_like(normal(batch, 16, heads_kv, dim)) for _ in "kv"]
    lengths = jax.device_put(np.array([0, 3, 7], np.int32), jax_gpu)

    def step(carry: Any, i: Any) -> Any:
        k_cache, v_cache = carry
        one = [jax.lax.dynamic_slice_in_dim(x, i, 1, axis=1) for x in (q, k, v)]
        at = lengths + i.astype(jnp.int32)
        k_cache, v_cache = fm.kv_append(one[1], one[2], k_cache, v_cache, cache_seqlens=at)
        out = fm.flash_attention(one[0], k_cache, v_cache, seqused_k=at + 1)
        return (k_cache, v_cache), out[:, 0]

    run = jax.jit(lambda *caches: jax.lax.scan(step, caches, jnp.arange(tokens)))
    (k_cache, v_cache), outs = run(*caches)
    for b, length in enumerate(np.asarray(lengths)):
        np.testing.assert_array_equal(
            np.asarray(k_cache[b, length : length + tokens]), np.asarray(k[b])
        )
        assert (np.asarray(v_cache[b, :length]) == 0).all()
    whole = fm.flash_attention(q[:1], k_cache[:1, :tokens], v_cache[:1, :tokens], causal=True)
    error = np.abs(np.asarray(outs[:, 0], np.float32) - np.asarray(whole[0], np.float32))
    assert error.max() < 2**-6
