"""`sparsify`: weights set to zero one by one, or N of each M kept: by magnitude, Wanda or SparseGPT."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from compress.facts import LayerDecision, LayerFacts, ModelFacts, Note, PassPlan, Structure, find_uncalled, matches
from compress.formats.targets import Target
from compress.passes.base import Pass, Stage
from compress.passes.choosing import choose_layers, pattern_problems
from compress.pruning.sparsity import Sparsity
from compress.specs import LayerPattern, Record

HALF = Sparsity(0.5)
PRODUCTS = ("Linear", "Conv1D")
CONVOLUTIONS = ("Conv1d", "Conv2d", "Conv3d")
"""Types of layers that are taken."""
SPARSE_CORES = ("tensorrt",)
"""Targets that run 2:4 on sparse tensor cores (TensorRT 11.1, Data Formats and Tensors)."""


def _check_pattern(text: str) -> str:
    """Return the text as it is. Raises ValueError if it is not N:M."""
    Sparsity.of(text)
    return text


NmPattern = Annotated[
    str,
    AfterValidator(_check_pattern),
    WithJsonSchema({"type": "string", "pattern": "^[0-9]+:[0-9]+$", "examples": ["2:4"]}),
]


class _Amount(Record):
    """How many weights become zero: one of the two."""

    sparsity: Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)] | None = None
    """Share of a layer's weights that become zero. With neither key: 0.5."""
    pattern: NmPattern | None = None
    """"N:M": of each M inputs that stand side by side (of a convolution: channels) N stay."""

    @model_validator(mode="after")
    def _require_one_amount(self) -> _Amount:
        if self.sparsity is not None and self.pattern is not None:
            raise ValueError(f"pattern {self.pattern} says how many weights stay; leave sparsity or pattern out")
        return self

    @property
    def amount(self) -> Sparsity | None:
        if self.pattern is not None:
            return Sparsity.of(self.pattern)
        return None if self.sparsity is None else Sparsity(self.sparsity)


class SparsityOverride(_Amount):
    """Another amount for the layers that `targets` selects."""

    targets: tuple[LayerPattern, ...]
    """Layer names, `re:` patterns or types."""


class Sparsify(_Amount, Pass):
    """Zeros in the weights of matrix products and convolutions; their shapes stay."""

    stage: ClassVar[Stage] = "blocks"

    kind: Literal["sparsify"] = "sparsify"
    method: Literal["magnitude", "wanda", "sparsegpt"] = "sparsegpt"
    """What decides: the weight alone, also its input's norm, or the error that the other weights cannot make up for.
    SparseGPT alone changes the weights that stay; magnitude needs no data. `sparsity` is the share of each output's
    weights for wanda, of the layer's for the others."""
    damp_percent: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """SparseGPT: of the mean of the Hessian's diagonal, added to it."""
    block_size: Annotated[int, Field(ge=1)] = 128
    """SparseGPT: inputs among which the zeros of `sparsity` are chosen."""
    targets: tuple[LayerPattern, ...] = ()
    """Layers to make sparse, by name, `re:` pattern or type; empty: every matrix product and convolution."""
    ignore: tuple[LayerPattern, ...] = ("lm_head",)
    """Layers that keep their weights."""
    overrides: tuple[SparsityOverride, ...] = ()
    """Other amounts for some of the layers; of several that select a layer the last one wins."""

    @property
    def needs_calibration(self) -> bool:  # type: ignore[override]
        """Return whether the method needs data: all but magnitude do."""
        return self.method != "magnitude"

    @property
    def calibration_runs(self) -> float:  # type: ignore[override]
        return {"magnitude": 0.0, "wanda": 1.5, "sparsegpt": 2.5}[self.method]

    @property
    def scope(self) -> Literal["row", "layer"]:
        """Return within what a share is taken, as the method was published: of each output's weights, or of all."""
        return "row" if self.method == "wanda" else "layer"

    def setting(self, layer: LayerFacts) -> Sparsity:
        """Return the amount that one layer gets: of the last override that selects it, or the pass's."""
        return [self.amount or HALF, *(o.amount or HALF for o in self.overrides if _selects(o.targets, layer))][-1]

    def unfit(self, layer: LayerFacts) -> str | None:
        """Return why this layer cannot be taken, or None."""
        if layer.custom:
            return f"a subclass of {layer.type} with a forward of its own"
        return None if layer.type in (*PRODUCTS, *CONVOLUTIONS) else "not a matrix product or convolution"

    def choose_layers(
        self, layers: Sequence[LayerFacts], structure: Structure | None
    ) -> tuple[list[LayerFacts], list[LayerDecision]]:
        """Choose the layers to make sparse, and give a decision for each of the others."""
        taken, kept = choose_layers(layers, self.targets, self.ignore, self.unfit)
        if not self.needs_calibration or structure is None:
            return taken, kept
        idle = find_uncalled(taken, structure)
        outside = dict.fromkeys(CONVOLUTIONS, "outside the blocks, where no inputs are gathered; magnitude takes it")
        kept += [
            LayerDecision(layer.name, layer.type, "kept", outside.get(layer.type, "no forward pass calls it"))
            for layer in idle
        ]
        return [layer for layer in taken if layer not in idle], kept

    def check(self, facts: ModelFacts, target: Target) -> PassPlan:
        taken, kept = self.choose_layers(facts.layers, facts.structure)
        problems = pattern_problems(facts.layers, self.kind, self._collect_patterns())
        if not taken:
            rounded = next((layer for layer in facts.layers if layer.bits < 16), None)
            more = f"; {rounded.name} is rounded already: put sparsify before that" if rounded is not None else ""
            problems.append(f"sparsify: no layer is left to make sparse{more}")
        problems += [text for layer in taken if (text := self._find_problem(layer))]
        problems += find_tied_problems(self.kind, facts.layers, taken)
        notes = [gain(name, target) for name in sorted({_name_amount(self.setting(layer)) for layer in taken})]
        after = facts.with_zeros(layer.name for layer in taken)
        return PassPlan(after, (*map(self.decision, taken), *kept), tuple(notes), tuple(problems))

    def decision(self, layer: LayerFacts) -> LayerDecision:
        return LayerDecision(layer.name, layer.type, "sparse", f"{self.setting(layer)} by {self.method}")

    def _find_problem(self, layer: LayerFacts) -> str | None:
        """Return why this layer's amount cannot work, with the way out, or None."""
        amount, inputs = self.setting(layer), layer.shape[1]
        what = "input channels" if layer.type in CONVOLUTIONS else "inputs"
        if amount.group and inputs % amount.group:
            return (
                f"sparsify: {layer.name} has {inputs} {what}, which {amount} does not divide into groups of "
                f"{amount.group}; ignore it, or give it a sparsity under overrides"
            )
        n = math.prod(layer.shape[1:]) if self.scope == "row" else layer.n_weights
        if not amount.group and amount.count(n) == n:
            place = "each output" if self.scope == "row" else "the layer"
            return f"sparsify: {layer.name}: sparsity {amount} leaves none of the {n} weights of {place}; take less"
        return None

    def _collect_patterns(self) -> dict[str, Sequence[str]]:
        """Return the patterns that must select something: all but `lm_head`, which is ignored wherever there is one."""
        overrides = {f"overrides.{i}.targets": o.targets for i, o in enumerate(self.overrides)}
        return {"targets": self.targets, "ignore": [p for p in self.ignore if p != "lm_head"], **overrides}


def gain(name: str, target: Target) -> Note:
    """Say what the target makes of such zeros."""
    if name == "2:4" and target.name in SPARSE_CORES:
        text = "runs on sparse tensor cores (Ampere and later) where the engine is built with sparse weights"
    else:
        text = "zeros are stored and multiplied like other weights: no faster and no smaller than dense"
    return Note("info", f"{target.name}: {name} sparsity: {text}")


def _name_amount(amount: Sparsity) -> str:
    return str(amount) if amount.group else "unstructured"


def _selects(patterns: Sequence[str], layer: LayerFacts) -> bool:
    return any(matches(pattern, layer.name, layer.type, layer.op) for pattern in patterns)


def find_tied_problems(kind: str, layers: Sequence[LayerFacts], taken: Sequence[LayerFacts]) -> list[str]:
    """Report layers that share a weight with one that stays: a shared weight is made sparse for all, or for none.

    `kind`: the pass.
    """
    names = {layer.name for layer in taken}
    others = {layer.weight: layer.name for layer in layers if layer.name not in names}
    return [
        f"{kind}: {layer.name} shares its weight with {others[layer.weight]}, which keeps its own; ignore {layer.name}"
        for layer in taken
        if layer.weight in others
    ]
