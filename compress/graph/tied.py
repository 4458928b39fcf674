"""A table that embeds tokens and, transposed, makes logits: held once in a file."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compress.graph.edit import append, reroute, tidy, uses_of
from compress.graph.layers import constant, is_constant


def share_tables(model: ir.Model) -> int:
    """Let each MatMul by an embedding's transpose read the embedding's table, in place; returns how many.

    ONNX Runtime folds the Transpose when it loads the graph: what runs is the same.
    """
    tables = [node.inputs[0] for node in model.graph if node.op_type == "Gather" and is_constant(node.inputs[0])]
    products = [node.inputs[1] for node in model.graph if node.op_type == "MatMul" and is_constant(node.inputs[1])]
    pairs = [(t, w) for t in dict.fromkeys(tables) for w in dict.fromkeys(products) if t and w and _is_transpose(t, w)]
    for table, weight in pairs:
        turned = append(model, "Transpose", [table], f"{weight.name}/turned", {"perm": [1, 0]})
        turned.type, turned.shape = weight.type, weight.shape
        reroute(uses_of(weight), turned)
    if pairs:
        tidy(model)
    return len(pairs)


def _is_transpose(table: ir.Value, weight: ir.Value) -> bool:
    """Return whether `weight` is the transpose of `table`, both float matrices."""
    a, b = table.const_value, weight.const_value
    if a is None or b is None or a.dtype != b.dtype or len(a.shape) != 2:
        return False
    if tuple(a.shape.numpy()) != tuple(b.shape.numpy())[::-1]:
        return False
    return np.array_equal(constant(table).T, constant(weight))
