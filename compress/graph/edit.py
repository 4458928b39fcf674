"""Small edits of an ONNX graph: constants, nodes, and what nothing reads any more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import (
    LiftConstantsToInitializersPass,
    RemoveInitializersFromInputsPass,
    RemoveUnusedNodesPass,
)


def initializer(model: ir.Model, name: str, array: np.ndarray | ir.TensorProtocol) -> ir.Value:
    """Add a named constant to the graph; an existing one of that name is replaced in value."""
    tensor = ir.tensor(array, name=name) if isinstance(array, np.ndarray) else array
    value = model.graph.initializers.get(name)
    if value is None:
        value = ir.Value(name=name)
        value.const_value = tensor
        model.graph.register_initializer(value)
    value.const_value = tensor
    value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(tuple(tensor.shape.numpy()))
    return value


def replace_constant(model: ir.Model, node: ir.Node, index: int, array: np.ndarray) -> None:
    """Let a node's input of that number, a constant, hold `array`; whoever else reads the constant keeps it."""
    value = node.inputs[index]
    assert value is not None
    shared = len(value.uses()) > 1 or value.is_graph_output()
    name = f"{node.name}/{value.name}" if shared else value.name
    node.replace_input_with(index, initializer(model, str(name), array))


def share_constant(model: ir.Model, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """Return the initializer that holds `tensor`: one of that name if it is equal, else a new one, numbered."""
    names = (name if i == 1 else f"{name}#{i}" for i in count(1))
    held = model.graph.initializers
    free = next(n for n in names if n not in held or _are_equal(held[n].const_value, tensor))
    return initializer(model, free, tensor)


def _are_equal(a: ir.TensorProtocol | None, b: ir.TensorProtocol) -> bool:
    return a is not None and a.dtype == b.dtype and np.array_equal(a.numpy(), b.numpy())


def append(
    model: ir.Model,
    op: str,
    inputs: Sequence[ir.Value | None],
    output: str,
    attributes: Mapping[str, Any] | None = None,
    domain: str = "",
) -> ir.Value:
    """Add a node at the end of the graph (sort afterwards), named like its one output, which is returned."""
    node = ir.node(op, inputs, attributes=dict(attributes or {}), name=output, domain=domain)
    node.outputs[0].name = output
    model.graph.append(node)
    return node.outputs[0]


def reroute(uses: Sequence[tuple[ir.Node, int]], value: ir.Value) -> None:
    """Let these (node, input index) pairs read `value`."""
    for node, index in uses:
        node.replace_input_with(index, value)


def uses_of(value: ir.Value) -> list[tuple[ir.Node, int]]:
    """Return the (node, input index) pairs that read `value`."""
    return [(use.node, use.idx) for use in value.uses()]


def alone_reads(node: ir.Node, value: ir.Value) -> bool:
    """Return whether nothing but this one input of `node` sees `value`: it may be changed or go."""
    return [use.node for use in value.uses()] == [node] and not value.is_graph_output()


def take_over(model: ir.Model, old: ir.Value, new: ir.Value) -> None:
    """Give `new` the name, type and readers of `old` (but for the node that makes `new`) and its place as output."""
    reroute([(node, index) for node, index in uses_of(old) if node is not new.producer()], new)
    name = old.name
    old.name, new.name = f"{name}/before", name
    new.type, new.shape = old.type, old.shape
    replace_output(model, old, new)


def replace_output(model: ir.Model, old: ir.Value, new: ir.Value) -> None:
    """Put `new` wherever `old` is an output of the graph."""
    for i, output in enumerate(model.graph.outputs):
        if output is old:
            model.graph.outputs[i] = new


def values_by_name(model: ir.Model) -> dict[str, ir.Value]:
    """Return the graph's inputs and every node's outputs by name."""
    values = {value.name: value for value in model.graph.inputs if value.name}
    return values | {value.name: value for node in model.graph for value in node.outputs if value.name}


def tidy(model: ir.Model) -> None:
    """Sort the graph; remove the nodes and initializers that nothing reads, those too that could be given as inputs."""
    model.graph.sort()
    RemoveUnusedNodesPass()(model)
    for name, value in list(model.graph.initializers.items()):
        if not list(value.uses()) and not value.is_graph_output():
            del model.graph.initializers[name]
            if value.is_graph_input():
                model.graph.inputs.remove(value)


def strip_metadata(model: ir.Model) -> None:
    """Remove stack traces, module paths and doc strings: they name the machine and take up space."""
    model.doc_string = None
    model.metadata_props.clear()
    model.graph.doc_string = None
    model.graph.metadata_props.clear()
    for node in model.graph:
        node.doc_string = None
        node.metadata_props.clear()
        for value in node.outputs:
            value.doc_string = None
            value.metadata_props.clear()
    for value in [*model.graph.inputs, *model.graph.initializers.values()]:
        value.metadata_props.clear()


def normalize(model: ir.Model) -> None:
    """Make constants initializers, take initializers from the inputs, and give every node a name, in place."""
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    RemoveInitializersFromInputsPass()(model)
    name_nodes(model)


def name_nodes(model: ir.Model) -> None:
    """Give every node a name that no other has, in place: its own, else its operator and place in the graph.

    ONNX allows one name for several nodes; decisions and new constants go by it.
    """
    taken = {node.name for node in model.graph if node.name}
    met: set[str] = set()
    for index, node in enumerate(model.graph):
        name = node.name or f"{node.op_type}_{index}"
        if name in met or not node.name:
            while name in taken:
                name += "_"
        node.name = name
        met.add(name)
        taken.add(name)
