"""benchmarks/cpu_moe.py on a small layer: what it checks, and records joined cell by cell."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import capi  # noqa: E402
import cpu_moe as script  # noqa: E402


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(script, "LAYERS", {"thin": (64, 48, 5, 2)})
    monkeypatch.setattr(script, "keep_memory", lambda: None)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    capi.check(capi.load().flashmoe_set_num_threads(0), capi.load())


def run(monkeypatch: pytest.MonkeyPatch, path: Path, *arguments: str) -> Any:
    command = ["cpu_moe.py", "--layers", "thin", "--threads", "1", "--pairs", "2", *arguments]
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(path)])
    assert script.main() in (0, 1)  # which tells of the speed
    return json.loads(path.read_text())


@pytest.mark.parametrize("training", [False, True])
def test_cells_join_a_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, training: bool
) -> None:
    path = tmp_path / "record.json"
    options = ["--training"] if training else ["--orientations", "rows"]
    first = run(monkeypatch, path, *options, "--tokens", "9", "--dtypes", "fp32")
    assert [cell["tokens"] for cell in first["cells"]] == [9]
    assert first["training"] == training
    both = run(monkeypatch, path, *options, "--add", "--tokens", "3", "9", "--dtypes",
               "fp32", "bf16")  # fmt: skip
    cells = [(cell["dtype"], cell["tokens"]) for cell in both["cells"]]
    assert cells == [("bf16", 3), ("bf16", 9), ("fp32", 3), ("fp32", 9)]
    assert both["cells"][3]["ours_ms"] != first["cells"][0]["ours_ms"]
    assert both["cells"][0]["kernel"].startswith("moe_backward_dw" if training else "moe_up")
    both["environment"]["commit"] = "another"
    path.write_text(json.dumps(both))
    with pytest.raises(SystemExit, match="commit: the record has 'another', not"):
        run(monkeypatch, path, *options, "--add", "--tokens", "3", "--dtypes", "fp32")


def test_wrong_gradients_are_seen() -> None:
    layer = script.TrainingLayer((64, 48, 5, 2), 9, torch.float32, False)
    ours, _ = layer.ours()
    layer.check_small(ours)
    layer.check(ours, "fp32")
    for name in script.GRADIENTS:

        def wrong(name: str = name) -> Any:
            made = ours()
            made[name][-1] += 0.1 * made[name].abs().max()
            return made

        with pytest.raises(AssertionError):
            layer.check_small(wrong)
        with pytest.raises(AssertionError, match=name):
            layer.check(wrong, "fp32")
