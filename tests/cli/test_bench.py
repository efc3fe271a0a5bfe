"""`flashmoe bench`: checked rows, void rows, records that survive, suites as they say."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import bench_records
import flashmoe_science
import pytest
from flashmoe_science.cli import bench, ceilings, environment, main, records, resume
from flashmoe_science.cli.arrays import choose_arrays
from flashmoe_science.cli.bench_table import BenchTable
from flashmoe_science.cli.output import CommandError, Output
from flashmoe_science.cli.shapes import Shape
from flashmoe_science.cli.stats import compare
from flashmoe_science.cli.suites import load_suite, shape_of, suite_names
from flashmoe_science.cli.timing import Sampling

SMALL = ["--seq", "32", "--heads", "2", "--dim", "64", "--device", "cpu", "--seconds", "0.01"]


def run_bench(
    capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    code = main(["bench", *SMALL, *options, "--json"])
    document = json.loads(capsys.readouterr().out)
    return code, document, document["cells"][0]


def test_a_row_is_checked_and_timed(capsys: pytest.CaptureFixture[str]) -> None:
    code, document, cell = run_bench(capsys, "--causal")
    assert code == 0
    assert document["complete"] is True
    assert cell["status"] == "ok"
    assert cell["accuracy"]["passed"] is True
    assert cell["accuracy"]["checked"] == "2 of 2 heads, 32 of 32 rows"
    assert cell["plan"]["launches"] == cell["launches"]
    assert cell["plan"]["kernel"] == cell["launches"][0]["kernel"]
    ours = cell["contenders"]["flashmoe"]
    assert len(ours["samples_s"]) >= 7
    assert ours["q1_s"] <= ours["median_s"] <= ours["q3_s"]
    assert cell["flops"] == cell["plan"]["flops"]


def test_a_pipe_gets_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    assert main(["bench", *SMALL, "--json", str(pipe)]) == 0
    assert pipe.is_fifo()
    reader.join(timeout=60)
    assert [json.loads(text)["complete"] for text in read] == [True]
    assert main(["bench", "--suite", "cpu", "--resume", "--json", str(pipe)]) == 1
    assert "--resume: it is of a suite's record" in capsys.readouterr().err


def test_the_record_keeps_its_schema(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("jsonschema")
    file = tmp_path / "record.json"
    assert main(["bench", *SMALL, "--dim", "12", "--json", str(file)]) == 1  # a void row
    assert records.schema_violations(json.loads(file.read_text())) == []
    capsys.readouterr()
    _, document, cell = run_bench(capsys)
    assert records.schema_violations(document) == []
    ours = cell["contenders"]["flashmoe"]
    ours["median"] = ours.pop("median_s")
    assert any("median_s" in violation for violation in records.schema_violations(document))


def test_the_record_says_how_to_repeat_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    _, document, cell = run_bench(capsys, "--causal")
    assert document["command"] == ["flashmoe", "bench", *SMALL, "--causal"]
    assert document["source"]["commit"] == document["commit"]
    root = Path(__file__).parents[2]
    assert document["source"]["hash"] == environment.source_hash(root)
    kernels = environment.kernels_hash("attention_forward", "cpu", root)
    assert document["source"]["kernels"] == kernels
    assert cell["tokens"] == 32
    assert cell["bytes"] == 4 * 32 * 2 * 64 * 4 + 32 * 2 * 4
    ours = cell["contenders"]["flashmoe"]
    assert ours["tokens_per_s"] == pytest.approx(32 / ours["median_s"])
    assert "peak_bytes" not in ours


@pytest.mark.parametrize(
    "json_option", [["--json"], ["--json", "x/y.json"], ["--json=x", "--resume"]]
)
def test_where_a_record_goes_is_no_part_of_its_command(json_option: list[str]) -> None:
    command = ["bench", "--suite", "cpu", *json_option, "--seed", "3"]
    assert bench._command(command) == ["flashmoe", "bench", "--suite", "cpu", "--seed", "3"]


def test_ceilings_are_measured_in_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    _, document, cell = run_bench(capsys)
    ceiling = document["ceilings"]["matmul_flops_per_s"]["fp32"]
    assert document["ceilings"]["copy_bytes_per_s"] > 0
    ours = cell["contenders"]["flashmoe"]
    assert ours["ceiling_fraction"] == pytest.approx(ours["tflops"] * 1e12 / ceiling)


@pytest.mark.usefixtures("real_ceilings")
def test_a_ceiling_is_null_where_there_is_no_such_product() -> None:
    sampling = Sampling(seconds=0.001)
    found = ceilings.measure_ceilings(choose_arrays("cpu"), ["fp32", "fp16"], sampling)
    assert found["matmul_flops_per_s"]["fp32"] > 1e9
    assert found["matmul_flops_per_s"]["fp16"] is None
    assert found["copy_bytes_per_s"] > 1e8


@pytest.mark.parametrize(
    ("seconds", "calls"), [(60.0, 1), (2.1, 1), (0.9, 3), (0.5, 3), (0.1, 3), (1e-4, 30)]
)
def test_a_ceiling_takes_no_longer_than_its_budget(
    seconds: float, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow product gets a single call; a quick one is measured for as long as a contender."""
    passed = [0.0, 0.0]  # time, calls

    class Clock:
        def time(self, call: Any) -> float:
            passed[0] += seconds
            passed[1] += 1
            return seconds

    monkeypatch.setattr(ceilings, "make_clock", lambda arrays: Clock())
    monkeypatch.setattr(time, "monotonic", lambda: passed[0])
    found = ceilings.measure_ceilings(choose_arrays("cpu"), [], Sampling(seconds=0.25))
    assert passed[1] == calls
    assert found["copy_bytes_per_s"] == pytest.approx(2.0 * 2**16 / seconds)


def test_the_header_comes_before_what_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure_ceilings", interrupted)
    assert main(["bench", *SMALL]) == 130
    printed = capsys.readouterr().out
    assert printed.startswith("Attention forward, one shape, on cpu (")
    assert "On the CPU backend" in printed
    assert "First the ceilings" in printed


def mixed_suite(monkeypatch: pytest.MonkeyPatch, *dtypes: str) -> list[str]:
    """The command that runs a suite of a tiny row of each type, on a device that has only fp32."""
    row = Shape(1, 16, 16, 1, 1, 64, 64, "fp32", "none")
    shapes = tuple(dataclasses.replace(row, dtype=dtype) for dtype in dtypes)
    suite = dataclasses.replace(load_suite("cpu"), shapes=shapes)
    monkeypatch.setattr(bench, "load_suite", lambda name: suite)
    monkeypatch.setattr(bench, "native_dtypes", lambda device, served: ("fp32",))
    return ["bench", "--suite", "cpu", "--seconds", "0.01", "--peer", "none"]


def test_rows_that_the_device_does_not_multiply_are_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = mixed_suite(monkeypatch, "fp32", "fp16")
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "1 rows of fp16 are left out: the kernels of this device multiply fp16 as" in printed
    assert "--dtype fp16 measures those of that type" in printed
    assert "fp16 B1" not in printed
    assert main([*command, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [c["shape"]["dtype"] for c in document["cells"]] == ["fp32"]
    assert document["skipped"]["rows"] == 1
    assert document["skipped"]["dtypes"] == ["fp16"]
    assert list(document["ceilings"]["matmul_flops_per_s"]) == ["fp32"]
    assert records.schema_violations(document) == []


@pytest.mark.parametrize(
    ("rows", "options"), [(["fp32", "fp16"], ["--dtype", "fp16"]), (["fp16"], [])]
)
def test_what_is_asked_for_by_name_is_measured(
    rows: list[str],
    options: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its type, or by a suite that has no other."""
    assert main([*mixed_suite(monkeypatch, *rows), *options, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [c["shape"]["dtype"] for c in document["cells"]] == ["fp16"]
    assert "skipped" not in document


def test_what_a_device_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    served = ("fp32", "fp16", "bf16")
    for isa, native in (("avx512", ("fp32",)), ("amx", ("fp32", "bf16"))):
        info = dataclasses.replace(flashmoe_science.device_info("cpu"), isa=isa)
        monkeypatch.setattr(flashmoe_science, "device_info", lambda device, info=info: info)
        assert ceilings.native_dtypes("cpu", served) == native
    assert ceilings.native_dtypes("cuda:0", ("fp16", "bf16")) == ("fp16", "bf16")


def test_noisy_rows_have_no_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    real = bench.measure

    def noisy(*arguments: Any) -> Any:
        cell = real(*arguments)
        samples = [1.0, 2.0, 3.0, 4.0]
        entry = cell["contenders"]["torch-sdpa"]
        entry["against"] = compare(samples, samples)
        return cell

    monkeypatch.setattr(bench, "measure", noisy)
    assert main(["bench", *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "1.00 noisy" in printed
    assert "torch-sdpa: no verdict in 1: quartiles spread over more than 25 %" in printed
    assert "geometric mean" not in printed
    _, document, _ = run_bench(capsys)
    assert records.schema_violations(document) == []
    assert document["summary"]["torch-sdpa"] | {"least": 0} == {
        "rows": 0, "withheld": 1, "geometric_mean": None, "least": 0, "most": None,
        "faster": 0, "tie": 0, "slower": 0,
    }  # fmt: skip
    assert main(["bench", *SMALL, "--fail-below", "0.01"]) == 1
    assert "--fail-below: nothing can be judged, no verdict in 1" in capsys.readouterr().err


def test_torch_is_timed_beside_us(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    _, document, cell = run_bench(capsys)
    against = cell["contenders"]["torch-sdpa"]["against"]
    assert against["low"] <= against["ratio"] <= against["high"]
    assert against["verdict"] in ("faster", "tie", "slower", "withheld")
    summary = document["summary"]["torch-sdpa"]
    assert (summary["rows"], summary["withheld"]) in ((1, 0), (0, 1))


def test_a_peer_that_does_not_serve_a_mask_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    shape = ["--seq-q", "16", "--seq-k", "32", "--heads", "2", "--dim", "64", "--causal"]
    assert main(["bench", *shape, "--device", "cpu", "--seconds", "0.01", "--json"]) == 0
    cell = json.loads(capsys.readouterr().out)["cells"][0]
    assert cell["contenders"]["torch-sdpa"]["status"] == "refused"
    assert "top left" in cell["contenders"]["torch-sdpa"]["reason"]


def test_no_peer(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, cell = run_bench(capsys, "--peer", "none")
    assert list(cell["contenders"]) == ["flashmoe"]


def test_an_interrupt_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = bench.measure
    seen = []

    def interrupted(*arguments: Any, **options: Any) -> Any:
        seen.append(arguments)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(bench, "measure", interrupted)
    file = tmp_path / "made" / "results.json"
    command = ["bench", "--suite", "seeds", "--device", "cpu", "--seconds", "0.01"]
    assert main([*command, "--json", str(file)]) == 130
    document = json.loads(file.read_text())
    assert document["complete"] is False
    assert [c["status"] for c in document["cells"]] == ["ok", "ok"]
    assert "interrupted after 2 of 6 shapes" in capsys.readouterr().out


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    command = ["bench", "--suite", "seeds", "--device", "cpu", "--seconds", "1", "--peer", "none"]
    process = subprocess.Popen(
        [sys.executable, "-m", "flashmoe_science", *command, "--json", str(file)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not file.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    document = json.loads(file.read_text())
    assert document["complete"] is False
    assert document["cells"]
    assert all(cell["contenders"]["flashmoe"]["samples_s"] for cell in document["cells"])
    assert f"interrupted after {len(document['cells'])} of 6 shapes" in printed


class Suite:
    """The suite `seeds` on the CPU into one file, with every row that is measured counted."""

    def __init__(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = file
        self.measured: list[Shape] = []
        self.stop_after = 99
        real = bench.measure

        def counted(*arguments: Any, **options: Any) -> Any:
            if len(self.measured) == self.stop_after:
                raise KeyboardInterrupt
            self.measured.append(arguments[2])
            return real(*arguments, **options)

        monkeypatch.setattr(bench, "measure", counted)
        monkeypatch.chdir(Path(__file__).parent)  # in a checkout, which has sources

    def run(self, *options: str, code: int = 0) -> dict[str, Any]:
        self.measured.clear()
        command = ["bench", "--suite", "seeds", "--device", "cpu", "--seconds", "0.01"]
        assert main([*command, "--json", str(self.file), *options]) == code
        document: dict[str, Any] = json.loads(self.file.read_text())
        return document


def test_a_run_that_was_interrupted_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    suite = Suite(tmp_path / "r.json", monkeypatch)
    suite.stop_after = 2
    first = suite.run("--peer", "torch-sdpa", code=130)
    suite.stop_after = 99
    second = suite.run("--peer", "torch-sdpa", "--resume")
    assert len(suite.measured) == 4
    assert second["cells"][:2] == first["cells"]
    assert [c["status"] for c in second["cells"]] == ["ok"] * 6
    assert second["complete"] is True
    assert second["kept"] == {"rows": 2, "since": first["date"]}
    summary = second["summary"]["torch-sdpa"]
    assert summary["rows"] + summary["withheld"] == 6
    assert "--resume" not in second["command"]
    assert "2 of 6 rows are kept" in capsys.readouterr().out
    assert records.schema_violations(second) == []
    third = suite.run("--peer", "torch-sdpa", "--resume")
    assert suite.measured == []
    assert third["cells"] == second["cells"]
    assert third["kept"] == {"rows": 6, "since": first["date"]}


def a_record() -> dict[str, Any]:
    """Two rows beside torch-flash, which is found."""
    rows = [bench_records.cell(bench_records.shape(n), 1.0, bench_records.against(1, 1, 1))
            for n in (32, 64)]  # fmt: skip
    document = bench_records.document(rows)
    document["source"]["kernels"] = "1" * 64
    document["peers"] = {"torch-flash": {"status": "found", "version": "2.13.0"}}
    return document


CHANGES: dict[str, Any] = {
    "other kernels": lambda d: d["source"].update(kernels="2" * 64),
    "kernels not known": lambda d: d["source"].pop("kernels"),
    "another device": lambda d: d["device"].update(name="NVIDIA L4"),
    "another family": lambda d: d.update(kernel="sm89"),
    "other samples": lambda d: d["sampling"].update(seconds=0.5),
    "another torch": lambda d: d["environment"]["packages"].update(torch="2.12.0"),
    "another suite": lambda d: d.update(suite="other"),
}
REFUSALS = {
    "other kernels": f"its source.kernels is {'2' * 64}, and here it is {'1' * 64}",
    "kernels not known": "it does not say which kernels it measured",
    "another device": "its device.name is NVIDIA L4, and here it is NVIDIA H200",
    "another family": "its kernel is sm89, and here it is None",
    "other samples": "its sampling.seconds is 0.5, and here it is 0.25",
    "another torch": "its environment.packages.torch is 2.12.0, and here it is 2.13.0",
    "another suite": "its suite is other, and here it is grid",
}
CHANGES_OF_ROWS: dict[str, Any] = {
    "no such peer": lambda c: c["contenders"].pop("torch-flash"),
    "a peer that was missing": lambda c: c["contenders"].update(
        {"torch-flash": {"status": "missing", "reason": "not installed"}}
    ),
    "another version": lambda c: c["contenders"]["torch-flash"].update(version="2.12.0"),
    "a void row": lambda c: c.update(status="void"),
}
SHAPES = [Shape(**bench_records.shape(n)) for n in (32, 64)]


@pytest.fixture
def no_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "schema_violations", lambda document: [])


@pytest.mark.usefixtures("no_schema")
@pytest.mark.parametrize("change", ["", *CHANGES_OF_ROWS])
def test_what_is_kept_of_a_record(change: str, tmp_path: Path) -> None:
    earlier, now = a_record(), a_record()
    if change:
        CHANGES_OF_ROWS[change](earlier["cells"][1])
    file = bench_records.write(tmp_path / "r.json", earlier)
    kept = resume.kept_rows(str(file), now, SHAPES, SHAPES)
    assert list(kept.rows) == SHAPES[: 1 if change else 2]
    assert kept.since == earlier["date"]
    assert resume.kept_rows(str(tmp_path / "none.json"), now, SHAPES, SHAPES).rows == {}


@pytest.mark.usefixtures("no_schema")
@pytest.mark.parametrize("change", CHANGES)
def test_a_record_of_something_else_is_not_resumed(change: str, tmp_path: Path) -> None:
    earlier = a_record()
    CHANGES[change](earlier)
    file = str(bench_records.write(tmp_path / "r.json", earlier))
    with pytest.raises(CommandError, match=re.escape(f"{file} cannot be resumed: ")) as raised:
        resume.kept_rows(file, a_record(), SHAPES, SHAPES)
    assert REFUSALS[change] in str(raised.value)
    assert "leave --resume out" in str(raised.value)
    earlier["cells"] = []  # of which nothing can be lost
    bench_records.write(tmp_path / "r.json", earlier)
    assert resume.kept_rows(file, a_record(), SHAPES, SHAPES).rows == {}


@pytest.mark.usefixtures("no_schema")
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_times_of_the_cpu_are_of_a_number_of_threads(device: str, tmp_path: Path) -> None:
    earlier, now = a_record(), a_record()
    for record, threads in ((earlier, 2), (now, 1)):
        record["device"]["device"] = device
        record["environment"]["threads"] = threads
    file = str(bench_records.write(tmp_path / "r.json", earlier))
    if device != "cpu":
        assert len(resume.kept_rows(file, now, SHAPES, SHAPES).rows) == 2
        return
    with pytest.raises(CommandError, match=r"its environment\.threads is 2, and here it is 1"):
        resume.kept_rows(file, now, SHAPES, SHAPES)


@pytest.mark.usefixtures("no_schema")
@pytest.mark.parametrize("change", CHANGES_OF_ROWS)
def test_a_row_that_is_not_measured_anew_does_not_vanish(change: str, tmp_path: Path) -> None:
    """By --only, which asks for the first shape alone."""
    earlier = a_record()
    CHANGES_OF_ROWS[change](earlier["cells"][1])
    file = str(bench_records.write(tmp_path / "r.json", earlier))
    if change == "a void row":  # it has no peers, and stays what it is
        kept = resume.kept_rows(file, a_record(), SHAPES, SHAPES[:1])
        assert kept.rows[SHAPES[1]]["status"] == "void"
        return
    with pytest.raises(CommandError, match=f"would drop 1 of its rows, such as {SHAPES[1]}"):
        resume.kept_rows(file, a_record(), SHAPES, SHAPES[:1])


@pytest.mark.usefixtures("no_schema")
def test_a_row_of_a_shape_that_is_left_out_does_not_vanish(tmp_path: Path) -> None:
    file = str(bench_records.write(tmp_path / "r.json", a_record()))
    with pytest.raises(CommandError, match=f"would drop 1 of its rows, such as {SHAPES[1]}"):
        resume.kept_rows(file, a_record(), SHAPES[:1], SHAPES[:1])


def test_an_earlier_record_survives_where_kernels_are_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = Suite(tmp_path / "r.json", monkeypatch)
    suite.run("--peer", "none", "--only", "S64")
    before = suite.file.read_bytes()
    monkeypatch.setattr(environment, "checkout", lambda: None)
    suite.run("--peer", "none", "--resume", code=1)
    assert suite.measured == []
    assert suite.file.read_bytes() == before
    said = "".join(capsys.readouterr())
    assert "the kernels are not known here; run it in a checkout" in said
    suite.run("--peer", "none", "--only", "S64")  # without it the file is begun anew
    assert suite.measured


def test_void_rows_are_measured_again_and_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = Suite(tmp_path / "r.json", monkeypatch)
    document = suite.run("--peer", "none")
    void = {key: document["cells"][1][key] for key in ("shape", "flops", "bytes", "tokens")}
    document["cells"][1] = void | {"status": "void", "reason": "no memory"}
    suite.file.write_text(json.dumps(document))
    suite.stop_after = 0
    interrupted = suite.run("--peer", "none", "--resume", code=130)
    assert interrupted["cells"] == [document["cells"][0], *document["cells"][2:]]
    suite.stop_after = 99
    made = suite.run("--peer", "none", "--resume")
    assert len(suite.measured) == 1
    assert [c["shape"] for c in made["cells"]] == [c["shape"] for c in document["cells"]]
    assert made["cells"][1]["status"] == "ok"


@pytest.mark.parametrize("options", [SMALL, ["--suite", "cpu"], ["--suite", "cpu", "--json"]])
def test_resuming_takes_a_suite_and_a_file(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *options, "--resume"]) != 0
    said = capsys.readouterr()
    assert "--resume: it is of a suite's record" in said.out + said.err


def test_a_terminal_shows_progress(tmp_path: Path) -> None:
    """With rich, on standard error, while standard output is the document alone."""
    pytest.importorskip("rich")
    ours, theirs = os.openpty()
    command = ["bench", "--suite", "seeds", "--seconds", "0.01", "--device", "cpu", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "flashmoe_science", *command, "--peer", "none"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
        check=True,
    )
    os.close(theirs)
    drawn = os.read(ours, 2**16).decode()
    os.close(ours)
    assert "0/6" in drawn
    assert "5/6" in drawn
    assert "fp16 B1 S32 H1 D64" in drawn
    assert len(json.loads(done.stdout)["cells"]) == 6


def test_a_log_says_which_shape_begins(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "--suite", "seeds", "--device", "cpu", "--seconds", "0.01", "--json"]
    assert main([*command, "--peer", "none"]) == 0
    said = capsys.readouterr()
    lines = said.err.splitlines()
    shapes = [shape_of(cell["shape"]) for cell in json.loads(said.out)["cells"]]
    assert lines == [f"{i}/6 {shape}" for i, shape in enumerate(shapes)]


def test_a_suites_shapes_can_be_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = Suite(tmp_path / "r.json", monkeypatch)
    first = suite.run("--peer", "none", "--only", "S64", "--only", "S512")
    of_suite = load_suite("seeds").shapes
    chosen = [s for s in of_suite if "S64" in str(s) or "S512" in str(s)]
    assert 0 < len(chosen) < len(of_suite)
    assert suite.measured == chosen
    assert first["complete"] is False
    assert first["command"][-4:] == ["--only", "S64", "--only", "S512"]
    # The record takes the others in, in the suite's order.
    rest = suite.run("--peer", "none", "--only", "S", "--resume")
    assert suite.measured == [s for s in of_suite if s not in chosen]
    assert rest["complete"] is True
    assert [shape_of(c["shape"]) for c in rest["cells"]] == list(of_suite)
    # Rows of an earlier record stay, though they are not asked for.
    again = suite.run("--peer", "none", "--only", "S64", "--resume")
    assert suite.measured == []
    assert again["cells"] == rest["cells"]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--suite", "seeds", "--only", "olmoe"], "--only: got olmoe, which none of"),
        (["--seq", "8", "--heads", "1", "--dim", "8", "--only", "S"], "--only: it chooses among"),
    ],
)
def test_a_choice_among_no_shapes_is_refused(
    capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert main(["bench", "--device", "cpu", *options]) != 0
    assert said in "".join(capsys.readouterr())


def test_a_row_that_cannot_be_measured_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = bench.measure

    def fails_once(flashmoe: Any, arrays: Any, shape: Shape, *rest: Any) -> Any:
        if shape.seq_q == 64:
            raise MemoryError("no room")
        return real(flashmoe, arrays, shape, *rest)

    monkeypatch.setattr(bench, "measure", fails_once)
    command = ["bench", "--suite", "seeds", "--device", "cpu", "--seconds", "0.01", "--json"]
    assert main(command) == 1
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert [c["status"] for c in cells] == ["ok", "void", "ok", "ok", "ok", "ok"]
    assert cells[1]["reason"] == "measuring failed: MemoryError: no room"


def test_people_read_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *SMALL, "--peer", "none"]) == 0
    printed = capsys.readouterr().out
    assert "On the CPU backend" in printed
    assert "fp32 B1 S32 H2 D64" in printed


def test_the_table_keeps_the_clocks_of_a_gpu_apart(capsys: pytest.CaptureFixture[str]) -> None:
    against = {"ratio": 1.25, "low": 1.2, "high": 1.3, "verdict": "faster"}
    tie = {"ratio": 1.01, "low": 0.99, "high": 1.03, "verdict": "tie"}
    times = {"status": "ok", "median_s": 20e-6, "q1_s": 19e-6, "q3_s": 21e-6, "tflops": 300.0}
    graph = {"graph_s": 10e-6, "graph_samples_s": [10e-6, 10e-6, 10e-6], "host_s": 6e-6}
    graph |= {"eager_s": 7e-6}
    peer = times | graph | {"host_s": 21e-6, "against": against, "graph_against": tie}
    refused = {"status": "refused", "reason": "no"}
    entries = {"flashmoe": times | graph, "a": peer, "b": refused}
    ceilings = {"matmul_flops_per_s": {"bf16": 1e15}, "copy_bytes_per_s": 4e12}
    table = BenchTable(Output(), "cuda:0", ["a", "b"], ceilings)
    cell = {"status": "ok", "shape": {"dtype": "bf16"}, "contenders": entries}
    table.cell("shape", cell | {"flops": 6e9, "bytes": 32e6})  # 6 us of products, 8 of traffic
    lines = capsys.readouterr().out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("shape  "))
    header, *rows = (line.split() for line in lines[first:])
    assert header[-2:] == ["a", "b"]
    against_words = ["1.25", "(1.20-1.30)"]
    assert rows == [
        ["shape", "events", "20.0", "10.0", "%", "300", "40", "%", *against_words, "refused"],
        ["graph", "10.0", "0.0", "%", "600", "1.01", "(0.99-1.03)", "tie", "-"],
        ["eager", "7.0", "7.0", "us", "-"],
        ["host", "6.0", "21.0", "us", "-"],
    ]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--suite", "nothing"], "--suite: got nothing, accepted are attention-backward"),
        (["--suite", "attention-forward", "--device", "cpu"], "is for a GPU"),
        (["--suite", "seeds", "--dim", "64"], "a suite has its own shapes"),
        (["--suite", "seeds", "--batch", "2", "--causal"], "either it or --batch --causal"),
        (["--compare", "a.json", "b.json", "--dtype", "fp16"], "neither a suite nor a shape"),
        (["--suite", "seeds", "--dtype", "bf16"], "accepted for the suite seeds are fp16"),
        ([], "--suite: give one of attention-backward"),
        (["--dim", "64", "--seq", "8"], "--heads is missing"),
        ([*SMALL, "--seq", "0"], "nothing to time in fp32 B1 S0"),
        ([*SMALL, "--threads", "9999"], "--threads: got 9999 threads, accepted are 0 to 4096"),
        ([*SMALL, "--device", "tpu"], "--device: got tpu, accepted are cpu, cuda and cuda:N"),
    ],
)
def test_a_wrong_request_is_explained(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *options]) == 1
    assert sentence in capsys.readouterr().err


def test_a_record_that_cannot_be_written_is_said_before_measuring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "file" / "record.json"):
        assert main(["bench", *SMALL, "--json", str(place)]) == 1
        captured = capsys.readouterr()
        assert captured.err.startswith(f"flashmoe bench: --json: {place} cannot be written: ")
        assert captured.out == ""
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("option", "value", "least"), [("--samples", 6, 7), ("--seed", -1, 0)])
def test_numbers_have_a_least(
    option: str, value: int, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fewer than six samples have no 95 % interval of their median."""
    with pytest.raises(SystemExit) as stop:
        main(["bench", *SMALL, option, str(value)])
    assert stop.value.code == 2
    assert f"got {value}, accepted are {least} and more" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--seconds", "--threads"])
def test_numbers_are_above_zero(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", *SMALL, option, "0"])
    assert stop.value.code == 2
    assert "accepted is a number above 0" in capsys.readouterr().err


def test_a_shape_that_no_kernel_takes_is_a_void_row(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, cell = run_bench(capsys, "--dim", "12")
    assert code == 1
    assert "the call failed: q: its head dimension is 12" in cell["reason"]


def test_the_suites_are_what_they_say() -> None:
    of_moe = ["moe-backward", "moe-cpu", "moe-mixtral", "moe-olmoe", "moe-qwen3", "moe-training",
              "moe-training-step"]  # fmt: skip
    of_attention = ["attention-backward", "attention-backward-cpu", "attention-backward-fp16",
                    "attention-backward-sustained", "attention-backward-variants",
                    "attention-between", "attention-forward", "attention-forward-fp16",
                    "attention-training", "cpu", "decode", "gqa", "mla"]  # fmt: skip
    names = [*of_attention, *of_moe, "seeds"]
    assert suite_names() == names
    forward = load_suite("attention-forward").shapes
    assert len(set(forward)) == 36
    assert {s.batch * s.seq_q for s in forward} == {16384}
    assert {s.heads_q * s.dim for s in forward} == {2048}
    assert {s.dim for s in forward} == {64, 128, 256}
    assert {s.dtype for s in forward} == {"bf16"}
    types = load_suite("attention-forward-fp16").shapes  # either type right behind the other
    assert types[::2] == forward
    assert [dataclasses.replace(s, dtype="bf16") for s in types[1::2]] == list(forward)
    assert {s.dtype for s in types[1::2]} == {"fp16"}
    seeds = load_suite("seeds").shapes
    assert [(s.batch, s.heads_q, s.seq_q, s.dim) for s in seeds] == [
        (1, 1, 32, 64),
        (1, 1, 64, 64),
        (1, 1, 128, 64),
        (1, 1, 256, 64),
        (1, 1, 512, 64),
        (2, 4, 128, 64),
    ]
    gqa = load_suite("gqa").shapes
    prefill = [(s.batch, s.heads_q, s.heads_kv, s.seq_q) for s in gqa if s.seq_q == s.seq_k]
    assert {(2, 32, 8, 8192), (1, 64, 8, 4096), (4, 32, 32, 2048), (1, 16, 16, 32768)} <= set(
        prefill
    )
    assert len(set(gqa)) == 12
    between = load_suite("attention-between").shapes
    assert len(set(between)) == len(between) == 24
    assert {s.dim for s in between} >= {40, 72, 80, 96, 112, 160, 192}
    assert {20, 24} <= {s.heads_q for s in between}
    assert any(s.seq_q % 64 and s.seq_k % 64 for s in between)
    assert not set(between) & {*forward, *gqa}
    decode = load_suite("decode").shapes
    assert {s.seq_q for s in decode} == {1}
    assert [(s.batch, s.heads_q, s.heads_kv, s.seq_k) for s in decode] == [
        (1, 32, 8, 8192),
        (16, 32, 8, 8192),
        (1, 32, 8, 65536),
        (64, 32, 8, 4096),
        (128, 64, 8, 8192),
    ]
    assert {s.dim for s in (*gqa, *decode)} == {128}
    all_shapes = [s for n in suite_names() for s in load_suite(n).shapes if isinstance(s, Shape)]
    assert all(s.heads_q % s.heads_kv == 0 for s in all_shapes)


@pytest.mark.parametrize("causal", ["none", "bottom_right", "top_left"])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(7, 7), (1, 9), (9, 4), (4, 9), (30, 1)])
def test_flops_are_the_librarys(causal: str, seq_q: int, seq_k: int) -> None:
    shape = Shape(2, seq_q, seq_k, 4, 2, 64, 32, "fp32", causal)
    plan = flashmoe_science.attention_plan_for(
        batch=2,
        seq_q=seq_q,
        seq_k=seq_k,
        heads_q=4,
        heads_kv=2,
        dim=64,
        dim_v=32,
        dtype="fp32",
        device="cpu",
        causal=False if causal == "none" else causal,
    )
    assert shape.flops == plan.flops


@pytest.mark.gpu
def test_the_gpu_is_timed_with_all_peers(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--seq", "1024", "--heads", "8", "--dim", "128", "--batch", "2", "--causal"]
    assert main(["bench", *shape, "--device", "cuda:0", "--seconds", "0.02", "--json"]) == 0
    cell = json.loads(capsys.readouterr().out)["cells"][0]
    ours = cell["contenders"]["flashmoe"]
    assert 0 < ours["graph_s"] < 1
    assert 0 < ours["host_s"] < 1
    assert 0 < ours["eager_s"] < 1
    assert cell["contenders"]["torch-flash"]["status"] == "ok"
    assert "cpu" not in cell["launches"][0]["kernel"]
