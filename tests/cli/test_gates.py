"""What is not checked is not timed: a kernel broken on purpose turns its rows void.

Each test breaks the installed package in one way and runs the command itself.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import flashmoe_science
import pytest
from flashmoe_science.cli import main
from flashmoe_science.cli.measure import OURS, launch_mismatch

SMALL = ["--seq", "32", "--heads", "2", "--dim", "64", "--device", "cpu", "--seconds", "0.01"]


def void_reason(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Runs the command twice: the table and the record have the reason, and no time."""
    assert main(["bench", *SMALL, *options]) == 1
    printed = capsys.readouterr().out
    assert main(["bench", *SMALL, *options, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    [cell] = document["cells"]
    assert cell["status"] == "void"
    assert "contenders" not in cell
    assert document["summary"] == {}
    assert not re.search(r"median_s|samples_s|tflops", json.dumps(cell))
    [line] = [line for line in printed.splitlines() if line.startswith("fp32 B1 S32")]
    assert line == f"{'fp32 B1 S32 H2 D64':<36}  VOID: {cell['reason']}"
    assert "geometric mean" not in printed
    return str(cell["reason"])


def break_call(monkeypatch: pytest.MonkeyPatch, damage: Any) -> None:
    """Every call of ours gives what `damage` makes of its output."""
    real = flashmoe_science.flash_attention

    def broken(*arguments: Any, **options: Any) -> Any:
        answer = real(*arguments, **options)
        damage(answer[0] if options.get("return_lse") else answer, options)
        return answer

    monkeypatch.setattr(flashmoe_science, "flash_attention", broken)


def test_a_wrong_result(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(out: Any, options: dict[str, Any]) -> None:
        out[0, 3, 1, 5] *= 1.5

    break_call(monkeypatch, damage)
    assert "max|out - float64|" in void_reason(capsys)


def test_a_wrong_lse(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def damage(out: Any, options: dict[str, Any]) -> None:
        if "lse" in options:
            options["lse"][0, 1, 7] += 0.01

    break_call(monkeypatch, damage)
    assert "max|lse - float64|" in void_reason(capsys)


def test_an_output_that_is_not_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row too few: the poison that was there shows."""
    real = flashmoe_science.flash_attention

    def lazy(q: Any, *rest: Any, **options: Any) -> Any:
        if "out" not in options:
            return real(q, *rest, **options)
        out, lse = options.pop("out"), options.pop("lse")
        whole, whole_lse = real(q, *rest, **options)
        out[:, :-1], lse[:] = whole[:, :-1], whole_lse
        return out, lse

    monkeypatch.setattr(flashmoe_science, "flash_attention", lazy)
    assert "some of it was never written" in void_reason(capsys)


def test_a_call_that_is_right_only_when_it_is_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(out: Any, options: dict[str, Any]) -> None:
        if "out" not in options:
            out[0, 0, 0, 0] += 1e-6

    break_call(monkeypatch, damage)
    assert "the timed call gives other values than the one that was checked" in void_reason(capsys)


@pytest.mark.parametrize(
    "change",
    [
        {"grid": (1, 2, 3)},
        {"kernel": "another"},
        {"block": (7, 1, 1)},
        {"shared_bytes": 9},
        {"cluster": 2},
        {"device": "cuda:7"},
    ],
)
def test_a_wrong_route(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    real = flashmoe_science.last_launch
    monkeypatch.setattr(
        flashmoe_science, "last_launches", lambda: (dataclasses.replace(real(), **change),)
    )
    [field] = change
    assert f"the launched kernel is not the planned one: {field}: planned" in void_reason(capsys)


@pytest.mark.parametrize("times", [0, 2])
def test_more_launches_than_planned_or_fewer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    real = flashmoe_science.last_launch
    monkeypatch.setattr(flashmoe_science, "last_launches", lambda: (real(),) * times)
    reason = void_reason(capsys)
    assert reason.startswith("the launched kernel is not the planned one: planned attention_")
    assert reason.partition("launched attention_")[2].count("attention_") == max(times - 1, 0)


def test_what_is_read_from_the_loaded_code_is_not_planned() -> None:
    plan: dict[str, Any] = {"launches": [{"kernel": "a", "registers": 0}, {"kernel": "b"}]}
    read = [{"kernel": "a", "registers": 168}, {"kernel": "b"}]
    assert launch_mismatch(plan, read) == ""
    assert launch_mismatch(plan, [{"kernel": "a"}, {"kernel": "c"}]) == (
        "kernel: planned b, launched c"
    )


def test_a_wrong_route_of_the_timed_call(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = flashmoe_science.last_launch
    calls: list[int] = []

    def second_differs() -> Any:
        calls.append(1)
        launch = real()
        return (launch if len(calls) % 2 else dataclasses.replace(launch, kernel="another"),)

    monkeypatch.setattr(flashmoe_science, "last_launches", second_differs)
    assert "launched by the timed call is not the planned one: kernel" in void_reason(capsys)


def test_a_wrong_peer_is_void_and_we_are_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda q, *_, **__: torch.zeros_like(q)
    )
    assert main(["bench", *SMALL, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    entries = document["cells"][0]["contenders"]
    assert entries["torch-sdpa"]["status"] == "void"
    assert "median_s" not in entries["torch-sdpa"]
    assert "median_s" in entries[OURS]
    assert document["summary"] == {}
