"""Confidence intervals: exact knowledge of how little a finite evaluation set can tell.

All intervals are two-sided at `confidence` (0.95 leaves 2.5 % on either side). Proportions use score intervals, which
stay honest when every sample agrees; everything else uses the percentile bootstrap over samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

MIN_BOOTSTRAP_SAMPLES = 10
"""Below this a bootstrap interval is far too narrow; there is no interval then."""
_CHUNK = 1 << 22
"""Most resampled values held at once."""

Columns = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Estimate:
    """A value, its interval and how the interval was made. `low == high` for what is exact."""

    value: float
    low: float
    high: float
    method: str


def exact(value: float) -> Estimate:
    """A quantity without uncertainty, as a file's size."""
    return Estimate(value, value, value, "exact")


def unknown(value: float, n: int) -> Estimate:
    """A value of too few samples to say anything about; its interval is everything."""
    return Estimate(
        value, -math.inf, math.inf, f"no interval from {n} samples; at least {MIN_BOOTSTRAP_SAMPLES} needed"
    )


def _z(confidence: float) -> float:
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def wilson(successes: int, n: int, confidence: float) -> Estimate:
    """Wilson's score interval of a proportion (Wilson 1927; eq. 4 of Newcombe 1998, Stat. Med. 17:857)."""
    z, p = _z(confidence), successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Estimate(p, low, high, "Wilson score")


def paired_difference(gained: int, lost: int, n: int, confidence: float) -> Estimate:
    """Tango's score interval of the difference of two paired proportions (Tango 1998, Stat. Med. 17:891).

    Of n samples `gained` turned from 0 to 1 and `lost` from 1 to 0; the difference is (gained - lost) / n. The interval
    inverts McNemar's score test, and has a width even if no sample changed: then it is +-z^2 / (n + z^2).
    """
    z, value = _z(confidence), (gained - lost) / n
    low = _invert(lambda delta: _tango_score(gained, lost, n, delta) - z, -1.0, value)
    high = _invert(lambda delta: _tango_score(gained, lost, n, delta) + z, value, 1.0)
    return Estimate(value, low, high, "Tango paired score")


def _tango_score(gained: int, lost: int, n: int, delta: float) -> float:
    """The score statistic of `difference = delta`; falls as delta grows."""
    a = 2 * n
    b = -gained - lost + (2 * n - gained + lost) * delta
    c = -lost * delta * (1 - delta)
    p_lost = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)  # most likely P(lost) given delta
    variance = n * (2 * p_lost + delta * (1 - delta))
    distance = gained - lost - n * delta
    return distance / math.sqrt(variance) if variance > 0 else math.copysign(math.inf, distance) if distance else 0.0


def _invert(falling: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling function crosses zero in [low, high]; the nearer end where it does not."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2


def resamples(n: int, count: int, seed: int) -> Iterator[np.ndarray]:
    """`count` draws of n rows with replacement, in chunks int64 [r, n]. The same seed gives the same draws."""
    rng = np.random.default_rng(seed)
    step = max(1, _CHUNK // n)
    for start in range(0, count, step):
        yield rng.integers(0, n, size=(min(step, count - start), n))


def bootstrap_means(values: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Means of `count` resamples of values [N], float64 [count]."""
    return np.concatenate([values[rows].mean(axis=1) for rows in resamples(len(values), count, seed)])


def bootstrap_statistic(columns: Columns, statistic: Callable[[Columns], float], count: int, seed: int) -> np.ndarray:
    """`statistic` of `count` resamples of the columns' rows, float64 [count]."""
    draws = (rows for chunk in resamples(len(columns[0]), count, seed) for rows in chunk)
    return np.array([statistic(tuple(column[rows] for column in columns)) for rows in draws])


def bootstrap_percentiles(values: np.ndarray, percentile: float, count: int, seed: int) -> np.ndarray:
    """The percentile of `count` resamples of values [N], float64 [count]."""
    parts = [np.percentile(values[rows], percentile, axis=1) for rows in resamples(len(values), count, seed)]
    return np.concatenate(parts)


def percentile_interval(value: float, replicates: np.ndarray, n: int, confidence: float) -> Estimate:
    """Percentile bootstrap (Efron & Tibshirani 1993, ch. 13) from replicates of n samples."""
    if n < MIN_BOOTSTRAP_SAMPLES:
        return unknown(value, n)
    tail = (1 - confidence) / 2
    low, high = np.quantile(replicates, [tail, 1 - tail])
    return Estimate(value, float(low), float(high), "percentile bootstrap")


def samples_needed(estimate: Estimate, limit: float, n: int) -> int | None:
    """About how many samples would put the whole interval on one side of `limit`, were the value to stay.

    Widths shrink with the square root of n. None where the value is on the limit or has no interval, so that no number
    of samples is promised.
    """
    distance = abs(estimate.value - limit)
    width = estimate.high - estimate.value if limit > estimate.value else estimate.value - estimate.low
    if distance == 0 or not math.isfinite(width) or (width / distance) ** 2 > 1e6:
        return None
    return max(n + 1, math.ceil(n * (width / distance) ** 2))
