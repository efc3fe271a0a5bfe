"""Gradients of routing on the CPU against torch's autograd in float64."""

from __future__ import annotations

import ctypes
from typing import Any

import capi
import capi_moe
import numpy as np
import pytest
import torch
from reference import to_numpy


def reference(
    logits: np.ndarray, ids: np.ndarray, dweights: np.ndarray, dlse: np.ndarray | None,
    scoring: str, renormalize: bool, scale: float,
) -> np.ndarray:  # fmt: skip
    z = torch.from_numpy(to_numpy(logits)).requires_grad_()
    at = torch.from_numpy(ids.astype(np.int64))
    chosen = z.gather(1, at)
    if scoring == "softmax":
        scores = z.softmax(-1).gather(1, at)
    else:
        scores = chosen.softmax(-1) if scoring == "topk_softmax" else chosen.sigmoid()
    if renormalize:
        scores = scores / scores.sum(-1, keepdim=True)
    loss = (scores * scale * torch.from_numpy(dweights.astype(np.float64))).sum()
    if dlse is not None:
        loss = loss + (z.logsumexp(-1) * torch.from_numpy(dlse.astype(np.float64))).sum()
    loss.backward()
    assert z.grad is not None
    return z.grad.numpy()


def run(**arguments: Any) -> None:
    lib = arguments.pop("lib", None)
    capi_moe.run(capi_moe.make_params(capi_moe.RouteBackwardParams, **arguments), lib)


@pytest.mark.parametrize("dtype", capi_moe.DTYPES)
@pytest.mark.parametrize("scoring", capi_moe.SCORINGS)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("lse", [False, True])
def test_logits(
    library: ctypes.CDLL, dtype: str, scoring: str, renormalize: bool, lse: bool
) -> None:
    rng = np.random.default_rng(1)
    kind = capi_moe.DTYPES[dtype]
    for tokens, experts, top_k in ((0, 8, 2), (1, 1, 1), (200, 13, 4), (70, 256, 8)):
        wide = capi.normal(rng, (tokens, experts + 3), kind)
        logits = wide[:, :experts]
        groups = (
            {"num_groups": 8, "top_groups": 4} if scoring == "sigmoid" and experts > 200 else {}
        )
        routing = capi_moe.route(logits, top_k=top_k, scoring=scoring, **groups)
        dweights = rng.standard_normal((tokens, top_k)).astype(capi.sums_dtype(kind))
        dlse = rng.standard_normal(tokens).astype(dweights.dtype) if lse else None
        ref = reference(logits, routing.ids, dweights, dlse, scoring, renormalize, 2.5)
        for out in (kind, np.dtype(np.float32)):
            held = np.full((tokens, experts + 5), 7.0, np.float64).astype(out)
            given = {"dweights": dweights, "ids": routing.ids, "logits": logits, "dlse": dlse,
                     "dlogits": held[:, :experts], "scoring": capi_moe.SCORINGS[scoring],
                     "renormalize": int(renormalize), "scale": 2.5, "lib": library}  # fmt: skip
            run(**given)
            assert (held[:, experts:].astype(np.float64) == 7).all(), "wrote between rows"
            eps = {8: 1e-13, 4: 1e-6, 2: 2.0**-8 if out == capi.BF16 else 2.0**-11}[out.itemsize]
            least = min(eps, 1e-6)
            got = held[:, :experts].astype(np.float64)
            np.testing.assert_allclose(got, ref, rtol=eps, atol=least)
            # Added to what is there: an auxiliary loss.
            held[...] = np.float64(0.5).astype(out)
            run(**given, accumulate=1)
            got = held[:, :experts].astype(np.float64)
            np.testing.assert_allclose(got, ref + 0.5, rtol=2 * eps, atol=2 * least)


@pytest.mark.parametrize("dtype", capi_moe.DTYPES)
@pytest.mark.parametrize("renormalize", [False, True])
def test_given_weights(library: ctypes.CDLL, dtype: str, renormalize: bool) -> None:
    rng = np.random.default_rng(2)
    kind = capi_moe.DTYPES[dtype]
    given = (np.abs(to_numpy(capi.normal(rng, (50, 3), kind))) + 0.1).astype(kind)
    given[7] = 0  # a sum of 0 divides nothing
    ids = rng.integers(-1, 5, (50, 3)).astype(np.int32)
    dweights = rng.standard_normal((50, 3)).astype(capi.sums_dtype(kind))
    s = torch.from_numpy(to_numpy(given)).requires_grad_()
    total = s.sum(-1, keepdim=True)
    normal = torch.where(total == 0, s, s / torch.where(total == 0, 1.0, total))
    weights = (normal if renormalize else s) * 0.5 * torch.from_numpy(ids >= 0)
    (weights * torch.from_numpy(dweights.astype(np.float64))).sum().backward()
    assert s.grad is not None
    made = np.full((50, 3), 7.0, dweights.dtype)
    run(dweights=dweights, ids=ids, given_weights=given, dgiven_weights=made,
        renormalize=int(renormalize), scale=0.5, lib=library)  # fmt: skip
    near = 1e-13 if made.dtype == np.float64 else 2e-6
    np.testing.assert_allclose(made, s.grad.numpy(), rtol=near, atol=near)


def test_nan_and_foreign_ids_stay_in_their_rows(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((9, 6)).astype(np.float32)
    routing = capi_moe.route(logits, top_k=2)
    dweights = rng.standard_normal((9, 2)).astype(np.float32)
    logits[4] = np.nan
    routing.ids[6] = [2**31 - 1, -(2**31)]
    made = np.full((9, 6), 7.0, np.float32)
    run(dweights=dweights, ids=routing.ids, logits=logits, dlogits=made, lib=library)
    assert (np.isnan(made).any(axis=1) == (np.arange(9) == 4)).all()
    assert (made[6] == 0).all()
