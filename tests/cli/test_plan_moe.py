"""`flashmoe plan-moe`: what the library plans, in words and in JSON."""

from __future__ import annotations

import dataclasses
import json

import flashmoe_science as fm
import pytest
from flashmoe_science.cli import main

SHAPE = ["--tokens", "40", "--hidden", "64", "--inner", "24", "--experts", "8", "--top-k", "2"]


def test_json_is_the_plan_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--gate", "separate", "--activation", "gelu", "--transposed", "--bias"]
    assert main(["plan-moe", *SHAPE, *options, "--device", "cpu", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    plan = fm.moe_plan_for(
        tokens=40, hidden=64, inner=24, experts=8, top_k=2, dtype="fp32", gate="separate",
        activation="gelu", transposed=True, bias=True,
    )  # fmt: skip
    assert document["layer"] == json.loads(json.dumps(dataclasses.asdict(plan)))
    routing = fm.moe_route_plan_for(tokens=40, experts=8, top_k=2, dtype="fp32")
    assert document["routing"] == json.loads(json.dumps(dataclasses.asdict(routing)))
    assert document["layer"]["flops"] == 6.0 * 40 * 2 * 64 * 24
    assert document["shape"]["gate"] == "separate"


def test_people_read_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan-moe", *SHAPE, "--device", "cpu", "--dtype", "bf16"]) == 0
    printed = capsys.readouterr().out
    for word in ("bf16 tokens 40 hidden 64 inner 24 experts 8 top_k 2 on cpu", "Routing: cpu",
                 "Layer: cpu", "threads", "workspace", "GFLOP", "Not used"):  # fmt: skip
        assert word in printed


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (["--inner", "20"], "w_gate_up: its number of rows is 40, accepted"),
        (["--top-k", "9"], "top_k: got 9, accepted are 1 to 32, and no more than the 8 experts"),
        (["--tokens", "-1"], "tokens: got -1, accepted are 0 to 2^31 - 1"),
        (["--kernel", "sm12"], "sm12"),
    ],
)
def test_what_no_kernel_takes_is_explained(
    change: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan-moe", *SHAPE, "--device", "cpu", *change]) == 1
    assert sentence in capsys.readouterr().err


def test_a_wrong_command_line_exits_with_2() -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan-moe", "--tokens", "many"])
    assert stop.value.code == 2
