"""The steps of the `gptq` pass on an ONNX graph: for each group of layers that read one tensor, gather, then round."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import torch

from compress.blocks.streamed import StreamedModel
from compress.context import PassContext, PassResult
from compress.errors import PassError
from compress.facts import LayerFacts, Note
from compress.graph.edit import initializer
from compress.graph.layers import GraphLayer, find_layers
from compress.graph.run import clone
from compress.passes.gptq import Gptq
from compress.quantize.gptq import Hessian, RoundedWeight, gptq_round, invert_hessian
from compress.quantize.gram_graph import gram_matrix
from compress.quantize.rounding import QuantizedWeight
from compress.quantize.smooth_graph import input_groups
from compress.quantize.state import GraphState
from compress.work.gptq_blocks import gptq_blocks, gptq_rules, hessian_remarks


def apply_gptq(knobs: Gptq, model: GraphState | StreamedModel, context: PassContext) -> PassResult:
    if isinstance(model, GraphState):
        return _round_graph(knobs, model, context)
    return gptq_blocks(knobs, model, context)


def _round_graph(knobs: Gptq, state: GraphState, context: PassContext) -> PassResult:
    taken, kept = knobs.graph_layers(state)
    facts = {layer.name: layer for layer in taken}
    working = clone(state.model)
    groups = input_groups([layer for layer in find_layers(working) if layer.name in facts])
    weights: dict[str, QuantizedWeight] = {}
    measured: dict[str, dict[str, float]] = {}
    notes: list[Note] = []
    for tensor in context.progress(list(groups), "gptq: rounding"):
        source = working if knobs.sequential else state.model
        try:
            gram = gram_matrix(source, tensor, context.batches)
            hessian = invert_hessian(gram, knobs.damp_percent, knobs.actorder)
        except ValueError as error:
            raise PassError(f"gptq: {groups[tensor][0].name}: {error}") from error
        notes += _make_notes(knobs, groups[tensor], hessian)
        for layer in groups[tensor]:
            rounded = _round(knobs, layer, facts[layer.name], hessian, context)
            weights[layer.name] = rounded.weight
            measured[layer.name] = {"output_error": rounded.error, "output_error_rtn": rounded.nearest_error}
            _put_back(working, layer, rounded.weight)
    state = replace(state, weight_only=[*state.weight_only, *weights], weights={**state.weights, **weights})
    decisions = [knobs.decision(layer, context.target) for layer in taken]
    return PassResult(state, (*decisions, *kept), tuple(notes), measured)


def _round(knobs: Gptq, layer: GraphLayer, facts: LayerFacts, hessian: Hessian, context: PassContext) -> RoundedWeight:
    scheme = knobs.setting(facts, context.target)
    weight = torch.from_numpy(layer.matrix().copy())
    try:
        return gptq_round(weight, hessian, scheme.weights, gptq_rules(knobs, scheme, context.target))
    except ValueError as problem:
        raise PassError(f"gptq: {layer.name}: {problem}") from problem


def _put_back(model: ir.Model, layer: GraphLayer, weight: QuantizedWeight) -> None:
    """Let the layers after this one see it as it will be."""
    matrix = weight.dequantize()
    values = np.ascontiguousarray(matrix.T if layer.axis == 1 else matrix)
    layer.node.replace_input_with(layer.weight_input, initializer(model, f"{layer.name}/rounded", values))


def _make_notes(knobs: Gptq, group: list[GraphLayer], hessian: Hessian) -> list[Note]:
    remarks = hessian_remarks([layer.name for layer in group], hessian, knobs.damp_percent)
    if remarks and knobs.strict:
        raise PassError(remarks)
    return [Note("warning", text) for text in remarks]
