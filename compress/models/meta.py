"""A torch model without its weights: built on the meta device, its weight files' headers checked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from compress.blocks.parametrized import fold_computed
from compress.errors import SourceError
from compress.models import factory, huggingface
from compress.models.source import Source
from compress.models.weights import check_shapes, read_shapes


@dataclass(frozen=True)
class OpenedModel:
    """Where a model lies, its module on the meta device (None: an ONNX file), and notes on how it was built."""

    source: Source
    module: nn.Module | None
    notes: tuple[str, ...] = ()


def open_on_meta(source: Source) -> OpenedModel:
    """Build a model on the meta device unless it is an ONNX file. No weights are read. Raises SourceError."""
    if source.onnx is not None:
        return OpenedModel(source, None)
    module, notes = module_on_meta(source)
    return OpenedModel(source, module, tuple(notes))


def module_on_meta(source: Source) -> tuple[nn.Module, list[str]]:
    """Return the module on the meta device, in eval mode, and notes.

    A factory that cannot build on the meta device builds on the CPU, and a note says so. SourceError if the weight
    files do not fit the module.
    """
    if source.kind == "huggingface":
        return huggingface.build_on_meta(source)
    module, notes = _build_from_factory(source)
    if source.weights:
        check_shapes(module, read_shapes(source.weights[0]), str(source.weights[0]))
    else:
        notes.append("no `weights` are given: the factory itself must return the trained model")
    if computed := fold_computed(module):
        names = ", ".join(name.removesuffix(".weight") for name in computed)
        notes.append(f"{len(computed)} weights are computed from other parameters and are taken as they come: {names}")
    return module, notes


def _build_from_factory(source: Source) -> tuple[nn.Module, list[str]]:
    if source.live is not None:
        return factory.build(source).to("meta"), []
    try:
        with torch.device("meta"):
            return factory.build(source), []
    except SourceError as error:
        first = error
    with torch.random.fork_rng(devices=[]):
        module = factory.build(source)  # a factory that is simply wrong fails here again
    return module, [f"the factory cannot build on the meta device ({first}); it was built on the CPU to look at it"]
