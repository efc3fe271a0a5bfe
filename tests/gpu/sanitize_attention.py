"""Small attention calls on memory of exactly their size: a program for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/gpu/sanitize_attention.py
    compute-sanitizer --tool racecheck python tests/gpu/sanitize_attention.py --small sm89

Every result is checked as well. Prints the kernels that ran.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import capi
import kernels
import numpy as np
import reference
from gpu import sanitize
from gpu.sanitize import Driver
from kernels import Kernel


class Options(NamedTuple):
    seq_q: int
    seq_k: int
    heads_q: int
    heads_kv: int
    causal: str = "none"
    layout: str = "bshd"
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None


_OPTIONS = (
    Options(130, 200, 2, 1, "bottom_right"),
    Options(33, 17, 1, 1, "top_left", "bhsd", softcap=2.0),
    Options(1, 65, 2, 2),
    Options(150, 330, 1, 1, window=(40, 20)),
    Options(1, 1100, 8, 2, "bottom_right", "bhsd"),  # keys that blocks may share
    Options(5, 9000, 4, 1, "bottom_right"),  # that they may share through the workspace
)
# Each kernel once: some tiles of each family, of keys too, and keys that blocks share.
_SMALL = {
    "sm89": Options(70, 330, 2, 1, "bottom_right"),
    "sm90_whole_tiles": Options(130, 330, 2, 1, "bottom_right"),
    "sm89_few_rows": Options(1, 1100, 8, 2, "bottom_right", "bhsd"),
    "sm90_split_kv": Options(5, 1100, 4, 1, "bottom_right"),
    "sm89_decode": Options(5, 1100, 8, 2, "bottom_right"),
    "sm90_mla": Options(2, 330, 48, 1, "bottom_right"),
    "mixed": Options(130, 330, 2, 1, "bottom_right"),
}
_RARE = Options(100, 100, 1, 1, "top_left", window=(25, None))
_MANY = 150  # sequences with which tiles of decoding have several KV heads
FAMILIES = (*kernels.FAMILIES, *kernels.OF_SEQUENCES)


def _for_kernel(kernel: Kernel, options: Options) -> Options:
    """With a softcap or a window where the kernel is for calls that have one, without where
    another is; with heads enough for two blocks where these are a cluster, and a prompt in mixed
    batches."""
    if kernel.family == "mixed":  # some sequence has more queries than decode
        return options._replace(seq_q=options.seq_q + 128)
    if kernel.family == "sm90_mla":
        return options._replace(heads_q=80 if "Paired" in kernel.tuning else 16, heads_kv=1)
    if kernel.windowed:  # with both ends
        right = None if options.causal != "none" else 20
        return options._replace(softcap=None, window=(40, right))
    if kernel.family in kernels.COPY_ENGINE:
        return options._replace(softcap=2.0 if kernel.capped else None)
    return options


def compiled(family: str) -> list[Kernel]:
    """The family's kernels; of mixed batches calls that are divided, in both dtypes."""
    if family == "mixed":
        return [Kernel(family, dtype, 128, 128, "") for dtype in kernels.DTYPES]
    return sorted(kernels.attention(family))


def kernel_name(kernel: Kernel) -> str:
    """The first of its launches."""
    return "attention_forward_mixed_lengths" if kernel.family == "mixed" else kernel.table_name


def serves(family: str) -> bool:
    """Whether the family computes on this GPU."""
    dim, dim_v = (576, 512) if family == "sm90_mla" else (64, 64)
    arrays = {
        name: capi.aligned_empty((1, 40, 1, last), capi.DTYPES["fp16"])
        for name, last in (("q", dim), ("k", dim), ("out", dim_v))
    }
    lengths = {"seqused_k": np.full(1, 40, np.int32)} if family in kernels.OF_SEQUENCES else None
    values = arrays["k"][..., :dim_v]
    params = capi.attention_params(**arrays, v=values, tables=lengths, kernel=family.encode())
    if lengths is not None:
        params.keep |= params.keep_sequences.keep
    return sanitize.serves(params, capi.attention_plan)


def check_call(
    driver: Driver, kernel: Kernel, dim: int, dim_v: int,
    options: Options, bad_key: int | None = None,
) -> set[str]:  # fmt: skip
    """One call of the kernel's family; the names of the kernels that ran."""
    dtype = kernel.dtype
    seq_q, seq_k, heads_q, heads_kv, causal, layout, window, softcap = options
    rng = np.random.default_rng(dim + seq_k)

    def shape(seq: int, heads: int, last: int) -> tuple[int, int, int, int]:
        return (1, seq, heads, last) if layout == "bshd" else (1, heads, seq, last)

    arrays = {
        "q": capi.normal(rng, shape(seq_q, heads_q, dim), capi.DTYPES[dtype]),
        "k": capi.normal(rng, shape(seq_k, heads_kv, dim), capi.DTYPES[dtype]),
        "v": capi.normal(rng, shape(seq_k, heads_kv, dim_v), capi.DTYPES[dtype]),
        "out": capi.aligned_empty(shape(seq_q, heads_q, dim_v), capi.DTYPES[dtype]),
        "lse": np.full((1, heads_q, seq_q), np.nan, np.float32),
    }
    arrays["out"][...] = np.nan
    if bad_key is not None:
        arrays["v"][0, bad_key] = np.nan
    extra = {}
    if kernel.biased:
        extra["attn_bias"] = capi.normal(rng, (1, heads_q, seq_q, seq_k), capi.DTYPES[dtype])
        extra["attn_mask"] = rng.random((1, 1, seq_q, seq_k)) < 0.8
        arrays |= extra
    mask = {"causal": causal, "window": window}
    # Any rows of a tile serve a call of this family; of the others the dimensions tell the kernel.
    wanted = kernel.table_name if kernel.family == "sm89_few_rows" else kernel.family
    params = capi.attention_params(**arrays, layout=layout, **mask, softcap=softcap,
                                   kernel=wanted.encode())  # fmt: skip
    ran = sanitize.run(driver, arrays, ("out", "lse"), params, capi.attention_plan,
                       "flashmoe_attention_forward")  # fmt: skip
    out, lse, q, k, v = (arrays[name] for name in ("out", "lse", "q", "k", "v"))
    if bad_key is None:
        reference.assert_accurate(out, lse, q, k, v, **mask, softcap=softcap, layout=layout,
                                  **extra)  # fmt: skip
    else:
        seen = reference.visible(seq_q, seq_k, **mask)[:, bad_key]
        if kernel.biased:
            seen &= extra["attn_mask"][0, 0, :, bad_key]
        assert np.isnan(out[0, seen].astype(np.float32)).all()
        assert np.isfinite(out[0, ~seen].astype(np.float32)).all()
    return set(ran)


def _sequences(
    kernel: Kernel, dim: int, dim_v: int, options: Options, more: int = 0
) -> tuple[dict[str, np.ndarray], list[tuple[np.ndarray, ...]]]:
    """Queries one behind the other, and keys in pages: arrays of a call, and q, k and v of each
    sequence, of which so many more decode a few keys. Free rows are NaN, and the table ends in
    pages that there are not. Values of sm90_mla are columns of their keys."""
    rng, dtype, size = np.random.default_rng(dim + options.seq_k), capi.DTYPES[kernel.dtype], 16
    cached = capi.FP8 if kernel.fp8 else dtype
    lengths = [(options.seq_q, options.seq_k), (0, 5), (1, 40)]
    lengths += [(1, 1 + 7 * b % 40) for b in range(more)]

    def tensors(count: int, seq: int) -> tuple[np.ndarray, np.ndarray]:
        shapes = ((count, seq, options.heads_kv, last) for last in (dim, dim_v))
        k, v = (capi.normal(rng, shape, cached) for shape in shapes)
        return k, k[..., :dim_v] if kernel.family == "sm90_mla" else v

    ends = np.cumsum([0, *(n for n, _ in lengths)])
    q = capi.normal(rng, (1, int(ends[-1]), options.heads_q, dim), dtype)
    needed = [-(-n // size) for _, n in lengths]
    pages = tensors(sum(needed) + 1, size)
    table = np.full((len(lengths), max(needed) + 1), 2**31 - 1, np.int32)
    places = iter(rng.permutation(sum(needed) + 1))
    for x in pages:
        x[...] = np.nan
    parts = []
    for b, (_, length) in enumerate(lengths):
        own = tensors(1, length)
        parts.append((q[:, ends[b] : ends[b + 1]], *(x.astype(dtype) for x in own)))
        for page in range(needed[b]):
            at = table[b, page] = next(places)
            for x, part in zip(pages, own, strict=True):
                rows = part[0, page * size : (page + 1) * size]
                x[at, : len(rows)] = rows
    arrays = {
        "q": q, "k": pages[0], "v": pages[1],
        "out": capi.aligned_empty((*q.shape[:3], dim_v), dtype),
        "lse": np.full((1, options.heads_q, q.shape[1]), np.nan, np.float32),
        "cu_seqlens_q": ends.astype(np.int32),
        "seqused_k": np.array([n for _, n in lengths], np.int32), "page_table": table,
    }  # fmt: skip
    arrays["out"][...] = np.nan
    if kernel.biased:
        shape = (len(lengths), options.heads_q, int(ends[-1]), table.shape[1] * size)
        arrays["attn_bias"] = capi.normal(rng, shape, dtype)
        arrays["attn_mask"] = rng.random((shape[0], 1, *shape[2:])) < 0.8
    return arrays, parts


_TENSORS = ("q", "k", "v", "out", "lse")
_PAIRS = ("attn_bias", "attn_mask")


def _pairs_of(arrays: dict[str, np.ndarray], b: int, seq_q: int, seq_k: int) -> dict[str, Any]:
    """Biases and masks of one sequence."""
    return {name: arrays[name][b : b + 1, :, :seq_q, :seq_k] for name in _PAIRS if name in arrays}


def _run_sequences(
    driver: Driver, kernel: Kernel, arrays: dict[str, np.ndarray], **options: Any
) -> set[str]:
    tables = {name: x for name, x in arrays.items() if name not in _TENSORS + _PAIRS}
    options |= {name: arrays[name] for name in _PAIRS if name in arrays}
    wanted = "mixed" if kernel.family == "mixed" else kernel.table_name
    params = capi.attention_params(*(arrays[name] for name in _TENSORS), **options, tables=tables,
                                   kernel=wanted.encode())  # fmt: skip
    params.keep |= params.keep_sequences.keep
    return set(sanitize.run(driver, arrays, ("out", "lse"), params, capi.attention_plan,
                            "flashmoe_attention_forward"))  # fmt: skip


def check_sequences(
    driver: Driver, kernel: Kernel, dim: int, dim_v: int, options: Options,
    bad_key: int | None = None, more: int = 0,
) -> set[str]:  # fmt: skip
    """One ragged and paged call; the names of the kernels that ran."""
    arrays, parts = _sequences(kernel, dim, dim_v, options, more)
    mask = {"causal": options.causal, "window": options.window}
    if bad_key is not None:
        table, size = arrays["page_table"], arrays["v"].shape[1]
        arrays["v"][table[0, bad_key // size], bad_key % size] = np.nan
    ran = _run_sequences(driver, kernel, arrays, **mask, softcap=options.softcap)
    ends = arrays["cu_seqlens_q"]
    for b, (q, k, v) in enumerate(parts):
        rows = slice(ends[b], ends[b + 1])
        out, lse = arrays["out"][:, rows], arrays["lse"][:, :, rows]
        pairs = _pairs_of(arrays, b, q.shape[1], k.shape[1])
        if bad_key is None or b > 0:
            reference.assert_accurate(out, lse, q, k, v, **mask, softcap=options.softcap, **pairs)
        else:
            seen = reference.visible(q.shape[1], k.shape[1], **mask)[:, bad_key]
            if pairs:
                seen &= pairs["attn_mask"][0, 0, :, bad_key]
            assert np.isnan(out[0, seen].astype(np.float32)).all()
            assert np.isfinite(out[0, ~seen].astype(np.float32)).all()
    return ran


def check_hostile_sequences(driver: Driver, kernel: Kernel) -> set[str]:
    """Numbers that lead outside of everything, were they followed."""
    arrays, _ = _sequences(kernel, kernel.dim, kernel.dim_v, _OPTIONS[0])
    rng, most = np.random.default_rng(0), 2**31 - 1
    for name in ("cu_seqlens_q", "seqused_k", "page_table"):
        numbers = np.array([-most - 1, -1, 0, 3, 17, 200, most - 1, most], np.int32)
        arrays[name] = rng.choice(numbers, arrays[name].shape)
    arrays["k_begin"] = rng.choice(np.array([-most - 1, -1, 5, most], np.int32), 3)
    for name in ("k", "v", "out"):  # what is within the tensors is numbers
        arrays[name][...] = 0
    options = _for_kernel(kernel, _OPTIONS[0])
    mask = {"causal": "bottom_right", "window": options.window}
    ran = _run_sequences(driver, kernel, arrays, **mask, softcap=options.softcap)
    assert np.isfinite(arrays["out"].astype(np.float32)).all()
    return ran


def run_family(driver: Driver, family: str, small: bool, share: tuple[int, int]) -> set[str]:
    seen = set()
    for kernel in sanitize.part_of(compiled(family), share):
        of_sequences = kernel.ragged or family in kernels.OF_SEQUENCES
        check = check_sequences if of_sequences else check_call
        if family == "sm89_decode":
            seen |= check_sequences(driver, kernel, kernel.dim, kernel.dim_v, _SMALL[family],
                                    more=_MANY)  # fmt: skip
        if small:
            options = _for_kernel(kernel, _SMALL[family])
            seen |= check(driver, kernel, kernel.dim, kernel.dim_v, options)
            continue
        less = 16 if kernel.fp8 else 8  # rows of fp8 begin on 16-byte boundaries, too
        for dim, dim_v in {(kernel.dim, kernel.dim_v), (kernel.dim - less, kernel.dim_v - 16)}:
            for options in _OPTIONS:
                seen |= check(driver, kernel, dim, dim_v, _for_kernel(kernel, options))
        # The rare path: a NaN of V that lies right of some rows of a tile and left of others.
        seen |= check(driver, kernel, kernel.dim, kernel.dim_v, _for_kernel(kernel, _RARE),
                      bad_key=60)  # fmt: skip
        if of_sequences:
            seen |= check_hostile_sequences(driver, kernel)
    return seen


if __name__ == "__main__":
    sanitize.main(__doc__, FAMILIES, serves, run_family)
