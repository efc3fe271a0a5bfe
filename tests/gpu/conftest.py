"""What the GPU tests share."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the GPU tests make their tensors with torch")


@pytest.fixture(autouse=True)
def _errors_stay_with_their_test(request: pytest.FixtureRequest) -> object:
    """A kernel that fails does so here, and not in the next test's first CUDA call."""
    yield
    if request.node.get_closest_marker("gpu"):
        import torch

        torch.cuda.synchronize()
