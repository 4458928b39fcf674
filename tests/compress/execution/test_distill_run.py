"""`distill` as a recipe runs it: the training set, the teacher and the folder for unfinished work reach it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from distilling import Interrupted, broken_off
from places import QUICKSTART
from safetensors.torch import load_file

import compress
from compress.context import PassContext, PassResult
from compress.distill.train import FILE
from compress.execution.passes import RunContext, block_passes_alone
from compress.facts import ModelFacts, PassPlan
from compress.formats.targets import Target
from compress.passes import Pass
from compress.passes.base import DataSize, Stage
from compress.passes.distill import Distill
from compress.planning.make_plan import make_plan
from compress.planning.sets import load_set
from compress.recipe.schema import Recipe
from compress.specs import DataSpec
from compress.store.cache import ResultCache
from compress.store.run_log import RunLog
from compress.work import WORK


class Shake(Pass):
    """Noise on every kernel, so that there is something to win back."""

    stage: ClassVar[Stage] = "model"
    kind: Literal["shake"] = "shake"

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        return PassPlan(facts)


def apply_shake(config: Shake, model: Any, context: PassContext) -> PassResult:
    random = torch.Generator().manual_seed(1)
    for parameter in model.module.parameters():
        if parameter.dim() > 1:
            parameter.add_(0.5 * parameter.std() * torch.randn(parameter.shape, generator=random))
    return PassResult(model)


@pytest.fixture(autouse=True)
def _work_of_shake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORK, "shake", f"{__name__}:apply_shake")


pytestmark = pytest.mark.usefixtures("one_thread", "saved_after_every_step")


def ground(cache: Path, config: Distill) -> RunContext:
    recipe: Recipe = compress.load_recipe(QUICKSTART, ["data.evaluation.samples=20"])
    assert recipe.data.calibration is not None
    train = DataSpec(source=recipe.data.calibration.source, samples=120)
    changes = {"passes": (Shake(), config), "data": recipe.data.model_copy(update={"train": train})}
    plan = make_plan(recipe.model_copy(update=changes).at_root(recipe.root), cache)
    sets = {name: load_set(plan.inputs, name, 10) for name in plan.inputs.data}
    (cache / "log.txt").unlink(missing_ok=True)
    return RunContext(plan, ResultCache(cache), RunLog(cache / "log.txt", quiet=True), sets)


class BrokenLog(RunLog):
    """Of a run that is broken off."""

    progress = staticmethod(broken_off(5))


def weights(one: RunContext) -> dict[str, torch.Tensor]:
    cached = one.cache.get(one.plan.keys.passes[1])
    assert cached is not None
    return load_file(cached.folder / "weights.safetensors")


@pytest.mark.slow
def test_a_broken_off_run_of_a_recipe_goes_on_where_it_stood(tmp_path: Path) -> None:
    config = Distill(steps=8, batch_size=16, learning_rate=3e-3, held_out=0.2)
    whole = ground(tmp_path / "whole", config)
    block_passes_alone(whole)
    broken = ground(tmp_path / "broken", config)
    log = BrokenLog(tmp_path / "broken off.txt", quiet=True)
    with pytest.raises(Interrupted):
        block_passes_alone(replace(broken, run_log=log))
    (left,) = (tmp_path / "broken").glob("partial-*")
    (kept,) = left.glob("teacher-*.npy")
    assert {path.name for path in left.iterdir()} == {"label.txt", kept.name, FILE}
    block_passes_alone(broken)
    assert "distill: goes on from step 5 of 8" in broken.run_log.file.read_text()
    assert not list((tmp_path / "broken").glob("partial-*"))
    assert weights(whole).keys() == weights(broken).keys()
    assert all(torch.equal(value, weights(broken)[name]) for name, value in weights(whole).items())
    cached = whole.cache.get(whole.plan.keys.passes[1])
    assert cached is not None and cached.record["measured"]["distill"]["loss_after"] < 6.0
    block_passes_alone(whole)  # cached: nothing is trained again
    assert whole.run_log.file.read_text().count("step 8 of 8") == 1


def test_the_forecast_counts_training(tmp_path: Path) -> None:
    short, long = (ground(tmp_path, Distill(steps=n)).plan for n in (10, 1000))
    capped = ground(tmp_path, Distill(steps=100_000, max_seconds=30.0)).plan
    assert long.duration.seconds > short.duration.seconds
    assert capped.duration.seconds < short.duration.seconds + 40
    few, many = (Distill(batch_size=n).estimate_cost(short.before, DataSize()).memory_bytes for n in (1, 101))
    outputs = 4 * sum(layer.n_outputs for layer in short.before.layers)
    assert many - few >= 2 * 100 * outputs > 0  # what a layer gives, and what is made of it
    half = Distill(batch_size=101).estimate_cost(short.before, DataSize(filled=0.1))
    assert half.memory_bytes < many
