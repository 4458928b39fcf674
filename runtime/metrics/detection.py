"""Metrics of detections: average precision and recall by the COCO rules, and how far two models find the same boxes.

An average precision is no mean over images: what one adds to it is the derivative by its weight (the infinitesimal
jackknife; Efron 1982), of the area under the precision that is made to fall with recall.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from runtime.boxes.match import (
    ALL_AREAS,
    COUNTED,
    IGNORED,
    LABEL_WIDTH,
    RECALLS,
    RIGHT,
    WRONG,
    Matches,
    check_labels,
    leave_out_worst,
    match_detections,
)
from runtime.boxes.overlap import measure_areas
from runtime.metrics.base import FRACTION, Columns, Flaws, Metric, Outputs, ratio_of_sums, remember

LEAST_BOXES = 10
"""Boxes among the labels below which there is no interval: one of them is worth too much."""
AREAS = {"small": (0.0, 32.0**2), "medium": (32.0**2, 96.0**2), "large": (96.0**2, 1e10)}
"""Square pixels, as COCO has them."""
HALF, THREE_QUARTERS, EVERY = slice(0, 1), slice(5, 6), slice(None)
"""Of `runtime.boxes.match.THRESHOLDS`."""


@remember
def _find_matches(outputs: Outputs, labels: Any, areas: tuple[float, float]) -> Matches:
    return match_detections(outputs, check_labels(labels, len(outputs["scores"])), areas)


def _count_detections(levels: slice, areas: tuple[float, float]) -> Callable[[Outputs, Any], Columns]:
    """Return a function that gives scores [N, D], classes [N, D], results [N, D, T] and labelled boxes [N, C]."""

    def count(outputs: Outputs, labels: Any) -> Columns:
        matches = _find_matches(outputs, labels, areas)
        return matches.scores, matches.classes, matches.results[..., levels], matches.counted

    return count


def average_precision(columns: Columns) -> float:
    """Return the mean over classes that the labels have, and thresholds, of precision at 101 recalls; 0 of none."""
    values = [_read_precision(*curve[:2]).mean() for curve in _sort_by_class(columns)]
    return float(np.mean(values)) if values else 0.0


def precision_influence(columns: Columns) -> np.ndarray:
    """Return what each image adds to the average precision, float64 [N]."""
    return _sum_over_classes(columns, _differentiate_area)


def _sum_over_classes(columns: Columns, part: Callable[..., np.ndarray]) -> np.ndarray:
    """Return `part` of each class's curve, mean over classes and times the number of images: float64 [N]."""
    n, curves = len(columns[0]), _sort_by_class(columns)
    return sum((part(*curve) for curve in curves), np.zeros(n)) * n / max(len(curves), 1)


def precision_bias(columns: Columns) -> float:
    """Return by how much the average precision of so few images is too high.

    Precision is made to fall by the luckiest later place, and recall is read off at the next: of half as many images
    the average is too high by about twice as much, so that halves tell what the whole is off.
    """
    n, rng = len(columns[0]), np.random.default_rng(0)
    halves = []
    # halvings enough that their mean varies less than the bias that they tell
    for _ in range(10 if n > 1 else 0):
        order = rng.permutation(n)
        for part in (order[: n // 2], order[n // 2 :]):
            halves.append(average_precision(tuple(column[np.sort(part)] for column in columns)))
    return max(float(np.mean(halves)) - average_precision(columns), 0.0) if halves else 0.0


def _sort_by_class(columns: Columns) -> list[tuple[np.ndarray, ...]]:
    """Return for each class of the labels its detections from the best on.

    precision, recall, right, wrong [T, M]; image int64 [M] of each; labelled boxes int64 [N] of each image.
    """
    scores, classes, results, counted = columns
    rows, places = np.nonzero(classes >= 0)
    order = np.lexsort((-scores[rows, places].astype(np.float64), classes[rows, places]))  # of equal ones the first
    rows, places = rows[order], places[order]
    numbers = classes[rows, places]
    curves: list[tuple[np.ndarray, ...]] = []
    for number in np.flatnonzero(counted.sum(axis=0)):
        of_class = slice(*np.searchsorted(numbers, (number, number + 1)))
        image, place = rows[of_class], places[of_class]
        found = results[image, place].T  # [T, M]
        right, wrong = found == RIGHT, found == WRONG
        n_right, n_found = right.cumsum(axis=1), (right | wrong).cumsum(axis=1)
        precision = n_right / (n_found + np.spacing(1))
        recall = n_right / counted[:, number].sum()
        curves.append((precision, recall, right, wrong, image, counted[:, number]))
    return curves


def _make_falling(precision: np.ndarray) -> np.ndarray:
    """Return the best precision at this or a later detection, [T, M]."""
    falling: np.ndarray = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    return falling


def _read_precision(precision: np.ndarray, recall: np.ndarray) -> np.ndarray:
    """Return the precision at each of RECALLS, [T, 101]; 0 where that recall is not reached."""
    falling = np.concatenate([_make_falling(precision), np.zeros((len(precision), 1))], axis=1)
    places = np.stack([np.searchsorted(row, RECALLS, side="left") for row in recall])
    return np.take_along_axis(falling, places, axis=1)


def _differentiate_area(
    precision: np.ndarray,
    recall: np.ndarray,
    right: np.ndarray,
    wrong: np.ndarray,
    image: np.ndarray,
    of_image: np.ndarray,
) -> np.ndarray:
    """Return the derivative of the area under the curve by each image's weight, mean over thresholds: float64 [N].

    The area is the sum over right detections of the falling precision, over all labelled boxes. An image of more weight
    adds its right ones, moves the precision of every place from its own on, and makes the labelled boxes more.
    """
    n_real = of_image.sum()
    area = (right * _make_falling(precision)).sum(axis=1).mean() / n_real if precision.shape[1] else 0.0
    found = _differentiate_found(precision, recall, right, wrong, image, of_image)
    return np.asarray(found - area * of_image / n_real)


def _differentiate_found(
    precision: np.ndarray,
    recall: np.ndarray,
    right: np.ndarray,
    wrong: np.ndarray,
    image: np.ndarray,
    of_image: np.ndarray,
) -> np.ndarray:
    """Return the part of that derivative that comes of the image's own detections: float64 [N]."""
    n, n_real, levels = len(of_image), of_image.sum(), len(precision)
    if not precision.shape[1]:
        return np.zeros(n)
    falling = _make_falling(precision)
    n_right, n_found = right.cumsum(axis=1), np.maximum((right | wrong).cumsum(axis=1), 1)
    by_detection = np.zeros(precision.shape)
    for level in range(levels):
        # where each right detection's precision is read: the next place that has it itself
        peaks = _find_peaks(precision[level], falling[level])[np.flatnonzero(right[level])]
        times = np.bincount(peaks, minlength=len(image)) / n_found[level].astype(np.float64) ** 2
        gain = (times * (n_found[level] - n_right[level]))[::-1].cumsum()[::-1]
        loss = (times * n_right[level])[::-1].cumsum()[::-1]
        by_detection[level] = right[level] * (falling[level] + gain) - wrong[level] * loss
    return np.bincount(image, by_detection.mean(axis=0), n) / n_real


def _find_peaks(precision: np.ndarray, falling: np.ndarray) -> np.ndarray:
    """Return for each place [M] the next one, itself among them, whose own precision is the falling one."""
    places = np.where(precision == falling, np.arange(len(precision)), len(precision))
    peaks: np.ndarray = np.minimum.accumulate(places[::-1])[::-1]
    return peaks


def _count_found(outputs: Outputs, labels: Any) -> Columns:
    """Return the labelled boxes of each class that are found, at each threshold [N, C, T], and those there are."""
    matches = _find_matches(outputs, labels, ALL_AREAS)
    n, n_classes = matches.counted.shape
    found = np.zeros((n, n_classes, matches.results.shape[2]), np.uint8)  # DETECTIONS at most
    image, place = np.nonzero((matches.classes >= 0) & (matches.classes < n_classes))
    np.add.at(found, (image, matches.classes[image, place]), matches.results[image, place] == RIGHT)
    return found, matches.counted


def _mean_recall(columns: Columns) -> float:
    found, counted = columns
    there = counted.sum(axis=0) > 0
    recall = found.sum(axis=0)[there] / counted.sum(axis=0)[there, None]
    return float(recall.mean()) if recall.size else 0.0


def _recall_influence(columns: Columns) -> np.ndarray:
    found, counted = columns
    there = counted.sum(axis=0) > 0
    total = np.maximum(counted.sum(axis=0), 1)
    recall = found.sum(axis=0).mean(axis=1) / total  # [C]
    added = (found.mean(axis=2) - recall * counted) / total * len(counted)  # [N, C]
    influence: np.ndarray = added[:, there].mean(axis=1) if there.any() else np.zeros(len(counted))
    return influence


def _sum_overlaps(outputs: Outputs, labels: Any) -> Columns:
    """Return the intersection over union of each image's right detections, summed, and how many they are."""
    matches = _find_matches(outputs, labels, ALL_AREAS)
    right = matches.results[..., 0] == RIGHT
    return (matches.overlaps * right).sum(axis=1), right.sum(axis=1)


def find_best_threshold(outputs: Outputs, labels: Any) -> float:
    """Return the score from which on detections have the best F1: of all classes together, at an overlap of 0.5.

    It lies half way to the next lower score, so that rounding moves none of these across it; of equal F1 the highest.
    """
    matches = _find_matches(outputs, labels, ALL_AREAS)
    judged = (matches.classes >= 0) & (matches.results[..., 0] != IGNORED)
    scores = matches.scores[judged].astype(np.float64)
    order = np.argsort(-scores, kind="stable")
    if not len(order):
        return 0.0
    scores, right = scores[order], (matches.results[..., 0][judged][order] == RIGHT).cumsum()
    f1 = 2 * right / (np.arange(1, len(order) + 1) + matches.counted.sum())
    ends = np.append(np.flatnonzero(np.diff(scores)), len(order) - 1)  # equal scores stay together
    best = ends[f1[ends].argmax()]
    return float(scores[best : best + 2].mean())


def _count_from(threshold: float, outputs: Outputs, labels: Any) -> Columns:
    """Return right detections from that score on, right and wrong ones, and labelled boxes: int64 [N] each."""
    matches = _find_matches(outputs, labels, ALL_AREAS)
    results = matches.results[..., 0]
    # float64: a float32 has no number between two neighbouring scores
    judged = (matches.classes >= 0) & (matches.scores.astype(np.float64) >= threshold) & (results != IGNORED)
    return (judged & (results == RIGHT)).sum(axis=1), judged.sum(axis=1), matches.counted.sum(axis=1)


def _weigh_common(outputs: Outputs, baseline: Outputs) -> Columns:
    """Return the scores of the boxes of each image that both find, summed over both, and those of all."""
    classes = leave_out_worst(baseline["classes"])  # as of the candidate's
    theirs = baseline["scores"] * (classes >= 0)
    reference = np.zeros((*theirs.shape, LABEL_WIDTH))
    reference[..., 0], reference[..., 1:5] = classes, baseline["boxes"]
    reference[..., 5] = COUNTED
    reference[..., 6] = measure_areas(baseline["boxes"].reshape(-1, 4)).reshape(theirs.shape)
    matches = match_detections(outputs, reference)
    ours = matches.scores * (matches.classes >= 0)
    both = matches.partners >= 0
    taken = np.take_along_axis(theirs, np.maximum(matches.partners, 0), axis=1)
    common = (both * (ours + taken)).sum(axis=1)
    return common.astype(np.float64), (ours.sum(axis=1) + theirs.sum(axis=1)).astype(np.float64)


def _find_flawed(columns: Columns) -> np.ndarray:
    """Return which images have a wrong detection, or miss a box, at any threshold: bool [N]."""
    _, classes, results, counted = columns
    judged = (classes >= 0) & (classes < counted.shape[1])
    wrong = ((results == WRONG) & judged[..., None]).any(axis=(1, 2))
    n_right = ((results == RIGHT) & judged[..., None]).sum(axis=1)  # [N, T]
    missed = (n_right < counted.sum(axis=1)[:, None]).any(axis=1)
    return np.asarray(wrong | missed)


def _find_moved(ours: Columns, theirs: Columns) -> np.ndarray:
    """Return which images have others right, or whose detections add something else to the average precision: bool [N].

    What differs by less than the precision's own grain is left to them all together.
    """
    parts = [_sum_over_classes(columns, _differentiate_found) for columns in (ours, theirs)]
    moved = np.abs(parts[0] - parts[1]) > 2 * parts[1].std() / len(parts[1])
    ours_right, theirs_right = ((results == RIGHT).sum(axis=1) for _, _, results, _ in (ours, theirs))  # [N, T]
    return np.asarray(moved | (ours_right != theirs_right).any(axis=1))


def _largest_share(columns: Columns) -> float:
    """Return by how much precision or recall may move if a share of the images turns, over that share.

    Of the image that has the largest part of the labelled boxes, mean over classes: missed, and wrong ones in place.
    """
    counted = columns[-1]
    there = counted.sum(axis=0) > 0
    shares = (counted[:, there] / counted[:, there].sum(axis=0)).mean(axis=1)
    return float(2 * shares.max(initial=0) * len(counted))


def _find_shortage(columns: Columns) -> str:
    n = int(columns[-1].sum())
    return "" if n >= LEAST_BOXES else f"the labels have {n} boxes; at least {LEAST_BOXES} would be needed"


def _make_precision(
    name: str, about: str, levels: slice, areas: tuple[float, float] = ALL_AREAS, on_request: bool = False
) -> Metric:
    return Metric(
        name=name,
        against="labels",
        **FRACTION,
        fits=("boxes",),
        about=about,
        reduce=_count_detections(levels, areas),
        kind="statistic",
        statistic=average_precision,
        influence=precision_influence,
        bias=precision_bias,
        shortage=_find_shortage,
        flaws=Flaws(_find_flawed, _largest_share, changed=_find_moved),
        on_request=on_request,
    )


_MEAN = "average precision, mean over classes and over overlaps from 0.5 to 0.95, as COCO counts it"
MEAN_PRECISION = _make_precision("map", _MEAN, EVERY)
AP50 = _make_precision("ap50", "average precision where an overlap of 0.5 is enough, mean over classes", HALF)
AP75 = _make_precision(
    "ap75", "average precision where an overlap of 0.75 is needed, mean over classes", THREE_QUARTERS
)
BY_AREA = tuple(
    _make_precision(f"map_{name}", f"map of {name} boxes, by their area in pixels", EVERY, areas, on_request=True)
    for name, areas in AREAS.items()
)
BOX_RECALL = Metric(
    name="box_recall",
    against="labels",
    **FRACTION,
    fits=("boxes",),
    about="fraction of boxes found among 100 of an image, mean over classes and overlaps from 0.5 to 0.95 (COCO's AR)",
    reduce=_count_found,
    kind="statistic",
    statistic=_mean_recall,
    influence=_recall_influence,
    shortage=_find_shortage,
    flaws=Flaws(lambda columns: np.asarray((columns[0] < columns[1][..., None]).any(axis=(1, 2))), _largest_share),
)
BOX_IOU = Metric(
    name="box_iou",
    against="labels",
    **FRACTION,
    fits=("boxes",),
    about="mean intersection over union of the detections that are right at 0.5",
    reduce=_sum_overlaps,
    kind="statistic",
    **ratio_of_sums(1.0),
    shortage=lambda columns: "" if columns[1].sum() else "no detection is right",
)
F1_AT = Metric(
    name="f1_at",
    against="labels",
    **FRACTION,
    fits=("boxes",),
    about="F1 of detections (overlap 0.5, all classes together) from the score on at which the float model's is best",
    reduce=lambda outputs, labels: _count_from(find_best_threshold(outputs, labels), outputs, labels),
    kind="statistic",
    **ratio_of_sums(0.5, 0.5),
    shortage=_find_shortage,
    flaws=Flaws(
        of=lambda columns: (columns[0] < columns[1]) | (columns[0] < columns[2]),
        reach=lambda columns: float(2 * columns[2].max(initial=1) * len(columns[2]) / max(columns[2].sum(), 1)),
    ),
    fix=lambda baseline, labels: partial(_count_from, find_best_threshold(baseline, labels)),
)
BOX_AGREEMENT = Metric(
    name="box_agreement",
    against="baseline",
    **FRACTION,
    fits=("boxes",),
    about="scores of the boxes that candidate and baseline both find (overlap 0.5, same class) over those of all",
    reduce=_weigh_common,
    kind="statistic",
    **ratio_of_sums(1.0),
    shortage=lambda columns: "" if columns[1].sum() else "neither model finds anything",
    ideal=1.0,
    flaws=Flaws(
        of=lambda columns: columns[0] < columns[1],
        reach=lambda columns: float(columns[1].max(initial=0) * len(columns[1]) / max(columns[1].sum(), 1e-9)),
    ),
)
DETECTION_METRICS = (MEAN_PRECISION, AP50, AP75, *BY_AREA, BOX_RECALL, BOX_IOU, F1_AT, BOX_AGREEMENT)
