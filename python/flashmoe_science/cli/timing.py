"""Time of interleaved calls: wall clock on the CPU; events, graphs and host time on a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import time
from collections.abc import Callable
from typing import Any

from flashmoe_science.cli.arrays import Arrays

WARM_UP_CALLS = 3
_SLOW_S = 0.05  # a call this long needs no more warming up
_PAUSE_S = 0.003
_GRAPH_BUDGET_S = 0.02
_GRAPH_CALLS = 20
_GRAPH_REPLAYS = 5
_HOST_CALLS = 50
_SHORT_S = 0.001  # host and graph time say something about calls shorter than this


@dataclasses.dataclass
class Contender:
    """Something to time. `context` is entered around its calls and not timed."""

    name: str
    call: Callable[[], Any]
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


class CpuClock:
    """Wall-clock time of a call that returns when its result is there.

    A pause and an untimed call come first: no contender meets another's threads still spinning.
    """

    def time(self, call: Callable[[], Any]) -> float:
        time.sleep(_PAUSE_S)
        begin = time.perf_counter()
        call()
        latest = time.perf_counter() - begin
        if latest > _SLOW_S:
            return latest
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    def extra(self, contender: Contender, median_s: float) -> dict[str, Any]:
        return {}

    def peak_bytes(self, contender: Contender) -> int | None:
        return None  # no allocator of the host keeps count


class CudaClock:
    """Time between two events around a call on torch's current stream.

    Before each, the L2 cache is flushed by writing a buffer twice its size: no call finds its
    inputs there, and the host runs ahead of the GPU while the buffer is written, so launching is
    not part of the time of any but the shortest calls.
    """

    def __init__(self, torch: Any, device: str) -> None:
        self._torch = torch
        properties = torch.cuda.get_device_properties(device)
        l2_bytes = int(getattr(properties, "L2_cache_size", 0))
        self._flush = torch.empty(2 * max(l2_bytes, 2**25), dtype=torch.uint8, device=device)
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def time(self, call: Callable[[], Any]) -> float:
        self._flush.zero_()
        self._begin.record()
        call()
        self._end.record()
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) * 1e-3

    def extra(self, contender: Contender, median_s: float) -> dict[str, Any]:
        """Short calls: device time in a CUDA graph with a warm L2, and the host's time a call."""
        if median_s > _SHORT_S:
            return {}
        with contender.context():
            return {
                "host_s": self._host_time(contender.call),
                "graph_s": self._graph_time(contender.call, median_s),
            }

    def peak_bytes(self, contender: Contender) -> int | None:
        """Device memory that one call adds at its peak, by torch's allocator."""
        cuda = self._torch.cuda
        with contender.context():
            cuda.synchronize()
            cuda.reset_peak_memory_stats()
            before = cuda.memory_allocated()
            contender.call()
            cuda.synchronize()
            return int(cuda.max_memory_allocated() - before)

    def _host_time(self, call: Callable[[], Any]) -> float:
        samples = []
        self._torch.cuda.synchronize()
        for _ in range(_HOST_CALLS):
            begin = time.perf_counter()
            call()
            samples.append(time.perf_counter() - begin)
        self._torch.cuda.synchronize()
        return sorted(samples)[len(samples) // 2]

    def _graph_time(self, call: Callable[[], Any], median_s: float) -> float | None:
        cuda = self._torch.cuda
        calls = max(1, min(_GRAPH_CALLS, int(_GRAPH_BUDGET_S / max(median_s, 1e-9))))
        graph = cuda.CUDAGraph()
        try:
            with cuda.graph(graph):
                for _ in range(calls):
                    call()
        except RuntimeError:  # this contender cannot be captured
            return None
        graph.replay()
        samples = []
        for _ in range(_GRAPH_REPLAYS):
            self._begin.record()
            graph.replay()
            self._end.record()
            self._end.synchronize()
            samples.append(float(self._begin.elapsed_time(self._end)) * 1e-3 / calls)
        return sorted(samples)[len(samples) // 2]


def make_clock(arrays: Arrays) -> CpuClock | CudaClock:
    return CpuClock() if arrays.device == "cpu" else CudaClock(arrays.xp, arrays.device)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How long to look: seconds for each contender, within bounds on the number of samples."""

    seconds: float = 0.25
    least: int = 7
    most: int = 30
    seed: int = 0


def interleave(
    contenders: list[Contender], clock: CpuClock | CudaClock, sampling: Sampling
) -> dict[str, list[float]]:
    """Samples in seconds of every contender, taken in rounds of random order.

    A slow contender takes part in fewer rounds, spread over all of them.
    """
    counts = {}
    for contender in contenders:
        with contender.context():
            latest = clock.time(contender.call)
            if latest < _SLOW_S:
                latest = min(clock.time(contender.call) for _ in range(WARM_UP_CALLS - 1))
        affordable = int(sampling.seconds / max(latest, 1e-9))
        counts[contender.name] = max(sampling.least, min(sampling.most, affordable))
    rounds = max(counts.values())
    rng = random.Random(sampling.seed)
    samples: dict[str, list[float]] = {c.name: [] for c in contenders}
    for i in range(rounds):
        for contender in rng.sample(contenders, len(contenders)):
            count = counts[contender.name]
            if (i + 1) * count // rounds == i * count // rounds:
                continue
            with contender.context():
                samples[contender.name].append(clock.time(contender.call))
    return samples
