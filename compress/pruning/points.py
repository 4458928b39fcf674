"""Where the output of a layer arrives: after the batch norm that follows it, and in the sum that it is added to.

A layer that writes to a residual stream is fitted against the stream as it should be after it, not against its own old
output: what went wrong before it, in the shortcut, is then made up for as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from compress.blocks.materialise import plain
from compress.pruning.layers import is_matrix_layer, read_weight
from compress.structure.dataflow import DataFlow, Op, record, within


@dataclass(frozen=True)
class Point:
    """`layer`'s outputs reach it through the batch norm `norm` ("": none). It is the `addition`-th sum of the forward
    (counted from 0; every `add` operator counts), or if that is None what `norm`, or else the layer, gives. `index`:
    the operators that run before it. `rectified`: a ReLU alone reads it, so that below zero all values are alike."""

    layer: str
    norm: str
    addition: int | None
    index: int
    rectified: bool = False


@dataclass(frozen=True, eq=False)
class PointModules:
    """A point with its modules."""

    point: Point
    layer: Any
    norm: Any

    def scale(self) -> Tensor:
        """Return what the batch norm multiplies each output with, float64 [out]; ones without."""
        n_out = read_weight(self.layer).flatten(0, 1).shape[0]
        if self.norm is None:
            return torch.ones(n_out, dtype=torch.float64)
        scale: Tensor = (self.norm.running_var.double() + self.norm.eps).rsqrt()
        return scale if self.norm.weight is None else scale * self.norm.weight.detach().double()

    def bias_holder(self) -> Tensor | None:
        """Return the parameter or buffer that can take a shift of the outputs; None where there is none."""
        holder: Tensor | None = self.layer.bias
        if self.norm is not None:
            holder = self.norm.running_mean if self.norm.bias is None else self.norm.bias
        return None if holder is None else holder.detach()

    def shift(self, by: Tensor) -> None:
        """Move the outputs at the point by [out], in place, where there is what can take it."""
        holder = self.bias_holder()
        if holder is not None:
            holder.add_(-by / self.scale() if self.norm is not None and self.norm.bias is None else by)


def place_of(module: nn.Module, point: Point) -> PointModules:
    """Return the point with its modules in a model."""
    parts = {plain(name): part for name, part in module.named_modules()}
    return PointModules(point, parts[point.layer], parts[point.norm] if point.norm else None)


def find_points(module: nn.Module, feeds: Mapping[str, Tensor]) -> tuple[Point, ...]:
    """Return a point for every layer that is called once, in the order in which a forward on `feeds` reaches them.

    Raises whatever the forward raises.
    """
    flow = record(module, feeds, compute=True)
    additions = {op.index: number for number, op in enumerate(op for op in flow.ops if op.name == "add")}
    layers = [name for name, calls in flow.calls.items() if len(calls) == 1 and is_matrix_layer(flow.modules[name])]
    points = [_find_point(flow, name, additions) for name in layers]
    return tuple(sorted((point for point in points if point is not None), key=lambda point: point.index))


def _find_point(flow: DataFlow, layer: str, additions: Mapping[int, int]) -> Point | None:
    call = flow.calls[layer][0]
    if len(call.outputs) != 1:
        return None
    value, index = call.outputs[0], call.stop
    norm = _find_norm(flow, value)
    if norm:
        value, index = flow.calls[norm][0].outputs[0], flow.calls[norm][0].stop
    sums = _find_only_reader(flow, value)
    addition = None
    if sums is not None and sums.name == "add" and _adds_alike(flow, sums):
        value, index, addition = sums.outputs[0], sums.index + 1, additions[sums.index]
    reader = _find_only_reader(flow, value)
    return Point(layer, norm, addition, index, reader is not None and reader.name == "relu")


def _find_norm(flow: DataFlow, value: int) -> str:
    """Return the name of the batch norm that alone reads the value; "" if there is none."""
    for name, module in flow.modules.items():
        calls = flow.calls.get(name, ())
        if isinstance(module, _BatchNorm) and len(calls) == 1 and calls[0].inputs[:1] == (value,):
            alone = all(within(op.module, name) for op in flow.consumers.get(value, ()))
            return name if alone and value not in flow.outputs else ""
    return ""


def _find_only_reader(flow: DataFlow, value: int) -> Op | None:
    readers: Sequence[Op] = flow.consumers.get(value, [])
    return readers[0] if len(readers) == 1 and value not in flow.outputs else None


def _adds_alike(flow: DataFlow, op: Op) -> bool:
    """Return whether an operator adds two different tensors of one shape, neither of them multiplied."""
    a, b = (*op.inputs, -1, -1)[:2]
    same = len(op.inputs) == 2 and a != b and flow.shapes[a] == flow.shapes[b] == flow.shapes[op.outputs[0]]
    return same and op.kwargs.get("alpha", 1) == 1
