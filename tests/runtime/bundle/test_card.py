"""A bundle's README.md: every command in it is run, for every task."""

from __future__ import annotations

import math
import re
import shlex
import wave
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from PIL import Image
from shortcuts import quick_judge

from compress.export.card import model_card, usage_of
from runtime.__main__ import main
from runtime.bundle.format import Artifact, Benchmark, Judgement
from runtime.encode.preprocess import AudioPreprocess, ImageTextPreprocess, TensorPreprocess, TextPreprocess
from runtime.tasks import TASKS
from runtime.tasks.manifest import read_manifest, write_bundle

LOCK = {"model": {"source": "onnx:m.onnx", "digest": "abc"}}
QUICK = Judgement(benchmark=Benchmark(throughput_batch_size=2, warmup=1, iterations=10))


def commands_of(card: str) -> list[str]:
    """The lines of the card's code blocks."""
    blocks = re.findall(r"^```\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)
    return [line for block in blocks for line in block.splitlines() if line]


def make_generic(root: Path, tiny: Any, task: str = "generic") -> Path:
    tiny.image_model(root / "model/model.onnx")
    tiny.image_model(root / "baseline/model.onnx", seed=1)
    rows = np.zeros((12, 3, 4, 4), np.float32)
    write_bundle(root, replace(tiny.stage(root, task, TensorPreprocess(), {"x": rows}), class_names=()))
    return root


def make_images(root: Path, tiny: Any, task: str) -> Path:
    tiny.image_model(root / "model/model.onnx")
    tiny.image_model(root / "baseline/model.onnx", seed=1)
    write_bundle(root, tiny.stage(root, task, tiny.image_spec, {"image": np.zeros((12, 4, 4, 3), np.uint8)}))
    return root


def make_audio(root: Path, tiny: Any, task: str, shape: Sequence[int] = (5,)) -> Path:
    x, logits = tensor("x", ["batch", 8]), tensor("logits", ["batch", *shape])
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["flat"]),
        helper.make_node("Reshape", ["flat", "shape"], ["logits"]),
    ]
    for seed, folder in enumerate(("model", "baseline")):
        weight = np.random.default_rng(seed).normal(size=(8, math.prod(shape))).astype(np.float32)
        weights = {"weight": weight, "shape": np.array([-1, *shape])}
        tiny.save(root / folder / "model.onnx", nodes, [x], [logits], weights)
    sounds = {"audio": np.zeros((12, 8), np.float32), "rate": np.full(12, 16000)}
    write_bundle(root, tiny.stage(root, task, AudioPreprocess(seconds=8 / 16000), sounds))
    return root


def make_depths(root: Path, tiny: Any, task: str) -> Path:
    nodes = [helper.make_node("ReduceSum", ["pixels", "channels"], ["depths"], keepdims=0)]
    ends = [tensor("pixels", ["batch", 3, 4, 4])], [tensor("depths", ["batch", 4, 4])]
    for folder in ("model", "baseline"):
        tiny.save(root / folder / "model.onnx", nodes, *ends, {"channels": np.array([1])})
    write_bundle(root, tiny.stage(root, task, tiny.image_spec, {"image": np.zeros((12, 4, 4, 3), np.uint8)}))
    return root


def make_pairs(root: Path, tiny: Any, task: str) -> Path:
    ids = tensor("input_ids", ["batch", 8], TensorProto.INT64)
    inputs = [tensor("pixels", ["batch", 3, 4, 4]), ids]
    nodes = [
        helper.make_node("GlobalAveragePool", ["pixels"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["image_embeds"]),
        helper.make_node("Gather", ["table", "input_ids"], ["embedded"]),
        helper.make_node("ReduceSum", ["embedded", "middle"], ["text_embeds"], keepdims=0),
    ]
    outputs = [tensor(name, ["batch", 3]) for name in ("image_embeds", "text_embeds")]
    for seed, folder in enumerate(("model", "baseline")):
        weights = {
            "table": np.random.default_rng(seed).normal(size=(12, 3)).astype(np.float32),
            "middle": np.array([1]),
        }
        tiny.save(root / folder / "model.onnx", nodes, inputs, outputs, weights)
    tiny.write_tokenizer(root / "model")
    rng = np.random.default_rng(0)
    columns = {"image": rng.integers(0, 256, (12, 4, 4, 3), np.uint8), "text": tiny.words}
    spec = ImageTextPreprocess(image=tiny.image_spec, text=TextPreprocess(max_length=8, padding="max_length"))
    write_bundle(root, tiny.stage(root, task, spec, columns))
    return root


def tensor(name: str, shape: list[Any], kind: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


@quick_judge()
@pytest.mark.parametrize(
    "task",  # others: e2e/test_answers; and of a model that also sees or hears there is no graph
    [
        name
        for name, task in TASKS.items()
        if not task.encodes and name not in ("image-text-to-text", "audio-text-to-text")
    ],
)
def test_every_command_of_a_card_works(
    task: str,
    request: pytest.FixtureRequest,
    tiny: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    makers: dict[str, Callable[[], Path]] = {
        "image-classification": lambda: request.getfixturevalue("image_bundle"),
        "text-classification": lambda: request.getfixturevalue("make_text_bundle")(task, {"text": tiny.words}),
        "token-classification": lambda: request.getfixturevalue("make_text_bundle")(task, {"text": tiny.words}),
        "feature-extraction": lambda: request.getfixturevalue("make_text_bundle")(task, {"text": tiny.words}),
        "semantic-segmentation": lambda: tiny.segment_bundle(tmp_path / "bundle"),
        "object-detection": lambda: tiny.box_bundle(tmp_path / "bundle"),
        "question-answering": lambda: tiny.span_bundle(tmp_path / "bundle"),
        "depth-estimation": lambda: make_depths(tmp_path / "bundle", tiny, task),
        "ctc-speech-recognition": lambda: make_audio(tmp_path / "bundle", tiny, task, shape=(3, 5)),
        "generic": lambda: make_generic(tmp_path / "bundle", tiny),
        "text-generation": lambda: request.getfixturevalue("make_decoder_bundle")(),
    }
    by_kind: dict[str | None, Callable[[], Path]] = {
        None: lambda: make_generic(tmp_path / "bundle", tiny, task),
        "image": lambda: make_images(tmp_path / "bundle", tiny, task),
        "audio": lambda: make_audio(tmp_path / "bundle", tiny, task),
        "image-text": lambda: make_pairs(tmp_path / "bundle", tiny, task),
        "text": lambda: request.getfixturevalue("make_text_bundle")(task, {"text": tiny.words}),
    }
    root = (makers.get(task) or by_kind[TASKS[task].preprocess])()
    manifest = read_manifest(root)
    if task != "text-generation":
        manifest = write_bundle(root, replace(manifest, judgement=QUICK))
    commands = commands_of(model_card(manifest, LOCK, []))
    assert len(commands) == 2
    monkeypatch.chdir(tmp_path)
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save("image.png")
    with wave.open("sound.wav", "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(np.arange(100, dtype=np.int16).tobytes())
    np.savez("pairs.npz", image=np.zeros((2, 4, 4, 3), np.uint8), text=["the cat", "far"])
    np.savez("inputs.npz", x=np.zeros((2, 3, 4, 4), np.float32))
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "compress-run"
        assert main([str(root) if word == "DIR" else word for word in words[1:]]) == 0, capsys.readouterr()
        assert capsys.readouterr().out


@pytest.mark.parametrize(("target", "program"), [("vllm", "vllm serve DIR/model"), ("transformers", "python -c ")])
def test_a_checkpoints_card_names_the_engine_that_opens_it(target: str, program: str, image_bundle: Path) -> None:
    artifact = Artifact("candidate", "model/config.json", target, "W4A16", (), (), 1, kind="checkpoint")
    manifest = replace(read_manifest(image_bundle), task="text-generation", artifacts=(artifact,))
    usage = usage_of(replace(manifest, preprocess={"kind": "language"}))
    assert usage.command.startswith(program) and "DIR/model" in usage.command and "predict" not in usage.command
