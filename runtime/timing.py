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

MIN_ROUNDS = 10
"""Rounds that are made whatever they take: fewer give no interval."""
SETTLED_S = 0.05
WARMUP_BUDGET_S = 10.0


def time_rounds(
    sessions: Sequence[Session], feeds: Sequence[Sequence[Feeds]], rounds: int, warmup: int, seed: int, budget_s: float
) -> np.ndarray:
    """Seconds per call, float64 [models, rounds]; feeds[m] are model m's batches, taken in turn, round r the r-th.

    At most `rounds`; fewer, but at least MIN_ROUNDS (or `rounds`, if that is less), where they would take more than
    `budget_s`.
    """
    rng = np.random.default_rng(seed)
    pace = [_warm_up(session, own, warmup) for session, own in zip(sessions, feeds, strict=True)]
    repeats = [1 if seconds >= SETTLED_S else 2 for seconds in pace]
    per_round = sum(seconds * calls for seconds, calls in zip(pace, repeats, strict=True))
    made = max(min(rounds, MIN_ROUNDS), min(rounds, int(budget_s / max(per_round, 1e-9))))
    seconds = np.empty((len(sessions), made))
    with no_garbage_collection():
        for turn in range(made):
            for m in rng.permutation(len(sessions)):
                batch = feeds[m][turn % len(feeds[m])]
                if repeats[m] == 2:
                    sessions[m].run(batch)
                seconds[m, turn] = _timed(sessions[m], batch)
    return seconds


def device_rounds(sessions: Sequence[Session], feeds: Sequence[Sequence[Feeds]], rounds: int) -> np.ndarray | None:
    """Seconds per call by the device's own clock (CUDA events), copies left out: float64 [models, rounds].

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
    """At least one call; gives the seconds of the last."""
    start = time.perf_counter()
    seconds = _timed(session, feeds[0])
    for call in range(1, calls):
        if time.perf_counter() - start > WARMUP_BUDGET_S:
            break
        seconds = _timed(session, feeds[call % len(feeds)])
    return seconds


def _timed(session: Session, feeds: Feeds) -> float:
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
