"""Batches at the ends of what they may be: windows over more than a thousand pages, as many
sequences as fit a launch, and one very long one beside short ones."""

from __future__ import annotations

import ctypes
from typing import Any

import capi
import numpy as np
import pytest
from capi import aligned_empty, normal
from reference import assert_accurate

DTYPE = np.dtype(np.float32)


def starts(lengths: Any) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def attend(
    lib: ctypes.CDLL, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    out = aligned_empty(q.shape, q.dtype)
    lse = np.empty((q.shape[0], q.shape[2], q.shape[1]), np.float32)
    capi.run_attention(capi.attention_params(q, k, v, out, lse, **options), lib)
    return out, lse


@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize("queries", [1, 70])
def test_a_window_over_a_thousand_pages(isa_library: ctypes.CDLL, queries: int, size: int) -> None:
    """Its ends lie inside pages, and NaN in the pages before it reaches nothing."""
    width = 1100 * size + 1
    length, dim = width + queries + 300 * size + 2, 16
    rng = np.random.default_rng(11)
    q = normal(rng, (1, queries, 2, dim), DTYPE)
    k, v = (normal(rng, (1, length, 1, dim), DTYPE) for _ in range(2))
    options = {"causal": "bottom_right", "window": (width, None)}
    want, want_lse = attend(isa_library, q, k, v, **options)
    assert_accurate(want, want_lse, q, k, v, "bottom_right", window=(width, None))
    pages = -(-length // size)
    table = rng.permutation(pages + 3)[:pages].astype(np.int32)
    caches = []
    for x in (k, v):
        cache = aligned_empty((pages + 3, size, 1, dim), DTYPE)
        cache[...] = np.nan
        rows = np.arange(length)
        cache[table[rows // size], rows % size] = x[0]
        caches.append(cache)
    tables = {"seqused_k": np.array([length], np.int32), "page_table": table[None]}
    out, lse = attend(isa_library, q, *caches, tables=tables, **options)
    assert out.tobytes() == want.tobytes()
    assert lse.tobytes() == want_lse.tobytes()
    for cache in caches:
        cache[table[: (length - queries - width) // size]] = np.nan  # which no query sees
    out, lse = attend(isa_library, q, *caches, tables=tables, **options)
    np.testing.assert_allclose(out, want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6)


@pytest.mark.parametrize("paged", [False, True], ids=["packed", "paged"])
def test_sixteen_thousand_sequences(library: ctypes.CDLL, paged: bool) -> None:
    """Sequences of 0 to 4 queries and 0 to 9 keys; each is checked against NumPy, and some against
    the bits of dense calls."""
    count, dim = 16384, 8
    rng = np.random.default_rng(5)
    lengths_q, lengths_k = rng.integers(0, 5, count), rng.integers(0, 10, count)
    begins_q, begins_k = starts(lengths_q), starts(lengths_k)
    q = normal(rng, (1, begins_q[-1], 2, dim), DTYPE)
    k, v = (normal(rng, (1, begins_k[-1], 1, dim), DTYPE) for _ in range(2))
    tables = {"cu_seqlens_q": begins_q, "cu_seqlens_k": begins_k}
    keys, values = k, v
    if paged:  # of one row each: the pages of a sequence are its rows, from the last to the first
        keys, values = (aligned_empty((x.shape[1], 1, 1, dim), DTYPE) for x in (k, v))
        keys[:, 0], values[:, 0] = k[0, ::-1], v[0, ::-1]
        rows = begins_k[:-1, None] + np.arange(9)
        tables = {
            "cu_seqlens_q": begins_q,
            "seqused_k": lengths_k.astype(np.int32),
            "page_table": (begins_k[-1] - 1 - rows).astype(np.int32),
        }
    out, lse = attend(library, q, keys, values, tables=tables, causal="bottom_right")
    # All at once: each row of q beside the 9 keys that its sequence has at most.
    of = np.repeat(np.arange(count), lengths_q)
    place = np.arange(len(of)) - begins_q[of]
    at = np.minimum(begins_k[of][:, None] + np.arange(9), len(k[0]) - 1)  # [row, key]
    last = place + lengths_k[of] - lengths_q[of]
    seen = (np.arange(9) <= last[:, None]) & (np.arange(9) < lengths_k[of][:, None])
    wide_q, wide_k, wide_v = (x[0].astype(np.float64) for x in (q, k, v))
    logits = np.einsum("rhd,rkd->rhk", wide_q, wide_k[at, 0]) / np.sqrt(dim)
    logits = np.where(seen[:, None], logits, -np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        want_lse = np.log(np.exp(logits).sum(-1))
        weights = np.nan_to_num(np.exp(logits - want_lse[..., None]))
    want = np.einsum("rhk,rkd->rhd", weights, wide_v[at, 0])
    np.testing.assert_allclose(out[0], want, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(lse[0].T, want_lse, rtol=1e-5, atol=1e-5)
    for b in (0, 1, 4095, 8191, count - 2, count - 1):
        rows, columns = slice(*begins_q[b : b + 2]), slice(*begins_k[b : b + 2])
        if rows.start == rows.stop:
            continue
        alone, _ = capi.attention(q[:, rows], k[:, columns], v[:, columns],
                                  causal="bottom_right", lib=library)  # fmt: skip
        assert alone.tobytes() == out[:, rows].tobytes()


def test_a_million_keys_beside_short_ones(library: ctypes.CDLL) -> None:
    """Decoding from pages of 128. Each has the bits of its own call."""
    long_at, dim = 100, 8
    lengths = [(37 * b) % 90 + 1 for b in range(256)]
    lengths[long_at] = 1_000_003
    rng = np.random.default_rng(3)
    q = normal(rng, (256, 1, 2, dim), DTYPE)
    counts = [-(-n // 128) for n in lengths]
    pages = sum(counts)
    k, v = (normal(rng, (pages, 128, 1, dim), DTYPE) for _ in range(2))
    places = rng.permutation(pages)
    table = np.full((256, max(counts)), -1, np.int32)
    for b, (count, begin) in enumerate(zip(counts, starts(counts), strict=False)):
        table[b, :count] = places[begin : begin + count]
        last = places[begin + count - 1]
        k[last, (lengths[b] - 1) % 128 + 1 :] = v[last, (lengths[b] - 1) % 128 + 1 :] = np.nan
    tables = {"seqused_k": np.array(lengths, np.int32), "page_table": table}
    got, got_lse = attend(library, q, k, v, tables=tables)
    for b in (0, 1, long_at - 1, long_at, long_at + 1, 255):
        own = [x[table[b, : counts[b]]].reshape(1, -1, 1, dim)[:, : lengths[b]] for x in (k, v)]
        out, lse = capi.attention(q[b : b + 1], *own, lib=library)
        assert out.tobytes() == got[b].tobytes()
        assert lse.tobytes() == got_lse[b].tobytes()
        logits = np.einsum("hd,kd->hk", q[b, 0].astype(float), own[0][0, :, 0]) / np.sqrt(dim)
        largest = logits.max(-1, keepdims=True)
        weights = np.exp(logits - largest)
        want = weights @ own[1][0, :, 0] / weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(out[0, 0], want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(
            lse[0, :, 0], largest[:, 0] + np.log(weights.sum(-1)), rtol=1e-5, atol=1e-5
        )
