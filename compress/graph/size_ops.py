"""Compute the shape arithmetic of ONNX graphs on numpy arrays, so that sizes stay numbers while a module runs.

A size that torch.export follows is a symbol (`torch.SymInt`), which an array of objects holds as well as an int. As
tensors the same sizes would depend on data, which neither an export nor a run without values can follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from compress.graph.layers import int_attribute, ints_attribute
from compress.graph.torch_ops import Make, ignore_attributes

LONGEST = 64
"""Elements of a constant that may be sizes, axes or places; longer ones are data."""


def holds_sizes(array: np.ndarray) -> bool:
    """Return whether a constant is a single number, or a few whole ones in a row."""
    return array.size == 1 or (array.dtype.kind in "iu" and array.ndim <= 1 and array.size <= LONGEST)


def shape_of(x: Tensor | np.ndarray, start: int = 0, end: int | None = None) -> np.ndarray:
    """Return the sizes of some axes, as an array of objects [rank]."""
    return np.array([*x.shape][start:end], dtype=object)


def to_tensor(array: np.ndarray, like: Tensor | None) -> Tensor:
    """Return an array as a tensor, where `like` lies; sizes as int64."""
    device = None if like is None else like.device
    if array.dtype != object:
        return torch.from_numpy(np.array(array)).to(device)
    entries = array.reshape(-1).tolist()
    if all(type(entry) in (int, bool, float) for entry in entries):
        return torch.tensor(array.tolist(), device=device)
    parts = [torch.full((), entry, dtype=torch.int64, device=device) for entry in entries]
    return torch.stack(parts).reshape(array.shape)


def _divide(a: Any, b: Any) -> Any:
    """Divide two numbers; whole ones without a rest, towards zero."""
    if isinstance(a, float | torch.SymFloat) or isinstance(b, float | torch.SymFloat):
        return a / b
    return -(-a // b) if type(a) is int and type(b) is int and (a < 0) != (b < 0) else a // b


def _as_kind(to: int) -> Callable[[Any], Any]:
    kind = ir.DataType(to)
    if kind == ir.DataType.BOOL:
        return bool
    return torch.sym_int if kind.is_integer() else torch.sym_float


def _go_by_number(function: Callable[..., Any], n_in: int) -> Make:
    """Return the maker of an operator that goes number by number."""
    mapped = np.frompyfunc(function, n_in, 1)
    return lambda node: lambda *arrays: np.asarray(mapped(*arrays), dtype=object)


def _cast(node: ir.Node) -> Callable[..., Any]:
    mapped = np.frompyfunc(_as_kind(int_attribute(node, "to", 1)), 1, 1)
    return lambda x: np.asarray(mapped(x), dtype=object)


def _reduce(function: Callable[..., Any]) -> Make:
    def make(node: ir.Node) -> Callable[..., Any]:
        keep, axes = bool(int_attribute(node, "keepdims", 1)), ints_attribute(node, "axes", [])

        def compute(x: np.ndarray, chosen: np.ndarray | None = None) -> np.ndarray:
            over = tuple(axes if chosen is None else chosen.tolist()) or None
            return np.asarray(function(x, axis=over, keepdims=keep), dtype=object)

        return compute

    return make


def _gather(node: ir.Node) -> Callable[..., Any]:
    axis = int_attribute(node, "axis", 0)
    return lambda x, places: np.asarray(np.take(x, places.astype(np.int64), axis), dtype=object)


def _concat(node: ir.Node) -> Callable[..., Any]:
    axis = int_attribute(node, "axis", 0)
    return lambda *parts: np.concatenate([part.astype(object) for part in parts], axis)


def _slice(
    x: np.ndarray, starts: np.ndarray, ends: np.ndarray, axes: np.ndarray | None = None, steps: np.ndarray | None = None
) -> np.ndarray:
    at = [slice(None)] * x.ndim
    strides = [1] * len(starts) if steps is None else steps.tolist()
    chosen = range(len(starts)) if axes is None else axes.tolist()
    for axis, start, end, step in zip(chosen, starts.tolist(), ends.tolist(), strides, strict=True):
        at[axis] = slice(start, end, step)
    return x[tuple(at)]


def _unsqueeze(x: np.ndarray, axes: np.ndarray) -> np.ndarray:
    return np.expand_dims(x, tuple(axes.reshape(-1).tolist()))


def _squeeze(x: np.ndarray, axes: np.ndarray | None = None) -> np.ndarray:
    return np.squeeze(x, None if axes is None else tuple(axes.reshape(-1).tolist()))


SIZE_OPERATORS: dict[str, Make] = {
    "Abs": _go_by_number(abs, 1),
    "Add": _go_by_number(lambda a, b: a + b, 2),
    "And": _go_by_number(lambda a, b: a and b, 2),
    "Cast": _cast,
    "Ceil": _go_by_number(math.ceil, 1),
    "Concat": _concat,
    "Div": _go_by_number(_divide, 2),
    "Equal": _go_by_number(lambda a, b: bool(a == b), 2),
    "Expand": ignore_attributes(
        lambda x, shape: np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(shape.tolist())))
    ),
    "Floor": _go_by_number(math.floor, 1),
    "Gather": _gather,
    "Greater": _go_by_number(lambda a, b: bool(a > b), 2),
    "Identity": ignore_attributes(lambda x: x),
    "Less": _go_by_number(lambda a, b: bool(a < b), 2),
    "Max": _go_by_number(torch.sym_max, 2),
    "Min": _go_by_number(torch.sym_min, 2),
    "Mod": _go_by_number(lambda a, b: a % b, 2),
    "Mul": _go_by_number(lambda a, b: a * b, 2),
    "Neg": _go_by_number(lambda a: -a, 1),
    "Not": _go_by_number(lambda a: not a, 1),
    "Or": _go_by_number(lambda a, b: a or b, 2),
    "ReduceMax": _reduce(np.max),
    "ReduceMin": _reduce(np.min),
    "ReduceProd": _reduce(np.prod),
    "ReduceSum": _reduce(np.sum),
    "Reshape": ignore_attributes(lambda x, shape: x.reshape(shape.tolist())),
    "Slice": ignore_attributes(_slice),
    "Squeeze": ignore_attributes(_squeeze),
    "Sub": _go_by_number(lambda a, b: a - b, 2),
    "Unsqueeze": ignore_attributes(_unsqueeze),
    "Where": _go_by_number(lambda chosen, a, b: a if chosen else b, 3),
}
"""Operator -> what makes a node's function where all that it reads are arrays."""
