"""Strides of every kind, and not one byte read or written outside the tensors."""

from __future__ import annotations

import ctypes

import capi
import numpy as np
import pytest
from capi import normal
from guarded import between_guards
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_accurate
from strided import output_views, strided, views

DTYPES = list(capi.DTYPES)


@settings(max_examples=80)
@given(
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["bshd", "bhsd"]),
    causal=st.sampled_from(["none", "bottom_right", "top_left"]),
    q_view=views,
    k_view=views,
    v_view=views,
    out_view=output_views,
    seq_q=st.integers(1, 40),
    seq_k=st.integers(1, 70),
    dims=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_any_strides(
    dtype: str,
    layout: str,
    causal: str,
    q_view: tuple,
    k_view: tuple,
    v_view: tuple,
    out_view: tuple,
    seq_q: int,
    seq_k: int,
    dims: tuple[int, int],
) -> None:
    rng = np.random.default_rng(seq_q * 100 + seq_k)
    kind = capi.DTYPES[dtype]

    def shaped(seq: int, heads: int, dim: int) -> tuple[int, int, int, int]:
        return (2, seq, heads, dim) if layout == "bshd" else (2, heads, seq, dim)

    q = strided(rng, shaped(seq_q, 4, 8 * dims[0]), kind, *q_view)
    k = strided(rng, shaped(seq_k, 2, 8 * dims[0]), kind, *k_view)
    v = strided(rng, shaped(seq_k, 2, 8 * dims[1]), kind, *v_view)
    out = strided(rng, shaped(seq_q, 4, 8 * dims[1]), kind, *out_view)
    out[...] = np.nan
    lse = np.full((seq_q, 2, 4, 3), np.nan, np.float32)[..., 1].transpose(1, 2, 0)
    params = capi.attention_params(q, k, v, out, lse, layout=layout, causal=causal)
    capi.run_attention(params)
    assert_accurate(out, lse, q, k, v, causal, layout=layout)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim_v", [8, 24, 40, 128])
def test_writes_nothing_but_the_outputs(isa_library: ctypes.CDLL, dtype: str, dim_v: int) -> None:
    """Rows with gaps between them, in a buffer of sentinels; the same around the workspace."""
    rng = np.random.default_rng(dim_v)
    kind = capi.DTYPES[dtype]
    q, k = (normal(rng, (2, 29, 3, 16), kind) for _ in range(2))
    v = normal(rng, (2, 29, 3, dim_v), kind)
    sentinel = 0x5A
    buffer = capi.aligned_empty((4, 31, 5, dim_v + 32), kind)
    buffer.view(np.uint8)[...] = sentinel
    out = buffer[1:3, 1:30, 1:4, 16 : 16 + dim_v]
    lse_buffer = np.full((4, 5, 31), -7.0, np.float32)
    lse = lse_buffer[1:3, 1:4, 1:30]
    params = capi.attention_params(q, k, v, out, lse, causal="top_left")
    size = capi.attention_plan(params, isa_library).workspace_bytes
    margin = 4096
    workspace = capi.aligned_empty((size + 2 * margin,), np.dtype(np.uint8))
    workspace[...] = sentinel
    # As little aligned as is promised to be enough.
    capi.run_attention(params, isa_library, workspace[margin + 16 : margin + 16 + size])
    assert (workspace[: margin + 16] == sentinel).all()
    assert (workspace[margin + 16 + size :] == sentinel).all()
    assert_accurate(out, lse, q, k, v, "top_left")
    out[...] = 0
    lse[...] = -7.0
    outside = buffer.copy()
    outside[1:3, 1:30, 1:4, 16 : 16 + dim_v] = 0
    expected = np.full_like(buffer.view(np.uint8), sentinel).view(kind)
    expected[1:3, 1:30, 1:4, 16 : 16 + dim_v] = 0
    np.testing.assert_array_equal(outside.view(np.uint8), expected.view(np.uint8))
    assert (lse_buffer == -7.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(8, 8), (24, 40), (64, 72), (136, 8)])
@pytest.mark.parametrize("seqs", [(1, 1), (13, 35), (31, 259)])
@pytest.mark.parametrize("at_end", [False, True])
def test_touches_no_memory_outside(
    isa_library: ctypes.CDLL,
    dtype: str,
    dims: tuple[int, int],
    seqs: tuple[int, int],
    at_end: bool,
) -> None:
    """One byte read beyond any tensor would end the process."""
    rng = np.random.default_rng(0)
    kind = capi.DTYPES[dtype]
    q = between_guards(normal(rng, (1, seqs[0], 1, dims[0]), kind), at_end)
    k = between_guards(normal(rng, (1, seqs[1], 1, dims[0]), kind), at_end)
    v = between_guards(normal(rng, (1, seqs[1], 1, dims[1]), kind), at_end)
    out = between_guards(np.zeros((1, seqs[0], 1, dims[1]), kind), at_end)
    lse = between_guards(np.zeros((1, 1, seqs[0]), np.float32), at_end)
    params = capi.attention_params(q, k, v, out, lse)
    size = capi.attention_plan(params, isa_library).workspace_bytes
    workspace = between_guards(np.zeros(size // 16 * 16, np.uint8), at_end)
    capi.run_attention(params, isa_library, workspace)
    assert_accurate(out, lse, q, k, v)
