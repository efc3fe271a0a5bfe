"""Every test begins with the implementations registered, nothing said and nothing counted."""

from __future__ import annotations

import importlib.util
from collections.abc import Generator

import pytest


@pytest.fixture(autouse=True)
def registered() -> Generator[None, None, None]:
    if not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        yield
        return
    from flashmoe_science import _say, hf

    hf.register()
    hf.reset_report()
    _say.forget()
    yield
    hf.register()  # not strict
