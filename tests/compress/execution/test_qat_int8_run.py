"""`qat` for W8A8 as a recipe runs it: a judged bundle, a further process, what cannot be planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from places import QUICKSTART

import compress
from compress.errors import PlanError
from compress.execution.passes import RunContext, block_passes_alone
from compress.passes import Int8, Pass
from compress.passes.distill import Distill
from compress.passes.qat import Qat
from compress.passes.training import HiddenTerm
from compress.planning.make_plan import make_plan
from compress.planning.sets import load_set
from compress.recipe.schema import Recipe
from compress.specs import DataSpec
from compress.store.cache import ResultCache
from compress.store.run_log import RunLog
from runtime.tasks.manifest import verify

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


def config(**more: Any) -> Qat:
    return Qat(**{"scheme": "W8A8", "batch_size": 16, "held_out": 0.2} | more)


def ground(cache: Path, *passes: Pass) -> RunContext:
    recipe: Recipe = compress.load_recipe(QUICKSTART, ["data.evaluation.samples=40", "validate.gates=[]"])
    assert recipe.data.calibration is not None
    train = DataSpec(source=recipe.data.calibration.source, samples=120)
    benchmark = replace(recipe.validate_.benchmark, iterations=1, processes=1)
    judged = replace(recipe.validate_, benchmark=benchmark)
    changes = {"passes": passes, "data": recipe.data.model_copy(update={"train": train}), "validate_": judged}
    plan = make_plan(recipe.model_copy(update=changes).at_root(recipe.root), cache)
    sets = {name: load_set(plan.inputs, name, 10) for name in plan.inputs.data}
    (cache / "log.txt").unlink(missing_ok=True)
    return RunContext(plan, ResultCache(cache), RunLog(cache / "log.txt", quiet=True), sets)


def test_a_further_process_takes_part_and_a_recipe_ends_in_a_judged_int8_bundle(tmp_path: Path) -> None:
    one = ground(tmp_path, config(steps=3))
    block_passes_alone(one)  # what a further process does
    assert one.cache.has(one.plan.keys.passes[0])
    block_passes_alone(one)  # cached
    assert one.run_log.file.read_text().count("step 3 of 3") == 1
    report = compress.apply(one.plan.recipe, tmp_path / "out", tmp_path, quiet=True)
    assert {row["action"] for row in report.layers if row["layer"] in ("conv1", "linear")} == {"int8"}
    assert report.candidate.metrics["top1"] > 0.9
    assert report.candidate.size_bytes < 0.5 * report.baseline.size_bytes
    verify(tmp_path / "out")


def test_what_cannot_be_planned(tmp_path: Path) -> None:
    inside = "W8A8 trains the exported graph, which has no modules inside; leave it out"
    refused: list[tuple[tuple[Pass, ...], str]] = [
        ((config(hidden=HiddenTerm()),), f"qat: hidden: {inside}"),
        ((config(), Distill()), "passes.1: distill rewrites the whole torch model and must come before qat"),
        ((Int8(), config()), "in 8 bits already, and qat rounds by itself"),
        ((config(), Int8()), "int8: no convolution or matrix product is left to quantize"),
    ]
    for passes, message in refused:
        with pytest.raises(PlanError) as error:
            ground(tmp_path, *passes)
        assert message in str(error.value)
