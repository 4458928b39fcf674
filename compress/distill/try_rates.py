"""Which optimizer at which learning rate: short courses from one start, the best of them tried longer. No torch.

A rate is judged by where a schedule ends, so a trial is a whole schedule in little: the rate rises, then falls to zero.
The best rate of a short schedule is not that of a long one: the last trials are four times as long as the first, and
how the best rate grew with their length is followed to the length of the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from compress.distill.schedule import Optimizer

GRIDS: dict[Optimizer, tuple[float, ...]] = {
    "adamw": (1e-4, 4e-4, 1.6e-3, 6.4e-3),
    "sgd": (0.005, 0.02, 0.08, 0.32),
}
"""Rates that are tried first, each four times the one before."""
MIDDLE: dict[Optimizer, tuple[float, ...]] = {optimizer: rates[1:3] for optimizer, rates in GRIDS.items()}
"""Rates that a schedule tries that is too short for more."""
FEW, BROKEN, MOST_LOWERED = 4, 1.5, 3
"""Steps that show whether a rate breaks a model that begins well, times its loss that are broken, and rates so tried.
Qwen2.5-Coder 0.5B without a quarter of its blocks, whose loss was 0.30: with AdamW at 5e-4 8.5 after four steps."""
BEYOND = 2
"""Times that a rate beyond the lowest or the highest is tried, while the best lies at an end."""
LENGTHS = (1, 2, 4)
"""Of the trials of each round, in units."""
MOST_POWER, MOST_RISE = 0.5, 8.0
"""Of a schedule's length, with which the best rate is believed to grow, and times that it grows in all."""


@dataclass(frozen=True)
class Arm:
    """An optimizer and its highest rate."""

    optimizer: Optimizer
    learning_rate: float

    def times(self, factor: float) -> Arm:
        """Return the same optimizer with another rate."""
        return Arm(self.optimizer, float(f"{self.learning_rate * factor:.3g}"))

    def __str__(self) -> str:
        return f"{self.optimizer} at {self.learning_rate:g}"


@dataclass(frozen=True)
class RateTrial:
    """A short schedule: its steps, and the loss of its last third (infinite where it broke)."""

    arm: Arm
    steps: int
    loss: float


TryArm = Callable[[Arm, int], float]
"""Takes steps; gives the loss of the last third of such a schedule."""


def count_units(optimizers: Sequence[Optimizer]) -> int:
    """Return how many units all trials take at most: of each optimizer its rates, then those of `LENGTHS`."""
    firsts = sum(len(GRIDS[optimizer]) + BEYOND for optimizer in optimizers)
    return firsts * LENGTHS[0] + (2 + len(optimizers)) * LENGTHS[1] + 2 * LENGTHS[2]


def count_few(optimizers: Sequence[Optimizer]) -> int:
    """Return how many arms `choose_roughly` tries."""
    return sum(len(MIDDLE[optimizer]) for optimizer in optimizers)


def choose_roughly(try_arm: TryArm, optimizers: Sequence[Optimizer], steps: int) -> tuple[Arm | None, list[RateTrial]]:
    """Return the best of few arms, each tried once with so many steps; else as `choose_arm`."""
    arms = [Arm(optimizer, rate) for optimizer in optimizers for rate in MIDDLE[optimizer]]
    trials = [RateTrial(arm, steps, try_arm(arm, steps)) for arm in arms]
    best = min(trials, key=lambda trial: trial.loss)
    return (best.arm if math.isfinite(best.loss) else None), trials


def lower(try_arm: TryArm, arm: Arm, most: int, start: float) -> tuple[Arm, list[RateTrial]]:
    """Return the first of ever lower rates with which a few steps do not break a model, and the trials of these.

    After `most` trials it is the next one, untried. `start`: the loss that such steps have with no rate.
    """
    trials: list[RateTrial] = []
    while len(trials) < most:
        trials.append(RateTrial(arm, FEW, try_arm(arm, FEW)))
        if trials[-1].loss <= BROKEN * start:
            break
        arm = arm.times(0.25)
    return arm, trials


def choose_arm(try_arm: TryArm, optimizers: Sequence[Optimizer], unit: int) -> tuple[Arm | None, list[RateTrial]]:
    """Return the best arm, None where every loss broke, and all trials in order. `unit`: steps of the first ones."""
    trials: list[RateTrial] = []

    def run(arms: Sequence[Arm], length: int) -> list[Arm]:
        """Try arms; return those that ended, the best first."""
        found = [RateTrial(arm, unit * length, try_arm(arm, unit * length)) for arm in dict.fromkeys(arms)]
        trials.extend(found)
        return [trial.arm for trial in sorted(found, key=lambda trial: trial.loss) if math.isfinite(trial.loss)]

    firsts = []
    for optimizer in optimizers:
        rates = [Arm(optimizer, rate) for rate in GRIDS[optimizer]]
        order = run(rates, LENGTHS[0])
        for _ in range(BEYOND):
            beyond = _find_beyond(order, rates)
            if beyond is None:
                break
            rates.append(beyond)
            order = _sort(trials, run([beyond], LENGTHS[0]) + order)
        firsts += order[:1]
    firsts = _sort(trials, firsts)
    if not firsts:
        return None, trials
    best = firsts[0]
    order = run([best, best.times(0.5), best.times(2), *firsts[1:]], LENGTHS[1])
    order = run(order[:2], LENGTHS[2])
    return (order[0] if order else best), trials


def follow_trend(arm: Arm, trials: Sequence[RateTrial], steps: int) -> Arm:
    """Return the arm with the rate that a schedule of so many steps is foreseen to want: never a lower one.

    Where a module begins well, short courses mostly undo that, the less the lower their rate (seen on ResNet-56 with
    half of its blocks taken out: best 0.016 for 25 steps, 0.027 for 100; for 1,000 steps 0.1 beat 0.04). Where the best
    rate was the same at all lengths, it stays.
    """
    lowest = _find_lowest([trial for trial in trials if trial.arm.optimizer == arm.optimizer])
    if len(lowest) < 2:
        return arm
    slope = float(np.polyfit(np.log(list(lowest)), list(lowest.values()), 1)[0])
    power = min(max(slope, 0.0), MOST_POWER)
    tried = max(trial.steps for trial in trials if trial.arm == arm)
    return arm.times(min(max(steps / tried, 1.0) ** power, MOST_RISE))


def _find_lowest(trials: Sequence[RateTrial]) -> dict[int, float]:
    """Return steps -> log of the rate at which trials of that length would end lowest, where that can be told.

    By the parabola through the best loss and its neighbours over log rates; where one neighbour is missing, by one as
    curved as that of the length before.
    """
    found: dict[int, float] = {}
    curved = 0.0  # second derivative
    for length in sorted({trial.steps for trial in trials}):
        losses = {math.log(t.arm.learning_rate): t.loss for t in trials if t.steps == length and math.isfinite(t.loss)}
        rates = sorted(losses)
        best = rates.index(min(rates, key=losses.__getitem__)) if rates else 0
        options = rates[max(best - 1, 0) : best + 2]
        slopes = [(losses[high] - losses[low]) / (high - low) for low, high in pairwise(options)]
        if len(slopes) == 2:
            curved = (slopes[1] - slopes[0]) / ((options[2] - options[0]) / 2)
        if slopes and curved > 0:
            found[length] = (options[0] + options[1]) / 2 - slopes[0] / curved
    return found


def _find_beyond(order: Sequence[Arm], rates: Sequence[Arm]) -> Arm | None:
    """Return a rate beyond the best one where that lies at an end of `rates`; None inside, or where all broke."""
    tried = [arm.learning_rate for arm in rates]
    if not order:
        return rates[0].times(0.25 * min(tried) / rates[0].learning_rate)
    best = order[0]
    if best.learning_rate == max(tried):
        return best.times(4)
    return best.times(0.25) if best.learning_rate == min(tried) else None


def _sort(trials: Sequence[RateTrial], arms: Sequence[Arm]) -> list[Arm]:
    """Return arms by the loss of their last trial."""
    losses = {trial.arm: trial.loss for trial in trials}
    return sorted(arms, key=lambda arm: losses[arm])
