"""What passes over blocks share: the layers of a step and their schemes, what is said of them, static input scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor, nn

from compress.blocks.folding import fold_scales
from compress.blocks.materialise import plain
from compress.blocks.sharing import gathered
from compress.blocks.step import BlockStep
from compress.blocks.trace import layer_type, weight_shape
from compress.blocks.work import AFTER, BEFORE
from compress.errors import PassError
from compress.facts import LayerDecision, LayerFacts, Note, Reading
from compress.passes.weight_only import WeightPass
from compress.quantize.fp8 import round_to_fp8
from compress.quantize.grid import finite, round_to_grid
from compress.quantize.observers import Method, Observer, choose_range
from compress.quantize.rounding import QuantizedWeight
from compress.quantize.state import LARGEST_FLOAT8
from compress.schemes import ActivationScheme, Scheme
from compress.targets import Target

OPS = {"Linear": "MatMul", "Conv1D": "MatMul", "Embedding": "Gather"}
"""Type of layer -> the operator it becomes; all others are convolutions."""


def layer_facts(name: str, layer: nn.Module, bits: float = 32) -> LayerFacts:
    """Of a layer as the plan has them. `bits`: that its weight is stored in."""
    kind = layer_type(layer)
    return LayerFacts(name, kind, OPS.get(kind, "Conv"), f"{name}.weight", weight_shape(layer), bits=bits)


@dataclass(frozen=True)
class StepLayers:
    """Of one step: what each layer to round gets, in the order in which the step holds them, and the others."""

    facts: dict[str, LayerFacts]
    schemes: dict[str, Scheme]
    kept: tuple[LayerDecision, ...]

    def of(self, layers: Sequence[str]) -> list[str]:
        """Those of `layers` that are to be rounded."""
        return [layer for layer in layers if layer in self.schemes]


def step_facts(step: BlockStep) -> list[LayerFacts]:
    """The step's layers as the plan knows them."""
    quantized = step.quantized
    found = []
    for name, module in step.layers.items():
        bits = float(quantized[name].bits) if name in quantized else 32.0
        found.append(layer_facts(name, module, bits))
    return found


def step_layers(knobs: WeightPass, step: BlockStep, target: Target) -> StepLayers:
    taken, kept = knobs.taken(step_facts(step))
    schemes = {layer.name: knobs.setting(layer, target) for layer in taken}
    return StepLayers({layer.name: layer for layer in taken}, schemes, tuple(kept))


def remark(knobs: WeightPass, step: BlockStep, texts: Sequence[str]) -> None:
    """Notes of level warning; with `strict` a PassError."""
    if texts and knobs.strict:
        raise PassError(list(texts))
    step.say(notes=[Note("warning", text) for text in texts])


def matrix(knobs: WeightPass, step: BlockStep, layer: str) -> Tensor:
    """A layer's weight. PassError naming it if it is not finite."""
    found = step.matrix(layer)
    if not finite(found):
        raise PassError(f"{knobs.kind}: {layer}: the weight holds NaN or Inf")
    return found


def nearest(weight: Tensor, scheme: Scheme, target: Target, importance: Tensor | None = None) -> QuantizedWeight:
    """`weight` [out, in] rounded to the nearest by whatever numbers the scheme has."""
    if scheme.weights.kind == "float":
        return round_to_fp8(weight, scheme.weights.group_size)
    return round_to_grid(weight, scheme.weights, importance, may_be_negative(scheme, target))


def fold_into(step: BlockStep, reading: Reading, scales: Tensor) -> None:
    """Divide what the reading reads by `scales` [in], in the module that gives it; its layers multiply it back in."""
    modules = {full_name(step, path): module for path, module in step.block.named_modules()}
    fold_scales(reading, scales, modules.__getitem__)
    for name in (reading.source, *reading.layers):
        step.replace(f"{name}.weight", modules[name].weight)
    bias = getattr(modules[reading.source], "bias", None)
    if isinstance(bias, Tensor):
        step.replace(f"{reading.source}.bias", bias)


def full_name(step: BlockStep, path: str) -> str:
    """A module's name in the model, from its path in the step's block."""
    path = plain(path)
    inside = step.name not in ("", BEFORE, AFTER)
    return path if not inside else f"{step.name}.{path}" if path else step.name


def may_be_negative(scheme: Scheme, target: Target) -> bool:
    """Whether a scale may be: products of integers are left with symmetric levels, which every kernel may negate."""
    return target.negative_scales and scheme.activations is None


@dataclass
class InputRanges:
    """What each layer reads, for static input scales."""

    schemes: dict[str, ActivationScheme]
    seen: dict[str, Observer] = field(default_factory=dict)

    @classmethod
    def of(cls, schemes: dict[str, Scheme]) -> InputRanges:
        """For the layers whose inputs get a stored scale."""
        found = {name: one.activations for name, one in schemes.items() if one.activations is not None}
        return cls({name: inputs for name, inputs in found.items() if not inputs.dynamic})

    def see(self, layers: Sequence[str], rows: Tensor) -> None:
        """`rows` [n, in] are what all of `layers` read. ValueError on NaN or Inf."""
        wanted = [layer for layer in layers if layer in self.schemes]
        if wanted and rows.numel():
            first = self.seen.setdefault(wanted[0], Observer())
            first.update(rows.float().numpy())
            self.seen |= dict.fromkeys(wanted, first)

    def scale(self, layer: str) -> float | None:
        """What one level of its inputs stands for, over all processes; None: scaled at run time.

        int8: the symmetric range of least squared error; FP8, whose rounding is relative: all that was seen. ValueError
        if nothing, or nothing but zeros, was seen.
        """
        scheme = self.schemes.get(layer)
        if scheme is None:
            return None
        seen = _merged([one for one in gathered(self.seen.get(layer)) if one is not None])
        if seen is None or seen.low == seen.high == 0:
            raise ValueError("its inputs were never other than zero on the calibration data: they have no scale")
        method: Method = "minmax" if scheme.kind == "float" else "mse"
        high = choose_range(seen, method, symmetric=True)[1]
        return high / (LARGEST_FLOAT8 if scheme.kind == "float" else 2 ** (scheme.bits - 1) - 1)


def _merged(observers: Sequence[Observer]) -> Observer | None:
    """One that has seen what all of them have."""
    if not observers:
        return None
    widest = max(observers, key=lambda one: one.bound)
    total = replace(widest, counts=np.zeros_like(widest.counts))
    for one in observers:
        same = replace(one, counts=one.counts.copy())
        same.widen(widest.bound)
        total.counts += same.counts
        total.low, total.high = min(total.low, one.low), max(total.high, one.high)
    return total
