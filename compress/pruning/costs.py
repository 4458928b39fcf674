"""What a model costs as a function of the widths of its dimensions: parameters, multiply-accumulates, milliseconds.

A layer's cost depends on its input and its output width together, and either may belong to a dimension that is pruned;
so a cost is a sum of terms, each of which looks up the sizes of a few axes. Nothing is taken to be independent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from torch import Tensor, nn

from compress.blocks.materialise import plain
from compress.pruning.dimensions import Dimension
from compress.pruning.layers import weight_names
from compress.structure.dataflow import count_work, record


@dataclass(frozen=True)
class AxisSize:
    """An axis of `full` indices; of each unit that dimension d loses, `per_unit[d]` of them go."""

    full: int
    per_unit: Mapping[int, int]

    def at(self, lost: Sequence[int]) -> int:
        """Return the number of indices left when each dimension has lost so many units."""
        return self.full - sum(k * lost[d] for d, k in self.per_unit.items())


@dataclass(frozen=True)
class Term:
    """One part of the cost: `price` of the sizes of some axes."""

    sizes: tuple[AxisSize, ...]
    price: Callable[[tuple[int, ...]], float]

    def at(self, lost: Sequence[int]) -> float:
        return self.price(tuple(size.at(lost) for size in self.sizes))

    @cached_property
    def dimensions(self) -> frozenset[int]:
        """Return the dimensions that the term depends on."""
        return frozenset(d for size in self.sizes for d in size.per_unit)


@dataclass(frozen=True, eq=False)
class Cost:
    """The sum of the terms, in `unit`; `n_units` of each dimension."""

    unit: str
    n_units: tuple[int, ...]
    terms: tuple[Term, ...]
    _touching: dict[int, list[Term]] = field(default_factory=dict)

    def at(self, widths: Sequence[int]) -> float:
        """Return the cost of the model whose dimensions have these widths."""
        lost = self._count_lost(widths)
        return sum(term.at(lost) for term in self.terms)

    def change(self, widths: Sequence[int], dimension: int, width: int) -> float:
        """Return what the cost rises by when one dimension's width becomes `width`."""
        before = self._count_lost(widths)
        after = [*before]
        after[dimension] = self.n_units[dimension] - width
        return sum(term.at(after) - term.at(before) for term in self.touching(dimension))

    def touching(self, dimension: int) -> list[Term]:
        """Return the terms that depend on a dimension."""
        if dimension not in self._touching:
            self._touching[dimension] = [term for term in self.terms if dimension in term.dimensions]
        return self._touching[dimension]

    def _count_lost(self, widths: Sequence[int]) -> list[int]:
        return [n - width for n, width in zip(self.n_units, widths, strict=True)]


def sizes_of(parameter: str, shape: Sequence[int], dimensions: Sequence[Dimension]) -> tuple[AxisSize, ...]:
    """Return the size of each axis of a parameter, which is given by its plain name."""
    sizes = []
    for axis, full in enumerate(shape):
        members = {d: dimension.members.get((parameter, axis)) for d, dimension in enumerate(dimensions)}
        sizes.append(AxisSize(full, {d: int(m.shape[1]) for d, m in members.items() if m is not None}))
    return tuple(sizes)


def parameters_cost(module: nn.Module, dimensions: Sequence[Dimension]) -> Cost:
    """Return the cost that counts the numbers in all parameters, shared ones once."""
    terms = [_make_term(name, tensor.shape, dimensions, 1.0) for name, tensor in module.named_parameters()]
    return Cost("parameters", tuple(dimension.n_units for dimension in dimensions), tuple(terms))


def macs_cost(module: nn.Module, dimensions: Sequence[Dimension], sample: Mapping[str, Tensor]) -> Cost:
    """Return the cost in multiply-accumulates of all layers for one sample ([1, ...] by parameter of forward).

    Products of two activations (attention scores) are not counted.
    """
    flow, names = record(module, sample, compute=True), weight_names(module)
    work = {name: macs for name, (macs, _) in count_work(flow).items() if macs}
    terms = []
    for name, layer in flow.modules.items():  # in the order in which the module has them: sums are the same bits
        if name in work:
            weight: Tensor = layer.weight  # type: ignore[assignment]
            terms.append(_make_term(names[name], weight.shape, dimensions, work[name] / weight.numel()))
    return Cost("MACs", tuple(dimension.n_units for dimension in dimensions), tuple(terms))


def _make_term(name: str, shape: Sequence[int], dimensions: Sequence[Dimension], factor: float) -> Term:
    """Return the term that counts a parameter's numbers, times `factor`."""
    return Term(sizes_of(plain(name), shape, dimensions), lambda sizes: factor * float(np.prod(sizes)))
