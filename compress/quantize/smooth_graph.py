"""Applying smoothing scales to a graph: folded into the norm before where that is exact, else a multiplication."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from compress.graph.edit import append, initializer, reroute, uses_of
from compress.graph.layers import GraphLayer, constant, is_constant

NORMS = {"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"}


def input_groups(layers: Sequence[GraphLayer]) -> dict[str, list[GraphLayer]]:
    """Group matrix products by the tensor they read: those that must share smoothing scales."""
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
        name = f"{layer.name}/smoothed" if len(uses_of(layer.weight)) > 1 else layer.weight.name or layer.name
        layer.node.replace_input_with(layer.weight_input, initializer(model, name, (weight * along).astype(np.float32)))
    value = group[0].data_input
    readers = {layer.node for layer in group}
    norm = foldable_norm(group)
    if norm is not None:
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


def foldable_norm(group: Sequence[GraphLayer]) -> ir.Node | None:
    """Return the normalisation that gives the group's input and can take the scales in, or None."""
    norm = group[0].data_input.producer()
    return norm if norm is not None and _can_fold(norm, {layer.node for layer in group}) else None


def _can_fold(norm: ir.Node, readers: Collection[ir.Node]) -> bool:
    """Return whether `norm` is a normalisation that only `readers` see, with constant parameters of its own."""
    if norm.op_type not in NORMS or norm.outputs[0].is_graph_output():
        return False
    if not all(use.node in readers for use in norm.outputs[0].uses()):
        return False
    return all(value is not None and is_constant(value) and len(uses_of(value)) == 1 for value in norm.inputs[1:])
