"""What a detector's outputs mean, as a recipe states it and a manifest keeps it; and what shapes tell of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from runtime.bundle.records import PYDANTIC_CONFIG
from runtime.bundle.tensors import TensorSpec
from runtime.errors import UsageError

MOST_DETECTIONS = 1000
"""Of an image: what is kept of each sample is as large."""
WHOLE = ("xyxy", "xywh", "cxcywh", "yxyx")
"""Forms of boxes that need nothing else."""
RELATIVE = ("ltrb", "deltas")
"""Forms of boxes that are told beside priors."""


@dataclass(frozen=True)
class Priors:
    """Boxes on a grid, which a head's numbers are relative to: level by level, row by row, cell by cell, then by size.

    A level of stride s has ceil(height / s) x ceil(width / s) cells.
    """

    strides: tuple[float, ...]
    """Of each level: pixels of the model's input between two cells."""
    sizes: tuple[tuple[tuple[float, float], ...], ...] | None = None
    """Of each level (width, height) of the boxes in each cell, in pixels; default: one square as wide as the stride."""
    offset: float = 0.5
    """Where in its cell a box has its centre: 0.5 in the middle, 0 in its corner."""

    __pydantic_config__: ClassVar[dict[str, object]] = PYDANTIC_CONFIG

    def __post_init__(self) -> None:
        if not self.strides or not all(math.isfinite(stride) and stride >= 1 for stride in self.strides):
            raise ValueError(f"strides is {list(self.strides)}: give at least one, each 1 or more")
        if self.sizes is None:
            return
        if len(self.sizes) != len(self.strides):
            raise ValueError(f"sizes has {len(self.sizes)} levels, and strides has {len(self.strides)}: give as many")
        if not all(level and all(side > 0 for size in level for side in size) for level in self.sizes):
            raise ValueError("sizes: every level needs at least one [width, height], of numbers above 0")


@dataclass(frozen=True)
class HeadOutputs:
    """Which outputs say what. Of several names each is a level: they follow one another as the priors' levels do.

    [batch, n, numbers] or [batch, numbers, n]; of four dimensions [batch, numbers, height, width].
    """

    boxes: tuple[str, ...] = ()
    """Four numbers each."""
    scores: tuple[str, ...] = ()
    """A number for each class; where `classes` has numbers of classes, [batch, n], the scores of these."""
    objectness: tuple[str, ...] = ()
    """One number each, which the scores are multiplied by."""
    joined: tuple[str, ...] = ()
    """Four numbers of the box, one of objectness where it has one, and one for each class."""
    rows: str | None = None
    """[batch, n, 6]: x1, y1, x2, y2, score, class of what is left after suppression; unused rows have score 0."""
    classes: str | None = None
    """[batch, n]: class numbers of what is left after suppression."""
    count: str | None = None
    """[batch] or [batch, 1]: how many of the rows are used."""

    __pydantic_config__: ClassVar[dict[str, object]] = PYDANTIC_CONFIG

    def __post_init__(self) -> None:
        given = [bool(self.joined), self.rows is not None, bool(self.boxes or self.scores)]
        if sum(given) != 1 or bool(self.boxes) != bool(self.scores):
            raise ValueError("outputs: give either boxes and scores, or joined, or rows")
        if self.objectness and not self.boxes:
            raise ValueError("outputs: objectness goes with boxes and scores: leave it out")
        if self.classes is not None and not len(self.boxes) == len(self.scores) == 1:
            raise ValueError("outputs: classes goes with one output of boxes and one of scores")
        if self.count is not None and not self.final:
            raise ValueError("outputs: count goes with rows or classes, of a model that ends in boxes")

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all outputs that are read."""
        single = (self.rows, self.classes, self.count)
        return (*self.boxes, *self.scores, *self.objectness, *self.joined, *(name for name in single if name))

    @property
    def final(self) -> bool:
        """Return whether the model ends in boxes: it has suppressed what overlaps itself."""
        return self.rows is not None or self.classes is not None


@dataclass(frozen=True)
class Detections:
    """How detections are read from a detector's outputs. What is not given is told by names and shapes, or refused."""

    boxes: Literal["xyxy", "xywh", "cxcywh", "yxyx", "ltrb", "deltas"] | None = None
    """Two corners; corner and size; centre and size; TensorFlow's corners; distances from a cell's point to the four
    sides, in strides; shifts of `priors`: of the centre in sizes of the prior, of the size as a logarithm."""
    normalized: bool | None = None
    """Whether whole boxes are in parts of the model's input (0 to 1), or in its pixels."""
    priors: Priors | None = None
    """What ltrb and deltas are relative to."""
    variances: tuple[float, float] = (1.0, 1.0)
    """Factors of deltas: of the centre's, and of the size's (SSD: 0.1, 0.2)."""
    scores: Literal["sigmoid", "softmax", "none"] | None = None
    """What makes the classes' numbers scores; none: they are. Objectness takes the same sigmoid."""
    background: int | None = None
    """Place of the class for nothing among the classes' numbers, -1 the last; null: there is none."""
    objectness: bool = False
    """Whether joined outputs have a score of their own that there is an object, before the classes'."""
    multi_label: bool = False
    """Whether a box stands for every class above the threshold, or for the likeliest alone."""
    first_class: int = 0
    """Number that a model which ends in boxes gives the first class; smaller ones are nothing."""
    outputs: HeadOutputs | None = None
    """Which outputs say what."""
    suppress: Literal["class", "all", "none"] | None = None
    """Which boxes a better one that overlaps them removes: those of its class, all, none. Default: class; none of a
    model that has done it, or that needs it not."""
    score_threshold: float = 0.05
    """Detections below are left out."""
    iou_threshold: float = 0.5
    """Boxes of which more than this overlaps a better one (intersection over union) are left out."""
    most: int = 100
    """Detections of an image, the best ones."""

    __pydantic_config__: ClassVar[dict[str, object]] = PYDANTIC_CONFIG

    def __post_init__(self) -> None:
        for name in ("score_threshold", "iou_threshold"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give 0 to 1")
        if not 1 <= self.most <= MOST_DETECTIONS:
            raise ValueError(f"most is {self.most}: give 1 to {MOST_DETECTIONS}")
        if not all(math.isfinite(v) and v > 0 for v in self.variances):
            raise ValueError(f"variances is {list(self.variances)}: give two numbers above 0")
        if self.boxes in RELATIVE and self.priors is None:
            raise ValueError(f"boxes: {self.boxes} is relative to priors: give them, such as priors: {{strides: [8]}}")
        if self.boxes in WHOLE and self.priors is not None:
            raise ValueError(
                f"boxes: {self.boxes} is whole, and needs no priors: leave them out, or say ltrb or deltas"
            )
        if self.boxes in RELATIVE and self.normalized:
            raise ValueError(f"boxes: {self.boxes} is relative to priors, which are in pixels: leave normalized out")
        if self.scores == "softmax" and self.objectness:
            raise ValueError("scores: softmax has no objectness beside it: use sigmoid, or none")


def complete_detections(stated: Detections, outputs: Sequence[TensorSpec], class_names: Sequence[str]) -> Detections:
    """Return what is stated with what names and shapes of a model's outputs tell where they leave no choice.

    UsageError that names what has to be stated, and what it could be.
    """
    known = stated if stated.outputs is not None else replace(stated, outputs=_find_outputs(outputs, len(class_names)))
    assert known.outputs is not None
    shapes = {spec.name: spec.shape for spec in outputs}
    if missing := [name for name in known.outputs.names if name not in shapes]:
        raise UsageError(f"detections.outputs: the model has no output '{missing[0]}'; it has {_describe(outputs)}")
    known = _apply_conventions(known, stated, shapes, len(class_names))
    problems = []
    if known.boxes is None:
        problems.append(
            f"boxes ({', '.join(WHOLE)}: whole ones; {' or '.join(RELATIVE)}: relative to priors, which are then given)"
        )
    if known.normalized is None:
        problems.append("normalized (true: parts of the input from 0 to 1; false: its pixels)")
    if known.scores is None:
        problems.append("scores (sigmoid or softmax of the numbers, or none: they are scores)")
    if problems:
        raise UsageError(
            f"detections: the outputs {_describe(outputs)} do not say what their numbers mean: give "
            + "; ".join(problems)
        )
    final = known.outputs is not None and known.outputs.final
    known = replace(known, suppress=known.suppress or ("none" if final else "class"))
    _check_classes(known, shapes, class_names)
    return known


def _describe(outputs: Sequence[TensorSpec]) -> str:
    return ", ".join(f"{spec.name} {list(spec.shape)}" for spec in outputs)


def _find_outputs(outputs: Sequence[TensorSpec], n_classes: int) -> HeadOutputs:
    """Find which outputs say what by their shapes. UsageError where there is more than one way, or none."""
    flat = [spec for spec in outputs if len(spec.shape) == 3]
    fours = [spec.name for spec in flat if 4 in spec.shape[1:]]
    if len(fours) == 2:  # scores of four classes, too
        fours = [name for name in fours if "box" in name.lower()]
    others = [spec.name for spec in flat if spec.name not in fours]
    columns = [spec.name for spec in outputs if len(spec.shape) == 2 and spec.shape[1] != 1]
    counts = [spec.name for spec in outputs if len(spec.shape) < 2 or spec.shape[1:] == (1,)]
    if len(fours) == 1 and len(columns) == 2:
        named = [name for name in columns if "class" in name.lower() or "label" in name.lower()]
        scores = [name for name in columns if name not in named]
        if len(named) == 1:
            return HeadOutputs(tuple(fours), tuple(scores), classes=named[0], count=counts[0] if counts else None)
    if len(fours) == 1 and len(others) == 1:
        return HeadOutputs((fours[0],), (others[0],))
    if len(outputs) == 1 and len(flat) == 1:
        name, numbers = flat[0].name, set(flat[0].shape[1:])
        as_head = {4 + n_classes, 5 + n_classes} & numbers
        as_rows = flat[0].shape[2] == 6
        if as_head and not as_rows:
            return HeadOutputs(joined=(name,))
        if as_rows and not as_head:
            return HeadOutputs(rows=name)
        if as_rows:
            raise UsageError(
                f"detections.outputs: {_describe(outputs)} may be joined: [{name}] (box and classes), or rows: {name} "
                "(x1, y1, x2, y2, score, class): state which"
            )
    raise UsageError(
        f"detections.outputs: of {_describe(outputs)} it is not clear which are boxes and which scores of {n_classes} "
        "classes: give boxes: [name] and scores: [name], or joined: [name] (in one), or rows: name, or classes: name "
        "beside them for a model that ends in boxes"
    )


def _apply_conventions(
    known: Detections, stated: Detections, shapes: dict[str, tuple[int | str, ...]], n_classes: int
) -> Detections:
    """Fill in what an exporter's own names of outputs say: transformers', TensorFlow's, TensorRT's, ultralytics'."""
    head = known.outputs
    assert head is not None
    told: dict[str, object] = {}
    if head.final:
        told["scores"] = "none"
    if head.rows is not None:
        told["boxes"] = "xyxy"
    if head.boxes == ("pred_boxes",) and head.scores == ("logits",):
        extra = shapes["logits"][-1] == n_classes + 1
        told |= {"boxes": "cxcywh", "normalized": True, "suppress": "none"}
        told |= {"scores": "softmax", "background": -1} if extra else {"scores": "sigmoid"}
    elif head.boxes == ("detection_boxes",) and head.classes == "detection_classes":
        told |= {"boxes": "yxyx", "normalized": True, "first_class": 1}
    elif head.boxes == ("det_boxes",) and head.classes == "det_classes":
        told |= {"boxes": "xyxy", "normalized": False}
    elif head.joined == ("output0",) and shapes["output0"][1] == 4 + n_classes:
        told |= {"boxes": "cxcywh", "normalized": False, "scores": "none"}
    elif head.joined == ("output0",) and shapes["output0"][-1] == 5 + n_classes:
        told |= {"boxes": "cxcywh", "normalized": False, "scores": "none", "objectness": True}
    defaults = Detections()
    changes = {name: value for name, value in told.items() if getattr(stated, name) == getattr(defaults, name)}
    known = replace(known, **changes)  # type: ignore[arg-type]
    return replace(known, normalized=False) if known.boxes in RELATIVE else known


def _check_classes(known: Detections, shapes: dict[str, tuple[int | str, ...]], class_names: Sequence[str]) -> None:
    """Raise UsageError where the model has another number of classes than there are names."""
    head = known.outputs
    assert head is not None
    if head.final:
        return
    n_scores = len(class_names) + (known.background is not None)
    if known.background is not None and not -n_scores <= known.background < n_scores:
        raise UsageError(
            f"detections.background is {known.background}: give its place among {n_scores} numbers, 0 to "
            f"{n_scores - 1}, or -1 for the last"
        )
    width = n_scores + (4 + known.objectness if head.joined else 0)
    for name in head.joined or head.scores:
        shape = shapes[name]
        if len(shape) == 4:  # maps [batch, boxes of a cell * width, height, width of the map]
            fits = not isinstance(shape[1], int) or shape[1] % width == 0
        else:
            fits = width in shape[1:] or not all(isinstance(size, int) for size in shape[1:])
        if not fits:
            raise UsageError(
                f"detections: output '{name}' {list(shape)} has no dimension of {width} numbers, for "
                f"{len(class_names)} class names{_explain_extra(known)}; check class_names, background and objectness"
            )


def _explain_extra(known: Detections) -> str:
    assert known.outputs is not None
    parts = ["four of a box"] if known.outputs.joined else []
    parts += ["one of objectness"] if known.outputs.joined and known.objectness else []
    parts += ["one of the background"] if known.background is not None else []
    return f" and {', '.join(parts)}" if parts else ""
