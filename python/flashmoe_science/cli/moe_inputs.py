"""Tensors of a mixture of experts like a trained model's, with some experts more popular than
others."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

from flashmoe_science.cli.arrays import Arrays
from flashmoe_science.cli.moe_shapes import MoeShape

_VARIANTS = 20  # as many as there are calls in a CUDA graph (timing.py)
_VARIANT_TOKENS = 8192  # in all variants together, so that they take little memory
_REDRAWS = 64


@dataclasses.dataclass(frozen=True)
class MoeInputs:
    """One layer's tensors.

    Attributes:
        x: [T, H], standard normal.
        w_gate_up: [E, 2I, H], gate rows first, normal with variance 1 / H.
        w_down: [E, H, I], normal with variance 1 / I.
        logits: The router's logits, each [T, E]. Outputs are checked with the first; consecutive
            calls take one after another. With few tokens each choice uses other experts, so that
            weights come from memory even in consecutive calls.
    """

    x: Any
    w_gate_up: Any
    w_down: Any
    logits: tuple[Any, ...]

    def rotation(self, call: Callable[[Any], Any]) -> Callable[[], Any]:
        """Calls `call` with one logits after another, from the first on."""
        following = itertools.cycle(self.logits)
        return lambda: call(next(following))


def make_moe_inputs(arrays: Arrays, shape: MoeShape, seed: int = 0) -> MoeInputs:
    """The same inputs for the same seed. No token's K-th logit equals its next, so its experts do
    not depend on how ties are broken."""
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
    """[T, E] in the shape's dtype. By the Gumbel trick the K greatest of log p + noise are a draw
    without replacement with weights p. The ranks of experts are drawn once per seed."""
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
    """[T], whether the K-th greatest logit of a token equals the next one."""
    if top_k == logits.shape[-1]:
        return arrays.xp.zeros_like(logits[:, 0]) != 0
    ordered = arrays.sorted_down(arrays.cast(logits, "fp32"))
    return ordered[:, top_k - 1] == ordered[:, top_k]
