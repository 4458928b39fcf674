"""Detections of a detector's outputs: boxes in pixels of the model's input, scores and classes, image by image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.boxes.overlap import suppress_overlaps
from runtime.bundle.columns import Array
from runtime.bundle.detections import Detections, Priors
from runtime.errors import BundleError

CANDIDATES = 3000
"""Best boxes of an image that suppression looks at first; at more, where too few of these are kept."""


@dataclass(frozen=True)
class ImageDetections:
    """What was found in one image, best first: boxes float32 [k, 4] (x1, y1, x2, y2), scores float32 [k], classes."""

    boxes: Array
    scores: Array
    classes: Array


def find_objects(
    outputs: Mapping[str, Array], spec: Detections, size: tuple[int, int], n_classes: int
) -> list[ImageDetections]:
    """Return what a model found in each image of a batch, boxes in pixels of its input.

    `spec`: as `complete_detections` makes it; `size`: (height, width) of the model's input. BundleError where the
    outputs are not of such shapes.
    """
    head = spec.outputs
    assert head is not None  # or it is not complete
    if missing := [name for name in head.names if name not in outputs]:
        raise BundleError(f"the model gives no output '{missing[0]}'; it gives: {', '.join(outputs)}")
    if head.final:
        return _read_final(outputs, spec, size, n_classes)
    boxes, scores = _read_head(outputs, spec, n_classes)  # [n, A, 4], [n, A, C]
    boxes = _make_corners(boxes, spec, size)
    return [_select(b, s, spec) for b, s in zip(boxes, scores, strict=True)]


def _read_final(
    outputs: Mapping[str, Array], spec: Detections, size: tuple[int, int], n_classes: int
) -> list[ImageDetections]:
    """Read the outputs of a model that ends in boxes."""
    head = spec.outputs
    assert head is not None
    if head.rows is not None:
        rows = outputs[head.rows]
        if rows.ndim != 3 or rows.shape[2] != 6:
            raise BundleError(f"output '{head.rows}' has shape {rows.shape}, not [batch, n, 6]")
        boxes, scores, classes = rows[..., :4], rows[..., 4], rows[..., 5]
    else:
        boxes, scores, classes = (outputs[name] for name in (head.boxes[0], head.scores[0], head.classes or ""))
        if boxes.shape != (*scores.shape, 4) or classes.shape != scores.shape:
            raise BundleError(
                f"boxes {boxes.shape}, scores {scores.shape} and classes {classes.shape}: [batch, n, 4], [batch, n] "
                "and [batch, n] are needed"
            )
    boxes = _make_corners(boxes.astype(np.float32), spec, size)
    with np.errstate(invalid="ignore"):  # NaN becomes the number of no class
        numbers = np.rint(classes).astype(np.int64) - spec.first_class
    used = (scores >= spec.score_threshold) & (numbers >= 0) & (numbers < n_classes)
    if head.count is not None:
        counts = outputs[head.count].reshape(len(scores), -1)[:, 0]
        used &= np.arange(scores.shape[1]) < counts[:, None]
    return [
        _keep_best(b[u], s[u].astype(np.float32), c[u], spec)
        for b, s, c, u in zip(boxes, scores, numbers, used, strict=True)
    ]


def _read_head(outputs: Mapping[str, Array], spec: Detections, n_classes: int) -> tuple[Array, Array]:
    """Return the boxes' numbers [n, A, 4] and the scores of the classes [n, A, C], float32."""
    head, background = spec.outputs, spec.background
    assert head is not None
    width = n_classes + (background is not None)
    objectness = None
    if head.joined:
        joined = _join_levels(outputs, head.joined, 4 + spec.objectness + width)
        boxes, numbers = joined[..., :4], joined[..., 4 + spec.objectness :]
        objectness = joined[..., 4:5] if spec.objectness else None
    else:
        boxes, numbers = _join_levels(outputs, head.boxes, 4), _join_levels(outputs, head.scores, width)
        objectness = _join_levels(outputs, head.objectness, 1) if head.objectness else None
    if boxes.shape[1] != numbers.shape[1]:
        raise BundleError(f"the model gives {boxes.shape[1]} boxes and scores of {numbers.shape[1]}")
    if objectness is not None and objectness.shape[1] != boxes.shape[1]:
        raise BundleError(f"the model gives {boxes.shape[1]} boxes and objectness of {objectness.shape[1]}")
    scores = _ACTIVATIONS[spec.scores or "none"](numbers)
    if background is not None:
        scores = np.delete(scores, background, axis=2)
    if objectness is not None:
        scores = scores * _ACTIVATIONS["none" if spec.scores == "none" else "sigmoid"](objectness)
    return boxes, scores


def _join_levels(outputs: Mapping[str, Array], names: Sequence[str], width: int) -> Array:
    """Return levels, one after the other, as float32 [n, A, width]. BundleError."""
    return np.concatenate([_to_rows(name, outputs[name], width) for name in names], axis=1)


def _to_rows(name: str, output: Array, width: int) -> Array:
    """Return [n, A, width] of that, of [n, width, A], or of [n, k * width, h, w] with k boxes in a cell."""
    values = output.astype(np.float32, copy=False)
    if values.ndim == 4 and values.shape[1] % width == 0:
        n, _, rows, columns = values.shape
        cells = values.reshape(n, -1, width, rows, columns)  # [n, k, width, h, w]
        return cells.transpose(0, 3, 4, 1, 2).reshape(n, -1, width)
    if values.ndim == 3 and values.shape[2] == width:
        return values
    if values.ndim == 3 and values.shape[1] == width:
        return values.transpose(0, 2, 1)
    raise BundleError(
        f"output '{name}' has shape {output.shape}, of which no dimension is the {width} numbers of a box"
    )


def _sigmoid(numbers: Array) -> Array:
    likely: Array = 1 / (1 + np.exp(-np.clip(numbers, -80, 80)))
    return likely


def _softmax(numbers: Array) -> Array:
    shifted = np.exp(numbers - numbers.max(axis=-1, keepdims=True))
    likely: Array = shifted / shifted.sum(axis=-1, keepdims=True)
    return likely


_ACTIVATIONS = {"sigmoid": _sigmoid, "softmax": _softmax, "none": lambda numbers: numbers}


def place_priors(priors: Priors, size: tuple[int, int]) -> Array:
    """Return the priors of an input of `size` (height, width) as centre and size in pixels, float32 [A, 4]."""
    levels = []
    for level, stride in enumerate(priors.strides):
        sizes = np.array(priors.sizes[level] if priors.sizes is not None else [(stride, stride)], np.float32)
        rows, columns = (int(np.ceil(side / stride - 1e-6)) for side in size)
        y, x = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
        centres = (np.stack([x, y], axis=-1).astype(np.float32) + np.float32(priors.offset)) * np.float32(stride)
        shape = (rows, columns, len(sizes), 2)
        placed = [np.broadcast_to(centres[:, :, None], shape), np.broadcast_to(sizes, shape)]
        levels.append(np.concatenate(placed, axis=-1).reshape(-1, 4))
    return np.concatenate(levels)


def _make_corners(boxes: Array, spec: Detections, size: tuple[int, int]) -> Array:
    """Return boxes of the spec's form [n, A, 4] as corners x1, y1, x2, y2 in pixels of the input."""
    first, second = boxes[..., :2], boxes[..., 2:]
    if spec.priors is not None:
        priors = place_priors(spec.priors, size)
        if len(priors) != boxes.shape[1]:
            raise BundleError(
                f"the model gives {boxes.shape[1]} boxes, and the priors of an input of {size[0]}x{size[1]} (height x "
                f"width) are {len(priors)}: check strides and sizes"
            )
        centre, sides = priors[:, :2], priors[:, 2:]
        if spec.boxes == "ltrb":
            return np.concatenate([centre - first * sides, centre + second * sides], axis=-1)
        centre = centre + first * np.float32(spec.variances[0]) * sides
        sides = sides * np.exp(np.minimum(second * np.float32(spec.variances[1]), 20))
        return np.concatenate([centre - sides / 2, centre + sides / 2], axis=-1)
    if spec.boxes == "cxcywh":
        corners = np.concatenate([first - second / 2, first + second / 2], axis=-1)
    elif spec.boxes == "xywh":
        corners = np.concatenate([first, first + second], axis=-1)
    else:
        corners = boxes[..., [1, 0, 3, 2]] if spec.boxes == "yxyx" else boxes
    scale = np.array([size[1], size[0], size[1], size[0]], np.float32) if spec.normalized else np.float32(1)
    pixels: Array = corners * scale
    return pixels


def _select(boxes: Array, scores: Array, spec: Detections) -> ImageDetections:
    """Return what is found of one image's boxes [A, 4] and scores [A, C]."""
    if spec.multi_label:
        places, classes = np.nonzero(scores >= spec.score_threshold)
    else:
        best = scores.argmax(axis=1)
        places = np.flatnonzero(scores[np.arange(len(scores)), best] >= spec.score_threshold)
        classes = best[places]
    return _keep_best(boxes[places], scores[places, classes], classes, spec)


def _keep_best(boxes: Array, scores: Array, classes: Array, spec: Detections) -> ImageDetections:
    """Return the best detections, without those that better ones overlap. NaN is left out as no score is above it."""
    order = np.argsort(-scores, kind="stable")
    if spec.suppress == "none":
        return _take(boxes, scores, classes, order[: spec.most])
    n = CANDIDATES
    while True:
        best = _take(boxes, scores, classes, order[:n])
        of_class = best.classes if spec.suppress == "class" else None
        kept = suppress_overlaps(best.boxes, best.scores, of_class, spec.iou_threshold, spec.most)
        if len(kept) == spec.most or n >= len(order):
            return _take(best.boxes, best.scores, best.classes, kept)
        n *= 4


def _take(boxes: Array, scores: Array, classes: Array, places: Array) -> ImageDetections:
    return ImageDetections(boxes[places], scores[places], classes[places])
