"""The largest batch that keeps a limit on its time, found by trying: for throughput under a limit, and goodput."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from runtime.backends import Feeds, Session
from runtime.bundle.format import Benchmark
from runtime.judge.evidence import Best
from runtime.measure.request_times import RequestTimes
from runtime.measure.timing import MIN_ROUNDS, time_rounds

LIMIT_BUDGET_S = 10.0
"""For each batch size that is tried."""
MAX_LIMITED_POWER = 10
"""Batches of up to 2^10 are tried; of a decoder up to 2^MAX_REQUEST_POWER."""
MAX_REQUEST_POWER = 6
LIMIT_PERCENTILE = 95


def large_batch_rounds(settings: Benchmark) -> int:
    """Return the rounds for a large batch: a quarter of the iterations, each being many samples."""
    return min(settings.iterations, max(MIN_ROUNDS, settings.iterations // 4))


def find_limited_batches(
    sessions: Sequence[Session],
    feeds: Callable[[int], list[list[Feeds]]],
    fixed: int | None,
    settings: Benchmark,
    seed: int,
) -> tuple[Best, Best]:
    """Find for each model the largest batch, of rising sizes, whose p95 keeps the limit, with its times.

    `fixed`: the only size that can be tried.
    """
    limit_s = (settings.latency_limit_ms or 0.0) / 1000
    best: list[Best] = [None, None]
    growing = [True, True]
    for batch_size in [fixed] if fixed else [2**power for power in range(MAX_LIMITED_POWER + 1)]:
        seconds = time_rounds(sessions, feeds(batch_size), large_batch_rounds(settings), 2, seed, LIMIT_BUDGET_S)
        in_time = np.percentile(seconds, LIMIT_PERCENTILE, axis=1) <= limit_s
        for m in range(2):
            growing[m] = growing[m] and bool(in_time[m])
            best[m] = (batch_size, seconds[m]) if growing[m] else best[m]
        if not any(growing):
            break
    return best[0], best[1]


def goodput(timed: Callable[[int, int, int, float], RequestTimes], settings: Benchmark) -> tuple[Best, Best]:
    """Find for each decoder the largest batch, of rising sizes, whose p95 keeps the limits, and its requests' times."""

    def keep_limit(seconds: np.ndarray, limit_ms: float | None) -> np.ndarray:
        late = 1000 * np.percentile(seconds, LIMIT_PERCENTILE, axis=1)  # [2]
        kept: np.ndarray = late <= (np.inf if limit_ms is None else limit_ms)
        return kept

    best: list[Best] = [None, None]
    growing = np.array([True, True])
    for batch_size in (2**power for power in range(MAX_REQUEST_POWER + 1)):
        times = timed(batch_size, large_batch_rounds(settings), 1, LIMIT_BUDGET_S)
        growing &= keep_limit(times.first, settings.ttft_limit_ms) & keep_limit(times.per_token, settings.tpot_limit_ms)
        best = [(batch_size, times.whole[m]) if growing[m] else best[m] for m in range(2)]
        if not growing.any():
            break
    return best[0], best[1]
