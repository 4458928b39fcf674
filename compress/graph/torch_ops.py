"""ONNX operators as functions on torch tensors, with gradients: arithmetic. Moves are in `torch_moves`.

Each entry of `ARITHMETIC` reads a node's attributes once and gives what computes it: tensors in (None for an input that
is left out), a tensor or a tuple of them out. Definitions are those of https://onnx.ai/onnx/operators, opsets 17 to 22.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.graph.layers import int_attribute

Compute = Callable[..., Any]
Make = Callable[[ir.Node], Compute]


def float_attribute(node: ir.Node, name: str, default: float) -> float:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_float()


def ints_attribute(node: ir.Node, name: str, default: list[int]) -> list[int]:
    attribute = node.attributes.get(name)
    return default if attribute is None else list(attribute.as_ints())


def text_attribute(node: ir.Node, name: str, default: str) -> str:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_string()


def as_written(function: Compute) -> Make:
    """Return the maker of an operator without attributes: `function` serves every node."""
    return lambda node: function


def make_form_error(node: ir.Node, what: str) -> ValueError:
    return ValueError(f"{node.op_type} {node.name!r} with {what} has no form in torch here")


def _split_pads(node: ir.Node, n_dims: int) -> tuple[list[int], list[int]]:
    """Return (padding that torch's kernel takes, what has to be padded before, as `F.pad` wants it)."""
    if text_attribute(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise make_form_error(node, "auto_pad")
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
        raise make_form_error(node, "output_shape")

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        padding, before = _split_pads(node, x.dim() - 2)
        if before:
            raise make_form_error(node, "uneven pads")
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
        raise make_form_error(node, "uneven pads or dilations")
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
        raise make_form_error(node, "training_mode")
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


_PLAIN: dict[str, Compute] = {
    "Abs": torch.abs, "Add": torch.add, "And": torch.logical_and, "Ceil": torch.ceil, "Clip": _clip, "Cos": torch.cos,
    "Div": _divide, "Equal": torch.eq, "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor,
    "GlobalAveragePool": _global_mean, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "HardSwish": F.hardswish,
    "IsNaN": torch.isnan, "Less": torch.lt, "LessOrEqual": torch.le, "Log": torch.log, "MatMul": torch.matmul,
    "Max": _largest, "Min": _smallest, "Mish": F.mish, "Mul": torch.mul, "Neg": torch.neg, "Not": torch.logical_not,
    "Or": torch.logical_or, "PRelu": lambda x, slope: torch.where(x < 0, x * slope, x), "Pow": torch.pow,
    "Reciprocal": torch.reciprocal, "Relu": F.relu, "Round": torch.round, "Sigmoid": torch.sigmoid, "Sign": torch.sign,
    "Sin": torch.sin, "Softplus": F.softplus, "Sqrt": torch.sqrt, "Sub": torch.sub, "Tanh": torch.tanh,
    "Where": torch.where,
}  # fmt: skip
ARITHMETIC: dict[str, Make] = {name: as_written(function) for name, function in _PLAIN.items()} | {
    "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Einsum": _einsum,
    "Elu": _slope(F.elu, 1.0),
    "Gelu": _gelu,
    "Gemm": _gemm,
    "GroupNormalization": _group_norm,
    "HardSigmoid": _hard_sigmoid,
    "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm,
    "LeakyRelu": _slope(F.leaky_relu, 0.01),
    "LogSoftmax": _softmax(F.log_softmax),
    "MaxPool": _max_pool,
    "ReduceL2": _reduce(lambda x, axes, keep: torch.linalg.vector_norm(x, dim=axes, keepdim=keep)),
    "ReduceMax": _reduce(lambda x, axes, keep: torch.amax(x, axes, keep)),
    "ReduceMean": _reduce(lambda x, axes, keep: torch.mean(x, axes, keep)),
    "ReduceMin": _reduce(lambda x, axes, keep: torch.amin(x, axes, keep)),
    "ReduceSum": _reduce(lambda x, axes, keep: torch.sum(x, axes, keep)),
    "Softmax": _softmax(F.softmax),
}
"""Operator -> what makes a node's function."""
