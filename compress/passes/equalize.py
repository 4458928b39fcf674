"""`equalize`: cross-layer equalization of channel ranges before int8 (Nagel et al., 2019, arXiv:1906.04721)."""

from __future__ import annotations

from typing import ClassVar, Literal

from compress.facts import LayerDecision, LayerFacts, ModelFacts, PassPlan
from compress.formats.targets import Target
from compress.passes.base import Pass
from compress.passes.choosing import choose_layers, pattern_problems, refuse_rounded
from compress.specs import LayerPattern


class Equalize(Pass):
    """Scale channels between two layers with nothing but a ReLU between them; exact, and free at run time."""

    needs_calibration: ClassVar[bool] = True
    calibration_runs: ClassVar[float] = 1.3

    kind: Literal["equalize"] = "equalize"
    ignore: tuple[LayerPattern, ...] = ()
    """Layers (the second of a pair) whose input is left as it is."""

    def unfit(self, layer: LayerFacts) -> str | None:
        """Return why this layer cannot be taken, or None."""
        return "an embedding reads no activation" if layer.type == "Embedding" else None

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        taken, kept = choose_layers(facts.layers, (), self.ignore, self.unfit)
        problems = pattern_problems(facts.layers, self.kind, {"ignore": self.ignore})
        if len(taken) < 2:
            problems += refuse_rounded(self.kind, facts) or ["equalize: the model has no two layers in a row"]
        decisions = [
            LayerDecision(layer.name, layer.type, "equalized", "where only a ReLU stands before it") for layer in taken
        ]
        return PassPlan(facts, (*decisions, *kept), (), tuple(problems))
