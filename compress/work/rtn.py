"""The work of the `rtn` pass: on the layers of an ONNX graph, and on the blocks of a torch model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from compress.blocks.block import BlockWork
from compress.blocks.squares import InputSquares
from compress.blocks.stream import Stream
from compress.blocks.streamed import StreamedModel
from compress.context import PassContext, PassResult
from compress.errors import PassError
from compress.formats.schemes import Scheme
from compress.formats.targets import Target
from compress.graph.layers import find_layers
from compress.passes.rtn import Rtn
from compress.rounding.gptq import SMALL
from compress.rounding.quantized_weight import QuantizedWeight
from compress.rounding.state import GraphState
from compress.work.block_layers import (
    BlockLayers,
    InputRanges,
    block_layers,
    find_shared,
    leave_unscaled,
    matrix,
    nearest,
    put_layer,
    remark,
    round_tables,
    say_error,
)
from compress.work.contexts import BlockContext
from compress.work.mixed_bits import settle_bits


def apply_rtn(
    config: Rtn, model: GraphState | StreamedModel, context: PassContext
) -> PassResult[GraphState | StreamedModel]:
    if isinstance(model, GraphState):
        return _round_graph(config, model, context)
    return _round_blocks(config, model, context)


def _round_graph(config: Rtn, state: GraphState, context: PassContext) -> PassResult[GraphState]:
    taken, kept = config.graph_layers(state, context.target)
    layers = {layer.name: layer for layer in find_layers(state.model)}
    weights, target = {}, context.target
    for facts in context.progress(taken, "rtn: rounding"):
        try:
            values = torch.from_numpy(layers[facts.name].matrix().copy()).to(context.device)
            weights[facts.name] = nearest(values, config.setting(facts, target), target)
        except ValueError as error:
            raise PassError(f"rtn: {facts.name}: {error}") from error
    state = replace(state, weight_only=[*state.weight_only, *weights], weights={**state.weights, **weights})
    return PassResult(state, (*(config.decision(facts, target) for facts in taken), *kept))


def _gather_importance(block: BlockWork, layers: BlockLayers) -> dict[str, np.ndarray]:
    """Return layer -> squares of each of its inputs [in], on the calibration data."""
    seen = InputSquares()
    groups = [input_group for input_group in block.input_groups if layers.of(input_group.layers)]
    block.collect(lambda input_group, rows: seen.see(layers.of(input_group.layers), rows), groups)
    return {layer: seen.total(layer, layers.facts[layer].shape[1]).sums for layer in layers.schemes}


def _weigh_inputs(squares: Tensor) -> Tensor | None:
    """Return the weight of each input [in] by its squares; None where all are zero, or one is not finite."""
    mean = squares.mean()
    # what was always zero here counts a little, because serving may use it
    return (squares / mean + SMALL).float() if 0 < mean < torch.inf else None


def _round_blocks(config: Rtn, model: StreamedModel, context: PassContext) -> PassResult[StreamedModel]:
    config, settled = settle_bits(
        config, model, context, partial(_make_rounding, config, context.target), _round_layers
    )
    return settled.add_to(_round_layers(config, model, context))


def _round_layers(config: Rtn, model: StreamedModel, context: PassContext) -> PassResult[StreamedModel]:
    data = config.needs_calibration
    given = context.importance if isinstance(context, BlockContext) else {}
    stream = Stream(model, context, data=data, tables=config.takes_tables, lazy=not config.needs_forward)
    for block in stream:
        layers = block_layers(config, block, context.target)
        inputs = InputRanges.of(layers.schemes)
        try:
            if inputs.schemes:
                block.collect(lambda input_group, rows, inputs=inputs: inputs.see(input_group.layers, rows))  # type: ignore[misc]
            squares = _gather_importance(block, layers) if config.importance is True else given
            leave_unscaled(config, block, layers, inputs, list(layers.schemes))
            shared = find_shared(config, block, layers.schemes)
            for layer, scheme in layers.schemes.items():
                values, weighting = matrix(config, block, layer), None
                if layer in squares:
                    weighting = _weigh_inputs(torch.from_numpy(squares[layer]).double().to(values.device))
                if config.importance and weighting is None:
                    what = "the importance matrix" if config.importance_file else "finite calibration data"
                    remark(block, [f"rtn: {layer}: {what} has nothing but zeros of it: all of its inputs weigh alike"])
                weight = nearest(values, scheme, context.target, weighting, shared.get(layer))
                put_layer(block, layers, layer, weight, inputs.scale(layer))
                say_error(block, layer, values, weight)
        except ValueError as error:
            raise PassError(f"rtn: {block.name}: {error}") from error
        round_tables(config, block, layers, context.target)
        facts = layers.facts.values()
        remark(block, [text for layer_facts in facts if (text := config.fit_remark(layer_facts, context.target))])
        block.say(decisions=[*(config.decision(layer_facts, context.target) for layer_facts in facts), *layers.kept])
    return stream.result()


def _make_rounding(config: Rtn, target: Target, gram: Tensor) -> Callable[[Tensor, Scheme], QuantizedWeight]:
    """Return how rows of weights are rounded that read inputs of this Gram matrix."""
    importance = _weigh_inputs(gram.diagonal()) if config.importance else None
    return lambda rows, scheme: nearest(rows, scheme, target, importance)
