"""One micro-batch of training samples, and the part of it that one of several processes takes. Torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

MASK = "attention_mask"


@dataclass(frozen=True)
class Mixed:
    """Samples blended with others (mixup): `labels` of the others; `share`: how much of each sample is its own."""

    labels: Tensor | None
    share: float


@dataclass(frozen=True)
class Batch:
    """Samples as a model reads them.

    `rows`: int64 [b], their numbers in the training set. `feeds`: [b, ...] by parameter of forward. `weights`: float32
    [b], what each sample counts in a mean. `labels`: int64 [b] classes or float32 [b] scores. `augmented`: the feeds
    are not those of the rows as they are. `loss_mask`: int64 [b, T], 1 for each token whose prediction is learned;
    None: all are.
    """

    rows: np.ndarray
    feeds: dict[str, Tensor]
    weights: Tensor
    labels: Tensor | None = None
    mixed: Mixed | None = None
    augmented: bool = False
    loss_mask: Tensor | None = None

    @property
    def mask(self) -> Tensor | None:
        """Return the mask [b, T], nonzero at tokens; None where the samples are no texts."""
        return self.feeds.get(MASK)

    @property
    def weight(self) -> float:
        return float(self.weights.sum())


def part(batch: Batch, rank: int, size: int) -> Batch:
    """Return every `size`-th sample, from `rank` on."""
    if size == 1:
        return batch
    mine = slice(rank, None, size)
    mixed = batch.mixed and replace(batch.mixed, labels=_slice_optional(batch.mixed.labels, mine))
    feeds = {name: tensor[mine] for name, tensor in batch.feeds.items()}
    return replace(
        batch,
        rows=batch.rows[mine],
        feeds=feeds,
        weights=batch.weights[mine],
        labels=_slice_optional(batch.labels, mine),
        mixed=mixed,
        loss_mask=_slice_optional(batch.loss_mask, mine),
    )


def to_device(batch: Batch, device: torch.device, layout: torch.memory_format) -> Batch:
    """Move a batch to a device, images held in a layout.

    Shapes stay; channels last, convolutions run faster (measured: a training step of ResNet-56 in bfloat16 on a CPU
    1.15 times as fast).
    """
    mixed = batch.mixed and replace(batch.mixed, labels=_move_optional(batch.mixed.labels, device))
    feeds = {name: _place_tensor(tensor, device, layout) for name, tensor in batch.feeds.items()}
    weights, labels = batch.weights.to(device), _move_optional(batch.labels, device)
    counted = _move_optional(batch.loss_mask, device)
    return replace(batch, feeds=feeds, weights=weights, labels=labels, mixed=mixed, loss_mask=counted)


def _place_tensor(tensor: Tensor, device: torch.device, layout: torch.memory_format) -> Tensor:
    moved = tensor.to(device)
    return moved.contiguous(memory_format=layout) if moved.dim() == 4 else moved


def _slice_optional(tensor: Tensor | None, mine: slice) -> Tensor | None:
    return None if tensor is None else tensor[mine]


def _move_optional(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)
