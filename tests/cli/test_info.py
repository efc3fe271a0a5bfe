"""`flashmoe info`: a whole document, also from an installation that does not load."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import flashmoe_science
import pytest
from flashmoe_science.cli import environment, main


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["library"]["version"] == flashmoe_science.__version__
    assert document["devices"][0]["device"] == "cpu"
    assert document["devices"][0]["kernel_family"] == "cpu"
    assert document["packages"]["numpy"]
    assert any("libflashmoe" in path for path in document["loaded"])


def test_people_read_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    assert f"library             {flashmoe_science.__version__}" in printed
    if flashmoe_science.cuda_device_count() == 0:
        assert "No usable GPU here: calls run on the CPU backend." in printed


def test_variables_are_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHMOE_LOG_LEVEL", "0")
    main(["info", "--json"])
    assert json.loads(capsys.readouterr().out)["variables"]["FLASHMOE_LOG_LEVEL"] == "0"


def test_a_probe_that_raises_leaves_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> str:
        raise OSError("no such file")

    monkeypatch.setattr(environment, "cpu_model", broken)
    assert main(["info", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["cpu"] == {"error": "OSError: no such file"}
    assert document["library"]["version"]


@pytest.fixture
def broken_package(tmp_path: Path) -> Path:
    """A copy of the package whose shared library is not one."""
    source = Path(flashmoe_science.__file__).parent
    libraries = [p for d in environment.package_directories() for p in d.glob("lib/libflashmoe*")]
    if not libraries:
        pytest.skip("the library is not inside the package here")
    shutil.copytree(source, tmp_path / "flashmoe_science", ignore=shutil.ignore_patterns("cmake"))
    copied = tmp_path / "flashmoe_science" / "lib" / libraries[0].name
    copied.parent.mkdir(exist_ok=True)
    copied.unlink(missing_ok=True)
    copied.write_bytes(b"not a library")
    return tmp_path


@pytest.mark.parametrize("command", [["info"], ["check"], ["plan", "--seq", "8", "--heads", "1",
                                                           "--dim", "64"]])  # fmt: skip
def test_a_broken_library_is_explained(broken_package: Path, command: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "flashmoe_science", *command],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(broken_package)},
        cwd=broken_package,
        timeout=120,
        check=False,
    )
    assert run.returncode == 1
    assert "Traceback" not in run.stdout + run.stderr
    assert "libflashmoe" in run.stdout + run.stderr
    if command == ["info"]:
        assert "Python" in run.stdout


PLAN = ["plan", "--seq", "8", "--heads", "1", "--dim", "64"]


def output_to(file: Any, arguments: list[str]) -> tuple[int, str]:
    """The exit code, and what is on standard error."""
    command = [sys.executable, "-m", "flashmoe_science", *arguments]
    run = subprocess.run(
        command, stdout=file, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    return run.returncode, run.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], PLAN], ids=lambda a: a[0])
def test_a_reader_may_leave(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert output_to(writing, arguments) == (0, "")
    finally:
        os.close(writing)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="without a full device")
@pytest.mark.parametrize("arguments", [["--version"], PLAN], ids=lambda a: a[0])
def test_a_full_output_is_explained(arguments: list[str]) -> None:
    command = "flashmoe" if len(arguments) == 1 else "flashmoe plan"
    with open("/dev/full", "w") as full:
        code, said = output_to(full, arguments)
    assert (code, said) == (
        1, f"{command}: the output cannot be written: No space left on device\n",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        (["--version"], (0, "")),
        (PLAN, (0, "")),
        (
            [*PLAN, "--json"],
            (1, "flashmoe plan: --json: standard output is closed; give a FILE\n"),
        ),
    ],
    ids=["version", "plan", "json"],
)
def test_a_closed_output(arguments: list[str], want: tuple[int, str]) -> None:
    run = subprocess.run(
        ["bash", "-c", '"$@" >&-', "bash", sys.executable, "-m", "flashmoe_science", *arguments],
        stderr=subprocess.PIPE, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == want


def test_records_hold_no_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHMOE_LOG_FILE", "/somewhere/log")
    monkeypatch.setenv("FLASHMOE_LOG_LEVEL", "0")
    record = environment.for_record()
    assert record["variables"] == {"FLASHMOE_LOG_FILE": "(a path)", "FLASHMOE_LOG_LEVEL": "0"} | {
        k: v for k, v in record["variables"].items() if "LOG" not in k
    }
    assert str(Path(sys.prefix)) not in json.dumps(record)


def test_the_source_hash_is_what_a_shell_prints() -> None:
    root = Path(__file__).parents[2]
    command = environment.source_hash.__doc__
    assert command is not None
    shell = command.partition(":\n\n")[2]
    printed = subprocess.run(
        ["bash", "-c", shell], cwd=root, capture_output=True, text=True, check=True
    )
    assert environment.source_hash(root) == printed.stdout.split()[0]


def test_outside_a_checkout_there_is_no_source_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert environment.source_hash() == ""


OPERATIONS = ("attention_forward", "attention_backward", "moe_forward", "moe_backward")
KINDS = ("cuda", "cpu")
# A checkout in small: each file with what it includes, and whose kernels it is part of.
ATTENTION_CUDA, MOE_CUDA = ("attention_forward", "cuda"), ("moe_forward", "cuda")
ATTENTION_CPU, MOE_CPU = ("attention_forward", "cpu"), ("moe_forward", "cpu")
BACKWARD_CUDA, BACKWARD_CPU = ("attention_backward", "cuda"), ("attention_backward", "cpu")
MOE_BACKWARD_CUDA, MOE_BACKWARD_CPU = ("moe_backward", "cuda"), ("moe_backward", "cpu")
CUDA = {ATTENTION_CUDA, BACKWARD_CUDA, MOE_CUDA, MOE_BACKWARD_CUDA}
CPU = {ATTENTION_CPU, BACKWARD_CPU, MOE_CPU, MOE_BACKWARD_CPU}
ALL = CUDA | CPU
SMALL_CHECKOUT: dict[str, tuple[list[str], set[tuple[str, str]]]] = {
    "cuda/attention/sm89/forward.cuh": (
        ["cuda/ptx/mma.cuh", "core/ops/attention/problem.h"],
        {ATTENTION_CUDA},
    ),
    "cuda/attention/launch.cpp": (["cuda/launch.h"], {ATTENTION_CUDA}),
    "cuda/attention/sm89_decode/forward.cuh": (["cuda/ptx/generic.cuh"], set()),
    "cuda/ptx/generic.cuh": ([], set()),
    "cuda/attention/sm90_backward/family.cpp": (["cuda/ptx/tma.cuh"], {BACKWARD_CUDA}),
    "cuda/attention/sm89/backward.cuh": (["cuda/ptx/mma.cuh"], {BACKWARD_CUDA}),
    "cuda/moe/route/route.cuh": (
        ["cuda/ptx/mma.cuh", "cuda/ptx/tma.cuh"],
        {MOE_CUDA, MOE_BACKWARD_CUDA},
    ),
    "cuda/moe/sm90_backward/family.cpp": (["cuda/moe/shared/tile.cuh"], {MOE_BACKWARD_CUDA}),
    "cuda/moe/route_backward/rows.cuh": ([], {MOE_BACKWARD_CUDA}),
    "cuda/moe/shared/tile.cuh": ([], {MOE_CUDA, MOE_BACKWARD_CUDA}),
    "cuda/ptx/mma.cuh": (["cuda/numeric/dtype.cuh"], CUDA),
    "cuda/numeric/dtype.cuh": ([], CUDA),
    "cuda/ptx/tma.cuh": ([], {BACKWARD_CUDA, MOE_CUDA, MOE_BACKWARD_CUDA}),
    "cuda/launch.h": ([], {ATTENTION_CUDA}),
    "cuda/launch.cpp": (["cuda/runtime.h"], {ATTENTION_CUDA}),
    "cuda/runtime.h": ([], {ATTENTION_CUDA}),
    "cuda/device.cpp": ([], set()),
    "cpu/attention.cpp": (["cpu/attention_tile.h"], {ATTENTION_CPU, BACKWARD_CPU}),
    "cpu/attention_tile.h": (["cpu/products.h"], {ATTENTION_CPU, BACKWARD_CPU}),
    "cpu/moe_forward.cpp": (["cpu/products.h"], {MOE_CPU, MOE_BACKWARD_CPU}),
    "cpu/grouped_product.cpp": ([], {MOE_CPU, MOE_BACKWARD_CPU}),
    "cpu/products.h": ([], CPU),
    "core/ops/attention/forward.cpp": (["core/log.h"], {ATTENTION_CUDA, ATTENTION_CPU}),
    "core/ops/attention/backward.cpp": ([], {BACKWARD_CUDA, BACKWARD_CPU}),
    "core/ops/attention/problem.h": ([], set()),
    "core/log.h": ([], set()),
    "core/ops/moe/forward.cpp": ([], {MOE_CUDA, MOE_CPU}),
    "core/ops/moe/route_backward.cpp": ([], {MOE_BACKWARD_CUDA, MOE_BACKWARD_CPU}),
    "core/choose.cpp": ([], ALL),
    "bindings/attention.cpp": (["cuda/ptx/tma.cuh"], set()),
    "include/flashmoe/flashmoe.h": ([], set()),
    "cmake/FlashmoeCompile.cmake": ([], ALL),
    "cmake/FlashmoeCuda.cmake": ([], CUDA),
    "cmake/FlashmoeHarden.cmake": ([], CPU),
}


def kernels_hashes(root: Path) -> dict[tuple[str, str], str]:
    return {(o, k): environment.kernels_hash(o, k, root) for o in OPERATIONS for k in KINDS}


def test_a_kernel_is_hashed_with_what_it_is_made_of_and_nothing_else(tmp_path: Path) -> None:
    for name, (includes, _) in SMALL_CHECKOUT.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(f'#include "{header}"\n' for header in includes))
    before = kernels_hashes(tmp_path)
    assert len(set(before.values())) == len(before)
    for name, (_, part_of) in SMALL_CHECKOUT.items():
        file = tmp_path / name
        kept = file.read_text()
        file.write_text(f"{kept}// changed\n")
        after = kernels_hashes(tmp_path)
        assert {which for which in before if after[which] != before[which]} == part_of, name
        file.write_text(kept)
    (tmp_path / "cuda/attention/sm90").mkdir()
    (tmp_path / "cuda/attention/sm90/new.cuh").write_text("")  # a new file changes them, too
    after = kernels_hashes(tmp_path)
    assert {which for which in before if after[which] != before[which]} == {ATTENTION_CUDA}


def test_training_is_made_of_both_ways() -> None:
    root = Path(__file__).parents[2]
    for kind in KINDS:
        for of in ("attention", "moe"):
            training = environment.kernel_sources(f"{of}_training", kind, root)
            ways = [environment.kernel_sources(f"{of}_{w}", kind, root)
                    for w in ("forward", "backward")]  # fmt: skip
            assert training == sorted({*ways[0], *ways[1]})


def test_no_kernel_of_this_checkout_is_left_out() -> None:
    root = Path(__file__).parents[2]
    of = {(o, k): set(environment.kernel_sources(o, k, root)) for o in OPERATIONS for k in KINDS}
    for kind in KINDS:
        there = {
            file.relative_to(root).as_posix()
            for file in (root / kind).rglob("*")
            if file.is_file() and file.name != "CMakeLists.txt"
        }
        # What is of no operation: the list of devices. And of those that no suite measures.
        names = (
            *("merge_", "kv_append", "kv_gather", "check_sequences", "rows/"),
            *(f"attention/{of}/" for of in ("decode", "sm89_decode", "sm90_mla", "lengths")),
            *("numeric/fp8.cuh", "ptx/generic.cuh", "ptx/prefetch.cuh"),
        )
        prefixes = tuple(f"{kind}/{name}" for name in names)
        unmeasured = {n for n in there if n.startswith(prefixes)}
        rest = there - set().union(*(of[o, kind] for o in OPERATIONS))
        assert rest == {f"{kind}/device.cpp"} | unmeasured
    for (operation, _), names in of.items():
        other = "attention" if operation.startswith("moe_") else "moe"
        assert not [n for n in names if n.startswith((f"cuda/{other}/", f"core/ops/{other}"))]
        for pattern in environment._CHOICE[operation]:
            assert pattern in names  # each of them is still called so
