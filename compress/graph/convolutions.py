"""Rewrite a graph exactly around its convolutions: normalisations folded in, shortcuts written as what they are."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from compress.graph.edit import alone_reads, initializer, replace_constant, take_over, tidy
from compress.graph.layers import constant, float_attribute, int_attribute, ints_attribute, is_constant, text_attribute

Affine = tuple[np.ndarray, np.ndarray]
"""(gain, shift) of each channel, float64 [channels] or [1]: y = gain * x + shift."""
WEIGHT_AXIS = {"Conv": 0, "ConvTranspose": 1, "BatchNormalization": 0}
"""Operators that a gain of each output channel can be folded into -> that channel's axis in their second input."""


def fold_channel_scales(model: ir.Model) -> list[str]:
    """Fold what scales or shifts each channel of a convolution, and alone reads it, into it, in place.

    Graph outputs keep their names. Folded are BatchNormalization and Mul, Div, Add, Sub with a constant of each
    channel, into Conv, ConvTranspose of one group, Gemm, or a BatchNormalization that nothing takes up.
    W' = W * gain, b' = b * gain + shift, in float64. Returns the names of the nodes that went (torch's exporter folds
    most norms itself).
    """
    folded = []
    for node in list(model.graph):
        if node.op_type not in AFFINE or not node.inputs:
            continue
        index = next(
            (i for i, value in enumerate(node.inputs[:2]) if value is not None and not is_constant(value)), None
        )
        value = node.inputs[index] if index is not None else None
        layer = value.producer() if value is not None else None
        if value is None or layer is None or not alone_reads(node, value) or not _takes_scale(layer):
            continue
        affine = _read_affine(node, index or 0, layer)
        if affine is not None:
            _fold(model, layer, node, *affine)
            folded.append(node.name or node.op_type)
    tidy(model)
    return folded


AFFINE = {"BatchNormalization", "Mul", "Div", "Add", "Sub"}


def _takes_scale(layer: ir.Node) -> bool:
    """Return whether gain and shift of each output channel of `layer` can become part of its constants."""
    if layer.op_type == "BatchNormalization":
        return _is_inference(layer)
    if not all(is_constant(value) for value in layer.inputs[1:] if value is not None) or len(layer.inputs) < 2:
        return False
    if layer.op_type == "ConvTranspose":
        return int_attribute(layer, "group", 1) == 1
    if layer.op_type == "Gemm":
        plain = all(float_attribute(layer, name, 1.0) == 1.0 for name in ("alpha", "beta"))
        return plain and (len(layer.inputs) < 3 or constant(layer.inputs[2]).ndim == 1)
    return layer.op_type == "Conv"


def _is_inference(norm: ir.Node) -> bool:
    """Return whether a BatchNormalization has constants for all that it needs, and one output."""
    used = [value for value in norm.outputs[1:] if value.name and value.uses()]
    constants = len(norm.inputs) == 5 and all(is_constant(value) for value in norm.inputs[1:])
    return constants and not used and not int_attribute(norm, "training_mode", 0)


def _count_channels(layer: ir.Node) -> tuple[int, int | None]:
    """Return (output channels, dimensions of the output; None: not known)."""
    weight = constant(layer.inputs[1])
    if layer.op_type == "Gemm":
        return weight.shape[0 if int_attribute(layer, "transB", 0) else 1], 2
    if layer.op_type == "BatchNormalization":
        shape = layer.outputs[0].shape
        return len(weight), len(shape) if shape is not None else None
    return weight.shape[WEIGHT_AXIS[layer.op_type]], weight.ndim


def _read_affine(node: ir.Node, index: int, layer: ir.Node) -> Affine | None:
    """Return what `node`, whose input of that number `layer` gives, does to each channel; None: something else."""
    if node.op_type == "BatchNormalization":
        if not _is_inference(node):
            return None
        gamma, beta, mean, variance = (constant(value).astype(np.float64) for value in node.inputs[1:])
        gain = gamma / np.sqrt(variance + float_attribute(node, "epsilon", 1e-5))
        return gain, beta - mean * gain
    other = node.inputs[1 - index]
    if other is None or not is_constant(other) or constant(other).dtype.kind != "f":
        return None
    channels, rank = _count_channels(layer)
    values = _read_channels(constant(other).astype(np.float64), channels, rank)
    if values is None:
        return None
    one, zero = np.ones(1), np.zeros(1)
    if node.op_type == "Mul":
        return values, zero
    if node.op_type == "Add":
        return one, values
    if node.op_type == "Sub":
        return (one, -values) if index == 0 else (-one, values)
    return (1 / values, zero) if index == 0 and values.all() else None


def _read_channels(values: np.ndarray, channels: int, rank: int | None) -> np.ndarray | None:
    """Return a constant as one number for each channel (axis 1 of `rank`), or one for all; None: it is neither."""
    if rank is None or values.ndim > rank:
        return None
    whole = (1,) * (rank - values.ndim) + values.shape
    fits = whole[1] in (1, channels) and all(size == 1 for axis, size in enumerate(whole) if axis != 1)
    return values.reshape(-1) if fits else None


def _fold(model: ir.Model, layer: ir.Node, node: ir.Node, gain: np.ndarray, shift: np.ndarray) -> None:
    """Fold y = gain * x + shift, done by `node`, into the constants of `layer`."""
    channels, _ = _count_channels(layer)
    gain, shift = np.broadcast_to(gain, (channels,)), np.broadcast_to(shift, (channels,))
    value = layer.inputs[1]
    assert value is not None
    weight = constant(value)
    axis = WEIGHT_AXIS.get(layer.op_type, 0 if int_attribute(layer, "transB", 0) else 1)
    shape = [channels if i == axis else 1 for i in range(weight.ndim)]
    bias = layer.inputs[2] if len(layer.inputs) > 2 else None
    before = np.zeros(channels) if bias is None else constant(bias).astype(np.float64)
    folded = (weight * gain.reshape(shape)).astype(weight.dtype)
    replace_constant(model, layer, 1, folded)
    name = f"{layer.name}/{layer.inputs[1].name}_bias"  # type: ignore[union-attr]
    bias_value = initializer(model, name, (before * gain + shift).astype(weight.dtype))
    if len(layer.inputs) < 3:
        layer.resize_inputs(3)
    layer.replace_input_with(2, bias_value)
    take_over(model, node.outputs[0], layer.outputs[0])
    model.graph.remove(node, safe=True)  # still there, it would read what the next of a chain is to read alone


def pool_globally(model: ir.Model) -> list[str]:
    """Write an AveragePool whose one window holds the whole input as GlobalAveragePool; return the nodes' names.

    Both give the mean of what is there: a window that reaches beyond the input is cut (`ceil_mode`). Engines refuse
    windows of a size that only a model for any image has.
    """
    written = []
    for node in model.graph:
        if node.op_type != "AveragePool" or not _covers_all(node):
            continue
        node.op_type = "GlobalAveragePool"
        node.attributes.clear()
        written.append(node.name or "")
    return written


def _covers_all(pool: ir.Node) -> bool:
    """Return whether a pool's one window, without padding, holds the whole of an input of fixed size."""
    source, given = pool.inputs[0], pool.outputs[0]
    if source is None or source.shape is None or given.shape is None:
        return False
    sizes, left = list(source.shape)[2:], list(given.shape)[2:]
    window = ints_attribute(pool, "kernel_shape", [])
    return (
        all(isinstance(size, int) and size <= side for size, side in zip(sizes, window, strict=True))
        and all(side == 1 for side in left)
        and all(step == 1 for step in ints_attribute(pool, "dilations", []))
        and not any(ints_attribute(pool, "pads", []))
        and text_attribute(pool, "auto_pad", "NOTSET") in ("NOTSET", "VALID")
    )


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
        before, count, after = channels
        weight = np.zeros((before + count + after, count, 1, 1), np.float32)
        weight[np.arange(count) + before, np.arange(count)] = 1.0
        out = pad.outputs[0]
        name = f"{out.name}/select"
        value = initializer(model, f"{name}.weight", weight)
        conv = ir.node(
            "Conv", [source, value], name=name, attributes={"strides": [strides.get(2, 1), strides.get(3, 1)]}
        )
        model.graph.insert_before(pad, conv)
        take_over(model, out, conv.outputs[0])
        made.append(name)
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
