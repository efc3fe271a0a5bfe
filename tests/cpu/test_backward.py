"""Attention backward against float64, for every instruction set and dtype."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import capi
import numpy as np
import pytest
from capi import Gradients, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import visible
from reference_backward import assert_gradients_accurate, gradients_float64

DTYPES = list(capi.DTYPES)
FP64 = np.dtype(np.float64)
HEAD_DIMS = (8, 16, 24, 40, 64, 72, 96, 128, 136, 192, 248, 256)
LENGTHS = (1, 2, 3, 5, 13, 31, 33, 64, 95, 96, 97, 129, 191, 192, 193, 257, 300)


class Case:
    """Random inputs of a backward call, with the out and lse of the forward."""

    def __init__(
        self,
        rng: np.random.Generator,
        dtype: np.dtype[Any],
        *,
        batch: int = 1,
        seq: tuple[int, int] = (150, 150),
        heads: tuple[int, int] = (2, 2),
        dims: tuple[int, int] = (40, 40),
        dlse: bool = False,
        sinks: np.ndarray | None = None,
        size: float = 1.0,
        lib: ctypes.CDLL | None = None,
        **options: Any,
    ) -> None:
        def random(*shape: int) -> np.ndarray:
            x = normal(rng, shape, np.dtype(np.float32)) * np.float32(size)
            made = capi.aligned_empty(shape, dtype)
            made[...] = x.astype(dtype)
            return made if options.get("layout") != "bhsd" else heads_first(made)

        self.q = random(batch, seq[0], heads[0], dims[0])
        self.k = random(batch, seq[1], heads[1], dims[0])
        self.v = random(batch, seq[1], heads[1], dims[1])
        self.dout = random(batch, seq[0], heads[0], dims[1])
        self.options = options
        self.sinks = sinks
        self.out, self.lse = capi.attention(self.q, self.k, self.v, sinks=sinks, **options, lib=lib)
        self.dlse = normal(rng, self.lse.shape, self.lse.dtype) if dlse else None

    @property
    def inputs(self) -> tuple[Any, ...]:
        return self.dout, self.q, self.k, self.v, self.out, self.lse, self.dlse

    def run(self, lib: ctypes.CDLL | None = None, **how: Any) -> Gradients:
        return capi.attention_backward(
            *self.inputs, sinks=self.sinks, lib=lib, **self.options, **how
        )

    def check(self, gradients: Any, **how: Any) -> None:
        for x in gradients:
            assert x is None or not np.isnan(x.astype(np.float32)).any()
        assert_gradients_accurate(
            gradients, self.dout, self.q, self.k, self.v, self.dlse, self.sinks, **self.options,
            **how,
        )  # fmt: skip


def heads_first(x: np.ndarray) -> np.ndarray:
    """The same elements in layout bhsd."""
    return x.transpose(0, 2, 1, 3)


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def assert_same_bits(a: Gradients, b: Gradients) -> None:
    for x, y in zip(a, b, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            np.testing.assert_array_equal(bits(x), bits(y))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(8))
def test_random_problems(isa_library: ctypes.CDLL, dtype: str, seed: int) -> None:
    rng = np.random.default_rng([seed, DTYPES.index(dtype)])
    for causal in ("none", "bottom_right", "top_left"):
        heads_kv = int(rng.integers(1, 3))
        case = Case(
            rng,
            capi.DTYPES[dtype],
            batch=int(rng.integers(1, 3)),
            seq=(int(rng.choice(LENGTHS)), int(rng.choice(LENGTHS))),
            heads=(heads_kv * int(rng.integers(1, 4)), heads_kv),
            dims=(int(rng.choice(HEAD_DIMS)), int(rng.choice(HEAD_DIMS))),
            dlse=bool(rng.integers(2)),
            causal=causal,
            lib=isa_library,
        )
        case.check(case.run(isa_library))


WINDOWS = [
    (0, 0), (1, 0), (0, 1), (7, 8), (15, 16), (31, 33), (95, 96), (100, None), (None, 5),
    (191, 0), (192, 193), (250, 9), (2**62, 3), (2**63 - 1, 2**63 - 1),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows(
    isa_library: ctypes.CDLL, dtype: str, window: tuple[int | None, int | None]
) -> None:
    index = WINDOWS.index(window)
    seq = ((333, 333), (150, 400), (300, 90))[index % 3]
    shape = {"seq": seq, "heads": (3, 1), "dims": (64, 40), "lib": isa_library}
    rng = np.random.default_rng(index)
    case = Case(rng, capi.DTYPES[dtype], window=window, **shape)
    case.check(case.run(isa_library))
    causal = ("bottom_right", "top_left")[index % 2]
    case = Case(rng, capi.DTYPES[dtype], causal=causal, window=(window[0], None), **shape)
    case.check(case.run(isa_library))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("softcap", "scale", "window"),
    [(0.1, 0.0, (70, 3)), (1.0, 3.0, None), (30.0, 0.0, (70, 3)), (1e4, 0.5, None)],
)
def test_softcap(
    isa_library: ctypes.CDLL,
    dtype: str,
    softcap: float,
    scale: float,
    window: tuple[int, int] | None,
) -> None:
    case = Case(
        np.random.default_rng(6), capi.DTYPES[dtype], seq=(210, 230), softcap=softcap,
        scale=scale, window=window, lib=isa_library,
    )  # fmt: skip
    case.check(case.run(isa_library))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-6, 0.3, 4.0])
def test_scale(isa_library: ctypes.CDLL, dtype: str, scale: float) -> None:
    rng = np.random.default_rng(5)
    case = Case(rng, capi.DTYPES[dtype], scale=scale, causal="top_left", lib=isa_library)
    case.check(case.run(isa_library))


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_sums_stay_accurate(library: ctypes.CDLL, dtype: str) -> None:
    rng = np.random.default_rng(4)
    for seq in ((24, 4096), (4096, 24)):
        case = Case(rng, capi.DTYPES[dtype], seq=seq, heads=(1, 1), lib=library)
        case.check(case.run(library))


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_equal_logits(isa_library: ctypes.CDLL, dtype: str) -> None:
    case = Case(np.random.default_rng(3), capi.DTYPES[dtype], seq=(130, 300), lib=isa_library)
    case.q[...] = 1
    case.k[...] = 0.5
    case.out, case.lse = capi.attention(case.q, case.k, case.v, lib=isa_library)
    case.check(case.run(isa_library))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [100.0, 1e-3])
def test_huge_and_tiny_inputs(isa_library: ctypes.CDLL, dtype: str, size: float) -> None:
    # Well-separated scores, so that fp32's spacing of a huge one decides no winner.
    rng = np.random.default_rng(1)
    case = Case(rng, capi.DTYPES[dtype], seq=(130, 130), lib=isa_library)
    for x in (case.q, case.k):
        x[...] = (np.round(x.astype(np.float32) * 4) / 4 * size).astype(x.dtype)
    case.out, case.lse = capi.attention(case.q, case.k, case.v, lib=isa_library)
    case.check(case.run(isa_library))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("same_dtype", [False, True], ids=["fp32", "as_the_tensors"])
@pytest.mark.parametrize(
    "mask", [{}, {"causal": "bottom_right"}, {"window": (30, 0), "softcap": 2.0}], ids=str
)
def test_sinks(
    isa_library: ctypes.CDLL, dtype: str, same_dtype: bool, mask: dict[str, Any]
) -> None:
    kind = capi.DTYPES[dtype]
    large = np.zeros((6, 3), kind if same_dtype else np.float32)
    large[:, 1] = [0.5, -np.inf, 3.0, -2.0, 9.0, np.inf]
    case = Case(
        np.random.default_rng(19), kind, batch=2, seq=(230, 150), heads=(6, 2), dims=(40, 24),
        dlse=True, sinks=large[:, 1], lib=isa_library, **mask,
    )  # fmt: skip
    got = case.run(isa_library)
    case.check(got)
    assert got.dsinks.dtype == large.dtype and got.dsinks[1] == 0
    for x in (got.dq[:, :, 5], case.out[:, :, 5]):
        assert (x.astype(np.float32) == 0).all()

    # A NaN stays with its head.
    case.dout[1, 229, 2, 0] = np.nan
    spoilt = case.run(isa_library, wanted=("dsinks",)).dsinks
    assert np.isnan(spoilt[2].astype(np.float32))
    others = np.arange(6) != 2
    np.testing.assert_array_equal(bits(spoilt[others]), bits(got.dsinks[others]))


@pytest.mark.parametrize("dtype", [*DTYPES, "fp64"])
def test_dsinks_of_rows_that_see_nothing(isa_library: ctypes.CDLL, dtype: str) -> None:
    """Are those of lse alone: a NaN in such a row's dout or out reaches none."""
    kind = capi.DTYPES.get(dtype, FP64)
    case = Case(
        np.random.default_rng(20), kind, seq=(30, 20), causal="bottom_right", dlse=True,
        sinks=np.array([1.0, -2.0], np.float32), lib=isa_library,
    )  # fmt: skip
    clean = case.run(isa_library, wanted=("dsinks",)).dsinks
    for x in (case.dout, case.out):
        x[:, :10] = np.nan
    np.testing.assert_array_equal(case.run(isa_library, wanted=("dsinks",)).dsinks, clean)
    case.dlse[:, :, 3] += 1  # the derivative of such a row's lse by its sink is 1
    moved = case.run(isa_library, wanted=("dsinks",)).dsinks
    np.testing.assert_allclose(moved - clean, 1, rtol=1e-5)


def test_dsinks_of_no_rows(library: ctypes.CDLL) -> None:
    """Are zeros, which are written."""
    for batch, seq in ((0, (3, 5)), (2, (0, 5)), (2, (0, 0))):
        case = Case(
            np.random.default_rng(0), np.dtype(np.float32), batch=batch, seq=seq,
            sinks=np.zeros(2, np.float32), lib=library,
        )  # fmt: skip
        assert (case.run(library).dsinks == 0).all()


@settings(max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    causal=st.sampled_from(["none", "bottom_right", "top_left"]),
    layout=st.sampled_from(["bshd", "bhsd"]),
    batch=st.integers(0, 2),
    seq=st.tuples(st.integers(0, 150), st.integers(0, 300)),
    heads_kv=st.integers(1, 3),
    group=st.integers(1, 3),
    dims=st.tuples(st.integers(1, 32), st.integers(1, 32)),
    left=st.none() | st.integers(0, 350),
    right=st.none() | st.integers(0, 350),
    softcap=st.sampled_from([None, None, 0.5, 50.0]),
    dlse=st.booleans(),
    sink=st.none() | st.floats(-20, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(
    dtype: str,
    causal: str,
    layout: str,
    batch: int,
    seq: tuple[int, int],
    heads_kv: int,
    group: int,
    dims: tuple[int, int],
    left: int | None,
    right: int | None,
    softcap: float | None,
    dlse: bool,
    sink: float | None,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    sinks = None
    if sink is not None:
        sinks = np.float32(sink) + rng.standard_normal(heads_kv * group, dtype=np.float32)
    case = Case(
        rng,
        capi.DTYPES[dtype],
        batch=batch,
        seq=seq,
        heads=(heads_kv * group, heads_kv),
        dims=(8 * dims[0], 8 * dims[1]),
        dlse=dlse,
        sinks=sinks,
        causal=causal,
        layout=layout,
        window=(left, right if causal == "none" else None),
        softcap=softcap,
    )
    case.check(case.run())


# ---- what is written -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_in_fp32(isa_library: ctypes.CDLL, dtype: str) -> None:
    """They are those that are rounded to the tensors' dtype."""
    rng = np.random.default_rng(2)
    sinks = np.array([0.5, -1, 2, 4], np.float32).astype(capi.DTYPES[dtype])
    case = Case(rng, capi.DTYPES[dtype], seq=(210, 230), heads=(4, 2), sinks=sinks, lib=isa_library)
    wide = case.run(isa_library, dtype=np.dtype(np.float32))
    for x, y in zip(wide, case.run(isa_library), strict=True):
        assert x.dtype == np.float32
        np.testing.assert_array_equal(bits(x.astype(y.dtype)), bits(y))


@pytest.mark.parametrize("dtype", [*DTYPES, "fp64"])
@pytest.mark.parametrize("wide", [False, True], ids=["as_the_tensors", "fp32"])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": "top_left"},
        {"window": (60, 30), "dlse": True},
        {"softcap": 1.5, "dlse": True},
        {"causal": "bottom_right", "window": (50, None), "softcap": 3.0, "dlse": True},
    ],
    ids=str,
)
def test_accumulate(
    isa_library: ctypes.CDLL, dtype: str, wide: bool, options: dict[str, Any]
) -> None:
    rng = np.random.default_rng(12)
    kind = capi.DTYPES.get(dtype, FP64)
    exactly = FP64 if dtype == "fp64" else np.dtype(np.float32)
    case = Case(
        rng, kind, seq=(210, 190), heads=(4, 2), dims=(72, 40),
        sinks=np.array([0, 1, 2, 3], np.float32).astype(kind), lib=isa_library, **options,
    )  # fmt: skip
    own = np.dtype(np.float32) if wide else kind
    given = (case.q, case.k, case.v, case.sinks)
    before = Gradients(*(normal(rng, x.shape, own) for x in given))
    after = Gradients(*(x.copy() for x in before))
    names = ("dout", "q", "k", "v", "out", "lse", "dlse")
    tensors = dict(zip(names, case.inputs, strict=True))
    params = capi.attention_backward_params(
        tensors | after._asdict() | {"sinks": case.sinks}, accumulate=True, **case.options
    )
    capi.run_attention_backward(params, isa_library)
    part = case.run(isa_library, dtype=exactly)
    for x, old, added in zip(after, before, part, strict=True):
        exact = old.astype(exactly) + added
        np.testing.assert_array_equal(bits(x), bits(exact.astype(own)))


@pytest.mark.parametrize("dtype", [*DTYPES, "fp64"])
@pytest.mark.parametrize(
    "wanted",
    [("dq",), ("dk",), ("dv",), ("dsinks",), ("dq", "dv"), ("dk", "dv"), ("dq", "dk", "dsinks")],
    ids=str,
)
def test_wanted_gradients(isa_library: ctypes.CDLL, dtype: str, wanted: tuple[str, ...]) -> None:
    rng = np.random.default_rng(11)
    case = Case(
        rng, capi.DTYPES.get(dtype, FP64), seq=(210, 230), causal="bottom_right",
        sinks=np.array([0.5, 3.0], np.float32), lib=isa_library,
    )  # fmt: skip
    every = case.run(isa_library)
    some = case.run(isa_library, wanted=wanted)
    for name in capi.GRADIENTS:
        if name in wanted:
            np.testing.assert_array_equal(bits(getattr(some, name)), bits(getattr(every, name)))
        else:
            assert getattr(some, name) is None


@pytest.mark.parametrize("dtype", [*DTYPES, "fp64"])
def test_any_strides(isa_library: ctypes.CDLL, dtype: str) -> None:
    """Strides of inputs and of gradients; nothing is written in between."""
    rng = np.random.default_rng(10)
    kind = capi.DTYPES.get(dtype, FP64)
    how = {"causal": "bottom_right", "lib": isa_library}
    case = Case(rng, kind, batch=2, seq=(130, 210), heads=(4, 2), dims=(24, 40), **how)
    straight = case.run(isa_library)

    def middle(large: np.ndarray) -> np.ndarray:
        return large[:, :-1, ::-1, 8:-8].transpose(0, 2, 1, 3)

    def spread(x: np.ndarray, fill: float) -> np.ndarray:
        """A larger array with x in its middle, heads first and queries backwards."""
        b, s, h, d = x.shape
        large = capi.aligned_empty((b, h + 1, s, d + 16), x.dtype)
        large[...] = fill
        middle(large)[...] = x
        return large

    tensors = {
        name: middle(spread(x, np.nan))
        for name, x in zip(("dout", "q", "k", "v", "out"), case.inputs[:5], strict=True)
    }
    wide = np.full((2, 130, 3, 4), np.nan, case.lse.dtype)
    tensors["lse"] = wide[..., 1, :].transpose(0, 2, 1)
    tensors["lse"][...] = case.lse
    large = {name: spread(x, 7.0) for name, x in straight._asdict().items() if x is not None}
    gradients = {name: middle(x) for name, x in large.items()}
    for x in gradients.values():
        x[...] = np.nan
    params = capi.attention_backward_params(tensors | gradients, **case.options)
    capi.run_attention_backward(params, isa_library)
    assert_same_bits(Gradients(**gradients), straight)
    for name, x in large.items():
        gradients[name][...] = 7.0
        assert (x.astype(np.float32) == 7.0).all()


def test_broadcast_dout(library: ctypes.CDLL) -> None:
    """Rows of inputs may be one and the same, as the gradient of a sum is."""
    case = Case(np.random.default_rng(1), np.dtype(np.float32), seq=(40, 50), lib=library)
    case.dout = np.broadcast_to(case.dout[:, :1, :1], case.dout.shape)
    case.check(case.run(library))


# ---- edges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [0.0, np.nan, np.inf])
def test_rows_and_keys_that_see_nothing(
    isa_library: ctypes.CDLL, dtype: str, poison: float
) -> None:
    """Theirs are zeros, even where they hold a NaN, and they leave the others alone."""
    case = Case(
        np.random.default_rng(0), capi.DTYPES[dtype], batch=2, seq=(390, 240), dims=(64, 24),
        causal="bottom_right", window=(100, None), dlse=True, lib=isa_library,
    )  # fmt: skip
    clean = case.run(isa_library)
    case.check(clean)
    blind = 390 - 240
    for x in (case.q, case.dout, case.out):
        x[:, :blind] = poison
    got = case.run(isa_library)
    assert (got.dq[:, :blind].astype(np.float32) == 0).all()
    case.q[:, :blind] = case.dout[:, :blind] = 0
    case.check(got)

    # The other way round: queries that stand in front of most keys.
    case = Case(
        np.random.default_rng(0), capi.DTYPES[dtype], seq=(150, 400), causal="top_left",
        lib=isa_library,
    )  # fmt: skip
    for x in (case.k, case.v):
        x[:, 150:] = poison
    got = case.run(isa_library)
    for x in (got.dk, got.dv):
        assert (x[:, 150:].astype(np.float32) == 0).all()
    case.k[:, 150:] = case.v[:, 150:] = 0
    case.check(got)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seq", [(0, 30), (30, 0)])
def test_nothing_on_one_side(isa_library: ctypes.CDLL, dtype: str, seq: tuple[int, int]) -> None:
    case = Case(np.random.default_rng(0), capi.DTYPES[dtype], batch=2, seq=seq, lib=isa_library)
    for x in case.run(isa_library)[:3]:
        assert (x.astype(np.float32) == 0).all()


MASKS = [{"causal": "bottom_right"}, {"causal": "top_left"}, {"window": (50, 20)}, {}]


@pytest.mark.parametrize("dtype", [*DTYPES, "fp64"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinity_stay_where_they_touch(
    isa_library: ctypes.CDLL, dtype: str, mask: dict[str, Any], value: float
) -> None:
    """A bad query spoils its own dq and its keys' dk and dv; a bad key, its own gradients and its
    queries' dq, and what those put into other keys."""
    kind = capi.DTYPES.get(dtype, FP64)
    rng = np.random.default_rng(14)
    made = Case(rng, kind, seq=(230, 250), heads=(2, 1), dims=(40, 24), **mask, lib=isa_library)
    seen = visible(230, 250, **mask)
    for name, at in (("q", 120), ("dout", 121), ("k", 77), ("v", 78)):
        x = getattr(made, name)
        kept = x[0, at, 0, 3].copy()
        x[0, at, 0, 3] = value
        out, lse = capi.attention(made.q, made.k, made.v, **mask, lib=isa_library)
        got = capi.attention_backward(
            made.dout, made.q, made.k, made.v, out, lse, lib=isa_library, **mask
        )
        touched = np.zeros(230, bool)
        touched[at if name in ("q", "dout") else slice(None)] = True
        if name in ("k", "v"):
            touched = seen[:, at]
        keys = seen[touched].any(0)
        bad_q, bad_k, bad_v = (~np.isfinite(g.astype(np.float64)).all(-1)[0] for g in got[:3])
        assert not bad_q[~touched].any(), name
        assert not bad_k[~keys].any(), name
        assert not bad_v[~keys].any(), name
        if name in ("q", "dout"):
            assert bad_q[at, 0] and not bad_q[at, 1]
            assert bad_k[keys].all() or name == "q"
        else:
            assert bad_q[touched].all()
        x[0, at, 0, 3] = kept


@pytest.mark.parametrize("dtype", [*DTYPES, "fp64"])
@pytest.mark.parametrize("lse", [np.inf, -np.inf, np.nan, 0.0, -1e30, 1e30, -3e38])
def test_lse_of_something_else(isa_library: ctypes.CDLL, dtype: str, lse: float) -> None:
    """Is no crash, and spoils no other row's dq."""
    kind = capi.DTYPES.get(dtype, FP64)
    case = Case(np.random.default_rng(15), kind, causal="top_left", lib=isa_library)
    clean = case.run(isa_library)
    case.lse[0, 1, 70] = lse
    got = case.run(isa_library)
    others = np.arange(150) != 70
    np.testing.assert_array_equal(bits(got.dq[:, others]), bits(clean.dq[:, others]))
    np.testing.assert_array_equal(bits(got.dk[:, 71:]), bits(clean.dk[:, 71:]))
    case.lse[...] = lse
    case.run(isa_library)


# ---- determinism ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, "fp64"])
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
    kind = capi.DTYPES.get(dtype, FP64)
    case = Case(
        np.random.default_rng(7), kind, seq=(610, 830), heads=(2, 1), dims=(40, 40),
        sinks=np.array([1.0, 2.0], np.float32), lib=isa_library, **mask,
    )  # fmt: skip
    results = []
    for threads in (1, 2, 3, 8, 33):
        isa_library.flashmoe_set_num_threads(threads)
        results += [case.run(isa_library) for _ in range(2)]
        launch = capi.last_launches(isa_library)[0]
        # A thread of tiles of AMX wants more work than all eight find under a narrow window.
        most = 4 if launch.kernel.decode().startswith("attention_backward_cpu_amx") else 33
        assert min(threads, launch.grid[0], most) <= launch.block[0] <= min(threads, launch.grid[0])
    isa_library.flashmoe_set_num_threads(0)
    for other in results[1:]:
        assert_same_bits(other, results[0])


@pytest.mark.parametrize("dtype", [*DTYPES, "fp64"])
@pytest.mark.parametrize(
    "mask",
    [
        {"causal": "none"},
        {"causal": "top_left", "softcap": 3.0},
        {"causal": "bottom_right", "window": (100, None)},
        {"window": (20, 20)},
    ],
    ids=str,
)
def test_rows_of_one_kv_head_are_shared_out(
    isa_library: ctypes.CDLL, dtype: str, mask: dict[str, Any]
) -> None:
    """Where tiles of keys are few, dk and dv are sums over parts of the rows."""
    kind = capi.DTYPES.get(dtype, FP64)
    case = Case(
        np.random.default_rng(19), kind, seq=(410, 300), heads=(8, 1), dims=(40, 24),
        lib=isa_library, **mask,
    )  # fmt: skip
    results = []
    for threads in (1, 2, 16):
        isa_library.flashmoe_set_num_threads(threads)
        results += [case.run(isa_library) for _ in range(2)]
        launch = capi.last_launches(isa_library)[0]
        tiles = -(-300 // launch.tile_n)
        parts, rest = divmod(launch.grid[0], tiles)
        blocks = -(-410 * 8 // launch.tile_m)
        assert rest == 0 and blocks // 8 <= parts <= blocks // 4
        assert launch.grid[0] >= 12
    isa_library.flashmoe_set_num_threads(0)
    for other in results[1:]:
        assert_same_bits(other, results[0])
    case.check(results[0])
    for wanted in (("dk",), ("dv",), ("dq",)):
        some = case.run(isa_library, wanted=wanted)
        for name in wanted:
            np.testing.assert_array_equal(
                bits(getattr(some, name)), bits(getattr(results[0], name))
            )


def launch_of(lib: ctypes.CDLL, q: tuple[int, ...], heads_kv: int) -> capi.Launch:
    """As planned for tensors of zeros, with as many keys as queries."""
    of_q = capi.aligned_empty(q, np.dtype(np.float32))
    of_k = capi.aligned_empty((*q[:2], heads_kv, q[3]), np.dtype(np.float32))
    lse = np.zeros((q[0], q[2], q[1]), np.float32)
    tensors = {"dout": of_q, "q": of_q, "k": of_k, "v": of_k, "out": of_q, "lse": lse}
    made = {"dq": np.empty_like(of_q), "dk": np.empty_like(of_k), "dv": np.empty_like(of_k)}
    plan = capi.attention_backward_plan(capi.attention_backward_params(tensors | made), lib)
    return plan.launches[0]


@pytest.mark.parametrize("q", [(1, 512, 8, 64), (1, 2048, 2, 64), (1, 2048, 32, 128)], ids=str)
def test_one_kv_head_gives_work_to_sixteen_threads(
    library: ctypes.CDLL, q: tuple[int, ...]
) -> None:
    library.flashmoe_set_num_threads(16)
    launch = launch_of(library, q, 1)
    library.flashmoe_set_num_threads(0)
    assert launch.block[0] == 16 and launch.grid[0] >= 24


@pytest.mark.parametrize("batch", [1, 4])
def test_rows_of_many_tiles_stay_whole(library: ctypes.CDLL, batch: int) -> None:
    """Keys would be packed more often for nothing."""
    launch = launch_of(library, (batch, 1024, 16, 64), 16)
    assert launch.grid[0] == batch * 16 * -(-1024 // launch.tile_n)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hundred_runs(library: ctypes.CDLL, dtype: str) -> None:
    case = Case(np.random.default_rng(8), capi.DTYPES[dtype], seq=(300, 500), causal="top_left")
    library.flashmoe_set_num_threads(4)
    first = case.run(library)
    for _ in range(100):
        assert_same_bits(case.run(library), first)
    library.flashmoe_set_num_threads(0)


@pytest.mark.parametrize("dtype", [*DTYPES, "fp64"])
def test_thousand_runs_while_others_disturb(library: ctypes.CDLL, dtype: str) -> None:
    """Threads of other calls take the processors away, so that parts of a call are late."""
    kind = capi.DTYPES.get(dtype, FP64)
    case = Case(
        np.random.default_rng(18), kind, seq=(40, 100), heads=(4, 2), dims=(16, 24),
        sinks=np.array([1.0, 2.0, 0.0, -1.0], np.float32), causal="bottom_right", dlse=True,
    )  # fmt: skip
    done = threading.Event()
    others: list[int] = []

    def disturb(seed: int) -> None:
        rng = np.random.default_rng(seed)
        other = Case(rng, kind, seq=(int(rng.integers(20, 100)), 30), dims=(8, 8))
        calls = 0
        while not done.is_set():
            other.run(library)
            calls += 1
        others.append(calls)

    library.flashmoe_set_num_threads(4)
    threads = [threading.Thread(target=disturb, args=(seed,)) for seed in range(3)]
    first = case.run(library)
    for thread in threads:
        thread.start()
    try:
        for _ in range(1000):
            assert_same_bits(case.run(library), first)
    finally:
        done.set()
        for thread in threads:
            thread.join()
        library.flashmoe_set_num_threads(0)
    assert len(others) == 3 and min(others) > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_batch(library: ctypes.CDLL, dtype: str) -> None:
    case = Case(np.random.default_rng(9), capi.DTYPES[dtype], batch=3, seq=(150, 250))
    together = case.run(library)
    for b in range(3):
        alone = capi.attention_backward(*(x[b:][:1] for x in case.inputs[:6]), lib=library)
        for x, y in zip(alone[:3], together[:3], strict=True):
            np.testing.assert_array_equal(bits(x[0]), bits(y[b]))


# ---- fp64 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "bottom_right"},
        {"causal": "top_left", "window": (20, None)},
        {"window": (9, 4), "softcap": 1.5, "scale": 0.75},
    ],
    ids=str,
)
@pytest.mark.parametrize("seq", [(70, 300), (150, 90)])
def test_fp64(library: ctypes.CDLL, options: dict[str, Any], seq: tuple[int, int]) -> None:
    rng = np.random.default_rng(16)
    case = Case(
        rng, FP64, batch=2, seq=seq, heads=(4, 2), dims=(40, 24), dlse=True,
        sinks=np.array([0.5, -np.inf, 3.0, 1.0]), lib=library, **options,
    )  # fmt: skip
    want = gradients_float64(case.dout, case.q, case.k, case.v, case.dlse, case.sinks, **options)
    for x, y in zip(case.run(library), want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)
    for x, y in zip(case.run(library, dtype=np.dtype(np.float32)), want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": "bottom_right", "layout": "bhsd"},
        {"window": (3, 2), "softcap": 0.8, "scale": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_gradcheck(library: ctypes.CDLL, options: dict[str, Any], with_sinks: bool) -> None:
    """Every derivative, of a loss of out and lse, beside differences of the forward in fp64."""
    rng = np.random.default_rng(17)
    sinks = np.array([0.5, 3.0]) if with_sinks else None
    case = Case(
        rng, FP64, seq=(7, 9), heads=(2, 1), dims=(8, 16), dlse=True, sinks=sinks, lib=library,
        **options,
    )  # fmt: skip

    def loss() -> float:
        out, lse = capi.attention(case.q, case.k, case.v, lib=library, sinks=sinks, **options)
        seen = np.isfinite(lse)
        return float((out * case.dout).sum() + (lse[seen] * case.dlse[seen]).sum())

    step = 1e-6
    for x, gradient in zip((case.q, case.k, case.v, sinks), case.run(library), strict=True):
        if x is None:
            assert gradient is None
            continue
        for at in np.ndindex(x.shape):
            kept = x[at]
            x[at] = kept + step
            above = loss()
            x[at] = kept - step
            below = loss()
            x[at] = kept
            assert gradient[at] == pytest.approx((above - below) / (2 * step), rel=1e-6, abs=1e-8)
