"""A recipe and the facts about its model and data become a plan: what will be done, and whether it can work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.cache import StepCache, default_root
from compress.data.training import n_rows
from compress.engine_rules import engine_notes
from compress.errors import PlanError
from compress.export_rules import checkpoint_notes, checkpoint_problems
from compress.exports import CheckpointExport
from compress.facts import LayerDecision, ModelFacts, Note
from compress.forecast import Forecast, forecast
from compress.inputs import IMAGE_BATCH, TEXTS, Inputs, calibration_tokens, read_inputs, training_fill
from compress.legality import objections
from compress.network import restrict_network
from compress.passes import KvCache, Pass
from compress.schema import Recipe
from compress.schemes import Scheme
from compress.step_rules import step_note
from compress.steps import StepKeys, step_keys
from compress.targets import TARGETS
from runtime.benchmark import choose_backend
from runtime.manifest import GENERATION, fixed_batch

Schemes = dict[str, Scheme]
"""Layer -> how a checkpoint stores it."""


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
    store = StepCache(cache or default_root())
    inputs = read_inputs(recipe, store.root)
    keys = step_keys(inputs)
    before = inputs.facts
    done, problems, schemes = _planned_passes(inputs, keys, store)
    after = done[-1].after if done else before
    samples = {name: found.n_samples for name, found in inputs.data.items()}
    batch = 1 if inputs.preprocess.kind in TEXTS else fixed_batch(before.inputs) or IMAGE_BATCH
    tokens = calibration_tokens(inputs) if recipe.model.task in GENERATION else 0
    decisions = [one.step.decisions for one in done]
    expected = forecast(recipe, before, after, samples, batch, tokens, training_fill(inputs), decisions)
    checkpoints = [_checkpoint(inputs, index, schemes) for index in range(len(recipe.export))]
    problems = [*inputs.problems, *objections(inputs, expected, store.root), *problems]
    if not problems:  # of a layer that a pass cannot take its checkpoint needs no word
        problems = [problem for found, _ in checkpoints for problem in found]
    if problems:
        raise PlanError(problems)
    first = [
        PlannedStep(name, key, store.has(key), before.n_bytes, before.n_bytes)
        for name, key in (("export to float ONNX", keys.float_graph), ("baseline outputs", keys.baseline))
    ]
    steps = (*first, *(one.step for one in done))
    notes = (*_notes(inputs), *(note for _, found in checkpoints for note in found))
    return Plan(recipe, inputs, steps, keys, before, after, notes, expected)


@dataclass(frozen=True)
class _Done:
    """A pass that has been planned, and the model's facts after it."""

    step: PlannedStep
    after: ModelFacts


def _planned_passes(inputs: Inputs, keys: StepKeys, store: StepCache) -> tuple[list[_Done], list[str], Schemes]:
    """Each pass checked on the facts that the one before it leaves; the problems of all; how layers are stored."""
    recipe, facts = inputs.recipe, inputs.facts
    done, problems = [], []
    schemes: Schemes = {}
    for index, (one, key) in enumerate(zip(recipe.passes, keys.passes, strict=True)):
        plan = one.check(facts, TARGETS[recipe.target])
        problems += [f"passes.{index}: {problem}" for problem in plan.problems]
        sizes = facts.n_bytes, plan.facts.n_bytes
        notes = (*plan.notes, *_train_notes(one, inputs))
        done.append(_Done(PlannedStep(one.kind, key, store.has(key), *sizes, plan.decisions, notes), plan.facts))
        facts = plan.facts
        schemes |= plan.schemes
    return done, problems, schemes


def _train_notes(one: Pass, inputs: Inputs) -> list[Note]:
    """What the plan says of learning, once the training set is known."""
    train = inputs.data.get("train") if one.needs_train else None
    if train is None:
        return []
    return one.train_notes(inputs.facts, n_rows(inputs.recipe.model.task, train.n_samples, train.columns))


def _checkpoint(inputs: Inputs, index: int, schemes: Schemes) -> tuple[list[str], list[Note]]:
    """Why the export of that number, if it is a checkpoint, cannot be written or loaded; and what to know of it."""
    recipe, export = inputs.recipe, inputs.recipe.export[index]
    if not isinstance(export, CheckpointExport) or inputs.facts.source == "onnx":
        return [], []
    kv_cache = next((one.scheme for one in recipe.passes if isinstance(one, KvCache)), None)
    about = (inputs.facts, schemes, export, recipe.target_of(export), kv_cache)
    return [f"export.{index}: {problem}" for problem in checkpoint_problems(*about)], checkpoint_notes(*about)


EXPERTS = ".experts."
"""In the name of every expert's layers, once they are single."""
_IN_ONNXRUNTIME = "quality is judged in onnxruntime-cpu instead, and gates on speed and memory stay undecided"
_BY_TORCH = "torch measures its quality as it is built, and nothing measures its speed"


def _notes(inputs: Inputs) -> tuple[Note, ...]:
    recipe, data = inputs.recipe, inputs.data
    texts = list(inputs.facts.notes)
    if "calibration" in data and data["calibration"].digest == data["evaluation"].digest:
        texts.append("data: calibration and evaluation come from one file; apply counts the samples that are in both")
    _, elsewhere = choose_backend(recipe.target, None, recipe.model.task)
    if elsewhere is not None:
        how = _IN_ONNXRUNTIME if recipe.has_onnx else _BY_TORCH
        texts.append(f"{recipe.target} does not run here: {how}")
    if not recipe.validate_.gates:
        texts.append("validate: no gates; the verdict will be pass whatever is measured")
    notes = [Note("warning", text) for text in texts]
    if recipe.has_onnx and any(EXPERTS in layer.name for layer in inputs.facts.layers):
        notes.append(
            Note("slow", "an ONNX graph computes all experts for every token; engines that route read checkpoints")
        )
    steps = step_note(recipe, inputs.facts, data["evaluation"].n_samples)
    return (*notes, *engine_notes(inputs), *([steps] if steps else []))
