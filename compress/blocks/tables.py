"""The tables of a torch model whose weights stay in their files: embeddings, the output layer, what they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from compress.blocks.layers import has_own_forward, is_layer, layer_type, weight_shape
from compress.blocks.materialise import plain
from compress.blocks.store import WeightStore
from compress.facts import LayerFacts, Structure, assign_roles

OPS = {"Linear": "MatMul", "Conv1D": "MatMul", "Embedding": "Gather"}
"""Type of layer -> the operator it becomes; all others are convolutions."""


@dataclass(frozen=True)
class Tables:
    """The layers that have a role, or are unpackable (see `LayerFacts`), by name.

    `sharers`: layer at whose turn a shared weight is rounded -> the others that hold it.
    """

    facts: Mapping[str, LayerFacts] = field(default_factory=dict)
    sharers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def is_shared(self, layer: str) -> bool:
        """Return whether a layer's weight is rounded at the turn of another one."""
        return any(layer in others for others in self.sharers.values())

    def holds(self, layer: str) -> bool:
        """Return whether a layer's weight is looked up, by itself or by one that shares it."""
        return layer in self.facts and self.facts[layer].is_table


def layer_facts(name: str, layer: nn.Module, bits: float = 32) -> LayerFacts:
    """Return the facts of a layer as the plan has them, but for its role. `bits`: that its weight is stored in."""
    kind = layer_type(layer)
    op, custom = OPS.get(kind, "Conv"), has_own_forward(layer)
    return LayerFacts(name, kind, op, f"{name}.weight", weight_shape(layer), bits=bits, custom=custom)


def find_tables(module: nn.Module, structure: Structure, tied: Mapping[str, str]) -> Tables:
    """Return the tables of a module (which may lie on meta). `tied`: parameter -> the one that holds its values.

    A shared weight is rounded at the turn of a layer that reads something (the output layer), else of the first.
    """
    layers = [
        replace(facts, weight=tied.get(facts.weight, facts.weight))
        for name, part in module.named_modules()
        if is_layer(part)
        for facts in [layer_facts(plain(name), part)]
    ]
    with_role = {layer.name: layer for layer in assign_roles(layers, structure) if layer.role or layer.unpackable}
    read = {name for input_group in structure.input_groups for name in input_group.layers}
    by_weight: dict[str, list[str]] = {}
    for layer in with_role.values():
        by_weight.setdefault(layer.weight, []).append(layer.name)
    sharers = {}
    for members in by_weight.values():
        first = next((name for name in members if name in read), members[0])
        sharers[first] = tuple(name for name in members if name != first)
    return Tables(with_role, {first: others for first, others in sharers.items() if others})


def row_reader(store: WeightStore, layer: str) -> Callable[[Tensor], Tensor]:
    """Return the forward of an embedding in few bits: token ids [...] -> rows [..., width], float32.

    The rows that are looked up are dequantized, and no others.
    """
    weight = store.quantized(layer)
    assert weight is not None

    def look_up(ids: Tensor) -> Tensor:
        rows = torch.from_numpy(weight.rows(ids.reshape(-1).cpu().numpy()).dequantize())
        return rows.reshape(*ids.shape, -1).to(ids.device)

    return look_up
