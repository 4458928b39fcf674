"""What the graph passes that compute in eight bits share: which layers they take, when layers go back to float."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from compress.facts import LayerDecision, LayerFacts, ModelFacts, Note, PassPlan
from compress.formats.targets import Format, Target
from compress.passes.base import Pass
from compress.passes.choosing import choose_layers, pattern_problems, target_word, tell_float_share
from compress.specs import LayerPattern, Record

Number = Literal["int8", "fp8"]
Calibration = Literal["minmax", "percentile", "entropy", "mse"]
Placement = Literal["auto", "all", "inputs"]


class Restore(Record):
    """Which layers go back to float.

    Without a budget the most sensitive, one after the other, when the quality gates do not hold and until they do.
    Under `size_ratio` or `speedup` as many as the budget allows, those whose return gains most by their measured
    sensitivity (an integer programme), layers that share a rounded tensor together. The gates, or without them the
    task's main metric, confirm the choice on the evaluation set; where it falls short, the next best one is tried.
    """

    size_ratio: Annotated[float, Field(gt=1)] | None = None
    """How many times smaller than the float one the whole file is to stay, at least."""
    speedup: Annotated[float, Field(gt=1)] | None = None
    """How many times faster than in float the whole model is to stay on the target, at least, as measured here."""
    max_layers: Annotated[int, Field(ge=0)] = 8
    """Without a budget: layers to return at most; 0: the gates are not looked at."""
    max_minutes: Annotated[float, Field(gt=0)] = 10.0
    """Time to spend at most."""
    samples: Annotated[int, Field(ge=1)] = 64
    """Calibration samples used to measure each layer's sensitivity."""

    @model_validator(mode="after")
    def _check_budget(self) -> Restore:
        if self.size_ratio is not None and self.speedup is not None:
            raise ValueError("size_ratio and speedup are given; give one of them, and the other as a gate")
        return self

    @property
    def budget(self) -> str:
        """Return the budget as a recipe gives it, "size_ratio 3.5"; "" where there is none."""
        name = next((name for name in ("size_ratio", "speedup") if getattr(self, name) is not None), "")
        return name and f"{name} {getattr(self, name):g}"


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
    """Which layers go back to float: where the quality gates do not hold, or under a budget (`{size_ratio: 3.5}`,
    `{speedup: 2.0}`)."""

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
    def time_budget(self) -> Literal["graph", "module"] | None:
        return None if self.restore.speedup is None else "graph"

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
        notes += tell_float_share(self.kind, facts, kept, self.unfit)
        problems += pattern_problems(facts.layers, self.kind, self.patterns())
        if not any(layer.type != "Embedding" for layer in taken):
            reasons = "; ".join(sorted({decision.reason for decision in kept})) or "the model has no such layer"
            problems.append(f"{self.kind}: no convolution or matrix product is left to quantize ({reasons})")
        decisions = [
            LayerDecision(layer.name, layer.type, self.number, self.scheme if layer.type != "Embedding" else "W8")
            for layer in taken
        ]
        after = facts.with_bits({layer.name: 8 for layer in taken})
        if self.restore.budget and importlib.util.find_spec("scipy") is None:
            problems.append(f"{self.kind}: restore: a budget needs the package scipy: pip install scipy")
        if self.restore.budget:
            text = f"{self.kind}: layers go back to float as far as {self.restore.budget} allows, by what they lose"
            notes.append(Note("info", text))
        if self.restore.size_ratio is not None and not problems:
            after, problems = self._plan_size(facts, taken, self.restore.size_ratio)
        return PassPlan(after, (*decisions, *kept), tuple(notes), tuple(problems))

    def _plan_size(self, facts: ModelFacts, taken: Sequence[LayerFacts], ratio: float) -> tuple[ModelFacts, list[str]]:
        """Return the facts with as many bits as the ratio leaves, and why it cannot be kept.

        Weights, scales and zero points are counted; what a graph holds beside them makes a file larger, never smaller.
        """
        whole = facts.with_bits({layer.name: 32 for layer in facts.layers}).n_bytes
        distinct = {layer.weight: layer for layer in taken}.values()
        n_weights = sum(layer.n_weights for layer in distinct)
        channels = sum(layer.shape[1 if layer.type == "Embedding" else 0] for layer in distinct)
        rounded = facts.with_bits({layer.name: 8 for layer in taken}).n_bytes
        # a channel's scale and zero point take 5 bytes
        least = rounded + 5 * channels
        if whole / ratio < least:
            nearest = math.floor(100 * whole / least) / 100
            text = (
                f"{self.kind}: restore: size_ratio {ratio:g} is out of reach: with all of these layers in eight bits "
                f"the file is at most {nearest:g} times smaller; ask for less than that, or quantize more of it"
            )
            return facts, [text]
        bits = 8 + 8 * (whole / ratio - rounded) / max(n_weights, 1)
        return facts.with_bits({layer.name: min(bits, 32.0) for layer in taken}), []

    @property
    def formats(self) -> tuple[Format, ...]:
        return (self.format,)
