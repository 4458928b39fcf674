"""Lower a graph with its decisions to ExecuTorch's .pte, what XNNPACK has kernels for to these.

The float graph is rebuilt as a torch module. What the ONNX file has as pairs becomes ExecuTorch's own operators, at the
same places and with the same scales (int8 where the file has uint8, both zero points less 128), and a layer holds the
integers that the file holds. XNNPACK has no integer product with a float output but one that scales each row of its
input by itself: a layer whose output stays float is computed so, as mode: dynamic is.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from compress.engine.orders import BATCH
from compress.errors import ExportError, NotExportable
from compress.facts import Note
from compress.graph.edit import tidy
from compress.graph.layers import GraphLayer, constant, find_layers
from compress.graph.rebuild import RebuildError, Rebuilt, check_known, rebuild
from compress.graph.run import clone
from compress.models.rebuilt import FREE_BATCH
from compress.rounding.placement import after_activation, place
from compress.rounding.qdq import find_rounded_tensors, fit_scales_to_bias, get_bias, insert_pair
from compress.rounding.quantized_weight import QuantizedWeight
from compress.rounding.state import GraphState
from runtime.backends.executorch import DESCRIBE, describe_ends, open_session
from runtime.bundle.tensors import TensorSpec

INT8 = (-128, 127, torch.int8)
"""What ExecuTorch's operators are told of integers: the least, the greatest, their type."""
VIEWS = ("sym_size", "view_copy", "squeeze_copy", "unsqueeze_copy")
"""Operators that compute nothing."""
OTHER_WAY = "use {kind: onnx}, or {kind: ort} for phones"
Ranges = Mapping[str, tuple[int, int, int]]
"""Free size -> (least, usual, most)."""
Specs = tuple[TensorSpec, ...]


def check_lowers(graph: ir.Model) -> None:
    """Raise NotExportable for a float graph with operators of which no torch module is made."""
    try:
        check_known(graph)
    except RebuildError as error:
        raise _explain(error) from error


def _explain(error: RebuildError) -> NotExportable:
    return NotExportable(f"executorch: no torch module can be made of the graph: {error}; {OTHER_WAY}")


def write_pte(state: GraphState, ends: tuple[Specs, Specs], ranges: Ranges, path: Path) -> list[Note]:
    """Write a state's graph as a .pte; return notes on operators that XNNPACK does not take. ExportError.

    `ends`: inputs and outputs, whose free sizes take `ranges`. Same state, same bytes.
    """
    try:
        with _quiet():
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
            from executorch.exir import to_edge_transform_and_lower

            program = _export(_make_module(state, ends, ranges), ends[0], ranges)
            told = {DESCRIBE: describe_ends(*ends)}
            lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()], constant_methods=told)
            graph = lowered.exported_program().graph
            data = bytes(lowered.to_executorch().buffer)
    except RebuildError as error:
        raise _explain(error) from error
    except Exception as error:  # whatever torch, ExecuTorch or XNNPACK raise
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ExportError(f"executorch: the graph cannot be lowered: {said}; {OTHER_WAY}") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    open_session(path, 1, {}).close()
    return [Note("slow", text) for text in _list_left(graph)]


def _make_module(state: GraphState, ends: tuple[Specs, Specs], ranges: Ranges) -> nn.Module:
    """Return the state's graph as a module from inputs to outputs, in order. RebuildError."""
    model = clone(state.model)
    layers = {layer.name: layer for layer in find_layers(model)}
    integer = [layers[name] for name in state.integer]
    scales = {} if state.dynamic else _insert_pairs(model, integer, state)
    shapes = {spec.name: (_trace_shape(spec, ranges), getattr(torch, spec.dtype)) for spec in ends[0]}
    made = rebuild(model, shapes, {"QuantizeLinear": _make_quantize, "DequantizeLinear": _make_dequantize})
    for name, weight in state.weights.items():
        path = made.layers[name]
        module = made.module.get_submodule(path)
        if not isinstance(module, _IntegerLayer | _IntegerTable):  # else of a layer that shares it
            rounded = _round_layer(module, layers[name], weight, state, name in state.integer, scales)
            made.module.set_submodule(path, rounded)
    return _InOrder(made, ends)


def _insert_pairs(model: ir.Model, integer: Sequence[GraphLayer], state: GraphState) -> dict[str, float]:
    """Insert the pairs between which XNNPACK computes in integers; return the input scale of each layer that it does.

    Those that serve a layer with a float output, or a product of two activations, are left out.
    """
    products = [layer for layer in integer if layer.op != "Gather"]
    pairs = list(find_rounded_tensors(model, products, replace(state, attention=False), "u8s8"))
    whole = {value.name for value, _, uses in pairs if len(uses) == len(value.uses()) and not value.is_graph_output()}
    rounded = {value.name for value, _, _ in pairs}
    static = {
        layer.node: layer.name
        for layer in products
        if layer.data_input.name in rounded and after_activation(layer.output).name in whole
    }
    others = {layer.node for layer in products} - static.keys()
    written: set[str | None] = {*place(model, products, state.placement, leave_out=state.leave_out).writers}
    written |= {after_activation(layer.output).name for layer in products if layer.node in static}
    scales: dict[str, float] = {}
    for value, source, uses in pairs:
        kept = uses if value.name in written else [use for use in uses if use[0] not in others]
        if kept:
            scale, zero_point = state.ranges[source].parameters("u8s8")
            insert_pair(model, value, kept, scale, zero_point)
            scales |= {static[node]: float(scale) for node, index in kept if node in static and index == 0}
    tidy(model)
    return scales


def _make_quantize(node: ir.Node) -> Callable[..., Tensor]:
    scale, zero = _read_parameters(node)
    return lambda x, *_: torch.ops.quantized_decomposed.quantize_per_tensor(x, scale, zero, *INT8)


def _make_dequantize(node: ir.Node) -> Callable[..., Tensor]:
    scale, zero = _read_parameters(node)
    return lambda x, *_: torch.ops.quantized_decomposed.dequantize_per_tensor(x, scale, zero, *INT8)


def _read_parameters(node: ir.Node) -> tuple[float, int]:
    return float(constant(node.inputs[1])), int(constant(node.inputs[2])) - 128  # the file has uint8, XNNPACK int8


def _round_layer(
    module: Any,
    layer: GraphLayer,
    weight: QuantizedWeight,
    state: GraphState,
    computed: bool,
    scales: Mapping[str, float],
) -> nn.Module:
    """Return a layer with rounded weights: `computed` in integers where XNNPACK can, else with the floats they are.

    `scales`: of the inputs of layers between pairs.
    """
    if layer.op == "Gather":
        return _IntegerTable(weight)
    if layer.bias is not None:
        module.bias = nn.Parameter(torch.from_numpy(get_bias(layer, state)), requires_grad=False)
        if layer.name in scales:
            weight = fit_scales_to_bias(weight, get_bias(layer, state), np.asarray(scales[layer.name]))
    if computed and (layer.name in scales or _has_dynamic_kernel(module)):
        return _IntegerLayer(module, weight, dynamic=layer.name not in scales)
    module.weight = nn.Parameter(torch.from_numpy(weight.dequantize()), requires_grad=False)
    return module


def _has_dynamic_kernel(module: nn.Module) -> bool:
    """Return whether XNNPACK scales each row, or image, of a layer's input by itself."""
    return isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)


class _IntegerLayer(nn.Module):
    """A Linear or convolution on dequantized int8 weights, a scale for each output; XNNPACK fuses what it reads."""

    def __init__(self, layer: Any, weight: QuantizedWeight, dynamic: bool) -> None:
        super().__init__()
        n_out = len(weight.values)
        self.layer, self.bias, self.dynamic = layer, layer.bias, dynamic
        del layer.weight  # else a float copy would be stored, too
        self.register_buffer("values", torch.from_numpy(np.ascontiguousarray(weight.values)))
        self.register_buffer("scales", torch.from_numpy(np.broadcast_to(weight.scales[:, 0], n_out).copy()))
        self.register_buffer("zeros", torch.zeros(n_out, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        ops = torch.ops.quantized_decomposed
        if self.dynamic:
            scale, zero = ops.choose_qparams_per_token_asymmetric(x, torch.int8)
            x = ops.quantize_per_token(x, scale, zero, *INT8)
            x = ops.dequantize_per_token(x, scale, zero, *INT8, torch.float32)
        weight = ops.dequantize_per_channel(self.values, self.scales, self.zeros, 0, *INT8)
        if isinstance(self.layer, nn.Linear):
            return F.linear(x, weight, self.bias)
        return self.layer._conv_forward(x, weight, self.bias)


class _IntegerTable(nn.Module):
    """An embedding that dequantizes the rows that are looked up: of int8 [rows, width], with a scale for each column.

    `weight`: the table transposed, as `int8` leaves it.
    """

    values: Tensor
    scales: Tensor

    def __init__(self, weight: QuantizedWeight) -> None:
        super().__init__()
        self.register_buffer("values", torch.from_numpy(np.ascontiguousarray(weight.values.T)))
        self.register_buffer("scales", torch.from_numpy(np.ascontiguousarray(weight.scales[:, 0])))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.values).to(torch.float32) * self.scales


class _InOrder(nn.Module):
    """Takes the graph's inputs in order, and gives its outputs so."""

    def __init__(self, made: Rebuilt, ends: tuple[Specs, Specs]) -> None:
        super().__init__()
        self.wrapped = made.module
        self.reads = [made.parameters[spec.name] for spec in ends[0]]
        self.gives = [spec.name for spec in ends[1]]

    def forward(self, *feeds: Tensor) -> tuple[Tensor, ...]:
        outputs = self.wrapped(**dict(zip(self.reads, feeds, strict=True)))
        return tuple(outputs[name] for name in self.gives)


def _trace_shape(spec: TensorSpec, ranges: Ranges) -> tuple[int, ...]:
    """Return a shape on which the graph is rebuilt: a batch that no other size is, the usual size elsewhere."""
    free = {name: usual for name, (_, usual, _) in ranges.items()} | {BATCH: FREE_BATCH}
    return tuple(free[size] if isinstance(size, str) else size for size in spec.shape)


def _export(module: nn.Module, inputs: Specs, ranges: Ranges) -> torch.export.ExportedProgram:
    """Export the module with its free sizes within `ranges`."""
    dims = {name: torch.export.Dim(name, min=sizes[0], max=sizes[2]) for name, sizes in ranges.items() if sizes[2] > 1}
    example, free = [], []
    for spec in inputs:
        # The largest: traced with a batch of 2, a convolution bounds the batch to 15, below which torch would choose
        # another kernel; ExecuTorch takes no more than the upper bound, and asks for no lower one.
        shape = [ranges[size][2] if isinstance(size, str) else size for size in spec.shape]
        example.append(torch.zeros(shape, dtype=getattr(torch, spec.dtype)))
        free.append({axis: dims[size] for axis, size in enumerate(spec.shape) if size in dims})
    with torch.no_grad():
        return torch.export.export(module, tuple(example), dynamic_shapes={"feeds": tuple(free)}, strict=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep from the terminal what ExecuTorch, torchao and torch.export tell as they work."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _list_left(graph: fx.Graph) -> list[str]:
    """Return in a sentence which operators XNNPACK does not take."""
    left = Counter(
        str(node.target.__name__).removeprefix("aten.").partition(".")[0]
        for node in graph.nodes
        if node.op == "call_function" and hasattr(node.target, "_op")
    )
    left = Counter({name: n for name, n in left.items() if name not in VIEWS})
    if not left:
        return []
    counts = ", ".join(f"{n} {name}" for name, n in left.most_common())
    return [f"executorch: XNNPACK does not take {counts}: ExecuTorch's own kernels compute them, on one thread"]
