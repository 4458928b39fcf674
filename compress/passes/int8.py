"""`int8`: weights and activations in eight bits (W8A8), static or dynamic. The arithmetic is in `compress.quantize`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from compress.facts import LayerDecision, LayerFacts, ModelFacts, PassPlan
from compress.passes.base import LayerPattern, Pass, Record
from compress.passes.choosing import choose_layers, pattern_problems, refusal, target_word
from compress.targets import Target

if TYPE_CHECKING:
    from compress.context import PassContext, PassResult

Calibration = Literal["minmax", "percentile", "entropy", "mse"]
SMALL_TABLE = 4096
"""Embeddings with fewer weights stay float: there is nothing to gain."""


class Int8Override(Record):
    """Other settings for the layers that `targets` selects (names, `re:` patterns or types)."""

    targets: tuple[LayerPattern, ...]
    """Layer names, `re:` patterns or types."""
    calibration: Calibration | None = None
    """How the ranges of what these layers read and give are chosen."""
    percentile: Annotated[float, Field(gt=50, le=100)] | None = None
    """Of these ranges, with calibration: percentile."""


class Restore(Record):
    """When the quality gates do not hold, return the most sensitive layers to float until they do or a budget ends."""

    max_layers: Annotated[int, Field(ge=0)] = 8
    """Layers to return at most; 0: the gates are not looked at."""
    max_minutes: Annotated[float, Field(gt=0)] = 10.0
    """Time to spend at most."""
    samples: Annotated[int, Field(ge=1)] = 64
    """Calibration samples used to measure each layer's sensitivity."""


class Int8(Pass):
    """Eight-bit weights (symmetric, per output channel) and activations (per tensor, calibrated or at run time)."""

    needs_calibration: ClassVar[bool] = True
    calibration_runs: ClassVar[float] = 1.6
    uses_gates: ClassVar[bool] = True

    kind: Literal["int8"] = "int8"
    mode: Literal["static", "dynamic"] = "static"
    """static: activation ranges are measured on the calibration data; dynamic: at run time, for each batch."""
    calibration: Calibration = "mse"
    """How a range is chosen from what was observed."""
    percentile: Annotated[float, Field(gt=50, le=100)] = 99.99
    """With calibration: percentile, how much of what was observed lies inside the range, in per cent."""
    placement: Literal["auto", "all", "inputs"] = "auto"
    """all: activations stay int8 between operators (convolutional nets). inputs: only the inputs of matrix products are
    quantized, and what convolutions read and write; the residual stream stays float (transformers). auto: decided from
    the graph."""
    attention: bool = False
    """With placement inputs: also quantize the products of two activations (queries with keys, scores with values)."""
    bias_correction: bool = True
    """Take the mean shift that weight rounding causes out of each layer's bias."""
    targets: tuple[LayerPattern, ...] = ()
    """Layers to quantize, by name, `re:` pattern or type; empty: all that can be."""
    ignore: tuple[LayerPattern, ...] = ()
    """Layers that stay float."""
    overrides: tuple[Int8Override, ...] = ()
    """Exceptions for some of the layers."""
    restore: Restore = Restore()
    """What to do when the quality gates do not hold."""

    def unfit(self, layer: LayerFacts) -> str | None:
        """Why this layer cannot be taken, or None."""
        if layer.type == "Embedding":
            return "a small table" if layer.n_weights < SMALL_TABLE else None
        if layer.op == "Conv" and self.mode == "dynamic":
            return "dynamic int8 convolutions are slower than float32 on every target"
        return None if layer.op in ("Conv", "Gemm", "MatMul") else f"{layer.op} has no int8 form"

    def choose(self, layers: tuple[LayerFacts, ...]) -> tuple[list[LayerFacts], list[LayerDecision]]:
        return choose_layers(layers, self.targets, self.ignore, self.unfit)

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        taken, kept = self.choose(facts.layers)
        notes, problems = target_word(target, "int8-static" if self.mode == "static" else "int8-dynamic", self.kind)
        patterns = {"targets": self.targets, "ignore": self.ignore}
        patterns |= {f"overrides.{i}.targets": o.targets for i, o in enumerate(self.overrides)}
        problems += pattern_problems(facts.layers, self.kind, patterns)
        if not any(layer.type != "Embedding" for layer in taken):
            reasons = "; ".join(sorted({decision.reason for decision in kept})) or "the model has no such layer"
            problems.append(f"{self.kind}: no convolution or matrix product is left to quantize ({reasons})")
        problems += self._contradictions()
        scheme = "W8A8" if self.mode == "static" else "W8A8 dynamic"
        decisions = [
            LayerDecision(la.name, la.type, "int8", scheme if la.type != "Embedding" else "W8") for la in taken
        ]
        after = facts.with_bits({layer.name: 8 for layer in taken})
        return PassPlan(after, (*decisions, *kept), tuple(notes), tuple(problems))

    def _contradictions(self) -> list[str]:
        """Settings that would have no effect beside the others."""
        problems = []
        if self.mode == "dynamic" and self.placement == "all":
            problems.append("int8: mode: dynamic quantizes inputs only; leave placement at auto or set it to inputs")
        if self.mode == "dynamic" and self.overrides:
            problems.append("int8: overrides set calibrated ranges, and mode: dynamic has none; remove them")
        if self.attention and (self.mode == "dynamic" or self.placement == "all"):
            problems.append("int8: attention: true needs mode: static and placement: inputs")
        return problems

    def refused_by(self, target: Target) -> str | None:
        return refusal(target, "int8-static" if self.mode == "static" else "int8-dynamic", self.kind)

    def apply(self, model: Any, context: PassContext) -> PassResult:
        """`model`: a GraphState. Observes, rounds, corrects, looks for a collapse, restores layers if gates ask."""
        from compress.passes.int8_steps import apply_int8  # numpy, onnx-ir and onnxruntime: not at `compress check`

        return apply_int8(self, model, context)
