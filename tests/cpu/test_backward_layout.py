"""Attention backward with strides of every kind, and not one byte read or written outside."""

from __future__ import annotations

import ctypes
from typing import Any

import capi
import numpy as np
import pytest
from capi import GRADIENTS, normal
from guarded import between_guards
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_backward import assert_gradients_accurate
from strided import output_views, strided, views

FP64 = np.dtype(np.float64)
KINDS = {**capi.DTYPES, "fp64": FP64}
SINGLE = np.dtype(np.float32)


def numbers(rng: np.random.Generator, shape: tuple[int, int, int], step: int) -> np.ndarray:
    """[batch, heads, seq] with heads first in memory and `step` numbers from query to query."""
    batch, heads, seq = shape
    return normal(rng, (heads, batch, seq, step), SINGLE)[..., 0].transpose(1, 0, 2)


@settings(max_examples=120)
@given(
    dtype=st.sampled_from(list(KINDS)),
    layout=st.sampled_from(["bshd", "bhsd"]),
    causal=st.sampled_from(["none", "bottom_right", "top_left"]),
    input_views=st.tuples(views, views, views, views),
    written_views=st.tuples(output_views, output_views, output_views, output_views),
    seq_q=st.integers(1, 40),
    seq_k=st.integers(1, 70),
    dims=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    softcap=st.sampled_from([None, None, 2.0]),
    dlse=st.booleans(),
    sinks=st.booleans(),
    wide=st.booleans(),
    accumulate=st.booleans(),
    wanted=st.sets(st.sampled_from(("dq", "dk", "dv")), min_size=1),
)
def test_any_strides(
    dtype: str,
    layout: str,
    causal: str,
    input_views: tuple[Any, ...],
    written_views: tuple[Any, ...],
    seq_q: int,
    seq_k: int,
    dims: tuple[int, int],
    softcap: float | None,
    dlse: bool,
    sinks: bool,
    wide: bool,
    accumulate: bool,
    wanted: set[str],
) -> None:
    """The bits of contiguous tensors, written or added to, and nothing between the rows."""
    rng = np.random.default_rng(seq_q * 100 + seq_k)
    kind = KINDS[dtype]
    kept = FP64 if dtype == "fp64" else SINGLE  # what is added, or rounded

    def shaped(seq: int, heads: int, dim: int) -> tuple[int, int, int, int]:
        return (2, seq, heads, dim) if layout == "bshd" else (2, heads, seq, dim)

    shapes = {
        "q": shaped(seq_q, 4, 8 * dims[0]), "k": shaped(seq_k, 2, 8 * dims[0]),
        "v": shaped(seq_k, 2, 8 * dims[1]), "dout": shaped(seq_q, 4, 8 * dims[1]),
    }  # fmt: skip
    tensors = {
        name: strided(rng, shape, kind, *view)
        for (name, shape), view in zip(shapes.items(), input_views, strict=True)
    }
    options: dict[str, Any] = {"layout": layout, "causal": causal, "softcap": softcap}
    if sinks:
        tensors["sinks"] = normal(rng, (4, 3), kept)[:, 1]
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    out, lse = capi.attention(q, k, v, sinks=tensors.get("sinks"), **options)
    tensors["out"] = strided(rng, out.shape, kind, *written_views[3])
    tensors["out"][...] = out
    tensors["lse"] = numbers(rng, lse.shape, 2).astype(lse.dtype)
    tensors["lse"][...] = lse
    if dlse:
        tensors["dlse"] = numbers(rng, lse.shape, 3).astype(lse.dtype)

    straight = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    names = (*(x for x in GRADIENTS[:3] if x in wanted), *(("dsinks",) if sinks else ()))
    ordered = [straight.get(x) for x in ("dout", "q", "k", "v", "out", "lse", "dlse")]
    want = capi.attention_backward(
        *ordered, sinks=straight.get("sinks"), wanted=names, dtype=kept, **options
    )  # type: ignore[arg-type]
    # Where rows repeat, so do what they are rounded by, which a single number of a head sums up:
    # dsinks have no second chance in the rule.
    rounded = [None if x is None else x.astype(kind) for x in (*want[:3], None)]
    assert_gradients_accurate(
        rounded, *(tensors[x] for x in ("dout", "q", "k", "v")), tensors.get("dlse"),
        tensors.get("sinks"), **options,
    )  # fmt: skip

    own = SINGLE if wide else kind
    written: dict[str, np.ndarray] = {}
    for name, view in zip(GRADIENTS, written_views, strict=True):
        if name == "dsinks" and sinks:
            written[name] = normal(rng, (4, 5), kept)[:, 2]
        elif name in names:
            written[name] = strided(rng, shapes[name[1:]], own, *view)
    before = {name: x.copy() for name, x in written.items()}
    memory = {name: owner(x).copy() for name, x in written.items()}
    if not accumulate:
        for x in written.values():
            x[...] = np.nan
    capi.run_attention_backward(
        capi.attention_backward_params(tensors | written, accumulate=accumulate, **options)
    )
    for name, x in written.items():
        added = getattr(want, name)
        exact = before[name].astype(kept) + added if accumulate else added
        np.testing.assert_array_equal(x, exact.astype(x.dtype), err_msg=name)
        x[...] = before[name]
        np.testing.assert_array_equal(owner(x), memory[name], err_msg=f"around {name}")


def owner(view: np.ndarray) -> np.ndarray:
    """All the memory that a view is of, as bytes."""
    base = view
    while isinstance(base.base, np.ndarray):
        base = base.base
    return base.reshape(-1).view(np.uint8)


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("dims", [(8, 8), (24, 40), (64, 72), (136, 8)])
@pytest.mark.parametrize("seqs", [(1, 1), (13, 35), (31, 259)])
@pytest.mark.parametrize("at_end", [False, True])
def test_touches_no_memory_outside(
    isa_library: ctypes.CDLL,
    dtype: str,
    dims: tuple[int, int],
    seqs: tuple[int, int],
    at_end: bool,
) -> None:
    """One byte read or written beyond any tensor would end the process."""
    rng = np.random.default_rng(0)
    kind = KINDS[dtype]
    q, k = (normal(rng, (1, seq, 1, dims[0]), kind) for seq in seqs)
    v, dout = (normal(rng, (1, seq, 1, dims[1]), kind) for seq in reversed(seqs))
    sinks = np.zeros(1, np.float32)
    out, lse = capi.attention(q, k, v, sinks=sinks, lib=isa_library)
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "sinks": sinks,
             "dlse": normal(rng, lse.shape, lse.dtype)}  # fmt: skip
    made = {"dq": q, "dk": k, "dv": v, "dsinks": sinks}
    tensors = {name: between_guards(x, at_end) for name, x in (given | made).items()}
    for name in made:
        tensors[name][...] = np.nan
    params = capi.attention_backward_params(tensors)
    size = capi.attention_backward_plan(params, isa_library).workspace_bytes
    workspace = between_guards(np.full(size // 16 * 16, 0xFF, np.uint8), at_end)
    capi.run_attention_backward(params, isa_library, workspace)
    assert_gradients_accurate([tensors[name] for name in made], dout, q, k, v, given["dlse"], sinks)
