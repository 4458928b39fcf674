"""What passes over blocks share: the layers of a block and their schemes, what is said of them, static input scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor, nn

from compress.blocks.block import BlockWork
from compress.blocks.folding import fold_scales
from compress.blocks.materialise import plain
from compress.blocks.sharing import gather_from_processes
from compress.blocks.trace import layer_type, weight_shape
from compress.blocks.work import AFTER, BEFORE
from compress.errors import PassError
from compress.facts import LayerDecision, LayerFacts, Note, Reading
from compress.formats.schemes import ActivationScheme, Scheme
from compress.formats.targets import Target
from compress.passes.weight_only import WeightPass
from compress.quantize.fp8 import round_to_fp8
from compress.quantize.grid import finite, round_to_grid
from compress.quantize.k_quants import round_to_k
from compress.quantize.observers import Method, Observer, choose_range
from compress.quantize.rounding import QuantizedWeight
from compress.quantize.state import LARGEST_FLOAT8

OPS = {"Linear": "MatMul", "Conv1D": "MatMul", "Embedding": "Gather"}
"""Type of layer -> the operator it becomes; all others are convolutions."""


def layer_facts(name: str, layer: nn.Module, bits: float = 32) -> LayerFacts:
    """Return the facts of a layer as the plan has them. `bits`: that its weight is stored in."""
    kind = layer_type(layer)
    return LayerFacts(name, kind, OPS.get(kind, "Conv"), f"{name}.weight", weight_shape(layer), bits=bits)


@dataclass(frozen=True)
class BlockLayers:
    """Of one block: what each layer to round gets, in the order in which the block holds them, and the others."""

    facts: dict[str, LayerFacts]
    schemes: dict[str, Scheme]
    kept: tuple[LayerDecision, ...]

    def of(self, layers: Sequence[str]) -> list[str]:
        """Return those of `layers` that are to be rounded."""
        return [layer for layer in layers if layer in self.schemes]


def block_facts(block: BlockWork) -> list[LayerFacts]:
    """Return the facts of the block's layers, as the plan has them."""
    quantized = block.quantized
    facts = []
    for name, module in block.layers.items():
        bits = float(quantized[name].bits) if name in quantized else 32.0
        facts.append(layer_facts(name, module, bits))
    return facts


def block_layers(knobs: WeightPass, block: BlockWork, target: Target) -> BlockLayers:
    taken, kept = knobs.choose_layers(block_facts(block))
    schemes = {layer.name: knobs.setting(layer, target) for layer in taken}
    return BlockLayers({layer.name: layer for layer in taken}, schemes, tuple(kept))


def remark(knobs: WeightPass, block: BlockWork, texts: Sequence[str]) -> None:
    """Add notes of level warning; with `strict` raise a PassError."""
    if texts and knobs.strict:
        raise PassError(list(texts))
    block.say(notes=[Note("warning", text) for text in texts])


def matrix(knobs: WeightPass, block: BlockWork, layer: str) -> Tensor:
    """Return a layer's weight. PassError naming it if it is not finite."""
    weight = block.matrix(layer)
    if not finite(weight):
        raise PassError(f"{knobs.kind}: {layer}: the weight holds NaN or Inf")
    return weight


def find_shared_peaks(knobs: WeightPass, block: BlockWork, schemes: Mapping[str, Scheme]) -> dict[str, float]:
    """Return the magnitude that the one scale of a whole weight makes room for: the largest of its input group.

    vLLM computes layers that read one tensor (q, k and v; gate and up) as one product with one scale, and rounds them
    to the largest of theirs once more where they differ: what runs would not be what was judged.
    """
    peaks: dict[str, float] = {}
    for reading in block.readings:
        names = [name for name in reading.layers if name in schemes and schemes[name].weights.group_size == 0]
        largest = max((float(matrix(knobs, block, name).abs().max()) for name in names), default=0.0)
        peaks |= dict.fromkeys(names, largest)
    return peaks


def nearest(
    weight: Tensor, scheme: Scheme, target: Target, importance: Tensor | None = None, least_peak: float = 0.0
) -> QuantizedWeight:
    """Round `weight` [out, in] to the nearest of whatever numbers the scheme has.

    `least_peak`: of `round_to_fp8`, a magnitude that its scales have room for.
    """
    if scheme.weights.kind == "float":
        return round_to_fp8(weight, scheme.weights.group_size, least_peak)
    if scheme.weights.scales == "six-bit":
        return round_to_k(weight, scheme.weights, importance)
    return round_to_grid(weight, scheme.weights, importance, may_be_negative(scheme, target))


def fold_into(block: BlockWork, reading: Reading, scales: Tensor) -> None:
    """Divide what the reading reads by `scales` [in], in the module that gives it; its layers multiply it back in."""
    modules = {full_name(block, path): module for path, module in block.module.named_modules()}
    fold_scales(reading, scales, modules.__getitem__)
    for name in (reading.source, *reading.layers):
        block.replace(f"{name}.weight", modules[name].weight)
    bias = getattr(modules[reading.source], "bias", None)
    if isinstance(bias, Tensor):
        block.replace(f"{reading.source}.bias", bias)


def full_name(block: BlockWork, path: str) -> str:
    """Return a module's name in the model, from its path in the block."""
    path = plain(path)
    inside = block.name not in ("", BEFORE, AFTER)
    return path if not inside else f"{block.name}.{path}" if path else block.name


def may_be_negative(scheme: Scheme, target: Target) -> bool:
    """Return whether a scale may be negative.

    Products of integers are left with symmetric levels, which every kernel may negate.
    """
    return target.negative_scales and scheme.activations is None


@dataclass
class InputRanges:
    """What each layer reads, for static input scales."""

    schemes: dict[str, ActivationScheme]
    seen: dict[str, Observer] = field(default_factory=dict)

    @classmethod
    def of(cls, schemes: dict[str, Scheme]) -> InputRanges:
        """Make the ranges of the layers whose inputs get a stored scale."""
        activations = {name: scheme.activations for name, scheme in schemes.items() if scheme.activations is not None}
        return cls({name: inputs for name, inputs in activations.items() if not inputs.dynamic})

    def see(self, layers: Sequence[str], rows: Tensor) -> None:
        """Observe `rows` [n, in], which all of `layers` read. ValueError on NaN or Inf."""
        wanted = [layer for layer in layers if layer in self.schemes]
        if wanted and rows.numel():
            first = self.seen.setdefault(wanted[0], Observer())
            first.update(rows.float().numpy())
            self.seen |= dict.fromkeys(wanted, first)

    def scale(self, layer: str) -> float | None:
        """Return what one level of its inputs stands for, over all processes; None: scaled at run time.

        int8: the symmetric range of least squared error; FP8, whose rounding is relative: all that was seen. ValueError
        if nothing, or nothing but zeros, was seen.
        """
        scheme = self.schemes.get(layer)
        if scheme is None:
            return None
        seen = _merge_observers(
            [observer for observer in gather_from_processes(self.seen.get(layer)) if observer is not None]
        )
        if seen is None or seen.low == seen.high == 0:
            raise ValueError("its inputs were never other than zero on the calibration data: they have no scale")
        method: Method = "minmax" if scheme.kind == "float" else "mse"
        high = choose_range(seen, method, symmetric=True)[1]
        return high / (LARGEST_FLOAT8 if scheme.kind == "float" else 2 ** (scheme.bits - 1) - 1)


def _merge_observers(observers: Sequence[Observer]) -> Observer | None:
    """Merge observers into one that has seen what all of them have; None of none."""
    if not observers:
        return None
    widest = max(observers, key=lambda observer: observer.bound)
    total = replace(widest, counts=np.zeros_like(widest.counts))
    for observer in observers:
        same = replace(observer, counts=observer.counts.copy())
        same.widen(widest.bound)
        total.counts += same.counts
        total.low, total.high = min(total.low, observer.low), max(total.high, observer.high)
    return total
