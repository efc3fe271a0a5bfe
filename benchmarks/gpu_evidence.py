"""Everything that needs a GPU, in one command: tests, smoke test and measurements.

On a machine with an NVIDIA GPU, in a checkout, with the package and its test and bench extras
installed:

    python benchmarks/gpu_evidence.py

runs the GPU test suite, `flashmoe check` and the benchmark suites, and writes

    benchmarks/results/gpu_evidence_<gpu>.json          what ran, exit codes, seconds, test counts,
                                                        and what one call costs the host
    benchmarks/results/<suite>_<gpu>.json               one record of `flashmoe bench` a suite
    benchmarks/results/host_cost_<gpu>.json             that cost alone

A part of it, whose steps take the place of the same ones in the evidence that is there:

    python benchmarks/gpu_evidence.py --suites moe-qwen3 moe-mixtral
    python benchmarks/gpu_evidence.py --tests tests/gpu/test_moe_route.py --check

Where a command may take only so long, as often as it takes until it says that nothing is left:

    python benchmarks/gpu_evidence.py --suites --minutes 9

A step that fails does not stop the next; the exit code is 1 if any failed, or if one that was run
before and is kept had failed, and 3 where time ran out. `python benchmarks/report.py` then makes
the tables. Only the standard library is needed to run the script itself.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results"
# A suite, or a suite@family: that kernel family serves it.
SUITES = (
    "attention-forward",
    "attention-forward@sm89",
    "attention-forward-fp16",
    "attention-backward",
    "attention-backward-variants",
    "attention-backward-fp16",
    "attention-backward-sustained",
    "attention-training",
    "attention-between",
    "gqa",
    "mla",
    "decode",
    "seeds",
    "moe-training",
    "moe-training@sm89",
    "moe-backward",
    "moe-training-step",
    "moe-qwen3",
    "moe-mixtral",
    "moe-olmoe",
)
_FLASHMOE = (sys.executable, "-m", "flashmoe_science")
_TAIL = 4000  # characters of a step's output that are kept
_REASON = 200  # and of why a test failed
_GRACE_S = 20  # for a step that was interrupted to write what it has
LATE = -1  # the exit code of a step that took too long
OUT_OF_TIME = 3  # the exit code where steps are left
NO_TESTS = 5  # pytest's exit code where it collected none


def gpu_count() -> int:
    return len(_gpu_names())


def gpu_name() -> str:
    """The first GPU's short name for file names: "h200" for "NVIDIA H200"."""
    name = _gpu_names()[0].lower()
    short = re.sub(r"[^a-z0-9]+", "_", re.sub(r"nvidia|geforce|tesla", "", name))
    return short.strip("_")


def _gpu_names() -> list[str]:
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise SystemExit(f"no GPU to measure on: nvidia-smi: {error}") from error
    return found.stdout.splitlines()


_places = {sys.executable: "python", str(ROOT): ".", sys.prefix: "<prefix>"}


def _portable(text: str) -> str:
    """`text` without where this machine keeps things."""
    for place, word in _places.items():
        text = text.replace(place, word)
    return text.replace(tempfile.gettempdir(), "<tmp>")


def git_commit() -> str:
    """As `flashmoe bench` has it: FLASHMOE_COMMIT, else the checkout's, marked where it has changes
    other than results; "" where neither says."""
    told = os.environ.get("FLASHMOE_COMMIT", "")
    if told:
        return told
    status = ["status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RESULTS}"]
    answers = []
    for words in (["rev-parse", "HEAD"], status):
        try:
            found = subprocess.run(
                ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
            )
        except OSError:
            return ""
        if found.returncode != 0:
            return ""
        answers.append(found.stdout.strip())
    return answers[0] + ("+changes" if answers[1] else "")


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def run_step(name: str, command: list[str], limit_s: float) -> dict[str, Any]:
    """Runs one command from the root of the checkout; never raises.

    One that takes too long is interrupted, so that it can write what it has, and then stopped.
    """
    print(f"== {name}: {' '.join(command)}", flush=True)
    begin = time.monotonic()
    started = now()
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace",
    ) as process:  # fmt: skip
        try:
            text, _ = process.communicate(timeout=limit_s)
            code = process.returncode
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                text, _ = process.communicate(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                text, _ = process.communicate()
            code = LATE
            text = f"{text}\nstopped after {limit_s:.0f} s\n"
    seconds = round(time.monotonic() - begin, 1)
    text = _portable(text)
    print(text[-_TAIL:], flush=True)
    print(f"== {name}: exit code {code}, {seconds} s", flush=True)
    words = [_portable(word) for word in command]
    return {
        "name": name,
        "date": started,
        "commit": git_commit(),
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


def failed_tests(report: Path) -> dict[str, str]:
    """Tests of a JUnit report that did not pass, and the first line of the reason. If there are
    many, pytest's last lines, which a step keeps, show only some."""
    if not report.exists():
        return {}
    failed: dict[str, str] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        for kind in ("failure", "error"):
            found = case.find(kind)
            if found is not None:
                name = f"{case.get('classname')}::{case.get('name')}"
                said = _portable(found.get("message", "")).partition("\n")[0]
                failed.setdefault(name, said[:_REASON])
    return failed


def _json_of(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


class Evidence:
    """What the evidence of one GPU says, and the steps that make it."""

    def __init__(
        self, out: Path, gpu: str, limit_s: float, until: float, *, merge: bool, resume: bool
    ) -> None:
        """`until` is when the last step must have ended, by time.monotonic(); `merge`: steps take
        the place of those of the same name in the evidence that is there; `resume`: one of these
        that passed at the same commit is not run again."""
        self.out = out
        self.gpu = gpu
        self.file = out / f"gpu_evidence_{gpu}.json"
        self.left: list[str] = []  # steps for which there was no time
        self._limit_s = limit_s
        self._until = until
        self._resume = resume
        earlier = _json_of(self.file) if merge else None
        self._document: dict[str, Any] = earlier or {"gpu": gpu}
        self._steps = {step["name"]: step for step in self._document.get("steps", [])}

    def run(self, name: str, command: list[str], **made: Callable[[], Any]) -> dict[str, Any]:
        """One step, unless time is out. `made` are what it leaves for the document, read if it
        succeeded: otherwise the file is an earlier run's."""
        if self._resume and self._passed(name):
            print(f"== {name}: passed at this commit")
            return {}
        remaining = self._until - time.monotonic()
        if remaining <= 0:
            self.left.append(name)
            return {}
        step = run_step(name, command, min(self._limit_s, remaining))
        if step["code"] == LATE and remaining < self._limit_s:
            self.left.append(name)
        self._steps[name] = step
        for key, read in made.items():
            self._document.pop(key, None)
            if step["code"] == 0:
                self._document[key] = read()
        self.write()  # whatever becomes of the steps that follow
        return step

    def _passed(self, name: str) -> bool:
        """Whether a step that is there passed at this very commit."""
        step = self._steps.get(name, {})
        commit = git_commit()
        known = commit != "" and "+" not in commit
        return known and step.get("commit") == commit and step["code"] == 0

    def write(self) -> bool:
        """Whether every step in it has passed; tests that were all skipped have not."""
        steps = list(self._steps.values())
        counts: Counter[str] = Counter()
        for step in steps:
            counts.update(step.get("tests", {}))
        ran = not counts or counts["tests"] > counts["skipped"]
        passed = ran and all(step["code"] == 0 for step in steps)
        head = {"date": now(), "commit": git_commit(), "gpu": self.gpu, "passed": passed}
        head |= {"tests": dict(counts)} if counts else {}
        kept = {k: v for k, v in self._document.items() if k not in {*head, "tests", "steps"}}
        document = head | kept | {"steps": steps}
        self.file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return passed


@contextlib.contextmanager
def shared_gpu(folder: Path) -> Iterator[None]:
    """What is run inside shares the GPU by NVIDIA's MPS, where that is installed: kernels of
    several processes run side by side, in place of one process's after another's. By a daemon of
    its own, whose files are in `folder`."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        yield
        return
    variables = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
    os.environ.update(dict.fromkeys(variables, str(folder)))
    try:
        subprocess.run([control, "-d"], check=False)
        yield
    finally:
        subprocess.run([control], input="quit\n", text=True, check=False)
        for variable in variables:
            del os.environ[variable]


def run_tests(evidence: Evidence, files: list[str], scratch: Path) -> None:
    """The GPU tests, of these files or all: with pytest-xdist several at a time, and what measures
    the machine by itself."""
    several = importlib.util.find_spec("xdist") is not None
    workers = ["-n", str(min(14 * gpu_count(), os.cpu_count() or 1))] if several else []
    parts = (
        ("tests", "gpu and not alone", workers),
        ("tests by themselves", "gpu and alone", []),
    )
    of = f" of {' '.join(files)}" if files else ""
    for name, marks, options in parts:
        report = scratch / "tests.xml"
        report.unlink(missing_ok=True)
        pytest = [sys.executable, "-m", "pytest", "-m", marks, "-q", *options, *files]
        with shared_gpu(scratch) if options else contextlib.nullcontext():
            step = evidence.run(f"{name}{of}", [*pytest, f"--junitxml={report}"])
        if step:
            step["tests"] = test_counts(report)
            step["failed"] = failed_tests(report)
            # Single files need not contain tests of each kind: pytest's 5 is "none collected".
            if files and step["code"] == NO_TESTS and not step["tests"].get("tests"):
                step["code"] = 0


def run_check(evidence: Evidence, scratch: Path) -> None:
    file = scratch / "check.json"
    command = [*_FLASHMOE, "check", "--device", "cuda:0", "--json", str(file)]
    evidence.run("check", command, check=lambda: _json_of(file))


def _is_of_other_kernels(file: Path) -> bool:
    """Whether `flashmoe bench` would refuse to resume a suite's record, for its kernels."""
    from flashmoe_science.cli import environment

    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        hashed = environment.kernels_hash(document["operation"], "cuda", ROOT)
        return bool(document["source"]["kernels"] != hashed)
    except (OSError, ValueError, KeyError):
        return False


def run_suite(evidence: Evidence, suite: str, options: list[str], *, resume: bool = False) -> None:
    name, _, family = suite.partition("@")
    file = evidence.out / f"{suite.replace('-', '_').replace('@', '_')}_{evidence.gpu}.json"
    command = [*_FLASHMOE, "bench", "--suite", name, "--device", "cuda:0"]
    command += [*(["--kernel", family] if family else []), "--json", str(file)]
    command += ["--resume"] if resume and not _is_of_other_kernels(file) else []
    evidence.run(f"bench {suite}", [*command, *options])


def run_host_cost(evidence: Evidence) -> None:
    file = evidence.out / f"host_cost_{evidence.gpu}.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "host_cost.py")]
    command += ["--device", "cuda:0", "--json", str(file)]
    evidence.run("host cost", command, host_cost=lambda: _json_of(file))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / RESULTS, metavar="DIR")
    parts = parser.add_argument_group("parts (default: all of them)")
    parts.add_argument(
        "--tests", nargs="*", metavar="FILE", help="GPU tests, of these files or all"
    )
    parts.add_argument("--check", action="store_true", help="flashmoe check")
    parts.add_argument(
        "--suites", nargs="*", metavar="NAME", help=f"these or all: {', '.join(SUITES)}"
    )
    parts.add_argument("--host-cost", action="store_true", help="what one call costs the host")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="leave out steps that passed at this commit, and of a suite the rows whose record is "
        "of these kernels",
    )
    parser.add_argument("--limit", type=float, default=1800, metavar="S", help="for each step")
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        metavar="M",
        help="stop by then and say what is left; implies --resume, so that the same command again "
        "goes on",
    )
    parser.add_argument("bench", nargs="*", help="after --: more options for `flashmoe bench`")
    return parser


def main(argv: list[str] | None = None) -> int:
    begin = time.monotonic()
    arguments = _parser().parse_args(argv)
    for suite in arguments.suites or []:
        if suite.partition("@")[0] not in {known.partition("@")[0] for known in SUITES}:
            raise SystemExit(f"--suites: got {suite}, accepted are {', '.join(SUITES)}")
    gpu = gpu_name()
    os.environ["FLASHMOE_COMMIT"] = git_commit()  # of every step, whatever they write
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    _places.setdefault(str(out), "<out>")
    part = (
        arguments.tests is not None
        or arguments.suites is not None
        or arguments.check
        or arguments.host_cost
    )
    resume = arguments.resume or arguments.minutes < float("inf")
    # Time to interrupt the last step, and for it to write.
    until = begin + 60 * arguments.minutes - _GRACE_S
    evidence = Evidence(out, gpu, arguments.limit, until, merge=part or resume, resume=resume)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if arguments.tests is not None or not part:
            run_tests(evidence, arguments.tests or [], scratch)
        if arguments.check or not part:
            run_check(evidence, scratch)
        for suite in arguments.suites or (
            SUITES if arguments.suites is not None or not part else ()
        ):
            run_suite(evidence, suite, arguments.bench, resume=resume)
        if arguments.host_cost or not part:
            run_host_cost(evidence)
    passed = evidence.write()
    print(f"== {'passed' if passed else 'FAILED'}: {evidence.file}")
    if evidence.left:
        print(f"== time is out; left: {', '.join(evidence.left)}")
        return OUT_OF_TIME
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
