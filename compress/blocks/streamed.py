"""A torch model whose weights stay in their files: its modules on the meta device, and a store that reads by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from compress.blocks.materialise import fill
from compress.blocks.sizes import AS_BUILT, Shapes
from compress.blocks.store import WeightStore
from compress.facts import Structure
from compress.formats.schemes import KvScheme, Scheme


@dataclass(frozen=True)
class StreamedModel:
    """A model to compress block by block.

    `build`: a new module in eval mode, its parameters on meta, its buffers real; its forward takes the feeds by
    parameter name (`parameters`: input name -> that parameter). `schemes`, `activation_scales` (static, of a layer's
    inputs) and `kv_scales` (attention module -> scale of keys, of values) are what passes decided; a quantized layer's
    integers are in the store. `tied`: parameter -> the one that holds its values. `notes`: what the user should know.
    `shapes`: how sizes differ from those that the model's code, or its config.json, builds.
    """

    build: Callable[[], nn.Module]
    store: WeightStore
    structure: Structure
    parameters: Mapping[str, str]
    architecture: str = ""
    folder: Path | None = None
    schemes: Mapping[str, Scheme] = field(default_factory=dict)
    activation_scales: Mapping[str, float] = field(default_factory=dict)
    kv_cache: KvScheme | None = None
    kv_scales: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    shapes: Shapes = AS_BUILT

    @property
    def tied(self) -> Mapping[str, str]:
        return self.store.tied

    def quantized_layers(self) -> tuple[str, ...]:
        """Return the layers whose weights are integers (or FP8), in the order of `schemes`."""
        return tuple(layer for layer in self.schemes if self.store.is_quantized(layer))

    def materialise(self) -> nn.Module:
        """Return the whole module with its weights, dequantized, float32."""
        module = self.build()
        fill(module, self.store.read, self.store.tied)
        return module
