"""Gradients of routing on the GPU against torch's autograd in float64."""

from __future__ import annotations

from typing import Any

import capi_moe
import flashmoe_science as fm
import pytest
import torch
from gpu import memory
from gpu.memory import Placed, Placement
from gpu.moe_calls import Call
from gpu.moe_layers import DEVICE, DTYPES, generator

pytestmark = pytest.mark.gpu

# Tokens, experts, K: of a lane each and of several, at the ends of warps and blocks.
SHAPES = (
    (1, 1, 1), (200, 13, 4), (70, 32, 8), (5, 33, 2), (600, 256, 8), (33, 1024, 32), (3, 1000, 10)
)  # fmt: skip


def reference(
    logits: torch.Tensor, ids: torch.Tensor, dweights: torch.Tensor, dlse: torch.Tensor | None,
    scoring: str, renormalize: bool, scale: float, dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    z = logits.to(dtype).clone().requires_grad_()
    chosen = z.gather(1, ids.long())
    if scoring == "softmax":
        scores = z.softmax(-1).gather(1, ids.long())
    else:
        scores = chosen.softmax(-1) if scoring == "topk_softmax" else chosen.sigmoid()
    if renormalize:
        scores = scores / scores.sum(-1, keepdim=True)
    loss = (scores * scale * dweights.to(dtype)).sum()
    if dlse is not None:
        loss = loss + (z.logsumexp(-1) * dlse.to(dtype)).sum()
    loss.backward()
    assert z.grad is not None
    return z.grad.double()


def call_of(inputs: dict[str, torch.Tensor], output: dict[str, Placed], **values: Any) -> Call:
    placed = {
        name: memory.place_values(x, Placement((0, 1), (3, 0)) if name == "logits" else None)
        for name, x in inputs.items()
    }
    return Call(capi_moe.RouteBackwardParams, placed | output, **values)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("scoring", capi_moe.SCORINGS)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("lse", [False, True])
def test_logits(dtype: str, scoring: str, renormalize: bool, lse: bool) -> None:
    for tokens, experts, top_k in SHAPES:
        g = generator(tokens + experts)

        def normal(*shape: int, g: torch.Generator = g) -> torch.Tensor:
            return torch.randn(shape, generator=g, device=DEVICE)

        logits = (3 * normal(tokens, experts)).to(DTYPES[dtype])
        groups = (
            {"num_groups": 8, "top_groups": 4} if scoring == "sigmoid" and experts == 256 else {}
        )
        ids = fm.moe_route(logits, top_k, scoring=scoring, **groups).ids
        dweights, dlse = normal(tokens, top_k), normal(tokens) if lse else None
        options = (scoring, renormalize, 2.5)
        ref = reference(logits, ids, dweights, dlse, *options, torch.float64)
        plain = reference(logits, ids, dweights, dlse, *options, torch.float32)
        given = {"dweights": dweights, "ids": ids, "logits": logits}
        if dlse is not None:
            given["dlse"] = dlse
        for out in dict.fromkeys((dtype, "fp32")):
            dlogits = memory.place((tokens, experts), DTYPES[out], DEVICE,
                                   Placement((0, 1), (5, 0)))  # fmt: skip
            values = {"scoring": capi_moe.SCORINGS[scoring], "renormalize": int(renormalize),
                      "scale": 2.5}  # fmt: skip
            call = call_of(given, {"dlogits": dlogits}, **values)
            call.check_launch(0xFF, ("dlogits",))
            assert call.kernels == ("moe_route_backward",)
            eps = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11}[out]
            # Twice what torch's fp32 is off by, and the rounding of what is returned.
            allowed = 2 * float((plain - ref).abs().max()) + 1e-6 * float(ref.abs().max())
            tiny = 2.0**-24 if out == "fp16" else 1e-30
            error = (dlogits.view.double() - ref).abs()
            assert bool((error <= allowed + eps * ref.abs() + tiny).all()), float(error.max())
            # Added to what is there: an auxiliary loss.
            dlogits.view.fill_(0.5)
            adds = call_of(given, {"dlogits": dlogits}, accumulate=1, **values)
            adds.check_launch(0xFF, ("dlogits",))
            error = (dlogits.view.double() - (ref + 0.5)).abs()
            limit = allowed + eps * (ref + 0.5).abs() + 1e-6
            assert bool((error <= limit).all()), float(error.max())


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("top_k", [1, 3, 32])
def test_given_weights(dtype: str, renormalize: bool, top_k: int) -> None:
    g = generator(2)
    shape = (50, top_k)
    given = (torch.rand(shape, generator=g, device=DEVICE) + 0.1).to(DTYPES[dtype])
    given[7] = 0  # a sum of 0 divides nothing
    ids = torch.randint(-1, 5, shape, generator=g, device=DEVICE).int()
    dweights = torch.randn(shape, generator=g, device=DEVICE)
    s = given.double().requires_grad_()
    total = s.sum(-1, keepdim=True)
    normal = torch.where(total == 0, s, s / torch.where(total == 0, 1.0, total))
    weights = (normal if renormalize else s) * 0.5 * (ids >= 0)
    (weights * dweights.double()).sum().backward()
    assert s.grad is not None
    made = memory.place(shape, torch.float32, DEVICE, Placement((0, 1), (1, 0)))
    call = call_of(
        {"dweights": dweights, "ids": ids, "given_weights": given}, {"dgiven_weights": made},
        renormalize=int(renormalize), scale=0.5,
    )  # fmt: skip
    call.check_launch(0x5A, ("dgiven_weights",))
    torch.testing.assert_close(made.view.double(), s.grad, rtol=2e-6, atol=2e-6)


def test_nan_and_foreign_ids_stay_in_their_rows() -> None:
    logits = torch.randn(9, 6, generator=generator(3), device=DEVICE)
    ids = fm.moe_route(logits, 2).ids.clone()
    logits[4] = torch.nan
    ids[6] = torch.tensor([2**31 - 1, -(2**31)])
    made = fm.moe_route_backward(
        torch.randn(9, 2, device=DEVICE), fm.MoeRouting(ids, None, None, None, None), logits=logits
    )
    assert torch.equal(made.isnan().any(1), torch.arange(9, device=DEVICE) == 4)
    assert (made[6] == 0).all()


def test_ids_that_repeat() -> None:
    """As no routing writes them: each counts."""
    logits = torch.randn(5, 40, generator=generator(4), device=DEVICE)
    ids = torch.tensor([[3, 3, 35]], device=DEVICE).int().repeat(5, 1)
    dweights = torch.randn(5, 3, generator=generator(5), device=DEVICE)
    for scoring in ("softmax", "sigmoid"):
        ref = reference(logits, ids, dweights, None, scoring, False, 1.0, torch.float64)
        made = fm.moe_route_backward(
            dweights, fm.MoeRouting(ids, None, None, None, None), logits=logits, scoring=scoring
        )
        torch.testing.assert_close(made.double(), ref, rtol=1e-5, atol=1e-6)


def test_bits_of_every_run_and_a_captured_call() -> None:
    g = generator(6)
    logits = torch.randn(3000, 128, generator=g, device=DEVICE).bfloat16()
    ids = fm.moe_route(logits, 8).ids
    dweights = torch.randn(3000, 8, generator=g, device=DEVICE)
    made = memory.place((3000, 128), torch.bfloat16, DEVICE)
    call = call_of({"dweights": dweights, "ids": ids, "logits": logits}, {"dlogits": made},
                   renormalize=1)  # fmt: skip
    call.check_launch(0xFF, ("dlogits",))
    want = made.view.clone()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.cuda.graph(graph, stream=stream):
        call.launch()
    for _ in range(200):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(memory.bits(made.view), memory.bits(want))
