"""flash_attention and the mixture of experts for JAX arrays: XLA custom calls, eager or under jit.

XLA makes the outputs and the workspace, and chooses the stream. Errors in a call are raised while
it is traced. jax.vmap folds its axis into the batch of attention and into the tokens of fused_moe;
the other functions, and calls with batched weights, run one after another. Attention and the
mixture of experts have reverse-mode derivatives, which are custom calls, too. Any other derivative
is an error, except those of products.

This module is imported with the first JAX array. A process that runs a program exported by another
must import it, so that XLA finds the calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.custom_batching
import jax.custom_derivatives
import jax.extend.core
import jax.interpreters.mlir
import jax.interpreters.xla
import jax.numpy as jnp
import numpy as np

from flashmoe_science import _core
from flashmoe_science._dtypes import CPU, CUDA, FP8_E4M3, Device, Dtype, parse_dtype
from flashmoe_science._jax_attention import dot_product_attention
from flashmoe_science.errors import (
    ArgumentTypeError,
    DeviceError,
    FlashMoEError,
    InvalidArgumentError,
    UnsupportedError,
)

__all__ = ["dot_product_attention", "ragged_dot"]

if jax.__version_info__ < (0, 6):  # earlier shard_map has no rule for jax.custom_batching
    raise ArgumentTypeError(f"got a JAX array of JAX {jax.__version__}, accepted is 0.6 or newer")

for _target, _handlers in _core.xla_ffi_handlers().values():
    for _platform, _handler in _handlers.items():
        jax.ffi.register_ffi_target(_target, _handler, platform=_platform)


def _device(name: str, tensors: Sequence[Any]) -> Device | None:
    """The device on which XLA will compute on these; None for tracers, which have none yet."""
    if any(isinstance(tensor, jax.core.Tracer) for tensor in tensors):
        return None
    # XLA computes on the device of a committed array; other arrays and descriptions follow it.
    placed = next((x for x in tensors if getattr(x, "committed", False)), tensors[0])
    device = next(iter(placed.devices()))
    if device.platform == "cpu":
        return Device(CPU, 0)
    if device.platform in ("gpu", "cuda"):
        return Device(CUDA, int(getattr(device, "local_hardware_id", None) or 0))
    raise InvalidArgumentError(f"{name}: it is on {device}, accepted are CPU and CUDA devices")


_REFUSALS = {
    "attention backward": "a second derivative of attention is asked for, accepted are first ones; "
    "pass jax.lax.stop_gradient of the gradient",
    "the merge of attention states": "a derivative of the merge of attention states is asked for, "
    "but it has no backward pass yet; pass jax.lax.stop_gradient of its arguments",
    "appending to a cache": "a derivative of appending to a cache is asked for, but it has none; "
    "pass jax.lax.stop_gradient of its arguments",
    "gathering from a cache": "a derivative of gathering from a cache is asked for, but it has "
    "none; pass jax.lax.stop_gradient of its arguments",
    "the check of sequences": "a derivative of the check of sequences is asked for, but it has "
    "none; pass jax.lax.stop_gradient of its arguments",
    "the backward of the mixture of experts": "a second derivative of the mixture of experts is "
    "asked for, accepted are first ones; pass jax.lax.stop_gradient of the gradient",
}


def _refuse_derivative(words: str) -> Any:
    raise InvalidArgumentError(_REFUSALS[words])


def _batchable(function: Callable[..., Any], rule: Callable[..., Any] | None) -> Any:
    """`function` on arrays with a rule for jax.vmap.

    rule(size, batched, *arrays) gives results that all have the axis in front, or None if it does
    not apply. Then, and without a rule, the calls run one after another.
    """
    batchable = jax.custom_batching.custom_vmap(function)

    @batchable.def_vmap  # type: ignore[untyped-decorator, unused-ignore]
    def _(size: int, batched: Sequence[bool], *arrays: Any) -> Any:
        whole = _whole(arrays)
        made = rule(size, batched, *whole) if rule is not None else None
        if made is None:
            made = _one_after_another(batchable, batched, whole)
        made = _mapped_alike(made, batched, arrays)
        return made, jax.tree.map(lambda _: True, made)

    return batchable


def _transformable(
    function: Callable[..., Any], words: str, rule: Callable[..., Any] | None = None
) -> Any:
    """`function` on arrays, jitted, with an error for jax.grad and a rule for jax.vmap."""
    differentiable = jax.custom_jvp(_batchable(function, rule))
    differentiable.defjvp(lambda primals, tangents: _refuse_derivative(words))
    return jax.jit(lambda *arrays: differentiable(*_whole(arrays)))


def _one_after_another(
    function: Callable[..., Any], batched: Sequence[bool], arrays: Sequence[Any]
) -> Any:
    def one(rows: Sequence[Any]) -> Any:
        following = iter(rows)
        return function(
            *(next(following) if b else x for b, x in zip(batched, arrays, strict=True))
        )

    return jax.lax.map(one, [x for b, x in zip(batched, arrays, strict=True) if b])


# ---- custom calls ----------------------------------------------------------------------------

_DIFFERENTIABLE = ("q", "k", "v", "sinks")
# Tables of sequences, in the handlers' order.
_BOUNDS = ("max_seqlen_q", "max_seqlen_k", "split_size")
_INT32, _FP32, _FP64 = np.dtype("int32"), np.dtype("float32"), np.dtype("float64")
_NO_DEVICE = "FLASHMOE_ERROR_NO_DEVICE"
_WORKSPACE_ALIGNMENT = 256  # bytes, more than XLA's

_CheckCall = Callable[[Any, Device, tuple[Any, ...], tuple[Any, ...]], dict[str, Any]]
"""Returns the fields of a call's plan, or raises its error on the device: (compiled call, device,
shapes, dtypes)."""


def _custom_call(
    target: str, words: str, check: _CheckCall, takes_fp32_on_gpu: bool = False,
    in_place: dict[int, int] | None = None,
) -> Any:  # fmt: skip
    """A primitive for XLA's call of a target, on the platforms where kernels serve it.

    bind(*arrays, call=, attributes=, results=): call is what `check` takes, attributes are the
    handler's as pairs, results the types of the results. With jax.ffi.ffi_call alone, only the
    running handler would find that nothing serves the call. in_place: the results written to the
    memory of an operand, by its index. XLA first copies operands that others read, too.
    """
    primitive: Any = jax.extend.core.Primitive(target)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *_, results, **__: results)
    primitive.def_impl(functools.partial(jax.interpreters.xla.apply_primitive, primitive))
    lower = jax.ffi.ffi_lowering(target, operand_output_aliases=in_place)

    def for_cpu(context: Any, *operands: Any, call: Any, attributes: Any, results: Any) -> Any:
        _checked(check, call, Device(CPU, 0), *_described(context.avals_in))
        return lower(context, *operands, **dict(attributes))

    def for_cuda(context: Any, *operands: Any, call: Any, attributes: Any, results: Any) -> Any:
        shapes, dtypes = _described(context.avals_in)
        plan = _plan_here(check, call, shapes, dtypes)
        refused = (_FP64,) if takes_fp32_on_gpu else (_FP32, _FP64)
        if plan is None and dtypes[0] in refused:
            accepted = "fp16, bf16 and fp32" if takes_fp32_on_gpu else "fp16 and bf16"
            given_dtype = "fp64" if dtypes[0] == _FP64 else "fp32"
            raise UnsupportedError(
                f"{words}: dtype {given_dtype}, accepted on a GPU are {accepted}"
            )
        given = dict(attributes)
        # The workspace is a result that nothing reads: XLA's CUDA graphs would keep only the
        # address of memory that a handler allocates. If its size is unknown, the handler allocates.
        size = plan["workspace_bytes"] if plan is not None and not _are_symbolic(shapes) else 0
        if size > 0:
            given["outputs"] += "workspace "
            buffer = jax.core.ShapedArray((size + _WORKSPACE_ALIGNMENT,), jnp.uint8)
            context = context.replace(avals_out=[*context.avals_out, buffer])
        return lower(context, *operands, **given)[: len(results)]

    def refuse(context: Any, *_: Any, **__: Any) -> Any:
        platforms = ", ".join(context.module_context.platforms)
        raise UnsupportedError(
            f"{words} is compiled for {platforms}, but has kernels for cpu and cuda alone"
        )

    jax.interpreters.mlir.register_lowering(primitive, refuse)
    jax.interpreters.mlir.register_lowering(primitive, for_cpu, platform="cpu")
    jax.interpreters.mlir.register_lowering(primitive, for_cuda, platform="cuda")
    if jax.__version_info__ < (0, 7):
        from jax.experimental import shard_map

        rules: Any = shard_map
        # shard_map of 0.6.0 asks each primitive; later ones ask the types.
        if hasattr(rules, "register_standard_check"):
            rules.register_standard_check(primitive)
            rules.register_standard_rewrite(primitive)
    return primitive


def _arrays(tensors: dict[str, Any]) -> list[Any]:
    """Converts NumPy arrays, which may occur among JAX arrays, for JAX."""
    return [_array(name, x) for name, x in tensors.items()]


def _array(name: str, x: Any) -> Any:
    # Neither has a NumPy dtype with a number in the C ABI: random keys, and tangents of integers.
    no_tangents = x.dtype == jax.dtypes.float0
    if no_tangents or jnp.issubdtype(x.dtype, jax.dtypes.extended):
        given = "float0" if no_tangents else x.dtype
        raise ArgumentTypeError(f"{name}: got dtype {given}, accepted are arrays of numbers")
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


def _refuse_descriptions(tensors: dict[str, Any]) -> None:
    """They have no numbers; only plans take them."""
    for name, x in tensors.items():
        if isinstance(x, jax.ShapeDtypeStruct):
            raise ArgumentTypeError(
                f"{name}: got a jax.ShapeDtypeStruct, accepted are arrays; jax.eval_shape of the "
                "call takes descriptions"
            )


def _described(arrays: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Shapes and dtypes."""
    return tuple(x.shape for x in arrays), tuple(x.dtype for x in arrays)


def _check_traced(
    check: _CheckCall, call: Any, device: Device | None, arrays: Sequence[Any]
) -> None:
    """Raises errors in a call, on its device if known. Under jit it is unknown: rules of every
    device are checked as on the CPU, and the rest when a platform is known."""
    if device is None:
        _checked(check, call.of_any_size(), Device(CPU, 0), *_described(arrays))
    else:
        check(call, device, *_described(arrays))


def _plan_here(
    check: _CheckCall, call: Any, shapes: tuple[Any, ...], dtypes: tuple[Any, ...]
) -> dict[str, Any] | None:
    """The plan of a call on the first GPU of this machine that serves it, since JAX does not say
    which GPU it will use. None if there is no GPU to ask, as in an export; raises the reason if no
    GPU serves it."""
    refusals: list[FlashMoEError] = []
    for ordinal in range(max(1, _core.cuda_device_count())):
        try:
            return _checked(check, call, Device(CUDA, ordinal), shapes, dtypes)
        except (UnsupportedError, DeviceError) as error:
            refusals.append(error)
    if refusals[0].status == _NO_DEVICE:
        return None
    raise refusals[0]


def _checked(
    check: _CheckCall, call: Any, device: Device, shapes: tuple[Any, ...], dtypes: tuple[Any, ...]
) -> dict[str, Any]:
    """Checks a call with symbolic dimensions (jax.export) with numbers in their places."""
    if not _are_symbolic(shapes):
        return check(call, device, shapes, dtypes)
    variables = sorted({v for shape in shapes for n in shape for v in _variables(n)})
    values = {name: _EXAMPLE * (i + 2) for i, name in enumerate(variables)}
    example = tuple(
        tuple(int(n._evaluate(values)) if _variables(n) else n for n in shape) for shape in shapes
    )
    try:
        return check(call.of_any_size(), device, example, dtypes)
    except FlashMoEError as error:
        where = ", ".join(f"{name} = {value}" for name, value in values.items())
        made = type(error)(f"{error}; this is with {where}")
        made.status = error.status
        raise made from None


def _are_symbolic(shapes: tuple[Any, ...]) -> bool:
    return any(_variables(n) for shape in shapes for n in shape)


_EXAMPLE = 24  # thirds and eighths of its multiples are whole


def _variables(dimension: Any) -> set[str]:
    """Names in a dimension of JAX's; an int has none."""
    return set() if isinstance(dimension, int) else dimension._get_vars()


def _result_types(arrays: Sequence[Any], like: Callable[[Any], Sequence[Any]]) -> tuple[Any, ...]:
    """Types of the dead arrays that `like` makes from a scalar. They vary over the devices of a
    mesh like the arrays, which only operations on all arrays can tell."""
    mark = functools.reduce(jnp.add, (jnp.sum(x).astype(_FP32) for x in arrays))
    return tuple(jax.typeof(x) for x in like(mark))


# ---- operations ------------------------------------------------------------------------------

# By NumPy's kind; those of other packages, as bfloat16 and int4, are not NumPy's own.
_DLPACK_CODES = {"b": 6, "i": 0, "u": 1, "f": 2, "c": 5}
_UNKNOWN = Dtype(255, 0)
_UNKNOWN_WORDS = "dtype code 0 (code 255, 1 lanes)"  # the C ABI's of it


class _Call(NamedTuple):
    """An operation and its compile-time parameters, besides shapes and dtypes."""

    operation: str
    names: tuple[str, ...]
    """The C ABI's names of the tensors."""
    options: tuple[tuple[str, Any], ...]
    """As _core.plan takes them."""

    def of_any_size(self) -> _Call:
        """Without options that serve only some sizes."""
        return self._replace(options=tuple(o for o in self.options if o[0] != "kernel"))


def _dtype_numbers(dtype: Any) -> Dtype:
    if str(dtype) == "bfloat16":
        return parse_dtype(dtype)
    if str(dtype) == "float8_e4m3fn":
        return FP8_E4M3
    numpys = np.dtype(dtype)
    if numpys.isbuiltin != 1 or numpys.kind not in _DLPACK_CODES:
        return _UNKNOWN
    return Dtype(_DLPACK_CODES[numpys.kind], 8 * numpys.itemsize)


_TURNED = ".T"
"""Follows the name of a tensor whose last two axes are swapped in the array."""

# The tensors that moe_backward makes gradients for, in the order of its flags.
LAYER_GRADIENTS = (
    "x", "w_gate_up", "w_up", "w_down", "b_gate_up", "b_up", "b_down", "weights"
)  # fmt: skip


def _product_gradients(
    call: _Call, tensors: dict[str, Any]
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """The gradients of grouped_product_backward, checked or not."""
    options, dout = dict(call.options), tensors["dout"]
    by_x, by_w, by_bias = options.get("wanted") or (True, True, False)
    factors = [
        tensors[name].shape[-2 if name.endswith(_TURNED) else -1]
        for name in ("x", "w", "w" + _TURNED)
        if name in tensors and tensors[name].ndim > 1
    ]
    bounds = tensors.get("offsets", tensors.get("counts"))
    experts = 0
    if bounds is not None and bounds.ndim == 1:
        experts = bounds.shape[0] - ("offsets" in tensors)
    columns = factors[0] if factors else 0
    rows, out_columns = (dout.shape[:-1], dout.shape[-1]) if dout.ndim else ((), 0)
    made = {"dx": ((*rows, columns), dout.dtype)} if by_x else {}
    if by_w:
        made["dw"] = ((experts, out_columns, columns), dout.dtype)
    if by_bias:
        made["dbias"] = ((experts, out_columns), jnp.dtype(options.get("dbias") or dout.dtype))
    return made


def _outputs(call: _Call, tensors: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shapes and dtypes of a checked call's outputs, by the C ABI's names."""
    options = dict(call.options)
    if call.operation == "moe_backward":
        flags = zip(LAYER_GRADIENTS, options["wanted"] or (True,) * 8, strict=True)
        of = (name for name, wanted in flags if wanted and name in tensors)
        return {f"d{name}": (tensors[name].shape, tensors[name].dtype) for name in of}
    if call.operation == "grouped_product_backward":
        return _product_gradients(call, tensors)
    if call.operation == "moe_route_backward":
        name = "logits" if "logits" in tensors else "given_weights"
        return {f"d{name}": (tensors[name].shape, tensors[name].dtype)}
    if call.operation == "attention_backward":
        kept = zip(_DIFFERENTIABLE, options["wanted"], strict=True)
        of = (name for name, wanted in kept if wanted and name in tensors)
        return {f"d{name}": (tensors[name].shape, tensors[name].dtype) for name in of}
    if call.operation == "attention_forward":
        q, v = tensors["q"], tensors["v"]
        made = {"out": ((*q.shape[:3], v.shape[3]), q.dtype)}
        batch, seq, heads = q.shape[:3]
        if options["layout"] == "bhsd":
            seq, heads = heads, seq
        sums = _FP64 if q.dtype == _FP64 else _FP32
        return made | ({"lse": ((batch, heads, seq), sums)} if options["return_lse"] else {})
    if call.operation == "kv_append":
        made = {name: (tensors[name].shape, tensors[name].dtype) for name in _APPENDED[2:]}
        q = tensors.get("q")
        return made if q is None else made | {"q_out": (q.shape, q.dtype)}
    if call.operation == "kv_gather":
        return _gathered(tensors, options)
    if call.operation == "check_sequences":
        offsets = tensors.get("cu_seqlens_q")
        count = tensors["q"].shape[0] if offsets is None else offsets.shape[0] - 1
        return {"status": ((count,), _INT32)}
    if call.operation == "merge_states":
        outs = tensors["outs"]
        batch, seq, heads, dim = outs.shape[-4:]
        of_out = options["dtype"] or tensors.get("prior_out", outs).dtype
        made = {"out": ((batch, seq, heads, dim), jnp.dtype(of_out))}
        if options["layout"] == "bhsd":
            seq, heads = heads, seq
        sums = _FP64 if outs.dtype == _FP64 else _FP32
        return made | ({"lse": ((batch, heads, seq), sums)} if options["return_lse"] else {})
    if call.operation == "moe_route":
        if "given_ids" in tensors:
            (t, k), e = tensors["given_ids"].shape, options["num_experts"]
        else:
            (t, e), k = tensors["logits"].shape, options["top_k"]
        scores = tensors.get("logits", tensors.get("given_weights"))
        numbers = _FP64 if scores is not None and scores.dtype == _FP64 else _FP32
        made = {
            "ids": ((t, k), _INT32),
            "weights": ((t, k), numbers),
            "offsets": ((e + 1,), _INT32),
            "pairs": ((t * k,), _INT32),
            "slots": ((t, k), _INT32),
        }
        return made | ({"lse": ((t,), numbers)} if options.get("return_lse") else {})
    if call.operation == "fused_moe":
        return {"out": (tensors["tokens"].shape, tensors["tokens"].dtype)}
    x = tensors["x"]
    if call.operation == "grouped_product":
        return {"out": ((*x.shape[:-1], tensors["w"].shape[1]), x.dtype)}
    made = {"out": (x.shape, x.dtype)}
    if options["return_pre_activation"]:
        t, k = tensors["slots"].shape
        rows = tensors["w_gate_up"].shape[1] * (2 if options["gate"] == "separate" else 1)
        made["pre_activation"] = ((t * k, rows), x.dtype)
    return made


def _gathered(tensors: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """k, and v if there is a v_cache."""
    caches = {"k": tensors["k_cache"]} | ({"v": tensors["v_cache"]} if "v_cache" in tensors else {})
    shape = tensors["k_cache"].shape
    axis = 2 if options["layout"] == "bhsd" else 1
    table, rows = tensors.get("page_table"), options["rows"]
    if rows is None:
        rows = shape[axis] * (1 if table is None else table.shape[1])
    of = tensors.get("batch_index", tensors["k_cache"]) if table is None else table
    batch = 1 if "cu_seqlens_k" in tensors else of.shape[0]
    made = {}
    for name, cache in caches.items():
        extents = [batch, *cache.shape[1:]]
        extents[axis] = rows
        made[name] = (tuple(extents), jnp.dtype(options["dtype"] or cache.dtype))
    return made


def _plan(
    call: _Call, device: Device, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[Any, ...]
) -> dict[str, Any]:
    arrays = dict(zip(call.names, map(jax.ShapeDtypeStruct, shapes, dtypes), strict=True))
    tensors: dict[str, Any] = {}
    for name, array in arrays.items():
        shape, strides = array.shape, None
        if name.endswith(_TURNED):
            name = name.removesuffix(_TURNED)
            groups, columns, rows = shape
            shape, strides = (groups, rows, columns), (columns * rows, 1, rows)
        tensors[name] = (shape, _dtype_numbers(array.dtype), device, strides)
    if call.operation == "grouped_product_backward":  # its inputs alone do not tell them
        for name, (shape, dtype) in _product_gradients(call, arrays).items():
            tensors[name] = (shape, _dtype_numbers(dtype), device, None)
    try:
        return _core.plan(call.operation, tensors, dict(call.options))
    except ArgumentTypeError as error:
        name = str(error).partition(":")[0]
        if name not in arrays or _UNKNOWN_WORDS not in str(error):
            raise
        made = type(error)(str(error).replace(_UNKNOWN_WORDS, str(arrays[name].dtype)))
        made.status = error.status
        raise made from None


def plan(operation: str, tensors: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Fields of the plan of run() with these arguments; raises errors in the call."""
    arrays = _arrays(tensors)
    device = _device(next(iter(tensors)), arrays)
    call = _Call(operation, tuple(tensors), tuple(options.items()))
    if device is None:
        call, device = call.of_any_size(), Device(CPU, 0)
    return _plan(call, device, *_described(arrays))


@functools.lru_cache(maxsize=1024)
def _kept_plan(
    call: _Call, device: Device, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[Any, ...]
) -> dict[str, Any]:
    """The same, outside JAX's tracing and its tracebacks."""
    return _plan(call, device, shapes, dtypes)


_WORDS = {"attention_forward": "attention", "attention_backward": "attention backward"}


def _words(operation: str) -> str:
    if operation == "merge_states":
        return "the merge of attention states"
    if operation == "kv_append":
        return "appending to a cache"
    if operation == "kv_gather":
        return "gathering from a cache"
    if operation == "check_sequences":
        return "the check of sequences"
    if operation in ("moe_backward", "moe_route_backward"):
        return "the backward of the mixture of experts"
    return _WORDS.get(operation, "the mixture of experts")


# The required tensors of kv_append, in order; the caches are the old ones.
_APPENDED = ("k", "v", "k_cache", "v_cache")
_CACHES_IN_PLACE = {_APPENDED.index("k_cache"): 0, _APPENDED.index("v_cache"): 1}

_CALLS = {
    operation: _custom_call(
        target,
        _words(operation),
        _kept_plan,
        takes_fp32_on_gpu=operation
        in ("moe_route", "moe_route_backward", "kv_append", "kv_gather", "merge_states"),
        in_place=_CACHES_IN_PLACE if operation == "kv_append" else None,
    )
    for operation, (target, _) in _core.xla_ffi_handlers().items()
}


def _bind(call: _Call, *arrays: Any) -> dict[str, Any]:
    """The custom call on tracers; runs once for each set of shapes."""
    outputs = _outputs(call, dict(zip(call.names, arrays, strict=True)))
    attributes = {
        "inputs": "".join(f"{name} " for name in call.names),
        "outputs": "".join(f"{name} " for name in outputs),
        "options": _core.pack_options(call.operation, dict(call.options)),
    }
    bounds = [dict(call.options).get(name) or 0 for name in _BOUNDS]
    if any(bounds):
        attributes["bounds"] = "".join(f"{bound} " for bound in bounds)

    def like(mark: Any) -> list[Any]:
        return [jnp.broadcast_to(mark.astype(dtype), shape) for shape, dtype in outputs.values()]

    made = _CALLS[call.operation].bind(
        *arrays,
        call=call,
        attributes=tuple(attributes.items()),
        results=_result_types(arrays, like),
    )
    return dict(zip(outputs, made, strict=True))


def _with_axis(size: int, batched: bool, array: Any) -> Any:
    """The array with vmap's axis in front, added if it had none."""
    return array if batched else jnp.broadcast_to(array[None], (size, *array.shape))


def _widened(
    names: Sequence[str], folded: Sequence[str], size: int, batched: Sequence[bool], arrays: Any
) -> list[Any] | None:
    """The arrays, with vmap's axis on the `folded` ones; None if another one has it."""
    if any(b for name, b in zip(names, batched, strict=True) if name not in folded):
        return None
    return [
        _with_axis(size, b, x) if name in folded else x
        for name, b, x in zip(names, batched, arrays, strict=True)
    ]


# Tensors with a batch in front, and tables that prevent folding several calls into one batch.
_ROWS = ("q", "k", "v", "dout", "out", "lse", "dlse", "seqused_q", "seqused_k", "k_begin",
         "q_offset")  # fmt: skip
_PLACES = ("cu_seqlens_q", "cu_seqlens_k", "batch_index", "page_table", "k_scale", "v_scale")
_PAIRS = ("attn_bias", "attn_mask")  # their batch may be 1, which broadcasts


# The primitives of these know all transformations: _jax_moe has their rules.
_WITH_RULES = (
    "moe_route",
    "moe_forward",
    "grouped_product",
    "grouped_product_backward",
    "fused_moe",
)


@functools.lru_cache(maxsize=256)
def _compiled(call: _Call) -> Any:
    def folded(size: int, batched: Sequence[bool], *arrays: Any) -> Any:
        """Folds sequences of an outer batch into one larger batch; dsinks is its sum."""
        if "sinks" in call.names and dict(call.options).get("wanted", ())[-1:] == (True,):
            return None
        if any(name in (*_PLACES, *_PAIRS) for name in call.names):
            return None
        wide = _widened(call.names, _ROWS, size, batched, arrays)
        if wide is None:
            return None
        apart = wide[0].shape[:2]
        made = compiled(
            *(
                x.reshape((x.shape[0] * x.shape[1], *x.shape[2:])) if name in _ROWS else x
                for name, x in zip(call.names, wide, strict=True)
            )
        )
        return jax.tree.map(lambda x: x.reshape((*apart, *x.shape[1:])), made)

    function = functools.partial(_bind, call)
    compiled: Any
    if call.operation in _WITH_RULES:
        return jax.jit(lambda *arrays: function(*_alike(arrays)))
    rule = folded if call.operation in _WORDS else None
    if call.operation == "attention_forward":
        compiled = _differentiable(call, _batchable(function, rule))
    else:
        compiled = _transformable(function, _words(call.operation), rule)
    return compiled


# ---- derivatives of attention ----------------------------------------------------------------


def _differentiable(call: _Call, attend: Any) -> Any:
    """Gives `attend`, which makes the outputs of an attention_forward from arrays, a gradient."""
    with_lse = call._replace(options=_key(dict(call.options) | {"return_lse": True}))
    attention = jax.custom_vjp(attend)

    def forward(*inputs: Any) -> Any:
        # Does not keep which arrays are perturbed: JAX may reuse this trace for a call with others.
        arrays = dict(zip(call.names, (x.value for x in inputs), strict=True))
        made = _compiled(with_lse)(*arrays.values())
        return {name: made[name] for name in _outputs(call, arrays)}, (arrays, made)

    def backward(kept: Any, cotangents: Any) -> Any:
        arrays, made = kept
        given = {
            f"d{name}": x
            for name, x in cotangents.items()
            if not isinstance(x, jax.custom_derivatives.SymbolicZero)
        }
        gradients = _gradients(call, arrays | made, given) if given else {}
        return tuple(gradients.get(f"d{name}") for name in call.names)

    attention.defvjp(forward, backward, symbolic_zeros=True)
    return jax.jit(lambda *arrays: attention(*_alike(arrays)))


def _whole(arrays: Sequence[Any]) -> list[Any]:
    """The arrays, whole on every device. XLA gathers them anyway, but in an explicit mesh types
    tell how arrays are sharded, and results are of one device's kind. The transpose gives
    gradients the sharding of their arrays."""
    return [
        _resharded(x, sharding.mesh, *(None,) * x.ndim)
        if (sharding := _explicit_sharding(x)) is not None
        else x
        for x in arrays
    ]


def _explicit_sharding(array: Any) -> Any:
    """How the array is sharded over axes of an explicit mesh; None if it is not."""
    if not hasattr(jax.sharding, "reshard"):  # such meshes are newer than this JAX
        return None
    sharding = getattr(jax.typeof(array), "sharding", None)
    parted = sharding is not None and any(axis is not None for axis in sharding.spec)
    return sharding if parted else None


def _mapped_alike(made: Any, batched: Sequence[bool], arrays: Sequence[Any]) -> Any:
    """Results with vmap's axis in front, which is sharded like that of the batched arrays."""
    given = (_explicit_sharding(x) for b, x in zip(batched, arrays, strict=True) if b)
    sharding = next((its for its in given if its is not None and its.spec[0] is not None), None)
    if sharding is None:
        return made

    def parted(x: Any) -> Any:
        return _resharded(x, sharding.mesh, sharding.spec[0], *(None,) * (x.ndim - 1))

    return jax.tree.map(parted, made)


def _resharded(array: Any, mesh: Any, *axes: Any) -> Any:
    """The array, sharded over these axes of the mesh, one or None for each of its own."""
    api: Any = jax.sharding
    return api.reshard(array, api.NamedSharding(mesh, api.PartitionSpec(*axes)))


def _alike(arrays: Sequence[Any]) -> list[Any]:
    """In shard_map the gradient of an array that does not vary over an axis is the sum of the
    devices' gradients along it, which is the transpose of pvary."""
    arrays = _whole(arrays)
    axes = [_varying_axes(x) for x in arrays]
    every = frozenset().union(*axes)
    return [
        _cast(x, tuple(sorted(every - its, key=str))) if every - its else x
        for x, its in zip(arrays, axes, strict=True)
    ]


def _varying_axes(array: Any) -> frozenset[Any]:
    """Axes of the mesh along which shard_map's devices may have different values."""
    kind: Any = jax.typeof(array)
    if hasattr(kind, "manual_axis_type"):
        return frozenset(kind.manual_axis_type.varying)
    return getattr(kind, "vma", frozenset())  # before JAX 0.10


def _cast(array: Any, axes: tuple[Any, ...]) -> Any:
    """The array as one that varies over these axes."""
    lax: Any = jax.lax
    if hasattr(lax, "pcast"):
        return lax.pcast(array, axes, to="varying")
    return lax.pvary(array, axes)  # before JAX 0.8


def without_gradient(name: str, array: Any) -> Any:
    """The bias of that name, whose gradient no kernel computes: asking for it is an error."""

    def refuse(primals: Any, tangents: Any) -> NoReturn:
        raise UnsupportedError(
            f"{name}: got one that is differentiated, but no kernel computes the gradient of a "
            "bias in this version; pass jax.lax.stop_gradient of it"
        )

    same: Any = jax.custom_jvp(lambda x: x)
    same.defjvp(refuse)
    return same(array)


def _gradients(call: _Call, tensors: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The gradients, as "dq" and so on, from an attention_forward's tensors and the gradients of
    its outputs."""
    given = {"dout": jnp.zeros_like(tensors["out"])} | given
    named = {name: tensors[name] for name in (*call.names, "out", "lse")}
    options = {name: x for name, x in call.options if name != "return_lse"}
    options |= {"kernel": None, "wanted": tuple(name in tensors for name in _DIFFERENTIABLE)}
    return run("attention_backward", named | given, options)


# ---- functions -------------------------------------------------------------------------------


def _key(options: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Valid options as a key, so that equal calls are compiled once. NumPy scalars become Python's,
    which hash alike, and lists become tuples."""

    def key(name: str, x: Any) -> Any:
        if isinstance(x, jax.core.Tracer):
            raise ArgumentTypeError(
                f"{name}: got {x} of type {type(x).__name__}, accepted is a number that is known "
                "when the call is traced; jax.jit takes it by static_argnames"
            )
        return tuple(x) if isinstance(x, list) else x.item() if hasattr(x, "item") else x

    return tuple((name, key(name, x)) for name, x in options.items())


def run(operation: str, tensors: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Runs an operation of the C ABI on JAX arrays and options by name; returns its outputs by
    name. Raises errors in the call. `device` among the options is the device of tracers."""
    _refuse_descriptions(tensors)
    _core.pack_options(operation, options)  # raises before anything is cached
    arrays = _arrays(tensors)
    device = options.get("device") or _device(next(iter(tensors)), arrays)
    call = _Call(operation, tuple(tensors), _key(options))
    _check_traced(_kept_plan, call, device, arrays)
    made: dict[str, Any] = _compiled(call)(*arrays)
    return made


@functools.lru_cache(maxsize=256)
def _compiled_fused_moe(
    steps: Callable[..., Any], names: tuple[str, ...], options: tuple[tuple[str, Any], ...]
) -> Any:
    def function(*arrays: Any) -> Any:
        # Gathered before the router's product, which refuses some explicit shardings.
        return steps(dict(zip(names, _whole(arrays), strict=True)), dict(options))

    return jax.jit(function)


def fused_moe(
    steps: Callable[[dict[str, Any], dict[str, Any]], Any],
    tensors: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    """Compiles steps(tensors, options), which calls run() and operations of JAX, as one program."""
    _refuse_descriptions(tensors)
    _core.pack_options("fused_moe", options)  # raises before anything is cached
    arrays = _arrays(tensors)
    options = options | {"device": _device("tokens", arrays)}
    return _compiled_fused_moe(steps, tuple(tensors), _key(options))(*arrays)


def _refuse_outputs(outputs: dict[str, Any], stream: Any) -> None:
    for name in outputs:
        raise InvalidArgumentError(f"{name}: JAX arrays cannot be written to; leave it None")
    if stream is not None:
        raise InvalidArgumentError("stream: XLA chooses the stream of JAX arrays; leave it None")


def flash_attention(
    tensors: dict[str, Any], options: dict[str, Any], outputs: dict[str, Any], stream: Any
) -> Any:
    """flash_attention, with everything by name."""
    _refuse_outputs(outputs, stream)
    _refuse_descriptions(tensors)
    if "attn_bias" in tensors:
        bias = without_gradient("attn_bias", jnp.asarray(tensors["attn_bias"]))
        tensors = tensors | {"attn_bias": bias}
    prior = {name: tensors[name] for name in ("prior_out", "prior_lse") if name in tensors}
    if not prior:
        made = run("attention_forward", tensors, options)
        return (made["out"], made["lse"]) if options["return_lse"] else made["out"]
    if len(prior) == 1:
        plan("attention_forward", tensors, options)  # raises which one is missing
    # The same two steps; XLA holds between them what is in the workspace elsewhere.
    tensors = {name: x for name, x in tensors.items() if name not in prior}
    made = run("attention_forward", tensors, options | {"return_lse": True})
    merge = {"layout": options["layout"], "dtype": None, "return_lse": options["return_lse"]}
    made = run("merge_states", {"outs": made["out"], "lses": made["lse"]} | prior, merge)
    return (made["out"], made["lse"]) if options["return_lse"] else made["out"]


def merge_states(
    tensors: dict[str, Any], options: dict[str, Any], outputs: dict[str, Any], stream: Any
) -> Any:
    """merge_states, with everything by name."""
    _refuse_outputs(outputs, stream)
    made = run("merge_states", tensors, options)
    return (made["out"], made["lse"]) if options["return_lse"] else made["out"]


def kv_append(
    tensors: dict[str, Any], options: dict[str, Any], outputs: dict[str, Any], stream: Any
) -> tuple[Any, ...]:
    """kv_append, with everything by name: returns new caches, and the rotated queries if any."""
    caches = {name: outputs[name] for name in _APPENDED[2:]}
    _refuse_outputs({name: x for name, x in outputs.items() if name not in caches}, stream)
    given = tensors | caches
    ordered = {name: given.pop(name) for name in _APPENDED}
    made = run("kv_append", ordered | given, options)
    for name, cache in caches.items():  # a loop that carries caches wants the same types back
        sharding = _explicit_sharding(cache)
        if sharding is not None:
            made[name] = _resharded(made[name], sharding.mesh, *sharding.spec)
    return tuple(made[name] for name in ("k_cache", "v_cache", "q_out") if name in made)


def kv_gather(
    tensors: dict[str, Any], options: dict[str, Any], outputs: dict[str, Any], stream: Any
) -> Any:
    """kv_gather, with everything by name."""
    _refuse_outputs(outputs, stream)
    made = run("kv_gather", tensors, options)
    return (made["k"], made["v"]) if "v" in made else made["k"]


def check_sequences(
    tensors: dict[str, Any], options: dict[str, Any], outputs: dict[str, Any], stream: Any
) -> Any:
    """check_sequences, with everything by name. Only the extents of q and k are used."""
    _refuse_outputs(outputs, stream)
    tensors = tensors | {name: jax.lax.stop_gradient(tensors[name]) for name in ("q", "k")}
    return run("check_sequences", tensors, options)["status"]


def flash_attention_backward(
    tensors: dict[str, Any], options: dict[str, Any], outputs: dict[str, Any], stream: Any
) -> tuple[Any, ...]:
    """flash_attention_backward, with everything by name."""
    _refuse_outputs(outputs, stream)
    if options["accumulate"]:
        raise InvalidArgumentError("accumulate: JAX arrays cannot be added to; leave it False")
    made = run("attention_backward", tensors, options)
    return tuple(made.get(f"d{name}") for name in _DIFFERENTIABLE)


from flashmoe_science import _jax_moe  # noqa: E402  # its rules use the code above

ragged_dot = _jax_moe.ragged_dot
