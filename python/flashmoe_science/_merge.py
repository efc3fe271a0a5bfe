"""merge_states for tensors whose type has no DLPack exchange API: see _dispatch.

The native function calls this one with everything by name, and only with optional tensors that are
given.
"""

from __future__ import annotations

from typing import Any

from flashmoe_science import _core, _dispatch
from flashmoe_science._dispatch import NUMPY, Framework, Words
from flashmoe_science._dtypes import CUDA
from flashmoe_science.errors import ArgumentTypeError

WORDS = Words(
    "the merge of attention states", "all tensors of a call", "out, and lse with return_lse"
)


def merge_states(
    tensors: dict[str, Any], options: dict[str, Any], outputs: dict[str, Any], stream: Any
) -> Any:
    framework = _dispatch.common_framework(tensors | outputs, WORDS)
    return_lse = options["return_lse"]
    if framework is _dispatch.JAX:
        from flashmoe_science import jax

        return jax.merge_states(tensors, options, outputs, stream)
    for name, tensor in outputs.items():
        framework.check_output(name, tensor, WORDS)

    like = tensors["outs"]
    device = framework.device(like)
    missing = "out" not in outputs or (return_lse and "lse" not in outputs)
    if missing and type(framework) is Framework and not _dispatch.makes_tensors(like):
        if device.type == CUDA:
            framework.namespace(like, WORDS)  # raises: there is no way to allocate
        like = _dispatch.through_numpy({"outs": like}, WORDS)["outs"]
        framework = NUMPY

    handle = _core.stream_handle(stream)
    if handle is None and device.type == CUDA:
        handle = framework.current_stream(device)
    given = tensors | outputs

    def allocate(name: str, shape: tuple[int, ...], dtype: str) -> Any:
        given[name] = framework.empty(
            like_of_dtype(dtype, framework, like, tensors, "out"), shape, dtype
        )
        return framework.view(given[name], handle)

    views = {name: framework.view(tensor, handle) for name, tensor in given.items()}
    _core.call("merge_states", views, options, allocate, handle)
    framework.finish(*outputs.values())
    return (given["out"], given["lse"]) if return_lse else given["out"]


def like_of_dtype(
    dtype: str, framework: Framework, like: Any, tensors: dict[str, Any], outputs: str
) -> Any:
    """The tensor next to which one of this dtype can be made: NumPy itself has no bfloat16."""
    if framework is not NUMPY or dtype != "bfloat16":
        return like
    for tensor in (like, *tensors.values()):
        if str(getattr(tensor, "dtype", "")) == "bfloat16":
            return tensor
    raise ArgumentTypeError(
        "dtype: got bfloat16, which NumPy has in the arrays of others alone, and here is none; "
        f"pass {outputs}"
    )
