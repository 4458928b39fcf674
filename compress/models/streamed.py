"""A torch model whose weights stay in their files: its modules on the meta device, and a store that reads by name."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from compress.errors import SourceError
from compress.facts import SampleShapes, Structure
from compress.models import factory, huggingface
from compress.models.checkpoint import NotAsNamed, open_store
from compress.models.experts import ExpertPart, is_stacked, stacked_parts, unstack_experts
from compress.models.facts import architecture
from compress.models.feeds import check_feeds, parameters
from compress.models.load import load_model
from compress.models.materialise import emptied, empty_weights, fill, memory_store, plain
from compress.models.source import Source, locate
from compress.models.store import WeightStore
from compress.schema import ModelSpec
from compress.schemes import KvScheme, Scheme


@dataclass(frozen=True)
class StreamedModel:
    """A model to compress block by block.

    `build`: a new module in eval mode, its parameters on meta, its buffers real; its forward takes the feeds by
    parameter name (`parameters`: input name -> that parameter). `schemes`, `activation_scales` (static, of a layer's
    inputs) and `kv_scales` (attention module -> scale of keys, of values) are what passes decided; a quantized layer's
    integers are in the store. `tied`: parameter -> the one that holds its values. `notes`: what the user should know.
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

    @property
    def tied(self) -> Mapping[str, str]:
        return self.store.tied

    def quantized_layers(self) -> tuple[str, ...]:
        """Layers whose weights are integers (or FP8), in the order of `schemes`."""
        return tuple(layer for layer in self.schemes if self.store.is_quantized(layer))

    def materialise(self) -> nn.Module:
        """The whole module with its weights, dequantized, float32."""
        module = self.build()
        fill(module, self.store.read, self.store.tied)
        return module


def streamed_model(spec: ModelSpec, root: Path, feeds_shapes: SampleShapes, structure: Structure) -> StreamedModel:
    """A torch source with its weights left in their files, where their names are the module's.

    Otherwise the weights are read at once and held in memory, and `notes` say so. Stacked experts become layers.
    Attention is torch's fused one where the model has it. Raises SourceError.
    """
    source = locate(spec, root)
    if source.kind == "onnx":
        raise SourceError(f"{spec.source}: an ONNX file cannot be worked on block by block; give the torch model")
    notes: tuple[str, ...] = ()
    try:
        template = _empty(spec, source, root)
        parts = expert_parts(template)
        unstack_experts(template)
        store = open_store(source.weights, template, parts)
    except NotAsNamed as error:
        notes = (f"the weights are held in memory as a whole: {error}",)
        template, store = _in_memory(spec, root, feeds_shapes)
    _fuse_attention(template)
    names = parameters(spec, source, template)
    check_feeds(spec, names, feeds_shapes)
    build = functools.partial(copy.deepcopy, template)
    return StreamedModel(build, store, structure, names, architecture(template), source.folder, notes=notes)


def streamed_module(
    module: nn.Module, structure: Structure, names: Mapping[str, str], folder: Path | None = None
) -> StreamedModel:
    """A module (changed in place: stacked experts become layers) that holds its weights. `names`: as `parameters`."""
    unstack_experts(module)
    template, store = emptied(module), memory_store(module)
    _fuse_attention(template)
    build = functools.partial(copy.deepcopy, template)
    return StreamedModel(build, store, structure, names, architecture(template), folder)


def expert_parts(module: nn.Module) -> dict[str, ExpertPart]:
    """Plain name of each expert's parameter -> where it lies in a stacked one, before `unstack_experts`."""
    found: dict[str, ExpertPart] = {}
    for path, part in module.named_modules():
        if is_stacked(part):
            found |= stacked_parts(part, plain(path))
    return found


def _in_memory(spec: ModelSpec, root: Path, feeds_shapes: SampleShapes) -> tuple[nn.Module, WeightStore]:
    """The module without its weights, and those."""
    module = load_model(spec, root, feeds_shapes).module
    assert module is not None
    unstack_experts(module)
    return emptied(module), memory_store(module)


def _empty(spec: ModelSpec, source: Source, root: Path) -> nn.Module:
    """The module without weights. NotAsNamed where only the module itself can tell what its weights are."""
    if source.kind == "huggingface":
        with empty_weights():
            return huggingface.build_untrained(spec, source).requires_grad_(False)
    assert source.code is not None
    if not source.weights:
        raise NotAsNamed("the factory itself gives the trained model")
    if source.weights[0].suffix != ".safetensors":
        raise NotAsNamed(f"{source.weights[0].name} is no safetensors file")
    try:
        with empty_weights(), torch.random.fork_rng(devices=[]):
            module = factory.build(spec, source.code, root).float().requires_grad_(False)
    except SourceError as error:
        raise NotAsNamed(f"the factory cannot build without weights ({error})") from error
    hollow = [name for name, buffer in module.named_buffers() if buffer.device.type == "meta"]
    if hollow:
        raise NotAsNamed(f"the factory computes {', '.join(hollow)} from its weights")
    return module


def _fuse_attention(module: nn.Module) -> None:
    """Of a Hugging Face model: the same results to rounding, without a matrix of scores for each head in memory."""
    choose = getattr(getattr(module, "wrapped", None), "set_attn_implementation", None)
    if choose is not None:
        with contextlib.suppress(ValueError, ImportError):  # the model has its own attention alone
            choose("sdpa")
