"""The precision that each product of an ONNX graph asks for: what stands before its inputs."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

PRODUCTS = ("Conv", "ConvTranspose", "MatMul", "Gemm")
_KINDS = {
    ir.DataType.INT8: "int8",
    ir.DataType.INT4: "int4",
    ir.DataType.FLOAT8E4M3FN: "float8",
    ir.DataType.FLOAT16: "float16",
    ir.DataType.BFLOAT16: "bfloat16",
    ir.DataType.FLOAT: "float32",
}


def find_asked_precisions(path: Path) -> dict[str, str]:
    """Return product node -> the precision that it asks for.

    int8 or float8 (both factors are dequantized), int4 (its weights are), or its float type.
    """
    model = ir.load(path)
    precisions = {}
    for node in model.graph.all_nodes():
        if node.op_type in PRODUCTS and node.name:
            precisions[node.name] = _find_precision(node)
    return precisions


def _find_precision(node: ir.Node) -> str:
    stored = [_find_stored_type(value) for value in node.inputs[:2] if value is not None]
    for kind in ("int8", "float8"):
        if stored.count(kind) == 2:
            return kind
    if "int4" in stored:
        return "int4"
    types = [
        _KINDS.get(value.dtype, "") for value in (*node.outputs, *node.inputs[:2]) if value is not None and value.dtype
    ]
    return next((kind for kind in types if kind), "float32")


def _find_stored_type(value: ir.Value) -> str:
    """Return the type in which a factor is stored, where a DequantizeLinear makes it; "" for any other."""
    node = value.producer()
    while node is not None and node.op_type in ("Transpose", "Reshape", "Unsqueeze", "Squeeze", "Cast"):
        node = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    if node is None or node.op_type != "DequantizeLinear" or node.inputs[0] is None:
        return ""
    return _KINDS.get(node.inputs[0].dtype, "") if node.inputs[0].dtype is not None else ""
