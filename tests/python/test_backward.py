"""flash_attention_backward on the tensors of each library."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import flashmoe_science as fm
import ml_dtypes
import numpy as np
import producers
import pytest
from dlpack_objects import HandMade
from producers import Producer
from reference import to_numpy
from reference_backward import assert_gradients_accurate

torch = pytest.importorskip("torch")

HOW = {"causal": "top_left", "window": (20, None), "softcap": 4.0}


def inputs(dtype: Any = np.float32) -> list[np.ndarray]:
    """q, k, v and dout."""
    rng = np.random.default_rng(0)
    shapes = [(2, 30, 4, 24), (2, 50, 2, 24), (2, 50, 2, 16), (2, 30, 4, 16)]
    return [rng.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_numpy(dtype: Any) -> None:
    q, k, v, dout = inputs(dtype)
    out, lse = fm.flash_attention(q, k, v, return_lse=True, **HOW)
    gradients = fm.flash_attention_backward(dout, q, k, v, out, lse, **HOW)
    assert gradients.dsinks is None
    assert all(type(x) is np.ndarray and x.dtype == dtype for x in gradients[:3])
    assert_gradients_accurate(gradients, dout, q, k, v, **HOW)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_sinks(dtype: Any) -> None:
    q, k, v, dout = inputs(np.float16)
    sinks = np.array([1, -2, 3, 0], dtype)
    out, lse = fm.flash_attention(q, k, v, sinks=sinks, return_lse=True, **HOW)
    got = fm.flash_attention_backward(dout, q, k, v, out, lse, sinks=sinks, **HOW)
    assert got.dsinks.dtype == dtype
    assert_gradients_accurate(got, dout, q, k, v, sinks=sinks, **HOW)
    total = got.dsinks.astype(np.float32)
    again = fm.flash_attention_backward(
        dout, q, k, v, out, lse, sinks=sinks, dsinks=total, accumulate=True, **HOW
    )
    assert again.dsinks is total and again[:3] == (None, None, None)
    np.testing.assert_allclose(total, 2 * got.dsinks.astype(np.float32), rtol=2e-3)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_torch_gradcheck(layout: str) -> None:
    """In fp64, of both outputs, by torch's own."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            out, lse = fm.flash_attention(q, k, v, return_lse=True, layout=layout, causal=True)
            ctx.save_for_backward(q, k, v, out, lse)
            return out, lse

        @staticmethod
        def backward(ctx: Any, dout: Any, dlse: Any) -> Any:
            q, k, v, out, lse = ctx.saved_tensors
            return fm.flash_attention_backward(
                dout, q, k, v, out, lse, dlse=dlse, layout=layout, causal=True
            )[:3]

    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 5, 2, 8), (1, 7, 1, 8), (1, 7, 1, 16)]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    if layout == "bhsd":
        tensors = [x.transpose(1, 2) for x in tensors]
    assert torch.autograd.gradcheck(Attention.apply, [x.requires_grad_() for x in tensors])


def test_torch_follows_autograd() -> None:
    q, k, v, dout = (torch.from_numpy(x).transpose(1, 2) for x in inputs())
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    stock = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    want = torch.autograd.grad(stock, (q, k, v), dout)
    with torch.no_grad():
        out, lse = fm.flash_attention(q, k, v, return_lse=True, layout="bhsd")
        got = fm.flash_attention_backward(dout, q, k, v, out, lse, layout="bhsd")
    for x, y in zip(got[:3], want, strict=True):
        torch.testing.assert_close(x, y)
    with pytest.raises(ValueError, match="q: requires grad, but attention backward has no"):
        fm.flash_attention_backward(dout, q, k, v, out, lse, layout="bhsd")


def test_objects_with_dlpack_alone() -> None:
    q, k, v, dout = inputs()
    out, lse = fm.flash_attention(q, k, v, return_lse=True, **HOW)
    want = fm.flash_attention_backward(dout, q, k, v, out, lse, **HOW)
    wrapped = [HandMade.of(x) for x in (dout, q, k, v, out, lse)]
    got = fm.flash_attention_backward(*wrapped, **HOW)
    for x, y in zip(got[:3], want[:3], strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("producer", producers.ON_CPU, ids=str)
def test_every_producer(producer: Producer) -> None:
    """Its own arrays, in the bits of NumPy's; sinks and dlse, too."""
    for dtype in producer.dtypes:
        q, k, v, dout = (producers.cast(x, dtype) for x in inputs())
        sinks = np.array([1, -2, 3, 0], np.float32)
        out, lse = fm.flash_attention(q, k, v, sinks=sinks, return_lse=True, **HOW)
        dlse = np.sin(lse)
        want = fm.flash_attention_backward(dout, q, k, v, out, lse, dlse=dlse, sinks=sinks, **HOW)
        tensors = [producer.make(x, dtype) for x in (dout, q, k, v, out)]
        lse, dlse, sinks = (producer.as_is(x) for x in (lse, dlse, sinks))
        got = fm.flash_attention_backward(*tensors, lse, dlse=dlse, sinks=sinks, **HOW)
        strict = producer.name in ("array-api", "array-api-strict")
        for x, y in zip(got, want, strict=True):
            assert isinstance(x, producer.kind)
            np.testing.assert_array_equal(np.asarray(x) if strict else to_numpy(x), to_numpy(y))
        dq_only = fm.flash_attention_backward(
            *tensors, lse, sinks=sinks, wanted=(True, False, False, False), **HOW
        )
        assert isinstance(dq_only.dq, producer.kind) and dq_only[1:] == (None, None, None)


def test_given_and_wanted_gradients() -> None:
    q, k, v, dout = inputs(np.float16)
    out, lse = fm.flash_attention(q, k, v, return_lse=True)
    every = fm.flash_attention_backward(dout, q, k, v, out, lse)
    got = fm.flash_attention_backward(dout, q, k, v, out, lse, wanted=(False, True, False, True))
    assert got[0] is None and got[2] is None
    np.testing.assert_array_equal(got[1], every[1])

    dq = np.full(q.shape, np.nan, np.float32)
    none = (False,) * 4
    got = fm.flash_attention_backward(dout, q, k, v, out, lse, dq=dq, wanted=none)
    assert got[0] is dq and got[1:] == (None, None, None)
    np.testing.assert_array_equal(dq.astype(np.float16), every[0])
    once = dq.copy()
    got = fm.flash_attention_backward(dout, q, k, v, out, lse, dq=dq, accumulate=True)
    assert got[0] is dq and got[1:] == (None, None, None)
    np.testing.assert_array_equal(dq, once + once)


@pytest.mark.parametrize(
    ("changed", "error", "sentence"),
    [
        ({"dout": None}, TypeError, "dout: got NoneType, accepted is a tensor"),
        ({"lse": np.zeros((2, 30, 4), np.float32)}, ValueError, "lse: its number of heads is 30"),
        ({"dk": np.zeros((2, 50, 2, 24), np.float16)}, TypeError, "dk: got dtype fp16, accepted"),
        (
            {"accumulate": 1},
            TypeError,
            "accumulate: got 1 of type int, accepted",
        ),
        ({"accumulate": True}, ValueError, "dq: got a null tensor, as dk, dv and dsinks"),
        ({"wanted": (True, 1, True, True)}, TypeError, "wanted: got 1 of type int"),
        ({"wanted": (True, True, True)}, ValueError, "wanted: got 3 flags"),
        ({"wanted": True}, TypeError, "wanted: got True of type bool, accepted are four flags"),
        ({"dsinks": np.zeros(4, np.float32)}, ValueError, "dsinks: got one, accepted without"),
        ({"sinks": np.zeros(3, np.float32)}, ValueError, "sinks: its number of heads is 3"),
        ({"causal": "up"}, ValueError, "causal: got 'up'"),
        ({"kernel": "nobody"}, ValueError, "kernel: "),
    ],
    ids=str,
)
def test_errors(changed: dict[str, Any], error: type[Exception], sentence: str) -> None:
    q, k, v, dout = inputs()
    out, lse = fm.flash_attention(q, k, v, return_lse=True)
    arguments = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse} | changed
    with pytest.raises(error) as caught:
        fm.flash_attention_backward(**arguments)
    assert str(caught.value).startswith(sentence)
