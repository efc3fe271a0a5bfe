"""Causal attention for NumPy through C of our own, which links libflashmoe."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt

_attend = ctypes.CDLL(str(next(Path(__file__).parent.glob("*attend.so")))).attend
_array = np.ctypeslib.ndpointer(np.float32, ndim=4, flags="C_CONTIGUOUS")
_attend.argtypes = [_array] * 4 + [np.ctypeslib.ndpointer(np.int64)]
_attend.restype = ctypes.c_char_p


def attend(
    q: npt.NDArray[np.float32], k: npt.NDArray[np.float32], v: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Attention of `[batch, seq, heads, dim]` fp32 arrays, all of one shape.

    Raises:
        ValueError: With the library's sentence.
    """
    if not q.shape == k.shape == v.shape:
        raise ValueError(f"q, k, v: got shapes {q.shape}, {k.shape}, {v.shape}, accepted is one")
    out = np.empty_like(q)
    sentence = _attend(q, k, v, out, np.array(q.shape, np.int64))
    if sentence is not None:
        raise ValueError(sentence.decode())
    return out
