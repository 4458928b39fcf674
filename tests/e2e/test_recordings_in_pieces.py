"""Recordings longer than a speech model hears, through the whole product: written down, judged and learned from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from makers import QUICK, apply, changed
from small_answers import HEARD, write_listener, write_speech

from compress.errors import CompressError
from runtime import Bundle, open_bundle
from runtime.bundle.format import read_outputs, read_samples
from runtime.decode.answers import join_texts, score_answers
from runtime.encode.audio import load_audio, split_chunks
from runtime.encode.preprocess import AudioPreprocess, Preprocessor, Seq2SeqPreprocess, make_preprocessor
from runtime.metrics.texts import unpack_texts
from runtime.tasks.manifest import read_manifest
from runtime.tasks.metrics import METRICS

pytestmark = pytest.mark.slow

RECIPE: dict[str, Any] = {
    "version": 1,
    "name": "listener",
    "model": {"source": "dir:model", "task": "automatic-speech-recognition"},
    "data": {
        "calibration": {"source": "jsonl:train.jsonl", "samples": 8},
        "train": {"source": "jsonl:train.jsonl"},
        "evaluation": {"source": "jsonl:test.jsonl"},
    },
    "passes": [
        {"kind": "distill", "steps": 2, "batch_size": 4, "learning_rate": 1e-6, "held_out": 0, "labels": {}},
        {"kind": "int8", "weight_bits": 7},
    ],
    "validate": {
        "gates": [{"metric": "wer", "max": 0.2}, {"metric": "nll", "max": 1}],
        "benchmark": QUICK | {"prompt_tokens": 6, "new_tokens": 3},
    },
}
SHORT, LONG = [1] * 12, [2, 3, 2] * 4


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the trained model and what is said to it."""
    folder = tmp_path_factory.mktemp("listener")
    write_listener(folder / "model")
    write_speech(folder, "train", [*SHORT, 2, 3], seed=1)
    write_speech(folder, "test", [*SHORT, *LONG], seed=2)
    write_speech(folder, "long", [2, 3], seed=3)
    return folder


def reads(bundle: Bundle, longer: Any) -> Preprocessor:
    """The bundle's preprocessing, but for what becomes of long recordings."""
    spec = bundle.preprocessor.spec
    assert isinstance(spec, Seq2SeqPreprocess) and isinstance(spec.source, AudioPreprocess)
    changed = replace(spec, source=replace(spec.source, longer=longer))
    return make_preprocessor(changed, bundle.session.inputs, bundle.root / "model")


def test_long_recordings_are_written_down_whole(listener: Path, cache: Path, tmp_path: Path) -> None:
    root = tmp_path / "out"
    report = apply(RECIPE, root, cache, listener)
    manifest = read_manifest(root)
    assert manifest.preprocess["source"]["longer"] == "pauses"
    notes = [row["reason"] for row in json.loads((root / "layers.json").read_text()) if row["type"] == "note"]
    assert any("data.train: 2 of 14 samples are longer than the model reads at once and are not" in n for n in notes)
    assert any("nll, perplexity" in line and "of 12 of 24 samples" in line for line in report.advice)
    gates = {gate.metric: gate for gate in report.gates}
    assert gates["wer"].value < 0.1 and "12 samples" in gates["nll"].why
    columns = read_samples(root, manifest)
    frozen = read_outputs(root, manifest)
    assert (frozen["n_tokens"] > 0).tolist() == [True] * 12 + [False] * 12
    assert [len(text.split()) for text in unpack_texts(frozen["answer"])] == [*SHORT, *LONG]
    with open_bundle(root) as bundle:
        _check_one_by_one(bundle, listener)
        cut, whole = (score_answers(bundle.session, reads(bundle, how), columns) for how in ("cut", "pauses"))
        wer, words = METRICS["wer"], sum(SHORT + LONG)
        assert wer.compute(whole, columns["label"]) < 0.1
        assert wer.compute(cut, columns["label"]) == pytest.approx((words - 24) / words, abs=0.05)
        few = {name: column[:12] for name, column in columns.items()}
        short = [score_answers(bundle.session, reads(bundle, how), few) for how in ("cut", "pauses")]
        for name in short[0]:
            np.testing.assert_array_equal(short[0][name], short[1][name])


def _check_one_by_one(bundle: Bundle, folder: Path) -> None:
    """A long recording's text is that of its pieces, also where it comes piece by piece and beside others."""
    spec = AudioPreprocess(**HEARD, longer="pauses")
    files = [folder / f"test-{i}.wav" for i in (12, 0, 13)]
    wanted = []
    for file in files:
        pieces = split_chunks(load_audio(file)[0], spec)
        given = [{"array": piece, "sampling_rate": spec.rate} for piece in pieces]
        wanted.append(join_texts([bundle.generate([piece])[0].text for piece in given]))
    assert [len(text.split()) for text in wanted] == [2, 1, 3]
    results = bundle.generate(files)
    assert [result.text for result in results] == wanted
    assert [len(result.token_ids) for result in results] == [2, 1, 3]
    streamed = ["", "", ""]
    for row, text in bundle.generate(files, stream=True):
        streamed[row] += text
    assert streamed == wanted
    last = wanted[0][-1]
    stopped = bundle.generate(files[0], stop=[last])
    assert (stopped.text, stopped.finish) == (wanted[0][: wanted[0].index(last)].rstrip(), "stop")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"evaluation": {"source": "jsonl:long.jsonl"}}, "validate: nll: all samples of data.evaluation are longer"),
        ({"train": {"source": "jsonl:long.jsonl"}}, "data.train: 2 of 2 samples are longer .* cut them, with their"),
    ],
)
def test_nothing_but_long_recordings(
    listener: Path, cache: Path, tmp_path: Path, data: dict[str, Any], message: str
) -> None:
    with pytest.raises(CompressError, match=message):
        apply(changed(RECIPE, data=data), tmp_path / "out", cache, listener)
