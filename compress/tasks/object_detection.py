"""Images, in which objects are found: a box, a class and a score each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from compress.tasks.base import INT8, Columns, LabelReader, Starter, TorchTask
from runtime.boxes.match import LABEL_WIDTH

ROUNDING = 1.0
"""Pixels by which a box may lie outside its image, as rounded ones do; it is cut off."""


def _read_objects(reader: LabelReader, column: str, raw: Sequence[Any]) -> np.ndarray:
    """Read each image's boxes, as `compress.data.boxes` brings them into one form: float64 [N, most, 7].

    Rows of `runtime.boxes.match`: class, x1, y1, x2, y2, ignored, area; class -1 fills up.
    """
    most = max((len(cell["classes"]) for cell in raw), default=0)
    labels = np.zeros((len(raw), max(most, 1), LABEL_WIDTH))
    labels[..., 0] = -1
    for row, cell in enumerate(raw):
        for box, name in enumerate(cell["classes"]):
            labels[row, box, 0] = _read_class(reader, column, row, box, name)
            labels[row, box, 1:5] = cell["boxes"][box]
            sides = labels[row, box, 3:5] - labels[row, box, 1:3]
            if not (sides > 0).all():
                shown = labels[row, box, 1:5].tolist()
                raise reader.fail(column, row, f"box {box} (x1, y1, x2, y2) {shown} is empty; mend it or remove it")
            labels[row, box, 5] = cell["ignored"][box]
            labels[row, box, 6] = sides.prod() if cell["areas"] is None else cell["areas"][box]
    return labels


def _read_class(reader: LabelReader, column: str, row: int, box: int, value: Any) -> int:
    names = [name.casefold() for name in reader.class_names]
    if isinstance(value, str) and value.casefold() in names:
        return names.index(value.casefold())
    number = int(value) if isinstance(value, float) and value == int(value) else value
    if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < len(names):
        return number
    known = ", ".join(reader.class_names)
    raise reader.fail(column, row, f"box {box}: class {value!r} is none of the model's {len(names)} ({known})")


def _cut_to_images(columns: Columns) -> tuple[int, str] | None:
    """Cut off, in place, what of boxes lies outside by rounding; return the first that is outside by more, or whole."""
    if "label" not in columns or "image" not in columns:
        return None
    for row, (image, boxes) in enumerate(zip(columns["image"], columns["label"], strict=True)):
        height, width = image.shape[:2]
        corners, there = boxes[:, 1:5], boxes[:, 0] >= 0
        limit = np.array([width, height, width, height])
        cut = np.clip(corners, 0, limit)
        empty = (cut[:, 2:] <= cut[:, :2]).any(axis=1)
        outside = there & ((np.abs(cut - corners) > ROUNDING).any(axis=1) | empty)
        if outside.any():
            box = int(outside.argmax())
            shown = corners[box].tolist()
            return row, (
                f"box {box} (x1, y1, x2, y2) {shown} is outside its image of {width}x{height} (width x height); "
                "`boxes:` in the set says what form boxes have"
            )
        corners[:] = cut
    return None


OBJECT_DETECTION = TorchTask(
    name="object-detection",
    starter=Starter(
        "python:model.py:build",
        """  # voc: a folder with JPEGImages, Annotations, ImageSets; coco: a JSON (`images: folder`); jsonl:, parquet:
  # {image: file, objects: {bbox: [[x, y, width, height], ...], category: [...]}}
  calibration: {source: "voc:data", split: train, samples: 128}
  evaluation: {source: "voc:data", split: test}
""",
        "  - {kind: fold_batchnorm}     # into the convolutions; exact\n" + INT8,
        "    - {metric: ap50, max_drop: 0.02}\n",
        model="""  class_names: [cat, dog]      # in the order of the model's outputs
  detections:                  # what the outputs mean, where their names and shapes do not say
    boxes: cxcywh              # or xyxy, xywh, yxyx; ltrb or deltas with priors: {strides: [8, 16, 32]}
    normalized: false          # in pixels of the model's input
    scores: sigmoid            # or softmax, none
preprocess: {kind: image, letterbox: [640, 640]}
""",
    ),
    loss="detections",
    auto_class="AutoModelForObjectDetection",
    outputs={"logits": ("batch", "queries", "numbers"), "pred_boxes": ("batch", "queries", "sides")},
    any_outputs=True,
    read_labels=_read_objects,
    usual_names={"image": ("file", "file_name", "path"), "label": ("objects",)},
    needs_class_names=True,
    filler=-1,
    find_misfit=_cut_to_images,
)
