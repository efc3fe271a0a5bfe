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
    from flashmoe_science import _warn_once, hf
    from flashmoe_science.hf import _report

    hf.register()
    _warn_once.forget()
    # Also layers of models that earlier tests have left in graphs of torch.compile.
    for known in (_report._calls, _report._by_module, _report._traced, _report._without_choice):
        known.clear()
    yield
    hf.register()  # not strict
