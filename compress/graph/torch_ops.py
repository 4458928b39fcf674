"""Compute ONNX operators on torch tensors, with gradients: arithmetic first, then shapes, indices and moves.

Each entry of `OPERATORS` reads a node's attributes once and gives what computes it: tensors in (None for an input that
is left out), a tensor or a tuple of them out. Definitions are those of https://onnx.ai/onnx/operators, opsets 17 to 22.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.graph.layers import float_attribute, int_attribute, ints_attribute, text_attribute

Compute = Callable[..., Any]
Make = Callable[[ir.Node], Compute]


def _as_written(function: Compute) -> Make:
    """Return the maker of an operator without attributes: `function` serves every node."""
    return lambda node: function


def _make_form_error(node: ir.Node, what: str) -> ValueError:
    return ValueError(f"{node.op_type} {node.name!r} with {what} has no form in torch here")


def _split_pads(node: ir.Node, n_dims: int) -> tuple[list[int], list[int]]:
    """Return (padding that torch's kernel takes, what has to be padded before, as `F.pad` wants it)."""
    if text_attribute(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise _make_form_error(node, "auto_pad")
    pads = ints_attribute(node, "pads", [0] * (2 * n_dims))
    begins, ends = pads[:n_dims], pads[n_dims:]
    if begins == ends:
        return begins, []
    return [0] * n_dims, [p for pair in reversed(list(zip(begins, ends, strict=True))) for p in pair]


def _conv(node: ir.Node) -> Compute:
    group, strides, dilations = int_attribute(node, "group", 1), *_read_strides(node)
    kernels: dict[int, tuple[Compute, list[int], list[int]]] = {}

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        n = x.dim() - 2
        if n not in kernels:
            kernels[n] = ((F.conv1d, F.conv2d, F.conv3d)[n - 1], *_split_pads(node, n))
        kernel, padding, before = kernels[n]
        x = F.pad(x, before) if before else x
        return kernel(x, weight, bias, strides or 1, padding, dilations or 1, group)

    return compute


def _conv_transpose(node: ir.Node) -> Compute:
    group, strides, dilations = int_attribute(node, "group", 1), *_read_strides(node)
    extra = ints_attribute(node, "output_padding", [])
    if "output_shape" in node.attributes:
        raise _make_form_error(node, "output_shape")

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        padding, before = _split_pads(node, x.dim() - 2)
        if before:
            raise _make_form_error(node, "uneven pads")
        kernel = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[x.dim() - 3]
        return kernel(x, weight, bias, strides or 1, padding, extra or 0, group, dilations or 1)

    return compute


def _read_strides(node: ir.Node) -> tuple[list[int], list[int]]:
    return ints_attribute(node, "strides", []), ints_attribute(node, "dilations", [])


def _max_pool(node: ir.Node) -> Compute:
    size, (strides, dilations) = ints_attribute(node, "kernel_shape", []), _read_strides(node)
    padding, before = _split_pads(node, len(size))
    kernel = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(size) - 1]
    ceil = bool(int_attribute(node, "ceil_mode", 0))

    def compute(x: Tensor) -> Tensor:
        x = F.pad(x, before, value=-torch.inf) if before else x
        return kernel(x, size, strides or 1, padding, dilations or 1, ceil)

    return compute


def _average_pool(node: ir.Node) -> Compute:
    size, (strides, dilations) = ints_attribute(node, "kernel_shape", []), _read_strides(node)
    padding, before = _split_pads(node, len(size))
    kernel = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(size) - 1]
    if before or any(d != 1 for d in dilations):
        raise _make_form_error(node, "uneven pads or dilations")
    ceil, whole = bool(int_attribute(node, "ceil_mode", 0)), bool(int_attribute(node, "count_include_pad", 0))
    return lambda x: kernel(x, size, strides or [1] * len(size), padding, ceil, whole)


def _gemm(node: ir.Node) -> Compute:
    alpha, beta = float_attribute(node, "alpha", 1.0), float_attribute(node, "beta", 1.0)
    flip_a, flip_b = int_attribute(node, "transA", 0), int_attribute(node, "transB", 0)

    def compute(a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
        a, b = a.t() if flip_a else a, b.t() if flip_b else b
        product = a @ b if alpha == 1.0 else alpha * (a @ b)
        return product if c is None else product + (c if beta == 1.0 else beta * c)

    return compute


def _batch_norm(node: ir.Node) -> Compute:
    epsilon = float_attribute(node, "epsilon", 1e-5)
    if int_attribute(node, "training_mode", 0):
        raise _make_form_error(node, "training_mode")
    return lambda x, gain, shift, mean, var: F.batch_norm(x, mean, var, gain, shift, False, 0.0, epsilon)


def _layer_norm(node: ir.Node) -> Compute:
    axis, epsilon = int_attribute(node, "axis", -1), float_attribute(node, "epsilon", 1e-5)

    def compute(x: Tensor, gain: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        return F.layer_norm(x, x.shape[axis:], gain, shift, epsilon)

    return compute


def _instance_norm(node: ir.Node) -> Compute:
    epsilon = float_attribute(node, "epsilon", 1e-5)
    return lambda x, gain, shift: F.instance_norm(x, None, None, gain, shift, True, 0.0, epsilon)


def _group_norm(node: ir.Node) -> Compute:
    groups, epsilon = int_attribute(node, "num_groups", 1), float_attribute(node, "epsilon", 1e-5)

    def compute(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        if len(gain) != x.shape[1]:  # opset 18: one for each group
            gain, shift = (v.repeat_interleave(x.shape[1] // groups) for v in (gain, shift))
        return F.group_norm(x, groups, gain, shift, epsilon)

    return compute


def _gelu(node: ir.Node) -> Compute:
    kind = text_attribute(node, "approximate", "none")
    return lambda x: F.gelu(x, approximate=kind)


def _hard_sigmoid(node: ir.Node) -> Compute:
    alpha, beta = float_attribute(node, "alpha", 0.2), float_attribute(node, "beta", 0.5)
    return lambda x: (alpha * x + beta).clamp(0, 1)


def _softmax(function: Compute) -> Make:
    def make(node: ir.Node) -> Compute:
        axis = int_attribute(node, "axis", -1)
        return lambda x: function(x, axis)

    return make


def _slope(function: Compute, default: float) -> Make:
    def make(node: ir.Node) -> Compute:
        alpha = float_attribute(node, "alpha", default)
        return lambda x: function(x, alpha)

    return make


def _reduce(function: Callable[[Tensor, list[int], bool], Tensor]) -> Make:
    """Return the maker of a reduction, whose axes are an attribute or a second input; none: all."""

    def make(node: ir.Node) -> Compute:
        written, keep = ints_attribute(node, "axes", []), bool(int_attribute(node, "keepdims", 1))
        idle = bool(int_attribute(node, "noop_with_empty_axes", 0))

        def compute(x: Tensor, axes: Tensor | None = None) -> Tensor:
            chosen = written if axes is None else axes.tolist()
            return x if idle and not chosen else function(x, chosen or list(range(x.dim())), keep)

        return compute

    return make


def _clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    return x if low is None and high is None else torch.clamp(x, low, high)


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _largest(*values: Tensor) -> Tensor:
    largest = values[0]
    for value in values[1:]:
        largest = torch.maximum(largest, value)
    return largest


def _smallest(*values: Tensor) -> Tensor:
    return -_largest(*(-value for value in values))


def _einsum(node: ir.Node) -> Compute:
    equation = text_attribute(node, "equation", "")
    return lambda *values: torch.einsum(equation, *values)


def _global_mean(x: Tensor) -> Tensor:
    return x.mean(tuple(range(2, x.dim())), keepdim=True)


def _dtype_of(code: int) -> torch.dtype:
    """Return the torch type of an ONNX element type. ValueError for one that torch has not."""
    try:
        return torch.from_numpy(np.zeros(0, ir.DataType(code).numpy())).dtype
    except TypeError as error:
        raise ValueError(f"{ir.DataType(code).name} has no type in torch") from error


def _cast(node: ir.Node) -> Compute:
    dtype = _dtype_of(int_attribute(node, "to", 1))
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
        raise _make_form_error(node, "a value that is no tensor")
    value = torch.from_numpy(np.array(given.as_tensor().numpy()))
    return lambda: value


def _trilu(node: ir.Node) -> Compute:
    keep = torch.triu if int_attribute(node, "upper", 1) else torch.tril
    return lambda x, k=None: keep(x, 0 if k is None else int(k))


def _cumulative_sum(node: ir.Node) -> Compute:
    if int_attribute(node, "exclusive", 0) or int_attribute(node, "reverse", 0):
        raise _make_form_error(node, "exclusive or reverse")
    return lambda x, axis: x.cumsum(int(axis), dtype=x.dtype)


def _pad(node: ir.Node) -> Compute:
    mode = text_attribute(node, "mode", "constant")
    if mode == "wrap":
        raise _make_form_error(node, "mode wrap")

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
    "Abs": torch.abs, "Add": torch.add, "And": torch.logical_and, "CastLike": lambda x, like: x.to(like.dtype),
    "Ceil": torch.ceil, "Clip": _clip, "Cos": torch.cos, "Div": _divide, "Dropout": lambda x, *ratio: x,
    "Equal": torch.eq, "Erf": torch.erf, "Exp": torch.exp, "Expand": _expand, "Floor": torch.floor,
    "GlobalAveragePool": _global_mean, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "HardSwish": F.hardswish,
    "Identity": lambda x: x, "IsNaN": torch.isnan, "Less": torch.lt, "LessOrEqual": torch.le, "Log": torch.log,
    "MatMul": torch.matmul, "Max": _largest, "Min": _smallest, "Mish": F.mish, "Mul": torch.mul, "Neg": torch.neg,
    "Not": torch.logical_not, "Or": torch.logical_or, "PRelu": lambda x, slope: torch.where(x < 0, x * slope, x),
    "Pow": torch.pow, "Range": _range, "Reciprocal": torch.reciprocal, "Relu": F.relu, "Round": torch.round,
    "Sigmoid": torch.sigmoid, "Sign": torch.sign, "Sin": torch.sin,
    "Size": lambda x: torch.tensor(x.numel(), device=x.device), "Slice": _slice, "Softplus": F.softplus,
    "Sqrt": torch.sqrt, "Squeeze": _squeeze, "Sub": torch.sub, "Tanh": torch.tanh,
    "Tile": lambda x, times: x.repeat(times.tolist()), "Unsqueeze": _unsqueeze, "Where": torch.where,
}  # fmt: skip
OPERATORS: dict[str, Make] = {name: _as_written(function) for name, function in _PLAIN.items()} | {
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Cast": _cast,
    "Concat": _concat,
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "CumSum": _cumulative_sum,
    "Einsum": _einsum,
    "Elu": _slope(F.elu, 1.0),
    "Flatten": _flatten,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "GroupNormalization": _group_norm,
    "HardSigmoid": _hard_sigmoid,
    "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm,
    "LeakyRelu": _slope(F.leaky_relu, 0.01),
    "LogSoftmax": _softmax(F.log_softmax),
    "MaxPool": _max_pool,
    "Pad": _pad,
    "ReduceL2": _reduce(lambda x, axes, keep: torch.linalg.vector_norm(x, dim=axes, keepdim=keep)),
    "ReduceMax": _reduce(lambda x, axes, keep: torch.amax(x, axes, keep)),
    "ReduceMean": _reduce(lambda x, axes, keep: torch.mean(x, axes, keep)),
    "ReduceMin": _reduce(lambda x, axes, keep: torch.amin(x, axes, keep)),
    "ReduceSum": _reduce(lambda x, axes, keep: torch.sum(x, axes, keep)),
    "Reshape": _reshape,
    "Shape": _shape,
    "Softmax": _softmax(F.softmax),
    "Split": _split,
    "Transpose": _transpose,
    "Trilu": _trilu,
}
"""Operator -> what makes a node's function."""
