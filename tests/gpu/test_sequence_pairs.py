"""Diagonals of sequences' own (q_offset), biases and masks beside lengths: every sequence as a
dense call with a mask that hides the same, against float64."""

from __future__ import annotations

from typing import Any

import flashmoe_science as fm
import kernels
import numpy as np
import pairs
import pytest
import torch
from gpu import families, ragged, ragged_backward
from gpu.cases import DTYPES
from gpu.ragged import INT_MAX, Batch, Call, int32
from reference import assert_accurate, attention_float64, to_numpy, visible
from reference_backward import assert_gradients_accurate

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
LENGTHS_Q = (5, 0, 1, 40, 3, 130, 1, 70)
LENGTHS_K = (9, 30, 0, 33, 1, 170, 215, 71)
OFFSETS = (4, 0, -INT_MAX - 1, -10, -1, 45, 600, INT_MAX)
DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))

STANDING: dict[str, dict[str, Any]] = {
    "causal": {"causal": "bottom_right"},
    "top_left": {"causal": "top_left"},
    "left": {"window": (20, None)},
    "both": {"window": (7, 3)},
    "one": {"causal": "top_left", "window": (0, None)},
    "all": {},
}


def check_sequence(batch: Batch, b: int, got: ragged.Result, **given: Any) -> None:  # of float64
    if got.out[b].shape[1] == 0:
        return
    tensors = [x[b] for x in (batch.q, batch.k, batch.v)]
    assert_accurate(got.out[b], got.lse[b], *tensors, sinks=batch.sinks, **given)


def assert_alike(got: ragged.Result, want: ragged.Result) -> None:
    """Where kernels add in the same order, bit by bit."""
    if got.kernel == want.kernel and "_ragged" in got.kernel:
        ragged.assert_same_bits(got, want)
        return
    for name in ("out", "lse"):
        for x, y in zip(getattr(got, name), getattr(want, name), strict=True):
            allowed = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(x.dtype, 1e-3)
            torch.testing.assert_close(x, y, atol=allowed, rtol=allowed)


# ---- q_offset ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", STANDING.values(), ids=STANDING)
@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
def test_queries_stand_where_they_are_said_to(
    dim: int, dim_v: int, options: dict[str, Any], kernel: str | None
) -> None:
    for i, dtype in enumerate(DTYPES):
        batch = ragged.make(LENGTHS_Q, LENGTHS_K, dtype=dtype, dim=dim, dim_v=dim_v,
                            heads=((4, 2), (6, 1))[i], sinks=i == 1, seed=i)  # fmt: skip
        made: ragged.Result | None = None
        for call in ragged.ways(batch).values():
            call = call._replace(tables=call.tables | {"q_offset": int32(OFFSETS)})
            got = ragged.run(call, DEVICE, sinks=batch.sinks, kernel=kernel, **options)
            if made is not None:
                assert_alike(got, made)
                continue
            made = got
            for b, offset in enumerate(OFFSETS):
                seen = visible(LENGTHS_Q[b], LENGTHS_K[b], offset=offset, **options)
                check_sequence(batch, b, got, attn_mask=seen[None, None])


@pytest.mark.parametrize("causal", ["bottom_right", "top_left"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_offsets_of_either_alignment_have_its_bits(
    causal: str, dim: int, kernel: str | None
) -> None:
    """Whatever the call's own is."""
    batch = ragged.make(LENGTHS_Q, LENGTHS_K, dtype="bf16", dim=dim)
    ends = [m - n for n, m in zip(LENGTHS_Q, LENGTHS_K, strict=True)]
    offsets = int32(ends if causal == "bottom_right" else [0] * len(ends))
    for call in ragged.ways(batch).values():
        want = ragged.run(call, DEVICE, kernel=kernel, causal=causal)
        call = call._replace(tables=call.tables | {"q_offset": offsets})
        for alignment in ("bottom_right", "top_left"):
            got = ragged.run(call, DEVICE, kernel=kernel, causal=alignment)
            ragged.assert_same_bits(got, want)


@pytest.mark.parametrize("group", [1, 4, 8])
def test_one_query_stands_anywhere(group: int, kernel: str | None) -> None:
    """Heads that share a tile see the keys of the one query."""
    lengths = (300, 70, 0, 200, 48, 515)
    offsets = (100, 69, 5, 0, -1, 600)
    for options in STANDING.values():
        batch = ragged.make((1,) * 6, lengths, dtype="bf16", dim=128, heads=(2 * group, 2))
        made: ragged.Result | None = None
        for call in ragged.ways(batch).values():
            extra = {"q_offset": int32(offsets), "max_seqlen_q": 1}
            call = call._replace(tables=call.tables | extra)
            got = ragged.run(call, DEVICE, kernel=kernel, **options)
            if made is not None:
                assert_alike(got, made)
                continue
            made = got
            for b, offset in enumerate(offsets):
                seen = visible(1, lengths[b], offset=offset, **options)
                check_sequence(batch, b, got, attn_mask=seen[None, None])


def test_latent_keys_of_queries_that_stand_anywhere() -> None:
    reason = families.why_not("sm90_mla")
    if reason is not None:
        pytest.skip(reason)
    lengths, offsets = (200, 333, 64), (150, 20, 63)
    batch = ragged.make((2, 3, 1), lengths, dtype="bf16", dim=576, dim_v=512, heads=(16, 1))
    batch = Batch(batch.q, batch.k, [x[..., :512].contiguous() for x in batch.k])
    call = ragged.paginate(batch, 64)
    extra = {"q_offset": int32(offsets)}
    call = call._replace(latent=512, tables=call.tables | extra)
    got = ragged.run(call, DEVICE, kernel="sm90_mla", causal="bottom_right")
    for b, offset in enumerate(offsets):
        seen = visible(batch.lengths_q[b], lengths[b], offset=offset, causal=True)
        check_sequence(batch, b, got, attn_mask=seen[None, None])


@pytest.mark.parametrize("options", STANDING.values(), ids=STANDING)
@pytest.mark.parametrize("family", ["sm89", "sm90"])
@pytest.mark.parametrize("dim", [64, 128])
def test_gradients_of_queries_that_stand_anywhere(
    dim: int, options: dict[str, Any], family: str
) -> None:
    if family == "sm90" and families.why_not("sm90_whole_tiles") is not None:
        pytest.skip("no sm90 kernels")
    given = ragged_backward.make(LENGTHS_Q, LENGTHS_K, DEVICE, dtype="bf16", dim=dim)
    masks = [
        torch.from_numpy(visible(n, m, offset=offset, **options))[None, None].to(DEVICE)
        for n, m, offset in zip(LENGTHS_Q, LENGTHS_K, OFFSETS, strict=True)
    ]
    for x, mask in zip(given.tensors, masks, strict=True):
        x["out"], x["lse"] = fm.flash_attention(
            x["q"], x["k"], x["v"], attn_mask=mask, return_lse=True
        )
    given.options = options
    made: ragged_backward.Result | None = None
    for way in ragged_backward.ways(given).values():
        way = way._replace(tables=way.tables | {"q_offset": int32(OFFSETS)})
        got = ragged_backward.run(given, way, kernel=family)
        assert kernels.stem(family) in got.kernel
        if made is None:
            check_gradients(given, got, [{"attn_mask": mask} for mask in masks])
        else:
            ragged_backward.assert_same_bits(got, made.parts)
        made = got


def check_gradients(
    given: ragged_backward.Given, got: ragged_backward.Result, options: list[dict[str, Any]]
) -> None:
    for x, part, each in zip(given.tensors, got.parts, options, strict=True):
        if x["q"].shape[1] == 0 or x["k"].shape[1] == 0:
            assert all((gradient == 0).all() for gradient in part.values())
            continue
        made = (part["dq"], part["dk"], part["dv"], None)
        dlse = x["dlse"] if given.dlse else None
        assert_gradients_accurate(made, x["dout"], x["q"], x["k"], x["v"], dlse, **each)


# ---- biases and masks ----------------------------------------------------------------------------


class Numbers:
    """A bias and a mask of all sequences; what no query and key have is NaN, and visible."""

    def __init__(self, kind: str, batch: Batch, tables: dict[str, Any], *, one: str = "",
                 odd: int = 0, seed: int = 0) -> None:  # fmt: skip
        generator = torch.Generator(DEVICE).manual_seed(seed)
        count, heads = len(batch.q), batch.q[0].shape[2]
        skips = tables.get("k_begin")
        self.skips = [0] * count if skips is None else skips.tolist()
        self.batch = batch
        room = sum(batch.lengths_q) + 320, sum(batch.lengths_k) + 60 + odd
        shape = pairs.extents((count, heads, *room), one)
        there = torch.full(shape, bool(one), device=DEVICE)
        for b, (skip, n, m) in enumerate(self.places()):
            if not one:
                there[b, :, :n, skip : skip + m] = True

        def chance(of: float) -> torch.Tensor:
            return torch.rand(shape, generator=generator, device=DEVICE) < of

        self.options: dict[str, torch.Tensor] = {}
        if "mask" in kind:
            self.options["attn_mask"] = chance(0.6) | ~there
        dtype = {"q": batch.q[0].dtype, "fp32": torch.float32}.get(kind.split()[-1])
        if dtype is not None:
            bias = torch.randn(shape, generator=generator, device=DEVICE)
            bias[chance(0.05)] = -60.0
            bias[chance(0.2)] = -torch.inf
            bias[~there] = torch.nan
            self.options["attn_bias"] = bias.to(dtype)

    def places(self) -> list[tuple[int, int, int]]:
        lengths = zip(self.skips, self.batch.lengths_q, self.batch.lengths_k, strict=True)
        return list(lengths)

    def of(self, b: int) -> dict[str, torch.Tensor]:
        """Those of a sequence alone."""
        skip, n, m = self.places()[b]
        made = {}
        for name, x in self.options.items():
            x = x[b : b + 1] if x.shape[0] > 1 else x
            x = x[:, :, :n] if x.shape[2] > 1 else x
            made[name] = x[..., skip : skip + m] if x.shape[3] > 1 else x
        return made


KINDS = ("mask", "q", "fp32", "mask and q", "mask and fp32")


def check_pairs(
    batch: Batch, call: Call, numbers: Numbers, *, exact: bool = True, **options: Any
) -> ragged.Result:
    """With the bits of dense calls, and beside float64."""
    got = ragged.run(call, DEVICE, sinks=batch.sinks, **numbers.options, **options)
    assert got.kernel.endswith("_ragged_biased")
    assert fm.last_launches()[0].local_bytes == 0
    dense = []
    for b in range(len(batch.q)):
        if exact:
            check_sequence(batch, b, got, **numbers.of(b), **options)
        tensors = [x[b].to(DEVICE) for x in (batch.q, batch.k, batch.v)]
        own = numbers.of(b)
        # Tensors without elements count as absent, and a kernel without them serves the call.
        kernel = (
            got.kernel.replace("_ragged", "") if all(map(torch.numel, own.values())) else "sm89"
        )
        dense.append(fm.flash_attention(
            *tensors, **own, **options, return_lse=True,
            sinks=None if batch.sinks is None else batch.sinks.to(DEVICE), kernel=kernel,
        ))  # fmt: skip
    want = ragged.Result([x[0] for x in dense], [x[1] for x in dense], "dense")
    ragged.assert_same_bits(got, want)
    return got


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right", "softcap": 3.0},
                                     {"window": (60, 3)}], ids=str)  # fmt: skip
@pytest.mark.parametrize(("dim", "dim_v"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_biases_and_masks(kind: str, options: dict[str, Any], dim: int, dim_v: int) -> None:
    dtype = ("fp16", "bf16")[dim // 64 % 2]
    batch = ragged.make(LENGTHS_Q, LENGTHS_K, dtype=dtype, dim=dim, dim_v=dim_v,
                        sinks=kind == "mask")  # fmt: skip
    for i, call in enumerate(ragged.ways(batch).values()):
        numbers = Numbers(kind, batch, call.tables, odd=i % 3, seed=i)
        check_pairs(batch, call, numbers, exact=i == 0, **options)


@pytest.mark.parametrize("one", pairs.BROADCASTS)
def test_broadcasts(one: str) -> None:
    batch = ragged.make(LENGTHS_Q, LENGTHS_K, dtype="bf16")
    for name in ("left", "paged"):
        call = ragged.ways(batch)[name]
        numbers = Numbers("mask and q", batch, call.tables, one=one)
        check_pairs(batch, call, numbers, exact=name == "left")


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("kind", ["mask", "q"])
def test_decoding(group: int, kind: str) -> None:
    """Heads that share a tile have numbers of their own."""
    batch = ragged.make((1,) * 6, (300, 70, 0, 200, 48, 515), dtype="bf16", dim=128,
                        heads=(2 * group, 2))  # fmt: skip
    for call in ragged.ways(batch).values():
        call = call._replace(tables=call.tables | {"max_seqlen_q": 1})
        got = ragged.run(call, DEVICE, **Numbers(kind, batch, call.tables).options)
        for b in range(6):
            check_sequence(batch, b, got, **Numbers(kind, batch, call.tables).of(b))


def test_offsets_beside_a_mask() -> None:
    batch = ragged.make(LENGTHS_Q, LENGTHS_K, dtype="bf16")
    for call in ragged.ways(batch).values():
        call = call._replace(tables=call.tables | {"q_offset": int32(OFFSETS)})
        numbers = Numbers("mask", batch, call.tables)
        got = ragged.run(call, DEVICE, causal=True, **numbers.options)
        for b, offset in enumerate(OFFSETS):
            seen = torch.from_numpy(visible(LENGTHS_Q[b], LENGTHS_K[b], offset=offset, causal=True))
            mask = numbers.of(b)["attn_mask"] & seen.to(DEVICE)
            check_sequence(batch, b, got, attn_mask=mask)


def check_wild(batch: Batch, b: int, got: ragged.Result, **given: Any) -> None:
    """What is no number in float64 is none, and nothing else."""
    want = attention_float64(*(x[b] for x in (batch.q, batch.k, batch.v)), **given)
    out, wild = to_numpy(got.out[b]), ~np.isfinite(want.out)
    assert wild.any()
    assert not np.isfinite(out[wild]).any()
    assert np.abs(out[~wild] - want.out[~wild]).max() < 0.01


def test_a_nan_is_of_the_rows_that_see_it() -> None:
    """NaN in values, keys and pages that do not exist, with a mask."""
    batch = ragged.make((200, 7), (230, 300), dtype="fp16")
    batch.v[0][0, 100, 0, 5] = torch.nan
    batch.k[1][0, 297, 1, 2] = torch.inf
    call = ragged.paginate(batch, 16)
    numbers = Numbers("mask", batch, call.tables)
    got = ragged.run(call, DEVICE, causal=True, **numbers.options)
    table = call.tables["page_table"]
    for b in range(2):
        check_wild(batch, b, got, causal=True, **numbers.of(b))
    hidden = numbers.options["attn_mask"].clone()
    hidden[0, :, :, 32:64] = False
    call.k[table[0, 2:4].long()] = torch.nan
    table[0, 2:4] = -1
    got = ragged.run(call, DEVICE, causal=True, **numbers.options)
    numbers.options["attn_mask"] = hidden
    for b in range(2):
        check_wild(batch, b, got, causal=True, **numbers.of(b))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right", "softcap": 3.0},
                                     {"window": (60, 3)}], ids=str)  # fmt: skip
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_gradients(kind: str, options: dict[str, Any], dim: int) -> None:
    given = ragged_backward.make(LENGTHS_Q, LENGTHS_K, DEVICE, dtype="bf16", dim=dim)
    batch = Batch(given.all("q"), given.all("k"), given.all("v"))
    given.options = options
    for i, way in enumerate(ragged_backward.ways(given).values()):
        numbers = Numbers(kind, batch, way.tables, odd=i % 3, seed=i)
        own = [numbers.of(b) | options for b in range(len(LENGTHS_Q))]
        for x, each in zip(given.tensors, own, strict=True):
            x["out"], x["lse"] = fm.flash_attention(x["q"], x["k"], x["v"], return_lse=True, **each)
        given.options = options | numbers.options
        got = ragged_backward.run(given, way)
        assert got.kernel.endswith("_ragged_biased_ada")
        if i == 0:
            check_gradients(given, got, own)
        want = []
        for x, each in zip(given.tensors, own, strict=True):
            given.options = each
            pairs_there = all(each[name].numel() for name in numbers.options)
            named = got.kernel.replace("_ragged", "") if pairs_there else "sm89"
            made = ragged_backward.dense_call(x, named, given)
            want.append(dict(zip(("dq", "dk", "dv"), made, strict=True)))
        ragged_backward.assert_same_bits(got, want)
