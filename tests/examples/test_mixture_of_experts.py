"""The example's model has the stock model's logits, by our operations."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

# Here, and not when it is first used: after whatever other tests of this process have done.
importlib.import_module("transformers.models.auto.modeling_auto")

_EXAMPLE = Path(__file__).parents[2] / "examples" / "mixture_of_experts.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mixture_of_experts", _EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mixture_of_experts"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def calls(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counted: Counter[str] = Counter()

    def counting(name: str) -> Any:
        real = getattr(example.flashmoe_science, name)

        def call(*arguments: Any, **options: Any) -> Any:
            counted[name] += 1
            return real(*arguments, **options)

        return call

    for name in ("flash_attention", "moe_forward"):
        monkeypatch.setattr(example.flashmoe_science, name, counting(name))
    return counted


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_logits_hold_the_accuracy_rule(example: ModuleType, kind: str, calls: Counter[str]) -> None:
    model = example.build(kind, "cpu", torch.float32)
    prompt = torch.randint(0, 1000, (1, 40), generator=torch.Generator().manual_seed(2))
    errors = example.compare(model, prompt)
    ulp = 2.0**-23 * errors["largest"]
    assert errors["ours"] <= 2 * errors["stock"] + ulp
    assert calls == {"flash_attention": 4, "moe_forward": 4}


def test_main_prints_what_was_compared(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    example.main(["--model", "mixtral", "--device", "cpu"])
    printed = capsys.readouterr().out
    assert "24 tokens generated, 24 of them the same" in printed
    assert "FlashMoE           max error" in printed
    assert "the last launch was moe_" in printed


@pytest.mark.gpu
def test_main_on_the_gpu(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.main(["--model", "qwen3_moe", "--device", "cuda"])
    assert "the last launch was moe_" in capsys.readouterr().out
