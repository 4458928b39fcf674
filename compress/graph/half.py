"""Computing a float32 graph in float16 or bfloat16, with casts where it meets what stays float32."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from compress.graph.edit import append, initializer, tidy, uses_of
from compress.graph.layers import constant, is_constant

TYPES = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
STAYS = {"Cast", "Range", "Resize", "QuantizeLinear", "DynamicQuantizeLinear", "DequantizeLinear", "Constant", "ConstantOfShape"}
"""Operators whose float inputs are parameters, or whose type is part of what they do."""


def to_half(model: ir.Model, dtype: str, kept: Collection[str]) -> None:
    """Rewrite `model` in place: nodes not in `kept` compute in `dtype`; graph inputs and outputs stay float32.

    Needs the dtype of every value (run shape inference before).
    """
    half = TYPES[dtype]
    casts: dict[ir.Value, ir.Value] = {}
    nodes = [node for node in model.graph if node.op_type not in STAYS and node.name not in set(kept)]
    for node in nodes:
        if not any(value is not None and value.dtype == ir.DataType.FLOAT for value in [*node.inputs, *node.outputs]):
            continue
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype == ir.DataType.FLOAT:
                node.replace_input_with(index, _as_half(model, value, half, casts))
        for value in node.outputs:
            if value.dtype == ir.DataType.FLOAT:
                _back_to_float(model, value, half, casts)
    tidy(model)


def _as_half(model: ir.Model, value: ir.Value, half: ir.DataType, casts: dict[ir.Value, ir.Value]) -> ir.Value:
    if value not in casts:
        name = f"{value.name}/{half.name.lower()}"
        if is_constant(value):
            casts[value] = initializer(model, name, ir.Tensor(_clipped(constant(value), half), dtype=half, name=name))
        else:
            casts[value] = append(model, "Cast", [value], name, {"to": half})
            casts[value].type, casts[value].shape = ir.TensorType(half), value.shape
    return casts[value]


def _clipped(array: np.ndarray, half: ir.DataType) -> np.ndarray:
    """Masks such as -3.4e38 become the type's own lowest value."""
    limit = 65504.0 if half == ir.DataType.FLOAT16 else 3.3895e38
    return np.clip(array, -limit, limit).astype(half.numpy())


def _back_to_float(model: ir.Model, value: ir.Value, half: ir.DataType, casts: dict[ir.Value, ir.Value]) -> None:
    """The node now gives `half`; whoever reads the value reads a float32 cast of it until it is itself converted."""
    uses, name, is_output = uses_of(value), value.name, value.is_graph_output()
    value.name = f"{name}/{half.name.lower()}"
    value.type = ir.TensorType(half)
    back = append(model, "Cast", [value], name or "", {"to": ir.DataType.FLOAT})
    back.type, back.shape = ir.TensorType(ir.DataType.FLOAT), value.shape
    for node, index in uses:
        node.replace_input_with(index, back)
    if is_output:
        for i, output in enumerate(model.graph.outputs):
            if output is value:
                model.graph.outputs[i] = back
    casts[back] = value
