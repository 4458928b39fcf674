"""The keys of a recipe's steps: what each one's result depends on, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from compress.cache import step_key
from compress.inputs import Inputs
from runtime.bundle import Judgement
from runtime.metrics import METRICS
from runtime.records import to_json


@dataclass(frozen=True)
class StepKeys:
    """`float_graph`: the exported float graph; `passes`: the state after each pass; `baseline`: the float outputs."""

    float_graph: str
    passes: tuple[str, ...]
    baseline: str


def step_keys(inputs: Inputs) -> StepKeys:
    """Chained keys: a step's key holds that of the step before it."""
    recipe = inputs.recipe
    preprocess = to_json(inputs.preprocess)
    data = {name: _set(inputs, name) for name in inputs.data}
    float_graph = step_key("export", inputs.digest, inputs.feeds, preprocess, recipe.export[0].opset, data)
    keys, previous = [], float_graph
    quality = quality_gates(recipe.validate_)
    for one in recipe.passes:
        uses: list[Any] = [one.model_dump(mode="json"), recipe.target, recipe.seed]
        if one.needs_calibration:
            uses += [data.get("calibration"), to_json(quality), data.get("evaluation")]
        previous = step_key("pass", previous, uses)
        keys.append(previous)
    baseline = step_key("baseline", float_graph, data.get("evaluation"), recipe.validate_.batch_size)
    return StepKeys(float_graph, tuple(keys), baseline)


def quality_gates(judgement: Judgement) -> Judgement:
    """The judgement with only those gates that speak of outputs, not of speed or size."""
    return replace(judgement, gates=tuple(gate for gate in judgement.gates if gate.metric in METRICS))


def _set(inputs: Inputs, name: str) -> list[Any]:
    spec = getattr(inputs.recipe.data, name)
    chosen = spec.model_dump(mode="json", exclude={"source"})
    return [inputs.data[name].digest, chosen, inputs.recipe.seed, list(inputs.recipe.model.class_names)]
