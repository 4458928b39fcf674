"""`fold_batchnorm`: batch normalisation becomes part of the convolution before it."""

from __future__ import annotations

from typing import Literal

from compress.facts import LayerDecision, ModelFacts, Note, PassPlan
from compress.formats.targets import Target
from compress.passes.base import Pass
from compress.passes.choosing import refuse_rounded


class FoldBatchNorm(Pass):
    """Fold every BatchNormalization (and scale or shift of each channel) that alone reads a convolution into it; exact
    in real arithmetic."""

    kind: Literal["fold_batchnorm"] = "fold_batchnorm"

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        problems, notes = [], []
        if facts.source == "onnx":
            notes.append(
                Note("info", "fold_batchnorm: an ONNX file is cleaned of what can be folded before all passes")
            )
        elif not any("batchnorm" in operator.lower().replace("_", "") for operator in facts.operators):
            problems.append("fold_batchnorm: the model has no batch normalisation; remove the pass")
        problems += refuse_rounded(self.kind, facts, "Conv")
        decisions = [
            LayerDecision(layer.name, layer.type, "folded into", "") for layer in facts.layers if layer.op == "Conv"
        ]
        return PassPlan(facts, tuple(decisions), tuple(notes), tuple(problems))
