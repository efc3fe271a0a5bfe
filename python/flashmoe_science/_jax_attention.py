"""JAX's own attention function, jax.nn.dot_product_attention, computed by FlashMoE."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flashmoe_science.attention import flash_attention
from flashmoe_science.errors import ArgumentTypeError, InvalidArgumentError, _naming

_RANK = 4
_NAMES = {
    "q": "query", "k": "key", "v": "value", "attn_bias": "bias", "attn_mask": "mask",
    "window": "local_window_size", "seqused_q": "query_seq_lengths",
    "seqused_k": "key_value_seq_lengths",
}  # fmt: skip


@_naming(_NAMES)
def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: None = None,
    return_residual: bool = False,
) -> Any:
    """jax.nn.dot_product_attention, computed only by FlashMoE.

    Lengths are read when the program runs.

    Args:
        query: [batch, seq_q, heads_q, dim], or without a batch [seq_q, heads_q, dim]. fp16, bf16,
            on the CPU also fp32 and fp64. dim is a multiple of 8, at most 256.
        key: [batch, seq_k, heads_kv, dim], or [seq_k, heads_kv, dim], same dtype; heads_kv divides
            heads_q.
        value: [batch, seq_k, heads_kv, dim_v], or [seq_k, heads_kv, dim_v], same dtype.
        bias: Added to the logits after scale: [batch, heads_q, seq_q, seq_k]; any extent may be 1,
            and leading ones may be left out; fp32 or query's dtype. -inf hides a key. It has no
            gradient: differentiating it is an error.
        mask: The same in bool: which keys a query may see.
        scale: Factor of the logits, positive; None is 1 / sqrt(dim).
        is_causal: Query i sees the keys up to i, counted from the first of both.
        query_seq_lengths: [batch], int32: the number of queries of each row of the batch; the
            results of others are 0.
        key_value_seq_lengths: [batch], int32: the number of visible keys of each row.
        local_window_size: (left, right), or a number for both: query i sees the keys from i - left
            to i + right, counted from the first of both.
        implementation: None.
        return_residual: Also return the log-sum-exp of each row's logits, [batch, seq_q, heads_q],
            in key's dtype and without a gradient.

    Returns:
        [batch, seq_q, heads_q, dim_v], or with return_residual (that, residual); without a batch if
        query has none. A query that sees no key gives 0 and -inf; JAX's own function gives the mean
        of all values.

    Raises:
        NotImplementedError: A bias is differentiated, or no kernel serves the call.
        ValueError, TypeError: A shape, a dtype or an option is wrong.
    """
    if implementation is not None:
        raise InvalidArgumentError(
            f"implementation: got {implementation!r}, accepted is None: FlashMoE is the only one"
        )
    from flashmoe_science.jax import _refuse_descriptions, without_gradient

    _refuse_descriptions(
        {
            "query": query, "key": key, "value": value, "bias": bias, "mask": mask,
            "query_seq_lengths": query_seq_lengths,
            "key_value_seq_lengths": key_value_seq_lengths,
        }
    )  # fmt: skip
    rank = jnp.ndim(query)
    q, k, v = (
        _with_batch(name, x, rank) for name, x in (("query", query), ("key", key), ("value", value))
    )
    batch, seq_q, seq_k = q.shape[0], q.shape[1], k.shape[1]
    used_q = _lengths("query_seq_lengths", query_seq_lengths, batch, seq_q)
    used_k = _lengths("key_value_seq_lengths", key_value_seq_lengths, batch, seq_k)
    aligned = used_q is None and used_k is None and seq_q == seq_k
    full = (batch, q.shape[2], seq_q, seq_k)
    pairs = {
        "attn_bias": _pairs("bias", bias, full),
        "attn_mask": _pairs("mask", mask, full),
    }
    if bias is not None:
        pairs["attn_bias"] = without_gradient("bias", pairs["attn_bias"])
    window = _window(local_window_size, is_causal)
    # Without is_causal, windows align at the last query and key unless q_offset says otherwise.
    stands = None if window is None or is_causal or aligned else jnp.zeros(batch, np.int32)
    options = {"causal": "top_left" if is_causal else False, "scale": scale, "window": window}
    tensors = {"q_offset": stands, "seqused_q": used_q, "seqused_k": used_k} | pairs
    out, residual = _attended(q, k, v, tensors, options)
    if rank < _RANK:
        out, residual = out[0], residual[0]
    return (out, residual) if return_residual else out


def _attended(q: Any, k: Any, v: Any, tensors: dict[str, Any], options: dict[str, Any]) -> Any:
    """The output and the residual."""
    unhashable = isinstance(
        options["scale"], (jax.core.Tracer, list)
    )  # which flash_attention refuses
    if tensors["seqused_q"] is None or unhashable:
        return _attend(q, k, v, tensors, tuple(options.items()))
    # As one program: alone, rows that are not written are numbers of any kind to jax.debug_nans.
    from flashmoe_science.jax import _key

    return _attend_at_once(q, k, v, tensors, _key(options))


def _attend(
    q: Any, k: Any, v: Any, tensors: dict[str, Any], options: tuple[tuple[str, Any], ...]
) -> Any:
    given: dict[str, Any] = tensors | dict(options)
    out, lse = flash_attention(q, k, v, return_lse=True, **given)
    residual = jax.lax.stop_gradient(jnp.swapaxes(lse, 1, 2)).astype(k.dtype)
    if tensors["seqused_q"] is not None:  # other rows are not written
        seen = (jnp.arange(q.shape[1])[None] < tensors["seqused_q"][:, None])[..., None]
        residual = jnp.where(seen, residual, -jnp.inf)
        out = jnp.where(seen[..., None], out, 0)
    return out, residual


_attend_at_once = jax.jit(_attend, static_argnums=4)


def _with_batch(name: str, array: Any, rank: int) -> Any:
    array = jnp.asarray(array)
    if rank not in (_RANK - 1, _RANK) or array.ndim != rank:
        raise InvalidArgumentError(
            f"{name}: got {array.ndim} dimensions, accepted are 4, or 3 of all without a batch"
        )
    return array if rank == _RANK else array[None]


def _pairs(name: str, array: Any, full: tuple[int, ...]) -> Any:
    """[batch, heads_q, seq_q, seq_k], where each extent may be 1."""
    if array is None:
        return None
    array = jnp.asarray(array)
    if name == "mask" and array.dtype != np.bool_:
        raise ArgumentTypeError(f"mask: got dtype {array.dtype}, accepted is bool")
    wide = array[(None,) * (_RANK - array.ndim)]
    fits = wide.ndim == _RANK and all(n in (1, m) for n, m in zip(wide.shape, full, strict=True))
    if not fits:
        raise InvalidArgumentError(
            f"{name}: got shape {list(array.shape)}, accepted is one that broadcasts to "
            f"{list(full)}"
        )
    return wide


def _lengths(name: str, lengths: Any, batch: int, most: int) -> Any:
    if lengths is None:
        return None
    lengths = jnp.asarray(lengths)
    if lengths.dtype != np.int32:
        raise ArgumentTypeError(f"{name}: got dtype {lengths.dtype}, accepted is int32")
    if lengths.shape != (batch,):
        raise InvalidArgumentError(
            f"{name}: got shape {list(lengths.shape)}, accepted is [batch] = [{batch}]"
        )
    # A length beyond the rows takes all of them, as in JAX.
    return jnp.clip(lengths, 0, most)


def _window(size: Any, is_causal: bool) -> tuple[int, int | None] | None:
    """flash_attention's window, where a causal mask is the right end."""
    if size is None:
        return None
    try:
        left, right = (size, size) if hasattr(type(size), "__index__") else size
        left, right = operator.index(left), operator.index(right)
    except (TypeError, ValueError):
        left = right = -1
    if left < 0 or right < 0:
        raise InvalidArgumentError(
            f"local_window_size: got {size!r}, accepted are a number of keys and a pair (left, "
            "right) of them, each 0 or more"
        )
    return left, None if is_causal else right
