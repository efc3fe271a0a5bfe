"""Few query rows a KV head, as in decoding: another path than that of many rows.

The most rows that take it differ by instruction set and dtype, 24 at most: counts here are below,
beside and above all of them.
"""

from __future__ import annotations

import ctypes
from typing import Any

import capi
import numpy as np
import pytest
from capi import normal
from guarded import between_guards
from reference import assert_accurate, attention_float64, visible

DTYPES = list(capi.DTYPES)
MOST_ROWS = 24

# Query rows and query heads of one KV head.
ROWS = [(1, 1), (1, 3), (1, 4), (5, 1), (1, 6), (7, 1), (2, 4), (1, 12), (13, 1), (6, 4), (5, 5)]
LENGTHS = (1, 2, 15, 17, 33, 127, 129, 256, 257, 300)
DIMS = ((8, 8), (64, 64), (128, 128), (24, 136), (256, 40), (40, 256), (192, 128))
MASKS: list[dict[str, Any]] = [
    {},
    {"causal": "bottom_right"},
    {"causal": "top_left"},
    {"window": (3, 1)},
    {"window": (130, None), "causal": "bottom_right"},
    {"softcap": 2.0},
]


def problem(
    rng: np.random.Generator, dtype: str, rows: tuple[int, int], seq_k: int, dims: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    kind = capi.DTYPES[dtype]
    q = normal(rng, (2, rows[0], 2 * rows[1], dims[0]), kind)
    k, v = (normal(rng, (2, seq_k, 2, dim), kind) for dim in dims)
    return q, k, v


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_against_float64(isa_library: ctypes.CDLL, dtype: str, rows: tuple[int, int]) -> None:
    rng = np.random.default_rng(ROWS.index(rows))
    for i, seq_k in enumerate(LENGTHS):
        q, k, v = problem(rng, dtype, rows, seq_k, DIMS[(i + ROWS.index(rows)) % len(DIMS)])
        for mask in (MASKS[0], MASKS[1 + i % (len(MASKS) - 1)]):
            out, lse = capi.attention(q, k, v, **mask, lib=isa_library)
            assert_accurate(out, lse, q, k, v, **mask)


@pytest.mark.parametrize("dtype", DTYPES)
def test_thousands_of_keys(isa_library: ctypes.CDLL, dtype: str) -> None:
    q, k, v = problem(np.random.default_rng(0), dtype, (1, 4), 5000, (64, 64))
    out, lse = capi.attention(q, k, v, lib=isa_library)
    assert_accurate(out, lse, q, k, v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(1, 1), (3, 2), (MOST_ROWS, 1)], ids=str)
@pytest.mark.parametrize("key", [0, 6, 15, 16, 31, 127, 128, 199])
def test_nan_and_infinity_stay_with_the_rows_that_see_them(
    isa_library: ctypes.CDLL, dtype: str, rows: tuple[int, int], key: int
) -> None:
    """With windows, so that rows see different keys, also within pairs of keys, which bf16
    multiplies."""
    seq_k = 200
    rng = np.random.default_rng(key)
    q, k, v = problem(rng, dtype, rows, seq_k, (24, 40))
    close = {"fp32": 1e-6, "fp16": 2.0**-9, "bf16": 2.0**-6}[dtype]
    # Around the key, with and without it in the first row's.
    after = seq_k - rows[0] - key
    for window in ((max(0, after), None), (max(0, after - 1), None), (None, max(0, -after))):
        seen = visible(rows[0], seq_k, window=window)[:, key]
        clean, clean_lse = capi.attention(q, k, v, window=window, lib=isa_library)
        for bad in (np.nan, np.inf, -np.inf):
            bad_k, bad_v = k.copy(), v.copy()
            if np.isnan(bad):
                bad_k[:, key, :, 3] = bad
            bad_v[:, key, :, 5] = bad
            out, lse = capi.attention(q, bad_k, bad_v, window=window, lib=isa_library)
            blind = (x[:, ~seen].astype(np.float32) for x in (out, clean))
            np.testing.assert_allclose(*blind, atol=close)
            np.testing.assert_array_equal(bits(lse[..., ~seen]), bits(clean_lse[..., ~seen]))
            with np.errstate(invalid="ignore"):
                reference = attention_float64(q, bad_k, bad_v, window=window)
            finite = np.isfinite(reference.out)
            np.testing.assert_array_equal(np.isfinite(out.astype(np.float32)), finite)
            np.testing.assert_allclose(
                out.astype(np.float64)[finite], reference.out[finite], atol=4 * close
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", [{}, {"causal": "bottom_right"}, {"window": (45, 3)}], ids=str)
def test_bits_do_not_depend_on_threads(
    isa_library: ctypes.CDLL, dtype: str, mask: dict[str, Any]
) -> None:
    """Nor so on how the rows are dealt to tiles."""
    q, k, v = problem(np.random.default_rng(1), dtype, (2, MOST_ROWS // 2), 311, (72, 72))
    results = []
    for threads in (1, 2, 3, 16):
        isa_library.flashmoe_set_num_threads(threads)
        results.append(capi.attention(q, k, v, **mask, lib=isa_library))
    isa_library.flashmoe_set_num_threads(0)
    for out, lse in results[1:]:
        np.testing.assert_array_equal(bits(out), bits(results[0][0]))
        np.testing.assert_array_equal(bits(lse), bits(results[0][1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
def test_bits_do_not_depend_on_rows_beside(
    isa_library: ctypes.CDLL, dtype: str, causal: str
) -> None:
    rows, seq_k = (8 if dtype == "fp32" else 2), 311
    q, k, v = problem(np.random.default_rng(2), dtype, (rows, 1), seq_k, (72, 72))
    together, together_lse = capi.attention(q, k, v, causal=causal, lib=isa_library)
    for row in range(rows):
        keys = seq_k if causal == "none" else seq_k - (rows - 1 - row)
        alone = capi.attention(
            q[:, row : row + 1], k[:, :keys], v[:, :keys], causal=causal, lib=isa_library
        )
        np.testing.assert_array_equal(bits(alone[0][:, 0]), bits(together[:, row]))
        np.testing.assert_array_equal(bits(alone[1][..., 0]), bits(together_lse[..., row]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(8, 8), (24, 40), (136, 72)])
@pytest.mark.parametrize("seq_k", [1, 2, 3, 18, 131])
@pytest.mark.parametrize("at_end", [False, True])
def test_touches_no_memory_outside(
    isa_library: ctypes.CDLL, dtype: str, dims: tuple[int, int], seq_k: int, at_end: bool
) -> None:
    """One byte read beyond any tensor would end the process."""
    rng = np.random.default_rng(0)
    kind = capi.DTYPES[dtype]
    for rows in (1, 3, 11):
        q = between_guards(normal(rng, (1, rows, 1, dims[0]), kind), at_end)
        k, v = (between_guards(normal(rng, (1, seq_k, 1, dim), kind), at_end) for dim in dims)
        out = between_guards(np.zeros((1, rows, 1, dims[1]), kind), at_end)
        lse = between_guards(np.zeros((1, 1, rows), np.float32), at_end)
        params = capi.attention_params(q, k, v, out, lse)
        size = capi.attention_plan(params, isa_library).workspace_bytes
        workspace = between_guards(np.zeros(size // 16 * 16, np.uint8), at_end)
        capi.run_attention(params, isa_library, workspace)
        assert_accurate(out, lse, q, k, v)


def test_a_decoding_call_asks_for_less_workspace(library: ctypes.CDLL) -> None:
    """Nothing is packed."""
    sizes = []
    for rows in (1, 100):
        q = np.zeros((1, rows, 1, 128), np.float32)
        k = np.zeros((1, 4096, 1, 128), np.float32)
        params = capi.attention_params(q, k, k, np.empty_like(q))
        library.flashmoe_set_num_threads(1)
        sizes.append(capi.attention_plan(params, library).workspace_bytes)
        library.flashmoe_set_num_threads(0)
    assert sizes[0] < sizes[1] / 4
