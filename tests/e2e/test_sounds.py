"""Models of sound from transformers' folders: read as their extractors read, through a run, and without torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchanges import assert_no_exchange_passes, copy_baseline
from makers import apply, plan, serve
from shortcuts import quick_judge
from small_audio import RATE, TONES, draw_tone, train_spectrogram_model, write_tones, write_wave, write_waveform_model

import runtime
from compress.errors import SourceError
from compress.models.preprocess import resolve_preprocess
from compress.models.source import locate
from compress.specs import ModelSpec
from runtime.encode.audio import AudioPreprocess
from runtime.serving.protocol import ServedModel

pytestmark = pytest.mark.slow

RECIPE: dict[str, Any] = {
    "version": 1,
    "name": "tones",
    "model": {"source": "dir:model", "task": "audio-classification"},
    "data": {
        "calibration": {"source": "audiofolder:train", "samples": 16},
        "train": {"source": "audiofolder:train"},
        "evaluation": {"source": "audiofolder:test"},
    },
    "passes": [
        {"kind": "distill", "steps": 2, "batch_size": 8, "learning_rate": 1e-4, "held_out": 0, "labels": {}},
        {"kind": "int8"},
    ],
    "validate": {
        "gates": [{"metric": "top1", "min": 0.9}, {"metric": "agreement", "min": 0.9}],
        "benchmark": {"warmup": 1, "iterations": 10, "processes": 1, "throughput_batch_size": 2},
    },
}


def changed(**model: Any) -> dict[str, Any]:
    return RECIPE | {"model": RECIPE["model"] | model}


@pytest.fixture(scope="module")
def tones(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train/ and test/, and an untrained wav2vec2 as plain/ and, with a mask, as masked/."""
    folder = tmp_path_factory.mktemp("tones")
    write_tones(folder / "train", 16, seed=1)
    write_tones(folder / "test", 20, seed=2)
    write_waveform_model(folder / "plain", masked=False)
    write_waveform_model(folder / "masked", masked=True)
    return folder


def test_a_trained_model_of_spectrograms(tones: Path, cache: Path, tmp_path: Path) -> None:
    train_spectrogram_model(tones / "model")
    with quick_judge():
        report = apply(RECIPE, tmp_path / "out", cache, tones)
    assert report.verdict == "pass"
    path = tones / "test/low/000.wav"
    served = serve(tmp_path / "out", f"[{str(path)!r}]", tmp_path)
    assert served["metrics"]["top1"] >= 0.9
    with runtime.open_bundle(tmp_path / "out") as bundle:
        assert [each["label"] for each in bundle.predict([path]).predictions] == ["low"]
        samples = draw_tone("middle", np.random.default_rng(0)) / 32768
        request = {
            "inputs": [
                {"name": "audio", "datatype": "FP32", "shape": [1, len(samples)], "data": samples.tolist()},
                {"name": "rate", "datatype": "INT64", "shape": [1], "data": [RATE]},
            ]
        }
        served_model = ServedModel(bundle, max_batch=4)
        assert [each["name"] for each in served_model.metadata()["inputs"]] == ["audio", "rate"]
        label = json.loads(served_model.infer(json.dumps(request).encode()).header)["outputs"][0]
        assert (label["name"], label["data"]) == ("label", ["middle"])
    copy_baseline(tmp_path / "out", tmp_path / "whole")
    assert_no_exchange_passes(tmp_path / "whole", tmp_path)


def test_waveforms_of_several_lengths_with_a_mask(tones: Path, cache: Path, tmp_path: Path) -> None:
    """As transformers answers, batch by batch; its model has the mask's places at every length."""
    import torch
    from transformers import AutoFeatureExtractor, AutoModelForAudioClassification

    recipe = changed(source="dir:masked") | {
        "preprocess": {"kind": "audio", "normalize": True, "seconds": 0.3},
        "passes": [],
        "validate": RECIPE["validate"] | {"gates": []},
    }
    with quick_judge():
        apply(recipe, tmp_path / "out", cache, tones)
    rng = np.random.default_rng(5)
    sounds = [draw_tone("low", rng, seconds=seconds) / 32768 for seconds in (0.2, 0.3, 0.11)]
    extractor = AutoFeatureExtractor.from_pretrained(tones / "masked")
    feeds = extractor(sounds, sampling_rate=RATE, padding="max_length", max_length=4800, return_tensors="pt")
    with torch.no_grad():
        wanted = AutoModelForAudioClassification.from_pretrained(tones / "masked").eval()(**feeds).logits.numpy()
    with runtime.open_bundle(tmp_path / "out") as bundle:
        found = bundle.predict([{"array": sound, "sampling_rate": RATE} for sound in sounds])["logits"]
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("extractor", "wanted"),
    [
        (
            {"feature_extractor_type": "Wav2Vec2FeatureExtractor", "do_normalize": False, "sampling_rate": 8000},
            AudioPreprocess(rate=8000),
        ),
        (
            {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128, "chunk_length": 10},
            AudioPreprocess(features="whisper", bins=128, seconds=10, longer="chunks"),
        ),
        (
            {"feature_extractor_type": "ASTFeatureExtractor", "max_length": 50, "mean": -4.0, "std": 2.0},
            AudioPreprocess(features="kaldi", window="hann", bins=128, frames=50, mean=-4.0, std=4.0, longer="chunks"),
        ),
        (
            {"feature_extractor_type": "SeamlessM4TFeatureExtractor", "padding_value": 1},
            AudioPreprocess(features="kaldi", gain=32768, normalize=True, stack=2, padding_value=1),
        ),
        ({}, "preprocessor_config.json: is missing; add"),
        ({"feature_extractor_type": "ClapFeatureExtractor"}, "ClapFeatureExtractor is not one of Wav2Vec2Feature"),
        ({"feature_extractor_type": "WhisperFeatureExtractor", "hop_length": 80}, "hop_length is 80, and only 160"),
        ({"feature_extractor_type": "ASTFeatureExtractor", "std": 0}, "std is 0"),
    ],
)
def test_the_folder_says_how_audio_is_read(tones: Path, tmp_path: Path, extractor: dict[str, Any], wanted: Any) -> None:
    folder = Path(shutil.copytree(tones / "plain", tmp_path / "model"))
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
    spec = ModelSpec(source=f"dir:{folder}", task="audio-classification")
    if isinstance(wanted, str):
        with pytest.raises(SourceError, match=wanted):
            resolve_preprocess(locate(spec, tmp_path), None)
        return
    assert resolve_preprocess(locate(spec, tmp_path), None) == wanted
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").write_text(json.dumps({"feature_extractor": extractor}))
    assert resolve_preprocess(locate(spec, tmp_path), None) == wanted


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "audio of 8000 samples a second, and the model takes 16000: set resample"),
        ({"preprocess": {"kind": "audio", "resample": True}}, "resample changes the length of audio: set seconds"),
        ({"preprocess": {"kind": "audio", "longer": "chunks"}}, "longer is chunks, and no length is given"),
        ({"preprocess": {"kind": "image"}}, "kind: image does not fit the task audio-classification"),
        ({"data": {"evaluation": {"source": "audiofolder:no-such"}}}, "no-such"),
        ({"data": {"evaluation": {"source": "audiofolder:plain"}}}, "no .wav, .flac"),
        ({"data": {"evaluation": {"source": "audiofolder:mixed"}}}, "files at several depths"),
    ],
)
def test_audio_that_does_not_fit(
    tones: Path, cache: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_tones(tones / "slow", 1, seed=3, rate=8000)
    write_wave(tones / "mixed/a.wav", np.zeros(4000, np.int16))
    write_wave(tones / "mixed/b/c.wav", np.zeros(4000, np.int16))
    recipe = changed(source="dir:plain") | {"passes": [], "data": {"evaluation": {"source": "audiofolder:slow"}}}
    with pytest.raises(Exception, match=message):
        plan(recipe | changes, tones, cache)


@pytest.mark.parametrize("names", [("high", "low", "middle"), ("middle", "high", "low")])
def test_folders_tables_and_arrays_hold_the_same_audio(tones: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    """Paths in a table stand beside it; labels become the model's."""
    from compress.data.samples import load_samples
    from compress.specs import DataSpec

    write_tones(tmp_path / "set", 2, seed=4)
    files = sorted((tmp_path / "set").rglob("*.wav"))
    rows = [{"audio": str(file.relative_to(tmp_path)), "label": file.parent.name} for file in files]
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arrays = [np.frombuffer(file.read_bytes()[44:], np.int16) for file in files]
    labels = [names.index(file.parent.name) for file in files]
    np.savez(tmp_path / "set.npz", audio=arrays, rate=np.full(len(arrays), RATE), label=labels)
    parquet(tmp_path / "set.parquet", files)
    sources = ("audiofolder:set", "jsonl:set.jsonl", "npz:set.npz", "parquet:set.parquet")
    samples = [
        load_samples(DataSpec(source=source), tmp_path, "audio-classification", (), 0, len(TONES), names)
        for source in sources
    ]
    assert len({each.digest for each in samples}) == 1
    assert samples[0].columns["label"].tolist() == labels
    assert samples[0].columns["rate"].tolist() == [RATE] * len(files)


def parquet(path: Path, files: list[Path]) -> None:
    """Write files as `datasets` does: bytes and path, and a mark that the column is audio."""
    import pyarrow as pa
    from datasets import Audio, ClassLabel, Dataset, Features

    features = Features({"audio": Audio(decode=False), "label": ClassLabel(names=sorted(TONES))})
    rows = {
        "audio": [{"bytes": file.read_bytes(), "path": file.name} for file in files],
        "label": [sorted(TONES).index(file.parent.name) for file in files],
    }
    Dataset(pa.Table.from_pydict(rows, features.arrow_schema)).to_parquet(str(path))
