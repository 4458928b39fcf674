"""The steps of the `rtn` pass: on the layers of an ONNX graph, and on the blocks of a torch model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from compress.blocks.stream import Stream
from compress.blocks.streamed import StreamedModel
from compress.context import PassContext, PassResult
from compress.errors import PassError
from compress.graph.layers import find_layers
from compress.passes.blockwork import InputRanges, matrix, nearest, remark, step_layers
from compress.quantize.state import GraphState

if TYPE_CHECKING:
    from compress.passes.rtn import Rtn


def apply_rtn(knobs: Rtn, model: GraphState | StreamedModel, context: PassContext) -> PassResult:
    if isinstance(model, GraphState):
        return _on_graph(knobs, model, context)
    return _on_blocks(knobs, model, context)


def _on_graph(knobs: Rtn, state: GraphState, context: PassContext) -> PassResult:
    taken, kept = knobs.graph_layers(state)
    layers = {layer.name: layer for layer in find_layers(state.model)}
    weights, target = {}, context.target
    for facts in context.progress(taken, "rtn: rounding"):
        try:
            values = torch.from_numpy(layers[facts.name].matrix().copy())
            weights[facts.name] = nearest(values, knobs.setting(facts, target), target)
        except ValueError as error:
            raise PassError(f"rtn: {facts.name}: {error}") from error
    state = replace(state, weight_only=[*state.weight_only, *weights], weights={**state.weights, **weights})
    return PassResult(state, (*(knobs.decision(facts, target) for facts in taken), *kept))


def _on_blocks(knobs: Rtn, model: StreamedModel, context: PassContext) -> PassResult:
    stream = Stream(model, context, data=knobs.needs_calibration)
    for step in stream:
        work = step_layers(knobs, step, context.target)
        inputs = InputRanges.of(work.schemes)
        try:
            if inputs.schemes:
                step.collect(lambda reading, rows, inputs=inputs: inputs.see(reading.layers, rows))  # type: ignore[misc]
            for layer, scheme in work.schemes.items():
                weight = nearest(matrix(knobs, step, layer), scheme, context.target)
                step.put(layer, weight, scheme, inputs.scale(layer))
        except ValueError as error:
            raise PassError(f"rtn: {step.name}: {error}") from error
        facts = work.facts.values()
        remark(knobs, step, [text for one in facts if (text := knobs.fit_remark(one, context.target))])
        step.say(decisions=[*(knobs.decision(one, context.target) for one in facts), *work.kept])
    return stream.result()
