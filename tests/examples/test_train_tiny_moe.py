"""The example trains experts by ours as by a loop over them, and says what it measured."""

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
pytest.importorskip("matplotlib")
pytest.importorskip("rich")

_EXAMPLE = Path(__file__).parents[2] / "examples" / "train_tiny_moe.py"
_SHORT = ["--steps", "40", "--batch", "4", "--context", "32", "--dim", "32", "--heads", "2",
          "--layers", "1", "--experts", "4", "--inner", "32", "--sample", "50"]  # fmt: skip


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_tiny_moe", _EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_tiny_moe"] = module
    spec.loader.exec_module(module)
    return module


def test_it_trains_and_says_what_it_measured(
    example: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = []
    real = example.gpt.train

    def noting(*arguments: Any) -> Any:
        runs.append(real(*arguments))
        return runs[-1]

    monkeypatch.setattr(example.gpt, "train", noting)
    plot = tmp_path / "losses.png"
    example.main([*_SHORT, "--plot", str(plot)])
    ours, stock = runs
    assert ours.loss < ours.losses[0] - 0.5
    assert ours.losses == pytest.approx(stock.losses, abs=1e-2)
    assert plot.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for run in (ours, stock):
        assert re.search(
            rf"by {run.name} +{run.seconds:.1f} s  loss {run.losses[0]:.4f} -> {run.loss:.4f}, "
            rf"of unseen text {run.validation:.4f}\n",
            printed,
        )


def test_both_ways_have_the_same_gradients(example: ModuleType) -> None:
    made = []
    for compute in (example.experts_by_flashmoe, example.experts_by_torch):
        torch.manual_seed(0)
        layer = example.Experts(32, 16, 8, 3, compute)
        x = torch.randn(2, 9, 32, requires_grad=True)
        (layer(x).square().sum() * 100 + layer.balance).backward()
        assert sum(layer.counts).sum() == 2 * 9 * 3
        made.append([x.grad, *(p.grad for p in layer.parameters())])
    for ours, stock in zip(*made, strict=True):
        torch.testing.assert_close(ours, stock)


def test_losses_that_differ_are_an_error(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(x: Any, logits: Any, experts: Any) -> Any:
        out, ids = example.experts_by_torch(x, logits, experts)
        return out.detach(), ids

    monkeypatch.setattr(example, "experts_by_flashmoe", wrong)
    monkeypatch.setattr(example, "MOST_DIFFERENCE", 1e-4)
    with pytest.raises(SystemExit, match="the losses differ: accepted is a difference of"):
        example.main([*_SHORT, "--plot", str(tmp_path / "losses.png")])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--steps", "0"], "--steps: got 0, accepted are 1 and more"),
        (["--top-k", "0"], "--top-k: got 0, accepted are 1 and more"),
        (
            ["--experts", "2", "--top-k", "3"],
            "--top-k: got 3, but there are 2 experts: accepted",
        ),
        (["--inner", "12"], "--inner: got 12, accepted are multiples of 8"),
        (["--dim", "64", "--heads", "3"], "--heads: got 3, but dim is 64: accepted are those of"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else None,
)
def test_what_is_refused(
    options: list[str], sentence: str, example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(example.main, options, sentence, capsys)
