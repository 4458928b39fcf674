"""How far boxes overlap, and which of them a better one removes."""

from __future__ import annotations

import numpy as np

from runtime.bundle.columns import Array


def intersect(a: Array, b: Array) -> Array:
    """Return the areas that boxes share: [n, 4] and [m, 4] (x1, y1, x2, y2) -> [n, m]."""
    low = np.maximum(a[:, None, :2], b[None, :, :2])
    high = np.minimum(a[:, None, 2:], b[None, :, 2:])
    sides = np.maximum(high - low, 0)
    areas: Array = sides[..., 0] * sides[..., 1]
    return areas


def measure_areas(boxes: Array) -> Array:
    """Return the areas of boxes [n, 4] -> [n]."""
    areas: Array = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    return areas


def compute_iou(a: Array, b: Array, crowd: Array | None = None) -> Array:
    """Return intersection over union of boxes [n, 4] and [m, 4] -> [n, m]; 0 where both are empty.

    `crowd`, bool [m]: where a box of `b` is one, the area of `a` alone is below the line, as COCO has it.
    """
    shared, own = intersect(a, b), measure_areas(a)[:, None]
    union = own + measure_areas(b)[None, :] - shared
    if crowd is not None:
        union = np.where(crowd, own, union)
    ratio: Array = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return ratio


def suppress_overlaps(boxes: Array, scores: Array, classes: Array | None, iou_threshold: float, most: int) -> Array:
    """Return which boxes stay, best first, at most `most`: int64 [k]. Greedy non-maximum suppression.

    `boxes` [n, 4], `scores` [n]. A box goes where more than `iou_threshold` of it and a better one of its class
    (`classes` [n]; None: of any) overlaps. Of equal scores the earlier one is better.
    """
    order = np.argsort(-scores, kind="stable")
    kept: list[int] = []
    while len(order) and len(kept) < most:
        best, order = order[0], order[1:]
        kept.append(int(best))
        away = compute_iou(boxes[best][None], boxes[order])[0] <= iou_threshold
        if classes is not None:
            away |= classes[order] != classes[best]
        order = order[away]
    return np.array(kept, np.int64)
