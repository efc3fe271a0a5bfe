"""Small ceilings, since every run of `bench` measures them; threads as they were, which it sets;
and a folder for modules."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import flashmoe_science as fm
import pytest
from flashmoe_science.cli import ceilings


@pytest.fixture(autouse=True)
def low_ceilings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "real_ceilings" not in request.fixturenames:
        monkeypatch.setattr(ceilings, "_MATMUL_EXTENT", {"cpu": 64, "cuda": 512})
        monkeypatch.setattr(ceilings, "_COPY_BYTES", {"cpu": 2**16, "cuda": 2**20})


@pytest.fixture
def real_ceilings() -> None:
    """Asks for those of a real run."""


@pytest.fixture(autouse=True)
def threads_put_back() -> Iterator[None]:
    """Puts back how many threads torch and we have. Processes of tests that each have torch in more
    threads than one wait for each other in what comes behind, which takes many times as long."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    fm.set_num_threads(0)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path, whose modules are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        # A package without an __init__ has no file, but its spec says its folder.
        if str(tmp_path) in str(getattr(sys.modules[name], "__spec__", "")):
            del sys.modules[name]
