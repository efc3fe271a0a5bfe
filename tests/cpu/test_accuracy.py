"""Against float64 over random problems, for every instruction set and dtype."""

from __future__ import annotations

import ctypes

import capi
import numpy as np
import pytest
from capi import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_accurate

SEEDS = range(12)
HEAD_DIMS = (8, 16, 24, 32, 40, 64, 72, 80, 96, 128, 136, 160, 192, 248, 256)
LENGTHS = (1, 2, 3, 5, 12, 13, 17, 31, 33, 64, 100, 129, 191, 193, 255, 257, 300, 515)


def run_and_check(lib: ctypes.CDLL, q: np.ndarray, k: np.ndarray, v: np.ndarray, **how) -> None:
    out, lse = capi.attention(q, k, v, lib=lib, **how)
    assert not np.isnan(out.astype(np.float32)).any()
    assert_accurate(out, lse, q, k, v, **how)


@pytest.mark.parametrize("dtype", capi.DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_problems(isa_library: ctypes.CDLL, dtype: str, seed: int) -> None:
    rng = np.random.default_rng([seed, list(capi.DTYPES).index(dtype)])
    for causal in ("none", "bottom_right", "top_left"):
        dim, dim_v = (int(rng.choice(HEAD_DIMS)) for _ in range(2))
        seq_q, seq_k = (int(rng.choice(LENGTHS)) for _ in range(2))
        heads_kv, group, batch = (int(rng.integers(1, 3)) for _ in range(3))
        q = normal(rng, (batch, seq_q, heads_kv * group, dim), capi.DTYPES[dtype])
        k = normal(rng, (batch, seq_k, heads_kv, dim), capi.DTYPES[dtype])
        v = normal(rng, (batch, seq_k, heads_kv, dim_v), capi.DTYPES[dtype])
        run_and_check(isa_library, q, k, v, causal=causal)


@pytest.mark.parametrize("dtype", capi.DTYPES)
@pytest.mark.parametrize("causal", ["none", "top_left"])
@pytest.mark.parametrize("dim", [64, 128])
def test_usual_shapes(isa_library: ctypes.CDLL, dtype: str, causal: str, dim: int) -> None:
    rng = np.random.default_rng(dim)
    q, k, v = (normal(rng, (1, 640, 2, dim), capi.DTYPES[dtype]) for _ in range(3))
    run_and_check(isa_library, q, k, v, causal=causal)


@pytest.mark.parametrize("dtype", capi.DTYPES)
@pytest.mark.parametrize("dims", [(576, 512), (264, 8), (8, 512), (328, 264)], ids=str)
def test_head_dimensions_without_gradients(
    isa_library: ctypes.CDLL, dtype: str, dims: tuple[int, int]
) -> None:
    """With few rows and with many, with separate values and with values in the keys."""
    rng = np.random.default_rng(dims[0])
    numbers = capi.DTYPES[dtype]
    for seq_q, heads_q in ((1, 16), (40, 2), (1, 128)):
        q = normal(rng, (1, seq_q, heads_q, dims[0]), numbers)
        k = normal(rng, (1, 300, 1, dims[0]), numbers)
        v = normal(rng, (1, 300, 1, dims[1]), numbers)
        run_and_check(isa_library, q, k, v, causal="bottom_right")
        if dims[1] <= dims[0]:
            run_and_check(isa_library, q, k, k[..., : dims[1]], causal="bottom_right")


# Around the vectors, panels, groups and steps of the kernels; None is no bound.
WINDOWS = [
    (0, 0), (1, 0), (0, 1), (7, 8), (15, 16), (31, 33), (63, 64), (100, None), (None, 5),
    (127, 128), (129, 0), (255, 256), (300, 9), (2**62, 3), (3, 2**62), (2**63 - 1, 2**63 - 1),
]  # fmt: skip


@pytest.mark.parametrize("dtype", capi.DTYPES)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows(
    isa_library: ctypes.CDLL, dtype: str, window: tuple[int | None, int | None]
) -> None:
    index = WINDOWS.index(window)
    seq_q, seq_k = ((333, 333), (150, 400), (300, 90))[index % 3]
    rng = np.random.default_rng(index)
    q = normal(rng, (1, seq_q, 3, 64), capi.DTYPES[dtype])
    k, v = (normal(rng, (1, seq_k, 1, dim), capi.DTYPES[dtype]) for dim in (64, 40))
    run_and_check(isa_library, q, k, v, window=window)
    causal = ("bottom_right", "top_left")[index % 2]
    run_and_check(isa_library, q, k, v, causal=causal, window=(window[0], None))


@pytest.mark.parametrize("dtype", capi.DTYPES)
@pytest.mark.parametrize(
    ("softcap", "window"),
    [(1e-30, None), (0.01, (70, 3)), (1.0, None), (30.0, (70, 3)), (1e4, None)],
)
def test_softcap(
    isa_library: ctypes.CDLL, dtype: str, softcap: float, window: tuple[int, int] | None
) -> None:
    rng = np.random.default_rng(6)
    q, k, v = (normal(rng, (1, 270, 2, 40), capi.DTYPES[dtype]) for _ in range(3))
    run_and_check(isa_library, q, k, v, softcap=softcap, window=window)
    run_and_check(isa_library, q, k, v, softcap=softcap, scale=3.0, causal="top_left")


@pytest.mark.parametrize("dtype", capi.DTYPES)
def test_tanh_is_accurate_relative_to_its_value(isa_library: ctypes.CDLL, dtype: str) -> None:
    """One key: lse is its logit. From where tanh is the identity to where it is 1."""
    numbers = np.concatenate([np.logspace(-6, 1.5, 500), np.linspace(0.1, 12, 500)])
    q = np.zeros((1, 2000, 1, 8), capi.DTYPES[dtype])
    q[0, :, 0, 0] = np.concatenate([numbers, -numbers]).astype(capi.DTYPES[dtype])
    k = np.zeros((1, 1, 1, 8), q.dtype)
    k[..., 0] = 1
    for cap in (1.0, 1024.0):
        _, lse = capi.attention(q, k, k, scale=cap, softcap=cap, lib=isa_library)
        exact = cap * np.tanh(q[0, :, 0, 0].astype(np.float64))
        if dtype == "bf16":  # the products of denormals are 0
            assert np.abs(exact).min() > 1e-7
        np.testing.assert_allclose(lse[0, 0], exact, rtol=1e-6)


SINKS = {
    "normal": [0.4, -1.3, 0.9, 2.2],
    "low": [-40.0, -60.0, -30.0, -1e30],
    "high": [40.0, 60.0, 30.0, 1e30],
    "infinite": [np.inf, -np.inf, 0.0, -np.inf],
}


@pytest.mark.parametrize("dtype", capi.DTYPES)
@pytest.mark.parametrize("kind", SINKS)
def test_sinks(isa_library: ctypes.CDLL, dtype: str, kind: str) -> None:
    rng = np.random.default_rng(7)
    q = normal(rng, (2, 300, 4, 40), capi.DTYPES[dtype])
    k, v = (normal(rng, (2, 270, 2, dim), q.dtype) for dim in (40, 72))
    for of in (np.dtype(np.float32), q.dtype):
        spread = np.full(12, np.nan, of)
        spread[1::3] = SINKS[kind]
        sinks = spread[1::3]
        how = {"sinks": sinks}
        run_and_check(isa_library, q, k, v, **how)
        # Rows 0 to 29 see no key.
        run_and_check(isa_library, q, k, v, causal="bottom_right", softcap=3.0, **how)
        run_and_check(isa_library, q, k, v, window=(20, 3), scale=2.0, **how)
        run_and_check(isa_library, q[:, :1], k, v, **how)
        run_and_check(isa_library, q[:, :3], k[:, :0], v[:, :0], **how)


@pytest.mark.parametrize("dtype", capi.DTYPES)
def test_a_sink_and_scores_of_minus_infinity(library: ctypes.CDLL, dtype: str) -> None:
    """Keys that weigh nothing leave all to a sink, and without one 0 / 0."""
    q = np.ones((1, 1, 1, 8), capi.DTYPES[dtype])
    k = np.full((1, 3, 1, 8), -np.inf, q.dtype)
    v = np.ones_like(k)
    for sink, out, lse in ((2.0, 0.0, 2.0), (-np.inf, np.nan, -np.inf), (np.inf, 0.0, np.inf)):
        sinks = np.array([sink], np.float32)
        got = capi.attention(q, k, v, sinks=sinks, lib=library)
        np.testing.assert_array_equal(got[0].astype(np.float32), np.full((1, 1, 1, 8), out))
        np.testing.assert_array_equal(got[1], [[[lse]]])
    got = capi.attention(q, v, v, sinks=np.array([np.nan], np.float32), lib=library)
    assert np.isnan(got[0].astype(np.float32)).all()
    assert np.isnan(got[1]).all()


@pytest.mark.parametrize("dtype", capi.DTYPES)
def test_a_high_softcap_changes_nothing(isa_library: ctypes.CDLL, dtype: str) -> None:
    rng = np.random.default_rng(6)
    q, k, v = (normal(rng, (1, 90, 1, 64), capi.DTYPES[dtype]) for _ in range(3))
    for cap, scale in ((1e5, 0.0), (3e38, 0.0), (3e38, 4.0), (9e37, 4.0)):
        out, lse = capi.attention(q, k, v, softcap=cap, scale=scale, lib=isa_library)
        assert_accurate(out, lse, q, k, v, scale=scale)


@pytest.mark.parametrize("dtype", capi.DTYPES)
def test_long_sums_stay_accurate(library: ctypes.CDLL, dtype: str) -> None:
    rng = np.random.default_rng(4)
    q = normal(rng, (1, 24, 1, 64), capi.DTYPES[dtype])
    k, v = (normal(rng, (1, 8192, 1, 64), capi.DTYPES[dtype]) for _ in range(2))
    run_and_check(library, q, k, v)


@pytest.mark.parametrize("dtype", capi.DTYPES)
@pytest.mark.parametrize("scale", [1e-6, 0.3, 4.0])
def test_scale(isa_library: ctypes.CDLL, dtype: str, scale: float) -> None:
    rng = np.random.default_rng(5)
    q, k, v = (normal(rng, (1, 70, 2, 40), capi.DTYPES[dtype]) for _ in range(3))
    run_and_check(isa_library, q, k, v, scale=scale, causal="top_left")


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(list(capi.DTYPES)),
    causal=st.sampled_from(["none", "bottom_right", "top_left"]),
    layout=st.sampled_from(["bshd", "bhsd"]),
    batch=st.integers(0, 2),
    seq_q=st.integers(0, 150),
    seq_k=st.integers(0, 300),
    heads_kv=st.integers(1, 3),
    group=st.integers(1, 3),
    dims=st.tuples(st.integers(1, 32), st.integers(1, 32)),
    left=st.none() | st.integers(0, 350),
    right=st.none() | st.integers(0, 350),
    softcap=st.sampled_from([None, None, 0.5, 50.0]),
    # Beside a larger one keys have weights below fp32's normal numbers, which are 0.
    sink=st.none() | st.floats(-80, 80, width=16),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(
    dtype: str,
    causal: str,
    layout: str,
    batch: int,
    seq_q: int,
    seq_k: int,
    heads_kv: int,
    group: int,
    dims: tuple[int, int],
    left: int | None,
    right: int | None,
    softcap: float | None,
    sink: float | None,
    seed: int,
) -> None:
    window = (left, right if causal == "none" else None)
    rng = np.random.default_rng(seed)
    dim, dim_v = 8 * dims[0], 8 * dims[1]
    q = normal(rng, (batch, seq_q, heads_kv * group, dim), capi.DTYPES[dtype])
    k = normal(rng, (batch, seq_k, heads_kv, dim), capi.DTYPES[dtype])
    v = normal(rng, (batch, seq_k, heads_kv, dim_v), capi.DTYPES[dtype])
    sinks = None
    if sink is not None:
        sinks = sink + rng.standard_normal(heads_kv * group, dtype=np.float32)
    how = {"causal": causal, "window": window, "softcap": softcap, "sinks": sinks}
    if layout == "bshd":
        out, lse = capi.attention(q, k, v, **how)
    else:
        out, lse = capi.attention(
            *(x.transpose(0, 2, 1, 3) for x in (q, k, v)), **how, layout="bhsd"
        )
        out = out.transpose(0, 2, 1, 3)
    assert_accurate(out, lse, q, k, v, **how)
