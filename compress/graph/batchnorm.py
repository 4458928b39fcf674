"""Folding batch normalisation into convolutions."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compress.graph.edit import alone_reads, initializer, take_over, tidy, uses_of
from compress.graph.layers import constant, is_constant


def fold_batchnorms(model: ir.Model) -> list[str]:
    """Fold each BatchNormalization that alone reads a Conv's output, in place; graph outputs keep their names.

    W' = W * g, b' = (b - mean) * g + beta with g = gamma / sqrt(variance + epsilon), computed in float64.
    Returns the names of the nodes that went (the exporter folds most of them itself).
    """
    folded = []
    for node in [node for node in model.graph if node.op_type == "BatchNormalization"]:
        conv = node.inputs[0].producer() if node.inputs[0] is not None else None
        if conv is None or conv.op_type != "Conv" or not all(is_constant(v) for v in conv.inputs[1:] if v is not None):
            continue
        if not alone_reads(node, conv.outputs[0]) or not all(is_constant(v) for v in node.inputs[1:]):
            continue
        _fold(model, conv, node)
        folded.append(node.name or "BatchNormalization")
    tidy(model)
    return folded


def _fold(model: ir.Model, conv: ir.Node, norm: ir.Node) -> None:
    gamma, beta, mean, variance = (constant(value).astype(np.float64) for value in norm.inputs[1:])
    epsilon = norm.attributes["epsilon"].as_float() if "epsilon" in norm.attributes else 1e-5
    gain = gamma / np.sqrt(variance + epsilon)  # [out]
    weight, value = constant(conv.inputs[1]), conv.inputs[1]
    assert value is not None
    shared = len(uses_of(value)) > 1  # then it is folded into a copy
    name = f"{conv.name}/{value.name}" if shared else value.name
    has_bias = len(conv.inputs) > 2 and conv.inputs[2] is not None
    bias = constant(conv.inputs[2]).astype(np.float64) if has_bias else np.zeros(len(gain))
    folded = (weight * gain.reshape(-1, *[1] * (weight.ndim - 1))).astype(np.float32)
    weight_value = initializer(model, str(name), folded)
    bias_value = initializer(model, f"{name}_bias", ((bias - mean) * gain + beta).astype(np.float32))
    conv.replace_input_with(1, weight_value)
    if len(conv.inputs) < 3:
        conv.resize_inputs(3)
    conv.replace_input_with(2, bias_value)
    take_over(model, norm.outputs[0], conv.outputs[0])
