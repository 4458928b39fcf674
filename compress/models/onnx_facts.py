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
from compress.graph.layers import GraphLayer, find_layers, is_constant
from compress.graph.run import clone, weight_bytes
from compress.models.onnx_graph import SHORT, check_runs, open_onnx
from compress.models.source import read_onnx
from compress.tasks import find_torch_task
from runtime.bundle.tensors import TensorSpec
from runtime.tasks import find_task

DTYPES = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.DOUBLE: "float64",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.BFLOAT16: "float32",  # numpy has no bfloat16: the cleaned graph reads and gives float32
    onnx.TensorProto.INT64: "int64",
    onnx.TensorProto.INT32: "int32",
    onnx.TensorProto.UINT8: "uint8",
    onnx.TensorProto.INT8: "int8",
    onnx.TensorProto.BOOL: "bool",
}
Shapes = dict[str, tuple[tuple[int, ...], int]]
"""Tensor name -> (shape, bytes per element)."""
INTEGER_PRODUCTS = re.compile(r"^QLinear(Conv|MatMul)$|Integer|^MatMulNBits$|^QGemm$|^DynamicQuantizeMatMul$")
PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def onnx_facts(path: Path, task: str, feeds: SampleShapes) -> ModelFacts:
    """Return layers, work and memory of the graph in `path` for one sample of the shapes in `feeds`, by input.

    The graph is the cleaned one, which passes work on.
    """
    proto = read_onnx(path)
    inputs, outputs = onnx_io(proto, task)
    _check_feeds(path, inputs, feeds)
    _check_outputs(path, task, outputs)
    check_runs(path, {spec.name: feeds[spec.name] for spec in inputs}, _read_fixed_batch(proto))
    opened = open_onnx(path)
    model = opened.model
    light = _without_weights(model)
    shapes, batch = _sample_shapes(light, feeds, path), _read_fixed_batch(light)
    graph_layers = find_layers(model)
    layers = tuple(_describe_layer(layer, shapes, batch) for layer in graph_layers)
    in_layers = sum(facts.n_bytes for facts in {facts.weight: facts for facts in layers}.values())
    known = {layer.weight for layer in layers}
    others = {name: value.const_value for name, value in model.graph.initializers.items() if name not in known}
    facts = ModelFacts(
        source="onnx",
        architecture=proto.graph.name or path.stem,
        task=task,
        inputs=inputs,
        outputs=outputs,
        layers=layers,
        other_bytes=max(0, weight_bytes(model) - in_layers),
        peak_activation_bytes=_count_peak_bytes(light, shapes, feeds) // batch,
        operators=tuple(sorted({node.op_type for node in model.graph})),
        notes=(*opened.clean_up.problems, *_list_notes(model, layers)),
        opset=model.opset_imports.get(""),
        clean_up=opened.clean_up.done,
    )
    return facts.keep_worth_naming({name: tensor.nbytes for name, tensor in others.items() if tensor is not None})


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


def onnx_io(proto: onnx.ModelProto, task: str) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return inputs and outputs. Dynamic dimensions have names: the first "batch", a text model's second "sequence"."""
    constants = {tensor.name for tensor in proto.graph.initializer}
    inputs = tuple(_make_tensor_spec(value, task) for value in proto.graph.input if value.name not in constants)
    return inputs, tuple(_make_tensor_spec(value, task) for value in proto.graph.output)


def _make_tensor_spec(value: Any, task: str) -> TensorSpec:
    tensor = value.type.tensor_type
    if tensor.elem_type not in DTYPES or not tensor.HasField("shape"):
        raise SourceError(f"onnx: '{value.name}' has no shape or a dtype that cannot be fed from numpy")
    dims = tuple(_name_dim(dim, axis, task) for axis, dim in enumerate(tensor.shape.dim))
    return TensorSpec(value.name, DTYPES[tensor.elem_type], dims)


def _name_dim(dim: Any, axis: int, task: str) -> int | str:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    if axis == 0:
        return "batch"
    if axis == 1 and find_task(task).reads_texts:
        return "sequence"
    return str(dim.dim_param or f"dim_{axis}")


def _check_feeds(path: Path, inputs: tuple[TensorSpec, ...], feeds: SampleShapes) -> None:
    problems = []
    for spec in inputs:
        if spec.name not in feeds:
            problems.append(
                f"{path}: input '{spec.name}' {list(spec.shape)} is not fed; the feeds are: {', '.join(feeds)}"
            )
            continue
        shape = feeds[spec.name][0]
        fits = len(shape) == len(spec.shape) - 1 and all(
            isinstance(want, str) or want == have for want, have in zip(spec.shape[1:], shape, strict=True)
        )
        if not fits:
            problems.append(
                f"{path}: input '{spec.name}' takes {list(spec.shape)}, a sample is {list(shape)} (without batch)"
            )
    if problems:
        raise SourceError(problems)


def _check_outputs(path: Path, task: str, outputs: tuple[TensorSpec, ...]) -> None:
    """Raise SourceError unless the outputs of a task that needs certain ones are there.

    Of classes there is one output: that by its name, else the only one. Several are told by their names alone.
    """
    wanted = find_torch_task(task)
    if wanted.any_outputs or (not wanted.chooses and len(wanted.outputs) < 2):
        return
    for name, axes in wanted.outputs.items():
        rank = len(axes)
        named = [out for out in outputs if out.name == name]
        candidates = named or [out for out in outputs if len(out.shape) == rank and len(wanted.outputs) == 1]
        if len(candidates) != 1 or len(candidates[0].shape) != rank:
            shown = ", ".join(f"'{out.name}' {list(out.shape)}" for out in outputs)
            called = f"that output '{name}'" if len(wanted.outputs) == 1 else "them so"
            raise SourceError(
                f"{path}: task {task} needs {wanted.describe_outputs()}, but the graph gives {shown}; call {called}, "
                "or use task: generic"
            )


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


def _sample_shapes(proto: onnx.ModelProto, feeds: SampleShapes, path: Path) -> Shapes:
    """Return shapes for a batch of 1 (or the graph's fixed batch), of the tensors whose dimensions can all be told.

    What the graph declares, with the names of its input dimensions replaced by numbers; over that, what ONNX infers.
    `path`: of the file. SourceError where ONNX says that such a sample does not pass.
    """
    fixed = onnx.ModelProto()
    fixed.CopyFrom(proto)
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


def _read_fixed_batch(proto: onnx.ModelProto) -> int:
    """Return the first dimension of the first input where the graph fixes it, else 1."""
    constants = {tensor.name for tensor in proto.graph.initializer}
    shapes = [value.type.tensor_type.shape.dim for value in proto.graph.input if value.name not in constants]
    return int(shapes[0][0].dim_value) or 1 if shapes and len(shapes[0]) else 1


def _bind_inputs(model: onnx.ModelProto, feeds: SampleShapes) -> dict[str, int]:
    """Give the inputs one sample's sizes (in place), and return the numbers of the named dimensions."""
    sizes: dict[str, int] = {}
    for value in model.graph.input:
        if value.name in feeds:
            wanted = (_read_fixed_batch(model), *feeds[value.name][0])
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
