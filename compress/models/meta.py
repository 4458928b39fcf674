"""A torch model without its weights: built on the meta device, its weight files' headers checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.blocks.parametrized import fold_computed
from compress.errors import SourceError
from compress.models import factory, huggingface
from compress.models.source import Source, locate
from compress.models.weights import check_shapes, read_shapes
from compress.specs import ModelSpec


@dataclass(frozen=True)
class OpenedModel:
    """Where a model lies, its module on the meta device (None: an ONNX file), and notes on how it was built."""

    spec: ModelSpec
    root: Path
    source: Source
    module: nn.Module | None
    notes: tuple[str, ...] = ()


def open_on_meta(spec: ModelSpec, root: Path, config: Mapping[str, Any] | None = None) -> OpenedModel:
    """Find a model, and build it on the meta device unless it is an ONNX file. No weights are read.

    `config`: what is different in config.json, of a model that is to be built anew. Raises SourceError.
    """
    source = replace(locate(spec, root), config=config or {})
    if source.onnx is not None:
        return OpenedModel(spec, root, source, None)
    module, notes = module_on_meta(spec, source, root)
    return OpenedModel(spec, root, source, module, tuple(notes))


def module_on_meta(spec: ModelSpec, source: Source, root: Path) -> tuple[nn.Module, list[str]]:
    """Return the module on the meta device, in eval mode, and notes.

    A factory that cannot build on the meta device builds on the CPU, and a note says so. SourceError if the weight
    files do not fit the module.
    """
    if source.kind == "huggingface":
        return huggingface.build_on_meta(spec, source)
    module, notes = _build_from_factory(spec, source, root)
    if source.weights:
        check_shapes(module, read_shapes(source.weights[0]), str(source.weights[0]))
    else:
        notes.append("no `weights` are given: the factory itself must return the trained model")
    if computed := fold_computed(module):
        names = ", ".join(name.removesuffix(".weight") for name in computed)
        notes.append(f"{len(computed)} weights are computed from other parameters and are taken as they come: {names}")
    return module, notes


def _build_from_factory(spec: ModelSpec, source: Source, root: Path) -> tuple[nn.Module, list[str]]:
    try:
        with torch.device("meta"):
            return factory.build(spec, source, root), []
    except SourceError as error:
        first = error
    with torch.random.fork_rng(devices=[]):
        module = factory.build(spec, source, root)  # a factory that is simply wrong fails here again
    return module, [f"the factory cannot build on the meta device ({first}); it was built on the CPU to look at it"]
