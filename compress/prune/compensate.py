"""After units are gone: every layer is fitted anew, in the order of the forward, to what the whole model gave there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compress.errors import PassError
from compress.prune.layers import (
    applied,
    in_groups,
    input_rows,
    n_features,
    n_groups,
    output_rows,
    read_weight,
    write_weight,
)
from compress.prune.least_squares import Fit, fit
from compress.prune.left_alone import left_alone
from compress.prune.points import Place, Point, find_points, place_of
from compress.prune.statistics import Batch, Sums, check_width, chosen_rows, rows_per_batch
from compress.prune.sweep import Forward, stopping, stops_of

HELD_OUT = 4
"""Every so many-th batch is held out to choose the ridge; of fewer batches none is."""
RECTIFIED_STEPS = 3
"""Rounds of least squares after the first where a ReLU follows."""
FAINT = 1e-4
"""A batch norm scale below this share of its largest lets too little through to fit what lies before it."""
Progress = Callable[[Sequence[Any], str], Iterable[Any]]


@dataclass(frozen=True)
class Refitted:
    """What became of one layer: squared distance to its target per row, and the ridge that was chosen (0: left)."""

    layer: str
    before: float
    after: float
    ridge: float


def compensate(
    student: nn.Module,
    teacher: nn.Module,
    batches: Sequence[Batch],
    kept_outputs: Mapping[str, np.ndarray],
    layers: Sequence[str] | None = None,
    rows_per_feature: int = 128,
    seed: int = 0,
    progress: Progress = lambda items, text: items,
) -> list[Refitted]:
    """Fit weights and biases of `student` in place; `layers`: only these (None: all that are called once).

    `kept_outputs`: layer -> which of the teacher's outputs it still has, int64. A layer without bias gets one in the
    batch norm that follows it, or none. Layers that `left_alone` names stay as they are, and the result lacks them.
    PassError for a layer too wide, or one whose input is changed in place.
    """
    points, places = _points_of_both(student, teacher, {name: tensor[:2] for name, tensor in batches[0].items()})
    left = left_alone(student, {one.layer for one in points})
    stops = stops_of([one for one in points if one.layer not in left and (layers is None or one.layer in layers)])
    found: list[Refitted] = []
    own = [tuple(places[point.layer] for point in stop) for stop in stops]
    students = [Forward(student, batch, own) for batch in batches]
    teachers = [Forward(teacher, batch, stops) for batch in batches]
    with stopping(student, stops, inputs=True), stopping(teacher, stops, inputs=False):
        try:
            for number, stop in enumerate(progress(stops, "fitting layers")):
                for one in (*students, *teachers):
                    one.advance()
                    if one.at != number:
                        raise PassError(f"{stop[0].layer}: is reached in another order than when the model was traced")
                for point in stop:
                    place = place_of(student, point)
                    kept = kept_outputs.get(point.layer)
                    rows = partial(_rows, place, students, teachers, kept, rows_per_feature, seed + 7919 * number)
                    found.append(_refit(place, rows, students))
        finally:
            for one in (*students, *teachers):
                one.end()
    return found


@dataclass(frozen=True, eq=False)
class _Rows:
    """Some rows of one batch: `x` [groups, n, features] that the layer reads; outputs as they are and as wanted, both
    [groups, n, out / groups]; whether they are held out."""

    x: Tensor
    found: Tensor
    wanted: Tensor
    held: bool

    def lacking(self, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """What the outputs should rise by; given a change of the weight and bias, for an output that a ReLU reads.

        Where the wanted value is not above zero, neither need be more than what the changed layer gives, nor above zero
        (Zhang et al. 2016, "Accelerating Very Deep Convolutional Networks", arXiv:1505.06798, equation 9).
        """
        if weight is None or bias is None:
            return self.wanted - self.found
        now = self.found + self.x @ weight.mT.to(self.x.dtype) + bias[:, None].to(self.x.dtype)
        return torch.where(self.wanted > 0, self.wanted, now.clamp_max(0)) - self.found


def _points_of_both(student: nn.Module, teacher: nn.Module, feeds: Batch) -> tuple[list[Point], Mapping[str, Point]]:
    """The teacher's points at layers that the student has at a place of the same kind, and the student's by layer.

    They differ in the number of their sum where the student does without some of the teacher's blocks.
    """
    own = {one.layer: one for one in find_points(student, feeds)}
    both = [one for one in find_points(teacher, feeds) if one.layer in own]
    alike = [one for one in both if _kind(one) == _kind(own[one.layer])]
    return alike, own


def _kind(point: Point) -> tuple[str, bool]:
    return point.norm, point.addition is None


def _refit(place: Place, rows: Callable[[], Iterable[_Rows]], students: Sequence[Forward]) -> Refitted:
    """Fit one layer, write it, and put right what the students' forwards hold."""
    layer, name = place.layer, place.point.layer
    check_width(name, layer)
    found = _fitted(place, rows)
    scale = place.scale()
    faint = scale.abs() <= FAINT * scale.abs().max()
    change, shift = found.weight.flatten(0, 1).clone(), found.bias.flatten().clone()
    change[faint], shift[faint], scale[faint] = 0, 0, 1
    own = (change / scale[:, None]).reshape(found.weight.shape)
    write_weight(layer, read_weight(layer).double() + own)
    place.shift(shift)
    for one in students:
        assert one.value is not None
        one.value.add_(applied(layer, one.inputs.pop(name)[0], change.reshape(found.weight.shape), shift))
    return Refitted(name, found.before, found.after, found.ridge)


def _fitted(place: Place, rows: Callable[[], Iterable[_Rows]]) -> Fit:
    """The least squares change; where a ReLU follows, sought again for the targets that it leaves free."""
    layer = place.layer
    free_bias = place.bias_holder() is not None
    learned, held = (Sums.empty(n_groups(layer), n_features(layer), read_weight(layer).shape[1]) for _ in range(2))
    for some in rows():
        (held if some.held else learned).add(some.x, some.lacking())
    found = fit(learned, held, free_bias)
    for _ in range(RECTIFIED_STEPS if place.point.rectified and found.ridge else 0):
        learned, held = learned.retargeted(), held.retargeted()
        for some in rows():
            (held if some.held else learned).aim(some.x, some.lacking(found.weight, found.bias))
        found = fit(learned, held, free_bias, (found.ridge,))
        if not found.ridge:
            break
    return found


def _rows(
    place: Place,
    students: Sequence[Forward],
    teachers: Sequence[Forward],
    kept: np.ndarray | None,
    rows_per_feature: int,
    seed: int,
) -> Iterator[_Rows]:
    """Those of one layer, batch by batch; the same whenever they are asked for."""
    layer, name = place.layer, place.point.layer
    limit = rows_per_batch(layer, len(students), rows_per_feature)
    for number, (one, other) in enumerate(zip(students, teachers, strict=True)):
        if name not in one.inputs or one.value is None or other.value is None:
            raise PassError(f"{name}: is reached in another order than when the model was traced")
        x, version = one.inputs[name]
        if x._version != version:
            raise PassError(f"{name}: what it reads is changed in place afterwards; it cannot be fitted. Ignore it")
        rows = chosen_rows(layer, x, one.value, one.batch, limit, seed + number)
        wanted = output_rows(layer, other.value, rows)
        if kept is not None:
            wanted = wanted[:, torch.from_numpy(kept)]
        yield _Rows(
            input_rows(layer, x, rows),
            in_groups(layer, output_rows(layer, one.value, rows)),
            in_groups(layer, wanted),
            number % HELD_OUT == HELD_OUT - 1,
        )
