"""What a course's length decides: `learning_rate: auto`, `ema_decay: auto`, whether `augment: auto` blends images.

The rate is found by short courses with the pass's own loss, from where it begins; rate and optimizer are the best's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from torch import nn

from compress.context import PassContext
from compress.distill.course import Course
from compress.distill.train import Around, Lessons, try_course
from compress.distill.try_rates import Arm, Trial, choose_arm, choose_roughly, count_few, count_units, follow_trend
from compress.errors import PassError
from compress.facts import Note
from compress.passes.training import AVERAGED, TRIED, TrainingPass
from compress.store.progress import no_log
from compress.work.settled import Settled, keep, recall

FILE = "rates.json"
"""In a pass's folder of unfinished work: what was tried, so that a killed run chooses the same without trying."""
LEAST_STEPS = 6
"""Of the shortest trial: below that, nothing is seen."""
JUDGED = 512
"""Samples held out that a trial is judged on, at most."""
WARMUP = 0.2
"""Part of a trial over which its rate rises."""
BLENDED_EPOCHS = 40.0
"""Of a course that blends images: fewer are better spent on the images as they are. ResNet-56 with half of its blocks
after 3.5 epochs: top-1 92.0 %, 91.5 % with blends."""
Pass = TypeVar("Pass", bound=TrainingPass)


@dataclass(frozen=True)
class Tried:
    """The trials, `seconds` in all; `chosen`: None where there was nothing to try, or the course is too short for it.

    `steps`: that the course is foreseen to make.
    """

    chosen: Arm | None
    trials: tuple[Trial, ...]
    seconds: float
    steps: int


def settle_course(
    knobs: Pass,
    changes: Settled,
    pupil: nn.Module,
    lessons_of: Callable[[Pass], Lessons],
    around: Around,
    context: PassContext,
) -> tuple[Pass, Lessons, Settled]:
    """Return the pass with what it asks to find (rate, optimizer, average, blending), its lessons, and what was found.

    `changes`: what was found before, of images and precision. `pupil` is trained in place by each trial and put back.
    What was tried is kept in `context.work`. PassError where the loss broke in every trial.
    """
    may_blend = "augment" in changes.fields and knobs.changes.mixup > 0
    if "auto" not in (knobs.learning_rate, knobs.ema_decay) and not may_blend:
        return knobs, lessons_of(knobs), changes
    lessons, seed = lessons_of(knobs), context.seed
    tried, begun = _recall_trials(context), time.monotonic()
    steps = _foresee_steps(knobs, pupil, lessons, around, seed) if tried is None else tried.steps
    if may_blend:
        knobs, blended = _settle_blending(knobs, _count_epochs(knobs.course(lessons.n, seed), steps, lessons.n))
        lessons, changes = lessons_of(knobs), changes.then(blended)
        context.log(blended.notes[0].text)
    if tried is None:
        arm, trials = _try_rates(knobs, pupil, lessons, around, steps, seed)
        tried = Tried(arm, tuple(trials), time.monotonic() - begun, steps)
        keep(context, FILE, asdict(tried))
    arm = tried.chosen or Arm(knobs.optimizers[0], knobs.nominal_rate)
    found = asdict(arm) if knobs.learning_rate == "auto" else {}
    found |= {"ema_decay": round(max(1 - AVERAGED / steps, 0), 5)} if knobs.ema_decay == "auto" else {}
    settled = knobs.settle(tried.seconds, **found)
    if knobs.learning_rate != "auto":
        return settled, lessons, changes.then(Settled(found))
    note = _describe(knobs.kind, arm, tried.trials)
    context.log(note.text)
    losses = {f"{trial.arm}, {trial.steps} steps": trial.loss for trial in tried.trials if math.isfinite(trial.loss)}
    measured = {f"{knobs.kind}: loss after trials": losses} if losses else {}
    return settled, lessons, changes.then(Settled(found, (note,), measured))


def _count_epochs(course: Course, steps: int, n_samples: int) -> float:
    return steps * course.samples / ((1 - course.held_out) * n_samples)


def _settle_blending(knobs: Pass, epochs: float) -> tuple[Pass, Settled]:
    """Return the pass, images blended in a course of many epochs alone, and which it is."""
    if epochs >= BLENDED_EPOCHS:
        note = Note("info", f"{knobs.kind}: mixup {knobs.changes.mixup:g}: the course has {epochs:.0f} epochs")
        return knobs, Settled(notes=(note,))
    augment = knobs.changes.model_copy(update={"mixup": 0.0})
    text = f"{knobs.kind}: no mixup: the course has {epochs:.1f} epochs, and it is for {BLENDED_EPOCHS:g} and more"
    return knobs.settle(0.0, augment=augment), Settled({"augment": augment.model_dump()}, (Note("info", text),))


def _describe(kind: str, arm: Arm, trials: Sequence[Trial]) -> Note:
    if not trials:
        return Note("warning", f"{kind}: {arm}, untried: there are too few steps to find a learning rate in a part of")
    steps = [trial.steps for trial in trials]
    found = f"{kind}: {arm}, found by {len(trials)} trials of {min(steps)} to {max(steps)} steps"
    raised = "" if arm in [trial.arm for trial in trials] else ": the longer a trial, the higher its best rate"
    return Note("info", found + raised)


def _try_rates(
    knobs: TrainingPass, pupil: nn.Module, lessons: Lessons, around: Around, steps: int, seed: int
) -> tuple[Arm | None, list[Trial]]:
    """Return the best arm for a course of so many steps, and the trials. PassError where the loss broke in all."""
    attempt = _make_attempt(knobs, pupil, lessons, around, seed)
    budget = int(TRIED * steps) if knobs.learning_rate == "auto" else 0
    unit, few = budget // count_units(knobs.optimizers), budget // count_few(knobs.optimizers)
    chosen, trials = None, list[Trial]()
    if unit >= LEAST_STEPS:
        chosen, trials = choose_arm(attempt, knobs.optimizers, unit)
    elif few >= LEAST_STEPS:
        chosen, trials = choose_roughly(attempt, knobs.optimizers, few)
    if trials and chosen is None:
        raise PassError(f"{knobs.kind}: learning_rate: auto: the loss became NaN or infinite at every rate")
    return chosen and follow_trend(chosen, trials, steps), trials


def _make_attempt(
    knobs: TrainingPass, pupil: nn.Module, lessons: Lessons, around: Around, seed: int
) -> Callable[[Arm, int], float]:
    """Return a function that gives the loss held out at the end of a short course of an arm."""
    course = knobs.course(lessons.n, seed)
    quiet = replace(around, name=f"{around.name}: rates", log=no_log, work=None)

    def attempt(arm: Arm, steps: int) -> float:
        loss = try_course(pupil, lessons, _shorten(course, arm, steps), quiet, JUDGED)
        around.log(f"{around.name}: {arm}, {steps} steps: held out {loss:.4g}")
        return loss

    return attempt


def _shorten(course: Course, arm: Arm, steps: int) -> Course:
    """Return the course in little: looked at once, at its end, whose state is judged and not an average."""
    return replace(
        course,
        **asdict(arm),
        steps=steps,
        schedule="cosine",
        warmup=round(WARMUP * steps),
        evaluate_every=steps,
        patience=None,
        max_seconds=None,
        ema_decay=0.0,
    )


def _foresee_steps(knobs: TrainingPass, pupil: nn.Module, lessons: Lessons, around: Around, seed: int) -> int:
    """Return how many steps the course will make: those that `max_seconds` leave time for, 1 at least."""
    course = knobs.course(lessons.n, seed)
    if course.max_seconds is None:
        return course.steps
    attempt, arm = _make_attempt(knobs, pupil, lessons, around, seed), Arm(knobs.optimizers[0], knobs.nominal_rate)
    attempt(arm, 1)  # warm
    begun = time.monotonic()
    attempt(arm, 1)
    one = time.monotonic() - begun
    attempt(arm, 4)
    seconds = max((time.monotonic() - begun - 2 * one) / 3, 1e-6)  # of a step, without what every trial takes beside
    return max(min(course.steps, int((1 - TRIED) * course.max_seconds / seconds)), 1)


def _recall_trials(context: PassContext) -> Tried | None:
    record = recall(context, FILE)
    if record is None:
        return None
    trials = tuple(Trial(Arm(**trial["arm"]), trial["steps"], trial["loss"]) for trial in record["trials"])
    return Tried(record["chosen"] and Arm(**record["chosen"]), trials, record["seconds"], record["steps"])
