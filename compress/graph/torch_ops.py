"""Compute ONNX operators on torch tensors, with gradients: arithmetic, norms, reductions; and what all makers share.

A maker reads a node's attributes once and gives what computes it: tensors in (None for an input that is left out), a
tensor or a tuple of them out. Definitions are those of https://onnx.ai/onnx/operators, opsets 17 to 23.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor

from compress.graph.layers import float_attribute, int_attribute, ints_attribute, text_attribute

Compute = Callable[..., Any]
Make = Callable[[ir.Node], Compute]


def ignore_attributes(function: Compute) -> Make:
    """Return the maker of an operator without attributes: `function` serves every node."""
    return lambda node: function


def make_form_error(node: ir.Node, what: str) -> ValueError:
    """Return the error of a node whose attributes, described by `what`, ask for what torch does not compute here."""
    return ValueError(f"{node.op_type} {node.name!r} with {what} has no form in torch here")


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


def _clip(x: Tensor, low: Any = None, high: Any = None) -> Tensor:
    """Clamp to bounds that are both tensors or both numbers."""
    return x if low is None and high is None else torch.clamp(x, low, high)


def _divide(a: Any, b: Any) -> Any:
    whole = not any(value.is_floating_point() if isinstance(value, Tensor) else value % 1 for value in (a, b))
    return torch.div(a, b, rounding_mode="trunc") if whole else a / b


def _largest(*values: Tensor) -> Tensor:
    return reduce(torch.maximum, values)


def _smallest(*values: Tensor) -> Tensor:
    return reduce(torch.minimum, values)


def _mean_of(*values: Tensor) -> Tensor:
    return reduce(torch.add, values) / len(values)


def _einsum(node: ir.Node) -> Compute:
    equation = text_attribute(node, "equation", "")
    return lambda *values: torch.einsum(equation, *values)


def _lp_norm(node: ir.Node) -> Compute:
    axis, p = int_attribute(node, "axis", -1), int_attribute(node, "p", 2)
    return lambda x: x / torch.linalg.vector_norm(x, p, dim=axis, keepdim=True)


def _rms_norm(node: ir.Node) -> Compute:
    axis, epsilon = int_attribute(node, "axis", -1), float_attribute(node, "epsilon", 1e-5)
    return lambda x, gain: F.rms_norm(x, x.shape[axis:], None, epsilon) * gain


def _dtype_of(code: int) -> torch.dtype:
    """Return the torch type of an ONNX element type. ValueError for one that torch has not."""
    try:
        return torch.from_numpy(np.zeros(0, ir.DataType(code).numpy())).dtype
    except TypeError as error:
        raise ValueError(f"{ir.DataType(code).name} has no type in torch") from error


def _cast(node: ir.Node) -> Compute:
    dtype = _dtype_of(int_attribute(node, "to", 1))
    return lambda x: x.to(dtype)


def _arg_max(node: ir.Node) -> Compute:
    axis, keep = int_attribute(node, "axis", 0), bool(int_attribute(node, "keepdims", 1))
    if int_attribute(node, "select_last_index", 0):
        raise make_form_error(node, "select_last_index")
    return lambda x: x.argmax(axis, keep)


def _cumulative_sum(node: ir.Node) -> Compute:
    if int_attribute(node, "exclusive", 0) or int_attribute(node, "reverse", 0):
        raise make_form_error(node, "exclusive or reverse")
    return lambda x, axis: x.cumsum(int(axis), dtype=x.dtype)


VALUE_OPERATORS: dict[str, Make] = {
    "Abs": ignore_attributes(torch.abs),
    "Add": ignore_attributes(torch.add),
    "And": ignore_attributes(torch.logical_and),
    "ArgMax": _arg_max,
    "BatchNormalization": _batch_norm,
    "Cast": _cast,
    "CastLike": ignore_attributes(lambda x, like: x.to(like.dtype)),
    "Ceil": ignore_attributes(torch.ceil),
    "Celu": _slope(F.celu, 1.0),
    "Clip": ignore_attributes(_clip),
    "Cos": ignore_attributes(torch.cos),
    "CumSum": _cumulative_sum,
    "Div": ignore_attributes(_divide),
    "Dropout": ignore_attributes(lambda x, *ratio: x),
    "Einsum": _einsum,
    "Elu": _slope(F.elu, 1.0),
    "Equal": ignore_attributes(torch.eq),
    "Erf": ignore_attributes(torch.erf),
    "Exp": ignore_attributes(torch.exp),
    "Floor": ignore_attributes(torch.floor),
    "Gelu": _gelu,
    "Gemm": _gemm,
    "Greater": ignore_attributes(torch.gt),
    "GreaterOrEqual": ignore_attributes(torch.ge),
    "GroupNormalization": _group_norm,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": ignore_attributes(F.hardswish),
    "InstanceNormalization": _instance_norm,
    "IsNaN": ignore_attributes(torch.isnan),
    "LayerNormalization": _layer_norm,
    "LeakyRelu": _slope(F.leaky_relu, 0.01),
    "Less": ignore_attributes(torch.lt),
    "LessOrEqual": ignore_attributes(torch.le),
    "Log": ignore_attributes(torch.log),
    "LogSoftmax": _softmax(F.log_softmax),
    "LpNormalization": _lp_norm,
    "MatMul": ignore_attributes(torch.matmul),
    "Max": ignore_attributes(_largest),
    "Mean": ignore_attributes(_mean_of),
    "Min": ignore_attributes(_smallest),
    "Mish": ignore_attributes(F.mish),
    "Mod": lambda node: torch.fmod if int_attribute(node, "fmod", 0) else torch.remainder,
    "Mul": ignore_attributes(torch.mul),
    "Neg": ignore_attributes(torch.neg),
    "Not": ignore_attributes(torch.logical_not),
    "Or": ignore_attributes(torch.logical_or),
    "Pow": ignore_attributes(torch.pow),
    "PRelu": ignore_attributes(lambda x, slope: torch.where(x < 0, x * slope, x)),
    "Reciprocal": ignore_attributes(torch.reciprocal),
    "ReduceL1": _reduce(lambda x, axes, keep: torch.linalg.vector_norm(x, 1, dim=axes, keepdim=keep)),
    "ReduceL2": _reduce(lambda x, axes, keep: torch.linalg.vector_norm(x, dim=axes, keepdim=keep)),
    "ReduceMax": _reduce(lambda x, axes, keep: torch.amax(x, axes, keep)),
    "ReduceMean": _reduce(lambda x, axes, keep: torch.mean(x, axes, keep)),
    "ReduceMin": _reduce(lambda x, axes, keep: torch.amin(x, axes, keep)),
    "ReduceSum": _reduce(lambda x, axes, keep: torch.sum(x, axes, keep)),
    "ReduceSumSquare": _reduce(lambda x, axes, keep: torch.sum(x.square(), axes, keep)),
    "Relu": ignore_attributes(F.relu),
    "RMSNormalization": _rms_norm,
    "Round": ignore_attributes(torch.round),
    "Sigmoid": ignore_attributes(torch.sigmoid),
    "Sign": ignore_attributes(torch.sign),
    "Sin": ignore_attributes(torch.sin),
    "Softmax": _softmax(F.softmax),
    "Softplus": ignore_attributes(F.softplus),
    "Softsign": ignore_attributes(F.softsign),
    "Sqrt": ignore_attributes(torch.sqrt),
    "Sub": ignore_attributes(torch.sub),
    "Sum": ignore_attributes(lambda *values: reduce(torch.add, values)),
    "Tan": ignore_attributes(torch.tan),
    "Tanh": ignore_attributes(torch.tanh),
    "Where": ignore_attributes(torch.where),
    "Xor": ignore_attributes(torch.logical_xor),
}
"""Operator -> what makes a node's function."""
