"""The work of the `rtn` pass: on the layers of an ONNX graph, and on the blocks of a torch model."""

from __future__ import annotations

from dataclasses import replace

import torch

from compress.blocks.stream import Stream
from compress.blocks.streamed import StreamedModel
from compress.context import PassContext, PassResult
from compress.errors import PassError
from compress.graph.layers import find_layers
from compress.passes.rtn import Rtn
from compress.quantize.state import GraphState
from compress.work.block_layers import (
    InputRanges,
    block_layers,
    find_shared,
    matrix,
    nearest,
    put_layer,
    remark,
    round_tables,
)


def apply_rtn(
    knobs: Rtn, model: GraphState | StreamedModel, context: PassContext
) -> PassResult[GraphState | StreamedModel]:
    if isinstance(model, GraphState):
        return _round_graph(knobs, model, context)
    return _round_blocks(knobs, model, context)


def _round_graph(knobs: Rtn, state: GraphState, context: PassContext) -> PassResult[GraphState]:
    taken, kept = knobs.graph_layers(state)
    layers = {layer.name: layer for layer in find_layers(state.model)}
    weights, target = {}, context.target
    for facts in context.progress(taken, "rtn: rounding"):
        try:
            values = torch.from_numpy(layers[facts.name].matrix().copy()).to(context.device)
            weights[facts.name] = nearest(values, knobs.setting(facts, target), target)
        except ValueError as error:
            raise PassError(f"rtn: {facts.name}: {error}") from error
    state = replace(state, weight_only=[*state.weight_only, *weights], weights={**state.weights, **weights})
    return PassResult(state, (*(knobs.decision(facts, target) for facts in taken), *kept))


def _round_blocks(knobs: Rtn, model: StreamedModel, context: PassContext) -> PassResult[StreamedModel]:
    stream = Stream(model, context, data=knobs.needs_calibration, tables=knobs.takes_tables)
    for block in stream:
        layers = block_layers(knobs, block, context.target)
        inputs = InputRanges.of(layers.schemes)
        try:
            if inputs.schemes:
                block.collect(lambda reading, rows, inputs=inputs: inputs.see(reading.layers, rows))  # type: ignore[misc]
            shared = find_shared(knobs, block, layers.schemes)
            for layer, scheme in layers.schemes.items():
                values = matrix(knobs, block, layer)
                weight = nearest(values, scheme, context.target, shared=shared.get(layer))
                put_layer(block, layers, layer, weight, inputs.scale(layer))
        except ValueError as error:
            raise PassError(f"rtn: {block.name}: {error}") from error
        round_tables(knobs, block, layers, context.target)
        facts = layers.facts.values()
        remark(knobs, block, [text for layer_facts in facts if (text := knobs.fit_remark(layer_facts, context.target))])
        block.say(decisions=[*(knobs.decision(layer_facts, context.target) for layer_facts in facts), *layers.kept])
    return stream.result()
