"""The calls that compute-sanitizer watches (tests/gpu/sanitize_moe.py), on the CPU: what they are
held to holds of them."""

from __future__ import annotations

import capi
import kernels
import numpy as np
import pytest
from gpu import sanitize_moe
from gpu.sanitize_moe import Runner
from moe_cases import Case
from moe_chains import LayerChain, RouteChain


class HostMemory:
    """What the program asks of the CUDA driver, of the host."""

    def __init__(self) -> None:
        self._blocks: dict[int, np.ndarray] = {}

    def allocate(self, like: np.ndarray) -> int:
        block = capi.aligned_empty((like.nbytes,), np.dtype(np.uint8), 256)
        block[...] = 0x5A
        self._blocks[block.ctypes.data] = block
        return int(block.ctypes.data)

    def upload(self, array: np.ndarray) -> int:
        address = self.allocate(array)
        self._blocks[address][...] = array.view(np.uint8).reshape(-1)
        return address

    def download(self, address: int, like: np.ndarray) -> np.ndarray:
        return self._blocks[address].view(like.dtype).reshape(like.shape)

    def free(self, address: int) -> None:
        del self._blocks[address]

    def synchronize(self) -> None:
        pass


@pytest.fixture(params=[False, True], ids=["poisoned", "unwritten"])
def runner(request: pytest.FixtureRequest) -> Runner:
    return Runner(HostMemory(), (capi.CPU, 0), unwritten=request.param)


@pytest.mark.parametrize("route", [*sanitize_moe.SMALL_ROUTES, *sanitize_moe.ROUTES], ids=str)
def test_routes(runner: Runner, route: RouteChain) -> None:
    assert sanitize_moe.check_route(runner, route)


@pytest.mark.parametrize("chain", sanitize_moe.SMALL, ids=str)
def test_layers(runner: Runner, chain: LayerChain) -> None:
    dtype = kernels.DTYPES[sanitize_moe.SMALL.index(chain) % 2]
    assert sanitize_moe.check_layer(runner, "cpu", chain.case, dtype,
                                    pre_activation=chain.pre_activation)  # fmt: skip


@pytest.mark.parametrize("case", sanitize_moe.LAYERS, ids=str)
@pytest.mark.parametrize("wild", [False, True])
def test_edges(runner: Runner, case: Case, wild: bool) -> None:
    assert sanitize_moe.check_layer(runner, "cpu", case, "bf16", wild=wild)


@pytest.mark.parametrize("masked", [False, True])
def test_products(runner: Runner, masked: bool) -> None:
    assert sanitize_moe.check_product(runner, "cpu", "fp16", masked)
