"""Assembling a bundle: everything that decides its bytes is in the arguments, so same in, same bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from compress import __version__
from compress.export.card import model_card
from compress.export.onnx import finished_graph, float_graph, save_graph
from compress.quantize.state import GraphState
from compress.schema import Recipe
from compress.targets import TARGETS
from runtime.bundle import Artifact, Manifest, TensorSpec, model_size, write_bundle, write_outputs, write_samples
from runtime.preprocess import PreprocessSpec, spec_to_dict

FOLDER_FILES = (
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
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
class Contents:
    """What a bundle is made of."""

    recipe: Recipe
    recipe_yaml: str
    lock: dict[str, Any]
    float_model: ir.Model
    state: GraphState
    preprocess: PreprocessSpec
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    folder: Path | None
    class_names: tuple[str, ...]
    samples: Mapping[str, Any]
    baseline_outputs: Mapping[str, np.ndarray]
    layers: Sequence[Mapping[str, Any]]


def assemble(staging: Path, contents: Contents) -> Manifest:
    """Write every file of the bundle under `staging`, then its manifest. Raises ExportError, BundleError."""
    recipe = contents.recipe
    artifacts = [_write_model(staging / "baseline", float_graph(contents.float_model), "baseline", "float32", contents)]
    for export in recipe.export:
        target = export.target or recipe.target
        main = target == recipe.target
        graph = finished_graph(contents.state, TARGETS[target])
        folder, name = (
            (staging / "model", "candidate") if main else (staging / f"model-{target}", f"candidate-{target}")
        )
        artifacts.append(_write_model(folder, graph, name, precision(contents.state), contents, target))
        if contents.folder is not None:
            _copy_folder_files(contents.folder, folder)
    evaluation = write_samples(staging, contents.samples)
    write_outputs(staging, contents.baseline_outputs)
    (staging / "recipe.yaml").write_text(contents.recipe_yaml, encoding="utf-8")
    _write_json(staging / "lock.json", contents.lock)
    _write_json(staging / "layers.json", list(contents.layers))
    manifest = Manifest(
        name=recipe.name,
        task=recipe.model.task,
        target=recipe.target,
        class_names=contents.class_names,
        preprocess=spec_to_dict(contents.preprocess),
        artifacts=tuple(artifacts),
        evaluation=evaluation,
        judgement=recipe.validate_,
        created_by=f"compress {__version__}",
    )
    (staging / "README.md").write_text(model_card(manifest, contents.lock, contents.layers), encoding="utf-8")
    return write_bundle(staging, manifest)


def precision(state: GraphState) -> str:
    """What the weights are stored in, in words: "int8", "int4 + float16", ..."""
    found = {f"int{weight.bits}" for weight in state.weights.values()}
    return " + ".join([*sorted(found), *([state.half] if state.half else [])]) or "float32"


def _write_model(
    folder: Path, graph: ir.Model, name: str, stored: str, contents: Contents, target: str | None = None
) -> Artifact:
    path = folder / "model.onnx"
    save_graph(graph, path)
    return Artifact(
        name=name,
        path=f"{folder.name}/model.onnx",
        target=target or contents.recipe.target,
        precision=stored,
        inputs=contents.inputs,
        outputs=contents.outputs,
        size_bytes=model_size(path),
    )


def _copy_folder_files(source: Path, folder: Path) -> None:
    for name in FOLDER_FILES:
        if (source / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, folder / name)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
