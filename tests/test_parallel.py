"""What runs in one process under pytest-xdist, by the tests' ids."""

from __future__ import annotations

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


def test_processes_begin_with_another_gpu_than_their_neighbours() -> None:
    assert [parallel.gpus_in_turn(f"gw{i}", 2) for i in range(3)] == ["0,1", "1,0", "0,1"]
    assert parallel.gpus_in_turn("gw5", 3) == "2,0,1"
