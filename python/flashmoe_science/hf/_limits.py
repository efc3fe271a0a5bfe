"""What our operations take for any layer: devices, dtypes, sizes."""

from __future__ import annotations

import torch

from flashmoe_science.errors import InvalidArgumentError, UnsupportedError
from flashmoe_science.torch import operators

_DTYPES = {
    "cpu": (torch.float32, torch.float16, torch.bfloat16),
    "cuda": (torch.float16, torch.bfloat16),
}
EXTENT_MULTIPLE = 8  # of head dimensions, hidden and inner sizes
MOST_DIM = 256  # of a head

# Models are assumed correct: if their tensors are refused (misaligned rows, for example), the limit
# is ours.
REFUSALS = (InvalidArgumentError, UnsupportedError)


def is_traced_by_jit() -> bool:
    """Whether torch.jit.trace records the operations of torch, and so not what our kernels write
    through pointers."""
    if torch.compiler.is_compiling():
        return False
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return tracing


def not_ours(tensors: tuple[torch.Tensor, ...]) -> str:
    """Why our operations do not take these, "" if they do."""
    if is_traced_by_jit():
        return "the call is traced by torch.jit"
    first = tensors[0]
    kind = first.device.type
    if kind not in _DTYPES or (kind == "cuda" and operators.cuda_devices() == 0):
        return f"tensors are on {first.device}"
    if any(t.dtype not in _DTYPES[kind] or t.dtype != first.dtype for t in tensors):
        found = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))
        return f"tensors are of {found} on {kind}"
    return ""
