"""Facts about an ONNX model from its graph and its tensors' shapes for one sample, without its weights' values."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from compress.errors import SourceError
from compress.facts import LayerFacts, ModelFacts, SampleShapes
from compress.graph.files import weight_bytes
from compress.graph.layers import GraphLayer, find_layers, is_constant
from compress.graph.run import clone
from compress.models.onnx_ends import read_ends
from compress.models.onnx_graph import EMPTY, SHORT, open_onnx
from runtime.bundle.manifest import fixed_batch

Shapes = dict[str, tuple[tuple[int, ...], int]]
"""Tensor name -> (shape, bytes per element)."""
INTEGER_PRODUCTS = re.compile(r"^QLinear(Conv|MatMul)$|Integer|^MatMulNBits$|^QGemm$|^DynamicQuantizeMatMul$")
PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def onnx_facts(
    path: Path,
    task: str,
    feeds: SampleShapes,
    values: Mapping[str, Any] = EMPTY,
    state: Mapping[str, str] = EMPTY,
) -> ModelFacts:
    """Return layers, work and memory of the graph in `path` for one sample of the shapes in `feeds`, by input.

    The graph is the cleaned one, which passes work on. `values` and `state`: as `ModelSpec.inputs` and `.state` say.
    With a state the work is that of one call.
    """
    ends = read_ends(path, task, feeds, values, state)
    inputs, outputs = ends.inputs, ends.outputs
    opened = open_onnx(path, values)
    model = opened.model
    ends.fix_batch(model)
    light = _without_weights(model)
    batch = fixed_batch(inputs) or 1
    if ends.states:
        feeds = {name: (shape[1:], dtype) for name, (shape, dtype) in feeds.items()}
    shapes = _sample_shapes(light, feeds, path, batch)
    graph_layers = find_layers(model)
    layers = tuple(_describe_layer(layer, shapes, batch) for layer in graph_layers)
    in_layers = sum(facts.n_bytes for facts in {facts.weight: facts for facts in layers}.values())
    known = {layer.weight for layer in layers}
    others = {name: value.const_value for name, value in model.graph.initializers.items() if name not in known}
    facts = ModelFacts(
        source="onnx",
        architecture=model.graph.name or path.stem,
        task=task,
        inputs=inputs,
        outputs=outputs,
        layers=layers,
        other_bytes=max(0, weight_bytes(model) - in_layers),
        peak_activation_bytes=_count_peak_bytes(light, shapes, feeds) // batch,
        operators=tuple(sorted({node.op_type for node in model.graph})),
        notes=(*opened.clean_up.problems, *ends.notes, *_note_shared(values), *_list_notes(model, layers)),
        states=ends.states,
        opset=model.opset_imports.get(""),
        clean_up=opened.clean_up.done,
    )
    return facts.keep_worth_naming({name: tensor.nbytes for name, tensor in others.items() if tensor is not None})


def _note_shared(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield what becomes of inputs that are the same for all samples."""
    for name, value in values.items():
        yield f"input '{name}' is {value} for all samples: the result has it as a constant, and takes no such input"


def _list_notes(model: ir.Model, layers: Sequence[LayerFacts]) -> Iterator[str]:
    """Yield what a user should know of a graph: whose work is not known, and what no pass can take."""
    unknown = [layer.name for layer in layers if not layer.macs and layer.op != "Gather"]
    if unknown:
        yield f"work is not known (the graph does not tell its shape): {', '.join(unknown)}"
    every = list(ir.traversal.RecursiveGraphIterator(model.graph))
    inner = [node for node in every if node.graph is not model.graph and node.op_type in PRODUCTS]
    if inner:
        yield f"{len(inner)} products lie within the body of an If, Loop or Scan, and stay as they are"
    integers = [node for node in every if node.op_type == "DequantizeLinear" and is_constant(node.inputs[0])]
    if integers:
        yield (
            f"{len(integers)} constants are stored as integers already, and layers that read them stay as they are; "
            "give the float model to have them compressed"
        )
    rounded = sorted({node.op_type for node in every if INTEGER_PRODUCTS.search(node.op_type)})
    if rounded:
        yield f"{', '.join(rounded)} compute with integers already, and stay as they are; better give the float model"


def _without_weights(model: ir.Model) -> onnx.ModelProto:
    """Return the graph as a proto whose large constants are inputs: protobuf holds no more than 2 GiB."""
    copy = clone(model)
    for name, value in list(copy.graph.initializers.items()):
        if value.const_value is not None and value.const_value.size > SHORT:
            del copy.graph.initializers[name]
            value.type, value.shape = ir.TensorType(value.const_value.dtype), ir.Shape(value.const_value.shape.numpy())
            value.const_value = None
            if not value.is_graph_input():
                copy.graph.inputs.append(value)
    return ir.to_proto(copy)


def _describe_layer(layer: GraphLayer, shapes: Shapes, batch: int) -> LayerFacts:
    weight = layer.weight.const_value
    assert weight is not None  # find_layers gives only constant weights
    shape = tuple(int(size) for size in weight.shape.numpy())
    if layer.axis == 1 and layer.op != "Gather":
        shape = shape[::-1]  # [in, out] -> [out, in]
    out = shapes.get(layer.node.outputs[0].name or "")
    macs = math.prod(out[0]) * math.prod(shape[1:]) // batch if out is not None and layer.op != "Gather" else 0
    bits = weight.dtype.bitwidth
    return LayerFacts(layer.name, layer.type, layer.op, layer.weight.name or layer.name, shape, macs, bits)


def _count_peak_bytes(proto: Any, shapes: Shapes, fed: Collection[str]) -> int:
    """Return the largest sum of tensors alive at once, in the graph's order; those of unknown shape count nothing."""
    nodes = proto.graph.node
    keep = {value.name for value in proto.graph.output}
    last = {name: i for i, node in enumerate(nodes) for name in node.input}
    alive = {value.name: _count_bytes(shapes, value.name) for value in proto.graph.input if value.name in fed}
    peak = sum(alive.values())
    for i, node in enumerate(nodes):
        alive |= {name: _count_bytes(shapes, name) for name in node.output}
        peak = max(peak, sum(alive.values()))
        alive = {name: size for name, size in alive.items() if name in keep or last.get(name, -1) > i}
    return peak


def _count_bytes(shapes: Shapes, name: str) -> int:
    return math.prod(shapes[name][0]) * shapes[name][1] if name in shapes else 0


def _sample_shapes(proto: onnx.ModelProto, feeds: SampleShapes, path: Path, batch: int) -> Shapes:
    """Return shapes for a call of `batch` samples, of the tensors whose dimensions can all be told.

    What the graph declares, with the names of its input dimensions replaced by numbers; over that, what ONNX infers.
    `path`: of the file. SourceError where ONNX says that such a sample does not pass.
    """
    fixed = onnx.ModelProto()
    fixed.CopyFrom(proto)
    sizes: dict[str, int] = {}
    for value in fixed.graph.input:
        if value.name in feeds:
            wanted = (batch, *feeds[value.name][0])
            for dim, size in zip(value.type.tensor_type.shape.dim, wanted, strict=True):
                if dim.dim_param:
                    sizes[dim.dim_param] = size
                dim.dim_value = size
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
