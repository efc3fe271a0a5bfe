"""Tensors that are known by DLPack alone: what a capsule may say, and what is said of the rest."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import dlpack_objects as d
import flashmoe_science as fm
import numpy as np
import pytest
from dlpack_objects import HandMade

SHAPE = (2, 9, 4, 16)  # q, k and v

OUT = "out"  # the argument that a case is about is the output


def room(bytes_before: int = 0) -> np.ndarray:
    """Memory of a tensor of SHAPE, on a 16-byte boundary but for so many bytes."""
    count = int(np.prod(SHAPE)) * 4
    raw = np.zeros(count + bytes_before + 64, np.uint8)
    begin = -raw.ctypes.data % 64 + bytes_before
    return raw[begin : begin + count]


def values(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE, np.float32)


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[np.ndarray], HandMade]  # an object with these values
    error: type[Exception] | None = None
    sentence: str = ""  # after the argument's name

    def __str__(self) -> str:
        return self.name


def with_offset(array: np.ndarray) -> HandMade:
    memory = room(128)
    memory.view(np.float32).reshape(SHAPE)[:] = array
    return HandMade(memory.ctypes.data - 128, SHAPE, byte_offset=128, keeps=memory)


def unaligned(by_offset: bool) -> Callable[[np.ndarray], HandMade]:
    def make(array: np.ndarray) -> HandMade:
        memory = room(8)
        memory.view(np.float32).reshape(SHAPE)[:] = array
        begin, offset = memory.ctypes.data, 0
        if by_offset:
            begin, offset = begin - 8, 8
        return HandMade(begin, SHAPE, byte_offset=offset, keeps=memory)

    return make


def spaced(array: np.ndarray) -> HandMade:
    wide = np.full((*SHAPE[:3], 32), np.nan, np.float32)
    wide[..., :16] = array
    return HandMade.of(wide[..., :16])


def backwards(array: np.ndarray) -> HandMade:
    return HandMade.of(np.ascontiguousarray(array[:, ::-1])[:, ::-1])


def of(**fields: Any) -> Callable[[np.ndarray], HandMade]:
    return lambda array: HandMade.of(array, **fields)


def is_elsewhere() -> None:
    raise BufferError("the memory is elsewhere\nand what is below stays away")


RAISES = of(answer=is_elsewhere)
READABLE = [
    Case("new", of()),
    Case("old", of(versioned=False)),
    Case("read-only", of(flags=d.READ_ONLY)),
    Case("no strides", of(strides=None)),
    Case("old, no strides", of(strides=None, versioned=False)),
    Case("byte offset", with_offset),
    Case("rows apart", spaced),
    Case("backwards", backwards),
    Case("a later minor version", of(version=(1, 7))),
    Case("copied", of(flags=d.IS_COPIED)),
    Case("pinned for CUDA", of(device=(d.CUDA_HOST, 0))),
    Case("pinned for another GPU", of(device=(d.CUDA_HOST, 3))),
]
WRITABLE = [case for case in READABLE if case.name not in ("read-only", "copied")]
REFUSED = [
    Case("raises", RAISES, TypeError,
         ".*HandMade gives no view of its memory: the memory is elsewhere$"),
    Case("no capsule", of(answer=lambda: 7), TypeError,
         "got .*HandMade, accepted is a tensor of NumPy"),
    Case("a later major version", of(version=(2, 1)), TypeError,
         r"got a tensor of DLPack 2\.1, accepted is major version 1$"),
    Case("no dimensions", of(shape=()), ValueError, "got 0 dimensions, accepted are 4"),
    Case("five dimensions", of(shape=(1, *SHAPE), strides=None), ValueError, "got 5 dimensions"),
    Case("forty dimensions", of(shape=(1,) * 40, strides=None), (TypeError, ValueError), "got "),
    Case("unaligned", unaligned(False), ValueError, ".* which is not a multiple of 16 bytes"),
    Case("unaligned by its offset", unaligned(True), ValueError, ".* not a multiple of 16 bytes"),
    Case("null", of(data=0), ValueError, "its data is a null pointer but its shape"),
    Case("vectors", of(dtype=(2, 32, 2)), TypeError, "got dtype float32 .*2 lanes"),
    Case("quadruples", of(dtype=(2, 128, 1)), TypeError, "got dtype float128"),
    Case("integers", of(dtype=d.INT32), TypeError, "got dtype int32"),
    Case("columns apart", of(strides=(576, 64, 16, 2)), ValueError, "its last dimension has"),
    Case("a stride of half a row", of(strides=(576, 66, 16, 1)), ValueError,
         "dimension 1 has stride 66"),
    Case("negative extent", of(shape=(2, -9, 4, 16)), ValueError, "got shape .*cannot be negative"),
    Case("a GPU of AMD's", of(device=(d.ROCM, 0)), ValueError, "got device type 10, accepted are"),
]  # fmt: skip


def refused(case: Case, argument: str) -> Any:
    assert case.error is not None
    return pytest.raises(case.error, match=f"^{argument}: {case.sentence}")


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every tensor that a test's objects gave away comes back, and once."""
    made: list[HandMade] = []
    init = HandMade.__init__

    def remember(self: HandMade, *arguments: Any, **fields: Any) -> None:
        made.append(self)
        init(self, *arguments, **fields)

    monkeypatch.setattr(HandMade, "__init__", remember)
    gc.freeze()  # a second of each collection is what earlier tests left
    yield
    gc.collect()
    gc.unfreeze()
    assert made, "a test of hand-made objects makes some"
    assert all(one.balanced for one in made)
    assert any(one.streams for one in made)


# ---- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("argument", ["q", "k", "v"])
@pytest.mark.parametrize("case", READABLE, ids=str)
def test_attention_reads(case: Case, argument: str) -> None:
    arrays = {"q": values(0), "k": values(1), "v": values(2)}
    want, sums = fm.flash_attention(**arrays, return_lse=True)
    given = {n: case.make(x) if n == argument else HandMade.of(x) for n, x in arrays.items()}
    out, lse = fm.flash_attention(**given, return_lse=True)
    assert type(out) is type(lse) is np.ndarray
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(lse, sums)


@pytest.mark.parametrize("case", WRITABLE, ids=str)
def test_attention_writes(case: Case) -> None:
    arrays = [values(seed) for seed in range(3)]
    target = case.make(np.full(SHAPE, np.nan, np.float32))
    assert fm.flash_attention(*(HandMade.of(x) for x in arrays), out=target) is target
    memory = target.keeps
    if memory.dtype == np.uint8:
        memory = memory.view(np.float32).reshape(SHAPE)
    np.testing.assert_array_equal(memory, fm.flash_attention(*arrays))


@pytest.mark.parametrize("argument", ["q", "k", "v", "out"])
@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_attention_refuses(case: Case, argument: str) -> None:
    given = {name: HandMade.of(values()) for name in ("q", "k", "v", "out")}
    given[argument] = case.make(values())
    with refused(case, argument):
        fm.flash_attention(**given)


def test_attention_refuses_to_write_to_what_is_read_only() -> None:
    given = [HandMade.of(values()) for _ in range(3)]
    frozen = values()
    frozen.setflags(write=False)
    match = "^out: it is read-only, accepted is a writable tensor$"
    with pytest.raises(ValueError, match=match):
        fm.flash_attention(*given, out=HandMade.of(values(), flags=d.READ_ONLY))
    lse = HandMade.of(np.zeros((2, 4, 9), np.float32), flags=d.READ_ONLY)
    with pytest.raises(ValueError, match=match.replace("out", "lse")):
        fm.flash_attention(*given, out=HandMade.of(values()), lse=lse)
    with pytest.raises(ValueError, match=match):
        fm.flash_attention(values(), values(), values(), out=frozen)


def test_outputs_that_are_copied_are_refused() -> None:
    given = [HandMade.of(values()) for _ in range(3)]
    for name, shape in {"out": SHAPE, "lse": (2, 4, 9)}.items():
        outputs = {
            "out": HandMade.of(values()),
            "lse": HandMade.of(np.zeros((2, 4, 9), np.float32)),
        }
        outputs[name] = HandMade.of(np.zeros(shape, np.float32), flags=d.IS_COPIED)
        match = f"^{name}: DLPack gives a copy of it, accepted is a tensor that shares its memory$"
        with pytest.raises(ValueError, match=match):
            fm.flash_attention(*given, **outputs)
        assert not outputs[name].keeps.any()
    arrays = layer()
    tensors = [HandMade.of(x) for x in arrays.values()]
    with pytest.raises(ValueError, match=r"^out: DLPack gives a copy of it"):
        fm.fused_moe(*tensors, 2, out=HandMade.of(np.zeros((TOKENS, HIDDEN), np.float32), flags=2))


def test_a_later_major_version_is_refused_without_outputs() -> None:
    """Where NumPy makes them, which holds the tensors for that."""
    given = [HandMade.of(values()) for _ in range(2)]
    for order in ((2, 0, 1), (0, 2, 1), (0, 1, 2)):
        tensors = [(*given, HandMade.of(values(), version=(2, 0)))[i] for i in order]
        with pytest.raises(
            TypeError, match=r"^[qkv]: got a tensor of DLPack 2\.0, accepted is major version 1$"
        ):
            fm.flash_attention(*tensors)


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("shape", [(0, 9, 4, 16), (2, 0, 4, 16)])
def test_attention_on_nothing(shape: tuple[int, ...], versioned: bool) -> None:
    nothing = HandMade(0, shape, versioned=versioned)
    out, lse = fm.flash_attention(nothing, nothing, nothing, return_lse=True)
    assert out.shape == shape and lse.shape == (shape[0], shape[2], shape[1])


def test_what_is_pinned_and_what_is_not_go_together() -> None:
    arrays = [values(seed) for seed in range(3)]
    devices = ((d.CPU, 0), (d.CUDA_HOST, 0), (d.CUDA_HOST, 1))
    given = [HandMade.of(x, device=device) for x, device in zip(arrays, devices, strict=True)]
    np.testing.assert_array_equal(fm.flash_attention(*given), fm.flash_attention(*arrays))


def test_managed_memory_is_a_gpus() -> None:
    given = [HandMade.of(values(), device=(d.CUDA_MANAGED, 97)) for _ in range(4)]
    with pytest.raises((NotImplementedError, RuntimeError), match="cuda:97"):
        fm.flash_attention(*given[:3], out=given[3])
    assert given[0].streams == [1], "its stream is the legacy one, as of any GPU's memory"


# ---- the mixture of experts ----------------------------------------------------------------------

TOKENS, EXPERTS, HIDDEN, INNER = 5, 8, 32, 16


def layer() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {
        "tokens": (TOKENS, HIDDEN),
        "router_weights": (EXPERTS, HIDDEN),
        "w_gate_up": (EXPERTS, 2 * INNER, HIDDEN),
        "w_down": (EXPERTS, HIDDEN, INNER),
    }
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(("versioned", "flags"), [(True, 0), (True, d.READ_ONLY), (False, 0)])
def test_experts(versioned: bool, flags: int) -> None:
    arrays = layer()
    given = {n: HandMade.of(x, versioned=versioned, flags=flags) for n, x in arrays.items()}
    want = fm.fused_moe(**arrays, top_k=2)
    np.testing.assert_array_equal(fm.fused_moe(**given, top_k=2), want)
    target = HandMade.of(np.full((TOKENS, HIDDEN), np.nan, np.float32), versioned=versioned)
    assert fm.fused_moe(**given, top_k=2, out=target) is target
    np.testing.assert_array_equal(target.keeps, want)
    logits = arrays["tokens"] @ arrays["router_weights"].T
    routing = fm.moe_route(HandMade.of(logits, flags=flags), 2)
    assert all(type(part) is np.ndarray for part in routing[:5])
    # Results are NumPy's, and go together with objects that have DLPack alone.
    out = fm.moe_forward(given["tokens"], given["w_gate_up"], given["w_down"], routing)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    by_hand = fm.MoeRouting(*(None if p is None else HandMade.of(p) for p in routing))
    again = fm.moe_forward(given["tokens"], given["w_gate_up"], given["w_down"], by_hand)
    np.testing.assert_array_equal(again, out)
    product = fm.grouped_product(given["tokens"], given["w_gate_up"], offsets=routing.offsets)
    np.testing.assert_array_equal(
        product,
        fm.grouped_product(arrays["tokens"], arrays["w_gate_up"], offsets=routing.offsets),
    )


@pytest.mark.parametrize("name", ["tokens", "w_gate_up", "w_down"])
def test_experts_are_refused(name: str) -> None:
    arrays = layer()
    logits = arrays["tokens"] @ arrays["router_weights"].T
    routed = fm.moe_route(logits, 2)
    routing = fm.MoeRouting(*(None if part is None else HandMade.of(part) for part in routed))
    arguments = ("tokens", "w_gate_up", "w_down")
    for make, error, sentence in (
        (RAISES, TypeError, ".*HandMade gives no view of its memory: the memory is elsewhere$"),
        (of(dtype=d.INT32), TypeError, "got dtype int32"),
        (of(version=(2, 0)), TypeError, r"got a tensor of DLPack 2\.0"),
        (of(device=(d.ROCM, 0)), ValueError, "got device type 10, accepted are"),
    ):
        given = [make(arrays[n]) if n == name else HandMade.of(arrays[n]) for n in arguments]
        argument = name.replace("tokens", "x")
        with pytest.raises(error, match=f"^{argument}: {sentence}"):
            fm.moe_forward(*given, routing)


def test_experts_refuse_to_write_to_what_is_read_only() -> None:
    arrays = layer()
    logits = arrays["tokens"] @ arrays["router_weights"].T
    routing = fm.moe_route(logits, 2)
    for i, name in enumerate(fm.MoeRouting._fields[:5]):
        parts = [HandMade.of(x, flags=d.READ_ONLY if i == j else 0)
                 for j, x in enumerate(routing[:5])]  # fmt: skip
        with pytest.raises(ValueError, match=rf"^{name}: it is read-only"):
            fm.moe_route(HandMade.of(logits), 2, out=fm.MoeRouting(*parts, None))
    given = [HandMade.of(arrays[name]) for name in ("tokens", "w_gate_up", "w_down")]
    frozen = HandMade.of(np.zeros((TOKENS, HIDDEN), np.float32), flags=d.READ_ONLY)
    with pytest.raises(ValueError, match=r"^out: it is read-only"):
        fm.moe_forward(*given, routing, out=frozen)


def test_numpy_comes_first_or_not_at_all() -> None:
    """The first tensor says whose the call is."""
    arrays = [values(seed) for seed in range(3)]
    with pytest.raises(TypeError, match=r"^k: got .*HandMade, but q is numpy\.ndarray"):
        fm.flash_attention(arrays[0], HandMade.of(arrays[1]), arrays[2])
    mixed = fm.flash_attention(HandMade.of(arrays[0]), arrays[1], arrays[2])
    np.testing.assert_array_equal(mixed, fm.flash_attention(*arrays))
