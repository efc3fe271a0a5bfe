"""Medians, quartiles, and the uncertainty of a ratio of two medians."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

# If quartiles are further apart than this share of the median, no verdict is possible: other work
# on the machine took much of the time and need not hit all contenders alike. In most rows of the
# recorded results they are within a tenth.
MOST_SPREAD = 0.25

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


def spreads_too_far(samples: Sequence[float]) -> bool:
    """Whether the quartiles lie too far apart for a verdict."""
    found = summary(samples)
    return bool(found["q3_s"] - found["q1_s"] > MOST_SPREAD * found["median_s"])


def ratio_of_medians(
    numerators: Sequence[Sequence[float]],
    denominators: Sequence[Sequence[float]],
    confidence: float = 0.95,
    resamples: int = _RESAMPLES,
    seed: int = 0,
) -> dict[str, Any]:
    """Product of the medians of the numerators over that of the denominators, with its bootstrap
    interval: every list of samples is resampled separately.

    The verdict is "faster" or "slower" if the whole interval is above or below 1, else "tie"; it is
    "withheld" if the quartiles of some list spread too far.
    """
    numpy = importlib.import_module("numpy")
    rng = numpy.random.default_rng(seed)

    def medians(samples: Sequence[float]) -> Any:
        """The median itself, then those of the resamples."""
        values = numpy.asarray(samples)
        drawn = numpy.median(rng.choice(values, size=(resamples, len(values))), axis=1)
        return numpy.concatenate([[numpy.median(values)], drawn])

    below = [medians(samples) for samples in denominators]
    above = [medians(samples) for samples in numerators]
    ratios = numpy.prod(above, axis=0) / numpy.prod(below, axis=0)
    tail = (1 - confidence) / 2 * 100
    low, high = (float(x) for x in numpy.percentile(ratios[1:], [tail, 100 - tail]))
    verdict = "faster" if low > 1 else "slower" if high < 1 else "tie"
    if any(map(spreads_too_far, (*numerators, *denominators))):
        verdict = "withheld"
    return {"ratio": float(ratios[0]), "low": low, "high": high, "verdict": verdict}


def compare(ours: Sequence[float], peer: Sequence[float], seed: int = 0) -> dict[str, Any]:
    """Median of the peer over ours (above 1: ours is faster) with its 95 % bootstrap interval."""
    return ratio_of_medians([peer], [ours], seed=seed)


def verdicts(ratios: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts of each verdict, and the geometric mean of the ratios that have one, or None: `rows`
    counts these, `withheld` the others."""
    judged = [r for r in ratios if r["verdict"] != "withheld"]
    return {
        "rows": len(judged),
        "withheld": len(ratios) - len(judged),
        "geometric_mean": geometric_mean([r["ratio"] for r in judged]) if judged else None,
        **{v: sum(r["verdict"] == v for r in judged) for v in ("faster", "tie", "slower")},
    }


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
