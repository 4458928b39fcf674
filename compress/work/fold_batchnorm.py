"""The work of `fold_batchnorm`: the float graph is rewritten."""

from __future__ import annotations

from dataclasses import replace

from compress.context import PassResult
from compress.facts import LayerDecision, ModelFacts
from compress.graph.convolutions import fold_channel_scales
from compress.graph.run import clone
from compress.passes.fold_batchnorm import FoldBatchNorm
from compress.rounding.state import GraphState
from compress.work.contexts import GraphContext


def apply_fold_batchnorm(config: FoldBatchNorm, state: GraphState, context: GraphContext) -> PassResult[GraphState]:
    """Fold every batch normalisation of the float graph into the convolution before it."""
    graph = clone(state.model)
    folded = fold_channel_scales(graph)
    decisions = tuple(LayerDecision(name, "BatchNorm", "folded") for name in folded)
    return PassResult(replace(state, model=graph), decisions)


def foresee_fold_batchnorm(
    config: FoldBatchNorm, state: GraphState, facts: ModelFacts, context: GraphContext
) -> GraphState:
    """Fold them: it asks for no data."""
    return apply_fold_batchnorm(config, state, context).model
