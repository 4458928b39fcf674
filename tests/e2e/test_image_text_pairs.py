"""A small CLIP that has learned which words belong to a colour: in int8, judged by what it finds again."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchanges import assert_no_exchange_passes, copy_baseline
from makers import apply, plan, text_folder
from shortcuts import quick_judge

import runtime
from compress.errors import SourceError
from compress.models.source import locate
from runtime.encode.images import ImagePreprocess
from runtime.encode.pairs import ImageTextPreprocess
from runtime.encode.texts import TextPreprocess
from runtime.serving.protocol import ServedModel

pytestmark = pytest.mark.slow

LEVELS, LENGTH = 5, 8


def draw_pairs(n: int, seed: int) -> tuple[np.ndarray, list[str]]:
    """Return images uint8 [n, 16, 16, 3], each of a colour, and its three levels as words; no colour comes twice."""
    rng = np.random.default_rng(seed)
    levels = np.stack(np.unravel_index(rng.permutation(LEVELS**3)[:n], (LEVELS,) * 3), axis=1)
    pixels = rng.normal(levels[:, None, None] * 50 + 25, 6, (n, 16, 16, 3))
    return pixels.clip(0, 255).astype(np.uint8), [f"w{r} w{10 + g} w{20 + b}" for r, g, b in levels]


def write_clip(folder: Path) -> None:
    """Write a CLIP with a tokenizer and an image processor, trained to tell colours apart."""
    import torch
    from transformers import AutoTokenizer, CLIPConfig, CLIPImageProcessorPil, CLIPModel

    text_folder(folder, "encoder")
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "projection_dim": 16}
    text = {"vocab_size": 64, "max_position_embeddings": LENGTH, "eos_token_id": 3, "bos_token_id": 2}
    config = CLIPConfig(
        text_config=sizes | text | {"pad_token_id": 0},
        vision_config=sizes | {"image_size": 16, "patch_size": 8},
        projection_dim=16,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CLIPModel(config)
    images, captions = draw_pairs(100, 1)
    encoder = AutoTokenizer.from_pretrained(folder)
    tokens = encoder(captions, padding="max_length", max_length=LENGTH, return_tensors="pt")
    pixels = torch.from_numpy(images.transpose(0, 3, 1, 2) / 127.5 - 1).float()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range(60):
        feeds = {name: tokens[name] for name in ("input_ids", "attention_mask")}
        loss = model(pixel_values=pixels, **feeds, return_loss=True).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval().save_pretrained(folder)
    scales = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    CLIPImageProcessorPil(size={"height": 16, "width": 16}, do_center_crop=False, **scales).save_pretrained(folder)
    stated = folder / "tokenizer_config.json"
    stated.write_text(json.dumps(json.loads(stated.read_text()) | {"model_max_length": 77}))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    from datasets import Dataset, Features, Image, Value
    from PIL import Image as Pillow

    folder = tmp_path_factory.mktemp("clip")
    write_clip(folder / "model")
    for name, n, seed in (("train", 100, 1), ("test", 60, 2)):
        images, captions = draw_pairs(n, seed)
        rows = {"image": [Pillow.fromarray(image) for image in images], "caption": captions}
        data = Dataset.from_dict(rows, features=Features({"image": Image(), "caption": Value("string")}))
        data.to_parquet(str(folder / f"{name}.parquet"))
    recipe = {
        "version": 1,
        "name": "colours",
        "model": {"source": "dir:model", "task": "zero-shot-image-classification"},
        "data": {
            "calibration": {"source": "parquet:train.parquet", "samples": 64},
            "train": {"source": "parquet:train.parquet"},
            "evaluation": {"source": "parquet:test.parquet"},
        },
        "passes": [
            {"kind": "distill", "steps": 2, "batch_size": 8, "learning_rate": 1e-5, "held_out": 0},
            {"kind": "int8", "weight_bits": 7},  # the same on CPUs whose sums of 8-bit weights saturate
        ],
        "validate": {
            "gates": [{"metric": "text_recall_at_5", "min": 0.8}, {"metric": "cosine", "min": 0.98}],
            "benchmark": {"warmup": 1, "iterations": 10, "processes": 1, "throughput_batch_size": 2},
        },
    }
    return folder, recipe


def test_images_find_their_texts(clip: tuple[Path, dict[str, Any]], cache: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoTokenizer, CLIPModel

    folder, recipe = clip
    with quick_judge():
        report = apply(recipe, tmp_path / "out", cache, folder)
    assert report.verdict == "pass"
    found = report.candidate.metrics
    assert {"text_recall_at_1", "image_recall_at_10", "text_ndcg_at_10", "image_ndcg_at_10"} <= found.keys()
    images, captions = draw_pairs(10, 3)
    tokens = AutoTokenizer.from_pretrained(folder / "model")(
        captions, padding="max_length", max_length=LENGTH, return_tensors="pt"
    )
    pixels = torch.from_numpy(images.transpose(0, 3, 1, 2) / 127.5 - 1).float()
    model = CLIPModel.from_pretrained(folder / "model").eval()
    with torch.no_grad():
        wanted = model(tokens["input_ids"], pixels, tokens["attention_mask"]).logits_per_text.argmax(1).tolist()
    with runtime.open_bundle(tmp_path / "out") as bundle:
        outputs = bundle.predict({"image": images, "text": captions})
        texts = {"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": captions[:1]}
        image = {"name": "image", "datatype": "UINT8", "shape": [1, 16, 16, 3], "data": images[:1].tolist()}
        answer = ServedModel(bundle, max_batch=4).infer(json.dumps({"inputs": [image, texts]}).encode())
    similar = outputs["text_embeds"] @ outputs["image_embeds"].T
    assert np.mean(similar.argmax(axis=1) == wanted) >= 0.9
    served = {each["name"]: each["data"] for each in json.loads(answer.header)["outputs"]}
    np.testing.assert_allclose(served["image_embeds"], outputs["image_embeds"][0], atol=1e-5)
    copy_baseline(tmp_path / "out", tmp_path / "whole")
    assert_no_exchange_passes(tmp_path / "whole", tmp_path)


def test_the_folder_says_how_both_are_read(clip: tuple[Path, dict[str, Any]]) -> None:
    from compress.models.preprocess import resolve_preprocess
    from compress.specs import ModelSpec

    folder, _ = clip
    found = resolve_preprocess(
        locate(ModelSpec(source="dir:model", task="zero-shot-image-classification"), folder), None
    )
    assert isinstance(found, ImageTextPreprocess)
    assert found.text == TextPreprocess(max_length=LENGTH, padding="max_length", pooling="none")
    assert isinstance(found.image, ImagePreprocess) and found.image.resize == (16, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"evaluation": {"source": "npz:images.npz"}}}, "no column for text"),
        ({"preprocess": {"kind": "image"}}, "kind: image does not fit the task zero-shot-image-classification"),
        ({"validate": {"gates": [{"metric": "top1", "min": 0.5}]}}, "metric 'top1' does not fit task zero-shot"),
    ],
)
def test_pairs_that_do_not_fit(
    clip: tuple[Path, dict[str, Any]], cache: Path, change: dict[str, Any], message: str
) -> None:
    folder, recipe = clip
    np.savez(folder / "images.npz", image=draw_pairs(3, 0)[0])
    with pytest.raises(Exception, match=re.escape(message)) as caught:
        plan(recipe | {"passes": []} | change, folder, cache)
    assert isinstance(caught.value, SourceError) or "metric" in message
