"""The DLPack exchange API of a tensor type, from a producer made of ctypes: tables that are
complete, partial, of another version, or no table at all."""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from typing import Any

import flashmoe_science as fm
import numpy as np
import pytest
from dlpack_objects import DELETER, DLTensor, Managed
from flashmoe_science import _core
from reference import assert_accurate

SET_ERROR = c.CFUNCTYPE(None, c.c_void_p, c.c_char_p, c.c_char_p)
ALLOCATE = c.PYFUNCTYPE(
    c.c_int, c.POINTER(DLTensor), c.POINTER(c.POINTER(Managed)), c.c_void_p, SET_ERROR
)
FROM_OBJECT = c.PYFUNCTYPE(c.c_int, c.py_object, c.POINTER(c.POINTER(Managed)))
TO_OBJECT = c.PYFUNCTYPE(c.c_int, c.POINTER(Managed), c.POINTER(c.c_void_p))
VIEW = c.PYFUNCTYPE(c.c_int, c.py_object, c.POINTER(DLTensor))
STREAM = c.PYFUNCTYPE(c.c_int, c.c_int32, c.c_int32, c.POINTER(c.c_void_p))


class Table(c.Structure):
    pass


Table._fields_ = [
    ("major", c.c_uint32),
    ("minor", c.c_uint32),
    ("previous", c.POINTER(Table)),
    ("allocate", ALLOCATE),
    ("from_object", FROM_OBJECT),
    ("to_object", TO_OBJECT),
    ("view", VIEW),
    ("stream", STREAM),
]


class Tensor:
    """A NumPy array behind an exchange API."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.shape = (c.c_int64 * array.ndim)(*array.shape)
        self.strides = (c.c_int64 * array.ndim)(*(s // array.itemsize for s in array.strides))


deleted: list[int] = []
alive: dict[int, Any] = {}


def fill(tensor: Tensor, view: Any) -> None:
    view.data = tensor.array.ctypes.data
    view.device_type, view.device_id, view.ndim = 1, 0, tensor.array.ndim
    view.code = {"f": 2, "i": 0}[tensor.array.dtype.kind]
    view.bits, view.lanes = 8 * tensor.array.itemsize, 1
    view.shape, view.strides, view.byte_offset = tensor.shape, tensor.strides, 0


def manage(tensor: Tensor) -> Any:
    managed = Managed(1, 3, None, delete, 0)
    fill(tensor, managed.tensor)
    alive[c.addressof(managed)] = (managed, tensor)
    return c.pointer(managed)


@DELETER
def delete(managed: Any) -> None:
    deleted.append(c.addressof(managed.contents))
    del alive[deleted[-1]]


@ALLOCATE
def allocate(prototype: Any, out: Any, context: Any, set_error: Any) -> int:
    shape = [prototype.contents.shape[i] for i in range(prototype.contents.ndim)]
    if shape[-1] == 24:  # out of one of the cases below
        set_error(context, b"MemoryError", b"no room for 24")
        return -1
    out[0] = manage(types[-1](np.full(shape, np.nan, f"f{prototype.contents.bits // 8}")))
    return 0


@FROM_OBJECT
def from_object(tensor: Any, out: Any) -> int:
    out[0] = manage(tensor)
    return 0


@TO_OBJECT
def to_object(managed: Any, out: Any) -> int:
    _, tensor = alive.pop(c.addressof(managed.contents))
    increase(tensor)
    out[0] = id(tensor)
    return 0


@VIEW
def view(tensor: Any, out: Any) -> int:
    fill(tensor, out.contents)
    return 0


@STREAM
def stream(device_type: int, device_id: int, out: Any) -> int:
    raise AssertionError("a CPU call needs no stream")


increase = c.pythonapi.Py_IncRef
increase.argtypes = [c.py_object]
increase.restype = None

new_capsule = c.pythonapi.PyCapsule_New
new_capsule.argtypes = [c.c_void_p, c.c_char_p, c.c_void_p]
new_capsule.restype = c.py_object

CAPSULE_NAME = b"dlpack_exchange_api"
kept: list[Any] = []
types: list[type[Tensor]] = []  # the last one is that of new tensors


def tensor_type(table: Table, name: bytes = CAPSULE_NAME) -> type[Tensor]:
    kept.append(table)
    capsule = new_capsule(c.addressof(table), name, None)
    types.append(type("Exchanged", (Tensor,), {"__dlpack_c_exchange_api__": capsule}))
    return types[-1]


def table(major: int = 1, minor: int = 3, **functions: Any) -> Table:
    made: dict[str, Any] = {
        "allocate": allocate,
        "from_object": from_object,
        "to_object": to_object,
        "view": view,
        "stream": stream,
    }
    made |= functions
    return Table(major, minor, None, *made.values())


def arrays(dim_v: int = 16) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = ((2, 9, 4, 32), (2, 7, 2, 32), (2, 7, 2, dim_v))
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("missing", [(), ("view",), ("stream",), ("view", "stream")], ids=str)
def test_tables_with_missing_functions(missing: tuple[str, ...]) -> None:
    null = {"view": VIEW(0), "stream": STREAM(0)}
    kind = tensor_type(table(**{name: null[name] for name in missing}))
    inputs = arrays()
    out, lse = fm.flash_attention(*(kind(x) for x in inputs), return_lse=True)
    assert_accurate(out.array, lse.array, *inputs)
    assert not alive, "every managed tensor was given back"


def test_older_table_behind_a_newer_one() -> None:
    newer = Table(2, 0, c.pointer(table()))
    inputs = arrays()
    kind = tensor_type(newer)
    assert_accurate(fm.flash_attention(*(kind(x) for x in inputs)).array, None, *inputs)


@pytest.mark.parametrize(
    "kind",
    [
        tensor_type(Table(2, 0, None)),
        tensor_type(table(), b"another name"),
        tensor_type(table(view=VIEW(0), from_object=FROM_OBJECT(0))),
    ],
    ids=["newer-major", "another-capsule", "no-view"],
)
def test_tables_that_cannot_be_used(kind: type[Tensor]) -> None:
    with pytest.raises(TypeError, match=r"^q: got .*Exchanged, accepted is a tensor"):
        fm.flash_attention(*(kind(x) for x in arrays()))


def test_a_type_without_an_allocator_needs_outputs() -> None:
    kind = tensor_type(table(allocate=ALLOCATE(0)))
    inputs = arrays()
    tensors = [kind(x) for x in inputs]
    with pytest.raises(TypeError, match=r"^out: Exchanged offers no allocator; pass out, and lse"):
        fm.flash_attention(*tensors)
    out = kind(np.full((2, 9, 4, 16), np.nan, np.float32))
    assert fm.flash_attention(*tensors, out=out) is out
    assert_accurate(out.array, None, *inputs)


@pytest.mark.parametrize(
    ("field", "value", "refused", "sentence"),
    [
        ("major", 2, "kout", r"got a tensor of DLPack 2\.3, accepted is major version 1$"),
        (
            "flags",
            2,
            "out",
            "DLPack gives a copy of it, accepted is a tensor that shares its memory",
        ),
    ],
)
def test_what_a_managed_tensor_says_of_itself(
    field: str, value: int, refused: str, sentence: str
) -> None:
    @FROM_OBJECT
    def saying(tensor: Any, out: Any) -> int:
        made = manage(tensor)
        if tensor.array[0, 0, 0, 0] == 7:
            setattr(made.contents, field, value)
        out[0] = made
        return 0

    kind = tensor_type(table(view=VIEW(0), from_object=saying))
    for name in ("k", "out"):
        given = dict(zip("qkv", arrays(), strict=True)) | {"out": np.zeros((2, 9, 4, 16), "f4")}
        given[name][0, 0, 0, 0] = 7
        tensors = {n: kind(x) for n, x in given.items()}
        if name in refused:
            with pytest.raises(fm.FlashMoEError, match=f"^{name}: {sentence}"):
                fm.flash_attention(**tensors)
        else:
            fm.flash_attention(**tensors)
    assert not alive, "every managed tensor was given back"


@FROM_OBJECT
def frozen(tensor: Any, out: Any) -> int:
    """Tensors whose array is read-only say so: a view of borrowed memory cannot."""
    out[0] = manage(tensor)
    out[0].contents.flags = 0 if tensor.array.flags.writeable else 1
    return 0


def test_read_only_tensors_are_not_written_to() -> None:
    kind = tensor_type(table(view=VIEW(0), from_object=frozen))

    def zeros(*shape: int, dtype: Any = np.float32, writable: bool = True) -> Any:
        array = np.zeros(shape, dtype)
        array.setflags(write=writable)
        return kind(array)

    def refused(name: str, call: Callable[[Any], object], *shape: int, dtype: Any = None) -> None:
        output = zeros(*shape, dtype=dtype or np.float32, writable=False)
        with pytest.raises(ValueError, match=rf"^{name}: it is read-only, accepted"):
            call(output)
        assert not output.array.any()
        assert not alive, "every managed tensor was given back"

    q, k, v = (kind(x) for x in arrays())
    refused("out", lambda out: fm.flash_attention(q, k, v, out=out), 2, 9, 4, 16)
    refused("lse", lambda lse: fm.flash_attention(q, k, v, lse=lse), 2, 4, 9)
    x, router, *experts = (kind(x) for x in layer(8))
    refused("out", lambda out: fm.fused_moe(x, router, *experts, 2, out=out), 5, 40)
    logits = kind(np.zeros((5, 8), np.float32))
    shapes = {"ids": (5, 2), "weights": (5, 2), "offsets": (9,), "pairs": (10,), "slots": (5, 2),
              "lse": (5,)}  # fmt: skip
    parts = {n: (s, np.float32 if n in ("weights", "lse") else np.int32) for n, s in shapes.items()}
    routing = fm.MoeRouting(*(zeros(*s, dtype=dtype) for s, dtype in parts.values()))
    for part, (shape, dtype) in parts.items():

        def route(output: Any, part: str = part) -> object:
            return fm.moe_route(logits, 2, out=routing._replace(**{part: output}))

        refused(part, route, *shape, dtype=dtype)
    fm.moe_route(logits, 2, out=routing)

    def run(**output: Any) -> object:
        return fm.moe_forward(x, *experts, routing, **output)

    refused("out", lambda out: run(out=out), 5, 40)
    refused("pre_activation", lambda output: run(pre_activation=output), 10, 48)
    offsets = kind(np.array([0, 5] + [5] * 7, np.int32))
    product = {"offsets": offsets}
    refused("out", lambda out: fm.grouped_product(x, experts[0], **product, out=out), 5, 48)


def layer(experts: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = ((5, 40), (experts, 40), (experts, 48, 40), (experts, 40, 24))
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def test_experts() -> None:
    kind = tensor_type(table(stream=STREAM(0)))
    inputs = layer(8)
    out = fm.fused_moe(*(kind(x) for x in inputs), 2)
    assert type(out) is kind
    np.testing.assert_array_equal(out.array, fm.fused_moe(*inputs, 2))
    given = kind(np.full((5, 40), np.nan, np.float32))
    assert fm.fused_moe(*(kind(x) for x in inputs), 2, out=given) is given
    np.testing.assert_array_equal(given.array, out.array)
    assert not alive


def test_a_router_that_only_its_framework_could_multiply() -> None:
    """The library's products take multiples of 8 rows."""
    kind = tensor_type(table())
    tokens, router, *experts = layer(6)
    with pytest.raises(TypeError, match=r"^router_weights: .*Exchanged knows no product"):
        fm.fused_moe(*(kind(x) for x in (tokens, router, *experts)), 2)
    logits = kind(tokens @ router.T)
    out = fm.fused_moe(kind(tokens), None, *(kind(x) for x in experts), 2, logits=logits)
    np.testing.assert_array_equal(out.array, fm.fused_moe(tokens, router, *experts, 2))


def test_gradients_of_a_framework_that_nobody_knows() -> None:
    kind = tensor_type(table())
    kind.requires_grad = True  # type: ignore[attr-defined]
    match = (
        r"^q: requires grad, but attention records gradients of torch's inputs alone; "
        r"pass q\.detach\(\)"
    )
    with pytest.raises(ValueError, match=match):
        fm.flash_attention(*(kind(x) for x in arrays()))


def test_an_allocator_that_fails() -> None:
    kind = tensor_type(table())
    with pytest.raises(MemoryError, match="no room for 24"):
        fm.flash_attention(*(kind(x) for x in arrays(dim_v=24)))
    assert not alive


def test_types_are_told_apart() -> None:
    one, other = tensor_type(table()), tensor_type(table())
    q, k, v = arrays()
    with pytest.raises(TypeError, match="must come from one framework"):
        fm.flash_attention(one(q), other(k), one(v))


def test_a_producer_that_fails_without_a_word() -> None:
    @VIEW
    def broken(tensor: Any, out: Any) -> int:
        return -1

    kind = tensor_type(table(view=broken))
    kept.append(broken)
    match = r"^q: .*Exchanged gives no view of its memory: it gives no reason$"
    with pytest.raises(TypeError, match=match):
        fm.flash_attention(*(kind(x) for x in arrays()))


class Stream:
    """As torch 2.10's and CuPy's."""

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 0x1230)


def test_the_frameworks_stream_is_asked_for_unless_one_is_given() -> None:
    asked = []

    @STREAM
    def stream_of(device_type: int, device_id: int, out: Any) -> int:
        asked.append((device_type, device_id))
        out[0] = 0x4560
        return 0

    @VIEW
    def view_on_gpu(tensor: Any, out: Any) -> int:
        fill(tensor, out.contents)
        out.contents.device_type, out.contents.device_id = 2, 97
        return 0

    kind = tensor_type(table(view=view_on_gpu, stream=stream_of))
    kept.extend((stream_of, view_on_gpu))
    q, k, v = (kind(x) for x in arrays())
    out = kind(np.zeros((2, 9, 4, 16), np.float32))
    with pytest.raises((NotImplementedError, RuntimeError), match="cuda:97"):
        fm.flash_attention(q, k, v, out=out)
    assert asked == [(2, 97)]
    for given in (0x1230, Stream()):
        with pytest.raises((NotImplementedError, RuntimeError), match="cuda:97"):
            fm.flash_attention(q, k, v, out=out, stream=given)
    assert asked == [(2, 97)]


@pytest.mark.parametrize("attribute", ["cuda_stream", "ptr"])
def test_stream_objects(attribute: str) -> None:
    assert _core.stream_handle(type("S", (), {attribute: 0x1230})()) == 0x1230
    assert _core.stream_handle(Stream()) == 0x1230
    assert _core.stream_handle(7) == 7
    assert _core.stream_handle(None) is None


def test_nothing_leaks() -> None:
    """References of arguments and results are all given back."""
    import gc
    import sys

    inputs = arrays()
    functions: list[Callable[[np.ndarray], Any]] = [np.asarray, tensor_type(table())]
    for make in functions:
        tensors = [make(x) for x in inputs]
        before = [sys.getrefcount(t) for t in tensors]
        fresh = object()
        for _ in range(50):
            out, lse = fm.flash_attention(*tensors, return_lse=True)
            assert sys.getrefcount(out) == sys.getrefcount(fresh)
            assert sys.getrefcount(lse) == sys.getrefcount(fresh)
        gc.collect()
        assert [sys.getrefcount(t) for t in tensors] == before
