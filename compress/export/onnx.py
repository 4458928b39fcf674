"""Export a loaded model to a float ONNX graph, and write a decided graph to the file that a target is fast on.

What passes over blocks rounded is put beside the exported graph: what is written is what was rounded, bit for bit.
"""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes.common import DeduplicateInitializersPass, InlinePass, ShapeInferencePass
from onnxruntime import RunOptions
from torch import nn
from torch.fx import config as fx_config
from torch.utils._pytree import tree_leaves

from compress.blocks.materialise import plain
from compress.blocks.parametrized import without_computed
from compress.blocks.rounded import RoundedLayers
from compress.blocks.store import WeightStore
from compress.blocks.streamed import StreamedModel
from compress.blocks.untouched import count_free_sizes, leave_untouched
from compress.errors import ExportError, NotExportable
from compress.export.operator_tables import keep_operator_tables
from compress.export.rotations import RealRotations
from compress.facts import Note
from compress.formats.schemes import PRESETS
from compress.formats.targets import Target
from compress.graph.attention import to_group_query_attention
from compress.graph.convolutions import pool_globally
from compress.graph.edit import initializer, reroute, strip_metadata, tidy, uses_of
from compress.graph.fast_forms import (
    divide_by_root,
    keep_norms_apart,
    keep_pools_fast,
    look_up_in_blocks,
    merge_products,
    own_transposes,
    pad_input_channels,
    share_blocks,
    share_tables,
    to_two_bits,
)
from compress.graph.files import write_graph
from compress.graph.half import to_half
from compress.graph.halves import cross_names, share_weights, split_halves
from compress.graph.last_logits import keep_last_logits
from compress.graph.layers import GraphLayer, constant, find_layers
from compress.graph.rebuild import make_identifier
from compress.graph.run import clone, open_session
from compress.graph.seeing import sees, split_sight
from compress.graph.specs import attention_layers, cache_of, past_name
from compress.graph.stored import StoredTensor, holds_stored, make_stored_weight
from compress.models.facts import user_line
from compress.models.load import OnnxModel, TorchModel
from compress.rounding.float_blocks import DOMAIN as TENSORRT
from compress.rounding.float_blocks import MOST_AXES, is_float_block
from compress.rounding.qdq import write_state
from compress.rounding.quantized_weight import QuantizedWeight, UnreadWeight
from compress.rounding.state import GraphState, Range
from runtime.backends.onnxruntime_cpu import MOST_SAID, describe_failure, failures
from runtime.bundle.files import ENCODER, VISION

SHARED = "shared.data"
"""Name of the file that holds what an encoder and its decoder have in common."""
WAY_OUT = "change that code, or give the model as an ONNX file (source: onnx:...), or export a checkpoint alone"
Weight = tuple[tuple[int, ...], Callable[[str], np.ndarray]]
"""Of a parameter that stays in its file: its shape, and what reads it by name, float32."""


def export_float(loaded: TorchModel | OnnxModel, feeds: Mapping[str, np.ndarray], opset: int) -> ir.Model:
    """Export the model as a float32 graph with dynamic batch and sequence. `feeds`: a batch of two samples or more.

    Raises ExportError with what the exporter said.
    """
    if isinstance(loaded, OnnxModel):
        return loaded.graph
    arguments = {
        loaded.parameters[name]: torch.from_numpy(np.ascontiguousarray(feeds[name])) for name in loaded.input_names
    }
    graph = export_program(
        loaded.module,
        loaded.architecture,
        arguments,
        loaded.input_names,
        loaded.output_names,
        _make_dynamic_shapes(loaded),
        opset,
    )
    quiet = RunOptions()
    quiet.log_severity_level = 4  # the error says it
    try:
        session: Any = open_session(graph)
        session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()}, quiet)
    except failures() as error:  # of a LSTM with a projection the exporter writes what nothing runs
        said = f"ONNX Runtime does not run the exported graph: {describe_failure(error)}"
        raise NotExportable(f"{loaded.architecture}: {said}; {WAY_OUT}") from error
    return graph


def finish(state: GraphState, target: Target) -> tuple[ir.Model, list[str]]:
    """Return the graph that `target` gets: decisions in its variant, forms that it is slow on avoided, no metadata.

    Decisions made by another target's times are not among them. The notes name what keeps a slower form, and why.
    Raises ExportError for a key-value cache that the target cannot keep in the decided form.
    """
    notes: list[str] = []
    model = write_state(state.for_target(target.name), target.variant)
    if state.half is not None:
        ShapeInferencePass()(model)
        to_half(model, state.half, state.half_kept)
    if target.cpu_operators:
        look_up_in_blocks(model)
        if cache_of(model) is not None:
            model, notes = _prepare_decoder_for_cpu(model, state)
        elif cross_names(model):
            _speed_up_single_rows(model)
        keep_norms_apart(model)
        pad_input_channels(model)
        keep_pools_fast(model)
    elif target.variant == "u8s8":
        share_blocks(model)
    if state.kv_cache is not None and not _keeps_integers(model):
        raise ExportError([_explain_missing_cache(state.kv_cache, target.name), *notes])
    flush_denormals(model)
    share_tables(model)
    # larger constants are weights, each with its own name
    DeduplicateInitializersPass(size_limit=2**16)(model)  # zero points, above all
    if target.cpu_operators and cache_of(model) is not None:
        keep_last_logits(model)
    strip_metadata(model)
    return model, notes


def flush_denormals(model: ir.Model) -> int:
    """Set float32 weights below the least normal number to zero, in place; return how many there were.

    CPUs compute with such numbers by slow micro-code: 447,229 of them made a landmark model 16 times slower, and ONNX
    Runtime's session option against them left it so. No output differs by more than rounding does.
    """
    n_flushed = 0
    for name, value in list(model.graph.initializers.items()):
        if value.dtype != ir.DataType.FLOAT or isinstance(value.const_value, StoredTensor):
            continue
        weights = constant(value)
        tiny = (weights != 0) & (np.abs(weights) < np.finfo(np.float32).tiny)
        if tiny.any():
            n_flushed += int(tiny.sum())
            initializer(model, name, np.where(tiny, np.float32(0), weights))
    return n_flushed


def _prepare_decoder_for_cpu(model: ir.Model, state: GraphState) -> tuple[ir.Model, list[str]]:
    scales = state.kv_scales if state.kv_cache == "int8" else None
    try:
        model, notes = to_group_query_attention(model, scales=scales)
    except KeyError as error:
        raise ExportError(f"the key-value cache is {state.kv_cache}, but {error} has no scales") from error
    _speed_up_single_rows(model)
    return model, notes


def _speed_up_single_rows(model: ir.Model) -> None:
    """Rewrite, in place, what costs much where a call reads one token."""
    divide_by_root(model)
    merge_products(model)
    to_two_bits(model)


def _keeps_integers(model: ir.Model) -> bool:
    pasts = {past_name(layer, kind) for layer in attention_layers(model) for kind in ("key", "value")}
    return bool(pasts) and all(v.dtype == ir.DataType.INT8 for v in model.graph.inputs if v.name in pasts)


def _explain_missing_cache(kind: str, target: str) -> str:
    if kind != "int8" or target != "onnxruntime-cpu":
        return f"{target} has no ONNX operator for a key-value cache of {kind}; use int8 on onnxruntime-cpu, or none"
    return "a key-value cache of int8 needs GroupQueryAttention in every layer"


def float_graph(model: ir.Model) -> ir.Model:
    """Return what the baseline's file holds: a copy of the float graph, its layers' nodes by name, without metadata."""
    plain = clone(model)
    taken = {node.name for node in plain.graph}
    for layer in find_layers(plain):  # the metadata that names them goes
        if layer.name not in taken:
            layer.node.name = layer.name
    share_tables(plain)
    tidy(plain)
    keep_pools_fast(plain)
    if cache_of(plain) is not None:
        keep_last_logits(plain)
    strip_metadata(plain)
    return plain


def save_graph(model: ir.Model, path: Path, load: bool = True) -> None:
    """Write a graph to a file, check it and load it once. ExportError where the checker or ONNX Runtime refuses it.

    That of an encoder-decoder becomes two: its decoder's, and beside it its encoder's; so does that of a decoder that
    also sees. What computes in bfloat16, FP4
    or MXFP8 is not loaded: ONNX Runtime has no such kernels for CPUs. Nor without `load`, for what memory has no room
    for.
    """
    if cross_names(model):
        encoder, model = split_halves(model)
        share_weights(encoder, model, path.with_name(SHARED))
        _save_one(encoder, path.with_name(ENCODER), load)
    elif sees(model):
        vision, model = split_sight(model)
        _save_one(vision, path.with_name(VISION), load)
    _save_one(model, path, load)


def _save_one(model: ir.Model, path: Path, load: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_graph(_without_inferred(model), path)
    refusals: tuple[type[Exception], ...] = (onnx.checker.ValidationError, *failures())
    try:
        onnx.checker.check_model(str(path))
        if load and not computes_in_bfloat16(model) and not needs_tensorrt(model):
            open_session(path)
    except refusals as error:
        raise ExportError(f"{path.name}: the exported graph is refused: {describe_failure(error)}") from error


def _without_inferred(model: ir.Model) -> ir.Model:
    """Return a copy without what every reader infers: types and shapes of constants and of float32 tensors between
    nodes, shapes of what Q/DQ nodes give, and the names of these nodes, which are those of their outputs. Of a detector
    of 300 KB it is a tenth.
    """
    plain = clone(model)
    inferred = list(plain.graph.initializers.values())
    for node in plain.graph:
        inner = [value for value in node.outputs if not value.is_graph_output()]
        inferred += [value for value in inner if value.dtype in (None, ir.DataType.FLOAT)]
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            node.name = None
            for value in inner:
                value.shape = None  # but not its type: an engine's order is read from the file
    for value in inferred:
        if not value.is_graph_output() and not value.is_graph_input():
            value.type = value.shape = None
    return plain


def computes_in_bfloat16(model: ir.Model) -> bool:
    return any(value.dtype == ir.DataType.BFLOAT16 for node in model.graph for value in node.outputs)


def needs_tensorrt(model: ir.Model) -> bool:
    """Return whether the graph holds FP4, or an operator of TensorRT's own."""
    float4 = any(value.dtype == ir.DataType.FLOAT4E2M1 for value in model.graph.initializers.values())
    return float4 or TENSORRT in model.opset_imports


def _make_dynamic_shapes(loaded: TorchModel) -> dict[str, dict[int, object]]:
    identifiers: dict[str, str] = {}  # an ONNX file calls its free sizes as it likes: "height/8"
    for name in sorted({dim for spec in loaded.inputs for dim in spec.shape if isinstance(dim, str)}):
        identifiers[name] = make_identifier(name, identifiers.values())
    dims = {name: torch.export.Dim(identifier) for name, identifier in identifiers.items()}
    return {
        loaded.parameters[spec.name]: {i: dims[dim] for i, dim in enumerate(spec.shape) if isinstance(dim, str)}
        for spec in loaded.inputs
    }


def with_rounded_layers(state: GraphState, layers: RoundedLayers) -> GraphState:
    """Return the state with layers whose weights alone were rounded in torch. ExportError: the graph lacks one."""
    known = {layer.name for layer in find_layers(state.model)}
    if lost := [name for name in layers if name not in known]:
        raise ExportError(f"{lost[0]}: is rounded, but not a layer of the exported graph; ignore it in its pass")
    weights = {name: layer.weight for name, layer in layers.items()}
    return replace(state, weights={**state.weights, **weights}, weight_only=[*state.weight_only, *weights])


def with_integers(state: GraphState, model: StreamedModel) -> tuple[GraphState, tuple[Note, ...]]:
    """Return the state with the model's quantized layers, and notes on what could not be taken over.

    8-bit activations: int8 with scales at run time if they are dynamic, static ones otherwise. Raises ExportError for a
    layer that the graph computes otherwise than rounded (FP8 has no kernels here), or dynamic and static in one model.
    """
    if any(f"{name}.weight" in model.tied for name in model.quantized_layers()):
        own_transposes(state.model)
    layers = {layer.name: layer for layer in find_layers(state.model)}
    unread = holds_stored(state.model)
    weights: dict[str, QuantizedWeight] = {}
    integer, dynamic, ranges, scales, lost = [], set(), {}, {}, []
    for name in model.quantized_layers():
        scheme, weight = model.schemes[name], model.store.quantized(name)
        assert weight is not None
        if scheme.weights.kind == "float" and not is_float_block(weight) and scheme != PRESETS["FP8"]:
            raise ExportError(f"{name}: {scheme.name} cannot be written as an ONNX graph; export a checkpoint")
        if name not in layers:
            lost.append(name)
            continue
        weights[name] = UnreadWeight(partial(_read_integers, model.store, name)) if unread else weight
        if layers[name].op == "Gather":
            weights[name] = with_row_groups(layers[name], weight)
        if scheme.activations is not None and is_float_block(weight):
            scales[name] = model.activation_scales.get(name, 1.0)
            if len(layers[name].data_input.shape or (0,)) > MOST_AXES:
                axes = f"TensorRT scales inputs of {MOST_AXES} axes at most as they run"
                raise ExportError(f"{name}: {axes}; ignore the layer, or use {scheme.name}A16")
        elif scheme.activations is not None:
            weights[name] = weight
            integer.append(name)
            dynamic.add(scheme.activations.dynamic)
            if not scheme.activations.dynamic:
                peak = model.activation_scales[name] * scheme.activations.most
                ranges[layers[name].data_input.name or ""] = Range(-peak, peak, peak)
    if len(dynamic) > 1:
        raise ExportError("some layers have dynamic activations and some static ones; one graph holds only one kind")
    notes = [
        Note("warning", f"{name}: is not a layer of the exported graph, so it is not quantized there") for name in lost
    ]
    weight_only = [name for name in weights if name not in integer]
    state = replace(
        state,
        weights={**state.weights, **weights},
        weight_only=[*state.weight_only, *weight_only],
        input_scales={**state.input_scales, **scales},
        integer=[*state.integer, *integer],
        ranges={**state.ranges, **ranges},
        dynamic=state.dynamic or dynamic == {True},
        kv_cache=model.kv_cache,
        kv_scales=dict(model.kv_scales),
    )
    return state, tuple(notes)


def with_row_groups(layer: GraphLayer, weight: QuantizedWeight) -> QuantizedWeight:
    """Return a table's integers [rows, width] with a group size: -1 in a graph says one scale for each column."""
    if layer.op != "Gather" or weight.group_size > 0:
        return weight
    return replace(weight, group_size=weight.values.shape[1])


def _read_integers(store: WeightStore, layer: str) -> QuantizedWeight:
    weight = store.quantized(layer)
    assert weight is not None
    return weight


def export_program(
    module: nn.Module,
    name: str,
    kwargs: Mapping[str, Any],
    input_names: Sequence[str],
    output_names: Sequence[str],
    dynamic_shapes: Mapping[str, Any],
    opset: int,
    weights: Mapping[str, Weight] | None = None,
) -> ir.Model:
    """Export the module as a graph. Raises NotExportable with what the exporter said of `name`.

    `weights`: parameters whose values the module does not hold, by plain name; the graph leaves them in their files,
    and what is computed from parameters alone is left to be.
    """
    from onnxscript.optimizer import optimize_ir

    module = without_computed(module)
    with (
        silence(),
        keep_operator_tables(),
        leave_untouched(module),
        count_free_sizes(module),
        without_line_numbers(),
        RealRotations(),
    ):
        try:
            program = torch.onnx.export(
                module,
                (),
                kwargs=dict(kwargs),
                dynamo=True,
                input_names=list(input_names),
                output_names=list(output_names),
                dynamic_shapes=dict(dynamic_shapes),
                opset_version=opset,
                verbose=False,
                optimize=weights is None,
                custom_translation_table=_make_translations(),
            )
            if program is not None and weights is not None:
                _leave_in_files(program.model, weights)
                optimize_ir(program.model, should_fold=_make_choice({name for name, _ in module.named_parameters()}))
        except (RuntimeError, ValueError, TypeError, torch.onnx.OnnxExporterError) as error:
            raise NotExportable(f"{name}: {_explain_failure(error)}; {WAY_OUT}") from error
    assert program is not None
    _check_free_sizes(program.model, name, [dynamic_shapes[key] for key in kwargs])
    pool_globally(program.model)
    return program.model


def _make_choice(parameters: Collection[str]) -> Callable[[ir.Node], bool | None]:
    """Return what says of a node that it is not to be computed once, as it reads a parameter; None: as usual."""

    def choose(node: ir.Node) -> bool | None:
        read = (value.name for value in node.inputs if value is not None and value.is_initializer())
        return False if any(name in parameters for name in read) else None

    return choose


def _make_translations() -> dict[Any, Callable[..., Any]]:
    """Return what the exporter has no translation for: torch operator -> a function that writes it."""
    from onnxscript import opset18

    op: Any = opset18

    def is_all_true(x: Any) -> Any:
        return op.Cast(op.ReduceMin(op.Cast(x, to=ir.DataType.INT32), keepdims=0), to=ir.DataType.BOOL)

    def is_any_true(x: Any) -> Any:
        return op.Cast(op.ReduceMax(op.Cast(x, to=ir.DataType.INT32), keepdims=0), to=ir.DataType.BOOL)

    def remove_axes(x: Any, dim: int | Sequence[int]) -> Any:
        """Return what torch's squeeze gives, which leaves an axis of another size than 1, where ONNX's fails."""
        axes = [
            axis for axis in ([dim] if isinstance(dim, int) else dim) if x.shape[axis] == 1 or x.shape[axis] is None
        ]
        return op.Squeeze(x, axes) if axes else op.Identity(x)

    aten = torch.ops.aten
    return {
        aten._is_all_true.default: is_all_true,
        aten._is_any_true.default: is_any_true,
        aten.squeeze.dim: remove_axes,
        aten.squeeze.dims: remove_axes,
    }


def _check_free_sizes(model: ir.Model, name: str, asked: Sequence[Any]) -> None:
    """Raise NotExportable for an axis that was to stay free, and that the model's code has made a number."""
    axes = tree_leaves(asked, is_leaf=lambda part: isinstance(part, Mapping))
    for value, free in zip(model.graph.inputs, axes, strict=False):
        for axis in free:
            if value.shape is not None and isinstance(value.shape[axis], int):
                text = f"its code takes axis {axis} of {value.name} for a number, {value.shape[axis]}"
                raise NotExportable(f"{name}: {text}: no graph of it reads another size; {WAY_OUT}")


def _explain_failure(error: BaseException) -> str:
    """Return what an exporter says of its failure, in one line without colours, and the line of code it is of."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).partition("## Exception summary")
    lines = [line.strip() for line in (text[2] or text[0]).splitlines()]
    first = next((line for line in lines if line[:1] not in ("", "=", "-", "⬆")), type(error).__name__)
    kind, _, said = first.removeprefix("<class '").partition("'>: ")
    cause = error.__cause__ or error
    first = f"{kind.rpartition('.')[2]}: {said}" if said else first
    sentence = re.split(r"\.\s", first)[0].rstrip(".:")
    return f"torch.onnx.export failed: {sentence[:MOST_SAID]}{user_line(cause)}"


def _leave_in_files(model: ir.Model, weights: Mapping[str, Weight]) -> None:
    """Let the initializers of these names be read from their files, in place, and so their transposes.

    The exporter's optimization would compute each transpose and hold it.
    """
    InlinePass()(model)
    for value in list(model.graph.initializers.values()):
        name = plain(value.name or "")
        if name not in weights:
            continue
        shape, read = weights[name]
        readers = [use.node for use in value.uses()]
        if len(readers) == 1 and readers[0].op_type == "Transpose" and len(shape) == 2:
            turned = readers[0].outputs[0]
            result = initializer(model, f"{value.name}/turned", make_stored_weight(name, shape, read, turned=True))
            result_name = turned.name
            reroute(uses_of(turned), result)
            model.graph.remove(readers[0], safe=True)
            del model.graph.initializers[value.name or ""]
            _rename(model, result, result_name or "")
        else:
            value.const_value = make_stored_weight(name, shape, read, turned=False)
            value.const_value.name = value.name


def _rename(model: ir.Model, value: ir.Value, name: str) -> None:
    del model.graph.initializers[value.name or ""]
    value.name = name
    assert value.const_value is not None
    value.const_value.name = name
    model.graph.register_initializer(value)


@contextmanager
def without_line_numbers() -> Iterator[None]:
    """Let torch not write beside every operator the lines of code that it stems from: a sixth of a small export."""
    before = getattr(fx_config, "do_not_emit_stack_traces", False)  # an older torch may not have it
    fx_config.do_not_emit_stack_traces = True
    try:
        yield
    finally:
        fx_config.do_not_emit_stack_traces = before


@contextmanager
def silence() -> Iterator[None]:
    """Hide what torch and its exporter log while the context is open: what matters is in what they raise."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    shown = io.StringIO()  # a failing trace is printed, too
    try:
        with warnings.catch_warnings(), redirect_stdout(shown), redirect_stderr(shown):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
