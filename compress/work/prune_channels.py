"""The steps of `prune_channels`: find what is coupled, learn what it is worth, choose widths, cut, fit the rest."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from compress.blocks.materialise import plain
from compress.blocks.sizes import Shapes, shapes_of, transformers_config
from compress.blocks.trace import is_layer, layer_type
from compress.context import PassContext, PassResult
from compress.errors import PassError
from compress.facts import LayerDecision, Note
from compress.passes.prune_channels import PruneChannels
from compress.prune.configuration import fit_config
from compress.prune.coupling import Coupling, Dimension, find_coupling
from compress.prune.curves import find_curves
from compress.prune.importance import draw_label_loss, random_projection_loss
from compress.prune.norms import follow_data
from compress.prune.shrink import Record, renumber_dimension, shrink
from compress.prune.surgery import differs_from_masked, remove
from compress.work.prune_batches import pruning_batches
from compress.work.prune_widths import Choosing, choose
from runtime.bundle.manifest import CLASSIFICATION, GENERATION

Batch = Mapping[str, Tensor]
EXACT = 1e-3
"""Relative difference of outputs below which removing units is not reading them."""


def apply_prune_channels(knobs: PruneChannels, loaded: Any, context: PassContext) -> PassResult:
    """Make `loaded.module` smaller in place. PassError names the dimension, or the best that is within reach."""
    module: nn.Module = loaded.module
    built = shapes_of(module)
    batches = [batch.feeds for batch in pruning_batches(knobs.kind, loaded, context)]
    sample = {name: tensor[:1] for name, tensor in batches[0].items()}
    coupling = find_coupling(module, sample, compute=True)
    types = {plain(name): layer_type(layer) for name, layer in module.named_modules() if is_layer(layer)}
    pairs = zip(coupling.dimensions, coupling.facts, strict=True)
    dimensions = [dimension for dimension, facts in pairs if knobs.takes(facts, types)]
    _check(knobs, module, dimensions, sample)
    classes = loaded.task in (*CLASSIFICATION, *GENERATION)
    loss = draw_label_loss(context.seed) if classes else random_projection_loss(context.seed)
    curves = find_curves(
        module, dimensions, batches, knobs.importance, loss=loss, seed=context.seed, progress=context.progress
    )
    choice = choose(knobs, Choosing(module, dimensions, curves, sample, context))
    record = shrink(
        module, dimensions, curves, choice.widths, batches, remove, knobs.compensate, context.seed, context.progress
    )
    follow_data(module, batches)
    loaded = replace(loaded, module=module)
    notes = [*choice.notes, *_make_notes(knobs, record, built, module), *_follow_config(module, built)]
    return PassResult(
        loaded, _make_decisions(module, types, coupling, record), tuple(notes), _collect_measurements(record)
    )


def _check(knobs: PruneChannels, module: nn.Module, dimensions: Sequence[Dimension], sample: Batch) -> None:
    """Raise PassError where the model's own code holds a size, so that it would not run as it should once smaller."""
    if not dimensions:
        raise PassError(f"{knobs.kind}: nothing is left to prune")
    smaller, left = copy.deepcopy(module), [*dimensions]
    for number in range(len(left)):
        dimension = left[number]
        last = np.array([dimension.n_units - 1])
        gone = {axis: dimension.indices(axis, last) for axis in dimension.members}
        difference = differs_from_masked(smaller, dimension, last, sample)
        left[number + 1 :] = [renumber_dimension(other, gone) for other in left[number + 1 :]]
        if math.isinf(difference) or (dimension.kind == "heads" and difference > EXACT):
            raise PassError(
                f"{knobs.kind}: {dimension.name}: the model's code fixes how many {dimension.kind} there are, so "
                "that it does not run with fewer; take that size from the weight's shape there, or ignore this layer"
            )


def _make_decisions(
    module: nn.Module, types: Mapping[str, str], coupling: Coupling, record: Record
) -> tuple[LayerDecision, ...]:
    reasons: dict[str, str] = {}
    unfitted = {name: f"; not fitted: {why}" for name, why in record.left.items()}
    writers = {dimension.name: dimension.writers for dimension in coupling.dimensions}
    for dimension in record.dimensions:
        if len(dimension.kept) < dimension.n_units:
            text = f"{len(dimension.kept)} of {dimension.n_units} {dimension.kind} stay"
            reasons |= dict.fromkeys(writers[dimension.name], text)
    return tuple(
        LayerDecision(name, kind, "pruned", reasons[name] + unfitted.get(name, ""))
        if name in reasons
        else LayerDecision(name, kind, "kept", coupling.kept.get(name, "as wide as it was") + unfitted.get(name, ""))
        for name, kind in types.items()
    )


def _collect_measurements(record: Record) -> dict[str, dict[str, float]]:
    """Return by layer what was fitted, and for a dimension's first layer how wide it is."""
    measurements = {
        layer.layer: {"fit_before": layer.before, "fit_after": layer.after} for layer in record.layers if layer.ridge
    }
    for dimension in record.dimensions:
        measurements.setdefault(dimension.name, {}).update(
            width_before=float(dimension.n_units), width=float(len(dimension.kept))
        )
    return measurements


def _make_notes(knobs: PruneChannels, record: Record, built: Shapes, module: nn.Module) -> list[Note]:
    n_before = sum(math.prod(shape) for shape in built.tensors.values())
    n_after = sum(math.prod(shape) for shape in shapes_of(module).tensors.values())
    text = f"{knobs.kind}: {n_after / n_before:.1%} of the weights stay; outputs differ by {record.error_without:.3f}"
    if knobs.compensate:
        text += f" without compensation, by {record.error_with:.3f} with it"
    return [Note("info", f"{text} (squared error over the outputs' variance, on calibration data)")]


def _follow_config(module: nn.Module, built: Shapes) -> list[Note]:
    """Make a transformers model's configuration follow; return a note where it cannot."""
    if transformers_config(module) is None:
        return []
    model = getattr(module, "wrapped", module)
    why = fit_config(model, built)
    if not why:
        return []
    text = (
        f"no config.json describes the pruned {type(model).__name__} ({why}): an ONNX file is not affected; a "
        "checkpoint gets a shapes.json, by which compress loads it and transformers cannot"
    )
    return [Note("warning", text)]
