"""Find for each dimension in which order its units go, and what each width costs. Importance is chosen here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from compress.blocks.layers import in_axis
from compress.errors import PassError
from compress.pruning.dimensions import Dimension
from compress.pruning.importance import (
    Comparison,
    Loss,
    activation_norm,
    batch_norm_scale,
    damage,
    gradient_scores,
    magnitude,
    output_fisher,
    random_scores,
    rank_units,
)
from compress.pruning.layers import features_of, layers_of, n_groups, read_weight, weight_names, write_weight
from compress.pruning.obs import Elimination, ReadingLayer, compensate_weight, eliminate
from compress.pruning.points import Point, PointModules, find_points, place_of
from compress.pruning.statistics import GRAM_BYTES, Batch, Sums, gather_inputs, gram_bytes
from compress.rounding.outputs import list_outputs, square_distance
from runtime.progress import Progress, no_progress

Importance = Literal["obs", "obd", "activation", "l1", "l2", "bn_scale", "taylor", "fisher", "random"]


def find_curves(
    module: nn.Module,
    dimensions: Sequence[Dimension],
    batches: Sequence[Batch],
    importance: Importance = "obs",
    comparison: Comparison = "global",
    loss: Loss | None = None,
    seed: int = 0,
    progress: Progress = no_progress,
    most_bytes: int = GRAM_BYTES,
) -> list[Elimination]:
    """Return one curve for each dimension: the order in which its units go, and the damage that each width does.

    `comparison` is for other importances than "obs"; `loss` for "taylor" and "fisher", and for "obs" and "obd" to weigh
    readers' outputs by (`sampled_label_loss` of a classifier or decoder; None: alike).

    The curves of "obs" are in squared error of the model's outputs per sample; those of other importances in their own
    scores, summed. PassError: gradients without `loss`, a reader that cannot be measured, Gram matrices of one
    dimension's readers above `most_bytes`.
    """
    if importance in ("obs", "obd", "activation"):
        two_samples = {name: tensor[:2] for name, tensor in batches[0].items()}
        # a reader that is called several times has no one place: it is taken by its own outputs
        points = {name: Point(name, "", None, 0) for dimension in dimensions for name in dimension.readers}
        points |= {point.layer: point for point in find_points(module, two_samples)}
        curves: list[Elimination] = []
        parts = list(_split_into_passes(module, dimensions, most_bytes))
        for part in progress(parts, f"importance: {importance}"):
            curves += _find_curves_from_inputs(module, part, points, batches, importance, comparison, loss, seed)
        return curves
    return [
        rank_units(scores, comparison) for scores in _score_units(module, dimensions, batches, importance, loss, seed)
    ]


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


def _split_into_passes(
    module: nn.Module, dimensions: Sequence[Dimension], most_bytes: int
) -> Iterator[list[Dimension]]:
    """Yield the dimensions in parts, cut where their readers' Gram matrices would take more than `most_bytes`."""
    layers = layers_of(module)
    part: list[Dimension] = []
    held = 0
    for dimension in dimensions:
        size = sum(gram_bytes(layers[name]) for name in dimension.readers)
        if size > most_bytes:
            raise PassError(
                f"{dimension.name}: the Gram matrices of its {len(dimension.readers)} readers take "
                f"{size / 2**30:.1f} GiB, more than {most_bytes / 2**30:.0f}; choose importance: l2 for it, or ignore "
                "it"
            )
        if part and held + size > most_bytes:
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
    weights = _output_weights(module, [place_of(module, points[name]) for name in names], batches, loss)
    reading_layers = [[reader.as_layer(weights[reader.place.point.layer]) for reader in own] for own in readers]
    if importance == "obd":
        return [rank_units(damage(own), comparison) for own in reading_layers]
    # a dimension's damage is measured on the last ones
    held = batches[-2:]
    with torch.no_grad():
        targets = [list_outputs(module(**batch), batch) for batch in held]
    curves = []
    for dimension, own, weighed in zip(dimensions, readers, reading_layers, strict=True):
        curve = eliminate(weighed)
        damages = {}
        for width in {max(1, round(share * dimension.n_units)) for share in (0.5, 0.25)}:
            removed = curve.order[: dimension.n_units - width]
            damages[width] = measure_damage(module, own, removed, held, targets)
        curves.append(calibrate_curve(curve, dimension.n_units, damages))
    return curves


@dataclass(frozen=True, eq=False)
class Reader:
    """A layer that reads a dimension: where its output arrives, the features that each unit is, what it reads."""

    place: PointModules
    features: np.ndarray
    sums: Sums

    def gram(self) -> Tensor:
        """Return the Gram matrix [features, features], float64; groups lie along the diagonal.

        Without means where a bias can take them up.
        """
        blocks = self.sums.without_means()[0] if self.place.bias_holder() is not None else self.sums.plain()[0]
        return torch.block_diag(*blocks)

    def as_layer(self, weights: Tensor | None = None) -> ReadingLayer:
        """Return the layer's matrix, its outputs times `weights` [out] (None: as they are), with its Gram matrix."""
        matrix = torch.block_diag(*read_weight(self.place.layer).double())
        return ReadingLayer(matrix if weights is None else weights[:, None] * matrix, self.gram(), self.features)

    def raw_reading(self) -> ReadingLayer:
        """Return the layer's matrix with second moments about zero, whatever the bias."""
        matrix = torch.block_diag(*read_weight(self.place.layer).double())
        return ReadingLayer(matrix, torch.block_diag(*self.sums.plain()[0]), self.features)


def readers_of(
    module: nn.Module, dimension: Dimension, points: Mapping[str, Point], sums: Mapping[str, Sums]
) -> list[Reader]:
    """Return the layers that read a dimension, in the order in which they run."""
    layers, weights = layers_of(module), weight_names(module)
    readers = []
    for name in dimension.readers:
        features = features_of(layers[name], dimension.members[weights[name], in_axis(layers[name])])
        readers.append(Reader(place_of(module, points[name]), features, sums[name]))
    return readers


def _output_weights(
    module: nn.Module, places: Sequence[PointModules], batches: Sequence[Batch], loss: Loss | None
) -> dict[str, Tensor]:
    """Return by layer the root of what an error in each of its outputs is worth, float64 [out].

    The worth of an error is its square times the square of this. With `loss` (see `sampled_label_loss`) the sum is
    about twice what the loss rises by; without, this is what the batch norm passes.
    """
    if loss is None:
        return {place.point.layer: place.scale().abs() for place in places}
    parts = {place.point.layer: place.point.norm or place.point.layer for place in places}
    # enough for the curvature, which only weighs outputs against each other
    fisher = output_fisher(module, [*dict.fromkeys(parts.values())], batches[:4], loss)
    weights = {}
    for place in places:
        scale = place.scale()
        curvature = fisher.get(parts[place.point.layer], torch.zeros_like(scale))
        weights[place.point.layer] = curvature.sqrt() * scale.abs()
    return weights


def measure_damage(
    module: nn.Module,
    readers: Sequence[Reader],
    removed: np.ndarray,
    batches: Sequence[Batch],
    targets: Sequence[list[Tensor]],
) -> float:
    """Return the squared error per sample of the model's outputs without the units `removed`, their readers
    compensated.

    `targets`: the outputs of the whole model, by batch. The module is as before afterwards.

    The order in which units go and the curve's form come from the readers' Gram matrices and the curvature of a loss
    with respect to their outputs, which takes one forward and one backward pass. Errors of neighbouring pixels and
    tokens add up, which these forms do not know; how much it costs in the end is therefore measured, each dimension
    alone at two widths, its readers making up for it. On ResNet-56 that is 2 to 6 times more, not alike in all layers,
    and rises faster: from half to a quarter of the units 3.5 times where the forms say 2.3.

    What is measured is not the divergence of class probabilities: on images that a model was trained on these are near
    0 and 1, and show nothing of what happens to others.
    """
    with _compensate_readers(readers, removed), torch.no_grad():
        squares = sum(
            square_distance(list_outputs(module(**batch), batch), target)
            for batch, target in zip(batches, targets, strict=True)
        )
    return squares / sum(len(target[0]) for target in targets)


def calibrate_curve(curve: Elimination, n_units: int, measured: Mapping[int, float]) -> Elimination:
    """Return the curve scaled to the damage `measure_damage` at some widths; between them the factor is interpolated.

    Widths where either is nothing are left out; the curve stays as it is where none remains. The errors still rise with
    every unit that goes.
    """
    known = {width: (damage, curve.error_at(width, n_units)) for width, damage in measured.items()}
    factors = {width: damage / foretold for width, (damage, foretold) in known.items() if damage > 0 and foretold > 0}
    if not factors:
        return curve
    widths = sorted(factors)
    left = n_units - 1 - np.arange(len(curve.errors))
    errors = curve.errors * np.interp(left, widths, [factors[width] for width in widths])
    return Elimination(curve.order, np.maximum.accumulate(errors))


@contextmanager
def _compensate_readers(readers: Sequence[Reader], removed: np.ndarray) -> Iterator[None]:
    """Compensate the readers' weights and biases for missing units while the context is open."""
    before = []
    try:
        for reader in readers:
            layer, holder = reader.place.layer, reader.place.bias_holder()
            before.append(
                (layer.weight, layer.weight.detach().clone(), holder, None if holder is None else holder.clone())
            )
            reading_layer = reader.as_layer()
            compensated = compensate_weight(reading_layer, removed)
            # with the bias that keeps the mean output
            place, groups = reader.place, n_groups(reader.place.layer)
            rows, columns = reading_layer.weight.shape[0] // groups, reading_layer.weight.shape[1] // groups
            blocks = [compensated[g * rows : (g + 1) * rows, g * columns : (g + 1) * columns] for g in range(groups)]
            write_weight(place.layer, torch.stack(blocks))
            mean = reader.sums.mean.flatten()
            place.shift((reading_layer.weight - compensated) @ mean * place.scale())
        yield
    finally:
        for weight, old, holder, bias in before:
            weight.data.copy_(old)
            if holder is not None and bias is not None:
                holder.data.copy_(bias)
