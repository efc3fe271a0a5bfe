"""Speed and energy of calls without pauses: what a kernel reaches under the power limit.

Single calls, each after a cache flush, run on a GPU that has cooled and clocks high. Here every
contender works for seconds. Each runs twice, in one order and in reverse, so that none always
follows a hotter one.
"""

from __future__ import annotations

import collections
import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

from flashmoe_science.cli.timing import Contender

_WARM_UP_S = 0.25  # until clocks and power settle for this contender
_BATCH_S = 0.02  # of calls between two events; another batch is always in the queue
_POLL_S = 0.001
_LEAST_READINGS = 3  # the first belongs to a change that was not seen

_NVML = "libnvidia-ml.so.1"  # comes with the driver


class EnergyCounter:
    """The energy that a GPU has used since its driver was loaded, by NVML."""

    def __init__(self, uuid: str) -> None:
        """Raises OSError if NVML, the GPU or its counter is missing."""
        self._nvml = ctypes.CDLL(_NVML)
        self._handle = ctypes.c_void_p()
        self._ask("nvmlInit_v2")
        name = f"GPU-{uuid.removeprefix('GPU-')}".encode()
        self._ask("nvmlDeviceGetHandleByUUID", name, ctypes.byref(self._handle))
        self.joules()

    def joules(self) -> float:
        found = ctypes.c_ulonglong()
        self._ask("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(found))
        return found.value * 1e-3

    def _ask(self, function: str, *arguments: Any) -> None:
        code = getattr(self._nvml, function)(*arguments)
        if code != 0:
            raise OSError(f"{function} of {_NVML} fails with {code}")


def energy_counter(torch: Any, device: str) -> EnergyCounter | None:
    """The counter of a torch device, None if it has none."""
    try:
        return EnergyCounter(str(torch.cuda.get_device_properties(device).uuid))
    except (OSError, AttributeError):  # no such library, function or field
        return None


def watts_of(readings: list[tuple[float, float]]) -> float | None:
    """Mean power from (seconds, joules) at every observed change of the counter; the first pair is
    just the start of reading. None if it changed too seldom."""
    if len(readings) < _LEAST_READINGS:
        return None
    (begin, before), (end, after) = readings[1], readings[-1]
    return (after - before) / (end - begin)


class _Run:
    """Calls of one contender without pauses."""

    def __init__(
        self, torch: Any, contender: Contender, calls: int, joules: Callable[[], float] | None
    ) -> None:
        """`calls`: calls per batch."""
        self._torch = torch
        self._call = contender.call
        self._calls = calls
        self._joules = joules
        self._queue: collections.deque[Any] = collections.deque()
        self._readings: list[tuple[float, float]] = []

    def measure(self, seconds: float) -> dict[str, Any]:
        """The number of calls, their GPU seconds, and the mean power."""
        self._launch()
        self._work(_WARM_UP_S)
        self._readings.clear()
        first, batches, last = self._work(seconds)
        self._queue.pop().synchronize()
        return {
            "calls": batches * self._calls,
            "seconds": float(first.elapsed_time(last)) * 1e-3,
            "watts": watts_of(self._readings),
        }

    def _launch(self) -> None:
        for _ in range(self._calls):
            self._call()
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        self._queue.append(event)

    def _work(self, seconds: float) -> tuple[Any, int, Any]:
        """Runs batches for that long, with one still queued at the end. Returns the event after the
        preceding batch, the number of finished batches, and the event after the last of these."""
        self._launch()
        first = last = self._wait()
        begin, batches = time.perf_counter(), 0
        while batches == 0 or time.perf_counter() - begin < seconds:
            self._launch()
            last = self._wait()
            batches += 1
        return first, batches, last

    def _wait(self) -> Any:
        """Waits for the oldest batch and reads the counter meanwhile."""
        event = self._queue.popleft()
        while True:
            done = event.query()
            if self._joules is not None:
                joules = self._joules()
                if not self._readings or joules != self._readings[-1][1]:
                    self._readings.append((time.perf_counter(), joules))
            if done:
                return event
            time.sleep(_POLL_S)


def sustain(
    torch: Any,
    device: str,
    contenders: list[Contender],
    medians: dict[str, float],
    flops: float,
    seconds: float,
) -> dict[str, dict[str, Any]]:
    """Makes two runs of this many seconds for every contender on torch's stream. Returns speed,
    power and joules per 10^12 FLOPs over both; the last two are None without a counter."""
    counter = energy_counter(torch, device)
    runs: dict[str, list[dict[str, Any]]] = {c.name: [] for c in contenders if c.of_torch}
    there = [c for c in contenders if c.of_torch]
    for contender in [*there, *reversed(there)]:
        calls = max(1, int(_BATCH_S / max(medians[contender.name], 1e-9)))
        with contender.context():
            run = _Run(torch, contender, calls, counter.joules if counter else None)
            runs[contender.name].append(run.measure(seconds))
    return {name: _over_both(of, flops) for name, of in runs.items()}


def _over_both(runs: list[dict[str, Any]], flops: float) -> dict[str, Any]:
    tflops = flops * sum(r["calls"] for r in runs) / sum(r["seconds"] for r in runs) * 1e-12
    powers = [r["watts"] for r in runs]
    watts = None if None in powers else statistics.fmean(powers)
    return {
        "tflops": tflops,
        "watts": watts,
        "joules_per_tflop": None if watts is None else watts / tflops,
        "runs": runs,
    }
