"""Detections go back to the image as it came, wherever preprocessing put it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from runtime.bundle.detections import Detections, HeadOutputs
from runtime.encode.images import ImagePreprocess, image_pixels, place_image
from runtime.errors import BundleError
from runtime.metrics import NonFiniteOutputs, check_finite
from runtime.tasks import find_task
from runtime.tasks.base import IMAGE_SIZE, BatchFacts

SPECS = (
    ImagePreprocess(letterbox=(64, 96)),
    ImagePreprocess(letterbox=(64, 96), anchor="top-left", padding=0),
    ImagePreprocess(letterbox=(97, 51)),
    ImagePreprocess(resize=(48, 80)),
    ImagePreprocess(resize=60, crop=(56, 40)),
    ImagePreprocess(),
)
HOW = Detections(
    boxes="xyxy",
    normalized=False,
    scores="none",
    suppress="class",
    outputs=HeadOutputs(("boxes",), ("scores",)),
    most=4,
)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_bright_box_is_found_where_it_is_in_the_image(spec: ImagePreprocess) -> None:
    """What stands out in the model's input, as a box of it, lies over the bright pixels of the image."""
    image = np.zeros((120, 90, 3), np.uint8)
    image[40:80, 30:60] = 255
    pixels = image_pixels(image, spec)
    rows, columns = np.nonzero(pixels[..., 0] > 127)
    box = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    outputs = {"boxes": np.array([[box]], np.float32), "scores": np.array([[[0.9]]], np.float32)}
    facts = BatchFacts(1, {IMAGE_SIZE: np.array([[120, 90]])}, spec, ("thing",), HOW)
    task = find_task("object-detection")
    read = task.read_batch(outputs, facts)
    grain = 1 / min(place_image(120, 90, spec).scale)
    assert read["boxes"][0, 0] == pytest.approx([30, 40, 60, 80], abs=grain)
    assert read["classes"][0].tolist() == [0, -1, -1, -1]
    ((answer,),) = task.predict(read, ("thing",)) or []
    assert answer["label"] == "thing"
    assert answer["score"] == pytest.approx(0.9)
    assert task.answers(read, ("thing",))["label"].tolist() == [["thing", "", "", ""]]


def test_letterbox_is_a_resized_image_on_padding() -> None:
    image = np.random.default_rng(0).integers(0, 256, (50, 80, 3), dtype=np.uint8)
    pixels = image_pixels(image, ImagePreprocess(letterbox=(64, 64), padding=7))
    inside = np.asarray(Image.fromarray(image).resize((64, 40), Image.Resampling.BILINEAR))
    assert np.array_equal(pixels[12:52], inside)
    assert (pixels[:12] == 7).all()
    assert (pixels[52:] == 7).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"letterbox": (64, 64), "resize": 32}, "leave resize and crop out"),
        ({"letterbox": (0, 64)}, "at least 1 pixel"),
        ({"letterbox": (64, 64), "padding": 256}, "give 0 to 255"),
    ],
)
def test_a_letterbox_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImagePreprocess(**fields)


def test_a_broken_model_is_not_one_that_finds_nothing() -> None:
    outputs = {"boxes": np.full((2, 3, 4), 5, np.float32), "scores": np.zeros((2, 3, 1), np.float32)}
    outputs["boxes"][1, 0, 2] = np.nan
    sizes = {IMAGE_SIZE: np.array([[32, 32], [32, 32]])}
    read = find_task("object-detection").read_batch(outputs, BatchFacts(2, sizes, ImagePreprocess(), ("a",), HOW))
    with pytest.raises(NonFiniteOutputs, match=r"1 of 2 samples \(first rows: 1\)"):
        check_finite(read)


def test_a_batch_that_the_export_fixed_to_one_image_is_named() -> None:
    outputs = {"boxes": np.zeros((1, 6, 4), np.float32), "scores": np.zeros((1, 6, 1), np.float32)}
    sizes = {IMAGE_SIZE: np.array([[32, 32], [32, 32]])}
    facts = BatchFacts(2, sizes, ImagePreprocess(), ("a",), HOW)
    with pytest.raises(BundleError, match=r"'boxes' has shape \(1, 6, 4\) for a batch of 2.* free batch"):
        find_task("object-detection").read_batch(outputs, facts)
