"""Timing several models against each other, so that a change of the machine's pace hits them all.

Every round calls each model once, in a random order. Just before a timed call the same model is called untimed:
otherwise a model would meet the caches, and with several threads the spinning workers, that the other one left behind,
which it does not meet where it is deployed. Slow calls (SETTLED_S and up) need no such help and get none.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from runtime.backends import DeviceTimed, Feeds, Session
from runtime.judge.stats import is_drifting

MIN_ROUNDS = 30
"""Rounds that are made whatever they take: fewer seldom give an interval (`stats.MIN_DRIFTING_ROUNDS`)."""
SETTLED_S = 0.05
WARMUP_BUDGET_S = 10.0
SETTLING_S = 5.0
"""How long rounds that drift are added to: 200 of a model of 50 us are over in one hiccup of the machine."""


def time_rounds(
    sessions: Sequence[Session],
    feeds: Sequence[Sequence[Feeds]],
    rounds: int,
    warmup: int,
    seed: int,
    budget_s: float,
    settling_s: float = 0.0,
) -> np.ndarray:
    """Return seconds per call, float64 [models, rounds].

    feeds[m] are model m's batches, taken in turn, round r the r-th. At most `rounds`; fewer, but at least MIN_ROUNDS
    (or `rounds`, if that is less), where they would take more than `budget_s`. Where the ratio of the first two models
    drifts from round to round, as many are added again and again until it does no longer, for at most `settling_s`.
    Only the drift decides, never the ratio itself, so that its interval keeps its promise.
    """
    rng = np.random.default_rng(seed)
    pace = [_warm_up(session, batches, warmup) for session, batches in zip(sessions, feeds, strict=True)]
    repeats = [1 if seconds >= SETTLED_S else 2 for seconds in pace]
    per_round = max(1e-9, sum(seconds * calls for seconds, calls in zip(pace, repeats, strict=True)))
    made = max(min(rounds, MIN_ROUNDS), min(rounds, int(budget_s / per_round)))

    def run_rounds(first: int, n: int) -> np.ndarray:
        seconds = np.empty((len(sessions), n))
        for turn in range(n):
            for m in rng.permutation(len(sessions)):
                batch = feeds[m][(first + turn) % len(feeds[m])]
                if repeats[m] == 2:
                    sessions[m].run(batch)
                seconds[m, turn] = _time_call(sessions[m], batch)
        return seconds

    with no_garbage_collection():
        seconds = run_rounds(0, made)
        until = time.perf_counter() + settling_s
        while made >= MIN_ROUNDS and time.perf_counter() < until and is_drifting(seconds[0] / seconds[1]):
            left = int((until - time.perf_counter()) / per_round)
            seconds = np.hstack([seconds, run_rounds(seconds.shape[1], max(1, min(seconds.shape[1], left)))])
    return seconds


def device_rounds(sessions: Sequence[Session], feeds: Sequence[Sequence[Feeds]], rounds: int) -> np.ndarray | None:
    """Return seconds per call by the device's own clock (CUDA events), copies left out: float64 [models, rounds].

    The models take turns. None where one of them runs on no such device.
    """
    clocks = [session for session in sessions if isinstance(session, DeviceTimed)]
    if len(clocks) < len(sessions):
        return None
    seconds = np.empty((len(sessions), rounds))
    for turn in range(rounds):
        for m, (session, clock) in enumerate(zip(sessions, clocks, strict=True)):
            session.run(feeds[m][turn % len(feeds[m])])
            seconds[m, turn] = clock.device_ms / 1000
    return seconds


def _warm_up(session: Session, feeds: Sequence[Feeds], calls: int) -> float:
    """Run at least one call; return the seconds of the last."""
    start = time.perf_counter()
    seconds = _time_call(session, feeds[0])
    for call in range(1, calls):
        if time.perf_counter() - start > WARMUP_BUDGET_S:
            break
        seconds = _time_call(session, feeds[call % len(feeds)])
    return seconds


def _time_call(session: Session, feeds: Feeds) -> float:
    start = time.perf_counter()
    session.run(feeds)
    return time.perf_counter() - start


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
