"""Which nodes of a graph could overflow a half-precision type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from compress.graph.half import HIDDEN, LARGEST, STAYS, node_name
from compress.graph.layers import constant, is_constant
from compress.graph.run import TAPPED, Feeds, cut_batches, open_session, run_batches, take_each, tap

CARRIES = {"Add", "Mul", "Where", "Expand", "Unsqueeze", "Squeeze", "Reshape", "Slice", "Transpose", "Gather", "Concat"}
"""Operators through which what hides a token comes to the softmax that makes it 0."""


@dataclass
class TensorExtremes:
    """The extremes of one tensor: its largest magnitude but for what hides that it is added to (as good as -infinity),
    and the lowest value of all."""

    peak: float = 0.0
    lowest: float = 0.0

    @property
    def hides(self) -> bool:
        return self.lowest <= HIDDEN

    def add(self, values: np.ndarray) -> None:
        hidden = values <= HIDDEN
        self.peak = max(self.peak, float(np.abs(values, where=~hidden, out=np.zeros_like(values)).max(initial=0.0)))
        self.lowest = min(self.lowest, float(values.min(initial=0.0)))


def overflowing_nodes(model: ir.Model, dtype: str, headroom: float, batches: Iterable[Feeds]) -> dict[str, float]:
    """Return the nodes whose float inputs and outputs leave `dtype` no `headroom`: name -> largest magnitude of these.

    A constant that hides (masks such as -3.4e38, -infinity) is written as a number that the type holds; it counts only
    where it is read by anything but a softmax. Raises ValueError when there is no batch or a value is NaN.
    """
    limit = LARGEST[dtype] / headroom
    seen = _observe_floats(model, batches)
    overflowing = {}
    for node in model.graph:
        touched = [value for value in (*node.inputs, *node.outputs) if value is not None]
        peak = max((seen[value].peak for value in touched if value in seen), default=0.0)
        hidden = [value for value in touched if value in seen and seen[value].hides]
        if hidden and not all(_only_hides(value, seen) for value in hidden):
            peak = max(peak, *(abs(seen[value].lowest) for value in hidden))
        if peak > limit:
            overflowing[node_name(node)] = peak
    return overflowing


def _observe_floats(model: ir.Model, batches: Iterable[Feeds]) -> dict[ir.Value, TensorExtremes]:
    """Watch every float tensor of the graph over the batches, constants among them."""
    values = {v.name: v for node in model.graph for v in node.outputs if v.dtype == ir.DataType.FLOAT and v.name}
    seen = {value: TensorExtremes() for value in values.values()}
    session = open_session(tap(model, list(values)))
    ran = False
    for outputs in run_batches(session, cut_batches(session, batches)):
        ran = True
        for name, array in take_each(outputs):
            if np.isnan(array).any():
                raise ValueError(f"tensor {name.removesuffix(TAPPED)!r}: NaN among the values")
            seen[values[name.removesuffix(TAPPED)]].add(array)
    if not ran:
        raise ValueError("there is no calibration data")
    for value in (value for node in model.graph for value in node.inputs if value is not None):
        if value not in seen and is_constant(value) and value.dtype == ir.DataType.FLOAT:
            seen[value] = TensorExtremes()
            seen[value].add(constant(value))
    return seen


def _only_hides(value: ir.Value, seen: Mapping[ir.Value, TensorExtremes]) -> bool:
    """Return whether what hides in `value` comes from constants and is read, in the end, by softmaxes alone."""
    return _comes_from_constants(value, seen) and _goes_to_softmax(value, seen)


def _comes_from_constants(value: ir.Value, seen: Mapping[ir.Value, TensorExtremes]) -> bool:
    if is_constant(value):
        return True
    node = value.producer()
    if node is None or node.op_type in STAYS or node.op_type not in CARRIES:
        return False
    before = [source for source in node.inputs if source is not None and source in seen and seen[source].hides]
    return bool(before) and all(_comes_from_constants(source, seen) for source in before)


def _goes_to_softmax(value: ir.Value, seen: Mapping[ir.Value, TensorExtremes]) -> bool:
    if value.is_graph_output():
        return False
    for use in value.uses():
        if use.node.op_type == "Softmax":
            continue
        carried = [out for out in use.node.outputs if out in seen and seen[out].hides]
        if use.node.op_type not in CARRIES or not all(_goes_to_softmax(out, seen) for out in carried):
            return False
    return True
