"""Rewrite a graph exactly around its convolutions: normalisations folded in, shortcuts written as what they are."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compress.graph.edit import alone_reads, initializer, take_over, tidy, uses_of
from compress.graph.layers import constant, is_constant


def fold_batchnorms(model: ir.Model) -> list[str]:
    """Fold each BatchNormalization that alone reads a Conv's output, in place; graph outputs keep their names.

    W' = W * g, b' = (b - mean) * g + beta with g = gamma / sqrt(variance + epsilon), computed in float64.
    Returns the names of the nodes that went (the exporter folds most of them itself).
    """
    folded = []
    for node in [node for node in model.graph if node.op_type == "BatchNormalization"]:
        conv = node.inputs[0].producer() if node.inputs[0] is not None else None
        if conv is None or conv.op_type != "Conv" or not all(is_constant(v) for v in conv.inputs[1:] if v is not None):
            continue
        if not alone_reads(node, conv.outputs[0]) or not all(is_constant(v) for v in node.inputs[1:]):
            continue
        _fold(model, conv, node)
        folded.append(node.name or "BatchNormalization")
    tidy(model)
    return folded


def _fold(model: ir.Model, conv: ir.Node, norm: ir.Node) -> None:
    gamma, beta, mean, variance = (constant(value).astype(np.float64) for value in norm.inputs[1:])
    epsilon = norm.attributes["epsilon"].as_float() if "epsilon" in norm.attributes else 1e-5
    gain = gamma / np.sqrt(variance + epsilon)  # [out]
    weight, value = constant(conv.inputs[1]), conv.inputs[1]
    assert value is not None
    shared = len(uses_of(value)) > 1  # then it is folded into a copy
    name = f"{conv.name}/{value.name}" if shared else value.name
    has_bias = len(conv.inputs) > 2 and conv.inputs[2] is not None
    bias = constant(conv.inputs[2]).astype(np.float64) if has_bias else np.zeros(len(gain))
    folded = (weight * gain.reshape(-1, *[1] * (weight.ndim - 1))).astype(np.float32)
    weight_value = initializer(model, str(name), folded)
    bias_value = initializer(model, f"{name}_bias", ((bias - mean) * gain + beta).astype(np.float32))
    conv.replace_input_with(1, weight_value)
    if len(conv.inputs) < 3:
        conv.resize_inputs(3)
    conv.replace_input_with(2, bias_value)
    take_over(model, norm.outputs[0], conv.outputs[0])


def shortcuts_to_convolutions(model: ir.Model) -> list[str]:
    """Replace each such Slice/Pad chain on an [N, C, H, W] float32 tensor, in place; returns the new nodes' names.

    Written as Slice, Slice, Pad they leave the integer domain: each int8 kernel around them stops for a copy in float.
    The convolution with a 0/1 selection weight computes the same values, stays int8, and its weight is exact in eight
    bits.
    """
    made = []
    for pad in [node for node in model.graph if node.op_type == "Pad"]:
        strides, source = _follow_strides(pad.inputs[0])
        channels = _match_channel_padding(pad, source)
        if source is None or strides is None or channels is None:
            continue
        made.append(_replace_pad(model, pad, source, strides, channels))
    tidy(model)
    return made


def _follow_strides(value: ir.Value | None) -> tuple[dict[int, int] | None, ir.Value | None]:
    """Follow whole-range strided Slices of axes 2 and 3 upwards: (axis -> stride, where they start)."""
    strides: dict[int, int] = {}
    while value is not None and (node := value.producer()) is not None and node.op_type == "Slice":
        if len(node.inputs) != 5 or not all(is_constant(v) for v in node.inputs[1:]) or len(list(value.uses())) != 1:
            return None, None
        starts, ends, axes, steps = (constant(v).ravel() for v in node.inputs[1:])
        if any(s != 0 for s in starts) or any(e < 2**31 - 1 for e in ends) or any(a not in (2, 3) for a in axes):
            return None, None
        if any(s < 1 for s in steps):
            return None, None
        strides |= {int(a): strides.get(int(a), 1) * int(s) for a, s in zip(axes, steps, strict=True)}
        value = node.inputs[0]
    return (strides or None), value


def _match_channel_padding(pad: ir.Node, source: ir.Value | None) -> tuple[int, int, int] | None:
    """Return (before, channels, after) if `pad` only adds zero channels to a tensor of known channel count."""
    if source is None or source.shape is None or len(source.shape) != 4 or not isinstance(source.shape[1], int):
        return None
    if source.dtype != ir.DataType.FLOAT:
        return None
    if "mode" in pad.attributes and pad.attributes["mode"].as_string() != "constant":
        return None
    filling = pad.inputs[2] if len(pad.inputs) > 2 else None
    if filling is not None and (not is_constant(filling) or constant(filling).any()):
        return None
    if not is_constant(pad.inputs[1]) or (len(pad.inputs) > 3 and pad.inputs[3] is not None):
        return None
    pads = [int(p) for p in constant(pad.inputs[1])]
    if len(pads) != 8 or any(p for i, p in enumerate(pads) if i not in (1, 5)) or min(pads) < 0:
        return None
    return pads[1], source.shape[1], pads[5]


def _replace_pad(
    model: ir.Model, pad: ir.Node, source: ir.Value, strides: dict[int, int], channels: tuple[int, int, int]
) -> str:
    before, count, after = channels
    weight = np.zeros((before + count + after, count, 1, 1), np.float32)
    weight[np.arange(count) + before, np.arange(count)] = 1.0
    out = pad.outputs[0]
    name = f"{out.name}/select"
    value = initializer(model, f"{name}.weight", weight)
    conv = ir.node("Conv", [source, value], name=name, attributes={"strides": [strides.get(2, 1), strides.get(3, 1)]})
    model.graph.insert_before(pad, conv)
    take_over(model, out, conv.outputs[0])
    return name
