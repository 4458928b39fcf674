"""A recipe and the facts about its model and data become a plan: what will be done, and whether it can work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.cache import StepCache, default_root
from compress.errors import PlanError
from compress.facts import LOWEST_OPSET, LayerDecision, ModelFacts, Note
from compress.forecast import Forecast, forecast
from compress.inputs import IMAGE_BATCH, Inputs, read_inputs
from compress.network import restrict_network
from compress.passes import Pass
from compress.schema import Recipe
from compress.steps import StepKeys, step_keys
from compress.targets import TARGETS
from runtime.benchmark import choose_backend
from runtime.errors import UsageError
from runtime.gates import check_gates
from runtime.manifest import fixed_batch


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
    """Check that the recipe can work and say how. Loads no weights, and no network but for a recipe that names the hub.

    Raises PlanError with all problems at once (naming layers), SourceError for a model, or data, that cannot be read.
    """
    restrict_network(recipe)
    inputs = read_inputs(recipe)
    keys = step_keys(inputs)
    store = StepCache(cache or default_root())
    before = inputs.facts
    done, problems = _planned_passes(inputs, keys, store)
    after = done[-1].after if done else before
    samples = {name: found.n_samples for name, found in inputs.data.items()}
    batch = 1 if inputs.preprocess.kind == "text" else fixed_batch(before.inputs) or IMAGE_BATCH
    expected = forecast(recipe, before, after, samples, batch)
    problems = [
        *inputs.problems,
        *_data_problems(inputs),
        *_order_problems(recipe.passes, before.source),
        *problems,
        *_export_problems(recipe),
        *_opset_problems(recipe, before),
        *_gate_problems(inputs),
        *_limit_problems(recipe, expected),
    ]
    if problems:
        raise PlanError(problems)
    first = [
        PlannedStep(name, key, store.has(key), before.n_bytes, before.n_bytes)
        for name, key in (("export to float ONNX", keys.float_graph), ("baseline outputs", keys.baseline))
    ]
    steps = (*first, *(one.step for one in done))
    return Plan(recipe, inputs, steps, keys, before, after, _notes(inputs), expected)


@dataclass(frozen=True)
class _Done:
    """A pass that has been planned, and the model's facts after it."""

    step: PlannedStep
    after: ModelFacts


def _planned_passes(inputs: Inputs, keys: StepKeys, store: StepCache) -> tuple[list[_Done], list[str]]:
    """Each pass checked on the facts that the one before it leaves, and the problems of all of them."""
    recipe, facts = inputs.recipe, inputs.facts
    done, problems = [], []
    for index, (one, key) in enumerate(zip(recipe.passes, keys.passes, strict=True)):
        plan = one.check(facts, TARGETS[recipe.target])
        problems += [f"passes.{index}: {problem}" for problem in plan.problems]
        sizes = facts.n_bytes, plan.facts.n_bytes
        done.append(_Done(PlannedStep(one.kind, key, store.has(key), *sizes, plan.decisions, plan.notes), plan.facts))
        facts = plan.facts
    return done, problems


def _data_problems(inputs: Inputs) -> list[str]:
    recipe, problems = inputs.recipe, []
    calibrated = [one.kind for one in recipe.passes if one.needs_calibration]
    if calibrated and recipe.data.calibration is None:
        problems.append(f"data: {calibrated[0]} needs a calibration set; add data.calibration")
    if recipe.data.evaluation is None:
        problems.append("data: there is no evaluation set to judge the result on; add data.evaluation")
    fixed, calibration = fixed_batch(inputs.facts.inputs), inputs.data.get("calibration")
    if fixed is not None and calibration is not None and calibration.n_samples < fixed:
        problems.append(
            f"data.calibration: {calibration.n_samples} samples do not fill one batch of {fixed}, which the model is "
            "bound to; give more, or export the model with a free batch"
        )
    return problems


def _order_problems(passes: tuple[Pass, ...], source: str) -> list[str]:
    """Model passes rewrite the torch module, graph passes what was exported from it: the former come first."""
    problems, graph = [], None
    for index, one in enumerate(passes):
        if one.stage == "graph":
            graph = one.kind
        elif source == "onnx":
            problems.append(f"passes.{index}: {one.kind} rewrites a torch model, and an onnx: source is none")
        elif graph is not None:
            problems.append(f"passes.{index}: {one.kind} rewrites the torch model and must come before {graph}")
    return problems


def _export_problems(recipe: Recipe) -> list[str]:
    """Every further flavour must be able to hold what the passes leave."""
    problems, seen, opset = [], set(), recipe.export[0].opset
    for index, export in enumerate(recipe.export):
        name = export.target or recipe.target
        if export.opset != opset:
            problems.append(
                f"export.{index}: opset {export.opset}, but export.0 has {opset}; one graph serves them all"
            )
        if name in seen:
            problems.append(f"export.{index}: a second file for target {name}; give each target once")
        seen.add(name)
        for one in recipe.passes:
            if name != recipe.target and (text := one.refused_by(TARGETS[name])):
                problems.append(f"export.{index}: {text}")
    if recipe.target not in seen:
        problems.append(f"export: nothing is written for the recipe's own target {recipe.target}; add {{kind: onnx}}")
    return problems


def _opset_problems(recipe: Recipe, facts: ModelFacts) -> list[str]:
    """A graph's opset must have the operators that a pass needs."""
    opset, mend = recipe.export[0].opset, "set it as export.0.opset"
    if facts.opset is not None:
        opset, mend = facts.opset, "convert the file, with onnx.version_converter"
    return [
        f"passes.{index}: {one.kind} needs a graph of opset {one.lowest_opset} or later; this one has {opset}: {mend}"
        for index, one in enumerate(recipe.passes)
        if opset < one.lowest_opset and one.lowest_opset > LOWEST_OPSET
    ]


def _gate_problems(inputs: Inputs) -> list[str]:
    """Gates and metrics that could not be judged at the end are refused now."""
    evaluation = inputs.data.get("evaluation")
    if evaluation is None:
        return []
    try:
        check_gates(inputs.recipe.validate_, inputs.recipe.model.task, evaluation.has_labels)
    except UsageError as error:
        return [f"validate: {problem}" for problem in error.problems]
    return []


def _limit_problems(recipe: Recipe, expected: Forecast) -> list[str]:
    limits, problems = recipe.limits, []
    memory, disk = expected.memory_bytes / 2**30, expected.disk_bytes / 2**30
    if limits.memory_gib is not None and memory > limits.memory_gib:
        problems.append(
            f"limits.memory_gib: about {memory:.1f} GiB are needed, {limits.memory_gib:g} are allowed; use a smaller "
            "model, or raise the limit"
        )
    if limits.disk_gib is not None and disk > limits.disk_gib:
        problems.append(f"limits.disk_gib: about {disk:.1f} GiB are needed, {limits.disk_gib:g} are allowed")
    return problems


def _notes(inputs: Inputs) -> tuple[Note, ...]:
    recipe, data = inputs.recipe, inputs.data
    texts = list(inputs.facts.notes)
    if "calibration" in data and data["calibration"].digest == data["evaluation"].digest:
        texts.append("data: calibration and evaluation come from one file; apply counts the samples that are in both")
    _, elsewhere = choose_backend(recipe.target, None)
    if elsewhere is not None:
        texts.append(f"{recipe.target} does not run here: the bundle is judged in onnxruntime-cpu instead")
    if not recipe.validate_.gates:
        texts.append("validate: no gates; the verdict will be pass whatever is measured")
    return tuple(Note("warning", text) for text in texts)
