"""`fold_batchnorm`: batch normalisation becomes part of the convolution before it."""

from __future__ import annotations

from typing import Literal

from compress.facts import LayerDecision, ModelFacts, PassPlan
from compress.formats.targets import Target
from compress.passes.base import Pass


class FoldBatchNorm(Pass):
    """Fold every BatchNormalization that alone reads a convolution; exact in real arithmetic."""

    kind: Literal["fold_batchnorm"] = "fold_batchnorm"

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        problems = []
        if not any("batchnorm" in operator.lower().replace("_", "") for operator in facts.operators):
            problems.append("fold_batchnorm: the model has no batch normalisation; remove the pass")
        rounded = [layer.name for layer in facts.layers if layer.op == "Conv" and layer.bits < 16]
        if rounded:
            problems.append(f"fold_batchnorm: must come before the pass that rounds {rounded[0]}")
        decisions = [
            LayerDecision(layer.name, layer.type, "folded into", "") for layer in facts.layers if layer.op == "Conv"
        ]
        return PassPlan(facts, tuple(decisions), (), tuple(problems))
