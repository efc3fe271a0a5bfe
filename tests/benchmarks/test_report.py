"""Tables and pictures are the recorded results and nothing else; the GPU script counts what ran."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import bench_records
import pytest
from flashmoe_science.cli import build_parser, environment
from flashmoe_science.cli.suites import load_suite, suite_names

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


def source(document: dict[str, Any], outdated: bool = False) -> Any:
    return report.Source(Path("x.json"), document, "results/x.json", outdated)


# ---- what stands here ------------------------------------------------------------------------


def test_the_documents_match_the_recorded_results() -> None:
    assert report.main(["--check"]) == 0


def test_every_record_that_a_page_names_is_there() -> None:
    """And every record is named, by itself or by a pattern, where the records are explained."""
    folder = ROOT / "benchmarks" / "results"
    explained = (folder / "README.md").read_text(encoding="utf-8")
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = [explained, *(page.read_text(encoding="utf-8") for page in pages)]
    said = re.sub(r"^<!-- results: .*$", "", "\n".join(texts), flags=re.MULTILINE)
    named = set(re.findall(r"(?<![\w<>*])(\w+_(?:h200|epyc)\.json)", said))
    assert len(named) > 10
    assert {name for name in named if not (folder / name).is_file()} == set()

    forms = [re.escape(f) for f in re.findall(r"`([\w<>]+\.json)`", explained)]
    patterns = [re.sub(r"<\w+>", r"\\w+", form) for form in forms]
    records = {path.name for path in folder.glob("*.json")}
    assert {r for r in records if not any(re.fullmatch(p, r) for p in patterns)} == set()


@pytest.mark.parametrize("page", list(report.documents(ROOT)), ids=lambda p: p.name)
def test_every_command_to_measure_again_is_one(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    commands = re.findall(r"^(flashmoe bench .*?)(?: +#.*)?$", text, re.MULTILINE)
    assert commands
    for command in commands:
        build_parser().parse_args(shlex.split(command)[1:])


# ---- tables ----------------------------------------------------------------------------------


def test_a_grid() -> None:
    lines = report.render_grid(source(bench_records.grid())).splitlines()
    assert "NVIDIA H200, 2026-11-21, commit 0123456789ab, torch 2.13.0" in lines[0]
    assert "[x.json](results/x.json)" in lines[0]
    assert "|  |  | S=32 | S=64 |" in lines
    assert "| bf16 D=64 full | TFLOP/s | 400 | void |" in lines
    assert "|  | over torch-flash | 1.21 | - |" in lines
    assert "|  | over torch-flash | 1.00 (tie) | 0.83 |" in lines
    means = next(line for line in lines if line.startswith("Geometric mean"))
    assert "1.10 over torch-flash (from 0.83 to 1.21; faster in 1, tied in 1" in means
    assert lines[-4:] == [
        "```sh",
        "flashmoe bench --suite grid --device cuda",
        "flashmoe bench --batch 1 --seq 32 --heads 8 --kv-heads 2 --dim 64 --causal --dtype bf16 "
        "--device cuda",
        "```",
    ]


def test_mixtures_of_experts() -> None:
    lines = report.render_moe(source(bench_records.moe_grid())).splitlines()
    assert lines[2].startswith("All rows: bf16 tiny H256 I128 E16 K2. Times are of calls in a CUDA")
    assert (
        "| T | routing | us | TFLOP/s | weights TB/s | of dense | MiB | over torch-grouped |"
        in lines
    )
    # A short row is by its time in a graph, half of the other.
    assert "| 8 | uniform | 0.4 | 8 | 3.50 | - | 3 | 1.25 |" in lines
    assert "| 4096 | zipf 1 | 2.9 | 560 | 3.50 | 80% | 3 | 1.50 |" in lines
    assert lines[-3:] == [
        "flashmoe bench --suite moe-tiny --device cuda",
        "flashmoe bench --tokens 8 --hidden 256 --inner 128 --experts 16 --top-k 2 --skew 1 "
        "--dtype bf16 --device cuda",
        "```",
    ]


@pytest.mark.parametrize("operation", ["moe_forward", "moe_backward", "moe_training"])
def test_memory_of_mixtures_of_experts(operation: str) -> None:
    """A peer's peak where the record has it, our workspace, and what the forward saves."""
    document = bench_records.moe_grid(operation=operation)
    for cell in document["cells"]:
        cell["plan"]["workspace_bytes"] = 5 * 2**20
    document["cells"][1]["contenders"]["torch-grouped"]["peak_bytes"] = 7 * 2**20
    lines = report.render_moe(source(document)).splitlines()
    saves = operation != "moe_forward"
    memory = ["MiB", "torch-grouped MiB", "workspace", *(["saved"] if saves else [])]
    assert any(f" | {' | '.join(memory)} | over torch-grouped |" in line for line in lines)
    # 4096 tokens take 4 T K I bytes, 8 tokens next to none.
    short, long = ("3 | - | 5 | 0", "3 | 7 | 5 | 4") if saves else ("3 | - | 5", "3 | 7 | 5")
    [row] = [line for line in lines if line.startswith("| 8 | uniform |")]
    assert f"| {short} |" in row
    [row] = [line for line in lines if line.startswith("| 4096 | uniform |")]
    assert f"| {long} |" in row
    assert any("*saved*" in line for line in lines) == saves


def test_a_backward_of_experts_has_no_rate_of_weights() -> None:
    document = bench_records.moe_grid(operation="moe_backward")
    with_rates = report.render_moe(source(document)).splitlines()
    for cell in document["cells"]:
        for entry in cell["contenders"].values():
            del entry["weight_bytes_per_s"]
    lines = report.render_moe(source(document)).splitlines()
    headers = [next(row for row in of if row.startswith("| T")) for of in (with_rates, lines)]
    assert headers[0].replace(" weights TB/s |", "") == headers[1] != headers[0]
    assert {row.count("|") for row in lines if row.startswith("| ")} == {headers[1].count("|")}
    [command] = [line for line in lines if line.startswith("flashmoe bench --tokens")]
    assert "--backward" in command.split()


def test_one_mixture_of_experts() -> None:
    document = bench_records.moe_grid()
    document["cells"] = document["cells"][:1]
    lines = report.render_moe(source(document)).splitlines()
    assert any(line.startswith("| dtype | model | T | H |") for line in lines)


def test_a_grid_with_a_ceiling() -> None:
    document = bench_records.grid()
    document["cells"][0]["contenders"]["flashmoe"]["ceiling_fraction"] = 0.572
    lines = report.render_grid(source(document)).splitlines()
    assert "|  | of a matrix product | 57% | void |" in lines
    assert "|  | of a matrix product | - | - |" in lines


def test_a_grid_of_both_types() -> None:
    document = bench_records.grid()
    for full in document["cells"][:2]:
        in_fp16 = copy.deepcopy(full)
        in_fp16["shape"]["dtype"] = "fp16"
        document["cells"].append(in_fp16)
    document["cells"][-2]["contenders"]["flashmoe"]["tflops"] = 390.39
    lines = report.render_grid(source(document)).splitlines()
    assert lines[lines.index("| fp16 D=64 full | TFLOP/s | 390 | void |") + 2] == (
        "|  | of bf16 | 97.5% | - |"
    )
    assert sum("of bf16" in line for line in lines) == 1


def test_a_list() -> None:
    document = bench_records.a_list()
    document["cells"].append(bench_records.void(bench_records.shape(64), "wrong"))
    ours = document["cells"][1]["contenders"]["flashmoe"]
    del ours["graph_s"]
    ours["median_s"] = 1.25e-5
    lines = report.render_list(source(document)).splitlines()
    assert (
        "| dtype | B | S | H | D | mask | us | us in a graph | TFLOP/s | over torch-flash |"
    ) in lines
    assert "| bf16 | 4 | 32 | 8/2 | 64 | full | 12.5 | - | 300 | 25.50 |" in lines
    assert "| bf16 | 1 | 64 | 8/2 | 64 | full | void | void | void | - |" in lines
    (few,) = [line for line in lines if "1/8192" in line]
    assert few.endswith("| 5.0 | 2.5 | 1.02 (tie) |")


def test_calls_without_a_pause() -> None:
    text = report.render_sustained(source(bench_records.sustained()))
    lines = text.splitlines()
    assert "NVIDIA H200, 2026-11-21, commit 0123456789ab" in lines[0]
    assert "called for 1 s on end, twice" in lines[0]
    ours, theirs = (f"{n} TFLOP/s | {n} W | {n} J/TFLOP" for n in ("flashmoe", "torch-flash"))
    assert lines[2] == f"| dtype | B | S | H | D | mask | {ours} | {theirs} |"
    shape = "| bf16 | 1 | 4096 | 8/2 | 64 |"
    assert lines[4] == f"{shape} full | 380 | 650 | 1.71 | 325 | 650 | 2.00 |"
    assert lines[5] == f"{shape} causal | 380 | - | - | 325 | - | - |"
    assert "--sustained 1 " in lines[-2]


def test_a_contender_that_was_not_called_without_a_pause_has_dashes() -> None:
    document = bench_records.sustained()
    del document["cells"][0]["contenders"]["torch-flash"]["sustained"]
    line = report.render_sustained(source(document)).splitlines()[4]
    assert line.endswith("| 380 | 650 | 1.71 | - | - | - |")


def test_memory_at_the_peak() -> None:
    document = bench_records.grid()
    cells = document["cells"]
    cells[2]["contenders"]["torch-flash"]["peak_bytes"] = 5 * 2**20
    cells[3]["contenders"]["torch-flash"]["peak_bytes"] = 9 * 2**20
    lines = report.render_memory(source(document)).splitlines()
    assert "commit 0123456789ab" in lines[0]
    assert lines[2] == "|  | flashmoe | torch-flash |"
    assert lines[4:] == ["| D 64 full | 3 | - |", "| D 64 causal | 3 | 5 to 9 |"]


def test_a_summary_of_several_suites() -> None:
    grid, layers = bench_records.grid(), bench_records.moe_grid()
    assert grid["summary"]["torch-flash"]["slower"] == 1
    layers["summary"]["torch-grouped"] |= {"rows": 0, "geometric_mean": None}
    caption, _, *table = report.render_summary(
        [source(grid, outdated=True), source(layers)]
    ).splitlines()
    assert "measured at 0123456789ab (the kernels have changed since), torch 2.13.0; " in caption
    assert "*in 5*: of 5 of them, " in caption  # one of the first record's four shapes is void
    assert table == [
        "|  | shapes | over torch-flash | over torch-grouped |",
        "| --- | ---: | ---: | ---: |",
        f"| [{grid['title']}](results/x.json) | {len(grid['cells'])} | 1.10 in 3 (1 slower) | - |",
        f"| [{layers['title']}](results/x.json) | {len(layers['cells'])} | - | - |",
    ]


def test_noisy_rows_have_no_verdict() -> None:
    document = bench_records.a_list()
    document["cells"][2]["contenders"]["torch-flash"]["against"]["verdict"] = "withheld"
    of_peer = document["summary"]["torch-flash"]
    of_peer |= {"rows": 2, "withheld": 1}
    said = report.render_list(source(document))
    assert "1.02 (noisy) |" in said
    assert "slower in 0 of 2; no verdict in 1: quartiles spread over more than 25 %" in said
    of_peer |= {"rows": 0, "withheld": 3, "geometric_mean": None}
    assert "none over torch-flash; no verdict in 3: quartiles" in report.render_list(
        source(document)
    )


def test_an_older_record_reads_the_same() -> None:
    older = bench_records.grid(schema=1)
    for key in ("command", "source", "ceilings", "machine_before", "machine_after", "peers"):
        del older[key]
    assert report.render_grid(source(older)) == report.render_grid(source(bench_records.grid()))


@pytest.mark.parametrize(
    "render",
    [report.render_grid, report.render_list, report.render_memory, report.render_sustained],
)
def test_an_outdated_table_says_when_it_was_true(render: Any) -> None:
    caption = render(source(bench_records.sustained(), outdated=True)).splitlines()[0]
    assert "measured at 0123456789ab (the kernels have changed since)" in caption


def test_a_cpu_record() -> None:
    cells = [
        {"threads": threads, "dtype": "fp32", "dim": 64, "seq": seq, "causal": True,
         "ours_gflops": 49.6 * threads, "ratio": 1.5}
        for threads, seq in ((1, 128), (2, 128), (2, 512))
    ]  # fmt: skip
    summary = {"geometric_mean": 1.5, "lowest": 1.2, "highest": 2.0}
    record = {
        "what": "attention backward on the CPU",
        "batch": 1,
        "heads": 8,
        "environment": {"cpu": "A CPU", "isa": "avx2", "torch": "2.13.0", "commit": "abc",
                        "time": "2026-11-21T10:00:00"},
        "summary_by_threads": {"1": summary, "2": summary},
        "cells": cells,
    }  # fmt: skip
    lines = report.render_cpu(source(record)).splitlines()
    assert lines[0].startswith("Attention backward on the CPU, batch 1, 8 heads")
    assert "python benchmarks/cpu_attention.py --backward --threads 1 2" in lines
    forward = report.render_cpu(source(record | {"what": "attention forward on the CPU"}))
    assert forward.startswith("Attention forward") and "--backward" not in forward
    assert "| fp32 D=64 causal | 50 (1.50) |" in lines
    assert "| fp32 D=64 causal | 99 (1.50) | 99 (1.50) |" in lines
    assert "2 threads; geometric mean of the ratios 1.50, from 1.20 to 2.00:" in lines


def test_padded_batches_on_the_cpu() -> None:
    cells = [
        {"threads": 2, "dtype": "fp32", "dim": 64, "batch": batch, "seq": seq, "side": side,
         "ours_gflops": 49.6, "ratio": 1.5, "ours_ms": 2.0}
        for batch, seq, side in ((8, 256, "right"), (32, 256, "right"), (8, 256, "left"))
    ]  # fmt: skip
    cells[0]["nested_ms"] = 30.0
    record = {
        "batch": [8, 32],
        "heads": 8,
        "environment": {"cpu": "A CPU", "isa": "avx2", "torch": "2.13.0", "commit": "abc",
                        "time": "2026-11-21T10:00:00"},
        "summary_by_threads": {"2": {"geometric_mean": 1.5, "lowest": 1.2, "highest": 2.0}},
        "cells": cells,
    }  # fmt: skip
    lines = report.render_cpu_padded(source(record)).splitlines()
    assert "|  | B=8 S=256 | B=32 S=256 |" in lines
    assert "| fp32 D=64 right | 50 (1.50), jagged 15 | 50 (1.50) |" in lines
    assert "| fp32 D=64 left | 50 (1.50) | - |" in lines
    command = "python benchmarks/cpu_attention.py --padded --threads 2 --dtypes fp32"
    assert f"{command} --batch 8 --seq 256 --dims 64" in lines


def test_what_calls_cost_the_host() -> None:
    lines = report.render_host_cost(source(bench_records.host_cost())).splitlines()
    assert lines == [
        "What one call costs the host, medians of 3 rounds of 100 calls. NVIDIA H200, 2026-11-21, "
        "commit 0123456789ab, torch 2.13.0; from [x.json](results/x.json).",
        "",
        "| call | us | quartiles |",
        "| --- | ---: | ---: |",
        "| fused_moe | 15.2 | 15.1 to 15.5 |",
        "| torch linear | 8.0 | 7.9 to 8.3 |",
        "",
        "To measure it again, all of it:",
        "",
        "```sh",
        "python benchmarks/host_cost.py --device cuda:0",
        "```",
    ]
    changed = report.render_host_cost(source(bench_records.host_cost(), outdated=True))
    assert "measured at 0123456789ab (the host's code has changed since)" in changed


def test_the_script_of_host_cost_leaves_a_whole_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    script = load("host_cost")
    monkeypatch.setattr(script, "ROUNDS", 2)
    monkeypatch.setattr(script, "CALLS_PER_ROUND", 2)
    monkeypatch.setenv("FLASHMOE_COMMIT", bench_records.COMMIT)
    file = tmp_path / "host_cost_cpu.json"
    assert script.main(["--device", "cpu", "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert set(document) == set(bench_records.host_cost())
    assert document["commit"] == bench_records.COMMIT
    figures = document["host_cost"]
    operations = ("flash_attention", "moe_route", "moe_forward", "grouped_product", "fused_moe")
    assert {*operations, "torch scaled_dot_product_attention", "torch linear"} <= set(figures)
    for row in figures.values():
        assert set(row) == set(bench_records.host_cost()["host_cost"]["fused_moe"])
        assert len(row["samples_us"]) == 2 and row["median_us"] > 0
    said = capsys.readouterr().out
    text = report.render_host_cost(source(document))
    assert all(name in said and f"| {name} |" in text for name in figures)


def test_layers_on_the_cpu() -> None:
    lines = report.render_cpu_moe(source(bench_records.cpu_moe(), outdated=True)).splitlines()
    assert "AMD EPYC (avx512), 2026-11-21, measured at 0123456789ab (the kernels have" in lines[0]
    assert "*thin*: H 2048, I 768, 32 experts, 4 of a token" in lines[2]
    assert lines[4] == "One thread; geometric mean of the ratios 1.40, from 1.30 to 1.50:"
    assert lines[6:10] == [
        "|  | T=1 | T=16 |",
        "| --- | ---: | ---: |",
        "| thin bf16 | 10 (1.50) | 166 (1.50) |",
        "| thin bf16 transposed | - | 166 (1.30) |",
    ]
    assert lines[-2] == "python benchmarks/cpu_moe.py --threads 1"


def test_training_layers_on_the_cpu() -> None:
    cells = [cell for cell in bench_records.cpu_moe()["cells"] if not cell["transposed"]]
    record = bench_records.cpu_moe(training=True, cells=cells)
    lines = report.render_cpu_moe(source(record)).splitlines()
    assert lines[0].startswith("Training layers of experts on the CPU, forward and backward of T")
    assert "products over experts, with autograd, over ours" in lines[0]
    assert lines[2].endswith("4 of a token. Freed memory stays with the process.")
    assert lines[-2] == "python benchmarks/cpu_moe.py --training --threads 1"


# ---- documents, each deliberately broken ------------------------------------------------------


class Checkout:
    """A small checkout with two documents, whose tables and pictures are of one record."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.readme = root / "README.md"
        self.page = root / "docs" / "more.md"
        self.record = root / "r" / "x.json"
        self.picture = root / "docs" / "pictures" / "x-ratio-dark.svg"
        self.kernel = root / "cuda" / "attention" / "kernel.cu"
        (root / "docs").mkdir()
        self.kernel.parent.mkdir(parents=True)
        self.kernel.write_text("// one\n")
        self.readme.write_text(f"before\n{self.block('attention-grid')}after\n")
        self.page.write_text(
            f"{self.block('ratio-picture')}{self.block('attention-list')}"
            f"{self.block('roofline-picture')}"
        )
        self.measure()

    @staticmethod
    def block(kind: str) -> str:
        return f"<!-- results: {kind} r/x*.json -->\nold\n<!-- results: end -->\n"

    def measure(self, **given: Any) -> None:
        made = bench_records.grid(**given)
        if "source" not in given:
            hashed = environment.kernels_hash(made["operation"], "cuda", self.root)
            made["source"]["kernels"] = hashed
        bench_records.write(self.record, made)

    def git(self, *arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        run = subprocess.run(
            ["git", *who, *arguments], cwd=self.root, capture_output=True, text=True, check=True
        )
        return run.stdout.strip()

    def make(self) -> None:
        assert report.main(["--root", str(self.root)]) == 0

    def complaints(self, capsys: pytest.CaptureFixture[str]) -> str:
        """What --check says; it must fail exactly when it complains."""
        capsys.readouterr()
        code = report.main(["--check", "--root", str(self.root)])
        words = capsys.readouterr().err
        assert code == (1 if words else 0)
        return words


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    pytest.importorskip("matplotlib")
    return Checkout(tmp_path)


def test_one_summary_stands_for_all_its_files(
    checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    other = checkout.root / "r" / "y.json"
    bench_records.write(other, bench_records.moe_grid())
    checkout.readme.write_text(
        "<!-- results: summary r/x.json,r/y.json -->\n<!-- results: end -->\n"
    )
    checkout.make()
    text = checkout.readme.read_text()
    assert text.count("| --- |") == 1 and "](r/x.json)" in text and "](r/y.json)" in text
    assert checkout.complaints(capsys) == ""
    changed = bench_records.moe_grid()
    changed["summary"]["torch-grouped"]["geometric_mean"] = 9.0
    bench_records.write(other, changed)
    words = checkout.complaints(capsys)
    assert "README.md: summary r/x.json,r/y.json does not match its record" in words
    other.unlink()
    (checkout.root / "r" / "x.json").unlink()
    checkout.make()
    assert checkout.readme.read_text() == (
        "<!-- results: summary r/x.json,r/y.json -->\n<!-- results: end -->\n"
    )


def test_what_it_makes_it_accepts(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    words = checkout.complaints(capsys)
    assert "README.md: attention-grid r/x*.json does not match its record\n" in words
    assert "docs/pictures/x-ratio-dark.svg is missing\n" in words
    assert "docs/pictures/x-roofline-light.svg is missing\n" in words
    checkout.make()
    assert checkout.complaints(capsys) == ""
    text = checkout.readme.read_text()
    assert text.startswith("before\n") and text.endswith("<!-- results: end -->\nafter\n")
    page = checkout.page.read_text()
    assert "[x.json](../r/x.json)" in page
    for target in re.findall(r'(?:src|srcset)="([^"]+)"', page):
        assert (checkout.page.parent / target).exists()
    before = checkout.picture.read_bytes()
    checkout.make()
    assert checkout.picture.read_bytes() == before


def test_no_record_no_numbers(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.make()
    checkout.record.unlink()
    assert "README.md: attention-grid" in checkout.complaints(capsys)
    checkout.make()
    assert checkout.complaints(capsys) == ""
    assert checkout.readme.read_text() == (
        "before\n<!-- results: attention-grid r/x*.json -->\n<!-- results: end -->\nafter\n"
    )
    assert not checkout.picture.exists()


def test_a_number_changed_by_hand_is_seen(
    checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout.make()
    checkout.page.write_text(checkout.page.read_text().replace("1.21", "1.31"))
    assert "docs/more.md: attention-list" in checkout.complaints(capsys)


def test_a_changed_record_is_seen(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.make()
    made = json.loads(checkout.record.read_text())
    made["cells"][0]["contenders"]["flashmoe"]["tflops"] = 411.6
    checkout.record.write_text(json.dumps(made))
    words = checkout.complaints(capsys)
    assert "README.md: attention-grid" in words
    assert "x-ratio-dark.svg was not made from x.json as it is now" in words


def test_a_missing_picture_is_seen(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.make()
    checkout.picture.unlink()
    assert checkout.complaints(capsys).splitlines() == [
        "docs/pictures/x-ratio-dark.svg is missing",
        "run python benchmarks/report.py",
    ]


def test_a_picture_of_another_record_is_seen(
    checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout.make()
    good = checkout.picture.read_bytes()
    kept = checkout.record.read_text()
    checkout.measure(title="Another")
    checkout.make()
    checkout.record.write_text(kept)
    assert "x-ratio-dark.svg was not made from x.json" in checkout.complaints(capsys)
    checkout.make()
    assert checkout.picture.read_bytes() == good
    checkout.picture.write_text("<svg/>")  # says nothing of where it is from
    assert "x-ratio-dark.svg was not made from x.json" in checkout.complaints(capsys)


def test_a_picture_shown_nowhere_is_seen_and_removed(
    checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout.make()
    extra = checkout.picture.with_name("y-speed-dark.svg")
    extra.write_text("<svg/>")
    assert "docs/pictures/y-speed-dark.svg is shown nowhere" in checkout.complaints(capsys)
    checkout.make()
    assert not extra.exists()


def test_a_record_that_breaks_the_schema_is_refused(
    checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("jsonschema")
    checkout.make()
    made = json.loads(checkout.record.read_text())
    made["cells"][0]["contenders"]["flashmoe"]["median_s"] = "fast"
    checkout.record.write_text(json.dumps(made))
    assert "breaks the schema" in checkout.complaints(capsys)


def test_a_changed_kernel_is_seen_by_the_hash_of_the_sources(
    checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout.make()
    assert "commit 0123456789ab" in checkout.readme.read_text()
    checkout.kernel.write_text("// two\n")
    words = checkout.complaints(capsys)
    said = "the kernels have changed and it does not say measured at 0123456789ab"
    assert [line.split(" ")[1] for line in words.splitlines() if said in line] == [
        "attention-grid", "ratio-picture", "attention-list", "roofline-picture",
    ]  # fmt: skip
    checkout.make()
    assert checkout.complaints(capsys) == ""
    text = checkout.readme.read_text()
    assert "measured at 0123456789ab (the kernels have changed since)" in text

    checkout.readme.write_text(text.replace("measured at 0123456789ab", "commit 0123456789ab"))
    assert f"README.md: attention-grid r/x*.json does not match its record: {said}" in (
        checkout.complaints(capsys)
    )
    checkout.make()
    checkout.kernel.write_text("// one\n")  # as measured: it may not say so any longer
    assert "README.md: attention-grid" in checkout.complaints(capsys)


def test_the_kernels_of_another_operation_change_nothing(
    checkout: Checkout, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout.make()
    (checkout.root / "cuda" / "moe").mkdir()
    (checkout.root / "cuda" / "moe" / "experts.cu").write_text("// one\n")
    assert checkout.complaints(capsys) == ""


@pytest.mark.parametrize("hashed", [False, True])
def test_a_changed_kernel_is_seen_by_the_history(
    checkout: Checkout, capsys: pytest.CaptureFixture[str], hashed: bool
) -> None:
    """Records from before there was a hash of the kernels: without one, or of all sources."""
    other = checkout.root / "cuda" / "moe" / "experts.cu"
    other.parent.mkdir()
    other.write_text("// one\n")
    checkout.git("init", "-q")
    checkout.git("add", "-A")
    checkout.git("commit", "-qm", "one")
    source = {"commit": "", "hash": environment.source_hash(checkout.root) if hashed else ""}
    checkout.measure(commit=checkout.git("rev-parse", "HEAD"), source=source)
    checkout.make()
    other.write_text("// two\n")
    assert checkout.complaints(capsys) == ""
    assert "measured at" not in checkout.readme.read_text()
    checkout.kernel.write_text("// two\n")
    assert "the kernels have changed" in checkout.complaints(capsys)
    checkout.make()
    assert "measured at" in checkout.readme.read_text()
    assert checkout.complaints(capsys) == ""


def test_unchanged_sources_need_no_history(checkout: Checkout) -> None:
    older = bench_records.grid()
    older["source"] = {"commit": "", "hash": environment.source_hash(checkout.root)}
    assert report.outdated(older, checkout.root) is False


def test_without_history_a_document_is_taken_at_its_word(
    checkout: Checkout, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout.measure(source={"commit": "", "hash": ""})
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(checkout.root.parent))
    checkout.make()
    assert "commit 0123456789ab" in checkout.readme.read_text()
    assert checkout.complaints(capsys) == ""
    text = checkout.readme.read_text().replace(
        "commit 0123456789ab", "measured at 0123456789ab (the kernels have changed since)"
    )
    checkout.readme.write_text(text)
    assert checkout.complaints(capsys) == ""


def test_what_was_measured_with_changes_was_no_commit() -> None:
    older = bench_records.grid(commit=f"{bench_records.COMMIT}+changes", source={})
    assert report.outdated(older, ROOT) is True


def test_the_cost_on_the_host_is_held_to_the_hosts_code(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    kernel, command = (
        tmp_path / "cuda/moe/experts.cu",
        tmp_path / "python/flashmoe_science/cli/a.py",
    )
    host = [
        tmp_path / name
        for name in ("bindings/moe.cpp", "cuda/launch.cpp", "python/flashmoe_science/moe.py")
    ]
    for path in (kernel, command, *host):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("one\n")
    checkout.git("init", "-q")
    checkout.git("add", "-A")
    checkout.git("commit", "-qm", "one")
    document = bench_records.host_cost(commit=checkout.git("rev-parse", "HEAD"))
    for path in (kernel, command):
        path.write_text("two\n")
    assert report.outdated(document, tmp_path) is False
    for path in host:
        path.write_text("two\n")
        assert report.outdated(document, tmp_path) is True
        path.write_text("one\n")


def test_cpu_records_are_held_to_the_cpu_kernels(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    names = ("cpu/attention.cpp", "cpu/moe.cpp", "core/ops/attention/forward.cpp", "core/log.cpp")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("// one\n")
    checkout.git("init", "-q")
    checkout.git("add", "-A")
    checkout.git("commit", "-qm", "one")
    head = checkout.git("rev-parse", "HEAD")
    bench = {"commit": head, "device": {"device": "cpu"}, "environment": {}}
    script = {"environment": {"commit": head}}
    checkout.kernel.write_text("// two\n")
    for name in ("cpu/moe.cpp", "core/log.cpp"):
        (tmp_path / name).write_text("// two\n")
    for document in (bench, script):
        assert report.outdated(document, tmp_path) is False
    assert report.outdated(bench | {"operation": "moe_forward"}, tmp_path) is True
    assert report.outdated(script | {"layers": {}}, tmp_path) is True
    (tmp_path / "core/ops/attention/forward.cpp").write_text("// two\n")
    for document in (bench, script):
        assert report.outdated(document, tmp_path) is True
    assert report.outdated({"environment": {"commit": "f" * 40}}, tmp_path) is None
    script["environment"] |= {"commit": head, "cpu_sources_modified": True}
    assert report.outdated(script, tmp_path) is True


def test_an_unknown_kind_is_refused(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.readme.write_text(checkout.block("video"))
    assert "README.md: results of kind video, known are attention-grid" in (
        checkout.complaints(capsys)
    )


# ---- the GPU script --------------------------------------------------------------------------


def test_tests_are_counted(tmp_path: Path) -> None:
    evidence = load("gpu_evidence")
    assert evidence.test_counts(tmp_path / "none.xml") == {}
    file = tmp_path / "tests.xml"
    file.write_text(
        '<testsuites><testsuite tests="5" failures="1" errors="0" skipped="2"/></testsuites>'
    )
    assert evidence.test_counts(file) == {"tests": 5, "failures": 1, "errors": 0, "skipped": 2}


def test_failed_tests_are_named(tmp_path: Path) -> None:
    evidence = load("gpu_evidence")
    assert evidence.failed_tests(tmp_path / "none.xml") == {}
    file = tmp_path / "tests.xml"
    file.write_text(
        '<testsuites><testsuite><testcase classname="tests.a" name="good"/>'
        '<testcase classname="tests.a" name="bad[1]">'
        f'<failure message="{tmp_path}/x is 3&#10;more"/>'
        '<error message="later"/></testcase>'
        f'<testcase classname="tests.b" name="broken"><error message="{"y" * 999}"/></testcase>'
        '<testcase classname="tests.b" name="left"><skipped/></testcase></testsuite></testsuites>'
    )
    said = evidence.failed_tests(file)
    assert list(said) == ["tests.a::bad[1]", "tests.b::broken"]
    assert said["tests.a::bad[1]"].startswith("<tmp>")
    assert said["tests.a::bad[1]"].endswith("/x is 3")
    assert 0 < len(said["tests.b::broken"]) < 999


def test_without_a_gpu_there_is_no_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence = load("gpu_evidence")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="no GPU to measure on"):
        evidence.main([])


class Steps:
    """Stands for the steps of the GPU script: keeps their commands, writes what they would."""

    def __init__(self, failing: str = "", seconds: float = 0.0) -> None:
        self.commands: dict[str, list[str]] = {}
        self.limits: dict[str, float] = {}
        self._failing = failing
        self._seconds = seconds

    def __call__(self, name: str, command: list[str], limit_s: float) -> dict[str, Any]:
        self.commands[name] = command
        self.limits[name] = limit_s
        code = int(name == self._failing)
        time.sleep(min(self._seconds, limit_s))
        if limit_s < self._seconds:
            code = -1
        if "--json" in command and code == 0:
            Path(command[command.index("--json") + 1]).write_text(json.dumps({"of": name}))
        for word in command:
            if word.startswith("--junitxml="):
                Path(word.partition("=")[2]).write_text(
                    '<testsuites><testsuite tests="3" failures="0" errors="0" skipped="1"/>'
                    "</testsuites>"
                )
        return {"name": name, "date": "2026-11-21T10:00:00+00:00", "commit": bench_records.COMMIT,
                "command": command, "code": code, "seconds": 1.0, "tail": ""}  # fmt: skip


def gather(
    steps: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, out: Path, *options: str
) -> tuple[int, dict[str, Any]]:
    """With the daemon of MPS that `out` has, or none."""
    evidence = load("gpu_evidence")
    monkeypatch.setattr(evidence, "_gpu_names", lambda: ["NVIDIA H200", "NVIDIA H200"])
    find = functools.partial(shutil.which, path=str(out))
    monkeypatch.setattr(evidence.shutil, "which", find)
    monkeypatch.setattr(evidence, "run_step", steps)
    monkeypatch.setattr(evidence, "_GRACE_S", 0)
    monkeypatch.setenv("FLASHMOE_COMMIT", bench_records.COMMIT)
    code = evidence.main(["--out", str(out), *options])
    return code, json.loads((out / "gpu_evidence_h200.json").read_text())


def test_all_the_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps()
    code, document = gather(steps, monkeypatch, tmp_path)
    assert code == 0
    suites = load("gpu_evidence").SUITES
    benches = [f"bench {suite}" for suite in suites]
    names = ["tests", "tests by themselves", "check", *benches, "host cost"]
    assert list(steps.commands) == names
    assert [step["name"] for step in document["steps"]] == names
    assert document["tests"] == {"tests": 6, "failures": 0, "errors": 0, "skipped": 2}
    assert document["passed"] is True
    assert document["commit"] == bench_records.COMMIT
    command = steps.commands["bench moe-training@sm89"]
    assert command[command.index("--kernel") + 1] == "sm89"
    assert command[command.index("--json") + 1].endswith("/moe_training_sm89_h200.json")
    assert not any("--resume" in command for command in steps.commands.values())
    for suite in suites:  # each is one of the package's, for a GPU
        assert load_suite(suite.partition("@")[0]).device in ("cuda", "any")


def test_processes_of_tests_share_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a daemon that is there for the tests that run several at a time, and no longer."""
    said = tmp_path / "said"
    control = tmp_path / "nvidia-cuda-mps-control"
    control.write_text(f'#!/bin/sh\n[ "$1" = -d ] && echo begin >>{said} || cat >>{said}\n')
    control.chmod(0o755)
    steps = Steps()
    folders: dict[str, str | None] = {}

    def watched(name: str, command: list[str], limit_s: float) -> dict[str, Any]:
        folders[name] = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
        with said.open("a") as file:
            file.write(f"{name}\n")
        return steps(name, command, limit_s)

    gather(watched, monkeypatch, tmp_path, "--tests", "--check")
    assert said.read_text().split("\n")[:-1] == [
        "begin", "tests", "quit", "tests by themselves", "check"
    ]  # fmt: skip
    assert folders["tests"] and folders["tests by themselves"] is folders["check"] is None


def test_every_suite_of_a_gpu_is_in_the_evidence_and_in_the_documents() -> None:
    evidence = load("gpu_evidence")
    here = {name for name in suite_names() if load_suite(name).device != "cpu"}
    assert {suite.partition("@")[0] for suite in evidence.SUITES} == here
    shown = "".join(page.read_text(encoding="utf-8") for page in report.documents(ROOT))
    for suite in evidence.SUITES:
        file = f"benchmarks/results/{suite.replace('-', '_').replace('@', '_')}_h200.json"
        tables = re.findall(rf"<!-- results: (\S+) {re.escape(file)} -->", shown)
        of_attention = {"attention-grid", "attention-list", "sustained"}
        kinds = {"moe-list"} if suite.startswith("moe") else of_attention
        assert kinds & set(tables), suite


def test_the_evidence_can_be_restricted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps()
    options = ["--suites", "gqa", "attention-forward@sm89", "--limit", "7", "--check"]
    code, document = gather(steps, monkeypatch, tmp_path, *options, "--", "--peer", "torch-flash")
    assert code == 0
    assert list(steps.commands) == ["check", "bench gqa", "bench attention-forward@sm89"]
    assert set(steps.limits.values()) == {7}
    assert all(steps.commands[n][-2:] == ["--peer", "torch-flash"] for n in steps.commands
               if n.startswith("bench"))  # fmt: skip
    assert all("cuda:0" in command for command in steps.commands.values())
    assert {p.name for p in tmp_path.iterdir()} == {
        "attention_forward_sm89_h200.json",
        "gpu_evidence_h200.json",
        "gqa_h200.json",
    }
    assert "tests" not in document
    assert document["check"] == {"of": "check"}
    with pytest.raises(SystemExit, match="--suites: got moe-qwen, accepted are"):
        gather(steps, monkeypatch, tmp_path, "--suites", "moe-qwen")


def test_tests_can_be_of_some_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps()
    _, document = gather(steps, monkeypatch, tmp_path, "--tests", "tests/gpu/test_moe_route.py")
    of = "of tests/gpu/test_moe_route.py"
    assert list(steps.commands) == [f"tests {of}", f"tests by themselves {of}"]
    assert all("tests/gpu/test_moe_route.py" in command for command in steps.commands.values())
    assert document["tests"]["tests"] == 6


def test_a_part_takes_its_place_in_the_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather(Steps(failing="bench gqa"), monkeypatch, tmp_path)
    (tmp_path / "host_cost_h200.json").write_text('{"of": "an earlier run"}')
    code, document = gather(Steps(), monkeypatch, tmp_path, "--host-cost")
    assert code == 1  # what failed before has failed still
    assert document["passed"] is False
    names = [step["name"] for step in document["steps"]]
    assert names.count("host cost") == 1
    assert document["tests"]["tests"] == 6
    assert document["check"] == {"of": "check"}
    code, document = gather(Steps(), monkeypatch, tmp_path, "--suites", "gqa")
    assert code == 0
    assert [step["name"] for step in document["steps"]] == names
    assert document["host_cost"] == {"of": "host cost"}
    code, document = gather(Steps(failing="check"), monkeypatch, tmp_path)
    assert code == 1  # all of it starts anew
    assert "check" not in document


def test_what_time_runs_out_for_is_left_for_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suites = ["--suites", "gqa", "mla", "decode", "seeds", "--minutes"]
    first = Steps(seconds=0.2)
    code, document = gather(first, monkeypatch, tmp_path, *suites, str(0.5 / 60))
    assert code == 3
    done = [step["name"] for step in document["steps"] if step["code"] == 0]
    left = capsys.readouterr().out.splitlines()[-1]
    assert left.startswith("== time is out; left: bench ")
    assert 1 <= len(done) <= 2 and done[0] == "bench gqa" and not any(n in left for n in done)
    assert all("--resume" in command for command in first.commands.values())
    assert all(limit <= 0.5 for limit in first.limits.values())
    second = Steps()
    code, document = gather(second, monkeypatch, tmp_path, *suites, "9")
    assert code == 0
    assert not set(done) & set(second.commands)  # they passed at this commit
    assert [step["name"] for step in document["steps"]] == [
        "bench gqa", "bench mla", "bench decode", "bench seeds",
    ]  # fmt: skip


def test_what_was_done_stays_where_a_run_is_broken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Steps):
        def __call__(self, name: str, command: list[str], limit_s: float) -> dict[str, Any]:
            if name == "bench mla":
                raise KeyboardInterrupt
            return super().__call__(name, command, limit_s)

    with pytest.raises(KeyboardInterrupt):
        gather(Broken(), monkeypatch, tmp_path, "--suites", "gqa", "mla", "decode")
    document = json.loads((tmp_path / "gpu_evidence_h200.json").read_text())
    assert [step["name"] for step in document["steps"]] == ["bench gqa"]


def test_a_step_that_fails_leaves_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather(Steps(), monkeypatch, tmp_path, "--host-cost")
    code, document = gather(Steps(failing="host cost"), monkeypatch, tmp_path, "--host-cost")
    assert code == 1
    assert document["passed"] is False
    assert "host_cost" not in document


def test_steps_are_run_and_timed(tmp_path: Path) -> None:
    evidence = load("gpu_evidence")
    step = evidence.run_step("three", [sys.executable, "-c", "print(1); raise SystemExit(3)"], 60)
    assert (step["code"], step["tail"]) == (3, "1\n")


def test_a_step_that_takes_too_long_can_write_what_it_has() -> None:
    evidence = load("gpu_evidence")
    program = """
import time
print("begun", flush=True)
try:
    time.sleep(9)
except KeyboardInterrupt:
    print("kept")
"""
    step = evidence.run_step("late", [sys.executable, "-c", program], 1.0)
    assert step["code"] == evidence.LATE
    assert step["tail"].startswith("begun\nkept\n")
    assert "stopped after" in step["tail"]


def test_records_of_measurements_are_no_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLASHMOE_COMMIT", raising=False)
    checkout = Checkout(tmp_path)
    result = tmp_path / "benchmarks" / "results" / "x.json"
    bench_records.write(result, {})
    checkout.git("init", "-q")
    checkout.git("add", "-A")
    checkout.git("commit", "-qm", "one")
    head = checkout.git("rev-parse", "HEAD")
    evidence = load("gpu_evidence")
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path / "docs")
    bench_records.write(result, {"of": "a later run"})
    assert evidence.git_commit() == environment.git_commit() == head
    checkout.kernel.write_text("// two\n")
    assert evidence.git_commit() == environment.git_commit() == f"{head}+changes"
