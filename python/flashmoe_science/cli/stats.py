"""Medians, quartiles, and how sure a ratio of two medians is."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

_RESAMPLES = 2000


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Median and quartiles of samples in seconds, with the samples (to 1 ns)."""
    numpy = importlib.import_module("numpy")
    low, middle, high = (float(x) for x in numpy.percentile(samples, [25, 50, 75]))
    return {
        "median_s": middle,
        "q1_s": low,
        "q3_s": high,
        "samples_s": [round(s, 9) for s in samples],
    }


def compare(ours: Sequence[float], peer: Sequence[float], seed: int = 0) -> dict[str, Any]:
    """Median of the peer over ours (above 1: ours is faster) with its 95 % bootstrap interval.

    An interval that holds 1 is a tie.
    """
    numpy = importlib.import_module("numpy")
    rng = numpy.random.default_rng(seed)
    a, b = numpy.asarray(ours), numpy.asarray(peer)
    resampled = [numpy.median(rng.choice(x, size=(_RESAMPLES, len(x))), axis=1) for x in (a, b)]
    low, high = (float(x) for x in numpy.percentile(resampled[1] / resampled[0], [2.5, 97.5]))
    verdict = "faster" if low > 1 else "slower" if high < 1 else "tie"
    ratio = float(numpy.median(b) / numpy.median(a))
    return {"ratio": ratio, "low": low, "high": high, "verdict": verdict}


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
