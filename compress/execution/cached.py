"""The results of a run, each from the cache or made and kept: the float graph, one pass, the baseline's outputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_model

from compress.blocks.rounded import read_rounded, write_rounded
from compress.blocks.sizes import fit, shapes_from, shapes_of
from compress.context import PassResult
from compress.data.sight import Sight
from compress.errors import ExportError, OutputError, SourceError
from compress.execution.quality import run_graph
from compress.execution.work_meter import WorkMeter
from compress.export.model import export_model
from compress.export.onnx import float_graph, save_graph
from compress.export.parity import check_decoder_parity, check_encoder_decoder_parity, check_parity
from compress.facts import LayerDecision, Note
from compress.graph.cleanup import describe_clean_up
from compress.graph.files import read_graph, write_graph
from compress.graph.halves import cross_names
from compress.graph.run import Feeds
from compress.graph.seeing import decoder_of
from compress.graph.specs import input_specs, output_specs
from compress.models.load import OnnxModel, TorchModel
from compress.models.weights import load_state
from compress.passes import Pass
from compress.planning.inputs import Inputs
from compress.planning.sets import Batches, example_feeds
from compress.rounding.state import GraphState, restore_state
from compress.store.cache import HELD_BY, CachedResult, ResultCache, cache_key
from compress.work import Form, apply_pass, begin_pass
from compress.work.contexts import GraphContext, ModelContext
from runtime.bundle.records import from_json, to_json
from runtime.bundle.samples import read_outputs_npz, write_npz
from runtime.bundle.tensors import TensorSpec
from runtime.metrics import NonFiniteOutputs, check_finite
from runtime.tasks import find_task

GRAPH, ARRAYS, STATE, WEIGHTS = "graph.onnx", "arrays.safetensors", "state.json", "weights.safetensors"
BASELINE, CANDIDATE = "baseline.npz", "candidate.npz"
PARITY_BATCHES = 4
"""Batches of the sample on which an export is compared with the model, beside the one that it was traced with."""
MakeBatches = Callable[[tuple[TensorSpec, ...]], Batches]
"""Inputs of a model -> the encoded samples that it is exported and checked with."""


@dataclass(frozen=True)
class FloatModel:
    """The exported float graph and what the bundle needs of the model it came from."""

    state: GraphState
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    class_names: tuple[str, ...]
    parity: float | None
    """Largest relative difference to the source on real inputs; None: the source, an ONNX file, does not run."""
    clean_up: Mapping[str, int] = field(default_factory=dict)
    """What was done to an ONNX source, and how often."""

    def notes(self) -> list[Note]:
        """Return what the report says of a graph that came as a file."""
        if not self.clean_up:
            return []
        compared = "ONNX Runtime does not run the file as it is, so that the two are not compared"
        if self.parity is not None:
            compared = f"outputs differ from the file's by at most {self.parity:.1e} of the largest"
        return [Note("info", f"{describe_clean_up(self.clean_up)}; {compared}")]


def float_model(
    cache: ResultCache,
    key: str,
    made_of: str,
    load: Callable[[], TorchModel | OnnxModel],
    batches: MakeBatches,
    opset: int,
    refilled: Callable[[], ir.Model | None] = lambda: None,
    sight: Sight | None = None,
    on_reuse: Callable[[], None] = lambda: None,
) -> FloatModel:
    """Export the float graph, check parity on real inputs, keep it; weights are loaded only if the cache has none.

    `made_of`: as in `CacheKeys`; the graph is also kept under what it is really made of, and one that is there already
    is compared on these inputs instead of exported again: `on_reuse` is then called. `refilled`: gives a graph to take
    in place of an export, if there is one and it passes the same check. `sight`: as of `export_model`; a question about
    an image is then among what parity is checked with.
    """

    def write(folder: Path) -> dict[str, Any]:
        loaded = load()
        sample, called = batches(loaded.inputs), find_task(loaded.task).unit == "call"
        example = example_feeds(sample[0], loaded.inputs) if called else sample[0]
        graph_key = key_graph(made_of, loaded.task, example)
        kept = None if isinstance(loaded, OnnxModel) else cache.get(graph_key)
        given = refilled() if kept is None else load_graph(kept)

        def make_graphs() -> Iterator[ir.Model]:
            if given is not None:
                yield given
            yield export_model(loaded, example, opset, sight)
            if find_task(loaded.task).decoder_only:
                yield export_model(loaded, example, opset, sight, repeat=False)

        graph, (inputs, outputs, parity) = find_right(
            make_graphs(), lambda graph: _compare(loaded, graph, example, sample, batches, sight)
        )
        held_by: str | None = graph_key
        if kept is not None and graph is given:
            on_reuse()
        elif kept is None and isinstance(loaded, TorchModel):
            cache.put(graph_key, lambda place: _write_graph_alone(graph, place))
        else:
            write_graph(graph, folder / GRAPH)
            held_by = None
        return {
            HELD_BY: held_by,
            "inputs": to_json(inputs),
            "outputs": to_json(outputs),
            "class_names": list(loaded.class_names),
            "parity": None if parity is None else float(f"{parity:.2e}"),
            "clean_up": list(loaded.clean_up.done.items()) if isinstance(loaded, OnnxModel) else [],  # in its order
        }

    cached, graph = find_or_make(cache, key, write)
    record = cached.record
    return FloatModel(
        GraphState(load_graph(graph)),
        tuple(from_json(TensorSpec, spec, "inputs") for spec in record["inputs"]),
        tuple(from_json(TensorSpec, spec, "outputs") for spec in record["outputs"]),
        tuple(record["class_names"]),
        record["parity"],
        dict(record["clean_up"]),
    )


def key_graph(made_of: str, task_name: str, example: Feeds) -> str:
    """Return the key of a graph by what it is really made of: `made_of` as in `CacheKeys`, and an example's sizes.

    The exporter runs the model on tensors without values, so that no sample's values are in a graph. Sizes stay in the
    key although the axes are free: code may ask for them (`if x.shape[1] > 512`). Tokens of models that write texts are
    exported with sizes of their own, and a decoder without any example.
    """
    task = find_task(task_name)
    if task.decoder_only:
        return made_of

    def sizes(values: np.ndarray) -> Any:
        return list(values.shape) if task.unit == "call" or values.dtype.kind == "f" else values.ndim

    return cache_key("sizes", made_of, {name: [str(a.dtype), sizes(a)] for name, a in example.items()})


def find_or_make(
    cache: ResultCache, key: str, write: Callable[[Path], dict[str, Any]]
) -> tuple[CachedResult, CachedResult]:
    """Return the result of a float model, and the one that holds its graph; made where either is not there."""
    cached = cache.get(key)
    holder = None if cached is None else cache.find_holder(cached)
    if cached is None or holder is None:
        cached = cache.put(key, write)
        holder = cache.find_holder(cached)
        assert holder is not None
    return cached, holder


def _write_graph_alone(graph: ir.Model, folder: Path) -> dict[str, Any]:
    write_graph(graph, folder / GRAPH)
    return {}


def load_graph(cached: CachedResult) -> ir.Model:
    """Return the graph of a result."""
    with cached.hold() as folder:
        return read_graph(folder / GRAPH)


Found = TypeVar("Found")


def find_right(graphs: Iterable[ir.Model], compare: Callable[[ir.Model], Found]) -> tuple[ir.Model, Found]:
    """Return the first of at least one graph that is the model, with what `compare` says; else raise its last error.

    `compare` raises ExportError of a graph that is not.
    """
    failure: ExportError | None = None
    for graph in graphs:
        try:
            return graph, compare(graph)
        except ExportError as error:
            failure = error
    assert failure is not None
    raise failure


def _compare(
    loaded: TorchModel | OnnxModel,
    graph: ir.Model,
    example: Feeds,
    sample: Batches,
    batches: MakeBatches,
    sight: Sight | None,
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...], float | None]:
    """Return what a graph reads and gives, and by how much it differs from its model: with caches in its own calls."""
    if find_task(loaded.task).unit == "call":
        parity = check_parity(loaded, graph, [example, *sample[:PARITY_BATCHES]])
        return loaded.inputs, loaded.outputs, parity
    assert isinstance(loaded, TorchModel)  # or nothing was exported
    read = decoder_of(graph)
    check = check_encoder_decoder_parity if cross_names(graph) else check_decoder_parity
    return input_specs(read), output_specs(read), check(loaded, graph, make_parity_feeds(graph, batches, sight))


def make_parity_feeds(graph: ir.Model, batches: MakeBatches, sight: Sight | None) -> list[Feeds]:
    """Return what a graph with caches is compared with its model on: samples, and a question about an image."""
    some = list(batches(input_specs(decoder_of(graph)))[:PARITY_BATCHES])
    return some if sight is None else [*some, sight.make_feeds(some[0])]


def run_model_pass(
    cache: ResultCache, key: str, config: Pass, loaded: TorchModel, context: ModelContext
) -> PassResult[TorchModel]:
    """Run one pass over a torch model, whose module is changed in place: its values, or its sizes, too."""
    loaded = begin_pass(config, loaded, context)
    module = loaded.module
    before = shapes_of(module)

    def write(folder: Path) -> dict[str, Any]:
        with WorkMeter() as meter:
            result = apply_pass(config, loaded, context)
        result = meter.add_to(result)
        save_model(module, str(folder / WEIGHTS))
        shapes = json.loads(json.dumps(asdict(shapes_of(module).since(before))))
        if result.model.rounded:
            write_rounded(folder, result.model.rounded)
        return {**result_to_record(result), "shapes": shapes, "rounded": bool(result.model.rounded)}

    cached = cache.get(key)
    if cached is None:
        cached = cache.put(key, write)
    else:
        fit(module, shapes_from(cached.record["shapes"]))
    with cached.hold() as folder:
        load_state(module, folder / WEIGHTS)
        rounded = read_rounded(folder) if cached.record["rounded"] else {}
    shapes = loaded.shapes.then(shapes_from(cached.record["shapes"]))
    return result_from_record(cached, replace(loaded, shapes=shapes, rounded=rounded))


def run_graph_pass(
    cache: ResultCache, key: str, config: Pass, state: GraphState, context: GraphContext
) -> PassResult[GraphState]:
    """Run one pass over a graph state, or read its result from the cache."""

    def write(folder: Path) -> dict[str, Any]:
        with WorkMeter() as meter:
            result = apply_pass(config, state, context)
        return _write_result(folder, meter.add_to(result))

    return _read_result(cache.get(key) or cache.put(key, write))


def run_baseline(
    cache: ResultCache, key: str, model: FloatModel, inputs: Inputs, columns: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Return the float model's outputs over the evaluation samples."""

    def write(folder: Path) -> dict[str, Any]:
        save_graph(float_graph(model.state.model), folder / "model.onnx")
        outputs = run_graph(folder / "model.onnx", inputs, model.inputs, columns, exact=True)
        _refuse_broken(outputs)
        for path in folder.iterdir():
            path.unlink()
        write_npz(folder / "outputs.npz", outputs)
        return {}

    cached = cache.get(key) or cache.put(key, write)
    return read_outputs_npz(cached.folder / "outputs.npz")


def keep_both(
    cache: ResultCache, key: str, measure: Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]]]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return (baseline, candidate) outputs of a language model: those of the cache, or what is measured now."""

    def write(folder: Path) -> dict[str, Any]:
        for name, outputs in zip((BASELINE, CANDIDATE), measure(), strict=True):
            write_npz(folder / name, outputs)
        return {}

    cached = cache.get(key) or cache.put(key, write)
    baseline, candidate = (read_outputs_npz(cached.folder / name) for name in (BASELINE, CANDIDATE))
    return baseline, candidate


def _refuse_broken(outputs: Mapping[str, np.ndarray]) -> None:
    """Raise SourceError for a float model that gives NaN or infinity, before any pass works on it."""
    try:
        check_finite(outputs)
    except NonFiniteOutputs as error:
        raise SourceError(f"the float model's outputs on the evaluation set are broken: {error}") from error


def _write_result(folder: Path, result: PassResult[GraphState]) -> dict[str, Any]:
    state = result.model
    write_graph(state.model, folder / GRAPH)
    _save_arrays({name: np.ascontiguousarray(array) for name, array in state.arrays().items()}, folder / ARRAYS)
    (folder / STATE).write_text(json.dumps(state.record(), indent=1))
    return result_to_record(result)


def result_to_record(result: PassResult[object]) -> dict[str, Any]:
    """Return the record of a result: all that it has beside its model, as JSON values."""
    return {
        "decisions": [asdict(decision) for decision in result.decisions],
        "notes": [asdict(note) for note in result.notes],
        "measured": result.measured,
        "seconds": round(result.seconds, 3),
        "choice": result.choice,
        "settled": result.settled,
        "peak_memory_bytes": result.peak_memory_bytes,
    }


def result_from_record(cached: CachedResult, model: Form) -> PassResult[Form]:
    """Restore a result from the cached record, which `result_to_record` made, and from its model."""
    return PassResult(
        model,
        tuple(LayerDecision(**decision) for decision in cached.record["decisions"]),
        tuple(Note(**note) for note in cached.record["notes"]),
        cached.record["measured"],
        cached.record["seconds"],
        cached.record["choice"],
        cached.record["settled"],
        cached.record.get("peak_memory_bytes"),
    )


def _save_arrays(arrays: dict[str, np.ndarray], path: Path) -> None:
    try:
        save_file(arrays, path)
    except SafetensorError as error:  # what the library makes of a full disk
        raise OutputError(f"{path}: cannot be written: {error}; finished work is kept, run again") from error


def _read_result(cached: CachedResult) -> PassResult[GraphState]:
    with cached.hold() as folder:
        record = json.loads((folder / STATE).read_text())
        state = restore_state(read_graph(folder / GRAPH), record, load_file(folder / ARRAYS))
    return result_from_record(cached, state)
