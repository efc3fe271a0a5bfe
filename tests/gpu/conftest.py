"""What the GPU tests share."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]  # they make their tensors with torch


@pytest.fixture(autouse=True)
def _errors_stay_with_their_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """A kernel that fails does so here, and not in the next test's first CUDA call."""
    yield
    if request.node.get_closest_marker("gpu"):
        import torch

        torch.cuda.synchronize()
