"""Recordings that are longer than a model reads: what a recipe says of them, and what training makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compress.data.samples import samples_of
from compress.data.training import make_encoded_set
from compress.errors import SourceError
from compress.models.preprocess import resolve_preprocess
from compress.models.source import locate
from compress.specs import ModelSpec
from runtime.bundle.tensors import TensorSpec
from runtime.encode.preprocess import AudioPreprocess, TextPreprocess, make_preprocessor

INPUT = TensorSpec("x", "float32", ("batch", 8))


def test_every_chunk_has_the_label_of_its_sound() -> None:
    spec = AudioPreprocess(seconds=8 / 16000, longer="chunks")
    sounds = [np.full(n, i / 8, np.float32) for i, n in enumerate((8, 20, 5))]
    columns = {"audio": sounds, "rate": np.full(3, 16000), "label": np.array([2, 0, 1])}
    found = make_encoded_set(samples_of(columns), make_preprocessor(spec, (INPUT,)), "audio-classification")
    assert found.n == 5 and found.labels is not None and found.labels.tolist() == [2, 0, 0, 0, 1]
    assert found.feeds(np.arange(5))["x"][:, 0].tolist() == [0, 1 / 8, 1 / 8, 1 / 8, 2 / 8]


def write_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    whisper = {"feature_extractor_type": "WhisperFeatureExtractor", "chunk_length": 10}
    (folder / "preprocessor_config.json").write_text(json.dumps(whisper))
    return folder


@pytest.mark.parametrize(
    ("task", "declared", "wanted"),
    [
        ("audio-classification", None, "chunks"),
        ("audio-classification", AudioPreprocess(seconds=1), "chunks"),
        ("audio-classification", AudioPreprocess(features="kaldi", frames=10), "chunks"),
        ("audio-classification", AudioPreprocess(seconds=1, longer="cut"), "cut"),
        ("audio-classification", AudioPreprocess(seconds=1, longer="pauses"), "pauses"),
        ("audio-classification", AudioPreprocess(), None),
        ("audio-regression", AudioPreprocess(seconds=1), "cut"),
    ],
)
def test_the_task_says_what_a_recipe_does_not(tmp_path: Path, task: str, declared: Any, wanted: str | None) -> None:
    spec = ModelSpec(source=f"dir:{write_folder(tmp_path / 'model')}", task=task)
    found = resolve_preprocess(locate(spec, tmp_path), declared)
    assert isinstance(found, AudioPreprocess) and found.longer == wanted


def test_tasks_that_read_the_beginning_alone(tmp_path: Path) -> None:
    source = f"dir:{write_folder(tmp_path / 'model')}"
    chunks = AudioPreprocess(seconds=1, longer="chunks")
    with pytest.raises(SourceError, match="longer: chunks: audio-regression reads the beginning of a recording alone"):
        resolve_preprocess(locate(ModelSpec(source=source, task="audio-regression"), tmp_path), chunks)
    (tmp_path / "model/tokenizer.json").write_text("{}")
    with pytest.raises(SourceError, match="stride: text2text-generation reads the beginning of a text alone"):
        resolve_preprocess(
            locate(ModelSpec(source=source, task="text2text-generation"), tmp_path), TextPreprocess(stride=3)
        )
