"""Whether the suite sees faults: plants those of this folder, one at a time, and runs their tests.

    python tests/mutation/run.py [--jobs 2] [--keep FOLDER] [core python/gqa-heads ...]

A fault is a patch, tests/mutation/<part>/<name>.patch: a sentence or two of what is wrong, a line
`tests:` with the tests that must fail, each pytest's (a node id) or ctest's (a name), and a unified
diff. Nothing happens in this tree: copies of it are built and patched, without CUDA. The named
tests must pass on an unpatched copy. Then a fault is

    killed           every one of its tests fails, crashes, or runs longer than --timeout
    survived         one of them passes, or skips: a test is missing
    does not apply   the sources have changed: the patch wants writing anew
    does not build   a compiler sees it: no fault for a test
    broken           a named test cannot be run

and the exit status is 0 if all are killed, 1 if not and 2 if the named tests fail without a fault.
"""

from __future__ import annotations

import argparse
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

KILLED, SURVIVED = "killed", "survived"
DOES_NOT_APPLY, DOES_NOT_BUILD, BROKEN = "does not apply", "does not build", "broken"

_PYTEST_PASSED, _PYTEST_FAILED = 0, 1


@dataclass(frozen=True)
class Fault:
    name: str  # "<part>/<name>"
    text: str  # the patch
    about: str
    tests: tuple[str, ...]

    @classmethod
    def read(cls, file: Path) -> Fault:
        name = f"{file.parent.name}/{file.stem}"
        text = file.read_text(encoding="utf-8")
        header, diff, _ = text.partition("\n--- ")
        lines = header.splitlines()
        starts = [line for line in lines if line.startswith("tests:")]
        about = " ".join(line for line in lines if not line.startswith("tests:")).strip()
        tests = tuple(test for line in starts for test in line.removeprefix("tests:").split())
        if not (diff and about and tests):
            raise SystemExit(f"{name}: accepted is what is wrong, a line `tests:` and a diff")
        return cls(name, text, about, tests)

    @property
    def files(self) -> list[Path]:
        """Those that it changes, in the tree."""
        return [Path(name) for name in re.findall(r"^\+\+\+ b/(\S+)", self.text, re.MULTILINE)]

    @property
    def needs_build(self) -> bool:
        return any(file.parts[0] != "python" for file in self.files)


def faults(names: Sequence[str]) -> list[Fault]:
    """Those named, by "<part>", "<part>/<name>" or "<name>"; all without names."""
    every = [Fault.read(file) for file in sorted(HERE.glob("*/*.patch"))]
    unknown = set(names) - {word for f in every for word in _words(f)}
    if unknown:
        raise SystemExit(f"no such faults: {', '.join(sorted(unknown))}")
    return [fault for fault in every if not names or set(names) & set(_words(fault))]


def _words(fault: Fault) -> tuple[str, ...]:
    part, name = fault.name.split("/")
    return part, name, fault.name


class Copy:
    """A copy of this tree, its build folder, and the package that is installed from it."""

    def __init__(self, folder: Path, timeout: float) -> None:
        self._tree, self._build, self._site = (folder / name for name in ("tree", "build", "site"))
        self._timeout = timeout
        tracked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listing = subprocess.run(tracked, cwd=ROOT, capture_output=True, text=True, check=True)
        for name in filter(None, listing.stdout.split("\0")):
            if (ROOT / name).is_file():  # not one that was removed and is still tracked
                (self._tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, self._tree / name)
                shutil.copymode(ROOT / name, self._tree / name)

    def build(self) -> str | None:
        """Builds and installs; None, or why that failed."""
        shutil.rmtree(self._site, ignore_errors=True)
        options = ["--no-build-isolation", "--no-deps", f"--target={self._site}"]
        settings = [f"build-dir={self._build}", "cmake.build-type=Release"]
        settings += [f"cmake.define.{one}" for one in ("FLASHMOE_CUDA=OFF", "FLASHMOE_TESTS=ON")]
        command = [sys.executable, "-m", "pip", "install", *options, *(f"-C{s}" for s in settings)]
        done = self._run([*command, "."], timeout=None)
        return None if done.returncode == 0 else done.stdout

    @contextmanager
    def with_fault(self, fault: Fault) -> Iterator[str | None]:
        """Yields None, or why there is no such copy."""
        apply = ["git", "apply", "--recount", "-"]
        done = self._run(apply, input=fault.text)
        if done.returncode != 0:
            yield f"{DOES_NOT_APPLY}\n{done.stdout}"
            return
        try:
            if fault.needs_build:
                said = self.build()
            else:
                said = None
                self._install_python(self._tree, fault)
            yield None if said is None else f"{DOES_NOT_BUILD}\n{said}"
        finally:
            for file in fault.files:
                shutil.copyfile(ROOT / file, self._tree / file)
            self._install_python(ROOT, fault)

    def _install_python(self, tree: Path, fault: Fault) -> None:
        """What of the package the fault is in, from `tree`."""
        for file in (file for file in fault.files if file.parts[0] == "python"):
            shutil.copyfile(tree / file, self._site / file.relative_to("python"))

    def test(self, *tests: str, timeout: float | None = -1) -> tuple[bool | None, str]:
        """Whether all pass (None: they cannot be run), and what the run said."""
        by_ctest = [test for test in tests if ".py" not in test]
        said = ""
        if by_ctest:
            pattern = f"^({'|'.join(map(re.escape, by_ctest))})$"
            ctest = ["ctest", "--test-dir", str(self._build), "--output-on-failure"]
            try:
                done = self._run([*ctest, "--no-tests=error", "-R", pattern], timeout=timeout)
            except subprocess.TimeoutExpired:
                return False, "timed out"
            said = done.stdout
            ran = re.search(r"tests passed.* out of (\d+)", said)
            if ran is None or int(ran[1]) != len(by_ctest):
                return None, said
            if done.returncode != 0:
                return False, said
        by_pytest = [test for test in tests if ".py" in test]
        if by_pytest:
            pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
            try:
                done = self._run([*pytest, *by_pytest], timeout=timeout)
            except subprocess.TimeoutExpired:
                return False, "timed out"
            said += done.stdout
            crashed = done.returncode < 0
            if crashed or done.returncode == _PYTEST_FAILED:
                return False, said
            if done.returncode != _PYTEST_PASSED:
                return None, said
        return True, said

    def _run(
        self, command: Sequence[str], input: str = "", timeout: float | None = -1
    ) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": str(self._site),
            "PYTHONDONTWRITEBYTECODE": "1",  # of a second's two versions of a file one might stay
            "GIT_CEILING_DIRECTORIES": str(self._tree.parent),  # `git apply` minds no other tree
        }
        if shutil.which("ccache"):
            for language in ("C", "CXX"):
                environment[f"CMAKE_{language}_COMPILER_LAUNCHER"] = "ccache"
            # What one copy has compiled is not compiled anew for another one, or the next run.
            environment |= {"CCACHE_BASEDIR": str(self._tree.parent), "CCACHE_NOHASHDIR": "1"}
        return subprocess.run(
            command,
            cwd=self._tree,
            env=environment,
            input=input,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=self._timeout if timeout == -1 else timeout,
            check=False,
        )


def verdict(copy: Copy, fault: Fault) -> tuple[str, str]:
    """What becomes of the fault, and what was said on the way."""
    with copy.with_fault(fault) as obstacle:
        if obstacle is not None:
            kind, _, said = obstacle.partition("\n")
            return kind, said
        log = ""
        for test in fault.tests:
            passed, said = copy.test(test)
            log += said
            if passed is not False:
                return (SURVIVED if passed else BROKEN), f"{test}\n{log}"
        return KILLED, log


def main() -> int:
    parser = argparse.ArgumentParser(description="Plants faults and runs the tests that name them.")
    parser.add_argument("names", nargs="*", help="faults, or the folders of some; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree, of a build each")
    parser.add_argument("--keep", type=Path, help="keep copies, builds and logs in this folder")
    parser.add_argument("--timeout", type=float, default=600, help="of a test's run, in seconds")
    options = parser.parse_args()
    chosen = faults(options.names)

    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.keep or Path(scratch)).resolve()
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for job in range(max(1, min(options.jobs, len(chosen)))):
            copy = Copy(folder / f"copy{job}", options.timeout)
            print(f"building copy {job + 1}", flush=True)
            said = copy.build()
            if said is not None:
                print(said)
                return 2
            copies.put(copy)

        tests = list(dict.fromkeys(test for fault in chosen for test in fault.tests))
        print(f"{len(tests)} tests without a fault", flush=True)
        jobs = copies.qsize()

        def pass_unpatched(share: list[str]) -> tuple[bool | None, str]:
            copy = copies.get()
            try:
                return copy.test(*share, timeout=None)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(jobs) as pool:
            for passed, said in pool.map(pass_unpatched, [tests[i::jobs] for i in range(jobs)]):
                if not passed:
                    print(said)
                    return 2

        print_lock = threading.Lock()

        def judge(fault: Fault) -> tuple[str, float]:
            copy = copies.get()
            begin = time.monotonic()
            try:
                kind, said = verdict(copy, fault)
            finally:
                copies.put(copy)
            seconds = time.monotonic() - begin
            log = folder / "logs" / f"{fault.name}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(said, encoding="utf-8")
            with print_lock:
                print(f"{fault.name}: {kind} ({seconds:.0f} s)", flush=True)
            return kind, seconds

        # Those of Python first: a build after a build is of little that changed.
        ordered = sorted(chosen, key=lambda fault: (fault.needs_build, fault.name))
        with ThreadPoolExecutor(jobs) as pool:
            judged = dict(zip([f.name for f in ordered], pool.map(judge, ordered), strict=True))

    print_table(chosen, {name: kind for name, (kind, _) in judged.items()})
    return 0 if all(kind == KILLED for kind, _ in judged.values()) else 1


def print_table(chosen: Sequence[Fault], kinds: dict[str, str]) -> None:
    width = max((len(fault.name) for fault in chosen), default=0)
    print()
    for fault in chosen:
        print(f"{kinds[fault.name]:14}  {fault.name:{width}}  {fault.about}")
    print()
    for part in sorted({fault.name.split("/")[0] for fault in chosen}):
        of_part = [kind for name, kind in kinds.items() if name.startswith(f"{part}/")]
        print(f"{part:14}  {of_part.count(KILLED)} of {len(of_part)} killed")
    every = list(kinds.values())
    print(f"{'all':14}  {every.count(KILLED)} of {len(every)} killed")


if __name__ == "__main__":
    sys.exit(main())
