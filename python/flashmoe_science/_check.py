"""check_sequences for tensors whose type has no DLPack exchange API: see _dispatch.

The native function calls this one with everything by name, and only with optional tensors that are
given; only `sequences` may be None.
"""

from __future__ import annotations

from typing import Any

from flashmoe_science import _core, _dispatch
from flashmoe_science._dispatch import NUMPY, Framework, Words, tables_and_bounds
from flashmoe_science._dtypes import CUDA

WORDS = Words("the check of sequences", "all tensors of a call", "status")


def check_sequences(
    tensors: dict[str, Any],
    options: dict[str, Any],
    outputs: dict[str, Any],
    stream: Any,
    sequences: Any,
) -> Any:
    tables, bounds = tables_and_bounds(sequences)
    given = tensors | tables | outputs
    framework = _dispatch.common_framework(given, WORDS)
    if framework is _dispatch.JAX:
        from flashmoe_science import jax

        return jax.check_sequences(tensors | tables, options | bounds, outputs, stream)
    for name, tensor in outputs.items():
        framework.check_output(name, tensor, WORDS)

    like = tensors["q"]
    device = framework.device(like)
    missing = "status" not in outputs
    if missing and type(framework) is Framework and not _dispatch.makes_tensors(like):
        if device.type == CUDA:
            framework.namespace(like, WORDS)  # raises: there is no way to allocate
        like = _dispatch.through_numpy({"q": like}, WORDS)["q"]
        framework = NUMPY

    handle = _core.stream_handle(stream)
    if handle is None and device.type == CUDA:
        handle = framework.current_stream(device)

    def allocate(name: str, shape: tuple[int, ...], dtype: str) -> Any:
        given[name] = framework.empty(like, shape, dtype)
        return framework.view(given[name], handle)

    views = {name: framework.view(tensor, handle) for name, tensor in given.items()}
    _core.call("check_sequences", views, options | bounds, allocate, handle)
    framework.finish(*outputs.values())
    return given["status"]
