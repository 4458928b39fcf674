"""What passes over blocks rounded, put beside the exported graph: what is written is what was rounded, bit for bit."""

from __future__ import annotations

from dataclasses import replace

from compress.blocks.rounded import RoundedLayers
from compress.blocks.streamed import StreamedModel
from compress.errors import ExportError
from compress.facts import Note
from compress.graph.layers import find_layers
from compress.quantize.rounding import QuantizedWeight
from compress.quantize.state import GraphState, Range

LEVELS = 127
"""Of symmetric int8 activations, on either side of zero."""


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
    layers = {layer.name: layer for layer in find_layers(state.model)}
    weights: dict[str, QuantizedWeight] = {}
    integer, dynamic, ranges, lost = [], set(), {}, []
    for name in model.quantized_layers():
        scheme, weight = model.schemes[name], model.store.quantized(name)
        assert weight is not None
        if scheme.weights.kind == "float":
            raise ExportError(f"{name}: {scheme.name} cannot be written as an ONNX graph; export a checkpoint")
        if name not in layers:
            lost.append(name)
            continue
        weights[name] = weight
        if scheme.activations is not None:
            integer.append(name)
            dynamic.add(scheme.activations.dynamic)
            if not scheme.activations.dynamic:
                peak = model.activation_scales[name] * LEVELS
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
        integer=[*state.integer, *integer],
        ranges={**state.ranges, **ranges},
        dynamic=state.dynamic or dynamic == {True},
        kv_cache=model.kv_cache,
        kv_scales=dict(model.kv_scales),
    )
    return state, tuple(notes)
