"""The steps of a run, each taken from the cache or done and kept: the float graph, one pass, the baseline's outputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from safetensors.numpy import load_file, save_file

from compress.cache import Step, StepCache
from compress.export.onnx import export_float, float_graph, save_graph
from compress.export.parity import check_parity
from compress.facts import LayerDecision, Note
from compress.inputs import Batches, Inputs
from compress.models.load import LoadedModel
from compress.passes import Pass
from compress.passes.context import PassContext, PassResult
from compress.quality import run_graph
from compress.quantize.state import GraphState, restore_state
from runtime.bundle import TensorSpec
from runtime.samples import read_npz, write_npz

GRAPH, ARRAYS, STATE = "graph.onnx", "arrays.safetensors", "state.json"
PARITY_BATCHES = 4


@dataclass(frozen=True)
class FloatModel:
    """The exported float graph and what the bundle needs of the model it came from."""

    state: GraphState
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    folder: Path | None
    class_names: tuple[str, ...]
    parity: float


def float_model(
    cache: StepCache,
    key: str,
    load: Callable[[], LoadedModel],
    batches: Callable[[tuple[TensorSpec, ...]], Batches],
    opset: int,
) -> FloatModel:
    """Export, check parity on real inputs, keep; the weights are loaded only if the step is not in the cache."""

    def write(folder: Path) -> dict[str, Any]:
        loaded = load()
        sample = batches(loaded.inputs)
        graph = export_float(loaded, _example(sample, loaded.inputs), opset)
        parity = check_parity(loaded, graph, sample[:PARITY_BATCHES])
        ir.save(graph, folder / GRAPH)
        return {
            "inputs": [asdict(spec) for spec in loaded.inputs],
            "outputs": [asdict(spec) for spec in loaded.outputs],
            "folder": str(loaded.folder) if loaded.folder else None,
            "class_names": list(loaded.class_names),
            "parity": float(f"{parity:.2e}"),
        }

    step = cache.get(key) or cache.put(key, write)
    record = step.record
    return FloatModel(
        GraphState(ir.load(step.folder / GRAPH)),
        tuple(TensorSpec(s["name"], s["dtype"], tuple(s["shape"])) for s in record["inputs"]),
        tuple(TensorSpec(s["name"], s["dtype"], tuple(s["shape"])) for s in record["outputs"]),
        Path(record["folder"]) if record["folder"] else None,
        tuple(record["class_names"]),
        record["parity"],
    )


def pass_step(cache: StepCache, key: str, one: Pass, state: GraphState, context: PassContext) -> PassResult:
    """The result of one pass over a graph state."""
    step = cache.get(key) or cache.put(key, lambda folder: _write_result(folder, one.apply(state, context)))
    return _read_result(step)


def baseline_step(
    cache: StepCache, key: str, model: FloatModel, inputs: Inputs, columns: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The float model's outputs over the evaluation samples."""

    def write(folder: Path) -> dict[str, Any]:
        save_graph(float_graph(model.state.model), folder / "model.onnx")
        outputs = run_graph(folder / "model.onnx", inputs, model.inputs, columns)
        for path in folder.iterdir():
            path.unlink()
        write_npz(folder / "outputs.npz", outputs)
        return {}

    step = cache.get(key) or cache.put(key, write)
    return dict(read_npz(step.folder / "outputs.npz"))


def _example(batches: Batches, specs: Sequence[TensorSpec]) -> dict[str, np.ndarray]:
    """A batch of two samples (where the batch is free), so that the exporter does not take a size of one for a constant."""
    feeds = batches[0]
    free = all(isinstance(spec.shape[0], str) for spec in specs)
    if free and len(next(iter(feeds.values()))) < 2:
        return {name: np.concatenate([values, values]) for name, values in feeds.items()}
    return feeds


def _write_result(folder: Path, result: PassResult) -> dict[str, Any]:
    state: GraphState = result.model
    ir.save(state.model, folder / GRAPH)
    save_file({name: np.ascontiguousarray(array) for name, array in state.arrays().items()}, folder / ARRAYS)
    (folder / STATE).write_text(json.dumps(state.record(), indent=1))
    return {
        "decisions": [asdict(decision) for decision in result.decisions],
        "notes": [asdict(note) for note in result.notes],
        "measured": result.measured,
    }


def _read_result(step: Step) -> PassResult:
    record = json.loads((step.folder / STATE).read_text())
    state = restore_state(ir.load(step.folder / GRAPH), record, load_file(step.folder / ARRAYS))
    return PassResult(
        state,
        tuple(LayerDecision(**decision) for decision in step.record["decisions"]),
        tuple(Note(**note) for note in step.record["notes"]),
        step.record["measured"],
    )
