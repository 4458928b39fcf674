"""Which sizes a model's own code ties to each other, or fixes: found by trying smaller copies, without values.

A forward may read a size from one tensor and lay out another by it (`x.reshape(batch, channels, -1)`, the channels
those of the layer's input): no label shows that the two must stay equal. And it may name a number: nothing can go.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor, nn

from compress.blocks.materialise import copy_without_weights
from compress.facts import Prunable
from compress.pruning.dimensions import Coupling, Dimension
from compress.pruning.shrink import remove_all
from compress.pruning.surgery import remove
from compress.structure.dataflow import Attempt, attempt, within

Pair = tuple[Dimension, Prunable]


def settle_sizes(coupling: Coupling, module: nn.Module, feeds: Mapping[str, Tensor], compute: bool) -> Coupling:
    """Return the coupling with dimensions that the code ties as one, and without those that it fixes.

    Where it does neither, a run or two show it.
    """
    trial = _Trial(module, feeds, compute)
    pairs = list(zip(coupling.dimensions, coupling.facts, strict=True))
    stuck = _find_stuck(trial, pairs)
    if not stuck:
        return coupling
    tied, fixed = _tie(trial, {pair[0].name: (pair, stuck[pair[0].name]) for pair in pairs if pair[0].name in stuck})
    order = {dimension.name: number for number, (dimension, _) in enumerate(pairs)}
    free = [pair for pair in pairs if pair[0].name not in stuck]
    settled = sorted([*free, *tied], key=lambda pair: order[pair[0].name])
    why = "the model's code fixes this size"
    kept = dict.fromkeys((writer for dimension, _ in fixed for writer in dimension.writers), why)
    return Coupling(tuple(d for d, _ in settled), tuple(f for _, f in settled), {**kept, **coupling.kept})


class _Trial:
    """Runs of smaller copies of a module; of one without values, unless its forward looks at them."""

    def __init__(self, module: nn.Module, feeds: Mapping[str, Tensor], compute: bool) -> None:
        self.feeds, self.compute = feeds, False
        self.module = copy_without_weights(module)
        self.shapes = attempt(self.module, feeds).shapes
        if self.shapes is None and compute:
            self.module, self.compute = module, True
            self.shapes = attempt(module, feeds, True).shapes

    def find_failure(self, dimensions: Sequence[Dimension], counts: Sequence[int]) -> Attempt | None:
        """Return how far the module comes without so many units of each; None where it gives what it gave before."""
        smaller = copy.deepcopy(self.module)
        kept = [np.arange(one.n_units - count) for one, count in zip(dimensions, counts, strict=True)]
        remove_all(smaller, dimensions, kept, remove)
        tried = attempt(smaller, self.feeds, self.compute)
        return None if tried.shapes == self.shapes else tried


def _find_stuck(trial: _Trial, pairs: Sequence[Pair]) -> dict[str, Attempt]:
    """Return the dimensions without whose units, alone, the model does not run: name -> how far it comes."""
    left, stuck = list(pairs), dict[str, Attempt]()
    while left:
        dimensions = [dimension for dimension, _ in left]
        failures = (trial.find_failure(dimensions, counts) for counts in _count_apart(dimensions))
        failure = next((one for one in failures if one is not None), None)
        if failure is None:
            break
        near = _find_near(left, failure.module)
        rest = [pair for pair in left if pair not in near]
        for suspects in (near, rest):
            tried = {pair[0].name: trial.find_failure([pair[0]], [1]) for pair in suspects}
            found = {name: failure for name, failure in tried.items() if failure is not None}
            if found:
                break
        else:
            break  # only several at once are too many
        stuck |= found
        left = [pair for pair in left if pair[0].name not in found]
    return stuck


def _find_near(pairs: Sequence[Pair], module: str) -> list[Pair]:
    """Return the dimensions that lie in a module, or in the innermost one around it where any does."""
    while True:
        near = [pair for pair in pairs if any(within(name, module) for name, _ in pair[0].members)]
        if near or not module:
            return near
        module = module.rpartition(".")[0]


def _count_apart(dimensions: Sequence[Dimension]) -> Iterator[list[int]]:
    """Yield how many units to take from each, until any two of one size were once asked for different numbers.

    Two that are tied run as long as both lose as many. So each is numbered among those of its size, from 1, and loses
    the digits of its number, in the base of its units.
    """
    seen: dict[int, int] = {}
    left = []
    for dimension in dimensions:
        seen[dimension.n_units] = seen.get(dimension.n_units, 0) + 1
        left.append(seen[dimension.n_units])
    while any(left):
        yield [number % dimension.n_units for number, dimension in zip(left, dimensions, strict=True)]
        left = [number // dimension.n_units for number, dimension in zip(left, dimensions, strict=True)]


def _tie(trial: _Trial, stuck: Mapping[str, tuple[Pair, Attempt]]) -> tuple[list[Pair], list[Pair]]:
    """Return dimensions that run together though not alone, each group as one, and those that run with none.

    `stuck`: by name, with how far the model comes without units of it alone. A group grows by what lies where it fails,
    as long as the run then comes further.
    """
    left, tied, fixed = [pair for pair, _ in stuck.values()], list[Pair](), list[Pair]()
    while left:
        group = [left[0]]
        failure: Attempt | None = stuck[group[0][0].name][1]
        while failure is not None:
            others = [pair for pair in left if pair not in group and pair[0].n_units == group[0][0].n_units]
            for pair in _find_near(others, failure.module):
                further = trial.find_failure([_join([*group, pair])[0]], [1])
                if further is None or further.n_calls > failure.n_calls:
                    group, failure = [*group, pair], further
                    break
            else:
                break
        if failure is None:
            tied.append(_join(group))
        else:
            group = group[:1]
            fixed += group
        left = [pair for pair in left if pair not in group]
    return tied, fixed


def _join(pairs: Sequence[Pair]) -> Pair:
    """Return dimensions of one size as one, unit by unit."""
    (first, facts), dimensions = pairs[0], [dimension for dimension, _ in pairs]
    kind = "width" if any(one.kind == "width" for one in dimensions) else first.kind
    members = {
        axis: np.concatenate([one.members[axis] for one in dimensions if axis in one.members], axis=1)
        for axis in dict.fromkeys(axis for one in dimensions for axis in one.members)
    }
    writers = dict(sum((Counter(one.writers) for _, one in pairs), Counter[str]()))
    readers = dict(sum((Counter(one.readers) for _, one in pairs), Counter[str]()))
    dimension = Dimension(first.name, kind, members, tuple(writers), tuple(readers))
    return dimension, replace(facts, kind=kind, writers=writers, readers=readers)
