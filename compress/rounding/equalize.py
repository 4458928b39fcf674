"""Cross-layer equalization: channels that differ in range are brought together before one scale must serve them all.

Nagel et al., Data-Free Quantization Through Weight Equalization and Bias Correction (2019), section 4.1: between two
layers with nothing but a ReLU, channel i may be divided by s_i in the first and multiplied by it in the second.
Deviation: the paper balances the two weights' ranges, because it quantizes them per tensor; ours are per channel, so
the activation's range is balanced against the second weight's, with SmoothQuant's formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from compress.graph.edit import alone_reads, initializer
from compress.graph.layers import GraphLayer, constant, is_constant


@dataclass(frozen=True)
class LayerPair:
    """Two layers with nothing but a ReLU between them, which nothing else reads. `tensor` is what the second reads."""

    first: GraphLayer
    second: GraphLayer
    tensor: str


def find_pairs(layers: Sequence[GraphLayer]) -> list[LayerPair]:
    """Return every pair of ungrouped convolutions or matrix products that can be equalized, in graph order."""
    by_output = {layer.output: layer for layer in layers if layer.op != "Gather"}
    pairs = []
    for second in by_output.values():
        value = second.data_input
        source = _skip_relu(value)
        first = by_output.get(source) if source is not None else None
        if first is None or second.groups != 1 or value.name is None or not alone_reads(second.node, value):
            continue
        if (first.op == "Conv") != (second.op == "Conv"):  # their channels stand along different axes
            continue
        if _has_own_weight(first) and _has_own_weight(second) and first.matrix().shape[0] == second.matrix().shape[1]:
            pairs.append(LayerPair(first, second, value.name))
    return pairs


def equalize_pair(model: ir.Model, pair: LayerPair, scales: np.ndarray) -> None:
    """Divide the first layer's outputs by `scales` [channels] and multiply what the second does with them, in place."""
    first, second = pair.first, pair.second
    _rescale(model, first, 1.0 / scales, along_outputs=True)
    if first.bias is not None:
        initializer(model, first.bias.name or "", (constant(first.bias) / scales).astype(np.float32))
    _rescale(model, second, scales, along_outputs=False)


def input_channel_peak(layer: GraphLayer) -> np.ndarray:
    """Return the largest magnitude of a layer's weights for each input channel, float [in]."""
    matrix = np.abs(layer.matrix())
    peak: np.ndarray = matrix.max(axis=tuple(i for i in range(matrix.ndim) if i != 1))
    return peak


def _skip_relu(value: ir.Value) -> ir.Value | None:
    """Return the input of the ReLU that made `value`, None if others read it too; `value` itself if no ReLU did."""
    node = value.producer()
    if node is None or node.op_type != "Relu":
        return value
    source = node.inputs[0]
    return source if source is not None and alone_reads(node, source) else None


def _rescale(model: ir.Model, layer: GraphLayer, factors: np.ndarray, along_outputs: bool) -> None:
    weight = constant(layer.weight)
    axis = layer.axis if along_outputs else 1 - layer.axis
    shape = [1] * weight.ndim
    shape[axis] = -1
    initializer(model, layer.weight.name or layer.name, (weight * factors.reshape(shape)).astype(np.float32))


def _has_own_weight(layer: GraphLayer) -> bool:
    """Return whether no other node reads the layer's weight or bias, and its bias is a constant vector."""
    if layer.bias is None and len(layer.node.inputs) > 2 and layer.node.inputs[2] is not None:
        return False
    constants = [layer.weight, *([layer.bias] if layer.bias is not None else [])]
    return all(is_constant(value) and len(list(value.uses())) == 1 for value in constants)
