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


def kept_units(n_units: int, kind: str, ratio: float, round_to: int) -> int:
    """How many stay when `ratio` of them go: a multiple of `round_to` if there are so many, heads excepted.

    0 where nothing would be left.
    """
    wanted = n_units * (1 - Fraction(str(ratio)))
    if wanted < 1:
        return 0
    step = 1 if kind == "heads" else min(round_to, n_units)
    return min(n_units, max(step, step * round(wanted / step)))


def shrunk(facts: ModelFacts, dimensions: Sequence[Prunable], units: Units) -> ModelFacts:
    """The model's facts once only so many units are left; those of a layer's bias and norm go uncounted."""
    layers = {layer.name: layer for layer in facts.layers}
    for one in dimensions:
        gone = one.n_units - units.get(one.name, one.n_units)
        for name, each in one.writers.items():
            layers[name] = _smaller(layers[name], 0, gone * each)
        for name, each in one.readers.items():
            layers[name] = _smaller(layers[name], 1, gone * each)
    left = facts.prunable and tuple(replace(one, n_units=units.get(one.name, one.n_units)) for one in facts.prunable)
    return replace(facts, layers=tuple(layers.values()), prunable=left)


def _smaller(layer: LayerFacts, axis: int, gone: int) -> LayerFacts:
    """`axis` 0: outputs, 1: inputs; a table has its width second."""
    axis = 1 if layer.type == "Embedding" else axis
    shape = list(layer.shape)
    macs = layer.macs * (shape[axis] - gone) // shape[axis]
    shape[axis] -= gone
    return replace(layer, shape=tuple(shape), macs=macs)


def least_ratio(holds: Callable[[float], bool]) -> float | None:
    """The least ratio, in steps of 1 / STEPS, of which `holds`, which is so from some ratio on; None: of none."""
    low, high = 0, STEPS - 1
    if not holds(high / STEPS):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle / STEPS) else (middle + 1, high)
    return low / STEPS
