"""Work the `smoothquant` pass: observe, search each group's strength, rewrite; on an ONNX graph or a torch model.

A torch model's inputs are scaled by row, for W8A8, and scales are folded where that is exact.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from compress.blocks.block import BlockWork
from compress.blocks.folding import tie_scales
from compress.blocks.sharing import gather_from_processes
from compress.blocks.stream import Stream
from compress.blocks.streamed import StreamedModel
from compress.context import PassContext, PassResult
from compress.errors import PassError
from compress.facts import InputGroup, LayerDecision, LayerFacts, ModelFacts
from compress.graph.layers import GraphLayer, find_layers
from compress.graph.run import clone
from compress.passes.choosing import choose_layers
from compress.passes.smoothquant import SmoothQuant
from compress.rounding.observers import collect_rows, observe
from compress.rounding.smooth import (
    ALPHAS,
    COSTLY,
    FREE,
    Smoothing,
    apply_smoothing,
    foldable_norm,
    input_groups,
    search_smoothing,
)
from compress.rounding.state import GraphState
from compress.work.block_layers import block_facts, fold_into

ROWS = 1024
"""Of the calibration data, on which the search measures the error of the int8 product."""


def apply_smoothquant(
    config: SmoothQuant, model: GraphState | StreamedModel, context: PassContext
) -> PassResult[GraphState | StreamedModel]:
    if isinstance(model, GraphState):
        return _smooth_graph(config, model, context)
    stream = Stream(model, context)
    for block in stream:
        _BlockSmoothing(config, block, context).run()
    return stream.result()


def _smooth_graph(config: SmoothQuant, state: GraphState, context: PassContext) -> PassResult[GraphState]:
    model = clone(state.model)
    taken, kept = choose_layers(state.facts(), (), config.ignore, config.unfit)
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
    unseen = {name: groups.pop(name) for name, observer in seen.items() if observer.trouble}
    kept += [
        LayerDecision(layer.name, layer.type, "kept", f"tensor {name!r} has {seen[name].trouble}")
        for name, group in unseen.items()
        for layer in group
    ]
    rows = collect_rows(model, groups, context.batches, ROWS, context.seed)
    alphas = ALPHAS if config.alpha is None else (config.alpha,)
    decisions, measured = [], {}
    for name in context.progress(list(groups), "smoothquant: searching"):
        group, peak = groups[name], seen[name].channel_peak
        assert peak is not None
        _check_weights(group)
        gain = float("inf") if config.alpha is not None else FREE if foldable_norm(group) is not None else COSTLY
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


def foresee_smoothquant(config: SmoothQuant, model: GraphState, facts: ModelFacts, context: PassContext) -> GraphState:
    """Return the graph with a multiplication before each group that no norm can take the scales of.

    A search may leave groups alone, so that the result may be faster than this; it is not slower.
    """
    graph = clone(model.model)
    wanted = {layer.name for layer in choose_layers(model.facts(), (), config.ignore, config.unfit)[0]}
    for group in input_groups(find_layers(graph)).values():
        if all(layer.name in wanted for layer in group) and foldable_norm(group) is None:
            width = group[0].matrix().shape[1]
            apply_smoothing(graph, group, np.full(width, 2.0, np.float32))  # ones would be optimized away
    return replace(model, model=graph)


def _check_weights(group: list[GraphLayer]) -> None:
    for layer in group:
        if not np.isfinite(layer.matrix()).all():
            raise PassError(f"smoothquant: {layer.name}: the weight holds NaN or Inf")


class _Sample:
    """Of what one input group reads: some rows of each micro-batch, and each channel's largest magnitude."""

    def __init__(self) -> None:
        self.rows: list[Tensor] = []
        self.peak: Tensor | None = None

    def add(self, rows: Tensor, n: int) -> None:
        if len(rows):
            self.rows.append(rows[:: -(-len(rows) // n)].to("cpu", copy=True))
            peak = rows.abs().amax(0).cpu()
            self.peak = peak if self.peak is None else torch.maximum(self.peak, peak)


class _BlockSmoothing:
    """One block."""

    def __init__(self, config: SmoothQuant, block: BlockWork, context: PassContext) -> None:
        self.config, self.block = config, block
        taken, self.kept = choose_layers(block_facts(block), (), config.ignore, config.unfit)
        self.facts = {layer.name: layer for layer in taken}
        self.samples: dict[InputGroup, _Sample] = {}
        self.n_each = max(1, ROWS // max(1, len(context.batches)))

    def run(self) -> None:
        able = [input_group for input_group in self.block.input_groups if self._find_obstacle(input_group) is None]
        if able:
            self.block.collect(self._visit, able)
        for input_group in self.block.input_groups:
            names = [name for name in input_group.layers if name in self.facts]
            smoothed, how = self._smooth(input_group)
            self._report([self.facts.pop(name) for name in names], "smoothed" if smoothed else "kept", how)
        self._report(list(self.facts.values()), "kept", "nothing reads it in a forward pass")
        self.block.say(decisions=self.kept)

    def _visit(self, input_group: InputGroup, rows: Tensor) -> None:
        self.samples.setdefault(input_group, _Sample()).add(rows, self.n_each)

    def _find_obstacle(self, input_group: InputGroup) -> str | None:
        """Return why this reading cannot be smoothed, or None."""
        if not input_group.source:
            return "left alone: no module before it can take a scale exactly"
        if other := [name for name in input_group.layers if name not in self.facts]:
            return f"left alone: it reads a tensor with {other[0]}, which is kept"
        if input_group.source in self.block.quantized:
            return f"left alone: {input_group.source} is rounded already"
        return None

    def _smooth(self, input_group: InputGroup) -> tuple[bool, str]:
        """Smooth an input group; return whether it was done, and how or why not."""
        if obstacle := self._find_obstacle(input_group):
            return False, obstacle
        samples = [
            sample
            for sample in gather_from_processes(self.samples.pop(input_group, None))
            if sample is not None and sample.rows
        ]
        if not samples:
            return False, "left alone: no calibration data reaches it"
        rows = torch.cat([part for sample in samples for part in sample.rows]).numpy()
        peak = torch.stack([sample.peak for sample in samples]).amax(0).numpy()
        if not np.isfinite(peak).all():
            return False, "left alone: NaN or Inf among its inputs on the calibration data"
        smoothing = self._search(input_group, rows, peak)
        errors = {"error_before": smoothing.error_before, "error_after": smoothing.error_after}
        self.block.say(measured=dict.fromkeys(input_group.layers, errors))
        if smoothing.scales is None:
            return False, "left alone: no strength lowers the error enough"
        fold_into(self.block, input_group, torch.from_numpy(smoothing.scales))
        return True, f"alpha {smoothing.alpha:g}, folded into {input_group.source.rpartition('.')[2]}"

    def _search(self, input_group: InputGroup, rows: np.ndarray, peak: np.ndarray) -> Smoothing:
        config = self.config
        alphas, gain = (ALPHAS, FREE) if config.alpha is None else ((config.alpha,), float("inf"))
        weights = [self.block.matrix(name).cpu().numpy() for name in input_group.layers]
        return search_smoothing(rows, peak, weights, alphas, gain, partial(_tie, input_group), by_row=True)

    def _report(self, layers: list[LayerFacts], action: str, how: str) -> None:
        self.block.say(decisions=[LayerDecision(layer.name, layer.type, action, how) for layer in layers])


def _tie(input_group: InputGroup, scales: np.ndarray) -> np.ndarray:
    return tie_scales(input_group, torch.from_numpy(scales)).numpy()
