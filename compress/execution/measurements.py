"""Measure modules and models while a run works: how fast modules are once exported, what each pass cost and gave.

The models between the passes are written as a user would get them, for the judge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from compress.context import PassResult
from compress.errors import CompressError
from compress.execution.cached import FloatModel
from compress.execution.quality import run_graph
from compress.export.onnx import finish, float_graph, save_graph
from compress.graph.seeing import specs_fed
from compress.graph.specs import cache_of
from compress.passes import Pass
from compress.planning.measurements import pass_names
from compress.planning.plan import Plan
from compress.planning.timing import variant_of
from compress.rounding.state import GraphState
from compress.store.cache import ResultCache
from compress.store.run_log import RunLog
from runtime.bundle.format import model_size
from runtime.bundle.samples import read_outputs_npz, write_npz
from runtime.errors import RuntimeFailure
from runtime.judge.passes import PassModel


def list_costs(passes: Sequence[Pass], results: Sequence[PassResult[object]]) -> list[PassModel]:
    """Return what each pass cost, of a run that does not measure the models between them."""
    return [_describe_costs(passes, index, result) for index, result in enumerate(results)]


def _describe_costs(passes: Sequence[Pass], index: int, result: PassResult[object]) -> PassModel:
    # a pass that trains reports its seconds itself, with those of runs broken off
    trained = result.measured.get(passes[index].kind, {}).get("seconds", 0.0)
    seconds = max(result.seconds, trained)
    return PassModel(pass_names(passes)[index], seconds, peak_memory_bytes=result.peak_memory_bytes)


@dataclass
class PassMeasurements:
    """`folder`: where the models lie until they are judged. `columns`: the evaluation samples."""

    plan: Plan
    cache: ResultCache
    run_log: RunLog
    folder: Path
    columns: Mapping[str, Any]
    exported: FloatModel
    models: list[PassModel] = field(default_factory=list)
    """One for each pass so far."""

    def add(self, index: int, result: PassResult[object], graph: Callable[[], GraphState]) -> None:
        """Write and score the model that the pass of that number left. If it cannot be measured, its row says why."""
        costs = _describe_costs(self.plan.recipe.passes, index, result)
        if index == len(self.plan.recipe.passes) - 1:  # it left the candidate, which is judged anyway
            self.models.append(costs)
            return
        try:
            with self.run_log.time_stage(f"what {costs.name} left"):
                self.models.append(self._write_model(index, costs, graph()))
        except (CompressError, RuntimeFailure) as error:
            why = f"not measured: {error}"
            self.run_log.log(f"what {costs.name} left: {why}")
            self.models.append(replace(costs, error=why))

    def _write_model(self, index: int, costs: PassModel, state: GraphState) -> PassModel:
        model, _ = finish(state, variant_of(self.plan.recipe))
        path = self.folder / str(index) / "model.onnx"
        save_graph(model, path)
        cache, specs = cache_of(model), specs_fed(model, self.exported.inputs)
        outputs = self._load_or_run(self.plan.keys.outputs[index], lambda: self._run(path, specs))
        return replace(costs, path=path, size_bytes=model_size(path), cache=cache, outputs=outputs)

    def _run(self, path: Path, specs: Any) -> dict[str, np.ndarray]:
        """Return the model's outputs over the evaluation samples; a language model's beside the float one's."""
        beside = None
        if self.plan.recipe.generates:
            beside = self.folder / "float" / "model.onnx"
            if not beside.is_file():
                save_graph(float_graph(self.exported.state.model), beside)
        return run_graph(path, self.plan.inputs, specs, self.columns, beside)

    def _load_or_run(self, key: str, run: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
        """Return outputs from the cache, or run the model and keep them."""

        def write(folder: Path) -> dict[str, Any]:
            write_npz(folder / "outputs.npz", run())
            return {}

        cached = self.cache.get(key) or self.cache.put(key, write)
        return read_outputs_npz(cached.folder / "outputs.npz")
