"""A study's trials as the page of its best bundle draws them."""

from __future__ import annotations

from compress.pages.frontier import Frontier
from compress.pages.frontier import Trial as Point
from compress.recipe.points import format_point
from compress.search.study import Study
from runtime.metrics import MEASURED


def find_frontier(study: Study) -> Frontier | None:
    """Return the trials that were judged in full by the study's first two goals; None with fewer goals or trials."""
    goals = [metric for _, metric in study.search.split_goals()]
    judged = [(trial, trial.full) for trial in study.trials if trial.full is not None]
    if len(goals) < 2 or not judged:
        return None
    front, chosen = {trial.number for trial in study.front}, study.nearest
    points = tuple(
        Point(
            f"trial {trial.number}",
            run.goals[goals[0]].compared,
            run.goals[goals[1]].compared,
            on_front=trial.number in front,
            chosen=chosen is not None and trial.number == chosen.number,
            about=format_point(trial.point),
        )
        for trial, run in judged
    )
    labels = [f"{metric}, ratio to the float model" if metric in MEASURED else metric for metric in goals[:2]]
    return Frontier(labels[0], labels[1], points, (study.format_counts(),))
