"""Writing NVFP4 and MXFP8 into a graph for TensorRT: small floats in blocks that share a small scale.

NVFP4's weights are standard operators of opset 23; what is scaled as it runs, and scales that are powers of two (E8M0),
ONNX has no operator for, and TensorRT has its own (its documentation, "Working with Quantized Types"; the same nodes
with the same attributes as NVIDIA's ModelOpt writes). Tried in the builder of TensorRT for RTX 1.7.1.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from compress.graph.edit import append, share_constant
from compress.graph.layers import GraphLayer, constant, is_constant
from compress.rounding.quantized_weight import QuantizedWeight
from compress.rounding.state import FLOAT8

OPSET, FILE_FORMAT = 23, 11
"""The first opset, and format of files, with FP4: no operator of a graph of opset 20 means something else there."""
DOMAIN = "trt"
TO_NVFP4, TO_MXFP8, FROM_MXFP8 = "TRT_FP4DynamicQuantize", "TRT_MXFP8DynamicQuantize", "TRT_MXFP8DequantizeLinear"
"""TensorRT's own operators, and their domain."""
FLOAT4 = ml_dtypes.float4_e2m1fn
NVFP4_BLOCK, MX_BLOCK = 16, 32
MOST_AXES = 3
"""Of what TensorRT scales as it runs."""


def is_float4(weight: QuantizedWeight) -> bool:
    """Return whether a weight is NVFP4: FP4 numbers, held as the same ones of FP8, with E4M3 scales below a float."""
    return weight.values.dtype == FLOAT8 and weight.bits == 4 and "global_scale" in weight.stored


def is_mxfp8(weight: QuantizedWeight) -> bool:
    """Return whether a weight is MXFP8: E4M3 numbers below powers of two."""
    return weight.values.dtype == FLOAT8 and weight.bits == 8 and "exponents" in weight.stored


def is_float_block(weight: QuantizedWeight) -> bool:
    """Return whether `write_float_blocks` writes such a weight."""
    return is_float4(weight) or is_mxfp8(weight)


def write_float_blocks(
    model: ir.Model, layer: GraphLayer, weight: QuantizedWeight, input_scale: float | None = None
) -> None:
    """Let a product (MatMul or Gemm, which then must become a MatMul) read small floats, in place.

    `input_scale`: what the layer reads is rounded as it runs, too, in the weight's own format; of NVFP4 this is what a
    block's E4M3 scale of 1 stands for. None: it stays float.
    """
    if is_float4(weight):
        model.opset_imports[""] = max(model.opset_imports[""], OPSET)
        model.ir_version = max(model.ir_version, FILE_FORMAT)
        _write_nvfp4(model, layer, weight)
    else:
        model.opset_imports[DOMAIN] = 1
        _write_mxfp8(model, layer, weight)
    if input_scale is not None:
        model.opset_imports[DOMAIN] = 1
        _round_input(model, layer, input_scale if is_float4(weight) else None)


def _round_input(model: ir.Model, layer: GraphLayer, scale: float | None) -> None:
    """Let the layer read its input in NVFP4 below `scale`, or in MXFP8 (None), as all that read it so do."""
    x = _say_width(model, layer.data_input, layer.shape[1])
    rounded = _find_rounded(x, scale)
    if rounded is None:
        rounded = _round_to_mxfp8(model, x) if scale is None else _round_to_nvfp4(model, x, scale)
        rounded.type, rounded.shape = x.type, x.shape
    layer.node.replace_input_with(1 - layer.weight_input, rounded)


def _say_width(model: ir.Model, x: ir.Value, width: int) -> ir.Value:
    """Return `x` [..., width] from a Reshape that says how wide it is: TensorRT scales nothing else as it runs.

    Exporters compute the shape of attention's output from the batch, and TensorRT knows none of its sizes then.
    """
    name = f"{x.name}/sized"
    for use in x.uses():
        if use.node.name == name:
            return use.node.outputs[0]
    sizes = list(x.shape or (None, None))[:-1]
    shape = share_constant(model, f"{name}/shape", ir.Tensor(np.array([*[0] * len(sizes), width])))  # 0: as it is
    sized = append(model, "Reshape", [x, shape], name)
    sized.type, sized.shape = x.type, ir.Shape([*sizes, width])
    return sized


def _find_rounded(x: ir.Value, scale: float | None) -> ir.Value | None:
    """Return what another layer reads of `x` rounded with that scale, if one does."""
    for use in x.uses():
        stored = None if len(use.node.inputs) == 1 else use.node.inputs[1]
        same = stored is None if scale is None else is_constant(stored) and constant(stored) == np.float32(scale)
        if use.node.op_type in (TO_NVFP4, TO_MXFP8) and same:
            (reader,) = use.node.outputs[0].uses()
            return reader.node.outputs[0]
    return None


def _turn(layer: GraphLayer, *arrays: np.ndarray) -> tuple[int, list[np.ndarray]]:
    """Return the axis of the inputs, and arrays [out, ...] as a MatMul, or a Gemm of these axes, has its weight."""
    turned = layer.op == "Gemm" or layer.axis == 1
    return 0 if turned else 1, [np.ascontiguousarray(array.T if turned else array) for array in arrays]


def _write_nvfp4(model: ir.Model, layer: GraphLayer, weight: QuantizedWeight) -> None:
    """Write E4M3 scales times one float, then FP4 numbers times those.

    What files hold divides the scales; here its inverse multiplies them: weights may differ by a float32's last bit.
    """
    base, codes = f"{layer.weight.name}", weight.stored["scales"].view(FLOAT8)
    axis, (values, scales) = _turn(layer, weight.values.astype(np.float32), codes)
    four_bits = ir.Tensor(values.astype(FLOAT4), dtype=ir.DataType.FLOAT4E2M1)
    q = share_constant(model, f"{base}/float4", four_bits)
    s = share_constant(model, f"{base}/scale", ir.Tensor(scales, dtype=ir.DataType.FLOAT8E4M3FN))
    whole = np.asarray(np.float32(1) / weight.stored["global_scale"][0], np.float32)
    g = share_constant(model, f"{base}/global_scale", ir.Tensor(whole))
    spread = append(model, "DequantizeLinear", [s, g], f"{layer.name}/weight/scale/float")
    spread.type, spread.shape = layer.weight.type, ir.Shape(scales.shape)
    blocks = {"axis": axis, "block_size": NVFP4_BLOCK}
    floats = append(model, "DequantizeLinear", [q, spread], f"{layer.name}/weight/float", blocks)
    floats.type, floats.shape = layer.weight.type, ir.Shape(values.shape)
    layer.node.replace_input_with(layer.weight_input, floats)


def _round_to_nvfp4(model: ir.Model, x: ir.Value, scale: float) -> ir.Value:
    """Return `x` in FP4: each block of a row gets an E4M3 scale as it runs, below the float `scale`."""
    whole = share_constant(model, f"{x.name}/float4/scale", ir.Tensor(np.asarray(scale, np.float32)))
    stem, _, number = f"{whole.name}".rpartition("/scale")
    name = stem + number
    attributes = {"axis": -1, "block_size": NVFP4_BLOCK, "scale_type": int(ir.DataType.FLOAT8E4M3FN)}
    types = (ir.DataType.FLOAT4E2M1, ir.DataType.FLOAT8E4M3FN)
    q, s = _scale_as_it_runs(model, TO_NVFP4, [x, whole], name, attributes, types)
    spread = append(model, "DequantizeLinear", [s, whole], f"{name}/scales/float")
    spread.type, spread.shape = x.type, s.shape
    blocks = {"axis": -1, "block_size": NVFP4_BLOCK}
    return append(model, "DequantizeLinear", [q, spread], f"{name}/float", blocks)


def _write_mxfp8(model: ir.Model, layer: GraphLayer, weight: QuantizedWeight) -> None:
    """Write E4M3 numbers and, as bytes, the exponents of their powers of two."""
    axis, (values, exponents) = _turn(layer, weight.values, weight.stored["exponents"])
    q = share_constant(model, f"{layer.weight.name}/float8", ir.Tensor(values, dtype=ir.DataType.FLOAT8E4M3FN))
    s = share_constant(model, f"{layer.weight.name}/exponent", ir.Tensor(exponents))
    floats = _unpack_mxfp8(model, q, s, f"{layer.name}/weight/float", axis)
    floats.type, floats.shape = layer.weight.type, ir.Shape(values.shape)
    layer.node.replace_input_with(layer.weight_input, floats)


def _round_to_mxfp8(model: ir.Model, x: ir.Value) -> ir.Value:
    """Return `x` in FP8 below powers of two that each block of a row gets as it runs; nothing is stored for it."""
    attributes = {"axis": -1, "block_size": MX_BLOCK, "output_dtype": int(ir.DataType.FLOAT8E4M3FN)}
    types = (ir.DataType.FLOAT8E4M3FN, ir.DataType.UINT8)
    q, s = _scale_as_it_runs(model, TO_MXFP8, [x], f"{x.name}/mxfp8", attributes, types)
    return _unpack_mxfp8(model, q, s, f"{x.name}/mxfp8/float", -1)


def _unpack_mxfp8(model: ir.Model, values: ir.Value, exponents: ir.Value, name: str, axis: int) -> ir.Value:
    attributes = {"axis": axis, "block_size": MX_BLOCK, "output_dtype": int(ir.DataType.FLOAT)}
    return append(model, FROM_MXFP8, [values, exponents], name, attributes, DOMAIN)


def _scale_as_it_runs(
    model: ir.Model,
    op: str,
    inputs: list[ir.Value],
    name: str,
    attributes: dict[str, int],
    types: tuple[ir.DataType, ir.DataType],
) -> tuple[ir.Value, ir.Value]:
    """Add a node of TensorRT's that gives (numbers, scales) of its first input."""
    node = ir.node(op, inputs, attributes=attributes, domain=DOMAIN, num_outputs=2, name=name)
    shape = inputs[0].shape
    assert shape is not None
    width = shape[-1]
    assert isinstance(width, int)
    shapes = ([*shape], [*shape[:-1], width // attributes["block_size"]])
    for value, suffix, kind, sizes in zip(node.outputs, ("quantized", "scales"), types, shapes, strict=True):
        value.name, value.type, value.shape = f"{name}/{suffix}", ir.TensorType(kind), ir.Shape(sizes)
    model.graph.append(node)
    numbers, scales = node.outputs
    return numbers, scales
