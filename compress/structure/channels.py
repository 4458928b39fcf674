"""How a factor on the channels of one tensor travels through operators: the algebra behind exact folding of scales.

A `Layout` tells, for each element of a tensor, which channel of a source it is scaled with. Rules are per operator; an
operator without a rule, or one that is not homogeneous (GELU, softmax, a sum with something unscaled), ends the search.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from compress.structure.dataflow import Op, Ref

Atom = tuple[int, int]
"""(how many, stride in channels); stride 0: all of the same channel."""
Dims = tuple[tuple[Atom, ...], ...]


@dataclass(frozen=True)
class Layout:
    """Element [i, j, ...] has channel `offset` + each index, split over its dimension's atoms, times their strides.

    `mixes`: attention or another weighted sum lies behind. `plain`: nothing but moves, weighted sums and factors shared
    by all channels lie behind, so that a rotation of channels would travel the same way. `head_size`: the width of the
    last weighted sum.
    """

    dims: Dims
    offset: int = 0
    mixes: bool = False
    plain: bool = True
    head_size: int = 0

    @property
    def still(self) -> tuple[bool, ...]:
        """Return for each dimension whether the channel does not depend on it."""
        return tuple(all(stride == 0 for _, stride in atoms) for atoms in self.dims)

    @property
    def reach(self) -> tuple[int, int]:
        """Return the first and last channel."""
        return self.offset, self.offset + sum((n - 1) * stride for atoms in self.dims for n, stride in atoms)

    def channels(self) -> list[int]:
        """Return the channels along the last dimension."""
        channels = [self.offset]
        for n, stride in self.dims[-1]:
            channels = [base + i * stride for base in channels for i in range(n)]
        return channels


class Stop(Exception):
    """The factor does not pass. The message says where."""


@dataclass(frozen=True)
class ScaledOp:
    """An operator to pass: its arguments, the layouts of the scaled ones among its inputs, and shapes by value."""

    op: Op
    layouts: Mapping[int, Layout]
    shapes: Sequence[tuple[int, ...]]
    scaled: tuple[int, int]

    def of(self, argument: Any) -> Layout | None:
        return self.layouts.get(argument.value) if isinstance(argument, Ref) else None

    def shape(self, argument: Any) -> tuple[int, ...]:
        return self.shapes[argument.value] if isinstance(argument, Ref) else ()

    def stop(self, why: str = "is not homogeneous") -> Stop:
        place = f" in {self.op.module}" if self.op.module else ""
        return Stop(f"{self.op.name}{place} {why}")


def last_dim(shape: tuple[int, ...]) -> Layout:
    """Return the layout of a source's own output [..., channels]."""
    return Layout((*(((n, 0),) for n in shape[:-1]), ((shape[-1], 1),)))


def pass_through(operator: ScaledOp) -> list[Layout | None]:
    """Return the layouts of the operator's outputs (None: not scaled). Raises Stop."""
    rule = RULES.get(operator.op.name)
    if rule is None and "scaled_dot_product" in operator.op.name:
        rule = _attention
    if rule is None:
        raise operator.stop()
    return rule(operator)


def reshape_factor(layout: Layout, shape: Sequence[int]) -> Layout | None:
    """Return the same elements in the same order as another shape; None where a new dimension would cut across."""
    atoms = _merge_atoms([atom for dim in layout.dims for atom in dim if atom[0] != 1])
    dims: list[tuple[Atom, ...]] = []
    for size in shape:
        taken, left = [], size
        while left > 1:
            if not atoms:
                return None
            n, stride = atoms.pop(0)
            if left % n == 0:
                taken.append((n, stride))
                left //= n
            elif n % left == 0:
                taken.append((left, stride * (n // left)))
                atoms.insert(0, (n // left, stride))
                left = 1
            else:
                return None
        dims.append(tuple(_merge_atoms(taken)) or ((size, 0),))
    return None if atoms else replace(layout, dims=tuple(dims))


def _merge_atoms(atoms: list[Atom]) -> list[Atom]:
    merged: list[Atom] = []
    for n, stride in atoms:
        if merged and merged[-1][1] == stride * n:
            merged[-1] = (merged[-1][0] * n, stride)
        else:
            merged.append((n, stride))
    return merged


def _view(operator: ScaledOp) -> list[Layout | None]:
    layout = _require_only_layout(operator, operator.op.args[0])
    if len(operator.op.args) > 1 and isinstance(operator.op.args[1], torch.dtype):
        raise operator.stop()
    out = reshape_factor(layout, operator.shapes[operator.op.outputs[0]])
    if out is None:
        raise operator.stop("cuts across channels")
    return [out]


def _require_only_layout(operator: ScaledOp, argument: Any) -> Layout:
    """Return the layout of the first argument, which must be the only scaled one."""
    layout = operator.of(argument)
    if layout is None or len(operator.layouts) != 1:
        raise operator.stop("takes a scaled tensor as a second argument")
    return layout


def _keep_layout(operator: ScaledOp) -> list[Layout | None]:
    if not operator.op.kwargs.get("dtype", torch.float32).is_floating_point:
        raise operator.stop()
    return [_require_only_layout(operator, operator.op.args[0])]


def _pass_rectifier(operator: ScaledOp) -> list[Layout | None]:
    """Pass a factor through an operator that is positively homogeneous, not linear: f(s x) = s f(x) for s > 0."""
    return [replace(_require_only_layout(operator, operator.op.args[0]), plain=False)]


def _permute(operator: ScaledOp) -> list[Layout | None]:
    layout = _require_only_layout(operator, operator.op.args[0])
    n = len(layout.dims)
    order = list(range(n))
    if operator.op.name == "permute":
        order = [d % n for d in operator.op.args[1]]
    else:
        a, b = (operator.op.args[1:3] if operator.op.name == "transpose" else (0, 1)) if n > 1 else (0, 0)
        order[a % n], order[b % n] = order[b % n], order[a % n]
    return [replace(layout, dims=tuple(layout.dims[d] for d in order))]


def _broadcast_layout(layout: Layout, shape: Sequence[int]) -> Layout:
    dims = (((1, 0),),) * (len(shape) - len(layout.dims)) + layout.dims
    sized = (((n, 0),) if math.prod(a[0] for a in atoms) != n else atoms for n, atoms in zip(shape, dims, strict=True))
    return replace(layout, dims=tuple(sized))


def _expand(operator: ScaledOp) -> list[Layout | None]:
    return [
        _broadcast_layout(_require_only_layout(operator, operator.op.args[0]), operator.shapes[operator.op.outputs[0]])
    ]


def _cut_dimension(operator: ScaledOp, layout: Layout, dim: int, start: int, length: int) -> Layout | None:
    """Return the layout of some indices of a dimension; None if that part is not scaled."""
    atoms = layout.dims[dim]
    size = math.prod(n for n, _ in atoms)
    if length == size:
        return layout
    if layout.still[dim]:
        out = replace(layout, dims=(*layout.dims[:dim], ((length, 0),), *layout.dims[dim + 1 :]))
    elif len(atoms) == 1:
        offset = layout.offset + start * atoms[0][1]
        dims = (*layout.dims[:dim], ((length, atoms[0][1]),), *layout.dims[dim + 1 :])
        out = replace(layout, dims=dims, offset=offset)
    else:
        raise operator.stop("cuts across channels")
    low, high = out.reach
    return None if high < operator.scaled[0] or low >= operator.scaled[1] else out


def _slice(operator: ScaledOp) -> list[Layout | None]:
    layout = _require_only_layout(operator, operator.op.args[0])
    args = (*operator.op.args[1:], *(None,) * 4)
    dim = (args[0] or 0) % len(layout.dims)
    size = math.prod(n for n, _ in layout.dims[dim])
    if args[3] not in (None, 1):
        raise operator.stop("takes every other channel")
    start, _, _ = slice(args[1], args[2]).indices(size)
    return [_cut_dimension(operator, layout, dim, start, operator.shapes[operator.op.outputs[0]][dim])]


def _split(operator: ScaledOp) -> list[Layout | None]:
    layout = _require_only_layout(operator, operator.op.args[0])
    dim = (operator.op.args[2] if len(operator.op.args) > 2 else operator.op.kwargs.get("dim", 0)) % len(layout.dims)
    lengths = [operator.shapes[value][dim] for value in operator.op.outputs]
    starts = itertools.accumulate(lengths, initial=0)
    return [
        _cut_dimension(operator, layout, dim, start, length) for start, length in zip(starts, lengths, strict=False)
    ]


def _pick(operator: ScaledOp) -> list[Layout | None]:
    """Remove a dimension, of which select and unbind take one index."""
    layout = _require_only_layout(operator, operator.op.args[0])
    dim = (operator.op.args[1] if len(operator.op.args) > 1 else 0) % len(layout.dims)
    size = math.prod(n for n, _ in layout.dims[dim])
    picked = [operator.op.args[2] % size] if operator.op.name == "select" else range(size)
    parts = [_cut_dimension(operator, layout, dim, index, 1) for index in picked]
    return [p and replace(p, dims=(*p.dims[:dim], *p.dims[dim + 1 :])) for p in parts]


def _concatenate(operator: ScaledOp) -> list[Layout | None]:
    parts = [part for part in operator.op.args[0] if math.prod(operator.shape(part))]  # an empty cache is nothing
    layouts = [operator.of(part) for part in parts]
    first = layouts[0]
    dim = operator.op.args[1] if len(operator.op.args) > 1 else operator.op.kwargs.get("dim", 0)
    if first is None or len({layout and replace(layout, dims=()) for layout in layouts}) != 1:
        raise operator.stop("puts scaled and unscaled channels together")
    dim %= len(first.dims)
    others = {tuple(a for d, a in enumerate(layout.dims) if d != dim) for layout in layouts if layout is not None}
    if len(parts) > 1 and (not all(layout and layout.still[dim] for layout in layouts) or len(others) != 1):
        raise operator.stop("puts channels together")
    size = operator.shapes[operator.op.outputs[0]][dim]
    dims = first.dims if len(parts) == 1 else (*first.dims[:dim], ((size, 0),), *first.dims[dim + 1 :])
    return [replace(first, dims=dims)]


def _multiply(operator: ScaledOp) -> list[Layout | None]:
    """Pass a factor through mul and div with an unscaled tensor; plain stays if that is the same for all channels."""
    a, b = operator.op.args[0], operator.op.args[1]
    layout, factor = (operator.of(a), b) if operator.of(a) else (operator.of(b), a)
    divides_by_it = operator.op.name == "div" and (operator.of(a) is None or operator.op.kwargs.get("rounding_mode"))
    if layout is None or operator.of(factor) is not None or divides_by_it:
        raise operator.stop("multiplies scaled tensors with each other")
    out = _broadcast_layout(layout, operator.shapes[operator.op.outputs[0]])
    shape = operator.shape(factor)
    aligned = (1,) * (len(out.dims) - len(shape)) + tuple(shape)
    shared = all(n == 1 or still for n, still in zip(aligned, out.still, strict=True))
    return [replace(out, plain=out.plain and shared)]


def _add(operator: ScaledOp) -> list[Layout | None]:
    layouts = [operator.of(argument) for argument in operator.op.args[:2]]
    if None in layouts or layouts[0] != layouts[1]:
        raise operator.stop("adds something unscaled")
    return [layouts[0]]


def _fill_masked(operator: ScaledOp) -> list[Layout | None]:
    layout = _require_only_layout(operator, operator.op.args[0])
    if operator.op.args[2] != 0:
        raise operator.stop("fills in something unscaled")
    return [replace(layout, plain=False)]


def _matmul(operator: ScaledOp) -> list[Layout | None]:
    """Pass a factor through mm and bmm with the scaled channels outside the contracted dimension."""
    a, b = operator.op.args[0], operator.op.args[1]
    left, right = operator.of(a), operator.of(b)
    if len(operator.layouts) != 1 or (left is None) == (right is None):
        raise operator.stop("multiplies scaled tensors with each other")
    layout, contracted = (left, -1) if left is not None else (right, -2)
    assert layout is not None
    if not layout.still[contracted]:
        raise operator.stop("sums over channels")
    shape = operator.shapes[operator.op.outputs[0]]
    tail = (layout.dims[-2], ((shape[-1], 0),)) if left is not None else (((shape[-2], 0),), layout.dims[-1])
    return [replace(layout, dims=(*layout.dims[:-2], *tail), mixes=True, head_size=shape[-1])]


def _attention(operator: ScaledOp) -> list[Layout | None]:
    """Pass the value's channels through fused attention, its heads repeated.

    Query, key, value [B, heads, T, size].
    """
    q, k, v = operator.op.args[:3]
    layout = operator.of(v)
    n_outputs = len(operator.op.outputs)
    if layout is None or operator.of(q) is not None or operator.of(k) is not None or len(layout.dims) != 4:
        raise operator.stop("takes scaled queries or keys")
    heads, tokens, size = operator.shapes[operator.op.outputs[0]][1:]
    value_heads = math.prod(n for n, _ in layout.dims[1])
    if heads % value_heads or not layout.still[2]:
        raise operator.stop("sums over channels")
    repeated = (*layout.dims[1], (heads // value_heads, 0)) if heads != value_heads else layout.dims[1]
    dims = (layout.dims[0], repeated, ((tokens, 0),), layout.dims[3])
    return [replace(layout, dims=dims, mixes=True, head_size=size), *([None] * (n_outputs - 1))]


Rule = Callable[[ScaledOp], list[Layout | None]]
RULES: dict[str, Rule] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "unflatten"), _view),
    **dict.fromkeys(("clone", "contiguous", "_to_copy", "alias", "detach", "lift_fresh", "neg"), _keep_layout),
    **dict.fromkeys(("relu", "leaky_relu", "abs"), _pass_rectifier),
    **dict.fromkeys(("t", "transpose", "permute", "numpy_T"), _permute),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    **dict.fromkeys(("select", "unbind"), _pick),
    **dict.fromkeys(("mul", "div"), _multiply),
    **dict.fromkeys(("mm", "bmm"), _matmul),
    "expand": _expand,
    "slice": _slice,
    "cat": _concatenate,
    "add": _add,
    "sub": _add,
    "masked_fill": _fill_masked,
}
"""Operator -> how it passes a factor on. In-place forms have the same names."""
