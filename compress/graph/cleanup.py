"""Clean a graph that came as a file, exactly, so that passes see layers with constant weights and little else.

By onnx-ir's passes and onnxscript's constant folding: they work on the graph that everything here works on, keep names,
shapes and metadata, load external weights only where they are folded, and are what torch's exporter stands on. Tried
beside them: ONNX Runtime's offline optimization (renames nodes, makes Gemm of MatMul and Add, raises no opset, writes a
file) and onnxslim (folds no ConstantOfShape, rewrites patterns of its own that cannot be listed).
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, RemoveInitializersFromInputsPass, RemoveUnusedOpsetsPass

from compress.graph.convolutions import fold_channel_scales, pool_globally
from compress.graph.edit import append, name_nodes, normalize, replace_constant, replace_output, reroute, tidy, uses_of
from compress.graph.layers import constant, float_attribute, int_attribute, is_constant

WANTED_OPSETS = (20, 17)
"""What graphs are raised to, the first that the converter reaches: 20 has all that passes write (with block-wise
weights it may be called 21 as it is), 17 all but those."""
IR_VERSION = 10
"""The first with 4-bit tensors; before 4, initializers had to be inputs, too."""
MOST_FOLDED_BYTES = 2**32
"""Of all folded constants together: a file of a few bytes may ask for any size."""
GROWING = {
    "ConstantOfShape",
    "Expand",
    "Tile",
    "Range",
    "OneHot",
    "Pad",
    "Resize",
    "Upsample",
    "EyeLike",
    "CenterCropPad",
}
"""Operators whose result may be larger than what they read."""
QUANTIZED = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"}
HALVES = "half-precision weights made float32"
HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass
class CleanUp:
    """What was done: kind -> how often, in the order of the work. `problems`: what could not be done, and why."""

    done: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, kind: str, count: int) -> None:
        if count:
            self.done[kind] = self.done.get(kind, 0) + count

    def __str__(self) -> str:
        return describe_clean_up(self.done)


def describe_clean_up(done: Mapping[str, int]) -> str:
    """Return what was done to a graph, as a sentence's beginning."""
    parts = ", ".join(kind if count == 1 else f"{kind} ({count})" for kind, count in done.items())
    return f"the ONNX file was cleaned: {parts or 'nothing was to do'}"


def clean_graph(model: ir.Model) -> CleanUp:
    """Rewrite the graph in place to one that computes the same with fewer, plainer nodes; return what was done.

    Exact in real arithmetic; what is computed in half precision is computed in float32. Inputs and outputs keep names
    and types. Layers within the bodies of If, Loop and Scan are cleaned and not lifted out.
    """
    report = CleanUp()
    _take_initializers_from_inputs(model, report)
    _inline_functions(model, report)
    normalize(model)  # before nodes come and go: those without a name get their place in the file
    raise_opset(model, report)
    _widen_halves(model, report)
    _fold_constants(model, report)
    normalize(model)
    _simplify(model, report)
    before = _count_operators(model), len(model.graph.initializers)
    tidy(model)
    report.add("dead nodes removed", sum((before[0] - _count_operators(model)).values()))
    report.add("dead initializers removed", before[1] - len(model.graph.initializers))
    return report


def _take_initializers_from_inputs(model: ir.Model, report: CleanUp) -> None:
    n_inputs = len(model.graph.inputs)
    RemoveInitializersFromInputsPass()(model)
    report.add("initializers no longer inputs", n_inputs - len(model.graph.inputs))
    model.ir_version = max(model.ir_version, IR_VERSION)


def _inline_functions(model: ir.Model, report: CleanUp) -> None:
    calls = sum(node.op_identifier() in model.functions for node in ir.traversal.RecursiveGraphIterator(model.graph))
    if model.functions:
        InlinePass()(model)
        model.functions.clear()
        RemoveUnusedOpsetsPass()(model)
    report.add("functions inlined", calls)


def raise_opset(model: ir.Model, report: CleanUp) -> None:
    """Raise the opset to the first of WANTED_OPSETS that is reached; a later one is left as it is."""
    from onnxscript.version_converter import ConvertVersionPass  # 0.3 s, which plans of torch models do without

    imports = model.graph.opset_imports
    if "ai.onnx" in imports:  # the other name of the same domain
        imports[""] = max(imports.pop("ai.onnx"), imports.get("", 0))
    opset = imports.get("", WANTED_OPSETS[0])
    for wanted in WANTED_OPSETS:
        if opset >= wanted:
            break
        copy = model.clone()
        shrinking = _find_shrinking(copy) if opset < 11 else {}
        with _listen("onnxscript.version_converter") as why:
            try:
                ConvertVersionPass(target_version=wanted, fallback=True)(copy)
            except (RuntimeError, ValueError, TypeError, AssertionError) as error:
                why.append(str(error))
        if copy.graph.opset_imports.get("") == wanted:
            _keep_places(copy, shrinking)
            model.graph = copy.graph
            report.add(f"opset {opset} raised to {wanted}", 1)
            name_nodes(model)
            break
        reason = " ".join(" ".join(why).split())[:300] or "the converter does not say why"
        report.problems.append(f"opset {opset} cannot be raised to {wanted}: {reason}")


def _find_shrinking(model: ir.Model) -> dict[str, bool]:
    """Return the outputs of the graph's Upsample and Resize -> whether their known scales make something smaller."""
    nodes = [
        node for node in ir.traversal.RecursiveGraphIterator(model.graph) if node.op_type in ("Upsample", "Resize")
    ]
    return {
        node.outputs[0].name or "": len(node.inputs) > 1
        and is_constant(node.inputs[1])
        and bool((constant(node.inputs[1]) < 1).any())
        for node in nodes
    }


def _keep_places(model: ir.Model, shrinking: Mapping[str, bool]) -> None:
    """Let each Resize that was an operator before opset 11 read the places that it read then, in place."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        name = node.outputs[0].name or ""
        if node.op_type == "Resize" and name in shrinking:  # the converters leave the default of 11, half_pixel
            places = {"coordinate_transformation_mode": "asymmetric"}
            places |= {"nearest_mode": "ceil" if shrinking[name] else "floor"}
            node.attributes.update({key: ir.AttrString(key, value) for key, value in places.items()})


@contextmanager
def _listen(name: str) -> Iterator[list[str]]:
    """Collect what errors a logger is told of while the context is open, and let nobody else hear it."""
    heard: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and record.exc_info[1] is not None:
                heard.append(str(record.exc_info[1]))

    logger, collector = logging.getLogger(name), Collector(logging.WARNING)
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(collector)
    try:
        yield heard
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagate


def _fold_constants(model: ir.Model, report: CleanUp) -> None:
    """Compute what depends on no input, once: weights made by nodes, shape arithmetic of fixed shapes, known branches.

    Integers of a quantized file stay integers.
    """
    left = MOST_FOLDED_BYTES

    def choose(node: ir.Node) -> bool | None:
        nonlocal left
        if node.op_type in QUANTIZED or any(value.is_graph_output() for value in node.outputs):
            return False
        n_bytes = sum(_count_bytes(value) for value in node.outputs)
        if math.isinf(n_bytes):
            return False if node.op_type in GROWING else None  # None: onnxscript's own limits, of small constants
        if n_bytes > left:
            report.problems.append(f"{node.name}: {node.op_type} makes {n_bytes:.0f} bytes and is left as it is")
            return False
        left -= int(n_bytes)
        return True

    from onnxscript.optimizer import fold_constants_ir

    before = _count_operators(model)
    try:
        with np.errstate(all="ignore"):
            fold_constants_ir(model, onnx_shape_inference=True, output_size_limit=MOST_FOLDED_BYTES, should_fold=choose)
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        reason = " ".join(f"{error}: {error.__cause__ or ''}".split())[:300]
        report.problems.append(f"constants are folded up to a node only: {reason}")
    model.graph = model.clone().graph  # the branch that an If did not take would still read what it read
    for operator, count in sorted((before - _count_operators(model)).items()):
        report.add(f"{operator} folded", count)


def _count_bytes(value: ir.Value) -> float:
    """Return the bytes of a value; infinity where shape or type is not known."""
    if value.shape is None or value.dtype is None or not value.shape.is_static():
        return math.inf
    return math.prod(value.shape.numpy()) * value.dtype.itemsize


def _count_operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in ir.traversal.RecursiveGraphIterator(model.graph))


def _simplify(model: ir.Model, report: CleanUp) -> None:
    for node in list(model.graph):
        if node.op_type == "Sum" and len(node.inputs) == 2 and None not in node.inputs:
            node.op_type = "Add"
            report.add("Sum of two written as Add", 1)
        elif node.op_type == "Gemm" and _to_plain_gemm(model, node):
            report.add("factors and biases of Gemm made plain", 1)
    report.add("pools of all places written as global", len(pool_globally(model)))
    report.add("batch norms and channel scales folded", len(fold_channel_scales(model)))


def _to_plain_gemm(model: ir.Model, gemm: ir.Node) -> bool:
    """Take a Gemm's factors into its constants, and make its bias a vector [out]; return whether there was any."""
    bias = gemm.inputs[2] if len(gemm.inputs) > 2 else None
    alpha, beta = float_attribute(gemm, "alpha", 1.0), float_attribute(gemm, "beta", 1.0)
    if not is_constant(gemm.inputs[1]) or (bias is not None and not is_constant(bias)):
        return False
    weight = constant(gemm.inputs[1])
    n_out = weight.shape[0 if int_attribute(gemm, "transB", 0) else 1]
    vector = None if bias is None else constant(bias)
    flat = vector is None or vector.shape == (n_out,)
    if (alpha == 1.0 and (beta == 1.0 or bias is None) and flat) or (vector is not None and _has_rows(vector)):
        return False
    if alpha != 1.0:
        scaled = (weight.astype(np.float64) * alpha).astype(weight.dtype)
        replace_constant(model, gemm, 1, scaled)
    if vector is not None:
        whole = np.broadcast_to(vector.reshape(-1).astype(np.float64) * beta, (n_out,)).astype(vector.dtype)
        replace_constant(model, gemm, 2, whole)
    for name in ("alpha", "beta"):
        gemm.attributes.pop(name, None)
    return True


def _has_rows(bias: np.ndarray) -> bool:
    """Return whether a Gemm's bias differs from row to row, and so is none of the outputs."""
    return bias.ndim > 1 and bias.shape[0] != 1


def _widen_halves(model: ir.Model, report: CleanUp) -> None:
    """Let what computes in half precision compute in float32; float16 inputs and outputs keep their types, by casts.

    Every half is a float32. Integer kernels read float32, and CPUs have few kernels for halves.
    """
    graphs = [model.graph, *_iter_bodies(model.graph)]
    values = [value for graph in graphs for value in _iter_values(graph)]
    if not any(value.dtype in HALF for value in values):
        return
    n_weights = 0
    ends = [*model.graph.inputs, *model.graph.outputs]
    types = {value: value.dtype for value in ends if value.dtype is ir.DataType.FLOAT16}  # numpy has no bfloat16
    for graph in graphs:
        for value in graph.initializers.values():
            if value.const_value is not None and value.const_value.dtype in HALF:
                name = value.name
                value.const_value = ir.Tensor(constant(value).astype(np.float32), name=name)
                n_weights += 1
        for node in graph:
            _widen_attributes(node)
    for value in values:
        if value.dtype in HALF:
            value.type = ir.TensorType(ir.DataType.FLOAT)
    for value in list(model.graph.inputs):
        if (half := types.get(value)) is not None:
            uses = uses_of(value)
            value.type = ir.TensorType(half)
            wide = append(model, "Cast", [value], f"{value.name}/float32", {"to": ir.DataType.FLOAT})
            wide.type, wide.shape = ir.TensorType(ir.DataType.FLOAT), value.shape
            reroute(uses, wide)  # where it is an output, too, that stays as it is
    for value in list(model.graph.outputs):
        if (half := types.get(value)) is not None and not value.is_graph_input():
            name, value.name = value.name, f"{value.name}/float32"
            narrow = append(model, "Cast", [value], name or "", {"to": half})
            narrow.type, narrow.shape = ir.TensorType(half), value.shape
            replace_output(model, value, narrow)
    model.graph.sort()
    report.add(HALVES, max(1, n_weights))


def _iter_bodies(graph: ir.Graph) -> Iterator[ir.Graph]:
    """Yield the graphs within nodes, at any depth."""
    for node in graph:
        for attribute in node.attributes.values():
            inner = [attribute.as_graph()] if attribute.type == ir.AttributeType.GRAPH else []
            inner += attribute.as_graphs() if attribute.type == ir.AttributeType.GRAPHS else []
            for body in inner:
                yield body
                yield from _iter_bodies(body)


def _iter_values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _widen_attributes(node: ir.Node) -> None:
    """Make float32 of the types and tensors of half precision that a node has as attributes."""
    for name, attribute in list(node.attributes.items()):
        if name in ("to", "dtype", "output_dtype", "stash_type") and attribute.type == ir.AttributeType.INT:
            if attribute.as_int() in [int(half) for half in HALF]:
                node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))
        elif attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in HALF:
            wide = attribute.as_tensor().numpy().astype(np.float32)
            node.attributes[name] = ir.AttrTensor(name, ir.Tensor(wide))
