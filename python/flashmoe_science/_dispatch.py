"""Tensors whose type has no DLPack exchange API, and flash_attention on them.

The fast path is native. This path serves NumPy, CuPy, JAX, torch older than 2.10, other DLPack
objects, and attention on a GPU that needs workspace. Each framework defines how its tensors are
viewed, how new ones are made, and which stream is current. The mixture of experts on such tensors
is in _moe.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from typing import Any, NamedTuple

from flashmoe_science import _core
from flashmoe_science._dtypes import CPU, CUDA, Device
from flashmoe_science.errors import (
    ArgumentTypeError,
    InvalidArgumentError,
    _TransformedError,
)

_NO_GRADIENTS = "{0}: requires grad, but {1} {2}; call under torch.no_grad() or pass {0}.detach()"
NO_DERIVATIVE = (
    "{0}: has a tangent of forward-mode differentiation, but {1} has no derivative yet; pass "
    "{0}.detach()"
)
NEGATED = "{0}: its negative bit is set, accepted is a tensor without; pass {0}.resolve_neg()"
_INFERENCE = (
    "{0}: it is an inference tensor, accepted outside of torch.inference_mode() are others, such "
    "as its clone()"
)
_LEGACY_STREAM = 1  # cudaStreamLegacy, which DLPack's protocol also calls 1
_DLPACK = (1, 0)  # the newest version of capsules
# DLPack's kCUDAHost and kCUDAManaged: memory that one of our devices can read.
_HOME_OF = {3: CPU, 13: CUDA}


Context = contextlib.AbstractContextManager[Any]


class Words(NamedTuple):
    """Words for an operation in messages; the native half has the same."""

    name: str
    tensors: str
    outputs: str
    """What to pass if no output can be made."""
    gradients: str = "has no backward pass yet"
    has_gradients: bool = False
    """Whether torch's gradients are recorded."""


ATTENTION = Words(
    "attention", "all tensors of a call", "out, and lse with return_lse",
    "records gradients of torch's inputs alone", True,
)  # fmt: skip
ATTENTION_BACKWARD = Words("attention backward", "all tensors of a call", "dq, dk and dv")


class Framework:
    """Tensors of the Python array API standard (2021.12 or newer), or with DLPack only."""

    def __init__(self, name: str) -> None:
        self.name = name

    def device(self, tensor: Any) -> Device:
        kind, ordinal = tensor.__dlpack_device__()
        home = _HOME_OF.get(int(kind), int(kind))
        return Device(home, 0 if home == CPU else int(ordinal))

    def check(self, name: str, tensor: Any, words: Words) -> None:
        """Raises errors in an argument that only this framework can detect."""

    def check_output(self, name: str, tensor: Any, words: Words) -> None:
        """The same for an output."""

    def finish(self, *outputs: Any) -> None:
        """Reports that these have been written to."""

    def view(self, tensor: Any, stream: int | None) -> Any:
        """What the native side can read: the tensor, or a DLPack capsule ordered on `stream`."""
        if self.device(tensor).type != CUDA:
            return tensor
        stream = stream or _LEGACY_STREAM  # the protocol has no 0
        try:  # read-only tensors have no older capsule
            return tensor.__dlpack__(stream=stream, max_version=_DLPACK)
        except TypeError:  # a producer older than DLPack 1.0
            return tensor.__dlpack__(stream=stream)

    def current_stream(self, device: Device) -> int:
        return _LEGACY_STREAM

    def on_stream(self, like: Any, stream: int | None) -> Context:
        """Makes the framework's own work on `like`'s device go on that stream, if given."""
        return contextlib.nullcontext()

    def out(self, q: Any, shape: tuple[int, ...]) -> Any:
        xp = self.namespace(q)
        return xp.empty(shape, dtype=q.dtype, device=q.device)

    def empty(
        self, like: Any, shape: tuple[int, ...], dtype: str, stream: int | None = None
    ) -> Any:
        """A new tensor on `like`'s device; with a stream, memory for work on that stream only."""
        xp = self.namespace(like)
        device = self.device(like)
        # As a handle, the legacy stream is also 0.
        if (
            stream is not None
            and device.type == CUDA
            and (stream or _LEGACY_STREAM) != self.current_stream(device)
        ):
            raise InvalidArgumentError(
                f"stream: this call needs workspace, which {type_name(like)} makes for its current "
                "stream alone; make this one current, or leave it None"
            )
        return xp.empty(shape, dtype=getattr(xp, dtype), device=like.device)

    def reshaped(self, tensor: Any, shape: tuple[int, ...]) -> Any:
        """The same memory in another shape; None if that needs a copy."""
        copy = None if 0 in shape else False  # empty: nothing to copy
        try:
            return self.namespace(tensor).reshape(tensor, shape, copy=copy)
        except (ValueError, BufferError, AttributeError):  # the last is array-api-strict's
            return None

    def namespace(self, like: Any, words: Words = ATTENTION) -> Any:
        if not makes_tensors(like):
            raise ArgumentTypeError(
                f"out: {type_name(like)} offers no way to make a tensor on its device; pass "
                f"{words.outputs}"
            )
        return like.__array_namespace__()


def makes_tensors(like: Any) -> bool:
    """Whether it follows the array API standard far enough to make tensors."""
    return hasattr(like, "__array_namespace__") and hasattr(like, "device")


def _rows_kept(made: Any, xp: Any) -> Any:
    """`made` from empty_like(q), unless q's repeated axes (stride 0) became the innermost ones."""
    if made.shape[-1] == 1 or made.strides[-1] == made.itemsize or made.size == 0:
        return made
    return xp.empty(made.shape, made.dtype)


class NumPy(Framework):
    def device(self, tensor: Any) -> Device:
        return Device(1, 0)

    def out(self, q: Any, shape: tuple[int, ...]) -> Any:
        import numpy

        return _rows_kept(numpy.empty_like(q, shape=shape, subok=False), numpy)

    def empty(
        self, like: Any, shape: tuple[int, ...], dtype: str, stream: int | None = None
    ) -> Any:
        import numpy

        # NumPy's bfloat16 comes from the package that made `like`, so use the dtype of `like`.
        return numpy.empty(shape, like.dtype if dtype == "bfloat16" else dtype)

    def reshaped(self, tensor: Any, shape: tuple[int, ...]) -> Any:
        import numpy

        made = numpy.reshape(tensor, shape)
        return made if numpy.may_share_memory(made, tensor) or made.size == 0 else None


def refuse_gradient(name: str, tensor: Any, words: Words) -> None:
    """Raises if torch would record the gradient of this argument."""
    import torch

    if tensor.requires_grad and torch.is_grad_enabled():
        raise InvalidArgumentError(_NO_GRADIENTS.format(name, words.name, words.gradients))


def refuse_tangent(name: str, tensor: Any, words: Words) -> None:
    """Raises if torch differentiates through this argument in forward mode."""
    if _has_tangent(tensor):
        raise InvalidArgumentError(NO_DERIVATIVE.format(name, words.name))


def _has_tangent(tensor: Any) -> bool:
    import torch

    forward_ad: Any = torch.autograd.forward_ad
    try:
        return forward_ad.unpack_dual(tensor).tangent is not None
    except RuntimeError:
        # Older versions cannot unpack inference tensors or, inside an operator, any tensor: there
        # are no tangents there.
        return False


def is_transformed(tensor: Any) -> bool:
    """Whether it is a tensor of a transform of torch.func: it looks like all others but has no
    memory."""
    import torch

    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_nested or _has_memory(tensor))
    )


def refuse_nested(name: str, tensor: Any) -> None:
    if tensor.is_nested:
        raise ArgumentTypeError(
            f"{name}: got a nested tensor, accepted is a dense one; of a jagged one values() are "
            "all rows, and scaled_dot_product_attention of flashmoe_science.torch takes it as it is"
        )


def refuse_without_memory(name: str, tensor: Any, operation: str) -> None:
    """Raises for a nested tensor, and for a tensor of a transform of torch.func."""
    refuse_nested(name, tensor)
    if is_transformed(tensor):
        raise _TransformedError(
            f"{name}: got a tensor of a transform of torch.func, accepted is one with memory: "
            f"{operation} has no derivative yet, and for torch.func.vmap there are the functions "
            "of flashmoe_science.torch"
        )


def _has_memory(tensor: Any) -> bool:
    try:
        return bool(tensor.data_ptr() != 0 or tensor.numel() == 0)
    except RuntimeError:
        return False


class Torch(Framework):
    def check(self, name: str, tensor: Any, words: Words) -> None:
        refuse_without_memory(name, tensor, words.name)
        if not words.has_gradients:
            refuse_gradient(name, tensor, words)
        refuse_tangent(name, tensor, words)
        if tensor.is_neg():
            raise InvalidArgumentError(NEGATED.format(name))

    def check_output(self, name: str, tensor: Any, words: Words) -> None:
        import torch

        refuse_gradient(name, tensor, words)
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise InvalidArgumentError(_INFERENCE.format(name))

    def finish(self, *outputs: Any) -> None:
        import torch

        for tensor in outputs:
            torch.autograd.graph.increment_version(tensor)

    def view(self, tensor: Any, stream: int | None) -> Any:
        tensor = tensor.detach()
        return tensor.__dlpack__(stream=-1) if tensor.is_cuda else tensor

    def current_stream(self, device: Device) -> int:
        import torch

        return int(torch.cuda.current_stream(device.id).cuda_stream)

    def out(self, q: Any, shape: tuple[int, ...]) -> Any:
        import torch

        return torch.empty_like(q) if q.shape == shape else q.new_empty(shape)

    def empty(
        self, like: Any, shape: tuple[int, ...], dtype: str, stream: int | None = None
    ) -> Any:
        import torch

        # Allocates while that stream is current: other free memory may still be used by work on the
        # current stream, for which this stream does not wait.
        with self.on_stream(like, stream):
            return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)

    def on_stream(self, like: Any, stream: int | None) -> Context:
        import torch

        if stream is None or not like.is_cuda or stream == self.current_stream(self.device(like)):
            return contextlib.nullcontext()
        on: Context = torch.cuda.stream(self._stream(like, stream))
        return on

    def _stream(self, like: Any, stream: int) -> Any:
        import torch

        if stream in (0, _LEGACY_STREAM):  # for 0 torch would take an ExternalStream from its pool
            return torch.cuda.default_stream(like.device)
        external_stream: Any = torch.cuda.ExternalStream
        return external_stream(stream, device=like.device)

    def reshaped(self, tensor: Any, shape: tuple[int, ...]) -> Any:
        try:
            return tensor.view(shape)
        except RuntimeError:
            return None


class CuPy(Framework):
    def device(self, tensor: Any) -> Device:
        return Device(CUDA, int(tensor.device.id))

    def check(self, name: str, tensor: Any, words: Words) -> None:
        super().check(name, tensor, words)
        if min(tensor.strides, default=0) < 0:
            # When exporting, CuPy divides byte strides by the item size as unsigned numbers.
            raise InvalidArgumentError(
                f"{name}: got a CuPy array with strides {tensor.strides} bytes; CuPy cannot export "
                f"negative strides, pass cupy.ascontiguousarray({name})"
            )

    def view(self, tensor: Any, stream: int | None) -> Any:
        return tensor.__dlpack__(stream=-1)  # launched on CuPy's own stream: nothing to wait for

    def current_stream(self, device: Device) -> int:
        import cupy

        return int(cupy.cuda.get_current_stream(device.id).ptr)

    def out(self, q: Any, shape: tuple[int, ...]) -> Any:
        import cupy

        with q.device:
            return _rows_kept(cupy.empty_like(q, shape=shape), cupy)

    def empty(
        self, like: Any, shape: tuple[int, ...], dtype: str, stream: int | None = None
    ) -> Any:
        import cupy

        with like.device, self.on_stream(like, stream):
            return cupy.empty(shape, getattr(cupy, dtype))

    def on_stream(self, like: Any, stream: int | None) -> Context:
        import cupy

        if stream is None or stream == self.current_stream(self.device(like)):
            return contextlib.nullcontext()
        on: Context = cupy.cuda.ExternalStream(stream, like.device.id)
        return on

    def reshaped(self, tensor: Any, shape: tuple[int, ...]) -> Any:
        made = tensor.reshape(shape)
        return made if made.data.ptr == tensor.data.ptr or made.size == 0 else None


NUMPY = NumPy("numpy")
_TORCH = Torch("torch")
_CUPY = CuPy("cupy")


def type_name(tensor: object) -> str:
    kind = type(tensor)
    name = kind.__qualname__
    return name if kind.__module__ == "builtins" else f"{kind.__module__}.{name}"


JAX = Framework("jax")  # flashmoe_science.jax and _moe serve it; only its name is used

_KNOWN = (
    (NUMPY, "numpy", "ndarray"),
    (_TORCH, "torch", "Tensor"),
    (_CUPY, "cupy", "ndarray"),
)


@functools.lru_cache(maxsize=64)
def _framework_of_type(kind: Any) -> Framework | None:
    for framework, module, name in _KNOWN:
        # The tensor's maker has imported its module, so nothing is imported here.
        base = getattr(sys.modules.get(module), name, None)
        if base is not None and issubclass(kind, base):
            return framework
    root = kind.__module__.partition(".")[0]
    if root in ("jax", "jaxlib"):  # arrays, and the tracers that stand for them
        return JAX
    if hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
        return Framework(root)
    return None


def framework_of(name: str, tensor: Any) -> Framework:
    """The framework of a tensor. Raises a TypeError for other objects."""
    framework = _framework_of_type(tensor.__class__)
    if framework is None:
        raise ArgumentTypeError(
            f"{name}: got {type_name(tensor)}, accepted is a tensor of NumPy, torch, JAX or CuPy, "
            "or an object with __dlpack__"
        )
    return framework


def on_stream(like: Any, stream: int | None) -> Context:
    """See Framework.on_stream; does nothing for an unknown framework."""
    framework = _framework_of_type(like.__class__)
    return contextlib.nullcontext() if framework is None else framework.on_stream(like, stream)


def is_jax(tensor: Any) -> bool:
    """Whether this is a JAX array, or a tracer that stands for one."""
    return _framework_of_type(tensor.__class__) is JAX


def common_framework(tensors: dict[str, Any], words: Words = ATTENTION) -> Framework:
    """The framework of all of these."""
    first_name, first = next(iter(tensors.items()))
    framework = framework_of(first_name, first)
    if framework is NUMPY and any(map(is_jax, tensors.values())):
        framework = JAX
    # If new tensors are NumPy's, these may include an earlier call's results. Among JAX arrays,
    # NumPy arrays are constants, as in JAX's own functions.
    also = NUMPY if framework is JAX or is_dlpack_alone(framework, first) else framework
    for name, tensor in tensors.items():
        other = framework_of(name, tensor)
        if other not in (framework, also) and other.name != framework.name:
            raise ArgumentTypeError(
                f"{name}: got {type_name(tensor)}, but {first_name} is {type_name(first)}; "
                f"{words.tensors} must come from one framework"
            )
        framework.check(name, tensor, words)
    return framework


def is_dlpack_alone(framework: Framework, tensor: Any) -> bool:
    """Whether it is in host memory and has DLPack but nothing else."""
    return (
        type(framework) is Framework
        and framework is not JAX
        and not makes_tensors(tensor)
        and framework.device(tensor).type == CPU
    )


def workspace(like: Any, size: int, stream: int) -> Any:
    """Memory on `like`'s device for work on a stream that is not its framework's current one."""
    return framework_of("workspace", like).empty(like, (size,), "uint8", stream)


def through_numpy(arguments: dict[str, Any], words: Words = ATTENTION) -> dict[str, Any]:
    """Views, perhaps read-only, of CPU objects that have DLPack and nothing else."""
    import numpy

    made = {}
    for name, tensor in arguments.items():
        _core.check_readable(name, tensor)
        try:
            made[name] = numpy.from_dlpack(tensor)
        except (BufferError, RuntimeError) as error:
            raise ArgumentTypeError(
                f"{name}: {type_name(tensor)} offers DLPack alone, and NumPy cannot hold it "
                f"({error}); pass {words.outputs}"
            ) from error
    return made


class _Unlocked:
    """The memory of a NumPy array, for writing."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = array.__array_interface__ | {"data": (array.ctypes.data, False)}
        self._array = array  # owns the memory


def output_through_numpy(name: str, tensor: Any, words: Words) -> Any:
    """The same for an output. Raises if it is read-only."""
    import numpy

    _core.check_writable(name, tensor)
    made = through_numpy({name: tensor}, words)[name]
    # An old capsule does not tell whether it is read-only, so NumPy assumes that it is.
    return made if made.flags.writeable else numpy.asarray(_Unlocked(made))


def tables_and_bounds(sequences: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The given tables and bounds of ragged, padded and paged batches, by name."""
    from flashmoe_science.attention import BOUNDS, NO_SEQUENCES, SEQUENCES

    tables = {
        name: value
        for name, value in zip(SEQUENCES, sequences or NO_SEQUENCES, strict=True)
        if value is not None
    }
    bounds = {name: tables.pop(name) for name in SEQUENCES[-BOUNDS:] if name in tables}
    return tables, bounds


def flash_attention(
    tensors: dict[str, Any],
    options: dict[str, Any],
    outputs: dict[str, Any],
    stream: Any,
    sequences: Any = None,
) -> Any:
    """The native flash_attention calls this with everything by name, and only with outputs and
    optional tensors that are given; only `sequences` may be None."""
    tables, bounds = tables_and_bounds(sequences)
    given = tensors | tables | outputs
    framework = common_framework(given)
    for name, tensor in outputs.items():
        framework.check_output(name, tensor, ATTENTION)
    return_lse = options["return_lse"]
    if framework is JAX:
        from flashmoe_science import jax

        return jax.flash_attention(tensors | tables, options | bounds, outputs, stream)
    if isinstance(framework, Torch):
        from flashmoe_science import _autograd

        if _autograd.is_handled(**tensors):
            optional = ("sinks", "out", "lse", "prior_out", "prior_lse")
            given = dict.fromkeys(optional) | tensors | outputs
            return _autograd.flash_attention(**given, **options, stream=stream, sequences=sequences)

    of_out = "prior_out" if "prior_out" in tensors else "q"
    like = tensors[of_out]
    device = framework.device(tensors["q"])
    missing = "out" not in outputs or (return_lse and "lse" not in outputs)
    if missing and type(framework) is Framework and not makes_tensors(like):
        if device.type == CUDA:
            framework.namespace(like)  # raises: there is no way to allocate
        like = through_numpy({of_out: like})[of_out]
        framework = NUMPY

    handle = _core.stream_handle(stream)
    if handle is None and device.type == CUDA:
        handle = framework.current_stream(device)

    def allocate(name: str, shape: tuple[int, ...], dtype: str) -> Any:
        if name == "out":
            given[name] = framework.out(like, shape)
        else:
            alone = handle if name == "workspace" else None
            given[name] = framework.empty(like, shape, dtype, alone)
        return framework.view(given[name], handle)

    views = {name: framework.view(tensor, handle) for name, tensor in given.items()}
    _core.call("attention_forward", views, options | bounds, allocate, handle)
    framework.finish(*outputs.values())
    return (given["out"], given["lse"]) if return_lse else given["out"]


def flash_attention_backward(
    tensors: dict[str, Any],
    options: dict[str, Any],
    outputs: dict[str, Any],
    stream: Any,
    sequences: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """The same for flash_attention_backward, with `wanted` among the options."""
    tables, bounds = tables_and_bounds(sequences)
    given = tensors | tables | outputs
    framework = common_framework(given, ATTENTION_BACKWARD)
    if framework is JAX:
        from flashmoe_science import jax

        return jax.flash_attention_backward(tensors | tables, options | bounds, outputs, stream)
    for name, tensor in outputs.items():
        framework.check_output(name, tensor, ATTENTION_BACKWARD)
    like = {"dq": tensors["q"], "dk": tensors["k"], "dv": tensors["v"]}
    if "sinks" in tensors:
        like["dsinks"] = tensors["sinks"]
    device = framework.device(like["dq"])
    if type(framework) is Framework and not makes_tensors(like["dq"]) and len(outputs) < len(like):
        if device.type == CUDA:
            framework.namespace(like["dq"], ATTENTION_BACKWARD)  # raises: no way to allocate
        like = through_numpy(like, ATTENTION_BACKWARD)
        framework = NUMPY

    handle = _core.stream_handle(stream)
    if handle is None and device.type == CUDA:
        handle = framework.current_stream(device)

    def allocate(name: str, shape: tuple[int, ...], dtype: str) -> Any:
        if name in like:
            given[name] = framework.out(like[name], shape)
        elif type(framework) is Framework and not makes_tensors(like["dq"]):
            raise ArgumentTypeError(
                f"dout: this call needs {shape[0]} bytes of workspace, but "
                f"{type_name(like['dq'])} offers no way to make a tensor on its device"
            )
        else:
            given[name] = framework.empty(like["dq"], shape, dtype, handle)
        return framework.view(given[name], handle)

    views = {name: framework.view(tensor, handle) for name, tensor in given.items()}
    _core.call("attention_backward", views, options | bounds, allocate, handle)
    framework.finish(*outputs.values())
    return given.get("dq"), given.get("dk"), given.get("dv"), given.get("dsinks")
