"""Writing a quantized state into its graph as standard ONNX, in the flavour a target is fast on.

Flavours come from one calibration: `u8s8` (uint8 activations with a zero point, int8 per-channel weights, int32 biases), which
ONNX Runtime's CPU kernels and OpenVINO fuse; `s8s8` (symmetric int8 activations, float biases), which TensorRT fuses.
Dynamic int8 is written as DynamicQuantizeLinear and MatMulInteger, which is the only standard form it has.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compress.graph.edit import append, initializer, reroute, tidy, uses_of, values_by_name
from compress.graph.layers import GraphLayer, constant, find_layers
from compress.graph.run import clone
from compress.quantize.placement import Placement, place
from compress.quantize.rounding import QuantizedWeight
from compress.quantize.state import Flavour, GraphState


def write_state(state: GraphState, flavour: Flavour) -> ir.Model:
    """A new graph in which the state's layers are quantized; `state` is left as it is."""
    model = clone(state.model)
    layers = {layer.name: layer for layer in find_layers(model)}
    integer = [layers[name] for name in state.integer]
    if state.dynamic:
        for layer in integer:
            _write_dynamic(model, layer, state)
    else:
        _write_static(model, integer, state, flavour)
    for name in state.weight_only:
        _write_weight(model, layers[name], state.weights[name])
    tidy(model)
    return model


def _write_static(model: ir.Model, layers: list[GraphLayer], state: GraphState, flavour: Flavour) -> None:
    placement = place(model, layers, state.placement, state.attention, state.leave_out)
    values = values_by_name(model)
    scales: dict[ir.Node, np.ndarray] = {}
    for name, uses in placement.consumers.items():
        if flavour == "s8s8" and placement.only_added(name):
            continue  # TensorRT fuses the layer, the Add and the requantization after it
        scale, zero_point = state.ranges[placement.source(name)].parameters(flavour)
        targets = uses if name not in placement.writers else uses_of(values[name])
        scales |= {node: scale for node, index in targets if index == 0}
        _insert_pair(model, values[name], targets, scale, zero_point)
    for layer in layers:
        _write_weight(model, layer, state.weights[layer.name])
        _write_bias(model, layer, state, scales.get(layer.node) if flavour == "u8s8" else None)


def _insert_pair(
    model: ir.Model, value: ir.Value, uses: list[tuple[ir.Node, int]], scale: np.ndarray, zero_point: np.ndarray
) -> None:
    """value -> QuantizeLinear -> DequantizeLinear -> the given uses."""
    s = initializer(model, f"{value.name}/scale", scale)
    z = initializer(model, f"{value.name}/zero_point", zero_point)
    quantized = append(model, "QuantizeLinear", [value, s, z], f"{value.name}/quantized")
    quantized.type, quantized.shape = ir.TensorType(ir.DataType(z.dtype)), value.shape
    dequantized = append(model, "DequantizeLinear", [quantized, s, z], f"{value.name}/dequantized")
    dequantized.type, dequantized.shape = value.type, value.shape
    reroute(uses, dequantized)


def _write_weight(model: ir.Model, layer: GraphLayer, weight: QuantizedWeight) -> None:
    if layer.op == "Gather":
        return _write_embedding(model, layer, weight)
    base, transposed = layer.weight.name, layer.axis == 1
    values = np.ascontiguousarray(weight.values.T if transposed else weight.values)
    if weight.scales.shape[1] == 1:  # one scale for each output channel
        scales, zeros, attributes = weight.scales[:, 0], _zeros(weight)[:, 0], {"axis": layer.axis}
    else:  # [out, groups] -> the layout of the weight
        scales, zeros = weight.scales, _zeros(weight)
        if transposed:
            scales, zeros = scales.T, zeros.T
        attributes = {"axis": 1 - layer.axis, "block_size": weight.group_size}
    q = initializer(model, f"{base}/int{weight.bits}", _tensor(values, weight, f"{base}/int{weight.bits}"))
    s = initializer(model, f"{base}/scale", np.ascontiguousarray(scales))
    z = initializer(model, f"{base}/zero_point", _tensor(np.ascontiguousarray(zeros), weight, f"{base}/zero_point"))
    inputs = [q, s] if weight.zero_points is None and weight.bits == 4 else [q, s, z]
    dequantized = append(model, "DequantizeLinear", inputs, f"{base}/dequantized", attributes)
    layer.node.replace_input_with(layer.weight_input, dequantized)
    return None


def _zeros(weight: QuantizedWeight) -> np.ndarray:
    return np.zeros(weight.scales.shape, np.int8) if weight.zero_points is None else weight.zero_points


def _tensor(values: np.ndarray, weight: QuantizedWeight, name: str) -> np.ndarray | ir.TensorProtocol:
    """int8 as it is; four bits as ONNX's INT4 / UINT4."""
    if weight.bits == 8:
        return values
    kind = ir.DataType.INT4 if values.dtype == np.int8 else ir.DataType.UINT4
    return ir.Tensor(values.astype(kind.numpy()), dtype=kind, name=name)


def _write_embedding(model: ir.Model, layer: GraphLayer, weight: QuantizedWeight) -> None:
    """Look up integers and dequantize only the rows found: a table dequantized first would be, whole, on every run.

    `weight` is the table transposed, [width, rows]: one scale for each column.
    """
    base = layer.weight.name
    q = initializer(model, f"{base}/int8", np.ascontiguousarray(weight.values.T))
    s = initializer(model, f"{base}/scale", weight.scales[:, 0])
    z = initializer(model, f"{base}/zero_point", np.zeros(len(weight.scales), np.int8))
    layer.node.replace_input_with(layer.weight_input, q)
    found = layer.node.outputs[0]
    uses, kind = uses_of(found), found.type
    found.type = ir.TensorType(ir.DataType.INT8)
    dequantized = append(model, "DequantizeLinear", [found, s, z], f"{layer.node.name}/dequantized", {"axis": -1})
    dequantized.type, dequantized.shape = kind, found.shape
    reroute(uses, dequantized)


def _write_bias(model: ir.Model, layer: GraphLayer, state: GraphState, input_scale: np.ndarray | None) -> None:
    """int32 with scale = input scale x weight scale where integer kernels add it; float otherwise."""
    if layer.bias is None:
        return
    bias = state.biases.get(layer.name, constant(layer.bias)).astype(np.float32)
    if input_scale is None or layer.bias_add is not None:
        value = initializer(model, f"{layer.name}/bias", bias)
    else:
        scales = (input_scale * state.weights[layer.name].scales[:, 0]).astype(np.float32)
        values = np.clip(np.round(bias.astype(np.float64) / scales), -(2**31) + 1, 2**31 - 1).astype(np.int32)
        q = initializer(model, f"{layer.name}/bias/int32", values)
        s = initializer(model, f"{layer.name}/bias/scale", scales)
        z = initializer(model, f"{layer.name}/bias/zero_point", np.zeros(len(scales), np.int32))
        value = append(model, "DequantizeLinear", [q, s, z], f"{layer.name}/bias/dequantized", {"axis": 0})
    holder = layer.bias_add or layer.node
    index = next(i for i, v in enumerate(holder.inputs) if v is layer.bias)
    holder.replace_input_with(index, value)


def _write_dynamic(model: ir.Model, layer: GraphLayer, state: GraphState) -> None:
    """x -> DynamicQuantizeLinear -> MatMulInteger -> Cast -> Mul(scales): ranges are measured on every run."""
    weight = state.weights[layer.name]
    if layer.op == "Gather":
        return _write_embedding(model, layer, weight)
    base, x = layer.weight.name, layer.data_input
    quantized, x_scale, x_zero = _dynamic_input(model, x)
    q = initializer(model, f"{base}/int8", np.ascontiguousarray(weight.values.T))  # [in, out]
    s = initializer(model, f"{base}/scale", weight.scales[:, 0])
    z = initializer(model, f"{base}/zero_point", np.zeros(len(weight.scales), np.int8))
    out = layer.node.outputs[0]
    product = append(model, "MatMulInteger", [quantized, q, x_zero, z], f"{base}/product")
    as_float = append(model, "Cast", [product], f"{base}/product/float", {"to": ir.DataType.FLOAT})
    scale = append(model, "Mul", [x_scale, s], f"{base}/product/scale")
    result = append(model, "Mul", [as_float, scale], f"{base}/result")
    if layer.op == "Gemm" and layer.bias is not None:
        bias = initializer(model, f"{layer.name}/bias", state.biases.get(layer.name, constant(layer.bias)))
        result = append(model, "Add", [result, bias], f"{base}/biased")
    elif layer.name in state.biases and layer.bias_add is not None:
        _write_bias(model, layer, state, None)
    result.type, result.shape = out.type, out.shape
    reroute(uses_of(out), result)
    for i, value in enumerate(model.graph.outputs):
        if value is out:
            model.graph.outputs[i] = result
            out.name, result.name = f"{base}/float", out.name
    return None


def _dynamic_input(model: ir.Model, x: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """One DynamicQuantizeLinear for all layers that read `x`: (integers, scale, zero point)."""
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
    """Where the pairs of a static state stand in its own float graph."""
    chosen = set(state.integer)
    layers = [layer for layer in find_layers(state.model) if layer.name in chosen]
    return place(state.model, layers, state.placement, state.attention, state.leave_out)
