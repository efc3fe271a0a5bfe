"""`flashmoe profile`: the command it gives to Nsight Compute, and what it reads of the answer."""

from __future__ import annotations

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import flashmoe_science
import pytest
from flashmoe_science.cli import main, profile
from flashmoe_science.cli.arrays import choose_arrays
from flashmoe_science.cli.profile_call import profiled_call
from flashmoe_science.cli.shapes import Shape

SHAPE = ["--seq", "64", "--heads", "2", "--dim", "64", "--causal"]

# Stands in for ncu: keeps its arguments, and answers as the real one does. The call itself is not
# made: FILE, its last argument, gets what the real call writes.
FAKE = """#!{python}
import json, pathlib, sys
here = pathlib.Path(__file__).parent
here.joinpath("arguments.json").write_text(json.dumps(sys.argv[1:]))
answer = json.loads(here.joinpath("answer.json").read_text())
if answer["call"] is not None:
    pathlib.Path(sys.argv[-1]).write_text(json.dumps(answer["call"]))
pathlib.Path(sys.argv[sys.argv.index("--log-file") + 1]).write_text(answer["log"])
sys.exit(answer["code"])
"""

CALL: dict[str, Any] = {
    "launches": [{"kernel": "attention_forward_sm89_bf16", "local_bytes": 0}],
    "plan": {},
}
VALUES = {
    "tensor_percent": ("%", "61.25"),
    "mufu_percent": ("%", "33.1"),
    "dram_percent": ("%", "12.5"),
    "dram_bytes_per_s": ("byte/second", "512,000,000,000"),
    "shared_bank_conflicts": ("", "2,048"),
    "shared_wavefronts": ("", "1,024,000"),
    "registers": ("register/thread", "255"),
    "local_loads": ("inst", "0"),
    "local_stores": ("inst", "0"),
}


def table(without: str = "", kernels: int = 1) -> str:
    """What ncu --csv --page raw writes."""
    names = [n for n in profile.METRICS if n != without]
    rows = [
        ["ID", "Process ID", "Kernel Name", *(profile.METRICS[n] for n in names)],
        ["", "", "", *(VALUES[n][0] for n in names)],
        *(
            [str(i), "77", "void flashmoe::sm89::attention_forward_kernel<T>(P)",
             *(VALUES[n][1] for n in names)]
            for i in range(kernels)
        ),
    ]  # fmt: skip
    body = "\n".join(",".join(f'"{word}"' for word in row) for row in rows)
    return f"==PROF== Connected to process 77\n==PROF== Disconnected\n{body}\n"


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts the stand-in on the PATH of a machine with a GPU. What it gives sets the answer, and its
    attribute `arguments` tells what the stand-in was called with."""
    program = tmp_path / "ncu"
    program.write_text(FAKE.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(profile, "usable_device", lambda _: ("cuda:0", ""))
    cpu = flashmoe_science.device_info("cpu")
    monkeypatch.setattr(flashmoe_science, "device_info", lambda _: cpu)

    def answer(log: str, call: Any = CALL, code: int = 0) -> None:
        document = {"log": log, "call": call, "code": code}
        (tmp_path / "answer.json").write_text(json.dumps(document))

    answer(table())
    answer.arguments = lambda: json.loads((tmp_path / "arguments.json").read_text())  # type: ignore[attr-defined]
    return answer


def test_five_figures(ncu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *SHAPE]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[1] == "attention_forward_sm89_bf16: void flashmoe::sm89::attention_forward_kernel<T>"
    )
    assert [" ".join(line.split()) for line in lines[2:]] == [
        "tensor pipes 61.2 %",
        "MUFU 33.1 %",
        "memory (DRAM) 12.5 %, 0.512 TB/s",
        "shared-memory bank conflicts 2048, 0.2 % of the wavefronts",
        "registers, local memory 255 a thread; 0 instructions, 0 bytes a thread",
    ]


def test_json(ncu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *SHAPE, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    [kernel] = document["kernels"]
    assert kernel["figures"]["dram_bytes_per_s"] == 512e9
    assert kernel["figures"]["registers"] == 255
    assert document["shape"]["causal"] == "bottom_right"
    assert document["launches"] == CALL["launches"]


def test_figures_of_every_launch(ncu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    launches = [{"kernel": "main", "local_bytes": 0}, {"kernel": "combine", "local_bytes": 48}]
    ncu(table(kernels=2), CALL | {"launches": launches})
    assert main(["profile", *SHAPE]) == 0
    printed = capsys.readouterr().out
    first, second = printed.split("combine: void")
    assert "main: void" in first
    assert "0 bytes a thread" in first
    assert "48 bytes a thread" in second
    ncu(table(kernels=1), CALL | {"launches": launches})
    assert main(["profile", *SHAPE]) == 1
    assert "has figures of 1 kernels, the call launched 2" in capsys.readouterr().err


def test_the_command(ncu: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *SHAPE, "--kernel", "sm89"]) == 0
    arguments = ncu.arguments()
    options = dict(itertools.pairwise(arguments))
    assert options["--kernel-name"] == "regex:flashmoe"
    assert options["--kernel-name-base"] == "demangled"
    assert options["--profile-from-start"] == "off"
    assert options["--metrics"].split(",") == list(profile.METRICS.values())
    call = arguments[arguments.index(sys.executable) :]
    assert call[1:3] == ["-m", "flashmoe_science.cli.profile_call"]
    assert Shape(**json.loads(call[3])) == Shape(1, 64, 64, 2, 2, 64, 64, "bf16", "bottom_right")
    assert call[4:6] == ["cuda:0", "sm89"]


@pytest.mark.parametrize("name", ["mufu_percent", "shared_bank_conflicts", "local_loads"])
def test_a_metric_that_is_not_there_is_no_zero(
    ncu: Any, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    ncu(table(without=name))
    assert main(["profile", *SHAPE]) == 0
    assert "not reported" in capsys.readouterr().out
    assert main(["profile", *SHAPE, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"][0]["figures"][name] is None


@pytest.mark.parametrize(
    ("log", "call", "code", "sentence"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - no permission", CALL, 1, "NVreg_RestrictProfilingToAdmin"),
        ("==ERROR== Failed to find metric", None, 1, "exited with 1 and no figures: ==ERROR=="),
        ("==WARNING== No kernels were profiled.", CALL, 0, "No kernels were profiled"),
        (table(), {"reason": "max|out - float64| is 3"}, 0, "void: max|out - float64| is 3"),
    ],
)
def test_no_figures_without_a_reason(
    ncu: Any, capsys: pytest.CaptureFixture[str], log: str, call: Any, code: int, sentence: str
) -> None:
    ncu(log, call, code)
    assert main(["profile", *SHAPE]) == 1
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.out == ""


def test_without_ncu_it_says_how_to_get_it(
    ncu: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(profile, "_FOLDERS", ())
    assert main(["profile", *SHAPE]) == 1
    assert "install NVIDIA's package nsight-compute" in capsys.readouterr().err


def test_ncu_is_found_beside_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "cuda-13.0/bin/ncu"
    program.parent.mkdir(parents=True)
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(profile, "_FOLDERS", (str(tmp_path / "cuda-*/bin"),))
    assert profile.find_ncu() == str(program)
    monkeypatch.setattr(profile, "_FOLDERS", ())
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda-13.0"))
    assert profile.find_ncu() == str(program)


def test_the_cpu_is_not_profiled(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *SHAPE, "--device", "cpu"]) == 1
    assert "--device: got cpu, accepted are cuda and cuda:N" in capsys.readouterr().err


def test_the_profiled_call_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(1, 64, 64, 2, 2, 64, 64, choose_arrays("cpu").dtypes[0], "bottom_right")
    file = tmp_path / "call.json"
    module = "flashmoe_science.cli.profile_call"
    command = [sys.executable, "-m", module, json.dumps(vars(shape)), "cpu", "", str(file)]
    subprocess.run(command, check=True)
    about = json.loads(file.read_text())
    assert about["launches"] == about["plan"]["launches"]
    assert about["accuracy"]["passed"] is True
    real = flashmoe_science.last_launch
    monkeypatch.setattr(
        flashmoe_science, "last_launches", lambda: (dataclasses.replace(real(), grid=(1, 2, 3)),)
    )
    reason = profiled_call(shape, "cpu", None)["reason"]
    assert reason.startswith("the launched kernel is not the planned one: grid: planned")
