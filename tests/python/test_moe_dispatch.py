"""The mixture of experts by CuPy's interface, played on the host: see test_dispatch.py."""

from __future__ import annotations

import sys
import types
from typing import Any

import flashmoe_science as fm
import moe_oracle
import numpy as np
import pytest
from flashmoe_science import _core, _dispatch
from moe_cases import Case, make
from producers import Producer
from python.test_dispatch import STREAM, fake_cupy


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    log: list[Any] = []
    module: Any = fake_cupy(log)
    base = module.ndarray

    class ndarray(base):  # type: ignore[misc, valid-type]
        def __getitem__(self, index: Any) -> ndarray:
            return ndarray(self.array[index])

        def __sub__(self, other: ndarray) -> ndarray:
            return ndarray(self.array - other.array)

        def __matmul__(self, other: ndarray) -> ndarray:
            return ndarray(self.array @ other.array)

        @property
        def T(self) -> ndarray:
            return ndarray(self.array.T)

        @property
        def data(self) -> Any:
            return types.SimpleNamespace(ptr=self.array.ctypes.data)

        def reshape(self, shape: tuple[int, ...]) -> ndarray:
            return ndarray(self.array.reshape(shape))

    module.ndarray = ndarray
    module.int32 = np.int32
    module.empty = lambda shape, dtype: ndarray(np.empty(shape, dtype))
    module.log = log
    monkeypatch.setitem(sys.modules, "cupy", module)
    _dispatch._framework_of_type.cache_clear()
    yield module
    _dispatch._framework_of_type.cache_clear()


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Operations that reach the native side, and their streams."""
    calls: list[Any] = []
    real = _core.call

    def spy(operation: str, tensors: Any, options: Any, allocate: Any, stream: Any) -> None:
        calls.append((operation, stream))
        real(operation, tensors, options, allocate, stream)

    monkeypatch.setattr(_core, "call", spy)
    return calls


def of_cupy(cupy: Any, value: Any) -> Any:
    if isinstance(value, tuple):
        return fm.MoeRouting(*(of_cupy(cupy, part) for part in value))
    return cupy.ndarray(value) if isinstance(value, np.ndarray) else value


def test_routing_and_layer(cupy: Any, handed: list[Any]) -> None:
    case = Case(gate="separate", bias="fp32")
    values = make(case, Producer(), "fp32")
    arguments = {name: of_cupy(cupy, value) for name, value in values.items()}
    out, pre = fm.moe_forward(**arguments, **case.options, return_pre_activation=True)
    assert type(out) is type(pre) is cupy.ndarray
    moe_oracle.assert_forward(out.array, **values, **case.options, pre_activation=pre.array)
    logits = np.random.default_rng(0).standard_normal((9, 6), np.float32)
    routing = fm.moe_route(cupy.ndarray(logits), 2, return_lse=True)
    assert all(type(part) is cupy.ndarray for part in routing)
    moe_oracle.assert_routed(fm.MoeRouting(*(part.array for part in routing)),
                             moe_oracle.route(logits, 2))  # fmt: skip
    assert routing.counts.array.sum() == 18
    assert handed == [("moe_forward", STREAM), ("moe_route", STREAM)]
    assert {entry[1] for entry in cupy.log if entry[0] == "dlpack"} == {-1}, "nothing waits"


@pytest.mark.parametrize("experts", [8, 6])
def test_fused(cupy: Any, handed: list[Any], experts: int) -> None:
    case = Case(experts=experts)
    values = make(case, Producer(), "fp32")
    router = np.random.default_rng(0).standard_normal((experts, 40), np.float32)
    tensors = {"tokens": values["x"].reshape(1, 37, 40), "router_weights": router,
               "w_gate_up": values["w_gate_up"], "w_down": values["w_down"]}  # fmt: skip
    given = {name: cupy.ndarray(value) for name, value in tensors.items()}
    for _ in range(2):
        got = fm.fused_moe(**given, top_k=2)
        assert type(got) is cupy.ndarray
        want = fm.fused_moe(**tensors, top_k=2)
        np.testing.assert_allclose(got.array, want, rtol=1e-5, atol=1e-6)
    assert [call for call in handed if call[1] == STREAM] == [("fused_moe", STREAM)] * 2


def test_a_stream_that_is_given_wins(cupy: Any, handed: list[Any]) -> None:
    logits = cupy.ndarray(np.zeros((3, 4), np.float32))
    fm.moe_route(logits, 2, stream=types.SimpleNamespace(ptr=0x1230))
    assert handed == [("moe_route", 0x1230)]
    assert not [entry for entry in cupy.log if entry[0] == "current"]
    values = make(Case(experts=6), Producer(), "fp32")
    given = [cupy.ndarray(values[name]) for name in ("x", "w_gate_up", "w_down")]
    router = cupy.ndarray(np.zeros((6, 40), np.float32))
    fm.fused_moe(given[0], router, *given[1:], 2, stream=0x4560)
    assert handed[1:] == [("fused_moe", 0x4560)]
    made = [entry for entry in cupy.log if entry[0] == "external"]
    assert made == [("external", 0x4560, 3)], "the router's product goes there too"


def test_workspace_is_the_frameworks(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    def asks(operation: str, tensors: Any, options: Any, allocate: Any, stream: Any) -> None:
        allocate("out", (37, 40), "float32")
        kept.append(allocate("workspace", (4096,), "uint8"))

    monkeypatch.setattr(_core, "call", asks)
    values = make(Case(), Producer(), "fp32")
    out = fm.moe_forward(**{n: of_cupy(cupy, v) for n, v in values.items()})
    assert out.shape == (37, 40)
    assert len(kept) == 1
    assert not [entry for entry in cupy.log if entry[0] == "external"], "the stream is current"
    fm.moe_forward(**{n: of_cupy(cupy, v) for n, v in values.items()}, stream=0x1230)
    made = [entry for entry in cupy.log if entry[0] == "external"]
    assert made == [("external", 0x1230, 3)], "workspace alone, on the stream that uses it"
