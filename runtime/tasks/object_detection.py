"""Images, in which objects are found: a box, a class and a score each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.boxes.decode import find_objects
from runtime.bundle.columns import Array
from runtime.bundle.tensors import TensorSpec
from runtime.encode.images import ImagePlacement, ImagePreprocess, place_image
from runtime.errors import BundleError
from runtime.tasks.base import IMAGE_SIZE, BatchFacts, Task, Tensors, check_rows, name_class, rename


class ObjectDetection(Task):
    """Find objects in images.

    Outputs, K the most detections of an image: {"boxes": float32 [N, K, 4], corners x1, y1, x2, y2 in pixels of the
    image as it came, best first; "scores": float32 [N, K]; "classes": int64 [N, K]}, filled up with class -1.
    """

    name = "object-detection"
    about = "objects in each image: a box, a class and a score"
    columns = ("image",)
    preprocess = "image"
    outputs = "boxes"
    always = ("boxes", "scores", "classes")
    leaping = ("boxes", "classes")
    facts = (IMAGE_SIZE,)

    def read_outputs(self, outputs: Tensors, batch: BatchFacts) -> dict[str, Array]:
        """Return {"boxes", "scores", "classes"}; of an image whose outputs hold NaN its first score is that.

        BundleError without `batch.detections`, and where the outputs are not what it says.
        """
        how, spec, sizes = batch.detections, batch.spec, batch.known[IMAGE_SIZE]
        assert isinstance(spec, ImagePreprocess)  # or it is refused before
        if how is None or how.outputs is None:
            raise BundleError("nothing says what the detector's outputs mean: build the bundle again")
        placed = [place_image(int(height), int(width), spec) for height, width in sizes]
        found = find_objects(outputs, how, placed[0].window, len(batch.class_names))
        for name in how.outputs.names:
            if name != how.outputs.count:  # of one image it may be a number alone
                check_rows(name, outputs[name], batch.n)
        boxes = np.zeros((batch.n, how.most, 4), np.float32)
        scores = np.zeros((batch.n, how.most), np.float32)
        classes = np.full((batch.n, how.most), -1, np.int64)
        for row, (image, place) in enumerate(zip(found, placed, strict=True)):
            corners = _return_to_image(image.boxes, place)
            there = (corners[:, 2] > corners[:, 0]) & (corners[:, 3] > corners[:, 1])
            n = min(int(there.sum()), how.most)
            boxes[row, :n], scores[row, :n] = corners[there][:n], image.scores[there][:n]
            classes[row, :n] = image.classes[there][:n]
        finite = [np.isfinite(outputs[name].reshape(batch.n, -1)).all(axis=1) for name in how.outputs.names]
        scores[~np.all(finite, axis=0), 0] = np.nan  # a broken model is not one that finds nothing
        return {"boxes": boxes, "scores": scores, "classes": classes}

    def predict(self, outputs: Tensors, class_names: Sequence[str]) -> list[Any] | None:
        """Return for each image a list of {"label", "score", "box": [x1, y1, x2, y2]}, best first."""
        return [
            [
                {"label": name_class(number, class_names), "score": float(score), "box": box.tolist()}
                for box, score, number in zip(boxes, scores, classes, strict=True)
                if number >= 0
            ]
            for boxes, scores, classes in (
                zip(outputs["boxes"], outputs["scores"], outputs["classes"].tolist(), strict=True)
            )
        ]

    def answers(self, outputs: Tensors, class_names: Sequence[str]) -> dict[str, Array]:
        """Return boxes float32 [n, K, 4], score float32 [n, K] and label (str) [n, K]: "" and 0 where there is none."""
        names = np.array([*(str(name) for name in class_names), ""], np.object_)
        return {"box": outputs["boxes"], "score": outputs["scores"], "label": names[outputs["classes"]]}

    def answer_specs(self, outputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Return the specs of `answers`."""
        first = outputs[0]
        return (
            rename(first, "box", "float32", "detections", 4),
            rename(first, "score", "float32", "detections"),
            rename(first, "label", "object", "detections"),
        )


def _return_to_image(boxes: Array, place: ImagePlacement) -> Array:
    """Return boxes [k, 4] in pixels of what the model saw as pixels of the image, cut at its edges."""
    (height, width), (scale_y, scale_x), (top, left) = place.size, place.scale, place.start
    corners = (boxes + np.array([left, top] * 2, np.float64)) / np.array([scale_x, scale_y] * 2)
    cut: Array = np.clip(corners, 0, np.array([width, height] * 2)).astype(np.float32)
    return cut
