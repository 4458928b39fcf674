"""Classes of pixels: resized as torch does, scored as scikit-learn does, what was cut off, what cannot be scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.bundle.columns import stack_rows
from runtime.bundle.samples import read_outputs_npz, write_npz
from runtime.encode.images import ImagePreprocess, image_pixels, place_image
from runtime.errors import BundleError, UsageError
from runtime.tasks import find_task
from runtime.tasks.base import IMAGE_SIZE, BatchFacts
from runtime.tasks.metrics import METRICS
from runtime.tasks.semantic_segmentation import choose_classes, class_ious, unlabelled

TASK = find_task("semantic-segmentation")
NAMES = ("miou", "dice", "pixel_accuracy")


def same_where_sure(found: np.ndarray, logits: np.ndarray) -> bool:
    """Whether the classes [H, W] are the largest logits' [C, H, W], but where two are equal up to rounding."""
    ordered = np.sort(logits, axis=0)
    sure = ordered[-1] - ordered[-2] > 1e-4
    return bool(sure.mean() > 0.95 and (found == logits.argmax(axis=0))[sure].all())


@pytest.mark.parametrize(("height", "width"), [(5, 7), (13, 9), (64, 48), (1, 3), (1000, 800)])
def test_logits_are_resized_as_torch_does(height: int, width: int) -> None:
    """The last ones in several strips."""
    import torch
    from torch.nn.functional import interpolate

    logits = np.random.default_rng(0).normal(size=(6, 5, 7)).astype(np.float32)
    wanted = interpolate(torch.from_numpy(logits)[None], (height, width), mode="bilinear", align_corners=False)[0]
    found = choose_classes(logits, place_image(height, width, ImagePreprocess(resize=(10, 14))))
    assert found.dtype == np.uint8 and same_where_sure(found, wanted.numpy())


def test_what_was_cut_off_was_not_seen() -> None:
    """Of an image of stripes, each of its own grey, the answers of a model that names the grey lie where they were."""
    spec = ImagePreprocess(resize=8, crop=(8, 8), channels="L", resample="nearest")
    image = np.repeat(np.arange(16, dtype=np.uint8), 2)[None].repeat(16, axis=0)  # 16 x 32, resized to 8 x 16
    seen = image_pixels(image, spec)[..., 0]  # [8, 8], greys 4 to 11
    logits = np.eye(16, dtype=np.float32)[seen].transpose(2, 0, 1)
    found = choose_classes(logits, place_image(16, 32, spec))
    assert (found[:, 8:24] == image[:, 8:24]).all() and (found[:, :8] == 255).all() and (found[:, 24:] == 255).all()
    small = choose_classes(np.ones((2, 8, 8), np.float32), place_image(4, 4, ImagePreprocess(crop=(8, 8))))
    assert (small == 0).all()  # black was added around it: all of it was seen


def read(logits: Any, sizes: Any, **spec: Any) -> dict[str, np.ndarray]:
    facts = BatchFacts(len(logits), {IMAGE_SIZE: np.array(sizes)}, ImagePreprocess(resize=(4, 4), **spec))
    return TASK.read_batch({"out": np.asarray(logits, np.float32)}, facts)


def test_images_of_several_sizes(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    batches = [read(rng.normal(size=(2, 3, 4, 4)), sizes) for sizes in ([(4, 4), (6, 5)], [(4, 4), (4, 4)])]
    joined = {name: TASK.join_batches(name, [batch[name] for batch in batches]) for name in batches[0]}
    assert [one.shape for one in joined["classes"]] == [(4, 4), (6, 5), (4, 4), (4, 4)]
    write_npz(tmp_path / "outputs.npz", joined)
    again = read_outputs_npz(tmp_path / "outputs.npz")
    assert all(np.array_equal(a, b) for a, b in zip(again["classes"], joined["classes"], strict=True))
    TASK.check_frozen("file", again)
    with pytest.raises(BundleError, match="holds no maps"):
        TASK.check_frozen("file", {**again, "classes": np.ones((4, 2, 2))})
    shares = TASK.predict(joined, ("sky", "road"))
    assert shares is not None and all(sum(one["score"] for one in image) == pytest.approx(1) for image in shares)


def test_one_channel_is_two_classes() -> None:
    found = read(np.array([[[[-1.0, 2.0], [3.0, -4.0]]]]).repeat(2, 2).repeat(2, 3), [(4, 4)])
    assert found["classes"][0, ::2, ::2].tolist() == [[0, 1], [1, 0]] and found["n_classes"] == [2]


def test_broken_logits_are_not_hidden_by_the_choice() -> None:
    logits = np.zeros((2, 3, 4, 4))
    logits[1, 0, 0, 0] = np.nan
    found = read(logits, [(4, 4)] * 2)
    with pytest.raises(Exception, match="NaN or infinity in 1 of 2"):
        METRICS["miou"].columns(found, [np.zeros((4, 4), np.uint8)] * 2)


@pytest.mark.parametrize(
    ("outputs", "spec", "message"),
    [
        ({"a": np.zeros((1, 3, 4), np.float32)}, {}, "one output"),
        ({"a": np.zeros((1, 3, 4, 4), np.int64)}, {}, "of logits"),
        ({"a": np.zeros((1, 3, 4, 4), np.float32)}, {"layout": "NHWC"}, "channels first"),
    ],
)
def test_outputs_that_are_no_logits(outputs: Any, spec: Any, message: str) -> None:
    facts = BatchFacts(1, {IMAGE_SIZE: np.array([[4, 4]])}, ImagePreprocess(**spec))
    with pytest.raises(BundleError, match=message):
        TASK.read_outputs(outputs, facts)


def answered(maps: Any, n_classes: int = 5) -> dict[str, np.ndarray]:
    n = np.full(len(maps), n_classes, np.uint16)
    return {"classes": stack_rows(list(maps)), "score": np.ones(len(maps), np.float32), "n_classes": n}


def draw(seed: int, n: int = 12) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Labels of several sizes, some pixels without any, and maps that are right on most; class 4 is nowhere."""
    rng = np.random.default_rng(seed)
    sizes = [tuple(rng.integers(5, 12, 2)) for _ in range(n)]
    labels = [rng.integers(0, 4, size).astype(np.uint8) for size in sizes]
    maps = [
        np.where(rng.random(one.shape) < 0.7, one, rng.integers(0, 4, one.shape)).astype(np.uint8) for one in labels
    ]
    for one in labels:
        one[rng.random(one.shape) < 0.1] = 255
    return maps, labels


def test_metrics_are_scikit_learns() -> None:
    from sklearn.metrics import accuracy_score, f1_score, jaccard_score

    maps, labels = draw(2)
    known = np.concatenate([one.reshape(-1) for one in labels]) != 255
    real, chosen = (np.concatenate([one.reshape(-1) for one in many])[known] for many in (labels, maps))
    outputs = answered(maps)
    assert METRICS["miou"].compute(outputs, labels) == pytest.approx(jaccard_score(real, chosen, average="macro"))
    assert METRICS["dice"].compute(outputs, labels) == pytest.approx(f1_score(real, chosen, average="macro"))
    assert METRICS["pixel_accuracy"].compute(outputs, labels) == pytest.approx(accuracy_score(real, chosen))
    ious = class_ious(outputs, labels)
    assert ious[:4] == pytest.approx(jaccard_score(real, chosen, average=None)) and np.isnan(ious[4])
    assert METRICS["pixel_agreement"].compute(answered(labels), answered(labels)) == 1.0
    assert METRICS["miou_baseline"].compute(outputs, answered(maps)) == 1.0


def test_what_was_not_seen_is_wrong() -> None:
    label = np.zeros((2, 2), np.uint8)
    half = np.array([[0, 255], [0, 255]], np.uint8)
    for name, value in (("miou", 0.5), ("pixel_accuracy", 0.5), ("dice", 2 / 3)):
        assert METRICS[name].compute(answered([half]), [label]) == pytest.approx(value)


@pytest.mark.parametrize("name", NAMES)
def test_what_an_image_adds_is_the_derivative(name: str) -> None:
    maps, labels = draw(3, 200)
    metric = METRICS[name]
    columns = metric.columns(answered(maps), labels)
    twice = tuple(np.concatenate([column, column[:1]]) for column in columns)
    step = metric.statistic(twice) - metric.statistic(columns)
    assert step == pytest.approx(metric.influence(columns)[0] / 201, rel=0.05)
    assert abs(metric.influence(columns).mean()) < 1e-9


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([np.zeros((2, 2), np.uint8)], "1 masks for 2 images"),
        ([np.zeros((2, 2), np.uint8), np.zeros((2, 3), np.uint8)], r"row 1 is uint8 \[2, 3\]"),
        ([np.zeros((2, 2), np.uint8), np.full((2, 2), 5, np.uint8)], "row 1 has class 5"),
        ([np.full((2, 2), 255, np.uint8)] * 2, "no pixel has a class"),
    ],
)
def test_masks_that_do_not_fit(labels: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        METRICS["miou"].compute(answered(np.zeros((2, 2, 2), np.uint8)), labels)


def test_many_classes_take_two_bytes() -> None:
    found = choose_classes(np.eye(300, dtype=np.float32)[:, :4, None], place_image(4, 1, ImagePreprocess()))
    assert found.dtype == np.uint16 and unlabelled(found) == 65535 and found[:, 0].tolist() == [0, 1, 2, 3]
