"""Encoder-decoders through the whole product: a T5 that has learned to turn texts round, a Whisper that has not."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from child_processes import run_python
from exchanges import assert_no_exchange_passes, copy_baseline
from makers import BLOCKED, QUICK, apply, changed, plan
from small_answers import write_speech_model, write_texts, write_tokenizer, write_turner

from compress.errors import CompressError
from compress.export.card import usage_of
from runtime import open_bundle
from runtime.__main__ import main
from runtime.bundle.files import model_files
from runtime.bundle.format import read_outputs
from runtime.encode.audio import load_audio
from runtime.errors import UsageError
from runtime.metrics.texts import unpack_texts
from runtime.tasks.manifest import read_manifest

TURNS: dict[str, Any] = {
    "version": 1,
    "name": "turns",
    "model": {"source": "dir:model", "task": "text2text-generation"},
    "data": {
        "calibration": {"source": "jsonl:train.jsonl", "samples": 32},
        "train": {"source": "jsonl:train.jsonl"},
        "evaluation": {"source": "jsonl:test.jsonl"},
    },
    "passes": [{"kind": "int8"}],
    "validate": {
        "gates": [
            {"metric": "exact_match", "min": 0.9},
            {"metric": "text_agreement", "min": 0.8},
            {"metric": "nll", "max_drop": 0.2},
            {"metric": "wer", "max": 0.2},
        ],
        "benchmark": QUICK | {"throughput_batch_size": 64, "prompt_tokens": 6, "new_tokens": 4},
    },
}
SPEECH = changed(TURNS, name="speech", model={"task": "automatic-speech-recognition"})
SPEECH["data"]["calibration"]["samples"] = 8
SPEECH |= {
    "preprocess": {"kind": "seq2seq", "source": {"kind": "audio", "features": "whisper", "bins": 8, "seconds": 1.0}},
    "validate": {"benchmark": TURNS["validate"]["benchmark"]},
}


@pytest.fixture(scope="module")
def turner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the trained T5 and its texts."""
    folder = tmp_path_factory.mktemp("turner")
    write_turner(folder / "model")
    write_texts(folder / "train.jsonl", 64, seed=1)
    write_texts(folder / "test.jsonl", 96, seed=2)
    return folder


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a T5 of the same form that has learned nothing."""
    folder = tmp_path_factory.mktemp("untrained")
    write_turner(folder / "model", trained=False)
    write_texts(folder / "train.jsonl", 8, seed=1)
    write_texts(folder / "test.jsonl", 8, seed=2)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "passes",
    [
        [{"kind": "int8"}],
        [{"kind": "awq", "scheme": "W8A16", "group_size": 16}],
        [{"kind": "distill", "steps": 3, "batch_size": 8, "learning_rate": 1e-5, "held_out": 0}],
    ],
    ids=lambda passes: passes[0]["kind"],
)
def test_a_trained_model(turner: Path, cache: Path, tmp_path: Path, passes: list[dict[str, Any]]) -> None:
    report = apply(TURNS | {"passes": passes}, tmp_path / "out", cache, turner)
    assert report.verdict == "pass", [(gate.metric, gate.why) for gate in report.gates]
    sides = report.baseline, report.candidate
    assert all(side.metrics["exact_match"] > 0.95 and side.metrics["chrf"] > 95 for side in sides)
    assert {"ttft", "tpot"} <= report.candidate.generation.keys()
    manifest = read_manifest(tmp_path / "out")
    candidate = manifest.artifact("candidate")
    files = model_files(tmp_path / "out/model/model.onnx")
    assert (
        {f"model/{file.name}" for file in files} == {"model/model.onnx", "model/encoder.onnx"} <= manifest.files.keys()
    )
    assert candidate.size_bytes == sum(file.stat().st_size for file in files)
    if passes[0]["kind"] != "distill":
        assert report.ratios["size"] > 1.2
        halves = [_smaller(tmp_path / "out", name) for name in ("model.onnx", "encoder.onnx")]
        assert min(halves) > 1.1, "one of the halves has been left as it was"
    with open_bundle(tmp_path / "out") as bundle:
        results = bundle.generate(["abc", "hgf de"])
        assert results[0].text == "cba"
        assert bundle.generate("abcd", max_new_tokens=2).text == "dc"
        assert "".join(bundle.generate("abcd", stream=True)) == "dcba"
    command = shlex.split(usage_of(manifest).command)
    assert main([str(tmp_path / "out") if word == "DIR" else word for word in command[1:]]) == 0
    if passes[0]["kind"] == "int8":
        _answer_without_torch(tmp_path / "out")
        copy_baseline(tmp_path / "out", tmp_path / "whole")
        assert_no_exchange_passes(tmp_path / "whole", tmp_path)


def _answer_without_torch(bundle: Path) -> None:
    code = f"""
import sys
sys.modules.update(dict.fromkeys({BLOCKED!r}))
import runtime
with runtime.open_bundle(sys.argv[1]) as bundle:
    print(bundle.generate("abc").text, bundle.evaluate()["exact_match"])
"""
    done = run_python("-c", code, str(bundle), cwd=bundle)
    assert done.returncode == 0, done.stderr
    text, match = done.stdout.split()
    assert text == "cba" and float(match) > 0.9


def _smaller(out: Path, name: str) -> float:
    return (out / "baseline" / name).stat().st_size / (out / "model" / name).stat().st_size


@pytest.mark.slow
def test_a_pruned_speech_model_writes_what_transformers_writes(cache: Path, tmp_path: Path) -> None:
    import torch
    from transformers import WhisperFeatureExtractor

    model = write_speech_model(tmp_path / "model", tmp_path)
    recipe = changed(SPEECH, preprocess={"target": {"language": "de", "task": "transcribe"}})
    passes = [{"kind": "prune_channels", "ratio": 0.5}, {"kind": "int8"}]
    report = apply(recipe | {"passes": passes}, tmp_path / "out", cache, tmp_path)
    assert report.candidate.metrics["wer"] > 0
    manifest = read_manifest(tmp_path / "out")
    before, after = (manifest.artifact(name).cache for name in ("baseline", "candidate"))
    assert before is not None and after is not None and (before.n_heads, after.n_heads) == (2, 1)
    assert manifest.artifact("candidate").precision == "int8"
    frozen = unpack_texts(read_outputs(tmp_path / "out", manifest)["answer"])
    rows = [json.loads(line)["audio"] for line in (tmp_path / "test.jsonl").read_text().splitlines()]
    sounds = [load_audio(tmp_path / row, None)[0] / 32768 for row in rows]
    features = WhisperFeatureExtractor(feature_size=8, chunk_length=1)(sounds, sampling_rate=16000, return_tensors="pt")
    tokenizer = write_tokenizer(tmp_path / "again", ("<|en|>", "<|de|>", "<|transcribe|>", "<|translate|>", "<|no|>"))
    with torch.no_grad():
        ids = model.generate(features.input_features, language="de", task="transcribe")
    wanted = tokenizer.batch_decode(ids, skip_special_tokens=True)
    assert len(set(frozen)) > 1
    for ours, theirs in zip(frozen, wanted, strict=True):
        assert ours and theirs.startswith(ours)
    with open_bundle(tmp_path / "out") as bundle:
        assert bundle.generate(tmp_path / rows[0]).text
    copy_baseline(tmp_path / "out", tmp_path / "whole")
    assert_no_exchange_passes(tmp_path / "whole", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"evaluation": {"source": "jsonl:bare.jsonl"}}}, "no column for label"),
        ({"data": {"evaluation": {"source": "jsonl:numbers.jsonl"}}}, "expected a reference text, found int"),
        ({"passes": [{"kind": "kv_cache", "scheme": "int8"}]}, "text2text-generation keeps no keys and values"),
        ({"passes": [{"kind": "autoround", "scheme": "W8A16"}]}, "learns one chain of blocks, and this model has two"),
        ({"export": [{"kind": "checkpoint"}]}, "is written as onnx, not as checkpoint"),
        ({"preprocess": {"kind": "seq2seq", "target": {"language": "de"}}}, "knows no languages"),
        ({"preprocess": {"kind": "language"}}, "kind: language does not fit"),
        (
            {"model": {"task": "text-generation"}, "validate": {"gates": []}},
            "t5 has an encoder, .* give task: text2text-generation",
        ),
        ({"model": {"task": "automatic-speech-recognition"}}, "preprocessor_config.json: is missing"),
        ({"validate": {"benchmark": {"prompt_tokens": 33, "new_tokens": 4}}}, "33 is more than the 32 tokens"),
        ({"validate": {"benchmark": {"prompt_tokens": 3, "new_tokens": 12}}}, "12 is more than an answer's 11"),
        ({"validate": {"gates": [{"metric": "top1", "min": 0}]}}, "'top1' does not fit"),
    ],
)
def test_refusals(untrained: Path, cache: Path, change: dict[str, Any], message: str) -> None:
    (untrained / "bare.jsonl").write_text('{"text": "ab"}\n')
    (untrained / "numbers.jsonl").write_text('{"text": "ab", "label": 1}\n')
    with pytest.raises((CompressError, UsageError), match=message):
        plan(changed(TURNS, **change), untrained, cache)


def test_a_model_that_is_no_encoder_decoder(cache: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Wav2Vec2Config, Wav2Vec2ForCTC

    write_tokenizer(tmp_path / "model")
    write_texts(tmp_path / "train.jsonl", 2, seed=1)
    write_texts(tmp_path / "test.jsonl", 2, seed=2)
    GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2)).save_pretrained(tmp_path / "model")
    recipe = changed(TURNS, preprocess={"kind": "seq2seq", "target": {"start_tokens": [0], "end_tokens": [1]}})
    with pytest.raises(CompressError, match="gpt2 is no encoder-decoder, which task text2text-generation is for"):
        plan(recipe, tmp_path, cache)
    config = Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, conv_dim=(8,),
        conv_kernel=(10,), conv_stride=(8,), num_feat_extract_layers=1, num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    Wav2Vec2ForCTC(config).save_pretrained(tmp_path / "model")
    speech = recipe | {"model": SPEECH["model"], "preprocess": recipe["preprocess"] | {"source": {"kind": "audio"}}}
    with pytest.raises(CompressError, match=r"wav2vec2 is no encoder-decoder.*; give task: ctc-speech-recognition"):
        plan(speech, tmp_path, cache)
