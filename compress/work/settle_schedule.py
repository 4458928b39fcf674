"""What a schedule's length decides: `learning_rate: auto`, `ema_decay: auto`, whether `augment: auto` blends images.

The rate is found by short courses with the pass's own loss, from where it begins; rate and optimizer are the best's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from torch import nn

from compress.blocks.sharing import from_main
from compress.context import PassContext
from compress.distill.schedule import TrainingSchedule
from compress.distill.train import Dataset, TrainOptions, try_schedule
from compress.distill.try_rates import (
    FEW,
    MOST_LOWERED,
    Arm,
    RateTrial,
    choose_arm,
    choose_roughly,
    count_few,
    count_units,
    follow_trend,
    lower,
)
from compress.errors import PassError
from compress.facts import Note
from compress.passes.training import AVERAGED, TRIED, TrainingPass
from compress.store.progress import no_log
from compress.work.settled import Settled, keep, recall

FILE = "rates.json"
"""In a pass's folder of unfinished work: what was tried, so that a killed run chooses the same without trying."""
LEAST_STEPS = 6
"""Of the shortest trial: below that, nothing is seen."""
NO_RATE = 1e-12
"""Of steps that change nothing."""
WARMUP = 0.2
"""Part of a trial over which its rate rises."""
BLENDED_EPOCHS = 40.0
"""Of a schedule that blends images: fewer are better spent on the images as they are. ResNet-56 with half of its blocks
after 3.5 epochs: top-1 92.0 %, 91.5 % with blends."""
Pass = TypeVar("Pass", bound=TrainingPass)


@dataclass(frozen=True)
class Tried:
    """The trials, `seconds` in all; `chosen`: None where there was nothing to try, or the schedule is too short for it.

    `steps`: that the schedule is foreseen to make.
    """

    chosen: Arm | None
    trials: tuple[RateTrial, ...]
    seconds: float
    steps: int


def settle_schedule(
    config: Pass,
    changes: Settled,
    pupil: nn.Module,
    dataset_of: Callable[[Pass], Dataset],
    options: TrainOptions,
    context: PassContext,
) -> tuple[Pass, Dataset, Settled]:
    """Return the pass with what it asks to find (rate, optimizer, average, blending), its batches, and what was found.

    `changes`: what was found before, of images and precision. `pupil` is trained in place by each trial and put back.
    What was tried is kept in `context.work`. PassError where the loss broke in every trial.
    """
    may_blend = "augment" in changes.fields and config.changes.mixup > 0
    if "auto" not in (config.learning_rate, config.ema_decay) and not may_blend:
        return config, dataset_of(config), changes
    dataset, seed = dataset_of(config), context.seed
    tried, begun = _recall_trials(context), time.monotonic()
    steps, start = _foresee(config, pupil, dataset, options, seed) if tried is None else (tried.steps, math.nan)
    if may_blend:
        config, blended = _settle_blending(
            config, _count_epochs(config.make_schedule(dataset.n, seed), steps, dataset.n)
        )
        dataset, changes = dataset_of(config), changes.then(blended)
        context.log(blended.notes[0].text)
    if tried is None:
        arm, trials = _try_rates(config, pupil, dataset, options, steps, start, seed)
        tried = Tried(arm, tuple(trials), from_main(time.monotonic() - begun), steps)
        keep(context, FILE, asdict(tried))
    arm = tried.chosen or Arm(config.optimizers[0], config.nominal_rate)
    found = asdict(arm) if config.learning_rate == "auto" else {}
    found |= {"ema_decay": round(max(1 - AVERAGED / steps, 0), 5)} if config.ema_decay == "auto" else {}
    settled = config.settle(tried.seconds, **found)
    if config.learning_rate != "auto":
        return settled, dataset, changes.then(Settled(found))
    note = _describe(config.kind, arm, tried.trials)
    context.log(note.text)
    losses = {f"{trial.arm}, {trial.steps} steps": trial.loss for trial in tried.trials if math.isfinite(trial.loss)}
    measured = {f"{config.kind}: loss after trials": losses} if losses else {}
    return settled, dataset, changes.then(Settled(found, (note,), measured))


def _count_epochs(schedule: TrainingSchedule, steps: int, n_samples: int) -> float:
    return steps * schedule.batch_size / ((1 - schedule.held_out) * n_samples)


def _settle_blending(config: Pass, epochs: float) -> tuple[Pass, Settled]:
    """Return the pass, images blended in a schedule of many epochs alone, and which it is."""
    if epochs >= BLENDED_EPOCHS:
        note = Note("info", f"{config.kind}: mixup {config.changes.mixup:g}: the course has {epochs:.0f} epochs")
        return config, Settled(notes=(note,))
    augment = config.changes.model_copy(update={"mixup": 0.0})
    text = f"{config.kind}: no mixup: the course has {epochs:.1f} epochs, and it is for {BLENDED_EPOCHS:g} and more"
    return config.settle(0.0, augment=augment), Settled({"augment": augment.model_dump()}, (Note("info", text),))


def _describe(kind: str, arm: Arm, trials: Sequence[RateTrial]) -> Note:
    if not trials:
        return Note("warning", f"{kind}: {arm}, untried: there are too few steps to find a learning rate in a part of")
    lengths = sorted({trial.steps for trial in trials})
    found = f"{kind}: {arm}, found by {len(trials)} trial{'s' * (len(trials) > 1)} of "
    found += f"{' to '.join(map(str, lengths[:1] + lengths[1:][-1:]))} steps"
    if arm in [trial.arm for trial in trials]:
        return Note("info", found)
    if arm.learning_rate < min(trial.arm.learning_rate for trial in trials):
        return Note("info", f"{found}, all of which broke it: a quarter of the last one")
    return Note("info", f"{found}: the longer a trial, the higher its best rate")


def _try_rates(
    config: TrainingPass, pupil: nn.Module, dataset: Dataset, options: TrainOptions, steps: int, start: float, seed: int
) -> tuple[Arm | None, list[RateTrial]]:
    """Return the best arm for a schedule of so many steps, and the trials.

    `start`: the loss of a few steps that change nothing; NaN: not known. PassError where the loss broke in all trials
    of a schedule that is long enough to compare rates.
    """
    attempt = _make_attempt(config, pupil, dataset, options, seed)
    budget = int(TRIED * steps) if config.learning_rate == "auto" else 0
    unit, few = budget // count_units(config.optimizers), budget // count_few(config.optimizers)
    chosen, trials = None, list[RateTrial]()
    if unit >= LEAST_STEPS:
        chosen, trials = choose_arm(attempt, config.optimizers, unit)
        if chosen is None:
            raise PassError(f"{config.kind}: learning_rate: auto: the loss became NaN or infinite at every rate")
        return follow_trend(chosen, trials, steps), trials
    if few >= LEAST_STEPS:
        chosen, trials = choose_roughly(attempt, config.optimizers, few)
    if budget < FEW:
        return None, []
    # so few steps do not show which rate is best, but one that breaks a model shows
    first = chosen or Arm(config.optimizers[0], config.nominal_rate)
    start = attempt(_stand(config), FEW) if math.isnan(start) else start
    chosen, lowered = lower(attempt, first, min(budget // FEW, MOST_LOWERED), start)
    return chosen, [*trials, *lowered]


def _stand(config: TrainingPass) -> Arm:
    """Return an arm that changes nothing."""
    return Arm(config.optimizers[0], NO_RATE)


def _make_attempt(
    config: TrainingPass, pupil: nn.Module, dataset: Dataset, options: TrainOptions, seed: int
) -> Callable[[Arm, int], float]:
    """Return a function that gives the loss towards the end of a short schedule of an arm."""
    schedule = config.make_schedule(dataset.n, seed)
    quiet = replace(options, name=f"{options.name}: rates", log=no_log, work=None)

    def attempt(arm: Arm, steps: int) -> float:
        loss = try_schedule(pupil, dataset, _shorten(schedule, arm, steps), quiet)
        options.log(f"{options.name}: {arm}, {steps} steps: loss {loss:.4g}")
        return loss

    return attempt


def _shorten(schedule: TrainingSchedule, arm: Arm, steps: int) -> TrainingSchedule:
    """Return the schedule in little, whose own state is judged and not an average."""
    return replace(
        schedule,
        **asdict(arm),
        steps=steps,
        warmup=round(WARMUP * steps),
        max_seconds=None,
        ema_decay=0.0,
    )


def _foresee(
    config: TrainingPass, pupil: nn.Module, dataset: Dataset, options: TrainOptions, seed: int
) -> tuple[int, float]:
    """Return how many steps the schedule will make, and the loss of a few that change nothing; NaN: not tried.

    Of steps there are 1 at least, and those that `max_seconds` leave time for.
    """
    schedule = config.make_schedule(dataset.n, seed)
    if schedule.max_seconds is None:
        return schedule.steps, math.nan
    attempt, arm = _make_attempt(config, pupil, dataset, options, seed), _stand(config)
    attempt(arm, 1)  # warm
    begun = time.monotonic()
    attempt(arm, 1)
    one = time.monotonic() - begun
    start = attempt(arm, FEW)
    seconds = max((time.monotonic() - begun - 2 * one) / (FEW - 1), 1e-6)  # of a step, without what each trial takes
    steps = max(min(schedule.steps, int((1 - TRIED) * schedule.max_seconds / seconds)), 1)
    # each process has times of its own, and all are to make the same steps and end at the same one
    return from_main(steps), from_main(start)


def _recall_trials(context: PassContext) -> Tried | None:
    record = recall(context, FILE)
    if record is None:
        return None
    trials = tuple(RateTrial(Arm(**trial["arm"]), trial["steps"], trial["loss"]) for trial in record["trials"])
    return Tried(record["chosen"] and Arm(**record["chosen"]), trials, record["seconds"], record["steps"])
