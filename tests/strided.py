"""Arrays of any strides, and hypothesis' choice among them."""

from __future__ import annotations

import numpy as np
from capi import normal
from hypothesis import strategies as st


def strided(
    rng: np.random.Generator,
    shape: tuple[int, int, int, int],
    dtype: np.dtype,
    order: tuple[int, int, int],
    flip: tuple[bool, bool, bool],
    repeat: tuple[bool, bool, bool],
    gap: int,
) -> np.ndarray:
    """A view of `shape` whose first three axes lie in memory in any order, run backwards, repeat
    one element (stride 0), and whose rows are `gap` 16-byte blocks apart."""
    stored = [1 if repeat[axis] else shape[axis] for axis in order]
    row = shape[3] + gap * 16 // dtype.itemsize
    array = normal(rng, (*stored, row), dtype)[..., : shape[3]]
    array = array.transpose(*np.argsort(order), 3)
    for axis in range(3):
        if flip[axis]:
            array = np.flip(array, axis)
    return np.broadcast_to(array, shape) if any(repeat) else array


axes = st.permutations([0, 1, 2]).map(tuple)
flags = st.tuples(st.booleans(), st.booleans(), st.booleans())
never = st.just((False, False, False))
views = st.tuples(axes, flags, flags, st.integers(0, 2))
output_views = st.tuples(axes, flags, never, st.integers(0, 2))
