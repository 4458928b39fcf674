"""Opening a recipe's torch model for a stream: its modules on the meta device, its weights left in their files."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.blocks import heap
from compress.blocks.experts import unstack_experts
from compress.blocks.materialise import copy_without_weights, empty_weights, memory_store, plain
from compress.blocks.parametrized import list_computed
from compress.blocks.sizes import AS_BUILT, Shapes, read_shapes_record
from compress.blocks.streamed import StreamedModel
from compress.errors import SourceError
from compress.facts import SampleShapes, Structure
from compress.models import factory, huggingface
from compress.models.checkpoint import NotAsNamed, expert_parts, open_store
from compress.models.facts import architecture
from compress.models.feeds import check_feeds, parameters
from compress.models.load import load_torch_model
from compress.models.packed import quantization_of
from compress.models.shards import open_named_model
from compress.models.source import Source


def open_streamed_model(source: Source, feeds_shapes: SampleShapes, structure: Structure) -> StreamedModel:
    """Return a torch source with its weights left in their files, where their names are the module's.

    Otherwise the weights are read at once and held in memory, and `notes` say so. Stacked experts become layers.
    Attention is torch's fused one where the model has it. Raises SourceError.
    """
    heap.return_large()
    if source.kind == "onnx":
        raise SourceError(f"{source.name}: an ONNX file cannot be worked on block by block; give the torch model")
    if source.kind == "shards":
        return open_named_model(source)
    notes: tuple[str, ...] = ()
    try:
        if quantization_of(source.folder):
            raise NotAsNamed("they are quantized")
        template = _build_empty(source)
        parts = expert_parts(template)
        unstack_experts(template)
        store = open_store(source.weights, template, parts)
        # counters of batch norms, which checkpoints leave out: a stream reads every tensor of its blocks
        if lacking := [name for name in map(plain, template.state_dict()) if name not in store]:
            raise NotAsNamed(f"no tensor of the files is called '{lacking[0]}'")
    except NotAsNamed as error:
        notes = (f"the weights are held in memory as a whole: {error}",)
        module = load_torch_model(source, feeds_shapes).module
        template, store = copy_without_weights(module), memory_store(module)
    _fuse_attention(template)
    names = parameters(source, template)
    check_feeds(source.spec, names, feeds_shapes)
    build = functools.partial(copy.deepcopy, template)
    shapes = read_shapes_record(source.shapes)
    return StreamedModel(
        build, store, structure, names, architecture(template), source.folder, notes=notes, shapes=shapes
    )


def open_streamed_module(
    module: nn.Module,
    structure: Structure,
    names: Mapping[str, str],
    folder: Path | None = None,
    shapes: Shapes = AS_BUILT,
) -> StreamedModel:
    """Return a module that holds its weights, for a stream. `names`: as `parameters`.

    The module is changed in place: stacked experts become layers.
    """
    heap.return_large()
    unstack_experts(module)
    template, store = copy_without_weights(module), memory_store(module)
    _fuse_attention(template)
    build = functools.partial(copy.deepcopy, template)
    return StreamedModel(build, store, structure, names, architecture(template), folder, shapes=shapes)


def _build_empty(source: Source) -> nn.Module:
    """Return the module without weights. NotAsNamed where only the module itself can tell what its weights are."""
    if source.kind == "huggingface":
        with empty_weights():
            return huggingface.build_untrained(source).requires_grad_(False)
    if not source.weights:
        raise NotAsNamed("the factory itself gives the trained model")
    if source.weights[0].suffix != ".safetensors":
        raise NotAsNamed(f"{source.weights[0].name} is no safetensors file")
    try:
        with empty_weights(), torch.random.fork_rng(devices=[]):
            module = factory.build(source).float().requires_grad_(False)
    except SourceError as error:
        raise NotAsNamed(f"the factory cannot build without weights ({error})") from error
    if computed := list_computed(module):
        raise NotAsNamed(f"{computed[0]} is computed from other parameters")
    hollow = [name for name, buffer in module.named_buffers() if buffer.device.type == "meta"]
    if hollow:
        raise NotAsNamed(f"the factory computes {', '.join(hollow)} from its weights")
    return module


def _fuse_attention(module: nn.Module) -> None:
    """Switch a Hugging Face model to fused attention, in place: same results to rounding, no scores kept in memory."""
    wrapped: Any = getattr(module, "wrapped", None)
    choose = getattr(wrapped, "set_attn_implementation", None)
    if choose is None:
        return
    # a decoder's attention that is not causal by itself: transformers leaves out the mask where the fused one is chosen
    masked = wrapped.can_generate() and any(
        getattr(part, "is_causal", True) is False for part in wrapped.get_decoder().modules()
    )
    if not masked:
        with contextlib.suppress(ValueError, ImportError):  # the model has its own attention alone
            choose("sdpa")
