"""Writing a quantized state into its graph as standard ONNX, in the variant a target is fast on.

Flavours come from one calibration: `u8s8` (uint8 activations with a zero point, int8 per-channel weights, int32
biases), which ONNX Runtime's CPU kernels and OpenVINO fuse; `s8s8` (symmetric int8 activations, float biases), which
TensorRT fuses. Dynamic int8 is written as DynamicQuantizeLinear and MatMulInteger, which is the only standard form it
has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from compress.formats.targets import KERNEL_BLOCKS
from compress.graph.edit import append, initializer, reroute, share_constant, take_over, tidy, uses_of, values_by_name
from compress.graph.layers import GraphLayer, constant, find_layers, int_attribute
from compress.graph.run import clone
from compress.graph.stored import StoredTensor
from compress.rounding.float_blocks import is_float_block, write_float_blocks
from compress.rounding.placement import Placement, Use, place
from compress.rounding.quantized_weight import SMALLEST_SCALE, QuantizedWeight, UnreadWeight
from compress.rounding.state import FLOAT8, GraphState, Variant

BLOCK_OPSET = 21
"""The first opset with block-wise and 4-bit DequantizeLinear; a graph of opset 20 may be called one of 21 as it is."""
LONG_NAME = 64
"""Letters. A pair and its readers hold the name of its tensor some 14 times: those of up to 300 letters that TensorFlow
gave basic-pitch's (0.2 MB) took more room than all weights."""


def write_state(state: GraphState, variant: Variant) -> ir.Model:
    """Write a new graph in which the state's layers are quantized; `state` is left as it is."""
    model = clone(state.model)
    layers = {layer.name: layer for layer in find_layers(model)}
    integer = [layers[name] for name in state.integer]
    if state.dynamic:
        for layer in integer:
            _write_dynamic(model, layer, state)
    else:
        _write_static(model, integer, state, variant)
    for name in state.weight_only:
        weight, scale = state.weights[name], state.input_scales.get(name)
        _write_rounded(model, layers[name], weight, variant, name in state.unpacked, scale)
    if any(_needs_blocks(node) for node in model.graph):
        model.opset_imports[""] = max(model.opset_imports[""], BLOCK_OPSET)
    tidy(model)
    return model


def _write_rounded(
    model: ir.Model,
    layer: GraphLayer,
    weight: QuantizedWeight,
    variant: Variant,
    unpack: bool,
    input_scale: float | None = None,
) -> None:
    """Write a layer whose weights are rounded, and, for `write_float_blocks`, what it reads."""
    if layer.op == "Gather" and weight.group_size > 0:
        _write_table(model, layer, in_kernel_blocks(weight, variant))
    elif layer.op == "Gather":
        _write_embedding(model, layer, weight, variant)
    elif is_float_block(weight) and variant == "u8s8":
        _write_floats(model, layer, weight)  # CPU runtimes have no operator that reads FP4, or scales of few bits
    elif is_float_block(weight):
        write_float_blocks(model, layer, weight, input_scale)
        _avoid_gemm(model, layer)
    elif unpack or not _has_kernel(weight):
        _write_unpacked(model, layer, weight, variant)
    else:
        weight = in_kernel_blocks(weight, variant)
        _write_weight(model, layer, weight)
        if weight.group_size > 0:
            _avoid_gemm(model, layer)


def _has_kernel(weight: QuantizedWeight) -> bool:
    """Return whether a runtime may multiply by these weights as they are stored: convolutions have no such kernels."""
    return weight.values.ndim == 2 or weight.values.dtype == FLOAT8


def _needs_blocks(node: ir.Node) -> bool:
    """Return whether `node` reads 4-bit integers, or is a DequantizeLinear of blocks."""
    values = node.inputs[0] if node.op_type in ("Cast", "DequantizeLinear") else None
    small = values is not None and values.dtype in (ir.DataType.INT4, ir.DataType.UINT4)
    return small or int_attribute(node, "block_size", 0) > 0


def in_kernel_blocks(weight: QuantizedWeight, variant: Variant) -> QuantizedWeight:
    """Return the same numbers with each scale repeated over blocks that kernels have, where groups are not such blocks.

    A channel (-1), a tensor (0) and any other group become the largest blocks that divide them. Groups that no block
    divides, and FP8 weights, for which no kernel is known, stay as they are.
    """
    rows, n_inputs = weight.values.shape[0], weight.values.size // weight.values.shape[0]
    group = weight.group_size if weight.group_size > 0 else n_inputs
    block = next((size for size in KERNEL_BLOCKS[variant] if group % size == 0), 0)
    if block in (0, weight.group_size) or weight.values.ndim != 2 or weight.values.dtype == FLOAT8:
        return weight
    scales = _repeat_over_blocks(weight.scales, rows, n_inputs // block)
    zeros = None if weight.zero_points is None else _repeat_over_blocks(weight.zero_points, rows, n_inputs // block)
    return weight.with_parts(scales, zeros, block)


def _repeat_over_blocks(parts: np.ndarray, rows: int, blocks: int) -> np.ndarray:
    """Repeat [out or 1, groups] to [out, blocks], `groups` dividing `blocks`."""
    spread = np.broadcast_to(parts, (rows, parts.shape[1]))
    return np.repeat(spread, blocks // parts.shape[1], axis=1)


def _write_static(model: ir.Model, layers: list[GraphLayer], state: GraphState, variant: Variant) -> None:
    scales: dict[ir.Node, np.ndarray] = {}
    for value, source, uses in find_rounded_tensors(model, layers, state, variant):
        scale, zero_point = state.ranges[source].parameters(variant, state.in_float8)
        scales |= {node: scale for node, index in uses if index == 0}
        insert_pair(model, value, uses, scale, zero_point)
    for layer in layers:
        weight = state.weights[layer.name]
        whole = integer_bias(layer, variant) and not state.in_float8
        input_scale = scales.get(layer.node) if whole else None
        if input_scale is not None:
            weight = fit_scales_to_bias(weight, get_bias(layer, state), input_scale)
        _write_weight(model, layer, weight)
        _write_bias(model, layer, state, None if input_scale is None else input_scale * weight.scales[:, 0])


def find_rounded_tensors(
    model: ir.Model, layers: list[GraphLayer], state: GraphState, variant: Variant
) -> Iterator[tuple[ir.Value, str, list[Use]]]:
    """Yield (tensor of `model`, tensor whose range it is rounded with, who is to read it rounded) for each rounded one.

    Those of which calibration saw no range stay float. Readers are asked for as the iterator goes on, so `model` may be
    changed on the way.
    """
    placement = place(model, layers, state.placement, state.attention, state.leave_out)
    values = values_by_name(model)
    for name, uses in placement.consumers.items():
        if variant == "s8s8" and placement.only_added(name):
            continue  # TensorRT fuses the layer, the Add and the requantization after it
        if placement.source(name) not in state.ranges:
            continue
        readers = uses if name not in placement.writers else uses_of(values[name])
        yield values[name], placement.source(name), readers


def integer_bias(layer: GraphLayer, variant: Variant) -> bool:
    """Return whether an integer kernel adds the layer's bias, which is then int32."""
    return variant == "u8s8" and layer.bias is not None and layer.bias_add is None


def insert_pair(
    model: ir.Model, value: ir.Value, uses: list[tuple[ir.Node, int]], scale: np.ndarray, zero_point: np.ndarray
) -> None:
    """Insert value -> QuantizeLinear -> DequantizeLinear -> the given uses."""
    name = _shorten(f"{value.name}")
    s = initializer(model, f"{name}/scale", scale)
    z = initializer(model, f"{name}/zero_point", ir.Tensor(zero_point))
    quantized = append(model, "QuantizeLinear", [value, s, z], f"{name}/quantized")
    quantized.type, quantized.shape = z.type, value.shape
    dequantized = append(model, "DequantizeLinear", [quantized, s, z], f"{name}/float")
    dequantized.type, dequantized.shape = value.type, value.shape
    reroute(uses, dequantized)


def _shorten(name: str) -> str:
    """Return a tensor's name as others are named after it, the beginning of a long one as a digest."""
    if len(name) <= LONG_NAME:
        return name
    return f"{hashlib.sha256(name.encode()).hexdigest()[:8]}~{name[9 - LONG_NAME :]}"


def _write_weight(model: ir.Model, layer: GraphLayer, weight: QuantizedWeight) -> None:
    axis, scales, zeros = layer.axis, weight.scales, _get_zero_points(weight)
    if weight.group_size > 0 and layer.op == "Gemm":
        axis = 1  # it becomes a MatMul, see `_avoid_gemm`
    values = _values_tensor(weight, turned=axis == 1)
    if axis == 1:  # [out, in] -> [in, out], and [out, groups] with it
        scales, zeros = scales.T, zeros.T
    attributes: dict[str, int] = {}
    if weight.group_size > 0:
        attributes = {"axis": 1 - axis, "block_size": weight.group_size}
    elif weight.group_size == 0 and weight.values.dtype == FLOAT8:
        scales = scales.reshape(())  # kernels know one scale in all by its shape
    else:
        scales, zeros = (np.broadcast_to(v.ravel(), (weight.values.shape[0],)) for v in (scales, zeros))
        attributes = {"axis": axis}
    q = _add_constant(model, layer, _choose_type(weight), values)
    inputs = [q, _add_constant(model, layer, "scale", _to_tensor(scales, 32))]
    if weight.zero_points is not None or (weight.bits > 4 and weight.values.dtype != FLOAT8):
        inputs.append(_add_constant(model, layer, "zero_point", _to_tensor(zeros, weight.bits)))
    dequantized = append(model, "DequantizeLinear", inputs, f"{_shorten(layer.name)}/weight/float", attributes)
    dequantized.type, dequantized.shape = layer.weight.type, ir.Shape(values.shape.numpy())
    layer.node.replace_input_with(layer.weight_input, dequantized)


def _write_floats(model: ir.Model, layer: GraphLayer, weight: QuantizedWeight) -> None:
    """Write the floats that rounded weights stand for."""
    rounded = weight.dequantize()
    value = initializer(model, f"{layer.name}/weight/float", rounded.T if layer.axis == 1 else rounded)
    layer.node.replace_input_with(layer.weight_input, value)


def _write_unpacked(model: ir.Model, layer: GraphLayer, weight: QuantizedWeight, variant: Variant) -> None:
    """Write integer weights as Cast and Mul: constants, which a runtime folds to floats once, as it loads them.

    A DequantizeLinear it would keep, for a kernel that takes integers, and compute on every call. Not for TensorRT,
    whose file is an engine: there the rounded weights are floats.
    """
    if variant == "s8s8":
        _write_floats(model, layer, weight)
        return
    name, (rows, groups) = f"{layer.name}/weight", (weight.values.shape[0], weight.scales.shape[1])
    values, parts = weight.values, [np.broadcast_to(weight.scales, (rows, groups))]
    if weight.zero_points is not None:
        parts.insert(0, np.broadcast_to(weight.zero_points, (rows, groups)).astype(np.float32))
    if layer.axis == 1:  # [out, in] -> [in, out]
        values, parts = values.T, [part.T for part in parts]
    by_group = (groups, -1, rows) if layer.axis == 1 else (rows, groups, -1)
    spread = by_group
    if groups == 1:
        spread = (1, rows) if layer.axis == 1 else (rows, *[1] * (values.ndim - 1))
    q = _add_constant(model, layer, _choose_type(weight), _to_tensor(values, weight.bits))
    floats = append(model, "Cast", [q], f"{name}/cast", {"to": ir.DataType.FLOAT})
    if groups > 1:
        shape = initializer(model, f"{name}/groups", np.array(by_group))
        floats = append(model, "Reshape", [floats, shape], f"{name}/grouped")
    steps = [("Sub", "zero", "centred"), ("Mul", "scale", "scaled")][-len(parts) :]
    for part, (op, suffix, result) in zip(parts, steps, strict=True):
        sizes = [1 if size == -1 else size for size in spread]
        factor = _add_constant(model, layer, suffix, _to_tensor(part.reshape(sizes), 32))
        floats = append(model, op, [floats, factor], f"{name}/{result}")
    if groups > 1:
        shape = initializer(model, f"{name}/shape", np.array(values.shape))
        floats = append(model, "Reshape", [floats, shape], f"{name}/float")
    floats.type, floats.shape = layer.weight.type, layer.weight.shape
    layer.node.replace_input_with(layer.weight_input, floats)


def _avoid_gemm(model: ir.Model, layer: GraphLayer) -> None:
    """Turn Gemm, or MatMul and Add, into MatMul and Sum.

    Of a Gemm ONNX Runtime unpacks the blocks on every call, ten times slower than floats; and where x is a matrix, it
    makes a Gemm of a MatMul and an Add before it looks at blocks.
    """
    if layer.op == "Gemm":
        x, weight, *bias = layer.node.inputs
        result = append(model, "MatMul", [x, weight], f"{layer.name}/product")
        if bias and bias[0] is not None:
            result.type, result.shape = layer.node.outputs[0].type, layer.node.outputs[0].shape
            result = append(model, "Sum", [result, bias[0]], f"{layer.name}/biased")
        take_over(model, layer.node.outputs[0], result)
    elif layer.bias_add is not None and _is_matrix(layer.data_input):
        result = append(model, "Sum", layer.bias_add.inputs, f"{layer.name}/biased")
        take_over(model, layer.bias_add.outputs[0], result)


def _is_matrix(value: ir.Value) -> bool:
    return value.shape is not None and len(value.shape) == 2


def _add_constant(model: ir.Model, layer: GraphLayer, suffix: str, tensor: ir.TensorProtocol) -> ir.Value:
    """Add a constant named after the weight: layers that share the weight share it, unless rounded differently."""
    return share_constant(model, f"{layer.weight.name}/{suffix}", tensor)


def _get_zero_points(weight: QuantizedWeight) -> np.ndarray:
    return np.zeros(weight.scales.shape, np.int8) if weight.zero_points is None else weight.zero_points


def _choose_type(weight: QuantizedWeight) -> str:
    """Return int8, int4, or float8: what ONNX has for the weight's bits."""
    return "float8" if weight.values.dtype == FLOAT8 else f"int{4 if weight.bits <= 4 else 8}"


def _values_tensor(weight: QuantizedWeight, turned: bool) -> ir.TensorProtocol:
    """Return the integers [out, in, ...] as a tensor, or `turned` [in, out]; those of a file stay in it."""

    def read() -> ir.TensorProtocol:
        return _to_tensor(weight.values.T if turned else weight.values, weight.bits)

    if not isinstance(weight, UnreadWeight):
        return read()
    values = weight.values
    shape = values.shape[::-1] if turned else values.shape
    return StoredTensor(lambda: read().numpy(), _integer_type(values.dtype, weight.bits), shape, bits=weight.bits)


def _integer_type(dtype: np.dtype[Any], bits: int) -> ir.DataType:
    """Return ONNX's type for values of numpy's: up to four bits INT4 / UINT4."""
    if bits > 4:
        return ir.DataType.from_numpy(dtype)
    return ir.DataType.INT4 if dtype == np.int8 else ir.DataType.UINT4


def _to_tensor(values: np.ndarray, bits: int) -> ir.TensorProtocol:
    """Return an array as a tensor: as it is, or up to four bits as ONNX's INT4 / UINT4."""
    if bits > 4:
        return ir.Tensor(np.asarray(values, order="C"))
    kind = _integer_type(values.dtype, bits)
    return ir.Tensor(np.ascontiguousarray(values).astype(kind.numpy()), dtype=kind)


def _write_table(model: ir.Model, layer: GraphLayer, weight: QuantizedWeight) -> None:
    """Dequantize a table [rows, width] whose rows have scales, a block of inputs each, before it is looked up in.

    Runtimes do that with constants when they load them; where one would on every call, `look_up_in_blocks` rewrites it.
    """
    inputs = [
        _add_constant(model, layer, _choose_type(weight), _to_tensor(weight.values, weight.bits)),
        _add_constant(model, layer, "scale", _to_tensor(weight.scales, 32)),
    ]
    if weight.zero_points is not None:
        inputs.append(_add_constant(model, layer, "zero_point", _to_tensor(weight.zero_points, weight.bits)))
    attributes = {"axis": 1, "block_size": weight.group_size}
    table = append(model, "DequantizeLinear", inputs, f"{layer.name}/dequantized", attributes)
    table.type, table.shape = layer.weight.type, layer.weight.shape
    layer.node.replace_input_with(layer.weight_input, table)


def _write_embedding(model: ir.Model, layer: GraphLayer, weight: QuantizedWeight, variant: Variant) -> None:
    """Look up integers and dequantize only the rows found: a table dequantized first would be, whole, on every run.

    Not for TensorRT, which takes integers for nothing but what is dequantized at once, and does so when it compiles.
    `weight` is the table transposed, [width, rows]: one scale for each column.
    """
    q, s, z = _add_columns(model, layer, weight)
    # Zeros that looked-up rows share with a layer's weights keep that layer out of int8 in OpenVINO, where shapes are
    # fixed: all-MiniLM-L6-v2 ran at 2.1 times its float speed instead of 3.0.
    scales = [s] if weight.zero_points is None else [s, z]
    if variant == "s8s8":
        table = append(model, "DequantizeLinear", [q, *scales], f"{layer.name}/dequantized", {"axis": 1})
        layer.node.replace_input_with(layer.weight_input, table)
        return
    layer.node.replace_input_with(layer.weight_input, q)
    rows = layer.node.outputs[0]
    dequantized = append(model, "DequantizeLinear", [rows, *scales], f"{layer.name}/dequantized", {"axis": -1})
    take_over(model, rows, dequantized)
    rows.type = ir.TensorType(ir.DataType.INT8)


def _add_columns(model: ir.Model, layer: GraphLayer, weight: QuantizedWeight) -> list[ir.Value]:
    """Add (integers [in, out], scales [out], zero points [out]) as constants."""
    arrays = {"int8": weight.values.T, "scale": weight.scales[:, 0], "zero_point": _get_zero_points(weight)[:, 0]}
    return [_add_constant(model, layer, suffix, _to_tensor(array, 8)) for suffix, array in arrays.items()]


def fit_scales_to_bias(weight: QuantizedWeight, bias: np.ndarray, input_scale: np.ndarray) -> QuantizedWeight:
    """Return the weight [out, ...] with larger scales where the bias [out], in steps of both scales, is no int32.

    A channel whose inputs and weights are that small beside its bias adds a hundredth of it at most: that its weights
    keep fewer bits is seen nowhere, and a bias cut off would be.
    """
    # as much of int32 is left for the sum of products that the bias is added to
    least = np.abs(bias.astype(np.float64)) / (float(input_scale) * 2.0**30)  # [out]
    growth = np.maximum(1.0, least / weight.scales[:, 0])
    if (growth == 1.0).all():
        return weight
    values = np.round(weight.values / growth.reshape(-1, *[1] * (weight.values.ndim - 1))).astype(np.int8)
    return replace(weight, values=values, scales=(weight.scales * growth[:, None]).astype(np.float32))


def get_bias(layer: GraphLayer, state: GraphState) -> np.ndarray:
    """Return the bias [out] of a layer that has one: the corrected one, else its own."""
    bias: np.ndarray = state.biases.get(layer.name, constant(layer.bias)).astype(np.float32)
    return bias


def _write_bias(model: ir.Model, layer: GraphLayer, state: GraphState, scales: np.ndarray | None) -> None:
    """Write a bias: int32 with `scales` [out], input scale x weight scale, where integer kernels add it; else float."""
    if layer.bias is None:
        return
    bias = get_bias(layer, state)
    if scales is None:
        value = initializer(model, f"{layer.name}/bias", bias)
    else:
        scales = np.maximum(scales, SMALLEST_SCALE).astype(np.float32)
        values = np.clip(np.round(bias.astype(np.float64) / scales), -(2**31) + 1, 2**31 - 1).astype(np.int32)
        q = initializer(model, f"{layer.name}/bias/int32", values)
        s = initializer(model, f"{layer.name}/bias/scale", scales)
        z = initializer(model, f"{layer.name}/bias/zero_point", np.zeros(len(scales), np.int32))
        value = append(model, "DequantizeLinear", [q, s, z], f"{layer.name}/bias/float", {"axis": 0})
    holder = layer.bias_add or layer.node
    index = next(i for i, v in enumerate(holder.inputs) if v is layer.bias)
    holder.replace_input_with(index, value)


def _write_dynamic(model: ir.Model, layer: GraphLayer, state: GraphState) -> None:
    """Write x -> DynamicQuantizeLinear -> MatMulInteger -> Cast -> Mul(scales): ranges are measured on every run."""
    name = layer.name
    quantized, x_scale, x_zero = _quantize_input(model, layer.data_input)
    q, s, z = _add_columns(model, layer, state.weights[name])
    product = append(model, "MatMulInteger", [quantized, q, x_zero, z], f"{name}/product")
    as_float = append(model, "Cast", [product], f"{name}/product/float", {"to": ir.DataType.FLOAT})
    scale = append(model, "Mul", [x_scale, s], f"{name}/product/scale")
    result = append(model, "Mul", [as_float, scale], f"{name}/product/scaled")
    _write_bias(model, layer, state, None)
    if layer.op == "Gemm" and len(layer.node.inputs) > 2 and layer.node.inputs[2] is not None:
        result = append(model, "Add", [result, layer.node.inputs[2]], f"{name}/biased")
    take_over(model, layer.node.outputs[0], result)


def _quantize_input(model: ir.Model, x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Return (integers, scale, zero point) of the one DynamicQuantizeLinear for all layers that read `x`."""
    for use in x.uses():
        if use.node.op_type == "DynamicQuantizeLinear":
            q, s, z = use.node.outputs
            return q, s, z
    node = ir.node("DynamicQuantizeLinear", [x], num_outputs=3, name=f"{x.name}/dynamic")
    for value, suffix in zip(node.outputs, ("quantized", "scale", "zero_point"), strict=True):
        value.name = f"{x.name}/{suffix}"
    model.graph.append(node)
    q, s, z = node.outputs
    return q, s, z


def placement_of(state: GraphState) -> Placement:
    """Return where the pairs of a static state stand in its own float graph."""
    return place(state.model, integer_layers(state), state.placement, state.attention, state.leave_out)


def integer_layers(state: GraphState) -> list[GraphLayer]:
    """Return the layers that compute in int8, in the state's own float graph and its order."""
    chosen = set(state.integer)
    return [layer for layer in find_layers(state.model) if layer.name in chosen]
