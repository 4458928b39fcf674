"""The steps of the `gptq` pass: for each group of layers that read one tensor, gather its Gram matrix, then round."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from compress.errors import PassError
from compress.facts import LayerFacts, Note
from compress.graph.edit import initializer
from compress.graph.layers import GraphLayer, find_layers
from compress.graph.run import clone
from compress.passes.context import PassContext, PassResult
from compress.passes.gptq import Gptq
from compress.quantize.gptq import Hessian, gptq_round, gram_matrix, invert_hessian
from compress.quantize.rounding import QuantizedWeight
from compress.quantize.smooth_graph import input_groups
from compress.quantize.state import GraphState


def apply_gptq(knobs: Gptq, state: GraphState, context: PassContext) -> PassResult:
    taken, kept = knobs.begin(state)
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
        notes += _remarks(knobs, groups[tensor], hessian)
        for layer in groups[tensor]:
            weights[layer.name], measured[layer.name] = _round(knobs, layer, facts[layer.name], hessian)
            _put_back(working, layer, weights[layer.name])
    state = replace(state, weight_only=[*state.weight_only, *weights], weights={**state.weights, **weights})
    return PassResult(state, (*map(knobs.decision, taken), *kept), tuple(notes), measured)


def _round(
    knobs: Gptq, layer: GraphLayer, facts: LayerFacts, hessian: Hessian
) -> tuple[QuantizedWeight, dict[str, float]]:
    """The rounded weight, and its relative output error beside that of rounding to the nearest."""
    try:
        rounded, error, nearest = gptq_round(layer.matrix(), hessian, *knobs.setting(facts))
    except ValueError as problem:
        raise PassError(f"gptq: {layer.name}: {problem}") from problem
    return rounded, {"output_error": error, "output_error_rtn": nearest}


def _put_back(model: ir.Model, layer: GraphLayer, weight: QuantizedWeight) -> None:
    """Let the layers after this one see it as it will be."""
    matrix = weight.dequantize()
    values = np.ascontiguousarray(matrix.T if layer.axis == 1 else matrix)
    layer.node.replace_input_with(layer.weight_input, initializer(model, f"{layer.name}/rounded", values))


def _remarks(knobs: Gptq, group: list[GraphLayer], hessian: Hessian) -> list[Note]:
    names = ", ".join(layer.name for layer in group)
    said = []
    if hessian.damp_percent > knobs.damp_percent:
        said.append(f"gptq: {names}: the Hessian could not be inverted until damp_percent was {hessian.damp_percent:g}")
    if hessian.dead.any():
        said.append(
            f"gptq: {names}: {int(hessian.dead.sum())} of {len(hessian.dead)} inputs were zero on all calibration data"
        )
    if said and knobs.strict:
        raise PassError(said)
    return [Note("warning", text) for text in said]
