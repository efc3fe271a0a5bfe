"""kv_append for tensors whose type has no DLPack exchange API: see _dispatch.

The native function calls this one with everything by name, and only with optional tensors that are
given.
"""

from __future__ import annotations

from typing import Any

from flashmoe_science import _core, _dispatch
from flashmoe_science._dispatch import NUMPY, Framework, Words
from flashmoe_science._dtypes import CUDA

WORDS = Words("appending to a cache", "all tensors of a call", "q_out, where there is a q")


def kv_append(
    tensors: dict[str, Any], options: dict[str, Any], outputs: dict[str, Any], stream: Any
) -> Any:
    framework = _dispatch.common_framework(tensors | outputs, WORDS)
    if framework is _dispatch.JAX:
        from flashmoe_science import jax

        return jax.kv_append(tensors, options, outputs, stream)
    for name, tensor in outputs.items():
        framework.check_output(name, tensor, WORDS)
    given = tensors | outputs
    q = tensors.get("q")
    device = framework.device(tensors["k"])
    missing = q is not None and "q_out" not in outputs
    if missing and type(framework) is Framework and not _dispatch.makes_tensors(q):
        if device.type == CUDA:
            framework.namespace(q, WORDS)  # raises: there is no way to allocate
        q = _dispatch.through_numpy({"q": q}, WORDS)["q"]
        framework = NUMPY

    handle = _core.stream_handle(stream)
    if handle is None and device.type == CUDA:
        handle = framework.current_stream(device)

    def allocate(name: str, shape: tuple[int, ...], dtype: str) -> Any:
        given[name] = framework.out(q, shape)
        return framework.view(given[name], handle)

    views = {name: framework.view(tensor, handle) for name, tensor in given.items()}
    _core.call("kv_append", views, options, allocate, handle)
    framework.finish(*outputs.values())
    return given.get("q_out")
