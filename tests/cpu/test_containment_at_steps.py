"""A NaN in V at the first keys of a step of the main loop, where a group of rows begins."""

from __future__ import annotations

import ctypes

import capi
import numpy as np
import pytest
from reference import visible


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("key", [128, 129, 130, 131, 256, 258])
def test_rows_before_it_keep_their_values(isa_library: ctypes.CDLL, dtype: str, key: int) -> None:
    """Rows whose maximum rises in that very step, too: what they summed before is rescaled."""
    rng = np.random.default_rng(key)
    q = capi.normal(rng, (8, 270, 2, 72), capi.DTYPES[dtype])
    k = capi.normal(rng, (8, 270, 1, 72), capi.DTYPES[dtype])
    v = capi.normal(rng, (8, 270, 1, 96), capi.DTYPES[dtype])
    k[:, 128::128] *= 3  # so that they do
    clean, clean_lse = capi.attention(q, k, v, causal="top_left", lib=isa_library)
    v[:, key, 0, 2] = np.nan
    out, lse = capi.attention(q, k, v, causal="top_left", lib=isa_library)
    blind = ~visible(270, 270, "top_left")[:, key]
    close = {"fp32": 1e-6, "fp16": 2.0**-9, "bf16": 2.0**-6}[dtype]
    np.testing.assert_allclose(
        out[:, blind].astype(np.float32), clean[:, blind].astype(np.float32), atol=close
    )
    np.testing.assert_array_equal(lse, clean_lse)
