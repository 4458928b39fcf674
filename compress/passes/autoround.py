"""`autoround`: rounding learned block by block by the sign of the gradient (arXiv:2309.05516)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from compress.facts import ModelFacts, PassPlan
from compress.formats.targets import Format, Target
from compress.passes.base import DataSize, PassCost, Stage
from compress.passes.tune import LEARNED_FORWARDS, STEP_ROWS, count_state_bytes, plan_from_integers
from compress.passes.weight_only import WeightPass


class AutoRound(WeightPass):
    """Learn each block's rounding and the ends of its ranges, so that it gives what the float block gave."""

    needs_calibration: ClassVar[bool] = True
    calibration_runs: ClassVar[float] = 2.0

    kind: Literal["autoround"] = "autoround"
    steps: Annotated[int, Field(ge=0)] = 200
    """For each block; each takes about 2048 rows (tokens)."""
    rate: Annotated[float, Field(ge=0)] | None = None
    """How far one step moves the rounding, in levels, and the ends of a range, as a part of them; empty: 1 / steps, as
    in the paper."""
    held_out: Annotated[float, Field(ge=0, le=0.5)] = 0.125
    """Part of the micro-batches, the last, on which the best state is chosen; none worse than the start is kept."""
    start: Literal["nearest", "given"] = "nearest"
    """nearest: float layers, rounded to the nearest first; given: go on from the integers that an earlier pass left."""

    def stage_on(self, facts: ModelFacts) -> Stage:
        return "blocks"

    @property
    def formats(self) -> tuple[Format, ...]:
        return () if self.start == "given" else super().formats

    def estimate_cost(self, facts: ModelFacts, data: DataSize) -> PassCost:
        cost = super().estimate_cost(facts, data)
        learned = LEARNED_FORWARDS * self.steps * STEP_ROWS / data.sample_rows
        disk_bytes = count_state_bytes(facts, whole=False)
        return replace(cost, forwards=cost.forwards + learned, disk_bytes=disk_bytes, float_blocks=True)

    def shorten(self, share: float) -> AutoRound:
        """Return the pass with this share of its steps."""
        return self.model_copy(update={"steps": max(round(self.steps * share), 1) if self.steps else 0})

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        if facts.has_two_chains:
            return PassPlan(
                facts, problems=("autoround: learns one chain of blocks, and this model has two; use gptq",)
            )
        if facts.structure is None:
            return PassPlan(facts, problems=("autoround: works on torch models; an ONNX file has no blocks to learn",))
        if self.start == "given":
            return plan_from_integers(self, facts)
        return super().check(facts, target)
