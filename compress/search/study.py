"""A study on disk: its trials, the front, the best bundle and the recipe that makes it without searching.

    study.json        the summary: goals, front, best, every trial's outcome
    goal.yaml         of a study of a goal: the recipe that says it
    search.yaml       the recipe that is searched; of a goal's study it grows
    recipe.yaml       the explicit recipe of the best trial so far
    best              a link to its bundle
    bundles/0007/     the bundles of the front; those of other trials are removed
    recipes/0007.yaml, reports/0007.json, trials/0007.json   of every trial; of a rung before the last 0007.0.json

Each file is written whole or not at all, and a trial counts once its record stands: a study that is killed anywhere
goes on from its records.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from html import escape as html_escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compress.errors import OutputError, PlaceError, PlanError
from compress.recipe.load import load_recipe
from compress.recipe.pinned import pin_recipe
from compress.recipe.points import SearchSpace, format_point, open_space
from compress.recipe.repeat import repeat_training
from compress.recipe.schema import Recipe
from compress.recipe.search import Search
from compress.search.outcome import find_best, find_front, find_nearest, rank
from compress.search.trials import GoalValue, Run, Trial, read_trials, write_json, write_trial
from compress.store.durable import blame, lock
from runtime.bundle.files import write_whole
from runtime.bundle.records import to_json
from runtime.metrics import MEASURED
from runtime.report.report import Report, finite
from runtime.report.stored import read_report

if TYPE_CHECKING:
    from compress.pages.frontier import Frontier
    from compress.pages.frontier import PlottedTrial as Point

FORMAT_VERSION = 1
SUMMARY, SEARCHED, FOUND, BEST, LOG, LOCK = "study.json", "search.yaml", "recipe.yaml", "best", "workers.log", "lock"
ASKED = "goal.yaml"
BUNDLES, RECIPES, REPORTS, TRIALS, WORK = "bundles", "recipes", "reports", "trials", "work"
MOST_ROWS = 12
STOPS = re.compile(r"^  trials: \d+$", re.MULTILINE)
"""What may differ between two calls that go on with one study."""


@dataclass
class Study:
    """The trials of a searched recipe, and what is best of them so far; draws itself in a notebook.

    `folder`: where all of it is on disk. `ended`: why no further trial is begun; "" while it works.
    """

    folder: Path
    space: SearchSpace
    trials: list[Trial] = field(default_factory=list)
    ended: str = ""
    judged_on: str = ""

    @property
    def search(self) -> Search:
        return self.space.search

    @property
    def front(self) -> list[Trial]:
        """Return the trials that hold all gates and that no other one is better than in all goals."""
        return find_front(self.trials, self.search)

    @property
    def best(self) -> Trial | None:
        """Return the best of the front over all goals together; None while no trial's gates hold."""
        return find_best(self.trials, self.search)

    @property
    def nearest(self) -> Trial | None:
        """Return the best trial, or while no trial's gates hold the one that misses them least."""
        return self.best or find_nearest(self.trials, self.search)

    @property
    def bundle(self) -> Path | None:
        """Return the bundle of the best trial, or of the nearest; None while there is none."""
        return None if self.nearest is None else self.folder / BUNDLES / name_trial(self.nearest)

    @property
    def frontier(self) -> Frontier | None:
        """Return the trials judged in full by the first two goals, as a chart; None with fewer goals or trials."""
        from compress.pages.frontier import Frontier

        goals = self.search.split_goals()[:2]
        judged = [(trial, trial.full) for trial in self.trials if trial.full is not None]
        if len(goals) < 2 or not judged:
            return None
        points = place_trials(judged, [trial.number for trial in self.front], self.nearest, self.search)
        x_label, y_label = (_label_goal(*goal) for goal in goals)
        return Frontier(x_label, y_label, points, (self.format_counts(),))

    @property
    def exit_code(self) -> int:
        """Return 0 if a trial holds all gates, 3 if none does."""
        return 0 if self.best is not None else 3

    def to_dict(self) -> dict[str, Any]:
        """Return the study as JSON values, which study.json has."""
        numbers = {trial.number for trial in self.front}
        best, nearest = self.best, self.nearest
        return {
            "format_version": FORMAT_VERSION,
            "name": self.space.recipe.name,
            "goals": [
                {"direction": direction, "metric": metric, "as_ratio": metric in MEASURED}
                for direction, metric in self.search.split_goals()
            ],
            "space": {each.key: to_json(each.space.model_dump(mode="json")) for each in self.space.dimensions},
            "gates": [to_json(gate) for gate in self.space.recipe_at(self.space.start()).validate_.gates],
            "seed": self.space.recipe.seed,
            "target": self.space.recipe.target,
            "judged_on": self.judged_on,
            "ended": self.ended,
            "best": None if best is None else best.number,
            "nearest": None if nearest is None else nearest.number,
            "front": sorted(numbers),
            "trials": [finite({**to_json(trial), "on_front": trial.number in numbers}) for trial in self.trials],
        }

    def find(self, number: int) -> Trial:
        """Return the trial of that number as it is now."""
        return next(trial for trial in self.trials if trial.number == number)

    def open_trial(self, point: Mapping[str, Any]) -> Trial:
        """Return the trial of a point, written down as a batch of its own where it is new."""
        trial = next((trial for trial in self.trials if trial.point == point), None)
        if trial is None:
            number = max((trial.number for trial in self.trials), default=-1) + 1
            trial = Trial(number, number, dict(point))
            self.record(trial)
        return trial

    def read_report(self, trial: Trial) -> Report:
        """Return the report of a trial that was judged in full. Raises UsageError where there is none."""
        return read_report(self.folder / REPORTS / f"{name_trial(trial)}.json")

    def record(self, trial: Trial) -> None:
        """Write a trial's record, then what follows from it; bundles that nothing refers to any more go last."""
        with blame(self.folder):
            write_trial(self.folder / TRIALS, trial)
            known = [i for i, other in enumerate(self.trials) if other.number == trial.number]
            if known:
                self.trials[known[0]] = trial
            else:
                self.trials.append(trial)
            self.write()

    def write(self) -> None:
        """Write the summary, the best recipe and the link to the best bundle; remove the bundles of other trials."""
        write_json(self.folder / SUMMARY, self.to_dict())
        nearest = self.nearest
        if nearest is not None:
            write_whole(self.folder / FOUND, self._describe_found(nearest))
            self._link_best(nearest)
        self.keep_bundles([*self.front, *([nearest] if nearest else [])])

    def keep_bundles(self, trials: Iterable[Trial]) -> None:
        """Remove the bundles of all other trials, and what a killed run placed without a record."""
        kept = {name_trial(trial) for trial in trials}
        for bundle in (self.folder / BUNDLES).glob("[0-9]*"):
            if bundle.name not in kept:
                shutil.rmtree(bundle, ignore_errors=True)

    def _describe_found(self, trial: Trial) -> bytes:
        """Return the recipe of a trial, with what its bundle says that training found out by itself."""
        file = self.folder / RECIPES / f"{name_trial(trial)}.yaml"
        lock = self.folder / BUNDLES / name_trial(trial) / "lock.json"
        settled = json.loads(lock.read_bytes()).get("training", {}) if lock.exists() else {}
        return pin_recipe(repeat_training(load_recipe(file), settled)).encode() if settled else file.read_bytes()

    def extend(self, space: SearchSpace) -> None:
        """Search in a space that has all points of the one before."""
        with blame(self.folder):
            write_whole(self.folder / SEARCHED, pin_recipe(space.recipe).encode())
        self.space = space

    def _link_best(self, trial: Trial) -> None:
        link, draft, target = self.folder / BEST, self.folder / f".{BEST}", f"{BUNDLES}/{name_trial(trial)}"
        if link.is_symlink() and os.readlink(link) == target:
            return
        with suppress(FileNotFoundError):
            draft.unlink()
        os.symlink(target, draft)
        os.replace(draft, link)

    def render(self, console: Console) -> None:
        """Print the front, or what came nearest, and where things lie (rich)."""
        table = Table(*self._heads(), title=f"{self.space.recipe.name}: {self.format_counts()}", title_justify="left")
        for row in self._rows():
            table.add_row(*map(escape, row))
        console.print(table)
        for text in self._sentences():
            console.print(text, markup=False, highlight=False)

    def __repr__(self) -> str:
        return f"<Study {self.folder}: {len(self.trials)} trials; bundle: {self.bundle}>"

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html_escape(text)}</th>" for text in self._heads())
        rows = "".join(f"<tr>{''.join(f'<td>{html_escape(c)}</td>' for c in row)}</tr>" for row in self._rows())
        said = "".join(f"<p>{html_escape(text)}</p>" for text in self._sentences())
        title = html_escape(f"{self.space.recipe.name}: {self.format_counts()}")
        chart = "" if (frontier := self.frontier) is None else frontier._repr_html_()
        return f"<div><p><b>{title}</b></p>{chart}<table><tr>{head}</tr>{rows}</table>{said}</div>"

    def _heads(self) -> tuple[str, ...]:
        return ("trial", *(metric for _, metric in self.search.split_goals()), "gates", "point")

    def _rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the best trials: the front from the best on, or what came nearest."""
        shown = rank(self.front or [t for t in self.trials if t.full], lambda trial: trial.full, self.search)
        best = self.best
        rows = []
        for trial in shown[:MOST_ROWS]:
            assert trial.full is not None
            mark = " (best)" if best is not None and trial.number == best.number else ""
            goals = [format_goal(trial.full.goals[metric]) for _, metric in self.search.split_goals()]
            point = format_point(trial.point).replace(", ", "\n")
            rows.append((f"{trial.number}{mark}", *goals, _format_gates(trial.full), point))
        return rows

    def format_counts(self) -> str:
        """Return how many trials there are, and what became of them."""
        states = [trial.last.state if trial.last else "waiting" for trial in self.trials]
        full = sum(trial.full is not None for trial in self.trials)
        parts = [f"{len(self.trials)} trials", f"{full} judged in full", f"{len(self.front)} on the front"]
        parts += [f"{states.count(state)} {state}" for state in ("refused", "failed", "waiting") if state in states]
        return ", ".join(parts)

    def _sentences(self) -> list[str]:
        said = [self.ended] if self.ended else []
        if self.nearest is None:
            reasons = [trial.last.reason for trial in self.trials if trial.last and trial.last.reason]
            return [*said, *(f"no trial was judged in full; the last reason: {reason}" for reason in reasons[-1:])]
        if self.best is None:
            said.append("no trial holds all gates; shown is what comes nearest")
        which = "best" if self.best is not None else "nearest"
        best, found = (shorten_path(self.folder / name) for name in (BEST, FOUND))
        said.append(f"the {which} bundle: {best}; its recipe, without a search: {found}")
        return said


def name_trial(trial: Trial) -> str:
    return f"{trial.number:04d}"


def shorten_path(path: Path) -> Path:
    """Return a path as it is typed here: relative to the working directory where it lies below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def place_trials(
    judged: Sequence[tuple[Trial, Run]], front: Sequence[int], chosen: Trial | None, search: Search
) -> tuple[Point, ...]:
    """Return trials that were judged in full as the chart of the front has them. `front`: numbers of those on it."""
    from compress.pages.frontier import PlottedTrial as Point

    metrics = [metric for _, metric in search.split_goals()]
    points = []
    for trial, run in judged:
        x, y = (run.goals[metric] for metric in metrics[:2])
        goals = [f"{metric} {format_goal(run.goals[metric])}" for metric in metrics]
        points.append(
            Point(
                f"trial {trial.number}",
                x.compared,
                y.compared,
                on_front=trial.number in front,
                chosen=chosen is not None and trial.number == chosen.number,
                about=format_point(trial.point),
                holds=run.holds,
                details=(*goals, f"gates: {_format_gates(run)}"),
                x_interval=x.interval,
                y_interval=y.interval,
            )
        )
    return tuple(points)


def _label_goal(direction: str, metric: str) -> str:
    """Return a goal as the label of an axis."""
    return f"{metric}, times better than float" if metric in MEASURED else f"{metric}, to {direction}"


def format_goal(goal: GoalValue) -> str:
    """Return a goal's value as text: a ratio with its interval, or the value with its own."""
    unit = "" if goal.ratio is None else "x"
    ends = "" if goal.low is None or goal.high is None else f" [{goal.low:.4g}, {goal.high:.4g}]"
    return f"{goal.compared:.4g}{unit}{ends}"


def _format_gates(run: Run) -> str:
    short = [gate for gate in run.gates if not gate.holds]
    return "all hold" if not short else "; ".join(f"{gate.metric} {gate.rule}: {gate.verdict}" for gate in short)


AnyStudy = TypeVar("AnyStudy", bound=Study)


@contextmanager
def open_study(
    kind: type[AnyStudy], folder: Path, space: SearchSpace, asked: Recipe | None = None
) -> Iterator[AnyStudy]:
    """Make the folder of a study, or go on with the one that is there; it is held while the context is open.

    `asked`: the recipe whose goal is sought; the space that has grown for it then takes the place of the one given.
    `kind`: the class of the study.

    What is refused before any trial (PlanError) leaves no folder behind that was not there.

    Raises PlaceError where another process works on it, it is of another recipe, or the folder holds something else.
    """
    folder = Path(folder).absolute()
    was_there, is_new = folder.exists(), not (folder / LOCK).exists()
    with blame(folder, PlaceError):
        _check_folder(folder)
        for name in (BUNDLES, RECIPES, REPORTS, TRIALS):
            (folder / name).mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            lock(handle)
        except BlockingIOError as error:
            raise PlaceError(
                f"{folder}: another process works on this study; wait for it, or choose another --out"
            ) from error
        _settle_recipe(folder, *((SEARCHED, space.recipe) if asked is None else (ASKED, asked)))
        if asked is not None and (folder / SEARCHED).exists():
            space = open_space(load_recipe(folder / SEARCHED))
        shutil.rmtree(folder / WORK, ignore_errors=True)  # what a killed run left
        (folder / WORK).mkdir()
        study = kind(folder, space, _forget_untried(folder / TRIALS))
        study.write()  # a killed run may have recorded a trial, or placed a bundle, and not what follows from it
        try:
            yield study
        except PlanError:
            if is_new and not study.trials:
                _take_away(folder, was_there)
            raise
        shutil.rmtree(folder / WORK, ignore_errors=True)
    finally:
        os.close(handle)


def _take_away(folder: Path, was_there: bool) -> None:
    """Remove what a study without a trial has put into its folder, and the folder, unless it was there before."""
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    if not was_there:
        folder.rmdir()


def _forget_untried(folder: Path) -> list[Trial]:
    """Return the recorded trials without the last batch if nothing of it was tried: it may not be whole."""
    trials = read_trials(folder)
    latest = max((trial.batch for trial in trials), default=-1)
    batch = [trial for trial in trials if trial.batch == latest]
    if any(trial.runs for trial in batch):
        return trials
    for trial in batch:
        (folder / f"{name_trial(trial)}.json").unlink()
    return [trial for trial in trials if trial.batch != latest]


def _check_folder(folder: Path) -> None:
    if folder.is_dir() and os.listdir(folder) and not any((folder / name).exists() for name in (SEARCHED, ASKED, LOCK)):
        raise PlaceError(f"{folder}: holds other things than a study; choose another --out or empty it")
    if folder.exists() and not folder.is_dir():
        raise PlaceError(f"{folder}: a file; --out names the study's folder")


def _settle_recipe(folder: Path, name: str, recipe: Recipe) -> None:
    """Write the recipe that is searched, or compare it with the one whose trials are there."""
    text, file = pin_recipe(recipe), folder / name
    if not file.exists() and not (folder / SEARCHED).exists():
        write_whole(file, text.encode())
    elif not file.exists() or STOPS.sub("", file.read_text()) != STOPS.sub("", text):
        raise PlaceError(
            f"{folder}: a study of another recipe, or of other values of it ({file} is what it searches); choose "
            "another --out, or give the recipe as it was"
        )


def read_study(folder: Path) -> Study:
    """Read a study from its folder, for a look at it. Raises OutputError where there is none."""
    file = folder / SEARCHED
    if not file.exists():
        raise OutputError(f"{folder}: no study lies there; `compress sweep RECIPE --out {folder}` makes one")
    return Study(folder, open_space(load_recipe(file)), read_trials(folder / TRIALS))


def find_due(batch: Sequence[Trial], search: Search) -> tuple[int, list[Trial]]:
    """Return the rung that a batch has come to, and its trials that are still to be tried there; [] where it is over.

    On each rung one of `factor` goes on. In the place of one that fails there the next best does.
    """
    n_rungs, factor = (1, 1) if search.racing is None else (search.racing.rungs, search.racing.factor)
    alive = list(batch)
    for rung in range(n_rungs):
        if waiting := [trial for trial in alive if trial.run_at(rung) is None]:
            return rung, waiting
        order = rank(alive, partial(Trial.run_at, rung=rung), search)
        fit = [trial for trial in order if (run := trial.run_at(rung + 1)) is None or run.state == "judged"]
        alive = fit[: math.ceil(len(alive) / factor)]
    return n_rungs - 1, []
