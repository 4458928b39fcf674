"""A chain of passes: what each one left is what a recipe that ends there would give."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from makers import bundle_bytes
from places import QUICKSTART

import compress
from compress.context import PassContext, PassResult
from compress.errors import ExportError, PlanError
from compress.execution import measurements as chain
from compress.execution.measurements import variant_of
from compress.facts import ModelFacts, PassPlan
from compress.formats.targets import Target
from compress.passes import Int8, Pass, Rtn
from compress.passes.base import Stage
from compress.planning import measurements as rules
from compress.planning.forecast import Volumes, forecast
from compress.planning.make_plan import make_plan
from compress.planning.measurements import n_between
from compress.recipe.schema import Recipe
from compress.work import WORK
from runtime.judge.findings import PassRow
from runtime.judge.passes import PASSES_FILE
from runtime.report.report import Report, render_text
from runtime.tasks.manifest import verify

pytestmark = pytest.mark.slow
QUICK = [
    "validate.gates=[]",
    "validate.benchmark={iterations: 1, throughput_batch_size: 4, processes: 1}",
    "data.evaluation.samples=60",
    "data.calibration.samples=16",
]
INT8 = Int8()
ROUND = Rtn(bits=4, group_size=16, targets=("linear",))


TRAINED = {"shake": {"seconds": 1000.0}, "shake: training loss": {"1": 2.0, "2": 0.5}}
"""As of a pass that was broken off, and that drew a curve."""


class Shake(Pass):
    """Noise on every kernel."""

    stage: ClassVar[Stage] = "model"
    kind: Literal["shake"] = "shake"
    scale: float = 0.3

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        return PassPlan(facts)


def apply_shake(config: Shake, model: Any, context: PassContext) -> PassResult:
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.module.parameters():
            if parameter.dim() > 1:
                parameter.add_(config.scale * parameter.std() * torch.randn(parameter.shape, generator=random))
    return PassResult(model, measured=TRAINED if config.scale == 0.5 else {})


@pytest.fixture(scope="module", autouse=True)
def _one_thread_one_backend() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(WORK, "shake", f"{__name__}:apply_shake")
        yield
    torch.set_num_threads(before)


def recipe_of(*passes: Pass, **validate: Any) -> Recipe:
    recipe: Recipe = compress.load_recipe(QUICKSTART, QUICK)
    judged = replace(recipe.validate_, **validate)
    return recipe.model_copy(update={"passes": passes, "validate_": judged}).at_root(recipe.root)


def run(recipe: Recipe, folder: Path, cache: Path) -> Report:
    report: Report = compress.apply(recipe, folder, cache, quiet=True)
    return report


def rows(report: Report) -> tuple[PassRow, ...]:
    assert report.steps is not None
    return report.steps.rows


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Path, Report]:
    """A pass on the module, one on its blocks or graph, one on the graph."""
    bundle = tmp_path_factory.mktemp("whole") / "bundle"
    return bundle, run(recipe_of(Shake(), ROUND, INT8), bundle, cache)


def test_there_is_a_row_for_the_float_model_and_for_each_pass(whole: tuple[Path, Report]) -> None:
    assert [row.name for row in rows(whole[1])] == ["float", "shake", "rtn", "int8"]
    assert all(row.error == "" and row.metrics and row.latency_ms for row in rows(whole[1]))
    assert json.loads((whole[0] / PASSES_FILE).read_text())["manifest_digest"] == verify(whole[0]).digest


@pytest.mark.parametrize("number", [1, 2])
def test_what_a_pass_left_is_the_candidate_of_a_recipe_that_ends_there(
    whole: tuple[Path, Report], cache: Path, tmp_path: Path, number: int
) -> None:
    passes = (Shake(), ROUND)[:number]
    ends_there = run(recipe_of(*passes, steps=False), tmp_path / "b", cache)
    row = rows(whole[1])[number]
    assert row.size_bytes == ends_there.candidate.size_bytes
    assert row.metrics == ends_there.candidate.metrics
    assert row.metrics["top1"] != rows(whole[1])[0].metrics["top1"], "nothing has changed: the test sees nothing"


def test_measuring_the_passes_changes_no_byte_of_the_bundle(
    whole: tuple[Path, Report], cache: Path, tmp_path: Path
) -> None:
    report = run(recipe_of(Shake(), ROUND, INT8, steps=False), tmp_path / "b", tmp_path / "fresh")
    assert report.steps is None and not (tmp_path / "b" / PASSES_FILE).exists()
    ours, theirs = (verify(folder).files for folder in (whole[0], tmp_path / "b"))
    assert {name for name in ours if ours[name] != theirs[name]} <= {"recipe.yaml", "lock.json"}, "of the knob itself"
    assert ours.keys() == theirs.keys()


def test_a_second_run_scores_nothing_again_and_says_what_each_pass_took(
    whole: tuple[Path, Report], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("finished work was done again")

    work = ("store.cache.ResultCache.put", "execution.measurements.run_graph", "execution.passes.load_model")
    for name in work:
        monkeypatch.setattr(f"compress.{name}", refuse)
    again = run(recipe_of(Shake(), ROUND, INT8), tmp_path / "b", cache)
    assert [(row.seconds, row.metrics) for row in rows(again)] == [(r.seconds, r.metrics) for r in rows(whole[1])]
    assert all(row.seconds is not None and row.seconds > 0 for row in rows(again)[1:])
    assert bundle_bytes(tmp_path / "b") == bundle_bytes(whole[0])


def test_a_training_curve_is_drawn_counts_as_no_layer_and_all_its_runs_are_counted(cache: Path, tmp_path: Path) -> None:
    report = run(recipe_of(Shake(scale=0.5), INT8), tmp_path / "b", cache)
    assert rows(report)[1].seconds == 1000.0
    assert "shake: training loss  █▁  2 to 0.5; steps 1 to 2" in render_text(report)
    assert (tmp_path / "b/report.md").read_text().count("█▁") == 1 and "<svg" in report._repr_html_()
    assert ": measured" not in (tmp_path / "b/README.md").read_text()


def test_what_cannot_be_exported_on_the_way_is_a_row_that_says_why(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(state: Any, target: Target) -> Any:
        raise ExportError("no such operator")

    monkeypatch.setattr(chain, "finish", refuse)
    report = run(recipe_of(Shake(), INT8), tmp_path / "b", cache)
    lost, end = rows(report)[1:]
    assert (lost.error, lost.metrics, lost.latency_ms) == ("not measured: no such operator", {}, None)
    assert end.metrics == report.candidate.metrics and end.error == ""
    assert "what shake left: not measured: no such operator" in (tmp_path / "b/compress.log").read_text()


def test_the_plan_says_what_is_measured(cache: Path) -> None:
    def said(recipe: Recipe) -> list[str]:
        return [note.text for note in make_plan(recipe, cache).notes if note.text.startswith("validate: the model is ")]

    (text,) = said(recipe_of(Shake(), INT8))
    assert "the model is measured after shake, too, on 60 samples" in text
    assert said(recipe_of(INT8)) == said(recipe_of(Shake(), INT8, steps=False)) == []
    facts = replace(make_plan(recipe_of(INT8), cache).before, other_bytes=rules.LARGEST_BYTES)
    (left_out, asked) = (
        rules.measurement_note(recipe_of(Shake(), INT8, **knob), facts, 60) for knob in ({}, {"steps": True})
    )
    assert left_out is not None and "is not measured after shake, as the model has" in left_out.text
    assert "more than 512.0 MiB" in left_out.text
    assert asked is not None and "is measured after shake, too" in asked.text


def test_the_knob(cache: Path) -> None:
    facts = make_plan(recipe_of(INT8), cache).before

    def n(*passes: Pass, **knob: Any) -> int:
        return n_between(recipe_of(*passes, **knob), facts)

    assert [n(), n(INT8), n(Shake(), INT8), n(Shake(), ROUND, INT8)] == [0, 0, 1, 2]
    assert n(Shake(), INT8, steps=False) == 0
    without = make_plan(recipe_of(Shake(), INT8, steps=False), cache).keys
    assert make_plan(recipe_of(Shake(), INT8), cache).keys == without, "it decides no pass's result"
    facts = replace(facts, other_bytes=rules.LARGEST_BYTES)
    assert (n(Shake(), INT8), n(Shake(), INT8, steps=True)) == (0, 1)


def test_one_pass_has_its_two_rows_where_they_are_asked_for(cache: Path, tmp_path: Path) -> None:
    report = run(recipe_of(INT8, steps=True), tmp_path / "b", cache)
    assert [row.name for row in rows(report)] == ["float", "int8"]


def test_a_checkpoint_cannot_have_its_passes_measured(cache: Path) -> None:
    recipe = compress.load_recipe(QUICKSTART, ["export=[{kind: checkpoint}]", "target=vllm", "validate.steps=true"])
    with pytest.raises(PlanError, match=r"validate\.steps: true measures .* target vllm gets what nothing here runs"):
        make_plan(recipe, cache)
    assert n_between(recipe, make_plan(recipe_of(INT8), cache).before) == 0


def test_the_forecast_counts_what_lies_between(cache: Path) -> None:
    plan = make_plan(recipe_of(Shake(), INT8), cache)
    few, many = (
        forecast(recipe_of(Shake(), INT8, steps=steps), plan.before, plan.after, Volumes({"evaluation": 10_000}, 1))
        for steps in (False, True)
    )
    assert many.disk_bytes - few.disk_bytes == plan.before.n_bytes
    took = [sum(stage.duration.seconds for stage in found.stages) for found in (few, many)]
    assert took[0] < took[1]


def test_the_form_that_is_judged_is_the_backend_s_own() -> None:
    def chosen(*sets: str) -> str:
        name: str = variant_of(compress.load_recipe(QUICKSTART, list(sets))).name
        return name

    assert chosen() == "onnxruntime-cpu"
    assert chosen("target=tensorrt") == "tensorrt"
    both = "export=[{kind: onnx}, {kind: onnx, target: onnxruntime-cpu}]"
    assert chosen("target=tensorrt", both) == "onnxruntime-cpu"
