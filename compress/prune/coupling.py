"""Find which parts of a model can be removed together, by running it once without values, on any architecture.

As DepGraph (Fang et al. 2023, arXiv:2301.12900) groups parameters, but index by index: every index of every parameter
axis carries a label, operators carry labels from tensor to tensor, and where two meet they are one. Concatenation,
flattening, padding, shared heads and split projections then need no special cases, and part of an axis may be removable
while the rest is not.

A `Dimension` is what can only be removed together, and where each of its units lies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor, nn

from compress.blocks.materialise import plain
from compress.blocks.trace import CONVOLUTIONS, TRANSPOSED, is_hf_conv1d, is_layer
from compress.facts import Prunable
from compress.prune.labels import Book
from compress.prune.rules import walk
from compress.structure.dataflow import DataFlow, record

Axis = tuple[str, int]
"""(a parameter's or buffer's plain name, which of its axes)."""
DimensionKind = Literal["channels", "neurons", "heads", "width"]
Counts = dict[Axis, int]
"""Axis -> how many indices of it belong to one unit."""


@dataclass(frozen=True, eq=False)
class Dimension:
    """Units 0 .. n_units - 1, each removable on its own. Removing unit u removes indices `members[axis][u]` everywhere.

    `members`: axis -> int64 [n_units, k]. `writers`: layers whose outputs the units are; `readers`: layers that read
    them along their input axis, in the order in which they run. `name`: that of the first writer. `kind`: "channels"
    of convolutions, "neurons" of a feed-forward layer, "heads" of attention (of grouped queries: a key-value head with
    its queries), "width" of what several layers write to (a residual stream).
    """

    name: str
    kind: DimensionKind
    members: Mapping[Axis, np.ndarray]
    writers: tuple[str, ...]
    readers: tuple[str, ...]

    @property
    def n_units(self) -> int:
        return len(next(iter(self.members.values())))

    def indices(self, axis: Axis, units: np.ndarray) -> np.ndarray:
        """Return the indices of some units along an axis, int64, rising."""
        return np.sort(self.members[axis][units].reshape(-1))


@dataclass(frozen=True)
class Coupling:
    """What can be removed, in the order in which it is first written (`facts`: the same, for a plan), and what cannot.

    `kept`: layer -> why its outputs, or some of them, stay.
    """

    dimensions: tuple[Dimension, ...]
    facts: tuple[Prunable, ...]
    kept: Mapping[str, str]


def find_coupling(module: nn.Module, feeds: Mapping[str, Tensor], compute: bool = False) -> Coupling:
    """Find the dimensions of `module`, whose units can be removed, by one run on `feeds`.

    `feeds`: by parameter of forward; values do not matter unless `compute`.

    As `record`: a forward that looks at values raises RuntimeError unless `compute`.
    """
    return coupling_of(record(module, feeds, compute))


def coupling_of(flow: DataFlow) -> Coupling:
    """Return the dimensions that a recorded run shows, and why other outputs stay, as `find_coupling` does."""
    book = Book()
    axes = {
        value: tuple(book.fresh(size) for size in flow.shapes[value])
        for value, name in flow.parameters.items()
        if not name.endswith("num_batches_tracked")
    }
    state = walk(flow, book, axes)
    roots = book.roots()
    places = {(flow.parameters[v], i): roots[labels] for v, found in axes.items() for i, labels in enumerate(found)}
    pinned = {int(root): why for why, pins in book.pins.items() for labels in pins for root in np.unique(roots[labels])}
    headed = {int(root) for labels in book.several for root in np.unique(roots[labels])}
    summed = {int(root) for labels in state.sums for root in np.unique(roots[labels])}
    layers = _find_layers(flow)
    units = _group_by_signature(places, pinned)
    found = [_make_dimension(counts, roots, places, layers, summed, headed) for counts, roots in units]
    ordered = sorted((one for one in found if one is not None), key=lambda one: list(layers).index(one[0].name))
    return Coupling(tuple(d for d, _ in ordered), tuple(f for _, f in ordered), _explain_kept(layers, places, pinned))


@dataclass(frozen=True, eq=False)
class _Layer:
    """A layer: its weight's name, and the axes along which its outputs and inputs lie; a table reads nothing."""

    module: nn.Module
    output: Axis
    input: Axis | None


def _find_layers(flow: DataFlow) -> dict[str, _Layer]:
    """Return name -> layer, in the order in which they first run."""
    names = {id(parameter): plain(name) for name, parameter in flow.module.named_parameters()}
    layers: dict[str, _Layer] = {}
    for call in flow.in_order():
        module = flow.modules[call.module]
        if is_layer(module) and call.module not in layers:
            weight, into = names.get(id(module.weight)), in_axis(module)
            if weight is None:  # computed anew at each call, of other parameters: torch.nn.utils.parametrize
                continue
            table = isinstance(module, nn.Embedding)
            output = (weight, 1 if table else 1 - into)
            layers[call.module] = _Layer(module, output, None if table else (weight, into))
    return layers


def in_axis(layer: nn.Module) -> int:
    """Return the axis of a layer's weight along which its inputs lie."""
    return 0 if is_hf_conv1d(layer) or isinstance(layer, TRANSPOSED) else 1


def _group_by_signature(
    places: Mapping[Axis, np.ndarray], pinned: Mapping[int, str]
) -> Iterator[tuple[Counts, list[int]]]:
    """Yield (axis -> how often a unit lies there, the removable units that lie so)."""
    lies: dict[int, dict[Axis, int]] = {}
    for axis, roots in places.items():
        for root, count in zip(*np.unique(roots, return_counts=True), strict=True):
            lies.setdefault(int(root), {})[axis] = int(count)
    signed: dict[tuple[tuple[Axis, int], ...], list[int]] = {}
    for root in sorted(lies):
        if root not in pinned:
            signed.setdefault(tuple(lies[root].items()), []).append(root)
    return ((dict(signature), roots) for signature, roots in signed.items())


def _make_dimension(
    counts: Counts,
    roots: list[int],
    places: Mapping[Axis, np.ndarray],
    layers: Mapping[str, _Layer],
    summed: set[int],
    headed: set[int],
) -> tuple[Dimension, Prunable] | None:
    """Return a dimension and its facts; None where nothing writes it, nothing reads it, or it has only one unit."""
    writers = {name: counts[layer.output] for name, layer in layers.items() if layer.output in counts}
    readers = {name: counts[layer.input] for name, layer in layers.items() if layer.input in counts}
    if len(roots) < 2 or not writers or not readers:
        return None
    name = next(iter(writers))
    first = layers[name]
    kind: DimensionKind = "heads" if headed & set(roots) else "neurons"
    if isinstance(first.module, (*CONVOLUTIONS, *TRANSPOSED)):
        kind = "channels"
    if summed & set(roots):
        kind = "width"
    members = {axis: _locate_members(places[axis], roots, count) for axis, count in counts.items()}
    dimension = Dimension(name, kind, members, tuple(writers), tuple(readers))
    return dimension, Prunable(name, kind, len(roots), writers, readers)


def _locate_members(axis_roots: np.ndarray, roots: list[int], count: int) -> np.ndarray:
    """Return int64 [units, count]: where each unit lies along an axis whose indices have these roots."""
    order = np.argsort(axis_roots, kind="stable")
    starts = np.searchsorted(axis_roots[order], roots)
    return order[starts[:, None] + np.arange(count)]


def _explain_kept(
    layers: Mapping[str, _Layer], places: Mapping[Axis, np.ndarray], pinned: Mapping[int, str]
) -> dict[str, str]:
    """Return layer -> why all or some of its outputs stay."""
    reasons = {}
    for name, layer in layers.items():
        roots = places[layer.output]
        why = [pinned[int(root)] for root in roots if int(root) in pinned]
        if why:
            reasons[name] = f"{why[0]}" if len(why) == len(roots) else f"{len(why)} of {len(roots)} outputs: {why[0]}"
    return reasons
