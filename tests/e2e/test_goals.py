"""A recipe that says a goal: formats, a race of structures and the winner's training are trials of one study."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from makers import changed, image_recipe, write_recipe
from studies import pretend
from typer.testing import CliRunner, Result

from compress.cli import app
from compress.errors import PlaceError, PlanError
from compress.execution.run import apply_recipe
from compress.recipe.load import load_recipe
from compress.recipe.schema import Recipe
from compress.search.pursue import pursue
from compress.search.study import Study
from compress.search.workers import InThisProcess


def asked(folder: Path, goal: str, **parts: Any) -> Recipe:
    recipe = changed(image_recipe(folder), goal=goal, passes=[], **parts)
    recipe["data"]["train"] = {"source": "npz:train.npz"}
    recipe["validate"]["gates"] = []
    return load_recipe(write_recipe(folder / "recipe.yaml", recipe))


def reach(recipe: Recipe, folder: Path, budget_s: float = 600.0) -> Study:
    return pursue(recipe, folder / "study", folder / "cache", budget_s=budget_s, jobs=0, quiet=True)


def list_kinds(study: Study, name: str) -> list[str]:
    return [given["kind"] for given in study.space.search.space["passes"].options[name]]


@pytest.mark.slow
def test_a_format_that_reaches_the_goal_alone_is_all_that_is_tried(tmp_path: Path) -> None:
    study = reach(asked(tmp_path, "size >= 1.1x, agreement >= 0.2"), tmp_path)
    assert study.ended == "the goal is reached"
    assert study.exit_code == 0
    assert [trial.point for trial in study.trials] == [{"passes": "w8"}]  # the most bits of those that reach it
    found = load_recipe(tmp_path / "study/recipe.yaml")
    assert [pass_.kind for pass_ in found.passes] == ["gptq"]
    assert {gate.metric for gate in found.validate_.gates} == {"size_ratio", "agreement"}


@pytest.mark.slow
def test_what_formats_lack_is_cut_raced_and_trained_over_a_kill_and_made_again_without_searching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, few in (("chains.MOST_EPOCHS", 2.0), ("pursue.MOST_FITTINGS", 1)):
        monkeypatch.setattr(f"compress.search.{name}", few)
    recipe, begun = asked(tmp_path, "size >= 6.5x, agreement >= 0.05"), list[str]()

    class DyingAtTheThird(InThisProcess):
        def build(self, orders: Any, deadline: Any) -> Any:
            begun.append(Path(orders[0].out).name)
            if begun[-1] == "0002" and begun.count("0002") == 1:
                raise KeyboardInterrupt
            return super().build(orders, deadline)

    with pretend(DyingAtTheThird(), "pursue"):
        with pytest.raises(KeyboardInterrupt):
            reach(recipe, tmp_path)
        kept = json.loads((tmp_path / "study/study.json").read_text())
        assert kept["ended"].startswith("stopped") and len([t for t in kept["trials"] if t["runs"]]) == 2
        study = reach(recipe, tmp_path)
    assert study.ended == "the goal is reached"
    assert begun == ["0000", "0001", "0002", "0002"]  # a format, a fitting, the training; one alone runs no race
    best = study.best
    assert best is not None and best.point["passes"].endswith("-trained")
    assert [run.share < 1 for trial in study.trials for run in trial.runs] == [False, True, False]
    assert list_kinds(study, best.point["passes"])[:2] == ["prune_channels", "distill"]
    trained = load_recipe(tmp_path / "study/recipe.yaml").passes[1]
    settled = [getattr(trained, name) for name in ("learning_rate", "optimizer", "precision", "augment", "ema_decay")]
    assert "auto" not in settled and trained.model_dump()["max_seconds"] is None
    again = apply_recipe(load_recipe(tmp_path / "study/recipe.yaml"), tmp_path / "again", tmp_path / "other", True)
    assert again is not None and again.verdict == "pass"


@pytest.mark.parametrize(
    ("goal", "rule"),
    [
        (
            "size >= 900x",
            r"size >= 900x is out of reach: the least that passes leave of the weights is [\d.]+x \(prune",
        ),
        ("size <= 100B", r"size <= 100 bytes is out of reach: the least .* is \d+ bytes"),
    ],
)
def test_a_goal_out_of_reach_is_refused_before_any_work_with_the_nearest_that_is(
    tmp_path: Path, goal: str, rule: str
) -> None:
    with pytest.raises(PlanError, match=rule):
        reach(asked(tmp_path, goal), tmp_path)
    assert not (tmp_path / "study").exists()


def test_a_speed_that_no_structure_has_is_refused_and_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.search.foresight.explain_untimed", lambda recipe, layers: "")  # all is foreseen at 1x
    with pytest.raises(PlanError, match=r"900x as fast is out of reach: the smallest structure .* is 1x"):
        reach(asked(tmp_path, "latency_p50 >= 900x"), tmp_path)
    assert not (tmp_path / "study").exists()


@pytest.mark.slow
def test_a_quality_that_the_float_model_has_not_is_said_after_the_first_judgement(tmp_path: Path) -> None:
    recipe = asked(tmp_path, "size >= 6.5x, ece <= 0.0000001")
    study = reach(recipe, tmp_path)
    assert "out of reach: the float model itself has" in study.ended
    assert len(study.trials) == 1


def test_a_model_data_and_a_goal_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`new` writes the goal's recipe, `auto` pursues it; what is missing is said by its flag."""
    image_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPRESS_CACHE", str(tmp_path / "cache"))

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, arguments)

    model = ["net.py:make", "--weights", "net.safetensors", "--preprocess", "{kind: image, channels: L}"]
    given = [*model, "--task", "image-classification", "--train", "train.npz", "--evaluation", "test.npz"]
    goal = "size >= 1.1x, top1 drop <= 0.9"
    written = run("new", "--model", *given, "--goal", goal, "--out", "goal.yaml")
    assert written.exit_code == 0, written.stderr
    assert load_recipe(tmp_path / "goal.yaml").goal == ("size >= 1.1x", "top1 drop <= 0.9")
    with pretend(InThisProcess(), "pursue"):
        done = run("auto", *given, "--goal", goal, "--out", "study")
    assert done.exit_code == 0, done.stderr
    assert "the goal is reached" in done.stdout
    assert load_recipe(tmp_path / "study/recipe.yaml").passes
    refused = run("auto", *model, "--goal", "small", "--out", "other")
    assert refused.exit_code == 2 and "--goal: 'small' is no goal; write a metric" in refused.stderr
    counted = run("sweep", "goal.yaml", "--out", "other", "--trials", "3")
    assert counted.exit_code == 2 and "--trials: it is not known how many a goal takes" in counted.stderr
    assert not (tmp_path / "other").exists()


def test_apply_leaves_a_goal_without_passes_to_sweep(tmp_path: Path) -> None:
    recipe = asked(tmp_path, "size >= 2x")
    with pytest.raises(PlanError, match="the passes that reach it are yet to be found: `compress sweep"):
        apply_recipe(recipe, tmp_path / "out", tmp_path / "cache", quiet=True)


def test_a_study_of_another_goal_is_not_gone_on_with(tmp_path: Path) -> None:
    recipe = asked(tmp_path, "size >= 2x")
    (tmp_path / "study").mkdir()
    (tmp_path / "study/goal.yaml").write_text("another")
    with pytest.raises(PlaceError, match="a study of another recipe"):
        reach(recipe, tmp_path)
