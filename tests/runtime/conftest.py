"""Tiny models, a tiny tokenizer and tiny bundles, made anew for each test: no network, no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from shortcuts import judge_here

from runtime.backends import BACKENDS, Session
from runtime.bundle.detections import Detections, HeadOutputs
from runtime.bundle.format import (
    Artifact,
    Benchmark,
    Generation,
    Judgement,
    KvCacheSpec,
    Manifest,
    model_size,
    write_outputs,
    write_samples,
)
from runtime.encode.preprocess import (
    ImagePreprocess,
    LanguagePreprocess,
    PreprocessSpec,
    TextPreprocess,
    make_preprocessor,
    spec_to_dict,
)
from runtime.tasks.base import BatchFacts
from runtime.tasks.manifest import write_bundle
from runtime.tasks.predict import run_samples

__all__ = ["judge_here"]

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


def segment_model(path: Path, seed: int = 0) -> Path:
    """x [batch, 3, 4, 4] -> logits [batch, 5, 2, 2]: the mean of each quarter, then a matrix."""
    weight = np.random.default_rng(seed).normal(size=(5, 3, 2, 2)).astype(np.float32)
    node = helper.make_node("Conv", ["x", "weight"], ["logits"], kernel_shape=[2, 2], strides=[2, 2])
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 4, 4])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 5, 2, 2])
    return save(path, [node], [x], [logits], {"weight": weight})


def span_model(path: Path, seed: int = 0, batch: int | str = "batch") -> Path:
    """input_ids, attention_mask -> start_logits, end_logits [batch, sequence]: each token's own."""
    shape = [batch, "sequence"]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name in ("input_ids", "attention_mask")]
    outputs = [helper.make_tensor_value_info(f"{k}_logits", TensorProto.FLOAT, shape) for k in ("start", "end")]
    nodes = [helper.make_node("Gather", [k, "input_ids"], [f"{k}_logits"]) for k in ("start", "end")]
    tables = np.random.default_rng(seed).normal(size=(2, len(WORDS))).astype(np.float32)
    return save(path, nodes, inputs, outputs, {"start": tables[0], "end": tables[1]})


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


def stage(
    root: Path, task: str, spec: PreprocessSpec, columns: dict[str, Any], detections: Detections | None = None
) -> Manifest:
    """Samples and the baseline's outputs in `root`, beside models that are there already; the manifest to write."""
    session = open_onnx(root / "baseline/model.onnx")
    preprocessor = make_preprocessor(spec, session.inputs, root / "model")
    evaluation = write_samples(root, columns)
    names = ("a", "b", "c", "d", "e")
    facts = BatchFacts(class_names=names, detections=detections)
    write_outputs(root, run_samples(session, preprocessor, task, columns, facts=facts))
    (root / "recipe.yaml").write_text("version: 1\n")
    return Manifest(
        name="tiny",
        task=task,
        target="onnxruntime-cpu",
        class_names=names,
        preprocess=spec_to_dict(spec),
        detections=detections,
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
    return write_image_bundle(tmp_path / "bundle", image_columns)


def write_image_bundle(root: Path, columns: dict[str, np.ndarray]) -> Path:
    image_model(root / "model/model.onnx")
    image_model(root / "baseline/model.onnx", seed=1)
    write_bundle(root, stage(root, "image-classification", IMAGE, columns))
    return root


@pytest.fixture
def make_text_bundle(tmp_path: Path) -> Callable[..., Path]:
    return partial(write_text_bundle, tmp_path / "bundle")


def write_segment_bundle(root: Path) -> Path:
    for name, seed in (("model", 0), ("baseline", 1)):
        segment_model(root / name / "model.onnx", seed)
    rng = np.random.default_rng(1)
    sizes = [(4, 4), (6, 5), (4, 4)]
    images = [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]
    labels = [rng.integers(0, 5, size, np.uint8) for size in sizes]
    spec = replace(IMAGE, resize=(4, 4))
    write_bundle(root, stage(root, "semantic-segmentation", spec, {"image": images, "label": labels}))
    return root


def box_model(path: Path, seed: int = 0) -> Path:
    """x [batch, 3, 4, 4] -> rows [batch, 3, 6]: corners, score, class; moved by the picture's mean."""
    weight = np.random.default_rng(seed).normal(size=(3, 18)).astype(np.float32) / 50
    base = np.array([[0, 0, 2, 2, 0.9, 0], [1, 1, 4, 3, 0.8, 3], [0, 0, 0, 0, 0, 0]], np.float32).reshape(-1)
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("MatMul", ["flat", "weight"], ["moved"]),
        helper.make_node("Add", ["moved", "base"], ["joined"]),
        helper.make_node("Reshape", ["joined", "shape"], ["rows"]),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 4, 4])
    rows = helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["batch", 3, 6])
    return save(path, nodes, [x], [rows], {"weight": weight, "base": base, "shape": np.array([-1, 3, 6])})


def write_box_bundle(root: Path) -> Path:
    for name, seed in (("model", 0), ("baseline", 1)):
        box_model(root / name / "model.onnx", seed)
    images = [np.full((*size, 3), 90, np.uint8) for size in ((4, 4), (8, 6), (4, 4))]
    labels = np.zeros((3, 1, 7))
    labels[:, 0, 3:5] = 2
    stated = Detections(
        boxes="xyxy", normalized=False, scores="none", suppress="none", outputs=HeadOutputs(rows="rows")
    )
    spec = replace(IMAGE, resize=(4, 4))
    columns = {"image": images, "label": labels}
    write_bundle(root, stage(root, "object-detection", spec, columns, replace(stated, most=3)))
    return root


def write_span_bundle(root: Path, batch: int | str = "batch", **spec: Any) -> Path:
    for name, seed in (("model", 0), ("baseline", 1)):
        span_model(root / name / "model.onnx", seed, batch)
    write_tokenizer(root / "model")
    contexts = ["the cat sat on the mat " * 3, "a dog ran far", "mat"]
    questions = ["the cat", "dog ran", "far"]
    columns = {"question": questions, "context": contexts, "label": ["4\tcat\nmat", "", "mat"]}
    settings = TextPreprocess(**{"max_length": 12, "stride": 2, **spec})
    write_bundle(root, stage(root, "question-answering", settings, columns))
    return root


def write_text_bundle(root: Path, task: str, columns: dict[str, Any], **spec: Any) -> Path:
    kind = "hidden" if task in ("feature-extraction", "token-classification") else "logits"
    text_model(root / "model/model.onnx", kind)
    text_model(root / "baseline/model.onnx", kind, seed=1)
    write_tokenizer(root / "model")
    write_bundle(root, stage(root, task, TextPreprocess(**spec), columns))
    return root


# decoders

VOCAB, WIDTH, HEADS, SIZE, CONTEXT = 258, 16, 2, 8, 64
"""256 bytes, <s> 256, </s> 257; WIDTH is HEADS x SIZE."""


def decoder_weights(seed: int = 0, layers: int = 2) -> dict[str, np.ndarray]:
    """Random weights of a small attention model; large enough that its distributions are far from flat."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (VOCAB, WIDTH),
        "places": (4 * CONTEXT, WIDTH),
        "head": (WIDTH, VOCAB),
    }
    shapes |= {f"{name}{layer}": (WIDTH, WIDTH) for layer in range(layers) for name in "qkvo"}
    scales = {"embed": 1.0, "head": 0.6}
    return {name: (rng.normal(size=s) * scales.get(name, 0.25)).astype(np.float32) for name, s in shapes.items()}


def decoder_logits(weights: dict[str, np.ndarray], ids: Any) -> np.ndarray:
    """The model without any cache or padding, in float64: tokens [t] -> logits [t, VOCAB]."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    n = len(ids)
    x = w["embed"][np.asarray(ids)] + w["places"][:n]  # [t, WIDTH]
    for layer in range(len([name for name in w if name.startswith("q")])):
        q, k, v = ((x @ w[f"{name}{layer}"]).reshape(n, HEADS, SIZE) for name in "qkv")
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(SIZE)
        scores[:, np.triu(np.ones((n, n), bool), 1)] = -np.inf
        chances = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hij,jhd->ihd", chances / chances.sum(-1, keepdims=True), v).reshape(n, WIDTH)
        x = x + mixed @ w[f"o{layer}"]
    return x @ w["head"]


def decoder_model(path: Path, seed: int = 0, shared: bool = False, layers: int = 2, noise: float = 0.0) -> Path:
    """The same as a graph with a key-value cache; `shared`: GroupQueryAttention on one buffer; `noise` in the head."""
    weights = decoder_weights(seed, layers)
    weights["head"] = weights["head"] + noise * np.random.default_rng(99).normal(size=(WIDTH, VOCAB)).astype(np.float32)
    consts: dict[str, np.ndarray] = {
        "one": np.array(1),
        "zero": np.array(0),
        "axis": np.array(1),
        "far": np.array([2**62]),
        "first": np.array([1]),
        "lanes": np.array([1, 2]),
        "rows": np.array([0]),
        "heads": np.array([0, 0, HEADS, SIZE]),
        "flat": np.array([0, 0, WIDTH]),
        "root": np.array(np.sqrt(SIZE), np.float32),
        "no": np.array(-1e9, np.float32),
        "yes": np.array(0, np.float32),
    }
    make = helper.make_node
    nodes = [
        make("Shape", ["input_ids"], ["sequence"], start=1, end=2),
        make("Shape", ["attention_mask"], ["total"], start=1, end=2),
        make("CumSum", ["attention_mask", "axis"], ["counted"]),
        make("Sub", ["counted", "one"], ["before"]),
        make("Max", ["before", "zero"], ["places_all"]),
        make("Sub", ["total", "sequence"], ["start"]),
        make("Slice", ["places_all", "start", "far", "first"], ["place_ids"]),
        make("Gather", ["embed", "input_ids"], ["tokens"]),
        make("Gather", ["places", "place_ids"], ["placed"]),
        make("Add", ["tokens", "placed"], ["x0"]),
    ]
    nodes += _shared_mask() if shared else _plain_mask()
    for i in range(layers):
        nodes += [make("MatMul", [f"x{i}", f"{name}{i}"], [f"{name}_{i}"]) for name in "qkv"]
        nodes += _shared_attention(i) if shared else _plain_attention(i)
        nodes += [make("MatMul", [f"mixed{i}", f"o{i}"], [f"out{i}"]), make("Add", [f"x{i}", f"out{i}"], [f"x{i + 1}"])]
    nodes.append(make("MatMul", [f"x{layers}", "head"], ["logits"]))
    ints = {"input_ids": ["batch", "sequence"], "attention_mask": ["batch", "total"]}
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, shape) for name, shape in ints.items()]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "sequence", VOCAB])]
    for i, kind in ((i, kind) for i in range(layers) for kind in ("key", "value")):
        for name, length, into in (("past_key_values", "past", inputs), ("present", "kept", outputs)):
            shape = ["batch", HEADS, length, SIZE]
            into.append(helper.make_tensor_value_info(f"{name}.{i}.{kind}", TensorProto.FLOAT, shape))
    path.parent.mkdir(parents=True, exist_ok=True)
    initializers = [numpy_helper.from_array(np.asarray(value), name) for name, value in {**weights, **consts}.items()]
    graph = helper.make_graph(nodes, "decoder", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
    return path


def _plain_mask() -> list[Any]:
    """bias [batch, 1, sequence, total]: 0 where a token is that came no later, else -1e9."""
    make = helper.make_node
    return [
        make("Squeeze", ["total"], ["n_total"]),
        make("Squeeze", ["start"], ["n_start"]),
        make("Range", ["zero", "n_total", "one"], ["keys"]),
        make("Range", ["n_start", "n_total", "one"], ["queries"]),
        make("Unsqueeze", ["queries", "first"], ["queries2"]),
        make("LessOrEqual", ["keys", "queries2"], ["causal"]),
        make("Cast", ["attention_mask"], ["real"], to=TensorProto.BOOL),
        make("Unsqueeze", ["real", "lanes"], ["real4"]),
        make("And", ["causal", "real4"], ["allowed"]),
        make("Where", ["allowed", "yes", "no"], ["bias"]),
    ]


def _plain_attention(i: int) -> list[Any]:
    make, nodes = helper.make_node, []
    for name in "qkv":
        nodes += [
            make("Reshape", [f"{name}_{i}", "heads"], [f"{name}4_{i}"]),
            make("Transpose", [f"{name}4_{i}"], [f"{name}t_{i}"], perm=[0, 2, 1, 3]),
        ]
    for name, kind in (("k", "key"), ("v", "value")):
        nodes.append(make("Concat", [f"past_key_values.{i}.{kind}", f"{name}t_{i}"], [f"present.{i}.{kind}"], axis=2))
    return [
        *nodes,
        make("Transpose", [f"present.{i}.key"], [f"kk_{i}"], perm=[0, 1, 3, 2]),
        make("MatMul", [f"qt_{i}", f"kk_{i}"], [f"raw_{i}"]),
        make("Div", [f"raw_{i}", "root"], [f"scaled_{i}"]),
        make("Add", [f"scaled_{i}", "bias"], [f"scores_{i}"]),
        make("Softmax", [f"scores_{i}"], [f"chances_{i}"], axis=-1),
        make("MatMul", [f"chances_{i}", f"present.{i}.value"], [f"by_head_{i}"]),
        make("Transpose", [f"by_head_{i}"], [f"back_{i}"], perm=[0, 2, 1, 3]),
        make("Reshape", [f"back_{i}", "flat"], [f"mixed{i}"]),
    ]


def _shared_mask() -> list[Any]:
    make = helper.make_node
    return [
        make("ReduceSum", ["attention_mask", "first"], ["lengths"], keepdims=0),
        make("Sub", ["lengths", "one"], ["last"]),
        make("Cast", ["last"], ["seqlens"], to=TensorProto.INT32),
        make("Squeeze", ["total"], ["n_total"]),
        make("Cast", ["n_total"], ["total32"], to=TensorProto.INT32),
    ]


def _shared_attention(i: int) -> list[Any]:
    past, present = ([f"{name}.{i}.{kind}" for kind in ("key", "value")] for name in ("past_key_values", "present"))
    inputs = [f"q_{i}", f"k_{i}", f"v_{i}", *past, "seqlens", "total32"]
    sizes = {"num_heads": HEADS, "kv_num_heads": HEADS}
    return [helper.make_node("GroupQueryAttention", inputs, [f"mixed{i}", *present], domain="com.microsoft", **sizes)]


def write_byte_tokenizer(folder: Path, config: dict[str, Any] | None = None) -> Path:
    """A token for each byte, <s> 256 and </s> 257, and a post-processor that would add <s>."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.enable_truncation(9)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def kv_cache(shared: bool = False, layers: int = 2) -> KvCacheSpec:
    return KvCacheSpec(layers, HEADS, SIZE, shared_buffer=shared)


def decoder_manifest(root: Path, spec: LanguagePreprocess, columns: dict[str, Any], shared: bool = False) -> Manifest:
    """Samples and the baseline's sums in `root`, beside decoders that are there already; the manifest to write."""
    manifest = stage(root, "text-generation", spec, columns)
    caches = {"candidate": kv_cache(shared), "baseline": kv_cache()}
    return replace(
        manifest,
        class_names=(),
        artifacts=tuple(replace(one, cache=caches[one.name]) for one in manifest.artifacts),
        generation=Generation(CONTEXT, VOCAB, 256, (257,)),
        judgement=Judgement(benchmark=Benchmark(warmup=1, iterations=40, prompt_tokens=8, new_tokens=5)),
    )


STORIES = [
    "the cat sat on the mat",
    "a dog ran far",
    "one day",
    "she saw a café and a 🐈",
    *(f"story {i} of many" for i in range(56)),
]


@pytest.fixture
def make_decoder_bundle(tmp_path: Path) -> Callable[..., Path]:
    return partial(write_decoder_bundle, tmp_path / "bundle")


def write_decoder_bundle(root: Path, shared: bool = False, noise: float = 0.3, gates: Any = (), **changes: Any) -> Path:
    decoder_model(root / "model/model.onnx", shared=shared, noise=noise)
    decoder_model(root / "baseline/model.onnx")
    write_byte_tokenizer(root / "model", changes.pop("config", None))
    spec = LanguagePreprocess(max_length=20, bos_token_id=256)
    manifest = decoder_manifest(root, spec, {"text": STORIES}, shared)
    judgement = replace(manifest.judgement, gates=tuple(gates), **changes.pop("judgement", {}))
    write_bundle(root, replace(manifest, judgement=judgement, **changes))
    return root


class Tiny:
    """The functions above, as one fixture: test files need no import of each other."""

    words = WORDS
    image_spec = IMAGE
    save = staticmethod(save)
    image_model = staticmethod(image_model)
    text_model = staticmethod(text_model)
    span_model = staticmethod(span_model)
    span_bundle = staticmethod(write_span_bundle)
    segment_bundle = staticmethod(write_segment_bundle)
    box_bundle = staticmethod(write_box_bundle)
    write_tokenizer = staticmethod(write_tokenizer)
    open_onnx = staticmethod(open_onnx)
    stage = staticmethod(stage)
    stories = STORIES
    decoder_weights = staticmethod(decoder_weights)
    decoder_logits = staticmethod(decoder_logits)
    decoder_model = staticmethod(decoder_model)
    decoder_manifest = staticmethod(decoder_manifest)
    write_byte_tokenizer = staticmethod(write_byte_tokenizer)
    kv_cache = staticmethod(kv_cache)


@pytest.fixture
def tiny() -> type[Tiny]:
    return Tiny
