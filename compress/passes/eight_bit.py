"""What the graph passes that compute in eight bits share: which layers they take, when layers go back to float."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from compress.facts import LayerDecision, LayerFacts, ModelFacts, PassPlan
from compress.formats.targets import Format, Target
from compress.passes.base import Pass
from compress.passes.choosing import choose_layers, pattern_problems, refusal, target_word
from compress.specs import LayerPattern, Record

Number = Literal["int8", "fp8"]
Calibration = Literal["minmax", "percentile", "entropy", "mse"]
Placement = Literal["auto", "all", "inputs"]


class Restore(Record):
    """When the quality gates do not hold, return the most sensitive layers to float until they do or a budget ends."""

    max_layers: Annotated[int, Field(ge=0)] = 8
    """Layers to return at most; 0: the gates are not looked at."""
    max_minutes: Annotated[float, Field(gt=0)] = 10.0
    """Time to spend at most."""
    samples: Annotated[int, Field(ge=1)] = 64
    """Calibration samples used to measure each layer's sensitivity."""


class EightBit(Pass):
    """Weights and activations in eight bits: one scale for each tensor of activations, calibrated."""

    needs_calibration: ClassVar[bool] = True
    calibration_runs: ClassVar[float] = 1.6
    uses_gates: ClassVar[bool] = True
    number: ClassVar[Number]

    attention: bool = False
    """With placement inputs: also quantize the products of two activations (queries with keys, scores with values)."""
    bias_correction: bool = True
    """Take the mean shift that weight rounding causes out of each layer's bias."""
    targets: tuple[LayerPattern, ...] = ()
    """Layers to quantize, by name, `re:` pattern or type; empty: all that can be."""
    ignore: tuple[LayerPattern, ...] = ()
    """Layers that stay float."""
    restore: Restore = Restore()
    """What to do when the quality gates do not hold."""

    @property
    def format(self) -> Format:
        """Return the format under which targets say what they do with the result."""
        raise NotImplementedError

    @property
    def scheme(self) -> str:
        """Return the scheme's name for people."""
        raise NotImplementedError

    @property
    def is_dynamic(self) -> bool:
        """Return whether ranges are measured at run time."""
        return False

    @property
    def placement_is_given(self) -> bool:
        """Return whether the recipe says which tensors are quantized, so that a pass may not leave some out."""
        return False

    def unfit(self, layer: LayerFacts) -> str | None:
        """Return why this layer cannot be taken, or None."""
        raise NotImplementedError

    def choose_tensors(self) -> Placement:
        """Return which tensors are quantized."""
        return "inputs"

    def choose(self, layers: tuple[LayerFacts, ...]) -> tuple[list[LayerFacts], list[LayerDecision]]:
        return choose_layers(layers, self.targets, self.ignore, self.unfit)

    def patterns(self) -> dict[str, tuple[LayerPattern, ...]]:
        """Return each key of the recipe that selects layers -> its patterns."""
        return {"targets": self.targets, "ignore": self.ignore}

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        taken, kept = self.choose(facts.layers)
        notes, problems = target_word(target, self.format, self.kind)
        problems += pattern_problems(facts.layers, self.kind, self.patterns())
        if not any(layer.type != "Embedding" for layer in taken):
            reasons = "; ".join(sorted({decision.reason for decision in kept})) or "the model has no such layer"
            problems.append(f"{self.kind}: no convolution or matrix product is left to quantize ({reasons})")
        decisions = [
            LayerDecision(layer.name, layer.type, self.number, self.scheme if layer.type != "Embedding" else "W8")
            for layer in taken
        ]
        after = facts.with_bits({layer.name: 8 for layer in taken})
        return PassPlan(after, (*decisions, *kept), tuple(notes), tuple(problems))

    def explain_refusal(self, target: Target) -> str | None:
        return refusal(target, self.format, self.kind)
