"""`autocast`: float16 or bfloat16 where the ranges seen on calibration data allow it, float32 elsewhere."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from compress.facts import LayerDecision, LayerFacts, ModelFacts, PassPlan
from compress.formats.targets import Format, Target
from compress.passes.base import Pass
from compress.passes.choosing import choose_layers, pattern_problems, target_word
from compress.specs import LayerPattern


class Autocast(Pass):
    """Half precision with range checks: a node whose values could overflow stays float32 and is named."""

    needs_calibration: ClassVar[bool] = True
    calibration_runs: ClassVar[float] = 1.3

    kind: Literal["autocast"] = "autocast"
    dtype: Literal["float16", "bfloat16"] = "float16"
    """What the rest is computed in."""
    headroom: Annotated[float, Field(ge=1)] = 4.0
    """A node stays float32 if its largest value seen times this overflows."""
    ignore: tuple[LayerPattern, ...] = ()
    """Layers that stay float32, by name, `re:` pattern or type."""

    def unfit(self, layer: LayerFacts) -> str | None:
        """Return None: every float layer can be cast."""
        return None

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        taken, kept = choose_layers(facts.layers, (), self.ignore, self.unfit)
        notes, problems = target_word(target, self.dtype, self.kind)
        problems += pattern_problems(facts.layers, self.kind, {"ignore": self.ignore})
        decisions = [LayerDecision(layer.name, layer.type, self.dtype) for layer in taken]
        after = facts.with_bits({layer.name: 16 for layer in taken})
        return PassPlan(after, (*decisions, *kept), tuple(notes), tuple(problems))

    @property
    def formats(self) -> tuple[Format, ...]:
        return (self.dtype,)
