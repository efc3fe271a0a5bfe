"""The example's two ways generate the same text, and it says what it measured."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from command_lines import assert_refused

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


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--new", "1"], "--new: got 1, accepted are 2 and more"),
        (["--dim", "100"], "--dim: got 100, accepted are multiples of 64"),
        (["--dim", "0"], "--dim: got 0, accepted are 1 and more"),
        (["--batch", "0"], "--batch: got 0, accepted are 1 and more"),
        (["--steps", "-1"], "--steps: got -1, accepted are 0 and more"),
        (["--show", "-1"], "--show: got -1, accepted are 0 and more"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else None,
)
def test_what_is_refused(
    options: list[str], sentence: str, example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(example.main, options, sentence, capsys)
