"""Choose the next points of a study, by Optuna's TPE fed with the records of its trials.

TPE ("Algorithms for Hyper-Parameter Optimization", 2011; several goals: Ozaki et al. 2022) stands for NSGA-II, too: it
learns from every record, whoever made it, where a genetic algorithm needs whole generations of its own; and a study
here has tens of trials, not thousands.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from compress.recipe.points import Point, SearchSpace, SpaceDimension
from compress.search.outcome import scores, total_miss
from compress.search.trials import UNKNOWN, Run, Trial, same_point
from runtime.errors import MissingDependency

if TYPE_CHECKING:
    import optuna

MOST_LISTED = 10_000
"""Points of a finite space that are listed to find those that were not tried."""


def choose_points(space: SearchSpace, trials: Sequence[Trial], n: int, first: Sequence[Point] = ()) -> list[Point]:
    """Return `n` further points, fewer where the space has no more: none that was tried, and none twice.

    They follow from the recipe's seed and from the trials alone. `first`: those to try before any that is drawn, some
    of their values at least; then comes what stands in the recipe. Raises MissingDependency without optuna, RecipeError
    for a value in `first` that is not of the space.
    """
    tried = {same_point(trial.point) for trial in trials}
    chosen: list[Point] = []
    for point in [*map(space.start, first), space.start()]:
        if len(chosen) < n and same_point(point) not in tried:
            tried.add(same_point(point))
            chosen.append(point)
    study = _feed_study(space, [*trials, *(Trial(-1, -1, dict(point)) for point in chosen)])
    while len(chosen) < n:
        drawn = _draw_new(study, space, tried) or _find_untried(space, tried, len(trials) + len(chosen))
        if drawn is None:
            break
        tried.add(same_point(drawn))
        chosen.append(drawn)
    return chosen


def _draw_new(study: optuna.Study, space: SearchSpace, tried: set[str]) -> Point | None:
    # draws of what was tried, before one is taken from the list of what was not
    for _ in range(30):
        asked = study.ask()
        point: dict[str, Any] = {}
        for dimension in space.dimensions:
            if dimension.is_active(point):
                point[dimension.key] = _draw(asked, dimension)
        if same_point(point) not in tried:
            return point
    return None


def _find_untried(space: SearchSpace, tried: set[str], seed: int) -> Point | None:
    """Return a point of a finite space that was not tried; None where there is none, or the space is too large."""
    listed = list(islice(list_points(space), MOST_LISTED))
    left = [point for point in listed if same_point(point) not in tried]
    return random.Random(space.recipe.seed + seed).choice(left) if left else None


def list_points(space: SearchSpace, chosen: Mapping[str, Any] | None = None) -> Iterator[Point]:
    """Yield the points of a space in which every place has finitely many values, not too many; else none."""
    point = dict(chosen or {})
    rest = [d for d in space.dimensions if d.is_active(point) and d.key not in point]
    if not rest:
        yield point
    elif rest[0].n_values <= MOST_LISTED:
        for value in rest[0].list_values():
            yield from list_points(space, {**point, rest[0].key: value})


def _feed_study(space: SearchSpace, trials: Sequence[Trial]) -> optuna.Study:
    """Return a study in memory that knows the trials; those without a run are taken to be under way."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "IProgress not found")  # of bars in notebooks, which nothing here draws
            import optuna
    except ImportError as error:
        raise MissingDependency("optuna", "searching a recipe's space") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # multivariate and group are called experimental
        sampler = optuna.samplers.TPESampler(
            seed=space.recipe.seed + 1_000_003 * len(trials),
            n_startup_trials=8,
            multivariate=True,
            group=True,
            constant_liar=True,
        )
    study = optuna.create_study(directions=["minimize"] * len(space.search.goals), sampler=sampler)
    judged = [run for trial in trials if (run := trial.last) is not None and run.state == "judged"]
    worst = [max(column) for column in zip(*(scores(run, space.search) for run in judged), strict=True)]
    for trial in trials:
        study.add_trial(_freeze(space, trial, worst))
    return study


def _freeze(space: SearchSpace, trial: Trial, worst: Sequence[float]) -> optuna.trial.FrozenTrial:
    """Return a trial as Optuna has it. One without a result counts as the worst in all goals, far from its gates."""
    import optuna

    active = [dimension for dimension in space.dimensions if dimension.key in trial.point]
    distributions = {dimension.key: _distribution(dimension) for dimension in active}
    params = {dimension.key: _encode(dimension, trial.point[dimension.key]) for dimension in active}
    run = trial.last
    if run is None or (run.state != "judged" and not worst):
        state = optuna.trial.TrialState.RUNNING if run is None else optuna.trial.TrialState.FAIL
        return optuna.trial.create_trial(state=state, params=params, distributions=distributions)
    values, miss = _score(run, space, worst)
    return optuna.trial.create_trial(
        values=values, params=params, distributions=distributions, constraints={"gates": miss}
    )


def _score(run: Run, space: SearchSpace, worst: Sequence[float]) -> tuple[list[float], float]:
    if run.state == "judged":
        return list(scores(run, space.search)), total_miss(run)
    return list(worst), UNKNOWN


def _distribution(dimension: SpaceDimension) -> optuna.distributions.BaseDistribution:
    """Return what Optuna draws from: the number of a choice's label, or a number of a range."""
    import optuna

    if dimension.space.range is None:
        return optuna.distributions.CategoricalDistribution(tuple(range(len(dimension.labels))))
    (low, high), log, step = dimension.ends, dimension.space.log, dimension.step
    if dimension.whole:
        return optuna.distributions.IntDistribution(int(low), int(high), log, int(step or 1))
    return optuna.distributions.FloatDistribution(low, high, log, step)


def _draw(asked: optuna.Trial, dimension: SpaceDimension) -> Any:
    """Return a value that Optuna draws, as a point has it."""
    if dimension.space.range is None:
        return dimension.labels[asked.suggest_categorical(dimension.key, range(len(dimension.labels)))]
    (low, high), log, step = dimension.ends, dimension.space.log, dimension.step
    if dimension.whole:
        return asked.suggest_int(dimension.key, int(low), int(high), step=int(step or 1), log=log)
    return dimension.snap(asked.suggest_float(dimension.key, low, high, step=step, log=log))


def _encode(dimension: SpaceDimension, value: Any) -> Any:
    """Return what would have been drawn for a point's value."""
    return dimension.labels.index(value) if dimension.space.range is None else value
