"""`flashmoe plan`: what the library plans, in words and in JSON."""

from __future__ import annotations

import dataclasses
import json

import flashmoe_science
import pytest
from flashmoe_science.cli import main
from flashmoe_science.cli.plan import occupancy
from flashmoe_science.cli.shapes import Shape

SHAPE = ["--seq", "512", "--heads", "8", "--kv-heads", "2", "--dim", "64", "--device", "cpu"]


def test_json_is_the_plan_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SHAPE, "--causal", "--dtype", "bf16", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    plan = flashmoe_science.attention_plan_for(
        batch=1,
        seq_q=512,
        seq_k=512,
        heads_q=8,
        heads_kv=2,
        dim=64,
        dim_v=64,
        dtype="bf16",
        device="cpu",
        causal="bottom_right",
    )
    of_first_launch = ("kernel", "grid", "block", "shared_bytes", "cluster", "stages", "tile_q",
                       "tile_k", "dim", "dim_v")  # fmt: skip
    for name in (*of_first_launch, *(field.name for field in dataclasses.fields(plan))):
        if name != "launches":
            value = getattr(plan, name)
            assert document["plan"][name] == (list(value) if isinstance(value, tuple) else value)
    assert document["plan"]["launches"] == [
        {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(la).items()
        }
        for la in plan.launches
    ]
    assert document["plan"]["operation"] == "attention_forward"
    assert document["shape"]["causal"] == "bottom_right"


def test_a_backward_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SHAPE, "--causal", "--backward", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    plan = flashmoe_science.attention_backward_plan_for(
        batch=1, seq_q=512, heads_q=8, heads_kv=2, dim=64, dtype="fp32", causal=True
    )
    assert document["plan"]["operation"] == plan.operation == "attention_backward"
    assert document["plan"]["kernel"] == plan.kernel
    assert document["plan"]["flops"] == plan.flops > 0
    assert document["plan"]["workspace_bytes"] == plan.workspace_bytes > 0
    assert main(["plan", *SHAPE, "--backward"]) == 0
    assert "backward of fp32 B1 S512 H8/2 D64 on cpu" in capsys.readouterr().out
    with pytest.raises(SystemExit):  # what is timed, and no call of ours, has no plan
        main(["plan", *SHAPE, "--training"])


@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(7, 7), (3, 11), (11, 3)])
def test_windows_are_planned_and_counted(
    capsys: pytest.CaptureFixture[str], causal: str, seq_q: int, seq_k: int
) -> None:
    shape = ["--seq-q", str(seq_q), "--seq-k", str(seq_k), "--heads", "2", "--dim", "64"]
    for left in (None, 0, 2, 50):
        for right in (None, 0) if causal != "none" else (None, 0, 2, 50):
            window = ",".join("none" if end is None else str(end) for end in (left, right))
            flags = ["--causal", causal, "--window", window, "--softcap", "30", "--json"]
            assert main(["plan", *shape, "--device", "cpu", *flags]) == 0
            document = json.loads(capsys.readouterr().out)
            assert document["shape"]["softcap"] == 30
            assert document["plan"]["flops"] == Shape(**document["shape"]).flops


@pytest.mark.parametrize("window", ["5", "1,2,3", "-1,0", "a,b", "1.5,2", ""])
def test_what_is_no_window_is_explained(capsys: pytest.CaptureFixture[str], window: str) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *SHAPE, f"--window={window}"])
    sentence = f"argument --window: got {window}, accepted is LEFT,RIGHT: numbers of keys from 0 up"
    assert sentence in capsys.readouterr().err


def test_people_read_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SHAPE]) == 0
    printed = capsys.readouterr().out
    for word in ("fp32 B1 S512 H8/2 D64 on cpu", "kernel", "tile", "waves", "GFLOP",
                 "workspace", "traffic", "Not used"):  # fmt: skip
        assert word in printed


def test_a_shape_that_no_kernel_takes_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--seq", "8", "--heads", "8", "--kv-heads", "3", "--dim", "64"]
    assert main([*command, "--device", "cpu"]) == 1
    error = capsys.readouterr().err
    assert "got 3 heads" in error
    assert "Traceback" not in error


def test_an_unknown_kernel_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SHAPE, "--kernel", "sm12"]) == 1
    assert "sm12" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--heads", "1", "--dim", "64"], "--seq (or --seq-q) is missing"),
        (["--heads", "1", "--dim", "64", "--seq-q", "4"], "--seq (or --seq-k) is missing"),
        (["--heads", "1", "--dim", "64", "--seq", "4", "--seq-k", "4"], "not both"),
    ],
)
def test_an_extent_left_open_is_named(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *flags, "--device", "cpu"]) == 1
    assert sentence in capsys.readouterr().err


def test_a_wrong_command_line_exits_with_2() -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", "--seq", "many"])
    assert stop.value.code == 2


def test_waves_on_a_gpu() -> None:
    device = {"multiprocessors": 132, "compute_capability": 90, "shared_bytes_per_block": 232448}
    plan = {"grid": [8, 66, 1], "block": [128, 1, 1], "shared_bytes": 81920}
    assert occupancy(plan, device) == {"blocks": 528, "units": 132, "resident": 2, "waves": 2.0}
