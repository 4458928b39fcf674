"""A pass on the torch model: a file of its own is all it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
from places import QUICKSTART

import compress
from compress.context import PassContext, PassResult
from compress.errors import PlanError
from compress.export.onnx import export_float
from compress.facts import LayerDecision, ModelFacts, PassPlan
from compress.formats.targets import Target
from compress.passes import Int8, Pass
from compress.recipe.schema import Recipe
from compress.work import WORK
from runtime.bundle.format import read_outputs
from runtime.tasks.manifest import verify

pytestmark = pytest.mark.slow
RUNS: list[str] = []


class Silence(Pass):
    """Zeroes a parameter: the classifier, so that every logit is its bias."""

    stage: ClassVar[Literal["model", "graph"]] = "model"
    kind: Literal["silence"] = "silence"
    parameter: str = "linear.weight"

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        return PassPlan(facts, (LayerDecision("linear", "Linear", "silenced"),))


def apply_silence(config: Silence, model: Any, context: PassContext) -> PassResult:
    RUNS.append(config.kind)
    model.module.get_parameter(config.parameter).data.zero_()
    return PassResult(model, (LayerDecision("linear", "Linear", "silenced"),))


@pytest.fixture(autouse=True)
def _work_of_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORK, "silence", f"{__name__}:apply_silence")


def recipe_with(passes: tuple[Pass, ...]) -> Recipe:
    quick = ["validate.gates=[]", "validate.benchmark={iterations: 1, processes: 1}", "data.evaluation.samples=40"]
    recipe = compress.load_recipe(QUICKSTART, quick)
    return recipe.model_copy(update={"passes": passes}).at_root(recipe.root)


def test_a_model_pass_runs_before_the_export_and_is_cached(tmp_path: Path) -> None:
    """And a graph pass works on what it left."""
    RUNS.clear()
    recipe, cache = recipe_with((Silence(),)), tmp_path / "cache"
    for out in ("one", "two"):
        report = compress.apply(recipe, tmp_path / out, cache, quiet=True)
    then = compress.apply(recipe_with((Silence(), Int8())), tmp_path / "three", cache, quiet=True)
    assert RUNS == ["silence"]
    assert report.layers[0]["action"] == "silenced"
    assert report.candidate.metrics["top1"] < 0.3 < report.baseline.metrics["top1"]
    manifest = verify(tmp_path / "one")
    baseline = read_outputs(tmp_path / "one", manifest)["logits"]
    assert not np.allclose(baseline, baseline[:1])  # the baseline is the model as it came
    assert verify(tmp_path / "two").digest == manifest.digest
    assert [row["action"] for row in then.layers if row["layer"] == "linear"] == ["int8"]
    assert then.candidate.metrics["top1"] < 0.3


@pytest.mark.parametrize(("parameter", "n_exports"), [("linear.weight", 1), ("bn1.weight", 2)])
def test_values_alone_are_put_into_the_graph_that_is_there(
    parameter: str, n_exports: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where the graph does not hold one as it is, a norm that is folded, the model is exported anew."""
    exports = []

    def export(*arguments: Any) -> Any:
        exports.append(arguments)
        return export_float(*arguments)

    monkeypatch.setattr("compress.export.model.export_float", export)
    report = compress.apply(
        recipe_with((Silence(parameter=parameter),)), tmp_path / "out", tmp_path / "cache", quiet=True
    )
    assert len(exports) == n_exports
    assert report.candidate.metrics["top1"] < report.baseline.metrics["top1"]


def test_a_model_pass_after_a_graph_pass_is_refused() -> None:
    with pytest.raises(PlanError, match=r"passes\.1: silence rewrites the whole torch model and must come before int8"):
        compress.plan(recipe_with((Int8(), Silence())))
