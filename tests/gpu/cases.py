"""Random attention calls, and the verdict on one of them."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, field
from typing import Any

import flashmoe_science as fm
import kernels
import torch
from gpu import memory, oracle
from gpu.memory import Placed, Placement

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
CAUSAL = ("none", "bottom_right", "top_left")
LENGTHS = (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 48, 63, 64, 65, 96, 100, 127, 128, 129, 191, 200, 255,
           256, 257, 300, 511, 513, 777, 1000, 1023, 1025, 2049)  # fmt: skip
DIMS = tuple(range(8, 257, 8))
HEADS = ((1, 1), (2, 2), (5, 5), (8, 8), (3, 1), (8, 1), (4, 2), (6, 3), (8, 2), (16, 4))
VALUES = ("normal", "normal", "normal", "peaked", "huge", "tiny", "equal", "rising", "falling",
          "buried")  # fmt: skip
SINKS = ("normal", "low", "high", "infinite")
MOST_SCORES = 2**24  # batch * heads_q * seq_q * seq_k of a random case

_CONTIGUOUS = memory.contiguous(4)


@dataclass(frozen=True)
class Case:
    """One call. Placements are those of q, k, v and out."""

    dtype: str = "fp16"
    batch: int = 1
    seq_q: int = 128
    seq_k: int = 128
    heads_q: int = 1
    heads_kv: int = 1
    dim: int = 64
    dim_v: int = 64
    causal: str = "none"
    layout: str = "bshd"
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: str | None = None
    """A kind of them: one of SINKS."""
    values: str = "normal"
    kernel: str | None = None
    entry: str = "python"
    seed: int = 0
    placements: tuple[Placement, ...] = field(default=(_CONTIGUOUS,) * 4, repr=False)
    lse_placement: Placement = field(default=memory.contiguous(3), repr=False)

    def __str__(self) -> str:
        return (
            f"{self.seed}-{self.dtype}-b{self.batch}-s{self.seq_q}x{self.seq_k}"
            f"-h{self.heads_q}x{self.heads_kv}-d{self.dim}x{self.dim_v}-{self.causal}"
            f"{'' if self.window is None else '-w{}x{}'.format(*self.window)}"
            f"{'' if self.softcap is None else f'-cap{self.softcap:g}'}"
            f"{'' if self.sinks is None else f'-{self.sinks}-sinks'}"
            f"-{self.layout}-{self.values}-{self.entry}"
        )

    @property
    def mask(self) -> dict[str, Any]:
        """causal, window and softcap as flash_attention takes them."""
        causal = False if self.causal == "none" else self.causal
        return {"causal": causal, "window": self.window, "softcap": self.softcap}

    @property
    def seq_axis(self) -> int:
        return 2 if self.layout == "bhsd" else 1

    def shape(self, seq: int, heads: int, dim: int) -> tuple[int, int, int, int]:
        if self.layout == "bhsd":
            return self.batch, heads, seq, dim
        return self.batch, seq, heads, dim


def random_placement(rng: random.Random, *, readable: bool, flips: bool) -> Placement:
    """Row-contiguous, 16-byte aligned, otherwise anything."""
    outer = [0, 1, 2]
    if rng.random() < 0.5:
        rng.shuffle(outer)
    chunks = (0, 0, 0, 1, 3, 16) if rng.random() < 0.6 else (0,)
    gaps = tuple(8 * rng.choice(chunks) for _ in range(4))
    broadcast: tuple[int, ...] = ()
    flipped: tuple[int, ...] = ()
    if readable and rng.random() < 0.15:
        broadcast = tuple(rng.sample((0, 1, 2), rng.choice((1, 1, 2))))
    if flips:
        flipped = tuple(axis for axis in (0, 1, 2) if rng.random() < 0.5)
    return Placement((*outer, 3), gaps, 8 * rng.randrange(16), broadcast, flipped)


def random_case(seed: int, kernels: tuple[str | None, ...] = (None,)) -> Case:
    rng = random.Random(seed)
    dtype = rng.choice(("fp16", "bf16"))
    seq_q = rng.choice(LENGTHS)
    seq_k = seq_q if rng.random() < 0.4 else rng.choice(LENGTHS)
    dim = rng.choice((64, 128, rng.choice(DIMS), rng.choice(DIMS)))
    dim_v = dim if rng.random() < 0.5 else rng.choice(DIMS)
    if rng.random() < 0.1:
        dim, dim_v = 192, 128
    heads_q, heads_kv = rng.choice(HEADS)
    batch = rng.randrange(1, 5)
    if batch * heads_q * seq_q * seq_k > MOST_SCORES:
        batch = 1
    if heads_q * seq_q * seq_k > MOST_SCORES:
        heads_q, heads_kv = rng.choice(((1, 1), (2, 1), (3, 3)))
    entry = rng.choice(("python", "python", "c"))
    flips = entry == "c" and rng.random() < 0.7
    lse_order = [0, 1, 2]
    rng.shuffle(lse_order)
    case = Case(
        dtype=dtype,
        batch=batch,
        seq_q=seq_q,
        seq_k=seq_k,
        heads_q=heads_q,
        heads_kv=heads_kv,
        dim=dim,
        dim_v=dim_v,
        causal=rng.choice(CAUSAL),
        layout=rng.choice(("bshd", "bhsd")),
        scale=rng.choice((None, None, round(rng.uniform(0.02, 1.5) * dim**-0.5, 4))),
        values=rng.choice(VALUES),
        kernel=rng.choice(kernels),
        entry=entry,
        seed=seed,
        placements=tuple(
            random_placement(rng, readable=name != "out", flips=flips)
            for name in ("q", "k", "v", "out")
        ),
        lse_placement=Placement(tuple(lse_order), tuple(rng.choice((0, 0, 5)) for _ in "bhs")),
    )
    if rng.random() < 0.4:
        left, right = (rng.choice((None, 0, 1, rng.choice(LENGTHS))) for _ in "lr")
        if case.causal != "none":
            right = rng.choice((None, 0))
        case = dataclasses.replace(case, window=(left, right))
    if rng.random() < 0.25:
        case = dataclasses.replace(case, softcap=rng.choice((0.5, 5.0, 30.0, 1e3)))
    if rng.random() < 0.25:
        case = dataclasses.replace(case, sinks=rng.choice(SINKS))
    return case


def is_walkable(case: Case) -> bool:
    """Whether sm90 serves these strides of q, k, v and out: above 0 along the sequence, 0
    or more along batches and heads. An axis of one entry is never stepped along."""
    shapes = (
        case.shape(case.seq_q, case.heads_q, case.dim),
        case.shape(case.seq_k, case.heads_kv, case.dim),
        case.shape(case.seq_k, case.heads_kv, case.dim_v),
        case.shape(case.seq_q, case.heads_q, case.dim_v),
    )
    return not any(
        axis == case.seq_axis if axis in where.broadcast else axis in where.flipped
        for shape, where in zip(shapes, case.placements, strict=True)
        for axis in (0, 1, 2)
        if shape[axis] > 1
    )


def walkable(case: Case) -> Case:
    """The case without the strides that sm90 refuses. Repeated batches and heads stay."""
    placements = tuple(
        dataclasses.replace(
            where, broadcast=tuple(a for a in where.broadcast if a != case.seq_axis), flipped=()
        )
        for where in case.placements
    )
    return dataclasses.replace(case, placements=placements)


def for_family(case: Case, family: str) -> Case:
    """The case asking for that family's kernel, with strides that it walks."""
    if family in kernels.COPY_ENGINE:
        case = walkable(case)
    return dataclasses.replace(case, kernel=family)


def make_values(case: Case, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of a case, contiguous."""
    generator = torch.Generator(device=device).manual_seed(case.seed)

    def normal(seq: int, heads: int, dim: int) -> torch.Tensor:
        return torch.randn(case.shape(seq, heads, dim), generator=generator, device=device)

    q = normal(case.seq_q, case.heads_q, case.dim)
    k = normal(case.seq_k, case.heads_kv, case.dim)
    v = normal(case.seq_k, case.heads_kv, case.dim_v)
    along_keys = (1, -1, 1, 1) if case.layout == "bshd" else (1, 1, -1, 1)
    ramp = torch.linspace(0, 1, case.seq_k, device=device).view(along_keys)
    if case.values == "peaked":
        q = q * 8
    elif case.values == "huge":
        q, k = q * 1e3, k * 1e3
    elif case.values == "tiny":
        q, k = q * 1e-3, k * 1e-3
    elif case.values == "equal":
        k = torch.full_like(k, 0.5)
    elif case.values in ("rising", "falling"):
        # Every step of the main loop finds a new maximum, or none after the first.
        q = q.abs() + 0.5
        k = 0.1 * k + 3 * (ramp if case.values == "rising" else 1 - ramp)
    elif case.values == "buried":
        # All logits far below zero, the later ones less so.
        q = q.abs() + 0.5
        k = 0.1 * k - 60 + 30 * (ramp > 0.7)
    elif case.values == "separated":
        # Logits of a thousand, of sums that are exact in any order: no rounding decides which wins.
        q, k = (q * 4).round() * 4, (k * 4).round() * 4
    dtype = DTYPES[case.dtype]
    return q.to(dtype), k.to(dtype), v.to(dtype)


def make_sinks(case: Case, device: str) -> torch.Tensor | None:
    """[heads_q], every third element of memory that is NaN elsewhere; fp32 or the case's dtype."""
    if case.sinks is None:
        return None
    generator = torch.Generator().manual_seed(case.seed)
    values = torch.randn(case.heads_q, generator=generator)
    if case.sinks in ("low", "high"):
        values = values + {"low": -50.0, "high": 50.0}[case.sinks]
    elif case.sinks == "infinite":
        values[::2] = torch.inf
        values[::3] = -torch.inf
    dtype = torch.float32 if case.seed % 2 else DTYPES[case.dtype]
    memory_ = torch.full((3 * case.heads_q + 2,), torch.nan, dtype=dtype, device=device)
    sinks = memory_[2:-1:3]
    sinks.copy_(values)
    return sinks


def place_case(case: Case, device: str) -> tuple[Placed, Placed, Placed]:
    """q, k and v where the case has them, NaN all around."""
    q, k, v = (
        memory.place_values(x, where)
        for x, where in zip(make_values(case, device), case.placements, strict=False)
    )
    return q, k, v


def place_outputs(case: Case, device: str) -> tuple[Placed, Placed]:
    out = memory.place(
        case.shape(case.seq_q, case.heads_q, case.dim_v),
        DTYPES[case.dtype],
        device,
        case.placements[3],
    )
    lse = memory.place(
        (case.batch, case.heads_q, case.seq_q), torch.float32, device, case.lse_placement
    )
    out.remember()
    lse.remember()
    return out, lse


def run_case(case: Case, q: Placed, k: Placed, v: Placed, out: Placed, lse: Placed) -> None:
    options = {"layout": case.layout, "scale": case.scale, **case.mask}
    sinks = make_sinks(case, str(q.view.device))
    if case.entry == "c":
        views = (q.raw(), k.raw(), v.raw(), out.raw(), lse.raw())
        given = None
        if sinks is not None:
            given = memory.raw_tensor(sinks, sinks.data_ptr(), sinks.shape, sinks.stride())
        options |= {"causal": case.causal, "sinks": given}
        memory.call(*views, **options, kernel=case.kernel)
        return
    result = fm.flash_attention(
        q.view,
        k.view,
        v.view,
        **options,
        sinks=sinks,
        return_lse=True,
        out=out.view,
        lse=lse.view,
        kernel=case.kernel,
    )
    assert result[0] is out.view
    assert result[1] is lse.view


def check_case(case: Case, device: str) -> None:
    """One call with everything poisoned: right, and nothing else in memory touched."""
    inputs = place_case(case, device)
    outputs = place_outputs(case, device)
    for placed in inputs:
        placed.remember()
    run_case(case, *inputs, *outputs)
    for name, placed in zip(("q", "k", "v"), inputs, strict=True):
        assert placed.intact(inside=True), f"{name} was written to"
    for name, placed in zip(("out", "lse"), outputs, strict=True):
        assert placed.intact(), f"memory around {name} was written to"
    out, lse = outputs
    q, k, v = (placed.logical for placed in inputs)
    oracle.assert_accurate(
        out.logical,
        lse.logical,
        q,
        k,
        v,
        case.causal,
        window=case.window,
        scale=case.scale,
        softcap=case.softcap,
        sinks=make_sinks(case, device),
        layout=case.layout,
        lse_slack=oracle.logit_rounding(q, k, case.scale) if case.values == "huge" else 0.0,
    )
