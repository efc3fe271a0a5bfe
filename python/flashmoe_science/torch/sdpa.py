"""torch's scaled_dot_product_attention, computed by ours: a function with exactly its semantics,
and routing of torch's own calls to it."""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from flashmoe_science import _autograd, _warn_once
from flashmoe_science._dtypes import parse_flag
from flashmoe_science.errors import (
    ArgumentTypeError,
    InvalidArgumentError,
    UnsupportedError,
    _naming,
    _without_addresses,
)
from flashmoe_science.torch import nested
from flashmoe_science.torch.operators import cuda_devices, flash_attention

_LOGGER = "flashmoe_science.torch"
_DTYPES = {
    "cpu": (torch.float64, torch.float32, torch.float16, torch.bfloat16),
    "cuda": (torch.float16, torch.bfloat16),
}
_MOST_DIM, _DIM_MULTIPLE = 256, 8
_HEADS_AXIS = -3
_ROW_ALIGNMENT = 16  # bytes
_STOCK: Any = torch.nn.functional.scaled_dot_product_attention


@_naming({"q": "query", "k": "key", "v": "value", "attn_bias": "attn_mask"})
def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch.nn.functional.scaled_dot_product_attention, computed only by FlashMoE.

    Args:
        query: [..., heads_q, seq_q, dim]; with three dimensions [batch, seq_q, dim], with two a
            single sequence. fp16, bf16, on the CPU also fp32 and fp64. All three may be jagged
            nested tensors [batch, heads, seq, dim] with sequences of any lengths, which are read in
            place.
        key, value: [..., heads_kv, seq_k, dim] and [..., heads_kv, seq_k, dim_v]. The dimensions
            before the last two broadcast. If that folds several dimensions into one batch, it takes
            a copy.
        attn_mask: Which keys a query may see (bool), or numbers added to its logits (query's dtype
            or fp32, without gradient; -inf hides a key). Any shape that broadcasts to [...,
            heads_q, seq_q, seq_k]; not with is_causal. A query whose keys are all hidden gives 0.
            None is no mask.
        dropout_p: 0: dropout is not supported yet.
        is_causal: Query i sees the keys up to i, counted from the first of both: top-left, as in
            torch.
        scale: Factor of the logits, positive, rounded to fp32 even for fp64 tensors; None is 1 /
            sqrt(dim) at full precision.
        enable_gqa: Whether heads_kv may be a divisor of heads_q, a different one for key and value.

    Returns:
        [..., heads_q, seq_q, dim_v].

    Raises:
        NotImplementedError: Dropout is asked for, or the gradient of attn_mask, or no kernel serves
            the call or, where gradients are recorded, its backward.
        ValueError, TypeError: A shape, a stride, a dtype or an option is wrong.
    """
    is_causal = parse_flag("is_causal", is_causal)
    enable_gqa = parse_flag("enable_gqa", enable_gqa)
    if attn_mask is None and _is_zero(dropout_p) and _is_plain(query, key, value, enable_gqa):
        return _attend_plainly(query, key, value, is_causal, scale)
    _check_kinds(query, key, value, attn_mask, dropout_p)
    reason = _lacking(attn_mask, dropout_p)
    if reason:
        raise UnsupportedError(reason)
    jagged = nested.is_nested(query, key, value)
    if jagged and attn_mask is not None:
        raise UnsupportedError(_MASK_OF_JAGGED)
    mismatch = nested.mismatch if jagged else _mismatch
    reason = mismatch(query, key, value, enable_gqa)
    query, key, value = _autocast(query, key, value)
    if not reason and attn_mask is not None:
        attn_mask = _cast_mask(attn_mask, query)
        reason = _mask_mismatch(attn_mask, query, key, value, is_causal)
    if reason:
        raise InvalidArgumentError(reason)
    if jagged:
        return nested.attend(query, key, value, is_causal, scale)
    return _attend(query, key, value, is_causal, scale, enable_gqa, attn_mask)


def _check_kinds(query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: Any) -> None:
    for name, given in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if not isinstance(given, torch.Tensor) and (given is not None or name != "attn_mask"):
            raise ArgumentTypeError(
                f"{name}: got {type(given).__name__}, accepted is a torch.Tensor"
            )
    if isinstance(dropout_p, torch.Tensor):
        raise ArgumentTypeError("dropout_p: got a torch.Tensor, accepted is the number 0")


def _is_zero(dropout_p: Any) -> bool:
    """Whether an option is 0. A tensor never is: no option of torch's may be one."""
    return not isinstance(dropout_p, torch.Tensor) and dropout_p == 0.0


def _is_plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> bool:
    """Whether a call is of the common kind that needs none of the checks below: real tensors with
    four matching dimensions. Not for graphs, where time does not matter."""
    for tensor in (query, key, value):
        if not isinstance(tensor, torch.Tensor) or tensor.is_nested:
            return False
    if torch.compiler.is_compiling():
        return False
    shape, shape_k = query.shape, key.shape
    if len(shape) != 4 or shape_k != value.shape or len(shape_k) != 4:
        return False
    batch, heads, _, dim = shape
    batch_k, heads_k, _, dim_k = shape_k
    if batch != batch_k or dim != dim_k or heads == 0 or heads_k == 0:
        return False
    if heads != heads_k and not (enable_gqa and heads % heads_k == 0):
        return False
    return not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"))


def _attend_plainly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: Any,
    attn_mask: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    added = attn_mask is not None and attn_mask.dtype != torch.bool
    out: torch.Tensor = flash_attention(
        query, key, value, causal="top_left" if is_causal else False, scale=scale, layout="bhsd",
        attn_bias=attn_mask if added else None, attn_mask=None if added else attn_mask,
    )  # fmt: skip
    return out


_MASK_OF_JAGGED = (
    "attn_mask: got one, accepted is None beside jagged tensors; is_causal goes with them, and a "
    "mask with what to_padded_tensor() makes of them"
)


def _lacking(attn_mask: Any, dropout_p: float) -> str:
    """Which used option of torch's ours lacks, "" if none."""
    if attn_mask is not None and _autograd.is_recorded(attn_mask):
        return _autograd.NO_BIAS_GRADIENT.replace("attn_bias", "attn_mask")
    if dropout_p != 0.0:
        return f"dropout_p: {_got(dropout_p)}accepted is 0: attention has no dropout yet"
    return ""


def _got(number: float) -> str:
    """The text of what was given; "" in a graph, where numbers may be symbols."""
    return "" if torch.compiler.is_compiling() else f"got {number}, "


def _autocast(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tensors as torch's own attention uses them: under torch.autocast in its dtype, except
    float64."""
    kind = query.device.type
    if kind not in _DTYPES or not torch.is_autocast_enabled(kind):
        return query, key, value
    dtype = torch.get_autocast_dtype(kind)

    def cast(x: torch.Tensor) -> torch.Tensor:
        takes_part = x.is_floating_point() and x.dtype != torch.float64 and x.device.type == kind
        return x.to(dtype) if takes_part else x

    return cast(query), cast(key), cast(value)


def _mismatch(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> str:
    """Why the three do not match by torch's rules, "" if they do."""
    named = (("query", query), ("key", key), ("value", value))
    least = 3 if enable_gqa else 2
    for name, tensor in named:
        if tensor.dim() < least:
            given = " with enable_gqa=True" if enable_gqa else ""
            return f"{name}: got {tensor.dim()} dimensions, accepted are {least} or more{given}"
    if key.shape[-1] != query.shape[-1]:
        return f"key: its head dimension is {key.shape[-1]}, but query has {query.shape[-1]}"
    if value.shape[-2] != key.shape[-2]:
        return f"value: its sequence length is {value.shape[-2]}, but key has {key.shape[-2]}"
    if query.shape[:-2] == key.shape[:-2] == value.shape[:-2]:
        return ""
    if enable_gqa:
        heads = query.shape[_HEADS_AXIS]
        for name, tensor in named[1:]:
            some = tensor.shape[_HEADS_AXIS]
            if some != heads and (some == 0 or heads % some != 0):
                return f"{name}: got {some} heads, accepted are divisors of query's {heads}"
    nearest = _HEADS_AXIS - 1 if enable_gqa else _HEADS_AXIS
    for axis in range(nearest, -max(x.dim() for _, x in named) - 1, -1):
        first, most = "query", 1
        for name, tensor in named:
            size = tensor.shape[axis] if tensor.dim() >= -axis else 1
            if most == 1:
                first, most = name, size
            elif size not in (1, most):
                if axis == _HEADS_AXIS and tensor.dim() > 3:
                    return (
                        f"{name}: got {size} heads, but {first} has {most}; with enable_gqa=True "
                        "they may be a divisor"
                    )
                return (
                    f"{name}: dimension {axis} is {size}, but {first} has {most}; accepted are "
                    "equal ones and 1"
                )
    return ""


def _cast_mask(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Under torch.autocast an additive mask gets query's dtype, or stays fp32."""
    kind = query.device.type
    if mask.dtype in (torch.bool, torch.float32, query.dtype) or not mask.is_floating_point():
        return mask
    return mask.to(query.dtype) if torch.is_autocast_enabled(kind) else mask


def _mask_mismatch(
    mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
) -> str:
    """Why a mask does not match the others by torch's rules, "" if it does."""
    if is_causal:
        return "attn_mask: got one beside is_causal=True, accepted is one of the two"
    if mask.is_nested:
        return "attn_mask: got a nested tensor, accepted are dense ones"
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        return (
            f"attn_mask: got dtype {mask.dtype}, accepted are torch.bool, torch.float32 and "
            f"query's {query.dtype}"
        )
    if mask.device != query.device:
        return f"attn_mask: it is on {mask.device}, but query is on {query.device}"
    dims = max(query.dim(), key.dim(), value.dim())
    if not 2 <= mask.dim() <= dims:
        return f"attn_mask: got {mask.dim()} dimensions, accepted are 2 to {dims}"
    named = (("key", key.shape[-2]), ("query", query.shape[-2]))
    for axis, (name, size) in enumerate(named, 1):
        if mask.shape[-axis] not in (1, size):
            return (
                f"attn_mask: dimension {-axis} is {mask.shape[-axis]}, accepted are {name}'s "
                f"sequence length {size} and 1"
            )
    for axis in range(3, mask.dim() + 1):
        sizes = [x.shape[-axis] for x in (query, key, value) if x.dim() >= axis]
        most = query.shape[-3] if axis == 3 and query.dim() > 2 else _broadcast_size(sizes)
        most = _broadcast_size(sizes) if most == 1 else most
        if mask.shape[-axis] not in (1, most):
            return f"attn_mask: dimension {-axis} is {mask.shape[-axis]}, accepted are {most} and 1"
    return ""


def _as_pairs(mask: torch.Tensor, lead: tuple[int, ...], batched: bool) -> torch.Tensor:
    """The mask as [batch, heads, seq_q, seq_k], for a call whose result has the dimensions `lead`
    before its last two. `batched`: a single one is the batch, with one head each."""
    mask = mask[(None,) * (len(lead) + 2 - mask.dim())]
    if len(lead) <= 1:
        return mask.unsqueeze(1) if batched else mask[(None,) * (2 - len(lead))]
    if len(lead) == 2:
        return mask
    if any(n != 1 for n in mask.shape[: len(lead) - 1]):  # otherwise one serves all
        mask = mask.expand(*lead[:-1], -1, -1, -1)
    return mask.flatten(0, len(lead) - 2)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    attn_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes matching tensors."""
    lead: tuple[int, ...] = tuple(query.shape[:-2])
    q, k, v = query, key, value
    alike = query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
    batched = alike and len(lead) == 1
    if batched:
        q, k, v = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
    elif not alike or len(lead) != 2:
        lead, q, k, v = _broadcast(query, key, value, enable_gqa)
    shape = (*lead, query.shape[-2], value.shape[-1])
    if q.shape[1] == 0:  # no heads: the library has no such call
        return query.new_empty(shape)
    pairs = None if attn_mask is None else _as_pairs(attn_mask, lead, batched)
    out = _attend_plainly(q, k, v, is_causal, scale, pairs)
    return out if len(shape) == 4 else out.view(shape)


def _broadcast(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool
) -> tuple[tuple[int, ...], torch.Tensor, torch.Tensor, torch.Tensor]:
    """The result's dimensions before [seq_q, dim_v], and all three as [batch, heads, seq, dim].

    Memory is copied only if several batch dimensions become one that no stride describes, or if key
    and value have different numbers of heads with enable_gqa.
    """
    dims = max(query.dim(), key.dim(), value.dim(), 4)
    tensors = [x[(None,) * (dims - x.dim())] for x in (query, key, value)]
    heads = [x.shape[_HEADS_AXIS] for x in tensors]
    if enable_gqa:
        if heads[1] != heads[2]:
            for i in (1, 2):
                tensors[i] = tensors[i].repeat_interleave(heads[0] // heads[i], _HEADS_AXIS)
            heads = [heads[0]] * 3
    else:
        most = _broadcast_size(heads)
        # The kernels treat one key head for all as grouped heads.
        shared = most if heads[1] != heads[2] else heads[1]
        heads = [most, shared, shared]
    batch = tuple(
        _broadcast_size([x.shape[axis] for x in tensors]) for axis in range(dims + _HEADS_AXIS)
    )
    made = [
        x.expand(*batch, n, -1, -1).flatten(0, dims - 4)
        for x, n in zip(tensors, heads, strict=True)
    ]
    lead = (*batch, heads[0])[dims - max(query.dim(), key.dim(), value.dim()) :]
    return lead, made[0], made[1], made[2]


def _broadcast_size(sizes: list[int]) -> int:
    for size in sizes:
        if size != 1:
            return size
    return 1


# ---- torch's own calls -----------------------------------------------------------------------


# Named like torch.nn.attention.sdpa_kernel, which is also a decorator.
class sdpa_kernel(TorchFunctionMode, contextlib.ContextDecorator):
    """While entered, routes this thread's calls of torch's scaled_dot_product_attention to
    FlashMoE.

        with flashmoe_science.torch.sdpa_kernel():
            out = model(x)

        @flashmoe_science.torch.sdpa_kernel()
        def step(x): ...

    A call that ours does not cover (dropout, gradients of masks, head dimensions that are no
    multiples of 8 up to 256, dtypes and devices without kernels, gradients that no kernel computes)
    goes to torch's own, and the logger "flashmoe_science.torch" warns why, once per reason. Works
    under torch.compile, whose graphs then contain our operator; a graph that leaves a call to
    torch's own warns while it is compiled.

    torch's modules in eval mode have their own fast path. They leave it while a mode is entered,
    except compiled ones, which need torch.backends.mha.set_fastpath_enabled(False).

    One object may be entered repeatedly and by several threads. When nested, the outer one decides
    about calls that the inner one does not serve, strictly or not.

    Args:
        strict: Raise NotImplementedError with that reason instead of going to torch's own.
    """

    def __init__(self, *, strict: bool = False) -> None:
        super().__init__()
        self.strict = strict

    def __torch_function__(
        self, func: Any, kinds: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _STOCK:
            return _route(self.strict, args, kwargs or {})
        if func is torch.nn.functional.multi_head_attention_forward:
            func = _MULTI_HEAD_ATTENTION[self.strict]
        return func(*args, **(kwargs or {}))


def _route(strict: bool, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Torch's own implementation reports errors."""
    out, reason = _ours(*arguments, **options)
    if not reason:
        return out
    if strict:
        raise UnsupportedError(reason)
    _warn_once.warn_once(
        _LOGGER, f"scaled_dot_product_attention by torch's own implementation: {reason}"
    )
    return _STOCK(*arguments, **options)


def _ours(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[torch.Tensor | None, str]:
    """Our result and "", or None and the reason."""
    if attn_mask is None and dropout_p == 0.0 and _is_plain(query, key, value, enable_gqa):
        # Either torch or ours may report an error; see below.
        with contextlib.suppress(UnsupportedError, InvalidArgumentError, ArgumentTypeError):
            return _attend_plainly(query, key, value, is_causal, scale), ""
    reason = _lacking(attn_mask, dropout_p)
    jagged = nested.is_nested(query, key, value)
    if jagged:
        reason = reason or (_MASK_OF_JAGGED if attn_mask is not None else "")
        reason = reason or nested.mismatch(query, key, value, enable_gqa)
    if not reason:
        query, key, value = _autocast(query, key, value)
        q, k, v = (nested.rows(x) if jagged else x for x in (query, key, value))
        reason = _beyond_ours(q, k, v, scale)
    reason = reason or ("" if jagged else _mismatch(query, key, value, enable_gqa))
    if not reason and attn_mask is not None:
        attn_mask = _cast_mask(attn_mask, query)
        reason = _mask_mismatch(attn_mask, query, key, value, is_causal)
    if reason:
        return None, reason

    def attend() -> torch.Tensor:
        if jagged:
            return nested.attend(query, key, value, is_causal, scale)
        return _attend(query, key, value, is_causal, scale, enable_gqa, attn_mask)

    if torch.compiler.is_compiling():
        return attend(), ""
    try:
        return attend(), ""
    except (UnsupportedError, InvalidArgumentError, ArgumentTypeError) as error:
        return None, _without_addresses(error)


def _beyond_ours(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
) -> str:
    """Why ours cannot serve tensors that torch can, as far as a graph can know; "" if it can."""
    tensors = (("query", query), ("key", key), ("value", value))
    kind = query.device.type
    if kind not in _DTYPES or (kind == "cuda" and cuda_devices() == 0):
        return f"query: it is on {query.device}, accepted are the CPU and CUDA devices with kernels"
    for name, tensor in tensors:
        if tensor.dtype not in _DTYPES[kind]:
            return f"{name}: got dtype {tensor.dtype} on {kind}"
        if tensor.shape[:-2] != query.shape[:-2] and tensor.numel() * query.numel() == 0:
            # torch's back ends give this different shapes.
            return f"{name}: an empty batch is broadcast"
        dim = tensor.shape[-1]
        if dim % _DIM_MULTIPLE or dim > _MOST_DIM or dim == 0:
            return f"{name}: its head dimension is {dim}"
        if tensor.stride(-1) != 1:
            return f"{name}: its last dimension is not contiguous"
        if torch.compiler.is_compiling() and not _has_aligned_rows(tensor):
            return f"{name}: its rows do not begin at multiples of {_ROW_ALIGNMENT} bytes"
    if scale is not None and not 0 < scale < math.inf:
        return f"scale: {_got(scale)}accepted are positive numbers"
    if torch.compiler.is_compiling() and _autograd.is_recorded(query, key, value):
        return _autograd.graph_lacks_gradients(query, value)
    return ""


def _has_aligned_rows(tensor: torch.Tensor) -> bool:
    """The library's alignment rule. When a graph runs, it is too late to fall back to torch's
    own."""
    size = tensor.element_size()
    for axis in range(tensor.dim() - 1):
        # In this order, since the first is known for contiguous tensors of any length.
        if tensor.stride(axis) * size % _ROW_ALIGNMENT and tensor.shape[axis] > 1:
            return False
    return True


def _multi_head_attention(strict: bool) -> Callable[..., Any]:
    """multi_head_attention_forward, calling ours. A mode intercepts this function but, while doing
    so, not the calls inside. So those are bound to our function."""
    stock: Any = torch.nn.functional.multi_head_attention_forward

    def routed(*arguments: Any, **options: Any) -> Any:
        return _route(strict, arguments, options)

    names = vars(torch.nn.functional) | {
        "has_torch_function": lambda tensors: False,
        "scaled_dot_product_attention": routed,
    }
    return types.FunctionType(stock.__code__, names, stock.__name__, stock.__defaults__)


_MULTI_HEAD_ATTENTION = {strict: _multi_head_attention(strict) for strict in (False, True)}
