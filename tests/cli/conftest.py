"""The ceilings are measured in every run of `bench`; small ones leave the tests their seconds."""

from __future__ import annotations

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
