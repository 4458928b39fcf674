"""What the passes that learn are given: batches from a stream's block or the calibration data, parameters by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compress.blocks.activations import with_others
from compress.blocks.block import BlockWork
from compress.blocks.materialise import fill, holders, plain
from compress.blocks.sharing import main_process, share, wait
from compress.blocks.streamed import StreamedModel
from compress.context import Feeds, PassContext
from compress.rounding.learn import is_transposed
from compress.rounding.learned_batches import BlockBatch, JoinedBatches, arrange_batches, together
from compress.rounding.quantized_weight import QuantizedWeight
from compress.rounding.tune import Places, vectors
from compress.store.durable import blame
from compress.store.training_state import SavedRun

JUDGED = 8
"""Samples that are judged at once, at least."""
ROWS = 2048
"""Of a block's inputs, that one step is taken on, unless a micro-batch has more."""


def block_batches(block: BlockWork, held_out: float) -> tuple[list[JoinedBatches], list[JoinedBatches]]:
    """Return a block's micro-batches, bundled, and the last of them that are kept aside (none if they are few)."""
    batches = [
        BlockBatch(_bind_index(block.forward, i), _bind_index(block.float_outputs, i), call.rows, call.n_rows)
        for i, call in enumerate(block.calls)
    ]
    n, how = len(batches) - round(held_out * len(batches)), (ROWS, 1 / share().size, not block.part.together)
    return together(batches[:n], *how), together(batches[n:], *how)


def open_saved_run(context: PassContext, name: str, what: str) -> SavedRun:
    """Return where the learning called `name` is saved, with what a killed run left of it; what is left of others goes.

    They are over: learning is saved with 16 bytes for each weight, so that a model's blocks would fill a disk. `what`:
    says in the log which pass learns what.
    """
    if context.work is None:
        return SavedRun(None)
    folder = context.work / "learning"  # apart from the pass's finished blocks, which go into the cache
    file = folder / f"{name}.safetensors"
    if main_process():
        with blame(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for other in set(folder.iterdir()) - {file}:
                other.unlink()
    saved = SavedRun(file, main_process())
    wait()  # until all have read, nobody writes
    if saved.damaged:
        context.log(f"{what}: what an earlier run left is damaged; learning starts afresh")
    if saved.left is not None:
        context.log(f"{what}: goes on from step {saved.left[1]['steps']}")
    return saved


def samples(batches: Sequence[Feeds], parameters: Mapping[str, str]) -> list[dict[str, Tensor]]:
    """Return the calibration data sample by sample, [1, ...] by parameter of forward."""
    all_samples = []
    for feeds in batches:
        tensors = {
            parameter: torch.from_numpy(np.ascontiguousarray(feeds[name]))
            for name, parameter in with_others(parameters, feeds).items()
        }
        if len({len(tensor) for tensor in tensors.values()}) > 1:  # one sample, and rows of its images' pixels
            all_samples.append(tensors)
            continue
        n = len(next(iter(tensors.values())))
        all_samples += [{name: tensor[i : i + 1] for name, tensor in tensors.items()} for i in range(n)]
    return all_samples


def float_module(model: StreamedModel) -> nn.Module:
    """Build the model as it was before anything was rounded, with its weights."""
    module = model.build()
    fill(module, model.store.read_float, model.store.tied)
    return module


def split(all_samples: Sequence[dict[str, Tensor]], held_out: float, batch_size: int) -> tuple[list[Any], list[Any]]:
    """Return batches to learn from, and those that are kept aside: larger ones, which are judged faster."""
    n = len(all_samples) - round(held_out * len(all_samples))
    return arrange_batches(all_samples[:n], batch_size), arrange_batches(all_samples[n:], max(batch_size, JUDGED))


def integers(model: StreamedModel, layer: str) -> QuantizedWeight:
    weight = model.store.quantized(layer)
    assert weight is not None
    return weight


def float_matrix(model: StreamedModel, layer: str, module: nn.Module) -> Tensor:
    weight = model.store.read_float(f"{layer}.weight")
    return weight.t().contiguous() if is_transposed(module) else weight


def modules(module: nn.Module) -> dict[str, nn.Module]:
    return {plain(name): part for name, part in module.named_modules()}


def vectors_of(module: nn.Module, model: StreamedModel) -> Places:
    """Return the vectors that the store can hold, by plain name."""
    known = holders(module, model.tied)
    return {plain(name): known[plain(name)] for name in vectors(module)}


def full_names(found: Places, block: str) -> Places:
    """Return the places by full plain name."""
    return {plain(f"{block}.{name}" if block else name): places for name, places in found.items()}


def _bind_index(function: Callable[[int], Tensor], i: int) -> Callable[[], Tensor]:
    return lambda: function(i)
