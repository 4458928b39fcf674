"""Building an int8 state: ranges from observations, integer weights, corrected biases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from compress.formats.schemes import WeightScheme
from compress.graph.layers import GraphLayer, constant, find_layers
from compress.graph.run import Feeds
from compress.rounding.observers import Method, Observer, choose_range, observe
from compress.rounding.placement import Kind, after_activation
from compress.rounding.qdq import integer_layers, placement_of
from compress.rounding.quantized_weight import QuantizedWeight
from compress.rounding.state import FLOAT8, GraphState, Range

INT8 = WeightScheme(8, -1)
Setting = tuple[Method, float]
"""How a range is chosen: (method, percentile)."""


def with_integer_layers(
    state: GraphState,
    names: Sequence[str],
    placement: Kind,
    attention: bool,
    dynamic: bool,
    rounded: Callable[[GraphLayer], QuantizedWeight],
) -> GraphState:
    """Return the state with these layers' weights `rounded` to eight bits, as `round_layer` does.

    Raises ValueError when a weight is not finite, or when the state holds such layers with other settings: they are one
    for the whole graph.
    """
    if state.integer and (state.placement, state.attention, state.dynamic) != (placement, attention, dynamic):
        raise ValueError(
            "an int8 pass before has another mode, placement or attention; put all layers into one int8 pass"
        )
    layers = {layer.name: layer for layer in find_layers(state.model)}
    weights = {name: rounded(layers[name]) for name in names}
    if state.integer and state.in_float8 != any(weight.values.dtype == FLOAT8 for weight in weights.values()):
        raise ValueError("a pass before computes other layers in another type of eight bits; one graph has one of them")
    return replace(
        state,
        integer=[*state.integer, *(name for name in names if layers[name].op != "Gather")],
        weight_only=[*state.weight_only, *(name for name in names if layers[name].op == "Gather")],
        weights={**state.weights, **weights},
        placement=placement,
        attention=attention,
        dynamic=dynamic,
    )


def round_layer(layer: GraphLayer, scheme: WeightScheme = INT8) -> QuantizedWeight:
    """Round to eight bits, one scale for each output channel (embeddings: column), or as the scheme has it.

    Of fewer bits than 8 the weights of products lie in so many, and are stored in 8. Raises ValueError naming the layer
    on NaN or Inf.
    """
    import torch

    from compress.rounding.grid import round_to_grid  # torch

    is_table = layer.op == "Gather"
    weight = np.ascontiguousarray(layer.matrix().T if is_table else layer.matrix())
    try:
        rounded = round_to_grid(torch.tensor(weight).flatten(1), INT8 if is_table else scheme, signed=False)
    except ValueError as error:
        raise ValueError(f"{layer.name}: {error}") from error
    return replace(rounded, values=rounded.values.reshape(weight.shape), bits=8)


def observe_state(state: GraphState, batches: Iterable[Feeds]) -> dict[str, Observer]:
    """Watch every tensor that the state's placement quantizes and every input of its layers (with channel means).

    Tensors that share another's range are among them: with fewer layers in int8 they may come to need their own.
    """
    axes: dict[str, int | None] = dict.fromkeys(placement_of(state).consumers) if not state.dynamic else {}
    for layer in integer_layers(state):
        axes[layer.data_input.name or ""] = 1 if layer.op == "Conv" else -1
    return observe(state.model, axes, batches)


def leave_unseen(state: GraphState, seen: Mapping[str, Observer]) -> tuple[GraphState, dict[str, str]]:
    """Return the state without the integer layers that read or give a tensor of which no range is known, and why.

    Other tensors without a range (sums, pools) are not rounded: `find_rounded_tensors` leaves them out.
    """
    state, why = replace(state, weights=dict(state.weights), biases=dict(state.biases)), dict[str, str]()
    for layer in integer_layers(state):
        for value in (layer.data_input, after_activation(layer.output)):
            observer = seen.get(value.name or "")
            if observer is not None and observer.trouble:
                why.setdefault(layer.name, f"tensor {value.name!r} has {observer.trouble}")
    for name in why:
        state.to_float(name)
    return state, why


def choose_ranges(seen: Mapping[str, Observer], setting: Callable[[str], Setting]) -> dict[str, Range]:
    """Choose a range for each observed tensor that has one; `setting` gives its method and percentile."""
    ranges = {}
    for name, observer in seen.items():
        if observer.trouble:
            continue
        method, percentile = setting(name)
        low, high = choose_range(observer, method, percentile)
        peak = choose_range(observer, method, percentile, symmetric=True)[1]
        ranges[name] = Range(low, high, peak)
    return ranges


def correct_biases(state: GraphState, seen: Mapping[str, Observer]) -> dict[str, np.ndarray]:
    """Return each integer layer's bias less the mean shift of its rounding; layers without a bias are left out."""
    biases = {}
    for layer in integer_layers(state):
        if layer.bias is None:
            continue
        mean = seen[layer.data_input.name or ""].channel_mean
        rounded = state.weights[layer.name].dequantize()
        shift = mean_shift(layer.matrix(), rounded, mean, layer.groups)
        biases[layer.name] = (constant(layer.bias).astype(np.float64) - shift).astype(np.float32)
    return biases


def tensors_of(model: ir.Model, layers: Iterable[str]) -> set[str]:
    """Return the tensors that are quantized before and after these layers: what a per-layer override applies to."""
    chosen = set(layers)
    tensors: set[str] = set()
    for layer in find_layers(model):
        if layer.name in chosen:
            tensors |= {layer.data_input.name or "", after_activation(layer.output).name or ""}
    return tensors


def mean_shift(weight: np.ndarray, rounded: np.ndarray, input_mean: np.ndarray, groups: int = 1) -> np.ndarray:
    """Return what rounding adds to each output's mean: (rounded - weight) applied to the input means.

    `weight`, `rounded`: [out, in / groups, *kernel]; `input_mean`: [in], the mean over samples and positions (positions
    that padding reaches are taken as if they were inside). Returns float64 [out].

    Nagel et al., Data-Free Quantization Through Weight Equalization and Bias Correction (2019), section 4.2, with the
    input means measured on calibration data. It depends on the weights' rounding alone, so it serves every variant.
    """
    difference = (rounded.astype(np.float64) - weight).reshape(*weight.shape[:2], -1).sum(axis=2)  # [out, in / groups]
    out, per_group = difference.shape
    means = input_mean.reshape(groups, per_group)  # [groups, in / groups]
    grouped = difference.reshape(groups, out // groups, per_group)  # [groups, out / groups, in / groups]
    shift: np.ndarray = np.einsum("goi,gi->go", grouped, means)  # [groups, out / groups]
    return shift.reshape(out)
