"""A trained model that segments images of several sizes: pruned, distilled, quantized, judged and run without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from makers import QUICK, apply, plan, serve
from PIL import Image
from shortcuts import quick_judge

from compress.errors import SourceError
from runtime import open_bundle
from runtime.bundle.format import read_outputs
from runtime.tasks.manifest import read_manifest

NET = '''
from torch import nn


def make():
    """[N, 3, 24, 24] -> logits of three classes [N, 3, 12, 12]."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 3, 1),
    )
'''


def draw_image(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Noise with a bright and a dark rectangle, and its mask; a border of the image has no class."""
    height, width = (int(size) for size in rng.integers(20, 30, 2))
    pixels, mask = rng.normal(128, 20, (height, width, 3)), np.zeros((height, width), np.uint8)
    for kind, grey in ((1, 230), (2, 25)):
        top, left = rng.integers(0, height - 8), rng.integers(0, width - 8)
        place = slice(top, top + 8), slice(left, left + 8)
        pixels[place], mask[place] = rng.normal(grey, 20, (8, 8, 3)), kind
    mask[0] = 255
    return np.clip(pixels, 0, 255).astype(np.uint8), mask


def write_set(folder: Path, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for i in range(n):
        image, mask = draw_image(rng)
        Image.fromarray(image).save(folder / f"images/{i}.png")
        Image.fromarray(mask).save(folder / f"masks/{i}.png")


def train(folder: Path) -> None:
    """Train the net for two seconds on images of its own size, and write its weights."""
    import torch
    from safetensors.torch import save_file
    from torch.nn.functional import cross_entropy, interpolate

    namespace: dict[str, Any] = {}
    exec(NET, namespace)
    rng = np.random.default_rng(7)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = namespace["make"]()
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        for _ in range(120):
            drawn = [draw_image(rng) for _ in range(16)]
            images = torch.stack([_resize(torch.from_numpy(image).movedim(-1, 0)) for image, _ in drawn]) / 255
            masks = torch.stack([_resize(torch.from_numpy(mask)[None])[0] for _, mask in drawn]).long()
            logits = interpolate(net(images), (24, 24), mode="bilinear")
            loss = cross_entropy(logits, masks, ignore_index=255)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    save_file(net.state_dict(), folder / "net.safetensors")


def _resize(tensor: Any) -> Any:
    from torch.nn.functional import interpolate

    return interpolate(tensor[None].float(), (24, 24), mode="nearest")[0]


@pytest.fixture(scope="module")
def segmenter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with the model and its data, and the recipe that stands in it."""
    folder = tmp_path_factory.mktemp("segmenter")
    (folder / "net.py").write_text(NET)
    train(folder)
    write_set(folder / "train", 48, 1)
    write_set(folder / "test", 60, 2)
    sets = {"calibration": "train", "train": "train", "evaluation": "test"}
    model = {"source": "python:net.py:make", "weights": "net.safetensors", "task": "semantic-segmentation"}
    distill = {"kind": "distill", "steps": 20, "batch_size": 16, "learning_rate": 2e-3, "logits": {}, "labels": {}}
    return folder, {
        "version": 1,
        "name": "segments",
        "model": {**model, "class_names": ["ground", "bright", "dark"]},
        "preprocess": {"kind": "image", "resize": [24, 24]},
        "data": {name: {"source": f"maskfolder:{part}"} for name, part in sets.items()},
        "passes": [{"kind": "prune_channels", "ratio": 0.25}, distill, {"kind": "int8"}],
        "validate": {
            "gates": [{"metric": "miou", "min": 0.75}, {"metric": "pixel_agreement", "min": 0.9}],
            "metrics": ["miou", "pixel_accuracy", "dice", "pixel_agreement", "miou_baseline"],
            "benchmark": QUICK,
            "steps": False,
        },
    }


@pytest.mark.slow
def test_a_model_that_segments(segmenter: tuple[Path, dict[str, Any]], cache: Path, tmp_path: Path) -> None:
    folder, recipe = segmenter
    with quick_judge():
        report = apply(recipe, tmp_path / "out", cache, folder)
    baseline, candidate = report.baseline.metrics, report.candidate.metrics
    assert report.verdict == "pass", report.gates
    assert baseline["miou"] > 0.8 and candidate["miou"] > baseline["miou"] - 0.05
    assert 0.9 < candidate["miou_baseline"] < 1 and candidate["dice"] > candidate["miou"]
    kept = (tmp_path / "out/evaluation/baseline_outputs.npz").stat().st_size
    assert kept < 60 * 600  # a byte a pixel at most, not three floats
    assert serve(tmp_path / "out", f"['{folder}/test/images/0.png', '{folder}/test/images/1.png']", tmp_path)["finite"]
    with open_bundle(tmp_path / "out") as bundle:
        image, mask = draw_image(np.random.default_rng(3))
        found = bundle.predict([image])
        assert found["classes"].shape == (1, *mask.shape) and (found["classes"][0] == mask)[1:].mean() > 0.9
        assert found.predictions[0][0]["label"] == "ground"
        assert bundle.evaluate()["miou"] == pytest.approx(candidate["miou"])


def test_what_does_not_fit(segmenter: tuple[Path, dict[str, Any]], cache: Path) -> None:
    folder, recipe = segmenter
    with pytest.raises(SourceError, match="answers by the pixels of images as they came, so it needs kind: image"):
        plan({**recipe, "preprocess": {"kind": "tensor"}}, folder, cache)
    flipped = {"kind": "distill", "steps": 1, "labels": {}, "augment": {"flip": True}}
    with pytest.raises(Exception, match="augment changes images, and labels of pixels would stay"):
        plan({**recipe, "passes": [flipped]}, folder, cache)
    (folder / "flat.py").write_text("from torch import nn\n\n\ndef make():\n    return nn.Flatten()\n")
    flat = {"source": "python:flat.py:make", "task": "semantic-segmentation"}
    with pytest.raises(Exception, match=r"needs one output \[batch, classes, height, width\]"):
        plan({**recipe, "model": flat}, folder, cache)


@pytest.mark.slow
def test_segformer(segmenter: tuple[Path, dict[str, Any]], cache: Path, tmp_path: Path) -> None:
    """transformers' class with random weights, from its folder: what it and its image processor answer is answered."""
    import torch
    from transformers import SegformerConfig, SegformerForSemanticSegmentation, SegformerImageProcessor

    folder, recipe = segmenter
    sizes = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_attention_heads": [1, 2], "sr_ratios": [4, 2]}
    more = {"patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16}
    config = SegformerConfig(num_encoder_blocks=2, num_labels=3, **sizes, **more)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = SegformerForSemanticSegmentation(config).eval()
    processor = SegformerImageProcessor(size={"height": 32, "width": 32})
    for part in (model, processor):
        part.save_pretrained(tmp_path / "model")
    data = {
        name: {"source": f"maskfolder:{folder / part}"}
        for name, part in (("calibration", "train"), ("evaluation", "test"))
    }
    hub = {
        **recipe,
        "name": "segformer",
        "data": data,
        "model": {"source": f"dir:{tmp_path}/model", "task": "semantic-segmentation"},
    }
    del hub["preprocess"]
    hub |= {
        "passes": [{"kind": "int8"}],
        "validate": {"gates": [{"metric": "pixel_agreement", "min": 0.6}], "benchmark": QUICK},
    }
    with quick_judge():
        report = apply(hub, tmp_path / "out", cache, tmp_path)
    assert report.candidate.metrics["pixel_agreement"] > 0.8
    frozen = read_outputs(tmp_path / "out", read_manifest(tmp_path / "out"))["classes"]
    for i, found in enumerate(frozen[:5]):
        image = np.asarray(Image.open(folder / f"test/images/{sorted(map(str, range(60)))[i]}.png"))
        with torch.no_grad():
            outputs = model(**processor(image, return_tensors="pt"))
        (wanted,) = processor.post_process_semantic_segmentation(outputs, [image.shape[:2]])
        assert (found == wanted.numpy()).mean() > 0.99
    SegformerImageProcessor(size={"height": 32, "width": 32}, do_reduce_labels=True).save_pretrained(tmp_path / "model")
    notes = [note.text for note in plan(hub, tmp_path, cache).notes]
    assert any("1 is the first class in its masks, and 0 none" in text for text in notes), notes
