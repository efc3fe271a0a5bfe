"""Names of the predecessor of this package that still make sense.

Its tensors were [batch, heads, seq, dim] and its options positional. New code uses
flash_attention, of which these are thin aliases. Its names of the backward pass and of
mixture-of-experts return with those features.
"""

from __future__ import annotations

from typing import TypeVar

from flashmoe_science.attention import flash_attention

_T = TypeVar("_T")


def flash_attention_forward(
    Q: _T, K: _T, V: _T, causal: bool = False, softmax_scale: float | None = None
) -> _T:
    """flash_attention(Q, K, V, causal=causal, scale=softmax_scale, layout="bhsd")."""
    return flash_attention(Q, K, V, causal=causal, scale=softmax_scale, layout="bhsd")


def flash_attention_warp_specialized(
    Q: _T, K: _T, V: _T, causal: bool = False, softmax_scale: float | None = None
) -> _T:
    """The same as flash_attention_forward: which kernel runs is no longer the caller's to name."""
    return flash_attention_forward(Q, K, V, causal, softmax_scale)
