"""ONNX operators as functions on torch tensors: shapes, indices and moves. As in `torch_ops`, which has arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.graph.layers import int_attribute
from compress.graph.torch_ops import Compute, Make, as_written, ints_attribute, make_form_error, text_attribute


def dtype_of(code: int) -> torch.dtype:
    """Return the torch type of an ONNX element type. ValueError for one that torch has not."""
    try:
        return torch.from_numpy(np.zeros(0, ir.DataType(code).numpy())).dtype
    except TypeError as error:
        raise ValueError(f"{ir.DataType(code).name} has no type in torch") from error


def _cast(node: ir.Node) -> Compute:
    dtype = dtype_of(int_attribute(node, "to", 1))
    return lambda x: x.to(dtype)


def _reshape(node: ir.Node) -> Compute:
    literal = bool(int_attribute(node, "allowzero", 0))

    def compute(x: Tensor, shape: Tensor) -> Tensor:
        sizes = shape.tolist()
        return x.reshape(sizes if literal else [s or x.shape[i] for i, s in enumerate(sizes)])

    return compute


def _flatten(node: ir.Node) -> Compute:
    axis = int_attribute(node, "axis", 1)

    def compute(x: Tensor) -> Tensor:
        rows = int(np.prod(x.shape[:axis], dtype=np.int64))
        return x.reshape(rows, x.numel() // rows if rows else 0)

    return compute


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

    def compute(x: Tensor, indices: Tensor) -> Tensor:
        at = axis % x.dim()
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


def _shape(node: ir.Node) -> Compute:
    start, end = int_attribute(node, "start", 0), node.attributes.get("end")
    stop = None if end is None else end.as_int()
    return lambda x: torch.tensor(list(x.shape)[start:stop], dtype=torch.int64, device=x.device)


def _constant_of_shape(node: ir.Node) -> Compute:
    given = node.attributes.get("value")
    value = torch.zeros(1) if given is None else torch.from_numpy(np.array(given.as_tensor().numpy()))
    return lambda shape: value.to(shape.device).reshape(()).expand(shape.tolist()).clone()


def _constant(node: ir.Node) -> Compute:
    given = node.attributes.get("value")
    if given is None:
        raise make_form_error(node, "a value that is no tensor")
    value = torch.from_numpy(np.array(given.as_tensor().numpy()))
    return lambda: value


def _trilu(node: ir.Node) -> Compute:
    keep = torch.triu if int_attribute(node, "upper", 1) else torch.tril
    return lambda x, k=None: keep(x, 0 if k is None else int(k))


def _cumulative_sum(node: ir.Node) -> Compute:
    if int_attribute(node, "exclusive", 0) or int_attribute(node, "reverse", 0):
        raise make_form_error(node, "exclusive or reverse")
    return lambda x, axis: x.cumsum(int(axis), dtype=x.dtype)


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
    places = range(*part.indices(x.shape[axis]))
    if places.step < 0:
        return x.index_select(axis, torch.tensor(list(places), dtype=torch.int64, device=x.device))
    at: list[Any] = [slice(None)] * x.dim()
    at[axis] = slice(places.start, max(places.stop, places.start), places.step)
    return x[tuple(at)]


def _expand(x: Tensor, shape: Tensor) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, shape.tolist()))


def _range(start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype, device=start.device)


_PLAIN: dict[str, Compute] = {
    "CastLike": lambda x, like: x.to(like.dtype),
    "Dropout": lambda x, *ratio: x,
    "Expand": _expand,
    "Identity": lambda x: x,
    "Range": _range,
    "Size": lambda x: torch.tensor(x.numel(), device=x.device),
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Tile": lambda x, times: x.repeat(times.tolist()),
    "Unsqueeze": _unsqueeze,
}
MOVES: dict[str, Make] = {name: as_written(function) for name, function in _PLAIN.items()} | {
    "Cast": _cast,
    "Concat": _concat,
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "CumSum": _cumulative_sum,
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Pad": _pad,
    "Reshape": _reshape,
    "Shape": _shape,
    "Split": _split,
    "Transpose": _transpose,
    "Trilu": _trilu,
}
"""Operator -> what makes a node's function."""
