"""Tiny models, a tiny tokenizer and tiny bundles, made anew for each test: no network, no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from runtime.backends import BACKENDS, Session
from runtime.bundle import Artifact, Judgement, Manifest, model_size, write_bundle, write_outputs, write_samples
from runtime.predict import run_samples
from runtime.preprocess import ImagePreprocess, PreprocessSpec, TextPreprocess, make_preprocessor, spec_to_dict

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "on", "mat", "dog", "ran", "far"]
IMAGE = ImagePreprocess(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))


def save(path: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: dict[str, np.ndarray]) -> Path:
    """An .onnx file of opset 20."""
    path.parent.mkdir(parents=True, exist_ok=True)
    initializers = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, initializers)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    return path


def image_model(path: Path, size: int | str = 4, batch: int | str = "batch", seed: int = 0) -> Path:
    """x [batch, 3, size, size] -> logits [batch, 5]: mean over the picture, then a matrix."""
    weight = np.random.default_rng(seed).normal(size=(3, 5)).astype(np.float32)
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weight"], ["logits"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 3, size, size])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, 5])
    return save(path, nodes, [x], [logits], {"weight": weight})


def text_model(path: Path, kind: str = "hidden", seed: int = 0) -> Path:
    """input_ids, attention_mask [batch, sequence] -> hidden: [batch, sequence, 6]; logits: [batch, 6], a masked sum."""
    table = np.random.default_rng(seed).normal(size=(len(WORDS), 6)).astype(np.float32)
    shape = ["batch", "sequence"]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name in ("input_ids", "attention_mask")]
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["embedded"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "last"], ["mask3"]),
        helper.make_node("Mul", ["embedded", "mask3"], ["hidden"]),
        helper.make_node("ReduceSum", ["hidden", "middle"], ["logits"], keepdims=0),
    ]
    shapes: dict[str, list[str | int | None]] = {"hidden": [*shape, 6], "logits": ["batch", 6]}
    output = helper.make_tensor_value_info(kind, TensorProto.FLOAT, shapes[kind])
    weights = {"table": table, "last": np.array([-1]), "middle": np.array([1])}
    return save(path, nodes if kind == "logits" else nodes[:4], inputs, [output], weights)


def write_tokenizer(folder: Path, padding: bool = True, config: dict[str, Any] | None = None) -> Path:
    """A word-level tokenizer.json that sets [CLS] and [SEP] as BERT does, and a tokenizer_config.json if given."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    if padding:
        tokenizer.enable_padding(pad_id=0, pad_token="[PAD]", length=99)
    tokenizer.enable_truncation(77)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def open_onnx(path: Path, backend: str = "onnxruntime-cpu") -> Session:
    return BACKENDS[backend].open(path, 1, {})


def artifact(root: Path, name: str, path: str) -> Artifact:
    session = open_onnx(root / path)
    return Artifact(name, path, "onnxruntime-cpu", "float32", session.inputs, session.outputs, model_size(root / path))


def stage(root: Path, task: str, spec: PreprocessSpec, columns: dict[str, Any]) -> Manifest:
    """Samples and the baseline's outputs in `root`, beside models that are there already; the manifest to write."""
    session = open_onnx(root / "baseline/model.onnx")
    preprocessor = make_preprocessor(spec, session.inputs, root / "model")
    evaluation = write_samples(root, columns)
    write_outputs(root, run_samples(session, preprocessor, task, columns))
    (root / "recipe.yaml").write_text("version: 1\n")
    return Manifest(
        name="tiny",
        task=task,
        target="onnxruntime-cpu",
        class_names=("a", "b", "c", "d", "e"),
        preprocess=spec_to_dict(spec),
        artifacts=(artifact(root, "candidate", "model/model.onnx"), artifact(root, "baseline", "baseline/model.onnx")),
        evaluation=evaluation,
        judgement=Judgement(),
        created_by="compress 0.1.0",
    )


@pytest.fixture
def image_columns() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {"image": rng.integers(0, 256, (7, 4, 4, 3), np.uint8), "label": rng.integers(0, 5, 7)}


@pytest.fixture
def image_bundle(tmp_path: Path, image_columns: dict[str, np.ndarray]) -> Path:
    root = tmp_path / "bundle"
    image_model(root / "model/model.onnx")
    image_model(root / "baseline/model.onnx", seed=1)
    write_bundle(root, stage(root, "image-classification", IMAGE, image_columns))
    return root


@pytest.fixture
def make_text_bundle(tmp_path: Path) -> Callable[..., Path]:
    def make(task: str, columns: dict[str, Any], **spec: Any) -> Path:
        root = tmp_path / "bundle"
        kind = "hidden" if task == "feature-extraction" else "logits"
        text_model(root / "model/model.onnx", kind)
        text_model(root / "baseline/model.onnx", kind, seed=1)
        write_tokenizer(root / "model")
        write_bundle(root, stage(root, task, TextPreprocess(**spec), columns))
        return root

    return make


class Tiny:
    """The functions above, as one fixture: test files need no import of each other."""

    words = WORDS
    image_spec = IMAGE
    save = staticmethod(save)
    image_model = staticmethod(image_model)
    text_model = staticmethod(text_model)
    write_tokenizer = staticmethod(write_tokenizer)
    open_onnx = staticmethod(open_onnx)
    stage = staticmethod(stage)


@pytest.fixture
def tiny() -> type[Tiny]:
    return Tiny
