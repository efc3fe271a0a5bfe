"""Names of this package's predecessor that still make sense.

Its tensors were [batch, heads, seq, dim] and its options positional. New code uses
flash_attention, of which these are thin aliases. flash_attention_backward computes gradients, with
its current arguments; torch and JAX call it automatically. FlashMoELayer and
FlashMoEScienceAttention are in flashmoe_science.torch, and train.

fused_moe is flashmoe_science.fused_moe under its old name, with other arguments: the predecessor's
took one matrix an expert and dense probabilities, and returned its input. Today's equivalent is

    fused_moe(tokens, router_weights, w_gate_up, w_down, top_k)

with gate="none" if experts have no gate, and `logits` if the router's are already computed.
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
    """The same as flash_attention_forward: callers no longer name the kernel."""
    return flash_attention_forward(Q, K, V, causal, softmax_scale)
