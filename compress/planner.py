"""A recipe and the facts about its model and data become a plan: what will be done, to what, and whether it can work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.cache import StepCache, default_root
from compress.errors import PlanError
from compress.facts import LayerDecision, ModelFacts, Note
from compress.forecast import Forecast, forecast
from compress.inputs import IMAGE_BATCH, Inputs, read_inputs
from compress.passes import Pass
from compress.schema import Recipe
from compress.steps import StepKeys, step_keys
from compress.targets import TARGETS


@dataclass(frozen=True)
class PlannedStep:
    """One step, in order. `cached`: its result is in the cache already."""

    name: str
    key: str
    cached: bool
    before_bytes: int
    after_bytes: int
    decisions: tuple[LayerDecision, ...] = ()
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What `apply` will do. `before` and `after` are the model's facts; sizes are those of the weights."""

    recipe: Recipe
    inputs: Inputs
    steps: tuple[PlannedStep, ...]
    keys: StepKeys
    before: ModelFacts
    after: ModelFacts
    notes: tuple[Note, ...]
    forecast: Forecast

    def to_dict(self) -> dict[str, Any]:
        """JSON values, for `compress plan --json`."""
        from compress.show_plan import plan_dict

        return plan_dict(self)

    def render(self, console: Any) -> None:
        """Print it (rich)."""
        from compress.show_plan import render_plan

        render_plan(self, console)

    def _repr_html_(self) -> str:
        from compress.show_plan import plan_html

        return plan_html(self)


def make_plan(recipe: Recipe, cache: Path | None = None) -> Plan:
    """Check that the recipe can work and say how. Loads no weights.

    Raises PlanError with all problems at once (naming layers), SourceError for the model or the data.
    """
    inputs = read_inputs(recipe)
    keys = step_keys(inputs)
    store = StepCache(cache or default_root())
    problems = [*_data_problems(inputs), *_order_problems(recipe.passes)]
    steps = [
        PlannedStep(
            "export to float ONNX",
            keys.float_graph,
            store.has(keys.float_graph),
            inputs.facts.n_bytes,
            inputs.facts.n_bytes,
        )
    ]
    facts = inputs.facts
    for index, (one, key) in enumerate(zip(recipe.passes, keys.passes, strict=True)):
        planned = one.check(facts, TARGETS[recipe.target])
        problems += [f"passes.{index}: {problem}" for problem in planned.problems]
        steps.append(
            PlannedStep(
                one.kind, key, store.has(key), facts.n_bytes, planned.facts.n_bytes, planned.decisions, planned.notes
            )
        )
        facts = planned.facts
    problems += _export_problems(recipe)
    samples = {name: found.n_samples for name, found in inputs.data.items()}
    batch = 1 if inputs.preprocess.kind == "text" else IMAGE_BATCH
    expected = forecast(recipe, inputs.facts, facts, samples, batch)
    problems += _limit_problems(recipe, expected)
    if problems:
        raise PlanError(problems)
    steps.append(PlannedStep("baseline outputs", keys.baseline, store.has(keys.baseline), facts.n_bytes, facts.n_bytes))
    return Plan(recipe, inputs, tuple(steps), keys, inputs.facts, facts, _notes(inputs), expected)


def _data_problems(inputs: Inputs) -> list[str]:
    recipe, problems = inputs.recipe, []
    calibrated = [one.kind for one in recipe.passes if one.needs_calibration]
    if calibrated and "calibration" not in inputs.data:
        problems.append(f"data: {calibrated[0]} needs a calibration set; add data.calibration")
    if "evaluation" not in inputs.data:
        problems.append("data: there is no evaluation set to judge the result on; add data.evaluation")
    return problems


def _order_problems(passes: tuple[Pass, ...]) -> list[str]:
    """Model passes rewrite the torch module, graph passes what was exported from it: the former come first."""
    problems, graph = [], None
    for index, one in enumerate(passes):
        if one.stage == "model" and graph is not None:
            problems.append(f"passes.{index}: {one.kind} rewrites the torch model and must come before {graph}")
        graph = one.kind if one.stage == "graph" else graph
    return problems


def _export_problems(recipe: Recipe) -> list[str]:
    """Every further flavour must be able to hold what the passes leave."""
    problems, seen = [], set()
    for index, export in enumerate(recipe.export):
        name = export.target or recipe.target
        if name in seen:
            problems.append(f"export.{index}: a second file for target {name}; give each target once")
        seen.add(name)
        for one in recipe.passes:
            if name != recipe.target and (text := one.refused_by(TARGETS[name])):
                problems.append(f"export.{index}: {text}")
    if recipe.target not in seen:
        problems.append(f"export: nothing is written for the recipe's own target {recipe.target}; add {{kind: onnx}}")
    return problems


def _limit_problems(recipe: Recipe, expected: Forecast) -> list[str]:
    limits, problems = recipe.limits, []
    if limits.memory_gib is not None and expected.memory_bytes > limits.memory_gib * 2**30:
        problems.append(
            f"limits.memory_gib: about {expected.memory_bytes / 2**30:.1f} GiB are needed, {limits.memory_gib:g} are allowed; "
            "use a smaller model or calibration batch, or raise the limit"
        )
    if limits.disk_gib is not None and expected.disk_bytes > limits.disk_gib * 2**30:
        problems.append(
            f"limits.disk_gib: about {expected.disk_bytes / 2**30:.1f} GiB are needed, {limits.disk_gib:g} are allowed"
        )
    return problems


def _notes(inputs: Inputs) -> tuple[Note, ...]:
    recipe = inputs.recipe
    notes = [Note("warning", text) for text in inputs.facts.notes]
    calibration, evaluation = recipe.data.calibration, recipe.data.evaluation
    if (
        calibration is not None
        and evaluation is not None
        and inputs.data["calibration"].digest == inputs.data["evaluation"].digest
    ):
        notes.append(
            Note(
                "warning",
                "data: calibration and evaluation come from one file; apply counts the samples that stand in both",
            )
        )
    if not TARGETS[recipe.target].runs_here:
        notes.append(
            Note("warning", f"{recipe.target} does not run here: the bundle is judged in onnxruntime-cpu instead")
        )
    if not recipe.validate_.gates:
        notes.append(Note("warning", "validate: no gates; the verdict will be pass whatever is measured"))
    return tuple(notes)
