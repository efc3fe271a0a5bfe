"""The plugin in a vLLM that it does not know: a warning, and vLLM goes on."""

from __future__ import annotations

import logging
import sys
import types
from typing import Any

import flashmoe_science.vllm
import pytest

_REGISTRY = "vllm.v1.attention.backends.registry"


def install(monkeypatch: pytest.MonkeyPatch, **registry: Any) -> None:
    """A package `vllm` in the place of any other, whose registry of backends has these names."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    parts = _REGISTRY.split(".")
    for end in range(1, len(parts) + (1 if registry else 0)):
        module = types.ModuleType(".".join(parts[:end]))
        module.__path__ = []
        monkeypatch.setitem(sys.modules, module.__name__, module)
    if registry:
        vars(sys.modules[_REGISTRY]).update(registry)


class Backend:
    """CUSTOM of a registry: registered or not."""

    def __init__(self, overridden: bool) -> None:
        self.is_overridden = lambda: overridden


@pytest.mark.parametrize(
    ("registry", "said"),
    [
        ({}, "No module named"),
        ({"AttentionBackendEnum": object()}, "register_backend"),
        ({"AttentionBackendEnum": object(), "register_backend": print}, "CUSTOM"),
        (
            {
                "AttentionBackendEnum": types.SimpleNamespace(CUSTOM=object()),
                "register_backend": print,
            },
            "is_overridden",
        ),
    ],
    ids=["no registry", "no function", "no backend", "another backend"],
)
def test_an_unknown_registry_is_a_warning(
    registry: dict[str, Any],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install(monkeypatch, **registry)
    with caplog.at_level(logging.WARNING):
        flashmoe_science.vllm.register()
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "FlashMoE is not registered as an attention backend" in record.getMessage()
    assert said in record.getMessage()


@pytest.mark.parametrize("overridden", [False, True])
def test_a_known_registry_is_asked(
    overridden: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    custom, calls = Backend(overridden), []
    install(
        monkeypatch,
        AttentionBackendEnum=types.SimpleNamespace(CUSTOM=custom),
        register_backend=lambda *given: calls.append(given),
    )
    flashmoe_science.vllm.register()
    backend = "flashmoe_science.vllm.backend.FlashMoEBackend"
    assert calls == ([] if overridden else [(custom, backend)])
    assert not caplog.records
