"""How wide each dimension is to be: by a ratio, or so that parameters, work or measured time keep to a budget."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor, nn

from compress.blocks.sizes import transformers_config
from compress.context import PassContext
from compress.errors import PassError
from compress.facts import Note
from compress.passes.prune_channels import PruneChannels
from compress.passes.widths import count_kept_units
from compress.prune.budget import Options, choose_widths, list_widths
from compress.prune.costs import Cost, Size, macs_cost, parameters_cost
from compress.prune.coupling import Dimension
from compress.prune.latency import (
    LatencyTable,
    Wanted,
    find_wanted_layers,
    from_json,
    latency_cost,
    measure,
    measure_scale,
    to_json,
)
from compress.prune.obs import Elimination
from compress.prune.shrink import remove_all
from compress.prune.surgery import remove
from compress.store.durable import seal, unseal
from runtime.bundle.files import write_whole
from runtime.measure.environment import cpu_info

TRIES = 4
"""Times that a choice of widths is measured, and made anew with what that taught."""
NEAR = 0.02
"""Of the speed-up that is asked for: what a measured one may be above it."""


@dataclass(frozen=True)
class Choosing:
    """What a choice rests on. `sample`: one sample, by parameter of forward."""

    module: nn.Module
    dimensions: Sequence[Dimension]
    curves: Sequence[Elimination]
    sample: Mapping[str, Tensor]
    context: PassContext


@dataclass(frozen=True)
class Choice:
    """A width for each dimension, and what the report says of it."""

    widths: tuple[int, ...]
    notes: tuple[Note, ...] = ()


def choose(knobs: PruneChannels, given: Choosing) -> Choice:
    """Choose a width for each dimension. PassError for a budget out of reach, with the best that is within it."""
    if knobs.ratio is not None:
        ratio = knobs.ratio
        return Choice(
            tuple(
                count_kept_units(dimension.n_units, dimension.kind, ratio, knobs.round_to)
                for dimension in given.dimensions
            )
        )
    groups = _group_dimensions(knobs, given)
    options = _make_options(knobs, given, groups)
    if knobs.speedup is not None:
        return _choose_fast_enough(knobs, given, groups, options)
    cost = (
        parameters_cost(given.module, given.dimensions)
        if knobs.max_params is not None
        else macs_cost(given.module, given.dimensions, given.sample)
    )
    budget = knobs.share * cost.at([dimension.n_units for dimension in given.dimensions])
    return Choice(_spread(choose_widths(options, _merge_cost(cost, groups), budget), groups))


Groups = list[list[int]]
"""Dimensions, by number, that get one width."""


def _group_dimensions(knobs: PruneChannels, given: Choosing) -> Groups:
    """Group dimensions: each for itself; where `alike` holds, those of one kind and size together."""
    if knobs.alike is False or (knobs.alike == "auto" and transformers_config(given.module) is None):
        return [[d] for d in range(len(given.dimensions))]
    groups: dict[tuple[str, int], list[int]] = {}
    for d, dimension in enumerate(given.dimensions):
        groups.setdefault((dimension.kind, dimension.n_units), []).append(d)
    return list(groups.values())


def _spread(widths: Sequence[int], groups: Groups) -> tuple[int, ...]:
    by_dimension = {d: width for width, group in zip(widths, groups, strict=True) for d in group}
    return tuple(by_dimension[d] for d in sorted(by_dimension))


def _make_options(knobs: PruneChannels, given: Choosing, groups: Groups) -> list[Options]:
    options = []
    for group in groups:
        first = given.dimensions[group[0]]
        step = 1 if first.kind == "heads" else min(knobs.round_to, first.n_units)
        widths = list_widths(first.name, first.n_units, step, min(step, first.n_units))
        damage = sum(np.array([given.curves[d].error_at(int(width), first.n_units) for width in widths]) for d in group)
        options.append(Options(widths, np.asarray(damage, np.float64)))
    return options


def _merge_cost(cost: Cost, groups: Groups) -> Cost:
    """Return the same cost as a function of one width for each group."""
    group_of = {d: g for g, group in enumerate(groups) for d in group}

    def size(before: Size) -> Size:
        per_unit: dict[int, int] = {}
        for d, k in before.per_unit.items():
            per_unit[group_of[d]] = per_unit.get(group_of[d], 0) + k
        return Size(before.full, per_unit)

    terms = tuple(replace(term, sizes=tuple(map(size, term.sizes))) for term in cost.terms)
    return Cost(cost.unit, tuple(cost.n_units[group[0]] for group in groups), terms)


def _choose_fast_enough(knobs: PruneChannels, given: Choosing, groups: Groups, options: list[Options]) -> Choice:
    """Choose widths whose model, exported and timed beside the whole one, is as fast as is asked for.

    What a measurement teaches of the table's errors goes into the next choice.
    """
    time_all, wanted_speedup = given.context.time_modules, knobs.speedup
    if time_all is None or wanted_speedup is None:
        raise PassError(f"{knobs.kind}: speedup needs a target that runs here; use max_flops or max_params")
    full = [dimension.n_units for dimension in given.dimensions]
    layers = find_wanted_layers(given.module, given.dimensions, _spread_widths(options, groups), given.sample)
    tables = _measure_tables(layers, given.context)
    (whole_ms,) = time_all([given.module])
    scale, goal = 1.0, wanted_speedup
    best: tuple[float, float, tuple[int, ...]] | None = None
    for _ in range(TRIES):
        cost = latency_cost(whole_ms, layers, tables, full, scale)
        widths = _spread(choose_widths(options, _merge_cost(cost, groups), whole_ms / goal), groups)
        before_ms, after_ms = time_all([given.module, _cut_copy(given, widths)])
        reached, predicted = before_ms / after_ms, whole_ms / cost.at(widths)
        given.context.log(f"{knobs.kind}: {reached:.2f}x measured, {predicted:.2f}x predicted")
        if reached >= wanted_speedup and (best is None or reached < best[0]):
            best = reached, predicted, widths
        if wanted_speedup <= reached <= wanted_speedup * (1 + NEAR):
            break
        plain = latency_cost(whole_ms, layers, tables, full).at(widths)
        scale = measure_scale(whole_ms, plain, whole_ms / reached)
        goal = wanted_speedup * (1 + NEAR / 2)
    if best is None:
        raise PassError(
            f"{knobs.kind}: speedup {wanted_speedup:g} was not reached: the last of {TRIES} choices of widths is "
            f"{reached:.2f} times as fast; ask for less, or allow more dimensions"
        )
    text = f"{knobs.kind}: {best[0]:.2f} times as fast as before, measured on {given.context.target.name}"
    return Choice(best[2], (Note("info", f"{text}; the layers' times foretold {best[1]:.2f}"),))


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


def _measure_tables(layers: Sequence[Wanted], context: PassContext) -> list[LatencyTable]:
    """Measure the layers' times, or read what an earlier run on this machine measured."""
    backend, threads = context.target.name, context.threads
    if context.measurements is None:
        return measure(layers, backend, threads, seed=context.seed)
    shapes = [[layer.shape, layer.outs, layer.ins] for layer in layers]
    path = context.measurements(["latency", *cpu_info(), backend, threads, shapes])
    kept = unseal(path.read_bytes()) if path.is_file() else None
    if kept is not None:
        return from_json(kept["tables"])
    context.log(f"measuring {len(layers)} layers at several widths")
    tables = measure(layers, backend, threads, seed=context.seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, seal({"tables": to_json(tables)}))
    return tables
