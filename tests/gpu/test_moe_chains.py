"""Chains of the experts' kernels on both sides of every boundary of the planners: the stated ones
are planned, what is planned is what runs, and it is right and touches nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import capi
import kernels
import moe_chains
import moe_kernels
import pytest
import torch
from gpu import moe_calls, moe_layers
from gpu.moe_calls import Call
from gpu.moe_layers import DEVICE
from moe_chains import LayerChain, RouteChain
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.gpu


ROUTES = moe_chains.routes()
LAYERS = moe_chains.layers()


def _check_planned(planned: tuple[str, ...], stated: tuple[str, ...]) -> None:
    if moe_layers.is_as_stated():
        assert planned == stated
    assert planned


@pytest.mark.parametrize("chain", ROUTES, ids=str)
def test_routes(chain: RouteChain) -> None:
    _check_planned(moe_calls.check_route(chain, DEVICE), chain.kernels)


@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize("chain", LAYERS, ids=str)
def test_layers(chain: LayerChain, dtype: str) -> None:
    if chain.named and moe_layers.why_not(chain.family) is not None:
        pytest.skip(str(moe_layers.why_not(chain.family)))
    if _refuses(chain, dtype):
        return
    _check_planned(moe_calls.check_layer(chain, dtype, DEVICE), chain.names(dtype))


def _refuses(chain: LayerChain, dtype: str) -> bool:
    """As stated, where it is, or as this GPU's multiprocessors have no room for it."""
    try:
        moe_calls.layer_calls(chain, dtype, DEVICE)
    except capi.FlashmoeError as error:
        if error.status != capi.UNSUPPORTED or f"{chain.family}: " not in error.sentence:
            raise
        refuses = True
    else:
        refuses = False
    if moe_layers.is_as_stated():
        assert refuses == (not chain.kernels)
    return refuses


@pytest.fixture(scope="module")
def _profiler_is_warm() -> None:
    with profile(activities=[ProfilerActivity.CUDA]):
        torch.zeros(8, device=DEVICE).add_(1)
        torch.cuda.synchronize()


def _profiled(calls: list[Call], path: Path) -> list[dict[str, Any]]:
    """What the GPU did during the calls, in order."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for call in calls:
            call.launch()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(path))
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return sorted((e for e in events if e.get("cat") in kinds), key=lambda e: e["ts"])


@pytest.mark.usefixtures("_profiler_is_warm")
@pytest.mark.parametrize("dtype", kernels.DTYPES)
@pytest.mark.parametrize("family", [None, *moe_layers.FAMILIES])
def test_a_profiler_sees_every_kernel_of_the_chains(
    family: str | None, dtype: str, tmp_path: Path
) -> None:
    """By its function, of which each kernel's name has one."""
    if family is not None and moe_layers.why_not(family) is not None:
        pytest.skip(str(moe_layers.why_not(family)))
    calls: list[Call] = []
    for chain in LAYERS:
        if (chain.family if chain.named else None) == family and not _refuses(chain, dtype):
            calls += moe_calls.layer_calls(chain, dtype, DEVICE)
    _check_profile(calls, tmp_path / "trace.json")


@pytest.mark.usefixtures("_profiler_is_warm")
@pytest.mark.parametrize("given", [False, True])
def test_a_profiler_sees_every_kernel_of_routing(given: bool, tmp_path: Path) -> None:
    calls = [moe_calls.route_call(chain, DEVICE)[0] for chain in ROUTES if chain.given == given]
    _check_profile(calls, tmp_path / "trace.json")


def _check_profile(calls: list[Call], path: Path) -> None:
    functions = moe_kernels.every()
    planned = [(name, launch) for call in calls
               for name, launch in zip(call.kernels, call.plan.launches, strict=True)]  # fmt: skip
    work = _profiled(calls, path)
    got = [moe_kernels.function_of(event["name"]) for event in work]
    assert got == [functions[name] for name, _ in planned]
    for event, (name, launch) in zip(work, planned, strict=True):
        arguments = event["args"]
        assert arguments["grid"] == list(launch.grid), name
        assert arguments["block"] == list(launch.block), name
        assert arguments["shared memory"] == launch.shared_bytes, name
