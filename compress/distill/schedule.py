"""How long and how fast a model is trained: plain numbers, and the learning rate and the rows of every step. No torch.

All of it is a function of the seed and the step's number, so that a run taken up again needs no replay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

Optimizer = Literal["adamw", "sgd"]
Precision = Literal["float32", "bfloat16"]
Rows = np.ndarray
"""int64 [n]."""


EVALUATIONS = 20
"""Evaluations on the samples held out, in a run."""


MEASURED_BYTES = 2**28
"""Of what is learned, from which on samples are taken in parts where memory asks for it; smaller models fit."""


@dataclass(frozen=True)
class TrainingSchedule:
    """How to train.

    `warmup`: steps over which the rate rises; then it falls as a cosine. `evaluate_every`: steps between two looks at
    the samples held out. `epsilon`: adamw's, against which gradients that are smaller vanish. `max_seconds`: rates fall
    to zero by then, too, warm-up is the shorter and looks come the sooner, and what a run gives depends on the machine.
    `ema_decay`: of the average of the states, which is kept in their place; 0: none. `save_seconds`: what a killed run
    may lose; None: as any that learns.
    """

    steps: int
    batch_size: int
    learning_rate: float = 5e-4
    weight_decay: float = 0.0
    optimizer: Optimizer = "adamw"
    epsilon: float = 1e-8
    warmup: int = 0
    precision: Precision = "float32"
    held_out: float = 0.05
    evaluate_every: int = 100
    max_seconds: float | None = None
    freeze_batchnorm: bool = False
    ema_decay: float = 0.0
    save_seconds: float | None = None
    seed: int = 0


def progress_made(schedule: TrainingSchedule, step: int, seconds: float) -> float:
    """Return 0 at the start, 1 at the end: by steps or by time, whichever is nearer to its end."""
    spent = 0.0 if schedule.max_seconds is None else seconds / schedule.max_seconds
    return min(max(step / max(schedule.steps, 1), spent), 1.0)


def is_evaluation_due(
    schedule: TrainingSchedule, step: int, seconds: float, n_evaluations: int, evaluating_s: float
) -> bool:
    """Return whether the time that is spent asks for a further one. `n_evaluations`: made, the first included."""
    if schedule.max_seconds is None or not n_evaluations:
        return False
    asked = EVALUATIONS * progress_made(schedule, step, seconds) >= n_evaluations
    # Of ResNet-56 on one thread an evaluation on 2,500 images takes the time of six steps: twenty left a training of a
    # minute nine.
    return asked and evaluating_s * (n_evaluations + 1) / n_evaluations <= 0.1 * seconds


def learning_rate(schedule: TrainingSchedule, step: int, seconds: float) -> float:
    """Return the rate of the step of that number, from 0 on: a linear rise, then a cosine."""
    done = progress_made(schedule, step, seconds)
    rise = min(max(step + 1, done * schedule.steps) / schedule.warmup, 1.0) if schedule.warmup else 1.0
    return schedule.learning_rate * rise * (1 + math.cos(math.pi * done)) / 2


def split_rows(n: int, held_out: float, seed: int) -> tuple[Rows, Rows]:
    """Split `n` rows into (rows to learn from, rows held out), the second drawn by the seed; in rising order."""
    n_held = round(held_out * n)
    order = np.random.default_rng([seed, 0]).permutation(n)
    return np.sort(order[n_held:]), np.sort(order[:n_held])


def step_rows(rows: Rows, schedule: TrainingSchedule, step: int) -> Rows:
    """Return the rows of a step. Samples come in an endless row of permutations, one for each epoch."""
    first = step * schedule.batch_size
    numbers = np.arange(first, first + schedule.batch_size)
    epochs, places = numbers // len(rows), numbers % len(rows)
    orders = {epoch: _permute_rows(len(rows), schedule.seed, epoch) for epoch in np.unique(epochs).tolist()}
    drawn = [orders[epoch][place] for epoch, place in zip(epochs.tolist(), places.tolist(), strict=True)]
    return rows[np.array(drawn)]


def step_random(schedule: TrainingSchedule, step: int) -> np.random.Generator:
    """Make the generator that augments a step's samples."""
    return np.random.default_rng([schedule.seed, 2, step])


def fit_samples(wanted: int, sample_bytes: int, free_bytes: int) -> int:
    """Return how many of a step's samples go through a model together in memory that is free; at least one."""
    share = 0.7  # a guess: gradients of activations lie beside what is counted
    return max(min(wanted, int(share * free_bytes) // max(sample_bytes, 1)), 1)


@lru_cache(maxsize=2)
def _permute_rows(n: int, seed: int, epoch: int) -> Rows:
    return np.random.default_rng([seed, 1, epoch]).permutation(n)
