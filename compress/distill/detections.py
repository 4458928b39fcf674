"""How far a student detector's head is from its teacher's: classes by divergence, boxes where the teacher sees objects.

Both heads say something of the same places (cells, priors, queries), so that they are compared place by place. What the
teacher is sure of weighs most; the sums are divided by how many objects it sees, as losses of detectors are. Torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.distill.losses import divergence
from compress.errors import PassError
from runtime.bundle.detections import WHOLE, Detections

EDGE = 1e-6
"""Scores that come ready stay so far from 0 and 1."""


@dataclass(frozen=True)
class HeadNumbers:
    """What a head says of its A places, as it is: boxes [b, A, 4], classes [b, A, C] and objectness [b, A, 1]."""

    boxes: Tensor
    classes: Tensor
    objectness: Tensor | None


def read_head(outputs: Mapping[str, Tensor], spec: Detections, n_classes: int) -> HeadNumbers:
    """Return the numbers of a head, as `runtime.boxes.decode` reads them. PassError for a model that ends in boxes."""
    head = spec.outputs
    if head is None or head.final:
        raise PassError("the model ends in boxes, after suppression, which teach nothing: give it without that end")
    width = n_classes + (spec.background is not None)
    if head.joined:
        joined = _join_levels(outputs, head.joined, 4 + spec.objectness + width)
        objectness = joined[..., 4:5] if spec.objectness else None
        return HeadNumbers(joined[..., :4], joined[..., 4 + spec.objectness :], objectness)
    objectness = _join_levels(outputs, head.objectness, 1) if head.objectness else None
    return HeadNumbers(_join_levels(outputs, head.boxes, 4), _join_levels(outputs, head.scores, width), objectness)


def _join_levels(outputs: Mapping[str, Tensor], names: Sequence[str], width: int) -> Tensor:
    return torch.cat([_to_rows(outputs[name].float(), width) for name in names], 1)


def _to_rows(values: Tensor, width: int) -> Tensor:
    """Return [b, A, width] of that, of [b, width, A], or of [b, k * width, h, w]."""
    if values.dim() == 4:
        return values.unflatten(1, (-1, width)).permute(0, 3, 4, 1, 2).flatten(1, 3)
    return values if values.shape[2] == width else values.transpose(1, 2)


def measure_confidence(head: HeadNumbers, spec: Detections) -> Tensor:
    """Return the best score of each place, [b, A], without gradient; 0 below the spec's threshold."""
    numbers = head.classes.detach()
    scores = {"sigmoid": torch.sigmoid, "softmax": lambda x: x.softmax(-1), "none": lambda x: x}[spec.scores or "none"](
        numbers
    )
    if spec.background is not None:
        kept = [i for i in range(scores.shape[-1]) if i != spec.background % scores.shape[-1]]
        scores = scores[..., kept]
    best = scores.amax(-1)
    if head.objectness is not None:
        sure = head.objectness.detach()[..., 0]
        best = best * (sure if spec.scores == "none" else sure.sigmoid())
    return best * (best >= spec.score_threshold)


def class_error(student: HeadNumbers, teacher: HeadNumbers, spec: Detections, temperature: float = 1.0) -> Tensor:
    """Return the divergence of classes and objectness, summed over places, for each object the teacher sees: [b].

    Of softmax as `divergence`; of sigmoids that of each as a choice of two. 0 for equal.
    """
    if spec.scores == "softmax":
        gaps = divergence(student.classes, teacher.classes, temperature)
    else:
        gaps = _choice_error(student.classes, teacher.classes, spec, temperature).sum(-1)
    if student.objectness is not None and teacher.objectness is not None:
        gaps = gaps + _choice_error(student.objectness, teacher.objectness, spec, temperature).sum(-1)
    return gaps.sum(1) / measure_confidence(teacher, spec).sum(1).clamp_min(1.0)


def _choice_error(student: Tensor, teacher: Tensor, spec: Detections, temperature: float) -> Tensor:
    """Return KL between choices of two, each; in this form loss and gradient of equal ones are 0 to the last bit."""
    if spec.scores == "none":
        own, other = student.clamp(EDGE, 1 - EDGE), teacher.clamp(EDGE, 1 - EDGE)
        gaps = F.binary_cross_entropy(own, other, reduction="none")
        return gaps - F.binary_cross_entropy(other, other, reduction="none")
    own, other = student / temperature, teacher / temperature
    target = other.sigmoid()
    gaps = F.binary_cross_entropy_with_logits(own, target, reduction="none")
    return (gaps - F.binary_cross_entropy_with_logits(other, target, reduction="none")) * temperature**2


def box_error(student: HeadNumbers, teacher: HeadNumbers, spec: Detections) -> Tensor:
    """Return the smooth L1 distance of the boxes' numbers where the teacher sees objects, by how sure it is: [b].

    In parts of the teacher's box; deltas, which are relative already, as they are.
    """
    target = teacher.boxes.detach()
    apart = (student.boxes - target) / _measure_sides(target, spec)
    # Below a tenth of a box's side its error counts by its square.
    gaps = F.smooth_l1_loss(apart, torch.zeros_like(apart), beta=0.1, reduction="none").sum(-1)
    sure = measure_confidence(teacher, spec)
    return (gaps * sure).sum(1) / sure.sum(1).clamp_min(1.0)


def _measure_sides(boxes: Tensor, spec: Detections) -> Tensor | float:
    """Return width and height that each of a box's four numbers is measured by: [b, A, 4]."""
    if spec.boxes == "deltas":
        return 1.0
    first, second = boxes[..., :2], boxes[..., 2:]
    if spec.boxes == "ltrb":
        sides = first + second
    else:
        assert spec.boxes in WHOLE
        sides = second if spec.boxes in ("xywh", "cxcywh") else second - first
    least = 1e-3 if spec.normalized else 0.1
    return torch.cat([sides, sides], -1).clamp_min(least)
