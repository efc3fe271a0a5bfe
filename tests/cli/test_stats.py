"""Ratios know how sure they are; JSON is strict; contenders take turns."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flashmoe_science.cli.output import CommandError, Output, check_writable, is_stream, write_json
from flashmoe_science.cli.stats import (
    MOST_SPREAD,
    compare,
    geometric_mean,
    ratio_of_medians,
    summary,
    verdicts,
)
from flashmoe_science.cli.timing import Contender, CpuClock, CudaClock, Sampling, interleave


def noisy(middle: float, seed: int, count: int = 30) -> list[float]:
    rng = random.Random(seed)
    return [middle * rng.uniform(0.95, 1.05) for _ in range(count)]


@pytest.mark.parametrize(("peer", "verdict"), [(2.0, "faster"), (0.5, "slower"), (1.0, "tie")])
def test_a_ratio_has_a_verdict(peer: float, verdict: str) -> None:
    found = compare(noisy(1.0, 1), noisy(peer, 2))
    assert found["verdict"] == verdict
    assert found["low"] <= found["ratio"] <= found["high"]
    assert found["ratio"] == pytest.approx(peer, rel=0.05)


@pytest.mark.parametrize("who", ["ours", "the peer"])
def test_quartiles_that_spread_too_far_have_no_verdict(who: str) -> None:
    """Half of the samples beside other work: however clear the medians are, nobody is ahead."""
    quiet = [1.0] * 20
    for excess, withheld in ((MOST_SPREAD * 0.9, False), (MOST_SPREAD * 1.1, True)):
        half = [5.0 * (1 - excess / 2)] * 10 + [5.0] + [5.0 * (1 + excess / 2)] * 10
        given = (half, quiet) if who == "ours" else (quiet, half)
        found = compare(*given)
        assert (found["verdict"] == "withheld") is withheld
        assert found["ratio"] == pytest.approx(0.2 if who == "ours" else 5.0)


def test_means_and_counts_leave_out_what_is_withheld() -> None:
    ratios = [{"ratio": r, "verdict": v} for r, v in
              ((2.0, "faster"), (8.0, "faster"), (100.0, "withheld"), (1.0, "tie"))]  # fmt: skip
    assert verdicts(ratios) == {
        "rows": 3, "withheld": 1, "geometric_mean": pytest.approx(16 ** (1 / 3)),
        "faster": 2, "tie": 1, "slower": 0,
    }  # fmt: skip
    assert verdicts(ratios[2:3]) | {"rows": 0} == {
        "rows": 0, "withheld": 1, "geometric_mean": None, "faster": 0, "tie": 0, "slower": 0,
    }  # fmt: skip


def test_an_interval_leaves_out_as_much_on_either_side() -> None:
    """With two samples, 1 and 2, a quarter of the resamples have the median 1, and another quarter
    2."""
    for confidence, ends in ((0.6, (1.0, 2.0)), (0.4, (1.5, 1.5))):
        found = ratio_of_medians([[1.0, 2.0]], [[1.0]], confidence)
        assert (found["low"], found["high"]) == ends


def test_a_verdict_needs_the_whole_interval() -> None:
    unsure = compare([1.0] * 20, [0.9] * 8 + [1.1] * 12)
    assert unsure["ratio"] > 1 > unsure["low"]
    assert unsure["verdict"] == "tie"


def test_summary_is_median_and_quartiles() -> None:
    found = summary([4.0, 1.0, 2.0, 3.0, 5.0])
    assert (found["q1_s"], found["median_s"], found["q3_s"]) == (2.0, 3.0, 4.0)


def test_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)


def test_json_has_no_nan(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    write_json({"a": math.nan, "b": [math.inf, (1, {"c": -math.inf})]}, str(file))
    assert json.loads(file.read_text()) == {"a": None, "b": [None, [1, {"c": None}]]}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_a_file_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="cannot be written"):
        write_json({}, str(tmp_path))


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_writable(str(pipe))
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    write_json({"a": 1}, str(pipe))
    assert pipe.is_fifo()
    reader.join(timeout=60)
    assert [json.loads(text) for text in read] == [{"a": 1}]
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.parametrize("exists", [False, True])
def test_a_link_stays_one(exists: bool, tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "folder" / "x.json"
    link.symlink_to(file)
    if exists:
        file.parent.mkdir()
        file.write_text("before")
    check_writable(str(link))
    assert file.exists() == exists
    write_json({"a": 1}, str(link))
    assert link.is_symlink() and not file.is_symlink()
    assert json.loads(file.read_text()) == {"a": 1}
    assert [p.name for p in file.parent.iterdir()] == ["x.json"]


def test_other_files_stay(tmp_path: Path) -> None:
    mine = tmp_path / "x.json.partial"
    mine.write_text("mine")
    check_writable(str(tmp_path / "x.json"))
    write_json({}, str(tmp_path / "x.json"))
    assert mine.read_text() == "mine"


def test_an_open_file_is_written_to(tmp_path: Path) -> None:
    # Not /dev/stdout, a link that a defect would replace for the whole machine.
    code = "from flashmoe_science.cli.output import write_json; write_json({}, '/dev/fd/1')"
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert json.loads(run.stdout) == {}
    with open(tmp_path / "x.json", "w+") as file:  # a regular one stays the same file
        file.write("first ")
        file.flush()
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
        file.seek(0)
        assert file.read() == "first {}\n"


def test_standard_output_by_name_is_no_file_to_replace() -> None:
    assert all(map(is_stream, ("-", "/dev/stdout", "/dev/stderr", "/dev/fd/63")))
    assert not is_stream(__file__)
    assert not is_stream("/dev/shm/x.json")


def test_silent_output_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    Output(silent=True).line("x")
    assert capsys.readouterr().out == ""


def test_contenders_take_turns() -> None:
    order: list[str] = []
    contenders = [
        Contender(name, lambda name=name: order.append(name))  # type: ignore[misc]
        for name in ("a", "b")
    ]
    samples = interleave(contenders, CpuClock(), Sampling(seconds=10, least=3, most=8))
    assert {name: len(s) for name, s in samples.items()} == {"a": 8, "b": 8}
    turns = order[-32::2]  # a sample is a call that is not timed, and one that is
    assert set(zip(turns[::2], turns[1::2], strict=True)) == {("a", "b"), ("b", "a")}


def test_a_slow_contender_gets_fewer_samples() -> None:
    class Clock(CpuClock):
        def time(self, call: object) -> float:
            return 1.0 if call is slow else 0.001

    def slow() -> None: ...

    def fast() -> None: ...

    contenders = [Contender("slow", slow), Contender("fast", fast)]
    samples = interleave(contenders, Clock(), Sampling(seconds=0.1, least=5, most=20))
    assert {name: len(s) for name, s in samples.items()} == {"slow": 5, "fast": 20}


class FakeCuda:
    """As much of torch as CudaClock uses; a call takes two milliseconds on this GPU."""

    def __init__(self, captures: bool = True) -> None:
        self.log: list[str] = []
        self.now = 0.0
        self.launching = 0.0  # ms that the host takes to launch a call
        self.captures = captures
        self.capturing = False
        self.uint8 = "uint8"
        self.allocated = self.peak = 0
        self.cuda = SimpleNamespace(
            Event=lambda enable_timing: Event(self),
            CUDAGraph=lambda: SimpleNamespace(replay=lambda: self.advance(0.4, "replay")),
            get_device_properties=lambda device: SimpleNamespace(L2_cache_size=50 * 2**20),
            graph=self.graph,
            synchronize=lambda: self.log.append("synchronize"),
            reset_peak_memory_stats=self.reset_peak,
            memory_allocated=lambda: self.allocated,
            max_memory_allocated=lambda: self.peak,
        )

    def reset_peak(self) -> None:
        self.peak = self.allocated

    def empty(self, size: int, dtype: str, device: str) -> Any:
        assert size == 100 * 2**20
        return SimpleNamespace(zero_=lambda: self.advance(0.05, "flush"))

    def advance(self, milliseconds: float, what: str) -> None:
        if not self.capturing:
            self.now += milliseconds
        self.log.append(what)

    @contextmanager
    def graph(self, graph: Any, capture_error_mode: str) -> Iterator[None]:
        if not self.captures:
            raise RuntimeError("cannot be captured")
        self.capturing = True
        yield
        self.capturing = False


class Event:
    def __init__(self, gpu: FakeCuda) -> None:
        self._gpu = gpu
        self.at = 0.0

    def record(self) -> None:
        self.at = self._gpu.now
        self._gpu.log.append("event")

    def query(self) -> bool:
        latest = " ".join(self._gpu.log).rpartition("synchronize")[2]
        return latest.count("flush") * 0.05 < self._gpu.launching

    def synchronize(self) -> None:
        self._gpu.log.append("synchronize")

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


def test_a_gpu_call_is_timed_alone_and_with_a_cold_cache() -> None:
    gpu = FakeCuda()
    clock = CudaClock(gpu, "cuda:0")
    assert clock.time(lambda: gpu.advance(2.0, "call")) == pytest.approx(2e-3)
    flushes = gpu.log.count("flush")
    assert gpu.log == [*["flush"] * flushes, "event", "call", "event", "synchronize"]
    assert gpu.now - 2.0 >= 0.2  # ms before the call, in which most hosts can launch it


def test_the_host_launches_a_gpu_call_while_the_cache_is_flushed() -> None:
    gpu = FakeCuda()
    clock = CudaClock(gpu, "cuda:0")
    gpu.launching = 1.0
    assert clock.time(lambda: gpu.advance(2.0, "call")) == pytest.approx(2e-3)
    assert gpu.log.count("call") > 1
    gpu.log.clear()
    gpu.launching = 0.0
    clock.time(lambda: gpu.advance(2.0, "call"))
    assert gpu.log.count("call") == 1
    assert gpu.log.count("flush") * 0.05 >= 1.0  # every contender gets the same


def test_a_call_that_waits_for_the_gpu_is_timed_in_the_end() -> None:
    gpu = FakeCuda()
    gpu.launching = math.inf
    assert CudaClock(gpu, "cuda:0").time(lambda: gpu.advance(2.0, "call")) == pytest.approx(2e-3)


@pytest.mark.parametrize("captures", [True, False])
def test_short_gpu_calls_have_graph_and_host_times(captures: bool) -> None:
    gpu = FakeCuda(captures)
    clock = CudaClock(gpu, "cuda:0")
    contenders = [
        Contender("short", lambda: gpu.advance(0.02, "call")),
        Contender("long", lambda: gpu.advance(2.0, "call")),
        Contender("another's", lambda: gpu.advance(0.02, "call"), of_torch=False),
    ]
    medians = {"short": 20e-6, "long": 2e-3, "another's": 20e-6}
    details = clock.details(contenders, medians, seed=0)
    assert details["short"]["host_s"] >= 0
    assert details["another's"]["host_s"] >= 0
    assert details["short"]["eager_s"] == pytest.approx(20e-6)
    assert "eager_s" not in details["another's"]
    assert details["short"]["graph_s"] == (pytest.approx(0.4e-3 / 20) if captures else None)
    assert len(details["short"].get("graph_samples_s", [])) == (15 if captures else 0)
    assert details["another's"]["graph_s"] is None
    assert set(details["long"]) == {"peak_bytes"}


def test_peak_memory_is_what_a_call_adds() -> None:
    gpu = FakeCuda()
    gpu.allocated = 1000

    def call() -> None:
        gpu.peak = max(gpu.peak, gpu.allocated + 300)
        gpu.allocated += 100

    contenders = [Contender("x", call), Contender("another's", call, of_torch=False)]
    details = CudaClock(gpu, "cuda:0").details(contenders, {"x": 1.0, "another's": 1.0}, seed=0)
    assert details == {"x": {"peak_bytes": 300}, "another's": {}}
