"""Weights of two bits, packed as such in com.microsoft MatMulNBits: half the file, and half of what a token reads.

ONNX's DequantizeLinear has no type of two bits that ONNX Runtime multiplies by, so a graph holds them as int4 first.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compress.graph.attention import DOMAIN
from compress.graph.edit import append, initializer, take_over, tidy
from compress.graph.layers import constant, int_attribute, is_constant

TWO_BIT_BLOCKS = (32, 64, 128)
"""Those that have a fast kernel; at 16 and 256 MatMulNBits unpacks its weights to float32 at every call."""
ACCURACY = 4
"""Inputs are rounded to int8, block by block: the level at which ONNX Runtime fuses int4 weights too."""


def to_two_bits(model: ir.Model) -> int:
    """Write each product with block-wise int4 weights that need two bits as MatMulNBits, in place; returns how many."""
    matches = [(node, weight) for node in model.graph if (weight := _match_two_bits(node)) is not None]
    for node, weight in matches:
        _write_product(model, node, weight)
    if matches:
        model.opset_imports[DOMAIN] = 1
        tidy(model)
    return len(matches)


def _match_two_bits(node: ir.Node) -> ir.Node | None:
    """Return the DequantizeLinear that gives a MatMul's weight, if two bits hold its integers."""
    weight = node.inputs[1].producer() if node.op_type == "MatMul" and node.inputs[1] is not None else None
    if weight is None or weight.op_type != "DequantizeLinear" or not all(is_constant(v) for v in weight.inputs):
        return None
    kind = weight.inputs[0].dtype if weight.inputs[0] is not None else None
    if kind not in (ir.DataType.INT4, ir.DataType.UINT4) or int_attribute(weight, "axis", 1) != 0:
        return None
    if int_attribute(weight, "block_size", 0) not in TWO_BIT_BLOCKS:
        return None
    low, high = (-2, 1) if kind == ir.DataType.INT4 else (0, 3)
    parts = [constant(value).astype(np.int8) for value in (weight.inputs[0], *weight.inputs[2:])]
    return weight if all(part.min() >= low and part.max() <= high for part in parts) else None


def _write_product(model: ir.Model, node: ir.Node, weight: ir.Node) -> None:
    quantized, scales, zeros = [*weight.inputs, None][:3]
    assert quantized is not None and scales is not None
    name, block = quantized.name or node.name, int_attribute(weight, "block_size", 0)
    offset = 2 if quantized.dtype == ir.DataType.INT4 else 0  # MatMulNBits holds unsigned numbers around 2
    values = constant(quantized).astype(np.int8).T + np.int8(offset)  # [out, in]
    n_outputs, n_inputs = values.shape
    blocks = n_inputs // block
    inputs = [
        node.inputs[0],
        initializer(model, f"{name}/2bit", _pack_bytes(values).reshape(n_outputs, blocks, block // 4)),
        initializer(model, f"{name}/2bit/scale", np.ascontiguousarray(constant(scales).T)),
    ]
    if zeros is not None:
        padded = np.pad(constant(zeros).astype(np.int8).T + np.int8(offset), ((0, 0), (0, -blocks % 4)))
        inputs.append(initializer(model, f"{name}/2bit/zero_point", _pack_bytes(padded)))
    attributes = {"K": n_inputs, "N": n_outputs, "bits": 2, "block_size": block, "accuracy_level": ACCURACY}
    old = node.outputs[0]
    take_over(model, old, append(model, "MatMulNBits", inputs, f"{old.name}/2bit", attributes, domain=DOMAIN))


def _pack_bytes(values: np.ndarray) -> np.ndarray:
    """Pack four numbers of 0 to 3 along the last axis into each byte, the first one lowest."""
    parts = values.astype(np.uint8).reshape(*values.shape[:-1], -1, 4)
    packed: np.ndarray = parts[..., 0] | parts[..., 1] << 2 | parts[..., 2] << 4 | parts[..., 3] << 6
    return packed
