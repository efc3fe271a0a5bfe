"""Routing on the GPU: exactly the reference's order, for every mode, extent and kind of logits."""

from __future__ import annotations

import itertools
from typing import Any

import flashmoe_science as fm
import moe_oracle
import pytest
import torch
from gpu import memory
from gpu.moe_calls import clear_rows, few_values, with_wild
from gpu.moe_layers import DEVICE, DTYPES, generator, poison_free_memory

pytestmark = pytest.mark.gpu

TOKENS = (0, 1, 2, 3, 7, 31, 32, 33, 100, 257, 1000, 4097)
SHAPES = ((1, 1), (2, 1), (2, 2), (6, 2), (7, 7), (8, 2), (8, 8), (31, 5), (60, 4), (64, 6),
          (64, 8), (128, 8), (256, 8), (257, 3), (384, 8), (512, 10), (1023, 7),
          (1024, 32))  # fmt: skip
MODES: list[dict[str, Any]] = [
    {}, {"renormalize": True}, {"scoring": "topk_softmax"}, {"scoring": "sigmoid"},
    {"scoring": "sigmoid", "renormalize": True, "scale": 2.5},
]  # fmt: skip


def logits_of(tokens: int, experts: int, dtype: str, values: str = "normal") -> torch.Tensor:
    g = generator(tokens + 31 * experts)
    z = torch.randn(tokens, experts, generator=g, device=DEVICE)
    if values == "few":  # most are equal to some other
        z = (z * 1.5).round()
    elif values == "equal":
        z = torch.zeros_like(z)
    elif values == "rising":
        z = z.sort(1).values
    elif values == "far":
        z = z * 1e4
    elif values == "rather far":  # sigmoids that fp32 holds
        z = z * 10
    elif values in ("wild", "wildest"):
        z = with_wild(z, 0.1 if values == "wild" else 1.0, g)
    return z.to(DTYPES[dtype])


def check(logits: torch.Tensor, top_k: int, **options: Any) -> fm.MoeRouting:
    """Into poisoned outputs, with poisoned workspace and logits among poison."""
    tokens, experts = logits.shape
    placed = memory.place_values(logits, memory.Placement((0, 1), (0, 3)))
    placed.remember()

    def blank(*shape: int, dtype: torch.dtype = torch.int32) -> memory.Placed:
        made = memory.place(shape, torch.float32, DEVICE)
        made.remember()
        return made

    parts = [blank(tokens, top_k), blank(tokens, top_k), blank(experts + 1), blank(tokens * top_k),
             blank(tokens, top_k), blank(tokens)]  # fmt: skip
    views = [p.view if i in (1, 5) else p.view.view(torch.int32) for i, p in enumerate(parts)]
    out = fm.MoeRouting(*views)
    plan = fm.moe_route_plan(placed.view, top_k, **options, return_lse=True)
    assert len(plan.launches) <= 2
    poison_free_memory(plan.workspace_bytes)
    got = fm.moe_route(placed.view, top_k, **options, return_lse=True, out=out)
    torch.cuda.synchronize()
    assert placed.intact(inside=True), "logits were written to"
    for name, part in zip(fm.MoeRouting._fields, parts, strict=True):
        assert part.intact(), f"memory around {name} was written to"
    moe_oracle.assert_routed(got, moe_oracle.route(logits, top_k, **options))
    return got


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_every_mode(shape: tuple[int, int], mode: dict[str, Any], dtype: str) -> None:
    experts, top_k = shape
    for tokens in (1, 33):
        check(logits_of(tokens, experts, dtype), top_k, **mode)


@pytest.mark.parametrize("tokens", [*TOKENS, 40000])
def test_every_number_of_tokens(tokens: int) -> None:
    for experts, top_k in ((8, 2), (128, 8), (60, 4), (1024, 32)):
        check(logits_of(tokens, experts, "bf16"), top_k, renormalize=True)


@pytest.mark.parametrize("values", ["few", "equal", "rising", "far", "wild", "wildest"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_ties_and_wild_numbers(values: str, mode: dict[str, Any]) -> None:
    if values == "far" and mode.get("scoring") == "sigmoid":
        values = "rather far"
    # In one launch and in two, of which the first takes several tokens at a time.
    for (experts, top_k), dtype, tokens in itertools.product(SHAPES, ("fp32", "fp16"), (65, 600)):
        got = check(logits_of(tokens, experts, dtype, values), top_k, **mode)
        ordered = got.ids.sort(1).values
        assert (ordered[:, 1:] > ordered[:, :-1]).all(), "an expert was chosen twice"


GROUPS = [
    (16, 2, 1, 4),
    (64, 8, 4, 6),
    (160, 8, 3, 6),
    (256, 8, 4, 8),
    (512, 32, 5, 16),
    (12, 4, 2, 5),
]


@pytest.mark.parametrize("shape", GROUPS, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("values", ["quarters", "wild"])
def test_groups(shape: tuple[int, int, int, int], biased: bool, values: str) -> None:
    """Sigmoids of few values: without a bias many groups are equal."""
    experts, groups, top_groups, top_k = shape
    g = generator(experts)
    for tokens in (1, 37, 700):
        z = few_values((tokens, experts), g)
        if values == "wild":
            z = with_wild(z, 0.3, g)
        bias = None
        if biased:
            bias = torch.randn(experts, generator=g, device=DEVICE)
        z = clear_rows(z, bias, groups)
        assert len(z) >= tokens // 4
        check(z, top_k, scoring="sigmoid", num_groups=groups, top_groups=top_groups,
              selection_bias=bias, renormalize=True, scale=2.5)  # fmt: skip


@pytest.mark.parametrize("experts", [1, 7, 8, 60, 128, 257, 1024])
@pytest.mark.parametrize("values", ["few", "wild"])
def test_a_selection_bias_without_groups(experts: int, values: str) -> None:
    g = generator(experts)
    for tokens in (1, 300, 513):
        z = few_values((tokens, experts), g)
        bias = torch.randint(-2, 3, (experts,), generator=g, device=DEVICE) * 1.75
        if values == "wild":
            z, bias = with_wild(z, 0.3, g), with_wild(bias, 0.3, g)
        # One sigmoid and one bias: equal or apart.
        check(z, min(experts, 5), scoring="sigmoid", selection_bias=bias)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("weights", [None, "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("options", [{}, {"renormalize": True, "scale": 2.5}], ids=str)
def test_given_ids(
    kind: torch.dtype, mapped: bool, weights: str | None, options: dict[str, Any]
) -> None:
    for tokens in TOKENS:
        for experts, top_k in ((1, 1), (7, 7), (60, 4), (257, 8), (1024, 32)):
            g = generator(tokens + experts)
            ids = torch.randint(-3, experts + 3, (tokens, top_k), generator=g, device=DEVICE)
            ids = ids.to(kind)
            ends = torch.iinfo(kind)
            if tokens > 2:
                ids[1, 0], ids[2, -1] = ends.max, ends.min
            expert_map = None
            if mapped:
                expert_map = torch.randint(-2, experts + 2, (experts // 2 + 1,), generator=g,
                                           device=DEVICE).int()  # fmt: skip
            given = None
            if weights is not None:
                # Weights of one sign if they are divided by their sum, which could be all rounding.
                draw = torch.rand if options else torch.randn
                given = draw(tokens, top_k, generator=g, device=DEVICE).to(DTYPES[weights])
            chosen = {"num_experts": experts, "expert_map": expert_map} | options
            got = fm.moe_route_given(ids, given, **chosen)
            moe_oracle.assert_routed(got, moe_oracle.route_given(ids, given, **chosen))


def test_all_tokens_to_one_expert_and_none_to_others() -> None:
    for experts in (8, 128, 1024):
        z = logits_of(3000, experts, "bf16")
        z[:, experts // 2] = 100.0
        got = check(z, 2)
        assert int(got.counts[experts // 2]) == 3000
        assert int(got.counts.sum()) == 6000
    ids = torch.full((500, 3), -1, dtype=torch.int32, device=DEVICE)
    got = fm.moe_route_given(ids, num_experts=16)
    assert (got.offsets == 0).all() and (got.pairs == -1).all() and (got.slots == -1).all()


def test_rows_of_a_wider_tensor() -> None:
    room = logits_of(77, 40, "bf16")
    moe_oracle.assert_routed(fm.moe_route(room[:, 3:19], 4), moe_oracle.route(room[:, 3:19], 4))
    ids = torch.arange(60, device=DEVICE).view(10, 6) % 7
    moe_oracle.assert_routed(fm.moe_route_given(ids[:, 1:4], num_experts=5),
                             moe_oracle.route_given(ids[:, 1:4], num_experts=5))  # fmt: skip
