"""Names of the predecessor of this package that still make sense.

Its tensors were [batch, heads, seq, dim] and its options positional. New code uses
flash_attention, of which these are thin aliases. Gradients are flash_attention_backward's, with
arguments of today, and torch's and JAX's differentiation calls it by itself. FlashMoELayer and
FlashMoEScienceAttention are in flashmoe_science.torch, and train.

fused_moe is flashmoe_science.fused_moe under its old name, with other arguments: the predecessor's
took one matrix an expert and dense probabilities, and returned its input. What it promised is

    fused_moe(tokens, router_weights, w_gate_up, w_down, top_k)

with gate="none" where experts have no gate, and `logits` where the router's are already there.
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
