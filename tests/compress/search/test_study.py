"""A study with pretended work: what is recorded, kept, removed, raced, continued; and what is said of its end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from studies import PretendedWorkers, make_report, pretend, searched

from compress.errors import PlaceError
from compress.search.study import Study, read_study
from compress.search.sweep import Prior, sweep
from compress.search.workers import TrialAnswer

pytest.importorskip("optuna")


def by_ratio(recipe: Mapping[str, Any], share: float) -> dict[str, Any]:
    """More pruned is smaller and worse; a gate is missed beyond a ratio of 0.4."""
    ratio = recipe["passes"][0]["ratio"]
    return make_report(1 + 5 * ratio, max(ratio - 0.35, 0), latency_p50=1 + ratio)


def smaller_is_worse(recipe: Mapping[str, Any], share: float) -> dict[str, Any]:
    ratio = recipe["passes"][0]["ratio"]
    return make_report(1 + ratio, ratio, limit=1)


def test_best_bundle_recipe_and_front_lie_in_the_folder_and_dominated_bundles_go(tmp_path: Path) -> None:
    with pretend(PretendedWorkers(by_ratio)):
        study = sweep(searched(tmp_path), tmp_path / "study", quiet=True)
    ratios = {t.number: t.point["passes.0.ratio"] for t in study.trials}
    best = max((r, -n) for n, r in ratios.items() if r <= 0.4)
    assert study.best is not None
    assert study.best.number == -best[1]
    assert study.ended == "6 trials were tried"
    assert [path.name for path in (tmp_path / "study/bundles").iterdir()] == [f"{study.best.number:04d}"]
    assert (tmp_path / "study/best/report").is_file()
    assert len(list((tmp_path / "study/reports").iterdir())) == 6
    written = json.loads((tmp_path / "study/study.json").read_text())
    assert (written["best"], written["front"]) == (study.best.number, [study.best.number])
    recipe = (tmp_path / "study/recipe.yaml").read_text()
    assert f"ratio: {best[0]}" in recipe
    assert "search:" not in recipe


def test_of_two_goals_the_front_stays(tmp_path: Path) -> None:
    goals = ["minimize size", "maximize top1"]
    with pretend(PretendedWorkers(smaller_is_worse)):
        study = sweep(searched(tmp_path, goals=goals), tmp_path / "study", quiet=True)
    assert len(study.front) == 6  # what is smaller is worse
    assert len(list((tmp_path / "study/bundles").iterdir())) == 6
    frontier = study.frontier
    assert frontier is not None and frontier.y_label == "top1, to maximize"
    assert [point.chosen for point in frontier.trials].count(True) == 1
    assert all(point.on_front and "passes.0.ratio" in point.about for point in frontier.trials)
    drawn = study._repr_html_()
    for trial in study.trials:  # at once in both widths, and in the table
        shown = f'aria-label="trial {trial.number}, {"chosen" if trial == study.best else "on the front"}\nsize '
        assert drawn.count(shown) == 2 and f"passes.0.ratio={trial.point['passes.0.ratio']}" in drawn
    assert "<script" not in drawn and "(best)" in drawn


def test_one_goal_has_no_front_to_draw(tmp_path: Path) -> None:
    with pretend(PretendedWorkers(smaller_is_worse)):
        assert sweep(searched(tmp_path), tmp_path / "study", quiet=True).frontier is None


def test_a_killed_study_goes_on_and_tries_nothing_twice(tmp_path: Path) -> None:
    whole = PretendedWorkers(by_ratio)
    with pretend(whole):
        sweep(searched(tmp_path), tmp_path / "whole", quiet=True)
    done: list[Any] = []
    for killed_after in (3, 4, 1, float("inf")):
        workers = PretendedWorkers(by_ratio, after=killed_after)
        with pretend(workers):
            try:
                study = sweep(searched(tmp_path), tmp_path / "study", quiet=True)
            except KeyboardInterrupt:
                stopped = json.loads((tmp_path / "study/study.json").read_text())["ended"]
                assert "the same command goes on" in stopped
                placed = tmp_path / "study/bundles/0005"  # by a run that was killed before the record
                placed.mkdir()
                (placed / "report").write_text("{}")
        done += workers.done
    judged = [name for what, name, _ in done if what == "judge"]
    assert sorted(judged) == sorted(set(judged)) == [f"{n:04d}" for n in range(6)]
    other = read_study(tmp_path / "whole")
    assert [t.point for t in study.trials] == [t.point for t in other.trials]
    assert study.best is not None
    assert other.best is not None
    assert study.best.number == other.best.number


def test_a_batch_that_was_not_written_whole_is_chosen_again(tmp_path: Path) -> None:
    with pretend(PretendedWorkers(by_ratio, after=0)), pytest.raises(KeyboardInterrupt):
        sweep(searched(tmp_path), tmp_path / "study", quiet=True)
    before = read_study(tmp_path / "study").trials
    (tmp_path / "study/trials/0001.json").unlink()
    with pretend(PretendedWorkers(by_ratio)):
        study = sweep(searched(tmp_path), tmp_path / "study", quiet=True)
    assert [t.point for t in study.trials[:2]] == [t.point for t in before]
    assert [t.number for t in study.trials] == list(range(6))


def test_points_do_not_depend_on_how_many_are_built_at_once(tmp_path: Path) -> None:
    studies: list[Study] = []
    for n in (1, 3):
        with pretend(PretendedWorkers(by_ratio, n)):
            studies.append(sweep(searched(tmp_path, batch=3), tmp_path / f"by{n}", quiet=True))
    assert [t.point for t in studies[0].trials] == [t.point for t in studies[1].trials]


def test_what_times_something_is_built_alone_and_what_comes_before_it_at_once(tmp_path: Path) -> None:
    free, timed = PretendedWorkers(by_ratio, 3), PretendedWorkers(by_ratio, 3)
    with pretend(free):
        sweep(searched(tmp_path, batch=3, trials=3), tmp_path / "free", quiet=True)
    passes = {"passes": [{"kind": "prune_channels"}, {"kind": "int8", "placement": "fastest"}]}
    with pretend(timed):
        sweep(searched(tmp_path, passes, batch=3, trials=3), tmp_path / "timed", quiet=True)
    assert free.waves == [("build", 3)]
    assert timed.waves == [("start", 3), *[("build", 1)] * 3]


def test_a_failed_and_a_refused_trial_are_recorded_with_their_reasons(tmp_path: Path) -> None:
    answers = [TrialAnswer("failed", "it broke"), TrialAnswer("refused", "it cannot work")]

    def answer(recipe: Mapping[str, Any], share: float) -> Any:
        return answers.pop() if answers else by_ratio(recipe, share)

    with pretend(PretendedWorkers(answer)):
        study = sweep(searched(tmp_path), tmp_path / "study", quiet=True)
    states = [(t.last.state, t.last.reason) for t in study.trials if t.last]
    assert states[:2] == [("refused", "it cannot work"), ("failed", "it broke")]
    assert len(states) == 7  # the refused one cost no work, and does not count
    assert study.best is not None


def test_where_no_gate_holds_the_nearest_is_kept_and_said_to_be_no_more(tmp_path: Path) -> None:
    with pretend(PretendedWorkers(lambda recipe, share: make_report(2, recipe["passes"][0]["ratio"]))):
        study = sweep(searched(tmp_path), tmp_path / "study", quiet=True)
    nearest = min(study.trials, key=lambda t: t.point["passes.0.ratio"])
    assert (study.best, study.exit_code) == (None, 3)
    assert study.nearest == nearest
    assert (tmp_path / "study/best").resolve().name == f"{nearest.number:04d}"


RACING = {"rungs": 3, "factor": 2}


def test_of_a_race_one_comes_to_the_end_and_only_there_is_a_verdict(tmp_path: Path) -> None:
    workers = PretendedWorkers(by_ratio)
    with pretend(workers):
        study = sweep(searched(tmp_path, racing=RACING, trials=4), tmp_path / "study", quiet=True)
    shares = [share for what, _, share in workers.done if what == "build"]
    assert shares == [0.25] * 4 + [0.5] * 2 + [1.0]
    raced = sorted(study.trials, key=lambda t: (t.point["passes.0.ratio"] > 0.4, -t.point["passes.0.ratio"]))
    assert study.best == raced[0]  # gates first, then the goal
    assert [run.verdict for run in raced[0].runs] == ["", "", "pass"]


def test_in_the_place_of_one_that_fails_in_full_the_next_best_goes_on(tmp_path: Path) -> None:
    broken: list[float] = []

    def fails_once(recipe: Mapping[str, Any], share: float) -> Any:
        if share == 1 and not broken:
            broken.append(share)
            return TrialAnswer("failed", "out of memory")
        return by_ratio(recipe, share)

    with pretend(PretendedWorkers(fails_once)):
        study = sweep(searched(tmp_path, racing=RACING, trials=4), tmp_path / "study", quiet=True)
    assert sum(t.full is not None for t in study.trials) == 1


def test_what_is_foreseen_to_miss_a_gate_by_far_costs_no_work(tmp_path: Path) -> None:
    prior = Prior(
        first=[{"passes.0.ratio": 0.59, "passes.1.calibration": "mse"}],
        foresee=lambda point: {("top1", "max_drop"): 0.5 if point["passes.0.ratio"] > 0.5 else 0.0},
    )
    workers = PretendedWorkers(by_ratio)
    with pretend(workers):
        study = sweep(searched(tmp_path), tmp_path / "study", quiet=True, prior=prior)
    assert study.trials[0].is_refused
    assert "top1 is foreseen to be 0.5, far from max_drop 0.05" in study.trials[0].runs[0].reason
    assert all(name != "0000" for _, name, _ in workers.done)


def test_a_budget_that_is_used_up_ends_the_study_and_another_call_goes_on(tmp_path: Path) -> None:
    with pretend(PretendedWorkers(by_ratio)):
        study = sweep(searched(tmp_path), tmp_path / "study", quiet=True, budget_s=0)
        assert (study.trials, study.ended) == ([], "the budget is used up; the same command goes on")
        assert len(sweep(searched(tmp_path), tmp_path / "study", quiet=True, trials=3).trials) == 3


def test_a_space_that_is_used_up_ends_the_study(tmp_path: Path) -> None:
    space = {"passes.0.ratio": {"choice": [0.2, 0.3]}}
    with pretend(PretendedWorkers(by_ratio)):
        study = sweep(searched(tmp_path, space=space), tmp_path / "study", quiet=True)
    assert (len(study.trials), study.ended) == (2, "every point of the space was tried")


def test_a_study_in_which_all_fails_ends_with_the_reason(tmp_path: Path) -> None:
    with pretend(PretendedWorkers(lambda recipe, share: TrialAnswer("failed", "no such kernel"))):
        study = sweep(searched(tmp_path, trials=30), tmp_path / "study", quiet=True)
    assert len(study.trials) == 8
    assert "no such kernel" in study.ended


def test_a_study_of_another_recipe_and_a_folder_with_other_things_are_refused(tmp_path: Path) -> None:
    with pretend(PretendedWorkers(by_ratio)):
        sweep(searched(tmp_path, trials=1), tmp_path / "study", quiet=True)
        with pytest.raises(PlaceError, match="a study of another recipe"):
            sweep(searched(tmp_path, batch=5), tmp_path / "study", quiet=True)
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine/thesis.txt").write_text("x")
        with pytest.raises(PlaceError, match="holds other things than a study"):
            sweep(searched(tmp_path), tmp_path / "mine", quiet=True)
