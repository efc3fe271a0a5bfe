"""What runs in one process under pytest-xdist, by the tests' ids."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import parallel
import pytest


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("tests/cuda/test_sass.py::test_a", "tests/cuda/test_sass_moe_sm90.py::test_b"),
        ("tests/packaging/test_consumers.py::test_cmake[system-c]",
         "tests/packaging/test_sanitizers.py::test_ctest"),
        ("tests/packaging/test_sanitizers.py::test_ctest_sanitized",
         "tests/packaging/test_sanitizers.py::test_fuzz_of_invalid_calls"),
        ("tests/cpu/test_edges.py::test_a[scalar-7-fp32]",
         "tests/cpu/test_edges.py::test_a[avx512bf16-7-fp32]"),
        ("tests/cpu/test_edges.py::test_a[7-avx2]", "tests/cpu/test_edges.py::test_a[7-avx512]"),
        ("tests/python/test_jax.py::test_a[1]", "tests/python/test_jax.py::test_b"),
        ("tests/docs/test_site.py::test_every_name_of_c", "tests/docs/test_site.py::test_a"),
    ],
)  # fmt: skip
def test_what_shares_something_stays_together(one: str, other: str) -> None:
    assert parallel.group_of(one) == parallel.group_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("tests/packaging/test_consumers.py::test_cmake[system-c]",
         "tests/packaging/test_sanitizers.py::test_ctest_sanitized"),
        ("tests/cpu/test_edges.py::test_a[scalar-7-fp32]",
         "tests/cpu/test_edges.py::test_a[scalar-8-fp32]"),
        ("tests/cpu/test_edges.py::test_a[scalar]", "tests/cpu/test_edges.py::test_b[scalar]"),
        ("tests/python/test_moe.py::test_a[1]", "tests/python/test_moe.py::test_a[2]"),
        ("tests/cpu/test_threads.py::test_avx2", "tests/cpu/test_threads.py::test_avx512"),
        ("tests/python/test_jax.py::test_a", "tests/python/test_jax_moe.py::test_a"),
    ],
)  # fmt: skip
def test_what_does_not_may_run_at_once(one: str, other: str) -> None:
    assert parallel.group_of(one) != parallel.group_of(other)


def test_what_takes_longest_begins_first(request: pytest.FixtureRequest) -> None:
    """In the order of the groups, each of which has tests; the rest stays as it is."""
    ids = [
        "tests/cli/test_bench.py::test_a",
        "tests/python/test_stub.py::test_b",
        "tests/cuda/test_sass.py::test_c",
        "tests/cli/test_bench.py::test_d",
        "tests/packaging/test_sanitizers.py::test_fuzz_of_invalid_calls",
    ]
    assert sorted(ids, key=parallel.first) == [ids[4], ids[2], ids[1], ids[0], ids[3]]
    root = request.config.rootpath
    files = [p.relative_to(root).as_posix() for p in (root / "tests").rglob("test_*.py")]
    there = {parallel.group_of(f"{file}::test_fuzz") for file in files}
    assert {name for name, _ in parallel._SHARING} <= there


def test_every_file_of_jax_stays_together() -> None:
    folder = Path(__file__).parent / "python"
    files = {path.stem.removeprefix("test_") for path in folder.glob("test_jax*.py")}
    assert set(parallel._JAX) == files


class _Process:
    """A process of pytest-xdist, as its scheduler sees it."""

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.shutting_down = False
        self.given: list[int] = []
        self.ended = 0

    def send_runtest_some(self, places: list[int]) -> None:
        assert places
        self.given += places

    def shutdown(self) -> None:
        self.shutting_down = True


def _scheduled(
    request: pytest.FixtureRequest, ids: list[str], count: int
) -> tuple[Any, list[_Process]]:
    pytest.importorskip("xdist")
    from xdist.remote import Producer

    option = argparse.Namespace(**vars(request.config.option))
    option.tx, option.numprocesses = [f"{count}*popen"], count
    config: Any = SimpleNamespace(option=option, getvalue=option.__dict__.__getitem__)
    scheduler = parallel.scheduler(config, Producer("test", enabled=False))
    processes = [_Process(f"gw{i}") for i in range(count)]
    for process in processes:
        scheduler.add_node(process)
    for process in processes:
        scheduler.add_node_collection(process, ids)
    scheduler.schedule()
    return scheduler, processes


def _end_one(scheduler: Any, process: _Process) -> None:
    scheduler.mark_test_complete(process, process.given[process.ended])
    process.ended += 1


def test_every_test_runs_once_and_groups_stay_together(request: pytest.FixtureRequest) -> None:
    shared = [f"tests/python/test_stub.py::test_{i}" for i in range(9)]
    single = [f"tests/cli/test_bench.py::test_{i}" for i in range(200)]
    ids = [*shared, *single]
    scheduler, processes = _scheduled(request, ids, 2)
    turns = 0
    while not all(process.ended == len(process.given) for process in processes):
        for process in processes[: 1 + turns % 2]:  # one is twice as fast
            if process.ended < len(process.given):
                _end_one(scheduler, process)
        turns += 1
        # What is finished is forgotten: no more is kept than a process may be given ahead.
        assert all(len(groups) <= 3 for groups in scheduler.assigned_work.values())
    assert scheduler.tests_finished and not scheduler.has_pending
    assert all(process.shutting_down for process in processes)
    given = [{ids[place] for place in process.given} for process in processes]
    assert sorted(processes[0].given + processes[1].given) == list(range(len(ids)))
    assert set(shared) <= given[0] or set(shared) <= given[1]
    assert len(given[0]) > len(given[1]) > 50  # whichever is free


def test_what_a_lost_process_had_goes_to_another(request: pytest.FixtureRequest) -> None:
    ids = [f"tests/cli/test_bench.py::test_{i}" for i in range(20)]
    scheduler, (lost, other) = _scheduled(request, ids, 2)
    _end_one(scheduler, lost)
    begun = ids[lost.given[lost.ended]]
    assert scheduler.remove_node(lost) == begun
    while other.ended < len(other.given):
        _end_one(scheduler, other)
    assert set(other.given) == set(range(20)) - {lost.given[0]}
    assert scheduler.tests_finished


def test_processes_begin_with_another_gpu_than_their_neighbours() -> None:
    assert [parallel.gpus_in_turn(f"gw{i}", 2) for i in range(3)] == ["0,1", "1,0", "0,1"]
    assert parallel.gpus_in_turn("gw5", 3) == "2,0,1"
