"""Bad calls: the kind of the exception, the whole sentence, and outputs untouched."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flashmoe_science as fm
import kernels
import numpy as np
import producers
import pytest
from producers import DlpackOnly

Q = np.zeros((2, 16, 4, 32), np.float32)
K = np.zeros((2, 24, 2, 32), np.float32)
BY_NAME = {"q": Q, "k": K, "v": K}

TENSORS = "accepted is a tensor of NumPy, torch, JAX or CuPy, or an object with __dlpack__"
WINDOW = (
    "accepted is None or a pair (left, right) of numbers of keys, each 0 or more, or None for no "
    "bound (FlashAttention's -1)"
)


@dataclass(frozen=True, repr=False)
class Unprintable:
    text: str | None

    def __repr__(self) -> str:
        if self.text is None:
            raise RuntimeError("no text")
        return self.text


@dataclass(frozen=True, repr=False)
class Stream:
    answer: Any

    def __cuda_stream__(self) -> Any:
        return self.answer

    def __repr__(self) -> str:
        return "a stream"


OPTIONS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "causal": (
        {"causal": "left"},
        ValueError,
        "causal: got 'left', accepted are False, True (bottom_right), 'bottom_right' and "
        "'top_left'",
    ),
    "causal-int": (
        {"causal": 1},
        TypeError,
        "causal: got 1 of type int, accepted are False, True (bottom_right), 'bottom_right' and "
        "'top_left'",
    ),
    "layout": (
        {"layout": "sbhd"},
        ValueError,
        "layout: got 'sbhd', accepted are 'bshd' and 'bhsd'",
    ),
    "layout-none": (
        {"layout": None},
        TypeError,
        "layout: got None of type NoneType, accepted are 'bshd' and 'bhsd'",
    ),
    "scale-zero": (
        {"scale": 0.0},
        ValueError,
        "scale: got 0.0, accepted is a finite positive number, or None for 1 / sqrt(dim)",
    ),
    "scale-underflow": (
        {"scale": 1e-60},
        ValueError,
        "scale: got 1e-60, accepted is a finite positive number, or None for 1 / sqrt(dim)",
    ),
    "scale-nan": (
        {"scale": float("nan")},
        ValueError,
        "scale: got nan, accepted is a finite positive number, or None for 1 / sqrt(dim)",
    ),
    "scale-overflow": (
        {"scale": 1e60},
        ValueError,
        "scale: got 1e+60, accepted is a finite positive number, or None for 1 / sqrt(dim)",
    ),
    "scale-text": (
        {"scale": "1"},
        TypeError,
        "scale: got '1' of type str, accepted is a number, or None for 1 / sqrt(dim)",
    ),
    "window-number": (
        {"window": 128},
        TypeError,
        "window: got 128 of type int, accepted is None or a pair (left, right), each a number of "
        "keys or None",
    ),
    "window-three": (
        {"window": (1, 2, 3)},
        ValueError,
        "window: got (1, 2, 3), accepted is None or a pair (left, right), each a number of keys or "
        "None",
    ),
    "window-flash-attention": ({"window": (-1, -1)}, ValueError, f"window: got (-1, -1), {WINDOW}"),
    "window-negative": ({"window": (5, -2)}, ValueError, f"window: got (5, -2), {WINDOW}"),
    "window-wide": (
        {"window": (1 << 64, None)},
        ValueError,
        f"window: got ({1 << 64}, None), {WINDOW}",
    ),
    "window-fraction": (
        {"window": (1.5, None)},
        TypeError,
        f"window: got (1.5, None) of type tuple, {WINDOW}",
    ),
    "window-array": (
        {"window": (np.array([1, 2]), None)},
        TypeError,
        f"window: got (array([1, 2]), None) of type tuple, {WINDOW}",
    ),
    "window-bool": (
        {"window": (None, True)},
        TypeError,
        f"window: got (None, True) of type tuple, {WINDOW}",
    ),
    "window-causal": (
        {"window": (5, 2), "causal": True},
        ValueError,
        "window: got (5, 2), accepted with causal is a pair (left, right) whose right is 0 or None",
    ),
    "softcap-zero": (
        {"softcap": 0.0},
        ValueError,
        "softcap: got 0.0, accepted is a finite positive number, or None for no cap",
    ),
    "softcap-negative": (
        {"softcap": -30.0},
        ValueError,
        "softcap: got -30.0, accepted is a finite positive number, or None for no cap",
    ),
    "softcap-nan": (
        {"softcap": float("nan")},
        ValueError,
        "softcap: got nan, accepted is a finite positive number, or None for no cap",
    ),
    "softcap-text": (
        {"softcap": "30"},
        TypeError,
        "softcap: got '30' of type str, accepted is a number, or None for no cap",
    ),
    "return_lse": (
        {"return_lse": 1},
        TypeError,
        "return_lse: got 1 of type int, accepted are False and True",
    ),
    "scale-bool": (
        {"scale": True},
        TypeError,
        "scale: got True of type bool, accepted is a number, or None for 1 / sqrt(dim)",
    ),
    "scale-huge": (
        {"scale": 10**400},
        ValueError,
        f"scale: got 1{'0' * 59}..., accepted is a number, or None for 1 / sqrt(dim)",
    ),
    "softcap-bool": (
        {"softcap": True},
        TypeError,
        "softcap: got True of type bool, accepted is a number, or None for no cap",
    ),
    "layout-long": (
        {"layout": "x" + "é" * 80},
        ValueError,
        f"layout: got 'x{'é' * 58}..., accepted are 'bshd' and 'bhsd'",
    ),
    "layout-surrogates": (
        {"layout": Unprintable("\ud800\0")},
        TypeError,
        f"layout: got \\ud800\0 of type {__name__}.Unprintable, accepted are 'bshd' and 'bhsd'",
    ),
    "layout-without-repr": (
        {"layout": Unprintable(None)},
        TypeError,
        f"layout: got one without a repr of type {__name__}.Unprintable, accepted are 'bshd' and "
        "'bhsd'",
    ),
    "kernel-null": (
        {"kernel": "cpu\0x"},
        ValueError,
        r"kernel: got 'cpu\x00x', accepted is the name of a kernel family, or None",
    ),
    "kernel-surrogate": (
        {"kernel": "\ud800"},
        ValueError,
        r"kernel: got '\ud800', accepted is the name of a kernel family, or None",
    ),
    "kernel-type": (
        {"kernel": 89},
        TypeError,
        "kernel: got 89 of type int, accepted is the name of a kernel family, or None",
    ),
    "stream": (
        {"stream": "default"},
        TypeError,
        "stream: got 'default' of type str, accepted is a cudaStream_t as an int, or an object "
        "with __cuda_stream__(), cuda_stream or ptr",
    ),
    "stream-bool": (
        {"stream": True},
        TypeError,
        "stream: got True of type bool, accepted is a cudaStream_t as an int, or an object with "
        "__cuda_stream__(), cuda_stream or ptr",
    ),
    "stream-protocol": (
        {"stream": Stream(3)},
        TypeError,
        f"stream: got a stream of type {__name__}.Stream, accepted is a cudaStream_t as an int, or "
        "an object with __cuda_stream__(), cuda_stream or ptr",
    ),
    "stream-protocol-short": (
        {"stream": Stream((0,))},
        TypeError,
        f"stream: got a stream of type {__name__}.Stream, accepted is a cudaStream_t as an int, or "
        "an object with __cuda_stream__(), cuda_stream or ptr",
    ),
    "stream-wide": (
        {"stream": 1 << 70},
        ValueError,
        f"stream: got {1 << 70}, accepted is a cudaStream_t as an int that fits a pointer",
    ),
}

ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q-list": ({"q": [1.0]}, TypeError, f"q: got list, {TENSORS}"),
    "v-none": ({"v": None}, TypeError, f"v: got NoneType, {TENSORS}"),
    "out-list": ({"out": []}, TypeError, f"out: got list, {TENSORS}"),
    "rank": ({"q": Q[0]}, ValueError, "q: got 3 dimensions, accepted are 4"),
    "rank-k": ({"k": K[0, 0]}, ValueError, "k: got 2 dimensions, accepted are 4"),
    "rank-v": ({"v": K[None]}, ValueError, "v: got 5 dimensions, accepted are 4"),
    "rank-many": (
        {"q": np.zeros((1,) * 12, np.float32)},
        ValueError,
        "q: got 12 dimensions, accepted are 4",
    ),
    "dtype": (
        {"q": Q.astype(np.int64)},
        TypeError,
        "q: got dtype int64 (code 0, 1 lanes), accepted are fp16, bf16, fp32 and fp64",
    ),
    "dtype-int": (
        {"k": K.astype(np.int32)},
        TypeError,
        "k: got dtype int32 (code 0, 1 lanes), accepted are fp32 as q's and fp8_e4m3",
    ),
    "dtype-mixed": (
        {"v": K.astype(np.float16)},
        TypeError,
        "v: got dtype fp16, accepted is fp32 as q's",
    ),
    "dtype-lse": (
        {"lse": np.zeros((2, 4, 16), np.float16)},
        TypeError,
        "lse: got dtype fp16, accepted is fp32",
    ),
    "dim": (
        {"q": Q[..., :20]},
        ValueError,
        "q: its head dimension is 20, accepted are multiples of 8 from 8 to 576",
    ),
    "dim-k": ({"k": K[..., :16]}, ValueError, "k: its head dimension is 16, but q has 32"),
    "batch": ({"v": K[:1]}, ValueError, "v: its batch is 1, but q has 2"),
    "length": ({"v": K[:, :5]}, ValueError, "v: its sequence length is 5, but k has 24"),
    "heads": (
        {"k": np.zeros((2, 24, 3, 32), np.float32), "v": np.zeros((2, 24, 3, 32), np.float32)},
        ValueError,
        "k: got 3 heads, accepted are divisors of q's 4",
    ),
    "rows": (
        {"k": np.zeros((2, 24, 32, 2), np.float32).swapaxes(2, 3)},
        ValueError,
        "k: its last dimension has stride 2, accepted is 1 (contiguous rows)",
    ),
    "stride": (
        {"k": np.zeros((2, 24, 2, 34), np.float32)[..., :32]},
        ValueError,
        "k: dimension 2 has stride 34 elements, accepted are multiples of 4 (rows begin on "
        "16-byte boundaries)",
    ),
    "out-shape": (
        {"out": np.zeros((2, 16, 4, 16), np.float32)},
        ValueError,
        "out: its head dimension is 16, but v has 32",
    ),
    "out-overlap": (
        {"out": np.lib.stride_tricks.as_strided(Q.copy(), strides=(0, 512, 128, 4))},
        ValueError,
        "out: its strides [0, 128, 32, 1] make elements of shape [2, 16, 4, 32] overlap; an output "
        "needs distinct elements",
    ),
    "lse-shape": (
        {"lse": np.zeros((2, 16, 4), np.float32)},
        ValueError,
        "lse: its number of heads is 16, but q has 4",
    ),
}
# torch has no strides without storage, and JAX no strides at all
NUMPY_ONLY = {"out-overlap"}


def raises(kind: type[Exception], sentence: str, call: Callable[[], object]) -> fm.FlashMoEError:
    with pytest.raises(fm.FlashMoEError, match=f"^{re.escape(sentence)}$") as caught:
        call()
    assert isinstance(caught.value, kind)
    return caught.value


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("producer", producers.ON_CPU, ids=str)
def test_options(producer: producers.Producer, name: str) -> None:
    options, kind, sentence = OPTIONS[name]
    if producer.name == "jax" and "stream" in options:
        sentence = "stream: XLA chooses the stream of JAX arrays; leave it None"
        kind = ValueError
    tensors = {n: producer.make(x, "fp32") for n, x in BY_NAME.items()}
    raises(kind, sentence, lambda: fm.flash_attention(**tensors, **options))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name: str) -> None:
    changes, kind, sentence = ARGUMENTS[name]
    out = np.full((2, 16, 4, 32), 7, np.float32)
    lse = np.full((2, 4, 16), 7, np.float32)
    raises(
        kind, sentence, lambda: fm.flash_attention(**{**BY_NAME, "out": out, "lse": lse, **changes})
    )
    assert (out == 7).all()
    assert (lse == 7).all()


@pytest.mark.parametrize("name", [n for n in ARGUMENTS if n not in NUMPY_ONLY])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_arguments_of_frameworks(name: str, framework: str) -> None:
    pytest.importorskip(framework)
    changes, kind, sentence = ARGUMENTS[name]
    if framework == "jax" and ({"out", "lse"} & set(changes) or name in ("rows", "stride")):
        pytest.skip("JAX arrays have no strides and are not written to")
    if framework == "torch":
        from torch import from_numpy as convert
    else:
        import jax

        if name == "dtype":
            pytest.skip("JAX makes float32 of float64")
        convert = jax.numpy.asarray
    tensors = {
        n: convert(x) if isinstance(x, np.ndarray) else x for n, x in {**BY_NAME, **changes}.items()
    }
    if not all(isinstance(x, np.ndarray) for x in changes.values()) and name != "q-list":
        kind_name = type(next(iter(changes.values()))).__name__
        q_type = f"{type(tensors['q']).__module__}.{type(tensors['q']).__qualname__}"
        argument = next(iter(changes))
        mixed = (
            f"{argument}: got {kind_name}, but q is {q_type}; all tensors of a call must come from "
            "one framework"
        )
        sentence = mixed if framework == "torch" else sentence
    raises(kind, sentence, lambda: fm.flash_attention(**tensors))


def test_extents_are_named_before_the_rows_that_they_make_odd() -> None:
    """24 bytes a row are no multiple of 16, but that is not what was wrong."""
    good, odd = np.zeros((1, 4, 2, 16), np.float16), np.zeros((1, 4, 2, 12), np.float16)
    for name, tensors in {"q": (odd, odd, good), "v": (good, good, odd)}.items():
        most = {"q": 576, "v": 512}[name]
        sentence = f"{name}: its head dimension is 12, accepted are multiples of 8 from 8 to {most}"
        raises(ValueError, sentence, lambda t=tensors: fm.flash_attention(*t))
    routing = fm.moe_route(np.zeros((5, 4), np.float32), 2)
    raises(
        ValueError,
        "x: its hidden size is 102, accepted are multiples of 8",
        lambda: fm.moe_forward(
            np.zeros((5, 102), np.float32),
            np.zeros((4, 16, 102), np.float32),
            np.zeros((4, 102, 8), np.float32),
            routing,
        ),
    )


def test_kernel_names_what_is_built_in() -> None:
    built = fm.build_info().kernel_families.split()
    with pytest.raises(ValueError, match=r'^kernel: got "sm12", built in are ') as caught:
        fm.flash_attention(Q, K, K, kernel="sm12")
    for family in built:
        assert (family in str(caught.value)) == (
            family in ("cpu", *map(kernels.family_of, kernels.FAMILIES), *kernels.OF_SEQUENCES)
        )
    assert caught.value.status == "FLASHMOE_ERROR_INVALID_ARGUMENT"


def test_long_kernel_names_are_cut_between_characters() -> None:
    for start in range(4):
        name = "x" * start + "\u20ac" * 40  # three bytes each
        kept = "x" * start + "\u20ac" * ((64 - start) // 3)
        with pytest.raises(ValueError, match=f'^kernel: got "{kept}", built in are '):
            fm.flash_attention(Q, K, K, kernel=name)
        assert fm.attention_plan(Q, K, K).family == "cpu"


def test_masked_arrays_are_refused() -> None:
    """Whose masks would be ignored."""

    def masked(array: Any) -> Any:
        return np.ma.masked_array(array, mask=np.zeros(array.shape, bool))

    def refused(name: str) -> Any:
        return pytest.raises(
            TypeError,
            match=rf"^{name}: got numpy\.ma\.MaskedArray, of which the mask would be ignored, "
            rf"accepted is an array without; pass {name}\.filled\(\) or {name}\.data$",
        )

    outputs = {"out": np.zeros_like(Q), "lse": np.zeros((2, 4, 16), np.float32)}
    for name, array in {**BY_NAME, **outputs}.items():
        with refused(name):
            fm.flash_attention(**{**BY_NAME, **outputs, name: masked(array)})
    with refused("k"):
        fm.attention_plan(Q, masked(K), K)
    for experts in (7, 8):
        layer = {
            "tokens": np.zeros((4, 16), np.float32),
            "router_weights": np.zeros((experts, 16), np.float32),
            "w_gate_up": np.zeros((experts, 16, 16), np.float32),
            "w_down": np.zeros((experts, 16, 8), np.float32),
        }
        for name, array in layer.items():
            with refused(name):
                fm.fused_moe(**{**layer, name: masked(array)}, top_k=2)
        with refused("out"):
            fm.fused_moe(**layer, top_k=2, out=masked(layer["tokens"].copy()))
    logits = np.zeros((4, 8), np.float32)
    with refused("logits"):
        fm.moe_route(masked(logits), 2)
    with refused("logits"):
        fm.moe_route_plan(masked(logits), 2)
    part = fm.moe_route(logits, 2)
    with refused("weights"):
        fm.moe_route(logits, 2, out=part._replace(weights=masked(part.weights)))


def test_unsupported_is_a_not_implemented_error() -> None:
    families = set(fm.build_info().kernel_families.split()) & set(kernels.FAMILIES)
    if not families:
        pytest.skip("this build has the CPU family alone, which serves every valid call")
    for family in sorted(families):
        with pytest.raises(
            NotImplementedError,
            match=rf"^kernel: cannot be served: {family}: the tensors are on the CPU",
        ):
            fm.flash_attention(Q, K, K, kernel=family)


def test_frameworks_do_not_mix() -> None:
    torch = pytest.importorskip("torch")
    q, k = torch.from_numpy(Q), torch.from_numpy(K)
    end = "; all tensors of a call must come from one framework"
    raises(
        TypeError,
        f"k: got numpy.ndarray, but q is torch.Tensor{end}",
        lambda: fm.flash_attention(q, K, k),
    )
    raises(
        TypeError,
        f"v: got torch.Tensor, but q is numpy.ndarray{end}",
        lambda: fm.flash_attention(Q, K, k),
    )
    raises(
        TypeError,
        f"out: got numpy.ndarray, but q is torch.Tensor{end}",
        lambda: fm.flash_attention(q, k, k, out=Q),
    )
    raises(
        TypeError,
        f"lse: got producers.DlpackOnly, but q is numpy.ndarray{end}",
        lambda: fm.flash_attention(Q, K, K, lse=DlpackOnly(Q)),
    )


def test_outputs_are_refused_while_gradients_are_recorded() -> None:
    torch = pytest.importorskip("torch")
    q, k = torch.from_numpy(Q.copy()).requires_grad_(), torch.from_numpy(K.copy())
    lse = torch.empty(q.shape[0], q.shape[2], q.shape[1])
    for name, given in (("out", torch.empty_like(q)), ("lse", lse), ("stream", 0)):
        raises(
            ValueError,
            f"{name}: got one in a call that gradients are recorded of, accepted is None",
            lambda given={name: given}: fm.flash_attention(q, k, k, return_lse=True, **given),
        )


def test_torch_tensors_without_memory() -> None:
    torch = pytest.importorskip("torch")
    k = torch.from_numpy(K)
    for bad in (torch.zeros(Q.shape, device="meta"), torch.zeros(Q.shape).to_sparse()):
        with pytest.raises(TypeError, match=r"^q: torch.Tensor gives no view of its memory: .*$"):
            fm.flash_attention(bad, k, k)


def test_read_only_outputs_are_refused() -> None:
    for dtype in ("fp32", "bf16"):
        q, k = (producers.cast(x, dtype) for x in (Q, K))
        out, lse = q.copy(), np.zeros((2, 4, 16), np.float32)
        for name, tensor in {"out": out, "lse": lse}.items():
            tensor.setflags(write=False)
            raises(
                ValueError,
                f"{name}: it is read-only, accepted is a writable tensor",
                lambda n=name, t=tensor, q=q, k=k: fm.flash_attention(q, k, k, **{n: t}),
            )


@pytest.mark.parametrize(
    "convert", [np.asarray, DlpackOnly, "torch"], ids=["numpy", "dlpack", "torch"]
)
def test_outputs_that_overlap(convert: Any) -> None:
    """Other tensors of the call; slices of one array do not."""
    if convert == "torch":
        convert = pytest.importorskip("torch").from_numpy
    rng = np.random.default_rng(0)
    packed = rng.standard_normal((2, 16, 4, 3, 32), np.float32)
    q, k, v = (packed[:, :, i] for i in range(3))
    before = packed.copy()
    last_of_out = packed.reshape(-1)[-2 * 3 * 16 :].reshape(2, 3, 16)
    memory = "accepted is memory that overlaps no other tensor of the call"
    for outputs, sentence in [
        ({"out": q}, f"out: it shares memory with q, {memory}"),
        ({"out": k}, f"out: it shares memory with k, {memory}"),
        ({"out": packed[:, :, 3], "lse": last_of_out},
         f"lse: it shares memory with out, {memory}"),
        ({"out": np.empty_like(q), "lse": packed[0, :2, 2, :, :16]},
         f"lse: it shares memory with v, {memory}"),
    ]:  # fmt: skip
        given = {name: convert(array) for name, array in outputs.items()}
        given.setdefault("lse", convert(np.empty((2, 3, 16), np.float32)))
        raises(
            ValueError,
            sentence,
            lambda given=given: fm.flash_attention(convert(q), convert(k), convert(v), **given),
        )
        np.testing.assert_array_equal(packed, before)
    fm.flash_attention(convert(q), convert(k), convert(v), out=convert(packed[:, :, 3]))
    np.testing.assert_array_equal(packed[:, :, 3], fm.flash_attention(q, k, v))


def test_misaligned_rows() -> None:
    torch = pytest.importorskip("torch")
    flat = torch.zeros(Q.size + 1)
    q = flat[1:].view(Q.shape)
    with pytest.raises(
        ValueError, match=r"^q: its data begins at address 0x.*, which is not a mult"
    ):
        fm.flash_attention(q, torch.from_numpy(K), torch.from_numpy(K))


def test_objects_with_dlpack_alone_that_numpy_cannot_hold() -> None:
    torch = pytest.importorskip("torch")

    class Hidden:
        def __init__(self, tensor: Any) -> None:
            self.tensor = tensor

        def __dlpack__(self, **options: Any) -> Any:
            return self.tensor.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.tensor.__dlpack_device__()

    q, k = Hidden(torch.zeros(Q.shape).bfloat16()), Hidden(torch.zeros(K.shape).bfloat16())
    with pytest.raises(TypeError, match="offers DLPack alone, and NumPy cannot hold it"):
        fm.flash_attention(q, k, k)
    out = Hidden(torch.ones(Q.shape).bfloat16())
    assert fm.flash_attention(q, k, k, out=out) is out
    assert (out.tensor == 0).all()


def test_every_exception_is_ours_and_one_of_pythons() -> None:
    from flashmoe_science import errors

    expected = {
        1: ValueError,
        2: NotImplementedError,
        3: RuntimeError,
        4: RuntimeError,
        5: MemoryError,
        6: RuntimeError,
        7: MemoryError,
        8: RuntimeError,
    }
    for status, kind in expected.items():
        error = errors._from_status(status, "q: a sentence")
        assert isinstance(error, fm.FlashMoEError)
        assert isinstance(error, kind)
        assert str(error) == "q: a sentence"
        assert error.status.startswith("FLASHMOE_ERROR_")


@pytest.mark.parametrize(
    ("sinks", "error", "sentence"),
    [
        (np.zeros(3, np.float32), ValueError, "sinks: its number of heads is 3, but q has 4"),
        (np.zeros((1, 4), np.float32), ValueError, "sinks: got 2 dimensions, accepted are 1"),
        (np.zeros(4, np.float16), TypeError, "sinks: got dtype fp16, accepted is q's fp32"),
        (np.zeros(4, np.int32), TypeError, "sinks: got dtype int32"),
        ([0.0] * 4, TypeError, "sinks: got list, accepted is a tensor of NumPy"),
    ],
)
def test_sinks(sinks: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error) as raised:
        fm.flash_attention(Q, K, K, sinks=sinks)
    assert str(raised.value).startswith(sentence)
