"""The work of `equalize`: for each pair of layers the channels of the float graph are brought together."""

from __future__ import annotations

from dataclasses import replace

from compress.context import PassResult
from compress.errors import PassError
from compress.facts import LayerDecision
from compress.graph.layers import find_layers
from compress.graph.run import clone
from compress.passes.choosing import choose_layers
from compress.passes.equalize import Equalize
from compress.rounding.equalize import equalize_pair, find_pairs, input_channel_peak
from compress.rounding.observers import observe
from compress.rounding.smooth import smoothing_scales
from compress.rounding.state import GraphState
from compress.work.contexts import GraphContext


def apply_equalize(config: Equalize, state: GraphState, context: GraphContext) -> PassResult[GraphState]:
    """Equalize the channel ranges of layers that follow each other in the float graph. Raises PassError."""
    graph = clone(state.model)
    taken, kept = choose_layers(state.facts(), (), config.ignore, config.unfit)
    wanted = {layer.name for layer in taken}
    pairs = [
        pair
        for pair in find_pairs(find_layers(graph))
        if pair.second.name in wanted and pair.first.name not in state.weights
    ]
    axes = {pair.tensor: 1 if pair.second.op == "Conv" else -1 for pair in pairs}
    try:
        seen = observe(graph, axes, context.progress(context.batches, "equalize: observing")) if axes else {}
    except ValueError as error:
        raise PassError(f"equalize: {error}") from error
    decisions = {
        layer.name: LayerDecision(layer.name, layer.type, "kept", "not alone behind a layer and a ReLU")
        for layer in taken
    }
    for pair in pairs:
        name, observer = pair.second.name, seen[pair.tensor]
        if observer.trouble:
            why = f"tensor {pair.tensor!r} has {observer.trouble}"
            decisions[name] = LayerDecision(name, pair.second.type, "kept", why)
            continue
        peak = observer.channel_peak
        assert peak is not None
        # Half of the spread between channels moves to the weight that reads it: both ranges then are their geometric
        # mean, as published (Nagel et al., 2019).
        equalize_pair(graph, pair, smoothing_scales(peak, input_channel_peak(pair.second), 0.5))
        decisions[name] = LayerDecision(name, pair.second.type, "equalized", f"with {pair.first.name}")
    return PassResult(replace(state, model=graph), (*decisions.values(), *kept))
