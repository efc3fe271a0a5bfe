"""The example's two ways generate the same text, and it says what it measured."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", minversion="2.6")
pytest.importorskip("rich")

_EXAMPLE = Path(__file__).parents[2] / "examples" / "generate.py"
_SHORT = ["--steps", "3", "--layers", "2", "--dim", "64", "--batch", "3", "--new", "6"]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", _EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_generates_and_says_what_it_measured(
    device: str,
    example: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[dict[str, Any]] = []
    real = example.fm.flash_attention

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(options)
        return real(*arguments, **options)

    monkeypatch.setattr(example.fm, "flash_attention", counted)
    example.main([*_SHORT, "--device", device])
    paged = [options for options in calls if "page_table" in options]
    # A prefill and five steps, of which a GPU computes one, captures one and replays the others.
    assert len(paged) == 2 * (6 if device == "cpu" else 3)
    assert [x["cu_seqlens_q"] is None for x in paged[:4]] == [False, False, True, True]
    assert len(calls) - len(paged) == 2 * 3  # of packed documents
    printed = capsys.readouterr().out
    assert re.search(r"FlashMoE, pages +[\d,]+ tokens per second\n", printed)
    assert re.search(r"torch, padded rows +[\d,]+ tokens per second\n", printed)
    if device == "cpu":
        assert "18 of 18 tokens are the same" in printed


def test_tokens_that_differ_are_an_error(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = example.fm.kv_append

    def wrong(*arguments: Any, **options: Any) -> Any:
        return -real(*arguments, **options)

    monkeypatch.setattr(example.fm, "kv_append", wrong)
    with pytest.raises(SystemExit, match="the tokens differ"):
        example.main([*_SHORT, "--steps", "0"])
