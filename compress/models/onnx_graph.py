"""Open an .onnx file as the graph that everything works on: read, checked, cleaned."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from compress.errors import SourceError
from compress.facts import SampleShapes
from compress.graph.cleanup import QUANTIZED, CleanUp, clean_graph
from compress.graph.layers import GraphLayer, constant, find_layers
from compress.graph.run import open_session, run_batches
from compress.models.batch_axis import TOLERANCE, Arrays, BatchAxis, draw_sample, find_batch_axis
from compress.models.onnx_check import COPIES, bound_process, follow_links, run_apart
from compress.models.source import onnx_external_files, read_onnx
from runtime.backends.onnxruntime_cpu import describe_failure, failures

DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training", "com.microsoft")
"""Of operators that ONNX Runtime has."""
SHORT = 1024
"""Elements of a constant up to which it may say shapes or axes."""
EMPTY: Mapping[str, Any] = {}
ROUNDED = 2e-2
"""Tolerance of a graph that rounds as it runs: five of the 255 steps of DynamicQuantizeLinear."""


@dataclass(frozen=True)
class OpenedGraph:
    """A cleaned graph with the shapes that can be told, and what the clean-up did."""

    model: ir.Model
    clean_up: CleanUp


def open_onnx(path: Path, values: Mapping[str, Any] = EMPTY) -> OpenedGraph:
    """Read an ONNX file and clean its graph; external weights stay in their files until they are needed.

    `values`: of inputs that are the same for all samples, and become constants. Raises SourceError: no valid ONNX
    model, or one of operators that nothing here runs.
    """
    proto = read_onnx(path, values)  # refuses what is damaged, before anything trusts it
    try:
        if onnx_external_files(path):
            follow_links(proto, path)
        model = ir.from_proto(proto)
        ir.external_data.set_base_dir(model.graph, path.resolve().parent)
        _load_short_constants(model.graph)
        clean_up = clean_graph(model)
        ShapeInferencePass()(model)
    except (ir.serde.SerdeError, ir.passes.PassError, RuntimeError, ValueError, TypeError, OSError) as error:
        raise SourceError(f"{path}: cannot be read as a graph: {' '.join(str(error).split())[:500]}") from error
    _refuse_unknown_operators(model, path)
    return OpenedGraph(model, clean_up)


def _load_short_constants(graph: ir.Graph) -> None:
    """Take what may say shapes or axes into memory: ONNX's inference does not look into files."""
    for value in graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and tensor.size <= SHORT:
            value.const_value = ir.Tensor(tensor.numpy().copy(), name=value.name)


def _refuse_unknown_operators(model: ir.Model, path: Path) -> None:
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    unknown = sorted({f"{node.domain}.{node.op_type}" for node in nodes if node.domain not in DOMAINS})
    if unknown:
        raise SourceError(
            f"{path}: ONNX Runtime has no operator {', '.join(unknown[:5])}; export the model without custom "
            "operators, or give them as functions of the file"
        )


def check_runs(
    path: Path,
    feeds: SampleShapes,
    fixed: int | None,
    values: Mapping[str, Any] = EMPTY,
    begin: SampleShapes = EMPTY,
    state: Mapping[str, str] = EMPTY,
) -> BatchAxis:
    """Return whether samples may share a call of the cleaned graph.

    Raises SourceError unless it opens in ONNX Runtime, its weights are finite, and a sample passes. In a process of its
    own, bounded in time and memory: a graph may loop for ever. `feeds`: of one sample, by input; `fixed`: the batch
    that the graph is bound to; `values`: as of `open_onnx`; `begin`: shapes of states, by input; `state`: output -> it.
    """
    marks = tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in (path, *onnx_external_files(path)))
    order = json.dumps({"feeds": feeds, "fixed": fixed, "values": values, "begin": begin, "state": state})
    found = _run_apart(path, order, marks)
    if isinstance(found, str):
        raise SourceError(found)
    return BatchAxis(**found)


@functools.lru_cache(maxsize=64)
def _run_apart(path: Path, order: str, marks: tuple[tuple[Path, int, int], ...]) -> Any:
    # libraries and stacks take address space beside copies of the weights
    most = 2**34 + 2 * COPIES * sum(size for _, size, _ in marks)
    code = "import sys; from compress.models.onnx_graph import main; main(*sys.argv[1:])"
    return run_apart(code, os.fspath(path.absolute()), order, str(most), what=f"{path}: one sample of it")


def main(path: str, order: str, most: str, seconds: str) -> None:
    """Run a file on samples in this process and print what `check_runs` is to return as JSON, or what is wrong.

    The process takes no more memory and time than it may.
    """
    bound_process(int(most), int(seconds))
    found: str | dict[str, Any]
    try:
        found = _run_samples(Path(path), **json.loads(order))
    except MemoryError:
        found = f"{path}: one sample of it takes more than {int(most) >> 20} MiB of memory"
    print(json.dumps(found))


def _run_samples(
    path: Path,
    feeds: SampleShapes,
    fixed: int | None,
    values: Mapping[str, Any],
    begin: SampleShapes,
    state: Mapping[str, str],
) -> str | dict[str, Any]:
    """Return the fields of a BatchAxis; a text, where the graph cannot be computed for a sample of such shapes."""
    try:
        model = open_onnx(path, values).model
        ir.external_data.load_to_model(model)
        check_finite_onnx(model, path)
    except SourceError as error:
        return str(error)
    try:
        session = open_session(model, threads=1)
    except failures() as error:
        return (
            f"{path}: ONNX Runtime cannot load it: {describe_failure(error)}; export it for this version, or upgrade "
            "onnxruntime"
        )

    def run(given: Arrays) -> Arrays:
        return next(run_batches(session, [{**given, **states}]))

    states = {name: np.zeros(shape, dtype) for name, (shape, dtype) in begin.items()}
    # one scale of a whole batch, as DynamicQuantizeLinear has it, moves answers by a step of 255
    rounds = any(node.op_type in QUANTIZED for node in ir.traversal.RecursiveGraphIterator(model.graph))
    why = ""
    for number in (1, 0):  # of whole numbers: ids, places, or sizes, not every one of which is any number
        samples = [draw_sample(feeds, number, seed) for seed in range(2)]
        try:
            outputs = run({name: np.stack([values] * (fixed or 1)) for name, values in samples[0].items()})
        except failures() as error:
            why = why or describe_failure(error)
        else:
            if state:
                return _find_lost_state(path, outputs, states, state) or asdict(BatchAxis(False))
            return asdict(find_batch_axis(run, samples, fixed, failures(), ROUNDED if rounds else TOLERANCE))
    shown = ", ".join(f"'{name}' {[fixed or 1, *shape]}" for name, (shape, _) in feeds.items())
    return f"{path}: ONNX Runtime cannot run it on one sample, {shown}: {why}; check the sizes, or export it anew"


def _find_lost_state(path: Path, outputs: Arrays, states: Arrays, state: Mapping[str, str]) -> str:
    """Return which state a call gives in another shape than the next call reads it in; "" for none."""
    for output, name in state.items():
        given, read = list(outputs[output].shape), list(states[name].shape)
        if given != read:
            return (
                f"{path}: model.state: output '{output}' is {given}, and the next call reads '{name}' as {read}; "
                "check which output is which input's"
            )
    return ""


def check_finite_onnx(model: ir.Model, path: Path) -> None:
    """Raise SourceError for a constant that cannot be read or holds NaN, and for infinity in a layer's weight or bias.

    Infinity elsewhere is common: what hides tokens from attention is one.
    """
    bad = []
    weights = {value.name for layer in find_layers(model) for value in (layer.weight, _find_bias(layer)) if value}
    for name, value in model.graph.initializers.items():
        try:
            array = constant(value)
        except (ValueError, OSError) as error:
            raise SourceError(f"{path}: weight '{name}' cannot be read: {error}") from error
        if array.dtype.kind == "f" and (np.isnan(array).any() or (name in weights and np.isinf(array).any())):
            bad.append(name)
    if bad:
        raise SourceError(f"{path}: NaN or infinity in {', '.join(bad)}; the weights are not usable")


def _find_bias(layer: GraphLayer) -> ir.Value | None:
    """Return a layer's bias, or what its node adds as the third input."""
    return layer.bias if layer.bias is not None else next(iter(layer.node.inputs[2:3]), None)
