"""Edges of the definition: no key in sight, extreme logits, NaN and infinity."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import capi
import ml_dtypes
import numpy as np
import pytest
from capi import normal
from reference import assert_accurate, attention_float64, visible

DTYPES = list(capi.DTYPES)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_no_key(isa_library: ctypes.CDLL, dtype: str) -> None:
    rng = np.random.default_rng(0)
    q = normal(rng, (2, 90, 2, 64), capi.DTYPES[dtype])
    k, v = (normal(rng, (2, 37, 2, 64), capi.DTYPES[dtype]) for _ in range(2))
    out, lse = capi.attention(q, k, v, causal="bottom_right", lib=isa_library)
    blind = 90 - 37
    assert (out[:, :blind].astype(np.float32) == 0).all()
    assert np.isneginf(lse[:, :, :blind]).all()
    assert_accurate(out, lse, q, k, v, "bottom_right")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
def test_no_keys_at_all(isa_library: ctypes.CDLL, dtype: str, causal: str) -> None:
    q = normal(np.random.default_rng(0), (2, 20, 3, 40), capi.DTYPES[dtype])
    k = np.empty((2, 0, 3, 40), q.dtype)
    out, lse = capi.attention(q, k, k, causal=causal, lib=isa_library)
    assert (out.astype(np.float32) == 0).all()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("shape", [(0, 5, 2, 16), (3, 0, 2, 16)])
def test_empty_output(library: ctypes.CDLL, shape: tuple[int, ...]) -> None:
    q = np.empty(shape, np.float32)
    k = np.zeros((shape[0], 4, 2, 16), np.float32)
    out, lse = capi.attention(q, k, k, lib=library)
    assert out.size == 0 and lse.size == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", ["none", "top_left"])
@pytest.mark.parametrize("size", [1e3, 1e2, 1e-4])
def test_huge_and_tiny_inputs(
    isa_library: ctypes.CDLL, dtype: str, causal: str, size: float
) -> None:
    # Well-separated scores, so that fp32's spacing of a huge one decides no winner.
    rng = np.random.default_rng(1)
    q, k, v = (normal(rng, (1, 130, 2, 64), np.dtype(np.float32)) for _ in range(3))
    q, k = ((np.round(x * 4) / 4 * size) for x in (q, k))
    q, k, v = (x.astype(capi.DTYPES[dtype]) for x in (q, k, v))
    out, lse = capi.attention(q, k, v, causal=causal, lib=isa_library)
    assert_accurate(out, lse, q, k, v, causal)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_beyond_the_exponent_range(isa_library: ctypes.CDLL, dtype: str) -> None:
    q = np.full((1, 20, 1, 8), 200.0, capi.DTYPES[dtype])
    k = np.zeros((1, 300, 1, 8), capi.DTYPES[dtype])
    k[0, 7], k[0, 290] = 100.0, 150.0
    v = normal(np.random.default_rng(2), (1, 300, 1, 24), capi.DTYPES[dtype])
    out, lse = capi.attention(q, k, v, lib=isa_library)
    assert (out[0, :, 0] == v[0, 290, 0]).all()
    np.testing.assert_allclose(lse, 200.0 * 150.0 * 8 / np.sqrt(8), rtol=1e-6)


FLT_MAX = float(np.finfo(np.float32).max)


def problem_of_scores(
    dtype: str, scores: list[float], q: float, rows: int = 3
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k and v whose q.k are these scores, exactly: every element is q times one of k."""
    queries = np.zeros((1, rows, 1, 8), capi.DTYPES[dtype])
    keys = np.zeros((1, len(scores), 1, 8), queries.dtype)
    queries[..., 0] = q
    keys[0, :, 0, 0] = np.array(scores) / q
    products = queries[0, 0, 0, 0].astype(np.float64) * keys[0, :, 0, 0].astype(np.float64)
    np.testing.assert_array_equal(products, scores)
    return queries, keys, normal(np.random.default_rng(0), (1, len(scores), 1, 16), queries.dtype)


# q, and the scores: magnitudes that fp16's products reach, and those that only the others do.
LARGE_SCORES = {
    "one": (2.0**12, [2.0**27]),
    "equal": (2.0**12, [2.0**27] * 40),
    "equal_below_zero": (2.0**12, [-(2.0**27)] * 40),
    "neighbours": (2.0**12, [2.0**27 - 2.0**20, 2.0**27, 2.0**27 - 2.0**21] * 7),
    "opposite": (2.0**12, [2.0**27, -(2.0**27), 0.0] * 7),
    "one_large": (2.0**64, [2.0**120]),
    "equal_large": (2.0**64, [2.0**127] * 40),
    "neighbours_large": (2.0**64, [2.0**127, 2.0**127 + 2.0**121, 2.0**127 - 2.0**120] * 7),
    "largest": (2.0**64, [2.0**127 * 1.9921875, -(2.0**127) * 1.9921875] * 7),
    "largest_apart": (2.0**64, [2.0**120 * i for i in range(-255, 256)]),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", LARGE_SCORES)
def test_large_scores(isa_library: ctypes.CDLL, dtype: str, case: str) -> None:
    """Up to the largest finite ones, whose differences fp32 does not hold."""
    q, scores = LARGE_SCORES[case]
    if q > float(ml_dtypes.finfo(capi.DTYPES[dtype]).max):
        q, scores = 2.0**12, [score * 2.0**-100 for score in scores]
    problem = problem_of_scores(dtype, scores, q)
    for scale in (1.0, 0.37, 2.0**-20, 1e-38, 1e-45):
        for softcap, window in ((None, None), (None, (len(scores), 0)), (0.5, None)):
            options = {"scale": float(np.float32(scale)), "softcap": softcap, "window": window}
            if softcap is not None and softcap > 8e37 * scale:
                continue  # is left out
            out, lse = capi.attention(*problem, **options, lib=isa_library)
            assert_accurate(out, lse, *problem, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1.0, 133120.0, 2.0**40, 2.0**60])
def test_one_key_is_passed_through(isa_library: ctypes.CDLL, dtype: str, size: float) -> None:
    """Whatever its logit: rounded products are not subtracted from it."""
    size = min(size, 60000.0) if dtype == "fp16" else size
    q = np.full((1, 1, 1, 64), size, capi.DTYPES[dtype])
    out, lse = capi.attention(q, q, q, lib=isa_library)
    np.testing.assert_array_equal(out, q)
    assert_accurate(out, lse, q, q, q)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("scale", [1e-38, 2.35e38, 2.37e38, 3e38, FLT_MAX])
def test_scale_to_the_ends_of_fp32(
    isa_library: ctypes.CDLL, dtype: str, softcap: float | None, scale: float
) -> None:
    scale = float(np.float32(scale))
    rng = np.random.default_rng(1)
    for of_scores in ([0.0] * 5, [0.0] * 300):
        problem = problem_of_scores(dtype, of_scores, 1.0)
        out, lse = capi.attention(*problem, scale=scale, softcap=softcap, lib=isa_library)
        assert_accurate(out, lse, *problem, scale=scale, softcap=softcap)
    if dtype == "fp16":
        return  # its smallest product is 2^-48
    # Logits of about one.
    unit = 2.0**-126 if scale > 1 else 2.0**125
    problem = problem_of_scores(dtype, [*(rng.integers(-6, 7, 300) * unit)], unit)
    out, lse = capi.attention(*problem, scale=scale, softcap=softcap, lib=isa_library)
    assert_accurate(out, lse, *problem, scale=scale, softcap=softcap)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [3e38, FLT_MAX])
def test_logits_beyond_fp32(isa_library: ctypes.CDLL, dtype: str, scale: float) -> None:
    """With finite scores, the greatest still takes all, and its log-sum-exp is infinite."""
    for sign in (1.0, -1.0):
        problem = problem_of_scores(dtype, [3.0 * sign, 5.0 * sign, 4.0 * sign], 1.0)
        out, lse = capi.attention(*problem, scale=scale, lib=isa_library)
        winner = 1 if sign > 0 else 0
        assert (out == problem[2][:, winner : winner + 1]).all()
        assert (lse == np.inf * sign).all()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("rows", [2, 40])  # as few rows, and in tiles
def test_differences_of_scores_beyond_fp32(isa_library: ctypes.CDLL, dtype: str, rows: int) -> None:
    """With finite scores whose logits are small, the lesser one still has its weight."""
    q = np.zeros((1, rows, 1, 8), capi.DTYPES[dtype])
    q[..., 0] = 1.5e19
    k = np.zeros((1, 2, 1, 8), q.dtype)
    k[0, :, 0, 0] = -2.2e19, 1.0e19
    v = np.zeros((1, 2, 1, 8), q.dtype)
    v[0, 0] = 100
    out, lse = capi.attention(q, k, v, scale=1.2e-38, lib=isa_library)
    assert (out.astype(np.float32) > 0.2).all()
    assert_accurate(out, lse, q, k, v, scale=1.2e-38)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_scores_beyond_fp32(isa_library: ctypes.CDLL, dtype: str) -> None:
    """Infinite ones are infinities: NaN where one is the maximum, no weight below a finite one."""
    q = np.full((1, 2, 1, 8), 1e25, capi.DTYPES[dtype])
    k = np.full((1, 3, 1, 8), -1e25, q.dtype)
    v = normal(np.random.default_rng(0), (1, 3, 1, 8), q.dtype)
    k[0, 1] = 1.0
    for scale in (0.0, 1e-38, 3e38):
        out, _ = capi.attention(q, k, v, scale=scale, lib=isa_library)
        assert (out == v[:, 1:2]).all()
    k[0, 2] = 1e25
    for scale in (0.0, 1e-38, 3e38):
        out, _ = capi.attention(q, k, v, scale=scale, lib=isa_library)
        assert np.isnan(out.astype(np.float32)).all()
        out, _ = capi.attention(q, k, v, scale=scale, causal="bottom_right", lib=isa_library)
        assert (out[:, 0] == v[:, 1]).all() and np.isnan(out[:, 1].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_logits_average(isa_library: ctypes.CDLL, dtype: str) -> None:
    rng = np.random.default_rng(3)
    q = np.ones((1, 50, 2, 32), capi.DTYPES[dtype])
    k = np.full((1, 400, 2, 32), 0.5, capi.DTYPES[dtype])
    v = normal(rng, (1, 400, 2, 32), capi.DTYPES[dtype])
    out, lse = capi.attention(q, k, v, lib=isa_library)
    assert_accurate(out, lse, q, k, v)
    np.testing.assert_allclose(lse, 16 / np.sqrt(32) + np.log(400), atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key", [0, 1, 14, 127, 130, 255, 256, 269])
def test_nan_and_infinity_stay_with_the_rows_that_see_them(
    isa_library: ctypes.CDLL, dtype: str, key: int
) -> None:
    seq = 270
    rng = np.random.default_rng(key)
    q, k, v = (normal(rng, (1, seq, 1, 40), capi.DTYPES[dtype]) for _ in range(3))
    clean, clean_lse = capi.attention(q, k, v, causal="top_left", lib=isa_library)
    blind = ~visible(seq, seq, "top_left")[:, key]
    close = {"fp32": 1e-6, "fp16": 2.0**-9, "bf16": 2.0**-6}[dtype]
    for bad in (np.nan, np.inf, -np.inf):
        for in_k, in_v in ((True, False), (False, True), (True, True)):
            bad_k, bad_v = k.copy(), v.copy()
            if in_k:
                bad_k[0, key, 0, 3] = bad
            if in_v:
                bad_v[0, key, 0, 5] = bad
            out, lse = capi.attention(q, bad_k, bad_v, causal="top_left", lib=isa_library)
            np.testing.assert_allclose(
                out[0, blind].astype(np.float32), clean[0, blind].astype(np.float32), atol=close
            )
            np.testing.assert_array_equal(lse[0, 0, blind], clean_lse[0, 0, blind])
            # Rows that see it get what IEEE arithmetic gives, in the columns that it reaches.
            with np.errstate(invalid="ignore"):
                reference = attention_float64(q, bad_k, bad_v, "top_left")
            finite = np.isfinite(reference.out)
            np.testing.assert_array_equal(np.isfinite(out.astype(np.float32)), finite)
            np.testing.assert_allclose(
                out.astype(np.float64)[finite], reference.out[finite], atol=4 * close
            )
            if np.isinf(bad) and not in_k:
                assert (out[0, key:, 0, 5].astype(np.float32) == bad).all()


# Quiet ones and signalling ones, of either sign, with bits of payload from end to end.
NAN_BITS = {
    "fp32": (0x7FFFFFFF, 0xFFFFFFFF, 0x7FC00001, 0xFFC00001, 0x7F800001, 0x7FC0007F, 0x7FEAAAAA),
    "fp16": (0x7FFF, 0xFFFF, 0x7E01, 0x7C01, 0x7EAA),
    "bf16": (0x7FFF, 0xFFFF, 0x7FC1, 0x7F81, 0x7FEA),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize(("seq", "softcap"), [(1, None), (70, None), (70, 5.0)])
def test_every_nan_is_one(
    isa_library: ctypes.CDLL, dtype: str, where: str, seq: int, softcap: float | None
) -> None:
    """Whatever its bits, it reaches the rows that see it."""
    rng = np.random.default_rng(0)
    for bits in NAN_BITS[dtype]:
        inputs = {name: normal(rng, (1, seq, 1, 24), capi.DTYPES[dtype]) for name in "qkv"}
        place = inputs[where].view(np.uint32 if dtype == "fp32" else np.uint16)
        place[0, seq // 2, 0, 3] = bits
        assert np.isnan(inputs[where].astype(np.float32)).sum() == 1
        options = {"causal": "top_left", "softcap": softcap, "lib": isa_library}
        out, lse = capi.attention(*inputs.values(), **options)
        rows = np.isnan(out[0, :, 0].astype(np.float32))
        touched = np.zeros_like(rows)
        if where == "q":
            touched[seq // 2] = True
        else:
            touched[seq // 2 :, 3 if where == "v" else slice(None)] = True
        np.testing.assert_array_equal(rows, touched, err_msg=f"{bits:#x}")
        np.testing.assert_array_equal(np.isnan(lse[0, 0]), touched[:, 3] & (where != "v"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "window"), [(1, (40, 7)), (5, (63, 0)), (1, (300, 2))])
@pytest.mark.parametrize("key", [0, 15, 16, 31, 200, 257, 399])
def test_nan_and_infinity_stay_inside_a_window(
    isa_library: ctypes.CDLL, dtype: str, heads: int, window: tuple[int, int], key: int
) -> None:
    """Outside of the window to either side, also in pairs of keys, which bf16 multiplies."""
    seq = 400
    rng = np.random.default_rng(key)
    q = normal(rng, (1, seq, heads, 24), capi.DTYPES[dtype])
    k, v = (normal(rng, (1, seq, 1, 24), capi.DTYPES[dtype]) for _ in range(2))
    clean, clean_lse = capi.attention(q, k, v, window=window, lib=isa_library)
    blind = ~visible(seq, seq, window=window)[:, key]
    close = {"fp32": 1e-6, "fp16": 2.0**-9, "bf16": 2.0**-6}[dtype]
    for bad, softcap in ((np.nan, None), (np.inf, None), (np.nan, 5.0)):
        bad_k, bad_v = k.copy(), v.copy()
        bad_k[0, key, 0, 3] = bad
        bad_v[0, key, 0, 5] = bad
        options = {"window": window, "softcap": softcap}
        out, lse = capi.attention(q, bad_k, bad_v, **options, lib=isa_library)
        if softcap is None:
            np.testing.assert_array_equal(lse[..., blind], clean_lse[..., blind])
            np.testing.assert_allclose(
                out[0, blind].astype(np.float32), clean[0, blind].astype(np.float32), atol=close
            )
        with np.errstate(invalid="ignore"):
            reference = attention_float64(q, bad_k, bad_v, **options)
        finite = np.isfinite(reference.out)
        assert not finite[0, ~blind].all()
        np.testing.assert_array_equal(np.isfinite(out.astype(np.float32)), finite)
        np.testing.assert_allclose(
            out.astype(np.float64)[finite], reference.out[finite], atol=4 * close
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [(None, 0), (0, 0), (3, 4), (None, None)])
def test_rows_whose_window_lies_before_the_first_key(
    isa_library: ctypes.CDLL, dtype: str, window: tuple[int | None, int | None]
) -> None:
    rng = np.random.default_rng(0)
    q = normal(rng, (2, 90, 2, 64), capi.DTYPES[dtype])
    k, v = (normal(rng, (2, 37, 2, 64), capi.DTYPES[dtype]) for _ in range(2))
    for options in ({"window": window}, {"window": (window[0], None), "causal": "top_left"}):
        out, lse = capi.attention(q, k, v, **options, lib=isa_library)
        blind = ~visible(90, 37, options.get("causal", "none"), options["window"]).any(1)
        assert (out[:, blind].astype(np.float32) == 0).all()
        assert np.isneginf(lse[:, :, blind]).all()
        assert np.isfinite(lse[:, :, ~blind]).all()
        assert_accurate(out, lse, q, k, v, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinite_scores_under_a_softcap(isa_library: ctypes.CDLL, dtype: str) -> None:
    """tanh takes them to +-1, and a NaN to a NaN."""
    q = np.ones((1, 3, 1, 8), capi.DTYPES[dtype])
    k = np.zeros((1, 40, 1, 8), q.dtype)
    k[0, 0, 0, 0], k[0, 1, 0, 0] = np.inf, -np.inf
    v = normal(np.random.default_rng(1), (1, 40, 1, 16), q.dtype)
    out, lse = capi.attention(q, k, v, softcap=2.0, lib=isa_library)
    assert_accurate(out, lse, q, k, v, softcap=2.0)
    np.testing.assert_allclose(lse, np.log(np.exp(2) + np.exp(-2) + 38), rtol=1e-6)
    k[0, 39, 0, 0] = np.nan
    out, lse = capi.attention(q, k, v, softcap=2.0, lib=isa_library)
    assert np.isnan(out.astype(np.float32)).all()
    assert np.isnan(lse).all()


_UNREADABLE = """
import ctypes, mmap, sys
import capi, numpy as np
from reference import assert_accurate

SEQ, ROW = 40000, 64 * 4  # keys, and bytes of one

def tensor(rng, first, end):
    # fp32 [1, SEQ, 1, 64], of which only keys `first` to `end` may be touched.
    memory = mmap.mmap(-1, SEQ * ROW)
    array = np.frombuffer(memory, np.float32).reshape(1, SEQ, 1, 64)
    array[:, first:end] = rng.standard_normal((1, end - first, 1, 64), np.float32)
    for a, b in ((0, first), (end, SEQ)):
        address, size = ctypes.c_void_p(array.ctypes.data + a * ROW), ctypes.c_size_t((b - a) * ROW)
        if size.value:
            assert ctypes.CDLL(None).mprotect(address, size, 0) == 0
    return array

rng = np.random.default_rng(0)
q = rng.standard_normal((1, 200, 2, 64), np.float32)
last = SEQ - 1024
k, v = tensor(rng, last, SEQ), tensor(rng, last, SEQ)
out, lse = capi.attention(q, k, v, window=(300, None))
assert_accurate(out, lse, q, k[:, last:], v[:, last:], window=(300, None))
k, v = tensor(rng, 0, 1024), tensor(rng, 0, 1024)
out, lse = capi.attention(q, k, v, causal="top_left", window=(30, 0))
assert_accurate(out, lse, q, k[:, :1024], v[:, :1024], causal="top_left", window=(30, 0))
print("done")
"""


def test_steps_outside_of_the_window_are_not_read() -> None:
    """Their memory cannot be: touching it ends the process."""
    done = subprocess.run(
        [sys.executable, "-c", _UNREADABLE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "done\n", f"exit status {done.returncode}: {done.stderr}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_that_no_row_shares_still_rescales(isa_library: ctypes.CDLL, dtype: str) -> None:
    """A NaN in V makes the diagonal's keys go row by row: here all keys of the second step do, and
    the first of them outweighs everything before it."""
    seq, step = 260, 256
    rng = np.random.default_rng(10)
    q, k, v = (normal(rng, (1, seq, 1, 16), capi.DTYPES[dtype]) for _ in range(3))
    q[...] = 1
    k[0, step] = 4
    v[0, seq - 1] = np.nan
    plan = capi.attention_plan(
        capi.attention_params(q, k, v, np.empty_like(q), causal="top_left"), isa_library
    )
    assert step % plan.launches[0].tile_n == 0, (
        "the second step should begin at the key that outweighs"
    )
    out, _ = capi.attention(q, k, v, causal="top_left", lib=isa_library)
    reference = attention_float64(q, k, v, "top_left").out[:, : seq - 1]
    close = {"fp32": 1e-5, "fp16": 2.0**-8, "bf16": 2.0**-5}[dtype]
    np.testing.assert_allclose(out[:, : seq - 1].astype(np.float64), reference, atol=close)
    assert np.isnan(out[0, seq - 1].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_minus_infinity_scores(isa_library: ctypes.CDLL, dtype: str) -> None:
    """Keys at -inf count as hidden beside finite ones; a row of nothing else is NaN."""
    rng = np.random.default_rng(6)
    q = np.ones((1, 30, 1, 16), capi.DTYPES[dtype])
    k, v = (normal(rng, (1, 600, 1, 16), capi.DTYPES[dtype]) for _ in range(2))
    k[0, :520] = 0
    k[0, :520, 0, 0] = -np.inf  # two whole steps of the main loop
    out, lse = capi.attention(q, k, v, lib=isa_library)
    rest = attention_float64(q, k[:, 520:], v[:, 520:])
    np.testing.assert_allclose(
        out.astype(np.float64), rest.out, atol=1e-6 if dtype == "fp32" else 0.02
    )
    np.testing.assert_allclose(lse, rest.lse, atol=1e-3)
    out, lse = capi.attention(q, k[:, :520], v[:, :520], lib=isa_library)
    assert np.isnan(out.astype(np.float32)).all()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_are_stored_to_the_bit(isa_library: ctypes.CDLL, dtype: str) -> None:
    """A single key passes V through unchanged: denormals, the largest numbers, signed zeros."""
    bits = {"fp32": np.uint32, "fp16": np.uint16, "bf16": np.uint16}[dtype]
    width = 8 * np.dtype(bits).itemsize
    pattern = np.arange(256, dtype=np.uint64) * ((1 << width) // 256) + 1
    v = pattern.astype(bits).view(capi.DTYPES[dtype]).reshape(1, 1, 1, 256)
    tiny = np.abs(v.astype(np.float64)) < np.finfo(np.float32).tiny
    v = np.where(np.isfinite(v.astype(np.float32)) & ~tiny, v, np.ones_like(v))
    q = np.zeros((1, 1, 1, 8), v.dtype)
    out, lse = capi.attention(q, q, np.ascontiguousarray(v), lib=isa_library)
    np.testing.assert_array_equal(out.view(bits), v.view(bits))
    assert lse[0, 0, 0] == 0.0


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_outputs_halfway_between_two_numbers_are_rounded_to_the_even_one(
    isa_library: ctypes.CDLL, dtype: str
) -> None:
    """Two equal logits average neighbours: fp32 holds what comes out exactly."""
    # fp16's smallest are normal numbers in fp32; from bf16's largest the sum would be infinite.
    first, end = {"fp16": (0x0001, 0x7BFF), "bf16": (0x0100, 0x7F00)}[dtype]
    low = np.linspace(first, end - 1, 128).astype(np.uint16)
    low = np.concatenate([low, low | 0x8000])
    v = np.stack([low, low + np.uint16(1)]).view(capi.DTYPES[dtype]).reshape(1, 2, 1, 256)
    q = np.zeros((1, 1, 1, 8), v.dtype)
    out, _ = capi.attention(q, np.zeros((1, 2, 1, 8), v.dtype), v, lib=isa_library)
    np.testing.assert_array_equal(out.view(np.uint16).reshape(-1), low + (low & 1))
    assert set(low & 1) == {0, 1}
