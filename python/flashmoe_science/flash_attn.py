"""FlashAttention 2's functions by FlashMoE: its names, arguments, defaults and results.

    from flashmoe_science.flash_attn import flash_attn_func

in place of `from flash_attn import flash_attn_func` is all that a program changes. The functions
have gradients where flashmoe_science.flash_attention has. Beyond FlashAttention's they have fp32
and fp64 on the CPU, a head dimension of v's own, and a gradient of the log-sum-exp. Backward is
always deterministic: `deterministic` is accepted and changes nothing.

`merge_attn_states` is vLLM's function of that name, which merges what two calls returned.

What is not there: dropout and ALiBi, which are refused, and the functions of variable lengths and
of key-value caches, which this module does not have.
"""

from __future__ import annotations

from typing import Any

import torch

from flashmoe_science.attention import flash_attention
from flashmoe_science.errors import ArgumentTypeError, InvalidArgumentError, UnsupportedError
from flashmoe_science.merge import merge_states

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "merge_attn_states",
]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """FlashAttention's flash_attn_func.

    Args:
        q: [batch, seq_q, heads_q, dim]. fp16 or bf16; on the CPU also fp32 and fp64. dim is a
            multiple of 8, at most 256: FlashAttention pads others by a copy. Nothing is copied
            here: the last dimension is contiguous, and rows begin on 16-byte boundaries.
        k: [batch, seq_k, heads_k, dim], same dtype; heads_k divides heads_q.
        v: [batch, seq_k, heads_k, dim_v], same dtype.
        dropout_p: 0.
        softmax_scale: Factor of the logits; None is 1 / sqrt(dim).
        causal: Query i sees the keys up to i + seq_k - seq_q: the mask ends bottom-right.
        window_size: (left, right): query i sees the keys from i + seq_k - seq_q - left to
            i + seq_k - seq_q + right. A negative number is no bound; with causal right is 0,
            whatever is given.
        softcap: Logits become softcap * tanh(logit / softcap); 0 or less is no cap.
        alibi_slopes: None.
        deterministic: Whether gradients are to be the same bits on every run. They always are.
        return_attn_probs: Also return the log-sum-exp, and what stands for the probabilities.

    Returns:
        out, [batch, seq_q, heads_q, dim_v], or (out, softmax_lse, S_dmask) with return_attn_probs.
        softmax_lse is [batch, heads_q, seq_q], fp32 (of fp64 fp64), a natural logarithm, and -inf
        for a query that sees no key, where FlashAttention has +inf. S_dmask is an empty tensor of
        q's dtype, as FlashAttention from 2.7 on returns it without dropout.

    Raises:
        NotImplementedError: There is dropout, or ALiBi, or no kernel serves the call.
        ValueError, TypeError: As flashmoe_science.flash_attention.
    """
    window = _refuse_or_window(dropout_p, alibi_slopes, window_size, causal)
    how: dict[str, Any] = {
        "causal": bool(causal), "window": window, "scale": softmax_scale,
        "softcap": softcap if softcap > 0 else None,
    }  # fmt: skip
    if not return_attn_probs:
        return flash_attention(q, k, v, **how)
    out, lse = flash_attention(q, k, v, **how, return_lse=True)
    return out, lse, q.new_empty(0)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """FlashAttention's flash_attn_qkvpacked_func.

    Args:
        qkv: [batch, seq, 3, heads, dim]: q, k and v, which are read where they lie. Its gradient
            has the same form.
        dropout_p: As of flash_attn_func, and so are all that follow.

    Returns:
        As flash_attn_func.

    Raises: What flash_attn_func raises.
    """
    q, k, v = _unpacked("qkv", qkv, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """FlashAttention's flash_attn_kvpacked_func.

    Args:
        q: [batch, seq_q, heads_q, dim].
        kv: [batch, seq_k, 2, heads_k, dim]: k and v, which are read where they lie. Its gradient
            has the same form.
        dropout_p: As of flash_attn_func, and so are all that follow.

    Returns:
        As flash_attn_func.

    Raises: What flash_attn_func raises.
    """
    k, v = _unpacked("kv", kv, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def merge_attn_states(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor | None = None,
) -> None:
    """vLLM's merge_attn_states: attention over a prefix and a suffix, from that over each.

    This version computes it on the CPU: tensors on a GPU are refused.

    Args:
        output: [tokens, heads, dim]: where to write. It may be prefix_output. fp16, bf16 or fp32,
            whichever the partials are; of fp64 fp64. dim is a multiple of 8. Here and below the
            last dimension is contiguous, and rows begin on 16-byte boundaries.
        prefix_output, suffix_output: [tokens, heads, dim].
        prefix_lse, suffix_lse: [heads, tokens], fp32 (of fp64 fp64): natural log-sum-exps. A token
            that saw no key has -inf, as of FlashAttention 3, or +inf, as of FlashAttention 2: its
            output is not read. flashmoe_science.merge_states takes +inf for what it is.
        output_lse: [heads, tokens]: where to write the merged one, -inf where neither part has a
            key; None if it is not wanted. It may be prefix_lse.

    Raises:
        NotImplementedError: The tensors are on a GPU.
        ValueError, TypeError: As flashmoe_science.merge_states.
    """
    ranks = {"output": 3, "prefix_output": 3, "prefix_lse": 2, "suffix_output": 3, "suffix_lse": 2}
    tensors = (output, prefix_output, prefix_lse, suffix_output, suffix_lse)
    for (name, rank), tensor in zip(ranks.items(), tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentTypeError(
                f"{name}: got {type(tensor).__name__}, accepted is a torch.Tensor"
            )
        if tensor.dim() != rank:
            raise InvalidArgumentError(
                f"{name}: got {tensor.dim()} dimensions, accepted are {rank}"
            )
    merge_states(
        (prefix_output[None], suffix_output[None]),
        (_empty_is_negative(prefix_lse), _empty_is_negative(suffix_lse)),
        out=output[None],
        lse=None if output_lse is None else output_lse[None],
    )


def _empty_is_negative(lse: torch.Tensor) -> torch.Tensor:
    """[1, heads, tokens] with -inf in the place of +inf, in memory of its own: FlashAttention 2's
    word for a row without a key."""
    return torch.where(lse == torch.inf, -torch.inf, lse)[None]


def _refuse_or_window(
    dropout_p: float, alibi_slopes: Any, window_size: tuple[int, int], causal: bool
) -> tuple[int | None, int | None] | None:
    """The window as flash_attention has it, unless something is asked for that is not there."""
    if dropout_p != 0.0:
        raise UnsupportedError(
            f"dropout_p: got {dropout_p}, accepted is 0.0: attention has no dropout; "
            "train without it, or keep flash_attn's own function where it is needed"
        )
    if alibi_slopes is not None:
        raise UnsupportedError(
            "alibi_slopes: got slopes, accepted is None: attention has no ALiBi; keep flash_attn's "
            "own function where it is needed"
        )
    left, right = (None if extent < 0 else extent for extent in window_size)
    if causal:
        right = None
    return None if left is None and right is None else (left, right)


def _unpacked(name: str, packed: Any, parts: int) -> tuple[torch.Tensor, ...]:
    """Views of the parts. By unbind: its gradient is one stack, where that of an index is zeros of
    the whole for each part, and their sum."""
    if not isinstance(packed, torch.Tensor):
        raise ArgumentTypeError(f"{name}: got {type(packed).__name__}, accepted is a torch.Tensor")
    if packed.dim() != 5 or packed.shape[2] != parts:
        raise InvalidArgumentError(
            f"{name}: got shape {tuple(packed.shape)}, accepted is "
            f"[batch, seq, {parts}, heads, dim]"
        )
    return packed.unbind(2)
