"""Converts the arguments of flash_attn.py's functions to those of flash_attention."""

from __future__ import annotations

import operator
from typing import Any

import torch

from flashmoe_science._autograd import autocast, is_recorded
from flashmoe_science._dispatch import _TORCH, ATTENTION, refuse_tangent
from flashmoe_science._tracing import is_traced
from flashmoe_science.attention import flash_attention
from flashmoe_science.errors import (
    ArgumentTypeError,
    InvalidArgumentError,
    UnsupportedError,
    _naming,
    _TransformedError,
)
from flashmoe_science.plan import attention_plan

_CHUNK = 1024  # keys, for num_splits=1


def options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Any,
    softcap: float,
    alibi_slopes: Any,
    qv: Any,
    attention_chunk: int,
    num_splits: int,
    s_aux: Any,
    learnable_sink: Any,
) -> dict[str, Any]:
    """The options that all functions share. Raises if an unsupported one is asked for."""
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
    if integer("attention_chunk", attention_chunk, "0") != 0:
        raise UnsupportedError(
            f"attention_chunk: got {attention_chunk}, accepted is 0: attention has no chunks; each "
            "can be a sequence of its own, by cu_seqlens"
        )
    if isinstance(causal, torch.Tensor):
        raise ArgumentTypeError(f"causal: got {type(causal).__name__}, accepted are False and True")
    left, right = (None, None) if window_size is None else window(window_size)
    right = None if causal else right
    return {
        "causal": bool(causal),
        "window": None if left is None and right is None else (left, right),
        "scale": softmax_scale,
        "softcap": softcap if _is_positive("softcap", softcap) else None,
        "sinks": one_of(s_aux=s_aux, learnable_sink=learnable_sink),
        "split_size": split_size(num_splits),
    }


def window(window_size: Any) -> tuple[int | None, int | None]:
    """flash_attention's window from FlashAttention's pair, where a negative number is no bound."""
    try:
        left, right = window_size
        return _extent(left), _extent(right)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidArgumentError(
            f"window_size: got {window_size!r}, accepted is a pair (left, right) of numbers of "
            "keys, negative or None for no bound"
        ) from None


def _extent(extent: Any) -> int | None:
    if extent is None:
        return None
    if not isinstance(extent, int):  # in a graph it may be a symbol
        extent = operator.index(extent)
    return None if extent < 0 else extent


def split_size(num_splits: Any) -> int | None:
    """flash_attention's split_size from FlashAttention's number of parts."""
    splits = integer("num_splits", num_splits, "a number of parts, 0 for any")
    return _CHUNK if splits == 1 else None


def integer(name: str, number: Any, accepted: str) -> int:
    """Checks an integer of 0 or more."""
    try:
        number = number if isinstance(number, int) else operator.index(number)
    except TypeError:
        raise ArgumentTypeError(
            f"{name}: got {number!r} of type {type(number).__name__}, accepted is {accepted}"
        ) from None
    if number < 0:
        raise InvalidArgumentError(f"{name}: got {number}, accepted is {accepted}")
    return number  # type: ignore[no-any-return]


def _is_positive(name: str, number: Any) -> bool:
    """Whether it is a positive number; NaN is not."""
    try:
        if number > 0:
            return True
        if number <= 0:
            return False
    except (TypeError, ValueError, RuntimeError):  # arrays and tensors of several numbers
        pass
    raise ArgumentTypeError(
        f"{name}: got {number!r} of type {type(number).__name__}, accepted is a number, 0 or less "
        "for no cap"
    )


def one_of(**named: Any) -> Any:
    """The value of an argument with two names."""
    given = [name for name, value in named.items() if value is not None]
    if len(given) > 1:
        error = InvalidArgumentError(
            f"{given[1]}: got one beside {given[0]}, accepted is one of the two: both name the same"
        )
        error._names_both = True
        raise error
    return named[given[0]] if given else None


def scales(k: Any, k_descale: Any, v_descale: Any, *, of_sequences: bool) -> dict[str, Any]:
    """k_scale and v_scale. `of_sequences`: whether k has a row for each sequence."""
    check_tensor("k", k)
    if k.dtype.itemsize > 1:  # FlashAttention 3 reads none for these
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
    """Lengths from a table, or from one number for all."""
    if isinstance(given, int) and not isinstance(given, bool):
        return torch.full((batch,), given, dtype=torch.int32, device=device)
    if given is not None:
        check_rank(1, **{name: given})
    found: torch.Tensor | None = given
    return found


def positions(
    begin: torch.Tensor, cu_seqlens: torch.Tensor | None, rows: int, stays: bool = False
) -> torch.Tensor:
    """The position of each row, [batch, rows] or [1, rows]; a sequence's first row stands at
    `begin`, which has one number per sequence."""
    row = torch.arange(rows, dtype=torch.int32, device=begin.device)
    if cu_seqlens is None:
        return begin[:, None] + (torch.zeros_like(row) if stays else row)
    if cu_seqlens.shape[0] < 2:  # no sequences: any position will do
        return row[None]
    sequence = torch.searchsorted(cu_seqlens, row, right=True) - 1
    sequence = sequence.clamp(0, cu_seqlens.shape[0] - 2)
    if stays:
        return begin[sequence][None]
    return (begin[sequence] + row - cu_seqlens[sequence])[None]


def unpacked(
    name: str, packed: Any, parts: int, rows: str = "batch, seq"
) -> tuple[torch.Tensor, ...]:
    """Views of the parts, along the axis after `rows`. Uses unbind, whose gradient is one stack;
    that of indexing is a zero tensor of the whole per part, and their sum."""
    check_tensor(name, packed)
    axis = 1 + rows.count(",")
    if packed.dim() != axis + 3 or packed.shape[axis] != parts:
        raise InvalidArgumentError(
            f"{name}: got shape {tuple(packed.shape)}, accepted is [{rows}, {parts}, heads, dim]"
        )
    parts_of: tuple[torch.Tensor, ...] = packed.unbind(axis)
    return parts_of


def with_batch(name: str, tensor: Any) -> torch.Tensor | None:
    """An optional tensor as one row of a batch."""
    if tensor is None:
        return None
    check_tensor(name, tensor)
    rows: torch.Tensor = tensor[None]
    return rows


_of_cache = _naming({"k": "k_cache", "v": "v_cache"})
attend_to_cache: Any = _of_cache(flash_attention)  # with either kind of result


@_of_cache
def check_before_append(
    q: torch.Tensor, k: Any, v: Any, how: dict[str, Any], return_lse: Any, out: Any
) -> None:
    """Raises what attention over a cache would raise only after new keys have been written."""
    if is_traced():  # a graph is checked before anything runs
        return
    # What plans do not check: they see no gradients, tangents or casts.
    for name, given in (("q", q), ("sinks", how["sinks"]), ("out", out)):
        if given is not None:
            refuse_tangent(name, given, ATTENTION)
    if out is not None:
        _TORCH.check_output("out", out, ATTENTION)

    def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        # Nothing reads the keys here, and a cache is too large to be copied once more.
        return x.to(dtype) if x is q or x.dtype == dtype else torch.empty_like(x, dtype=dtype)

    q, k, v = autocast(q, k, v, cast=cast)
    if is_recorded(q, how["sinks"]):
        into = None if out is None else out[:, :0]
        attend_to_cache(q[:, :0], k, v, **how, return_lse=return_lse, out=into)
    try:
        attention_plan(q, k, v, **how, return_lse=return_lse, out=out)
    except _TransformedError:  # torch's operators take these and check again
        return
    if out is not None and _may_overlap(out, (q, k, v, *how.values())):
        attend_to_cache(q, k, v, **how, return_lse=return_lse, out=out)  # plans do not check that


def _may_overlap(out: torch.Tensor, others: tuple[Any, ...]) -> bool:
    """Whether its range of bytes meets another's on its device."""
    begin, end = _bytes_of(out)
    for given in others:
        if given is None or not isinstance(given, torch.Tensor):
            continue
        first, last = _bytes_of(given)
        if begin < last and first < end and given.device == out.device:
            return True
    return False


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    if tensor.is_contiguous():  # nearly all are, and the rest is slow
        return begin, begin + tensor.nbytes
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((n - 1) * stride for n, stride in axes)
    return begin, begin + (last + 1) * tensor.element_size() if tensor.numel() else begin


def check_count(name: str, tensor: torch.Tensor, sequences: int) -> None:
    """Checks a table of one number per sequence, of one dimension."""
    if tensor.shape[0] != sequences:
        raise InvalidArgumentError(
            f"{name}: got {tensor.shape[0]} numbers, accepted are {sequences}, of {sequences} "
            "sequences"
        )


def check_tensor(name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(f"{name}: got {type(tensor).__name__}, accepted is a torch.Tensor")
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "a nested tensor" if tensor.is_nested else f"one of layout {tensor.layout}"
        raise ArgumentTypeError(f"{name}: got {kind}, accepted is a dense torch.Tensor")


def check_tensors(**tensors: Any) -> None:
    """Checks tensors that may be None."""
    for name, tensor in tensors.items():
        if tensor is not None:
            check_tensor(name, tensor)


def check_rank(rank: int, **tensors: Any) -> None:
    for name, tensor in tensors.items():
        check_tensor(name, tensor)
        if tensor.dim() != rank:
            verb = "is" if rank == 1 else "are"
            raise InvalidArgumentError(
                f"{name}: got {tensor.dim()} dimensions, accepted {verb} {rank}"
            )
