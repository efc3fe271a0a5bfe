"""flash_attention itself, and its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar, overload

from flashmoe_science import _core
from flashmoe_science._dtypes import parse_flag
from flashmoe_science._tracing import is_traced, operators
from flashmoe_science.errors import ArgumentTypeError, InvalidArgumentError, _TransformedError

_T = TypeVar("_T")


SEQUENCES = (
    "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "k_begin", "batch_index",
    "page_table", "q_offset", "k_scale", "v_scale", "max_seqlen_q", "max_seqlen_k", "split_size",
)  # fmt: skip
"""The arguments of ragged, padded and paged batches, and the scales of their keys and values, in
the order of tuples."""
BOUNDS = 3
"""This many, at the end, are numbers; those before are tables."""
NO_SEQUENCES = (None,) * len(SEQUENCES)
SCALES = ("k_scale", "v_scale")
"""Those that backward does not take."""


def of_backward(sequences: Sequence[Any]) -> dict[str, Any]:
    """By name, those that backward takes."""
    named = dict(zip(SEQUENCES, sequences, strict=True))
    return {name: value for name, value in named.items() if name not in SCALES}


class AttentionGradients(NamedTuple):
    """The result of flash_attention_backward: tensors, or None for those not computed."""

    dq: Any
    dk: Any
    dv: Any
    dsinks: Any


def parse_wanted(wanted: Sequence[bool]) -> tuple[bool, ...]:
    if not isinstance(wanted, Sequence) or isinstance(wanted, str):
        raise ArgumentTypeError(
            f"wanted: got {wanted!r} of type {type(wanted).__name__}, accepted are four flags: of "
            "dq, dk, dv and dsinks"
        )
    if len(wanted) != len(AttentionGradients._fields):
        raise InvalidArgumentError(
            f"wanted: got {len(wanted)} flags, accepted are four: of dq, dk, dv and dsinks"
        )
    return tuple(parse_flag("wanted", each) for each in wanted)


@overload
def flash_attention(
    q: _T,
    k: _T,
    v: _T,
    *,
    causal: bool | Literal["bottom_right", "top_left"] = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: _T | None = None,
    attn_bias: _T | None = None,
    attn_mask: _T | None = None,
    layout: Literal["bshd", "bhsd"] = "bshd",
    return_lse: Literal[False] = False,
    out: _T | None = None,
    lse: _T | None = None,
    kernel: str | None = None,
    stream: object = None,
    cu_seqlens_q: _T | None = None,
    cu_seqlens_k: _T | None = None,
    seqused_q: _T | None = None,
    seqused_k: _T | None = None,
    k_begin: _T | None = None,
    batch_index: _T | None = None,
    page_table: _T | None = None,
    q_offset: _T | None = None,
    k_scale: _T | None = None,
    v_scale: _T | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    split_size: int | None = None,
    prior_out: _T | None = None,
    prior_lse: _T | None = None,
) -> _T: ...


@overload
def flash_attention(
    q: _T,
    k: _T,
    v: _T,
    *,
    causal: bool | Literal["bottom_right", "top_left"] = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: _T | None = None,
    attn_bias: _T | None = None,
    attn_mask: _T | None = None,
    layout: Literal["bshd", "bhsd"] = "bshd",
    return_lse: Literal[True],
    out: _T | None = None,
    lse: _T | None = None,
    kernel: str | None = None,
    stream: object = None,
    cu_seqlens_q: _T | None = None,
    cu_seqlens_k: _T | None = None,
    seqused_q: _T | None = None,
    seqused_k: _T | None = None,
    k_begin: _T | None = None,
    batch_index: _T | None = None,
    page_table: _T | None = None,
    q_offset: _T | None = None,
    k_scale: _T | None = None,
    v_scale: _T | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    split_size: int | None = None,
    prior_out: _T | None = None,
    prior_lse: _T | None = None,
) -> tuple[_T, _T]: ...


def flash_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool | Literal["bottom_right", "top_left"] = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    attn_bias: Any = None,
    attn_mask: Any = None,
    layout: Literal["bshd", "bhsd"] = "bshd",
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    kernel: str | None = None,
    stream: object = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    k_begin: Any = None,
    batch_index: Any = None,
    page_table: Any = None,
    q_offset: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    split_size: int | None = None,
    prior_out: Any = None,
    prior_lse: Any = None,
) -> Any:
    """Exact attention: out = softmax(scale * q k^T) v, by an online softmax over tiles.

    Nothing of size seq_q x seq_k is stored. The algorithm is FlashAttention's (arXiv:2205.14135,
    arXiv:2307.08691) on the online softmax of Milakov and Gimelshein (arXiv:1805.02867); sums are
    accumulated in fp32, and the same inputs give the same bits on every run.

    Takes tensors of NumPy, torch (CPU and CUDA), JAX, CuPy or any library with DLPack, all of one
    library and on one device, and returns the same kind. GPU work goes on the library's current
    stream, and the call does not wait for it. torch's autograd and JAX differentiate it once,
    through out and lse; if no kernel computes the gradients that torch would record, the call is
    refused. Under torch.autocast, torch's fp32 tensors are cast to its dtype.

    Args:
        q: [batch, seq_q, heads_q, dim] in layout "bshd", [batch, heads_q, seq_q, dim] in "bhsd".
            fp16 or bf16; on the CPU also fp32 and fp64. dim is a multiple of 8, at most 576. Beyond
            256 there are no gradients, and on GPUs v must lie in k. Here and below the last
            dimension is contiguous and rows begin on 16-byte boundaries; nothing is copied.
        k: [batch, seq_k, heads_kv, dim], same dtype, or float8_e4m3fn if q has at most 32 bits: its
            numbers are widened to q's dtype, which holds all of them. heads_kv divides heads_q.
        v: [batch, seq_k, heads_kv, dim_v], k's dtype; dim_v may differ from dim.
        causal: False; "bottom_right" or True: query i sees keys j <= i + seq_k - seq_q; "top_left":
            j <= i, as in torch's scaled_dot_product_attention.
        window: (left, right), numbers of keys. Query i stands at key p = i + seq_k - seq_q (p = i
            with "top_left") and sees keys p - left <= j <= p + right. None is no bound. With
            causal, right is 0 or None.
        scale: Factor of the logits. It is rounded to fp32 even for fp64 tensors, like softcap; None
            is 1 / sqrt(dim) at full precision.
        softcap: Logits become softcap * tanh(logit / softcap), before the mask; None is no cap.
        sinks: [heads_q], fp32 or q's dtype, any stride: one logit per head that takes part in every
            softmax and has no value, as in gpt-oss. scale and softcap do not apply to it; the
            log-sum-exp counts it. None is no sinks.
        attn_bias: [batch, heads_q, seq_q, seq_k] in either layout, fp32 or q's dtype, any strides;
            any extent may be 1, which broadcasts. It is added to the logits after scale and
            softcap; -inf hides the key, as attn_mask does. It has no gradient: a bias that requires
            grad is refused. None is no bias. With sequences (below), queries count from the first
            of each sequence and keys from its first one, before k_begin.
        attn_mask: The same in bool or uint8: a query may see a key where it is not 0, on top of
            causal and window. Hidden keys and values are not read: a NaN there reaches nothing.
        layout: "bshd" or "bhsd".
        return_lse: Also return the log-sum-exp of each row's logits, natural logarithm.
        out: Where to write the result, [batch, seq_q, heads_q, dim_v] in the same layout. A new one
            has q's memory order. Like lse it must overlap no other tensor. Not for JAX.
        lse: Where to write the log-sum-exp, [batch, heads_q, seq_q], fp32, for fp64 fp64. Not for
            JAX.
        kernel: Kernel family to use ("cpu", "sm89_few_rows", "sm89_decode", "mixed", "sm89",
            "sm90", "sm90_mla"), or a schedule of one ("sm90_whole_tiles", "sm90_split_kv"): that
            one runs, or the call fails. None is the best.
        stream: cudaStream_t as an int, or an object with __cuda_stream__(), cuda_stream or ptr.
            None is the current stream of the tensors' library. Ignored on the CPU. Not for JAX.
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, k_begin, batch_index, page_table: Ragged,
            padded and paged batches; the last two have no gradients. int32, of q's library and on
            its device, any strides; described below.
        q_offset: [batch], int32: the key at which query 0 of each sequence stands, any number. It
            applies to causal and window, whatever the alignment.
        k_scale, v_scale: fp32 factors of the numbers of k and v: one for all ([] or [1]), one per
            KV head ([heads_kv]), or one per row of k's batch, or page, and head ([k.shape[0] or 1,
            heads_kv or 1]), any strides. They multiply scores, and weights or outputs, in fp32, so
            that nothing is rounded in q's dtype. If k and v are not fp8, scales work on the CPU
            only, and not for fp64. No gradients. None is 1.
        max_seqlen_q, max_seqlen_k: Bounds of the lengths, which may be loose; longer sequences are
            cut off at the end. None and 0 are no bound: as many as the tensors hold.
        split_size: On a GPU, divide the keys of a sequence among blocks in chunks of this many,
            counted from its first key (beyond 32 chunks, a multiple of it). Then its bits depend on
            nothing else in the batch, nor on the number of sequences or on pages. None is equal
            shares of all keys, which is fastest. The CPU's bits never depend on these.
        prior_out, prior_lse: A partial result of other keys, with the shapes of out and lse: out
            and lse then cover its keys and this call's, as if merge_states merged the two. It may
            be fp16, bf16 or fp32 whatever q is (with fp64, fp64), and so may out; a new out has its
            dtype. out may be prior_out, and lse may be prior_lse. The call's own part is rounded to
            q's dtype before it is merged in fp32. There are no gradients through them.

    Sequences of different lengths: the queries of sequence b are the rows of q[b]. With
    cu_seqlens_q [batch + 1] they are rows cu_seqlens_q[b] to before cu_seqlens_q[b + 1] of a q of
    [1, total_q, heads_q, dim]. seqused_q [batch] keeps the first seqused_q[b] of them. Its keys are
    the rows of k[b]. With batch_index [batch] they are the rows of k[batch_index[b]]; with
    cu_seqlens_k [batch + 1], rows of a k of [1, total_k, heads_kv, dim]; with page_table [batch,
    pages of a sequence], the rows of the pages that it names, in order, where k is [all pages,
    page_size, heads_kv, dim] with any page size. seqused_k [batch] keeps the first seqused_k[b] of
    these, and k_begin [batch] skips the first k_begin[b] of the rest. v is like k. causal and
    window use each sequence's own lengths. With split_size each sequence has the bits of a separate
    call. Rows of out and lse that belong to no sequence are not written: in new tensors they may
    hold anything. Entries out of range are cut to what exists, and nothing outside the tensors is
    read.

    Returns:
        out, or (out, lse) with return_lse. A query that sees no key gives an out of 0 and an lse of
        its head's sink or -inf.

    Raises:
        ValueError: A shape, stride, alignment or option is wrong. The message names the argument.
        TypeError: Not a tensor, or a wrong dtype, or tensors of different libraries.
        NotImplementedError: Valid, but no kernel here serves it; the message says why.
        RuntimeError: The device cannot be used, or CUDA reported an error.
        MemoryError: The host is out of memory.
    """
    sequences = (
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, k_begin, batch_index, page_table,
        q_offset, k_scale, v_scale, max_seqlen_q, max_seqlen_k, split_size,
    )  # fmt: skip
    if not is_traced():
        try:
            return _core.flash_attention(
                q, k, v, causal, window, scale, softcap, sinks, layout, return_lse, out, lse,
                kernel, stream, sequences, attn_bias, attn_mask, prior_out, prior_lse,
            )  # fmt: skip
        except _TransformedError:  # torch's operators take these
            pass
    return operators().flash_attention(
        q, k, v, causal=causal, window=window, scale=scale, softcap=softcap, sinks=sinks,
        attn_bias=attn_bias, attn_mask=attn_mask, layout=layout, return_lse=return_lse, out=out,
        lse=lse, kernel=kernel, stream=stream, prior_out=prior_out, prior_lse=prior_lse,
        **dict(zip(SEQUENCES, sequences, strict=True)),
    )  # fmt: skip


def flash_attention_backward(
    dout: _T,
    q: _T,
    k: _T,
    v: _T,
    out: _T,
    lse: _T,
    *,
    dlse: _T | None = None,
    sinks: _T | None = None,
    attn_bias: _T | None = None,
    attn_mask: _T | None = None,
    causal: bool | Literal["bottom_right", "top_left"] = False,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    layout: Literal["bshd", "bhsd"] = "bshd",
    wanted: tuple[bool, bool, bool, bool] = (True, True, True, True),
    accumulate: bool = False,
    dq: _T | None = None,
    dk: _T | None = None,
    dv: _T | None = None,
    dsinks: _T | None = None,
    kernel: str | None = None,
    stream: object = None,
    cu_seqlens_q: _T | None = None,
    cu_seqlens_k: _T | None = None,
    seqused_q: _T | None = None,
    seqused_k: _T | None = None,
    k_begin: _T | None = None,
    batch_index: _T | None = None,
    page_table: _T | None = None,
    q_offset: _T | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    split_size: int | None = None,
) -> AttentionGradients:
    """Computes the gradients of a loss for q, k, v and sinks from those for flash_attention's out
    and lse.

    Runs on the CPU, and on GPUs where attention_backward_plan finds a kernel. Nothing of size seq_q
    x seq_k is stored; sums are accumulated in fp32, and the same inputs give the same bits on every
    run, whatever the number of threads. A query that sees no key has a gradient of 0, and so has a
    key that no query sees.

    Takes tensors as flash_attention does. With JAX arrays there is no accumulate, no output to
    write to and no stream.

    Args:
        dout: The gradient of out, with its shape and dtype.
        q, k, v, causal, window, scale, softcap, layout: As in flash_attention.
        out, lse: What it returned, with return_lse.
        dlse: The gradient of lse, with its shape and dtype; None if lse is not used.
        sinks: As in flash_attention. They are read for dsinks alone, since lse counts them.
        attn_bias, attn_mask: As in flash_attention. The bias has no gradient.
        wanted: Whether to make each of dq, dk, dv and dsinks that is not given.
        accumulate: Add to those of dq, dk, dv and dsinks that are given, and make none.
        dq, dk, dv, dsinks: Where to write the gradients of q, k, v and sinks: their shape, and
            their dtype or fp32. They must overlap no other tensor.
        kernel, stream: As in flash_attention.
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, k_begin, max_seqlen_q, max_seqlen_k:
            As in flash_attention. Gradients of rows and keys of no sequence are 0, or stay as they
            are with accumulate.
        split_size: As in flash_attention; it changes nothing here.
        batch_index, page_table: None: keys that sequences may share have no gradients.

    Returns:
        AttentionGradients (dq, dk, dv, dsinks), None for those not computed.

    Raises: What flash_attention raises. A message names the argument.
    """
    sequences = (
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, k_begin, batch_index, page_table,
        q_offset, None, None, max_seqlen_q, max_seqlen_k, split_size,
    )  # fmt: skip
    if not is_traced():
        try:
            return _flash_attention_backward(  # type: ignore[no-any-return]
                dout, q, k, v, out, lse, dlse, sinks, causal, window, scale, softcap, layout,
                wanted, accumulate, dq, dk, dv, dsinks, kernel, stream, sequences, attn_bias,
                attn_mask,
            )  # fmt: skip
        except _TransformedError:  # as above
            pass
    made: AttentionGradients = operators().flash_attention_backward(
        dout, q, k, v, out, lse, dlse=dlse, sinks=sinks, attn_bias=attn_bias, attn_mask=attn_mask,
        causal=causal, window=window, scale=scale, softcap=softcap, layout=layout, wanted=wanted,
        accumulate=accumulate, dq=dq, dk=dk, dv=dv, dsinks=dsinks, kernel=kernel, stream=stream,
        **of_backward(sequences),
    )  # fmt: skip
    return made


def _flash_attention_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any, sinks: Any, causal: Any,
    window: Any, scale: Any, softcap: Any, layout: Any, wanted: Any, accumulate: Any, dq: Any,
    dk: Any, dv: Any, dsinks: Any, kernel: Any, stream: Any, sequences: Any, attn_bias: Any,
    attn_mask: Any,
) -> Any:  # fmt: skip
    """For tensors with memory."""
    made: Any = _core.flash_attention_backward(
        dout, q, k, v, out, lse, dlse, sinks, causal, window, scale, softcap, layout,
        parse_wanted(wanted), accumulate, dq, dk, dv, dsinks, kernel, stream, sequences, attn_bias,
        attn_mask,
    )  # fmt: skip
    return AttentionGradients(*made)
