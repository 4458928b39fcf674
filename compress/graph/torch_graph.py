"""An ONNX graph as a torch module, so that what is trained is the very graph that is exported. Torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn

from compress.graph.layers import constant, find_layers, is_constant
from compress.graph.operators import OPERATORS, list_unknown
from compress.graph.torch_ops import Compute, Make

NORMS = {"BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization"}
"""Operators whose second and third input are gains and shifts."""


@dataclass(frozen=True)
class Operation:
    """One node. `inputs`: names of values, None for one left out; `over`: names that no later node reads."""

    compute: Compute
    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    over: tuple[str, ...]


class TorchGraph(nn.Module):
    """Runs a sorted graph in torch. `trained`: the initializers that are parameters; the others stay as they are.

    `special`: operator of any domain -> what makes a node's function, beside the usual ones. Takes inputs and gives
    outputs by the graph's names. Raises ValueError as `check_operators` does.
    """

    def __init__(self, model: ir.Model, trained: Collection[str], special: Mapping[str, Make] | None = None) -> None:
        super().__init__()
        special = special or {}
        check_operators(model, special)
        makers = {**OPERATORS, **special}
        self.numbers: dict[str, int] = {}
        self.values = nn.ParameterList()
        self.constants: dict[str, str] = {}
        for name, value in model.graph.initializers.items():
            tensor = torch.from_numpy(np.array(constant(value)))
            if name in trained:
                self.numbers[name] = len(self.values)
                self.values.append(nn.Parameter(tensor))
            else:  # not persistent: it never changes, and a saved state need not hold it
                self.constants[name] = f"constant{len(self.constants)}"
                self.register_buffer(self.constants[name], tensor, persistent=False)
        self.outputs = [value.name or "" for value in model.graph.outputs]
        self.operations = _make_operations(model, makers, set(self.outputs))

    def parameter_of(self, name: str) -> Tensor:
        """Return the parameter that an initializer has become."""
        return self.values[self.numbers[name]]

    def forward(self, **feeds: Tensor) -> dict[str, Tensor]:
        """Run the graph; inputs and outputs go by its names."""
        known: dict[str, Tensor] = {name: getattr(self, key) for name, key in self.constants.items()}
        known |= {name: self.values[number] for name, number in self.numbers.items()}
        known |= feeds
        for operation in self.operations:
            given = operation.compute(*(None if name is None else known[name] for name in operation.inputs))
            known.update(zip(operation.outputs, given if isinstance(given, tuple) else (given,), strict=False))
            for name in operation.over:
                known.pop(name, None)
        return {name: known[name] for name in self.outputs}


def trainable(model: ir.Model) -> list[str]:
    """Return the initializers that training may change: weights and biases of layers, gains and shifts of norms.

    No others: what else is a constant there may be a mask, a table of angles or a running mean.
    """
    values = [value for layer in find_layers(model) for value in (layer.weight, layer.bias)]
    values += [value for node in model.graph if node.op_type in NORMS for value in node.inputs[1:3]]
    named = {value.name: None for value in values if value is not None and is_constant(value) and value.name}
    held = model.graph.initializers
    return [name for name in named if name in held and held[name].dtype == ir.DataType.FLOAT]


def check_operators(model: ir.Model, known: Collection[str] = ()) -> None:
    """Raise ValueError that names what torch cannot compute; `known`: operators of any domain beside the usual ones."""
    if problems := list_unknown(model, known):
        raise ValueError(f"the graph cannot be trained through: {'; '.join(problems)}")


def _make_operations(model: ir.Model, makers: Mapping[str, Make], kept: set[str]) -> list[Operation]:
    nodes = list(model.graph)
    last: dict[str, int] = {}
    for index, node in enumerate(nodes):
        last |= {value.name: index for value in (*node.inputs, *node.outputs) if value is not None and value.name}
    over: dict[int, list[str]] = {}
    for name, index in last.items():
        if name not in kept:
            over.setdefault(index, []).append(name)
    return [
        Operation(
            makers[node.op_type](node),
            tuple(None if value is None else value.name for value in node.inputs),
            tuple(value.name or "" for value in node.outputs),
            tuple(over.get(index, ())),
        )
        for index, node in enumerate(nodes)
    ]
