"""`flashmoe bench`: checked rows, void rows, records that survive, suites as they say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import flashmoe_science
import pytest
from flashmoe_science.cli import bench, ceilings, environment, main, records
from flashmoe_science.cli.shapes import Shape, load_suite, suite_names

SMALL = ["--seq", "32", "--heads", "2", "--dim", "64", "--device", "cpu", "--seconds", "0.01"]


@pytest.fixture(autouse=True)
def low_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ceilings are measured in every run; small ones leave the tests their seconds."""
    monkeypatch.setattr(ceilings, "_MATMUL_EXTENT", {"cpu": 64})
    monkeypatch.setattr(ceilings, "_COPY_BYTES", {"cpu": 2**16})


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
    assert cell["plan"]["kernel"] == cell["launch"]["kernel"]
    ours = cell["contenders"]["flashmoe"]
    assert len(ours["samples_s"]) >= 7
    assert ours["q1_s"] <= ours["median_s"] <= ours["q3_s"]
    assert cell["flops"] == cell["plan"]["flops"]


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
    assert document["source"]["hash"] == environment.source_hash(Path(__file__).parents[2])
    assert cell["tokens"] == 32
    assert cell["bytes"] == 4 * 32 * 2 * 64 * 4 + 32 * 2 * 4
    ours = cell["contenders"]["flashmoe"]
    assert ours["tokens_per_s"] == pytest.approx(32 / ours["median_s"])
    assert "peak_bytes" not in ours


@pytest.mark.parametrize("json_option", [["--json"], ["--json", "x/y.json"], ["--json=x"]])
def test_where_a_record_goes_is_no_part_of_its_command(json_option: list[str]) -> None:
    command = ["bench", "--suite", "cpu", *json_option, "--seed", "3"]
    assert bench._command(command) == ["flashmoe", "bench", "--suite", "cpu", "--seed", "3"]


def test_ceilings_are_measured_in_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    _, document, cell = run_bench(capsys)
    ceiling = document["ceilings"]["matmul_flops_per_s"]["fp32"]
    assert document["ceilings"]["copy_bytes_per_s"] > 0
    ours = cell["contenders"]["flashmoe"]
    assert ours["ceiling_fraction"] == pytest.approx(ours["tflops"] * 1e12 / ceiling)


def test_torch_is_timed_beside_us(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    _, document, cell = run_bench(capsys)
    against = cell["contenders"]["torch-sdpa"]["against"]
    assert against["low"] <= against["ratio"] <= against["high"]
    assert against["verdict"] in ("faster", "tie", "slower")
    assert document["summary"]["torch-sdpa"]["rows"] == 1


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


def test_wrong_values_make_the_row_void(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = flashmoe_science.flash_attention

    def wrong(*arguments: Any, **options: Any) -> Any:
        out, lse = real(*arguments, **options)
        out[0, 3, 1, 5] *= 1.5
        return out, lse

    monkeypatch.setattr(flashmoe_science, "flash_attention", wrong)
    code, document, cell = run_bench(capsys)
    assert code == 1
    assert cell["status"] == "void"
    assert "max|out - float64|" in cell["reason"]
    assert "contenders" not in cell
    assert document["summary"] == {}


def test_another_kernel_than_planned_makes_the_row_void(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = flashmoe_science.last_launch
    monkeypatch.setattr(
        flashmoe_science, "last_launch", lambda: dataclasses.replace(real(), grid=(1, 2, 3))
    )
    code, _, cell = run_bench(capsys)
    assert code == 1
    assert "not the planned one: grid: planned" in cell["reason"]


def test_a_wrong_peer_is_void_and_we_are_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda q, *_, **__: torch.zeros_like(q)
    )
    code, document, cell = run_bench(capsys)
    assert code == 0
    assert cell["contenders"]["torch-sdpa"]["status"] == "void"
    assert "median_s" in cell["contenders"]["flashmoe"]
    assert document["summary"] == {}


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


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--suite", "nothing"], "--suite: got nothing, accepted are attention-forward"),
        (["--suite", "attention-forward", "--device", "cpu"], "is for a GPU"),
        (["--suite", "seeds", "--dim", "64"], "a suite has its own shapes"),
        (["--dim", "64", "--seq", "8"], "--heads is missing"),
        ([*SMALL, "--seq", "0"], "nothing to time in fp32 B1 S0"),
        ([*SMALL, "--threads", "9999"], "4096"),
        ([*SMALL, "--device", "tpu"], "--device: got tpu, accepted are cpu, cuda and cuda:N"),
    ],
)
def test_a_wrong_request_is_explained(
    options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *options]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--seconds", "--samples", "--threads"])
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
    assert suite_names() == ["attention-forward", "attention-forward-fp16", "cpu", "gqa", "seeds"]
    forward = load_suite("attention-forward").shapes
    assert len(set(forward)) == 36
    assert {s.batch * s.seq_q for s in forward} == {16384}
    assert {s.heads_q * s.dim for s in forward} == {2048}
    assert {s.dim for s in forward} == {64, 128, 256}
    assert {s.dtype for s in forward} == {"bf16"}
    assert {s.dtype for s in load_suite("attention-forward-fp16").shapes} == {"fp16"}
    seeds = load_suite("seeds").shapes
    assert [(s.batch, s.heads_q, s.seq_q, s.dim) for s in seeds] == [
        (1, 1, 32, 64),
        (1, 1, 64, 64),
        (1, 1, 128, 64),
        (1, 1, 256, 64),
        (1, 1, 512, 64),
        (2, 4, 128, 64),
    ]
    assert all(s.heads_q % s.heads_kv == 0 for n in suite_names() for s in load_suite(n).shapes)


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
    assert cell["contenders"]["torch-flash"]["status"] == "ok"
    assert "cpu" not in cell["launch"]["kernel"]
