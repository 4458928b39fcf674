"""Open an .onnx file as the graph that everything works on: read, checked, cleaned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from compress.errors import SourceError
from compress.graph.cleanup import CleanUp, clean_graph
from compress.graph.layers import constant, find_layers
from compress.models.source import read_onnx

DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training", "com.microsoft")
"""Of operators that ONNX Runtime has."""
SHORT = 1024
"""Elements of a constant up to which it may say shapes or axes."""


@dataclass(frozen=True)
class OpenedGraph:
    """A cleaned graph with the shapes that can be told, and what the clean-up did."""

    model: ir.Model
    clean_up: CleanUp


def open_onnx(path: Path) -> OpenedGraph:
    """Read an ONNX file and clean its graph; external weights stay in their files until they are needed.

    Raises SourceError: no valid ONNX model, or one of operators that nothing here runs.
    """
    proto = read_onnx(path)  # refuses what is damaged, before anything trusts it
    try:
        model = ir.from_proto(proto)
        ir.external_data.set_base_dir(model.graph, path.parent)
        _load_short_constants(model.graph)
        clean_up = clean_graph(model)
        ShapeInferencePass()(model)
    except (ir.serde.SerdeError, ir.passes.PassError, RuntimeError, ValueError, TypeError, OSError) as error:
        raise SourceError(f"{path}: cannot be read as a graph: {' '.join(str(error).split())[:500]}") from error
    _refuse_unknown_operators(model, path)
    return OpenedGraph(model, clean_up)


def _load_short_constants(graph: ir.Graph) -> None:
    """Take what may say shapes or axes into memory: ONNX's inference does not look into files."""
    for value in graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and tensor.size <= SHORT:
            value.const_value = ir.Tensor(tensor.numpy().copy(), name=value.name)


def _refuse_unknown_operators(model: ir.Model, path: Path) -> None:
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    unknown = sorted({f"{node.domain}.{node.op_type}" for node in nodes if node.domain not in DOMAINS})
    if unknown:
        raise SourceError(
            f"{path}: ONNX Runtime has no operator {', '.join(unknown[:5])}; export the model without custom "
            "operators, or give them as functions of the file"
        )


def check_finite_onnx(model: ir.Model, path: Path) -> None:
    """Raise SourceError for a constant that cannot be read or holds NaN, and for infinity in a layer's weight.

    Infinity elsewhere is common: what hides tokens from attention is one.
    """
    bad = []
    weights = {layer.weight.name for layer in find_layers(model)}
    for name, value in model.graph.initializers.items():
        try:
            array = constant(value)
        except (ValueError, OSError) as error:
            raise SourceError(f"{path}: weight '{name}' cannot be read: {error}") from error
        if array.dtype.kind == "f" and (np.isnan(array).any() or (name in weights and np.isinf(array).any())):
            bad.append(name)
    if bad:
        raise SourceError(f"{path}: NaN or infinity in {', '.join(bad)}; the weights are not usable")
