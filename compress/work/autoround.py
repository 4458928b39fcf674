"""The work of the `autoround` pass: each block started from integers, learned against the float block, recorded."""

from __future__ import annotations

from collections.abc import Mapping

from compress.blocks.block import BlockWork
from compress.blocks.sharing import sum_over_processes
from compress.blocks.stream import Stream
from compress.blocks.streamed import StreamedModel
from compress.context import PassContext, PassResult
from compress.errors import PassError
from compress.facts import LayerDecision
from compress.formats.schemes import Scheme
from compress.formats.targets import Target
from compress.passes.autoround import AutoRound
from compress.passes.tune import is_selected
from compress.rounding.autoround import autoround_block
from compress.rounding.learn import RoundingSchedule, TuneLog
from compress.rounding.quantized_weight import QuantizedWeight
from compress.work.block_layers import (
    InputRanges,
    block_layers,
    find_shared,
    leave_unscaled,
    matrix,
    nearest,
    put_layer,
    remark,
    round_tables,
)
from compress.work.learning import block_batches, open_saved_run


def apply_autoround(config: AutoRound, model: StreamedModel, context: PassContext) -> PassResult[StreamedModel]:
    """Learn block after block, each on what the rounded ones before it give. PassError naming the layer."""
    tables = config.takes_tables and config.start == "nearest"
    stream = Stream(model, context, float_too=True, tables=tables)
    for block in stream:
        start, schemes, input_scales = _choose_start(config, model, block, context.target)
        if start:
            _learn(config, block, start, schemes, input_scales, context)
    result = stream.result()
    if not any(decision.action == "learned" for decision in result.decisions):
        raise PassError("autoround: no layer is left to round; check targets and ignore")
    return result


def _learn(
    config: AutoRound,
    block: BlockWork,
    start: Mapping[str, QuantizedWeight],
    schemes: Mapping[str, Scheme],
    input_scales: Mapping[str, float | None],
    context: PassContext,
) -> None:
    floats = {layer: block.float_matrix(layer) for layer in start}
    for layer, weight in start.items():
        block.put(layer, weight, schemes[layer], input_scales.get(layer))
    batches, kept = block_batches(block, config.held_out)
    rate = 1 / max(config.steps, 1) if config.rate is None else config.rate
    schedule = RoundingSchedule(
        config.steps,
        rate,
        rate,
        method="sign",
        seed=context.seed + block.index,
    )
    weights, log = autoround_block(
        block.layers,
        start,
        batches,
        schedule,
        kept_aside=kept,
        floats=floats,
        schemes={layer: schemes[layer].weights for layer in start},
        progress=context.progress,
        reduce=sum_over_processes,
        saved=open_saved_run(context, f"block-{block.index:05d}", f"autoround: {block.name or 'the model'}"),
    )
    _record(config, block, start, weights, schemes, log)


def _record(
    config: AutoRound,
    block: BlockWork,
    start: Mapping[str, QuantizedWeight],
    weights: Mapping[str, QuantizedWeight],
    schemes: Mapping[str, Scheme],
    log: TuneLog,
) -> None:
    where = block.name or "the model"
    if log.steps and not log.best_step:
        remark(block, [f"autoround: {where}: {log.steps} steps led to nothing better than the start, which is kept"])
    losses = {"start_loss": log.start_loss, "end_loss": log.end_loss, "best_step": log.best_step}
    block.say(measured={block.name: losses})
    for layer, weight in weights.items():
        block.put(layer, weight, schemes[layer])
        changed = float((weight.values != start[layer].values).mean())
        reason = f"{schemes[layer].name}, {changed:.1%} of its integers changed"
        decision = LayerDecision(layer, type(block.layers[layer]).__name__, "learned", reason)
        block.say([decision], measured={layer: {"changed": changed}})


def _choose_start(
    config: AutoRound, model: StreamedModel, block: BlockWork, target: Target
) -> tuple[dict[str, QuantizedWeight], dict[str, Scheme], dict[str, float | None]]:
    """Return the integers to go on from, the nearest or those that are there; their schemes, and scales of inputs.

    Of those that are there an earlier pass has stored the scales. Layers whose inputs have none stay float.
    """
    if config.start == "given":
        start = {
            layer: weight
            for layer, weight in block.quantized.items()
            if not block.tables.holds(layer) and is_selected(config, layer, type(block.layers[layer]).__name__)
        }
        return start, {layer: model.schemes[layer] for layer in start}, {}
    layers = block_layers(config, block, target)
    inputs = InputRanges.of(layers.schemes)
    if inputs.schemes:
        block.collect(lambda input_group, rows: inputs.see(input_group.layers, rows))
        leave_unscaled(config, block, layers, inputs, list(layers.schemes))
    round_tables(config, block, layers, target)
    for layer in layers.sharers:
        if layer not in layers.tables:  # learned as a product's weight it would drift from what is looked up
            put_layer(
                block, layers, layer, _round_to_nearest(config, block, layer, layers.schemes[layer], target, None)
            )
    learned = {layer: scheme for layer, scheme in layers.schemes.items() if layer not in layers.sharers}
    nearest_ones = [facts for layer, facts in layers.facts.items() if layer not in learned]
    block.say(decisions=[*(config.decision(facts, target) for facts in nearest_ones), *layers.kept])
    shared = find_shared(config, block, learned)
    start = {
        layer: _round_to_nearest(config, block, layer, scheme, target, shared.get(layer))
        for layer, scheme in learned.items()
    }
    return start, learned, {layer: inputs.scale(layer) for layer in learned}


def _round_to_nearest(
    config: AutoRound, block: BlockWork, layer: str, scheme: Scheme, target: Target, shared: float | None
) -> QuantizedWeight:
    weight = matrix(config, block, layer)
    try:
        return nearest(weight, scheme, target, shared=shared)
    except ValueError as error:
        raise PassError(f"autoround: {layer}: {error}") from error
