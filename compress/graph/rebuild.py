"""Rebuild an ONNX graph as a torch module made of torch's own layers, so that it can be pruned, trained and exported.

Layers and norms become `nn.Conv2d`, `nn.Linear`, `nn.BatchNorm2d`, ... (`torch_layers`) under the names that the
graph's layers have, so that a layer is called the same in the file, in the module, and in the graph that is exported of
it. Everything else is a function (`node_functions`) in an `fx.Graph`. Sizes stay numbers (`size_ops`). What the file
has as literals but torch code would take from its inputs (the width in a reshape, a batch of 1) is taken from the
inputs.
"""

from __future__ import annotations

import keyword
import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from compress.graph.layers import GraphLayer, constant, find_layers, int_attribute, is_constant, node_scope
from compress.graph.node_functions import NUMBERS, follow_input, make_concat_over_batch, make_function, make_reshape
from compress.graph.operators import OPERATORS, list_unknown, name_operator
from compress.graph.size_ops import holds_sizes, to_tensor
from compress.graph.torch_images import split_crops, split_pads
from compress.graph.torch_layers import MODULES, Parameters, make_layer
from compress.graph.torch_ops import Compute, Make

InputShapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Input -> (shape, batch included; dtype)."""
VECTORS = ("weight", "bias", "running_mean", "running_var")
"""What torch calls the parameters and statistics of a module."""


class RebuildError(ValueError):
    """No torch module can be made of a graph; the message names operators and nodes."""


@dataclass(frozen=True)
class Rebuilt:
    """`module` takes its inputs by `parameters` (the graph's input -> parameter of forward), gives outputs by name.

    `layers`: the name of each of the graph's layers -> that of its module, which several may share.
    """

    module: fx.GraphModule
    parameters: Mapping[str, str]
    layers: Mapping[str, str]


def rebuild(model: ir.Model, feeds: InputShapes, makers: Mapping[str, Make] | None = None) -> Rebuilt:
    """Rebuild a normalized float graph as a module in eval mode, on the CPU, that asks for no gradient.

    `feeds`: shapes that inputs may have; where the batch is free, one that nothing else has the size of. `makers`: of
    operators beside the usual ones. The values of weights are copied. Raises RebuildError for operators that are not
    known here and for what depends on data.
    """
    check_known(model, makers or {})
    return _ModuleBuilder(model, makers or {}).build(feeds)


def check_known(model: ir.Model, known: Collection[str] = ()) -> None:
    """Raise RebuildError that counts and names the nodes and weights of which no torch module can be made here.

    `known`: operators beside the usual ones.
    """
    problems = list_unknown(model, known)
    odd = Counter(
        value.dtype.name
        for value in model.graph.initializers.values()
        if value.dtype is not None and value.dtype.is_floating_point() and value.dtype != ir.DataType.FLOAT
    )
    problems += [f"{n} weights of {kind}, where FLOAT is needed" for kind, n in odd.items()]
    if problems:
        raise RebuildError("; ".join(problems))


class _ModuleBuilder:
    """`nodes`: a value's name -> its node in the fx graph; `samples`: what it is on sample inputs, without values.

    `layers`: by the node that computes it. `made`: what decides a layer's module -> its name, for those called twice.
    `names`: layer -> its module's name.
    """

    def __init__(self, model: ir.Model, makers: Mapping[str, Make]) -> None:
        self.model, self.makers, self.root, self.graph = model, makers, nn.Module(), fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.samples: dict[str, Any] = {}
        self.parameters = Parameters()
        self.made: dict[tuple[Any, ...], str] = {}
        self.names: dict[str, str] = {}
        self.layers = {id(layer.node): layer for layer in find_layers(model)}
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def build(self, feeds: InputShapes) -> Rebuilt:
        parameters: dict[str, str] = {}
        for value in self.model.graph.inputs:
            name = value.name or ""
            parameters[name] = make_identifier(name, parameters.values())
            shape, dtype = feeds[name]
            sample = self._run_empty(lambda shape=shape, dtype=dtype: torch.empty(shape, dtype=dtype))
            self._add_value(value, self.graph.placeholder(parameters[name]), sample)
        for node in self.model.graph:
            if node.outputs[0].name not in self.nodes:  # else: an Add that is a layer's bias
                try:
                    if not self._add_layer(node) and not self._add_module(node):
                        self._add_function(node)
                except RebuildError:
                    raise
                except Exception as error:  # whatever torch raises: the node cannot be computed so
                    text = " ".join(str(error).split())[:300]
                    named = node.name and node.name in text
                    raise RebuildError(text if named else f"{name_operator(node)} {node.name!r}: {text}") from error
        outputs = {}
        for value in self.model.graph.outputs:
            made, sample = self._find(value)
            outputs[value.name or ""] = self._make_tensor(made, sample)[0]
        self.graph.output(outputs)
        module = fx.GraphModule(self.root, self.graph)
        return Rebuilt(module.eval().requires_grad_(False), parameters, self.names)

    def _run_empty(self, function: Callable[..., Any], *samples: Any) -> Any:
        """Return what a function gives for samples, which hold no values."""
        with torch.no_grad(), self.fake:
            return function(*samples)

    # -- values

    def _add_value(self, value: ir.Value, made: fx.Node, sample: Any) -> None:
        if value.name:
            self.nodes[value.name], self.samples[value.name] = made, sample

    def _find(self, value: ir.Value) -> tuple[fx.Node, Any]:
        """Return a value's node, and what it is on the sample inputs; a constant gets its node when it is first read.

        Vectors that are equal may have been merged by an exporter: each reader has its own.
        """
        name = value.name or ""
        array = constant(value) if is_constant(value) else None
        vector = array is not None and array.dtype.kind == "f" and array.size == max(array.shape, default=1) > 1
        if name not in self.nodes or vector:
            if array is None:
                raise RebuildError(f"{name!r} is read, and no node that is known here gives it")
            self._add_value(value, *self._add_constant(name, array, holds_sizes(array)))
        return self.nodes[name], self.samples[name]

    def _find_numbers(self, value: ir.Value) -> tuple[fx.Node, Any]:
        """Return a value that an operator takes as numbers: a constant as an array, however long."""
        if not is_constant(value) or holds_sizes(constant(value)):
            return self._find(value)
        return self._add_constant(value.name or "", constant(value), as_array=True)

    def _add_constant(self, name: str, array: np.ndarray, as_array: bool) -> tuple[fx.Node, Any]:
        """Keep a constant in the module, as an array or else a buffer; return its node and itself."""
        key, held = self._free_name(_avoid_keyword(name.replace(".", "_")) or "constant"), np.array(array)
        if as_array:
            setattr(self.root, key, held)
            return self.graph.get_attr(key), held
        buffer = torch.from_numpy(held)
        self.root.register_buffer(key, buffer)
        return self.graph.get_attr(key), buffer

    def _get_sample(self, value: ir.Value | None) -> Any:
        """Return what a value is on the sample inputs; None for one that is left out."""
        return None if value is None or not value.name else self._find(value)[1]

    def _make_tensor(self, made: fx.Node, sample: Any) -> tuple[fx.Node, Any]:
        """Return the node and sample of a value as a tensor, whatever it is."""
        if isinstance(sample, np.ndarray):
            return self.graph.call_function(to_tensor, (made, None)), to_tensor(sample, None)
        return made, sample

    # -- functions

    def _add_function(self, node: ir.Node) -> None:
        """Add a call of a function, with one value for each output."""
        function, numbers = self._make_function(node), NUMBERS.get(node.op_type, set())
        read: list[tuple[fx.Node | None, Any]] = [
            (None, None)
            if value is None or not value.name
            else self._find_numbers(value)
            if place in numbers
            else self._find(value)
            for place, value in enumerate(node.inputs)
        ]
        sample = self._run_empty(function, *(sample for _, sample in read))
        function.__name__, function.__module__ = node.op_type.lower(), "onnx"
        made = self.graph.call_function(function, tuple(argument for argument, _ in read))
        if not isinstance(sample, tuple):
            self._add_value(node.outputs[0], made, sample)
            return
        for number, (value, part) in enumerate(zip(node.outputs, sample, strict=False)):
            self._add_value(value, self.graph.call_function(operator.getitem, (made, number)), part)

    def _make_function(self, node: ir.Node) -> Compute:
        """Return a function of a node that takes tensors and arrays."""
        if node.op_type in self.makers:
            return self.makers[node.op_type](node)
        if node.op_type == "Reshape" and isinstance(self._get_sample(node.inputs[0]), Tensor):
            x, sizes = self._get_sample(node.inputs[0]), self._get_sample(node.inputs[1])
            compute = OPERATORS["Reshape"](node)
            if not isinstance(sizes, np.ndarray):
                raise RebuildError(f"Reshape {node.name!r}: its sizes depend on data")
            # literal sizes follow the input where it has them
            literal = self._find_literals(node.inputs[1])
            rules = follow_input(
                tuple(x.shape), tuple(self._run_empty(compute, x, sizes).shape), sizes.tolist(), literal
            )
            if int_attribute(node, "allowzero", 0) or not rules:
                return lambda x, sizes: compute(x, sizes)
            return make_reshape(rules)
        if node.op_type == "Concat" and (batch := self._find_literal_batch()):
            return make_concat_over_batch(node, batch)
        return make_function(node)

    def _find_literal_batch(self) -> int | None:
        """Return the batch that the file fixes; None where it is free."""
        dims = [value.shape[0] for value in self.model.graph.inputs if value.shape is not None and len(value.shape)]
        return dims[0] if dims and isinstance(dims[0], int) else None

    def _find_literals(self, value: ir.Value | None) -> list[bool]:
        """Return for each element of a value whether the file fixes it."""
        if value is None:
            return []
        node = value.producer()
        if is_constant(value) or node is None or node.op_type != "Concat":
            return [is_constant(value)] * self._get_sample(value).size
        return [flag for part in node.inputs for flag in self._find_literals(part)]

    # -- modules

    def _add_layer(self, node: ir.Node) -> bool:
        """Add a call of one of torch's layers, if the node is one; return whether it is."""
        layer = self.layers.get(id(node))
        if layer is None or _has_other_bias(layer):
            return False
        key = (layer.type, layer.weight.name, layer.bias and layer.bias.name, str(node.attributes.values()))
        name = self.made.get(key) or self._register(layer.name, make_layer(layer, self.parameters))
        self.made[key] = self.names[layer.name] = name
        read, sample = self._make_tensor(*self._find(layer.data_input))
        if layer.op == "Conv" and (pads := split_pads(node, list(constant(layer.weight).shape[2:]))[1]) is not None:
            read, sample = self._call_function(_pad_by(pads), read, sample)
        self._add_value(layer.output, *self._call_module(name, read, sample))
        if layer.bias_add is not None:
            self.nodes.setdefault(node.outputs[0].name or "", self.nodes[layer.output.name or ""])
        return True

    def _add_module(self, node: ir.Node) -> bool:
        """Add a call of a module that is this node's own, if it has one; return whether it has."""
        make, x = MODULES.get(node.op_type), node.inputs[0] if node.inputs else None
        if make is None or x is None:
            return False
        read, sample = self._find(x)
        module = make(node, tuple(sample.shape), self.parameters)
        if module is None:
            return False
        names = [value.name or "" for value in node.inputs[1:] if value is not None]
        paths = [path for path, dot, last in (name.rpartition(".") for name in names) if last in VECTORS]
        taken = {name for name, _ in self.root.named_modules()}
        # a norm is named after its vectors, of which an exporter may have merged some with another's
        name = next((path for path in paths if path not in taken), node_scope(node) or node.name or node.op_type)
        made, sample = self._call_module(self._register(name, module), read, sample)
        if node.op_type == "ConvTranspose" and (crop := split_crops(node, sample.dim() - 2)[1]):
            made, sample = self._call_function(_pad_by(lambda x: crop), made, sample)
        self._add_value(node.outputs[0], made, sample)
        return True

    def _call_module(self, name: str, read: fx.Node, sample: Any) -> tuple[fx.Node, Any]:
        self.root.eval()
        return self.graph.call_module(name, (read,)), self._run_empty(self.root.get_submodule(name), sample)

    def _call_function(self, function: Compute, read: fx.Node, sample: Any) -> tuple[fx.Node, Any]:
        return self.graph.call_function(function, (read,)), self._run_empty(function, sample)

    def _register(self, name: str, module: nn.Module) -> str:
        """Put a module into the tree under that name, or the nearest that is free; return it."""
        *parents, last = [_avoid_keyword(part) for part in name.split(".") if part] or ["layer"]
        parent, path = self.root, list[str]()
        for part in parents:
            while part not in parent._modules and self._is_taken(parent, part):
                part += "_"
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            path.append(part)
            parent = parent.get_submodule(part)
        while self._is_taken(parent, last):
            last += "_"
        parent.add_module(last, module)
        return ".".join([*path, last])

    def _free_name(self, name: str) -> str:
        while self._is_taken(self.root, name):
            name += "_"
        return name

    def _is_taken(self, module: nn.Module, name: str) -> bool:
        """Return whether a module has an attribute of that name, as all modules have `train`."""
        return hasattr(module, name) or (module is self.root and hasattr(fx.GraphModule, name))


def _has_other_bias(layer: GraphLayer) -> bool:
    """Return whether a layer's bias is computed, or not one for each output, as torch's layers have it."""
    inputs = layer.node.inputs
    return layer.op in ("Conv", "Gemm") and len(inputs) > 2 and inputs[2] is not None and layer.bias is None


def _pad_by(amounts: Callable[[Tensor], Sequence[int]]) -> Compute:
    def pad(x: Tensor) -> Tensor:
        return F.pad(x, list(amounts(x)))

    return pad


def make_identifier(name: str, taken: Collection[str]) -> str:
    """Return a name like this one that Python accepts for a variable, and that is not taken."""
    made = re.sub(r"\W", "_", name, flags=re.ASCII) or "input"
    if made[0].isdigit() or keyword.iskeyword(made) or made == "self":
        made = f"input_{made}"
    while made in taken:
        made += "_"
    return made


def _avoid_keyword(name: str) -> str:
    """Change a name that the code which fx writes could not hold; it looks up all others."""
    return f"{name}_" if keyword.iskeyword(name) else name
