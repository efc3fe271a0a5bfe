"""flash_attention for JAX arrays: an XLA custom call, eager or under jit.

XLA makes the outputs and chooses the stream. There is no derivative and no batching rule yet:
jax.grad and jax.vmap of a call raise JAX's own errors.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from flashmoe_science import _core
from flashmoe_science._names import CPU, CUDA, Device, parse_dtype
from flashmoe_science.errors import ArgumentTypeError, InvalidArgumentError

_TARGET = "flashmoe_attention_forward_v1"


@functools.cache
def _register() -> None:
    if not hasattr(jax, "ffi"):
        raise ArgumentTypeError(
            f"q: got a JAX array of JAX {jax.__version__}, accepted is JAX 0.5 or newer"
        )
    for platform, handler in _core.xla_ffi_handlers().items():
        jax.ffi.register_ffi_target(_TARGET, handler, platform=platform)


def _device(q: Any) -> Device | None:
    """Where q is; None for a tracer, which is nowhere yet."""
    if isinstance(q, jax.core.Tracer):
        return None
    device = next(iter(q.devices()))
    if device.platform == "cpu":
        return Device(CPU, 0)
    if device.platform in ("gpu", "cuda"):
        return Device(CUDA, int(getattr(device, "local_hardware_id", None) or 0))
    raise InvalidArgumentError(f"q: it is on {device}, accepted are CPU and CUDA devices")


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
    options = _Options(causal, window, scale, softcap, layout, kernel, return_lse, _device(q))
    return _plan(options, (q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype))


def _type_of(value: Any) -> Any:
    """The result type that carries sharding; before jax.typeof there was none to carry."""
    if hasattr(jax, "typeof"):
        return jax.typeof(value)
    struct: Any = jax.ShapeDtypeStruct
    return struct(value.shape, value.dtype)


def _forward(q: Any, k: Any, v: Any, options: _Options) -> Any:
    """The custom call on tracers; runs once for each set of shapes."""
    # Result types by way of dead operations on q, so that they inherit how q is sharded.
    row = q[..., :1]
    like_out = q if q.shape[3] == v.shape[3] else jax.numpy.repeat(row, v.shape[3], 3)
    results = [_type_of(like_out)]
    if options.return_lse:
        heads_axis = 1 if options.layout == "bhsd" else 2
        like_lse = jax.numpy.moveaxis(row[..., 0], heads_axis, 1).astype(jax.numpy.float32)
        results.append(_type_of(like_lse))
    numbers = _core.option_numbers(
        options.causal,
        options.window,
        options.scale,
        options.softcap,
        options.layout,
        options.kernel,
    )
    made = jax.ffi.ffi_call(_TARGET, results)(
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


@functools.lru_cache(maxsize=256)
def _compiled(options: _Options) -> Any:
    _register()
    return jax.jit(functools.partial(_forward, options=options))


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
    options = _Options(causal, window, scale, softcap, layout, kernel, return_lse, _device(q))
    _check(options, (q.shape, k.shape, v.shape), (q.dtype, k.dtype, v.dtype))
    return _compiled(options)(q, k, v)
