"""The arguments of flash_attn.py's functions as those of flash_attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashmoe_science.errors import ArgumentTypeError, InvalidArgumentError, UnsupportedError

_CHUNK = 1024  # keys, of num_splits=1


def options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int] | None,
    softcap: float,
    alibi_slopes: Any,
    qv: Any,
    attention_chunk: int,
    num_splits: int,
    s_aux: Any,
    learnable_sink: Any,
) -> dict[str, Any]:
    """What all functions have, unless something is asked for that is not there."""
    if not isinstance(dropout_p, (int, float)):
        raise ArgumentTypeError(
            f"dropout_p: got {type(dropout_p).__name__}, accepted is 0.0: arguments by position "
            "are FlashAttention 2's, those of FlashAttention 3 go by name"
        )
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
    if qv is not None:
        raise UnsupportedError(
            "qv: got one, accepted is None: where v is in k, as of multi-head latent attention, "
            "flash_attention takes q with qv in its head dimension"
        )
    if attention_chunk != 0:
        raise UnsupportedError(
            f"attention_chunk: got {attention_chunk}, accepted is 0: attention has no chunks; each "
            "can be a sequence of its own, by cu_seqlens"
        )
    left, right = (None if extent < 0 else extent for extent in window_size or (-1, -1))
    right = None if causal else right
    return {
        "causal": bool(causal),
        "window": None if left is None and right is None else (left, right),
        "scale": softmax_scale,
        "softcap": softcap if softcap > 0 else None,
        "sinks": one_of(s_aux=s_aux, learnable_sink=learnable_sink),
        "split_size": _CHUNK if num_splits == 1 else None,
    }


def one_of(**named: Any) -> Any:
    """The value of an argument of two names."""
    given = [name for name, value in named.items() if value is not None]
    if len(given) > 1:
        raise InvalidArgumentError(
            f"{given[1]}: got one beside {given[0]}, accepted is one of the two: both name the same"
        )
    return named[given[0]] if given else None


def scales(k: Any, k_descale: Any, v_descale: Any, *, of_sequences: bool) -> dict[str, Any]:
    """k_scale and v_scale. `of_sequences`: whether k has a row for each sequence."""
    check_tensor("k", k)
    if k.dtype.itemsize > 1:  # of which FlashAttention 3 reads none
        return {}
    found = {}
    for name, given in (("k_descale", k_descale), ("v_descale", v_descale)):
        if given is None:
            continue
        check_tensor(name, given)
        if given.dim() == 2 and given.shape[0] > 1 and not of_sequences:
            if given.stride(0) != 0:
                raise UnsupportedError(
                    f"{name}: got {given.shape[0]} sequences, accepted is one row for all, or one "
                    "that is expanded: keys that lie in blocks or one behind the other have no "
                    "sequence of their own"
                )
            given = given[:1]
        found[name.replace("descale", "scale")] = given
    return found


def lengths(name: str, given: Any, batch: int, device: torch.device) -> torch.Tensor | None:
    """Of tables or one number for all."""
    if isinstance(given, int) and not isinstance(given, bool):
        return torch.full((batch,), given, dtype=torch.int32, device=device)
    if given is not None:
        check_rank(1, **{name: given})
    found: torch.Tensor | None = given
    return found


def positions(
    begin: torch.Tensor, cu_seqlens: torch.Tensor | None, rows: int, stays: bool = False
) -> torch.Tensor:
    """Where each row stands, [batch, rows] or [1, rows]: a sequence's first stands at `begin`."""
    row = torch.arange(rows, dtype=torch.int32, device=begin.device)
    if cu_seqlens is None:
        return begin[:, None] + (torch.zeros_like(row) if stays else row)
    sequence = torch.searchsorted(cu_seqlens, row, right=True) - 1
    sequence = sequence.clamp(0, begin.shape[0] - 1)
    if stays:
        return begin[sequence][None]
    return (begin[sequence] + row - cu_seqlens[sequence])[None]


def unpacked(
    name: str, packed: Any, parts: int, rows: str = "batch, seq"
) -> tuple[torch.Tensor, ...]:
    """Views of the parts, which are behind `rows`. By unbind: its gradient is one stack, where that
    of an index is zeros of the whole for each part, and their sum."""
    check_tensor(name, packed)
    axis = 1 + rows.count(",")
    if packed.dim() != axis + 3 or packed.shape[axis] != parts:
        raise InvalidArgumentError(
            f"{name}: got shape {tuple(packed.shape)}, accepted is [{rows}, {parts}, heads, dim]"
        )
    parts_of: tuple[torch.Tensor, ...] = packed.unbind(axis)
    return parts_of


def check_tensor(name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(f"{name}: got {type(tensor).__name__}, accepted is a torch.Tensor")


def check_rank(rank: int, **tensors: Any) -> None:
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
        if tensor.dim() != rank:
            verb = "is" if rank == 1 else "are"
            raise InvalidArgumentError(
                f"{name}: got {tensor.dim()} dimensions, accepted {verb} {rank}"
            )
