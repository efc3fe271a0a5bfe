"""flash_attention on every producer: values, kinds, layouts, options, outputs."""

from __future__ import annotations

import inspect
from typing import Any

import flashmoe_science as fm
import numpy as np
import producers
import pytest
from producers import Producer
from reference import assert_accurate

CASES = [(producer, dtype) for producer in producers.ON_CPU for dtype in producer.dtypes]
EVERY_PRODUCER = pytest.mark.parametrize(
    ("producer", "dtype"), CASES, ids=[f"{producer}-{dtype}" for producer, dtype in CASES]
)


def inputs(
    dtype: str, layout: str = "bshd", seed: int = 0, dim_v: int = 40
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, k, v with grouped heads, dim_v != dim and seq_q != seq_k, rounded to dtype."""
    rng = np.random.default_rng(seed)
    shapes = ((2, 37, 6, 64), (2, 53, 2, 64), (2, 53, 2, dim_v))
    arrays = (rng.standard_normal(shape, np.float32) for shape in shapes)
    if layout == "bhsd":
        arrays = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in arrays)
    q, k, v = (producers.cast(x, dtype) for x in arrays)
    return q, k, v


@EVERY_PRODUCER
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("causal", [False, "bottom_right", "top_left"])
def test_values(producer: Producer, dtype: str, layout: str, causal: Any) -> None:
    arrays = inputs(dtype, layout)
    q, k, v = (producer.make(x, dtype) for x in arrays)
    out, lse = fm.flash_attention(q, k, v, causal=causal, layout=layout, return_lse=True)
    assert isinstance(out, producer.kind)
    assert isinstance(lse, producer.kind)
    if producer.name == "array-api":
        out, lse = np.asarray(out), np.asarray(lse)
    assert_accurate(out, lse, *arrays, causal=causal, layout=layout)


@EVERY_PRODUCER
def test_alone_and_with_lse_are_the_same(producer: Producer, dtype: str) -> None:
    q, k, v = (producer.make(x, dtype) for x in inputs(dtype))
    alone = fm.flash_attention(q, k, v)
    beside, _ = fm.flash_attention(q, k, v, return_lse=True)
    assert isinstance(alone, producer.kind)
    assert bytes_of(alone) == bytes_of(beside)


def bytes_of(tensor: Any) -> bytes:
    if hasattr(tensor, "untyped_storage"):
        return bytes(tensor.contiguous().view(-1).view(dtype=__import__("torch").uint8).numpy())
    return np.asarray(tensor).tobytes()


@EVERY_PRODUCER
def test_scale_and_true_for_bottom_right(producer: Producer, dtype: str) -> None:
    arrays = inputs(dtype)
    q, k, v = (producer.make(x, dtype) for x in arrays)
    out, lse = fm.flash_attention(q, k, v, causal=True, scale=0.3, return_lse=True)
    if producer.name == "array-api":
        out, lse = np.asarray(out), np.asarray(lse)
    assert_accurate(out, lse, *arrays, causal="bottom_right", scale=0.3)


@EVERY_PRODUCER
@pytest.mark.parametrize(
    ("causal", "window"),
    [
        (False, (5, None)),
        (False, (None, 0)),
        (False, (9, 4)),
        (True, (0, 0)),
        ("top_left", (7, None)),
        (True, (1000, 0)),
        (False, (None, None)),
    ],
)
def test_windows(producer: Producer, dtype: str, causal: Any, window: Any) -> None:
    arrays = inputs(dtype)
    q, k, v = (producer.make(x, dtype) for x in arrays)
    out, lse = fm.flash_attention(q, k, v, causal=causal, window=window, return_lse=True)
    if producer.name == "array-api":
        out, lse = np.asarray(out), np.asarray(lse)
    assert_accurate(out, lse, *arrays, causal=causal, window=window)


@EVERY_PRODUCER
@pytest.mark.parametrize("softcap", [0.4, 50, 1e6])
def test_softcap(producer: Producer, dtype: str, softcap: float) -> None:
    arrays = inputs(dtype)
    q, k, v = (producer.make(x, dtype) for x in arrays)
    out, lse = fm.flash_attention(q, k, v, softcap=softcap, window=(20, 9), return_lse=True)
    if producer.name == "array-api":
        out, lse = np.asarray(out), np.asarray(lse)
    assert_accurate(out, lse, *arrays, softcap=softcap, window=(20, 9))


@EVERY_PRODUCER
@pytest.mark.parametrize("of", ["fp32", "q"])
def test_sinks(producer: Producer, dtype: str, of: str) -> None:
    arrays = inputs(dtype)
    q, k, v = (producer.make(x, dtype) for x in arrays)
    of = dtype if of == "q" or "fp32" not in producer.dtypes else of
    values = producers.cast(np.linspace(-2, 3, arrays[0].shape[2], dtype=np.float32), of)
    how = {"window": (20, 0), "softcap": 2.0}
    out, lse = fm.flash_attention(q, k, v, sinks=producer.make(values, of), **how, return_lse=True)
    if producer.name == "array-api":
        out, lse = np.asarray(out), np.asarray(lse)
    assert_accurate(out, lse, *arrays, sinks=values, **how)


def test_a_window_may_be_any_two_numbers_of_keys() -> None:
    q, k, v = inputs("fp32")
    want = fm.flash_attention(q, k, v, window=(6, 3))
    for window in ([6, 3], (np.int64(6), np.uint8(3))):
        np.testing.assert_array_equal(fm.flash_attention(q, k, v, window=window), want)
    np.testing.assert_array_equal(
        fm.flash_attention(q, k, v, window=(None, 0)), fm.flash_attention(q, k, v, causal=True)
    )


@pytest.mark.parametrize("producer", [p for p in producers.ON_CPU if p.takes_out], ids=str)
def test_outputs_are_the_callers(producer: Producer) -> None:
    arrays = inputs("fp32")
    q, k, v = (producer.make(x, "fp32") for x in arrays)
    out = producer.poisoned((2, 37, 6, 40), "fp32")
    lse = producer.poisoned((2, 6, 37), "fp32")
    assert fm.flash_attention(q, k, v, out=out) is out
    got = fm.flash_attention(q, k, v, out=out, lse=lse, return_lse=True)
    assert got[0] is out
    assert got[1] is lse
    if producer.name == "array-api":
        out, lse = np.asarray(out), np.asarray(lse)
    assert_accurate(out, lse, *arrays)


def test_an_lse_that_is_given_is_filled_even_if_not_returned() -> None:
    q, k, v = inputs("fp32")
    lse = np.full((2, 6, 37), np.nan, np.float32)
    out = fm.flash_attention(q, k, v, lse=lse)
    assert_accurate(out, lse, q, k, v)


def test_outputs_may_be_strided_and_are_written_nowhere_else() -> None:
    q, k, v = inputs("fp16")
    room = np.full((2, 37, 8, 48), 7, np.float16)
    out = room[:, :, 1:7, :40]
    sums = np.full((37, 2, 12), 7, np.float32)
    lse = sums.transpose(1, 2, 0)[:, ::2]
    fm.flash_attention(q, k, v, out=out, lse=lse)
    assert_accurate(np.ascontiguousarray(out), np.ascontiguousarray(lse), q, k, v)
    assert (room[:, :, 0] == 7).all()
    assert (room[:, :, 7] == 7).all()
    assert (room[..., 40:] == 7).all()
    assert (sums[:, :, 1::2] == 7).all()


@pytest.mark.parametrize("producer", [p for p in producers.ON_CPU if p.name != "jax"], ids=str)
def test_strided_inputs_are_read_in_place(producer: Producer) -> None:
    rng = np.random.default_rng(1)
    packed = rng.standard_normal((2, 40, 3, 4, 32), np.float32)  # [batch, seq, qkv, heads, dim]
    q, k, v = (packed[:, :, i] for i in range(3))
    out = fm.flash_attention(*(producer.make(x, "fp32") for x in (q, k, v)))
    assert_accurate(np.asarray(out), None, q, k, v)
    flipped, wide = q[:, ::-1], np.lib.stride_tricks.as_strided(k, strides=(0, *k.strides[1:]))
    if producer.name.startswith("torch"):  # which has no negative strides
        flipped = q
    out = fm.flash_attention(*(producer.make(x, "fp32") for x in (flipped, wide, v)))
    assert_accurate(np.asarray(out), None, flipped, wide, v)


def test_read_only_inputs_are_accepted() -> None:
    for dtype in ("fp32", "bf16"):
        q, k, v = inputs(dtype)
        for x in (q, k, v):
            x.setflags(write=False)
        assert_accurate(fm.flash_attention(q, k, v), None, q, k, v)


@pytest.mark.parametrize("extents", [(0, 5, 5), (2, 0, 5), (2, 5, 0)])
@pytest.mark.parametrize(
    "producer", [p for p in producers.ON_CPU if p.name not in ("array-api",)], ids=str
)
def test_empty_extents(producer: Producer, extents: tuple[int, int, int]) -> None:
    batch, seq_q, seq_k = extents
    q = producer.make(np.ones((batch, seq_q, 2, 16), np.float32), "fp32")
    k = producer.make(np.ones((batch, seq_k, 2, 16), np.float32), "fp32")
    out, lse = fm.flash_attention(q, k, k, return_lse=True)
    out, lse = np.asarray(out), np.asarray(lse)
    assert out.shape == (batch, seq_q, 2, 16)
    assert (out == 0).all()
    assert np.isneginf(lse).all()


def test_results_keep_qs_order_in_memory() -> None:
    """A transposed q gives a transposed out, as torch's own attention does: no copy follows."""
    torch = pytest.importorskip("torch")
    q = torch.randn(2, 9, 3, 16).transpose(1, 2)
    out = fm.flash_attention(q, q, q, layout="bhsd")
    assert out.stride() == q.stride()
    q = q.contiguous()  # of the same shape: what was made before is no example
    assert fm.flash_attention(q, q, q, layout="bhsd").is_contiguous()
    q = torch.randn(2, 3, 9, 32)[..., :16]
    assert fm.flash_attention(q, q, q, layout="bhsd").is_contiguous()
    q = np.ones((2, 9, 3, 16), np.float32).swapaxes(1, 2)
    assert fm.flash_attention(q, q, q, layout="bhsd").strides == q.strides


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 2), (0, 1, 2)])
def test_a_query_may_be_repeated(axes: tuple[int, ...]) -> None:
    """Rows of the new output lie as rows do, though q's axes have no order in memory."""
    shape = (2, 9, 3, 16)
    one = tuple(1 if axis in axes else n for axis, n in enumerate(shape))
    rng = np.random.default_rng(3)
    q = np.broadcast_to(rng.standard_normal(one, np.float32), shape)
    k = rng.standard_normal(shape, np.float32)
    out = fm.flash_attention(q, k, k)
    assert out.strides[-1] == out.itemsize
    np.testing.assert_array_equal(out, fm.flash_attention(q.copy(), k, k))


def test_torch_parameters_and_grad_mode() -> None:
    torch = pytest.importorskip("torch")
    q = torch.nn.Parameter(torch.randn(1, 4, 2, 16))
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            out = fm.flash_attention(q, q, q)
            assert type(out) is torch.Tensor
            assert not out.requires_grad
    assert torch.equal(out, fm.flash_attention(*[q.detach()] * 3))


def test_torch_outputs_own_torchs_storage() -> None:
    """record_stream does nothing for foreign storage, which cannot be resized either."""
    torch = pytest.importorskip("torch")
    q = torch.randn(1, 4, 2, 16)
    v = torch.randn(1, 4, 2, 8)
    for out in (*fm.flash_attention(q, q, q, return_lse=True), fm.flash_attention(q, q, v)):
        assert out.untyped_storage().resizable()


def test_predecessors_names() -> None:
    q, k, v = (x[:, :2] for x in inputs("fp32", "bhsd"))
    expected = fm.flash_attention(q, k, v, causal=True, scale=0.5, layout="bhsd")
    for alias in (fm.flash_attention_forward, fm.flash_attention_warp_specialized):
        np.testing.assert_array_equal(alias(q, k, v, True, 0.5), expected)
        np.testing.assert_array_equal(
            alias(Q=q, K=k, V=v, causal=True, softmax_scale=0.5), expected
        )


def test_everything_exported_is_there_and_documented() -> None:
    for name in fm.__all__:
        value = getattr(fm, name)
        assert name in dir(fm)
        if name != "__version__":
            assert inspect.getdoc(value), name
    with pytest.raises(AttributeError, match="no attribute 'flash_attention_sideways'"):
        fm.flash_attention_sideways  # noqa: B018
