"""Which detections are right, by the COCO rules: what every metric of detections counts. As pycocotools does.

Labels are float64 [N, m, 7], a row for each box: class (-1: none, it fills up), x1, y1, x2, y2, ignored, area. What is
`CROWD` or `DIFFICULT` need not be found, and a detection on it counts for nothing; a crowd overlaps what lies in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from runtime.boxes.overlap import compute_iou, measure_areas
from runtime.bundle.columns import Array
from runtime.errors import UsageError

COUNTED, CROWD, DIFFICULT = 0, 1, 2
"""Values of `ignored`."""
LABEL_WIDTH = 7
THRESHOLDS = np.linspace(0.5, 0.95, 10)
"""Intersection over union from which on a detection is right."""
RECALLS = np.linspace(0.0, 1.0, 101)
"""Where precision is read off."""
DETECTIONS = 100
"""Of an image and a class, the best ones, that are counted."""
ALL_AREAS = (0.0, 1e10)
"""Square pixels: least and most of the boxes that count."""
WRONG, RIGHT, IGNORED = 0, 1, -1


@dataclass(frozen=True)
class Matches:
    """Detections beside the labels, of N images with up to D detections each, best first.

    `scores` float32 [N, D]; `classes` int64 [N, D], -1 where there is none, or it is not counted. `results` int8
    [N, D, T] at each threshold: RIGHT, WRONG or IGNORED. `partners` int64 [N, D]: row of the label that it is right for
    at the first threshold, else -1; `overlaps` float64 [N, D]: with that one. `counted` int64 [N, C]: boxes of each
    class that should be found.
    """

    scores: Array
    classes: Array
    results: Array
    partners: Array
    overlaps: Array
    counted: Array


def check_labels(labels: object, n: int) -> Array:
    """Return labels as float64 [N, m, 7]. UsageError for another shape, or classes that are no whole numbers."""
    given = np.asarray(labels)
    if given.ndim != 3 or len(given) != n or given.shape[2] != LABEL_WIDTH or given.dtype.kind not in "iuf":
        raise UsageError(
            f"labels: {given.dtype} {list(given.shape)} where float64 [{n}, boxes, {LABEL_WIDTH}] are needed: class, "
            "x1, y1, x2, y2, ignored (0, 1 crowd, 2 difficult), area"
        )
    wrong = np.argwhere((given[..., 0] != np.floor(given[..., 0])) | (given[..., 0] < -1) | ~np.isfinite(given).all(-1))
    if len(wrong):
        row, box = wrong[0]
        raise UsageError(f"labels: row {row}, box {box}: {given[row, box].tolist()} is no class and box")
    return given.astype(np.float64)


def match_detections(outputs: Mapping[str, Array], labels: Array, areas: tuple[float, float] = ALL_AREAS) -> Matches:
    """Return which detections are right. `outputs`: boxes [N, D, 4], scores and classes [N, D], -1 for none.

    Boxes of another area than from `areas[0]` to `areas[1]` are ignored.
    """
    scores, classes = outputs["scores"], outputs["classes"]
    order = np.argsort(-scores.astype(np.float64), axis=1, kind="stable")
    scores, classes = np.take_along_axis(scores, order, 1), np.take_along_axis(classes, order, 1).astype(np.int64)
    boxes = np.take_along_axis(outputs["boxes"], order[..., None], 1).astype(np.float64)
    classes = leave_out_worst(classes)
    n_classes = int(labels[..., 0].max(initial=-1)) + 1
    area = measure_areas(boxes.reshape(-1, 4)).reshape(scores.shape)
    unfound = np.where((area < areas[0]) | (area > areas[1]), IGNORED, WRONG).astype(np.int8)
    results = np.repeat(unfound[..., None], len(THRESHOLDS), axis=2)
    partners, overlaps = np.full(scores.shape, -1), np.zeros(scores.shape)
    counted = np.zeros((len(scores), n_classes), np.int64)
    for image, rows in enumerate(labels):
        numbered, places = np.flatnonzero(rows[:, 0] >= 0), np.flatnonzero(classes[image] >= 0)
        real = rows[numbered]
        ignored = (real[:, 5] != COUNTED) | (real[:, 6] < areas[0]) | (real[:, 6] > areas[1])
        counted[image] = np.bincount(real[~ignored, 0].astype(np.int64), minlength=n_classes)
        if not (len(numbered) and len(places)):
            continue
        same = classes[image, places, None] == real[:, 0]  # [d, g]
        ious = np.where(same, compute_iou(boxes[image, places], real[:, 1:5], real[:, 5] == CROWD), 0.0)
        results[image, places], taken = _match_image(ious, real, ignored, results[image, places])
        right = taken >= 0
        partners[image, places[right]] = numbered[taken[right]]
        overlaps[image, places[right]] = ious[right, taken[right]]
    return Matches(scores, classes, results, partners, overlaps, counted)


def leave_out_worst(classes: Array) -> Array:
    """Return classes [N, D], best first, with -1 for those that are not among the DETECTIONS best of their class."""
    if classes.shape[1] <= DETECTIONS:
        return classes
    kept = classes.copy()
    for row in kept:
        for number in np.unique(row):
            row[np.flatnonzero(row == number)[DETECTIONS:]] = -1
    return kept


def _match_image(ious: Array, real: Array, ignored: Array, unfound: Array) -> tuple[Array, Array]:
    """Match the detections of one image, best first, to its labels [g, 7], of which some are `ignored`, bool [g].

    `ious`: float64 [d, g], 0 for another class. Returns results int8 [d, T], `unfound` where nothing fits; and the
    label that each is right for at the first threshold, int64 [d], -1 for none.

    Each detection takes the free box that it overlaps most, of equal ones the last, and an ignored one only where no
    other is left; a crowd, and what is difficult, stays free.
    """
    levels = np.minimum(THRESHOLDS, 1 - 1e-10)
    results, partners = unfound.copy(), np.full(len(ious), -1)
    near = ious >= levels[0]
    # most detections have one label near, which no other has: these need not wait for better ones
    alone = near.sum(axis=1) == 1
    alone[alone] = near.sum(axis=0)[near[alone].argmax(axis=1)] == 1
    only = near[alone].argmax(axis=1)
    outcome = np.where(ignored[only], IGNORED, RIGHT)[:, None]
    results[alone] = np.where(ious[alone, only][:, None] >= levels, outcome, results[alone])
    partners[alone] = np.where(ignored[only], -1, only)
    free = np.ones((len(levels), len(real)), bool)
    for place in np.flatnonzero(near.any(axis=1) & ~alone):
        close = np.flatnonzero(near[place])
        fits = free[:, close] & (ious[place, close] >= levels[:, None])  # [T, close]
        first, second = fits & ~ignored[close], fits & ignored[close]
        choice = np.where(first.any(axis=1, keepdims=True), first, second)
        weighed = np.where(choice, ious[place, close], -1.0)
        best = close[len(close) - 1 - weighed[:, ::-1].argmax(axis=1)]  # of equal ones the last
        matched = choice.any(axis=1)
        counts = matched & ~ignored[best]
        taken = matched & (real[best, 5] == COUNTED)
        free[np.flatnonzero(taken), best[taken]] = False
        results[place] = np.where(counts, RIGHT, np.where(matched, IGNORED, results[place]))
        if counts[0]:
            partners[place] = best[0]
    return results, partners
