"""What the GPU tests share."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import kernels
import pytest

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]  # they make their tensors with torch


def _serving(family: str) -> str:
    from gpu import families

    reason = families.why_not(family)
    if reason is not None:
        pytest.skip(reason)
    return family


@pytest.fixture(params=kernels.FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """Each kernel family that serves calls on this GPU, to be asked for by name."""
    return _serving(request.param)


@pytest.fixture(
    params=["sm89", "sm90_whole_tiles", "sm89_decode", None],
    ids=["sm89", "sm90", "decode", "choice"],
)
def kernel(request: pytest.FixtureRequest) -> str | None:
    """What calls of sequences ask for."""
    return None if request.param is None else _serving(request.param)


@pytest.fixture
def sm90() -> str:
    """For what is said of this family alone."""
    _serving("sm90_whole_tiles")
    return "sm90"


@pytest.fixture
def cupy() -> Any:
    """The module, where it finds a GPU."""
    module = pytest.importorskip("cupy")
    try:
        module.cuda.runtime.getDeviceCount()
    except module.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"CuPy has no GPU: {error}")
    return module


@pytest.fixture(scope="session")
def jax_gpu() -> Any:
    """The first GPU of JAX."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch's tensors live here too
    jax = pytest.importorskip("jax")
    try:
        return jax.devices("gpu")[0]
    except RuntimeError as error:
        pytest.skip(f"JAX has no GPU: {error}")


_MOST_KEPT = 1 << 30  # bytes


@pytest.fixture(autouse=True)
def _errors_and_memory_stay_with_their_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """A kernel that fails does so here, and not in the next test's first CUDA call. What torch
    keeps of a large test's memory goes back: other processes test on the same GPU."""
    yield
    if request.node.get_closest_marker("gpu"):
        import torch

        torch.cuda.synchronize()
        if torch.cuda.memory_reserved() > _MOST_KEPT:
            torch.cuda.empty_cache()
