"""`flashmoe profile`: Nsight Compute on the kernels of one call of ours; the figures that matter.

Nsight Compute (ncu) runs a separate process, cli/profile_call.py, which makes the call once with
the profiler on. Its CSV is read.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from flashmoe_science.cli import environment
from flashmoe_science.cli.arrays import normal_device, usable_device
from flashmoe_science.cli.output import (
    EXIT_OK,
    CommandError,
    Output,
    add_json_option,
    write_json,
)
from flashmoe_science.cli.shapes import Shape, add_shape_options, shape_from_options

# Our name of a figure: Nsight Compute's metric, on compute capability 8.9 and 9.0.
METRICS = {
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "mufu_percent": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_bytes_per_s": "dram__bytes.sum.per_second",
    "shared_bank_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "registers": "launch__registers_per_thread",
    "local_loads": "smsp__inst_executed_op_local_ld.sum",
    "local_stores": "smsp__inst_executed_op_local_st.sum",
}

_NAMESPACE = "flashmoe"  # all of our kernels have it, and no others
_FOLDERS = ("/usr/local/cuda/bin", "/usr/local/cuda-*/bin", "/opt/nvidia/nsight-compute/*")
_LIMIT_S = 600
_GET_IT = (
    "Nsight Compute (ncu) is not here: install NVIDIA's package nsight-compute or "
    "cuda-nsight-compute, which come with the CUDA toolkit, and put ncu on the PATH"
)
_NOT_PERMITTED = (
    "Nsight Compute may not read the GPU's counters here (ERR_NVGPUCTRPERM): run as root, give the "
    "container the capability SYS_ADMIN, or load the driver with "
    "NVreg_RestrictProfilingToAdminUsers=0"
)

_DESCRIPTION = """\
Runs Nsight Compute on the kernels of one attention call, in a process of its own, and prints five
figures: use of the tensor pipes, use of the MUFU (exponentials), memory throughput, bank conflicts
in shared memory, registers and spills. The call is checked as in bench: a wrong result or another
kernel than the planned one has no figures.

  flashmoe profile --seq 4096 --heads 16 --dim 128 --causal
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "profile",
        help="Nsight Compute on the kernel of one shape: the five figures that matter",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_shape_options(parser, required=True)
    parser.add_argument("--device", metavar="NAME", help="cuda or cuda:N (default: the first GPU)")
    parser.add_argument("--kernel", metavar="FAMILY", help="profile this kernel family")
    add_json_option(parser)
    parser.set_defaults(run=run)


def find_ncu() -> str:
    """Path of ncu: on the PATH, in CUDA_HOME, or where NVIDIA's packages put it; the newest."""
    found = shutil.which("ncu")
    if found is not None:
        return found
    home = os.environ.get("CUDA_HOME")
    folders = [Path(home, "bin")] if home else []
    for pattern in _FOLDERS:
        folders += sorted(Path("/").glob(pattern.lstrip("/")), reverse=True)
    for folder in folders:
        if os.access(folder / "ncu", os.X_OK):
            return str(folder / "ncu")
    raise CommandError(_GET_IT)


def ncu_command(ncu: str, log: Path, call: list[str]) -> list[str]:
    """Profiles our kernels that `call` launches while the profiler is on; CSV goes to `log`."""
    return [
        ncu,
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
        "--log-file",
        str(log),
        "--profile-from-start",
        "off",
        "--kernel-name-base",
        "demangled",
        "--kernel-name",
        f"regex:{_NAMESPACE}",
        "--metrics",
        ",".join(METRICS.values()),
        *call,
    ]


def _number(text: str | None) -> float | None:
    """Nsight Compute's number, which may have commas; None for "n/a" and missing values."""
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def parse_csv(text: str) -> list[dict[str, Any]]:
    """The profiled kernels: name and figures each. Lines of the tool stand before the table, and
    its second row has the units."""
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    kernels = []
    for row in csv.DictReader(lines[begin:]):
        if not (row["ID"] or "").isdigit():  # the units
            continue
        figures = {name: _number(row.get(metric)) for name, metric in METRICS.items()}
        kernels.append({"name": row["Kernel Name"], "figures": figures})
    return kernels


def _profile(
    ncu: str, shape: Shape, device: str, kernel: str | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the call reported, and the profiled kernels."""
    with tempfile.TemporaryDirectory() as folder:
        log, answer = Path(folder, "ncu.csv"), Path(folder, "call.json")
        call = [sys.executable, "-m", "flashmoe_science.cli.profile_call", json.dumps(vars(shape))]
        call += [device, kernel or "", str(answer)]
        try:
            done = subprocess.run(
                ncu_command(ncu, log, call),
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise CommandError(f"{ncu} did not end within {_LIMIT_S} s") from error
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        said = text + done.stdout + done.stderr
        if "ERR_NVGPUCTRPERM" in said:
            raise CommandError(_NOT_PERMITTED)
        about: dict[str, Any] = json.loads(answer.read_text()) if answer.exists() else {}
        if about.get("reason"):
            raise CommandError(f"void: {about['reason']}")
        kernels = parse_csv(text)
        if kernels and about and len(kernels) != len(about["launches"]):
            raise CommandError(
                f"{ncu} has figures of {len(kernels)} kernels, the call launched "
                f"{len(about['launches'])}"
            )
        if done.returncode != 0 or not about or not kernels:
            last = " ".join(said.strip().splitlines()[-3:])[:500] or "it said nothing"
            raise CommandError(f"{ncu} exited with {done.returncode} and no figures: {last}")
        return about, kernels


def _lines(figures: dict[str, Any], local_bytes: int) -> list[tuple[str, str]]:
    """The five figures for people."""

    def percent(name: str) -> str:
        value = figures[name]
        return "not reported" if value is None else f"{value:.1f} %"

    memory = percent("dram_percent")
    if figures["dram_bytes_per_s"] is not None:
        memory += f", {figures['dram_bytes_per_s'] * 1e-12:.3f} TB/s"
    conflicts = "not reported"
    if figures["shared_bank_conflicts"] is not None:
        conflicts = f"{figures['shared_bank_conflicts']:.0f}"
        if figures["shared_wavefronts"]:
            share = figures["shared_bank_conflicts"] / figures["shared_wavefronts"] * 100
            conflicts += f", {share:.1f} % of the wavefronts"
    registers = "not reported"
    if figures["registers"] is not None:
        registers = f"{figures['registers']:.0f} a thread"
    counts = [figures["local_loads"], figures["local_stores"]]
    spills = "not reported" if None in counts else f"{sum(counts):.0f} instructions"
    return [
        ("tensor pipes", percent("tensor_percent")),
        ("MUFU", percent("mufu_percent")),
        ("memory (DRAM)", memory),
        ("shared-memory bank conflicts", conflicts),
        ("registers, local memory", f"{registers}; {spills}, {local_bytes} bytes a thread"),
    ]


def run(arguments: argparse.Namespace) -> int:
    flashmoe = environment.package()
    device = normal_device(arguments.device) if arguments.device else usable_device(flashmoe)[0]
    if device == "cpu":
        raise CommandError(
            "there is no GPU to profile on here: Nsight Compute sees kernels of NVIDIA GPUs only"
            if arguments.device is None
            else "--device: got cpu, accepted are cuda and cuda:N: Nsight Compute sees GPUs only"
        )
    shape = shape_from_options(arguments, "bf16")
    ncu = find_ncu()
    about, kernels = _profile(ncu, shape, device, arguments.kernel)
    output = Output(silent=arguments.json == "-")
    output.heading(f"{shape}, on {device} ({flashmoe.device_info(device).name})")
    for kernel, launch in zip(kernels, about["launches"], strict=True):
        output.line(f"{launch['kernel']}: {kernel['name'].partition('(')[0][:200]}")
        output.pairs(_lines(kernel["figures"], launch["local_bytes"]))
    if arguments.json is not None:
        document = {"operation": "attention_forward", "shape": vars(shape), "device": device}
        write_json(document | about | {"kernels": kernels}, arguments.json)
    return EXIT_OK
