"""A graph in a file, and where it is large its weights beside it."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from compress.graph.stored import holds_stored

IN_MEMORY = 2**31 - 2**24
"""Bytes of weights up to which a graph is handed over in memory."""


def read_graph(path: Path) -> ir.Model:
    """Read a graph, its weights mapped where they lie beside it: it then is as any other, and may be written anywhere.

    As onnx_ir reads them they stay names of that file, which a graph of less than IN_MEMORY is written with.
    """
    model = ir.load(path)
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name)
    return model


def write_graph(model: ir.Model, path: Path, apart: bool = False) -> None:
    """Write a graph to a file; over 2 GiB, protobuf's limit, with the weights beside it in <name>.data.

    So are those that stay in files: they are copied one after the other, and never held together. `apart`: any are
    beside it, which ONNX Runtime maps.
    """
    apart = apart or holds_stored(model) or weight_bytes(model) > IN_MEMORY
    ir.save(model, path, external_data=f"{path.name}.data" if apart else None)


def weight_bytes(model: ir.Model) -> int:
    """Return the bytes of the initializers."""
    return sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
