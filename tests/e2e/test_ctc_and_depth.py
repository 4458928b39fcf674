"""Letters heard by an encoder alone, and depths of pixels, from transformers' folders through a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from makers import apply, plan
from shortcuts import quick_judge
from small_audio import RATE, draw_tone, write_wave

import runtime
from compress.errors import SourceError
from compress.models.find_task import find_task_of_folder
from compress.tasks.ctc_speech_recognition import read_vocabulary

pytestmark = pytest.mark.slow

VOCABULARY = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "|": 4, "A": 5, "B": 6}
JUDGED = {"benchmark": {"warmup": 1, "iterations": 10, "processes": 1, "throughput_batch_size": 2}}


def write_ctc_model(folder: Path) -> None:
    from transformers import Wav2Vec2Config, Wav2Vec2FeatureExtractor, Wav2Vec2ForCTC

    sizes = Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, conv_dim=(8, 8),
        conv_kernel=(10, 8), conv_stride=(8, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, vocab_size=len(VOCABULARY),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Wav2Vec2ForCTC(sizes)
        torch.nn.init.normal_(model.lm_head.weight, std=5.0)  # frames that differ
        model.lm_head.bias.data[1:4] = -1000.0  # special tokens, which no trained model chooses
    model.save_pretrained(folder)
    Wav2Vec2FeatureExtractor(return_attention_mask=False).save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps(VOCABULARY))


def test_ctc(tmp_path: Path, cache: Path) -> None:
    """As transformers' tokenizer writes its model's frames."""
    from transformers import Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, Wav2Vec2ForCTC

    folder = tmp_path / "model"
    write_ctc_model(folder)
    assert (find_task_of_folder(folder) or ("",))[0] == "ctc-speech-recognition"
    rng = np.random.default_rng(0)
    sounds = [draw_tone(kind, rng) for kind in ("low", "middle", "high", "low")]
    paths = [str(write_wave(tmp_path / f"{i}.wav", sound)) for i, sound in enumerate(sounds)]
    feeds = Wav2Vec2FeatureExtractor.from_pretrained(folder)(
        [s / 32768 for s in sounds], sampling_rate=RATE, return_tensors="pt"
    )
    with torch.no_grad():
        ids = Wav2Vec2ForCTC.from_pretrained(folder).eval()(**feeds).logits.argmax(-1)
    wanted = Wav2Vec2CTCTokenizer(str(folder / "vocab.json")).batch_decode(ids)
    assert any(wanted)
    rows = [json.dumps({"audio": path, "text": text}) for path, text in zip(paths, wanted, strict=True)]
    (tmp_path / "d.jsonl").write_text("\n".join(rows))
    recipe: dict[str, Any] = {
        "version": 1,
        "name": "letters",
        "model": {"source": "dir:model", "task": "ctc-speech-recognition"},
        "data": {"evaluation": {"source": "jsonl:d.jsonl"}},
        "passes": [],
        "validate": JUDGED | {"gates": [{"metric": "cer", "max": 0.1}]},
    }
    with quick_judge():
        report = apply(recipe, tmp_path / "out", cache, tmp_path)
    assert report.verdict in ("pass", "undecided")
    with runtime.open_bundle(tmp_path / "out") as bundle:
        assert [row["label"] for row in bundle.predict(paths).predictions] == wanted


def test_a_vocabulary_for_each_language_needs_names(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"eng": VOCABULARY}))
    with pytest.raises(SourceError, match=r"as of one language; give model\.class_names"):
        read_vocabulary(tmp_path)


def write_depth_model(folder: Path, **processor: Any) -> None:
    from transformers import Dinov2Config, DPTConfig, DPTForDepthEstimation, DPTImageProcessor

    backbone = Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14,
        out_features=["stage1", "stage2"], reshape_hidden_states=False, apply_layernorm=False,
    )  # fmt: skip
    config = DPTConfig(
        backbone_config=backbone, is_hybrid=False, hidden_size=16, neck_hidden_sizes=[8, 8], reassemble_factors=[2, 1],
        fusion_hidden_size=8, image_size=28, patch_size=14, use_pretrained_backbone=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        DPTForDepthEstimation(config).save_pretrained(folder)
    DPTImageProcessor(size={"height": 28, "width": 28}, do_pad=False, **processor).save_pretrained(folder)


def test_depth(tmp_path: Path, cache: Path) -> None:
    write_depth_model(tmp_path / "model")
    assert (find_task_of_folder(tmp_path / "model") or ("",))[0] == "depth-estimation"
    images = np.random.default_rng(0).integers(0, 256, (96, 28, 28, 3), np.uint8)
    np.savez(tmp_path / "d.npz", image=images)
    recipe: dict[str, Any] = {
        "version": 1,
        "name": "depths",
        "model": {"source": "dir:model", "task": "depth-estimation"},
        "data": {"calibration": {"source": "npz:d.npz"}, "evaluation": {"source": "npz:d.npz"}},
        "passes": [{"kind": "int8"}],
        "validate": JUDGED | {"gates": [{"metric": "cosine", "min": 0.7}]},
    }
    with quick_judge():
        report = apply(recipe, tmp_path / "out", cache, tmp_path)
    assert report.verdict == "pass", report.gates
    with runtime.open_bundle(tmp_path / "out") as bundle:
        depth = bundle.predict(list(images))["depth"]
    assert depth.ndim == 3 and len(depth) == len(images) and np.isfinite(depth).all()
    write_depth_model(tmp_path / "kept", keep_aspect_ratio=True)
    recipe["model"]["source"] = "dir:kept"
    with pytest.raises(SourceError, match=r"keep_aspect_ratio makes each image of another size.*resize: \[28, 28\]"):
        plan(recipe, tmp_path, cache)
