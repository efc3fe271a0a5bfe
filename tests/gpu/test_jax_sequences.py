"""Ragged, padded and paged batches and decoding on JAX arrays on the GPU: the bits of torch's call
with the same arrays, which other tests hold to float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flashmoe_science as fm
import numpy as np
import pytest
import torch
from reference import DTYPES

pytestmark = pytest.mark.gpu

HEADS, HEADS_KV, DIM = 8, 2, 64
PAGE, PAGES = 16, 80
BATCH, KEYS = 5, 200
LENGTHS = ([200, 1, 0, 77, 130], [3, 200, 64, 16, 199])

Arrays = dict[str, np.ndarray]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32)


def int32(values: Any) -> np.ndarray:
    return np.asarray(values, np.int32)


def packed(lengths: list[int]) -> tuple[Arrays, Arrays, dict[str, Any]]:
    total = 500
    offsets = int32(np.append(0, np.cumsum([n * 2 // 3 for n in lengths])))
    rows = {"q": normal(1, total, HEADS, DIM), "k": normal(1, total, HEADS_KV, DIM, seed=1),
            "v": normal(1, total, HEADS_KV, DIM, seed=2)}  # fmt: skip
    bounds = {"max_seqlen_q": KEYS, "max_seqlen_k": KEYS}
    return rows, {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}, bounds


def padded(lengths: list[int], queries: int = KEYS) -> tuple[Arrays, Arrays, dict[str, Any]]:
    rows = {"q": normal(BATCH, queries, HEADS, DIM),
            "k": normal(BATCH, KEYS, HEADS_KV, DIM, seed=1),
            "v": normal(BATCH, KEYS, HEADS_KV, DIM, seed=2)}  # fmt: skip
    return rows, {"seqused_k": int32(lengths)}, {}


def on_the_left(lengths: list[int]) -> tuple[Arrays, Arrays, dict[str, Any]]:
    rows, tables, _ = padded(lengths)
    return rows, {"k_begin": KEYS - tables["seqused_k"]}, {}


def paged(lengths: list[int], queries: int = 1) -> tuple[Arrays, Arrays, dict[str, Any]]:
    rows = {"q": normal(BATCH, queries, HEADS, DIM),
            "k": normal(PAGES, PAGE, HEADS_KV, DIM, seed=1),
            "v": normal(PAGES, PAGE, HEADS_KV, DIM, seed=2)}  # fmt: skip
    per_row = -(-KEYS // PAGE)
    table = np.random.default_rng(5).permutation(PAGES)[: BATCH * per_row].reshape(BATCH, per_row)
    return rows, {"page_table": int32(table), "seqused_k": int32(lengths)}, {}


WAYS: dict[str, Callable[[list[int]], tuple[Arrays, Arrays, dict[str, Any]]]] = {
    "packed": packed,
    "padded": padded,
    "padded on the left": on_the_left,
    "decode": lambda lengths: padded(lengths, 1),
    "paged decode": paged,
    "paged decode, of chunks": lambda lengths: (*paged(lengths)[:2], {"split_size": 64}),
    "a speculated chunk": lambda lengths: paged(lengths, 4),
}


def on_jax(arrays: Arrays, device: Any, dtype: str = "bf16") -> dict[str, Any]:
    import jax

    return {n: jax.device_put(x if x.dtype == np.int32 else x.astype(DTYPES[dtype]), device)
            for n, x in arrays.items()}  # fmt: skip


def on_torch(arrays: Arrays, dtype: str = "bf16") -> dict[str, torch.Tensor]:
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    return {n: torch.from_numpy(x).cuda() if x.dtype == np.int32
            else torch.from_numpy(x).to(kind).cuda() for n, x in arrays.items()}  # fmt: skip


def written(name: str, tables: Arrays, out: np.ndarray) -> np.ndarray:
    """Rows that a sequence has, of an array by rows."""
    if "cu_seqlens_q" in tables:
        return out[:, : tables["cu_seqlens_q"][-1]]
    return out


def wide(array: Any) -> np.ndarray:
    if isinstance(array, torch.Tensor):
        return array.detach().float().cpu().numpy()
    return np.asarray(array).astype(np.float32)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", WAYS)
def test_bits_are_those_of_torchs_call(jax_gpu: Any, name: str, dtype: str) -> None:
    """Eagerly and under jit, where one program serves other lengths."""
    import jax

    bounds: dict[str, Any] = WAYS[name](LENGTHS[0])[2]

    def call(rows: Any, tables: Any) -> Any:
        return fm.flash_attention(
            **rows, **tables, **bounds, causal=True, return_lse=True
        )  # fmt: skip

    compiled = jax.jit(call)
    for lengths in LENGTHS:
        rows, tables, _ = WAYS[name](lengths)
        want, want_lse = call(on_torch(rows, dtype), on_torch(tables))
        given = on_jax(rows, jax_gpu, dtype), on_jax(tables, jax_gpu)
        for made in (call, compiled):
            out, lse = made(*given)
            assert out.devices() == {jax_gpu}
            np.testing.assert_array_equal(
                written(name, tables, wide(out)), written(name, tables, wide(want))
            )
            by_rows = wide(lse).swapaxes(1, 2), wide(want_lse).swapaxes(1, 2)
            np.testing.assert_array_equal(*(written(name, tables, x) for x in by_rows))
    assert compiled._cache_size() == 1


def test_vmap_folds_rows_of_caches(jax_gpu: Any) -> None:
    import jax
    import jax.numpy as jnp

    many = [on_jax(x, jax_gpu) for x in padded(LENGTHS[0], 1)[:2]]
    others = [on_jax(x, jax_gpu) for x in padded(LENGTHS[1], 1)[:2]]
    call = lambda rows, tables: fm.flash_attention(**rows, **tables)  # noqa: E731
    stacked = jax.tree.map(lambda *x: jnp.stack(x), many, others)
    got = jax.jit(jax.vmap(call))(*stacked)
    for i, each in enumerate((many, others)):
        # How keys are parted depends on the batch.
        np.testing.assert_allclose(wide(got[i]), wide(call(*each)), atol=2e-2)


@pytest.mark.parametrize("name", ["packed", "padded"])
def test_gradients(jax_gpu: Any, name: str) -> None:
    import jax

    rows, tables, bounds = WAYS[name](LENGTHS[0])
    try:
        fm.attention_backward_plan_for(
            batch=2, seq_q=64, seq_k=64, heads_q=8, heads_kv=2, dim=DIM, device="cuda"
        )
    except fm.UnsupportedError as refusal:
        pytest.skip(f"gradients: {refusal}")

    def attend(q: Any, k: Any, v: Any, tables: Any) -> Any:
        return fm.flash_attention(q, k, v, causal=True, return_lse=True, **tables, **bounds)

    dout = normal(*rows["q"].shape, seed=3)
    there = on_torch(rows)
    for x in there.values():
        x.requires_grad_()
    out, _ = attend(*there.values(), on_torch(tables))
    out.backward(on_torch({"dout": dout})["dout"])
    given, on_gpu = on_jax(rows, jax_gpu), on_jax(tables, jax_gpu)

    @jax.jit
    def gradients(rows: Any, tables: Any, dout: Any) -> Any:
        _, pull = jax.vjp(lambda rows: attend(**rows, tables=tables)[0], rows)
        return pull(dout)[0]

    got = gradients(given, on_gpu, on_jax({"dout": dout}, jax_gpu)["dout"])
    for which, x in there.items():
        assert x.grad is not None
        np.testing.assert_array_equal(
            written(name, tables, wide(got[which])), written(name, tables, wide(x.grad))
        )


def test_a_loop_that_decodes_from_pages(jax_gpu: Any) -> None:
    """Append and attend, token by token, in pages that are the loop's state."""
    import jax
    import jax.numpy as jnp

    steps = 40
    table = int32(np.random.default_rng(5).permutation(12).reshape(2, 6))
    rows = {"q": normal(steps, 2, 1, HEADS, DIM), "k": normal(steps, 2, 1, HEADS_KV, DIM, seed=1),
            "v": normal(steps, 2, 1, HEADS_KV, DIM, seed=2)}  # fmt: skip
    given, (pages,) = on_jax(rows, jax_gpu), on_jax({"t": table}, jax_gpu).values()
    cache = jnp.zeros((12, PAGE, HEADS_KV, DIM), jnp.bfloat16, device=jax_gpu)
    begin = jnp.asarray([0, 30], jnp.int32)

    @jax.jit
    def generate(given: Any, k_cache: Any, v_cache: Any, at: Any) -> Any:
        def step(state: Any, one: Any) -> Any:
            k_cache, v_cache, at = state
            k_cache, v_cache = fm.kv_append(
                one["k"], one["v"], k_cache, v_cache, cache_seqlens=at, page_table=pages
            )
            out = fm.flash_attention(one["q"], k_cache, v_cache, page_table=pages, seqused_k=at + 1)
            return (k_cache, v_cache, at + 1), out

        return jax.lax.scan(step, (k_cache, v_cache, at), given)[1]

    outs = generate(given, cache, cache, begin)
    q, k, v = (wide(x)[:, 0, 0] for x in given.values())  # the first row has no older keys
    for i in (0, 7, 39):
        for h in range(HEADS):
            keys, values = (x[: i + 1, h // (HEADS // HEADS_KV)] for x in (k, v))
            scores = keys @ q[i, h] * DIM**-0.5
            p = np.exp(scores - scores.max())
            want = (p / p.sum()) @ values
            np.testing.assert_allclose(wide(outs)[i, 0, 0, h], want, atol=2e-2)


def test_jaxs_own_function_with_lengths(jax_gpu: Any) -> None:
    import jax
    from flashmoe_science.jax import dot_product_attention

    rows, _, _ = padded(LENGTHS[0])
    given = list(on_jax(rows, jax_gpu).values())
    used = on_jax({"q": int32([200, 3, 50, 77, 130]), "k": int32([200, 40, 64, 16, 199])}, jax_gpu)
    options = {"query_seq_lengths": used["q"], "key_value_seq_lengths": used["k"]}
    ours = jax.jit(lambda *x: dot_product_attention(*x, is_causal=True, **options))(*given)
    single = [x.astype("float32") for x in given]
    with jax.default_matmul_precision("highest"):
        want = jax.nn.dot_product_attention(*single, is_causal=True, **options)
    np.testing.assert_allclose(wide(ours), wide(want), atol=2e-2)
