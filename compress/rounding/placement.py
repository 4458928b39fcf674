"""Where quantize/dequantize pairs go: the decision that makes int8 fast or slow, accurate or ruined.

Two placements. `all` keeps activations in eight bits from layer to layer, which is what convolutional nets gain from.
`inputs` quantizes only what matrix products read and leaves their outputs, the residual stream and normalisation in
float, because one scale for a transformer's residual stream must cover outliers hundreds of times its median.
A convolution among them (patches, a depthwise mixer) also writes eight bits: ONNX Runtime has no integer convolution
with a float output, and would run it in float without its fast layout (measured on a small ConvNeXt: 0.47x).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

import onnx_ir as ir

from compress.graph.layers import GraphLayer, is_constant

Kind = Literal["all", "inputs"]
Use = tuple[ir.Node, int]
ACTIVATIONS = {"Relu", "Clip"}
"""Fused into the layer before them, so the pair goes after them."""
MOVES = {"Reshape", "Transpose", "Slice", "Flatten", "Squeeze", "Unsqueeze", "Pad", "MaxPool", "Identity"}
"""Give back values they read (or zero): their output shares their input's scale."""
POOLS = {"AveragePool", "GlobalAveragePool"}


@dataclass(frozen=True)
class Placement:
    """Which tensors are quantized, for whom.

    `consumers`: tensor -> the (node, input index) pairs that read its quantized form; none listed means all of them.
    `writers`: tensor -> the operator after which its pair stands ("Conv", "Add", ...). `shared`: tensor -> the tensor
    whose scale it takes.
    """

    consumers: dict[str, list[Use]] = field(default_factory=dict)
    writers: dict[str, str] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)

    def read(self, node: ir.Node, indices: Iterable[int]) -> None:
        """Let `node` read these inputs quantized (constants are not activations)."""
        for index in indices:
            value = node.inputs[index]
            if value is not None and value.name and not is_constant(value):
                uses = self.consumers.setdefault(value.name, [])
                if (node, index) not in uses:
                    uses.append((node, index))

    def write(self, value: ir.Value, op: str, shares: ir.Value | None = None) -> None:
        """Quantize `value` for all that read it, after the activation that alone reads it; never a graph output."""
        if shares is None:
            value = after_activation(value)
        if value.is_graph_output() or not value.name:
            return
        self.consumers.setdefault(value.name, [])
        self.writers[value.name] = op
        if shares is not None and shares.name:
            self.shared[value.name] = self.shared.get(shares.name, shares.name)

    def source(self, name: str) -> str:
        """Return the tensor whose range `name` is quantized with."""
        return self.shared.get(name, name)

    def only_added(self, name: str) -> bool:
        """Return whether `name` is a layer's output that nothing but Adds reads."""
        uses = self.consumers[name]
        return name in self.writers and bool(uses) and all(node.op_type == "Add" for node, _ in uses)


def after_activation(value: ir.Value) -> ir.Value:
    """Return where a layer's output is quantized: after the activation that alone reads it."""
    uses = list(value.uses())
    return uses[0].node.outputs[0] if len(uses) == 1 and uses[0].node.op_type in ACTIVATIONS else value


def decide_kind(layers: Collection[GraphLayer]) -> Kind:
    """Return `all` for graphs whose layers are mostly convolutions, `inputs` for the rest."""
    products = [layer for layer in layers if layer.op != "Gather"]
    return "all" if 2 * sum(layer.op == "Conv" for layer in products) > len(products) else "inputs"


def place(
    model: ir.Model,
    layers: Collection[GraphLayer],
    kind: Kind,
    attention: bool = False,
    leave_out: Collection[str] = (),
) -> Placement:
    """Return the placement for these layers; those that stay float are simply not among them.

    `attention` (for `inputs`): also quantize what products of two activations read. `leave_out`: operators whose
    outputs stay float, such as "Add".
    """
    placement = Placement()
    quantized = {layer.node: layer for layer in layers if layer.op != "Gather"}
    if kind == "inputs":
        _place_inputs(model, quantized, placement, attention, set(leave_out))
    else:
        _place_everywhere(model, quantized, placement, set(leave_out))
    return placement


def _place_inputs(
    model: ir.Model,
    quantized: dict[ir.Node, GraphLayer],
    placement: Placement,
    attention: bool,
    leave_out: set[str],
) -> None:
    for node in model.graph:
        if node in quantized:
            placement.read(node, [0])
            if node.op_type == "Conv" and "Conv" not in leave_out:
                placement.write(quantized[node].output, "Conv")
        elif attention and node.op_type == "MatMul" and not any(is_constant(v) for v in node.inputs):
            placement.read(node, [0, 1])


def _place_everywhere(
    model: ir.Model, quantized: dict[ir.Node, GraphLayer], placement: Placement, leave_out: set[str]
) -> None:
    written = {layer.output for layer in quantized.values()}
    for node in model.graph:
        op = node.op_type
        if node in quantized:
            placement.read(node, [0])
            if op not in leave_out:
                placement.write(quantized[node].output, op)
        elif op in leave_out:
            continue
        elif op == "Add" and not any(is_constant(v) for v in node.inputs) and written & set(node.inputs):
            placement.read(node, [0, 1])
            placement.write(node.outputs[0], op)
        elif op in POOLS | MOVES and node.inputs[0] is not None and node.inputs[0].name in placement.consumers:
            placement.read(node, [0])
            placement.write(node.outputs[0], op, shares=node.inputs[0] if op in MOVES else None)
