"""Two records: what moved beyond noise, what the machine did, and what fails a build."""

from __future__ import annotations

import json
import random
import zlib
from pathlib import Path
from typing import Any

import pytest
from flashmoe_science.cli import main, stats
from flashmoe_science.cli.stats import compare, summary

RECORDED = Path(__file__).parents[2] / "benchmarks/results"
SMALL = ["--seq", "32", "--heads", "2", "--dim", "64", "--device", "cpu", "--seconds", "0.01"]


def samples(middle: float, seed: int, spread: float = 0.02) -> list[float]:
    rng = random.Random(seed)
    return [middle * rng.uniform(1 - spread, 1 + spread) for _ in range(25)]


def record(times: dict[int, dict[str, float]], seed: int, device: str = "GPU") -> dict[str, Any]:
    """A record of schema 1 with these medians: sequence length, contender, seconds."""
    cells = []
    for seq, contenders in times.items():
        shape = {"batch": 1, "seq_q": seq, "seq_k": seq, "heads_q": 8, "heads_kv": 8, "dim": 64,
                 "dim_v": 64, "dtype": "bf16", "causal": "none"}  # fmt: skip
        entries: dict[str, dict[str, Any]] = {}
        for name, middle in contenders.items():
            drawn = samples(middle, zlib.crc32(f"{seq} {name}".encode()) + seed)
            entries[name] = {"status": "ok", "version": "1"} | summary(drawn)
            if name != "flashmoe":
                entries[name]["against"] = compare(entries["flashmoe"]["samples_s"], drawn)
        cells.append({"shape": shape, "status": "ok", "contenders": entries})
    return {
        "schema": 1,
        "date": "2026-11-21",
        "commit": "0123456789abcdef",
        "device": {"name": device},
        "cells": cells,
    }


def ask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], a: Any, b: Any, *options: str
) -> tuple[int, dict[str, Any]]:
    files = []
    for name, document in (("a", a), ("b", b)):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(document))
        files.append(str(file))
    code = main(["bench", "--compare", *files, *options, "--json"])
    return code, json.loads(capsys.readouterr().out)


BEFORE = {64: {"flashmoe": 1.0, "p": 2.0, "slow": 9.0}, 128: {"flashmoe": 4.0, "p": 4.0}}


def test_what_moved_is_told_from_what_did_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    after = {64: {"flashmoe": 0.8, "p": 2.0, "slow": 9.0}, 128: {"flashmoe": 4.0, "p": 4.0}}
    code, found = ask(tmp_path, capsys, record(BEFORE, 1), record(after, 2))
    assert code == 0
    moved, same = found["cells"]
    assert moved["ratio"]["verdict"] == "faster"
    assert moved["ratio"]["ratio"] == pytest.approx(1.25, rel=0.03)
    assert moved["ratio"]["low"] < moved["ratio"]["ratio"] < moved["ratio"]["high"]
    assert same["ratio"]["verdict"] == "tie"
    assert found["summary"] | {"geometric_mean": 0} == {
        "rows": 2, "withheld": 0, "geometric_mean": 0, "faster": 1, "tie": 1, "slower": 0,
    }  # fmt: skip


def test_a_slower_machine_is_not_a_slower_kernel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slower = {seq: {n: t * 1.5 for n, t in times.items()} for seq, times in BEFORE.items()}
    _, found = ask(tmp_path, capsys, record(BEFORE, 1), record(slower, 2, "another GPU"))
    for cell in found["cells"]:
        assert cell["peer"] == "p"  # the fastest, not any
        assert cell["ratio"]["verdict"] == "tie"
        assert cell["time"]["ratio"] == pytest.approx(1 / 1.5, rel=0.03)
        assert cell["drift"]["ratio"] == pytest.approx(1 / 1.5, rel=0.03)


def test_noise_is_no_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Forty shapes drawn twice from one distribution: none has moved."""
    times = {8 * seq: {"flashmoe": 1.0, "p": 1.5} for seq in range(1, 41)}
    _, found = ask(tmp_path, capsys, record(times, 1), record(times, 5000))
    assert found["summary"]["rows"] == found["summary"]["tie"] == 40


def test_intervals_hold_for_all_shapes_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same samples among forty shapes are less sure than alone."""
    times = {8 * seq: {"flashmoe": 1.0, "p": 1.5} for seq in range(1, 41)}
    ratios = []
    for some in (times, {8: times[8]}):
        _, found = ask(tmp_path, capsys, record(some, 1), record(some, 2))
        ratios.append(found["cells"][0]["ratio"])
    among, alone = ratios
    assert among["ratio"] == alone["ratio"]
    assert among["low"] < alone["low"] < alone["high"] < among["high"]


def test_another_version_is_no_yardstick(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = record(BEFORE, 2)
    for cell in b["cells"]:
        cell["contenders"]["p"]["version"] = "2"
    _, found = ask(tmp_path, capsys, record(BEFORE, 1), b)
    assert [cell["peer"] for cell in found["cells"]] == ["slow", None]
    assert found["cells"][1]["ratio"] == found["cells"][1]["time"]
    _, found = ask(tmp_path, capsys, record(BEFORE, 1), record(BEFORE, 2), "--peer", "slow")
    assert [cell["peer"] for cell in found["cells"]] == ["slow", None]


def test_rows_without_a_twin_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = record({**BEFORE, 256: BEFORE[64]}, 1), record({**BEFORE, 512: BEFORE[64]}, 2)
    b["cells"][1] = {"shape": b["cells"][1]["shape"], "status": "void", "reason": "wrong"}
    code, found = ask(tmp_path, capsys, a, b)
    assert [c["status"] for c in found["cells"]] == ["ok", "void in B", "only in A", "only in B"]
    assert code == 0
    code, _ = ask(tmp_path, capsys, a, b, "--fail-below", "0.5")
    assert code == 1  # the row that became void


@pytest.mark.parametrize(("least", "code"), [("0.7", 0), ("0.9", 1)])
def test_a_slower_kernel_fails_the_gate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], least: str, code: int
) -> None:
    after = {**BEFORE, 128: {"flashmoe": 5.0, "p": 4.0}}
    a, b = record(BEFORE, 1), record(after, 2)
    found_code, found = ask(tmp_path, capsys, a, b, "--fail-below", least)
    assert found_code == code
    assert found["gate"]["judged"] == 2
    assert [entry["shape"]["seq_q"] for entry in found["gate"]["failed"]] == [128] * code


def test_noise_is_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shape that was slower beside other work is in no mean. It fails a gate whose bar its whole
    interval is below, since a kernel can be slow now and then, and passes none."""
    a, b = record(BEFORE, 1), record(BEFORE, 2)
    ours = b["cells"][1]["contenders"]["flashmoe"]
    ours |= summary(samples(20.0, 3, spread=0.4))
    code, found = ask(tmp_path, capsys, a, b, "--fail-below", "0.9")
    assert code == 1
    assert (found["gate"]["judged"], found["gate"]["withheld"]) == (2, 0)
    assert [entry["shape"]["seq_q"] for entry in found["gate"]["failed"]] == [128]
    code, found = ask(tmp_path, capsys, a, b, "--fail-below", "0.05")
    assert code == 0
    assert [cell["ratio"]["verdict"] for cell in found["cells"]] == ["tie", "withheld"]
    assert found["cells"][1]["ratio"]["ratio"] < 0.3
    assert (found["summary"]["rows"], found["summary"]["withheld"]) == (1, 1)
    assert found["summary"]["geometric_mean"] == pytest.approx(1.0, rel=0.03)
    assert (found["gate"]["judged"], found["gate"]["withheld"]) == (1, 1)
    files = [str(tmp_path / f"{name}.json") for name in "ab"]
    assert main(["bench", "--compare", *files, "--fail-below", "0.05"]) == 0
    printed = capsys.readouterr().out
    assert f"{found['cells'][1]['ratio']['ratio']:.2f} noisy" in printed
    assert printed.count("no verdict in 1: quartiles spread over more than 25 % of a median") == 2
    for cell in (a["cells"][0], b["cells"][0]):
        cell["contenders"]["flashmoe"] |= summary(samples(1.0, 3, spread=0.4))
    (tmp_path / "a.json").write_text(json.dumps(a))
    (tmp_path / "b.json").write_text(json.dumps(b))
    assert main(["bench", "--compare", *files]) == 0
    printed = capsys.readouterr().out
    assert "no verdict in 2" in printed
    assert "geometric mean" not in printed
    assert main(["bench", "--compare", *files, "--fail-below", "0.05"]) == 1
    assert "nothing can be judged, no verdict in 2" in capsys.readouterr().err


def test_people_read_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(record(BEFORE, 1)))
    assert main(["bench", "--compare", str(file), str(file), "--fail-below", "1.5"]) == 1
    printed = capsys.readouterr().out
    assert f"A: {file}, GPU, 2026-11-21, commit 0123456789ab" in printed
    assert "bf16 B1 S64 H8 D64" in printed
    assert "geometric mean 1.000; faster in 0, slower in 0, the same in 2 of 2" in printed
    assert "2 of 2 shapes are below 1.5 with their whole interval" in printed


@pytest.mark.parametrize("name", ["gqa_h200.json", "seeds_h200.json"])
def test_recorded_results_can_be_compared(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(RECORDED / name)
    assert main(["bench", "--compare", file, file, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {cell["ratio"]["ratio"] for cell in document["cells"]} == {1.0}


def test_what_cannot_be_compared_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(a: str, b: str, *options: str) -> str:
        for name, text in (("a.json", a), ("b.json", b)):
            (tmp_path / name).write_text(text)
        files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
        assert main(["bench", "--compare", *files, *options]) == 1
        return capsys.readouterr().err

    good = json.dumps(record(BEFORE, 1))
    assert "is not JSON" in said(good, "{")
    assert "its schema is 7, accepted are 1 and 2" in said(good, '{"schema": 7}')
    assert "no shape has times in both" in said(good, json.dumps(record({8: BEFORE[64]}, 1)))
    assert "--peer: no shape has times of fa9 in both" in said(good, good, "--peer", "fa9")
    assert "neither a suite nor a shape" in said(good, good, "--suite", "seeds")
    alone = json.dumps(record({64: {"flashmoe": 1.0}}, 1, "another GPU"))
    assert "GPU and another GPU can be compared beside a peer only" in said(good, alone)
    assert main(["bench", "--compare", str(tmp_path / "no"), str(tmp_path / "no")]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_a_record_that_breaks_its_schema_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jsonschema")
    file = tmp_path / "a.json"
    assert main(["bench", *SMALL, "--peer", "none", "--json", str(file)]) == 0
    assert main(["bench", "--compare", str(file), str(file)]) == 0
    document = json.loads(file.read_text())
    document["cells"][0]["contenders"]["flashmoe"]["median_s"] = "fast"
    file.write_text(json.dumps(document))
    assert main(["bench", "--compare", str(file), str(file)]) == 1
    assert "breaks the schema of records: $.cells[0]" in capsys.readouterr().err


@pytest.mark.parametrize(("least", "code"), [("1e-6", 0), ("1e6", 1)])
def test_a_run_can_be_gated_by_its_fastest_peer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, least: str, code: int
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(stats, "MOST_SPREAD", float("inf"))  # the machine may be a busy one
    assert main(["bench", *SMALL, "--fail-below", least, "--json"]) == code
    gate = json.loads(capsys.readouterr().out)["gate"]
    assert (gate["judged"], len(gate["failed"])) == (1, code)
    assert all(entry["peer"] == "torch-sdpa" for entry in gate["failed"])


def test_a_gate_that_judges_nothing_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "kept.json"
    command = ["bench", *SMALL, "--peer", "none", "--fail-below", "1", "--json", str(file)]
    assert main(command) == 1
    assert "no shape has a peer with times to judge it by" in capsys.readouterr().err
    assert json.loads(file.read_text())["complete"] is True  # what was measured is kept
