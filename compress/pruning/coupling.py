"""Find which parts of a model can be removed together, by running it once without values, on any architecture.

As DepGraph (Fang et al. 2023, arXiv:2301.12900) groups parameters, but index by index: every index of every parameter
axis carries a label, operators carry labels from tensor to tensor, and where two meet they are one. Concatenation,
flattening, padding, shared heads and split projections then need no special cases, and part of an axis may be removable
while the rest is not.

What labels do not show, sizes that the model's code reads from one tensor and uses for another, or fixes, is found by
trying (`compress.pruning.trials`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from compress.blocks.layers import CONVOLUTIONS, TRANSPOSED, has_own_forward, in_axis, is_layer
from compress.blocks.materialise import plain
from compress.facts import Prunable
from compress.pruning.dimensions import Axis, Coupling, Dimension, DimensionKind
from compress.pruning.labels import Book
from compress.pruning.layers import COMPUTED
from compress.pruning.rules import walk
from compress.pruning.trials import settle_sizes
from compress.structure.dataflow import DataFlow, record

Counts = dict[Axis, int]
"""Axis -> how many indices of it belong to one unit."""
OWN_FORWARD = "the class of a layer that has it has a forward of its own"


def find_coupling(module: nn.Module, feeds: Mapping[str, Tensor], compute: bool = False) -> Coupling:
    """Find the dimensions of `module`, whose units can be removed, by a run on `feeds` and a few of smaller copies.

    `feeds`: by parameter of forward; values do not matter unless `compute`.

    As `record`: a forward that looks at values raises RuntimeError unless `compute`.
    """
    return settle_sizes(coupling_of(record(module, feeds, compute)), module, feeds, compute)


def coupling_of(flow: DataFlow) -> Coupling:
    """Return the dimensions that a recorded run shows, and why other outputs stay, as `find_coupling` does."""
    book = Book()
    axes = {
        value: tuple(book.fresh(size) for size in flow.shapes[value])
        for value, name in flow.parameters.items()
        if not name.endswith("num_batches_tracked")
    }
    for value, name in flow.parameters.items():
        owner = flow.modules[name.rpartition(".")[0]]
        if value in axes and is_layer(owner) and has_own_forward(owner):
            for labels in axes[value]:
                book.pin(labels, OWN_FORWARD)
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
    parts = {name: part for name, part in flow.modules.items() if is_layer(part)}
    kept = {name: COMPUTED for name, part in parts.items() if _is_computed(part)}
    kept |= {name: OWN_FORWARD for name, part in parts.items() if has_own_forward(part)}
    kept |= _explain_kept(layers, places, pinned)
    return Coupling(tuple(d for d, _ in ordered), tuple(f for _, f in ordered), kept)


def _is_computed(layer: nn.Module) -> bool:
    """Return whether a layer's weight is computed at each call, of other parameters: torch.nn.utils.parametrize."""
    return "weight" not in layer._parameters


@dataclass(frozen=True, eq=False)
class _CoupledLayer:
    """A layer: its weight's name, and the axes along which its outputs and inputs lie; a table reads nothing."""

    module: nn.Module
    output: Axis
    input: Axis | None

    @property
    def spread(self) -> int:
        """Return how many outputs one index of the output axis is, and how many indices of the input axis one input.

        The weight of a transposed convolution has the outputs of one group and the inputs of all; facts count
        otherwise, as for other convolutions.
        """
        return self.module.groups if isinstance(self.module, TRANSPOSED) else 1


def _find_layers(flow: DataFlow) -> dict[str, _CoupledLayer]:
    """Return name -> layer, in the order in which they first run."""
    names = {id(parameter): plain(name) for name, parameter in flow.module.named_parameters()}
    layers: dict[str, _CoupledLayer] = {}
    for call in flow.in_order():
        module = flow.modules[call.module]
        if is_layer(module) and call.module not in layers:
            if _is_computed(module) or has_own_forward(module):
                continue
            weight, into = names[id(module.weight)], in_axis(module)
            table = isinstance(module, nn.Embedding)
            output = (weight, 1 if table else 1 - into)
            layers[call.module] = _CoupledLayer(module, output, None if table else (weight, into))
    return layers


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
    layers: Mapping[str, _CoupledLayer],
    summed: set[int],
    headed: set[int],
) -> tuple[Dimension, Prunable] | None:
    """Return a dimension and its facts; None where nothing writes it, nothing reads it, or it has only one unit."""
    writers = {name: counts[layer.output] * layer.spread for name, layer in layers.items() if layer.output in counts}
    readers = {name: counts[layer.input] // layer.spread for name, layer in layers.items() if layer.input in counts}
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
    layers: Mapping[str, _CoupledLayer], places: Mapping[Axis, np.ndarray], pinned: Mapping[int, str]
) -> dict[str, str]:
    """Return layer -> why all or some of its outputs stay."""
    reasons = {}
    for name, layer in layers.items():
        roots = places[layer.output]
        why = [pinned[int(root)] for root in roots if int(root) in pinned]
        if why:
            reasons[name] = f"{why[0]}" if len(why) == len(roots) else f"{len(why)} of {len(roots)} outputs: {why[0]}"
    return reasons
