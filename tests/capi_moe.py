"""The mixture of experts of the C ABI by ctypes and NumPy. See capi.py."""

from __future__ import annotations

import ctypes as c
import dataclasses
from typing import Any

import capi
import numpy as np

DTYPES = capi.DTYPES | {"fp64": np.dtype(np.float64)}
SCORINGS = {"softmax": 0, "topk_softmax": 1, "sigmoid": 2}
GATES = {"gate_up": 0, "up_gate": 1, "interleaved": 2, "separate": 3, "no_gate": 4}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}
POISON_INDEX = -(2**30) - 7

TensorPointer = c.POINTER(capi.Tensor)


class RouteParams(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("logits", TensorPointer),
        ("selection_bias", TensorPointer),
        ("given_ids", TensorPointer),
        ("given_weights", TensorPointer),
        ("expert_map", TensorPointer),
        ("ids", TensorPointer),
        ("weights", TensorPointer),
        ("offsets", TensorPointer),
        ("pairs", TensorPointer),
        ("slots", TensorPointer),
        ("lse", TensorPointer),
        ("scoring", c.c_int32),
        ("renormalize", c.c_int32),
        ("num_groups", c.c_int32),
        ("top_groups", c.c_int32),
        ("scale", c.c_float),
        ("reserved", c.c_uint32),
    ]


class ForwardParams(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("x", TensorPointer),
        ("w_gate_up", TensorPointer),
        ("w_up", TensorPointer),
        ("w_down", TensorPointer),
        ("b_gate_up", TensorPointer),
        ("b_up", TensorPointer),
        ("b_down", TensorPointer),
        ("weights", TensorPointer),
        ("offsets", TensorPointer),
        ("pairs", TensorPointer),
        ("slots", TensorPointer),
        ("out", TensorPointer),
        ("pre_activation", TensorPointer),
        ("gate", c.c_int32),
        ("activation", c.c_int32),
        ("alpha", c.c_float),
        ("limit", c.c_float),
        ("up_offset", c.c_float),
        ("weight_on_input", c.c_int32),
        ("kernel", c.c_char_p),
        ("x_scale", TensorPointer),
        ("w_gate_up_scale", TensorPointer),
        ("w_up_scale", TensorPointer),
        ("w_down_scale", TensorPointer),
    ]


class ProductParams(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("x", TensorPointer),
        ("w", TensorPointer),
        ("bias", TensorPointer),
        ("offsets", TensorPointer),
        ("counts", TensorPointer),
        ("out", TensorPointer),
        ("kernel", c.c_char_p),
        ("x_scale", TensorPointer),
        ("w_scale", TensorPointer),
    ]


GRADIENTS = (
    "dx", "dw_gate_up", "dw_up", "dw_down", "db_gate_up", "db_up", "db_down", "dweights"
)  # fmt: skip


class BackwardParams(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("dout", TensorPointer),
        ("x", TensorPointer),
        ("w_gate_up", TensorPointer),
        ("w_up", TensorPointer),
        ("w_down", TensorPointer),
        ("b_gate_up", TensorPointer),
        ("b_up", TensorPointer),
        ("b_down", TensorPointer),
        ("weights", TensorPointer),
        ("offsets", TensorPointer),
        ("pairs", TensorPointer),
        ("slots", TensorPointer),
        ("pre_activation", TensorPointer),
        *((name, TensorPointer) for name in GRADIENTS),
        ("gate", c.c_int32),
        ("activation", c.c_int32),
        ("alpha", c.c_float),
        ("limit", c.c_float),
        ("up_offset", c.c_float),
        ("weight_on_input", c.c_int32),
        ("accumulate", c.c_int32),
        ("overwrite_pre_activation", c.c_int32),
        ("kernel", c.c_char_p),
        ("max_workspace_bytes", c.c_uint64),
    ]


class ProductBackwardParams(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("dout", TensorPointer),
        ("x", TensorPointer),
        ("w", TensorPointer),
        ("offsets", TensorPointer),
        ("counts", TensorPointer),
        ("dx", TensorPointer),
        ("dw", TensorPointer),
        ("dbias", TensorPointer),
        ("accumulate", c.c_int32),
        ("reserved", c.c_uint32),
        ("kernel", c.c_char_p),
    ]


class RouteBackwardParams(c.Structure):
    _fields_ = [
        ("struct_size", c.c_size_t),
        ("dweights", TensorPointer),
        ("ids", TensorPointer),
        ("logits", TensorPointer),
        ("given_weights", TensorPointer),
        ("dlse", TensorPointer),
        ("dlogits", TensorPointer),
        ("dgiven_weights", TensorPointer),
        ("scoring", c.c_int32),
        ("renormalize", c.c_int32),
        ("scale", c.c_float),
        ("accumulate", c.c_int32),
    ]


FUNCTIONS = {
    RouteParams: "flashmoe_moe_route",
    ForwardParams: "flashmoe_moe_forward",
    ProductParams: "flashmoe_grouped_product",
    BackwardParams: "flashmoe_moe_backward",
    ProductBackwardParams: "flashmoe_grouped_product_backward",
    RouteBackwardParams: "flashmoe_moe_route_backward",
}


def functions(params: Any, lib: c.CDLL) -> tuple[Any, Any, Any]:
    """(run, plan, workspace_size) for that kind of parameters."""
    kind = c.POINTER(type(params))
    name = FUNCTIONS[type(params)]
    run, plan, size = (getattr(lib, name + suffix) for suffix in ("", "_plan", "_workspace_size"))
    run.argtypes = [kind, c.c_void_p, c.c_size_t, c.c_void_p]
    plan.argtypes = [kind, c.POINTER(capi.Plan)]
    size.argtypes = [kind, c.POINTER(c.c_size_t)]
    return run, plan, size


def tensor(array: np.ndarray) -> capi.Tensor:
    """A view of an array of numbers or of indices."""
    made = capi.tensor(array)
    if array.dtype.kind == "i":
        made.dtype.code = 0
    return made


def make_params(kind: type, **values: Any) -> Any:
    """Parameters from arrays or tensors (or None), numbers and names; keeps the arrays alive."""
    params = kind(struct_size=c.sizeof(kind))
    params.keep = []
    for name, value in values.items():
        if isinstance(value, (np.ndarray, capi.Tensor)):
            view = tensor(value) if isinstance(value, np.ndarray) else value
            params.keep.append(view)
            setattr(params, name, c.pointer(view))
        elif value is not None:
            setattr(params, name, value)
    return params


def plan_of(params: Any, lib: c.CDLL | None = None) -> capi.Plan:
    lib = lib or capi.load()
    plan = capi.Plan(struct_size=c.sizeof(capi.Plan))
    capi.check(functions(params, lib)[1](params, plan), lib)
    return plan


def run(params: Any, lib: c.CDLL | None = None, poison: int = 0xFF) -> None:
    """Runs a call in a workspace of its own, full of `poison`, around which nothing may change, and
    which begins on a multiple of 16 bytes and of no more, as the library allows."""
    lib = lib or capi.load()
    call, _, workspace_size = functions(params, lib)
    size = c.c_size_t()
    capi.check(workspace_size(params, size), lib)
    guard = 256
    memory = capi.aligned_empty((guard + 16 + size.value + guard,), np.dtype(np.uint8))
    workspace = memory[guard + 16 : guard + 16 + size.value]
    memory[...] = 0xA5
    workspace[...] = poison
    capi.check(call(params, workspace.ctypes.data, size.value, None), lib)
    assert (memory[: guard + 16] == 0xA5).all(), "wrote before its workspace"
    assert (memory[guard + 16 + size.value :] == 0xA5).all(), "wrote behind its workspace"


@dataclasses.dataclass
class Routing:
    """What flashmoe_moe_route gives."""

    ids: np.ndarray
    weights: np.ndarray
    offsets: np.ndarray
    pairs: np.ndarray
    slots: np.ndarray
    lse: np.ndarray | None = None

    @classmethod
    def poisoned(
        cls, tokens: int, experts: int, top_k: int, *, lse: bool = False, numbers: Any = np.float32
    ) -> Routing:
        """`numbers`: of weights and lse."""

        def index(*shape: int) -> np.ndarray:
            return np.full(shape, POISON_INDEX, np.int32)

        return cls(
            ids=index(tokens, top_k),
            weights=np.full((tokens, top_k), np.nan, numbers),
            offsets=index(experts + 1),
            pairs=index(tokens * top_k),
            slots=index(tokens, top_k),
            lse=np.full(tokens, 7e7, numbers) if lse else None,
        )

    def arrays(self) -> dict[str, np.ndarray | None]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


def route(
    logits: np.ndarray | None = None,
    *,
    top_k: int,
    experts: int | None = None,
    given_ids: np.ndarray | None = None,
    scoring: str = "softmax",
    lse: bool = False,
    lib: c.CDLL | None = None,
    **options: Any,
) -> Routing:
    """One call on fresh, poisoned outputs; `experts` with given_ids only."""
    source = logits if logits is not None else given_ids
    assert source is not None
    count = experts if experts is not None else source.shape[1]
    scores = logits if logits is not None else options.get("given_weights")
    numbers = np.float32 if scores is None else capi.sums_dtype(scores.dtype)
    routing = Routing.poisoned(source.shape[0], count, top_k, lse=lse, numbers=numbers)
    params = make_params(
        RouteParams,
        logits=logits,
        given_ids=given_ids,
        scoring=SCORINGS[scoring],
        **routing.arrays(),
        **options,
    )
    run(params, lib)
    return routing
