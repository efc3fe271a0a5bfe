"""Tensors somewhere inside a larger buffer, with poison all around them.

Whatever reads past a view reads NaN, and whatever writes past one is found by `Placed.intact`.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import capi
import numpy as np
import torch

MOST_WORKSPACE = 16 << 20  # bytes, of attention
_GUARD = 512  # elements before and after, a multiple of 16 bytes
# NaNs that no arithmetic makes.
_POISON = {2: (torch.int16, 0x7FA5), 4: (torch.int32, 0x7FA5A5A5),
           8: (torch.int64, 0x7FF4A5A5A5A5A5A5)}  # fmt: skip
_DTYPE_CODES = {torch.float16: 2, torch.bfloat16: 4, torch.float32: 2, torch.int32: 0,
                torch.int64: 0}  # fmt: skip


def to_torch(x: np.ndarray, device: str = "cuda:0") -> torch.Tensor:
    if str(x.dtype) == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(x).to(device)


def to_numpy(x: torch.Tensor, dtype: np.dtype) -> np.ndarray:
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.int16).cpu().numpy().view(dtype)
    return x.cpu().numpy()


def bits(x: torch.Tensor) -> torch.Tensor:
    """The tensor's elements as integers: NaN equals NaN, and -0 differs from 0."""
    return x.view(_POISON[x.element_size()][0])


def poisoned(count: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    buffer = torch.empty(count, dtype=dtype, device=device)
    bits(buffer).fill_(_POISON[buffer.element_size()][1])
    return buffer


@dataclass(frozen=True)
class Placement:
    """Where the axes of a tensor lie in memory.

    order: Axes from the outermost in memory to the innermost.
    gaps: Elements left free after each axis, in that order.
    offset: Elements before the first.
    broadcast: Axes whose entries are all one and the same (stride 0).
    flipped: Axes that run backwards (negative stride): for the C ABI, torch has none.
    """

    order: tuple[int, ...]
    gaps: tuple[int, ...]
    offset: int = 0
    broadcast: tuple[int, ...] = ()
    flipped: tuple[int, ...] = ()


def contiguous(rank: int) -> Placement:
    return Placement(tuple(range(rank)), (0,) * rank)


@dataclass
class Placed:
    """A tensor in its buffer. `view` has no negative strides; `logical` is what a callee sees."""

    buffer: torch.Tensor
    view: torch.Tensor
    flipped: tuple[int, ...]
    before: torch.Tensor | None = None

    @property
    def logical(self) -> torch.Tensor:
        return self.view.flip(self.flipped) if self.flipped else self.view

    def remember(self) -> None:
        """Keeps a copy of the whole buffer for `intact`."""
        self.before = self.buffer.clone()

    def intact(self, *, inside: bool = False) -> bool:
        """Whether nothing outside the view has changed since; `inside` as well, if wanted."""
        assert self.before is not None
        if not inside:
            shape, strides = self.view.shape, self.view.stride()
            self.before.as_strided(shape, strides, self.view.storage_offset()).copy_(self.view)
        return torch.equal(bits(self.before), bits(self.buffer))

    def raw(self) -> capi.Tensor:
        """The view for the C ABI, negative strides and all."""
        shape, strides = list(self.view.shape), list(self.view.stride())
        first = self.view.data_ptr()
        if self.view.numel():
            for axis in self.flipped:
                first += (shape[axis] - 1) * strides[axis] * self.view.element_size()
                strides[axis] = -strides[axis]
        return raw_tensor(self.view, first, shape, strides)


def raw_tensor(
    keep: torch.Tensor, data: int, shape: Sequence[int], strides: Sequence[int]
) -> capi.Tensor:
    """A flashmoe_tensor of `keep`'s dtype and device."""
    made = capi.Tensor()
    made.data = data
    made.ndim = len(shape)
    made.shape = (c.c_int64 * len(shape))(*shape)
    made.strides = (c.c_int64 * len(shape))(*strides)
    made.dtype = capi.DType(_DTYPE_CODES[keep.dtype], 8 * keep.element_size(), 1)
    made.device = (
        capi.Device(capi.CUDA, keep.device.index) if keep.is_cuda else capi.Device(capi.CPU, 0)
    )
    made.keep = keep
    return made


def place(
    shape: Iterable[int], dtype: torch.dtype, device: str, placement: Placement | None = None
) -> Placed:
    """A tensor of this shape in a poisoned buffer; nothing is written to it."""
    shape = list(shape)
    placement = placement or contiguous(len(shape))
    stored = [1 if axis in placement.broadcast else n for axis, n in enumerate(shape)]
    strides = [0] * len(shape)
    step = 1
    for axis, gap in zip(reversed(placement.order), reversed(placement.gaps), strict=True):
        strides[axis] = step
        step = step * stored[axis] + gap
    first = _GUARD + placement.offset
    buffer = poisoned(first + max(step, 0) + _GUARD, dtype, device)
    view = buffer.as_strided(stored, strides, first).expand(shape)
    return Placed(buffer, view, placement.flipped)


def place_values(values: torch.Tensor, placement: Placement | None = None) -> Placed:
    """`values` in a poisoned buffer; along broadcast axes, the first entry everywhere."""
    placed = place(values.shape, values.dtype, str(values.device), placement)
    stored = values
    target = placed.view
    for axis in placement.broadcast if placement else ():
        stored, target = stored.narrow(axis, 0, 1), target.narrow(axis, 0, 1)
    if stored.numel():
        target.copy_(stored.flip(placed.flipped) if placed.flipped else stored)
    return placed


def call(
    q: capi.Tensor,
    k: capi.Tensor,
    v: capi.Tensor,
    out: capi.Tensor,
    lse: capi.Tensor | None,
    *,
    layout: str = "bshd",
    causal: str = "none",
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: capi.Tensor | None = None,
    kernel: str | None = None,
) -> None:
    """flashmoe_attention_forward on torch's current stream. Raises capi.FlashmoeError."""
    lib = capi.load()
    params = capi.AttentionForwardParams(struct_size=c.sizeof(capi.AttentionForwardParams))
    views = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "sinks": sinks}
    for name, view in views.items():
        if view is not None:
            setattr(params, name, c.pointer(view))
    params.layout = capi.LAYOUTS[layout]
    params.causal = capi.CAUSAL[causal]
    capi.set_window(params, window)
    params.scale = scale or 0.0
    params.softcap = softcap or 0.0
    params.kernel = kernel.encode() if kernel else None
    size = c.c_size_t()
    capi.check(lib.flashmoe_attention_forward_workspace_size(params, size), lib)
    assert size.value <= MOST_WORKSPACE
    device = q.keep.device
    workspace = torch.full((size.value,), 255, dtype=torch.uint8, device=device)  # NaN
    stream = torch.cuda.current_stream(device).cuda_stream if q.keep.is_cuda else None
    status = lib.flashmoe_attention_forward(params, workspace.data_ptr(), size.value, stream)
    capi.check(status, lib)
