"""Heads of every form decoded to the same boxes, suppression against a slow one, and what shapes and names tell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime.boxes.decode import CANDIDATES, find_objects, place_priors
from runtime.boxes.overlap import compute_iou, suppress_overlaps
from runtime.bundle.detections import Detections, HeadOutputs, Priors, complete_detections
from runtime.bundle.records import from_json, to_json
from runtime.bundle.tensors import TensorSpec
from runtime.errors import BundleError, UsageError

SIZE = (32, 64)
"""Height and width of the input; at stride 8 4 x 8 cells."""
NAMES = ("a", "b")
CORNERS = np.array([[4, 2, 20, 18], [30, 8, 60, 30]], np.float32)
"""In cells 9 and 21 of the grid."""
PLACES = (9, 21)
SCORES = np.array([[0.9, 0.2], [0.1, 0.7]], np.float32)


def logit(p: np.ndarray) -> np.ndarray:
    return np.log(p / (1 - p))


def fill(values: np.ndarray, rest: float, n: int = 32) -> np.ndarray:
    """Two rows of values at PLACES of n, as a batch of one."""
    filled = np.full((1, n, values.shape[1]), rest, np.float32)
    filled[0, list(PLACES)] = values
    return filled


def in_form(form: str) -> np.ndarray:
    """CORNERS in that form; relative to points of an 8-pixel grid, or to squares of 16 pixels there."""
    first, second = CORNERS[:, :2], CORNERS[:, 2:]
    y, x = np.divmod(np.array(PLACES), 8)
    centre = (np.stack([x, y], 1) + 0.5) * 8
    middle, sides = (first + second) / 2, second - first
    return np.concatenate(
        {
            "xyxy": [first, second],
            "yxyx": [first[:, ::-1], second[:, ::-1]],
            "xywh": [first, sides],
            "cxcywh": [middle, sides],
            "ltrb": [(centre - first) / 8, (second - centre) / 8],
            "deltas": [(middle - centre) / 16 / 0.1, np.log(sides / 16) / 0.2],
        }[form],
        axis=1,
    ).astype(np.float32)


def make_spec(form: str, **more: Any) -> Detections:
    priors = {"ltrb": Priors((8,)), "deltas": Priors((8,), (((16.0, 16.0),),))}.get(form)
    variances = (0.1, 0.2) if form == "deltas" else (1.0, 1.0)
    given: dict[str, Any] = {"boxes": form, "normalized": False, "priors": priors, "variances": variances}
    head = HeadOutputs(("boxes",), ("scores",))
    return Detections(**(given | {"scores": "none", "outputs": head, "suppress": "class"} | more))


@pytest.mark.parametrize("form", ["xyxy", "yxyx", "xywh", "cxcywh", "ltrb", "deltas"])
@pytest.mark.parametrize("channels_first", [False, True])
def test_every_form_gives_the_same_boxes(form: str, channels_first: bool) -> None:
    outputs = {"boxes": fill(in_form(form), 1.0), "scores": fill(SCORES, 0.0)}
    if channels_first:
        outputs = {name: values.transpose(0, 2, 1) for name, values in outputs.items()}
    (found,) = find_objects(outputs, make_spec(form), SIZE, 2)
    assert found.boxes == pytest.approx(CORNERS, abs=1e-3)
    assert found.scores.tolist() == pytest.approx([0.9, 0.7])
    assert found.classes.tolist() == [0, 1]


def test_normalized_boxes_are_parts_of_the_input() -> None:
    boxes = in_form("cxcywh") / np.array([64, 32, 64, 32], np.float32)
    (found,) = find_objects(
        {"boxes": fill(boxes, 0.5), "scores": fill(SCORES, 0.0)}, make_spec("cxcywh", normalized=True), SIZE, 2
    )
    assert found.boxes == pytest.approx(CORNERS, abs=1e-3)


@pytest.mark.parametrize("background", [0, 2, -1])
def test_softmax_with_a_background(background: int) -> None:
    rest = 1 - SCORES.sum(1, keepdims=True)
    place = background % 3
    likely = np.insert(np.maximum(SCORES, 1e-6), [place], np.abs(rest) + 1e-6, axis=1)
    outputs = {"boxes": fill(in_form("xyxy"), 1.0), "scores": np.log(fill(likely / likely.sum(1, keepdims=True), 1e-6))}
    outputs["scores"][0, [i for i in range(32) if i not in PLACES], place] = 20.0
    (found,) = find_objects(outputs, make_spec("xyxy", scores="softmax", background=background), SIZE, 2)
    assert found.classes.tolist() == [0, 1]
    assert found.boxes == pytest.approx(CORNERS, abs=1e-3)


def test_levels_of_maps_follow_one_another_as_priors_do() -> None:
    """Two levels [B, numbers, h, w], of strides 8 and 16; objectness is multiplied in."""
    spec = make_spec("ltrb", priors=Priors((8, 16)), scores="sigmoid", outputs=HeadOutputs(joined=("p3", "p4")))
    spec = Detections(**{**spec.__dict__, "objectness": True})
    values = np.full((1, 40, 7), -9.0, np.float32)
    values[0, 9] = [*in_form("ltrb")[0], *logit(np.array([0.8, 0.9, 0.1]))]
    values[0, 32 + 3] = [1, 1, 1, 1, *logit(np.array([0.5, 0.1, 0.9]))]
    outputs = {
        "p3": values[:, :32].reshape(1, 4, 8, 7).transpose(0, 3, 1, 2),
        "p4": values[:, 32:].reshape(1, 2, 4, 7).transpose(0, 3, 1, 2),
    }
    (found,) = find_objects(outputs, spec, SIZE, 2)
    assert found.scores.tolist() == pytest.approx([0.72, 0.45], abs=1e-4)
    assert found.boxes == pytest.approx(np.array([CORNERS[0], [40, -8, 72, 24]]), abs=1e-3)


def test_a_box_may_stand_for_several_classes() -> None:
    outputs = {"boxes": fill(in_form("xyxy"), 1.0), "scores": fill(SCORES, 0.0)}
    (found,) = find_objects(outputs, make_spec("xyxy", multi_label=True), SIZE, 2)
    assert found.scores.tolist() == pytest.approx([0.9, 0.7, 0.2, 0.1])


def test_models_that_end_in_boxes() -> None:
    rows = np.array([[[*CORNERS[0], 0.9, 0], [*CORNERS[1], 0.7, 1], [0, 0, 0, 0, 0, 0]]], np.float32)
    spec = make_spec("xyxy", outputs=HeadOutputs(rows="out"), suppress="none")
    (found,) = find_objects({"out": rows}, spec, SIZE, 2)
    assert found.boxes == pytest.approx(CORNERS)
    head = HeadOutputs(("detection_boxes",), ("detection_scores",), classes="detection_classes", count="num_detections")
    spec = make_spec("yxyx", outputs=head, normalized=True, first_class=1, suppress="none")
    outputs = {
        "detection_boxes": rows[..., [1, 0, 3, 2]] / np.array([32, 64, 32, 64], np.float32),
        "detection_scores": np.array([[0.9, 0.7, 0.8]], np.float32),
        "detection_classes": np.array([[1, 2, 1]], np.float32),
        "num_detections": np.array([2], np.float32),
    }
    (found,) = find_objects(outputs, spec, SIZE, 2)
    assert found.boxes == pytest.approx(CORNERS, abs=1e-3)
    assert found.classes.tolist() == [0, 1]


def test_priors_are_those_of_a_public_face_detector() -> None:
    """Ultraface's 4,420 for an input of 240 x 320; its last level has a broken cell at the edge."""
    sizes = (((10, 10), (16, 16), (24, 24)), ((32, 32), (48, 48)), ((64, 64), (96, 96)), ((128, 128),) * 3)
    priors = place_priors(Priors((8, 16, 32, 64), sizes), (240, 320))
    assert priors.shape == (4420, 4)
    assert priors[0].tolist() == [4, 4, 10, 10]
    assert priors[-1].tolist() == [4.5 * 64, 3.5 * 64, 128, 128]


def test_suppression_as_a_slow_one() -> None:
    n, rng = 60, np.random.default_rng(0)
    corner = rng.integers(0, 40, (n, 2))
    boxes = np.concatenate([corner, corner + rng.integers(5, 25, (n, 2))], 1).astype(np.float32)
    scores, classes = rng.integers(0, 9, n).astype(np.float32), rng.integers(0, 2, n)
    for of_class in (classes, None):
        kept: list[int] = []
        for place in sorted(range(n), key=lambda i: (-scores[i], i)):
            rivals = [k for k in kept if of_class is None or classes[k] == classes[place]]
            if all(compute_iou(boxes[[k]], boxes[[place]])[0, 0] <= 0.3 for k in rivals):
                kept.append(place)
        assert suppress_overlaps(boxes, scores, of_class, 0.3, 1000).tolist() == kept
        assert suppress_overlaps(boxes, scores, of_class, 0.3, 5).tolist() == kept[:5]


def specs(**shapes: tuple[int, ...]) -> list[TensorSpec]:
    return [TensorSpec(name, "float32", ("batch", *shape)) for name, shape in shapes.items()]


@pytest.mark.parametrize(
    ("outputs", "told"),
    [
        (specs(output0=(6, 8400)), {"boxes": "cxcywh", "scores": "none", "objectness": False}),
        (specs(output0=(25200, 7)), {"boxes": "cxcywh", "scores": "none", "objectness": True}),
        (specs(logits=(100, 3), pred_boxes=(100, 4)), {"scores": "softmax", "background": -1, "suppress": "none"}),
        (specs(logits=(300, 2), pred_boxes=(300, 4)), {"scores": "sigmoid", "background": None, "normalized": True}),
        (
            specs(num_detections=(), detection_boxes=(100, 4), detection_scores=(100,), detection_classes=(100,)),
            {"boxes": "yxyx", "normalized": True, "first_class": 1, "suppress": "none"},
        ),
    ],
)
def test_names_and_shapes_tell(outputs: list[TensorSpec], told: dict[str, Any]) -> None:
    known = complete_detections(Detections(), outputs, NAMES)
    assert {name: getattr(known, name) for name in told} == told
    assert from_json(Detections, to_json(known), "detections") == known


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (specs(out=(100, 6)), r"may be joined: \[out\].* or rows: out"),
        (
            specs(boxes=(4420, 4), scores=(4420, 3)),
            r"do not say what .*: give boxes \(xyxy.*; normalized",
        ),
        (specs(a=(10, 9), b=(3, 3)), "it is not clear which are boxes and which scores of 2 classes"),
    ],
)
def test_what_is_not_told_is_refused_with_the_candidates(outputs: list[TensorSpec], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        complete_detections(Detections(), outputs, NAMES)


def test_maps_may_have_several_boxes_in_a_cell() -> None:
    """SSD's heads: 3 boxes of 4 numbers, and of 2 classes and a background, in each cell."""
    stated = make_spec("ltrb", scores="softmax", background=0)
    assert complete_detections(stated, specs(boxes=(12, 4, 8), scores=(9, 4, 8)), NAMES) == stated
    with pytest.raises(UsageError, match="no dimension of 3 numbers, for 2 class names and one of the background"):
        complete_detections(stated, specs(boxes=(12, 4, 8), scores=(10, 4, 8)), NAMES)


def test_suppression_looks_at_more_where_the_best_are_all_one_object() -> None:
    boxes = np.repeat(CORNERS, CANDIDATES + 1, axis=0)[None]
    scores = np.linspace(1, 0.5, boxes.shape[1], dtype=np.float32)[None, :, None]
    (found,) = find_objects({"boxes": boxes, "scores": scores}, make_spec("xyxy"), SIZE, 1)
    assert found.boxes.tolist() == CORNERS.tolist()


def test_what_is_stated_must_fit_the_model() -> None:
    with pytest.raises(UsageError, match="background is 3: give its place among 3 numbers, 0 to 2, or -1"):
        complete_detections(make_spec("xyxy", background=3), specs(boxes=(9, 4), scores=(9, 3)), NAMES)
    stated = Detections(boxes="xyxy", normalized=True, scores="softmax")
    with pytest.raises(UsageError, match="no dimension of 2 numbers, for 2 class names; check class_names, background"):
        complete_detections(stated, specs(boxes=(9, 4), scores=(9, 3)), NAMES)
    spec = make_spec("ltrb")
    with pytest.raises(BundleError, match="32 boxes, and the priors of an input of 32x32"):
        find_objects({"boxes": fill(in_form("ltrb"), 1.0), "scores": fill(SCORES, 0.0)}, spec, (32, 32), 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"boxes": ("a", "b"), "scores": ("c", "d"), "classes": "e"}, "one output of boxes and one of scores"),
        ({"joined": ("a",), "classes": "e"}, "one output of boxes and one of scores"),
        ({"joined": ("a",), "objectness": ("e",)}, "objectness goes with boxes and scores"),
        ({"joined": ("a",), "count": "e"}, "count goes with rows or classes"),
    ],
)
def test_outputs_that_nothing_would_read(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeadOutputs(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"boxes": "ltrb"}, "ltrb is relative to priors: give them"),
        ({"boxes": "xyxy", "priors": Priors((8,))}, "needs no priors"),
        ({"score_threshold": 1.5}, "give 0 to 1"),
        ({"most": 0}, "give 1 to 1000"),
        ({"scores": "softmax", "objectness": True}, "no objectness beside it"),
    ],
)
def test_a_spec_that_contradicts_itself(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Detections(**fields)
