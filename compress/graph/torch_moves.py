"""Compute ONNX operators that move, choose, repeat or fill elements, in torch.

Sizes, axes and other whole numbers that say what is to be done may also come as numpy arrays, whose elements
torch.export may have made symbols.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.graph.layers import int_attribute, ints_attribute, text_attribute
from compress.graph.torch_ops import Compute, Make, ignore_attributes, make_form_error


def _reshape(node: ir.Node) -> Compute:
    literal = bool(int_attribute(node, "allowzero", 0))

    def compute(x: Tensor, shape: Tensor) -> Tensor:
        sizes = shape.tolist()
        return x.reshape(sizes if literal else [s or x.shape[i] for i, s in enumerate(sizes)])

    return compute


def _flatten(node: ir.Node) -> Compute:
    axis = int_attribute(node, "axis", 1)

    return lambda x: x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def _transpose(node: ir.Node) -> Compute:
    order = ints_attribute(node, "perm", [])
    return lambda x: x.permute(order or list(reversed(range(x.dim()))))


def _concat(node: ir.Node) -> Compute:
    axis = int_attribute(node, "axis", 0)
    return lambda *parts: torch.cat(parts, axis)


def _split(node: ir.Node) -> Compute:
    axis, n_parts = int_attribute(node, "axis", 0), len(node.outputs)

    def compute(x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
        return x.split(-(-x.shape[axis] // n_parts) if sizes is None else sizes.tolist(), axis)

    return compute


def _gather(node: ir.Node) -> Compute:
    axis = int_attribute(node, "axis", 0)

    def compute(x: Tensor, indices: Any) -> Tensor:
        at = axis % x.dim()
        if isinstance(indices, np.ndarray):
            return x.select(at, indices.item())
        places = torch.where(indices < 0, indices + x.shape[at], indices).long()
        if at == 0 and x.dim() == 2 and x.is_floating_point():
            return F.embedding(places, x)
        return x.index_select(at, places.reshape(-1)).reshape(*x.shape[:at], *places.shape, *x.shape[at + 1 :])

    return compute


def _gather_elements(node: ir.Node) -> Compute:
    axis = int_attribute(node, "axis", 0)
    return lambda x, indices: x.gather(axis, torch.where(indices < 0, indices + x.shape[axis], indices))


def _gather_nd(node: ir.Node) -> Compute:
    n_shared = int_attribute(node, "batch_dims", 0)

    def compute(x: Tensor, indices: Tensor) -> Tensor:
        if n_shared == 0:
            return x[tuple(indices.unbind(-1))]
        shared = x.shape[:n_shared]
        rows = x.reshape(-1, *x.shape[n_shared:])
        places = indices.reshape(-1, *indices.shape[n_shared:])
        gathered = [row[tuple(place.unbind(-1))] for row, place in zip(rows, places, strict=True)]
        return torch.stack(gathered).reshape(*shared, *gathered[0].shape)

    return compute


def _top_k(node: ir.Node) -> Compute:
    axis, largest = int_attribute(node, "axis", -1), bool(int_attribute(node, "largest", 1))
    return lambda x, k: tuple(x.topk(int(k.reshape(-1)[0]), axis, largest))


def _shape(node: ir.Node) -> Compute:
    start, end = int_attribute(node, "start", 0), node.attributes.get("end")
    stop = None if end is None else end.as_int()
    return lambda x: torch.tensor(list(x.shape)[start:stop], dtype=torch.int64, device=x.device)


def _constant_of_shape(node: ir.Node) -> Compute:
    given = node.attributes.get("value")
    value = torch.zeros(1) if given is None else torch.from_numpy(np.array(given.as_tensor().numpy()))
    if value.numel() == 1:
        number = value.item()
        return lambda shape: torch.full(shape.tolist(), number, dtype=value.dtype, device=_device_of(shape))
    raise make_form_error(node, "more than one value")


def _device_of(numbers: Any) -> Any:
    """Return the device of a tensor; None, the usual one, of an array."""
    return getattr(numbers, "device", None) if isinstance(numbers, Tensor) else None


def _constant(node: ir.Node) -> Compute:
    given = node.attributes.get("value")
    if given is None:
        raise make_form_error(node, "a value that is no tensor")
    value = torch.from_numpy(np.array(given.as_tensor().numpy()))
    return lambda: value


def _trilu(node: ir.Node) -> Compute:
    keep = torch.triu if int_attribute(node, "upper", 1) else torch.tril
    return lambda x, k=None: keep(x, 0 if k is None else int(k))


def _pad(node: ir.Node) -> Compute:
    mode = text_attribute(node, "mode", "constant")
    if mode == "wrap":
        raise make_form_error(node, "mode wrap")

    def compute(x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None) -> Tensor:
        chosen = list(range(x.dim())) if axes is None else [axis % x.dim() for axis in axes.tolist()]
        begins, ends = pads.reshape(2, -1).tolist()
        sides = {axis: pair for axis, *pair in zip(chosen, begins, ends, strict=True)}
        flat = [p for axis in reversed(range(x.dim())) for p in sides.get(axis, [0, 0])]
        if mode == "constant":
            return F.pad(x, flat, value=0 if value is None else value.item())
        while len(flat) > 2 and flat[-2:] == [0, 0]:  # torch reflects the last axes alone
            flat = flat[:-2]
        return F.pad(x, flat, mode="replicate" if mode == "edge" else mode)

    return compute


def _squeeze(x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(axes.reshape(-1).tolist()))


def _unsqueeze(x: Tensor, axes: Tensor) -> Tensor:
    chosen = axes.reshape(-1).tolist()
    rank = x.dim() + len(chosen)
    for axis in sorted(axis % rank for axis in chosen):
        x = x.unsqueeze(axis)
    return x


def _slice(x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None) -> Tensor:
    chosen = range(len(starts)) if axes is None else axes.tolist()
    strides = [1] * len(starts) if steps is None else steps.tolist()
    for axis, start, end, step in zip(chosen, starts.tolist(), ends.tolist(), strides, strict=True):
        x = _take_slice(x, axis, slice(start, end, step))
    return x


def _take_slice(x: Tensor, axis: int, part: slice) -> Tensor:
    if part.step > 0:
        return x[(*[slice(None)] * (axis % x.dim()), part)]
    places = range(*part.indices(x.shape[axis]))
    return x.index_select(axis, torch.tensor(list(places), dtype=torch.int64, device=x.device))


def _expand(x: Tensor, shape: Tensor) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, shape.tolist()))


def _range(start: Any, limit: Any, delta: Any) -> Tensor:
    dtype = start.dtype if isinstance(start, Tensor) else _find_dtype(start)
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=dtype, device=_device_of(start))


def _find_dtype(array: np.ndarray) -> torch.dtype:
    """Return the type that an array of one number has as a tensor; sizes are int64."""
    if array.dtype != object:
        return torch.from_numpy(np.empty(0, array.dtype)).dtype
    return torch.float32 if isinstance(array.item(), float | torch.SymFloat) else torch.int64


MOVE_OPERATORS: dict[str, Make] = {
    "Concat": _concat,
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Expand": ignore_attributes(_expand),
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Identity": ignore_attributes(lambda x: x),
    "Pad": _pad,
    "Range": ignore_attributes(_range),
    "Reshape": _reshape,
    "Shape": _shape,
    "Size": ignore_attributes(lambda x: torch.tensor(x.numel(), device=x.device)),
    "Slice": ignore_attributes(_slice),
    "Split": _split,
    "Squeeze": ignore_attributes(_squeeze),
    "Tile": ignore_attributes(lambda x, times: x.repeat(times.tolist())),
    "TopK": _top_k,
    "Transpose": _transpose,
    "Trilu": _trilu,
    "Unsqueeze": ignore_attributes(_unsqueeze),
}
"""Operator -> what makes a node's function."""
