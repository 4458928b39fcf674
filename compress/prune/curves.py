"""For each dimension: in which order its units go, and what that costs. The choice of importance is made here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from compress.errors import PassError
from compress.prune.damage import calibrate_curve, measure_damage, output_weights, readers_of
from compress.prune.dimension import Dimension
from compress.prune.importance import (
    Comparison,
    Loss,
    activation_norm,
    batch_norm_scale,
    damage,
    gradient_scores,
    magnitude,
    random_scores,
    rank_units,
)
from compress.prune.layers import layers_of
from compress.prune.obs import Elimination, eliminate
from compress.prune.points import Point, find_points, place_of
from compress.prune.statistics import GRAM_BYTES, Batch, gather_inputs, gram_bytes
from compress.quantize.outputs import first_output

Importance = Literal["obs", "obd", "activation", "l1", "l2", "bn_scale", "taylor", "fisher", "random"]
Progress = Callable[[Sequence[Any], str], Iterable[Any]]
MEASURED_BATCHES = 2
"""On so many, the last ones, a dimension's damage is measured."""
MEASURED_SHARES = (0.5, 0.25)
"""Of its units, with so many left."""


def find_curves(
    module: nn.Module,
    dimensions: Sequence[Dimension],
    batches: Sequence[Batch],
    importance: Importance = "obs",
    comparison: Comparison = "global",
    loss: Loss | None = None,
    seed: int = 0,
    progress: Progress = lambda items, text: items,
) -> list[Elimination]:
    """Return one curve for each dimension: the order in which its units go, and the damage that each width does.

    `comparison` is for other importances than "obs"; `loss` for "taylor" and "fisher", and for "obs" and "obd" to weigh
    readers' outputs by (`sampled_label_loss` of a classifier or decoder; None: alike).

    The curves of "obs" are in squared error of the model's outputs per sample; those of other importances in their own
    scores, summed. PassError: gradients without `loss`, a reader that cannot be measured, Gram matrices of one
    dimension's readers above GRAM_BYTES.
    """
    if importance in ("obs", "obd", "activation"):
        points = {point.layer: point for point in find_points(module, _take_two_samples(batches))}
        curves: list[Elimination] = []
        parts = list(_split_into_passes(module, dimensions))
        for part in progress(parts, f"importance: {importance}"):
            curves += _find_curves_from_inputs(module, part, points, batches, importance, comparison, loss, seed)
        return curves
    return [
        rank_units(scores, comparison) for scores in _score_units(module, dimensions, batches, importance, loss, seed)
    ]


def _take_two_samples(batches: Sequence[Batch]) -> dict[str, Tensor]:
    """Return the first two samples of the first batch."""
    return {name: tensor[:2] for name, tensor in batches[0].items()}


def _score_units(
    module: nn.Module,
    dimensions: Sequence[Dimension],
    batches: Sequence[Batch],
    importance: Importance,
    loss: Loss | None,
    seed: int,
) -> list[np.ndarray]:
    """Return each dimension's scores by an importance that needs no inputs of layers."""
    if importance == "taylor" or importance == "fisher":
        if loss is None:
            raise PassError(f"importance: {importance} needs a loss to take gradients of; give labels or a teacher")
        return gradient_scores(module, dimensions, batches, loss, importance)
    if importance == "l1" or importance == "l2":
        return [magnitude(module, dimension, 1 if importance == "l1" else 2) for dimension in dimensions]
    if importance == "bn_scale":
        return [batch_norm_scale(module, dimension) for dimension in dimensions]
    if importance == "random":
        return [random_scores(dimension.n_units, seed + number) for number, dimension in enumerate(dimensions)]
    raise PassError(f"importance: '{importance}' is unknown; known: {', '.join(get_args(Importance))}")


def _split_into_passes(module: nn.Module, dimensions: Sequence[Dimension]) -> Iterator[list[Dimension]]:
    """Yield the dimensions in parts, cut where their readers' Gram matrices would take more than GRAM_BYTES."""
    layers = layers_of(module)
    part: list[Dimension] = []
    held = 0
    for dimension in dimensions:
        size = sum(gram_bytes(layers[name]) for name in dimension.readers)
        if size > GRAM_BYTES:
            raise PassError(
                f"{dimension.name}: the Gram matrices of its {len(dimension.readers)} readers take "
                f"{size / 2**30:.1f} GiB, more than {GRAM_BYTES / 2**30:.0f}; choose importance: l2 for it, or ignore "
                "it"
            )
        if part and held + size > GRAM_BYTES:
            yield part
            part, held = [], 0
        part.append(dimension)
        held += size
    if part:
        yield part


def _find_curves_from_inputs(
    module: nn.Module,
    dimensions: Sequence[Dimension],
    points: Mapping[str, Point],
    batches: Sequence[Batch],
    importance: Importance,
    comparison: Comparison,
    loss: Loss | None,
    seed: int,
) -> list[Elimination]:
    """Return the curves of dimensions whose readers' statistics are held at once."""
    names = [*dict.fromkeys(name for dimension in dimensions for name in dimension.readers)]
    sums = gather_inputs(module, names, batches, seed=seed)
    readers = [readers_of(module, dimension, points, sums) for dimension in dimensions]
    if importance == "activation":
        return [rank_units(activation_norm([reader.raw_reading() for reader in own]), comparison) for own in readers]
    weights = output_weights(module, [place_of(module, points[name]) for name in names], batches, loss)
    readings = [[reader.reading(weights[reader.place.point.layer]) for reader in own] for own in readers]
    if importance == "obd":
        return [rank_units(damage(own), comparison) for own in readings]
    held = batches[-MEASURED_BATCHES:]
    with torch.no_grad():
        targets = [first_output(module(**batch)) for batch in held]
    curves = []
    for dimension, own, weighed in zip(dimensions, readers, readings, strict=True):
        curve = eliminate(weighed)
        damages = {}
        for width in {max(1, round(share * dimension.n_units)) for share in MEASURED_SHARES}:
            removed = curve.order[: dimension.n_units - width]
            damages[width] = measure_damage(module, own, removed, held, targets)
        curves.append(calibrate_curve(curve, dimension.n_units, damages))
    return curves
