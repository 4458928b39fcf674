"""`smoothquant`: move activation outliers into the weights before int8 (Xiao et al., 2022, arXiv:2211.10438)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from compress.facts import LayerDecision, LayerFacts, ModelFacts, Note, PassPlan
from compress.formats.targets import Target
from compress.passes.base import Pass, Stage
from compress.passes.choosing import choose_layers, pattern_problems, refuse_rounded
from compress.specs import LayerPattern
from runtime.tasks import find_task


class SmoothQuant(Pass):
    """Per-channel scaling of what matrix products read, folded into the normalisation before where that is exact."""

    needs_calibration: ClassVar[bool] = True
    calibration_runs: ClassVar[float] = 2.2

    kind: Literal["smoothquant"] = "smoothquant"
    alpha: Annotated[float, Field(ge=0, le=1)] | None = None
    """How much of the difficulty moves from activations to weights. Not given: searched for each group of layers, which
    may also be left alone; a fixed 0.5 ruins layers whose inputs have a few huge channels."""
    ignore: tuple[LayerPattern, ...] = ()
    """Layers whose input is left as it is (a whole group that reads one tensor is left if one of its layers is)."""

    def stage_on(self, facts: ModelFacts) -> Stage:
        """Return "blocks" for a decoder, smoothed in torch for W8A8 in a checkpoint; "graph" for others, for `int8`."""
        return "blocks" if facts.source == "torch" and find_task(facts.task).decoder_only else "graph"

    def unfit(self, layer: LayerFacts) -> str | None:
        """Return why this layer cannot be taken, or None."""
        return None if layer.op in ("MatMul", "Gemm") else "not a matrix product"

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        taken, kept = choose_layers(facts.layers, (), self.ignore, self.unfit)
        problems = pattern_problems(facts.layers, self.kind, {"ignore": self.ignore})
        if not taken:
            nothing = "smoothquant: the model has no float matrix product to smooth"
            problems += refuse_rounded(self.kind, facts) or [nothing]
        how = "alpha searched" if self.alpha is None else f"alpha {self.alpha:g}"
        decisions = [LayerDecision(layer.name, layer.type, "smoothed", how) for layer in taken]
        text = (
            "where no norm before a layer can take its scales, smoothing costs a multiplication at run time, if it is "
            "worth it; a forecast of speed counts all of these"
        )
        if self.stage_on(facts) == "blocks":
            text = "what cannot be folded into the module before is left alone"
        return PassPlan(facts, (*decisions, *kept), (Note("info", f"smoothquant: {text}"),), tuple(problems))
