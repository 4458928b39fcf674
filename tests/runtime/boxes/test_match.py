"""Average precision and recall against pycocotools, and what each image adds to them."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from runtime.boxes.match import CROWD, DIFFICULT, match_detections
from runtime.bundle.manifest import Gate, Judgement
from runtime.judge.evidence import quality_evidence, select_metrics
from runtime.metrics.base import UsageError
from runtime.metrics.detection import find_best_threshold
from runtime.tasks.metrics import METRICS

Found = list[tuple[int, float, list[float]]]
"""Class, score and box of each detection."""


def make_outputs(found: list[Found], most: int = 30) -> dict[str, np.ndarray]:
    """Return what the task keeps of detections, best first."""
    outputs = {
        "boxes": np.zeros((len(found), most, 4), np.float32),
        "scores": np.zeros((len(found), most), np.float32),
        "classes": np.full((len(found), most), -1, np.int64),
    }
    for row, of_image in enumerate(found):
        for place, (number, score, box) in enumerate(sorted(of_image, key=lambda one: -one[1])):
            outputs["boxes"][row, place], outputs["scores"][row, place] = box, score
            outputs["classes"][row, place] = number
    return outputs


def make_labels(real: list[list[list[float]]]) -> np.ndarray:
    """Return labels [N, m, 7] of rows (class, x1, y1, x2, y2, ignored, area)."""
    labels = np.zeros((len(real), max(1, *map(len, real)), 7))
    labels[..., 0] = -1
    for row, boxes in enumerate(real):
        for place, box in enumerate(boxes):
            labels[row, place] = box
    return labels


def oracle(outputs: dict[str, np.ndarray], labels: np.ndarray) -> dict[str, float]:
    """Return pycocotools' numbers."""
    n_classes = int(max(labels[..., 0].max(), outputs["classes"].max())) + 1
    real, found = [], []
    for row in range(len(labels)):
        for number, x1, y1, x2, y2, ignored, area in labels[row].tolist():
            if number >= 0:
                box = {"image_id": row, "category_id": int(number), "bbox": [x1, y1, x2 - x1, y2 - y1], "area": area}
                real.append(box | {"iscrowd": int(ignored), "id": len(real) + 1})
        rows = zip(outputs["classes"][row], outputs["scores"][row], outputs["boxes"][row].astype(float), strict=True)
        for number, score, (x1, y1, x2, y2) in rows:
            if number >= 0:
                box = {"image_id": row, "category_id": int(number), "bbox": [x1, y1, x2 - x1, y2 - y1]}
                found.append(box | {"score": float(score)})
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {
            "images": [{"id": row} for row in range(len(labels))],
            "categories": [{"id": number} for number in range(n_classes)],
            "annotations": real,
            "info": {},
        }
        coco.createIndex()
        judged = COCOeval(coco, coco.loadRes(found) if found else coco, "bbox")
        if not found:
            judged.cocoDt = COCO()
            judged.cocoDt.dataset = coco.dataset | {"annotations": []}
            judged.cocoDt.createIndex()
        judged.evaluate()
        judged.accumulate()
        judged.summarize()
    names = {"map": 0, "ap50": 1, "ap75": 2, "map_small": 3, "map_medium": 4, "map_large": 5, "box_recall": 8}
    return {name: float(judged.stats[place]) for name, place in names.items()}


def draw(seed: int, n: int = 25, n_classes: int = 3, most: int = 30) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Draw images with boxes and detections: shifted, doubled, of wrong classes; tied scores, crowds, whole pixels."""
    rng = np.random.default_rng(seed)
    real, found = [], []
    for _ in range(n):
        boxes: list[list[float]] = []
        detections: Found = []
        for _ in range(rng.integers(0, 7)):
            corner, side = rng.integers(0, 150, 2), rng.integers(4, 130, 2)
            number = int(rng.integers(0, n_classes))
            box = [*corner.tolist(), *(corner + side).tolist()]
            area = float(side.prod()) * (0.6 if rng.random() < 0.3 else 1.0)
            boxes.append([number, *box, CROWD if rng.random() < 0.15 else 0, area])
            for _ in range(rng.integers(0, 3)):
                moved = (np.array(box) + rng.integers(-9, 10, 4) * rng.integers(0, 2)).astype(float)
                moved[2:] = np.maximum(moved[2:], moved[:2] + 1)
                of_class = number if rng.random() < 0.9 else int(rng.integers(0, n_classes))
                detections.append((of_class, float(np.float32(rng.integers(1, 12) / 12)), moved.tolist()))
        real.append(boxes)
        found.append(detections[:most])
    return make_outputs(found, most), make_labels(real)


def compute(outputs: dict[str, np.ndarray], labels: np.ndarray) -> dict[str, float]:
    names = ("map", "ap50", "ap75", "map_small", "map_medium", "map_large", "box_recall")
    return {name: METRICS[name].compute(outputs, labels) for name in names}


def assert_same(outputs: dict[str, np.ndarray], labels: np.ndarray) -> None:
    wanted = oracle(outputs, labels)
    got = compute(outputs, labels)
    for name, value in wanted.items():
        assert got[name] == pytest.approx(max(value, 0.0), abs=1e-9), name  # pycocotools has -1 for no box at all


@pytest.mark.parametrize("seed", range(6))
def test_as_pycocotools(seed: int) -> None:
    assert_same(*draw(seed))


BOX = [10.0, 10.0, 50.0, 50.0]
HARD: dict[str, tuple[list[Found], list[list[list[float]]]]] = {
    "nothing found": ([[], []], [[[0, *BOX, 0, 1600]], []]),
    "nothing there": ([[(0, 0.9, BOX)], []], [[], []]),
    "a class without boxes": ([[(1, 0.9, BOX), (0, 0.8, BOX)]], [[[0, *BOX, 0, 1600]]]),
    "one box found twice": ([[(0, 0.9, BOX), (0, 0.9, BOX)]], [[[0, *BOX, 0, 1600]]]),
    "two equal boxes, one found": ([[(0, 0.9, BOX)]], [[[0, *BOX, 0, 1600], [0, *BOX, 0, 1600]]]),
    "overlap of just a half": ([[(0, 0.9, [0, 0, 10, 10])]], [[[0, 0, 0, 10, 5, 0, 50]]]),
    "in a crowd, twice": ([[(0, 0.9, [12, 12, 20, 20]), (0, 0.8, [30, 30, 40, 40])]], [[[0, *BOX, 1, 1600]]]),
    "a crowd around a box": ([[(0, 0.9, BOX)]], [[[0, 0, 0, 99, 99, 1, 9801], [0, *BOX, 0, 1600]]]),
    "an area that is not the box's": ([[(0, 0.9, BOX), (0, 0.8, BOX)]], [[[0, *BOX, 0, 900]]]),
    "ties between images": ([[(0, 0.5, [0, 0, 9, 9])], [(0, 0.5, BOX)]], [[[0, *BOX, 0, 1600]], [[0, *BOX, 0, 1600]]]),
}


@pytest.mark.parametrize("case", HARD)
def test_hard_cases_are_as_pycocotools_has_them(case: str) -> None:
    found, real = HARD[case]
    assert_same(make_outputs(found), make_labels(real))


def test_the_hundred_best_of_a_class_count() -> None:
    boxes = [[i * 10.0, 0.0, i * 10.0 + 8, 8.0] for i in range(130)]
    found = [[(0, 1 - i / 200, box) for i, box in enumerate(boxes)]]
    assert_same(make_outputs(found, 140), make_labels([[[0, *box, 0, 64] for box in boxes]]))


def test_a_detection_of_a_difficult_box_counts_for_nothing() -> None:
    found: list[Found] = [[(0, 0.9, BOX), (0, 0.8, BOX), (0, 0.7, [200.0, 200.0, 240.0, 240.0])]]
    real: list[list[list[float]]] = [[[0, *BOX, DIFFICULT, 1600], [0, 200, 200, 240, 240, 0, 1600]]]
    assert METRICS["map"].compute(make_outputs(found), make_labels(real)) == pytest.approx(1.0)
    small: list[Found] = [[(0, 0.9, [12.0, 12.0, 20.0, 20.0]), found[0][2]]]  # beside a difficult box, not in a crowd
    assert METRICS["ap50"].compute(make_outputs(small), make_labels(real)) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("name", "alike"), [("map", 0.97), ("ap50", 0.85), ("box_recall", 0.999), ("box_iou", 0.999), ("f1_at", 0.999)]
)
def test_what_an_image_adds_is_what_is_lost_without_it(name: str, alike: float) -> None:
    """The infinitesimal jackknife against the statistic without each image, which goes in steps where recalls do."""
    outputs, labels = draw(3, n=150)
    metric = METRICS[name].settle(outputs, labels)
    columns = metric.columns(outputs, labels)
    n, value = len(labels), metric.statistic(columns)
    without = [metric.statistic(tuple(np.delete(column, row, axis=0) for column in columns)) for row in range(n)]
    deleted, added = (n - 1) * (value - np.array(without)), metric.influence(columns)
    assert added.sum() == pytest.approx(0, abs=1e-6)
    assert np.corrcoef(added, deleted)[0, 1] > alike
    assert added.std() == pytest.approx(deleted.std(), rel=0.2)


OTHER, AWAY = [60.0, 60.0, 90.0, 90.0], [200.0, 200.0, 240.0, 240.0]
TWO_IMAGES = make_labels([[[0, *BOX, 0, 1600], [0, *OTHER, 0, 900]], [[1, *BOX, 0, 1600]]])


def test_f1_is_taken_at_the_baselines_own_threshold() -> None:
    """The baseline: 2/4, 2/5, 4/6 and 4/7 from .9, .6, .5 and .3 on, so that .4 parts them."""
    baseline = make_outputs([[(0, 0.9, BOX), (0, 0.6, AWAY), (0, 0.5, OTHER)], [(0, 0.3, BOX)]])
    candidate = make_outputs([[(0, 0.45, BOX), (0, 0.39, OTHER)], [(1, 0.8, AWAY)]])
    assert find_best_threshold(baseline, TWO_IMAGES) == pytest.approx(0.4)
    judgement = Judgement(metrics=("f1_at",), gates=(Gate("f1_at", max_drop=0.02),))
    metrics = select_metrics("object-detection", baseline, TWO_IMAGES, judgement)
    found = quality_evidence(metrics, candidate, baseline, TWO_IMAGES, judgement)["f1_at"]
    assert found.baseline is not None
    assert found.baseline.value == pytest.approx(4 / 6)
    assert found.candidate.value == pytest.approx(2 / 5)  # one right of two, three labelled; 4/6 at its own best
    assert METRICS["f1_at"].compute(candidate, TWO_IMAGES) == pytest.approx(4 / 6)


def test_neither_crowds_nor_difficult_boxes_count_in_f1() -> None:
    labels = TWO_IMAGES.copy()
    labels[0, 1, 5] = DIFFICULT
    outputs = make_outputs([[(0, 0.9, OTHER), (0, 0.8, BOX)], [(1, 0.7, AWAY)]])
    assert find_best_threshold(outputs, labels) == pytest.approx(0.75)
    assert METRICS["f1_at"].compute(outputs, labels) == pytest.approx(2 / 3)  # one right of one, two labelled


def test_equal_scores_stay_on_one_side_of_the_threshold() -> None:
    outputs = make_outputs([[(0, 0.5, BOX)], [(0, 0.5, AWAY), (1, 0.2, BOX)]])
    assert find_best_threshold(outputs, TWO_IMAGES) == pytest.approx(0.2)
    nothing = make_outputs([[], []])
    assert METRICS["f1_at"].compute(nothing, TWO_IMAGES) == 0


def test_agreement_is_1_with_itself_and_falls_with_what_one_alone_finds() -> None:
    metric, (outputs, _) = METRICS["box_agreement"], draw(1)
    clean = make_outputs([[(0, 0.9, BOX)], [(1, 0.6, BOX)]])
    assert metric.compute(clean, clean) == pytest.approx(1.0)
    fewer = make_outputs([[(0, 0.9, BOX)], []])
    assert metric.compute(fewer, clean) == pytest.approx(1.8 / 2.4)
    assert metric.compute(clean, fewer) == pytest.approx(1.8 / 2.4)
    other_class = make_outputs([[(1, 0.9, BOX)], [(1, 0.6, BOX)]])
    assert metric.compute(other_class, clean) == pytest.approx(1.2 / 3.0)
    assert 0 < metric.compute(outputs, outputs) <= 1


def test_agreement_counts_as_many_of_either_model() -> None:
    """Of a class a hundred detections of each image, the candidate's as the baseline's."""
    boxes = [[i * 10.0, 0.0, i * 10.0 + 8, 8.0] for i in range(130)]
    outputs = make_outputs([[(0, 1 - i / 200, box) for i, box in enumerate(boxes)]], 140)
    assert METRICS["box_agreement"].compute(outputs, outputs) == pytest.approx(1.0)


def test_the_share_of_the_baselines_precision_has_an_interval() -> None:
    outputs, labels = draw(3, n=150)
    judgement = Judgement(gates=(Gate("map", min_retained=0.9),))
    retained = quality_evidence([METRICS["map"]], outputs, outputs, labels, judgement)["map"].retained
    assert retained is not None and retained.low < retained.value == 1 < retained.high


def test_labels_of_another_shape_are_refused() -> None:
    outputs, labels = draw(0)
    with pytest.raises(UsageError, match=r"float64 \[25, boxes, 7\] are needed"):
        METRICS["map"].compute(outputs, labels[..., :5])
    broken: Any = labels.copy()
    broken[4, 0, 0] = 0.5
    with pytest.raises(UsageError, match="row 4, box 0"):
        match_detections(outputs, METRICS["map"].columns(outputs, broken)[0])
