"""Small calls of attention backward on memory of exactly their size, for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize_attention_backward.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize_attention_backward.py --small sm89

Output and log-sum-exp are the CPU's. Every result is checked as well. Prints the kernels that ran.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import capi
import kernels
import numpy as np
import reference
import reference_backward
from gpu import sanitize
from gpu.sanitize import Driver
from kernels import Kernel

FAMILIES = ("sm90", "sm89")


class Options(NamedTuple):
    seq_q: int
    seq_k: int
    heads_q: int
    heads_kv: int
    causal: str = "none"
    layout: str = "bshd"
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    fp32: bool = False
    accumulate: bool = False
    wanted: tuple[str, ...] = capi.GRADIENTS


_SMALL = Options(130, 200, 2, 1, "bottom_right")
_OPTIONS = (
    _SMALL,
    Options(33, 17, 1, 1, "top_left", "bhsd", fp32=True),
    Options(1, 65, 2, 2, softcap=2.0),
    Options(150, 330, 3, 1, window=(40, 20)),
    Options(140, 130, 1, 1, "top_left", accumulate=True, softcap=3.0),
    Options(70, 140, 2, 1, fp32=True, accumulate=True, wanted=("dq", "dsinks")),
    Options(200, 70, 1, 1, "bottom_right", wanted=("dk", "dv")),
)
_RARE = Options(100, 100, 1, 1, "top_left", window=(25, None))
_SUFFIXES = {"TableTuning": "", "CappedTuning": "_softcap", "AdaTuning": "_ada",
             "RaggedTuning": "_ragged", "CappedRaggedTuning": "_ragged_softcap",
             "RaggedAdaTuning": "_ragged_ada", "BiasedTuning": "_biased",
             "BiasedAdaTuning": "_biased_ada",
             "RaggedBiasedAdaTuning": "_ragged_biased_ada"}  # fmt: skip


def kernel_name(family: str, kernel: Kernel) -> str:
    return (
        f"attention_backward_{family}_{kernel.dtype}_d{kernel.dim}_dv{kernel.dim_v}"
        f"{_SUFFIXES[kernel.tuning]}"
    )


def _for_kernel(family: str, kernel: Kernel, options: Options) -> Options:
    """With a softcap where the kernel is for calls that have one, without where another is."""
    if family == "sm90":
        return options._replace(softcap=2.0 if kernel.capped else None)
    return options


def serves(family: str) -> bool:
    """Whether the family computes on this GPU."""
    shape = (1, 8, 1, 64)
    names = ("dout", "q", "k", "v", "out", "dq", "dk", "dv")
    arrays = {name: capi.aligned_empty(shape, capi.DTYPES["fp16"]) for name in names}
    arrays["lse"] = np.zeros((1, 1, 8), np.float32)
    params = capi.attention_backward_params(arrays, kernel=family.encode())
    return sanitize.serves(params, capi.attention_backward_plan)


def check_call(
    driver: Driver, family: str, kernel: Kernel, dim: int, dim_v: int, options: Options,
    bad_key: int | None = None,
) -> set[str]:  # fmt: skip
    """One call of the kernel; the names of the kernels that ran."""
    dtype = capi.DTYPES[kernel.dtype]
    seq_q, seq_k, heads_q, heads_kv, causal, layout, window, softcap, *_, wanted = options
    rng = np.random.default_rng(dim + seq_k)

    def shape(seq: int, heads: int, last: int) -> tuple[int, int, int, int]:
        return (1, seq, heads, last) if layout == "bshd" else (1, heads, seq, last)

    q = capi.normal(rng, shape(seq_q, heads_q, dim), dtype)
    k = capi.normal(rng, shape(seq_k, heads_kv, dim), dtype)
    v = capi.normal(rng, shape(seq_k, heads_kv, dim_v), dtype)
    dout = capi.normal(rng, shape(seq_q, heads_q, dim_v), dtype)
    dlse = rng.standard_normal((1, heads_q, seq_q)).astype(np.float32)
    sinks = rng.standard_normal(heads_q).astype(np.float32)
    if bad_key is not None:
        k[0, bad_key] = np.nan
    settings = {"layout": layout, "causal": causal, "window": window, "softcap": softcap}
    extra = {}
    if kernel.biased:
        extra["attn_bias"] = capi.normal(rng, (1, heads_q, seq_q, seq_k), dtype)
        extra["attn_mask"] = rng.random((1, 1, seq_q, seq_k)) < 0.8
    out, lse = capi.attention(q, k, v, sinks=sinks, **settings, **extra)
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse, "dlse": dlse,
              "sinks": sinks, **extra}  # fmt: skip
    arrays |= _outputs(arrays, options)
    ran = _run(driver, family, kernel, arrays, options)
    if bad_key is None:
        got = tuple(arrays.get(gradient) for gradient in ("dq", "dk", "dv"))
        reference_backward.assert_gradients_accurate(
            got, dout, q, k, v, dlse, sinks, **settings, **extra
        )
        if "dsinks" in wanted:
            _check_sinks(arrays, layout)
    else:
        visible = reference.visible(seq_q, seq_k, causal=causal, window=window)
        if kernel.biased:
            visible = visible & extra["attn_mask"][0, 0]
        _check_spread(arrays, visible, bad_key)
    return ran


def _outputs(arrays: dict[str, np.ndarray], options: Options) -> dict[str, np.ndarray]:
    made = {}
    for name in options.wanted:
        like = arrays[name[1:]]
        dtype = np.dtype(np.float32) if options.fp32 else like.dtype
        made[name] = capi.aligned_empty(like.shape, dtype)
        made[name][...] = 0 if options.accumulate else np.nan
    return made


def _run(
    driver: Driver, family: str, kernel: Kernel, arrays: dict[str, np.ndarray], options: Options
) -> set[str]:
    """Runs a call on arrays by their names in the C ABI, including those of sequences."""
    tables = {name: x for name, x in arrays.items() if name in capi.SEQUENCE_TENSORS}
    tensors = {name: x for name, x in arrays.items() if name not in tables}
    params = capi.attention_backward_params(
        tensors, layout=options.layout, causal=options.causal, window=options.window,
        softcap=options.softcap, accumulate=options.accumulate, tables=tables or None,
        kernel=kernel_name(family, kernel).encode(),
    )  # fmt: skip
    if tables:
        params.keep |= params.keep_sequences.keep
    return set(sanitize.run(driver, arrays, options.wanted, params, capi.attention_backward_plan,
                            "flashmoe_attention_backward"))  # fmt: skip


def check_sequences(
    driver: Driver, family: str, kernel: Kernel, options: Options, hostile: bool = False
) -> set[str]:
    """Runs packed sequences, with rows of NaN that belong to none. With `hostile`, offsets may be
    anything, and the only check is that the call stays inside its memory."""
    dtype, lengths = capi.DTYPES[kernel.dtype], ((options.seq_q, options.seq_k), (0, 5), (19, 40))
    options = options._replace(layout="bshd")
    rng = np.random.default_rng(kernel.dim + options.seq_k)
    sinks = rng.standard_normal(options.heads_q).astype(np.float32)
    settings = {"causal": options.causal, "window": options.window, "softcap": options.softcap}
    parts = []
    for seq_q, seq_k in lengths:
        shapes = {"dout": (seq_q, options.heads_q, kernel.dim_v),
                  "q": (seq_q, options.heads_q, kernel.dim),
                  "k": (seq_k, options.heads_kv, kernel.dim),
                  "v": (seq_k, options.heads_kv, kernel.dim_v)}  # fmt: skip
        part = {name: capi.normal(rng, (1, *shape), dtype) for name, shape in shapes.items()}
        part["dlse"] = rng.standard_normal((1, options.heads_q, seq_q)).astype(np.float32)
        parts.append(part)
    arrays = {"sinks": sinks}
    if kernel.biased:
        room = (sum(n for n, _ in lengths) + 3, sum(n for _, n in lengths) + 3)
        arrays["attn_bias"] = capi.normal(rng, (len(lengths), options.heads_q, *room), dtype)
        arrays["attn_mask"] = rng.random((len(lengths), 1, *room)) < 0.8
    pairs = [
        {name: arrays[name][b : b + 1, :, :seq_q, :seq_k]
         for name in ("attn_bias", "attn_mask") if name in arrays}
        for b, (seq_q, seq_k) in enumerate(lengths)
    ]  # fmt: skip
    for part, own in zip(parts, pairs, strict=True):
        tensors = (part[name] for name in "qkv")
        part["out"], part["lse"] = capi.attention(*tensors, sinks=sinks, **settings, **own)
    for name, first in parts[0].items():
        axis = 2 if name in ("lse", "dlse") else 1
        laid = np.concatenate([part[name] for part in parts], axis)
        shape = list(laid.shape)
        shape[axis] += 3
        arrays[name] = capi.aligned_empty(tuple(shape), first.dtype)
        arrays[name][...] = 0 if hostile else np.nan
        arrays[name][(slice(None),) * axis + (slice(laid.shape[axis]),)] = laid
    for which, name in enumerate(("cu_seqlens_q", "cu_seqlens_k")):
        starts = np.cumsum([0, *(each[which] for each in lengths)])
        arrays[name] = starts.astype(np.int32)
        if hostile:
            most = 2**31 - 1
            numbers = np.array([-most - 1, -1, 0, 3, 17, 200, most - 1, most], np.int32)
            arrays[name] = rng.choice(numbers, starts.shape)
    arrays |= _outputs(arrays, options)
    ends = [np.cumsum([0, *(each[which] for each in lengths)]) for which in (0, 1)]
    ran = _run(driver, family, kernel, arrays, options)
    for b, part in enumerate(parts if not hostile else ()):
        rows, keys = (slice(each[b], each[b + 1]) for each in ends)
        got = tuple(
            arrays[name][:, where] if name in arrays else None
            for name, where in (("dq", rows), ("dk", keys), ("dv", keys))
        )
        given = (part[name] for name in ("dout", "q", "k", "v", "dlse"))
        reference_backward.assert_gradients_accurate(got, *given, sinks, **settings, **pairs[b])
    return ran


def _check_sinks(arrays: dict[str, np.ndarray], layout: str) -> None:
    """By the formula from the same output and log-sum-exp. What the ordinary computation makes of
    the only number of a head is luck, and no measure."""
    rows = (arrays["out"].astype(np.float64) * arrays["dout"].astype(np.float64)).sum(-1)
    delta = (rows.swapaxes(1, 2) if layout == "bshd" else rows) - arrays["dlse"]
    terms = np.exp(arrays["sinks"][:, None].astype(np.float64) - arrays["lse"]) * delta
    error = np.abs(arrays["dsinks"] + terms.sum((0, 2)))
    assert (error <= 1e-5 * np.abs(terms).sum((0, 2)) + 1e-6).all(), error  # nor is it NaN


def _check_spread(arrays: dict[str, np.ndarray], visible: np.ndarray, bad_key: int) -> None:
    """What is NaN: rows that see the key, keys that these see, and nothing else."""
    rows = visible[:, bad_key]
    keys = visible[rows].any(0)
    for name, touched in (("dq", rows), ("dk", keys), ("dv", keys)):
        gradient = arrays[name][0].astype(np.float32)
        assert np.isnan(gradient[touched]).all(), name
        assert np.isfinite(gradient[~touched]).all(), name


def run_family(driver: Driver, family: str, small: bool, share: tuple[int, int]) -> set[str]:
    seen = set()
    every = list(enumerate(sorted(kernels.attention(f"{family}_backward"))))
    for index, kernel in sanitize.part_of(every, share):
        dim, dim_v = kernel.dim, kernel.dim_v
        if kernel.ragged:
            for given in (_SMALL,) if small else _OPTIONS:
                options = _for_kernel(family, kernel, given)
                seen |= check_sequences(driver, family, kernel, options)
            if not small:
                options = _for_kernel(family, kernel, _SMALL)
                seen |= check_sequences(driver, family, kernel, options, hostile=True)
            continue
        if small:
            options = _for_kernel(family, kernel, _SMALL)
            seen |= check_call(driver, family, kernel, dim, dim_v, options)
            continue
        for number, options in enumerate(_OPTIONS):
            less = (index + number) % 2
            seen |= check_call(driver, family, kernel, dim - 8 * less, dim_v - 16 * less,
                               _for_kernel(family, kernel, options))  # fmt: skip
        # The rare path: a NaN of K that lies right of some rows of a tile and left of others.
        seen |= check_call(driver, family, kernel, dim, dim_v,
                           _for_kernel(family, kernel, _RARE), bad_key=60)  # fmt: skip
        adding = _for_kernel(family, kernel, _RARE)._replace(accumulate=True, fp32=True)
        seen |= check_call(driver, family, kernel, dim, dim_v, adding, bad_key=60)
    return seen


if __name__ == "__main__":
    sanitize.main(__doc__, FAMILIES, serves, run_family)
