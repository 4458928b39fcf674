"""Applying smoothing scales to a graph: folded into the layer before where that is exact, a multiplication otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from compress.graph.edit import append, initializer, reroute, uses_of
from compress.graph.layers import GraphLayer, constant, is_constant

NORMS = {"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"}


def input_groups(layers: Sequence[GraphLayer]) -> dict[str, list[GraphLayer]]:
    """Matrix products by the tensor they read: those that must share smoothing scales."""
    groups: dict[str, list[GraphLayer]] = {}
    for layer in layers:
        if layer.op in ("MatMul", "Gemm") and layer.data_input.name:
            groups.setdefault(layer.data_input.name, []).append(layer)
    return groups


def apply_smoothing(model: ir.Model, group: Sequence[GraphLayer], scales: np.ndarray) -> str:
    """Divide the group's input by `scales` [in] and multiply its weights by them; the product stays the same.

    Returns how the division was written: "folded into <node>" or "multiplication".
    """
    for layer in group:
        weight = constant(layer.weight)
        along = scales[:, None] if layer.axis == 1 else scales[None, :]  # MatMul [in, out], Gemm transB [out, in]
        name = f"{layer.name}/smoothed" if len(list(layer.weight.uses())) > 1 else layer.weight.name or layer.name
        layer.node.replace_input_with(layer.weight_input, initializer(model, name, (weight * along).astype(np.float32)))
    value = group[0].data_input
    readers = {layer.node for layer in group}
    norm = value.producer()
    if norm is not None and norm.op_type in NORMS and all(use.node in readers for use in value.uses()):
        if all(is_constant(v) and len(list(v.uses())) == 1 for v in norm.inputs[1:]):
            for parameter in norm.inputs[1:]:
                assert parameter is not None
                initializer(model, parameter.name or "", (constant(parameter) / scales).astype(np.float32))
            return f"folded into {norm.name}"
    inverse = initializer(model, f"{value.name}/smoothing", (1.0 / scales).astype(np.float32))
    uses = [use for use in uses_of(value) if use[0] in readers]
    smoothed = append(model, "Mul", [value, inverse], f"{value.name}/smoothed")
    smoothed.type, smoothed.shape = value.type, value.shape
    reroute(uses, smoothed)
    model.graph.sort()
    return "multiplication"
