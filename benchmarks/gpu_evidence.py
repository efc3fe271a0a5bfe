"""Everything that needs a GPU, in one command: tests, smoke test and measurements.

On a machine with an NVIDIA GPU, in a checkout, with the package and its test and bench extras
installed:

    python benchmarks/gpu_evidence.py

runs the GPU test suite, `flashmoe check` and the benchmark suites, and writes

    benchmarks/results/gpu_evidence_<gpu>.json          what ran, exit codes, seconds, test counts,
                                                        and what one call costs the host
    benchmarks/results/<suite>_<gpu>.json               one record of `flashmoe bench` a suite
    benchmarks/results/host_cost_<gpu>.json             that cost alone

A step that fails does not stop the next; the exit code is 1 if any failed. Only the standard
library is needed to run the script itself.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# A suite, or a suite@family: that kernel family serves it.
SUITES = (
    "attention-forward",
    "attention-forward@sm89",
    "attention-forward-fp16",
    "gqa",
    "mla",
    "decode",
    "seeds",
    "moe-training",
    "moe-training@sm89",
    "moe-qwen3",
    "moe-mixtral",
    "moe-olmoe",
)
_FLASHMOE = (sys.executable, "-m", "flashmoe_science")
_TAIL = 4000  # characters of a step's output that are kept


def gpu_name() -> str:
    """The first GPU's short name for file names: "h200" for "NVIDIA H200"."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise SystemExit(f"no GPU to measure on: nvidia-smi: {error}") from error
    name = found.stdout.splitlines()[0].lower()
    short = re.sub(r"[^a-z0-9]+", "_", re.sub(r"nvidia|geforce|tesla", "", name))
    return short.strip("_")


_places = {sys.executable: "python", str(ROOT): ".", sys.prefix: "<prefix>"}


def _portable(text: str) -> str:
    """`text` without where this machine keeps things."""
    for place, word in _places.items():
        text = text.replace(place, word)
    return text.replace(tempfile.gettempdir(), "<tmp>")


def run_step(name: str, command: list[str], limit_s: float) -> dict[str, Any]:
    """Runs one command from the root of the checkout; never raises."""
    print(f"== {name}: {' '.join(command)}", flush=True)
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False
        )
        code, text = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        text = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
        code, text = -1, f"{text}\nstopped after {limit_s:.0f} s"
    seconds = round(time.monotonic() - begin, 1)
    text = _portable(text)
    print(text[-_TAIL:], flush=True)
    print(f"== {name}: exit code {code}, {seconds} s", flush=True)
    words = [_portable(word) for word in command]
    return {
        "name": name,
        "command": words,
        "code": code,
        "seconds": seconds,
        "tail": text[-_TAIL:],
    }


def test_counts(report: Path) -> dict[str, int]:
    """Tests, failures, errors and skips of a JUnit report; {} when there is none."""
    if not report.exists():
        return {}
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    names = ("tests", "failures", "errors", "skipped")
    counts = dict.fromkeys(names, 0)
    for suite in suites:
        for name in names:
            counts[name] += int(suite.get(name, 0))
    return counts


def _json_of(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    parser.add_argument("--suites", nargs="*", default=list(SUITES), metavar="NAME")
    parser.add_argument("--skip-tests", action="store_true", help="measure only")
    parser.add_argument("--limit", type=float, default=1800, metavar="S", help="for each step")
    parser.add_argument("bench", nargs="*", help="after --: more options for `flashmoe bench`")
    arguments = parser.parse_args(argv)
    gpu = gpu_name()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    _places.setdefault(str(out), "<out>")

    steps = []
    evidence: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": gpu,
    }
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if not arguments.skip_tests:
            # With pytest-xdist several at a time; what measures the machine runs by itself.
            several = importlib.util.find_spec("xdist") is not None
            workers = ["-n", str(min(14, os.cpu_count() or 1))] if several else []
            parts = (
                ("tests", "gpu and not alone", workers),
                ("tests by themselves", "gpu and alone", []),
            )
            counts: Counter[str] = Counter()
            for name, marks, options in parts:
                report = scratch / "tests.xml"
                report.unlink(missing_ok=True)
                pytest = [sys.executable, "-m", "pytest", "-m", marks, "-q", *options]
                pytest += [f"--junitxml={report}"]
                steps.append(run_step(name, pytest, arguments.limit))
                counts.update(test_counts(report))
            evidence["tests"] = dict(counts)
        command = [*_FLASHMOE, "check", "--device", "cuda:0", "--json", str(scratch / "check.json")]
        steps.append(run_step("check", command, arguments.limit))
        evidence["check"] = _json_of(scratch / "check.json")
    for suite in arguments.suites:
        name, _, family = suite.partition("@")
        file = out / f"{suite.replace('-', '_').replace('@', '_')}_{gpu}.json"
        command = [*_FLASHMOE, "bench", "--suite", name, "--device", "cuda:0"]
        command += [*(["--kernel", family] if family else []), "--json", str(file)]
        command += arguments.bench
        steps.append(run_step(f"bench {suite}", command, arguments.limit))
    file = out / f"host_cost_{gpu}.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "host_cost.py")]
    command += ["--device", "cuda:0", "--json", str(file)]
    steps.append(run_step("host cost", command, arguments.limit))
    if steps[-1]["code"] == 0:  # or it is a file of an earlier run
        evidence["host_cost"] = _json_of(file)
    evidence["steps"] = steps
    tested = evidence.get("tests")
    ran = tested is None or tested.get("tests", 0) > tested.get("skipped", 0)
    evidence["passed"] = ran and all(step["code"] == 0 for step in steps)
    file = out / f"gpu_evidence_{gpu}.json"
    file.write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")
    print(f"== {'passed' if evidence['passed'] else 'FAILED'}: {file}")
    return 0 if evidence["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
