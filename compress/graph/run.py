"""Running a graph over batches of feeds in ONNX Runtime, with any of its inner tensors as extra outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from compress.graph.edit import tidy
from compress.graph.files import IN_MEMORY, weight_bytes, write_graph
from compress.store.durable import temporary_folder
from runtime.backends.onnxruntime_cpu import InferenceSession, create

Feeds = dict[str, np.ndarray]
MASK = "attention_mask"
"""The input that says what is padding, 0, and what is a token."""
TAPPED = "/tapped"
"""Suffix of the output that a tapped graph input gets."""
OUTPUT_BYTES = 2**28
"""Of the tapped tensors that are held at once."""


def open_session(model: ir.Model | Path, threads: int = 0, optimize: bool = True) -> InferenceSession:
    """Open a CPU session. `threads` 0 means all cores; `optimize` False keeps every node as it is written.

    Raises whatever ONNX Runtime raises on a graph that it cannot load.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if isinstance(model, Path) or weight_bytes(model) < IN_MEMORY:
        source = str(model) if isinstance(model, Path) else ir.to_proto(model).SerializeToString()
        return create(source, options, ["CPUExecutionProvider"])
    with temporary_folder() as folder:  # a protobuf holds no more than 2 GiB
        path = folder / "model.onnx"
        write_graph(model, path, apart=True)
        return create(str(path), options, ["CPUExecutionProvider"])


def tap(model: ir.Model, names: Sequence[str]) -> ir.Model:
    """Copy the part of `model` that gives the named tensors, as its outputs. KeyError for one it does not have."""
    copy = clone(model)
    values = {value.name: value for node in copy.graph for value in node.outputs}
    values |= {value.name: value for value in copy.graph.inputs}
    copy.graph.outputs.clear()
    for name in dict.fromkeys(names):
        value = values[name]
        if value.is_graph_input():
            node = ir.node("Identity", [value])
            copy.graph.append(node)
            out = node.outputs[0]
            out.name = f"{value.name}{TAPPED}"
            out.type, out.shape = value.type, value.shape
            value = out
        if value.type is None:
            value.type = ir.TensorType(ir.DataType.FLOAT)
        copy.graph.outputs.append(value)
    tidy(copy)
    return copy


def clone(model: ir.Model) -> ir.Model:
    """Return an independent copy; weights are shared until replaced."""
    return model.clone()


def run_batches(session: InferenceSession, batches: Iterable[Feeds]) -> Iterator[dict[str, np.ndarray]]:
    """Yield the outputs by name, batch by batch."""
    names = [output.name for output in session.get_outputs()]
    for feeds in batches:
        yield dict(zip(names, session.run(names, feeds), strict=True))


def cut_batches(session: InferenceSession, batches: Iterable[Feeds]) -> Iterator[Feeds]:
    """Yield the batches in pieces of so few samples that the outputs of each fill no more than OUTPUT_BYTES.

    What one sample gives is tried with the first. A graph that is bound to a batch size gets its batches whole.
    """
    free = all(x.shape and not isinstance(x.shape[0], int) for x in session.get_inputs())
    most = None
    for feeds in batches:
        n = min(map(len, feeds.values())) if free else 1
        if most is None:  # 12 taps of 8 x 320 x 320 numbers on 32 samples are 1.3 GB, and twice that are compared
            alone = session.run(None, {name: values[:1] for name, values in feeds.items()}) if n > 1 else []
            most = max(1, OUTPUT_BYTES // max(sum(values.nbytes for values in alone), 1))
        for start in range(0, n, most):
            yield feeds if n <= most else {name: values[start : start + most] for name, values in feeds.items()}


def run_tokens(session: InferenceSession, batches: Iterable[Feeds]) -> Iterator[dict[str, np.ndarray]]:
    """Yield the outputs by name, piece by piece, without what was computed of padding: for statistics."""
    for feeds in batches:
        yield _drop_all_padding(next(run_batches(session, [feeds])), feeds.get(MASK))


def take_each(outputs: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield what is in the mapping, in order, and take it out: it is gone before the next batch is computed."""
    for name in list(outputs):
        yield name, outputs.pop(name)


def _drop_all_padding(outputs: dict[str, np.ndarray], mask: np.ndarray | None) -> dict[str, np.ndarray]:
    return {name: drop_padding(values, mask) for name, values in outputs.items()}


def drop_padding(values: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """Return `values` without the tokens that `mask` [B, T] hides, with as many dimensions: [1, n, ...] of [B, T, ...].

    Of [B * T, ...] [n, ...]; of attention's [B, heads, T, ...] or [B, heads, size, T] one row of heads with n tokens.
    Anything else is given as it is.
    """
    if mask is None or mask.ndim != 2 or mask.all() or not mask.any():
        return values
    tokens = mask.astype(bool)
    if values.shape[:2] == mask.shape:
        return values[tokens][None]
    if values.ndim == 2 and len(values) == mask.size:
        return values[tokens.ravel()]
    if values.ndim == 4 and len(values) == len(mask) and mask.shape[1] in values.shape[2:]:
        axis = 2 if values.shape[2] == mask.shape[1] else 3
        kept = np.moveaxis(values, axis, 1)[tokens]  # [n, heads, other]
        return np.moveaxis(kept[None], 1, axis)
    return values
