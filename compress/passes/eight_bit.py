"""What the graph passes that compute in eight bits share: which layers they take, when layers go back to float."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from compress.facts import LayerDecision, LayerFacts, ModelFacts, PassPlan
from compress.passes.base import LayerPattern, Pass, Record
from compress.passes.choosing import choose_layers, pattern_problems, refusal, target_word
from compress.targets import Format, Target

if TYPE_CHECKING:
    from compress.context import PassContext, PassResult

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
        """What targets have a word on."""
        raise NotImplementedError

    @property
    def scheme(self) -> str:
        """For people."""
        raise NotImplementedError

    @property
    def is_dynamic(self) -> bool:
        """True if ranges are measured at run time."""
        return False

    @property
    def placement_is_given(self) -> bool:
        """True if the recipe says which tensors are quantized, so that a pass may not leave some out."""
        return False

    def unfit(self, layer: LayerFacts) -> str | None:
        """Why this layer cannot be taken, or None."""
        raise NotImplementedError

    def placed(self) -> Placement:
        """Which tensors are quantized."""
        return "inputs"

    def choose(self, layers: tuple[LayerFacts, ...]) -> tuple[list[LayerFacts], list[LayerDecision]]:
        return choose_layers(layers, self.targets, self.ignore, self.unfit)

    def patterns(self) -> dict[str, tuple[LayerPattern, ...]]:
        """Key -> what it selects layers by."""
        return {"targets": self.targets, "ignore": self.ignore}

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        taken, kept = self.choose(facts.layers)
        notes, problems = target_word(target, self.format, self.kind)
        problems += pattern_problems(facts.layers, self.kind, self.patterns())
        if not any(layer.type != "Embedding" for layer in taken):
            reasons = "; ".join(sorted({decision.reason for decision in kept})) or "the model has no such layer"
            problems.append(f"{self.kind}: no convolution or matrix product is left to quantize ({reasons})")
        decisions = [
            LayerDecision(la.name, la.type, self.number, self.scheme if la.type != "Embedding" else "W8")
            for la in taken
        ]
        after = facts.with_bits({layer.name: 8 for layer in taken})
        return PassPlan(after, (*decisions, *kept), tuple(notes), tuple(problems))

    def refused_by(self, target: Target) -> str | None:
        return refusal(target, self.format, self.kind)

    def apply(self, model: Any, context: PassContext) -> PassResult:
        """`model`: a GraphState. Observes, rounds, corrects, looks for a collapse, restores layers if gates ask."""
        from compress.passes.eight_bit_steps import apply_eight_bit  # not at `compress check`: onnxruntime

        return apply_eight_bit(self, model, context)
