"""What every test shares: the `gpu` marker, a run that may not skip what it came to test, and what
several processes of pytest-xdist need."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import parallel
import pytest

# Every run has the same examples, so that a failure is of what was changed. Profile "random" looks
# for others: python -m pytest --hypothesis-profile=random.
if importlib.util.find_spec("hypothesis") is not None:
    import hypothesis

    hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True)
    hypothesis.settings.register_profile("random", deadline=None)
    hypothesis.settings.load_profile("fixed")


def _one_thread_each(config: pytest.Config) -> None:
    """Several processes, each with as many threads of BLAS and torch as there are processors, wait
    for each other most of the time. They inherit this: a plugin may load NumPy before any file of
    ours is read in them."""
    if getattr(config.option, "numprocesses", None):
        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ.setdefault(variable, "1")


def _spread_over_gpus() -> None:
    """Before anything has loaded CUDA."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None or "CUDA_VISIBLE_DEVICES" in os.environ:
        return
    count = sum(line.startswith("GPU ") for line in _gpus().stdout.splitlines())
    if count > 1:
        os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        os.environ["CUDA_VISIBLE_DEVICES"] = parallel.gpus_in_turn(worker, count)


def _compile_soon() -> None:
    """Before anything has loaded XLA. A third of the time of JAX's tests on a CPU is LLVM's, which
    optimizes what runs for microseconds; how XLA itself rewrites a program stays as it is."""
    if _why_no_gpu() is not None:
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")


def pytest_configure(config: pytest.Config) -> None:
    """Fails at once where something that this run must test with is missing.

    Tests that need an optional package or tool skip without it. FLASHMOE_TEST_REQUIRE, such as
    "torch,jax,cc", names those that must be there, so that a continuous-integration run cannot pass
    by skipping.
    """
    required = filter(None, os.environ.get("FLASHMOE_TEST_REQUIRE", "").split(","))
    missing = [name for name in required if not _is_here(name)]
    if missing:
        raise pytest.UsageError(f"FLASHMOE_TEST_REQUIRE: not installed: {', '.join(missing)}")
    _one_thread_each(config)
    _spread_over_gpus()
    _compile_soon()


# FLASHMOE_TEST_MAY_SKIP, where it is set, has the reasons for which a test may skip, a regular
# expression a line; one that skips for another reason fails. What nobody thought of requiring
# cannot be left out unseen then.


def _hold_to_reasons(report: pytest.TestReport | pytest.CollectReport) -> None:
    accepted = os.environ.get("FLASHMOE_TEST_MAY_SKIP")
    if accepted is None or not report.skipped or hasattr(report, "wasxfail"):
        return
    longrepr = report.longrepr
    reason = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    reason = reason.removeprefix("Skipped: ")
    if not any(re.search(one, reason) for one in filter(None, accepted.splitlines())):
        report.outcome = "failed"
        report.longrepr = f"skipped for a reason that FLASHMOE_TEST_MAY_SKIP lacks: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _hold_to_reasons(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _hold_to_reasons(report)
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Ours, unless another was asked for."""
    return parallel.scheduler(config, log) if config.getoption("dist") == "load" else None


def _is_here(name: str) -> bool:
    """Whether it is a program on the PATH or a package that can be imported."""
    if shutil.which(name) is not None:
        return True
    return name.isidentifier() and importlib.util.find_spec(name) is not None


@functools.cache
def _gpus() -> subprocess.CompletedProcess[str]:
    command = ["nvidia-smi", "--list-gpus"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def _why_no_gpu() -> str | None:
    """None where there is an NVIDIA GPU and a driver, else the reason to skip."""
    listing = _gpus()
    if listing.returncode != 0 or "GPU 0" not in listing.stdout:
        return f"needs an NVIDIA GPU: nvidia-smi: {(listing.stdout + listing.stderr).strip()}"
    return None


@pytest.hookimpl(specname="pytest_runtest_makereport", tryfirst=True)
def pytest_name_causes(call: pytest.CallInfo[None]) -> None:
    """Has a failure's line say what it came from, since transformers says of every import that
    failed the same, and a record of a run keeps that line alone."""
    error = call.excinfo.value if call.excinfo is not None else None
    while error is not None and error.__cause__ is not None:
        if hasattr(call.excinfo.value, "add_note"):  # from Python 3.11 on
            cause = error.__cause__
            call.excinfo.value.add_note(f"from {type(cause).__name__}: {cause}")
        error = error.__cause__


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU one test of a file skips for all that need one: thirteen thousand that say the
    same take a minute. They have been collected, so that a parameter that is none is an error
    everywhere. Behind what options choose, so that none is left out of a choice."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: parallel.first(item.nodeid))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if gpu_items else None
    if reason is None:
        return
    of_files: dict[Path, list[pytest.Item]] = {}
    for item in gpu_items:
        of_files.setdefault(item.path, []).append(item)
    others: set[pytest.Item] = set()
    for one, *more in of_files.values():
        said = reason.replace("GPU", f"GPU for {len(more) + 1} tests of this file", 1)
        one.add_marker(pytest.mark.skip(reason=said), append=False)
        others.update(more)
    items[:] = [item for item in items if item not in others]
    config.hook.pytest_deselected(items=list(others))
