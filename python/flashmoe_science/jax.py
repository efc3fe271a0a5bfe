"""flash_attention and the mixture of experts for JAX arrays: XLA custom calls, eager or under jit.

XLA makes the outputs and the workspace, and chooses the stream. What is wrong with a call is raised
while it is traced. jax.vmap folds its axis into the batch of attention and into the tokens of
fused_moe; of the other functions, and with batched weights, it makes calls one after another, which
is what they are. There is no derivative yet: one that is asked for is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.custom_batching
import jax.numpy as jnp
import numpy as np

from flashmoe_science import _core
from flashmoe_science._names import CPU, CUDA, Device, Dtype, parse_dtype
from flashmoe_science.errors import ArgumentTypeError, InvalidArgumentError

_ATTENTION = "flashmoe_attention_forward_v1"
_MOE = {
    "route": "flashmoe_moe_route_v1",
    "forward": "flashmoe_moe_forward_v1",
    "grouped_product": "flashmoe_grouped_product_v1",
}


@functools.cache
def _register() -> None:
    if not hasattr(jax, "ffi"):
        raise ArgumentTypeError(
            f"got a JAX array of JAX {jax.__version__}, accepted is 0.5 or newer"
        )
    for target, handlers in _core.xla_ffi_handlers().items():
        for platform, handler in handlers.items():
            jax.ffi.register_ffi_target(target, handler, platform=platform)


def _device(name: str, tensors: Sequence[Any]) -> Device | None:
    """Where the first of these is; None for tracers, which are nowhere yet."""
    if any(isinstance(tensor, jax.core.Tracer) for tensor in tensors):
        return None
    device = next(iter(tensors[0].devices()))
    if device.platform == "cpu":
        return Device(CPU, 0)
    if device.platform in ("gpu", "cuda"):
        return Device(CUDA, int(getattr(device, "local_hardware_id", None) or 0))
    raise InvalidArgumentError(f"{name}: it is on {device}, accepted are CPU and CUDA devices")


def _type_of(value: Any) -> Any:
    """The result type that carries sharding; before jax.typeof there was none to carry."""
    if hasattr(jax, "typeof"):
        return jax.typeof(value)
    struct: Any = jax.ShapeDtypeStruct
    return struct(value.shape, value.dtype)


def _refuse_derivative(words: str) -> Any:
    raise InvalidArgumentError(
        f"a derivative of {words} is asked for, but it has no backward pass yet; pass "
        "jax.lax.stop_gradient of its arguments"
    )


def _transformable(
    function: Callable[..., Any], words: str, rule: Callable[..., Any] | None = None
) -> Any:
    """`function` of arrays, jitted, with a sentence for jax.grad and a rule for jax.vmap.

    rule(size, batched, *arrays) gives results that all have the axis in front, or None where it
    does not apply; then, and without one, the calls are made one after another.
    """
    batchable = jax.custom_batching.custom_vmap(function)

    @batchable.def_vmap  # type: ignore[untyped-decorator, unused-ignore]
    def _(size: int, batched: Sequence[bool], *arrays: Any) -> Any:
        made = rule(size, batched, *arrays) if rule is not None else None
        if made is None:
            made = _one_after_another(batchable, batched, arrays)
        return made, jax.tree.map(lambda _: True, made)

    differentiable = jax.custom_jvp(batchable)
    differentiable.defjvp(lambda primals, tangents: _refuse_derivative(words))
    return jax.jit(differentiable)


def _one_after_another(
    function: Callable[..., Any], batched: Sequence[bool], arrays: Sequence[Any]
) -> Any:
    def one(rows: Sequence[Any]) -> Any:
        following = iter(rows)
        return function(
            *(next(following) if b else x for b, x in zip(batched, arrays, strict=True))
        )

    return jax.lax.map(one, [x for b, x in zip(batched, arrays, strict=True) if b])


# ---- attention -------------------------------------------------------------------------------


class _Options(NamedTuple):
    """What a call is compiled for, besides shapes and dtypes."""

    causal: bool | str
    window: tuple[int | None, int | None] | None
    scale: float | None
    softcap: float | None
    layout: str
    kernel: str | None
    return_lse: bool
    device: Device | None


def _plan(options: _Options, shapes: tuple[Any, ...], dtypes: tuple[Any, ...]) -> dict[str, Any]:
    names = ("q", "k", "v")
    if options.device is None:  # under jit: what holds on every device is checked as on the CPU
        options = options._replace(device=Device(CPU, 0), kernel=None)
    return _core.attention_plan_for(
        *shapes,
        dtypes=[parse_dtype(dtype, name) for name, dtype in zip(names, dtypes, strict=True)],
        **options._asdict(),
    )


def plan(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Any,
    window: Any,
    scale: Any,
    softcap: Any,
    layout: Any,
    kernel: Any,
    return_lse: bool,
) -> dict[str, Any]:
    """Fields of the plan; raises what is wrong with the call."""
    device = _device("q", (q, k, v))
    options = _Options(causal, window, scale, softcap, layout, kernel, return_lse, device)
    return _plan(options, (q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype))


def _forward(q: Any, k: Any, v: Any, options: _Options) -> Any:
    """The custom call on tracers; runs once for each set of shapes."""
    # Result types by way of dead operations on q, so that they inherit how q is sharded.
    row = q[..., :1]
    like_out = q if q.shape[3] == v.shape[3] else jnp.repeat(row, v.shape[3], 3)
    results = [_type_of(like_out)]
    if options.return_lse:
        heads_axis = 1 if options.layout == "bhsd" else 2
        like_lse = jnp.moveaxis(row[..., 0], heads_axis, 1).astype(jnp.float32)
        results.append(_type_of(like_lse))
    numbers = _core.option_numbers(
        options.causal,
        options.window,
        options.scale,
        options.softcap,
        options.layout,
        options.kernel,
    )
    made = jax.ffi.ffi_call(_ATTENTION, results)(
        q,
        k,
        v,
        causal=np.int32(numbers["causal"]),
        window=np.int32(numbers["window"]),
        window_left=np.int64(numbers["window_left"]),
        window_right=np.int64(numbers["window_right"]),
        scale=np.float32(numbers["scale"]),
        softcap=np.float32(numbers["softcap"]),
        layout=np.int32(numbers["layout"]),
        kernel=numbers["kernel"],
    )
    return tuple(made) if options.return_lse else made[0]


@functools.lru_cache(maxsize=1024)
def _check(options: _Options, shapes: tuple[Any, ...], dtypes: tuple[Any, ...]) -> None:
    """Raises what is wrong with a call, outside of JAX's tracing and its tracebacks."""
    _plan(options, shapes, dtypes)


def _with_axis(size: int, batched: bool, array: Any) -> Any:
    """The array with vmap's axis in front, whether it had one or not."""
    return array if batched else jnp.broadcast_to(array[None], (size, *array.shape))


@functools.lru_cache(maxsize=256)
def _compiled(options: _Options) -> Any:
    _register()
    function = functools.partial(_forward, options=options)

    def folded(size: int, batched: Sequence[bool], *qkv: Any) -> Any:
        """Sequences of an outer batch are sequences of one larger batch."""
        wide = [_with_axis(size, b, x) for b, x in zip(batched, qkv, strict=True)]
        made = compiled(*(x.reshape((x.shape[0] * x.shape[1], *x.shape[2:])) for x in wide))
        return jax.tree.map(lambda x: x.reshape((size, -1, *x.shape[1:])), made)

    compiled = _transformable(function, "attention", folded)
    return compiled


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    causal: Any,
    window: Any,
    scale: Any,
    softcap: Any,
    layout: Any,
    return_lse: bool,
    out: Any,
    lse: Any,
    kernel: Any,
    stream: Any,
) -> Any:
    """flash_attention, with all of its arguments."""
    for name, value in {"out": out, "lse": lse}.items():
        if value is not None:
            raise InvalidArgumentError(f"{name}: JAX arrays cannot be written to; leave it None")
    if stream is not None:
        raise InvalidArgumentError("stream: XLA chooses the stream of JAX arrays; leave it None")
    # Raises before anything is cached.
    _core.option_numbers(causal, window, scale, softcap, layout, kernel)
    window = None if window is None else tuple(window)
    scale = None if scale is None else float(scale)
    softcap = None if softcap is None else float(softcap)
    device = _device("q", (q, k, v))
    options = _Options(causal, window, scale, softcap, layout, kernel, return_lse, device)
    _check(options, (q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype))
    return _compiled(options)(q, k, v)


# ---- mixture of experts ----------------------------------------------------------------------

_INT32, _FP32 = np.dtype("int32"), np.dtype("float32")
_DLPACK_CODES = {"b": 6, "i": 0, "u": 1, "f": 2}  # by NumPy's kind; bfloat16 is none of NumPy's


class _Call(NamedTuple):
    """An operation and what it is compiled for, besides shapes and dtypes."""

    operation: str
    names: tuple[str, ...]
    """The C ABI's, of the tensors."""
    options: tuple[tuple[str, Any], ...]
    """As moe_plan takes them."""


def _dtype_numbers(dtype: Any) -> Dtype:
    if str(dtype) == "bfloat16":
        return parse_dtype(dtype)
    kind = _DLPACK_CODES.get(np.dtype(dtype).kind)
    return Dtype(255, 0) if kind is None else Dtype(kind, 8 * np.dtype(dtype).itemsize)


def _outputs(call: _Call, tensors: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shapes and dtypes of what a checked call makes, by the C ABI's names."""
    options = dict(call.options)
    if call.operation == "route":
        if "given_ids" in tensors:
            (t, k), e = tensors["given_ids"].shape, options["num_experts"]
        else:
            (t, e), k = tensors["logits"].shape, options["top_k"]
        made = {
            "ids": ((t, k), _INT32),
            "weights": ((t, k), _FP32),
            "offsets": ((e + 1,), _INT32),
            "pairs": ((t * k,), _INT32),
            "slots": ((t, k), _INT32),
        }
        return made | ({"lse": ((t,), _FP32)} if options.get("return_lse") else {})
    x = tensors["x"]
    if call.operation == "grouped_product":
        return {"out": ((*x.shape[:-1], tensors["w"].shape[1]), x.dtype)}
    made = {"out": (x.shape, x.dtype)}
    if options["return_pre_activation"]:
        t, k = tensors["slots"].shape
        rows = tensors["w_gate_up"].shape[1] * (2 if options["gate"] == "separate" else 1)
        made["pre_activation"] = ((t * k, rows), x.dtype)
    return made


@functools.lru_cache(maxsize=1024)
def _check_moe(
    call: _Call, device: Device, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[Any, ...]
) -> None:
    """Raises what is wrong with a call, outside of JAX's tracing and its tracebacks."""
    described = zip(call.names, shapes, dtypes, strict=True)
    tensors = {n: (s, _dtype_numbers(d), device, None) for n, s, d in described}
    _core.moe_plan(call.operation, tensors, dict(call.options))


def _result_types(
    arrays: Sequence[Any], outputs: dict[str, tuple[tuple[int, ...], Any]]
) -> list[Any]:
    """Types of results that vary over the devices of a mesh as the arrays do, by way of dead
    operations on all of them."""
    if not hasattr(jax, "typeof"):
        struct: Any = jax.ShapeDtypeStruct
        return [struct(shape, dtype) for shape, dtype in outputs.values()]
    mark = functools.reduce(jnp.add, (jnp.sum(x).astype(_FP32) for x in arrays))
    return [
        jax.typeof(jnp.broadcast_to(mark.astype(dtype), shape)) for shape, dtype in outputs.values()
    ]


def _call_moe(call: _Call, *arrays: Any) -> dict[str, Any]:
    """The custom call on tracers; runs once for each set of shapes."""
    outputs = _outputs(call, dict(zip(call.names, arrays, strict=True)))
    numbers = _core.moe_option_numbers(call.operation, dict(call.options))
    attributes = {
        name: np.int32(n) if isinstance(n, int) else np.float32(n) if isinstance(n, float) else n
        for name, n in numbers.items()
    }
    made = jax.ffi.ffi_call(_MOE[call.operation], _result_types(arrays, outputs))(
        *arrays,
        inputs="".join(f"{name} " for name in call.names),
        outputs="".join(f"{name} " for name in outputs),
        **attributes,
    )
    return dict(zip(outputs, made, strict=True))


@functools.lru_cache(maxsize=256)
def _compiled_moe(call: _Call) -> Any:
    _register()
    return _transformable(functools.partial(_call_moe, call), "the mixture of experts")


def _key(options: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Options that were found right, so that equal calls are compiled once: of NumPy's scalars
    Python's own, which hash alike."""
    return tuple((name, x.item() if hasattr(x, "item") else x) for name, x in options.items())


def run(operation: str, tensors: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """An operation of the C ABI, "route", "forward" or "grouped_product", on JAX arrays and options
    by the C ABI's names: its outputs, likewise. Raises what is wrong with the call. `device` among
    the options tells where tracers will be."""
    _core.moe_option_numbers(operation, options)  # raises before anything is cached
    arrays = [jnp.asarray(tensor) for tensor in tensors.values()]
    device = options.get("device") or _device(next(iter(tensors)), arrays)
    call = _Call(operation, tuple(tensors), _key(options))
    shapes, dtypes = tuple(x.shape for x in arrays), tuple(x.dtype for x in arrays)
    if device is None:  # under jit: what holds on every device is checked as on the CPU
        general = call._replace(options=tuple(o for o in call.options if o[0] != "kernel"))
        _check_moe(general, Device(CPU, 0), shapes, dtypes)
    else:
        _check_moe(call, device, shapes, dtypes)
    made: dict[str, Any] = _compiled_moe(call)(*arrays)
    return made


@functools.lru_cache(maxsize=256)
def _compiled_fused_moe(
    steps: Callable[..., Any], names: tuple[str, ...], options: tuple[tuple[str, Any], ...]
) -> Any:
    def function(*arrays: Any) -> Any:
        return steps(dict(zip(names, arrays, strict=True)), dict(options))

    def folded(size: int, batched: Sequence[bool], *arrays: Any) -> Any:
        """Tokens of an outer batch are tokens: any leading dimensions will do."""
        if any(b for name, b in zip(names, batched, strict=True) if name not in per_token):
            return None
        wide = [
            _with_axis(size, b, x) if name in per_token else x
            for name, b, x in zip(names, batched, arrays, strict=True)
        ]
        return compiled(*wide)

    per_token = ("tokens", "logits")
    compiled = _transformable(function, "the mixture of experts", folded)
    return compiled


def fused_moe(
    steps: Callable[[dict[str, Any], dict[str, Any]], Any],
    tensors: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    """steps(tensors, options), which calls run() and operations of JAX, as one compiled program."""
    for operation in ("route", "forward"):
        _core.moe_option_numbers(operation, options)  # raises before anything is cached
    options = options | {"device": _device("tokens", tuple(tensors.values()))}
    return _compiled_fused_moe(steps, tuple(tensors), _key(options))(*tensors.values())
