"""A graph that also gives tensors from its inside, so that two ways to run it can be compared there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from compress.graph.files import read_graph, write_graph

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
PASSED_OVER = (
    "QuantizeLinear", "DequantizeLinear", "Cast", "Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice",
    "Concat", "Split", "Gather", "Expand", "Constant", "Shape", "Flatten",
)  # fmt: skip
"""Operators that compute nothing: what goes in differs already, where what comes out does."""


def tensors_of(path: Path) -> list[str]:
    """Return the float tensors that operators compute, in the order in which they run."""
    nodes = ir.load(path).graph
    return [
        value.name
        for node in nodes
        if node.op_type not in PASSED_OVER
        for value in node.outputs
        if value.name and (value.dtype is None or value.dtype in FLOATS)
    ]


def mark(path: Path, names: Sequence[str], out: Path) -> None:
    """Write the graph of `path` to `out` with these tensors as outputs after its own. KeyError for an unknown one."""
    model = read_graph(path)
    values = {value.name: value for node in model.graph for value in node.outputs}
    given = {value.name for value in model.graph.outputs}
    model.graph.outputs.extend(values[name] for name in names if name not in given)
    write_graph(model, out)
