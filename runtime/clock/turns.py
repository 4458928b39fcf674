"""Time calls against each other in turn, so that a change of the machine's pace hits them all.

A round gives each model one block of calls in a row, in a random order. A block lasts longer than a scheduler's slice
(BLOCK_S), so that a model meets its own caches and not those that the other one left; its first call is not counted.
What other work takes is known: a call of one thread computes for as long as the process has the processor, so the rest
of its wall time is others' and is taken off; of several threads, rounds that were switched out are set apart.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from runtime.backends import Feeds, Session
from runtime.bundle.columns import Array

BLOCK_S = 0.005
"""Seconds of calls in a row. Linux hands a shared core on after about 3 ms; blocks of 5 ms gave ratios of a CNN of 0.08
and 0.04 ms that scatter by 0.6 % between processes, blocks of 30 ms, of which fewer fit in, by 0.9 %."""
MIN_ROUNDS = 5
"""Rounds whose ratios have a median and a spread."""
WARMUP_BUDGET_S = 10.0
"""Seconds after which a slow model counts as warm."""
DISTURBED = 0.02
"""Share of a round that other work took from which on the round is set apart, where others can be had."""
LEAST_SHARE = 0.05
"""Of a call's wall time, below which the processor's clock is not believed."""
MOST_EXTRA = 2
"""Times as many rounds as are wanted, at most, where some are set apart."""
Call = Callable[[int], object]
"""Makes the n-th call of a model, its batches in turn."""


@dataclass(frozen=True)
class Turns:
    """Seconds of calls, and what other work took meanwhile.

    `taken`: the share of all time that others had the processor instead. `set_apart`: rounds that are not among these.
    """

    seconds: Array  # float64 [models, rounds, calls]
    taken: float = 0.0
    set_apart: int = 0

    @property
    def medians(self) -> Array:
        """Return the median of each block, [models, rounds]."""
        medians: Array = np.median(self.seconds, axis=2)
        return medians

    @property
    def typical_ms(self) -> list[float]:
        """Return milliseconds of each: the first's median, the others' by the median of their ratios to it."""
        medians = self.medians
        return [1000 * float(np.median(medians[0]) * ratio) for ratio in np.median(medians / medians[0], axis=1)]


def time_in_turns(
    calls: Sequence[Call],
    count: int,
    *,
    seed: int = 0,
    warmup: int = 2,
    budget_s: float = 10.0,
    lasting_s: float = 0.0,
    one_thread: bool = True,
    shape: tuple[int, int] | None = None,
) -> Turns:
    """Time `count` calls of each model or more, in MIN_ROUNDS rounds at least.

    Fewer where they would take more than `budget_s`, more where they would not last `lasting_s`. `one_thread`: the
    calls compute on one thread of this process. `shape`: (rounds, calls in a block) to make whatever they take.
    """
    rng = np.random.default_rng(seed)
    pace = [_warm_up(call, warmup) for call in calls]
    in_block = max(1, int(np.ceil(BLOCK_S / max(pace)))) if shape is None else shape[1]
    # what a longer call meets in caches is nothing beside it
    uncounted = [1 if seconds < 0.05 else 0 for seconds in pace]
    per_round = max(1e-9, sum(seconds * (in_block + more) for seconds, more in zip(pace, uncounted, strict=True)))
    wanted = min(-(-count // in_block), int(budget_s / per_round))
    rounds = max(MIN_ROUNDS, wanted, int(lasting_s / per_round)) if shape is None else shape[0]
    blocks: list[Array] = []  # of each round, [models, calls]
    disturbances: list[float] = []
    wall = own = 0.0
    with no_garbage_collection():
        while sum(d <= DISTURBED for d in disturbances) < rounds and len(disturbances) < MOST_EXTRA * rounds:
            turn = len(disturbances)
            block = np.empty((len(calls), in_block))
            disturbance = 0.0
            for model in rng.permutation(len(calls)):
                passed, computed, switches = _time_block(
                    calls[model], turn * in_block, in_block, bool(uncounted[model])
                )
                wall, own = wall + float(passed.sum()), own + min(float(passed.sum()), float(computed.sum()))
                block[model] = take_off_others(passed, computed) if one_thread else passed
                share = 1 - float(computed.sum() / passed.sum()) if one_thread else float(switches)
                disturbance = max(disturbance, share)
            blocks.append(block)
            disturbances.append(disturbance)
    kept = np.sort(np.argsort(disturbances, kind="stable")[:rounds])  # the least disturbed, in their order
    taken = max(0.0, 1 - own / wall) if one_thread else float(np.mean([d > 0 for d in disturbances]))
    return Turns(np.stack([blocks[turn] for turn in kept], axis=1), round(taken, 4), len(disturbances) - rounds)


def _time_block(call: Call, first: int, n: int, settle: bool) -> tuple[Array, Array, int]:
    """Make n calls in a row; return the wall and the processor seconds of each, and how often it was switched out."""
    passed, computed = np.empty(n), np.empty(n)
    if settle:
        call(first)
    before = count_switches()
    for number in range(n):
        # the processor's clock is read outside of the wall's: undisturbed it shows more, and the wall time is taken
        begun = time.process_time()
        start = time.perf_counter()
        call(first + number)
        passed[number] = time.perf_counter() - start
        computed[number] = time.process_time() - begun
    return passed, computed, count_switches() - before


def take_off_others(passed: Array, computed: Array) -> Array:
    """Return the seconds that calls of one thread took of the wall's clock, without what others had the processor for.

    `computed`: of the processor's clock. A call that shows next to none of it keeps the wall's: such were seen in
    tests of tiny models, and a time of 0 has no ratio.
    """
    return np.where(computed > LEAST_SHARE * passed, np.minimum(passed, computed), passed)


def count_switches() -> int:
    """Return how often the system took the processor from this process; 0 where it does not tell (Windows)."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def _warm_up(call: Call, count: int) -> float:
    """Make at least one call; return the seconds of the quickest, the first left out where there are others."""
    times: list[float] = []
    begun = time.perf_counter()
    for number in range(max(count, 1)):
        start = time.perf_counter()
        call(number)
        times.append(time.perf_counter() - start)
        if time.perf_counter() - begun > WARMUP_BUDGET_S:
            break
    return max(min(times[1:] or times), 1e-7)


def make_call(session: Session, batches: Sequence[Feeds]) -> Call:
    """Return what makes the n-th call of a session: over its batches, in turn."""
    return lambda n: session.run(batches[n % len(batches)])


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep Python from collecting garbage while the context is open."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
