"""`fold_batchnorm`: batch normalisation becomes part of the convolution before it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from compress.facts import LayerDecision, ModelFacts, PassPlan
from compress.passes.base import Pass
from compress.targets import Target

if TYPE_CHECKING:
    from compress.context import PassContext, PassResult


class FoldBatchNorm(Pass):
    """Fold every BatchNormalization that alone reads a convolution; exact in real arithmetic."""

    kind: Literal["fold_batchnorm"] = "fold_batchnorm"

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        problems = []
        if not any("batchnorm" in operator.lower().replace("_", "") for operator in facts.operators):
            problems.append("fold_batchnorm: the model has no batch normalisation; remove the pass")
        rounded = [la.name for la in facts.layers if la.op == "Conv" and la.bits < 16]
        if rounded:
            problems.append(f"fold_batchnorm: must come before the pass that rounds {rounded[0]}")
        decisions = [LayerDecision(la.name, la.type, "folded into", "") for la in facts.layers if la.op == "Conv"]
        return PassPlan(facts, tuple(decisions), (), tuple(problems))

    def apply(self, model: Any, context: PassContext) -> PassResult:
        """`model`: a GraphState whose float graph is rewritten."""
        from compress.context import PassResult
        from compress.graph.batchnorm import fold_batchnorms  # onnx-ir
        from compress.graph.run import clone

        graph = clone(model.model)
        folded = fold_batchnorms(graph)
        decisions = tuple(LayerDecision(name, "BatchNorm", "folded") for name in folded)
        return PassResult(replace(model, model=graph), decisions)
