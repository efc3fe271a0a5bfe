"""The rule of tests/reference.py in torch, on the device of the tensors, in blocks.

    max|ours - ref| <= 2 max|plain - ref| + ulp,    |lse - ref| <= 1e-3 + 1e-6 |ref|

`ref` is float64 mathematics and `plain` the ordinary computation in the inputs' dtype, as there;
tests/gpu/test_oracle.py holds the two files to each other. NaN and infinities must be where the
reference has them, and nowhere else.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from reference import LSE_ABSOLUTE, LSE_RELATIVE, Window

_BLOCK_SCORES = 2**25  # of one step, float64


class Attention(NamedTuple):
    out: torch.Tensor  # [batch, heads_q, seq_q, dim_v]
    lse: torch.Tensor  # [batch, heads_q, seq_q]


def heads_first(x: torch.Tensor, layout: str) -> torch.Tensor:
    """[batch, heads, seq, dim], whatever the layout."""
    return x if layout == "bhsd" else x.transpose(1, 2)


def visible(
    rows: torch.Tensor,
    seq_q: int,
    seq_k: int,
    causal: bool | str = "none",
    window: Window | None = None,
) -> torch.Tensor:
    """[rows, seq_k]: which keys these queries see."""
    i = rows[:, None]
    j = torch.arange(seq_k, device=rows.device)[None, :]
    ahead = j - i if causal == "top_left" else j - (i + seq_k - seq_q)
    left, right = window or (None, None)
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if causal in (True, "bottom_right", "top_left"):
        seen &= ahead <= 0
    if left is not None:
        seen &= ahead >= -left
    if right is not None:
        seen &= ahead <= right
    return seen


def _weighted_sum(weights: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """weights @ v, in which a NaN or infinity of v reaches only the queries that see it."""
    wild = ~torch.isfinite(v).all(0).all(-1)  # [seq_k]
    if not wild.any():
        return weights @ v
    out = weights @ v.masked_fill(wild[:, None], 0)
    for j in wild.nonzero().flatten().tolist():
        reached = weights[..., j, None] * v[:, None, j, :]
        out += torch.where(seen[:, j, None], reached, 0)
    return out


def _rows_of_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor,
    rounded: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, rows, dim] against [n, seq_k, dim] and sinks [n]; every step rounded to a dtype."""

    def round_(x: torch.Tensor) -> torch.Tensor:
        low = x.to(rounded).to(x.dtype)
        return torch.where(torch.isinf(low), x, low)  # fp16 ends at 65504: no error to allow for

    if k.shape[1] == 0:
        lse = sinks[:, None].expand(q.shape[:2])
        return torch.zeros((*q.shape[:2], v.shape[2]), dtype=q.dtype, device=q.device), lse
    blind = ~seen.any(-1, keepdim=True)
    logits = round_((q @ k.transpose(1, 2)) * scale)
    if softcap is not None:
        logits = round_(round_(torch.tanh(round_(logits / softcap))) * softcap)
    logits = logits.masked_fill(~seen, -torch.inf)
    sinks = sinks[:, None, None]
    top = torch.maximum(logits.amax(-1, keepdim=True), sinks)
    weights = torch.where(seen, (logits - top).exp(), 0)
    total = weights.sum(-1, keepdim=True)
    # An infinite logit is as much as all others together, or nothing.
    total = total + torch.where(sinks.isinf(), sinks > 0, (sinks - top).exp())
    lse = torch.where(torch.isneginf(top), -torch.inf, total.log() + top)[..., 0]
    out = _weighted_sum(round_(weights / torch.where(blind, 1, total)), v, seen)
    return round_(out), lse


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool | str,
    window: Window | None,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    layout: str,
    compute: torch.dtype,
    rounded: torch.dtype,
) -> Attention:
    q, k, v = (heads_first(x, layout).to(compute) for x in (q, k, v))
    batch, heads, seq_q, dim = q.shape
    seq_k, dim_v = v.shape[2:]
    group = heads // k.shape[1]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    of_head = torch.arange(batch * heads, device=q.device) // group  # its KV head
    sinks = q.new_full((heads,), -torch.inf) if sinks is None else sinks.to(compute)
    sinks = sinks.repeat(batch)
    out = torch.empty((batch * heads, seq_q, dim_v), dtype=compute, device=q.device)
    lse = torch.empty((batch * heads, seq_q), dtype=compute, device=q.device)
    rows_at_once = max(1, min(seq_q, _BLOCK_SCORES // max(seq_k, 1)))
    # Keys, too, are there once for each head of a step: 128 heads of 9000 keys at once are 16 GB.
    heads_at_once = max(1, _BLOCK_SCORES // max(seq_k * max(rows_at_once, dim), 1))
    for row in range(0, seq_q, rows_at_once):
        rows = slice(row, min(row + rows_at_once, seq_q))
        index = torch.arange(rows.start, rows.stop, device=q.device)
        seen = visible(index, seq_q, seq_k, causal, window)
        for head in range(0, batch * heads, heads_at_once):
            some = slice(head, head + heads_at_once)
            keys, values = (x[of_head[some]] for x in (k, v))
            out[some, rows], lse[some, rows] = _rows_of_attention(
                q[some, rows], keys, values, seen, scale or dim**-0.5, softcap, sinks[some],
                rounded,
            )  # fmt: skip
    return Attention(out.unflatten(0, (batch, heads)), lse.unflatten(0, (batch, heads)))


def attention_float64(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool | str = "none",
    *,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    layout: str = "bshd",
) -> Attention:
    """Attention in float64. A query that sees no key gives out 0, and as lse its sink or -inf."""
    double = torch.float64
    return _attention(q, k, v, causal, window, scale, softcap, sinks, layout, double, double)


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool | str = "none",
    *,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    layout: str = "bshd",
) -> Attention:
    """The ordinary computation in the tensors' dtype: sums in fp32, results of steps rounded."""
    single = torch.float32
    return _attention(q, k, v, causal, window, scale, softcap, sinks, layout, single, q.dtype)


def ulp(dtype: torch.dtype, magnitude: float) -> float:
    """Distance of neighbouring numbers of `dtype` at this magnitude."""
    info = torch.finfo(dtype)
    _, exponent = math.frexp(max(magnitude, info.smallest_normal))
    return float(info.eps * 2.0 ** (exponent - 1))


def _largest(x: torch.Tensor) -> float:
    return float(x.abs().amax()) if x.numel() else 0.0


def _describe(name: str, got: torch.Tensor, want: torch.Tensor, wrong: torch.Tensor) -> str:
    first = wrong.nonzero()[0].tolist()
    return (
        f"{name}{first} is {float(got[tuple(first)])!r}, the reference "
        f"{float(want[tuple(first)])!r}; wrong in {int(wrong.sum())} of {wrong.numel()} places"
    )


def logit_rounding(q: torch.Tensor, k: torch.Tensor, scale: float | None = None) -> float:
    """What a logit may lose where huge products cancel: fp32 sums keep 24 bits of the largest, and
    tensor cores truncate them dim / 16 times."""
    largest = _largest(q.double().norm(dim=-1)) * _largest(k.double().norm(dim=-1))
    return (scale or q.shape[-1] ** -0.5) * largest * 2.0**-20


def assert_lse(lse: torch.Tensor, ref: torch.Tensor, slack: float = 0.0) -> None:
    """Within 1e-3, and the fp32 rounding of a huge one; -inf and NaN where the reference is."""
    assert lse.dtype == torch.float32
    assert lse.shape == ref.shape
    got = lse.double()
    near = (got - ref).abs() <= LSE_ABSOLUTE + LSE_RELATIVE * ref.abs() + slack
    right = torch.where(torch.isfinite(ref), near, (got == ref) | (got.isnan() & ref.isnan()))
    assert right.all(), _describe("lse", got, ref, ~right)


def assert_accurate(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool | str = "none",
    *,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    layout: str = "bshd",
    lse_slack: float = 0.0,
) -> None:
    """Holds one result to the accuracy rule. Axes of out are in the order of q's. `lse_slack`
    widens the tolerance of lse, for logits that fp32 cannot hold to 1e-3."""
    assert out.dtype == q.dtype
    options: dict[str, Any] = {"window": window, "scale": scale, "softcap": softcap}
    options |= {"sinks": sinks, "layout": layout}
    ref = attention_float64(q, k, v, causal, **options)
    usual = plain(q, k, v, causal, **options).out
    assert_near(heads_first(out, layout), lse, ref, usual, q.dtype, lse_slack)


def assert_near(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    ref: Attention,
    usual: torch.Tensor,
    dtype: torch.dtype,
    lse_slack: float = 0.0,
) -> None:
    """The same beside a reference and the plain computation that are there already."""
    got, usual = out.double(), usual.double()
    assert got.shape == ref.out.shape
    if lse is not None:
        assert_lse(lse, ref.lse, lse_slack)
    if got.numel() == 0:
        return
    finite = torch.isfinite(ref.out)
    wild_alike = (got == ref.out) | (got.isnan() & ref.out.isnan())
    alike = torch.where(finite, torch.isfinite(got), wild_alike)
    assert alike.all(), _describe("out", got, ref.out, ~alike)
    comparable = finite & torch.isfinite(usual)
    usual_error = _largest((usual - ref.out)[comparable])
    allowed = 2 * usual_error + ulp(dtype, _largest(ref.out[finite]))
    allowed += torch.finfo(torch.float32).smallest_normal  # kernels flush fp32's denormals
    wrong = finite & ((got - ref.out).abs() > allowed)
    assert not wrong.any(), (
        f"{_describe('out', got, ref.out, wrong)}; largest error "
        f"{_largest((got - ref.out)[finite]):.3g}, allowed {allowed:.3g}"
    )
