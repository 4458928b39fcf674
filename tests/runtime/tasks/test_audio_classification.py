"""Sounds that are longer than a model reads: the mean of their chunks' logits, wherever they are answered."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from runtime import open_bundle
from runtime.backends import open_artifact
from runtime.bundle.manifest import Postprocess
from runtime.encode.preprocess import AudioPreprocess, make_preprocessor
from runtime.errors import UsageError
from runtime.measure.answering import STAGES, Answerer
from runtime.serving.model import Encoder
from runtime.tasks import find_task
from runtime.tasks.base import BatchFacts
from runtime.tasks.manifest import read_manifest, write_bundle
from runtime.tasks.predict import bundle_preprocessor, facts_of, run_samples

TASK = "audio-classification"
RATE = 16000
CHUNKS = AudioPreprocess(seconds=8 / RATE, longer="chunks")
WEIGHTS = [np.random.default_rng(seed).normal(size=(8, 5)).astype(np.float32) for seed in (0, 1)]


def write_model(tiny: Any, path: Path, seed: int = 0) -> Path:
    """x [batch, 8] -> logits [batch, 5]."""
    x, logits = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", n]) for name, n in (("x", 8), ("logits", 5))
    )
    node = helper.make_node("MatMul", ["x", "weight"], ["logits"])
    written: Path = tiny.save(path, [node], [x], [logits], {"weight": WEIGHTS[seed]})
    return written


def draw_sounds(*lengths: int) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    sounds = [rng.uniform(-1, 1, n).astype(np.float32) for n in lengths]
    return {"audio": sounds, "rate": np.full(len(sounds), RATE)}


def run(tiny: Any, folder: Path, spec: AudioPreprocess, columns: Any, task: str = TASK, **how: Any) -> Any:
    session = tiny.open_onnx(write_model(tiny, folder / "model.onnx"))
    facts = BatchFacts(postprocess=Postprocess(**how))
    return run_samples(session, make_preprocessor(spec, session.inputs), task, columns, 2, facts=facts)


def average_by_hand(sound: np.ndarray) -> np.ndarray:
    parts = [sound[start : start + 8] for start in range(0, len(sound), 8)]
    logits = [np.pad(part, (0, 8 - len(part))).astype(np.float64) @ WEIGHTS[0] for part in parts]
    return np.average(logits, axis=0, weights=[len(part) for part in parts])


def test_the_logits_of_chunks_are_averaged(tiny: Any, tmp_path: Path) -> None:
    columns = draw_sounds(8, 20, 3, 16)
    found = run(tiny, tmp_path, CHUNKS, columns, top_k=2, reject_below=0.4)
    np.testing.assert_allclose(found["logits"], [average_by_hand(sound) for sound in columns["audio"]], atol=1e-5)
    assert found["logits"].dtype == np.float32
    np.testing.assert_array_equal(found["top"], np.argsort(-found["logits"], axis=1)[:, :2])
    chances = np.exp(found["logits"]) / np.exp(found["logits"]).sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(found["answered"], chances.max(axis=1) >= 0.4)
    assert set(found["answered"].tolist()) == {True, False}


def test_short_sounds_are_read_as_before(tiny: Any, tmp_path: Path) -> None:
    columns = draw_sounds(8, 5, 3)
    chunks = run(tiny, tmp_path, CHUNKS, columns)
    np.testing.assert_array_equal(
        chunks["logits"], run(tiny, tmp_path, AudioPreprocess(seconds=8 / RATE), columns)["logits"]
    )


def test_other_tasks_read_a_sound_in_one_piece(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"audio-regression reads a sample in one piece: .* longer: cut of recordings"):
        run(tiny, tmp_path, CHUNKS, draw_sounds(8, 20), "audio-regression")


def test_a_bundle_answers_the_same_everywhere(tiny: Any, tmp_path: Path) -> None:
    root, columns = tmp_path / "bundle", draw_sounds(8, 20, 3)
    for seed, name in enumerate(("model", "baseline")):
        write_model(tiny, root / name / "model.onnx", seed)
    write_bundle(root, tiny.stage(root, TASK, CHUNKS, columns))
    manifest = read_manifest(root)
    assert manifest.preprocess["longer"] == "chunks"
    with open_bundle(root) as bundle:
        found = bundle.predict(columns)["logits"]
    np.testing.assert_allclose(found[1], average_by_hand(columns["audio"][1]), atol=1e-5)
    with closing(open_artifact(root, manifest.artifact("candidate"), "onnxruntime-cpu", 1)) as session:
        preprocessor = bundle_preprocessor(root, manifest, session.inputs)
        answerer = Answerer(session, preprocessor, find_task(TASK), facts_of(manifest))
        assert len(answerer.answer(columns)) == len(STAGES)
    one_row_each = Encoder(root)
    assert one_row_each({"audio": np.stack([columns["audio"][0]]), "rate": np.array([RATE])})["x"].shape == (1, 8)
    with pytest.raises(UsageError, match="longer than the model reads at once, and here each is one row"):
        one_row_each({"audio": np.stack([columns["audio"][1]]), "rate": np.array([RATE])})
