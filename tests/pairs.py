"""Random biases and masks of pairs of a query and a key, for tests of attention with them."""

from __future__ import annotations

from typing import Any

import numpy as np

BIASES = ("none", "q", "fp32")
AXES = "bhqk"  # batch, heads, queries, keys
BROADCASTS = ("", "b", "h", "bh", "q", "bhq", "k", "bhk", "bhqk")
"""The axes along which one number stands for all."""


def extents(full: tuple[int, ...], one: str) -> tuple[int, ...]:
    return tuple(1 if axis in one else n for axis, n in zip(AXES, full, strict=True))


def as_given(x: np.ndarray, full: tuple[int, ...], how: str) -> np.ndarray:
    """The same numbers as an array of extents of 1, of strides of 0, or with gaps between them."""
    if how == "ones":
        return x
    if how == "strides":
        return np.broadcast_to(x, full)
    spread = np.empty(tuple(2 * n for n in x.shape), x.dtype)  # every second along each axis
    spread[...] = 0
    view = spread[tuple(slice(1, None, 2) for _ in x.shape)]
    view[...] = x
    return view


def random_bias(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any], *, hidden: float = 0.2
) -> np.ndarray:
    """Normal numbers, some of them large, and some -inf."""
    x = rng.standard_normal(shape)
    x = np.where(rng.random(shape) < 0.05, -60.0, x)
    return np.where(rng.random(shape) < hidden, -np.inf, x).astype(dtype)


def random_mask(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = np.bool_, *, hidden: float = 0.4
) -> np.ndarray:
    """In uint8, any number but 0 lets a key be seen."""
    seen = rng.random(shape) >= hidden
    return seen if dtype == np.bool_ else (seen * rng.integers(1, 256, shape)).astype(np.uint8)
