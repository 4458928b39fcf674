"""For each dimension: in which order its units go, and what that costs. The choice of importance is made here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from compress.errors import PassError
from compress.prune.damage import calibrated, measured, output_weights, readers_of
from compress.prune.dimension import Dimension
from compress.prune.importance import (
    Comparison,
    Loss,
    activation_norm,
    batch_norm_scale,
    damage,
    first_output,
    gradient_scores,
    magnitude,
    random_scores,
    ranked,
)
from compress.prune.layers import layers_of
from compress.prune.obs import Elimination, eliminate
from compress.prune.points import Point, find_points, place_of
from compress.prune.statistics import GRAM_BYTES, Batch, gather_inputs, gram_bytes

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
    """One curve for each dimension. `comparison` is for other importances than "obs"; `loss` for "taylor" and "fisher",
    and for "obs" and "obd" to weigh readers' outputs by (`sampled_label_loss` of a classifier or decoder; None: alike).

    The curves of "obs" are in squared error of the model's outputs per sample; those of other importances in their own
    scores, summed. PassError: gradients without `loss`, a reader that cannot be measured, Gram matrices of one
    dimension's readers above GRAM_BYTES.
    """
    if importance in ("obs", "obd", "activation"):
        points = {point.layer: point for point in find_points(module, _few(batches))}
        found: list[Elimination] = []
        parts = list(_in_passes(module, dimensions))
        for part in progress(parts, f"importance: {importance}"):
            found += _from_inputs(module, part, points, batches, importance, comparison, loss, seed)
        return found
    return [ranked(scores, comparison) for scores in _scores(module, dimensions, batches, importance, loss, seed)]


def _few(batches: Sequence[Batch]) -> dict[str, Tensor]:
    """Two samples."""
    return {name: tensor[:2] for name, tensor in batches[0].items()}


def _scores(
    module: nn.Module,
    dimensions: Sequence[Dimension],
    batches: Sequence[Batch],
    importance: Importance,
    loss: Loss | None,
    seed: int,
) -> list[np.ndarray]:
    """Those of importances that need no inputs of layers."""
    if importance == "taylor" or importance == "fisher":
        if loss is None:
            raise PassError(f"importance: {importance} needs a loss to take gradients of; give labels or a teacher")
        return gradient_scores(module, dimensions, batches, loss, importance)
    if importance == "l1" or importance == "l2":
        return [magnitude(module, one, 1 if importance == "l1" else 2) for one in dimensions]
    if importance == "bn_scale":
        return [batch_norm_scale(module, one) for one in dimensions]
    if importance == "random":
        return [random_scores(one.n_units, seed + number) for number, one in enumerate(dimensions)]
    raise PassError(f"importance: '{importance}' is unknown; known: {', '.join(get_args(Importance))}")


def _in_passes(module: nn.Module, dimensions: Sequence[Dimension]) -> Iterator[list[Dimension]]:
    """The dimensions, cut where their readers' Gram matrices would take more than GRAM_BYTES."""
    layers = layers_of(module)
    part: list[Dimension] = []
    held = 0
    for one in dimensions:
        size = sum(gram_bytes(layers[name]) for name in one.readers)
        if size > GRAM_BYTES:
            raise PassError(
                f"{one.name}: the Gram matrices of its {len(one.readers)} readers take {size / 2**30:.1f} GiB, more "
                f"than {GRAM_BYTES / 2**30:.0f}; choose importance: l2 for it, or ignore it"
            )
        if part and held + size > GRAM_BYTES:
            yield part
            part, held = [], 0
        part.append(one)
        held += size
    if part:
        yield part


def _from_inputs(
    module: nn.Module,
    dimensions: Sequence[Dimension],
    points: Mapping[str, Point],
    batches: Sequence[Batch],
    importance: Importance,
    comparison: Comparison,
    loss: Loss | None,
    seed: int,
) -> list[Elimination]:
    """Curves of dimensions whose readers' statistics are held at once."""
    names = [*dict.fromkeys(name for one in dimensions for name in one.readers)]
    sums = gather_inputs(module, names, batches, seed=seed)
    readers = [readers_of(module, one, points, sums) for one in dimensions]
    if importance == "activation":
        return [ranked(activation_norm([reader.raw_reading() for reader in own]), comparison) for own in readers]
    weights = output_weights(module, [place_of(module, points[name]) for name in names], batches, loss)
    readings = [[reader.reading(weights[reader.place.point.layer]) for reader in own] for own in readers]
    if importance == "obd":
        return [ranked(damage(own), comparison) for own in readings]
    held = batches[-MEASURED_BATCHES:]
    with torch.no_grad():
        targets = [first_output(module(**batch)) for batch in held]
    found = []
    for one, own, weighed in zip(dimensions, readers, readings, strict=True):
        curve = eliminate(weighed)
        damages = {}
        for width in {max(1, round(share * one.n_units)) for share in MEASURED_SHARES}:
            gone = curve.order[: one.n_units - width]
            damages[width] = measured(module, own, gone, held, targets)
        found.append(calibrated(curve, one.n_units, damages))
    return found
