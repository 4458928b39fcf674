"""From a loaded model to a float ONNX graph, and from a decided graph to the file a target is fast on."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import ShapeInferencePass

from compress.errors import ExportError
from compress.facts import LOWEST_OPSET
from compress.graph.channels import pad_input_channels
from compress.graph.edit import strip_metadata, tidy
from compress.graph.half import to_half
from compress.graph.normal import normalize
from compress.graph.norms import keep_norms_apart
from compress.graph.run import IN_MEMORY, clone, open_session, weight_bytes
from compress.models.load import LoadedModel
from compress.quantize.qdq import write_state
from compress.quantize.state import GraphState
from compress.targets import Target
from runtime.backends.onnxruntime_cpu import failures


def export_float(loaded: LoadedModel, feeds: Mapping[str, np.ndarray], opset: int) -> ir.Model:
    """The model as a float32 graph with dynamic batch and sequence. `feeds`: an encoded batch of at least two samples.

    Raises ExportError with what the exporter said.
    """
    if loaded.onnx_path is not None:
        return read_graph(loaded.onnx_path)
    assert loaded.module is not None
    assert loaded.parameters is not None
    arguments = {
        loaded.parameters[name]: torch.from_numpy(np.ascontiguousarray(feeds[name])) for name in loaded.input_names
    }
    with _quiet():
        try:
            program = torch.onnx.export(
                loaded.module,
                (),
                kwargs=arguments,
                dynamo=True,
                input_names=list(loaded.input_names),
                output_names=list(loaded.output_names),
                dynamic_shapes=_dynamic_shapes(loaded),
                opset_version=opset,
                verbose=False,
            )
        except (RuntimeError, ValueError, TypeError, torch.onnx.OnnxExporterError) as error:
            raise ExportError(f"{loaded.architecture}: torch.onnx.export failed: {_first_lines(error)}") from error
    assert program is not None
    return program.model


def read_graph(path: Path) -> ir.Model:
    """An ONNX file as a graph with inferred shapes, converted to LOWEST_OPSET if it is older. ExportError."""
    try:
        model = ir.from_proto(onnx.load(path))
        normalize(model)  # before the conversion, which may add nodes: names are those that the plan knows
        if model.opset_imports.get("", LOWEST_OPSET) < LOWEST_OPSET:
            model = ir.from_proto(onnx.version_converter.convert_version(ir.to_proto(model), LOWEST_OPSET))
            normalize(model)
        ShapeInferencePass()(model)
    except (RuntimeError, ValueError, onnx.checker.ValidationError) as error:
        raise ExportError(f"{path}: cannot be read as a graph: {_first_lines(error)}") from error
    return model


def finished_graph(state: GraphState, target: Target) -> ir.Model:
    """The graph that `target` gets: decisions written in its flavour, forms that it is slow on avoided, no metadata."""
    model = write_state(state, target.flavour)
    if state.half is not None:
        ShapeInferencePass()(model)
        to_half(model, state.half, state.half_kept)
    if target.name == "onnxruntime-cpu":
        keep_norms_apart(model)
        pad_input_channels(model)
    strip_metadata(model)
    return model


def float_graph(model: ir.Model) -> ir.Model:
    """What the baseline's file holds: the float graph, without metadata."""
    plain = clone(model)
    tidy(plain)
    strip_metadata(plain)
    return plain


def save_graph(model: ir.Model, path: Path) -> None:
    """Write the file, check it, and load it once. Raises ExportError when the checker or ONNX Runtime refuses it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_graph(model, path)
    refusals: tuple[type[Exception], ...] = (onnx.checker.ValidationError, *failures())
    try:
        onnx.checker.check_model(str(path))
        open_session(path)
    except refusals as error:
        raise ExportError(f"{path.name}: the exported graph is refused: {_first_lines(error)}") from error


def write_graph(model: ir.Model, path: Path) -> None:
    """Write the file; over 2 GiB, which is what protobuf can hold, with the weights beside it in <name>.data."""
    ir.save(model, path, external_data=f"{path.name}.data" if weight_bytes(model) > IN_MEMORY else None)


def _dynamic_shapes(loaded: LoadedModel) -> dict[str, dict[int, object]]:
    assert loaded.parameters is not None
    names = {dim for spec in loaded.inputs for dim in spec.shape if isinstance(dim, str)}
    dims = {name: torch.export.Dim(name) for name in sorted(names)}
    return {
        loaded.parameters[spec.name]: {i: dims[dim] for i, dim in enumerate(spec.shape) if isinstance(dim, str)}
        for spec in loaded.inputs
    }


def _first_lines(error: Exception, most: int = 6) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    return " | ".join(line for line in lines if line[:1] not in ("", "=", "-"))[: most * 160]


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter's progress and warnings about optional packages stay out of the user's terminal."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
