"""Calls of the attention backward through the C ABI: random ones, and the verdict on one of them.

The rule is that of tests/reference_backward.py, in torch, in blocks, on the device of the tensors:

    max|ours - ref| <= 2 max|plain - ref| + 2 ulp + what fp32 leaves of a cancellation

for dq by query head, where plain's error counts as at least the median of all heads, for dk and dv
by KV head. ref comes from torch's autograd in float64, plain
from the formulas with every step rounded. tests/gpu/test_oracle.py holds the two files to each
other.
"""

from __future__ import annotations

import ctypes as c
import dataclasses
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import capi
import flashmoe_science as fm
import kernels
import torch
from gpu import cases, memory, oracle
from gpu.memory import Placed, Placement
from reference_backward import CANCELLATION

GRADIENTS = ("dq", "dk", "dv")  # dsinks have tests of their own
INPUTS = ("dout", "q", "k", "v", "out", "lse", "dlse")
READ = ("q", "k", "v", "dout", "out")
FAMILIES = ("sm90", "sm89")
# Head dimensions of each family's kernels. All multiples of 8 up to the largest are served.
COMPILED = {
    family: sorted(
        {(kernel.dim, kernel.dim_v) for kernel in kernels.attention(f"{family}_backward")}
    )
    for family in FAMILIES
}
VALUES = ("normal", "normal", "normal", "peaked", "tiny", "equal", "rising", "falling")
_BLOCK_SCORES = 2**24  # of one step, float64


@dataclass(frozen=True)
class Case(cases.Case):
    """One call. Tensors without a placement are contiguous."""

    dtype: str = "bf16"
    kernel: str | None = "sm90"
    dlse: bool = False
    wanted: tuple[str, ...] = GRADIENTS
    fp32: tuple[str, ...] = ()  # gradients of this dtype
    accumulate: bool = False
    where: Mapping[str, Placement] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        wanted = "" if self.wanted == GRADIENTS else f"-{'-'.join(self.wanted)}"
        fp32 = f"-fp32-{'-'.join(self.fp32)}" if self.fp32 else ""
        accumulate = "-accumulate" if self.accumulate else ""
        return f"{super().__str__()}{'-dlse' if self.dlse else ''}{wanted}{fp32}{accumulate}"

    @property
    def options(self) -> dict[str, Any]:
        names = ("layout", "causal", "window", "scale", "softcap")
        return {name: getattr(self, name) for name in names}

    def shape_of(self, name: str) -> tuple[int, ...]:
        if name in ("lse", "dlse"):
            return self.batch, self.heads_q, self.seq_q
        of_keys = name in ("k", "v", "dk", "dv")
        of_v = name in ("v", "dv", "out", "dout")
        return self.shape(
            self.seq_k if of_keys else self.seq_q,
            self.heads_kv if of_keys else self.heads_q,
            self.dim_v if of_v else self.dim,
        )


def dims(family: str) -> tuple[int, ...]:
    """Head dimensions that a family serves, for q and k as for v."""
    return tuple(range(8, max(COMPILED[family])[0] + 1, 8))


def random_case(seed: int, kernel: str) -> Case:
    """A case that a family serves. sm90's copy engine walks no negative strides."""
    rng = random.Random(f"backward {seed}")
    base = cases.random_case(seed)
    each = dims("sm90" if kernel == "cpu" else kernel)
    of_kernels = () if kernel == "cpu" else tuple(dim for dim, _ in COMPILED[kernel])
    dim = rng.choice((*of_kernels, rng.choice(each), rng.choice(each)))
    dim_v = dim if rng.random() < 0.5 else rng.choice(each)
    where = {}
    for name in (*READ, *GRADIENTS):
        flips = name == "out" or kernel == "sm89"
        placed = cases.random_placement(rng, readable=name in READ[:4], flips=flips)
        repeated = tuple(axis for axis in placed.broadcast if axis != base.seq_axis)
        where[name] = dataclasses.replace(placed, broadcast=repeated)
    for name in ("lse", "dlse"):
        order = rng.sample((0, 1, 2), 3)
        flipped = tuple(axis for axis in (0, 1, 2) if rng.random() < 0.2)
        gaps = tuple(rng.choice((0, 0, 5)) for _ in order)
        where[name] = Placement(tuple(order), gaps, flipped=flipped)
    wanted = GRADIENTS
    if rng.random() < 0.2:
        wanted = tuple(sorted(rng.sample(GRADIENTS, rng.choice((1, 2)))))
    names = ("batch", "seq_q", "seq_k", "heads_q", "heads_kv", "causal", "layout", "window")
    return Case(
        **{name: getattr(base, name) for name in (*names, "softcap", "dtype", "seed")},
        dim=dim,
        dim_v=dim_v,
        scale=rng.choice((None, None, round(rng.uniform(0.02, 1.5) * dim**-0.5, 4))),
        values=rng.choice(VALUES),
        kernel=kernel,
        dlse=rng.random() < 0.3,
        wanted=wanted,
        fp32=tuple(name for name in GRADIENTS if rng.random() < 0.15),
        accumulate=rng.random() < 0.15,
        where=where,
    )


# ---- the oracle --------------------------------------------------------------------------------


class _Block(NamedTuple):
    """Heads of all batches, laid end to end, and rows."""

    heads: slice
    rows: slice
    seen: torch.Tensor  # [rows, seq_k]


def _blocks(heads: int, seq_q: int, seq_k: int, device: torch.device, mask: dict[str, Any]
            ) -> Iterator[_Block]:  # fmt: skip
    rows_at_once = max(1, min(seq_q, _BLOCK_SCORES // max(seq_k, 1)))
    heads_at_once = max(1, _BLOCK_SCORES // max(seq_k * rows_at_once, 1))
    for row in range(0, seq_q, rows_at_once):
        rows = slice(row, min(row + rows_at_once, seq_q))
        index = torch.arange(rows.start, rows.stop, device=device)
        seen = oracle.visible(index, seq_q, seq_k, **mask)
        for head in range(0, heads, heads_at_once):
            yield _Block(slice(head, min(head + heads_at_once, heads)), rows, seen)


def _by_autograd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor,
    seen: torch.Tensor, scale: float, softcap: float | None, _: torch.dtype,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    q, k, v = leaves
    logits = (q @ k.transpose(1, 2)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~seen, -torch.inf)
    blind = ~seen.any(-1, keepdim=True)
    top = logits.detach().amax(-1, keepdim=True).masked_fill(blind, 0)
    weights = (logits - top).exp()
    total = weights.sum(-1, keepdim=True).masked_fill(blind, 1)
    out = (weights / total) @ v
    lse = (total.log() + top)[..., 0].masked_fill(blind[..., 0], 0)
    loss = (out * dout).sum() + (lse * dlse).sum()
    return torch.autograd.grad(loss, leaves)


def _by_formulas(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, dlse: torch.Tensor,
    seen: torch.Tensor, scale: float, softcap: float | None, rounded: torch.dtype,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    def round_(x: torch.Tensor) -> torch.Tensor:
        low = x.to(rounded).to(x.dtype)
        return torch.where(torch.isinf(low), x, low)

    logits = round_((q @ k.transpose(1, 2)) * scale)
    slope: torch.Tensor | float = 1.0
    if softcap is not None:
        bent = round_(torch.tanh(round_(logits / softcap)))
        logits = round_(bent * softcap)
        slope = round_(1 - bent * bent)
    logits = logits.masked_fill(~seen, -torch.inf)
    blind = ~seen.any(-1, keepdim=True)
    top = logits.amax(-1, keepdim=True).masked_fill(blind, 0)
    weights = (logits - top).exp()
    weights = round_(weights / weights.sum(-1, keepdim=True).masked_fill(blind, 1))
    dweights = round_(dout @ v.transpose(1, 2))
    delta = (dout * round_(weights @ v)).sum(-1, keepdim=True) - dlse[..., None]
    dscores = round_(weights * (dweights - delta) * slope).masked_fill(~seen, 0)
    dq = (dscores @ k) * scale
    dk = (dscores.transpose(1, 2) @ q) * scale
    return dq, dk, weights.transpose(1, 2) @ dout


def _gradients(
    given: Mapping[str, torch.Tensor], case: Case, compute: torch.dtype, rounded: torch.dtype
) -> dict[str, torch.Tensor]:
    """[batch, heads, seq, dim] each, whatever the layout."""
    names = ("q", "k", "v", "dout")
    q, k, v, dout = (oracle.heads_first(given[n], case.layout).to(compute) for n in names)
    batch, heads, seq_q, dim = q.shape
    heads_kv, seq_k = k.shape[1:3]
    group = heads // heads_kv
    dlse = given.get("dlse", torch.zeros(case.shape_of("dlse"), device=q.device))
    k, v = (x.repeat_interleave(group, 1).flatten(0, 1) for x in (k, v))
    q, dout, dlse = (x.to(compute).flatten(0, 1) for x in (q, dout, dlse))
    sums = {"dq": torch.zeros_like(q), "dk": torch.zeros_like(k), "dv": torch.zeros_like(v)}
    if seq_k > 0:
        of_block = _by_autograd if rounded == torch.float64 else _by_formulas
        mask = {"causal": case.causal, "window": case.window}
        for heads_, rows, seen in _blocks(batch * heads, seq_q, seq_k, q.device, mask):
            dq, dk, dv = of_block(
                q[heads_, rows], k[heads_], v[heads_], dout[heads_, rows], dlse[heads_, rows],
                seen, case.scale or dim**-0.5, case.softcap, rounded,
            )  # fmt: skip
            sums["dq"][heads_, rows] = dq
            sums["dk"][heads_] += dk
            sums["dv"][heads_] += dv
    by_head = {name: x.unflatten(0, (batch, heads)) for name, x in sums.items()}
    for name in ("dk", "dv"):
        by_head[name] = by_head[name].unflatten(1, (heads_kv, group)).sum(2)
    return {name: x.to(rounded).to(torch.float64) for name, x in by_head.items()}


def float64(given: Mapping[str, torch.Tensor], case: Case) -> dict[str, torch.Tensor]:
    return _gradients(given, case, torch.float64, torch.float64)


def plain(given: Mapping[str, torch.Tensor], case: Case) -> dict[str, torch.Tensor]:
    """The ordinary computation in the tensors' dtype: sums in fp32, results of steps rounded."""
    return _gradients(given, case, torch.float32, given["q"].dtype)


def _largest(x: torch.Tensor) -> torch.Tensor:
    """The largest number of each head."""
    return x.abs().amax((0, 2, 3))


def assert_accurate(
    got: Mapping[str, torch.Tensor],
    given: Mapping[str, torch.Tensor],
    case: Case,
    before: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Holds gradients, in the layout of the call, to the accuracy rule. `before` is what they were
    added to."""
    ref, usual = float64(given, case), plain(given, case)
    dtype = given["q"].dtype
    size = {name: float(given[name].abs().max()) if given[name].numel() else 0.0 for name in INPUTS
            if name in given and name != "lse"}  # fmt: skip
    dscores = CANCELLATION * size["dout"] * size["v"] * case.dim_v**0.5
    dscores *= case.scale or case.dim**-0.5
    left = {"dq": dscores * size["k"], "dk": dscores * size["q"], "dv": 0.0}
    rows = torch.arange(case.seq_q, device=given["q"].device)
    seen = oracle.visible(rows, case.seq_q, case.seq_k, case.causal, case.window)
    sees = {"dq": seen.any(1), "dk": seen.any(0), "dv": seen.any(0)}
    for name, gradient in got.items():
        x, want = oracle.heads_first(gradient, case.layout).double(), ref[name]
        assert x.shape == want.shape
        added = torch.zeros_like(want)
        if before is not None:
            added = oracle.heads_first(before[name], case.layout).double()
        if x.numel() == 0:
            continue
        unseen = x[:, :, ~sees[name]]
        untouched = added[:, :, ~sees[name]]
        assert (unseen == untouched).all(), f"{name}: not 0 where no pair is seen"
        plainly = _largest(usual[name] - want)
        if name == "dq":
            # What the ordinary computation does to a query head of two rows is luck: it counts as
            # at least the median of the heads. dk and dv have no such allowance.
            plainly = torch.maximum(plainly, plainly.median())
        allowed = 2 * plainly + left[name]
        want = want + added
        allowed += torch.tensor([2 * oracle.ulp(dtype, float(most)) for most in _largest(want)],
                                device=x.device)  # fmt: skip
        error = (x - want).abs()
        wrong = ~(error <= allowed[:, None, None])  # NaN is wrong
        if wrong.any():
            first = wrong.nonzero()[0].tolist()
            place = tuple(first)
            raise AssertionError(
                f"{name}{first} is {float(x[place])!r}, the reference {float(want[place])!r}; "
                f"allowed is {float(allowed[first[1]]):.3g}; wrong in {int(wrong.sum())} of "
                f"{wrong.numel()} places"
            )


# ---- calls -------------------------------------------------------------------------------------


def make_inputs(case: Case, device: str) -> dict[str, Placed]:
    """The inputs where the case has them: out and lse are those of the library's forward."""
    generator = torch.Generator(device=device).manual_seed(case.seed + 1)

    def normal(name: str) -> torch.Tensor:
        return torch.randn(case.shape_of(name), generator=generator, device=device)

    dtype = cases.DTYPES[case.dtype]
    values = dict(zip(("q", "k", "v"), cases.make_values(case, device), strict=True))
    values["dout"] = normal("dout").to(dtype)
    if case.dlse:
        values["dlse"] = normal("dlse")
    placed = {name: memory.place_values(x, case.where.get(name)) for name, x in values.items()}
    q, k, v = (placed[name].logical.contiguous() for name in ("q", "k", "v"))
    options = {"layout": case.layout, "scale": case.scale, **case.mask}
    out, lse = fm.flash_attention(q, k, v, **options, return_lse=True)
    placed["out"] = memory.place_values(out, case.where.get("out"))
    placed["lse"] = memory.place_values(lse, case.where.get("lse"))
    return placed


def make_gradients(case: Case, device: str) -> dict[str, Placed]:
    """Poisoned places for those that are wanted."""
    placed = {}
    for name in case.wanted:
        dtype = torch.float32 if name in case.fp32 else cases.DTYPES[case.dtype]
        placed[name] = memory.place(case.shape_of(name), dtype, device, case.where.get(name))
        placed[name].remember()
    return placed


def add_to(case: Case, outputs: Mapping[str, Placed]) -> dict[str, torch.Tensor]:
    """Numbers for gradients to be added to, and a copy of them."""
    generator = torch.Generator(device=outputs[case.wanted[0]].view.device)
    generator.manual_seed(case.seed + 2)
    for placed in outputs.values():
        placed.view.normal_(generator=generator)
    return {name: placed.logical.clone() for name, placed in outputs.items()}


class Call:
    """One call's arguments, to be made any number of times."""

    def __init__(self, case: Case, tensors: Mapping[str, Placed]):
        self.keep = tensors
        self.device = tensors["q"].view.device
        self.params = capi.attention_backward_params(
            {name: placed.raw() for name, placed in tensors.items()},
            **case.options | {"scale": case.scale or 0.0},
            accumulate=case.accumulate,
            kernel=case.kernel.encode() if case.kernel else None,
        )

    def plan(self) -> capi.Plan:
        return capi.attention_backward_plan(self.params)

    def workspace(self) -> torch.Tensor:
        """A workspace full of NaN."""
        lib, size = capi.load(), c.c_size_t()
        capi.check(lib.flashmoe_attention_backward_workspace_size(self.params, size), lib)
        return torch.full((size.value,), 255, dtype=torch.uint8, device=self.device)

    def run(self, workspace: torch.Tensor | None = None, stream: int | None = None) -> None:
        """On torch's current stream, unless another is given."""
        lib = capi.load()
        memory_ = self.workspace() if workspace is None else workspace
        if stream is None and self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device).cuda_stream
        status = lib.flashmoe_attention_backward(
            self.params, c.c_void_p(memory_.data_ptr()), memory_.numel(), c.c_void_p(stream or 0)
        )
        capi.check(status, lib)


def logical(tensors: Mapping[str, Placed]) -> dict[str, torch.Tensor]:
    return {name: placed.logical for name, placed in tensors.items()}


def gradients(case: Case, inputs: Mapping[str, Placed], workspace: torch.Tensor | None = None
              ) -> dict[str, torch.Tensor]:  # fmt: skip
    """The gradients of one call, in new tensors."""
    outputs = make_gradients(case, str(inputs["q"].view.device))
    if case.accumulate:
        add_to(case, outputs)
    Call(case, {**inputs, **outputs}).run(workspace)
    return logical(outputs)


def check_case(case: Case, device: str) -> None:
    """One call with everything poisoned: right, and nothing else in memory touched."""
    inputs = make_inputs(case, device)
    outputs = make_gradients(case, device)
    before = add_to(case, outputs) if case.accumulate else None
    for placed in inputs.values():
        placed.remember()
    call = Call(case, {**inputs, **outputs})
    call.run()
    for name, placed in inputs.items():
        assert placed.intact(inside=True), f"{name} was written to"
    for name, placed in outputs.items():
        assert placed.intact(), f"memory around {name} was written to"
    assert_accurate(logical(outputs), logical(inputs), case, before)
