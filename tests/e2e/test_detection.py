"""A trained detector of squares and bars: pruned, distilled, in int8, judged by boxes, run where there is no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from detecting import CLASSES, SIZE, draw_images, write_detector
from makers import QUICK, apply, changed, plan, serve
from PIL import Image
from shortcuts import quick_judge

from compress.errors import CompressError
from runtime import open_bundle
from runtime.tasks.manifest import read_manifest

PASSES = [
    {"kind": "prune_channels", "max_flops": 0.6, "round_to": 2},
    {"kind": "distill", "steps": 4, "batch_size": 8, "learning_rate": 1e-4, "held_out": 0.1},
    {"kind": "int8", "restore": {"max_layers": 0}},
]
GATES = {
    "gates": [{"metric": "map", "max_drop": 0.2}, {"metric": "box_agreement", "min": 0.5}],
    "benchmark": QUICK,
    "steps": False,
}


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with the detector and its data, and a recipe that stands in it."""
    folder = tmp_path_factory.mktemp("squares")
    return folder, {"version": 1, "name": "squares", "passes": PASSES, "validate": GATES, **write_detector(folder)}


@pytest.fixture(scope="module")
def found(squares: tuple[Path, dict[str, Any]], cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its bundle."""
    out = tmp_path_factory.mktemp("found") / "bundle"
    with quick_judge():
        apply(squares[1], out, cache, squares[0])
    return out


@pytest.mark.slow
def test_it_stays_a_detector(found: Path) -> None:
    report = json.loads((found / "report.json").read_text())
    before, after = (report[side]["metrics"] for side in ("baseline", "candidate"))
    assert before["ap50"] > 0.9
    assert after["ap50"] > before["ap50"] - 0.05
    assert after["map"] > before["map"] - 0.1
    assert after["box_agreement"] > 0.9
    kept = np.load(found / "evaluation/baseline_outputs.npz")
    assert {name: kept[name].shape for name in kept.files} == {
        "boxes": (60, 20, 4),
        "scores": (60, 20),
        "classes": (60, 20),
    }


@pytest.mark.slow
def test_it_answers_with_boxes(found: Path, tmp_path: Path) -> None:
    ((image, objects),) = draw_images(1, 11)
    with open_bundle(found) as bundle:
        (answer,) = bundle.predict([image]).predictions
    best = [one for one in answer if one["score"] > 0.3]
    assert sorted((CLASSES.index(one["label"]), *np.rint(one["box"])) for one in best) == [
        pytest.approx(one, abs=2) for one in sorted(tuple(one) for one in objects)
    ]
    Image.fromarray(image).save(tmp_path / "a.png")
    assert serve(found, "['a.png']", tmp_path)["finite"]
    detections = read_manifest(found).detections
    assert detections is not None
    assert detections.suppress == "class"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"detections": None},
            r"model\.detections: the outputs boxes .* do not say what their numbers mean: give boxes",
        ),
        ({"class_names": ["square", "bar", "disc"]}, r"no dimension of 3 numbers, for 3 class names"),
        ({"class_names": []}, "class_names: object-detection needs them"),
        ({"detections": {"boxes": "ltrb"}}, "is relative to priors: give them"),
    ],
)
def test_what_does_not_say_what_it_means(
    squares: tuple[Path, dict[str, Any]], cache: Path, model: dict[str, Any], message: str
) -> None:
    with pytest.raises(CompressError, match=message):
        plan(changed(squares[1], model=model), squares[0], cache)


def test_tensors_are_no_images(squares: tuple[Path, dict[str, Any]], cache: Path) -> None:
    with pytest.raises(CompressError, match=r"object-detection answers by .*pixels.*, so it needs kind: image"):
        plan({**squares[1], "preprocess": {"kind": "tensor"}}, squares[0], cache)


def test_another_task_has_no_detections(squares: tuple[Path, dict[str, Any]], cache: Path) -> None:
    recipe = changed(squares[1], model={"task": "generic"}, validate={"gates": [{"metric": "sqnr_db", "min": 1}]})
    with pytest.raises(CompressError, match="is for models that find boxes, and the task is generic"):
        plan({**recipe, "preprocess": None}, squares[0], cache)


def test_labels_are_no_term_of_a_head(squares: tuple[Path, dict[str, Any]], cache: Path) -> None:
    with pytest.raises(CompressError, match="labels: which place of a head learns which box"):
        plan({**squares[1], "passes": [{"kind": "distill", "steps": 1, "labels": {}}]}, squares[0], cache)


@pytest.mark.slow
def test_a_transformers_detector(squares: tuple[Path, dict[str, Any]], cache: Path, tmp_path: Path) -> None:
    """A tiny random YOLOS: both of its outputs in the bundle, and what they mean told by their names."""
    from transformers import YolosConfig, YolosForObjectDetection, YolosImageProcessor

    config = YolosConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=[64, 64],
        patch_size=16,
        num_detection_tokens=5,
        use_mid_position_embeddings=False,
        id2label=dict(enumerate(CLASSES)),
        label2id={name: i for i, name in enumerate(CLASSES)},
    )
    YolosForObjectDetection(config).save_pretrained(tmp_path / "yolos")
    YolosImageProcessor(size={"height": 64, "width": 64}, do_pad=False).save_pretrained(tmp_path / "yolos")
    recipe = {
        "version": 1,
        "name": "yolos",
        "model": {"source": f"dir:{tmp_path / 'yolos'}", "task": "object-detection"},
        "data": squares[1]["data"],
        "passes": [{"kind": "int8", "restore": {"max_layers": 0}}],
        "validate": {"gates": [{"metric": "box_agreement", "min": 0.01}], "benchmark": QUICK},
    }
    with quick_judge():
        apply(recipe, tmp_path / "out", cache, squares[0])
    manifest = read_manifest(tmp_path / "out")
    assert [output.name for output in manifest.artifact("candidate").outputs] == ["logits", "pred_boxes"]
    assert manifest.detections is not None
    assert (manifest.detections.boxes, manifest.detections.background) == ("cxcywh", -1)
    assert manifest.class_names == CLASSES


@pytest.mark.slow
def test_a_head_that_chooses_its_boxes_stays_in_int8(
    squares: tuple[Path, dict[str, Any]], cache: Path, tmp_path: Path
) -> None:
    """Of scores that are nearly equal rounding changes the order, and each row of boxes with it: no collapse."""
    from safetensors.torch import save_file

    from compress.zoo.grid_detector import one_to_one_detector

    torch.manual_seed(0)
    weights = one_to_one_detector(**SIZE, most=20).state_dict()
    weights["once.2.weight"] *= 1000  # nearly equal, as an image's background is, but not to a float's last digits
    save_file(weights, tmp_path / "weights.safetensors")
    recipe = changed(
        squares[1],
        model={
            "source": "python:compress.zoo.grid_detector:one_to_one_detector",
            "args": {**SIZE, "most": 20},
            "weights": str(tmp_path / "weights.safetensors"),
            "detections": {"outputs": {"rows": "output"}, "normalized": False, "score_threshold": 0.0},
        },
        passes=[{"kind": "int8", "placement": "auto", "restore": {"max_layers": 0}}],
        validate={"gates": [{"metric": "f1_at", "max_drop": 0.9}], "benchmark": QUICK},
    )
    with quick_judge():
        apply(recipe, tmp_path / "out", cache, squares[0])
    assert "collapsed" not in (tmp_path / "out/compress.log").read_text()
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert set(report["baseline"]["metrics"]) >= {"f1_at", "ap50"}
