"""Try the points of a recipe's search, batch by batch, until the budget is used up: the loop of `compress sweep`."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

from compress.errors import CompressError, OutputError, RecipeError
from compress.recipe.pinned import pin_recipe
from compress.recipe.points import Point, SearchSpace, format_point, open_space
from compress.recipe.schema import Recipe
from compress.search.outcome import Foreseen, explain_foreseen_miss, read_gates, read_goals
from compress.search.sampler import choose_points
from compress.search.study import (
    BUNDLES,
    LOG,
    RECIPES,
    REPORTS,
    WORK,
    Study,
    find_due,
    format_goal,
    name_trial,
    open_study,
)
from compress.search.trials import Run, State, Trial, write_json
from compress.search.workers import TrialAnswer, TrialOrder, Workers, start_workers
from compress.store.run_log import choose_log
from runtime.bundle.files import write_whole

FIRST = "first.yaml"
"""In the study's folder of unfinished work: a recipe whose first passes are run."""
MOST_REFUSED = 50
"""Trials refused one after another, after which a study ends: nothing in the space can work."""
NO_TIME = "the budget is used up; the same command goes on"


class OutOfTime(Exception):
    """The budget is used up; what was tried is recorded."""


@dataclass(frozen=True)
class Prior:
    """What is known before the first trial, by cheaper means.

    `first`: points to try before what stands in the recipe, the most hopeful first; what one does not say is as in the
    recipe, so that {"passes": "small"} is one chain. `foresee`: what a point will come
    to, by (metric, rule of a gate): ("top1", "max_drop") -> 0.02; one that is foreseen far from a gate is refused
    before any work, and recorded so.
    """

    first: Sequence[Point] = ()
    foresee: Callable[[Point], Foreseen] | None = None


def count_untimed(recipe: Recipe) -> int:
    """Return how many passes come before the first one that times something."""
    return len(list(takewhile(lambda pass_: not pass_.measures_time, recipe.passes)))


@dataclass
class Sweep:
    """A study at work. `refuses`: what is foreseen to be far from a gate, or to outlast the budget, is not
    begun."""

    study: Study
    workers: Workers
    cache: Path | None
    deadline: float | None
    most: int
    prior: Prior
    log: Callable[[str], None]
    refuses: bool = True

    @property
    def space(self) -> SearchSpace:
        return self.study.space

    @property
    def shares(self) -> tuple[float, ...]:
        racing = self.study.search.racing
        return (1.0,) if racing is None else racing.shares

    def run(self) -> str:
        """Try batch after batch; return why there is no further one."""
        try:
            while not (why := self.explain_end()):
                batch = self.find_unfinished() or self.choose_batch()
                if not batch:
                    return "every point of the space was tried"
                self.race(batch)
        except OutOfTime as error:
            return str(error)
        return why

    def find_unfinished(self) -> list[Trial]:
        """Return the batch that was chosen last, if anything of it is still to be tried."""
        latest = max((trial.batch for trial in self.study.trials), default=-1)
        batch = [trial for trial in self.study.trials if trial.batch == latest]
        return batch if find_due(batch, self.study.search)[1] else []

    def explain_end(self) -> str:
        """Return why no further batch is begun; "" where one is."""
        trials = self.study.trials
        if self.find_unfinished():
            return ""
        last = [trial.last for trial in trials]
        if sum(run is not None and run.state != "refused" for run in last) >= self.most:
            return f"{self.most} trials were tried"
        ending = last[-MOST_REFUSED:]
        if len(ending) == MOST_REFUSED and all(run is not None and run.state == "refused" for run in ending):
            reason = Counter(run.reason for run in ending if run is not None).most_common(1)[0][0]
            return f"the last {MOST_REFUSED} trials were refused before any work, most of them for: {reason}"
        failed = [run for run in last if run is not None and run.state == "failed"]
        # where none was judged, 8 that failed are enough
        if len(failed) >= 8 and not any(run is not None and run.state == "judged" for run in last):
            return f"the first {len(failed)} trials failed, the last of them for: {failed[-1].reason}"
        return ""

    def choose_batch(self) -> list[Trial]:
        """Choose points and write them down before any is tried; [] where there are no more."""
        self.check_time()
        trials = self.study.trials
        tried = sum(trial.last is not None and not trial.is_refused for trial in trials)
        n = min(self.study.search.batch_size, self.most - tried)
        points = choose_points(self.space, trials, n, self.prior.first)
        batch = max((trial.batch for trial in trials), default=-1) + 1
        number = max((trial.number for trial in trials), default=-1) + 1
        made = [Trial(number + i, batch, dict(point)) for i, point in enumerate(points)]
        for trial in made:
            self.study.record(trial)
        return made

    def race(self, batch: Sequence[Trial]) -> None:
        """Take a batch from rung to rung until nothing of it is due any more."""
        while True:
            rung, due = find_due([self.study.find(trial.number) for trial in batch], self.study.search)
            if not due:
                return
            self.try_all(due, rung)

    def try_all(self, trials: Sequence[Trial], rung: int) -> None:
        """Build and judge trials in waves: a wave is built at once, then judged one after another.

        A pass that times something has nothing beside it, either: only what comes before it is done at once.
        """
        ready = [(trial, recipe) for trial in trials if (recipe := self.make_recipe(trial, rung)) is not None]
        timed = [trial for trial, recipe in ready if any(pass_.measures_time for pass_ in recipe.passes)]
        others = [trial for trial, _ in ready if trial not in timed]
        started = [(trial, n) for trial, recipe in ready if trial in timed and (n := count_untimed(recipe))]
        n = self.workers.n
        if n > 1 and len(started) > 1:
            self.check_time()
            orders = [replace(self.order(trial, rung), do="start", n_passes=first) for trial, first in started]
            self.workers.build(orders, self.deadline)
        for i in range(0, len(others), n):
            self.try_wave(others[i : i + n], rung)
        for trial in timed:
            self.try_wave([trial], rung)

    def run_first(self, recipe: Recipe, n_passes: int) -> None:
        """Run the first passes of a recipe, so that the cache has what they give; what fails, its trial will say."""
        self.check_time()
        file = self.study.folder / WORK / FIRST
        write_whole(file, pin_recipe(recipe).encode())
        cache = None if self.cache is None else str(self.cache)
        order = TrialOrder("start", str(file.parent), str(file), cache, n_passes=n_passes, refuse=False)
        self.workers.build([order], self.deadline)
        file.unlink()

    def make_recipe(self, trial: Trial, rung: int) -> Recipe | None:
        """Write the explicit recipe of a trial; None, and a record, where it is refused before any work."""
        try:
            recipe = self.space.recipe_at(trial.point)
        except RecipeError as error:
            self.refuse(trial, rung, str(error))
            return None
        foreseen = self.prior.foresee(trial.point) if self.prior.foresee else {}
        if why := explain_foreseen_miss(recipe.validate_.gates, foreseen):
            self.refuse(trial, rung, why)
            return None
        write_whole(self.recipe_file(trial), pin_recipe(recipe).encode())
        return recipe

    def refuse(self, trial: Trial, rung: int, why: str) -> None:
        self.record(trial, Run(rung, self.shares[rung], "refused", why))

    def recipe_file(self, trial: Trial) -> Path:
        return self.study.folder / RECIPES / f"{name_trial(trial)}.yaml"

    def try_wave(self, trials: Sequence[Trial], rung: int) -> None:
        """Build the bundles of trials at once, then judge each; raises OutOfTime where the budget ends before."""
        self.check_time()
        answers = self.workers.build([self.order(trial, rung) for trial in trials], self.deadline)
        late = ""
        for trial, built in zip(trials, answers, strict=True):
            late = self.finish(trial, rung, built) or late
            shutil.rmtree(self.work_of(trial), ignore_errors=True)
        if late:
            raise OutOfTime(late)

    def finish(self, trial: Trial, rung: int, built: TrialAnswer | None) -> str:
        """Judge what was built and record it; return why not, where no time is left for that."""
        if built is None:
            return NO_TIME
        if built.state == "late":
            return f"{NO_TIME} (the next trial would take {built.reason})"
        self.stop_where_hopeless(built)
        if built.state != "done":
            self.record(trial, self.describe(built, rung, built.state))
            return ""
        judged = self.workers.judge(TrialOrder("judge", str(self.work_of(trial)), notes=built.notes), self.deadline)
        if judged is None:
            return NO_TIME
        self.stop_where_hopeless(judged)
        self.record_judged(trial, rung, built, judged)
        return ""

    def order(self, trial: Trial, rung: int) -> TrialOrder:
        """Return the order to build a trial's bundle."""
        racing = self.study.search.racing
        left = None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)
        return TrialOrder(
            "build",
            str(self.work_of(trial)),
            str(self.recipe_file(trial)),
            None if self.cache is None else str(self.cache),
            self.shares[rung],
            racing.model_dump(mode="json") if racing else {},
            left,
            refuse=self.refuses,
        )

    def work_of(self, trial: Trial) -> Path:
        """Return where a trial's bundle is until it is judged in full."""
        return self.study.folder / WORK / name_trial(trial)

    def describe(self, built: TrialAnswer, rung: int, state: State) -> Run:
        """Return the run that a build came to."""
        return Run(
            rung,
            self.shares[rung],
            state,
            built.reason,
            seconds=built.seconds,
            host=built.host,
            reused=built.reused,
            foreseen=built.foreseen,
            stages=built.stages,
        )

    def record_judged(self, trial: Trial, rung: int, built: TrialAnswer, judged: TrialAnswer) -> None:
        """Record what a report says, or why there is none, and keep the report."""
        run = self.describe(built, rung, "judged")
        seconds, stages = built.seconds + judged.seconds, built.stages | judged.stages
        run = replace(run, seconds=seconds, stages=stages, judged_on=judged.host)
        report = judged.report
        if judged.state != "done":
            self.record(trial, replace(run, state="failed", reason=judged.reason))
            return
        name = name_trial(trial) if run.share == 1 else f"{name_trial(trial)}.{rung}"
        write_json(self.study.folder / REPORTS / f"{name}.json", report)
        goals = read_goals(report, self.study.search)
        missing = [metric for _, metric in self.study.search.split_goals() if metric not in goals]
        if missing:
            why = f"{', '.join(missing)} was not measured on {report['backend']}, and is a goal"
            self.record(trial, replace(run, state="failed", reason=why))
            return
        if run.share == 1 and self.work_of(trial).exists():
            os.replace(self.work_of(trial), self.study.folder / BUNDLES / name_trial(trial))
        verdict = report["verdict"] if run.share == 1 else ""
        self.record(trial, replace(run, goals=goals, gates=read_gates(report), verdict=verdict))

    def record(self, trial: Trial, run: Run) -> None:
        self.study.judged_on = run.judged_on or self.study.judged_on
        best = self.study.best
        self.study.record(trial.add(run))
        self.log(f"trial {trial.number}: {_format_run(run)}  ({format_point(trial.point)})")
        if (now := self.study.best) is not None and (best is None or now.number != best.number):
            self.log(f"trial {now.number} is the best so far")

    def check_time(self) -> None:
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise OutOfTime(NO_TIME)

    def stop_where_hopeless(self, answer: TrialAnswer) -> None:
        """Raise OutputError where the disk or a folder is what failed: no other trial would fare better."""
        if answer.stop:
            raise OutputError(answer.reason)


def _format_run(run: Run) -> str:
    if run.state != "judged":
        return f"{run.state}: {run.reason}"
    goals = ", ".join(f"{metric} {format_goal(goal)}" for metric, goal in run.goals.items())
    part = f" with {run.share:.0%} of the effort" if run.share < 1 else f", {run.verdict}"
    return f"{goals}{part}, {run.seconds:.0f} s"


def sweep(
    recipe: Recipe,
    out: Path | str,
    cache: Path | None = None,
    *,
    trials: int | None = None,
    budget_s: float | None = None,
    jobs: int = 1,
    ray: str | None = None,
    quiet: bool = False,
    prior: Prior = Prior(),
) -> Study:
    """Try the points of the recipe's `search:` and keep what is best of them in the folder `out`.

    A study that is there already goes on: its trials are not done again. `trials`: how many in all, those refused
    before any work not counted; default: the recipe's. `budget_s`: seconds after which this call ends, work in
    progress included, which the cache keeps as far as it came. `jobs`: trials that are built at once, each in a process
    of its own; 0: in this one. `ray`: the address of a Ray cluster ("auto", "local", HOST:PORT, ray://...) that builds
    them instead; times are still taken on this machine. `prior`: what is known before the first trial. `quiet`: no line
    for each trial.

    Returns the study: `.best`, `.front`, `.trials`, `.bundle`. Raises RecipeError for a recipe without `search:`,
    PlaceError for a folder that is in use or of another recipe, OutputError where the disk fails, MissingDependency
    without optuna (or ray).
    """
    deadline = None if budget_s is None else time.monotonic() + budget_s
    space = open_space(recipe)
    most = space.search.trials if trials is None else trials
    with (
        open_study(Study, Path(out), space) as study,
        start_workers(recipe.held, jobs, ray, study.folder / LOG) as workers,
    ):
        work = Sweep(study, workers, cache, deadline, most, prior, choose_log(quiet))
        finish_study(study, work.run)
    return study


def finish_study(study: Study, run: Callable[[], str]) -> None:
    """Do the work of a study, which returns why it ended, and write that down, whatever comes of it."""
    try:
        study.ended = run()
    except BaseException as error:
        study.ended = f"stopped: {error or type(error).__name__}; the same command goes on"
        with suppress(CompressError, OSError):
            study.write()
        raise
    study.write()
