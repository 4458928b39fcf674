"""Pruned Hugging Face models whose config.json cannot say their sizes: built as it says, cut as shapes.json says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.blocks.experts import unstack_experts
from compress.blocks.materialise import plain
from compress.blocks.sizes import UNFIT_NUMBERS, Shapes, fit, read_shapes_record, shapes_of, transformers_config
from compress.blocks.store import WeightStore
from compress.errors import SourceError
from compress.models.checkpoint import NotAsNamed, open_store
from compress.models.packed import quantization_of
from compress.models.source import Source

NOTE = "sizes are those of shapes.json, which config.json cannot say: compress loads this folder, transformers does not"


def config_lacks(module: nn.Module, shapes: Shapes, record: Mapping[str, Any]) -> bool:
    """Return whether a model built of config.json would lack a size of `shapes`, or its class refuses the file.

    `module`: as it was loaded; `record`: what config.json holds. A factory's module gets its sizes from `shapes` alone,
    whatever it has for a configuration.
    """
    wrapped: Any = getattr(module, "wrapped", None)
    if wrapped is None or not shapes:
        return bool(shapes)
    try:
        with torch.device("meta"):
            built = type(wrapped)(type(transformers_config(module)).from_dict(dict(record)))
    except UNFIT_NUMBERS:
        return True
    unstack_experts(built)
    made = shapes_of(built)
    differing = shapes.since(made)
    longer = any(len(made.blocks.get(name, ())) != len(numbers) for name, numbers in shapes.blocks.items())
    return bool(differing.tensors or differing.attributes or differing.skipped or longer)


def fit_record(module: nn.Module, path: Path | None) -> None:
    """Make `module` as small as the record says, in place; nothing without one. SourceError: damaged, another's."""
    try:
        fit(module, read_shapes_record(path))
    except SourceError as error:
        text = str(error)
        raise error if text.startswith(str(path)) else SourceError(f"{path}: {text}") from error


def open_recorded_store(module: nn.Module, source: Source) -> WeightStore:
    """Return a store of the source's tensors for a module that has its sizes, quantized ones as floats.

    Stacked experts become layers, in place, where the files hold them one by one. SourceError: names or shapes that do
    not fit.
    """
    try:
        return open_store(source.weights, module, quantization=quantization_of(source.folder))
    except NotAsNamed as error:
        if unstack_experts(module):
            return open_recorded_store(module, source)
        raise SourceError(f"{source.folder}: {error}; the files are of another model than config.json") from error


def load_recorded(module: nn.Module, source: Source) -> None:
    """Fill `module`, in place, with the source's values. SourceError as `open_recorded_store`, or a damaged file."""
    store = open_recorded_store(module, source)
    with torch.no_grad():
        for name, tensor in module.state_dict(keep_vars=True).items():
            if plain(name) in store:
                tensor.copy_(store.read(plain(name)))
