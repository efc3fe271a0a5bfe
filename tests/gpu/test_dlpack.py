"""Who makes tensors on the GPU, and how: a table of producers, all operations on each, on every
stream, in graphs; and hand-made DLPack objects. What torch gets, which other tests hold to account,
is what all of them get."""

from __future__ import annotations

import ctypes as c
import gc
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import dlpack_objects as d
import flashmoe_science as fm
import numpy as np
import pytest
import torch
from dlpack_objects import HandMade
from gpu import memory

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 30, 128, 64, 16, 4  # routed in one launch: no workspace


# ---- producers -----------------------------------------------------------------------------------


class Producer:
    """torch itself; base of the others. `make` gives the memory of a torch tensor as a tensor of
    the producer, `back` a torch tensor of a result's memory."""

    name = "torch"
    dtypes: tuple[str, ...] = ("fp16", "bf16")
    writes = True  # tensors of it may be outputs
    makes_outputs = True

    def __str__(self) -> str:
        return self.name

    def make(self, tensor: torch.Tensor) -> Any:
        return tensor

    def back(self, made: Any) -> torch.Tensor:
        return torch.from_dlpack(made)


class CuPy(Producer):
    name = "cupy"
    dtypes = ("fp16",)

    def make(self, tensor: torch.Tensor) -> Any:
        return pytest.importorskip("cupy").from_dlpack(tensor.contiguous())


class Jax(Producer):
    name = "jax"
    writes = False

    def make(self, tensor: torch.Tensor) -> Any:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch is here too
        jax = pytest.importorskip("jax")
        torch.cuda.synchronize()
        return jax.dlpack.from_dlpack(tensor.contiguous())

    def back(self, made: Any) -> torch.Tensor:
        return torch.from_dlpack(made.block_until_ready())


class ByHand(Producer):
    """DLPack alone, by capsules as they are since 1.0, or as they were before."""

    makes_outputs = False

    def __init__(self, versioned: bool, **fields: Any) -> None:
        self.name = "versioned" if versioned else "unversioned"
        if fields:
            self.name = " ".join(fields)
        self.fields = {"versioned": versioned, **fields}
        self.writes = "flags" not in fields

    def make(self, tensor: torch.Tensor) -> Any:
        return by_hand(tensor, **self.fields)

    def back(self, made: Any) -> torch.Tensor:
        tensor: torch.Tensor = made.keeps
        return tensor


def by_hand(tensor: torch.Tensor, **fields: Any) -> HandMade:
    codes = {torch.float16: d.FP16, torch.bfloat16: (4, 16, 1), torch.float32: d.FP32,
             torch.int32: d.INT32, torch.uint8: (1, 8, 1)}  # fmt: skip
    made: dict[str, Any] = {
        "data": tensor.data_ptr(),
        "shape": tuple(tensor.shape),
        "strides": tensor.stride(),
        "dtype": codes[tensor.dtype],
        "device": (d.CUDA, tensor.device.index),
        "keeps": tensor,
    }
    return HandMade(**made | fields)


class Exchange(Producer):
    """A type with the exchange API and nothing else, as PaddlePaddle's is to us."""

    name = "exchange"

    def make(self, tensor: torch.Tensor) -> Any:
        return Exchanged(tensor)

    def back(self, made: Any) -> torch.Tensor:
        tensor: torch.Tensor = made.tensor
        return tensor


class Exchanged:
    """torch's memory and streams behind torch's own functions, but no torch tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __matmul__(self, other: Exchanged) -> Exchanged:
        return Exchanged(self.tensor @ other.tensor)

    @property
    def T(self) -> Exchanged:
        return Exchanged(self.tensor.T)


class _Table(c.Structure):
    """DLPackExchangeAPI."""


_FROM_OBJECT = c.PYFUNCTYPE(c.c_int, c.py_object, c.POINTER(c.c_void_p))
_TO_OBJECT = c.PYFUNCTYPE(c.c_int, c.c_void_p, c.POINTER(c.c_void_p))
_VIEW = c.PYFUNCTYPE(c.c_int, c.py_object, c.c_void_p)
_Table._fields_ = [
    ("version", c.c_uint32 * 2),
    ("previous", c.c_void_p),
    ("allocate", c.c_void_p),
    ("from_object", _FROM_OBJECT),
    ("to_object", _TO_OBJECT),
    ("view", _VIEW),
    ("stream", c.c_void_p),
]


def _exchange() -> None:
    """Gives Exchanged torch's table, with the functions that take or make objects wrapped."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return
    name = b"dlpack_exchange_api"
    pointer_of = c.PYFUNCTYPE(c.c_void_p, c.py_object, c.c_char_p)(
        ("PyCapsule_GetPointer", c.pythonapi)
    )
    of_torch = _Table.from_address(pointer_of(capsule, name))

    @_FROM_OBJECT
    def from_object(made: Any, out: Any) -> int:
        return of_torch.from_object(made.tensor, out)

    @_TO_OBJECT
    def to_object(managed: Any, out: Any) -> int:
        raw = c.c_void_p()
        if of_torch.to_object(managed, c.byref(raw)) != 0:
            return -1
        tensor = c.cast(raw, c.py_object).value
        c.pythonapi.Py_DecRef(c.py_object(tensor))
        made = Exchanged(tensor)
        c.pythonapi.Py_IncRef(c.py_object(made))
        out[0] = id(made)
        return 0

    @_VIEW
    def view(made: Any, out: Any) -> int:
        return of_torch.view(made.tensor, out)

    table = _Table(of_torch.version, None, of_torch.allocate, from_object, to_object, view,
                   of_torch.stream)  # fmt: skip
    new_capsule = c.PYFUNCTYPE(c.py_object, c.c_void_p, c.c_char_p, c.c_void_p)(
        ("PyCapsule_New", c.pythonapi)
    )
    exchanged: Any = Exchanged
    exchanged.kept = (table, from_object, to_object, view, name)
    exchanged.__dlpack_c_exchange_api__ = new_capsule(c.addressof(table), name, None)


_exchange()

PRODUCERS = [
    Producer(),
    CuPy(),
    Jax(),
    ByHand(True),
    ByHand(False),
    ByHand(True, flags=d.READ_ONLY),
    ByHand(True, device=(d.CUDA_MANAGED, 0)),
    *([Exchange()] if hasattr(Exchanged, "__dlpack_c_exchange_api__") else []),
]
CASES = [(producer, dtype) for producer in PRODUCERS for dtype in producer.dtypes]
EVERY_PRODUCER = pytest.mark.parametrize(
    ("producer", "dtype"), CASES, ids=[f"{producer}-{dtype}" for producer, dtype in CASES]
)


# ---- operations ----------------------------------------------------------------------------------


def inputs(dtype: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        made = torch.randn(shape, generator=generator, device=DEVICE) * scale
        return made.to(DTYPES[dtype])

    q, k, v = normal(2, 130, 6, 64), normal(2, 190, 2, 64), normal(2, 190, 2, 96)
    x, router = normal(TOKENS, HIDDEN), normal(EXPERTS, HIDDEN, scale=HIDDEN**-0.5)
    w_gate_up = normal(EXPERTS, 2 * INNER, HIDDEN, scale=HIDDEN**-0.5)
    w_down = normal(EXPERTS, HIDDEN, INNER, scale=INNER**-0.5)
    return {"q": q, "k": k, "v": v, "x": x, "router": router, "w_gate_up": w_gate_up,
            "w_down": w_down, "logits": x @ router.T}  # fmt: skip


OPERATIONS = ("attention", "decode", "route", "forward", "fused", "fused from logits", "product")


def run(
    operation: str, values: dict[str, torch.Tensor], make: Callable[[torch.Tensor], Any],
    writes: bool, **options: Any,
) -> list[Any]:  # fmt: skip
    """Results of one operation on a producer's tensors. Where it `writes` outputs are given."""
    t = {name: make(value) for name, value in values.items()}
    if operation in ("attention", "decode"):
        q = t["q"]
        shape, heads = list(values["q"].shape), values["q"].shape[2]
        if operation == "decode":  # parts of the keys to many blocks, which need workspace
            q, shape[1] = make(values["q"][:, :1].contiguous()), 1
        shape[3] = values["v"].shape[3]
        if writes:
            options["out"] = make(values["q"].new_full(shape, torch.nan))
            sums = torch.full((shape[0], heads, shape[1]), torch.nan, device=DEVICE)
            options["lse"] = make(sums)
        return list(fm.flash_attention(q, t["k"], t["v"], causal=True, return_lse=True, **options))
    x, w_gate_up, w_down = t["x"], t["w_gate_up"], t["w_down"]
    blank = make(torch.full_like(values["x"], torch.nan))
    given = {"out": blank} if writes else {}
    if operation == "fused":
        return [fm.fused_moe(x, t["router"], w_gate_up, w_down, TOP_K, **given, **options)]
    if operation == "fused from logits":
        return [fm.fused_moe(x, None, w_gate_up, w_down, TOP_K, logits=t["logits"], **given,
                             **options)]  # fmt: skip
    routed = fm.moe_route(values["logits"], TOP_K)
    parts = [make(part) for part in routed[:5]]
    if operation == "route":
        if writes:
            poisoned = (make(torch.full_like(part, -7)) for part in routed[:5])
            options["out"] = fm.MoeRouting(*poisoned, None)
        return list(fm.moe_route(t["logits"], TOP_K, **options)[:5])
    if operation == "forward":
        routing = fm.MoeRouting(*parts, None)
        return [fm.moe_forward(x, w_gate_up, w_down, routing, **given, **options)]
    rows = values["x"].new_zeros(TOKENS * TOP_K, HIDDEN)
    rows[:] = values["x"].repeat(TOP_K, 1)
    if writes:
        blank = make(rows.new_full((TOKENS * TOP_K, 2 * INNER), torch.nan))
        given = {"out": blank}
    torch.cuda.synchronize()
    return [fm.grouped_product(make(rows), w_gate_up, offsets=parts[2], **given, **options)]


def same_bits(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    torch.cuda.synchronize()
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        assert one.device == other.device
        assert torch.equal(memory.bits(one.contiguous()), memory.bits(other.contiguous()))


@EVERY_PRODUCER
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations(operation: str, producer: Producer, dtype: str) -> None:
    values = inputs(dtype)
    want = run(operation, values, Producer().make, True)
    torch.cuda.synchronize()
    kept: list[Any] = []

    def make(tensor: torch.Tensor) -> Any:
        kept.append(producer.make(tensor))
        return kept[-1]

    if not producer.writes and not producer.makes_outputs:
        return refuses_outputs(operation, values, make)
    if not producer.makes_outputs and operation in ("forward", "fused", "fused from logits"):
        with pytest.raises(TypeError, match=r"offers no way to make a tensor on its device"):
            run(operation, values, make, True)  # there is workspace to be made
        return None
    if not producer.makes_outputs and operation == "decode":
        pytest.skip("needs workspace or not, by how many blocks the GPU has room for")
    for writes in {producer.writes, not producer.makes_outputs}:
        got = run(operation, values, make, writes)
        assert all(type(one) is type(kept[0]) or producer.name == "jax" for one in got)
        same_bits([producer.back(one) for one in got], want)
    if isinstance(producer, ByHand):
        del got
        assert all(one.balanced for one in kept if isinstance(one, HandMade))
    return None


def refuses_outputs(operation: str, values: Any, make: Callable[[torch.Tensor], Any]) -> None:
    """Read-only tensors are inputs."""
    if operation not in ("attention", "route"):
        return
    with pytest.raises(ValueError, match=r"^(out|ids): it is read-only, accepted is a writable"):
        run(operation, values, make, True)


def test_read_only_inputs() -> None:
    values = inputs("bf16")
    q, k, v = (values[name] for name in "qkv")
    frozen = [by_hand(x, flags=d.READ_ONLY) for x in (q, k, v)]
    out = torch.full((*q.shape[:3], v.shape[3]), torch.nan, dtype=q.dtype, device=DEVICE)
    fm.flash_attention(*frozen, out=by_hand(out))
    same_bits([out], [fm.flash_attention(q, k, v)])
    assert all(one.balanced for one in frozen)


# ---- devices -------------------------------------------------------------------------------------


def test_tensors_of_one_call_are_on_one_device() -> None:
    values = inputs("fp16")
    q, k, v = (by_hand(values[name]) for name in "qkv")
    out = by_hand(torch.empty(2, 130, 6, 96, dtype=torch.float16, device=DEVICE))
    for device, where in (((d.CUDA, 1), "cuda:1"), ((d.CPU, 0), "cpu")):
        elsewhere = by_hand(values["k"], device=device)
        with pytest.raises(ValueError, match=rf"^k: it is on {where} but q is on cuda:0; all"):
            fm.flash_attention(q, elsewhere, v, out=out)
    k.device = (d.CUDA_MANAGED, 0)
    fm.flash_attention(q, k, v, out=out)
    same_bits([out.keeps], [fm.flash_attention(*(values[name] for name in "qkv"))])


def test_a_device_that_is_not_there() -> None:
    values = inputs("fp16")
    q, k, v = (by_hand(values[name], device=(d.CUDA, 31)) for name in "qkv")
    room = torch.empty(2, 130, 6, 96, dtype=torch.float16, device=DEVICE)
    out = by_hand(room, device=(d.CUDA, 31))
    with pytest.raises((fm.DeviceError, fm.UnsupportedError), match="cuda:31"):
        fm.flash_attention(q, k, v, out=out)


def test_pinned_memory_is_computed_on_the_cpu() -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, 9, 4, 32), np.float32) for _ in range(3)]
    pinned = [torch.from_numpy(x).pin_memory() for x in arrays]
    want = fm.flash_attention(*arrays)
    np.testing.assert_array_equal(fm.flash_attention(*pinned).numpy(), want)
    objects = [HandMade.of(x.numpy(), device=(d.CUDA_HOST, 0), keeps=x) for x in pinned]
    np.testing.assert_array_equal(fm.flash_attention(*objects), want)


# ---- streams -------------------------------------------------------------------------------------


def cupy_streams(cupy: Any) -> dict[str, Any]:
    return {
        "legacy": cupy.cuda.Stream.null,
        "per thread": cupy.cuda.Stream.ptds,
        "blocking": cupy.cuda.Stream(),
        "non-blocking": cupy.cuda.Stream(non_blocking=True),
    }


def delay(pointer: int) -> None:
    """Keeps a stream busy, so that work which does not wait for it comes too early."""
    with torch.cuda.stream(torch.cuda.ExternalStream(pointer)):
        torch.cuda._sleep(100_000_000)


@pytest.mark.parametrize("stream", ["legacy", "per thread", "blocking", "non-blocking"])
@pytest.mark.parametrize("operation", ["attention", "route", "fused"])
def test_cupy_on_its_current_stream(cupy: Any, operation: str, stream: str) -> None:
    values = inputs("fp16")
    tensors = {name: cupy.from_dlpack(value) for name, value in values.items()}

    def call(x: Any) -> list[Any]:
        if operation == "attention":
            return [fm.flash_attention(x, tensors["k"], tensors["v"])]
        if operation == "route":
            return list(fm.moe_route(x, TOP_K)[:5])
        return [fm.fused_moe(x, tensors["router"], tensors["w_gate_up"], tensors["w_down"], TOP_K)]

    source = tensors[{"attention": "q", "route": "logits", "fused": "x"}[operation]]
    want = [one.get() for one in call(source)]
    current = cupy_streams(cupy)[stream]
    with current:
        late = cupy.zeros_like(source)
        cupy.cuda.Device().synchronize()
        if stream not in ("legacy", "per thread"):  # torch cannot sleep on these
            delay(current.ptr)
        late[...] = source
        got = call(late)
        doubled = [one + one for one in got]  # on the same stream: it has to wait for ours
        current.synchronize()
        for one, other in zip(doubled, want, strict=True):
            np.testing.assert_array_equal(one.get(), other + other)


def test_a_named_stream_is_that_of_dlpacks_consumer() -> None:
    values = inputs("bf16")
    want = fm.flash_attention(*(values[name] for name in "qkv"))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    tensors = [by_hand(values[name]) for name in "qkv"]
    out = by_hand(torch.full_like(want, torch.nan))
    delay(stream.cuda_stream)
    fm.flash_attention(*tensors, out=out, stream=stream)
    assert not stream.query(), "the call waited for its stream"
    assert {told for one in (*tensors, out) for told in one.streams} == {stream.cuda_stream}
    stream.synchronize()
    same_bits([out.keeps], [want])


@pytest.mark.skipif(
    not hasattr(Exchanged, "__dlpack_c_exchange_api__"), reason="needs torch 2.10 or newer"
)
def test_workspace_of_the_exchange_api_is_its_current_streams() -> None:
    values = inputs("bf16")
    names = ("x", "router", "w_gate_up", "w_down")
    want = fm.fused_moe(*(values[name] for name in names), TOP_K)
    torch.cuda.synchronize()
    tensors = [Exchanged(values[name]) for name in names]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        got = fm.fused_moe(*tensors, TOP_K)
        named = fm.fused_moe(*tensors, TOP_K, stream=side)
    side.synchronize()
    same_bits([got.tensor, named.tensor], [want, want])
    with pytest.raises(ValueError, match=r"^stream: this call needs workspace, which .*Exchanged"):
        fm.fused_moe(*tensors, TOP_K, stream=side)


# ---- graphs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["attention", "route", "forward", "fused"])
def test_cupy_in_a_graph(cupy: Any, operation: str) -> None:
    values = inputs("fp16")
    tensors = {name: cupy.from_dlpack(value) for name, value in values.items()}
    routing = fm.moe_route(tensors["logits"], TOP_K)
    sources = {"attention": "q", "route": "logits", "forward": "x", "fused": "x"}
    x = tensors[sources[operation]]
    weights = tensors["w_gate_up"], tensors["w_down"]
    outputs = {
        "attention": lambda: cupy.full((2, 130, 6, 96), cupy.nan, x.dtype),
        "route": lambda: fm.MoeRouting(*(cupy.full_like(p, -7) for p in routing[:5]), None),
    }

    def call(out: Any) -> Any:
        if operation == "attention":
            return fm.flash_attention(x, tensors["k"], tensors["v"], out=out)
        if operation == "route":
            return fm.moe_route(x, TOP_K, out=out)
        if operation == "forward":
            return fm.moe_forward(x, *weights, routing, out=out)
        return fm.fused_moe(x, tensors["router"], *weights, TOP_K, out=out)

    def arrays(result: Any) -> list[np.ndarray]:
        parts = result[:5] if isinstance(result, tuple) else [result]
        return [part.get() for part in parts]

    fresh = outputs.get(operation, lambda: cupy.full_like(x, cupy.nan))
    stream = cupy.cuda.Stream(non_blocking=True)
    out = fresh()
    # What lies between is the graph's for as long as it may run: its memory comes from a pool that
    # nobody else has, and that has it already, since nothing can be allocated during a capture.
    pool = cupy.cuda.MemoryPool()
    with stream, cupy.cuda.using_allocator(pool.malloc):
        call(fresh())
        stream.synchronize()
        stream.begin_capture()
        call(out)
        graph = stream.end_capture()
    x[...] = x[::-1].copy()
    want = arrays(call(fresh()))
    cupy.cuda.Device().synchronize()
    for _ in range(2):
        graph.launch(stream)
        stream.synchronize()
        for one, other in zip(arrays(out), want, strict=True):
            np.testing.assert_array_equal(one, other)


# ---- memory --------------------------------------------------------------------------------------


@pytest.fixture
def managed(cupy: Any) -> Iterator[Any]:
    pool = cupy.cuda.MemoryPool(cupy.cuda.malloc_managed)
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(pool.malloc)
    yield cupy
    cupy.cuda.set_allocator(before)


def test_cupys_managed_memory(managed: Any) -> None:
    values = inputs("fp16")
    q, k, v = (managed.array(managed.from_dlpack(values[name])) for name in "qkv")
    got = fm.flash_attention(q, k, v)
    want = fm.flash_attention(*(values[name] for name in "qkv"))
    np.testing.assert_array_equal(got.get(), want.cpu().numpy())
    tensors = (managed.array(managed.from_dlpack(values[n]))
               for n in ("x", "router", "w_gate_up", "w_down"))  # fmt: skip
    fused = fm.fused_moe(*tensors, TOP_K)
    want = fm.fused_moe(*(values[n] for n in ("x", "router", "w_gate_up", "w_down")), TOP_K)
    np.testing.assert_array_equal(fused.get(), want.cpu().numpy())


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("producer", [p for p in PRODUCERS if p.makes_outputs], ids=str)
def test_nothing_is_kept(operation: str, producer: Producer) -> None:
    """None of torch's memory is kept; all of these are torch's tensors."""
    values = inputs("fp16")

    def call() -> None:
        results = [producer.back(one) for one in run(operation, values, producer.make, False)]
        torch.cuda.synchronize()
        del results

    for _ in range(3):
        call()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        call()
    for _ in range(100):  # a framework's own threads let go of an array a moment later
        gc.collect()
        if torch.cuda.memory_allocated() == before:
            break
        time.sleep(0.02)
    assert torch.cuda.memory_allocated() == before
