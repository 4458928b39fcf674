"""What passes over blocks share: the layers of a block and their schemes, what is said of them, static input scales."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from compress.blocks.block import BlockWork
from compress.blocks.folding import fold_scales
from compress.blocks.layers import is_layer
from compress.blocks.materialise import plain
from compress.blocks.sharing import gather_from_processes
from compress.blocks.streamed import StreamedModel
from compress.blocks.tables import find_tables, layer_facts
from compress.blocks.work import AFTER, BEFORE
from compress.errors import PassError
from compress.facts import InputGroup, LayerDecision, LayerFacts, Note
from compress.formats.schemes import ActivationScheme, Scheme
from compress.formats.targets import Target
from compress.passes.weight_only import WeightPass
from compress.rounding.grid import finite, fit_shared
from compress.rounding.numbers import ScaleRule
from compress.rounding.observers import Method, Observer, choose_range
from compress.rounding.quantized_weight import QuantizedWeight
from compress.rounding.weights import round_weight

LOOKED_UP = 1.5
"""Weight of a shared table's use as embeddings beside that as output layer. Nats above float tables, on a small decoder
in 4 bits: 0.033 at 0, 0.018 at 0.3, 0.017 at 1, 0.013 at 1.5, 0.017 at 3, and 0.018 where it is rounded to nearest."""

COMPARED = 2**20
"""Weights that are compared with their rounded values at once, so that they (4 MiB) fit into a cache. A bound, not
measured."""


@dataclass(frozen=True)
class BlockLayers:
    """Of one block: what each layer to round gets, in the order in which the block holds them, and the others.

    `tables`: embeddings, which no method but rounding to the nearest is for, with their schemes. `sharers`: layer ->
    those, here or elsewhere, that hold the same weight in few bits; they are in `facts`, too.
    """

    facts: dict[str, LayerFacts]
    schemes: dict[str, Scheme]
    kept: tuple[LayerDecision, ...]
    tables: dict[str, Scheme] = field(default_factory=dict)
    sharers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def of(self, layers: Sequence[str]) -> list[str]:
        """Return those of `layers` that are to be rounded."""
        return [layer for layer in layers if layer in self.schemes]


def block_facts(block: BlockWork) -> list[LayerFacts]:
    """Return the facts of the block's layers, as the plan has them."""
    quantized = block.quantized
    facts = []
    for name, module in block.layers.items():
        bits = float(quantized[name].bits) if name in quantized else 32.0
        known = block.tables.facts.get(name, layer_facts(name, module))
        facts.append(replace(known, bits=bits))
    return facts


def list_layers(model: StreamedModel) -> list[LayerFacts]:
    """Return the facts of all layers of a model whose weights stay in their files, as the plan has them."""
    module = model.build()
    tables, layers = find_tables(module, model.structure, model.tied).facts, list[LayerFacts]()
    for path, part in module.named_modules():
        if is_layer(part):
            name = plain(path)
            known = tables.get(name) or layer_facts(name, part)
            weight = model.tied.get(known.weight, known.weight)
            bits = float(model.schemes[name].weights.bits) if model.store.is_quantized(name) else 32.0
            layers.append(replace(known, weight=weight, bits=bits))
    return layers


def block_layers(config: WeightPass, block: BlockWork, target: Target) -> BlockLayers:
    """Return what a pass does to the layers of a block. A shared table comes up where the first of its layers does."""
    taken, kept = config.choose_layers(block_facts(block), target)
    facts: dict[str, LayerFacts] = {}
    schemes: dict[str, Scheme] = {}
    tables: dict[str, Scheme] = {}
    sharers: dict[str, tuple[str, ...]] = {}
    for layer in taken:
        as_table = config.table_scheme(layer) is not None
        if as_table and block.tables.is_shared(layer.name):
            continue
        facts[layer.name] = layer
        (tables if layer.type == "Embedding" else schemes)[layer.name] = config.setting(layer, target)
        if as_table and (others := block.tables.sharers.get(layer.name)):
            sharers[layer.name] = others
            facts |= {other: block.tables.facts[other] for other in others}
    return BlockLayers(facts, schemes, tuple(kept), tables, sharers)


def put_layer(
    block: BlockWork, layers: BlockLayers, name: str, weight: QuantizedWeight, activation_scale: float | None = None
) -> None:
    """Put a rounded weight into a block, and into the layers that share it."""
    scheme = layers.schemes.get(name) or layers.tables[name]
    block.put(name, weight, scheme, activation_scale, layers.sharers.get(name, ()))


def round_tables(config: WeightPass, block: BlockWork, layers: BlockLayers, target: Target) -> None:
    """Round the block's embeddings to the nearest. Raises PassError naming the table."""
    for name, scheme in layers.tables.items():
        try:
            values = matrix(config, block, name)
            weight = nearest(values, scheme, target)
        except ValueError as error:
            raise PassError(f"{config.kind}: {name}: {error}") from error
        put_layer(block, layers, name, weight)
        say_error(block, name, values, weight)


def say_error(block: BlockWork, layer: str, values: Tensor, weight: QuantizedWeight) -> None:
    """Record what rounding took from a weight [out, in], relative to its energy: what data say of it is not known."""
    lost, energy, step = 0.0, 0.0, max(1, COMPARED // values.shape[1])
    for start in range(0, len(values), step):
        rows = values[start : start + step].float()
        rounded = torch.from_numpy(weight.rows(slice(start, start + step)).dequantize()).to(rows.device)
        lost += float((rounded - rows).square_().sum(dtype=torch.float64))
        energy += float(rows.square().sum(dtype=torch.float64))
    block.say(measured={layer: {"weight_error": lost / energy if energy else 0.0}})


def remark(block: BlockWork, texts: Iterable[str]) -> None:
    """Add notes of level warning."""
    block.say(notes=[Note("warning", text) for text in texts])


def weigh_both_uses(gram: Tensor) -> Tensor:
    """Return the matrix by which to round a table that is looked up and multiplied with, of what the product reads.

    Embeddings have no inputs: all columns of a row count alike, LOOKED_UP times as much as the average input.
    """
    both = gram.clone()
    both.diagonal().add_(LOOKED_UP * gram.diagonal().mean())
    return both


def matrix(config: WeightPass, block: BlockWork, layer: str) -> Tensor:
    """Return a layer's weight, not to be written to. PassError naming it if it is not finite."""
    weight = block.weight(layer)
    if not finite(weight):
        raise PassError(f"{config.kind}: {layer}: the weight holds NaN or Inf")
    return weight


@contextmanager
def name_errors(kind: str, names: Sequence[str]) -> Iterator[None]:
    """Put the pass and the layers before what is wrong with their numbers."""
    try:
        yield
    except ValueError as error:
        raise PassError(f"{kind}: {', '.join(names)}: {error}") from error


def find_shared(
    config: WeightPass, block: BlockWork, schemes: Mapping[str, Scheme], importance: Mapping[str, Tensor] | None = None
) -> dict[str, float]:
    """Return what layers that read one tensor have in common of their scales, as `fit_shared` finds it, by layer.

    vLLM computes such layers (q, k and v; gate and up) as one product with one scale of the whole weight, and takes the
    largest of theirs where they differ: what runs would not be what was judged. `importance`: by layer, [in].
    """
    shared: dict[str, float] = {}
    for input_group in block.input_groups:
        together: dict[Scheme, list[str]] = {}
        for name in input_group.layers:
            if name in schemes and ScaleRule.of(schemes[name].weights).spans_tensor:
                together.setdefault(schemes[name], []).append(name)
        for scheme, names in together.items():
            weights = [matrix(config, block, name) for name in names]
            found = fit_shared(weights, scheme.weights, (importance or {}).get(names[0]))
            shared |= {} if found is None else dict.fromkeys(names, found)
    return shared


def nearest(
    weight: Tensor,
    scheme: Scheme,
    target: Target,
    importance: Tensor | None = None,
    shared: float | None = None,
) -> QuantizedWeight:
    """Round `weight` [out, in] to the nearest of whatever numbers the scheme has; `shared`: of `find_shared`."""
    return round_weight(weight, scheme.weights, importance, may_be_negative(scheme, target), shared)


def fold_into(block: BlockWork, input_group: InputGroup, scales: Tensor) -> None:
    """Divide what the input group reads by `scales` [in], in the module that gives it; its layers multiply it back
    in."""
    modules = {full_name(block, path): module for path, module in block.module.named_modules()}
    fold_scales(input_group, scales, modules.__getitem__)
    for name in (input_group.source, *input_group.layers):
        block.replace(f"{name}.weight", modules[name].weight)
    bias = getattr(modules[input_group.source], "bias", None)
    if isinstance(bias, Tensor):
        block.replace(f"{input_group.source}.bias", bias)


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
        return cls({name: inputs for name, inputs in activations.items() if inputs.has_stored_scale})

    def see(self, layers: Sequence[str], rows: Tensor) -> None:
        """Observe `rows` [n, in], which all of `layers` read."""
        wanted = [layer for layer in layers if layer in self.schemes]
        if wanted and rows.numel():
            first = self.seen.setdefault(wanted[0], Observer())
            first.update(rows.float().cpu().numpy())
            self.seen |= dict.fromkeys(wanted, first)

    def scale(self, layer: str) -> float | None:
        """Return what one level of its inputs stands for, over all processes; None: scaled at run time alone.

        int8: the symmetric range of least squared error; floats, whose rounding is relative: all that was seen. Of
        NVFP4 what a group's scale of 1 stands for. Only of a layer for which `explain_no_scale` has nothing to say.
        """
        scheme = self.schemes.get(layer)
        if scheme is None:
            return None
        method: Method = "minmax" if scheme.kind == "float" else "mse"
        high = choose_range(self._gather(layer), method, symmetric=True)[1]
        return high / scheme.most

    def explain_no_scale(self, layer: str) -> str:
        """Return why no scale can be stored for the layer's inputs, over all processes; "" where none is asked for."""
        if layer not in self.schemes:
            return ""
        seen = self._gather(layer)
        trouble = seen.trouble or ("nothing but zeros on the calibration data" if seen.low == seen.high == 0 else "")
        return trouble and f"its inputs, for which a scale would be stored, have {trouble}"

    def _gather(self, layer: str) -> Observer:
        seen = gather_from_processes(self.seen.get(layer))
        observers = [observer for observer in seen if observer is not None] or [Observer()]
        widest = max(observers, key=lambda observer: observer.bound)
        total = replace(widest, counts=np.zeros_like(widest.counts))
        for observer in observers:
            same = replace(observer, counts=observer.counts.copy())
            same.widen(widest.bound)
            total.counts += same.counts
            total.finite = total.finite and observer.finite
            total.low, total.high = min(total.low, observer.low), max(total.high, observer.high)
        return total


def leave_unscaled(
    config: WeightPass, block: BlockWork, layers: BlockLayers, inputs: InputRanges, names: Sequence[str]
) -> list[str]:
    """Return those of `names` that can be rounded; the others stay float, with a decision and a warning.

    They leave `layers`: an input without a scale costs its layer, and not the run.
    """
    lost = {name: why for name in names if (why := inputs.explain_no_scale(name))}
    for name, why in lost.items():
        layers.schemes.pop(name)
        sharing = [layers.facts.pop(member) for member in (name, *layers.sharers.get(name, ()))]
        block.say(decisions=[LayerDecision(layer.name, layer.type, "kept", why) for layer in sharing])
    remark(block, [f"{config.kind}: {name} stays float: {why}" for name, why in lost.items()])
    return [name for name in names if name not in lost]
