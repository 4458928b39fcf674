"""Rebuild an ONNX graph as a torch module made of torch's own layers, so that it can be pruned, trained and exported.

Layers and norms become `nn.Conv2d`, `nn.Linear`, `nn.BatchNorm2d`, ... under the names that the graph's layers have, so
that a layer is called the same in the file, in the module, and in the graph that is exported of it. Everything else is
a function of `OPERATORS`, in an `fx.Graph`. Sizes stay numbers (`size_ops`). What the file has as literals but torch
code would take from its inputs (the width in a reshape, a batch of 1) is taken from the inputs.
"""

from __future__ import annotations

import keyword
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from compress.graph.layers import (
    GraphLayer,
    constant,
    find_layers,
    float_attribute,
    int_attribute,
    ints_attribute,
    is_constant,
    node_scope,
)
from compress.graph.size_ops import SIZE_OPERATORS, holds_sizes, shape_of, to_tensor
from compress.graph.torch_ops import OPERATORS, Compute, make_form_error, split_crops, split_pads

SampleShapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Input -> (shape, batch included; dtype)."""
MOST_NAMED = 3
"""Nodes of one operator that an error names."""
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
BATCH_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
VECTORS = ("weight", "bias", "running_mean", "running_var")
"""What torch calls the parameters and statistics of a module."""
NUMBERS = {
    "ConstantOfShape": {0},
    "CumSum": {1},
    "Expand": {1},
    "Pad": {1, 2, 3},
    "Range": {0, 1, 2},
    "Reshape": {1},
    "Resize": {1, 2, 3},
    "Slice": {1, 2, 3, 4},
    "Split": {1},
    "Squeeze": {1},
    "Tile": {1},
    "TopK": {1},
    "Trilu": {1},
    "Unsqueeze": {1},
    **{name: {1} for name in OPERATORS if name.startswith("Reduce")},
}
"""Operator -> the inputs that its function takes as arrays."""
_WITH_NUMBERS: dict[str, Compute] = {
    "Add": operator.add,
    "Clip": lambda x, low=None, high=None: x if low is None and high is None else x.clamp(low, high),
    "Div": OPERATORS["Div"](None),  # type: ignore[arg-type]
    "Equal": operator.eq,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
    "Max": lambda a, b: b.clamp(min=a) if isinstance(a, int | float) else a.clamp(min=b),
    "Min": lambda a, b: b.clamp(max=a) if isinstance(a, int | float) else a.clamp(max=b),
    "Mul": operator.mul,
    "Pow": operator.pow,
    "Sub": operator.sub,
    "Where": torch.where,
}
"""Operator -> what computes it of tensors and plain numbers: ReLU6 stays one operator when it is exported."""


class RebuildError(ValueError):
    """No torch module can be made of a graph; the message names operators and nodes."""


@dataclass(frozen=True)
class Rebuilt:
    """`module` takes its inputs by `parameters` (the graph's input -> parameter of forward), gives outputs by name."""

    module: fx.GraphModule
    parameters: Mapping[str, str]


def rebuild(model: ir.Model, feeds: SampleShapes) -> Rebuilt:
    """Rebuild a normalized float graph as a module in eval mode, on the CPU, that asks for no gradient.

    `feeds`: shapes that inputs may have; where the batch is free, one that nothing else has the size of. The values of
    weights are copied. Raises RebuildError for operators that are not known here and for what depends on data.
    """
    check_known(model)
    return _Builder(model).build(feeds)


def check_known(model: ir.Model) -> None:
    """Raise RebuildError that counts and names the nodes which no torch module here can compute."""
    unknown: dict[str, list[str]] = {}
    problems = []
    for node in model.graph:
        if node.domain not in ("", "ai.onnx") or node.op_type not in OPERATORS:
            unknown.setdefault(_name_operator(node), []).append(node.name or "unnamed")
    for name, nodes in unknown.items():
        more = f", and {len(nodes) - MOST_NAMED} more" if len(nodes) > MOST_NAMED else ""
        problems.append(f"{len(nodes)} {name} ({', '.join(nodes[:MOST_NAMED])}{more})")
    if problems:
        problems = [f"operators that have no form in torch here: {', '.join(problems)}"]
    odd = Counter(
        value.dtype.name
        for value in model.graph.initializers.values()
        if value.dtype is not None and value.dtype.is_floating_point() and value.dtype != ir.DataType.FLOAT
    )
    problems += [f"{n} weights of {kind}, where FLOAT is needed" for kind, n in odd.items()]
    if problems:
        raise RebuildError("; ".join(problems))


def _name_operator(node: ir.Node) -> str:
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"


class _Builder:
    """`values`: name -> its node in the fx graph; `samples`: what it is on sample inputs, without values.

    `layers`: by the node that computes it.
    """

    def __init__(self, model: ir.Model) -> None:
        self.model, self.root, self.graph = model, nn.Module(), fx.Graph()
        self.values: dict[str, fx.Node] = {}
        self.samples: dict[str, Any] = {}
        self.weights: dict[tuple[str, bool], nn.Parameter] = {}
        self.made: dict[tuple[Any, ...], str] = {}
        self.layers = {id(layer.node): layer for layer in find_layers(model)}
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def build(self, feeds: SampleShapes) -> Rebuilt:
        parameters: dict[str, str] = {}
        for value in self.model.graph.inputs:
            name = value.name or ""
            parameters[name] = _make_identifier(name, parameters.values())
            shape, dtype = feeds[name]
            self.values[name] = self.graph.placeholder(parameters[name])
            self.samples[name] = self._try(lambda shape=shape, dtype=dtype: torch.empty(shape, dtype=dtype))
        for node in self.model.graph:
            if node.outputs[0].name not in self.values:  # else: an Add that is a layer's bias
                self._add_node(node)
        outputs = {}
        for value in self.model.graph.outputs:
            name = value.name or ""
            made = self._use(value)
            sizes = isinstance(self.samples[name], np.ndarray)
            outputs[name] = self.graph.call_function(to_tensor, (made, None)) if sizes else made
        self.graph.output(outputs)
        module = fx.GraphModule(self.root, self.graph)
        return Rebuilt(module.eval().requires_grad_(False), parameters)

    def _add_node(self, node: ir.Node) -> None:
        inputs = [None if value is None or not value.name else value for value in node.inputs]
        try:
            if not self._add_module(node):
                function = self._make_function(node)
                self._call(node, function, inputs)
        except RebuildError:
            raise
        except Exception as error:  # whatever torch raises: the node cannot be computed so
            text = " ".join(str(error).split())[:300]
            named = node.name and node.name in text
            raise RebuildError(text if named else f"{_name_operator(node)} {node.name!r}: {text}") from error

    def _call(self, node: ir.Node, function: Compute, inputs: Sequence[ir.Value | None]) -> None:
        """Add a call of a function, with one value for each output."""
        numbers = NUMBERS.get(node.op_type, set())
        read = [
            (None, None) if value is None else self._use_numbers(value) if place in numbers else self._read(value)
            for place, value in enumerate(inputs)
        ]
        arguments, sample = [made for made, _ in read], self._try(function, *(sample for _, sample in read))
        function.__name__, function.__module__ = node.op_type.lower(), "onnx"
        made = self.graph.call_function(function, tuple(arguments))
        if not isinstance(sample, tuple):
            self._give(node.outputs[0], made, sample)
            return
        for number, (value, part) in enumerate(zip(node.outputs, sample, strict=False)):
            self._give(value, self.graph.call_function(operator.getitem, (made, number)), part)

    def _try(self, function: Callable[..., Any], *samples: Any) -> Any:
        """Return what a function gives for samples, which hold no values."""
        with torch.no_grad(), self.fake:
            return function(*samples)

    def _give(self, value: ir.Value, made: fx.Node, sample: Any) -> None:
        if value.name:
            self.values[value.name], self.samples[value.name] = made, sample

    def _use(self, value: ir.Value) -> fx.Node:
        """Return the node of a value; a constant becomes a buffer, or an array, when it is first read."""
        name = value.name or ""
        array = constant(value) if is_constant(value) else None
        vector = array is not None and array.dtype.kind == "f" and array.size == max(array.shape, default=1) > 1
        if name in self.values and not vector:  # vectors that are equal may have been merged: each reader has its own
            return self.values[name]
        if array is None:
            raise RebuildError(f"{name!r} is read, and no node that is known here gives it")
        if holds_sizes(array):
            self.samples[name] = np.array(array)
            key = self._free_name(_make_attribute(name))
            setattr(self.root, key, self.samples[name])
        else:
            self.samples[name] = torch.from_numpy(np.array(array))
            key = self._free_name(_make_attribute(name))
            self.root.register_buffer(key, self.samples[name])
        self.values[name] = self.graph.get_attr(key)
        return self.values[name]

    def _read(self, value: ir.Value) -> tuple[fx.Node, Any]:
        """Return the node of a value, and what it is on the sample inputs."""
        return self._use(value), self.samples[value.name or ""]

    def _use_numbers(self, value: ir.Value) -> tuple[fx.Node, Any]:
        """Return a value that an operator takes as numbers: a constant as an array, however long."""
        if not is_constant(value) or holds_sizes(constant(value)):
            return self._read(value)
        key, array = self._free_name(_make_attribute(value.name or "")), np.array(constant(value))
        setattr(self.root, key, array)
        return self.graph.get_attr(key), array

    def _sample(self, value: ir.Value | None) -> Any:
        """Return what a value is on the sample inputs."""
        if value is None or not value.name:
            return None
        self._use(value)
        return self.samples[value.name]

    # -- functions

    def _make_function(self, node: ir.Node) -> Compute:
        """Return a function of a node that takes tensors and arrays."""
        kind = node.op_type
        if kind == "Shape":
            end = node.attributes.get("end")
            start, stop = int_attribute(node, "start", 0), None if end is None else end.as_int()
            return lambda x: shape_of(x, start, stop)
        if kind == "Size":
            return lambda x: np.array(math.prod(x.shape), dtype=object)
        if kind == "Reshape" and isinstance(self._sample(node.inputs[0]), Tensor):
            return self._make_reshape(node)
        if kind == "Concat" and (batch := self._find_literal_batch()):
            return _concat_over_batch(node, batch)
        if kind == "ConstantOfShape":
            return _constant_of_shape(OPERATORS[kind](node), node)
        return _take_arrays(node, OPERATORS[kind](node))

    def _find_literal_batch(self) -> int | None:
        """Return the batch that the file fixes; None where it is free."""
        dims = [value.shape[0] for value in self.model.graph.inputs if value.shape is not None and len(value.shape)]
        return dims[0] if dims and isinstance(dims[0], int) else None

    def _make_reshape(self, node: ir.Node) -> Compute:
        """Make a reshape whose literal sizes follow its input where the input has them."""
        x, sizes = self._sample(node.inputs[0]), self._sample(node.inputs[1])
        compute = OPERATORS["Reshape"](node)
        if not isinstance(sizes, np.ndarray):
            raise RebuildError(f"Reshape {node.name!r}: its sizes depend on data")
        literal = self._find_literals(node.inputs[1])
        rules = follow_input(tuple(x.shape), tuple(self._try(compute, x, sizes).shape), sizes.tolist(), literal)
        if int_attribute(node, "allowzero", 0) or not rules:
            return lambda x, sizes: compute(x, sizes)

        def reshape(x: Tensor, sizes: np.ndarray) -> Tensor:
            shape = [size if size != 0 else x.shape[i] for i, size in enumerate(sizes.tolist())]
            for rule in rules:
                rest = math.prod(shape[other] for other in rule.others)
                shape[rule.axis] = math.prod(x.shape[i] for i in rule.axes) // rest
            return x.reshape(shape)

        return reshape

    def _find_literals(self, value: ir.Value | None) -> list[bool]:
        """Return for each element of a value whether the file fixes it."""
        if value is None:
            return []
        node = value.producer()
        if is_constant(value) or node is None or node.op_type != "Concat":
            return [is_constant(value)] * self._sample(value).size
        return [flag for part in node.inputs for flag in self._find_literals(part)]

    # -- modules

    def _add_module(self, node: ir.Node) -> bool:
        """Add a call of one of torch's layers, if the node is one; return whether it is."""
        layer, make = self.layers.get(id(node)), _MODULES.get(node.op_type)
        if layer is None and make is None:
            return False
        if layer is not None:
            return self._add_layer(layer)
        assert make is not None
        return make(self, node)

    def _add_layer(self, layer: GraphLayer) -> bool:
        node, x = layer.node, layer.data_input
        if layer.op in ("Conv", "Gemm") and len(node.inputs) > 2 and node.inputs[2] is not None and layer.bias is None:
            return False  # a bias that is computed, or not one for each output
        key = (layer.type, layer.weight.name, layer.bias and layer.bias.name, str(node.attributes.values()))
        before: Callable[[Tensor], list[int]] | None = None
        if layer.op == "Conv":
            before = split_pads(node, list(constant(layer.weight).shape[2:]))[1]
        name = self.made.get(key) or self._register(layer.name, self._make_layer(layer))
        self.made[key] = name
        sample, read = self._sample(x), self._use(x)
        if isinstance(sample, np.ndarray):
            read, sample = self.graph.call_function(to_tensor, (read, None)), to_tensor(sample, None)
        if before is not None:
            read, sample = self._call_on(_pad_by(before), read, sample)
        self._give(layer.output, *self._call_module(name, read, sample))
        if layer.bias_add is not None:
            self.values.setdefault(node.outputs[0].name or "", self.values[layer.output.name or ""])
        return True

    def _make_layer(self, layer: GraphLayer) -> nn.Module:
        node, shape = layer.node, constant(layer.weight).shape
        has_bias = layer.bias is not None
        made: Any
        if layer.op == "Conv":
            n = len(shape) - 2
            if n not in CONVOLUTIONS:
                raise make_form_error(node, f"{n} dimensions")
            padding = split_pads(node, list(shape[2:]))[0]
            strides, dilations = (ints_attribute(node, key, [1] * n) for key in ("strides", "dilations"))
            kind: Any = CONVOLUTIONS[n]
            sizes = (tuple(shape[2:]), tuple(strides), tuple(padding), tuple(dilations))
            made = kind(shape[1] * layer.groups, shape[0], *sizes, layer.groups, has_bias, device="meta")
        elif layer.op == "Gather":
            made = nn.Embedding(shape[0], shape[1], device="meta")
        else:
            out, into = shape if layer.axis == 0 else shape[::-1]
            made = nn.Linear(into, out, has_bias, device="meta")
        made.weight = self._weigh(layer.weight, flip=layer.axis == 1 and layer.op != "Gather")
        if layer.bias is not None:
            made.bias = self._weigh(layer.bias)
        module: nn.Module = made
        return module

    def _weigh(self, value: ir.Value, flip: bool = False) -> nn.Parameter:
        """Return the parameter that an initializer becomes; a matrix is shared by all that hold it in that form."""
        array = np.array(constant(value).T if flip else constant(value), order="C")
        made = nn.Parameter(torch.from_numpy(array), requires_grad=False)
        if array.ndim == 1:  # exporters merge vectors that are equal, as biases of 0 are
            return made
        return self.weights.setdefault((value.name or "", flip), made)

    def _call_module(self, name: str, read: fx.Node, sample: Any) -> tuple[fx.Node, Any]:
        self.root.eval()
        return self.graph.call_module(name, (read,)), self._try(self.root.get_submodule(name), sample)

    def _call_on(self, function: Compute, read: fx.Node, sample: Any) -> tuple[fx.Node, Any]:
        return self.graph.call_function(function, (read,)), self._try(function, sample)

    def _register(self, name: str, module: nn.Module) -> str:
        """Put a module into the tree under that name, or the nearest that is free; return it."""
        parent, path = self.root, [_avoid_keyword(part) for part in name.split(".") if part] or ["layer"]
        for part in path[:-1]:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            child = parent._modules[part]
            assert child is not None
            parent = child
        last = path[-1]
        while hasattr(parent, last) or (parent is self.root and hasattr(fx.GraphModule, last)):
            last += "_"
        parent.add_module(last, module)
        return ".".join([*path[:-1], last])

    def _free_name(self, name: str) -> str:
        while hasattr(self.root, name) or hasattr(fx.GraphModule, name):
            name += "_"
        return name

    def _name_module(self, node: ir.Node) -> str:
        """Name a norm after its vectors, of which an exporter may have merged some with another's; else its node."""
        names = [value.name or "" for value in node.inputs[1:] if value is not None]
        paths = [path for path, dot, last in (name.rpartition(".") for name in names) if last in VECTORS]
        taken = {name for name, _ in self.root.named_modules()}
        return next((path for path in paths if path not in taken), node_scope(node) or node.name or node.op_type)

    def _add_batch_norm(self, node: ir.Node) -> bool:
        vectors = node.inputs[1:5]
        if not all(is_constant(value) for value in vectors) or int_attribute(node, "training_mode", 0):
            return False
        x, momentum = node.inputs[0], 1 - float_attribute(node, "momentum", 0.9)
        assert x is not None
        kind = BATCH_NORMS[self._sample(x).dim()]
        epsilon = float_attribute(node, "epsilon", 1e-5)
        gain, shift, mean, variance = (self._weigh(value) for value in vectors if value is not None)
        module = kind(len(gain), epsilon, momentum if 0 < momentum < 1 else 0.1, device="meta")
        module.weight, module.bias = gain, shift
        module.running_mean, module.running_var = mean.data.clone(), variance.data.clone()
        module.num_batches_tracked = torch.tensor(0)
        return self._add_own(node, module)

    def _add_layer_norm(self, node: ir.Node) -> bool:
        x, gain = node.inputs[:2]
        shift = node.inputs[2] if len(node.inputs) > 2 else None
        assert x is not None
        shape = tuple(self._sample(x).shape)[int_attribute(node, "axis", -1) :]
        fits = all(value is None or (is_constant(value) and constant(value).shape == shape) for value in (gain, shift))
        if gain is None or not fits or node.op_type != "LayerNormalization":
            return False
        module = nn.LayerNorm(shape, float_attribute(node, "epsilon", 1e-5), bias=shift is not None, device="meta")
        module.weight = self._weigh(gain)
        if shift is not None:
            module.bias = self._weigh(shift)
        return self._add_own(node, module)

    def _add_group_norm(self, node: ir.Node) -> bool:
        x, gain, shift = node.inputs[:3]
        assert x is not None
        n_channels, n_groups = self._sample(x).shape[1], int_attribute(node, "num_groups", 1)
        if not all(is_constant(value) and len(constant(value)) == n_channels for value in (gain, shift)):
            return False
        assert gain is not None and shift is not None
        module = nn.GroupNorm(n_groups, n_channels, float_attribute(node, "epsilon", 1e-5), device="meta")
        module.weight, module.bias = self._weigh(gain), self._weigh(shift)
        return self._add_own(node, module)

    def _add_conv_transpose(self, node: ir.Node) -> bool:
        weight, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else None
        if not is_constant(weight) or (bias is not None and not is_constant(bias)):
            return False
        assert weight is not None
        shape, groups = constant(weight).shape, int_attribute(node, "group", 1)
        n = len(shape) - 2
        padding, crop = split_crops(node, n)
        strides, dilations = (ints_attribute(node, key, [1] * n) for key in ("strides", "dilations"))
        extra = ints_attribute(node, "output_padding", [0] * n)
        kind: Any = TRANSPOSED[n]
        module = kind(
            shape[0],
            shape[1] * groups,
            tuple(shape[2:]),
            tuple(strides),
            tuple(padding),
            tuple(extra),
            groups,
            bias is not None,
            tuple(dilations),
            device="meta",
        )
        module.weight = self._weigh(weight)
        if bias is not None:
            module.bias = self._weigh(bias)
        return self._add_own(node, module, _pad_by(lambda x: crop) if crop else None)

    def _add_own(self, node: ir.Node, module: nn.Module, after: Compute | None = None) -> bool:
        """Add a call of a module that is this node's own."""
        x = node.inputs[0]
        assert x is not None
        name = self._register(self._name_module(node), module)
        made, sample = self._call_module(name, self._use(x), self._sample(x))
        if after is not None:
            made, sample = self._call_on(after, made, sample)
        self._give(node.outputs[0], made, sample)
        return True


_MODULES: dict[str, Callable[[_Builder, ir.Node], bool]] = {
    "BatchNormalization": _Builder._add_batch_norm,
    "ConvTranspose": _Builder._add_conv_transpose,
    "GroupNormalization": _Builder._add_group_norm,
    "LayerNormalization": _Builder._add_layer_norm,
}
"""Operators beside the layers that become modules, where their vectors are constant."""


@dataclass(frozen=True)
class Followed:
    """A size of a reshape that follows its input: axis `axis` is what `axes` of the input hold over `others`."""

    axis: int
    axes: tuple[int, ...]
    others: tuple[int, ...]


def follow_input(
    shape: Sequence[int], out: Sequence[int], written: Sequence[int], literal: Sequence[bool]
) -> list[Followed]:
    """Return which literal sizes of a reshape follow the input's, so that it runs with fewer channels and any batch.

    `shape`, `out`: of the input and of what comes out; `written`: the sizes as given, with 0 and -1. Axes are taken
    together where their products agree. Of several literals that an axis is split into, the longest that is not the
    last follows: heads, and not what is in a head (as pruning takes units, `compress.prune.labels.unit_axis`).
    """
    rules, i, j = [], 0, 0
    while i < len(shape) and j < len(out):
        axes, places = [i], [j]
        while (a := math.prod(shape[k] for k in axes)) != (b := math.prod(out[k] for k in places)):
            if a < b and axes[-1] + 1 < len(shape):
                axes.append(axes[-1] + 1)
            elif a > b and places[-1] + 1 < len(out):
                places.append(places[-1] + 1)
            else:
                return []
        i, j = axes[-1] + 1, places[-1] + 1
        if j == len(out):  # what is left are axes of 1
            axes += range(i, len(shape))
        free = [k for k in places if written[k] == -1]
        fixed = [k for k in places if literal[k] and written[k] > 0]
        if free or fixed:
            chosen = free[0] if free else max(fixed[:-1] or fixed, key=lambda k: out[k])
            rules.append(Followed(chosen, tuple(axes), tuple(k for k in places if k != chosen)))
    if any(size == -1 and k not in {rule.axis for rule in rules} for k, size in enumerate(written)):
        return []
    return rules


def _take_arrays(node: ir.Node, compute: Compute) -> Compute:
    """Return a node's function that takes arrays where it is given some: sizes stay arrays, the rest become tensors."""
    kind = node.op_type
    of_sizes = SIZE_OPERATORS[kind](node) if kind in SIZE_OPERATORS else None
    with_numbers, numbers = _WITH_NUMBERS.get(kind), NUMBERS.get(kind, set())

    def function(*given: Any) -> Any:
        tensors = [value for value in given if isinstance(value, Tensor)]
        if of_sizes is not None and not tensors:
            return of_sizes(*given)
        like = tensors[0] if tensors else None
        rank = max((tensor.dim() for tensor in tensors), default=0)
        if with_numbers is not None and len(given) <= 3:
            plain = [_as_number(value, rank) for value in given]
            if kind == "Where" and not isinstance(plain[0], Tensor):
                plain[0] = to_tensor(given[0], like)
            if not any(isinstance(value, np.ndarray) for value in plain) and _fits(kind, plain):
                return with_numbers(*plain)
        if kind == "Gather" and isinstance(given[1], np.ndarray) and given[1].ndim == 0:
            return compute(*given)
        return compute(
            *(
                to_tensor(value, like) if isinstance(value, np.ndarray) and place not in numbers else value
                for place, value in enumerate(given)
            )
        )

    return function


def _as_number(value: Any, rank: int) -> Any:
    """Return an array of one element as a number, where it adds no dimension."""
    if isinstance(value, np.ndarray) and value.size == 1 and value.ndim <= rank:
        return value.reshape(-1)[0].item() if value.dtype != object else value.reshape(-1)[0]
    return value


def _fits(kind: str, plain: Sequence[Any]) -> bool:
    """Return whether the form with numbers serves: Max and Min of two, Clip with two bounds of one sort."""
    mixed = len({isinstance(value, Tensor) for value in plain[1:] if value is not None}) > 1
    if kind in ("Max", "Min"):
        return len(plain) == 2 and len({isinstance(value, Tensor) for value in plain}) == 2
    return not (kind == "Clip" and mixed)


def _constant_of_shape(compute: Compute, node: ir.Node) -> Compute:
    """Make a filled tensor; a short row of whole numbers stays an array."""
    given = node.attributes.get("value")
    value = np.zeros(1, np.float32) if given is None else np.array(given.as_tensor().numpy())

    def function(shape: Any) -> Any:
        row = isinstance(shape, np.ndarray) and shape.size == 1 and type(shape.item()) is int
        if row and value.dtype.kind in "iu" and shape.item() <= 8:
            return np.full(shape.tolist(), value.item(), dtype=object)
        return compute(shape)

    return function


def _concat_over_batch(node: ir.Node, batch: int) -> Compute:
    """Make a concatenation in which parts of the file's batch (a folded class token) are repeated to the others'."""
    axis, plain = int_attribute(node, "axis", 0), _take_arrays(node, OPERATORS["Concat"](node))

    def function(*parts: Any) -> Any:
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if axis == 0 or len(tensors) != len(parts):
            return plain(*parts)
        most = max(part.shape[0] for part in tensors)
        return torch.cat(
            [
                part.repeat(most // batch, *[1] * (part.dim() - 1)) if part.shape[0] == batch != most else part
                for part in tensors
            ],
            axis,
        )

    return function


def _pad_by(amounts: Callable[[Tensor], list[int]]) -> Compute:
    def pad(x: Tensor) -> Tensor:
        return F.pad(x, amounts(x))

    return pad


def _make_identifier(name: str, taken: Any) -> str:
    """Return a parameter's name that Python accepts and that is not taken."""
    made = re.sub(r"\W", "_", name, flags=re.ASCII) or "input"
    if made[0].isdigit() or keyword.iskeyword(made) or made == "self":
        made = f"input_{made}"
    while made in taken:
        made += "_"
    return made


def _make_attribute(name: str) -> str:
    return _avoid_keyword(name.replace(".", "_")) or "constant"


def _avoid_keyword(name: str) -> str:
    """Change a name that the code which fx writes could not hold; it looks up all others."""
    return f"{name}_" if keyword.iskeyword(name) else name
