"""`hqq`: weights rounded without data to a grid that leaves few large errors (half-quadratic quantization)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from compress.facts import ModelFacts, PassPlan
from compress.formats.targets import Target
from compress.passes.base import Stage
from compress.passes.weight_only import WeightPass, with_problems


class Hqq(WeightPass):
    """Half-quadratic quantization (Badri & Shaji, 2023): scales and zero points fitted to the weights alone; data is
    read where bits of tables are to be chosen."""

    stage: ClassVar[Stage] = "blocks"

    kind: Literal["hqq"] = "hqq"
    steps: Annotated[int, Field(ge=1)] = 20
    """Of the half-quadratic solver."""

    @property
    def needs_calibration(self) -> bool:  # type: ignore[override]
        return bool(self.open_tables)

    @property
    def needs_forward(self) -> bool:
        return self.needs_calibration

    def stage_on(self, facts: ModelFacts) -> Stage:
        return "blocks"

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        plan = super().check(facts, target)
        odd = sorted({s.name for s in self.schemes() if s.weights.kind == "float" or s.activations is not None})
        return with_problems(plan, [f"hqq: {name}: fits integers to weights alone; use rtn or gptq" for name in odd])
