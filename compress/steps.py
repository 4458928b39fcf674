"""The keys of a recipe's steps: what each one's result depends on, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from compress.cache import step_key
from compress.inputs import Inputs
from compress.passes import Distill, Pass
from compress.schema import Recipe
from runtime.bundle import Benchmark, Judgement
from runtime.files import sha256_of
from runtime.language import LanguagePreprocess
from runtime.metrics import METRICS
from runtime.preprocess import TextPreprocess
from runtime.records import to_json


@dataclass(frozen=True)
class StepKeys:
    """`float_graph`: the exported float graph; `passes`: the state after each pass; `baseline`: the float outputs.

    `passed_graph`: the graph exported after the passes over the torch model, on which the graph passes work; the float
    graph if there are none. `torch_outputs`: those of a model of which no graph is written, before and after.
    `exports`: the graph exported after each pass that is not over the graph; `outputs`: those of what each pass left.
    """

    float_graph: str
    passes: tuple[str, ...]
    passed_graph: str
    baseline: str
    torch_outputs: str
    exports: tuple[str, ...]
    outputs: tuple[str, ...]


def step_keys(inputs: Inputs) -> StepKeys:
    """Chained keys: a step's key holds that of the step before it."""
    recipe = inputs.recipe
    data = {name: _set(inputs, name) for name in inputs.data}
    example = data.get("calibration") or data.get("evaluation")
    export = [inputs.feeds, _preprocess(inputs), recipe.opset, list(recipe.model.class_names), example]
    float_graph = step_key("export", inputs.digest, export)
    keys, previous = [], inputs.digest
    staged = [(one, one.stage_on(inputs.facts)) for one in recipe.passes]
    for one, stage in ((one, stage) for one, stage in staged if stage != "graph"):
        uses = [*_uses(one, recipe, data), *_student(one, inputs)]
        previous = step_key(f"{stage} pass", previous, uses, _preprocess(inputs))
        keys.append(previous)
    exports = [step_key("export", key, export) for key in keys]
    previous = passed_graph = exports[-1] if exports else float_graph
    for one in (one for one, stage in staged if stage == "graph"):
        previous = step_key("pass", previous, _uses(one, recipe, data))
        keys.append(previous)
    judged = recipe.validate_
    how = [recipe.target, judged.batch_size, judged.benchmark.threads]
    baseline = step_key("baseline", float_graph, data.get("evaluation"), how)
    torch_outputs = step_key("torch outputs", inputs.digest, keys, data.get("evaluation"), _preprocess(inputs))
    left = [*exports, *keys[len(exports) :]]
    outputs = [step_key("step outputs", one, baseline) for one in left]
    return StepKeys(float_graph, tuple(keys), passed_graph, baseline, torch_outputs, tuple(exports), tuple(outputs))


def _uses(one: Pass, recipe: Recipe, data: Mapping[str, list[Any]]) -> list[Any]:
    """What a pass's result depends on, beside the step before it."""
    uses: list[Any] = [one.model_dump(mode="json"), recipe.target, recipe.seed]
    if one.needs_calibration:
        uses.append(data.get("calibration"))
    if one.needs_train:
        uses.append(data.get("train"))
    if one.uses_gates:
        uses += [to_json(quality_gates(recipe.validate_)), data.get("evaluation")]
    return uses


def _student(one: Pass, inputs: Inputs) -> list[str]:
    """The digest of the model that the pass puts in the given one's place."""
    student = one.student if isinstance(one, Distill) else None
    return [] if student is None or not student.separate else [inputs.students.get(student.key, "")]


def quality_gates(judgement: Judgement) -> Judgement:
    """The judgement without what it says of speed, size and steps: only gates that speak of outputs."""
    gates = tuple(gate for gate in judgement.gates if gate.metric in METRICS)
    return replace(judgement, gates=gates, benchmark=Benchmark(), steps="auto")


def _preprocess(inputs: Inputs) -> list[Any]:
    """What is said of preprocessing, and the tokenizer's digest."""
    said = inputs.preprocess
    if not isinstance(said, TextPreprocess | LanguagePreprocess) or inputs.tokenizer is None:
        return [to_json(said)]
    return [to_json(said), sha256_of(inputs.tokenizer / said.tokenizer)]


def _set(inputs: Inputs, name: str) -> list[Any]:
    spec = inputs.recipe.data.declared[name]
    chosen = [part.model_dump(mode="json", exclude={"source", "also"}) for part in spec.parts]
    return [inputs.data[name].digest, chosen, inputs.recipe.seed, list(inputs.recipe.model.class_names)]
