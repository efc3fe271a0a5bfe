"""Layers of experts on the GPU: poisoned memory all around, and the verdict on one call."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import flashmoe_science as fm
import moe_chains
import moe_oracle
import torch
from gpu import memory
from gpu.memory import Placed, Placement
from moe_cases import Case

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
FAMILIES = ("sm89_few_tokens", "sm90", "sm89")  # of GPU kernels that compute layers
DEVICE = "cuda:0"


@functools.cache
def why_not(family: str) -> str | None:
    """None where the family computes layers on cuda:0, else the reason."""
    if family not in fm.build_info().kernel_families.split():
        return f"built without the {family} kernels"
    try:
        fm.moe_plan_for(tokens=4, hidden=256, inner=256, experts=8, top_k=2, device=DEVICE,
                        kernel=family)  # fmt: skip
    except (fm.UnsupportedError, fm.InvalidArgumentError) as error:
        return str(error)  # the latter where it computes attention alone
    return None


def serving() -> list[str]:
    return [family for family in FAMILIES if why_not(family) is None]


@functools.cache
def is_as_stated() -> bool:
    """Whether cuda:0 is a GPU as that of which tests/moe_chains.py states the kernels."""
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    stated = ((9, 0), moe_chains.MULTIPROCESSORS)
    return (torch.cuda.get_device_capability(0), multiprocessors) == stated


@functools.cache
def multiplies(family: str) -> bool:
    """Whether the family has grouped products."""
    rows = torch.zeros(1, 64, dtype=torch.bfloat16, device=DEVICE)
    offsets = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    try:
        fm.grouped_product_plan(rows, rows.expand(1, 64, 64).contiguous(), offsets=offsets,
                                kernel=family)  # fmt: skip
    except fm.InvalidArgumentError:
        return False
    return True


@dataclass(frozen=True)
class Layer:
    """A layer in its memory. `values` are moe_forward's tensors by name."""

    case: Case
    dtype: str
    placed: dict[str, Placed]
    routing: fm.MoeRouting

    @property
    def values(self) -> dict[str, torch.Tensor]:
        return {name: placed.view for name, placed in self.placed.items()}

    @property
    def arguments(self) -> dict[str, Any]:
        return {**self.values, **self.case.options, "routing": self.routing}


def generator(seed: int, device: str = DEVICE) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def random_ids(case: Case, skew: float = 0.0, device: str = DEVICE) -> torch.Tensor:
    """[T, K] int32, distinct in each token; with a skew the first experts get most tokens."""
    g = generator(case.seed, device)
    noise = torch.rand(case.tokens, case.experts, generator=g, device=device)
    place = torch.arange(case.experts, device=device) / case.experts
    return (noise + skew * place).argsort(1)[:, : case.top_k].int().contiguous()


def routing_of(ids: torch.Tensor, case: Case) -> fm.MoeRouting:
    """By the oracle: the products are tested apart from the routing."""
    device = str(ids.device)
    weights = torch.rand(ids.shape, generator=generator(case.seed + 1, device), device=device)
    weights = torch.where(ids < 0, 0, weights)
    return fm.MoeRouting(ids, weights, *moe_oracle.sort_pairs(ids, case.experts))


def place_weights(
    case: Case, dtype: str, *, gap: int = 0, shared: bool = False, device: str = DEVICE
) -> dict[str, Placed]:
    """Random values of x and of the weights, by moe_forward's names. `gap` elements of poison
    follow every row; `shared`: all experts have the same matrices, at the same place."""
    g = generator(case.seed, device)

    def put(shape: tuple[int, ...], scale: float, kind: str, turned: bool = False) -> Placed:
        order = (0, 2, 1) if turned else tuple(range(len(shape)))
        gaps = (gap,) * len(shape) if kind != "bias" else (0,) * len(shape)
        broadcast = (0,) if shared and kind == "weights" else ()
        stored = [1 if axis in broadcast else n for axis, n in enumerate(shape)]
        values = torch.randn(stored, generator=g, device=device) * scale
        low = DTYPES[dtype if case.bias == "x" or kind != "bias" else "fp32"]
        where = Placement(order, gaps, broadcast=broadcast)
        return memory.place_values(values.to(low).expand(shape), where)

    made = {"x": put((case.tokens, case.hidden), 1.0, "rows")}
    first = (case.experts, case.rows, case.hidden)
    made["w_gate_up"] = put(first, case.hidden**-0.5, "weights", case.transposed)
    if case.gate == "separate":
        made["w_up"] = put(first, case.hidden**-0.5, "weights", case.transposed)
    down = (case.experts, case.hidden, case.inner)
    made["w_down"] = put(down, case.inner**-0.5, "weights", case.turns_down)
    if case.bias is not None:
        made["b_gate_up"] = put((case.experts, case.rows), 1.0, "bias")
        made["b_down"] = put((case.experts, case.hidden), 1.0, "bias")
        if case.gate == "separate":
            made["b_up"] = put((case.experts, case.inner), 1.0, "bias")
    return made


def make(
    case: Case, dtype: str, ids: torch.Tensor | None = None, *, skew: float = 0.0, gap: int = 0
) -> Layer:
    """Random values, and routing by `ids` or at random. `gap` as in `place_weights`."""
    ids = random_ids(case, skew) if ids is None else ids
    return Layer(case, dtype, place_weights(case, dtype, gap=gap), routing_of(ids, case))


def poison_free_memory(size: int) -> None:
    """What torch next hands out in one piece of this size holds NaN and wild numbers."""
    if size > 0:
        torch.empty(size, dtype=torch.uint8, device=DEVICE).fill_(0xFF)


def plan_or_none(layer: Layer, family: str | None, **options: Any) -> fm.MoePlan | None:
    """None where the family says that it does not serve the call."""
    try:
        return fm.moe_plan(**layer.arguments, kernel=family, **options)
    except fm.UnsupportedError as error:
        if family is None or family not in str(error):
            raise
        return None


def check(layer: Layer, family: str | None, *, pre_activation: bool = False) -> bool:
    """One call with everything poisoned: right, and nothing else in memory touched. False where the
    family does not serve it."""
    case, low = layer.case, DTYPES[layer.dtype]
    plan = plan_or_none(layer, family, return_pre_activation=pre_activation)
    if plan is None:
        return False
    out = memory.place((case.tokens, case.hidden), low, DEVICE, Placement((0, 1), (8, 8)))
    pairs = case.tokens * case.top_k
    width = case.inner if case.gate == "none" else 2 * case.inner
    pre = memory.place((pairs, width), low, DEVICE, Placement((0, 1), (0, 16)))
    guarded = [*layer.placed.values(), out, pre]
    for placed in guarded:
        placed.remember()
    outputs: dict[str, Any] = {"out": out.view}
    if pre_activation:
        outputs["pre_activation"] = pre.view
    poison_free_memory(plan.workspace_bytes)
    assert fm.moe_forward(**layer.arguments, **outputs, kernel=family) is out.view
    torch.cuda.synchronize()
    if case.tokens:
        assert fm.last_launches() == plan.launches
        assert family is None or plan.family == family
    for name, placed in layer.placed.items():
        assert placed.intact(inside=True), f"{name} was written to"
    assert out.intact(), "memory around out was written to"
    taken = int(layer.routing.offsets[-1])
    untouched = pre.view[taken:] if pre_activation else pre.view
    poison = memory.bits(memory.poisoned(1, low, DEVICE))[0]
    assert (memory.bits(untouched) == poison).all(), "pre_activation beyond its pairs was written"
    assert pre.intact(), "memory around pre_activation was written to"
    moe_oracle.assert_forward(
        out.view, **layer.values, **case.options, routing=layer.routing,
        pre_activation=pre.view if pre_activation else None,
    )  # fmt: skip
    return True
