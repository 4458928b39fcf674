"""What the weight-rounding passes share: which layers, which numbers in which groups, what the target says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from compress.errors import PassError
from compress.facts import LayerDecision, LayerFacts, ModelFacts, Note, PassPlan, matches
from compress.passes.base import LayerPattern, Pass, Record, Stage
from compress.passes.choosing import choose_layers, pattern_problems, refusal, target_word
from compress.passes.weight_rules import described, fitted, format_of, group_problem, uncalled
from compress.schemes import PRESETS, Scheme, WeightScheme
from compress.targets import Target

if TYPE_CHECKING:
    from compress.quantize.state import GraphState

LOWEST_OPSET = 20
"""Of a graph that can take 4-bit and block-wise weights, which opset 21 has, without being converted."""
GROUP_SIZE = 32
"""Where neither the recipe nor a scheme gives one: every target has kernels for it."""


def _preset(name: str) -> str:
    """Raises ValueError on an unknown name."""
    if name.upper() not in PRESETS:
        raise ValueError(f"there is no scheme {name!r}; there are {', '.join(PRESETS)}")
    return name.upper()


SchemeName = Annotated[str, AfterValidator(_preset), WithJsonSchema({"type": "string", "enum": list(PRESETS)})]
Bits = Annotated[int, Field(ge=2, le=8)]
GroupSize = Annotated[int, Field(ge=-1)]


class _Numbers(Record):
    """The keys that say how a weight is stored. `scheme` may not be contradicted by the others."""

    scheme: SchemeName | None = None
    """Preset: W4A16, W4A16_ASYM, W8A8, FP8_DYNAMIC, ... in capitals or not. It stands for `bits`, `symmetric`, what
    becomes of inputs, and, where `group_size` is not given, the groups."""

    @model_validator(mode="after")
    def _agrees(self) -> _Numbers:
        if self.scheme is None:
            return self
        weights = PRESETS[self.scheme].weights
        for key, value in (("bits", weights.bits), ("symmetric", weights.symmetric)):
            given = getattr(self, key)
            if key in self.model_fields_set and given is not None and given != value:
                raise ValueError(
                    f"scheme {self.scheme} stands for {key}: {str(value).lower()}; leave one of the two out"
                )
        return self


class WeightOverride(_Numbers):
    """Other numbers for the layers that `targets` selects."""

    targets: tuple[LayerPattern, ...]
    """Layer names, `re:` patterns or types."""
    bits: Bits | None = None
    """Bits for each weight."""
    group_size: GroupSize | None = None
    """Inputs that share one scale; -1 for one scale for each output channel."""
    symmetric: bool | None = None
    """False: unsigned weights with a zero point for each group."""


class WeightPass(_Numbers, Pass):
    """Weights of matrix products in few bits; a pass says how each weight is rounded."""

    lowest_opset: ClassVar[int] = LOWEST_OPSET

    bits: Bits = 4
    """Bits for each weight."""
    group_size: GroupSize | None = None
    """Inputs that share one scale; -1 for one scale for each output channel. Not given: the scheme's, as
    compressed-tensors has it (W4A16: 128, W8A16 and W8A8: -1), or 32 without a scheme."""
    symmetric: bool = True
    """False: unsigned weights with a zero point for each group."""
    targets: tuple[LayerPattern, ...] = ()
    """Layers to round, by name, `re:` pattern or type; empty: every matrix product."""
    ignore: tuple[LayerPattern, ...] = ("lm_head",)
    """Layers that stay float."""
    overrides: tuple[WeightOverride, ...] = ()
    """Exceptions for some of the layers; where several select a layer, later ones win key by key."""
    indivisible: Literal["refuse", "fit"] = "refuse"
    """What becomes of a layer whose inputs `group_size` does not divide: an error in the plan, or the nearest group
    size that divides them and that the target takes (else one scale for each output channel), named in the report."""
    strict: bool = False
    """An error, not a note, where a layer falls back or is not seen by the calibration data."""

    def stage_on(self, facts: ModelFacts) -> Stage:
        return "blocks" if facts.source == "torch" else "graph"

    def unfit(self, layer: LayerFacts) -> str | None:
        """Why this layer cannot be taken, or None."""
        return None if layer.op in ("MatMul", "Gemm") else "not a matrix product"

    def taken(self, layers: Sequence[LayerFacts]) -> tuple[list[LayerFacts], list[LayerDecision]]:
        """The layers to round, and a decision for each of the others."""
        return choose_layers(layers, self.targets, self.ignore, self.unfit)

    def setting(self, layer: LayerFacts, target: Target) -> Scheme:
        """What one layer gets: groups fitted to its inputs with `indivisible: fit`."""
        scheme = self.wanted(layer)
        if self.indivisible == "refuse" or scheme.weights.group_size < 1:
            return scheme
        size = fitted(scheme.weights.group_size, layer.shape[1], target.kernels(scheme.weights.bits))
        return scheme.with_group(size)

    def wanted(self, layer: LayerFacts) -> Scheme:
        """What the recipe asks for, whether the layer can have it or not."""
        scheme = self.base()
        for override in self.overrides:
            if any(matches(p, layer.name, layer.type, layer.op) for p in override.targets):
                scheme = self._overridden(scheme, override)
        return scheme

    def base(self) -> Scheme:
        """That of a layer without an override."""
        if self.scheme is not None:
            scheme = PRESETS[self.scheme]
            return scheme if self.group_size is None else scheme.with_group(self.group_size)
        size = GROUP_SIZE if self.group_size is None else self.group_size
        return Scheme(WeightScheme(self.bits, size, self.symmetric))

    def _overridden(self, scheme: Scheme, override: WeightOverride) -> Scheme:
        if override.scheme is not None:
            scheme = PRESETS[override.scheme]
        given = {
            key: value for key in ("bits", "group_size", "symmetric") if (value := getattr(override, key)) is not None
        }
        return replace(scheme, weights=replace(scheme.weights, **given)) if given else scheme

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        taken, kept = self.taken(facts.layers)
        if self.needs_calibration and facts.structure is not None:
            idle = uncalled(taken, facts.structure)
            taken = [layer for layer in taken if layer not in idle]
            kept += [LayerDecision(layer.name, layer.type, "kept", "no forward pass calls it") for layer in idle]
        problems = pattern_problems(facts.layers, self.kind, self._patterns())
        if not taken:
            rounded = next((layer for layer in facts.layers if layer.bits < 16), None)
            before = f"; {rounded.name} is in {rounded.bits:g} bits already" if rounded is not None else ""
            problems.append(f"{self.kind}: no matrix product is left to round{before}")
        settings = {layer.name: self.setting(layer, target) for layer in taken}
        notes, more = self._target_says(taken, settings, target)
        problems += more
        problems += [
            text for la in taken if (text := group_problem(self.kind, la, settings[la.name], target, self.ways))
        ]
        problems += self._graph_problems(facts, settings)
        remarks = [text for la in taken if (text := self.fit_remark(la, target))]
        problems += remarks if self.strict else []
        notes += [] if self.strict else [Note("warning", text) for text in remarks]
        decisions = [self.decision(layer, target) for layer in taken]
        after = facts.with_bits({la.name: stored_bits(settings[la.name], la) for la in taken})
        return PassPlan(after, (*decisions, *kept), tuple(notes), tuple(problems), settings)

    @property
    def ways(self) -> str:
        """What a layer that the group size does not divide can do besides another size."""
        return "or ignore it" if self.indivisible == "fit" else "set indivisible: fit, or ignore it"

    def decision(self, layer: LayerFacts, target: Target) -> LayerDecision:
        scheme = self.setting(layer, target)
        weights = scheme.weights
        action = f"w{weights.bits}" if weights.kind == "int" and scheme.activations is None else scheme.name.lower()
        reason = described(scheme)
        if (size := self.wanted(layer).weights.group_size) != weights.group_size:
            reason += f": {layer.shape[1]} inputs, which {size} does not divide"
        return LayerDecision(layer.name, layer.type, action, reason)

    def fit_remark(self, layer: LayerFacts, target: Target) -> str | None:
        """A sentence for a layer that gets other groups than the recipe asks for, or None."""
        wanted, found = self.wanted(layer).weights.group_size, self.setting(layer, target).weights.group_size
        if wanted == found:
            return None
        how = f"group_size {found}" if found > 0 else "one scale for each output channel"
        text = (
            f"{self.kind}: {layer.name} has {layer.shape[1]} inputs, which group_size {wanted} does not divide: {how}"
        )
        kernels = target.kernels(self.wanted(layer).weights.bits)
        return text if not kernels or found in kernels else f"{text}, slower than float32 on {target.name}"

    def schemes(self) -> list[Scheme]:
        """All that the recipe asks for."""
        return [self.base(), *(self._overridden(self.base(), override) for override in self.overrides)]

    def refused_by(self, target: Target) -> str | None:
        formats = dict.fromkeys(map(format_of, self.schemes()))
        return next((text for name in formats if (text := refusal(target, name, self.kind))), None)

    def graph_layers(self, model: GraphState) -> tuple[list[LayerFacts], list[LayerDecision]]:
        """The layers to round, and a decision for each of the others. PassError on a graph of too low an opset."""
        opset = model.model.opset_imports[""]
        if opset < LOWEST_OPSET:
            raise PassError(
                f"{self.kind}: block-wise weights need a graph of opset {LOWEST_OPSET} or later, "
                f"and this one has {opset}"
            )
        return self.taken(model.facts())

    def _patterns(self) -> dict[str, Sequence[str]]:
        """Those that must select something: all that the recipe gives."""
        ignore = self.ignore if "ignore" in self.model_fields_set else ()
        overrides = {f"overrides.{i}.targets": o.targets for i, o in enumerate(self.overrides)}
        return {"targets": self.targets, "ignore": [p for p in ignore if p != "lm_head"], **overrides}

    def _target_says(
        self, taken: Sequence[LayerFacts], settings: dict[str, Scheme], target: Target
    ) -> tuple[list[Note], list[str]]:
        notes, problems = [], []
        for name in sorted({format_of(settings[layer.name]) for layer in taken}):
            some, more = target_word(target, name, self.kind)
            notes += some
            problems += more
        return notes, problems

    def _graph_problems(self, facts: ModelFacts, settings: dict[str, Scheme]) -> list[str]:
        """A pass on an ONNX graph has 4 and 8 bits, and no other inputs."""
        if self.stage_on(facts) != "graph":
            return []
        odd = {
            scheme.name
            for scheme in settings.values()
            if scheme.activations or scheme.weights.kind == "float" or scheme.weights.bits not in (4, 8)
        }
        return [
            f"{self.kind}: {name} needs a torch model; weights of an onnx: source get 4 or 8 bits (W4A16, W8A16)"
            for name in sorted(odd)
        ]


def stored_bits(scheme: Scheme, layer: LayerFacts) -> float:
    """Bits for each weight, its share of the scales among them."""
    size, inputs = scheme.weights.group_size, layer.shape[1]
    groups = inputs / size if size > 0 else 1 if size else 1 / layer.shape[0]
    return scheme.weights.bits + 32 * groups / inputs
