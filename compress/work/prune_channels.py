"""Work `prune_channels`: find what is coupled, learn what it is worth, choose widths, cut, fit the rest.

Widths follow from a ratio, or are chosen so that parameters, work or measured time keep to a budget.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor, nn

from compress.blocks.layers import is_layer, layer_type
from compress.blocks.materialise import plain
from compress.blocks.sizes import Shapes, shapes_of, transformers_config
from compress.context import PassResult
from compress.errors import PassError
from compress.facts import LayerDecision, ModelFacts, Note
from compress.models.load import TorchModel
from compress.passes.prune_channels import TRIES, PruneChannels, count_kept_units
from compress.pruning.budget import Limit, Options, choose_widths, list_widths
from compress.pruning.compensate import follow_data
from compress.pruning.configuration import fit_config
from compress.pruning.costs import AxisSize, Cost, macs_cost, parameters_cost
from compress.pruning.coupling import find_coupling
from compress.pruning.curves import find_curves
from compress.pruning.dimensions import Coupling, Dimension
from compress.pruning.importance import draw_label_loss, random_projection_loss
from compress.pruning.latency import find_wanted_layers, keep_form, latency_cost, measure, measure_scale
from compress.pruning.obs import Elimination
from compress.pruning.shrink import ShrinkResult, remove_all, renumber_dimension, shrink
from compress.pruning.surgery import differs_from_masked, remove
from compress.tasks import find_torch_task
from compress.work.contexts import ModelContext
from compress.work.prune_batches import pruning_batches

Batch = Mapping[str, Tensor]
EXACT = 1e-3
"""Relative difference of outputs below which removing units is not reading them."""
ONE_OF_CLASSES = ("classes", "token classes", "pixel classes", "next tokens", "target tokens")
"""What is learned where outputs are logits of which one wins; of a lone number a softmax is 1, whatever the number."""
NEAR = 0.02
"""Of the speed-up that is asked for: what a measured one may be above it."""


def foresee_prune_channels(
    config: PruneChannels, loaded: TorchModel, facts: ModelFacts, context: ModelContext
) -> TorchModel:
    """Cut the module to the widths that the plan expects, in place: which units stay matters nothing to speed."""
    units = config.plan_units(facts)
    sample = pruning_batches(config.kind, loaded, context)[0].first
    dimensions = [dimension for dimension in find_coupling(loaded.module, sample).dimensions if dimension.name in units]
    remove_all(loaded.module, dimensions, [np.arange(units[dimension.name]) for dimension in dimensions], remove)
    return loaded


def apply_prune_channels(config: PruneChannels, loaded: TorchModel, context: ModelContext) -> PassResult[TorchModel]:
    """Make `loaded.module` smaller in place. PassError names the dimension, or the best that is within reach."""
    module = loaded.module
    built = shapes_of(module)
    batches = [batch.feeds for batch in pruning_batches(config.kind, loaded, context)]
    sample = {name: tensor[:1] for name, tensor in batches[0].items()}
    coupling = find_coupling(module, sample, compute=True)
    types = {plain(name): layer_type(layer) for name, layer in module.named_modules() if is_layer(layer)}
    pairs = zip(coupling.dimensions, coupling.facts, strict=True)
    dimensions = [dimension for dimension, facts in pairs if config.takes(facts, types)]
    _check(config, module, dimensions, sample)
    drawn = find_torch_task(loaded.task).loss in ONE_OF_CLASSES
    loss = draw_label_loss(context.seed) if drawn else random_projection_loss(context.seed)
    curves = find_curves(
        module, dimensions, batches, config.importance, loss=loss, seed=context.seed, progress=context.progress
    )
    choice = _decide_widths(config, Choosing(module, dimensions, curves, sample, context))
    record = shrink(
        module, dimensions, curves, choice.widths, batches, remove, config.compensate, context.seed, context.progress
    )
    follow_data(module, batches)
    loaded = replace(loaded, module=module)
    notes = [*choice.notes, *_make_notes(config, record, built, module), *_follow_config(module, built)]
    decisions = _make_decisions(module, types, coupling, record)
    return PassResult(
        loaded, decisions, tuple(notes), _collect_measurements(record), settled=_settle_widths(config, record)
    )


def _check(config: PruneChannels, module: nn.Module, dimensions: Sequence[Dimension], sample: Batch) -> None:
    """Raise PassError where the model's own code holds a size, so that it would not run as it should once smaller."""
    if not dimensions:
        raise PassError(f"{config.kind}: nothing is left to prune")
    smaller, left = copy.deepcopy(module), [*dimensions]
    for number in range(len(left)):
        dimension = left[number]
        last = np.array([dimension.n_units - 1])
        removed = {axis: dimension.indices(axis, last) for axis in dimension.members}
        difference = differs_from_masked(smaller, dimension, last, sample)
        left[number + 1 :] = [renumber_dimension(other, removed) for other in left[number + 1 :]]
        if math.isinf(difference) or (dimension.kind == "heads" and difference > EXACT):
            raise PassError(
                f"{config.kind}: {dimension.name}: the model's code fixes how many {dimension.kind} there are, so "
                "that it does not run with fewer; take that size from the weight's shape there, or ignore this layer"
            )


def _make_decisions(
    module: nn.Module, types: Mapping[str, str], coupling: Coupling, record: ShrinkResult
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


def _settle_widths(config: PruneChannels, record: ShrinkResult) -> dict[str, Any]:
    """Return the widths that measured times chose, which make the same model anywhere; {} where none were measured."""
    if config.speedup is None:
        return {}
    cut = {d.name: len(d.kept) for d in record.dimensions if len(d.kept) < d.n_units}
    return {"widths": cut, "timed_in": "float32", "or_nearest": False} | dict.fromkeys(("speedup", "max_params"))


def _collect_measurements(record: ShrinkResult) -> dict[str, dict[str, float]]:
    """Return by layer what was fitted, and for a dimension's first layer how wide it is."""
    measurements = {
        layer.layer: {"fit_before": layer.before, "fit_after": layer.after} for layer in record.layers if layer.ridge
    }
    for dimension in record.dimensions:
        measurements.setdefault(dimension.name, {}).update(
            width_before=float(dimension.n_units), width=float(len(dimension.kept))
        )
    return measurements


def _make_notes(config: PruneChannels, record: ShrinkResult, built: Shapes, module: nn.Module) -> list[Note]:
    n_before = sum(math.prod(shape) for shape in built.tensors.values())
    n_after = sum(math.prod(shape) for shape in shapes_of(module).tensors.values())
    text = f"{config.kind}: {n_after / n_before:.1%} of the weights stay; outputs differ by {record.error_without:.3f}"
    if config.compensate:
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


@dataclass(frozen=True)
class Choosing:
    """What a choice rests on. `sample`: one sample, by parameter of forward."""

    module: nn.Module
    dimensions: Sequence[Dimension]
    curves: Sequence[Elimination]
    sample: Mapping[str, Tensor]
    context: ModelContext


@dataclass(frozen=True)
class WidthChoice:
    """A width for each dimension, and what the report says of it."""

    widths: tuple[int, ...]
    notes: tuple[Note, ...] = ()


def _decide_widths(config: PruneChannels, given: Choosing) -> WidthChoice:
    """Choose a width for each dimension. PassError for a budget out of reach, with the best that is within it."""
    if config.ratio is not None:
        ratio = config.ratio
        return WidthChoice(
            tuple(
                count_kept_units(dimension.n_units, dimension.kind, ratio, config.round_to)
                for dimension in given.dimensions
            )
        )
    if config.widths is not None:
        return WidthChoice(
            tuple(config.widths.get(dimension.name, dimension.n_units) for dimension in given.dimensions)
        )
    groups = _group_dimensions(given)
    options = _make_options(config, given, groups)
    if config.speedup is not None:
        return _choose_fast_enough(config, given, groups, options)
    full = [dimension.n_units for dimension in given.dimensions]
    limits = _limit_params(config, given, groups)
    if config.max_flops is not None:
        cost = macs_cost(given.module, given.dimensions, given.sample)
        limits.append(Limit(_merge_cost(cost, groups), config.max_flops * cost.at(full)))
    widths = choose_widths(options, limits, config.or_nearest)
    return WidthChoice(_spread(widths, groups), _tell_excess(config, widths, limits))


def _tell_excess(config: PruneChannels, widths: Sequence[int], limits: Sequence[Limit]) -> tuple[Note, ...]:
    return tuple(
        Note(
            "warning",
            f"{config.kind}: {limit.most:.6g} {limit.cost.unit} are out of reach: the nearest is "
            f"{limit.cost.at(widths):.6g}",
        )
        for limit in limits
        if not limit.holds(widths)
    )


def _limit_params(config: PruneChannels, given: Choosing, groups: Groups) -> list[Limit]:
    if config.max_params is None:
        return []
    cost = parameters_cost(given.module, given.dimensions)
    whole = cost.at([dimension.n_units for dimension in given.dimensions])
    return [Limit(_merge_cost(cost, groups), config.max_params * whole)]


Groups = list[list[int]]
"""Dimensions, by number, that get one width."""


def _group_dimensions(given: Choosing) -> Groups:
    """Group dimensions: each for itself; of a transformers model, whose config.json is to say them, those alike."""
    if transformers_config(given.module) is None:
        return [[d] for d in range(len(given.dimensions))]
    groups: dict[tuple[str, int], list[int]] = {}
    for d, dimension in enumerate(given.dimensions):
        groups.setdefault((dimension.kind, dimension.n_units), []).append(d)
    return list(groups.values())


def _spread(widths: Sequence[int], groups: Groups) -> tuple[int, ...]:
    by_dimension = {d: width for width, group in zip(widths, groups, strict=True) for d in group}
    return tuple(by_dimension[d] for d in sorted(by_dimension))


def _make_options(config: PruneChannels, given: Choosing, groups: Groups) -> list[Options]:
    options = []
    for group in groups:
        first = given.dimensions[group[0]]
        step = 1 if first.kind == "heads" else min(config.round_to, first.n_units)
        widths = list_widths(first.name, first.n_units, step, min(step, first.n_units))
        damage = sum(np.array([given.curves[d].error_at(int(width), first.n_units) for width in widths]) for d in group)
        options.append(Options(widths, np.asarray(damage, np.float64)))
    return options


def _merge_cost(cost: Cost, groups: Groups) -> Cost:
    """Return the same cost as a function of one width for each group."""
    group_of = {d: g for g, group in enumerate(groups) for d in group}

    def size(before: AxisSize) -> AxisSize:
        per_unit: dict[int, int] = {}
        for d, k in before.per_unit.items():
            per_unit[group_of[d]] = per_unit.get(group_of[d], 0) + k
        return AxisSize(before.full, per_unit)

    terms = tuple(replace(term, sizes=tuple(map(size, term.sizes))) for term in cost.terms)
    return Cost(cost.unit, tuple(cost.n_units[group[0]] for group in groups), terms)


def _choose_fast_enough(config: PruneChannels, given: Choosing, groups: Groups, options: list[Options]) -> WidthChoice:
    """Choose widths whose model, exported and timed beside the whole one, is as fast as is asked for.

    What a measurement teaches of the table's errors goes into the next choice.
    """
    timing, wanted_speedup = given.context.timing, config.speedup
    assert wanted_speedup is not None
    if timing is None:
        raise PassError(f"{config.kind}: speedup needs a target that runs here; use max_flops or max_params")
    full = [dimension.n_units for dimension in given.dimensions]
    layers = find_wanted_layers(given.module, given.dimensions, _spread_widths(options, groups), given.sample)
    form = timing.in_int8 if config.timed_in == "int8" else keep_form
    given.context.log(f"measuring {len(layers)} layers at several widths, in {config.timed_in}")
    tables = measure(layers, timing.clock, form, config.timed_in)
    whole = form(timing.export(given.module))
    (whole_ms,) = timing.time([whole])
    others = _limit_params(config, given, groups)
    scale, goal = 1.0, wanted_speedup
    tried: list[tuple[float, float, tuple[int, ...]]] = []  # (times as fast, foretold, a width for each group)
    for _ in range(TRIES):
        cost = latency_cost(whole_ms, layers, tables, full, scale)
        limit = Limit(_merge_cost(cost, groups), whole_ms / goal)
        chosen = choose_widths(options, [limit, *others], config.or_nearest)
        if any(chosen == before for _, _, before in tried):
            break
        widths = _spread(chosen, groups)
        before_ms, after_ms = timing.time([whole, form(timing.export(_cut_copy(given, widths)))])
        reached, predicted = before_ms / after_ms, whole_ms / cost.at(widths)
        given.context.log(f"{config.kind}: {reached:.2f}x measured, {predicted:.2f}x predicted")
        tried.append((reached, predicted, chosen))
        if wanted_speedup <= reached <= wanted_speedup * (1 + NEAR):
            break
        plain = latency_cost(whole_ms, layers, tables, full).at(widths)
        scale = measure_scale(whole_ms, plain, whole_ms / reached)
        goal = wanted_speedup * (1 + NEAR / 2)
    enough = [each for each in tried if each[0] >= wanted_speedup]
    if not enough and not config.or_nearest:
        raise PassError(
            f"{config.kind}: speedup {wanted_speedup:g} was not reached: the last of {len(tried)} choices of widths is "
            f"{tried[-1][0]:.2f} times as fast; ask for less, or allow more dimensions"
        )
    reached, predicted, chosen = min(enough) if enough else max(tried)
    where = f"{given.context.target.name} in {config.timed_in}"
    text = f"{config.kind}: {reached:.2f} times as fast as before, measured on {where}"
    if not enough:
        text += f", the nearest to {wanted_speedup:g}"
    note = Note("info" if enough else "warning", f"{text}; the layers' times foretold {predicted:.2f}")
    return WidthChoice(_spread(chosen, groups), (note, *_tell_excess(config, chosen, others)))


def _spread_widths(options: Sequence[Options], groups: Groups) -> list[Sequence[int]]:
    by_dimension = {d: option.widths.tolist() for option, group in zip(options, groups, strict=True) for d in group}
    return [by_dimension[d] for d in sorted(by_dimension)]


def _cut_copy(given: Choosing, widths: Sequence[int]) -> nn.Module:
    """Return a copy with so many units left; its values do not matter."""
    smaller = copy.deepcopy(given.module)
    pairs = zip(given.curves, given.dimensions, widths, strict=True)
    remove_all(
        smaller, given.dimensions, [c.choose_kept(width, dimension.n_units) for c, dimension, width in pairs], remove
    )
    return smaller
