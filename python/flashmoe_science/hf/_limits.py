"""What our operations take of any layer: devices, dtypes, sizes."""

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

# A model is right: where its tensors are refused (rows begin at odd addresses, say), it is a limit
# of ours.
REFUSALS = (InvalidArgumentError, UnsupportedError)


def not_ours(tensors: tuple[torch.Tensor, ...]) -> str:
    """Why no operation of ours takes these, "" when it does."""
    first = tensors[0]
    kind = first.device.type
    if kind not in _DTYPES or (kind == "cuda" and operators.cuda_devices() == 0):
        return f"tensors are on {first.device}"
    if any(t.dtype not in _DTYPES[kind] or t.dtype != first.dtype for t in tensors):
        found = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))
        return f"tensors are of {found} on {kind}"
    return ""
