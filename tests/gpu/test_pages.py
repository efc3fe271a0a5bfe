"""The programs of the first pages, on a machine with a GPU: right there too, and computed by it."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest
from pages import DOCS, ROOT, Block, blocks, run, says, sentences

pytestmark = pytest.mark.gpu

_FIRST = [ROOT / "README.md", *sorted((DOCS / "start").glob("*.md"))]
_GUIDES = [DOCS / name for name in ("torch.md", "jax.md", "huggingface.md")]


def _programs(pages: list[Path]) -> list[Block]:
    """Those of frameworks that put tensors on a GPU."""
    found = (block for page in pages for block in blocks("python", page=page))
    return [b for b in found if re.search(r"^(import|from) (torch|jax|cupy|transf)", b.text, re.M)]


@pytest.mark.parametrize("block", _programs(_FIRST), ids=str)
def test_a_first_program_runs_on_the_gpu(block: Block, tmp_path: Path) -> None:
    result = _run(block, tmp_path)
    if "raise AssertionError" not in block.text:  # a call that is refused launches nothing
        assert "device=cuda:0" in result, result


@pytest.mark.parametrize(
    "block", [b for b in _programs(_GUIDES) if "cuda" in b.text or "import jax" in b.text], ids=str
)
def test_a_guides_program_runs(block: Block, tmp_path: Path) -> None:
    _run(block, tmp_path)


@pytest.mark.parametrize("block", blocks("python", page=DOCS / "producers.md"), ids=str)
def test_a_producers_program_runs(block: Block, tmp_path: Path) -> None:
    result = _run(block, tmp_path)
    if "cuda" in block.text and importlib.util.find_spec("torch") is not None:
        assert "device=cuda:0" in result, result


_ERRORS = {title: code for title, code in sentences().items() if "cuda" in code}


@pytest.mark.parametrize("sentence", _ERRORS)
def test_a_sentence_is_what_its_program_raises(sentence: str, tmp_path: Path) -> None:
    result = run(_ERRORS[sentence], tmp_path)
    assert says(result, sentence), result.stderr


def _run(block: Block, folder: Path) -> str:
    """What it logs."""
    if re.search(r"^import jax", block.text, re.M):
        jax = pytest.importorskip("jax")
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch's tensors live here
        if "gpu" not in {device.platform for device in jax.devices()}:
            pytest.skip("JAX has no GPU")
    environment = {"FLASHMOE_LOG_LEVEL": "2", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    result = run(block.text, folder, **environment)
    assert result.returncode == 0, result.stderr
    assert block.complaint(result.stdout) == ""
    return result.stderr
