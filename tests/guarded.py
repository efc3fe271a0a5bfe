"""Arrays next to pages that the process may not touch."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)


def between_guards(array: np.ndarray, at_end: bool) -> np.ndarray:
    """A copy that begins, or ends, at such a page; its axes lie in the same order in memory."""
    page = mmap.PAGESIZE
    pages = -(-array.nbytes // page)
    region = mmap.mmap(-1, (pages + 2) * page)
    raw = np.frombuffer(region, np.uint8)
    for guard in (raw.ctypes.data, raw.ctypes.data + (pages + 1) * page):
        assert _libc.mprotect(ctypes.c_void_p(guard), page, _PROT_NONE) == 0
    begin = (pages + 1) * page - array.nbytes if at_end else page
    order = np.argsort([-stride for stride in array.strides], kind="stable")
    shape = [array.shape[axis] for axis in order]
    copy = raw[begin : begin + array.nbytes].view(array.dtype).reshape(shape)
    copy = copy.transpose(np.argsort(order))
    copy[...] = array
    return copy
