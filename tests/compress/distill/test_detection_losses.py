"""What a detector's head learns of its teacher's: nothing of an equal one, most where the teacher is sure."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compress.distill.detections import box_error, class_error, measure_confidence, read_head
from compress.errors import PassError
from runtime.bundle.detections import Detections, HeadOutputs, Priors

TWO = HeadOutputs(("boxes",), ("scores",))
HEADS: dict[str, dict[str, Any]] = {
    "cells": {"boxes": "ltrb", "priors": Priors((8,)), "scores": "sigmoid", "outputs": TWO},
    "queries": {"boxes": "cxcywh", "normalized": True, "scores": "softmax", "background": -1, "outputs": TWO},
    "ready scores": {"boxes": "xyxy", "normalized": False, "scores": "none", "outputs": TWO},
    "joined": {
        "boxes": "deltas",
        "priors": Priors((8,)),
        "scores": "sigmoid",
        "objectness": True,
        "outputs": HeadOutputs(joined=("all",)),
    },
}


def draw(spec: Detections, seed: int, n_classes: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width = n_classes + (spec.background is not None)
    boxes, scores = (torch.randn(2, 20, n, generator=generator) for n in (4, width))
    if spec.boxes == "xyxy":
        boxes = torch.cat([boxes[..., :2] * 9, boxes[..., :2] * 9 + 5 + boxes[..., 2:].abs()], -1)
    scores = scores.sigmoid() if spec.scores == "none" else scores * 3
    if spec.outputs == TWO:
        return {"boxes": boxes.abs(), "scores": scores.requires_grad_()}
    return {"all": torch.cat([boxes, torch.randn(2, 20, 1, generator=generator), scores], -1).requires_grad_()}


@pytest.mark.parametrize("name", HEADS)
def test_an_equal_head_has_nothing_to_learn(name: str) -> None:
    spec = Detections(**HEADS[name])
    outputs = draw(spec, 0)
    teacher = read_head({key: values.detach() for key, values in outputs.items()}, spec, 3)
    student = read_head({key: values.detach().requires_grad_() for key, values in outputs.items()}, spec, 3)
    loss = class_error(student, teacher, spec) + box_error(student, teacher, spec)
    assert loss.tolist() == [0, 0]
    (gradient,) = torch.autograd.grad(loss.sum(), [student.classes])
    assert not gradient.any()
    other = read_head(draw(spec, 1), spec, 3)
    assert (class_error(other, teacher, spec) > 0).all()
    assert (box_error(other, teacher, spec) > 0).all()


@pytest.mark.parametrize("name", HEADS)
def test_boxes_are_learned_where_the_teacher_sees_objects_alone(name: str) -> None:
    spec = Detections(**HEADS[name], score_threshold=0.6)
    teacher, student = (read_head(draw(spec, seed), spec, 3) for seed in (0, 1))
    sure = measure_confidence(teacher, spec)
    assert (sure > 0).any()
    assert (sure == 0).any()
    boxes = student.boxes.detach().requires_grad_()
    box_error(type(student)(boxes, student.classes, student.objectness), teacher, spec).sum().backward()
    assert boxes.grad is not None
    assert torch.equal(boxes.grad.abs().sum(-1) > 0, sure > 0)


def test_a_model_that_ends_in_boxes_teaches_nothing() -> None:
    spec = Detections(boxes="xyxy", normalized=False, scores="none", outputs=HeadOutputs(rows="out"))
    with pytest.raises(PassError, match="ends in boxes, after suppression"):
        read_head({"out": torch.zeros(1, 5, 6)}, spec, 3)
