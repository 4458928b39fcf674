"""Layers that a pass over the whole module left in few bits: their integers, kept in a file, taken up by a stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from compress.blocks.blockfiles import BlockChanges, read_finished_blocks, write_block
from compress.blocks.layers import is_hf_conv1d
from compress.blocks.materialise import plain
from compress.blocks.store import HeldLayer, WeightStore
from compress.blocks.streamed import StreamedModel
from compress.formats.schemes import Scheme
from compress.rounding.quantized_weight import QuantizedWeight

NAME = "rounded"
"""Of the one block that such a file holds."""


@dataclass(frozen=True, eq=False)
class Rounded:
    """A layer's integers [out, in], and what they are."""

    weight: QuantizedWeight
    scheme: Scheme


RoundedLayers = Mapping[str, Rounded]
"""By the layer's plain name; the module that they belong to holds what they stand for."""


def write_rounded(folder: Path, layers: RoundedLayers) -> None:
    """Write rounded layers into `folder`. OutputError where the disk takes no more."""
    weights = {name: layer.weight for name, layer in layers.items()}
    schemes = {name: layer.scheme for name, layer in layers.items()}
    write_block(folder, 0, NAME, BlockChanges(quantized=weights, schemes=schemes), {})


def read_rounded(folder: Path) -> dict[str, Rounded]:
    """Read the layers that `write_rounded` wrote into `folder`."""
    (record,) = read_finished_blocks(folder, 1)
    store = WeightStore({}).over([record.path])
    weights = {name: store.quantized(name) for name in record.schemes}
    return {name: Rounded(weight, record.schemes[name]) for name, weight in weights.items() if weight is not None}


def with_rounded(model: StreamedModel, layers: RoundedLayers) -> StreamedModel:
    """Return the model as if a pass over its blocks had put these integers."""
    modules = {plain(name): part for name, part in model.build().named_modules()}
    held = {name: HeldLayer(layer.weight, is_hf_conv1d(modules[name])) for name, layer in layers.items()}
    schemes = {name: layer.scheme for name, layer in layers.items()}
    return replace(model, store=model.store.holding(held), schemes={**model.schemes, **schemes})
