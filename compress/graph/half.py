"""Computing a float32 graph in float16 or bfloat16, with casts where it meets what stays float32."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from compress.graph.edit import append, initializer, replace_output, reroute, tidy, uses_of
from compress.graph.layers import GraphLayer, constant, is_constant

INTEGER_PAIRS = {("DequantizeLinear", "QuantizeLinear"), ("Cast", "MatMulInteger")}
"""(operator, the one before it) whose output integer kernels make."""
TYPES = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38}
"""Finite value of each type."""
HIDDEN = -1e30
"""What is this low hides the token that it is added to: as good as -infinity, which a softmax makes 0."""
STAYS = {"Cast", "Range", "Resize", "QuantizeLinear", "DynamicQuantizeLinear", "DequantizeLinear"}
STAYS |= {"Constant", "ConstantOfShape", "If", "Loop", "Scan"}
STAYS |= {"TRT_FP4DynamicQuantize", "TRT_MXFP8DynamicQuantize", "TRT_MXFP8DequantizeLinear"}
"""Operators whose float inputs are parameters, whose type is part of what they do, or that hold graphs of their own."""


def to_half(model: ir.Model, dtype: str, kept: Collection[str]) -> None:
    """Let nodes not in `kept` (see `node_name`) compute in `dtype`, in place; graph inputs and outputs stay float32.

    What computes in integers stays as it is. Needs the dtype of every value (run shape inference before).
    """
    half, names, opset = TYPES[dtype], set(kept), model.opset_imports[""]
    casts: dict[ir.Value, ir.Value] = {}
    nodes = [node for node in model.graph if _becomes_half(node, names, opset)]
    for node in nodes:
        if not any(value is not None and value.dtype == ir.DataType.FLOAT for value in [*node.inputs, *node.outputs]):
            continue
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype == ir.DataType.FLOAT:
                node.replace_input_with(index, _cast_to_half(model, value, half, casts))
        for value in node.outputs:
            if value.dtype == ir.DataType.FLOAT:
                # readers get a float32 cast of it until they are converted themselves
                uses, name, is_output = uses_of(value), value.name, value.is_graph_output()
                value.name = f"{name}/{half.name.lower()}"
                value.type = ir.TensorType(half)
                back = append(model, "Cast", [value], name or "", {"to": ir.DataType.FLOAT})
                back.type, back.shape = ir.TensorType(ir.DataType.FLOAT), value.shape
                reroute(uses, back)
                if is_output:
                    replace_output(model, value, back)
                casts[back] = value
    tidy(model)


def node_name(node: ir.Node) -> str:
    """Return what a node is kept by: its name, or its first output's where it has none."""
    return node.name or node.outputs[0].name or ""


def layer_nodes(layer: GraphLayer) -> list[str]:
    """Return the names of a layer's product and, where it is an Add of its own, its bias."""
    return [node_name(node) for node in (layer.node, layer.bias_add) if node is not None]


def _becomes_half(node: ir.Node, kept: Collection[str], opset: int) -> bool:
    # opset 19 is the first in which DequantizeLinear gives half precision
    if node.op_type == "DequantizeLinear" and is_constant(node.inputs[0]) and opset >= 19:
        readers = [use.node for use in node.outputs[0].uses() if use.node.op_type == "DequantizeLinear"]
        # NVFP4: the one float above E4M3 scales is often below half's normal numbers
        if readers or not is_constant(node.inputs[1]):
            return False
        return all(_becomes_half(use.node, kept, opset) for use in node.outputs[0].uses())  # a weight follows its layer
    if node.op_type in STAYS or node_name(node) in kept or _crashes_in_half(node):
        return False
    return not _works_in_integers(node)


def _crashes_in_half(node: ir.Node) -> bool:
    """Return whether `node` is a transposed layer normalisation (torch's attention has one before its products).

    ONNX Runtime 1.31 dies of a segmentation fault while it fuses such a Transpose in half precision into a product.
    """
    maker = node.inputs[0].producer() if node.op_type == "Transpose" and node.inputs[0] is not None else None
    return maker is not None and maker.op_type == "LayerNormalization"


def _works_in_integers(node: ir.Node) -> bool:
    """Return whether `node` reads a quantized activation (kernels fuse the two) or scales an integer product back."""
    for value in node.inputs:
        maker = value.producer() if value is not None else None
        if maker is None:
            continue
        before = maker.inputs[0].producer() if maker.inputs and maker.inputs[0] is not None else None
        pair = (maker.op_type, before.op_type if before is not None else "")
        if maker.op_type == "DynamicQuantizeLinear" or pair in INTEGER_PAIRS:
            return True
    return False


def _cast_to_half(model: ir.Model, value: ir.Value, half: ir.DataType, casts: dict[ir.Value, ir.Value]) -> ir.Value:
    if value not in casts:
        name = f"{value.name}/{half.name.lower()}"
        if is_constant(value):
            array = constant(value)
            limit = LARGEST[half.name.lower()]
            # what hides (masks such as -3.4e38) gets half the lowest value: a score added stays finite
            clipped: np.ndarray = np.where(array <= HIDDEN, -limit / 2, np.clip(array, -limit, limit))
            casts[value] = initializer(model, name, ir.Tensor(clipped.astype(half.numpy()), dtype=half, name=name))
        else:
            casts[value] = append(model, "Cast", [value], name, {"to": half})
            casts[value].type, casts[value].shape = ir.TensorType(half), value.shape
    return casts[value]
