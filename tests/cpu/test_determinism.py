"""The same inputs give the same bits, whatever the threads, the tiles or the strides."""

from __future__ import annotations

import ctypes
from typing import Any

import capi
import numpy as np
import pytest
from capi import normal

DTYPES = list(capi.DTYPES)


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "mask",
    [
        {"causal": "none"},
        {"causal": "bottom_right"},
        {"window": (60, 30)},
        {"causal": "bottom_right", "window": (200, None), "softcap": 3.0},
    ],
    ids=str,
)
def test_bits_do_not_depend_on_threads(
    isa_library: ctypes.CDLL, dtype: str, mask: dict[str, Any]
) -> None:
    rng = np.random.default_rng(7)
    kind = capi.DTYPES[dtype]
    q = normal(rng, (1, 410, 2, 72), kind)
    k, v = (normal(rng, (1, 530, 1, 72), kind) for _ in range(2))
    tiles = set()
    results = []
    for threads in (1, 2, 3, 8, 33):
        isa_library.flashmoe_set_num_threads(threads)
        plan = capi.attention_plan(
            capi.attention_params(q, k, v, np.empty_like(q), **mask), isa_library
        )
        tiles.add(plan.launches[0].tile_m)
        results += [capi.attention(q, k, v, **mask, lib=isa_library) for _ in range(2)]
    isa_library.flashmoe_set_num_threads(0)
    assert len(tiles) > 1, "the test should cover several tile sizes"
    for out, lse in results[1:]:
        np.testing.assert_array_equal(bits(out), bits(results[0][0]))
        np.testing.assert_array_equal(bits(lse), bits(results[0][1]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_hundred_runs(library: ctypes.CDLL, dtype: str) -> None:
    rng = np.random.default_rng(8)
    q, k, v = (normal(rng, (2, 100, 3, 64), capi.DTYPES[dtype]) for _ in range(3))
    first = capi.attention(q, k, v, causal="top_left", lib=library)
    for _ in range(100):
        out, lse = capi.attention(q, k, v, causal="top_left", lib=library)
        np.testing.assert_array_equal(bits(out), bits(first[0]))
        np.testing.assert_array_equal(bits(lse), bits(first[1]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_batch_or_strides(library: ctypes.CDLL, dtype: str) -> None:
    rng = np.random.default_rng(9)
    q, k, v = (normal(rng, (3, 150, 2, 40), capi.DTYPES[dtype]) for _ in range(3))
    together, together_lse = capi.attention(q, k, v, lib=library)
    for b in range(3):
        alone, alone_lse = capi.attention(q[b:][:1], k[b:][:1], v[b:][:1], lib=library)
        np.testing.assert_array_equal(bits(alone[0]), bits(together[b]))
        np.testing.assert_array_equal(bits(alone_lse[0]), bits(together_lse[b]))
    heads_first = (x.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3) for x in (q, k, v))
    out, _ = capi.attention(*heads_first, lib=library)
    np.testing.assert_array_equal(bits(out), bits(together))
