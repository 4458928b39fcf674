"""What an .onnx file's graph is made of, read from its bytes: operators, and the format of quantized activations.

Enough to say why a quantized model may be slow, without the onnx package. Field numbers are those of onnx.proto.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime.bundle.protobuf import Field, fields

_DATA_TYPES = {2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 17: "float8e4m3fn", 21: "uint4", 22: "int4"}


@dataclass(frozen=True)
class GraphFacts:
    """Operators of the main graph by type, and the zero points' dtypes of its QuantizeLinear nodes."""

    operators: dict[str, int]
    activations: dict[str, int]

    def count(self, *types: str) -> int:
        """Return how many nodes are of these types."""
        return sum(self.operators.get(kind, 0) for kind in types)


def graph_facts(path: Path) -> GraphFacts:
    """Read the graph of a file that `verify` has accepted; the weights are passed over, not loaded."""
    operators: Counter[str] = Counter()
    dtypes: dict[str, str] = {}
    zero_points: list[str] = []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for number, first, last, _ in _graph_fields(data):
            if number == 1:
                kind, inputs = _read_node(data, first, last)
                operators[kind] += 1
                if kind == "QuantizeLinear":
                    zero_points.append(inputs[2] if len(inputs) > 2 else "")
            elif number == 5:
                name, dtype = _read_tensor(data, first, last)
                dtypes[name] = dtype
    activations = Counter(dtypes.get(name, "other") if name else "uint8" for name in zero_points)
    return GraphFacts(dict(operators), dict(activations))


def _graph_fields(data: mmap.mmap) -> Iterator[Field]:
    for number, first, last, _ in fields(data, 0, len(data)):
        if number == 7:
            yield from fields(data, first, last)


def _read_node(data: mmap.mmap, start: int, stop: int) -> tuple[str, list[str]]:
    texts = [(number, data[a:b].decode()) for number, a, b, _ in fields(data, start, stop) if number in (1, 4)]
    kinds = [text for number, text in texts if number == 4]
    return kinds[0] if kinds else "", [text for number, text in texts if number == 1]


def _read_tensor(data: mmap.mmap, start: int, stop: int) -> tuple[str, str]:
    name, dtype = "", "other"
    for number, first, last, value in fields(data, start, stop):
        if number == 2:
            dtype = _DATA_TYPES.get(value, "other")
        elif number == 8:
            name = data[first:last].decode()
    return name, dtype
