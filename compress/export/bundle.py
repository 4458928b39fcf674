"""Assemble a bundle: everything that decides its bytes is in the arguments, so same in, same bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from compress.blocks.streamed import StreamedModel
from compress.engine.compile import compile_order, why_not_here
from compress.engine.orders import find_needed_ranges, orders_of, ranges_of
from compress.export.card import model_card
from compress.export.checkpoint import write_checkpoint
from compress.export.executorch import write_pte
from compress.export.first_token import write_first_token
from compress.export.genai import write_genai_config
from compress.export.gguf import FILE, write_gguf
from compress.export.imatrix import Imatrix
from compress.export.loading_back import LoadBack, check_loads_back
from compress.export.onnx import finish, float_graph, save_graph
from compress.export.openvino import reads_texts, write_ir, write_tokenizer
from compress.export.ort import write_ort
from compress.export.torch_module import write_module
from compress.facts import Note
from compress.formats.targets import TARGETS
from compress.graph.halves import cache_of_decoder, cross_names
from compress.graph.layers import find_layers
from compress.graph.seeing import decoder_of
from compress.graph.specs import cache_of, input_specs, output_specs
from compress.graph.stored import holds_stored
from compress.models.load import TorchModel
from compress.recipe.exports import (
    CheckpointExport,
    Engine,
    EngineExport,
    ExecutorchExport,
    GgufExport,
    OpenVinoExport,
    OrtExport,
)
from compress.recipe.remedies import REMEDIES
from compress.recipe.schema import Recipe
from compress.rounding.state import FLOAT8, GraphState
from compress.version import __version__
from runtime.bundle.detections import Detections
from runtime.bundle.engine import EngineOrder
from runtime.bundle.files import ir_files, write_whole
from runtime.bundle.format import (
    HOST,
    REMEDIES_FILE,
    Artifact,
    BuildScore,
    Generation,
    Judgement,
    Manifest,
    RecordedMetric,
    checkpoint_size,
    model_size,
    write_candidate_outputs,
    write_outputs,
    write_recorded,
    write_samples,
)
from runtime.bundle.manifest import PromptImages
from runtime.bundle.tensors import State, TensorSpec
from runtime.encode.preprocess import PreprocessSpec, Seq2SeqPreprocess, spec_to_dict
from runtime.judge.evidence import select_metrics
from runtime.judge.frozen import record_metrics
from runtime.tasks.manifest import write_bundle

TEMPLATE = "chat_template.jinja"
FOLDER_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    TEMPLATE,
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
)
"""What travels beside model.onnx from a Hugging Face folder, so that other tools load the folder too."""


@dataclass(frozen=True)
class Graphs:
    """What ONNX files are written from: the float graph, what the passes decided, what a call reads and gives."""

    float_model: ir.Model
    state: GraphState
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    with_float: bool = True
    """Whether the float graph is written, to be run beside the candidate."""
    states: tuple[State, ...] = ()
    """What a call hands on to the next; `inputs` and `outputs` are then of whole sequences."""


@dataclass(frozen=True)
class Contents:
    """What a bundle is made of."""

    recipe: Recipe
    recipe_yaml: str
    lock: dict[str, Any]
    host: dict[str, Any]
    """What is of this machine alone; no digest covers it."""
    preprocess: PreprocessSpec
    folder: Path | None
    tokenizer: Path | None
    samples: Mapping[str, Any]
    layers: Sequence[Mapping[str, Any]]
    judgement: Judgement
    """The recipe's, with the names that own metrics have in a bundle."""
    slices: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By which samples are told apart."""
    graphs: Graphs | None = None
    """None: no ONNX file is written."""
    streamed: StreamedModel | None = None
    """What checkpoints are written from."""
    imatrix: Imatrix | None = None
    """What GGUF files get beside them."""
    module: TorchModel | None = None
    """The torch module that is kept; None: none is."""
    class_names: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    """Of a graph's config.json; None: that of `folder` is true of what the passes left."""
    generation: Generation | None = None
    images: PromptImages | None = None
    template: str | None = None
    """The chat template that images were tried with; None: the folder's own, if it has one."""
    cache: Path | None = None
    """Where timing caches of engines are kept; None: the user's folder."""
    surplus: Mapping[str, Path] = field(default_factory=dict)
    """What checkpoints hold that is no part of the model, as of `write_checkpoint`."""
    load_back: LoadBack | None = None
    """What checkpoints are loaded back with; None: they are not."""
    source_bytes: int | None = None
    """Of the weight files that the model came in, where no baseline is written."""
    detections: Detections | None = None
    """Of a detector: what its outputs mean."""


@dataclass(frozen=True)
class FrozenOutputs:
    """What the models gave on the samples, as far as a bundle keeps it."""

    baseline: Mapping[str, np.ndarray]
    candidate: Mapping[str, np.ndarray] | None = None
    """Of one that the runtime cannot run: measured at the build."""
    score: BuildScore | None = None
    """How `candidate` was measured."""
    recorded: tuple[RecordedMetric, ...] = ()
    recorded_values: tuple[Sequence[np.ndarray], Sequence[np.ndarray]] | None = None
    """Of the metrics `recorded`, for baseline and candidate."""


def write_models(staging: Path, contents: Contents) -> tuple[Manifest, list[Note]]:
    """Write the models under `staging`; return a manifest with which they can be run, and notes on the files.

    Raises ExportError, BundleError.
    """
    recipe = contents.recipe
    artifacts, orders, notes = _write_artifacts(staging, contents)
    if contents.module is not None:
        write_module(staging, contents.module)
    return Manifest(
        name=recipe.name,
        task=recipe.model.task,
        target=recipe.target,
        class_names=contents.class_names,
        preprocess=spec_to_dict(contents.preprocess),
        detections=contents.detections,
        artifacts=tuple(artifacts),
        evaluation=None,
        judgement=contents.judgement,
        postprocess=recipe.postprocess,
        generation=contents.generation,
        images=contents.images if contents.graphs is not None else None,
        source_bytes=contents.source_bytes,
        orders=tuple(orders),
        created_by=f"compress {__version__}",
    ), notes


def assemble(
    staging: Path, manifest: Manifest, notes: Sequence[Note], contents: Contents, frozen: FrozenOutputs | None
) -> Manifest:
    """Write what a bundle has beside its models, and then its manifest, which is returned; BundleError.

    `manifest`, `notes`: what `write_models` gave. `frozen`: None of a model that nothing runs, so that there are no
    samples.
    """
    if frozen is not None:
        manifest = _write_evaluation(staging, manifest, contents, frozen)
    (staging / "recipe.yaml").write_text(contents.recipe_yaml, encoding="utf-8")
    write_json(staging / "lock.json", contents.lock)
    here = [note.text for note in notes if note.here]
    write_json(staging / HOST, {**contents.host, "notes": here})
    layers = [*_name_weights(contents.layers, contents.graphs), *note_rows(notes)]
    write_json(staging / "layers.json", layers)
    write_json(staging / REMEDIES_FILE, REMEDIES)
    (staging / "README.md").write_text(model_card(manifest, contents.lock, layers), encoding="utf-8")
    return write_bundle(staging, manifest)


def _write_evaluation(staging: Path, manifest: Manifest, contents: Contents, frozen: FrozenOutputs) -> Manifest:
    """Write the samples and what the models gave on them; return the manifest with their records."""
    labels = contents.samples.get("label")
    metrics = select_metrics(contents.recipe.model.task, frozen.baseline, labels, contents.judgement)
    evaluation = replace(
        write_samples(staging, contents.samples, contents.slices),
        baseline_metrics=record_metrics(metrics, frozen.baseline, labels),
    )
    write_outputs(staging, frozen.baseline)
    if frozen.candidate is not None:
        write_candidate_outputs(staging, frozen.candidate)
    if frozen.recorded_values is not None:
        write_recorded(staging, *frozen.recorded_values)
    return replace(manifest, evaluation=evaluation, recorded=frozen.recorded, score=frozen.score)


def _name_weights(rows: Sequence[Mapping[str, Any]], graphs: Graphs | None) -> list[dict[str, Any]]:
    """Return the rows of layers with the names that their weights have in the float graph, where there is one."""
    layers = find_layers(graphs.float_model) if graphs is not None else []
    weights = {layer.name: {"weight": layer.weight.name} for layer in layers}
    return [{**row, **weights.get(str(row["layer"]), {})} for row in rows]


def note_rows(notes: Sequence[Note]) -> list[dict[str, Any]]:
    """Return notes as rows of layers.json, those of this machine alone left out."""
    shared = [note for note in notes if not note.here]
    return [{"layer": "", "type": "note", "action": note.level, "reason": note.text} for note in shared]


def _write_artifacts(staging: Path, contents: Contents) -> tuple[list[Artifact], list[EngineOrder], list[Note]]:
    """Write the float graph if there are graphs, then every export; that for the recipe's target is the candidate."""
    recipe = contents.recipe
    artifacts: list[Artifact] = []
    orders: list[EngineOrder] = []
    notes: list[Note] = []
    if contents.graphs is not None and contents.graphs.with_float:
        graph = float_graph(contents.graphs.float_model)
        artifacts.append(
            _write_graph(staging / "baseline", graph, "baseline", "float32", contents.graphs, recipe.target)
        )
    for export in recipe.export:
        target = recipe.target_of(export)
        main = target == recipe.target
        if isinstance(export, GgufExport):
            folder = staging / ("model" if main else "gguf")
            artifact, file_notes = _write_gguf(folder, "candidate" if main else "gguf", export, contents)
        elif isinstance(export, CheckpointExport):
            folder = staging / ("model" if main else "checkpoint")
            artifact, file_notes = _write_checkpoint(folder, "candidate" if main else "checkpoint", export, contents)
        else:
            folder = staging / ("model" if main else f"model-{target}")
            artifact, file_notes = _write_target_graph(
                folder, "candidate" if main else f"candidate-{target}", target, contents
            )
        artifacts.append(artifact)
        notes += file_notes
        if isinstance(export, OpenVinoExport):
            ir_artifact, file_notes = _write_openvino(staging, artifact, contents)
            artifacts.append(ir_artifact)
            notes += file_notes
        if isinstance(export, OrtExport):
            path = write_ort(staging / artifact.path, staging / "ort")
            size, name = path.stat().st_size, f"ort/{path.name}"
            artifacts.append(replace(artifact, name="ort", path=name, size_bytes=size, kind="ort"))
        if isinstance(export, ExecutorchExport):
            programs, file_notes = _write_executorch(staging, (artifact, artifacts[0]), contents)
            artifacts += programs
            notes += file_notes
        if isinstance(export, EngineExport):
            pair = (artifact, artifacts[0])
            made = _write_engines(
                staging, export, recipe, contents.preprocess, contents.generation, pair, contents.cache
            )
            artifacts += made.artifacts
            orders += made.orders
            notes += made.notes
    return artifacts, orders, notes


def _write_target_graph(folder: Path, name: str, target: str, contents: Contents) -> tuple[Artifact, list[Note]]:
    """Write the graph in the form that a target is fast on, and the files that tools expect beside it."""
    graphs = contents.graphs
    assert graphs is not None
    graph, texts = finish(graphs.state, TARGETS[target])
    notes = [Note("slow", text) for text in texts]
    artifact = _write_graph(folder, graph, name, precision(graphs.state), graphs, target)
    if contents.template is not None:
        (folder / TEMPLATE).write_text(contents.template, encoding="utf-8")
    if contents.folder is not None:
        _describe_graph(contents.folder, folder, contents)
        if isinstance(contents.preprocess, Seq2SeqPreprocess):
            _copy_file(contents.folder, folder, contents.preprocess.target.tokenizer)
        notes += write_first_token(folder, contents.preprocess)
        shared = artifact.cache is not None and artifact.cache.shared_buffer and not artifact.cache.states
        shared &= contents.images is None  # whose folder has files of other names there
        if shared and (folder / "config.json").is_file():
            write_genai_config(folder, graph, contents.generation.context_length if contents.generation else None)
    return artifact, notes


def _write_openvino(staging: Path, graph: Artifact, contents: Contents) -> tuple[Artifact, list[Note]]:
    """Write the folder openvino/ from a graph that lies in the bundle: the IR, the tokenizer, the model's settings."""
    folder = staging / "openvino"
    path, inputs, outputs = write_ir(staging / graph.path, folder)
    notes: list[Note] = []
    if contents.folder is not None:
        _describe_graph(contents.folder, folder, contents)
        if reads_texts(contents.preprocess):
            columns = [column for column in contents.samples.values() if len(column) and isinstance(column[0], str)]
            notes = write_tokenizer(folder, [text for column in columns for text in column])
    return replace(
        graph,
        name=f"ir-{graph.target}",
        path=f"{folder.name}/{path.name}",
        inputs=inputs,
        outputs=outputs,
        size_bytes=sum(file.stat().st_size for file in ir_files(path)),
        kind="openvino",
    ), notes


def _write_executorch(
    staging: Path, made_from: tuple[Artifact, Artifact], contents: Contents
) -> tuple[list[Artifact], list[Note]]:
    """Write the folder executorch/: the .pte of the result, and that of the float model, beside which it is judged.

    `made_from`: their graphs in the bundle.
    """
    graphs, (graph, baseline) = contents.graphs, made_from
    assert graphs is not None
    ranges = find_needed_ranges(contents.recipe, contents.preprocess, None)[0]
    states = {
        f"pte-{graph.target}": (graph, graphs.state.for_target(graph.target)),
        f"baseline-{graph.target}": (baseline, GraphState(graphs.float_model)),
    }
    artifacts, notes = [], list[Note]()
    for name, (source, state) in states.items():
        path = staging / "executorch" / ("model.pte" if source is graph else "baseline.pte")
        told = write_pte(state, (graphs.inputs, graphs.outputs), ranges, path)
        notes += told if source is graph else []
        size, inner = path.stat().st_size, path.relative_to(staging).as_posix()
        artifacts.append(replace(source, name=name, path=inner, target=graph.target, size_bytes=size, kind="pte"))
    return artifacts, notes


def _write_checkpoint(
    folder: Path, name: str, export: CheckpointExport, contents: Contents
) -> tuple[Artifact, list[Note]]:
    """Write the folder that transformers and vLLM load, and load it back where the contents say with what."""
    model = contents.streamed
    assert model is not None
    trusted = contents.recipe.model.trust_remote_code
    notes = write_checkpoint(folder, model, export, contents.recipe_yaml, trusted, contents.surplus)
    if contents.folder is not None:
        _copy_folder_files(contents.folder, folder)
        notes += write_first_token(folder, contents.preprocess) if contents.samples else []
    target = contents.recipe.target_of(export)
    if contents.load_back is not None:
        notes += check_loads_back(folder, model, export, target, contents.load_back)
    return Artifact(
        name=name,
        path=f"{folder.name}/config.json",
        target=target,
        precision=_name_schemes(model),
        inputs=(),
        outputs=(),
        size_bytes=checkpoint_size(folder / "config.json"),
        kind="checkpoint",
        remote_code=trusted,
    ), notes


def _write_gguf(folder: Path, name: str, export: GgufExport, contents: Contents) -> tuple[Artifact, list[Note]]:
    """Write the file that llama.cpp loads."""
    model, path = contents.streamed, folder / FILE
    assert model is not None
    notes = write_gguf(path, model, export, contents.recipe.name, contents.imatrix if export.imatrix else None)
    return Artifact(
        name=name,
        path=f"{folder.name}/{FILE}",
        target=contents.recipe.target_of(export),
        precision=_name_schemes(model),
        inputs=(),
        outputs=(),
        size_bytes=path.stat().st_size,
        kind="gguf",
    ), notes


def _name_schemes(model: StreamedModel) -> str:
    return " + ".join(sorted({scheme.name for scheme in model.schemes.values()})) or "as it was"


def precision(state: GraphState) -> str:
    """Return what the weights are stored in, in words: "int8", "float8", "int4 + float16", ..."""
    types = {f"{'float' if w.values.dtype == FLOAT8 else 'int'}{w.bits}" for w in state.weights.values()}
    return " + ".join([*sorted(types), *([state.half] if state.half else [])]) or "float32"


def _write_graph(folder: Path, graph: ir.Model, name: str, stored: str, graphs: Graphs, target: str) -> Artifact:
    path = folder / "model.onnx"
    save_graph(graph, path, load=name != "baseline" or not holds_stored(graph))  # it was compared piece by piece
    cross = cross_names(graph)
    cache = cache_of_decoder(graph) if cross else cache_of(graph)
    graph = decoder_of(graph)
    return Artifact(
        name=name,
        path=f"{folder.name}/model.onnx",
        target=target,
        precision=stored,
        inputs=graphs.inputs if cache is None else input_specs(graph),
        outputs=graphs.outputs
        if cache is None
        else tuple(spec for spec in output_specs(graph) if spec.name not in cross),
        size_bytes=model_size(path),
        cache=cache,
        states=graphs.states,
    )


def _describe_graph(source: Path, folder: Path, contents: Contents) -> None:
    """Write beside a graph what tools read of a folder: `source`'s files, but for a config.json that is given."""
    if contents.config is not None:
        write_json(folder / "config.json", contents.config)
    _copy_folder_files(source, folder, contents.tokenizer)


def _copy_folder_files(source: Path, folder: Path, tokenizer: Path | None = None) -> None:
    """Copy FOLDER_FILES that `folder` lacks from `source`; tokenizer.json from the folder `tokenizer`, where given."""
    for name in FOLDER_FILES:
        origin = tokenizer if tokenizer is not None and name == "tokenizer.json" else source
        _copy_file(origin, folder, name)


def _copy_file(source: Path, folder: Path, name: str) -> None:
    if (source / name).is_file() and not (folder / name).exists():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, folder / name)


def write_json(path: Path, value: Any) -> None:
    """Write JSON as all files of a bundle but its manifest and reports are written: keys sorted, two spaces."""
    write_whole(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


@dataclass(frozen=True)
class Engines:
    """`artifacts`: of the orders that were compiled."""

    orders: tuple[EngineOrder, ...]
    artifacts: tuple[Artifact, ...]
    notes: tuple[Note, ...]


def _write_engines(
    root: Path,
    export: Engine,
    recipe: Recipe,
    preprocess: PreprocessSpec,
    generation: Generation | None,
    graphs: tuple[Artifact, Artifact],
    cache: Path | None,
) -> Engines:
    """Write engines of `graphs` (candidate, baseline) under `root`. `cache`: holds the timing cache. ExportError."""
    graph, baseline = graphs
    ranges = ranges_of(export, recipe, preprocess, generation, graph.inputs)
    orders = orders_of(export, ranges, graph, baseline)
    made: list[Artifact] = []
    notes: list[Note] = []
    for order, source in zip(orders, graphs, strict=True):
        if text := why_not_here(order):
            notes.append(Note("warning", f"{order.name}: left for `compress compile` on the target machine: {text}"))
            continue
        artifact, compile_notes = compile_order(root, order, source, cache)
        made.append(artifact)
        notes += compile_notes
    return Engines(tuple(orders), tuple(made), tuple(notes))
