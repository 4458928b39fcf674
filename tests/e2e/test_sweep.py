"""`compress sweep` on a tiny model: cached results are shared, the best made again, processes may die, Ray agrees."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from makers import changed, cli, image_recipe, write_recipe

from compress.execution.run import apply_recipe
from compress.planning.make_plan import make_plan
from compress.recipe.load import load_recipe
from compress.search.study import WORK, read_study
from compress.search.sweep import Prior, Sweep, sweep
from compress.search.workers import start_workers
from runtime.tasks.manifest import read_manifest

pytest.importorskip("optuna")
NO_TIMING = {"COMPRESS_TIMING": "off"}


def searched(folder: Path, space: dict[str, Any], **search: Any) -> Path:
    """Write a model, its data and a recipe that prunes and quantizes it and is searched; return the recipe's file."""
    recipe = changed(
        image_recipe(folder),
        passes=[{"kind": "prune_channels", "ratio": 0.3}, {"kind": "int8"}],
        validate={"gates": [{"metric": "agreement", "min": 0.2}]},
        search={"space": space, "goals": ["minimize size"], "batch": 2, "trials": 6, **search},
    )
    return write_recipe(folder / "recipe.yaml", recipe)


CALIBRATIONS = {"passes.1.calibration": {"choice": ["mse", "minmax", "percentile"]}}
RATIOS = {"passes.0.ratio": {"choice": [0.3, 0.5]}}


@pytest.mark.slow
def test_a_first_pass_that_trials_share_is_done_once_and_the_best_is_made_again_without_a_search(
    tmp_path: Path,
) -> None:
    goals = ["minimize size", "maximize agreement", "minimize latency_p50", "minimize peak_memory"]
    path = searched(tmp_path, CALIBRATIONS, goals=goals, trials=2)
    recipe = load_recipe(path, ["validate.benchmark.processes=6"])  # goals of time need an interval
    study = sweep(recipe, tmp_path / "study", tmp_path / "cache", jobs=0, quiet=True)
    assert [run.state for trial in study.trials for run in trial.runs] == ["judged"] * 2
    assert ["prune_channels" in trial.runs[0].reused for trial in study.trials] == [False, True]
    assert study.bundle is not None
    apply_recipe(load_recipe(tmp_path / "study/recipe.yaml"), tmp_path / "again", tmp_path / "cache", quiet=True)
    assert read_manifest(tmp_path / "again").digest == read_manifest(tmp_path / "study/best").digest


@pytest.mark.slow
def test_what_is_run_first_is_there_when_the_whole_is_built(tmp_path: Path) -> None:
    recipe, cache = load_recipe(searched(tmp_path, RATIOS)).model_copy(update={"search": None}), tmp_path / "cache"
    (tmp_path / WORK).mkdir()
    with start_workers(held="", jobs=0, ray=None, log=tmp_path / "log") as workers:
        study: Any = SimpleNamespace(folder=tmp_path)
        Sweep(study, workers, cache, None, 1, Prior(), print).run_first(recipe, 1)
    assert not list((tmp_path / WORK).iterdir())
    cached = {step.name: step.cached for step in make_plan(recipe, cache, twins=False).steps}
    assert cached["prune_channels"] and not cached["int8"]


@pytest.mark.slow
def test_what_cannot_work_or_is_foreseen_to_be_too_large_costs_no_work(tmp_path: Path) -> None:
    file = searched(
        tmp_path,
        {"passes.1.ignore": {"choice": [[], ["no_such_layer"], ["fc1"]]}},
        constraints=[{"metric": "size_ratio", "min": 3}],
    )
    study = sweep(load_recipe(file), tmp_path / "study", tmp_path / "cache", jobs=0, quiet=True)
    reasons = {str(trial.point["passes.1.ignore"]): trial.runs[0].reason for trial in study.trials}
    assert "matches no layer" in reasons["['no_such_layer']"]
    assert "size_ratio is foreseen to be" in reasons["['fc1']"]
    assert [trial.is_refused for trial in study.trials].count(True) == 2


def test_a_rung_before_the_last_has_less_of_training_and_samples(tmp_path: Path) -> None:
    from compress.recipe.search import Racing
    from compress.search.trying import reduce_recipe

    image_recipe(tmp_path)
    passes = [{"kind": "distill", "epochs": 4, "max_seconds": 60}, {"kind": "qat", "steps": 90}, {"kind": "int8"}]
    data = {name: {"source": "npz:train.npz"} for name in ("calibration", "train", "evaluation")}
    recipe = load_recipe(write_recipe(tmp_path / "r.yaml", changed(image_recipe(tmp_path), passes=passes, data=data)))
    racing = Racing()
    less = reduce_recipe(recipe, racing, 1 / 3, {"evaluation": 300, "calibration": 64})
    first, second, third = (pass_.model_dump() for pass_ in less.passes)
    assert (first["epochs"], first["max_seconds"], second["steps"]) == (pytest.approx(4 / 3), 20, 30)
    assert third == recipe.passes[2].model_dump()
    assert less.data.declared["evaluation"].samples == 100
    assert less.data.declared["calibration"].samples is None  # not asked for
    assert reduce_recipe(recipe, racing, 1.0, {}) == recipe


@pytest.mark.slow
def test_a_command_is_killed_and_the_study_goes_on(tmp_path: Path) -> None:
    """The command ends by SIGKILL, and its processes with it."""
    racing = {"rungs": 2, "factor": 2, "shorten": ["evaluation"]}
    recipe = load_recipe(searched(tmp_path, CALIBRATIONS, trials=2, racing=racing))
    command = ["sweep", "recipe.yaml", "--out", "study", "--cache", "cache", "--jobs", "2"]
    started = subprocess.Popen(
        [sys.executable, "-m", "compress", *command], cwd=tmp_path, env={**os.environ, **NO_TIMING}
    )
    while not (tmp_path / "study/work/0001").exists() and started.poll() is None:
        time.sleep(0.05)
    started.send_signal(signal.SIGKILL)
    started.wait()
    assert len(list((tmp_path / "study/trials").glob("*.json"))) == 2
    study = sweep(recipe, tmp_path / "study", tmp_path / "cache", jobs=0, quiet=True)
    runs = [run for trial in study.trials for run in trial.runs]
    assert [run.state for run in runs] == ["judged"] * 3
    assert all("prune_channels" in run.reused for run in runs if run.rung == 1)
    assert study.ended == "2 trials were tried" and study.best is not None
    assert {path.name for path in (tmp_path / "study/bundles").iterdir()} == {f"{study.best.number:04d}"}


def test_a_worker_that_crashes_is_an_answer_and_another_takes_its_place(tmp_path: Path) -> None:
    from compress.search import workers

    with workers.LocalProcesses(2, tmp_path / "log", "broken_work:crash") as processes:
        answers = processes.build([workers.TrialOrder("build", "out")] * 3, None)
    reasons = [answer.reason for answer in answers if answer is not None]
    assert reasons == ["its process ended with exit code 7; it said last: illegal instruction"] * 3


def test_at_the_deadline_work_in_progress_ends(tmp_path: Path) -> None:
    from compress.search import workers

    with workers.LocalProcesses(2, tmp_path / "log", "broken_work:sleep") as processes:
        assert processes.build([workers.TrialOrder("build", "out")] * 3, time.monotonic() + 0.2) == [None] * 3


@pytest.mark.slow
def test_the_same_study_on_a_two_worker_ray_ends_with_the_same_front(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    file = searched(tmp_path, {**CALIBRATIONS, **RATIOS}, trials=4)
    command = ["sweep", "recipe.yaml", "--cache", "cache", "--quiet"]
    done = cli([*command, "--out", "ray", "--ray", "local", "--jobs", "2"], tmp_path, **NO_TIMING)
    assert done.returncode == 0, done.stderr
    here = sweep(load_recipe(file), tmp_path / "here", tmp_path / "cache", jobs=0, quiet=True)
    there = read_study(tmp_path / "ray")
    assert [trial.point for trial in there.trials] == [trial.point for trial in here.trials]
    assert [trial.number for trial in there.front] == [trial.number for trial in here.front]
    assert read_manifest(tmp_path / "ray/best").digest == read_manifest(tmp_path / "here/best").digest
