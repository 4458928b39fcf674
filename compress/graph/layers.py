"""The layers of an ONNX graph: the nodes that multiply by, or look up in, a constant weight."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from compress.facts import LayerFacts

SCOPES = "pkg.torch.onnx.name_scopes"
"""Node metadata in which torch.onnx.export keeps the module path."""
WRAPPER = "wrapped."
"""Prefix that the loader's wrapper module adds to a Hugging Face model's names."""
TABLE_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)
"""Of an embedding."""
CONV_TYPES = {3: "Conv1d", 4: "Conv2d", 5: "Conv3d"}


@dataclass(frozen=True, eq=False)
class GraphLayer:
    """A node with a constant weight. `axis`: the weight's output-channel axis; `bias`: a constant [out], or None."""

    name: str
    type: str
    node: ir.Node
    weight: ir.Value
    weight_input: int
    axis: int
    bias: ir.Value | None
    bias_add: ir.Node | None
    """The Add node that holds a MatMul's bias."""

    @property
    def op(self) -> str:
        return self.node.op_type

    @property
    def data_input(self) -> ir.Value:
        """Return the activation that the layer reads (the indices, for an Embedding)."""
        value = self.node.inputs[1 - self.weight_input]
        if value is None:
            raise ValueError(f"{self.name}: the node has no data input")
        return value

    @property
    def output(self) -> ir.Value:
        """Return what the layer gives, bias included."""
        return self.bias_add.outputs[0] if self.bias_add is not None else self.node.outputs[0]

    @property
    def groups(self) -> int:
        """Return the number of groups of a grouped convolution; 1 for every other layer."""
        return int_attribute(self.node, "group", 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of `matrix`, told without reading it."""
        shape = constant_shape(self.weight)
        return shape[::-1] if self.axis == 1 and self.op != "Gather" else shape

    def matrix(self) -> np.ndarray:
        """Return the weight as [out, in / groups, *kernel] (Embedding: [rows, width]), in its own dtype."""
        weight = constant(self.weight)
        return weight.T if self.axis == 1 and self.op != "Gather" else weight


def constant(value: ir.Value | None) -> np.ndarray:
    """Return the array of an initializer. Raises ValueError when it is none."""
    array = value.const_value.numpy() if value is not None and value.const_value is not None else None
    if array is None:
        raise ValueError(f"{value.name if value is not None else 'an absent input'} is not a constant")
    return array


def constant_shape(value: ir.Value | None) -> tuple[int, ...]:
    """Return the shape of an initializer, told without reading it. Raises ValueError when it is none."""
    if value is None or value.const_value is None:
        raise ValueError(f"{value.name if value is not None else 'an absent input'} is not a constant")
    return tuple(int(size) for size in value.const_value.shape.numpy())


def is_constant(value: ir.Value | None) -> bool:
    return value is not None and value.const_value is not None


def find_layers(model: ir.Model) -> list[GraphLayer]:
    """Return every layer, in graph order. Names are module paths if the exporter left them, else node names; unique."""
    layers: list[GraphLayer] = []
    taken: dict[str, int] = {}
    for node in model.graph:
        layer = as_layer(node)
        if layer is None:
            continue
        count = taken.get(layer.name, 0)
        taken[layer.name] = count + 1
        layers.append(layer if count == 0 else replace(layer, name=f"{layer.name}#{count + 1}"))
    return layers


def as_layer(node: ir.Node) -> GraphLayer | None:
    """Return the layer that `node` is, or None."""
    if node.domain not in ("", "ai.onnx") or not any(_is_float_constant(value) for value in node.inputs[:2]):
        return None
    if node.op_type != "Gather" and is_constant(node.inputs[0]):  # an output that depends on no input
        return None
    if node.op_type == "Conv" and is_constant(node.inputs[1]):
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        return _make_layer(node, CONV_TYPES.get(len(constant_shape(node.inputs[1])), "Conv"), 1, 0, bias, None)
    if node.op_type == "Gemm" and is_constant(node.inputs[1]) and _is_linear(node):
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        return _make_layer(node, "Linear", 1, 0 if int_attribute(node, "transB", 0) else 1, bias, None)
    if node.op_type == "MatMul" and is_constant(node.inputs[1]) and len(constant_shape(node.inputs[1])) == 2:
        add, bias = _find_bias_add(node)
        return _make_layer(node, "Linear", 1, 1, bias, add)
    if node.op_type == "Gather" and _is_embedding(node):
        return _make_layer(node, "Embedding", 0, 1, None, None)
    return None


def node_scope(node: ir.Node) -> str:
    """Return the module path that the exporter recorded for a node; '' when it recorded none."""
    text = node.metadata_props.get(SCOPES)
    if not text:
        return ""
    scopes = [scope for scope in ast.literal_eval(text)[:-1] if scope]
    return scopes[-1].removeprefix(WRAPPER) if scopes else ""


def _make_layer(
    node: ir.Node, kind: str, weight: int, axis: int, bias: ir.Value | None, add: ir.Node | None
) -> GraphLayer:
    value = node.inputs[weight]
    assert value is not None
    name = _get_module_path(value) or node_scope(node) or node.name or value.name or node.op_type
    vector = bias if is_constant(bias) and len(constant_shape(bias)) == 1 else None
    return GraphLayer(name, kind, node, value, weight, axis, vector, add)


def _get_module_path(weight: ir.Value) -> str:
    """Return `layer1.0.conv1` for an initializer that the exporter named `layer1.0.conv1.weight`, else ''."""
    name = weight.name or ""
    return name.removeprefix(WRAPPER).removesuffix(".weight") if name.endswith(".weight") else ""


def _find_bias_add(node: ir.Node) -> tuple[ir.Node | None, ir.Value | None]:
    """Return the Add of a constant [out] that alone reads a MatMul's output, and that constant; or two times None."""
    uses = list(node.outputs[0].uses())
    if len(uses) != 1 or uses[0].node.op_type != "Add" or node.outputs[0].is_graph_output():
        return None, None
    add = uses[0].node
    other = add.inputs[1 - uses[0].idx]
    if is_constant(other) and constant_shape(other) == constant_shape(node.inputs[1])[1:]:
        return add, other
    return None, None


def _is_linear(gemm: ir.Node) -> bool:
    """Return whether a Gemm is x W + b and nothing more: no factors, no transposed input."""
    plain = all(name not in gemm.attributes or gemm.attributes[name].as_float() == 1.0 for name in ("alpha", "beta"))
    return plain and not int_attribute(gemm, "transA", 0)


def _is_float_constant(value: ir.Value | None) -> bool:
    """Return whether a value is a weight, told without reading it."""
    return value is not None and value.const_value is not None and value.const_value.dtype.is_floating_point()


def _is_embedding(node: ir.Node) -> bool:
    table = node.inputs[0]
    return (
        table is not None
        and table.const_value is not None
        and len(constant_shape(table)) == 2
        and table.const_value.dtype in TABLE_TYPES
        and int_attribute(node, "axis", 0) == 0
    )


def int_attribute(node: ir.Node, name: str, default: int) -> int:
    """Return a node's whole-number attribute, or ONNX's default for it."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def float_attribute(node: ir.Node, name: str, default: float) -> float:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_float()


def ints_attribute(node: ir.Node, name: str, default: list[int]) -> list[int]:
    attribute = node.attributes.get(name)
    return default if attribute is None else list(attribute.as_ints())


def text_attribute(node: ir.Node, name: str, default: str) -> str:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_string()


def layer_facts(model: ir.Model, bits: dict[str, float] | None = None) -> tuple[LayerFacts, ...]:
    """Return the graph's layers as the plan knows them; `bits`: what decided layers' weights are stored in."""
    return tuple(
        LayerFacts(
            name=layer.name,
            type=layer.type,
            op=layer.op,
            weight=layer.weight.name or layer.name,
            shape=layer.shape,
            bits=(bits or {}).get(layer.name, 32),
        )
        for layer in find_layers(model)
    )
