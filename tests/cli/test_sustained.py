"""Calls without a pause, in `flashmoe bench --sustained`: speed, power and energy of each."""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import bench_records
import pytest
from flashmoe_science.cli import main, records, sustained
from flashmoe_science.cli.bench_table import sustained_ratios
from flashmoe_science.cli.measure import OURS
from flashmoe_science.cli.plotting import record
from flashmoe_science.cli.suites import load_suite
from flashmoe_science.cli.sustained import EnergyCounter, energy_counter, sustain, watts_of
from flashmoe_science.cli.timing import Contender

TICK_S = 0.1  # between two changes of the counter
FLOPS = 1e12


class Event:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.at = math.inf

    def record(self) -> None:
        self.at = self._gpu.busy_until

    def query(self) -> bool:
        return self._gpu.now >= self.at

    def synchronize(self) -> None:
        self._gpu.now = max(self._gpu.now, self.at)

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


class FakeGpu:
    """As much of torch and of a clock as is used; a GPU that works off its queue."""

    def __init__(self) -> None:
        self.now = self.busy_until = self.idle = 0.0
        self.watts = 0.0  # of the contender that is called
        self._joules = self._since = 0.0
        self.order: list[str] = []
        self.cuda = SimpleNamespace(
            Event=lambda enable_timing: Event(self),
            get_device_properties=lambda device: SimpleNamespace(uuid="1234"),
        )

    def contender(self, name: str, seconds: float, watts: float, **given: Any) -> Contender:
        def call() -> None:
            self._settle()
            self.watts = watts
            self.idle += max(0.0, self.now - self.busy_until)
            self.busy_until = max(self.now, self.busy_until) + seconds
            if self.order[-1:] != [name]:
                self.order.append(name)

        return Contender(name, call, **given)

    def joules(self) -> float:
        self._settle()
        return self._joules

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def _settle(self) -> None:
        """Counts up to the latest change of the counter."""
        while self.now - self._since >= TICK_S:
            self._since += TICK_S
            self._joules += TICK_S * self.watts


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu()
    monkeypatch.setattr(sustained, "time", gpu)
    monkeypatch.setattr(sustained, "energy_counter", lambda torch, device: gpu)
    return gpu


def test_speed_power_and_energy_of_each(gpu: FakeGpu) -> None:
    contenders = [gpu.contender("ours", 0.002, 600.0), gpu.contender("theirs", 0.004, 700.0)]
    medians = {"ours": 0.002, "theirs": 0.004}
    found = sustain(gpu, "cuda:0", contenders, medians, FLOPS, 1.0)
    assert gpu.order == ["ours", "theirs", "ours"]  # theirs twice in a row: the reverse order
    for name, seconds, watts in (("ours", 0.002, 600.0), ("theirs", 0.004, 700.0)):
        entry = found[name]
        assert entry["tflops"] == pytest.approx(1 / seconds)
        assert entry["watts"] == pytest.approx(watts, rel=0.02)
        assert entry["joules_per_tflop"] == pytest.approx(watts * seconds, rel=0.02)
        assert len(entry["runs"]) == 2
        for run in entry["runs"]:
            assert run["calls"] * seconds == pytest.approx(run["seconds"])
            assert 0.98 <= run["seconds"] <= 1.1
    assert sustained_ratios(found["ours"], found["theirs"]) == "2.00, 2.33 J"


def test_the_gpu_never_waits_for_the_host(gpu: FakeGpu) -> None:
    sustain(gpu, "cuda:0", [gpu.contender("x", 0.002, 1.0)], {"x": 0.002}, FLOPS, 0.5)
    assert gpu.idle == 0.0


def test_a_call_longer_than_a_batch_is_a_batch(gpu: FakeGpu) -> None:
    found = sustain(gpu, "cuda:0", [gpu.contender("x", 0.7, 1.0)], {"x": 0.7}, FLOPS, 1.0)
    assert [run["calls"] for run in found["x"]["runs"]] == [2, 2]
    assert found["x"]["tflops"] == pytest.approx(1 / 0.7)


def test_without_a_counter_there_is_speed_alone(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sustained, "energy_counter", lambda torch, device: None)
    contenders = [
        gpu.contender("x", 0.002, 1.0),
        gpu.contender("another's", 0.002, 1.0, of_torch=False),  # its work is on no stream of ours
    ]
    found = sustain(gpu, "cuda:0", contenders, {"x": 0.002, "another's": 0.002}, FLOPS, 0.2)
    assert set(found) == {"x"}
    assert found["x"]["watts"] is None
    assert found["x"]["joules_per_tflop"] is None
    assert sustained_ratios(found["x"], found["x"] | {"joules_per_tflop": 1.0}) == "1.00"


def test_power_is_from_change_to_change() -> None:
    # Reading began long after the first change; the counter then gained 70 J in 0.1 s, twice.
    assert watts_of([(0.09, 0.0), (0.1, 70.0), (0.2, 140.0), (0.3, 210.0)]) == pytest.approx(700)
    assert watts_of([(0.0, 0.0), (0.1, 70.0)]) is None


class FakeNvml:
    """The driver's library, with what its functions give."""

    def __init__(self, **codes: int) -> None:
        self._codes = codes

    def __getattr__(self, function: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            if function == "nvmlDeviceGetHandleByUUID":
                assert arguments[0] == b"GPU-1234"
            if function == "nvmlDeviceGetTotalEnergyConsumption":
                arguments[1]._obj.value = 2500  # mJ
            return self._codes.get(function, 0)

        return call


@pytest.mark.parametrize("uuid", ["1234", "GPU-1234"])
def test_the_drivers_counter_is_read(monkeypatch: pytest.MonkeyPatch, uuid: str) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeNvml())
    assert EnergyCounter(uuid).joules() == 2.5


@pytest.mark.parametrize(
    "function", ["nvmlInit_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetTotalEnergyConsumption"]
)
def test_a_gpu_without_a_counter_has_none(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeNvml(**{function: 3}))
    assert energy_counter(FakeGpu(), "cuda:0") is None
    with pytest.raises(OSError, match=f"{function} of libnvidia-ml.so.1 fails with 3"):
        EnergyCounter("1234")


def test_a_machine_without_the_library_has_no_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert energy_counter(FakeGpu(), "cuda:0") is None


def test_it_is_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--seq", "32", "--heads", "2", "--dim", "64", "--device", "cpu"]
    assert main(["bench", *shape, "--sustained", "1"]) == 1
    assert "--sustained: it is of a GPU" in capsys.readouterr().err


def test_a_suite_asks_for_it() -> None:
    assert load_suite("attention-backward-sustained").sustained == 1.0
    assert load_suite("attention-backward").sustained == 0.0


def test_a_record_keeps_it_and_says_how_to_repeat_it() -> None:
    document = bench_records.sustained()
    assert "--sustained 1 " in record.row_command(document, document["cells"][0])
    assert "--sustained" not in record.row_command(bench_records.grid(), document["cells"][0])
    pytest.importorskip("jsonschema")
    assert records.schema_violations(document) == []
    document["cells"][0]["contenders"][OURS]["sustained"]["watts"] = -1
    assert any("watts" in violation for violation in records.schema_violations(document))


@pytest.mark.gpu
def test_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    shape = ["--seq", "2048", "--heads", "16", "--dim", "128", "--batch", "2", "--backward"]
    command = ["bench", *shape, "--device", "cuda:0", "--seconds", "0.02", "--peer", "torch-flash"]
    assert main([*command, "--sustained", "1", "--json"]) == 0
    contenders = json.loads(capsys.readouterr().out)["cells"][0]["contenders"]
    for name in (OURS, "torch-flash"):
        entry = contenders[name]["sustained"]
        assert 0.3 < entry["tflops"] / contenders[name]["tflops"] < 3
        assert [run["seconds"] for run in entry["runs"]] == pytest.approx([1, 1], rel=0.2)
        assert entry["watts"] is None or 20 < entry["watts"] < 2000
