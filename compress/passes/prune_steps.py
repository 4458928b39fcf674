"""The steps of `prune_channels`: find what is coupled, learn what it is worth, choose widths, cut, fit the rest."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from compress.blocks.materialise import plain
from compress.blocks.sizes import Shapes, shapes_of, transformers_config
from compress.blocks.trace import is_layer, layer_type
from compress.context import PassContext, PassResult
from compress.errors import PassError
from compress.facts import LayerDecision, Note
from compress.passes.prune_batches import pruning_batches
from compress.passes.prune_widths import Choosing, choose
from compress.prune.configuration import fit_config
from compress.prune.coupling import Coupling, find_coupling
from compress.prune.curves import find_curves
from compress.prune.dimension import Dimension
from compress.prune.importance import random_projection_loss, sampled_label_loss
from compress.prune.norms import follow_data
from compress.prune.shrink import Record, renumbered, shrink
from compress.prune.surgery import differs_from_masked, remove
from runtime.manifest import CLASSIFICATION, GENERATION

if TYPE_CHECKING:
    from compress.passes.prune_channels import PruneChannels

Batch = Mapping[str, Tensor]
EXACT = 1e-3
"""Relative difference of outputs below which removing units is not reading them."""


def prune_channels(knobs: PruneChannels, loaded: Any, context: PassContext) -> PassResult:
    """`loaded.module` gets smaller in place. PassError names the dimension, or the best that is within reach."""
    module: nn.Module = loaded.module
    built = shapes_of(module)
    batches = [one.feeds for one in pruning_batches(knobs.kind, loaded, context)]
    sample = {name: tensor[:1] for name, tensor in batches[0].items()}
    coupling = find_coupling(module, sample, compute=True)
    types = {plain(name): layer_type(layer) for name, layer in module.named_modules() if is_layer(layer)}
    pairs = zip(coupling.dimensions, coupling.facts, strict=True)
    dimensions = [one for one, facts in pairs if knobs.takes(facts, types)]
    _check(knobs, module, dimensions, sample)
    classes = loaded.task in (*CLASSIFICATION, *GENERATION)
    loss = sampled_label_loss(context.seed) if classes else random_projection_loss(context.seed)
    curves = find_curves(
        module, dimensions, batches, knobs.importance, loss=loss, seed=context.seed, progress=context.progress
    )
    choice = choose(knobs, Choosing(module, dimensions, curves, sample, context))
    record = shrink(
        module, dimensions, curves, choice.widths, batches, remove, knobs.compensate, context.seed, context.progress
    )
    follow_data(module, batches)
    loaded = replace(loaded, module=module)
    notes = [*choice.notes, *_notes(knobs, record, built, module), *_config_notes(module, built)]
    return PassResult(loaded, _decisions(module, types, coupling, record), tuple(notes), _measured(record))


def _check(knobs: PruneChannels, module: nn.Module, dimensions: Sequence[Dimension], sample: Batch) -> None:
    """PassError where the model's own code holds a size, so that it would not run as it should once smaller."""
    if not dimensions:
        raise PassError(f"{knobs.kind}: nothing is left to prune")
    smaller, left = copy.deepcopy(module), [*dimensions]
    for number in range(len(left)):
        one = left[number]
        last = np.array([one.n_units - 1])
        gone = {axis: one.indices(axis, last) for axis in one.members}
        difference = differs_from_masked(smaller, one, last, sample)
        left[number + 1 :] = [renumbered(other, gone) for other in left[number + 1 :]]
        if math.isinf(difference) or (one.kind == "heads" and difference > EXACT):
            raise PassError(
                f"{knobs.kind}: {one.name}: the model's code fixes how many {one.kind} there are, so that it does not "
                "run with fewer; take that size from the weight's shape there, or ignore this layer"
            )


def _decisions(
    module: nn.Module, types: Mapping[str, str], coupling: Coupling, record: Record
) -> tuple[LayerDecision, ...]:
    said: dict[str, str] = {}
    unfitted = {name: f"; not fitted: {why}" for name, why in record.left.items()}
    writers = {one.name: one.writers for one in coupling.dimensions}
    for one in record.dimensions:
        if len(one.kept) < one.n_units:
            text = f"{len(one.kept)} of {one.n_units} {one.kind} stay"
            said |= dict.fromkeys(writers[one.name], text)
    return tuple(
        LayerDecision(name, kind, "pruned", said[name] + unfitted.get(name, ""))
        if name in said
        else LayerDecision(name, kind, "kept", coupling.kept.get(name, "as wide as it was") + unfitted.get(name, ""))
        for name, kind in types.items()
    )


def _measured(record: Record) -> dict[str, dict[str, float]]:
    """By layer: what was fitted, and for a dimension's first layer how wide it is."""
    found = {one.layer: {"fit_before": one.before, "fit_after": one.after} for one in record.layers if one.ridge}
    for one in record.dimensions:
        found.setdefault(one.name, {}).update(width_before=float(one.n_units), width=float(len(one.kept)))
    return found


def _notes(knobs: PruneChannels, record: Record, built: Shapes, module: nn.Module) -> list[Note]:
    n_before = sum(math.prod(shape) for shape in built.tensors.values())
    n_after = sum(math.prod(shape) for shape in shapes_of(module).tensors.values())
    text = f"{knobs.kind}: {n_after / n_before:.1%} of the weights stay; outputs differ by {record.error_without:.3f}"
    if knobs.compensate:
        text += f" without compensation, by {record.error_with:.3f} with it"
    return [Note("info", f"{text} (squared error over the outputs' variance, on calibration data)")]


def _config_notes(module: nn.Module, built: Shapes) -> list[Note]:
    """A transformers model's configuration follows; a note where it cannot."""
    if transformers_config(module) is None:
        return []
    model = getattr(module, "wrapped", module)
    missed = fit_config(model, built)
    if not missed:
        return []
    text = (
        f"no config.json describes the pruned model (of {type(model).__name__}, {missed[0]} among others): an ONNX "
        "file is not affected; a checkpoint gets a shapes.json, by which compress loads it and transformers cannot"
    )
    return [Note("warning", text)]
