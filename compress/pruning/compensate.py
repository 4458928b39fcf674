"""Fit every layer anew after units are gone, in the order of the forward, to what the whole model gave there.

Batch norms get the statistics of the data as it is then.

He, Zhang and Sun, "Channel Pruning for Accelerating Very Deep Neural Networks" (2017, arXiv:1707.06168), section 3.1,
reconstruct a layer's output from the inputs that are left, as those now are. What is solved for here is the change of
the weight, so that the ridge draws towards the weight as it stands and not towards zero.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from compress.blocks.forward import remove_hooks_on_exit
from compress.blocks.layers import is_layer
from compress.blocks.materialise import plain
from compress.errors import PassError
from compress.pruning.layers import (
    COMPUTED,
    apply_layer,
    in_groups,
    input_rows,
    is_matrix_layer,
    n_features,
    n_groups,
    output_rows,
    read_weight,
    write_weight,
)
from compress.pruning.obs import factor_of
from compress.pruning.points import Point, PointModules, find_points, place_of
from compress.pruning.statistics import MAX_FEATURES, Batch, Sums, check_width, choose_rows, rows_per_batch
from compress.pruning.sweep import Forward, stopping, stops_of
from runtime.progress import Progress, no_progress

HELD_OUT = 4
"""Every so many-th batch is held out to choose the ridge; of fewer batches none is."""
RECTIFIED_STEPS = 3
"""Rounds of least squares after the first where a ReLU follows."""
MAX_OUTPUTS = 16384
"""Of a layer that is fitted: the head of a large vocabulary would take gigabytes."""
RIDGES = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Tried on the rows held out, times the mean diagonal of the Gram matrix."""
RIDGE = 1e-2
"""Where nothing is held out."""


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
    progress: Progress = no_progress,
) -> list[Refitted]:
    """Fit weights and biases of `student` in place; `layers`: only these (None: all that are called once).

    `kept_outputs`: layer -> which of the teacher's outputs it still has, int64. A layer without bias gets one in the
    batch norm that follows it, or none. Layers that `explain_left_alone` names stay as they are; the result lacks them.
    PassError for a layer too wide, or one whose input is changed in place.
    """
    points, places = _find_common_points(student, teacher, {name: tensor[:2] for name, tensor in batches[0].items()})
    left = explain_left_alone(student, {one.layer for one in points})
    stops = stops_of([one for one in points if one.layer not in left and (layers is None or one.layer in layers)])
    refitted: list[Refitted] = []
    student_stops = [tuple(places[point.layer] for point in stop) for stop in stops]
    students = [Forward(student, batch, student_stops) for batch in batches]
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
                    rows = partial(
                        _iterate_rows, place, students, teachers, kept, rows_per_feature, seed + 7919 * number
                    )
                    refitted.append(_refit(place, rows, students))
        finally:
            for one in (*students, *teachers):
                one.end()
    return refitted


@dataclass(frozen=True, eq=False)
class _Rows:
    """Some rows of one batch: `x` [groups, n, features] that the layer reads; outputs as they are and as wanted, both
    [groups, n, out / groups]; whether they are held out."""

    x: Tensor
    found: Tensor
    wanted: Tensor
    held: bool

    def lacking(self, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Return what the outputs should rise by; given a change of weight and bias, for an output that a ReLU reads.

        Where the wanted value is not above zero, neither need be more than what the changed layer gives, nor above zero
        (Zhang et al. 2016, "Accelerating Very Deep Convolutional Networks", arXiv:1505.06798, equation 9).
        """
        if weight is None or bias is None:
            return self.wanted - self.found
        now = self.found + self.x @ weight.mT.to(self.x.dtype) + bias[:, None].to(self.x.dtype)
        return torch.where(self.wanted > 0, self.wanted, now.clamp_max(0)) - self.found


def _find_common_points(
    student: nn.Module, teacher: nn.Module, feeds: Batch
) -> tuple[list[Point], Mapping[str, Point]]:
    """Return the teacher's points that the student has too, at a place of the same kind, and the student's by layer.

    They differ in the number of their sum where the student does without some of the teacher's blocks.
    """
    student_points = {point.layer: point for point in find_points(student, feeds)}
    both = [point for point in find_points(teacher, feeds) if point.layer in student_points]
    alike = [point for point in both if _kind(point) == _kind(student_points[point.layer])]
    return alike, student_points


def _kind(point: Point) -> tuple[str, bool]:
    return point.norm, point.addition is None


def _refit(place: PointModules, rows: Callable[[], Iterable[_Rows]], students: Sequence[Forward]) -> Refitted:
    """Fit one layer, write its weight and bias, and correct what the students' forwards hold."""
    layer, name = place.layer, place.point.layer
    check_width(name, layer)
    fitted = _fit_change(place, rows)
    scale = place.scale()
    # a fainter scale lets too little through to fit what lies before it
    faint = scale.abs() <= 1e-4 * scale.abs().max()
    change, shift = fitted.weight.flatten(0, 1).clone(), fitted.bias.flatten().clone()
    change[faint], shift[faint], scale[faint] = 0, 0, 1
    weight_change = (change / scale[:, None]).reshape(fitted.weight.shape)
    write_weight(layer, read_weight(layer).double() + weight_change)
    place.shift(shift)
    for forward in students:
        assert forward.value is not None
        forward.value.add_(apply_layer(layer, forward.inputs.pop(name)[0], change.reshape(fitted.weight.shape), shift))
    return Refitted(name, fitted.before, fitted.after, fitted.ridge)


def _fit_change(place: PointModules, rows: Callable[[], Iterable[_Rows]]) -> Fit:
    """Return the least squares change; where a ReLU follows, solve again for the targets that it leaves free."""
    layer = place.layer
    free_bias = place.bias_holder() is not None
    learned, held = (Sums.empty(n_groups(layer), n_features(layer), read_weight(layer).shape[1]) for _ in range(2))
    for some in rows():
        (held if some.held else learned).add(some.x, some.lacking())
    fitted = fit(learned, held, free_bias)
    for _ in range(RECTIFIED_STEPS if place.point.rectified and fitted.ridge else 0):
        learned, held = learned.without_targets(), held.without_targets()
        for some in rows():
            (held if some.held else learned).aim(some.x, some.lacking(fitted.weight, fitted.bias))
        fitted = fit(learned, held, free_bias, (fitted.ridge,))
        if not fitted.ridge:
            break
    return fitted


def _iterate_rows(
    place: PointModules,
    students: Sequence[Forward],
    teachers: Sequence[Forward],
    kept: np.ndarray | None,
    rows_per_feature: int,
    seed: int,
) -> Iterator[_Rows]:
    """Yield the rows of one layer, batch by batch; the same rows at every call."""
    layer, name = place.layer, place.point.layer
    limit = rows_per_batch(layer, len(students), rows_per_feature)
    for number, (student, teacher) in enumerate(zip(students, teachers, strict=True)):
        if name not in student.inputs or student.value is None or teacher.value is None:
            raise PassError(f"{name}: is reached in another order than when the model was traced")
        x, version = student.inputs[name]
        if x._version != version:
            raise PassError(f"{name}: what it reads is changed in place afterwards; it cannot be fitted. Ignore it")
        rows = choose_rows(layer, x, student.value, student.batch, limit, seed + number)
        wanted = output_rows(layer, teacher.value, rows)
        if kept is not None:
            wanted = wanted[:, torch.from_numpy(kept)]
        yield _Rows(
            input_rows(layer, x, rows),
            in_groups(layer, output_rows(layer, student.value, rows)),
            in_groups(layer, wanted),
            number % HELD_OUT == HELD_OUT - 1,
        )


def explain_left_alone(module: nn.Module, called_once: Collection[str]) -> dict[str, str]:
    """Return layer -> why it stays as it is, of all but tables. `called_once`: those that one forward calls once."""
    holders: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), []).append(plain(name).rpartition(".")[0])
    layers = {plain(name): part for name, part in module.named_modules() if is_layer(part)}
    why = {
        name: _explain_exclusion(layer, name, holders.get(id(layer.weight)), name in called_once)
        for name, layer in layers.items()
        if is_matrix_layer(layer)
    }
    return {name: reason for name, reason in why.items() if reason}


def _explain_exclusion(layer: nn.Module, name: str, holders: list[str] | None, called_once: bool) -> str:
    """Return why a layer cannot be fitted; "" for one that can. `holders`: the layers that have its weight."""
    if holders is None:
        return COMPUTED
    if sharing := [other for other in holders if other != name]:
        return f"it shares its weight with {', '.join(sharing)}"
    if (n := len(read_weight(layer).flatten(0, 1))) > MAX_OUTPUTS:
        return f"it has {n} outputs, and more than {MAX_OUTPUTS} are not fitted"
    if (n := n_features(layer)) > MAX_FEATURES:
        return f"one output sees {n} features, and more than {MAX_FEATURES} are not fitted"
    return "" if called_once else "one forward does not call it exactly once"


@torch.no_grad()
def follow_data(module: nn.Module, batches: Sequence[Batch]) -> None:
    """Set running means and variances to those of the calibration data, in place; what the module gives stays.

    Each norm's weight and bias take up what its statistics change by. Units that are gone, and layers that were fitted
    anew, leave the old statistics far from the data: in eval mode that is as good as any affine map, but training
    normalises by each batch's own, and would begin with another model than the one that was pruned.
    """
    sums: dict[_BatchNorm, Tensor] = {}
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
    norms = [norm for norm in norms if norm.affine and norm.running_mean is not None]
    handles = [norm.register_forward_pre_hook(_make_sum_hook(norm, sums), with_kwargs=True) for norm in norms]
    with remove_hooks_on_exit(handles):
        for batch in batches:
            module(**batch)
    for norm, (n, x, xx) in sums.items():
        mean = x / n
        variance = (xx / n - (x / n).square()).clamp_min(0)
        assert norm.running_mean is not None and norm.running_var is not None
        # the same map, by another mean and variance (float64 [C])
        before, after = ((values.double() + norm.eps).sqrt() for values in (norm.running_var, variance))
        weight = norm.weight.double()
        norm.bias.add_((weight * (mean - norm.running_mean.double()) / before).float())
        norm.weight.copy_((weight * after / before).float())
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)


def _make_sum_hook(norm: _BatchNorm, sums: dict[_BatchNorm, Tensor]) -> Callable[[nn.Module, Any, Any], None]:
    """Return a hook that sums over all batches: number of values, values, and their squares, float64 [3, C]."""

    def hook(part: nn.Module, args: Any, kwargs: Any) -> None:
        x = next(iter((*args, *kwargs.values()))).double().movedim(1, 0).flatten(1)  # [C, values]
        batch_sums = torch.stack([torch.full((len(x),), float(x.shape[1])).double(), x.sum(1), x.square().sum(1)])
        sums[norm] = sums[norm] + batch_sums if norm in sums else batch_sums

    return hook


@dataclass(frozen=True, eq=False)
class Fit:
    """The change that brings outputs nearer to their targets: y is about x @ weight^T + bias.

    `weight` float64 [groups, out / groups, features], `bias` float64 [groups, out / groups], zeros for a layer that can
    have none. `before`, `after`: mean over rows of the squared distance, summed over outputs; on the rows held out
    where there are some. `ridge` 0: no change was better than none.
    """

    weight: Tensor
    bias: Tensor
    before: float
    after: float
    ridge: float


def fit(learned: Sums, held: Sums | None, free_bias: bool, ridges: Sequence[float] = RIDGES) -> Fit:
    """Return the least squares change for targets y (what the output still lacks), from the rows of both sets.

    The ridge is the one of `ridges` whose solution on `learned` is nearest on `held`, whose rows then join in; RIDGE
    without `held`. A solution that is no better than no change on `held` is not used.
    """
    if held is None or held.n == 0:
        weight, bias = solve(learned, RIDGE, free_bias)
        return Fit(weight, bias, distance(learned), distance(learned, weight, bias), RIDGE)
    tried = [(distance(held, *solve(learned, ridge, free_bias)), ridge) for ridge in ridges]
    after, ridge = min(tried)
    before = distance(held)
    weight, bias = solve(learned + held, ridge, free_bias)
    if after >= before:
        return Fit(torch.zeros_like(weight), torch.zeros_like(bias), before, before, 0.0)
    return Fit(weight, bias, before, after, ridge)


def solve(sums: Sums, ridge: float, free_bias: bool) -> tuple[Tensor, Tensor]:
    """Return (weight [groups, outputs, features], bias [groups, outputs]) of the ridge solution, float64."""
    xx, xy, _ = sums.without_means() if free_bias else sums.plain()
    factors = torch.stack([factor_of(gram, ridge) for gram in xx])
    weight = torch.cholesky_solve(xy, factors).mT
    bias = sums.y / max(sums.n, 1) - (weight @ sums.mean[:, :, None])[:, :, 0]
    return weight, bias if free_bias else torch.zeros_like(bias)


def distance(sums: Sums, weight: Tensor | None = None, bias: Tensor | None = None) -> float:
    """Return the mean over rows of |y - weight x - bias|^2, from the sums alone; without weight that of |y|^2."""
    n = max(sums.n, 1)
    total = sums.yy.sum()
    if weight is not None and bias is not None:
        bias = bias + (weight @ sums.shift[:, :, None])[:, :, 0]  # rows are counted from there
        wx = (weight @ sums.x[:, :, None])[:, :, 0]  # [groups, outputs]
        total = total + ((weight @ sums.xx) * weight).sum() - 2 * (weight * sums.xy.mT).sum()
        total = total + (2 * bias * (wx - sums.y) + sums.n * bias.square()).sum()
    return max(float(total) / n, 0.0)
