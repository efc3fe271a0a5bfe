"""Time of interleaved calls: wall clock on the CPU; events, graphs, eager calls and the host's time
on a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from flashmoe_science.cli.arrays import Arrays

WARM_UP_CALLS = 3
_SLOW_S = 0.05  # a call this long needs no more warming up
_PAUSE_S = 0.003
_FLUSHES = 6  # some 0.2 ms
_MOST_FLUSHES = 192  # some 7 ms
_GRAPH_BUDGET_S = 0.01
_GRAPH_CALLS = 20
_GRAPH_ROUNDS = 15
_ROUNDS = 5  # of host and eager time
_CALLS = 20  # calls per contender in each, fewer than a launch queue holds
_SHORT_S = 0.001  # host, eager and graph times are taken for calls shorter than this


def _as_it_is(answer: Any) -> Any:
    return answer


@dataclasses.dataclass(frozen=True)
class Contender:
    """Something to time.

    Attributes:
        name: What the record calls it.
        call: What is timed.
        context: Entered around its calls and not timed.
        output: The answer of a call as [batch, seq_q, heads_q, dim_v]; not timed.
        of_torch: It works on torch's current stream and in torch's allocator, so that it can be
            captured into a CUDA graph and its memory counted.
        capturable: Whether it can be captured. A graph of torch's autograd that was recorded
            earlier cannot, since its work goes on the stream of that time.
    """

    name: str
    call: Callable[[], Any]
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    output: Callable[[Any], Any] = _as_it_is
    of_torch: bool = True
    capturable: bool = True


class CpuClock:
    """Wall-clock time of a call that returns when its result is there.

    A pause and an untimed call come first, so that no contender meets another's threads still
        spinning.
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

    def details(
        self, contenders: list[Contender], medians: dict[str, float], seed: int
    ) -> dict[str, dict[str, Any]]:
        return {c.name: {} for c in contenders}  # the host does not count a call's memory


class CudaClock:
    """Time between two events around a call on torch's current stream.

    Before each call, writing a buffer of twice its size flushes the L2 cache, so that no call finds
    its inputs there. This is done several times, which takes the GPU longer than the host takes to
    launch the call: the host runs ahead, and launching is not part of the time. If the GPU finished
    flushing first, the sample is taken again after twice as many flushes, and so are all later
    samples of every contender.
    """

    def __init__(self, torch: Any, device: str) -> None:
        self._torch = torch
        properties = torch.cuda.get_device_properties(device)
        l2_bytes = int(getattr(properties, "L2_cache_size", 0))
        self._flush = torch.empty(2 * max(l2_bytes, 2**25), dtype=torch.uint8, device=device)
        self._flushes = _FLUSHES
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def time(self, call: Callable[[], Any]) -> float:
        while True:
            for _ in range(self._flushes):
                self._flush.zero_()
            self._begin.record()
            call()
            covered = not self._begin.query()
            self._end.record()
            self._end.synchronize()
            # Flushes can never cover a call that waits for the GPU: accept its time.
            if covered or self._flushes >= _MOST_FLUSHES:
                return float(self._begin.elapsed_time(self._end)) * 1e-3
            self._flushes *= 2

    def details(
        self, contenders: list[Contender], medians: dict[str, float], seed: int
    ) -> dict[str, dict[str, Any]]:
        """Peak memory of a call; for short ones host, eager and graph time."""
        found: dict[str, dict[str, Any]] = {c.name: self._peak(c) for c in contenders}
        short = [c for c in contenders if medians[c.name] <= _SHORT_S]
        for name, seconds in _interleaved_medians(short, self._host_samples, seed).items():
            found[name]["host_s"] = seconds
        of_torch = [c for c in short if c.of_torch]  # events are recorded on its stream
        for name, seconds in _interleaved_medians(of_torch, self._eager_samples, seed).items():
            found[name]["eager_s"] = seconds
        for name, samples in self._graph_samples(short, medians, seed).items():
            found[name]["graph_s"] = statistics.median(samples) if samples else None
            found[name] |= {"graph_samples_s": samples} if samples else {}
        return found

    def _peak(self, contender: Contender) -> dict[str, Any]:
        """Device memory that one call adds at its peak, by torch's allocator."""
        if not contender.of_torch:
            return {}
        cuda = self._torch.cuda
        with contender.context():
            cuda.synchronize()
            cuda.reset_peak_memory_stats()
            before = cuda.memory_allocated()
            contender.call()
            cuda.synchronize()
        return {"peak_bytes": int(cuda.max_memory_allocated() - before)}

    def _host_samples(self, contender: Contender) -> list[float]:
        """Host time of one call; the GPU may lag behind."""
        samples = []
        self._torch.cuda.synchronize()
        for _ in range(_CALLS):
            begin = time.perf_counter()
            contender.call()
            samples.append(time.perf_counter() - begin)
        self._torch.cuda.synchronize()
        return samples

    def _eager_samples(self, contender: Contender) -> list[float]:
        """Time between events around a call that finds the GPU idle, including the host's part."""
        samples = []
        for _ in range(_CALLS):
            self._torch.cuda.synchronize()
            self._begin.record()
            contender.call()
            self._end.record()
            self._end.synchronize()
            samples.append(float(self._begin.elapsed_time(self._end)) * 1e-3)
        return samples

    def _graph_samples(
        self, contenders: list[Contender], medians: dict[str, float], seed: int
    ) -> dict[str, list[float]]:
        """Time of a call inside a CUDA graph of several, replayed in rounds of random order; [] if
        it cannot be captured. It contains no launch, and the L2 cache is warm."""
        graphs = {}
        samples: dict[str, list[float]] = {c.name: [] for c in contenders}
        for contender in contenders:
            affordable = int(_GRAPH_BUDGET_S / max(medians[contender.name], 1e-9))
            calls = max(1, min(_GRAPH_CALLS, affordable))
            graph = self._capture(contender, calls)
            if graph is not None:
                graphs[contender.name] = (graph, calls)
        rng = random.Random(seed)
        for i in range(_GRAPH_ROUNDS + 1):
            for name in rng.sample(list(graphs), len(graphs)):
                graph, calls = graphs[name]
                self._begin.record()
                graph.replay()
                self._end.record()
                self._end.synchronize()
                seconds = float(self._begin.elapsed_time(self._end)) * 1e-3 / calls
                if i > 0:  # the first replay uploads the graph
                    samples[name].append(round(seconds, 9))
        return samples

    def _capture(self, contender: Contender, calls: int) -> Any:
        if not contender.of_torch or not contender.capturable:
            return None
        cuda = self._torch.cuda
        graph = cuda.CUDAGraph()
        try:
            # Only this thread: threads of another library may allocate meanwhile.
            mode = "thread_local"
            with contender.context(), cuda.graph(graph, capture_error_mode=mode):
                for _ in range(calls):
                    contender.call()
        except RuntimeError:  # this contender cannot be captured
            return None
        return graph


def _interleaved_medians(
    contenders: list[Contender], take: Callable[[Contender], list[float]], seed: int
) -> dict[str, float]:
    """Medians of the samples that `take` gives for every contender, in rounds of random order."""
    samples: dict[str, list[float]] = {c.name: [] for c in contenders}
    rng = random.Random(seed)
    for _ in range(_ROUNDS):
        for contender in rng.sample(contenders, len(contenders)):
            with contender.context():
                samples[contender.name] += take(contender)
    return {name: statistics.median(found) for name, found in samples.items()}


def make_clock(arrays: Arrays) -> CpuClock | CudaClock:
    return CpuClock() if arrays.device == "cpu" else CudaClock(arrays.xp, arrays.device)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How long to measure: seconds per contender, within bounds on the number of samples, and on a
    GPU twice this many seconds of calls without pauses."""

    seconds: float = 0.25
    least: int = 7
    most: int = 30
    seed: int = 0
    sustained: float = 0.0


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
