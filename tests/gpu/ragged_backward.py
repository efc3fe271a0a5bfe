"""Gradients of sequences of different lengths: every way to say where they are, and the verdict.

What no sequence has is NaN in every input, and gradients hold bits beforehand that must be zeros
behind a call, or be there still where it adds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import flashmoe_science as fm
import sequence_ways
import torch
from gpu import backward, memory, ragged
from gpu.backward import GRADIENTS
from gpu.memory import Placed
from gpu.ragged import int32
from sequence_ways import Way


@dataclass
class Given:
    """The inputs [1, length, ...] of each sequence on the device, and out and lse of the
    forward."""

    tensors: list[dict[str, torch.Tensor]]
    options: dict[str, Any]
    dlse: bool
    sinks: torch.Tensor | None = None
    _known: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def lengths_q(self) -> list[int]:
        return [x["q"].shape[1] for x in self.tensors]

    @property
    def lengths_k(self) -> list[int]:
        return [x["k"].shape[1] for x in self.tensors]

    def all(self, name: str) -> list[torch.Tensor]:
        return [x[name] for x in self.tensors]

    def dense(self, kernel: str | None) -> list[dict[str, torch.Tensor]]:
        """The gradients of each sequence's own call."""
        key = f"dense {kernel}"
        if key not in self._known:
            self._known[key] = [
                dict(zip(GRADIENTS, dense_call(x, kernel, self), strict=True)) for x in self.tensors
            ]
        return self._known[key]


def dense_call(
    tensors: Mapping[str, torch.Tensor], kernel: str | None, given: Given
) -> tuple[torch.Tensor, ...]:
    x = tensors
    made = fm.flash_attention_backward(
        x["dout"], x["q"], x["k"], x["v"], x["out"], x["lse"],
        dlse=x["dlse"] if given.dlse else None, kernel=kernel, **given.options,
    )  # fmt: skip
    return made.dq, made.dk, made.dv


def make(
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    device: str,
    *,
    dlse: bool = True,
    sinks: bool = False,
    options: Mapping[str, Any] | None = None,
    **how: Any,
) -> Given:
    batch = ragged.make(lengths_q, lengths_k, sinks=sinks, **how)
    generator = torch.Generator().manual_seed(how.get("seed", 0) + 1)
    options = dict(options or {})
    own = None if batch.sinks is None else batch.sinks.to(device)
    tensors = []
    for q, k, v in zip(batch.q, batch.k, batch.v, strict=True):
        each = {"q": q, "k": k, "v": v}
        each["dout"] = torch.randn((1, q.shape[1], q.shape[2], v.shape[3]), generator=generator).to(
            q.dtype
        )
        each["dlse"] = torch.randn((1, q.shape[2], q.shape[1]), generator=generator)
        each = {name: x.to(device) for name, x in each.items()}
        each["out"], each["lse"] = fm.flash_attention(
            each["q"], each["k"], each["v"], sinks=own, return_lse=True, **options
        )
        tensors.append(each)
    return Given(tensors, options, dlse, own)


class Rows(sequence_ways.Rows):
    def lay(self, parts: list[torch.Tensor], axis: int = 1) -> torch.Tensor:
        """Among NaN; the rows of parts [1, ...] are their `axis`."""
        shape = list(parts[0].shape)
        shape[0], shape[axis] = self.batch, self.length
        made = torch.full(shape, torch.nan, dtype=parts[0].dtype, device=parts[0].device)
        for (b, begin), part in zip(self.places, parts, strict=True):
            made[b].narrow(axis - 1, begin, part.shape[axis]).copy_(part[0])
        return made


def ways(given: Given) -> dict[str, Way]:
    return sequence_ways.ways(given.lengths_q, given.lengths_k, 300, Rows, int32)


class Result(NamedTuple):
    """Gradients of each sequence, and of sinks."""

    parts: list[dict[str, torch.Tensor]]
    dsinks: torch.Tensor | None
    kernel: str


def run(
    given: Given,
    way: Way,
    *,
    kernel: str | None = None,
    wanted: Sequence[str] = GRADIENTS,
    fp32: Sequence[str] = (),
    added_to: float | None = None,
    layout: str = "bshd",
) -> Result:
    """One call with everything poisoned; `added_to` is what gradients hold that are added to. What
    no sequence has is 0 then, or what it was."""
    device = str(given.tensors[0]["q"].device)
    inputs, tables, bounds = {}, {}, {}
    for name in ("dout", "q", "k", "v", "out", "lse", "dlse"):
        if name == "dlse" and not given.dlse:
            continue
        rows = way.keys if name in "kv" else way.queries
        axis = 2 if name in ("lse", "dlse") else 1
        inputs[name] = memory.place_values(rows.lay(given.all(name), axis))
    for name, x in way.tables.items():
        if isinstance(x, torch.Tensor):
            tables[name] = memory.place_values(x.to(device))
        else:
            bounds[name] = x
    for placed in (*inputs.values(), *tables.values()):
        placed.remember()
    outputs: dict[str, Placed] = {}
    for name in wanted:
        like = inputs[name[1:]].view
        outputs[name] = memory.place(
            like.shape, torch.float32 if name in fp32 else like.dtype, device
        )
        if added_to is not None:
            outputs[name].view.fill_(added_to)
        outputs[name].remember()
    sinks = None if given.sinks is None else {"sinks": given.sinks}
    if sinks is not None:
        sinks["dsinks"] = torch.full_like(given.sinks, added_to or torch.nan)

    def view(placed: Placed) -> torch.Tensor:
        x = placed.view
        return x.transpose(1, 2) if layout == "bhsd" and x.ndim == 4 else x

    fm.flash_attention_backward(
        **{name: view(x) for name, x in (inputs | outputs).items()},
        **{name: x.view for name, x in tables.items()}, **bounds, **(sinks or {}),
        wanted=(*(name in wanted for name in GRADIENTS), sinks is not None),
        accumulate=added_to is not None, layout=layout, kernel=kernel, **given.options,
    )  # fmt: skip
    launches = fm.last_launches()
    for name, placed in (inputs | tables).items():
        assert placed.intact(inside=True), f"{name} was written to"
    parts: list[dict[str, torch.Tensor]] = [{} for _ in given.tensors]
    for name, placed in outputs.items():
        assert placed.intact(), f"memory around {name} was written to"
        rows, lengths = (
            (way.queries, given.lengths_q) if name == "dq" else (way.keys, given.lengths_k)
        )
        for b, x in enumerate(rows.take(placed.view, lengths)):
            parts[b][name] = x.clone()
            x.fill_(added_to or 0.0)
        rest = placed.view
        assert (rest == (added_to or 0.0)).all(), f"{name}: rows that no sequence has"
    kernels = [x.kernel for x in launches if x.kernel.startswith("attention_backward_sm")]
    main = [x for x in kernels if not x.removeprefix("attention_backward_").startswith("pro")]
    return Result(parts, None if sinks is None else sinks["dsinks"], main[0] if main else "")


def dense_kernel(kernel: str) -> str:
    return kernel.replace("_ragged", "")


def assert_same_bits(got: Result, want: list[dict[str, torch.Tensor]]) -> None:
    for name in got.parts[0]:
        mine, other = ([x[name] for x in each] for each in (got.parts, want))
        assert [x.shape for x in mine] == [x.shape for x in other]
        if torch.equal(*(memory.bits(torch.cat(x, 1)) for x in (mine, other))):
            continue
        wrong = [b for b, (x, y) in enumerate(zip(mine, other, strict=True))
                 if not torch.equal(memory.bits(x), memory.bits(y))]  # fmt: skip
        worst = max(float((mine[b].double() - other[b].double()).abs().max()) for b in wrong)
        raise AssertionError(f"{name} of sequences {wrong}: {got.kernel}, as far off as {worst}")


def assert_accurate(given: Given, parts: list[dict[str, torch.Tensor]]) -> None:
    """Checks each sequence by the rule of the dense kernels."""
    for tensors, got in zip(given.tensors, parts, strict=True):
        q, k, v = (tensors[name] for name in "qkv")
        case = backward.Case(
            batch=1, seq_q=q.shape[1], seq_k=k.shape[1], heads_q=q.shape[2], heads_kv=k.shape[2],
            dim=q.shape[3], dim_v=v.shape[3], causal=given.options.get("causal", "none"),
            window=given.options.get("window"), scale=given.options.get("scale"),
            softcap=given.options.get("softcap"), dlse=given.dlse,
        )  # fmt: skip
        read = {name: x for name, x in tensors.items() if name != "dlse" or given.dlse}
        backward.assert_accurate(got, read, case)
