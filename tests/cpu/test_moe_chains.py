"""The chains that GPU tests run (tests/gpu/test_moe_chains.py), on the CPU: the same calls, the
same reference, the same memory around them."""

from __future__ import annotations

import kernels
import moe_chains
import pytest
from moe_chains import LayerChain, RouteChain

pytest.importorskip("torch")
from gpu import moe_calls

ROUTES = moe_chains.routes()
LAYERS = moe_chains.layers()


@pytest.mark.parametrize("chain", ROUTES, ids=str)
def test_routes(chain: RouteChain) -> None:
    assert all("_cpu" in name for name in moe_calls.check_route(chain, "cpu"))


@pytest.mark.parametrize("chain", LAYERS, ids=str)
def test_layers(chain: LayerChain) -> None:
    """Those too that one GPU family refuses, in one dtype or the other."""
    dtype = kernels.DTYPES[LAYERS.index(chain) % 2]
    assert all("_cpu_" in name for name in moe_calls.check_layer(chain, dtype, "cpu"))
