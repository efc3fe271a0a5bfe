"""README's tables are the recorded results and nothing else; the GPU script counts what ran."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


report = load("report")


def cell(seq: int, causal: str, tflops: float, ratio: float, verdict: str) -> dict[str, Any]:
    shape = {"batch": 1, "seq_q": seq, "seq_k": seq, "heads_q": 8, "heads_kv": 2, "dim": 64,
             "dim_v": 64, "dtype": "bf16", "causal": causal}  # fmt: skip
    against = {"ratio": ratio, "low": ratio - 0.1, "high": ratio + 0.1, "verdict": verdict}
    contenders = {
        "flashmoe": {"status": "ok", "tflops": tflops},
        "torch-flash": {"status": "ok", "against": against},
        "torch-cudnn": {"status": "refused", "reason": "no"},
    }
    return {"shape": shape, "status": "ok", "contenders": contenders}


@pytest.fixture
def document() -> dict[str, Any]:
    void = {"shape": cell(64, "none", 1, 1, "tie")["shape"], "status": "void", "reason": "wrong"}
    summary = {"geometric_mean": 1.1, "least": 1.0, "most": 1.21, "rows": 2, "faster": 1, "tie": 1,
               "slower": 0}  # fmt: skip
    return {
        "title": "Attention",
        "date": "2026-11-21T10:00:00+00:00",
        "commit": "0123456789abcdef",
        "device": {"device": "cuda:0", "name": "NVIDIA H200"},
        "environment": {"packages": {"torch": "2.13.0"}, "threads": 2},
        "cells": [
            cell(32, "none", 400.4, 1.21, "faster"),
            void,
            cell(32, "bottom_right", 300.0, 1.0, "tie"),
        ],
        "summary": {"torch-flash": summary},
    }


def test_readme_matches_the_recorded_results() -> None:
    assert report.main(["--check"]) == 0


def test_a_grid(document: dict[str, Any]) -> None:
    lines = report.render_grid(document, "results/x.json").splitlines()
    assert "NVIDIA H200, 2026-11-21, commit 0123456789ab, torch 2.13.0" in lines[0]
    assert "|  |  | S=32 | S=64 |" in lines
    assert "| bf16 D=64 full | TFLOP/s | 400 | void |" in lines
    assert "|  | over torch-flash | 1.21 | - |" in lines
    assert "|  | over torch-flash | 1.00 (tie) | - |" in lines
    assert "1.10 over torch-flash (from 1.00 to 1.21; faster in 1, tied in 1" in lines[-1]


def test_a_list(document: dict[str, Any]) -> None:
    lines = report.render_list(document, "results/x.json").splitlines()
    assert "| bf16 | full | 1 | 32 | 8/2 | 64 | 400 | 1.21 |" in lines
    assert "| bf16 | full | 1 | 64 | 8/2 | 64 | void | - |" in lines


def test_a_cpu_record() -> None:
    cells = [
        {"threads": threads, "dtype": "fp32", "dim": 64, "seq": seq, "causal": True,
         "ours_gflops": 49.6 * threads, "ratio": 1.5}
        for threads, seq in ((1, 128), (2, 128), (2, 512))
    ]  # fmt: skip
    summary = {"geometric_mean": 1.5, "lowest": 1.2, "highest": 2.0}
    record = {
        "batch": 1,
        "heads": 8,
        "environment": {"cpu": "A CPU", "isa": "avx2", "torch": "2.13.0", "commit": "abc",
                        "time": "2026-11-21T10:00:00"},
        "summary_by_threads": {"1": summary, "2": summary},
        "cells": cells,
    }  # fmt: skip
    lines = report.render_cpu(record, "x.json").splitlines()
    assert "| fp32 D=64 causal | 50 (1.50) |" in lines
    assert "| fp32 D=64 causal | 99 (1.50) | 99 (1.50) |" in lines
    assert "2 threads; geometric mean of the ratios 1.50, from 1.20 to 2.00:" in lines


def readme(folder: Path, kind: str = "attention-grid") -> Path:
    file = folder / "README.md"
    file.write_text(
        f"before\n<!-- results: {kind} r/*.json -->\nold\n<!-- results: end -->\nafter\n"
    )
    return file


def test_no_record_no_numbers(tmp_path: Path) -> None:
    file = readme(tmp_path)
    assert report.main(["--check", "--readme", str(file)]) == 1
    assert report.main(["--readme", str(file)]) == 0
    assert file.read_text() == (
        "before\n<!-- results: attention-grid r/*.json -->\n<!-- results: end -->\nafter\n"
    )


def test_a_changed_record_is_seen(tmp_path: Path, document: dict[str, Any]) -> None:
    file = readme(tmp_path)
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "x.json").write_text(json.dumps(document))
    assert report.main(["--readme", str(file)]) == 0
    assert report.main(["--check", "--readme", str(file)]) == 0
    document["cells"][0]["contenders"]["flashmoe"]["tflops"] = 401.6
    (tmp_path / "r" / "x.json").write_text(json.dumps(document))
    assert report.main(["--check", "--readme", str(file)]) == 1


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="known are attention-grid"):
        report.main(["--readme", str(readme(tmp_path, "picture"))])


def test_tests_are_counted(tmp_path: Path) -> None:
    evidence = load("gpu_evidence")
    assert evidence.test_counts(tmp_path / "none.xml") == {}
    file = tmp_path / "tests.xml"
    file.write_text(
        '<testsuites><testsuite tests="5" failures="1" errors="0" skipped="2"/></testsuites>'
    )
    assert evidence.test_counts(file) == {"tests": 5, "failures": 1, "errors": 0, "skipped": 2}


def test_without_a_gpu_there_is_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = load("gpu_evidence")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="no GPU to measure on"):
        evidence.main([])


def test_steps_are_run_and_timed(tmp_path: Path) -> None:
    evidence = load("gpu_evidence")
    step = evidence.run_step("three", [sys.executable, "-c", "print(1); raise SystemExit(3)"], 60)
    assert (step["code"], step["tail"]) == (3, "1\n")
    late = evidence.run_step("late", [sys.executable, "-c", "import time; time.sleep(9)"], 0.2)
    assert late["code"] == -1
    assert "stopped after" in late["tail"]
