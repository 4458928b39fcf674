"""Shapes of an ONNX graph's tensors for one sample, without its weights' values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx.external_data_helper import load_external_data_for_tensor

from compress.errors import SourceError
from compress.facts import SampleShapes

Shapes = dict[str, tuple[tuple[int, ...], int]]
"""Tensor name -> (shape, bytes per element)."""


def sample_shapes(proto: onnx.ModelProto, feeds: SampleShapes, path: Path) -> Shapes:
    """Return shapes for a batch of 1 (or the graph's fixed batch), of the tensors whose dimensions can all be told.

    What the graph declares, with the names of its input dimensions replaced by numbers; over that, what ONNX infers.
    `path`: of the file. SourceError where ONNX says that such a sample does not pass.
    """
    fixed = onnx.ModelProto()
    fixed.CopyFrom(proto)
    for tensor in fixed.graph.initializer:  # shapes and axes are read even where weights are not
        if tensor.data_location == onnx.TensorProto.EXTERNAL and math.prod(tensor.dims) <= 64:
            load_external_data_for_tensor(tensor, str(path.parent))
    sizes = _bind_inputs(fixed, feeds)
    declared = _collect_known_shapes((*fixed.graph.value_info, *fixed.graph.output), sizes)
    del fixed.graph.value_info[:]  # they may name dimensions that are numbers here
    for value in fixed.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        inferred = onnx.shape_inference.infer_shapes(fixed, data_prop=True).graph
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError) as error:
        samples = ", ".join(f"{name} {list(shape)}" for name, (shape, _) in feeds.items())
        why = " ".join(str(error).split())[:500]
        raise SourceError(f"{path}: its shapes cannot be told for a sample of {samples}: {why}") from error
    return declared | _collect_known_shapes((*inferred.value_info, *inferred.input, *inferred.output), {})


def read_fixed_batch(proto: onnx.ModelProto) -> int:
    """Return the first dimension of the first input where the graph fixes it, else 1."""
    constants = {tensor.name for tensor in proto.graph.initializer}
    shapes = [value.type.tensor_type.shape.dim for value in proto.graph.input if value.name not in constants]
    return int(shapes[0][0].dim_value) or 1 if shapes and len(shapes[0]) else 1


def _bind_inputs(model: onnx.ModelProto, feeds: SampleShapes) -> dict[str, int]:
    """Give the inputs one sample's sizes (in place), and return the numbers of the named dimensions."""
    sizes: dict[str, int] = {}
    for value in model.graph.input:
        if value.name in feeds:
            wanted = (read_fixed_batch(model), *feeds[value.name][0])
            for dim, size in zip(value.type.tensor_type.shape.dim, wanted, strict=True):
                if dim.dim_param:
                    sizes[dim.dim_param] = size
                dim.dim_value = size
    return sizes


def _collect_known_shapes(values: tuple[Any, ...], sizes: Mapping[str, int]) -> Shapes:
    shapes: Shapes = {}
    for value in values:
        tensor = value.type.tensor_type
        shape: list[Any] = [
            dim.dim_value if dim.HasField("dim_value") else sizes.get(dim.dim_param) for dim in tensor.shape.dim
        ]
        if tensor.HasField("shape") and None not in shape:
            wide = tensor.elem_type in (onnx.TensorProto.INT64, onnx.TensorProto.DOUBLE)
            shapes[value.name] = tuple(int(size) for size in shape), 8 if wide else 4
    return shapes
