"""Any shape, stride, dtype, layout and option against float64."""

from __future__ import annotations

from typing import Any

import flashmoe_science as fm
import numpy as np
import producers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from producers import Producer
from reference import DTYPES, assert_accurate, to_numpy
from reference_backward import gradients_float64

TORCH = [p for p in producers.ON_CPU if p.name.startswith("torch")]
STRIDED = [p for p in producers.ON_CPU if p.name == "numpy"] + TORCH


@st.composite
def arrays(draw: st.DrawFn, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Standard normal values in a view: axes permuted, rows padded, sliced, reversed or repeated.
    Rows stay contiguous and 16-byte aligned."""
    per_row = 16 // DTYPES[dtype].itemsize
    order = draw(st.permutations((0, 1, 2)))
    steps = [draw(st.sampled_from((1, 1, 1, 2, -1))) for _ in range(3)]
    begins = [draw(st.integers(0, 1)) for _ in range(3)]
    extents = [begins[axis] + shape[axis] * abs(steps[axis]) for axis in range(3)]
    padded = shape[3] + per_row * draw(st.integers(0, 1))
    seed = draw(st.integers(0, 2**32 - 1))
    base = np.random.default_rng(seed).standard_normal(
        (*(extents[axis] for axis in order), padded), np.float32
    )
    view = producers.cast(base, dtype).transpose(*np.argsort(order), 3)[..., : shape[3]]
    for axis, (begin, step) in enumerate(zip(begins, steps, strict=True)):
        index: list[Any] = [slice(None)] * 4
        index[axis] = slice(begin, None, abs(step))
        view = view[tuple(index)]
        if step < 0:
            view = np.flip(view, axis)
    assert view.shape == shape
    if draw(st.booleans()) and shape[0] > 0:  # every batch the first one's memory
        view = np.lib.stride_tricks.as_strided(view, strides=(0, *view.strides[1:]))
    return view


@st.composite
def windows(draw: st.DrawFn) -> dict[str, Any]:
    """causal and window."""
    causal = draw(st.sampled_from((False, True, "bottom_right", "top_left")))
    extents = st.none() | st.integers(0, 100) | st.just(2**63 - 1)
    right = draw(st.sampled_from((None, 0)) if causal else extents)
    window = draw(st.none() | st.tuples(extents, st.just(right)))
    return {"causal": causal, "window": window}


@st.composite
def calls(draw: st.DrawFn, producers_: list[Producer]) -> dict[str, Any]:
    producer = draw(st.sampled_from(producers_))
    dtype = draw(st.sampled_from(producer.dtypes))
    layout = draw(st.sampled_from(("bshd", "bhsd")))
    batch = draw(st.integers(0, 3))
    seq_q, seq_k = draw(st.integers(0, 70)), draw(st.integers(0, 90))
    heads_kv = draw(st.integers(1, 3))
    heads_q = heads_kv * draw(st.integers(1, 3))
    dim, dim_v = 8 * draw(st.integers(1, 12)), 8 * draw(st.integers(1, 12))

    def shape(seq: int, heads: int, last: int) -> tuple[int, ...]:
        return (batch, heads, seq, last) if layout == "bhsd" else (batch, seq, heads, last)

    return {
        "producer": producer,
        "dtype": dtype,
        "q": draw(arrays(shape(seq_q, heads_q, dim), dtype)),
        "k": draw(arrays(shape(seq_k, heads_kv, dim), dtype)),
        "v": draw(arrays(shape(seq_k, heads_kv, dim_v), dtype)),
        "options": {
            "layout": layout,
            "scale": draw(st.sampled_from((None, 0.05, 1.0))),
            "softcap": draw(st.sampled_from((None, None, 0.3, 30.0, 1e5))),
        }
        | draw(windows()),
    }


def check(call: dict[str, Any]) -> None:
    producer, dtype = call["producer"], call["dtype"]
    inputs = [call[name] for name in ("q", "k", "v")]
    if producer.name.startswith("torch"):  # torch has no negative strides
        inputs = [x if min(x.strides) >= 0 else x.copy() for x in inputs]
    tensors = [producer.make(x, dtype) for x in inputs]
    out, lse = fm.flash_attention(*tensors, return_lse=True, **call["options"])
    assert isinstance(out, producer.kind)
    if producer.name == "array-api":
        out, lse = np.asarray(out), np.asarray(lse)
    assert_accurate(out, lse, *inputs, **call["options"])


NEAR = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}  # of the largest


def check_gradients(call: dict[str, Any]) -> None:
    """Gradients are the producer's own arrays, and NumPy's to the last bit."""
    producer, dtype, options = call["producer"], call["dtype"], call["options"]
    q, k, v = (call[name] if call[name].size else call[name].copy() for name in ("q", "k", "v"))
    if producer.name.startswith("torch"):  # torch has no negative strides
        q, k, v = (x if min(x.strides) >= 0 else x.copy() for x in (q, k, v))
    out, lse = fm.flash_attention(q, k, v, return_lse=True, **options)
    rng = np.random.default_rng(0)
    dout = producers.cast(rng.standard_normal(out.shape, np.float32), dtype)
    dlse = rng.standard_normal(lse.shape, np.float32)
    want = fm.flash_attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
    # Whether the kernels are accurate tests/cpu asks: here, that they got what was meant.
    exact = gradients_float64(dout, q, k, v, dlse, **options)
    for x, reference in zip(want[:3], exact[:3], strict=True):
        most = max(1.0, float(np.abs(reference).max(initial=0.0)))
        np.testing.assert_allclose(to_numpy(x), reference, atol=NEAR[dtype] * most)
    tensors = [producer.make(x, dtype) for x in (dout, q, k, v, out)]
    got = fm.flash_attention_backward(
        *tensors, producer.as_is(lse), dlse=producer.as_is(dlse), **options
    )
    assert got.dsinks is None
    for x, y in zip(got[:3], want[:3], strict=True):
        assert isinstance(x, producer.kind)
        x = np.asarray(x) if producer.name in ("array-api", "array-api-strict") else to_numpy(x)
        np.testing.assert_array_equal(x, to_numpy(y))


@settings(max_examples=200)
@given(calls(STRIDED))
def test_any_valid_call(call: dict[str, Any]) -> None:
    check(call)


@settings(max_examples=25)
@given(calls([p for p in producers.ON_CPU if p not in STRIDED]))
def test_any_valid_call_through_dlpack_and_jax(call: dict[str, Any]) -> None:
    check(call)


@settings(max_examples=60)
@given(calls(STRIDED))
def test_any_gradients(call: dict[str, Any]) -> None:
    check_gradients(call)


@pytest.mark.parametrize("producer", [p for p in producers.ON_CPU if p not in STRIDED], ids=str)
def test_any_gradients_through_dlpack_and_jax(producer: Producer) -> None:
    @settings(max_examples=8)
    @given(calls([producer]))
    def run(call: dict[str, Any]) -> None:
        check_gradients(call)

    run()


WRONG_EXTENTS = st.sampled_from((-1, 0, 1, 3, 7, 12, 257, 264, 2**31, 2**62, 2**63 - 1))


@settings(max_examples=300)
@given(data=st.data())
def test_any_plan_is_made_or_refused_with_a_sentence(data: st.DataObject) -> None:
    extents = {"batch": 2, "seq_q": 16, "seq_k": 24, "heads_q": 4, "heads_kv": 2, "dim": 64}
    changed = data.draw(st.lists(st.sampled_from(list(extents)), max_size=3, unique=True))
    for name in changed:
        extents[name] = data.draw(WRONG_EXTENTS)
    layout = data.draw(st.sampled_from(("bshd", "bhsd")))
    wrong = None
    try:
        plan = fm.attention_plan_for(**extents, dtype="fp16", layout=layout)
    except fm.FlashMoEError as error:
        wrong = str(error).partition(":")[0]
    if wrong is None:
        assert plan.kernel
        assert extents["heads_q"] % extents["heads_kv"] == 0
        assert extents["dim"] % 8 == 0
    else:
        negative = [name for name in changed if extents[name] < 0]
        assert wrong in (negative or ("q", "k", "v", "out", "lse", "cpu"))


@pytest.mark.parametrize("producer", STRIDED, ids=str)
def test_same_inputs_same_bits(producer: Producer) -> None:
    rng = np.random.default_rng(2)
    q, k, v = (
        producer.make(rng.standard_normal((2, 130, 4, 64), np.float32), "bf16") for _ in range(3)
    )
    first = np.asarray(fm.flash_attention(q, k, v, causal=True).view(bits(producer)))
    before = fm.get_num_threads()
    try:
        for threads in (1, 2, 3, 1):
            fm.set_num_threads(threads)
            again = np.asarray(fm.flash_attention(q, k, v, causal=True).view(bits(producer)))
            np.testing.assert_array_equal(again, first)
    finally:
        fm.set_num_threads(before)


def bits(producer: Producer) -> Any:
    if producer.name == "numpy":
        return np.int16
    import torch

    return torch.int16
