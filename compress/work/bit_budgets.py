"""What each choice of bits costs under a budget: bits, bytes of the file, or milliseconds measured here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from compress.blocks.streamed import StreamedModel
from compress.context import PassContext
from compress.errors import PassError
from compress.facts import LayerFacts
from compress.formats.schemes import Scheme
from compress.models.facts import count_other_bytes
from compress.passes.layer_schemes import count_stored_bits
from compress.passes.mixed_bits import Allocation, BitBudget, count_choice_bits, count_file_bytes
from compress.passes.weight_only import WeightPass
from compress.rounding.budgets import NEAR, NEAR_BYTES, Measured, Prices
from compress.work.block_layers import list_layers
from compress.work.contexts import BlockContext, WeightTrials
from runtime.words import size_text


def price_bits(
    config: WeightPass,
    budget: BitBudget,
    allocation: Allocation,
    layers: Sequence[LayerFacts],
    model: StreamedModel,
    context: PassContext,
) -> Prices:
    """Return what each choice costs, before anything is measured of what it loses. `layers`: those that are rounded.

    PassError where no choice keeps the budget, with the nearest that can be kept.
    """
    choices = budget.ordered
    if budget.average is not None:
        bits = [count_choice_bits(choice) for choice in choices]
        return Prices([[size * n for n in bits] for size in allocation.sizes], allocation.budget(budget.average))
    trials = context.trials if isinstance(context, BlockContext) else WeightTrials()

    def find_schemes(numbers: Sequence[int]) -> dict[str, Scheme]:
        by_group = zip(allocation.groups, numbers, strict=True)
        chosen = config.with_bits(budget.choose({n: choices[k] for group, k in by_group for n in group}, {}))
        return {layer.name: chosen.setting(layer, context.target) for layer in layers}

    n_groups = len(allocation.groups)
    each = [find_schemes([k] * n_groups) for k in range(len(choices))]
    if budget.size_ratio is not None:
        return _price_bytes(config, budget, allocation, each, find_schemes, model, context, trials)
    return _price_time(config, budget, allocation, each, find_schemes, trials)


FindSchemes = Callable[[Sequence[int]], Mapping[str, Scheme]]
"""The number of each group's choice -> layer -> its scheme."""


def _price_bytes(
    config: WeightPass,
    budget: BitBudget,
    allocation: Allocation,
    each: Sequence[Mapping[str, Scheme]],
    find_schemes: FindSchemes,
    model: StreamedModel,
    context: PassContext,
    trials: WeightTrials,
) -> Prices:
    ratio = budget.size_ratio
    assert ratio is not None
    layers = _list_stored_layers(config, model, each[0])
    other = count_other_bytes(model.build(), layers)
    counted = count_file_bytes(layers, other, allocation, each, context.target, trials.float_bytes)
    if text := counted.explain_unreachable(budget, ratio):
        raise PassError(f"{config.kind}: {text}")

    def measure(numbers: Sequence[int]) -> Measured:
        assert trials.count_bytes is not None
        whole, left = trials.count_bytes([find_schemes(numbers)])
        return Measured(left - whole / ratio, f"a file of {size_text(left)}, {whole / left:.3f} times smaller")

    count = None if trials.count_bytes is None else measure
    return Prices(counted.by_group, counted.find_room(ratio), count, NEAR_BYTES * counted.whole / ratio)


def _list_stored_layers(
    config: WeightPass, model: StreamedModel, rounded: Mapping[str, Scheme]
) -> tuple[LayerFacts, ...]:
    """Return the layers with the bits they are stored in, those rounded apart with weights of their own."""
    known = {name: scheme for name, scheme in model.schemes.items() if name not in rounded}
    stored = [
        replace(layer, bits=count_stored_bits(known[layer.name], layer)) if layer.name in known else layer
        for layer in list_layers(model)
    ]
    return config.untie_layers(stored, rounded)


def _price_time(
    config: WeightPass,
    budget: BitBudget,
    allocation: Allocation,
    each: Sequence[Mapping[str, Scheme]],
    find_schemes: FindSchemes,
    trials: WeightTrials,
) -> Prices:
    """Time the layers at each choice, and the whole model with the fastest of each."""
    wanted = budget.speedup
    if trials.time is None or trials.time_layers is None or wanted is None:
        raise PassError(f"{config.kind}: bits: speedup needs a target that is timed here; use average or size_ratio")
    time_whole = trials.time
    by_layer = trials.time_layers({name: [some[name] for some in each] for g in allocation.groups for name in g})
    table = [
        [sum(by_layer[name][k] for name in group if name in by_layer) for k in range(len(each))]
        for group in allocation.groups
    ]
    fastest = [min(range(len(row)), key=lambda k, row=row: row[k]) for row in table]  # type: ignore[misc]
    before, after = time_whole([find_schemes(fastest)])
    if before / after < wanted:
        raise PassError(
            f"{config.kind}: bits: speedup {wanted:g} is out of reach: with the fastest of the choices in every group "
            f"the model is {before / after:.2f} times as fast as in float here; ask for less, give other choices, or "
            "round more layers"
        )

    def measure(numbers: Sequence[int]) -> Measured:
        whole, left = time_whole([find_schemes(numbers)])
        return Measured((left - whole / wanted) * before / whole, f"{whole / left:.2f} times as fast as in float here")

    rest = after - sum(row[k] for row, k in zip(table, fastest, strict=True))
    return Prices(table, before / wanted - rest, measure, NEAR * before / wanted, after - before / wanted)
