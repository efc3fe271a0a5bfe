"""The oracle of the GPU tests against the one of all tests, on the CPU."""

from __future__ import annotations

from typing import Any

import flashmoe_science as fm
import moe_oracle as on_host
import numpy as np
import producers
import pytest
import torch
from gpu import layer_oracle
from moe_cases import CASES, Case, make


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_layers_agree(case: Case, dtype: str) -> None:
    made = make(case, producers.Torch(), dtype)
    routing = made.pop("routing")
    ref = layer_oracle._layer(**made, **case.options, routing=routing, a=layer_oracle.EXACT,
                            want_pre=True)  # fmt: skip
    want = on_host.forward_float64(**made, **case.options, routing=routing)
    np.testing.assert_allclose(ref.out.numpy(), want.out, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(
        ref.pre_activation.numpy(), want.pre_activation, rtol=1e-11, atol=1e-12
    )
    out, pre = fm.moe_forward(**made, **case.options, routing=routing, return_pre_activation=True)
    layer_oracle.assert_forward(out, **made, **case.options, routing=routing, pre_activation=pre)
    for wrong in (out * 1.1, torch.where(torch.arange(40) == 3, torch.nan, out).to(out.dtype)):
        with pytest.raises(AssertionError, match=r"^out\["):
            layer_oracle.assert_forward(wrong, **made, **case.options, routing=routing)
    with pytest.raises(AssertionError, match=r"^pre_activation\["):
        layer_oracle.assert_forward(out, **made, **case.options, routing=routing,
                                  pre_activation=pre + 1)  # fmt: skip


ROUTES: list[dict[str, Any]] = [
    {"top_k": 3},
    {"top_k": 8, "scoring": "topk_softmax"},
    {"top_k": 2, "scoring": "sigmoid", "renormalize": True, "scale": 2.5},
    {"top_k": 3, "scoring": "sigmoid", "num_groups": 4, "top_groups": 2, "renormalize": True},
]


@pytest.mark.parametrize("options", ROUTES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("wild", [False, True])
def test_routes_agree(options: dict[str, Any], biased: bool, wild: bool) -> None:
    rng = np.random.default_rng(0)
    logits = rng.integers(-3, 4, (40, 16)).astype(np.float32)
    if wild:
        values = np.array([np.nan, np.inf, -np.inf], np.float32)
        logits = np.where(rng.random(logits.shape) < 0.2, values[rng.integers(0, 3, logits.shape)],
                          logits)  # fmt: skip
    if biased and options.get("scoring") == "sigmoid":
        options = options | {"selection_bias": rng.integers(-2, 3, 16).astype(np.float32) / 8}
    want = on_host.route(logits, **options)
    tensors = {n: torch.from_numpy(v) if isinstance(v, np.ndarray) else v
               for n, v in options.items()}  # fmt: skip
    got = layer_oracle.route(torch.from_numpy(logits), **tensors)
    for name in ("ids", "offsets", "pairs", "slots"):
        np.testing.assert_array_equal(getattr(got, name).numpy(), getattr(want, name), name)
    np.testing.assert_allclose(got.weights.numpy(), want.weights, rtol=1e-12)
    ours = fm.moe_route(torch.from_numpy(logits), **tensors, return_lse=True)
    layer_oracle.assert_routed(ours, got)
    with pytest.raises(AssertionError, match=r"^weights"):
        layer_oracle.assert_routed(ours._replace(weights=ours.weights + 1e-3), got)
    with pytest.raises(AssertionError, match=r"^pairs\[0\] is"):
        layer_oracle.assert_routed(ours._replace(pairs=ours.pairs.flip(0)), got)


@pytest.mark.parametrize("mapped", [False, True])
def test_given_ids_agree(mapped: bool) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(-2, 9, (30, 5))
    weights = rng.random((30, 5), np.float32)
    expert_map = rng.integers(-1, 7, 6).astype(np.int32) if mapped else None
    want = on_host.route_given(ids, weights, num_experts=6, expert_map=expert_map)
    got = layer_oracle.route_given(
        torch.from_numpy(ids), torch.from_numpy(weights), num_experts=6,
        expert_map=None if expert_map is None else torch.from_numpy(expert_map),
    )  # fmt: skip
    on_host.assert_routed(got._replace(weights=got.weights.float()), want)


@pytest.mark.parametrize("masked", [False, True])
def test_grouped_products_agree(masked: bool) -> None:
    rng = np.random.default_rng(0)
    w = torch.from_numpy(rng.standard_normal((3, 16, 24), np.float32)).half()
    x = torch.from_numpy(rng.standard_normal((3, 7, 24), np.float32)).half()
    bounds = {"counts": torch.tensor([7, 0, 3], dtype=torch.int32)}
    if not masked:
        x = x.view(21, 24)
        bounds = {"offsets": torch.tensor([1, 9, 9, 20], dtype=torch.int32)}
    out = fm.grouped_product(x, w, **bounds)
    on_host.assert_grouped_product(out, x, w, **bounds)
    layer_oracle.assert_grouped_product(out, x, w, **bounds)
    with pytest.raises(AssertionError, match=r"^out\["):
        layer_oracle.assert_grouped_product(out + 1, x, w, **bounds)
