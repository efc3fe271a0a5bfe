"""Tensors of a mixture of experts that are like a trained model's: who is liked, and how much."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.moe_shapes import MoeShape

_VARIANTS = 20  # as many as there are calls in a CUDA graph (timing.py)
_VARIANT_TOKENS = 8192  # of all variants together, so that they cost little memory
_REDRAWS = 64


@dataclasses.dataclass(frozen=True)
class MoeInputs:
    """One layer's tensors.

    Attributes:
        x: [T, H], standard normal.
        w_gate_up: [E, 2I, H], gate rows first, normal with variance 1 / H.
        w_down: [E, H, I], normal with variance 1 / I.
        logits: Of the router, each [T, E]: the first is what outputs are checked by, and calls in
            a row take one after the other. With few tokens each choice wakes other experts, so
            that weights come from memory even where calls follow on each other.
    """

    x: Any
    w_gate_up: Any
    w_down: Any
    logits: tuple[Any, ...]

    def rotation(self, call: Callable[[Any], Any]) -> Callable[[], Any]:
        """`call` of one logits after the other, from the first on."""
        following = itertools.cycle(self.logits)
        return lambda: call(next(following))


def make_moe_inputs(arrays: Arrays, shape: MoeShape, seed: int = 0) -> MoeInputs:
    """The same for the same seed. No token's K-th logit equals its next: which experts it has does
    not hang on how ties are broken."""
    h, i, e = shape.hidden, shape.inner, shape.experts
    x = arrays.normal((shape.tokens, h), shape.dtype, 4 * seed)
    w_gate_up = arrays.normal((e, 2 * i, h), shape.dtype, 4 * seed + 1)
    w_gate_up *= 1 / math.sqrt(h)
    w_down = arrays.normal((e, h, i), shape.dtype, 4 * seed + 2)
    w_down *= 1 / math.sqrt(i)
    count = max(1, min(_VARIANTS, _VARIANT_TOKENS // shape.tokens))
    seeds = ((4 * seed + 3) * 2**20 + 2 * variant * _REDRAWS for variant in range(count))
    return MoeInputs(x, w_gate_up, w_down, tuple(make_logits(arrays, shape, s) for s in seeds))


def make_logits(arrays: Arrays, shape: MoeShape, seed: int) -> Any:
    """[T, E] in the shape's dtype. By Gumbel's trick the K greatest of log p + noise are drawn
    without replacement with weights p; which expert has which rank is drawn once a seed."""
    liking = [-shape.skew * math.log(rank + 1) for rank in range(shape.experts)]
    ranks = arrays.stable_order(arrays.gumbel((shape.experts,), seed + _REDRAWS))
    preference = arrays.cast(arrays.array(liking), "fp32")[ranks]
    logits = arrays.cast(
        preference + arrays.gumbel((shape.tokens, shape.experts), seed), shape.dtype
    )
    for redraw in range(1, _REDRAWS):
        tied = _tied(arrays, logits, shape.top_k)
        count = int(tied.sum())
        if count == 0:
            break
        noise = arrays.gumbel((count, shape.experts), seed + redraw)
        logits[tied] = arrays.cast(preference + noise, shape.dtype)
    return logits


def _tied(arrays: Arrays, logits: Any, top_k: int) -> Any:
    """[T], whether the K-th greatest logit of a token equals the one behind it."""
    if top_k == logits.shape[-1]:
        return arrays.xp.zeros_like(logits[:, 0]) != 0
    ordered = arrays.sorted_down(arrays.cast(logits, "fp32"))
    return ordered[:, top_k - 1] == ordered[:, top_k]
