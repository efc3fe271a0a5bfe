"""flash_attention for JAX arrays: an XLA custom call, eager or under jit.

XLA makes the outputs and chooses the stream. There is no derivative and no batching rule yet:
jax.grad and jax.vmap of a call raise JAX's own errors.
"""

from __future__ import annotations

import functools
from typing import Any

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


def _device(q: Any) -> Device:
    """Where q is; for a tracer, which is nowhere yet, the CPU, whose rules hold everywhere."""
    if isinstance(q, jax.core.Tracer):
        return Device(CPU, 0)
    device = next(iter(q.devices()))
    if device.platform == "cpu":
        return Device(CPU, 0)
    if device.platform in ("gpu", "cuda"):
        return Device(CUDA, int(getattr(device, "local_hardware_id", None) or 0))
    raise InvalidArgumentError(f"q: it is on {device}, accepted are CPU and CUDA devices")


def plan(
    q: Any, k: Any, v: Any, *, causal: Any, scale: Any, layout: Any, kernel: Any, return_lse: bool
) -> dict[str, Any]:
    """Fields of the plan; validates shapes, dtypes and options."""
    for name, tensor in {"k": k, "v": v}.items():
        if not isinstance(tensor, jax.Array):
            kind = type(tensor)
            raise ArgumentTypeError(
                f"{name}: got {kind.__module__}.{kind.__qualname__}, but q is a JAX array; q, k "
                "and v must come from one framework"
            )
    return _core.attention_plan_for(
        q.shape,
        k.shape,
        v.shape,
        dtypes=[parse_dtype(t.dtype, name) for name, t in {"q": q, "k": k, "v": v}.items()],
        device=_device(q),
        causal=causal,
        scale=scale,
        layout=layout,
        kernel=kernel,
        return_lse=return_lse,
    )


def _type_of(value: Any) -> Any:
    """The result type that carries sharding; before jax.typeof there was none to carry."""
    if hasattr(jax, "typeof"):
        return jax.typeof(value)
    return jax.ShapeDtypeStruct(value.shape, value.dtype)


@functools.partial(
    jax.jit, static_argnames=("causal", "scale", "layout", "kernel", "return_lse", "heads_axis")
)
def _call(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: int,
    scale: float,
    layout: int,
    kernel: str,
    return_lse: bool,
    heads_axis: int,
) -> Any:
    # Types by way of dead operations on q, so that they inherit how q is sharded.
    row = q[..., :1]
    out_type = _type_of(q if q.shape[3] == v.shape[3] else jax.numpy.repeat(row, v.shape[3], 3))
    results = [out_type]
    if return_lse:
        sums = jax.numpy.moveaxis(row[..., 0], heads_axis, 1).astype(jax.numpy.float32)
        results.append(_type_of(sums))
    made = jax.ffi.ffi_call(_TARGET, results)(
        q,
        k,
        v,
        causal=np.int32(causal),
        scale=np.float32(scale),
        layout=np.int32(layout),
        kernel=kernel,
    )
    return tuple(made) if return_lse else made[0]


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    causal: Any,
    scale: Any,
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
    plan(q, k, v, causal=causal, scale=scale, layout=layout, kernel=kernel, return_lse=return_lse)
    _register()
    numbers = _core.option_numbers(causal=causal, scale=scale, layout=layout)
    return _call(
        q,
        k,
        v,
        **numbers,
        kernel=kernel or "",
        return_lse=return_lse,
        heads_axis=1 if layout == "bhsd" else 2,
    )
