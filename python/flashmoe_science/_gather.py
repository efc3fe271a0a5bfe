"""kv_gather for tensors whose type has no DLPack exchange API: see _dispatch.

The native function calls this one with everything by name, and only with optional tensors that are
given.
"""

from __future__ import annotations

from typing import Any

from flashmoe_science import _core, _dispatch
from flashmoe_science._dispatch import NUMPY, Framework, Words
from flashmoe_science._dtypes import CUDA
from flashmoe_science._merge import like_of_dtype

WORDS = Words(
    "gathering from a cache", "all tensors of a call", "k, and v where there is a v_cache"
)


def kv_gather(
    tensors: dict[str, Any], options: dict[str, Any], outputs: dict[str, Any], stream: Any
) -> Any:
    framework = _dispatch.common_framework(tensors | outputs, WORDS)
    if framework is _dispatch.JAX:
        from flashmoe_science import jax

        return jax.kv_gather(tensors, options, outputs, stream)
    for name, tensor in outputs.items():
        framework.check_output(name, tensor, WORDS)

    like = tensors["k_cache"]
    device = framework.device(like)
    wanted = {"k", "v"} if "v_cache" in tensors else {"k"}
    missing = not wanted <= outputs.keys()
    if missing and type(framework) is Framework and not _dispatch.makes_tensors(like):
        if device.type == CUDA:
            framework.namespace(like, WORDS)  # raises: there is no way to allocate
        like = _dispatch.through_numpy({"k_cache": like}, WORDS)["k_cache"]
        framework = NUMPY

    handle = _core.stream_handle(stream)
    if handle is None and device.type == CUDA:
        handle = framework.current_stream(device)
    given = tensors | outputs

    def allocate(name: str, shape: tuple[int, ...], dtype: str) -> Any:
        beside = like_of_dtype(dtype, framework, like, given, "k and v")
        given[name] = framework.empty(beside, shape, dtype)
        return framework.view(given[name], handle)

    views = {name: framework.view(tensor, handle) for name, tensor in given.items()}
    _core.call("kv_gather", views, options, allocate, handle)
    framework.finish(*outputs.values())
    return (given["k"], given["v"]) if "v" in given else given["k"]
