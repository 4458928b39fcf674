"""A compressed graph with a switch for each layer: rounded as it is in the file, or float as it was before.

One session then answers for every choice of layers, so that "this layer alone rounded" and "this layer alone float" are
runs, and not files to write and load. The switches are one boolean vector, an input beside the graph's own.

A layer is found by the tensor that it gives, which has one name in both graphs. Its float form is the float graph's own
node on the compressed graph's own activation, before that is rounded. What is rounded between layers belongs to those
whose output makes it so, as `compress.rounding.placement` has it: where they are float, it is, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
import onnx_ir as ir

from compress.graph.edit import append, initializer, take_over, tidy, uses_of
from compress.graph.layers import GraphLayer, constant, find_layers, int_attribute, is_constant
from compress.graph.run import clone

SWITCHES = "compress/rounded"
"""The input: a boolean for each of `SwitchedGraph.units`, true where it is rounded; one at least."""
PREFIX = "compress/switch/"
"""Of the names of all that is added."""
PRODUCTS = {"MatMul", "Gemm", "Conv", "Gather", "MatMulNBits", "MatMulInteger", "GatherBlockQuantized"}
PACKED = {"MatMulNBits", "GatherBlockQuantized"}
"""Operators whose weights may lie several to a byte."""
ROUNDINGS = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"}
BEHIND = {"Add", "Sum", "Mul", "Cast", "QuantizeLinear", "DequantizeLinear", "Reshape"}
"""Operators between a layer's product and what it gives: bias and scales; some tools round the product before that."""
BEFORE = ROUNDINGS | {"Cast", "Pad"}
"""Operators between the activation that a layer reads and its product."""
UNPACKING = {"DequantizeLinear", "Cast", "Sub", "Mul", "Reshape", "Transpose"}
"""Operators that make floats of stored weights."""
ACTIVATIONS = {"Relu", "Clip"}
HANDED_ON = ACTIVATIONS | {
    "Reshape", "Transpose", "Slice", "Flatten", "Squeeze", "Unsqueeze", "Pad", "MaxPool", "Identity", "AveragePool",
    "GlobalAveragePool",
}  # fmt: skip
"""Operators that are rounded because what they read is."""


@dataclass(frozen=True)
class Unit:
    """What one switch is for: a layer, or, with `type` "tensor", an activation that is rounded and no layer's.

    `bits`: of its weights in the file. `rounded_bytes`, `float_bytes`: of its constants in the two forms. `tensors`:
    names of its weights and of what its nodes give, in either file; a runtime's fused nodes keep one of them.
    """

    name: str
    type: str
    bits: int = 32
    rounded_bytes: int = 0
    float_bytes: int = 0
    tensors: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SwitchedGraph:
    """`forms`: layer -> names of what it gives in `model` rounded and in float, on the same activation.

    `unmatched`: layer -> why it has no switch, of those that the float graph has and the file rounds, or changes.
    """

    model: ir.Model
    units: tuple[Unit, ...]
    forms: Mapping[str, tuple[str, str]]
    unmatched: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Place:
    """Where a layer lies in the compressed graph.

    `output`: the tensor that it gives, perhaps side by side with others' (`merged`: all of them, in order). `nodes`:
    those between `source`, the activation that it reads, and `output`.
    """

    layer: GraphLayer
    output: ir.Value
    source: ir.Value
    nodes: tuple[ir.Node, ...]
    merged: tuple[GraphLayer, ...]


def add_switches(
    compressed: ir.Model, original: ir.Model, own_weights: bool = False, half: bool = False
) -> SwitchedGraph:
    """Return a copy of `compressed` in which each layer that differs from `original` has a switch.

    `own_weights`: the float form of a layer has the file's weights as they were rounded, where `original` has none that
    fit: what its switch tells is the rounding of activations alone. `half`: activations may be float16.
    """
    model = clone(compressed)
    values = {value.name: value for node in model.graph for value in node.outputs if value.name}
    values |= {value.name: value for value in model.graph.inputs if value.name}
    layers = [layer for layer in find_layers(original) if layer.output.name]
    merged = _find_merged(values, {str(layer.output.name): layer for layer in layers})
    places, unmatched = [], {}
    for layer in layers:
        place = _find_place(layer, values, merged)
        if isinstance(place, str):
            unmatched[layer.name] = place
        elif own_weights and not {node.op_type for node in place.nodes} & {"MatMul", "Gemm", "Conv"}:
            unmatched[layer.name] = "its weights are unpacked, and its inputs rounded, within one operator"
        elif _is_rounded(place, own_weights):
            places.append(place)
    outputs: dict[ir.Value, list[str]] = {}
    for place in places:
        outputs.setdefault(place.output, []).append(place.layer.name)
    borders = list(_find_borders(model, places, outputs))
    if own_weights and not list(find_pairs(model)):
        places = []  # of weights alone there is nothing to tell
    tensors = sorted({name for _, _, names in borders for name in names} - {place.layer.name for place in places})
    names = [*(place.layer.name for place in places), *tensors]
    units = [_describe(place) for place in places] + [
        Unit(name, "tensor", tensors=frozenset({name})) for name in tensors
    ]
    writer = _Writer(model, half)
    writer.add_vector(names)
    for place in places:
        writer.switch_layer(place, _find_owners(place.source, outputs), own_weights)
    for use, value, owners in borders:
        writer.switch_use(use, value, owners)
    writer.replace()
    tidy(model)
    return SwitchedGraph(model, tuple(units), writer.forms, unmatched)


def _find_merged(
    values: Mapping[str, ir.Value], layers: Mapping[str, GraphLayer]
) -> dict[str, tuple[ir.Value, tuple[GraphLayer, ...]]]:
    """Return for the output of each layer that was merged with others (`merge_products`) the tensor that holds all."""
    found: dict[str, tuple[ir.Value, tuple[GraphLayer, ...]]] = {}
    for suffix in ("/product", "/biased"):  # the later one: with the bias
        for name, value in values.items():
            parts = name.removesuffix(suffix).split("+")
            if name.endswith(suffix) and len(parts) > 1 and all(part in layers for part in parts):
                found |= dict.fromkeys(parts, (value, tuple(layers[part] for part in parts)))
    return found


def _find_place(
    layer: GraphLayer,
    values: Mapping[str, ir.Value],
    merged: Mapping[str, tuple[ir.Value, tuple[GraphLayer, ...]]],
) -> _Place | str:
    """Return where the layer lies; a reason where it is not found."""
    name = str(layer.output.name)
    output, together = merged.get(name, (values.get(name), (layer,)))
    if output is None:
        return f"the file has no tensor {name}, which it gives"
    known = values.get(str(layer.data_input.name))
    for stop in dict.fromkeys((known, None)):
        walked = _walk_back(output, stop)
        if walked is not None:
            return _Place(layer, output, walked[0], walked[1], together)
    return f"what gives {name} in the file is no one product of an activation with a constant"


def _walk_back(output: ir.Value, stop: ir.Value | None) -> tuple[ir.Value, tuple[ir.Node, ...]] | None:
    """Return the activation that a product's output is made of, and the nodes between.

    `stop`: that activation, where it is known by name; without it, what is before the product and its rounding.
    """
    seen: dict[ir.Node, None] = {}
    sources: dict[ir.Value, None] = {}
    waiting = [(output, False)]  # (tensor, whether the product lies behind it)
    while waiting:
        value, before = waiting.pop()
        node = value.producer()
        unpacking = _list_unpacking(value)
        if value is stop or node is None or unpacking is not None:
            seen |= dict.fromkeys(unpacking or ())
            if unpacking is None:
                sources[value] = None
            continue
        allowed = BEFORE | ({"Mul", "Div"} if stop is not None else set()) if before else BEHIND | PRODUCTS
        if node.op_type not in allowed | {"DynamicQuantizeLinear"}:
            if before and stop is None:
                sources[value] = None
                continue
            return None
        seen[node] = None
        before = before or node.op_type in PRODUCTS | {"DynamicQuantizeLinear"}
        waiting += [(part, before) for part in node.inputs if part is not None]
    products = [node for node in seen if node.op_type in PRODUCTS]
    if len(sources) != 1 or len(products) != 1 or (stop is not None and stop not in sources):
        return None
    return next(iter(sources)), tuple(seen)


def _list_unpacking(value: ir.Value) -> list[ir.Node] | None:
    """Return the nodes that make a tensor of constants alone; None where it depends on an input."""
    if is_constant(value):
        return []
    node = value.producer()
    if node is None or node.op_type not in UNPACKING:
        return None
    nodes = [node]
    for part in node.inputs:
        inner = [] if part is None else _list_unpacking(part)
        if inner is None:
            return None
        nodes += inner
    return nodes


def _is_rounded(place: _Place, own_weights: bool) -> bool:
    """Return whether the file has another weight than the float graph; with `own_weights` whether it is of integers."""
    held = [value for node in place.nodes for value in node.inputs if value is not None and is_constant(value)]
    if own_weights:
        return any(_count_bits(value) < 16 for value in held)
    weight = constant(place.layer.weight)
    return not any(
        value.dtype == place.layer.weight.dtype and np.array_equal(constant(value), weight) for value in held
    )


Border = tuple[tuple[ir.Node, int], ir.Value, tuple[str, ...]]
"""(node, input index) that reads a rounded tensor; the tensor before it is rounded; whose rounding that is."""


def _find_borders(
    model: ir.Model, places: Sequence[_Place], outputs: Mapping[ir.Value, Sequence[str]]
) -> Iterator[Border]:
    """Yield each reading of a rounded tensor by a node that is no part of a layer. `outputs`: of the layers."""
    inside = {node for place in places for node in place.nodes}
    for node in list(model.graph):
        if node.op_type != "DequantizeLinear" or (rounded := _before_pair(node.outputs[0])) is node.outputs[0]:
            continue
        for reader, index in uses_of(node.outputs[0]):
            if reader in inside or reader.op_type in ROUNDINGS:
                continue
            owners = _find_owners(rounded, outputs) or _find_owners(reader.outputs[0], outputs)
            yield (reader, index), rounded, tuple(owners) or (str(rounded.name),)


def find_pairs(model: ir.Model) -> Iterator[tuple[str, str]]:
    """Yield (activation, its rounded form) for each activation that a graph rounds."""
    for node in model.graph:
        if node.op_type == "DequantizeLinear":
            before, after = _before_pair(node.outputs[0]), node.outputs[0]
            if before is not after and not is_constant(before):
                yield str(before.name), str(after.name)


def _before_pair(value: ir.Value | None) -> ir.Value:
    """Return the activation that a DequantizeLinear gives back rounded; any other value as it is."""
    assert value is not None
    node = value.producer()
    if node is None or node.op_type != "DequantizeLinear" or node.inputs[0] is None:
        return value
    first = node.inputs[0].producer()
    return first.inputs[0] if first is not None and first.op_type == "QuantizeLinear" and first.inputs[0] else value


def _find_owners(value: ir.Value, outputs: Mapping[ir.Value, Sequence[str]]) -> list[str]:
    """Return the layers without which a tensor would not be rounded."""
    if value in outputs:
        return list(outputs[value])
    node = value.producer()
    if node is None:
        return []
    if node.op_type in HANDED_ON:
        return _find_owners(_before_pair(node.inputs[0]), outputs)
    if node.op_type == "Add":
        parts = [_before_pair(part) for part in node.inputs if part is not None and not is_constant(part)]
        return [name for part in parts for name in outputs.get(part, ())]
    return []


class _Writer:
    """Writes switches into a graph whose places have all been found before: what is replaced is remembered."""

    def __init__(self, model: ir.Model, half: bool) -> None:
        self.model, self.half = model, half
        self.scalars: dict[str, ir.Value] = {}
        self.pending: list[tuple[ir.Value, ir.Value, ir.Node]] = []
        self.switched: dict[ir.Value, list[_Place]] = {}
        self.forms: dict[str, tuple[str, str]] = {}
        self.count = 0

    def add_vector(self, names: Sequence[str]) -> None:
        """Add the vector, and a scalar of it for each name."""
        vector = ir.Value(name=SWITCHES, type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([max(len(names), 1)]))
        self.model.graph.inputs.append(vector)
        for index, name in enumerate(names):
            place = initializer(self.model, f"{PREFIX}place/{index}", np.array(index))
            self.scalars[name] = append(self.model, "Gather", [vector, place], f"{PREFIX}scalar/{index}")

    def switch_layer(self, place: _Place, owners: Sequence[str], own_weights: bool) -> None:
        """Let a layer's output, or its part of a merged one, be chosen by its switch.

        `owners`: the layers that round what it reads; in float it reads that rounded as long as one of them is.
        """
        together = self.switched.setdefault(place.output, [])
        together.append(place)
        if len(together) < len(place.merged):
            return
        by_name = {part.layer.name: part for part in together}
        ordered = [by_name[layer.name] for layer in place.merged]
        kept = self._append("Identity", [place.output])
        chosen = []
        source = self._choose_source(place, owners)
        for part, rounded in zip(ordered, self._split(kept, place.merged), strict=True):
            exact = self._write_own(part, source) if own_weights else self._write_float(part, source)
            if self.half:
                exact = self._append("CastLike", [exact, rounded])
            self.forms[part.layer.name] = (str(rounded.name), str(exact.name))
            chosen.append(self._append("Where", [self.scalars[part.layer.name], rounded, exact]))
        result = chosen[0] if len(chosen) == 1 else self._append("Concat", chosen, {"axis": -1})
        identity = kept.producer()
        assert identity is not None
        self.pending.append((place.output, result, identity))

    def switch_use(self, use: tuple[ir.Node, int], value: ir.Value, owners: Sequence[str]) -> None:
        """Let a node read a tensor rounded while any of its owners is."""
        node, index = use
        rounded = node.inputs[index]
        assert rounded is not None
        node.replace_input_with(index, self._choose_while_any(owners, rounded, value))

    def _choose_while_any(self, owners: Sequence[str], rounded: ir.Value, value: ir.Value) -> ir.Value:
        any_of = reduce(lambda a, b: self._append("Or", [a, b]), (self.scalars[name] for name in owners))
        return self._append("Where", [any_of, rounded, value])

    def _choose_source(self, place: _Place, owners: Sequence[str]) -> ir.Value:
        """Return what the layer reads in float: its activation, as its owners leave it."""
        given = [node.outputs[0] for node in place.nodes if node.op_type == "DequantizeLinear"]
        rounded = next((value for value in given if value is not _before_pair(value) is place.source), None)
        return place.source if rounded is None or not owners else self._choose_while_any(owners, rounded, place.source)

    def replace(self) -> None:
        """Put what was chosen in the place of the layers' outputs."""
        for old, new, kept in self.pending:
            take_over(self.model, old, new)
            old.name = f"{kept.name}/from"  # take_over's own name may be taken: the file was written with it, too
            kept.replace_input_with(0, old)

    def _append(
        self, op: str, inputs: Sequence[ir.Value | None], attributes: Mapping[str, object] | None = None
    ) -> ir.Value:
        self.count += 1
        return append(self.model, op, inputs, f"{PREFIX}{op}/{self.count}", attributes)

    def _split(self, value: ir.Value, layers: Sequence[GraphLayer]) -> list[ir.Value]:
        """Return the part of each layer in a tensor that holds them side by side."""
        if len(layers) == 1:
            return [value]
        self.count += 1
        name = f"{PREFIX}split/{self.count}"
        sizes = initializer(self.model, f"{name}/widths", np.array([layer.shape[0] for layer in layers]))
        node = ir.node("Split", [value, sizes], {"axis": -1}, num_outputs=len(layers), name=name)
        for index, part in enumerate(node.outputs):
            part.name = f"{name}/{index}"
        self.model.graph.append(node)
        return list(node.outputs)

    def _write_float(self, place: _Place, source: ir.Value) -> ir.Value:
        """Write the float graph's own node, and its bias, on the file's activation."""
        layer, source = place.layer, self._to_float(source, place.layer)
        given: dict[ir.Value, ir.Value] = {layer.data_input: source}
        for node in (layer.node, layer.bias_add):
            if node is not None:
                given[node.outputs[0]] = self._copy(node, given)
        return given[layer.output]

    def _to_float(self, value: ir.Value, layer: GraphLayer) -> ir.Value:
        if not self.half or layer.op == "Gather":
            return value
        return self._append("Cast", [value], {"to": ir.DataType.FLOAT})

    def _write_own(self, place: _Place, source: ir.Value) -> ir.Value:
        """Write the file's own product and bias on the activation before it is rounded."""
        given = {place.source: source}
        inside = set(place.nodes)
        for node in [node for node in self.model.graph if node in inside]:
            reads = [given[value] for value in node.inputs if value in given]
            if not reads:  # of constants alone
                continue
            if node.op_type in ROUNDINGS | {"Cast"}:
                given |= dict.fromkeys(node.outputs, reads[0])
            elif node.op_type == "Pad":  # with zeros, and not with the zero point
                given[node.outputs[0]] = self._append("Pad", [reads[0], node.inputs[1]])
            else:
                given[node.outputs[0]] = self._copy(node, given, shared=True)
        return given[place.output]

    def _copy(self, node: ir.Node, given: Mapping[ir.Value, ir.Value], shared: bool = False) -> ir.Value:
        """Copy a node, with its constants; `shared`: it is of this graph, whose constants it reads."""
        inputs = [
            None if value is None else given.get(value) or (value if shared else self._add_constant(value))
            for value in node.inputs
        ]
        self.count += 1
        copy = ir.Node(node.domain, node.op_type, inputs, node.attributes.values(), name=f"{PREFIX}float/{self.count}")
        copy.outputs[0].name = copy.name
        self.model.graph.append(copy)
        return copy.outputs[0]

    def _add_constant(self, value: ir.Value) -> ir.Value:
        """Add a constant of the float graph; layers that share it share it here, too."""
        name = f"{PREFIX}constant/{value.name}"
        held = self.model.graph.initializers.get(name)
        tensor = value.const_value
        assert tensor is not None
        return held if held is not None else initializer(self.model, name, tensor)


def _describe(place: _Place) -> Unit:
    share = place.layer.shape[0] / sum(layer.shape[0] for layer in place.merged)
    held = {
        value for node in place.nodes for value in node.inputs if value is not None and value.const_value is not None
    }
    rounded = sum(value.const_value.nbytes for value in held if value.const_value is not None)
    own = [value for node in (place.layer.node, place.layer.bias_add) if node is not None for value in node.inputs]
    exact = sum(value.const_value.nbytes for value in own if value is not None and value.const_value is not None)
    # its output also behind the activation and the rounding that runtimes fuse with it
    names, waiting = set[str](), [place.output]
    while waiting:
        value = waiting.pop()
        names.add(str(value.name))
        for node, _ in uses_of(value):
            if node.op_type in ROUNDINGS or (node.op_type in ACTIVATIONS and len(uses_of(value)) == 1):
                waiting += [given for given in node.outputs if given.name not in names]
    tensors = {str(value.name) for node in place.nodes for value in node.outputs} | names
    tensors |= {str(value.name) for value in held if value.const_value is not None and len(value.const_value.shape) > 1}
    tensors |= {str(place.layer.output.name), str(place.layer.weight.name)}  # as the float graph has them
    bits = min((_count_bits(value) for value in held), default=32)
    return Unit(place.layer.name, place.layer.type, bits, round(rounded * share), exact, frozenset(tensors))


def _count_bits(value: ir.Value) -> int:
    """Return the bits of each element of a weight; 32 of anything else."""
    tensor = value.const_value
    if tensor is None or len(tensor.shape) < 2:
        return 32
    packed = [
        int_attribute(use.node, "bits", 4) for use in value.uses() if use.node.op_type in PACKED and use.idx in (0, 2)
    ]
    return min([*packed, tensor.dtype.bitwidth])
