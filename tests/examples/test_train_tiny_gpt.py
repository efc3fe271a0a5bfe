"""The example trains by our attention as by torch's, and says what it measured."""

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

from torch_training import Case, needs_gradients  # noqa: E402

_EXAMPLE = Path(__file__).parents[2] / "examples" / "train_tiny_gpt.py"
_SHORT = ["--steps", "40", "--batch", "4", "--context", "32", "--dim", "32", "--heads", "2",
          "--layers", "1", "--sample", "50"]  # fmt: skip


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_tiny_gpt", _EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_tiny_gpt"] = module
    spec.loader.exec_module(module)
    return module


# How far the losses may be apart: on a GPU both runs are in bf16.
@pytest.mark.parametrize(
    ("device", "apart"), [("cpu", 1e-4), pytest.param("cuda", 0.1, marks=pytest.mark.gpu)]
)
def test_it_trains_and_says_what_it_measured(
    device: str,
    apart: float,
    example: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs_gradients(device, Case("of the example", dim=16, dim_v=16))
    runs = []
    real = example.train

    def noting(*arguments: Any) -> Any:
        runs.append(real(*arguments))
        return runs[-1]

    monkeypatch.setattr(example, "train", noting)
    plot = tmp_path / "losses.png"
    example.main([*_SHORT, "--plot", str(plot), "--device", device])
    ours, stock = runs
    assert len(ours.losses) == len(stock.losses) == 40
    assert ours.loss < ours.losses[0] - 0.5
    assert ours.losses == pytest.approx(stock.losses, abs=apart)
    assert plot.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    for run in (ours, stock):
        assert re.search(
            rf"attention by {run.name} +{run.seconds:.1f} s  loss {run.losses[0]:.4f} -> "
            rf"{run.loss:.4f}, of unseen text {run.validation:.4f}\n",
            printed,
        )
    sample = printed.partition(f"{plot}\n\n")[2]
    assert sample.startswith(example.PROMPT)
    assert len(sample.rstrip("\n")) >= len(example.PROMPT) + 40


def test_the_model_attends_by_ours(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = example.fm.flash_attention

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments[0].shape)
        return real(*arguments, **options)

    monkeypatch.setattr(example.fm, "flash_attention", counted)
    text = example.Text()
    model = example.GPT(len(text.characters), 16, 2, 2, 32, example.attend_by_flashmoe)
    (piece,) = example.batches(text.training, 1, 3, 16, seed=0)
    model.loss(piece).backward()
    assert calls == [(3, 16, 2, 16)] * 2
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert text.decode(text.encode("def f(): …")) == "def f(): …"


def test_losses_that_differ_are_an_error(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(q: Any, k: Any, v: Any) -> Any:
        return example.attend_by_torch(q, k, v.detach()) + v.mean(1, keepdim=True)

    monkeypatch.setattr(example, "attend_by_flashmoe", wrong)
    monkeypatch.setattr(example, "MOST_DIFFERENCE", 1e-4)
    with pytest.raises(SystemExit, match="the losses differ: accepted is a difference of"):
        example.main([*_SHORT, "--plot", str(tmp_path / "losses.png")])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--steps", "0"], "--steps: got 0, accepted are 1 and more"),
        (["--heads", "0"], "--heads: got 0, accepted are 1 and more"),
        (["--sample", "-1"], "--sample: got -1, accepted are 0 and more"),
        (["--dim", "64", "--heads", "3"], "--heads: got 3, but dim is 64: accepted are those of"),
        (["--dim", "48", "--heads", "4"], "--heads: got 4, but dim is 48: accepted are those of"),
        (["--dim", "512", "--heads", "1"], "--heads: got 1, but dim is 512: accepted are those"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else None,
)
def test_what_is_refused(
    options: list[str], sentence: str, example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(example.main, options, sentence, capsys)
