"""flash_attention for tensors whose type has no DLPack exchange API.

The fast path is native. What comes here is NumPy, CuPy, JAX, torch older than 2.10, other DLPack
objects, and GPU calls that need workspace. Each framework says how its tensors are viewed, where
new ones come from, and which stream is current.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from flashmoe_science import _core
from flashmoe_science._names import CUDA, Device
from flashmoe_science.errors import ArgumentTypeError, InvalidArgumentError

_NO_BACKWARD = (
    "{0}: requires grad, but attention has no backward pass yet; call under torch.no_grad() or "
    "pass {0}.detach()"
)
_LEGACY_STREAM = 1  # cudaStreamLegacy, which DLPack's protocol also calls 1


class Framework:
    """Tensors of the Python array API standard (2021.12 or newer), or with DLPack alone."""

    def __init__(self, name: str) -> None:
        self.name = name

    def device(self, tensor: Any) -> Device:
        kind, ordinal = tensor.__dlpack_device__()
        return Device(int(kind), int(ordinal))

    def check(self, name: str, tensor: Any) -> None:
        """Raises what only this framework knows to be wrong with an argument."""

    def view(self, tensor: Any, stream: int | None) -> Any:
        """What the native side can read: the tensor, or a DLPack capsule ordered on `stream`."""
        if self.device(tensor).type == CUDA:
            return tensor.__dlpack__(stream=stream or _LEGACY_STREAM)  # the protocol has no 0
        return tensor

    def current_stream(self, device: Device) -> int:
        return _LEGACY_STREAM

    def out(self, q: Any, shape: tuple[int, ...]) -> Any:
        xp = self._namespace(q)
        return xp.empty(shape, dtype=q.dtype, device=q.device)

    def lse(self, q: Any, shape: tuple[int, ...]) -> Any:
        xp = self._namespace(q)
        return xp.empty(shape, dtype=xp.float32, device=q.device)

    def workspace(self, q: Any, size: int, stream: int) -> Any:
        xp = self._namespace(q)
        return xp.empty((size,), dtype=xp.uint8, device=q.device)

    def _namespace(self, q: Any) -> Any:
        if not hasattr(q, "__array_namespace__"):
            raise ArgumentTypeError(
                f"out: {_type_name(q)} offers no way to make a tensor on its device; pass out, and "
                "lse with return_lse"
            )
        return q.__array_namespace__()


def _rows_kept(made: Any, xp: Any) -> Any:
    """`made` of empty_like(q), unless q's repeated axes (stride 0) have come to lie innermost."""
    if made.shape[-1] == 1 or made.strides[-1] == made.itemsize or made.size == 0:
        return made
    return xp.empty(made.shape, made.dtype)


class NumPy(Framework):
    def device(self, tensor: Any) -> Device:
        return Device(1, 0)

    def out(self, q: Any, shape: tuple[int, ...]) -> Any:
        import numpy

        return _rows_kept(numpy.empty_like(q, shape=shape, subok=False), numpy)

    def lse(self, q: Any, shape: tuple[int, ...]) -> Any:
        import numpy

        return numpy.empty(shape, numpy.float32)


class Torch(Framework):
    def check(self, name: str, tensor: Any) -> None:
        import torch

        if tensor.requires_grad and torch.is_grad_enabled():
            raise InvalidArgumentError(_NO_BACKWARD.format(name))

    def view(self, tensor: Any, stream: int | None) -> Any:
        tensor = tensor.detach()
        return tensor.__dlpack__(stream=-1) if tensor.is_cuda else tensor

    def current_stream(self, device: Device) -> int:
        import torch

        return int(torch.cuda.current_stream(device.id).cuda_stream)

    def out(self, q: Any, shape: tuple[int, ...]) -> Any:
        import torch

        return torch.empty_like(q) if q.shape == shape else q.new_empty(shape)

    def lse(self, q: Any, shape: tuple[int, ...]) -> Any:
        import torch

        return torch.empty(shape, dtype=torch.float32, device=q.device)

    def workspace(self, q: Any, size: int, stream: int) -> Any:
        import torch

        made = torch.empty(size, dtype=torch.uint8, device=q.device)
        external_stream: Any = torch.cuda.ExternalStream
        made.record_stream(external_stream(stream, device=q.device))
        return made


class CuPy(Framework):
    def device(self, tensor: Any) -> Device:
        return Device(CUDA, int(tensor.device.id))

    def check(self, name: str, tensor: Any) -> None:
        super().check(name, tensor)
        if min(tensor.strides, default=0) < 0:
            # CuPy divides byte strides by the item size as unsigned numbers when it exports them.
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

    def lse(self, q: Any, shape: tuple[int, ...]) -> Any:
        import cupy

        with q.device:
            return cupy.empty(shape, cupy.float32)

    def workspace(self, q: Any, size: int, stream: int) -> Any:
        import cupy

        with q.device, cupy.cuda.ExternalStream(stream, q.device.id):
            return cupy.empty(size, cupy.uint8)


_NUMPY = NumPy("numpy")
_TORCH = Torch("torch")
_CUPY = CuPy("cupy")


def _type_name(tensor: object) -> str:
    kind = type(tensor)
    name = kind.__qualname__
    return name if kind.__module__ == "builtins" else f"{kind.__module__}.{name}"


_JAX = Framework("jax")  # served by flashmoe_science.jax; only its name is used

_KNOWN = (
    (_NUMPY, "numpy", "ndarray"),
    (_TORCH, "torch", "Tensor"),
    (_CUPY, "cupy", "ndarray"),
)


@functools.lru_cache(maxsize=64)
def _framework_of_type(kind: Any) -> Framework | None:
    for framework, module, name in _KNOWN:
        # Whoever made the tensor has imported its module; nothing is imported here.
        base = getattr(sys.modules.get(module), name, None)
        if base is not None and issubclass(kind, base):
            return framework
    root = kind.__module__.partition(".")[0]
    if root in ("jax", "jaxlib"):  # arrays, and the tracers that stand for them
        return _JAX
    if hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__"):
        return Framework(root)
    return None


def framework_of(name: str, tensor: Any) -> Framework:
    """Raises TypeError for what is no tensor."""
    framework = _framework_of_type(tensor.__class__)
    if framework is None:
        raise ArgumentTypeError(
            f"{name}: got {_type_name(tensor)}, accepted is a tensor of NumPy, torch, JAX or CuPy, "
            "or an object with __dlpack__"
        )
    return framework


def is_jax(tensor: Any) -> bool:
    """Whether this is a JAX array, or a tracer that stands for one."""
    return _framework_of_type(tensor.__class__) is _JAX


def common_framework(tensors: dict[str, Any]) -> Framework:
    """The framework of all of these, which begin with q."""
    q = tensors["q"]
    framework = framework_of("q", q)
    for name, tensor in tensors.items():
        other = framework_of(name, tensor)
        if other is not framework and other.name != framework.name:
            raise ArgumentTypeError(
                f"{name}: got {_type_name(tensor)}, but q is {_type_name(q)}; q, k, v, out and lse "
                "must come from one framework"
            )
        framework.check(name, tensor)
    return framework


def _through_numpy(arguments: dict[str, Any]) -> dict[str, Any]:
    """Views of CPU objects that have DLPack and nothing else."""
    import numpy

    made = {}
    for name, tensor in arguments.items():
        try:
            made[name] = numpy.from_dlpack(tensor)
        except (BufferError, RuntimeError) as error:
            raise ArgumentTypeError(
                f"{name}: {_type_name(tensor)} offers DLPack alone, and NumPy cannot hold it "
                f"({error}); pass out, and lse with return_lse"
            ) from error
    return made


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
    """flash_attention, called by the native one with all of its arguments."""
    given = {"q": q, "k": k, "v": v}
    if out is not None:
        given["out"] = out
    if lse is not None:
        given["lse"] = lse
    framework = common_framework(given)
    if framework is _JAX:
        from flashmoe_science import jax

        return jax.flash_attention(
            q, k, v, causal, window, scale, softcap, layout, return_lse, out, lse, kernel, stream
        )

    device = framework.device(q)
    missing = out is None or (return_lse and lse is None)
    if missing and type(framework) is Framework and not hasattr(q, "__array_namespace__"):
        if device.type == CUDA:
            framework._namespace(q)  # raises: there is no way to allocate
        given, framework = _through_numpy(given), _NUMPY
    if missing:
        q, v = given["q"], given["v"]
        if len(q.shape) == 4 and len(v.shape) == 4:  # else the library says what is wrong
            b, s, h = q.shape[:3] if layout != "bhsd" else (q.shape[0], q.shape[2], q.shape[1])
            given.setdefault("out", framework.out(q, (*q.shape[:3], v.shape[3])))
            if return_lse:
                given.setdefault("lse", framework.lse(q, (b, h, s)))

    handle = _core.stream_handle(stream)
    if handle is None and device.type == CUDA:
        handle = framework.current_stream(device)

    def call(workspace: Any) -> int:
        views = {name: framework.view(tensor, handle) for name, tensor in given.items()}
        return _core.attention_forward(
            views["q"],
            views["k"],
            views["v"],
            views.get("out"),
            views.get("lse"),
            causal=causal,
            window=window,
            scale=scale,
            softcap=softcap,
            layout=layout,
            kernel=kernel,
            workspace=workspace,
            stream=handle,
        )

    needed = call(None)
    if needed > 0:
        assert handle is not None
        workspace = framework.workspace(q, needed, handle)
        call(framework.view(workspace, handle))
    return (given["out"], given["lse"]) if return_lse else given["out"]
