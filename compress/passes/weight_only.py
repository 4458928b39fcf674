"""What the weight-only passes share: which layers, how many bits in which groups, and what the target says of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from compress.errors import PassError
from compress.facts import LayerDecision, LayerFacts, ModelFacts, PassPlan, matches
from compress.passes.base import LayerPattern, Pass, Record
from compress.passes.choosing import choose_layers, pattern_problems, refusal, target_word
from compress.targets import Format, Target

if TYPE_CHECKING:
    from compress.quantize.state import GraphState

LOWEST_OPSET = 20
"""Of a graph that can take 4-bit and block-wise weights, which opset 21 has, without being converted."""
PRESETS = {"W4A16": (4, True), "W4A16_ASYM": (4, False), "W8A16": (8, True)}


class WeightOverride(Record):
    """Other bits or groups for the layers that `targets` selects."""

    targets: tuple[LayerPattern, ...]
    """Layer names, `re:` patterns or types."""
    bits: Literal[4, 8] | None = None
    """Bits for each weight."""
    group_size: Annotated[int, Field(ge=-1)] | None = None
    """Inputs that share one scale; -1 for one scale for each output channel."""


class WeightOnly(Pass):
    """Weights of matrix products in few bits, activations in float; a pass says how each weight is rounded."""

    lowest_opset: ClassVar[int] = LOWEST_OPSET

    scheme: Literal["W4A16", "W4A16_ASYM", "W8A16"] | None = None
    """Preset that stands for `bits` and `symmetric`."""
    bits: Literal[4, 8] = 4
    """Bits for each weight."""
    group_size: Annotated[int, Field(ge=-1)] = 32
    """Inputs that share one scale; -1 for one scale for each output channel."""
    symmetric: bool = True
    """False: unsigned weights with a zero point for each group."""
    targets: tuple[LayerPattern, ...] = ()
    """Layers to round, by name, `re:` pattern or type; empty: every matrix product."""
    ignore: tuple[LayerPattern, ...] = ()
    """Layers that stay float."""
    overrides: tuple[WeightOverride, ...] = ()
    """Exceptions for some of the layers."""

    @model_validator(mode="after")
    def _agrees(self) -> WeightOnly:
        for key, value in zip(("bits", "symmetric"), PRESETS.get(self.scheme or "", ()), strict=False):
            if key in self.model_fields_set and getattr(self, key) != value:
                raise ValueError(
                    f"scheme {self.scheme} stands for {key}: {str(value).lower()}; leave one of the two out"
                )
        return self

    def unfit(self, layer: LayerFacts) -> str | None:
        """Why this layer cannot be taken, or None."""
        return None if layer.op in ("MatMul", "Gemm") else "not a matrix product"

    def setting(self, layer: LayerFacts) -> tuple[int, int, bool]:
        """(bits, group_size, symmetric) for one layer; group_size as written (-1: the whole row)."""
        bits, symmetric = PRESETS.get(self.scheme or "", (self.bits, self.symmetric))
        size = self.group_size
        for override in self.overrides:
            if any(matches(p, layer.name, layer.type, layer.op) for p in override.targets):
                bits = bits if override.bits is None else override.bits
                size = size if override.group_size is None else override.group_size
        return bits, size, symmetric

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        taken, kept = choose_layers(facts.layers, self.targets, self.ignore, self.unfit)
        patterns = {"targets": self.targets, "ignore": self.ignore}
        patterns |= {f"overrides.{i}.targets": o.targets for i, o in enumerate(self.overrides)}
        problems = pattern_problems(facts.layers, self.kind, patterns)
        if not taken:
            problems.append(f"{self.kind}: no matrix product is left to round")
        formats = {_format(bits, symmetric) for bits, _, symmetric in map(self.setting, taken)}
        notes = []
        for name in sorted(formats):
            some, more = target_word(target, name, self.kind)
            notes += some
            problems += more
        problems += [text for la in taken if (text := self._problem(la, target))]
        decisions, bits_after = [], {}
        for layer in taken:
            bits, size, _ = self.setting(layer)
            groups = layer.shape[1] // size if size > 0 else 1
            decisions.append(self.decision(layer))
            bits_after[layer.name] = bits + 32 * groups / layer.shape[1]
        return PassPlan(facts.with_bits(bits_after), (*decisions, *kept), tuple(notes), tuple(problems))

    def decision(self, layer: LayerFacts) -> LayerDecision:
        bits, size, symmetric = self.setting(layer)
        how = f"W{bits}A16{'' if symmetric else '_ASYM'}, " + (f"group {size}" if size > 0 else "per channel")
        return LayerDecision(layer.name, layer.type, f"w{bits}", how)

    def _problem(self, layer: LayerFacts, target: Target) -> str | None:
        """Why this layer's group size cannot work, with the way out."""
        bits, size, _ = self.setting(layer)
        inputs = layer.shape[1]
        kernels = target.group_sizes if bits == 4 else target.group_sizes_8bit
        if size == 0 or (size > 0 and inputs % size):
            fitting = [g for g in kernels or range(1, 257) if inputs % g == 0]
            nearest = sorted(fitting, key=lambda g: abs(g - size))[:2]
            ways = (
                f"use group_size: {' or '.join(str(g) for g in sorted(nearest))}, or ignore it"
                if nearest
                else "ignore it"
            )
            return f"{self.kind}: {layer.name} has {inputs} inputs, which group_size {size} does not divide; {ways}"
        if kernels and size not in kernels:
            some = ", ".join(str(k) for k in kernels)
            return (
                f"{self.kind}: {layer.name}: target {target.name} has {bits}-bit kernels for group_size {some}, "
                f"not {size}; it would run slower than float32"
            )
        return None

    def refused_by(self, target: Target) -> str | None:
        bits, symmetric = PRESETS.get(self.scheme or "", (self.bits, self.symmetric))
        formats = [_format(b, symmetric) for b in dict.fromkeys((bits, *(o.bits or bits for o in self.overrides)))]
        return next((text for name in formats if (text := refusal(target, name, self.kind))), None)

    def begin(self, model: GraphState) -> tuple[list[LayerFacts], list[LayerDecision]]:
        """The layers to round, and a decision for each of the others. PassError on a graph of too low an opset."""
        opset = model.model.opset_imports[""]
        if opset < LOWEST_OPSET:
            raise PassError(
                f"{self.kind}: block-wise weights need a graph of opset {LOWEST_OPSET} or later, "
                f"and this one has {opset}"
            )
        return choose_layers(model.facts(), self.targets, self.ignore, self.unfit)


def _format(bits: int, symmetric: bool) -> Format:
    return "w8" if bits == 8 else "w4" if symmetric else "w4-asym"
