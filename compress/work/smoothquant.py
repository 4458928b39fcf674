"""The steps of the `smoothquant` pass on an ONNX graph: observe, search each group's strength, rewrite."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from compress.blocks.streamed import StreamedModel
from compress.context import PassContext, PassResult
from compress.errors import PassError
from compress.facts import LayerDecision
from compress.graph.layers import GraphLayer, find_layers
from compress.graph.run import clone
from compress.passes.choosing import choose_layers
from compress.passes.smoothquant import SmoothQuant
from compress.quantize.calibrate import collect_rows, observe
from compress.quantize.smooth import ALPHAS, COSTLY, FREE, search_smoothing
from compress.quantize.smooth_graph import apply_smoothing, foldable_norm, input_groups
from compress.quantize.state import GraphState
from compress.work.smoothquant_blocks import smoothquant_blocks


def apply_smoothquant(knobs: SmoothQuant, model: GraphState | StreamedModel, context: PassContext) -> PassResult:
    if isinstance(model, GraphState):
        return _smooth_graph(knobs, model, context)
    return smoothquant_blocks(knobs, model, context)


def _smooth_graph(knobs: SmoothQuant, state: GraphState, context: PassContext) -> PassResult:
    model = clone(state.model)
    taken, kept = choose_layers(state.facts(), (), knobs.ignore, knobs.unfit)
    wanted = {layer.name for layer in taken}
    all_groups = input_groups(find_layers(model))
    groups = {name: group for name, group in all_groups.items() if all(layer.name in wanted for layer in group)}
    left = [
        layer for name, group in all_groups.items() if name not in groups for layer in group if layer.name in wanted
    ]
    kept += [
        LayerDecision(layer.name, layer.type, "kept", f"reads {layer.data_input.name} with a layer that is kept")
        for layer in left
    ]
    try:
        seen = observe(model, dict.fromkeys(groups, -1), context.progress(context.batches, "smoothquant: observing"))
    except ValueError as error:
        raise PassError(f"smoothquant: {error}") from error
    rows = collect_rows(model, groups, context.batches, knobs.rows, context.seed)
    alphas = ALPHAS if knobs.alpha is None else (knobs.alpha,)
    decisions, measured = [], {}
    for name in context.progress(list(groups), "smoothquant: searching"):
        group, peak = groups[name], seen[name].channel_peak
        assert peak is not None
        _check_weights(group)
        gain = float("inf") if knobs.alpha is not None else FREE if foldable_norm(group) is not None else COSTLY
        smoothing = search_smoothing(rows[name], peak, [layer.matrix() for layer in group], alphas, gain)
        how = "left alone: no strength lowers the error enough"
        if smoothing.scales is not None:
            how = f"alpha {smoothing.alpha:g}, {apply_smoothing(model, group, smoothing.scales)}"
        for layer in group:
            decisions.append(
                LayerDecision(layer.name, layer.type, "smoothed" if smoothing.scales is not None else "kept", how)
            )
            measured[layer.name] = {"error_before": smoothing.error_before, "error_after": smoothing.error_after}
    return PassResult(replace(state, model=model), (*decisions, *kept), (), measured)


def _check_weights(group: list[GraphLayer]) -> None:
    for layer in group:
        if not np.isfinite(layer.matrix()).all():
            raise PassError(f"smoothquant: {layer.name}: the weight holds NaN or Inf")
