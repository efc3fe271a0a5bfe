"""Frameworks without the exchange API: what is asked of them, and in what order.

Those whose tensors live on a GPU are played by objects on the host, which the library then
computes like any other; tests/gpu has the real ones.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import flashmoe_science as fm
import numpy as np
import pytest
from flashmoe_science import _core, _dispatch
from flashmoe_science._dtypes import Device
from reference import assert_accurate

STREAM = 0x7E0


def arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = ((2, 9, 4, 32), (2, 7, 2, 32), (2, 7, 2, 32))
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


class FakeDevice:
    def __init__(self, log: list[Any]) -> None:
        self.id = 3
        self.log = log

    def __enter__(self) -> None:
        self.log.append("enter")

    def __exit__(self, *_: object) -> None:
        self.log.append("exit")


def fake_cupy(log: list[Any]) -> types.ModuleType:
    """A module with as much of CuPy's interface as a call uses."""

    class ndarray:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array
            self.shape, self.dtype, self.size = array.shape, array.dtype, array.size
            self.strides, self.itemsize = array.strides, array.itemsize
            self.device = FakeDevice(log)

        def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
            log.append(("dlpack", stream))
            return self.array.__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 3)

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return self.array

    class External:
        def __init__(self, pointer: int, device_id: int) -> None:
            log.append(("external", pointer, device_id))

        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    def current(device_id: int) -> Any:
        log.append(("current", device_id))
        return types.SimpleNamespace(ptr=STREAM)

    module = types.ModuleType("cupy")
    made: dict[str, Any] = {
        "ndarray": ndarray,
        "float32": np.float32,
        "uint8": np.uint8,
        "empty": lambda shape, dtype: ndarray(np.empty(shape, dtype)),
        "empty_like": lambda a, shape: ndarray(np.empty_like(a.array, shape=shape)),
        "cuda": types.SimpleNamespace(get_current_stream=current, ExternalStream=External),
    }
    vars(module).update(made)
    return module


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    log: list[Any] = []
    module: Any = fake_cupy(log)
    module.log = log
    monkeypatch.setitem(sys.modules, "cupy", module)
    _dispatch._framework_of_type.cache_clear()
    yield module
    _dispatch._framework_of_type.cache_clear()


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The streams that calls reach the native side with."""
    streams: list[Any] = []
    real = _core.call

    def spy(operation: str, tensors: Any, options: Any, allocate: Any, stream: Any) -> None:
        streams.append(stream)
        real(operation, tensors, options, allocate, stream)

    monkeypatch.setattr(_core, "call", spy)
    return streams


def test_cupy(cupy: Any, handed: list[Any]) -> None:
    inputs = arrays()
    tensors = [cupy.ndarray(x) for x in inputs]
    out, lse = fm.flash_attention(*tensors, return_lse=True)
    assert type(out) is type(lse) is cupy.ndarray
    assert_accurate(out.array, lse.array, *inputs)
    assert handed == [STREAM]
    assert ("current", 3) in cupy.log
    assert {entry[1] for entry in cupy.log if entry[0] == "dlpack"} == {-1}, "nothing waits"
    assert cupy.log.count("enter") == cupy.log.count("exit") == 2, "both made on q's device"


def test_a_stream_that_is_given_wins(cupy: Any, handed: list[Any]) -> None:
    tensors = [cupy.ndarray(x) for x in arrays()]
    fm.flash_attention(*tensors, stream=types.SimpleNamespace(ptr=0x1230))
    fm.flash_attention(*tensors, stream=0)
    assert handed == [0x1230, 0]
    assert not [entry for entry in cupy.log if entry[0] == "current"]


def test_workspace_is_the_frameworks(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def asks(operation: str, tensors: Any, options: Any, allocate: Any, stream: Any) -> None:
        allocate("out", (2, 9, 4, 32), "float32")
        allocate("workspace", (4096,), "uint8")

    monkeypatch.setattr(_core, "call", asks)
    tensors = [cupy.ndarray(x) for x in arrays()]
    fm.flash_attention(*tensors)
    assert not [entry for entry in cupy.log if entry[0] == "external"], "the stream is current"
    fm.flash_attention(*tensors, stream=0x1230)
    assert ("external", 0x1230, 3) in cupy.log, "made on the stream that uses it"


def test_workspace_of_torch_is_of_the_stream_that_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made while that stream is current: torch hands memory on in the order of its own stream."""
    torch = pytest.importorskip("torch")
    log: list[Any] = []

    class OnStream:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            log.append(("enter", self.stream))

        def __exit__(self, *_: object) -> None:
            log.append("exit")

    empty = torch.empty

    def logged_empty(*arguments: Any, **options: Any) -> Any:
        log.append("empty")
        return empty(*arguments, **options)

    current = types.SimpleNamespace(cuda_stream=0x5670)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda pointer, device: (pointer, device))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: ("default", device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", OnStream)
    monkeypatch.setattr(torch, "empty", logged_empty)
    like: Any = types.SimpleNamespace(
        is_cuda=True, device=torch.device("cpu"), __dlpack_device__=lambda: (2, 0)
    )
    made = _dispatch._TORCH.empty(like, (64,), "uint8", 0x1230)
    assert (tuple(made.shape), made.dtype) == ((64,), torch.uint8)
    assert log == [("enter", (0x1230, like.device)), "empty", "exit"]
    for legacy in (0, 1):
        log.clear()
        _dispatch._TORCH.empty(like, (64,), "uint8", legacy)
        assert log == [("enter", ("default", like.device)), "empty", "exit"]
    log.clear()
    _dispatch._TORCH.empty(like, (64,), "uint8", current.cuda_stream)
    assert log == ["empty"], "it is current"
    log.clear()
    _dispatch._TORCH.empty(like, (64,), "uint8")
    assert log == ["empty"], "an output is of the current stream"


def test_torch_without_the_exchange_api() -> None:
    """torch older than 2.10."""
    torch = pytest.importorskip("torch")
    inputs = arrays()
    tensors = [torch.from_numpy(x) for x in inputs]

    def call(*qkv: Any, return_lse: bool = False) -> Any:
        tensors = dict(zip("qkv", qkv, strict=True))
        options = {"causal": False, "window": None, "scale": None, "softcap": None,
                   "layout": "bshd", "kernel": None, "return_lse": return_lse}  # fmt: skip
        return _dispatch.flash_attention(tensors, options, {}, None)

    out, lse = call(*tensors, return_lse=True)
    assert type(out) is torch.Tensor
    assert_accurate(out, lse, *inputs)
    assert torch.equal(call(*tensors), out)
    made = call(tensors[0], tensors[1].clone().requires_grad_(), tensors[2])
    assert made.requires_grad and torch.equal(made, out)
    with torch.autocast("cpu", torch.bfloat16):
        assert call(*tensors).dtype == torch.bfloat16
    parameter = torch.nn.Parameter(tensors[1])
    with torch.no_grad():
        assert torch.equal(call(tensors[0], parameter, tensors[2]), out)


class OnGpu:
    """DLPack alone, on a GPU as far as anybody can tell."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.streams: list[int | None] = []

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        self.streams.append(stream)
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


class ArrayOnGpu(OnGpu):
    """An array of the array API standard, which has no streams."""

    device = "cpu"  # NumPy makes what it is asked for

    def __array_namespace__(self) -> Any:
        return np


def test_workspace_of_the_array_api_is_its_current_streams() -> None:
    like = ArrayOnGpu(np.zeros(3, np.float32))
    for stream in (0, 1):  # both mean the legacy one
        assert _dispatch.workspace(like, 64, stream).nbytes == 64
    with pytest.raises(
        ValueError, match=r"^stream: this call needs workspace, which .*ArrayOnGpu "
    ):
        _dispatch.workspace(like, 64, 0x1230)


def test_dlpack_alone_on_a_gpu_follows_the_protocol(handed: list[Any]) -> None:
    """The producer is told which stream its consumer will use, and makes that one wait."""
    inputs = arrays()
    tensors = [OnGpu(x) for x in inputs]
    out = OnGpu(np.full(inputs[0].shape, np.nan, np.float32))
    for stream, told, used in ((None, 1, 1), (0x1230, 0x1230, 0x1230), (0, 1, 0)):
        assert fm.flash_attention(*tensors, out=out, stream=stream) is out
        assert {t.streams.pop() for t in (*tensors, out)} == {told}
        assert handed.pop() == used
    assert_accurate(out.array, None, *inputs)


def test_dlpack_alone_on_a_gpu_needs_outputs() -> None:
    tensors = [OnGpu(x) for x in arrays()]
    match = r"^out: .*OnGpu offers no way to make a tensor on its device; pass out, and lse with"
    with pytest.raises(TypeError, match=match):
        fm.flash_attention(*tensors)


def test_devices_are_numbers() -> None:
    framework = _dispatch.framework_of("q", OnGpu(np.zeros(1)))
    assert framework.device(OnGpu(np.zeros(1))) == Device(2, 0)


@pytest.mark.parametrize("axis", range(3))
def test_negative_strides_of_cupy_are_refused(axis: int) -> None:
    """Which it exports as huge ones."""
    framework = _dispatch.CuPy("cupy")
    steps = [96, 32, 4]
    framework.check("q", types.SimpleNamespace(strides=tuple(steps)), _dispatch.ATTENTION)
    framework.check("q", types.SimpleNamespace(strides=()), _dispatch.ATTENTION)
    steps[axis] *= -1
    with pytest.raises(ValueError, match=r"^q: got a CuPy array with strides .*ascontiguousarray"):
        framework.check("q", types.SimpleNamespace(strides=tuple(steps)), _dispatch.ATTENTION)


def test_rows_of_the_array_api_are_reshaped_in_place_or_not_at_all() -> None:
    xp = pytest.importorskip("array_api_strict")
    framework = _dispatch.Framework("array_api_strict")
    whole = np.arange(48, dtype=np.float32).reshape(2, 3, 8)
    flat = framework.reshaped(xp.asarray(whole, copy=False), (6, 8))
    assert np.shares_memory(np.asarray(flat), whole)
    assert framework.reshaped(xp.asarray(whole[:, :2], copy=False), (4, 8)) is None
    assert framework.reshaped(xp.asarray(whole[:, :0], copy=False), (0, 8)).shape == (0, 8)
