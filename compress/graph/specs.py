"""The inputs and outputs of a graph as the manifest has them."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from runtime.bundle.tensors import TensorSpec


def input_specs(model: ir.Model) -> tuple[TensorSpec, ...]:
    return _make_specs(model.graph.inputs)


def output_specs(model: ir.Model) -> tuple[TensorSpec, ...]:
    return _make_specs(model.graph.outputs)


def _make_specs(values: Sequence[ir.Value]) -> tuple[TensorSpec, ...]:
    """Return the values' specs. ValueError for one whose type or number of dimensions the graph does not say."""
    specs = []
    for value in values:
        if value.shape is None or value.dtype is None:
            raise ValueError(f"{value.name}: the graph does not say its type and shape")
        shape = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
        specs.append(TensorSpec(value.name or "", str(value.dtype.numpy()), shape))
    return tuple(specs)
