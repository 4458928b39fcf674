"""What a plan knows of pruning: how many units of each dimension stay, and what the model then weighs. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from compress.facts import LayerFacts, ModelFacts, Prunable

Units = Mapping[str, int]
"""Dimension -> how many of its units stay."""
STEPS = 200
"""Ratios that are tried for a budget."""


def count_kept_units(n_units: int, kind: str, ratio: float, round_to: int) -> int:
    """Return how many units stay when `ratio` of them go: a multiple of `round_to` if there are enough, heads excepted.

    0 where nothing would be left.
    """
    wanted = n_units * (1 - Fraction(str(ratio)))
    if wanted < 1:
        return 0
    step = 1 if kind == "heads" else min(round_to, n_units)
    return min(n_units, max(step, step * round(wanted / step)))


def shrunk(facts: ModelFacts, dimensions: Sequence[Prunable], units: Units) -> ModelFacts:
    """Return the model's facts once only so many units are left; a layer's bias and norm are not counted."""
    layers = {layer.name: layer for layer in facts.layers}
    for group in dimensions:
        removed = group.n_units - units.get(group.name, group.n_units)
        for name, each in group.writers.items():
            layers[name] = _shrink_layer(layers[name], 0, removed * each)
        for name, each in group.readers.items():
            layers[name] = _shrink_layer(layers[name], 1, removed * each)
    left = facts.prunable and tuple(
        replace(group, n_units=units.get(group.name, group.n_units)) for group in facts.prunable
    )
    return replace(facts, layers=tuple(layers.values()), prunable=left)


def _shrink_layer(layer: LayerFacts, axis: int, removed: int) -> LayerFacts:
    """Take `removed` outputs (`axis` 0) or inputs (1) from a layer's shape and work; a table has its width second."""
    axis = 1 if layer.type == "Embedding" else axis
    shape = list(layer.shape)
    macs = layer.macs * (shape[axis] - removed) // shape[axis]
    shape[axis] -= removed
    return replace(layer, shape=tuple(shape), macs=macs)


def least_ratio(holds: Callable[[float], bool]) -> float | None:
    """Return the least ratio, in steps of 1 / STEPS, for which `holds`, true from some ratio on; None if for none."""
    low, high = 0, STEPS - 1
    if not holds(high / STEPS):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle / STEPS) else (middle + 1, high)
    return low / STEPS
