"""Attention in float64, and the accuracy rule that every kernel is held to.

    max|ours - ref| <= 2 * max|plain - ref| + ulp,    |lse - ref| <= 1e-3 + 1e-6 |ref|

ref is float64 mathematics on the same inputs, plain the same formula the ordinary way: logits,
probabilities and output each rounded to the inputs' dtype, sums in fp32. ulp is one unit in the
last place of the dtype at the largest reference value. The relative term of the log-sum-exp is
fp32's own: a huge one has no neighbours 1e-3 apart.

Tensors may be of any framework: `to_numpy` takes their values without rounding.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16), "bf16": BF16}

Window = tuple[int | None, int | None]  # keys to the left and to the right

LSE_ABSOLUTE = 1e-3
LSE_RELATIVE = 1e-6


class Attention(NamedTuple):
    out: np.ndarray  # layout and rank of q
    lse: np.ndarray  # [batch, heads_q, seq_q]


def to_numpy(tensor: Any) -> np.ndarray:
    """The tensor's values as float64 on the host."""
    if type(tensor).__module__.startswith("torch"):
        tensor = tensor.detach().double().cpu().numpy()
    elif type(tensor).__module__.startswith("cupy"):
        tensor = tensor.get()
    elif type(tensor).__module__.startswith("paddle"):
        tensor = tensor.astype("float64").numpy()
    return np.asarray(tensor).astype(np.float64)


def visible(
    seq_q: int,
    seq_k: int,
    causal: bool | str = "none",
    window: Window | None = None,
    *,
    offset: int | None = None,
) -> np.ndarray:
    """[seq_q, seq_k]: which keys a query sees. `offset`: the key at which query 0 stands, beyond
    either alignment."""
    i = np.arange(seq_q)[:, None]
    j = np.arange(seq_k)[None, :]
    if offset is None:
        offset = 0 if causal == "top_left" else seq_k - seq_q
    ahead = j - (i + offset)
    left, right = window or (None, None)
    seen = np.ones((seq_q, seq_k), bool)
    if causal in (True, "bottom_right", "top_left"):
        seen &= ahead <= 0
    if left is not None:
        seen &= ahead >= -left
    if right is not None:
        seen &= ahead <= right
    return seen


def seen_by(
    seen: np.ndarray, attn_bias: np.ndarray | None, attn_mask: np.ndarray | None
) -> np.ndarray:
    """Which of the keys that are `seen` a bias and a mask [batch, heads, seq_q, seq_k] leave."""
    if attn_bias is not None:
        seen = seen & ~np.isneginf(attn_bias.astype(np.float64))
    return seen if attn_mask is None else seen & (attn_mask != 0)


def _pairs(attn_bias: Any, attn_mask: Any) -> tuple[np.ndarray | None, ...]:
    return tuple(None if x is None else to_numpy(x) for x in (attn_bias, attn_mask))


def _heads_first(x: np.ndarray, layout: str) -> np.ndarray:
    return x if layout == "bhsd" else x.swapaxes(1, 2)


def _products_in_order(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """q @ k^T, each dot product summed from first to last. BLAS sums in blocks, whose error in
    fp32 is smaller than that of any kernel which walks along the head dimension."""
    out = np.zeros((*q.shape[:3], k.shape[2]), q.dtype)
    for d in range(q.shape[-1]):
        out += q[..., d, None] * k[:, :, None, :, d]
    return out


def _weighted_sum(weights: np.ndarray, v: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """weights @ v, in which a NaN or infinity of v reaches only the queries that see it."""
    wild = ~np.isfinite(v).all((0, 1, 3))  # [seq_k]
    out = np.matmul(weights, np.where(wild[:, None], 0, v))
    for j in np.flatnonzero(wild):
        out += np.where(seen[..., j, None], weights[..., j, None] * v[:, :, j, None, :], 0)
    return out


_REMEMBERED_BYTES = 2**26
_Answer = TypeVar("_Answer")


def _digested(digest: Any, value: Any) -> bool:
    """Whether a value is of the kinds that a digest can tell apart, and that is done."""
    if isinstance(value, np.ndarray):
        digest.update(repr((value.dtype.name, value.shape, value.strides)).encode())
        digest.update(value.tobytes())
        return True
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        value = tuple(value.items())
    if isinstance(value, (tuple, list)):
        digest.update(repr((type(value).__name__, len(value))).encode())
        return all(_digested(digest, item) for item in value)
    if value is None or isinstance(value, (bool, int, float, str, np.generic, np.dtype)):
        digest.update(repr((type(value).__name__, value)).encode())
        return True
    return False


def _arrays(answer: Any) -> list[np.ndarray]:
    if isinstance(answer, np.ndarray):
        return [answer]
    items = answer.values() if isinstance(answer, dict) else answer
    return [] if answer is None else [array for item in items for array in _arrays(item)]


def remembering(compute: Callable[..., _Answer]) -> Callable[..., _Answer]:
    """Remembers the latest answers (arrays in tuples or dicts) that fit into _REMEMBERED_BYTES, by
    their inputs, since every instruction set asks about a case. Nobody may write to them. Answers
    from tensors other than NumPy's are not remembered."""
    answers: OrderedDict[bytes, _Answer] = OrderedDict()
    kept = 0

    @functools.wraps(compute)
    def remembered(*arguments: Any, **options: Any) -> _Answer:
        nonlocal kept
        digest = hashlib.blake2b()
        if not _digested(digest, (arguments, options)):
            return compute(*arguments, **options)
        key = digest.digest()
        if key in answers:
            return answers[key]
        answer = answers[key] = compute(*arguments, **options)
        for array in _arrays(answer):
            array.flags.writeable = False
            kept += array.nbytes
        while kept > _REMEMBERED_BYTES:
            _, oldest = answers.popitem(last=False)
            kept -= sum(array.nbytes for array in _arrays(oldest))
        return answer

    return remembered


@remembering
def _attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    causal: bool | str,
    window: Window | None,
    scale: float | None,
    softcap: float | None,
    sinks: tuple[float, ...] | None,
    layout: str,
    compute: np.dtype[Any],
    rounded: np.dtype[Any],
    attn_bias: np.ndarray | None = None,
    attn_mask: np.ndarray | None = None,
) -> Attention:
    def round_(x: np.ndarray) -> np.ndarray:
        low = x.astype(rounded).astype(compute)
        return np.where(np.isinf(low), x, low)  # fp16 ends at 65504: that is no error to allow for

    q, k, v = (_heads_first(x, layout).astype(compute) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, group, axis=1) for x in (k, v))
    scale = scale or q.shape[-1] ** -0.5
    seen = seen_by(visible(q.shape[2], k.shape[2], causal, window), attn_bias, attn_mask)
    blind = ~seen.any(-1, keepdims=True)
    with np.errstate(all="ignore"):
        in_order = rounded == np.float32
        products = _products_in_order(q, k) if in_order else np.matmul(q, k.swapaxes(-1, -2))
        logits = round_(products * compute.type(scale))
        if softcap is not None:
            bent = round_(np.tanh(round_(logits / compute.type(softcap))))
            logits = round_(bent * compute.type(softcap))
        if attn_bias is not None:
            logits = round_(logits + attn_bias.astype(compute))
        logits = np.where(seen, logits, -np.inf)
        sink = np.full(q.shape[1], -np.inf) if sinks is None else np.array(sinks)
        sink = sink.astype(compute)[:, None, None]
        top = np.maximum(logits.max(-1, keepdims=True, initial=-np.inf), sink)
        weights = np.where(seen, np.exp(logits - top), 0)
        # An infinite logit is as much as all others together, or nothing.
        total = weights.sum(-1, keepdims=True)
        total = total + np.where(np.isinf(sink), sink > 0, np.exp(sink - top))
        lse = np.where(np.isneginf(top), -np.inf, np.log(total) + top)[..., 0]
        out = _weighted_sum(round_(weights / np.where(blind, 1, total)), v, seen)
        return Attention(_heads_first(round_(out), layout), lse)


def _numbers(sinks: Any) -> tuple[float, ...] | None:
    return None if sinks is None else tuple(map(float, to_numpy(sinks)))


def attention_float64(
    q: Any,
    k: Any,
    v: Any,
    causal: bool | str = "none",
    *,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    layout: str = "bshd",
    attn_bias: Any = None,
    attn_mask: Any = None,
) -> Attention:
    """Attention in float64. A query that sees no key gives out 0, and as lse its sink or -inf."""
    double = np.dtype(np.float64)
    q, k, v = (to_numpy(x) for x in (q, k, v))
    options = (causal, window, scale, softcap, _numbers(sinks), layout, double, double)
    return _attention(q, k, v, *options, *_pairs(attn_bias, attn_mask))


def plain(
    q: Any,
    k: Any,
    v: Any,
    causal: bool | str = "none",
    *,
    dtype: np.dtype[Any],
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    layout: str = "bshd",
    attn_bias: Any = None,
    attn_mask: Any = None,
) -> Attention:
    """The ordinary computation in `dtype`."""
    q, k, v = (to_numpy(x) for x in (q, k, v))
    single = np.dtype(np.float32)
    options = (causal, window, scale, softcap, _numbers(sinks), layout, single, dtype)
    return _attention(q, k, v, *options, *_pairs(attn_bias, attn_mask))


def ulp(dtype: np.dtype[Any], magnitude: float) -> float:
    """Distance of neighbouring numbers of `dtype` at this magnitude."""
    info = ml_dtypes.finfo(dtype)
    exponent = np.floor(np.log2(max(magnitude, float(info.smallest_normal))))
    return float(2.0 ** (exponent - info.nmant))


def dtype_of(tensor: Any) -> np.dtype[Any]:
    """NumPy's dtype of any framework's tensor."""
    name = str(tensor.dtype).rpartition(".")[2]
    return {str(dtype): dtype for dtype in (*DTYPES.values(), np.dtype(np.float64))}[name]


def assert_accurate(
    out: Any,
    lse: Any,
    q: Any,
    k: Any,
    v: Any,
    causal: bool | str = "none",
    *,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    layout: str = "bshd",
    attn_bias: Any = None,
    attn_mask: Any = None,
) -> None:
    """Holds one result, of any framework, to the accuracy rule. lse may be None."""
    options: dict[str, Any] = {"causal": causal, "window": window, "scale": scale}
    options |= {"softcap": softcap, "sinks": sinks, "layout": layout}
    options |= {"attn_bias": attn_bias, "attn_mask": attn_mask}
    dtype = dtype_of(q)
    assert dtype_of(out) == dtype
    ref = attention_float64(q, k, v, **options)
    got = to_numpy(out)
    assert got.shape == ref.out.shape
    if got.size:
        usual = plain(q, k, v, dtype=dtype, **options).out
        allowed = 2 * np.abs(usual - ref.out).max() + ulp(dtype, float(np.abs(ref.out).max()))
        error = np.abs(got - ref.out)
        worst = np.unravel_index(np.argmax(error), error.shape)  # NaN counts as the largest
        assert error[worst] <= allowed, (
            f"out{list(map(int, worst))} is {got[worst]}, the reference {ref.out[worst]}: error "
            f"{error[worst]:.3g}, allowed {allowed:.3g}"
        )
    if lse is not None:
        assert dtype_of(lse) == np.float32
        np.testing.assert_allclose(to_numpy(lse), ref.lse, rtol=LSE_RELATIVE, atol=LSE_ABSOLUTE)
