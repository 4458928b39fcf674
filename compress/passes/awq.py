"""`awq`: inputs that matter get larger weights before rounding, folded into what gives them (arXiv:2306.00978)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from compress.facts import LayerDecision, LayerFacts, ModelFacts, PassPlan
from compress.formats.schemes import Scheme
from compress.formats.targets import Target
from compress.passes.base import Stage
from compress.passes.calibrated import CalibratedWeightPass
from compress.passes.weight_only import with_problems


class Awq(CalibratedWeightPass):
    """Activation-aware scales for each input group that a module before it can take them from, then ranges that clip.

    Where the scheme rounds inputs, too, the search counts what that loses under the scales, on a sample of rows.
    With `round: false` the weights stay float and only carry the scales, chosen for the scheme given here: a `gptq`,
    `autoround` or `tune` after it rounds them.
    """

    stage: ClassVar[Stage] = "blocks"
    calibration_runs: ClassVar[float] = 4.0

    kind: Literal["awq"] = "awq"
    round: bool = True
    """Round the weights, too."""
    steps: Annotated[int, Field(ge=1)] = 20
    """Exponents tried for each input group."""

    def stage_on(self, facts: ModelFacts) -> Stage:
        return "blocks"

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        plan = super().check(facts, target)
        plan = with_problems(plan, sorted({text for s in self.schemes() if (text := self._refuse_scheme(s))}))
        if facts.structure is not None and not any(input_group.source for input_group in facts.structure.input_groups):
            plan = with_problems(
                plan, ["awq: no layer's inputs come from a module that can take a scale; use rtn or gptq"]
            )
        return plan if self.round else replace(plan, facts=facts, schemes={})

    def _refuse_scheme(self, scheme: Scheme) -> str | None:
        """Return why the pass cannot scale for this scheme; None where it can."""
        inputs = scheme.activations
        if inputs is None or not self.round:
            return None
        if inputs.has_stored_scale:
            then = f"{{kind: awq, round: false, scheme: {scheme.name}}}, then {{kind: gptq, scheme: {scheme.name}}}"
            return f"awq: {scheme.name}: inputs have stored scales, to be measured after awq has scaled them; {then}"
        if scheme.weights.bits == 8 and scheme.weights.scales == "float":
            return f"awq: {scheme.name}: what 8-bit weights lose is less than what their inputs lose; use smoothquant"
        return None

    def decision(self, layer: LayerFacts, target: Target) -> LayerDecision:
        planned = super().decision(layer, target)
        return planned if self.round else replace(planned, action="scaled", reason=f"for {planned.reason}")
