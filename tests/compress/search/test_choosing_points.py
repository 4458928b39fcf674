"""Which points a study tries next: they follow from its records, none comes twice, and they learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from studies import searched_space, write_searched

from compress.errors import RecipeError
from compress.recipe.load import load_recipe
from compress.recipe.points import open_space
from compress.search.sampler import choose_points, list_points
from compress.search.trials import GateMiss, GoalValue, Run, Trial, same_point

pytest.importorskip("optuna")
RANGE = {"passes.0.ratio": {"range": [0.1, 0.6]}}


def judged(number: int, point: Any, size: float, short: float = 0.0) -> Trial:
    gates = (GateMiss("top1", "max_drop 0.05", "pass", short == 0, "", short, short),)
    verdict = "fail" if short else "pass"
    run = Run(0, 1.0, "judged", verdict=verdict, goals={"size": GoalValue(1000 / size, size)}, gates=gates)
    return Trial(number, 0, dict(point), (run,))


def test_the_same_records_give_the_same_points_and_another_seed_others(tmp_path: Path) -> None:
    space = searched_space(tmp_path, space=RANGE)
    trials = [judged(i, point, 2.0) for i, point in enumerate(choose_points(space, [], 3))]
    assert choose_points(space, trials, 3) == choose_points(space, trials, 3)
    other = open_space(load_recipe(write_searched(tmp_path, {"seed": 5}, space=RANGE)))
    assert choose_points(other, trials, 3) != choose_points(space, trials, 3)


def test_what_is_given_first_comes_first_then_what_stands_in_the_recipe(tmp_path: Path) -> None:
    space = searched_space(tmp_path)
    first = {"passes.0.ratio": 0.2, "passes.1.calibration": "minmax"}
    assert choose_points(space, [], 3, [first])[:2] == [first, space.start()]


def test_a_point_given_first_may_say_part_of_it_and_nothing_that_is_not_of_the_space(tmp_path: Path) -> None:
    space = searched_space(tmp_path)
    assert choose_points(space, [], 1, [{"passes.1.calibration": "minmax"}]) == [
        {"passes.0.ratio": 0.35, "passes.1.calibration": "minmax"}
    ]
    with pytest.raises(RecipeError, match=r"passes\.0\.ratio: 0\.9 is not in its space"):
        choose_points(space, [], 1, [{"passes.0.ratio": 0.9}])
    with pytest.raises(RecipeError, match=r"is called passes\.0\.ratoi"):
        choose_points(space, [], 1, [{"passes.0.ratoi": 0.3}])


def test_a_finite_space_is_tried_to_its_end_without_a_repeat(tmp_path: Path) -> None:
    spaces = {
        "passes.0.ratio": {"range": [0.1, 0.5], "step": 0.2},
        "passes.1.calibration": {"choice": ["mse", "minmax"]},
    }
    space = searched_space(tmp_path, space=spaces)
    trials: list[Trial] = []
    while points := choose_points(space, trials, 4):
        trials += [judged(len(trials) + i, point, 2.0) for i, point in enumerate(points)]
    tried = [same_point(trial.point) for trial in trials]
    assert len(tried) == 6
    assert set(tried) == {same_point(point) for point in list_points(space)}


def test_points_gather_where_the_goal_is_good_and_gates_hold(tmp_path: Path) -> None:
    """Size grows with the ratio, and beyond 0.4 a gate is missed: the best is just below."""
    space = searched_space(tmp_path, space=RANGE)
    trials: list[Trial] = []
    for _ in range(8):
        for point in choose_points(space, trials, 4):
            ratio = point["passes.0.ratio"]
            trials.append(judged(len(trials), point, 1 + 5 * ratio, max(ratio - 0.4, 0) * 10))
    late = [trial.point["passes.0.ratio"] for trial in trials[16:]]
    assert sum(0.3 < ratio <= 0.42 for ratio in late) >= len(late) / 2  # by chance a quarter


def test_whole_numbers_logarithms_and_failed_trials(tmp_path: Path) -> None:
    spaces = {"passes.0.ratio": {"choice": [0.3]}, "validate.batch_size": {"range": [1, 64], "log": True}}
    space = searched_space(tmp_path, space=spaces)
    points = choose_points(space, [], 6)
    assert all(isinstance(point["validate.batch_size"], int) for point in points)
    failed = [Trial(i, 0, dict(point), (Run(0, 1.0, "failed", "boom"),)) for i, point in enumerate(points)]
    assert choose_points(space, [*failed, judged(9, points[0] | {"validate.batch_size": 64}, 2.0)], 2)
