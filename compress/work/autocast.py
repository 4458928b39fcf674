"""The work of `autocast`: which nodes of the graph stay float32, for their values could overflow the smaller type."""

from __future__ import annotations

from dataclasses import replace

from compress.context import PassResult
from compress.errors import PassError
from compress.facts import LayerDecision, ModelFacts, Note
from compress.graph.half import layer_nodes
from compress.graph.layers import find_layers
from compress.passes.autocast import Autocast
from compress.passes.choosing import choose_layers
from compress.rounding.ranges import overflowing_nodes
from compress.rounding.state import GraphState
from compress.work.contexts import GraphContext


def apply_autocast(config: Autocast, state: GraphState, context: GraphContext) -> PassResult[GraphState]:
    """Record the type to compute in, and the nodes that stay float32 because of their range. Raises PassError."""
    taken, kept = choose_layers(state.facts(), (), config.ignore, config.unfit)
    try:
        batches = context.progress(context.batches, "autocast: observing")
        overflowing = overflowing_nodes(state.model, config.dtype, config.headroom, batches)
    except ValueError as error:
        raise PassError(f"autocast: {error}") from error
    ignored = {decision.layer for decision in kept if decision.reason.startswith("ignore")}
    nodes = {layer.name: layer_nodes(layer) for layer in find_layers(state.model)}
    stays = sorted({*overflowing, *(node for name in ignored for node in nodes[name])})
    if taken and all(nodes[layer.name][0] in overflowing for layer in taken):
        raise PassError(f"autocast: {_explain_nothing_left(config, overflowing)}")
    notes = []
    if overflowing:
        named = ", ".join(f"{name} (largest value {peak:.3g})" for name, peak in sorted(overflowing.items()))
        notes.append(Note("warning", f"autocast: could overflow {config.dtype} and stay float32: {named}"))
    decisions = [
        LayerDecision(layer.name, layer.type, "float32", "could overflow")
        if nodes[layer.name][0] in overflowing
        else LayerDecision(layer.name, layer.type, config.dtype)
        for layer in taken
    ]
    return PassResult(replace(state, half=config.dtype, half_kept=stays), (*decisions, *kept), tuple(notes))


def foresee_autocast(config: Autocast, state: GraphState, facts: ModelFacts, context: GraphContext) -> GraphState:
    """Return the state computed in the smaller type throughout: nothing is known of values that could overflow it."""
    return replace(state, half=config.dtype)


def _explain_nothing_left(config: Autocast, overflowing: dict[str, float]) -> str:
    """Say that every layer would have to stay float32, and the way out."""
    node, peak = max(overflowing.items(), key=lambda item: item[1])
    way_out = "use dtype: bfloat16, or ask for less headroom" if config.dtype == "float16" else "leave the pass out"
    return (
        f"every layer could overflow {config.dtype} (the largest value, {peak:.3g}, is at {node}; headroom "
        f"{config.headroom:g}), so nothing can be computed in it: {way_out}"
    )
