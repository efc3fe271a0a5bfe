"""Attention with a bias or a mask of pairs of a query and a key, forward and backward."""

from __future__ import annotations

import ctypes
from typing import Any

import capi
import numpy as np
import pairs
import pytest
from capi import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import assert_accurate
from reference_backward import assert_gradients_accurate

DTYPES = list(capi.DTYPES)
FP64 = np.dtype(np.float64)


class Case:
    """Random tensors of a call with what is said of its pairs."""

    def __init__(
        self,
        rng: np.random.Generator,
        dtype: np.dtype[Any],
        *,
        batch: int = 2,
        seq: tuple[int, int] = (70, 150),
        heads: tuple[int, int] = (4, 2),
        dims: tuple[int, int] = (40, 40),
        **options: Any,
    ) -> None:
        self.q = normal(rng, (batch, seq[0], heads[0], dims[0]), dtype)
        self.k = normal(rng, (batch, seq[1], heads[1], dims[0]), dtype)
        self.v = normal(rng, (batch, seq[1], heads[1], dims[1]), dtype)
        self.dout = normal(rng, (batch, seq[0], heads[0], dims[1]), dtype)
        self.full = (batch, heads[0], seq[0], seq[1])
        self.options = options

    def check(self, lib: ctypes.CDLL | None = None, *, dlse: Any = None) -> Any:
        """The forward, and the backward with its results; (out, lse, gradients)."""
        out, lse = capi.attention(self.q, self.k, self.v, **self.options, lib=lib)
        assert_accurate(out, lse, self.q, self.k, self.v, **self.options)
        made = capi.attention_backward(
            self.dout, self.q, self.k, self.v, out, lse, dlse, **self.options, lib=lib
        )
        assert_gradients_accurate(made, self.dout, self.q, self.k, self.v, dlse, **self.options)
        return out, lse, made


def bias_of(rng: np.random.Generator, case: Case, kind: str, one: str, how: str) -> np.ndarray:
    dtype = case.q.dtype if kind == "q" else np.dtype(np.float32)
    shape = pairs.extents(case.full, one)
    return pairs.as_given(pairs.random_bias(rng, shape, dtype), case.full, how)


def mask_of(rng: np.random.Generator, case: Case, one: str, how: str, **kind: Any) -> np.ndarray:
    shape = pairs.extents(case.full, one)
    return pairs.as_given(pairs.random_mask(rng, shape, **kind), case.full, how)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["q", "fp32"])
@pytest.mark.parametrize("one", ["", "h", "bhq", "k"])
def test_bias(isa_library: ctypes.CDLL, dtype: str, kind: str, one: str) -> None:
    rng = np.random.default_rng(1)
    case = Case(rng, capi.DTYPES[dtype])
    case.options["attn_bias"] = bias_of(rng, case, kind, one, "ones")
    case.check(isa_library)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of", [np.bool_, np.uint8])
@pytest.mark.parametrize("one", ["", "bh", "q", "bhk"])
def test_mask(isa_library: ctypes.CDLL, dtype: str, of: Any, one: str) -> None:
    rng = np.random.default_rng(2)
    case = Case(rng, capi.DTYPES[dtype])
    case.options["attn_mask"] = mask_of(rng, case, one, "ones", dtype=of)
    case.check(isa_library)


@settings(max_examples=60)
@given(data=st.data())
def test_random_calls(data: st.DataObject) -> None:
    pick = data.draw
    rng = np.random.default_rng(pick(st.integers(0, 2**32 - 1)))
    dtype = capi.DTYPES[pick(st.sampled_from(DTYPES))]
    group = pick(st.sampled_from([1, 2, 3]))
    heads_kv = pick(st.sampled_from([1, 2]))
    case = Case(
        rng, dtype, batch=pick(st.integers(1, 2)),
        seq=(pick(st.sampled_from([1, 2, 5, 33, 97])), pick(st.sampled_from([1, 3, 64, 193, 300]))),
        heads=(group * heads_kv, heads_kv),
        dims=(pick(st.sampled_from([8, 64, 136])), pick(st.sampled_from([8, 64, 200]))),
        causal=pick(st.sampled_from(["none", "bottom_right", "top_left"])),
        softcap=pick(st.sampled_from([None, 2.0])),
        window=pick(st.sampled_from([None, (20, None), (3, 0)])),
    )  # fmt: skip
    ways = st.sampled_from(["ones", "strides", "gaps"])
    kind = pick(st.sampled_from(pairs.BIASES))
    if kind != "none":
        one = pick(st.sampled_from(pairs.BROADCASTS))
        case.options["attn_bias"] = bias_of(rng, case, kind, one, pick(ways))
    if kind == "none" or pick(st.booleans()):
        one = pick(st.sampled_from(pairs.BROADCASTS))
        of = pick(st.sampled_from([np.bool_, np.uint8]))
        case.options["attn_mask"] = mask_of(rng, case, one, pick(ways), dtype=of)
    dlse = normal(rng, case.full[:3], np.dtype(np.float32)) if pick(st.booleans()) else None
    case.check(dlse=dlse)


@pytest.mark.parametrize("rows", [70, 1])
def test_fp64(library: ctypes.CDLL, rows: int) -> None:
    rng = np.random.default_rng(3)
    case = Case(rng, FP64, seq=(rows, 150), causal="bottom_right", softcap=3.0)
    case.options["attn_bias"] = bias_of(rng, case, "q", "h", "gaps")
    case.options["attn_mask"] = mask_of(rng, case, "b", "gaps")
    out, lse = capi.attention(case.q, case.k, case.v, **case.options, lib=library)
    from reference import attention_float64
    from reference_backward import gradients_float64

    want = attention_float64(case.q, case.k, case.v, **case.options)
    np.testing.assert_allclose(out, want.out, rtol=0, atol=1e-13)
    np.testing.assert_allclose(lse, want.lse, rtol=1e-13)
    made = capi.attention_backward(
        case.dout, case.q, case.k, case.v, out, lse, **case.options, lib=library
    )
    wanted = gradients_float64(case.dout, case.q, case.k, case.v, **case.options)
    for got, ref in zip(made[:3], wanted[:3], strict=True):
        np.testing.assert_allclose(got, ref, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by", ["attn_bias", "attn_mask"])
@pytest.mark.parametrize("rows", [70, 2])
def test_rows_of_which_every_key_is_hidden(
    isa_library: ctypes.CDLL, dtype: str, by: str, rows: int
) -> None:
    rng = np.random.default_rng(4)
    case = Case(rng, capi.DTYPES[dtype], seq=(rows, 150))
    seen = np.ones(case.full, bool)
    seen[0, 1, : rows // 2] = False
    seen[1, :, -1] = False
    bias = np.where(seen, np.float32(0), np.float32(-np.inf))
    case.options[by] = seen if by == "attn_mask" else bias
    out, lse, made = case.check(isa_library)
    blind = ~seen.any(-1)  # [batch, heads, queries]
    assert np.isneginf(lse[blind]).all() and np.isfinite(lse[~blind]).all()
    assert (out.astype(np.float32).swapaxes(1, 2)[blind] == 0).all()
    assert (made.dq.astype(np.float32).swapaxes(1, 2)[blind] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [70, 2])
def test_a_sink_is_all_that_a_blind_row_has(
    isa_library: ctypes.CDLL, dtype: str, rows: int
) -> None:
    rng = np.random.default_rng(5)
    case = Case(rng, capi.DTYPES[dtype], seq=(rows, 90))
    case.options["attn_mask"] = mask_of(rng, case, "h", "ones")
    case.options["attn_mask"][0, :, 0] = False
    sinks = np.array([-1.0, 0.5, 2.0, 60.0], np.float32)
    out, lse = capi.attention(case.q, case.k, case.v, sinks=sinks, **case.options, lib=isa_library)
    assert_accurate(out, lse, case.q, case.k, case.v, sinks=sinks, **case.options)
    np.testing.assert_array_equal(lse[0, :, 0], sinks)
    # What dout says of a row that sees no key counts for nothing.
    case.dout[0, 0] = np.nan
    made = capi.attention_backward(
        case.dout, case.q, case.k, case.v, out, lse, sinks=sinks, **case.options, lib=isa_library
    )
    quiet = case.dout.copy()
    quiet[0, 0] = 0
    assert_gradients_accurate(made, quiet, case.q, case.k, case.v, None, sinks, **case.options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by", ["attn_bias", "attn_mask"])
@pytest.mark.parametrize("rows", [70, 2])
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
def test_nan_of_hidden_keys_reaches_nothing(
    isa_library: ctypes.CDLL, dtype: str, by: str, rows: int, causal: str
) -> None:
    rng = np.random.default_rng(6)
    case = Case(rng, capi.DTYPES[dtype], seq=(rows, 150), causal=causal)
    seen = rng.random(case.full) < 0.7
    seen[0, :, :, ::7] = False  # hidden from every query
    seen[0, :, 1] = False  # sees none
    case.options[by] = seen if by == "attn_mask" else np.where(seen, 0, -np.inf).astype(np.float32)
    for x in (case.k, case.v):
        x[0, ::7] = np.nan
    case.q[0, 1] = case.dout[0, 1] = np.nan
    out, lse = capi.attention(case.q, case.k, case.v, **case.options, lib=isa_library)
    made = capi.attention_backward(
        case.dout, case.q, case.k, case.v, out, lse, **case.options, lib=isa_library
    )
    for x in (out, *made[:3]):
        assert np.isfinite(x.astype(np.float32)).all()
    for x in (case.q, case.k, case.v, case.dout):
        x[~np.isfinite(x.astype(np.float32))] = 0
    assert_accurate(out, lse, case.q, case.k, case.v, **case.options)
    assert_gradients_accurate(made, case.dout, case.q, case.k, case.v, **case.options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_of_a_seen_key_reaches_the_rows_that_see_it(
    isa_library: ctypes.CDLL, dtype: str
) -> None:
    rng = np.random.default_rng(7)
    case = Case(rng, capi.DTYPES[dtype])
    case.v[0, 9] = np.nan
    mask = mask_of(rng, case, "", "ones")
    out, _ = capi.attention(case.q, case.k, case.v, attn_mask=mask, lib=isa_library)
    nan = np.isnan(out.astype(np.float32)).all(-1).swapaxes(1, 2)  # [batch, heads, queries]
    np.testing.assert_array_equal(nan[0], mask[0, :, :, 9])
    assert not nan[1].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_lowest_finite_bias_hides_nothing(isa_library: ctypes.CDLL, dtype: str) -> None:
    # What transformers adds: a row that has it everywhere is the mean of all values.
    rng = np.random.default_rng(8)
    case = Case(rng, capi.DTYPES[dtype])
    lowest = np.finfo(np.float32).min
    bias = np.where(rng.random(case.full) < 0.5, np.float32(0), lowest)
    bias[:, :, 3] = lowest
    out, _ = capi.attention(case.q, case.k, case.v, attn_bias=bias, lib=isa_library)
    seen = bias == 0
    seen[:, :, 3] = True
    flat = case.q.copy()
    flat[:, 3] = 0  # all logits alike
    assert_accurate(out, None, flat, case.k, case.v, attn_mask=seen)


def test_nothing_hidden_is_the_call_without(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(9)
    case = Case(rng, np.dtype(np.float32))
    plain, lse = capi.attention(case.q, case.k, case.v, lib=library)
    ones = np.ones((1, 1, 1, 1), np.uint8)
    out, sums = capi.attention(case.q, case.k, case.v, attn_mask=ones, lib=library)
    np.testing.assert_allclose(out, plain, atol=1e-6)
    np.testing.assert_allclose(sums, lse, atol=1e-6)


def test_bits_do_not_depend_on_threads(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(10)
    case = Case(rng, capi.BF16, batch=1, seq=(300, 300), causal="bottom_right")
    case.options["attn_mask"] = mask_of(rng, case, "h", "ones")
    results = []
    for threads in (1, 3):
        capi.check(library.flashmoe_set_num_threads(threads), library)
        try:
            results.append(case.check(library))
        finally:
            capi.check(library.flashmoe_set_num_threads(0), library)
    (out, lse, made), (out3, lse3, made3) = results
    for a, b in zip((out, lse, *made[:3]), (out3, lse3, *made3[:3]), strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


WRONG = {
    "heads": ("attn_mask", np.ones((1, 3, 1, 1), bool),
              "attn_mask: its number of heads is 3, accepted are q's 4, and 1 for all"),
    "keys": ("attn_bias", np.ones((1, 1, 1, 2), np.float32),
             "attn_bias: its number of keys is 2, accepted are k's 150, and 1 for all"),
    "rank": ("attn_mask", np.ones((70, 150), bool), "attn_mask: got 2 dimensions, accepted are 4"),
    "mask_dtype": ("attn_mask", np.ones((1, 1, 1, 1), np.float32),
                   "attn_mask: got dtype fp32, accepted are bool and uint8"),
    "bias_dtype": ("attn_bias", np.ones((1, 1, 1, 1), np.float16),
                   "attn_bias: got dtype fp16, accepted are fp32 and q's bf16"),
    "bool_bias": ("attn_bias", np.ones((1, 1, 1, 1), bool),
                  "attn_bias: got dtype bool8 (code 6, 1 lanes), accepted are fp32 and q's bf16"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(WRONG))
def test_errors(library: ctypes.CDLL, name: str) -> None:
    given_as, array, sentence = WRONG[name]
    case = Case(np.random.default_rng(0), capi.BF16)
    with pytest.raises(capi.FlashmoeError) as raised:
        capi.attention(case.q, case.k, case.v, **{given_as: array}, lib=library)
    assert raised.value.status == capi.INVALID_ARGUMENT
    assert raised.value.sentence == sentence
    out, lse = capi.attention(case.q, case.k, case.v, lib=library)
    with pytest.raises(capi.FlashmoeError) as raised:
        capi.attention_backward(
            case.dout, case.q, case.k, case.v, out, lse, **{given_as: array}, lib=library
        )
    assert raised.value.sentence == sentence
