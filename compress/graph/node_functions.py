"""Make the functions of the nodes of a rebuilt module: of tensors, and of sizes, which stay numbers in arrays."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from compress.graph.layers import int_attribute
from compress.graph.operators import OPERATORS
from compress.graph.size_ops import SIZE_OPERATORS, shape_of, to_tensor
from compress.graph.torch_ops import Compute

NUMBERS = {
    "ConstantOfShape": {0},
    "CumSum": {1},
    "Expand": {1},
    "Pad": {1, 2, 3},
    "Range": {0, 1, 2},
    "Reshape": {1},
    "Resize": {1, 2, 3},
    "Slice": {1, 2, 3, 4},
    "Split": {1},
    "Squeeze": {1},
    "Tile": {1},
    "TopK": {1},
    "Trilu": {1},
    "Unsqueeze": {1},
    **{name: {1} for name in OPERATORS if name.startswith("Reduce")},
}
"""Operator -> the inputs that its function takes as arrays."""
_WITH_NUMBERS: dict[str, Compute] = {
    "Add": operator.add,
    "Clip": lambda x, low=None, high=None: x if low is None and high is None else x.clamp(low, high),
    "Div": OPERATORS["Div"](None),  # type: ignore[arg-type]
    "Equal": operator.eq,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
    "Max": lambda a, b: b.clamp(min=a) if isinstance(a, int | float) else a.clamp(min=b),
    "Min": lambda a, b: b.clamp(max=a) if isinstance(a, int | float) else a.clamp(max=b),
    "Mul": operator.mul,
    "Pow": operator.pow,
    "Sub": operator.sub,
    "Where": torch.where,
}
"""Operator -> what computes it of tensors and plain numbers: ReLU6 stays one operator when it is exported."""


def make_function(node: ir.Node) -> Compute:
    """Return a function of a node's inputs, tensors or arrays, that gives its outputs: sizes as arrays, others tensors.

    Raises ValueError for attributes that torch does not compute here.
    """
    kind = node.op_type
    if kind == "Shape":
        end = node.attributes.get("end")
        start, stop = int_attribute(node, "start", 0), None if end is None else end.as_int()
        return lambda x: shape_of(x, start, stop)
    if kind == "Size":
        return lambda x: np.array(math.prod(x.shape), dtype=object)
    if kind == "ConstantOfShape":
        return _make_constant_of_shape(node)
    return _take_arrays(node)


def make_concat_over_batch(node: ir.Node, batch: int) -> Compute:
    """Make a concatenation in which parts of the file's batch (a folded class token) are repeated to the others'."""
    axis, plain = int_attribute(node, "axis", 0), _take_arrays(node)

    def concatenate(*parts: Any) -> Any:
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if axis == 0 or len(tensors) != len(parts):
            return plain(*parts)
        most = max(part.shape[0] for part in tensors)
        return torch.cat(
            [
                part.repeat(most // batch, *[1] * (part.dim() - 1)) if part.shape[0] == batch != most else part
                for part in tensors
            ],
            axis,
        )

    return concatenate


@dataclass(frozen=True)
class Followed:
    """A size of a reshape that follows its input: axis `axis` is what `axes` of the input hold over `others`."""

    axis: int
    axes: tuple[int, ...]
    others: tuple[int, ...]


def make_reshape(rules: Sequence[Followed]) -> Compute:
    """Return a reshape (x, sizes) -> tensor whose sizes in `rules` are computed of its input's; 0 takes the input's."""

    def reshape(x: Tensor, sizes: np.ndarray) -> Tensor:
        shape = [size if size != 0 else x.shape[i] for i, size in enumerate(sizes.tolist())]
        for rule in rules:
            rest = math.prod(shape[other] for other in rule.others)
            shape[rule.axis] = math.prod(x.shape[i] for i in rule.axes) // rest
        return x.reshape(shape)

    return reshape


def follow_input(
    shape: Sequence[int], out: Sequence[int], written: Sequence[int], literal: Sequence[bool]
) -> list[Followed]:
    """Return which literal sizes of a reshape follow the input's, so that it runs with fewer channels and any batch.

    `shape`, `out`: of the input and of what comes out; `written`: the sizes as given, with 0 and -1. Axes are taken
    together where their products agree. Of several literals that an axis is split into, the longest that is not the
    last follows: heads, and not what is in a head (as pruning takes units, `compress.pruning.labels.unit_axis`).
    """
    rules, i, j = [], 0, 0
    while i < len(shape) and j < len(out):
        axes, places = [i], [j]
        while (a := math.prod(shape[k] for k in axes)) != (b := math.prod(out[k] for k in places)):
            if a < b and axes[-1] + 1 < len(shape):
                axes.append(axes[-1] + 1)
            elif a > b and places[-1] + 1 < len(out):
                places.append(places[-1] + 1)
            else:
                return []
        i, j = axes[-1] + 1, places[-1] + 1
        if j == len(out):  # what is left are axes of 1
            axes += range(i, len(shape))
        free = [k for k in places if written[k] == -1]
        fixed = [k for k in places if literal[k] and written[k] > 0]
        if free or fixed:
            chosen = free[0] if free else max(fixed[:-1] or fixed, key=lambda k: out[k])
            rules.append(Followed(chosen, tuple(axes), tuple(k for k in places if k != chosen)))
    if any(size == -1 and k not in {rule.axis for rule in rules} for k, size in enumerate(written)):
        return []
    return rules


def _take_arrays(node: ir.Node) -> Compute:
    """Return a node's function that takes arrays where it is given some: sizes stay arrays, the rest become tensors."""
    kind, compute = node.op_type, OPERATORS[node.op_type](node)
    of_sizes = SIZE_OPERATORS[kind](node) if kind in SIZE_OPERATORS else None
    with_numbers, numbers = _WITH_NUMBERS.get(kind), NUMBERS.get(kind, set())

    def function(*given: Any) -> Any:
        tensors = [value for value in given if isinstance(value, Tensor)]
        if of_sizes is not None and not tensors:
            return of_sizes(*given)
        like = tensors[0] if tensors else None
        rank = max((tensor.dim() for tensor in tensors), default=0)
        if with_numbers is not None and len(given) <= 3:
            plain = [_as_number(value, rank) for value in given]
            if kind == "Where" and not isinstance(plain[0], Tensor):
                plain[0] = to_tensor(given[0], like)
            if not any(isinstance(value, np.ndarray) for value in plain) and _fits(kind, plain):
                return with_numbers(*plain)
        if kind == "Gather" and isinstance(given[1], np.ndarray) and given[1].ndim == 0:
            return compute(*given)
        return compute(
            *(
                to_tensor(value, like) if isinstance(value, np.ndarray) and place not in numbers else value
                for place, value in enumerate(given)
            )
        )

    return function


def _as_number(value: Any, rank: int) -> Any:
    """Return an array of one element as a number, where it adds no dimension."""
    if isinstance(value, np.ndarray) and value.size == 1 and value.ndim <= rank:
        return value.reshape(-1)[0].item() if value.dtype != object else value.reshape(-1)[0]
    return value


def _fits(kind: str, plain: Sequence[Any]) -> bool:
    """Return whether the form with numbers serves: Max and Min of two, Clip with two bounds of one sort."""
    mixed = len({isinstance(value, Tensor) for value in plain[1:] if value is not None}) > 1
    if kind in ("Max", "Min"):
        return len(plain) == 2 and len({isinstance(value, Tensor) for value in plain}) == 2
    return not (kind == "Clip" and mixed)


def _make_constant_of_shape(node: ir.Node) -> Compute:
    """Make a filled tensor; a short row of whole numbers stays an array."""
    compute, given = OPERATORS["ConstantOfShape"](node), node.attributes.get("value")
    value = np.zeros(1, np.float32) if given is None else np.array(given.as_tensor().numpy())

    def fill(shape: Any) -> Any:
        row = isinstance(shape, np.ndarray) and shape.size == 1 and type(shape.item()) is int
        # longer rows of equal whole numbers are data, and no sizes
        if row and value.dtype.kind in "iu" and shape.item() <= 8:
            return np.full(shape.tolist(), value.item(), dtype=object)
        return compute(shape)

    return fill
