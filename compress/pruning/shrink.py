"""Dimensions made narrower for good, what follows made up for it, and a record of what each cut cost and gave."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from compress.blocks.layers import TRANSPOSED, in_axis
from compress.errors import PassError
from compress.pruning.compensate import Refitted, compensate, explain_left_alone
from compress.pruning.dimensions import Axis, Dimension, DimensionKind
from compress.pruning.layers import layers_of, weight_names
from compress.pruning.obs import Elimination
from compress.pruning.points import find_points
from compress.pruning.statistics import Batch
from compress.rounding.outputs import list_outputs
from runtime.progress import Progress, no_progress

Remove = Callable[[nn.Module, Dimension, np.ndarray], None]
"""(module, dimension, units): take the units out of the module, in place."""


@dataclass(frozen=True, eq=False)
class Shrunk:
    """One dimension: the units that stayed (int64, numbers of before), and the damage that its curve foretold."""

    name: str
    kind: DimensionKind
    n_units: int
    kept: np.ndarray
    damage: float


@dataclass(frozen=True, eq=False)
class ShrinkResult:
    """`error_without`, `error_with` compensation: squared error of the outputs over that of their mean (1: nothing of
    them is left); the second is the first where nothing was compensated. `layers`: what was fitted, in order; `left`:
    layer -> why it was not, where others were."""

    dimensions: tuple[Shrunk, ...]
    layers: tuple[Refitted, ...]
    error_without: float
    error_with: float
    left: Mapping[str, str] = field(default_factory=dict)


def shrink(
    module: nn.Module,
    dimensions: Sequence[Dimension],
    curves: Sequence[Elimination],
    widths: Sequence[int],
    batches: Sequence[Batch],
    remove: Remove,
    compensation: bool = True,
    seed: int = 0,
    progress: Progress = no_progress,
) -> ShrinkResult:
    """Leave `widths[d]` units of each dimension, those that its curve removes last, in place; return the record.

    With `compensation` every layer is fitted anew to what it gave before. A copy of the whole model is held meanwhile.
    PassError where a width is below 1 or above the units there are.
    """
    for dimension, width in zip(dimensions, widths, strict=True):
        if not 1 <= width <= dimension.n_units:
            raise PassError(
                f"{dimension.name}: {width} of {dimension.n_units} units cannot be left; give 1 to {dimension.n_units}"
            )
    teacher = copy.deepcopy(module)
    kept = [
        curve.choose_kept(width, dimension.n_units)
        for dimension, curve, width in zip(dimensions, curves, widths, strict=True)
    ]
    shrunk = tuple(
        Shrunk(dimension.name, dimension.kind, dimension.n_units, units, curve.error_at(len(units), dimension.n_units))
        for dimension, units, curve in zip(dimensions, kept, curves, strict=True)
    )
    remove_all(module, dimensions, kept, remove)
    # the error of the outputs is told on the last ones
    held = batches[-2:]
    without = output_error(module, teacher, held)
    if not compensation or all(
        len(units) == dimension.n_units for units, dimension in zip(kept, dimensions, strict=True)
    ):
        return ShrinkResult(shrunk, (), without, without)
    outputs = find_kept_outputs(teacher, dimensions, kept)
    layers = compensate(module, teacher, batches, outputs, seed=seed, progress=progress)
    called_once = {
        point.layer for point in find_points(module, {name: tensor[:2] for name, tensor in batches[0].items()})
    }
    left = explain_left_alone(module, called_once)
    return ShrinkResult(shrunk, tuple(layers), without, output_error(module, teacher, held), left)


def remove_all(module: nn.Module, dimensions: Sequence[Dimension], kept: Sequence[np.ndarray], remove: Remove) -> None:
    """Remove from each dimension what is not kept; those that share an axis are renumbered on the way."""
    left = [*dimensions]
    for number, stays in enumerate(kept):
        dimension = left[number]
        units = np.setdiff1d(np.arange(dimension.n_units), stays)
        if len(units):
            removed = {axis: dimension.indices(axis, units) for axis in dimension.members}
            remove(module, dimension, units)
            left[number + 1 :] = [renumber_dimension(other, removed) for other in left[number + 1 :]]


def renumber_dimension(dimension: Dimension, removed: Mapping[Axis, np.ndarray]) -> Dimension:
    """Return the dimension after other indices (int64, rising) of some axes are gone."""
    members = {
        axis: indices - np.searchsorted(removed[axis], indices) if axis in removed else indices
        for axis, indices in dimension.members.items()
    }
    return replace(dimension, members=members)


def find_kept_outputs(
    module: nn.Module, dimensions: Sequence[Dimension], kept: Sequence[np.ndarray]
) -> dict[str, np.ndarray]:
    """Return layer of the whole model -> those of its outputs that stay, int64; layers that lose none are not in it."""
    outputs, weights = {}, weight_names(module)
    for name, layer in layers_of(module).items():
        weight: Tensor = layer.weight  # type: ignore[assignment]
        axis = (weights[name], 1 - in_axis(layer))
        stays = np.ones(weight.shape[axis[1]], bool)
        for dimension, units in zip(dimensions, kept, strict=True):
            if axis in dimension.members:
                stays[dimension.indices(axis, np.setdiff1d(np.arange(dimension.n_units), units))] = False
        if isinstance(layer, TRANSPOSED):  # its weight has the outputs of one group
            stays = np.tile(stays, layer.groups)
        if not stays.all():
            outputs[name] = np.flatnonzero(stays)
    return outputs


def output_error(module: nn.Module, teacher: nn.Module, batches: Sequence[Batch]) -> float:
    """Return the squared error of a model's outputs over the squared distance of the teacher's from their mean.

    Of several outputs the mean.
    """
    with torch.no_grad():
        pairs = [(list_outputs(module(**batch), batch), list_outputs(teacher(**batch), batch)) for batch in batches]
    errors = []
    for place in range(len(pairs[0][1])):
        n, apart, total, squares = 0, 0.0, torch.zeros(()), 0.0
        for outputs, whole in (
            (own[place].flatten(0, -2).double(), t[place].flatten(0, -2).double()) for own, t in pairs
        ):
            n += len(whole)
            apart += float((outputs - whole).square().sum())
            total, squares = total + whole.sum(0), squares + float(whole.square().sum())
        errors.append(apart / max(squares - float(total.square().sum()) / max(n, 1), 1e-300))
    return sum(errors) / len(errors)
