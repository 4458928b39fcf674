"""Read what an .onnx file holds from its bytes: no onnx package, no weights loaded.

A bundle may come from anyone, and an external-data location is a path that a runtime will open (`external_files`). Why
a quantized model may be slow shows in its operators (`graph_facts`, `read_graph`), and whether it holds float8 in its
types (`holds_float8`). Only the wire format (https://protobuf.dev/programming-guides/encoding/) and the field numbers
of onnx.proto are needed.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import BundleError

# message -> {field number: the message it holds}, for every way that leads to a TensorProto
_CHILDREN: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
    "entry": {},
}
Data = bytes | mmap.mmap
Field = tuple[int, int, int, int]
"""(field number, first byte, last byte + 1, value): value for a varint, the bytes for anything longer."""
_DATA_TYPES = {2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 17: "float8e4m3fn", 21: "uint4", 22: "int4"} | {
    1: "float32",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
    16: "bfloat16",
}
FLOAT8 = range(17, 21)
"""Of TensorProto.DataType: FLOAT8E4M3FN, FLOAT8E4M3FNUZ, FLOAT8E5M2, FLOAT8E5M2FNUZ."""
DATA_TYPE, NAME, INTEGER = 2, 1, 3
"""Fields of onnx.proto: TensorProto.data_type, AttributeProto.name, AttributeProto.i."""
MAKES = (b"to", b"output_dtype", b"dtype")
"""Attributes that say which type an operator gives."""


def external_files(path: Path) -> frozenset[str]:
    """Return the external-data locations in an .onnx file, as written there; BundleError if it is not protobuf."""
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise BundleError(f"{path}: the model file is empty; build the bundle again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return frozenset(_find_locations(data))
    except OSError as error:
        raise BundleError(f"{path}: the model file cannot be read: {error.strerror}") from error
    except (ValueError, IndexError) as error:
        raise BundleError(f"{path}: not an ONNX model ({error}); build the bundle again") from error


def _find_locations(data: Data) -> Iterator[str]:
    for kind, start, stop in _messages(data):
        if kind == "entry":
            entry = {n: bytes(data[a:b]) for n, a, b, _ in _fields(data, start, stop)}
            if entry.get(1) == b"location":
                yield entry.get(2, b"").decode()


@dataclass(frozen=True)
class GraphFacts:
    """Operators of the main graph by type, and the zero points' dtypes of its QuantizeLinear nodes.

    Those that read constants alone are left out, for a runtime computes them once, as it loads the graph; but for
    DequantizeLinear, which it keeps.
    """

    operators: dict[str, int]
    activations: dict[str, int]

    def count(self, *types: str) -> int:
        """Return how many nodes are of these types."""
        return sum(self.operators.get(kind, 0) for kind in types)


def graph_facts(path: Path) -> GraphFacts:
    """Read the graph of a file that `verify` has accepted; the weights are passed over, not loaded."""
    nodes: list[tuple[str, list[str], list[str]]] = []
    dtypes: dict[str, str] = {}
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for number, first, last, _ in _graph_fields(data):
            if number == 1:
                nodes.append(_read_node(data, first, last))
            elif number == 5:
                name, dtype = _read_tensor(data, first, last)
                dtypes[name] = dtype
    constants, operators = set(dtypes), Counter[str]()
    for kind, inputs, outputs in nodes:
        if kind != "DequantizeLinear" and any(inputs) and constants.issuperset(name for name in inputs if name):
            constants.update(outputs)
        else:
            operators[kind] += 1
    zero_points = [inputs[2] if len(inputs) > 2 else "" for kind, inputs, _ in nodes if kind == "QuantizeLinear"]
    activations = Counter(dtypes.get(name, "other") if name else "uint8" for name in zero_points)
    return GraphFacts(dict(operators), dict(activations))


@dataclass(frozen=True)
class GraphNode:
    """A node of the main graph. `integers`: its attributes that are one whole number."""

    name: str
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    integers: dict[str, int]


@dataclass(frozen=True)
class Graph:
    """The main graph: its nodes in the file's order; `constants`: name -> (dtype, shape) of its initializers."""

    nodes: tuple[GraphNode, ...]
    constants: dict[str, tuple[str, tuple[int, ...]]]


def read_graph(path: Path) -> Graph:
    """Read nodes, and names, types and shapes of weights; no weights. BundleError if the file is no ONNX model."""
    nodes, constants = [], {}
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for number, first, last, _ in _graph_fields(data):
                if number == 1:
                    nodes.append(_read_whole_node(data, first, last))
                elif number == 5:
                    name, dtype = _read_tensor(data, first, last)
                    constants[name] = (dtype, _read_dims(data, first, last))
    except (OSError, ValueError, IndexError) as error:
        raise BundleError(f"{path}: not an ONNX model ({error}); build the bundle again") from error
    return Graph(tuple(nodes), constants)


def _read_whole_node(data: Data, start: int, stop: int) -> GraphNode:
    operator, inputs, outputs = _read_node(data, start, stop)
    name, integers = "", {}
    for number, first, last, _ in _fields(data, start, stop):
        if number == 3:
            name = data[first:last].decode()
        elif number == 5:
            parts = {n: (a, b, value) for n, a, b, value in _fields(data, first, last)}
            if NAME in parts and INTEGER in parts:
                integers[data[parts[NAME][0] : parts[NAME][1]].decode()] = parts[INTEGER][2]
    return GraphNode(name, operator, tuple(inputs), tuple(outputs), integers)


def _read_dims(data: Data, start: int, stop: int) -> tuple[int, ...]:
    """Return a tensor's shape, whose sizes a writer may pack into one field or not."""
    dims: list[int] = []
    for number, first, last, value in _fields(data, start, stop):
        if number == 1 and last > first:
            while first < last:
                size, first = _read_varint(data, first)
                dims.append(size)
        elif number == 1:
            dims.append(value)
    return tuple(dims)


def _graph_fields(data: mmap.mmap) -> Iterator[Field]:
    for number, first, last, _ in _fields(data, 0, len(data)):
        if number == 7:
            yield from _fields(data, first, last)


def _read_node(data: Data, start: int, stop: int) -> tuple[str, list[str], list[str]]:
    """Return (operator, inputs, outputs)."""
    parts: dict[int, list[str]] = {1: [], 2: [], 4: []}
    for number, first, last, _ in _fields(data, start, stop):
        if number in parts:
            parts[number].append(data[first:last].decode())
    return parts[4][0] if parts[4] else "", parts[1], parts[2]


def _read_tensor(data: Data, start: int, stop: int) -> tuple[str, str]:
    name, dtype = "", "other"
    for number, first, last, value in _fields(data, start, stop):
        if number == 2:
            dtype = _DATA_TYPES.get(value, "other")
        elif number == 8:
            name = data[first:last].decode()
    return name, dtype


def holds_float8(model: str | bytes) -> bool:
    """Return whether a constant is float8, or an operator gives it. `model`: a file's path, or its content.

    ONNX Runtime 1.31 optimizes such a model to one that computes something else: it takes a Relu before a
    QuantizeLinear for done by its zero point, as it would be in uint8, and makes integer products of float8 ones.
    Models that hold float8 are therefore opened with basic optimizations alone. False of what is no ONNX model: who
    opens it will say so.
    """
    if isinstance(model, bytes):
        return _scan_for_float8(model)
    try:
        with Path(model).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _scan_for_float8(data)
    except (OSError, ValueError):  # not there, or empty
        return False


def _scan_for_float8(data: Data) -> bool:
    checks = {"tensor": _is_float8, "attribute": _gives_float8}
    try:
        return any(kind in checks and checks[kind](data, start, stop) for kind, start, stop in _messages(data))
    except (IndexError, ValueError):
        return False


def _is_float8(data: Data, start: int, stop: int) -> bool:
    return any(number == DATA_TYPE and value in FLOAT8 for number, _, _, value in _fields(data, start, stop))


def _gives_float8(data: Data, start: int, stop: int) -> bool:
    found_fields = {number: (first, last, value) for number, first, last, value in _fields(data, start, stop)}
    if NAME not in found_fields or INTEGER not in found_fields:
        return False
    first, last, _ = found_fields[NAME]
    return bytes(data[first:last]) in MAKES and found_fields[INTEGER][2] in FLOAT8


def _messages(data: Data) -> Iterator[tuple[str, int, int]]:
    """Yield (kind, first byte, last byte + 1) of each message on a way to a tensor, the model first.

    Errors are those of `_fields`.
    """
    pending = [("model", 0, len(data))]
    while pending:
        kind, start, stop = pending.pop()
        yield kind, start, stop
        children = _CHILDREN[kind]
        pending += [(children[n], first, last) for n, first, last, _ in _fields(data, start, stop) if n in children]


def _fields(data: Data, start: int, stop: int) -> Iterator[Field]:
    """Yield the fields of the message in data[start:stop], in order.

    ValueError where a field is longer than the message, of a type that proto3 lacks, or a number of more than 64 bits;
    IndexError where the data ends inside a number.
    """
    while start < stop:
        tag, start = _read_varint(data, start)
        wire_type, value, length = tag & 7, 0, 0
        if wire_type == 0:
            value, start = _read_varint(data, start)
        elif wire_type == 2:
            length, start = _read_varint(data, start)
            if start + length > stop:
                raise ValueError("a field is longer than the message around it")
        elif wire_type in (1, 5):
            length = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"wire type {wire_type}")
        yield tag >> 3, start, start + length, value
        start += length


def _read_varint(data: Data, at: int) -> tuple[int, int]:
    """Read the number at `at`, seven bits a byte with the lowest first; return it and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
