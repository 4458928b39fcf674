"""How labels travel through aten operators: a rule for each; what has none keeps its inputs whole, and says so."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from compress.pruning.labels import Axes, Book, Labels, align_labels, join_labels, reshape_labels
from compress.structure.dataflow import DataFlow, Op, Ref

Rule = Callable[["Walk", Op], None]


class Walk:
    """One pass over a recorded run. `axes`: value -> its labels. `sums`: labels at which two activations were added."""

    def __init__(self, flow: DataFlow, book: Book) -> None:
        self.flow, self.book = flow, book
        self.axes: dict[int, Axes] = {}
        self.sums: list[Labels] = []

    def of(self, argument: Any) -> Axes:
        """Return the labels of an argument; of a constant or an input none."""
        if not isinstance(argument, Ref):
            return ()
        return self.axes.get(argument.value, (None,) * len(self.shape(argument)))

    def shape(self, argument: Any) -> tuple[int, ...]:
        return self.flow.shapes[argument.value] if isinstance(argument, Ref) else ()

    def out_shape(self, op: Op, number: int = 0) -> tuple[int, ...]:
        return self.flow.shapes[op.outputs[number]]

    def give(self, op: Op, *outputs: Axes) -> None:
        """Label the outputs; those left over have none."""
        self.axes.update(zip(op.outputs, outputs, strict=False))

    def join(self, one: Labels | None, other: Labels | None, op: Op) -> Labels | None:
        return join_labels((one, other), self.book, f"{describe_operator(op)} meets a size that the code fixes")

    def keep(self, op: Op, why: str = "") -> None:
        """Pin everything that the operator reads: nothing of it may be removed."""
        for value in op.inputs:
            for labels in self.axes.get(value, ()):
                self.book.pin(labels, why or f"{describe_operator(op)} has no rule")


def describe_operator(op: Op) -> str:
    return f"{op.name}{f' in {op.module}' if op.module else ''}"


def walk(flow: DataFlow, book: Book, parameters: Mapping[int, Axes]) -> Walk:
    """Carry the labels of `parameters` (value -> axes) through the run; what leaves the model is pinned."""
    state = Walk(flow, book)
    state.axes.update(parameters)
    for op in flow.ops:
        rule = RULES.get(op.name) or (_attention if "scaled_dot_product" in op.name else None)
        if op.name in ("max", "min") and len(op.outputs) == 2:  # along an axis; of two tensors it is pointwise
            rule = _reduce
        if rule is None and _is_pointwise(op.name):
            rule = _pointwise
        (rule or Walk.keep)(state, op)
    for value in flow.outputs:
        for labels in state.axes.get(value, ()):
            book.pin(labels, "the model's outputs have it")
    return state


def _is_pointwise(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None) or getattr(torch.ops.aten, f"{name}_", None)
    if packet is None:
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


def _pointwise(state: Walk, op: Op) -> None:
    """Join the tensors index by index; what is added to a labelled activation ends up in it."""
    tensors = [
        argument for argument in _flatten_arguments((*op.args, *op.kwargs.values())) if isinstance(argument, Ref)
    ]
    shape = state.out_shape(op)
    options = align_labels([state.of(tensor) for tensor in tensors], [state.shape(tensor) for tensor in tensors], shape)
    axes = tuple(
        join_labels(some, state.book, f"{describe_operator(op)} meets a size that the code fixes") for some in options
    )
    parameters = [tensor for tensor in tensors if tensor.value in state.flow.parameters]
    if op.name in ("add", "sub") and len(tensors) == 2 and not parameters:
        state.sums += [labels for labels in map(_find_met_labels, options) if labels is not None]
    state.give(op, axes)


def _find_met_labels(options: Sequence[Labels | None]) -> Labels | None:
    """Return the labels of one of two tensors whose indices were not the same units before."""
    if len(options) != 2:
        return None
    one, other = options
    return None if one is None or other is None or np.array_equal(one, other) else one


def _flatten_arguments(arguments: Sequence[Any]) -> list[Any]:
    return [
        leaf
        for argument in arguments
        for leaf in (_flatten_arguments(argument) if isinstance(argument, list | tuple) else [argument])
    ]


def _keep_labels(state: Walk, op: Op) -> None:
    state.give(op, state.of(op.args[0]))


def _view(state: Walk, op: Op) -> None:
    source = op.args[0]
    state.give(
        op,
        reshape_labels(state.of(source), state.shape(source), state.out_shape(op), state.book, describe_operator(op)),
    )


def _permute(state: Walk, op: Op) -> None:
    axes = state.of(op.args[0])
    n = len(axes)
    order = list(range(n))
    if op.name == "permute":
        order = [axis % n for axis in op.args[1]]
    elif n > 1:
        a, b = op.args[1:3] if op.name == "transpose" else (n - 2, n - 1)
        order[a % n], order[b % n] = order[b % n], order[a % n]
    state.give(op, tuple(axes[axis] for axis in order))


def _expand(state: Walk, op: Op) -> None:
    axes, shape, out = state.of(op.args[0]), state.shape(op.args[0]), state.out_shape(op)
    lead = len(out) - len(axes)
    kept = (label if size == out[lead + i] else None for i, (label, size) in enumerate(zip(axes, shape, strict=True)))
    state.give(op, ((None,) * lead) + tuple(kept))


def _get_argument(op: Op, place: int, name: str, default: Any) -> Any:
    return op.args[place] if len(op.args) > place else op.kwargs.get(name, default)


def _replace_axis(axes: Axes, axis: int, labels: Labels | None) -> Axes:
    return (*axes[:axis], labels, *axes[axis + 1 :])


def _slice(state: Walk, op: Op) -> None:
    axes = state.of(op.args[0])
    axis = _get_argument(op, 1, "dim", 0) % len(axes)
    labels = axes[axis]
    if labels is not None:
        labels = labels[
            _get_argument(op, 2, "start", None) : _get_argument(op, 3, "end", None) : _get_argument(op, 4, "step", 1)
        ]
    state.give(op, _replace_axis(axes, axis, labels))


def _split(state: Walk, op: Op) -> None:
    axes = state.of(op.args[0])
    axis = _get_argument(op, 2, "dim", 0) % len(axes)
    sizes = [state.flow.shapes[value][axis] for value in op.outputs]
    labels = axes[axis]
    parts = [None] * len(sizes) if labels is None else np.split(labels, np.cumsum(sizes)[:-1])
    state.give(op, *(_replace_axis(axes, axis, part) for part in parts))


def _pick(state: Walk, op: Op) -> None:
    """Drop the axis of a select or unbind; one that is labelled stays whole."""
    axes = state.of(op.args[0])
    axis = _get_argument(op, 1, "dim", 0) % len(axes)
    state.book.pin(axes[axis], f"{describe_operator(op)} takes single indices of it")
    state.give(op, *[(*axes[:axis], *axes[axis + 1 :])] * len(op.outputs))


def _concatenate(state: Walk, op: Op) -> None:
    parts = [part for part in op.args[0] if math.prod(state.shape(part))]
    n = len(state.out_shape(op))
    axis = _get_argument(op, 1, "dim", 0) % n
    why = f"{describe_operator(op)} meets a size that the code fixes"
    axes: list[Labels | None] = [
        join_labels([state.of(part)[i] for part in parts], state.book, why) if i != axis else None for i in range(n)
    ]
    if any(state.of(part)[axis] is not None for part in parts):
        axes[axis] = np.concatenate(
            [_pin_if_unlabelled(state, state.of(p)[axis], state.shape(p)[axis], op) for p in parts]
        )
    state.give(op, tuple(axes))


def _pin_if_unlabelled(state: Walk, labels: Labels | None, size: int, op: Op) -> Labels:
    """Return the labels of a piece, or new ones that are pinned for a piece that has none: it stays as it is."""
    if labels is None:
        labels = state.book.fresh(size)
        state.book.pin(labels, f"{describe_operator(op)} adds a fixed number of them")
    return labels


def _pad(state: Walk, op: Op) -> None:
    """Carry labels through constant padding: new indices are fixed in number, those between may go."""
    axes, amounts = list(state.of(op.args[0])), op.args[1]
    for i in range(len(amounts) // 2):
        axis, (before, after) = len(axes) - 1 - i, amounts[2 * i : 2 * i + 2]
        labels = axes[axis]
        if labels is not None and (before or after):
            kept = labels[max(-before, 0) : len(labels) - max(-after, 0)]
            ends = (_pin_if_unlabelled(state, None, max(amount, 0), op) for amount in (before, after))
            axes[axis] = np.concatenate([next(ends), kept, next(ends)])
    state.give(op, tuple(axes))


def _reduce(state: Walk, op: Op) -> None:
    """Drop the axes that a sum, mean or extreme runs over."""
    axes = state.of(op.args[0])
    asked = _get_argument(op, 2 if op.name == "linalg_vector_norm" else 1, "dim", None)
    if isinstance(asked, bool):  # var and std may have `unbiased` there, and then run over all
        asked = None
    dropped = range(len(axes)) if asked is None or asked == [] else [asked] if isinstance(asked, int) else asked
    dims = {axis % len(axes) for axis in dropped} if axes else set()
    keeps = len(state.out_shape(op)) == len(axes)
    kept = tuple(None if i in dims else labels for i, labels in enumerate(axes) if keeps or i not in dims)
    state.give(op, *[kept] * len(op.outputs))


def _keep_axis_whole(state: Walk, op: Op) -> None:
    """Pin the axis along which a softmax or a running sum goes: it stays whole."""
    axes = state.of(op.args[0])
    if axes:
        state.book.pin(axes[_get_argument(op, 1, "dim", -1) % len(axes)], f"{describe_operator(op)} runs over it")
    state.give(op, axes)


def _matmul(state: Walk, op: Op) -> None:
    """Join what is summed over, and carry the other axes on.

    For mm, bmm, addmm, baddbmm and linear.
    """
    bias = (
        op.args[0]
        if op.name in ("addmm", "baddbmm")
        else _get_argument(op, 2, "bias", None)
        if op.name == "linear"
        else None
    )
    a, b = (state.of(argument) for argument in (op.args[1:3] if op.name in ("addmm", "baddbmm") else op.args[:2]))
    if op.name == "linear":
        b = b[::-1]
    state.join(a[-1], b[-2], op)
    lead = tuple(state.join(x, y, op) for x, y in zip(a[:-2], b[:-2], strict=True)) if len(b) > 2 else a[:-2]
    columns = b[-1]
    if isinstance(bias, Ref) and state.shape(bias)[-1] > 1:
        columns = state.join(columns, state.of(bias)[-1], op)
    state.give(op, (*lead, *a[-2:-1], columns))


def _convolution(state: Walk, op: Op) -> None:
    """Join a convolution's channels with those of its weight and bias.

    Grouped: each group loses the same ones. Depthwise: an output channel goes with its input channel.
    """
    x, w = state.of(op.args[0]), state.of(op.args[1])
    transposed, groups = op.args[6], op.args[8]
    into, out = (w[0], w[1]) if transposed else (w[1], w[0])
    for axis in w[2:]:
        state.book.pin(axis, "the size of a kernel")
    if groups == 1:
        state.join(x[1], into, op)
    elif not transposed and into is not None and len(into) == 1 and out is not None and x[1] is not None:
        n_per_channel = len(out) // groups
        state.book.join(out.reshape(groups, n_per_channel), x[1][:, None])
    else:
        out = _join_groups(state, x[1], into, out, groups, transposed)
    if isinstance(op.args[2], Ref):
        out = state.join(out, state.of(op.args[2])[0], op)
    state.give(op, (x[0], out, *(None,) * (len(state.out_shape(op)) - 2)))


def _join_groups(
    state: Walk, x: Labels | None, into: Labels | None, out: Labels | None, groups: int, transposed: bool
) -> Labels | None:
    why = "a grouped convolution reads something of fixed size"
    if x is None:
        state.book.pin(into, why)
    else:
        members = x.reshape(groups, -1)
        if transposed and members.shape[1] == 1:
            state.book.pin(x, "a depthwise transposed convolution reads it")
        if transposed:
            state.book.join(members, members[:1])
        if into is not None:
            state.book.join(members, into.reshape(groups, -1) if transposed else into[None, :])
    if out is None:
        return None
    if transposed:  # the weight has the outputs of one group, which all share
        return np.tile(out, groups)
    by_group = out.reshape(groups, -1)
    state.book.join(by_group, by_group[:1])
    return out


def _embedding(state: Walk, op: Op) -> None:
    table = state.of(op.args[0])
    state.book.pin(table[0], "the rows of a table")
    state.give(op, (*state.of(op.args[1]), table[1]))


def _batch_norm(state: Walk, op: Op) -> None:
    axes = state.of(op.args[0])
    channels = axes[1]
    for parameter in op.args[1:5]:
        if isinstance(parameter, Ref):
            channels = state.join(channels, state.of(parameter)[0], op)
    state.give(op, _replace_axis(axes, 1, channels))


def _layer_norm(state: Walk, op: Op) -> None:
    axes = list(state.of(op.args[0]))
    n = len(op.args[1])
    for parameter in op.args[2:4]:
        if isinstance(parameter, Ref):
            for i, labels in enumerate(state.of(parameter)):
                axes[len(axes) - n + i] = state.join(axes[len(axes) - n + i], labels, op)
    state.give(op, tuple(axes))


def _group_norm(state: Walk, op: Op) -> None:
    axes = state.of(op.args[0])
    channels, groups = axes[1], op.args[6]
    for parameter in op.args[1:3]:
        if isinstance(parameter, Ref):
            channels = state.join(channels, state.of(parameter)[0], op)
    if channels is not None:
        by_group = channels.reshape(groups, -1)
        state.book.join(by_group, by_group[:1])
    state.give(op, _replace_axis(axes, 1, channels))


def _keep_channels(state: Walk, op: Op) -> None:
    """Keep batch and channels through pooling and resizing; pixels change."""
    axes = state.of(op.args[0])
    n_kept = len(axes) - (1 if "1d" in op.name else 3 if "3d" in op.name else 2)
    state.give(op, *[(*axes[:n_kept], *(None,) * (len(axes) - n_kept))] * len(op.outputs))


def _attention(state: Walk, op: Op) -> None:
    """Join the heads of fused attention: query, key, value [B, heads, T, size].

    A key-value head goes with the queries that share it, and with its row of a mask that has one for each.
    """
    q, k, v = (state.of(argument) for argument in op.args[:3])
    state.join(q[3], k[3], op)
    keys = state.join(k[1], v[1], op)
    if keys is not None and len(keys) != state.shape(op.args[0])[1]:
        keys = np.repeat(keys, state.shape(op.args[0])[1] // len(keys))
    heads = state.join(q[1], keys, op)
    mask = op.args[3] if len(op.args) > 3 and isinstance(op.args[3], Ref) else op.kwargs.get("attn_mask")
    if isinstance(mask, Ref) and len(state.shape(mask)) > 2 and state.shape(mask)[-3] > 1:
        heads = state.join(heads, state.of(mask)[-3], op)
    state.give(op, (q[0], heads, q[2], v[3]))


def _drop_labels(state: Walk, op: Op) -> None:
    """Leave the outputs without labels: none of their sizes follows from a parameter's."""


RULES: dict[str, Rule] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze", "unflatten"), _view),
    **dict.fromkeys(
        ("clone", "contiguous", "_to_copy", "alias", "detach", "lift_fresh", "native_dropout"), _keep_labels
    ),
    **dict.fromkeys(("t", "transpose", "permute", "numpy_T"), _permute),
    **dict.fromkeys(("split", "split_with_sizes", "chunk"), _split),
    **dict.fromkeys(("select", "unbind"), _pick),
    **dict.fromkeys(("mean", "sum", "amax", "amin", "var", "std", "var_mean", "linalg_vector_norm"), _reduce),
    **dict.fromkeys(("_softmax", "softmax", "_log_softmax", "cumsum"), _keep_axis_whole),
    **dict.fromkeys(("mm", "bmm", "addmm", "baddbmm", "linear"), _matmul),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm"), _batch_norm),
    **dict.fromkeys(
        ("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "adaptive_max_pool2d"), _keep_channels
    ),
    **dict.fromkeys(
        ("upsample_nearest2d", "upsample_bilinear2d", "max_pool3d_with_indices", "avg_pool3d"), _keep_channels
    ),
    **dict.fromkeys(
        ("arange", "empty", "zeros", "ones", "full", "scalar_tensor", "zeros_like", "ones_like"), _drop_labels
    ),
    "_prelu_kernel": _pointwise,
    "expand": _expand,
    "slice": _slice,
    "cat": _concatenate,
    "constant_pad_nd": _pad,
    "convolution": _convolution,
    "embedding": _embedding,
    "native_layer_norm": _layer_norm,
    "native_group_norm": _group_norm,
}
"""Operator -> how labels pass it. Elementwise ones need no entry."""
