"""Running a part of a graph on values of one's own: what a mask or a table of angles is, whatever nodes make it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from compress.graph.edit import tidy
from compress.graph.run import clone, open_session


def evaluate(model: ir.Model, names: Sequence[str], feeds: Mapping[str, np.ndarray]) -> list[np.ndarray] | None:
    """Compute the named values where the values that `feeds` names are its arrays, of any shape that the nodes take.

    None where the values need more than those feeds, or the nodes do not take them.
    """
    part = _cut_part(model, names, feeds)
    if part is None:
        return None
    try:
        session = open_session(part, threads=1)
        wanted = {value.name for value in part.graph.inputs}
        return [np.asarray(output) for output in session.run(None, {k: v for k, v in feeds.items() if k in wanted})]
    except Exception as error:
        if type(error).__module__.startswith("onnxruntime"):
            return None
        raise


def _cut_part(model: ir.Model, names: Sequence[str], feeds: Mapping[str, np.ndarray]) -> ir.Model | None:
    """Return the graph between the fed values and the named ones; None where an input that it needs is not fed."""
    copy = clone(model)
    values = {value.name: value for node in copy.graph for value in node.outputs}
    values |= {value.name: value for value in copy.graph.inputs}
    outputs = [values[name] for name in names]
    copy.graph.outputs.clear()
    copy.graph.inputs.clear()
    for name, array in feeds.items():
        _feed_value(copy, values[name], array)
    for value in outputs:
        value.type, value.shape = value.type or ir.TensorType(ir.DataType.FLOAT), None
        copy.graph.outputs.append(value)
    for node in copy.graph:
        for value in node.outputs:
            value.shape = None  # they were those of other sizes
    tidy(copy)
    made = {value for node in copy.graph for value in node.outputs} | set(copy.graph.inputs)
    held = set(copy.graph.initializers.values())
    known = made | held
    complete = all(value is None or value in known for node in copy.graph for value in node.inputs)
    unused = [value for value in copy.graph.inputs if not list(value.uses())]
    for value in unused:
        copy.graph.inputs.remove(value)
    return copy if complete and all(value in known for value in outputs) else None


def _feed_value(model: ir.Model, value: ir.Value, array: np.ndarray) -> None:
    name = value.name
    value.name = f"{name}/made"
    fed = ir.Value(name=name, type=ir.TensorType(ir.DataType.from_numpy(array.dtype)), shape=ir.Shape(array.shape))
    for use in list(value.uses()):
        use.node.replace_input_with(use.idx, fed)
    model.graph.inputs.append(fed)
