"""A training set as the loop asks for it: rows to micro-batches, images changed at random on the way. Torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compress.context import TrainSet
from compress.distill.augment import blend_images, flip_images, shift_images
from compress.distill.batch import MASK, Batch, Mixed

Rows = np.ndarray
BatchOf = Callable[[Rows, np.random.Generator | None], Batch]


@dataclass(frozen=True)
class Augment:
    """What is done to images: mirrored, shifted by up to `crop` pixels, blended with others (`mixup`: Beta's alpha)."""

    flip: bool = False
    crop: int = 0
    mixup: float = 0.0

    @property
    def any(self) -> bool:
        return self.flip or self.crop > 0 or self.mixup > 0


def batch_maker(train: TrainSet, parameters: Mapping[str, str], augment: Augment, tokens: bool) -> BatchOf:
    """Return a function that makes the micro-batch of some rows.

    `parameters`: input -> parameter of forward. `tokens`: a sample counts by the tokens that are predicted in it.
    """

    def make(rows: Rows, random: np.random.Generator | None) -> Batch:
        feeds, labels = train.feeds(rows), _select_labels(train.labels, rows)
        mixed = None
        if random is not None and augment.any:
            feeds, mixed = _augment_images(feeds, labels, augment, random)
        tensors = {parameters[name]: torch.from_numpy(np.ascontiguousarray(array)) for name, array in feeds.items()}
        augmented = random is not None and augment.any
        return Batch(rows, tensors, _weigh_samples(tensors, len(rows), tokens), labels, mixed, augmented)

    return make


def _augment_images(
    feeds: Mapping[str, np.ndarray], labels: Tensor | None, augment: Augment, random: np.random.Generator
) -> tuple[dict[str, np.ndarray], Mixed | None]:
    """Augment the only input; return it with what it was blended with."""
    ((name, images),) = feeds.items()
    images = flip_images(images, random) if augment.flip else images
    images = shift_images(images, augment.crop, random) if augment.crop else images
    if not augment.mixup:
        return {name: images}, None
    images, others, share = blend_images(images, augment.mixup, random)
    return {name: images}, Mixed(None if labels is None else labels[torch.from_numpy(others)], share)


def _select_labels(labels: np.ndarray | None, rows: Rows) -> Tensor | None:
    if labels is None:
        return None
    chosen = torch.from_numpy(np.ascontiguousarray(labels[rows]))
    return chosen.long() if labels.dtype.kind in "iu" else chosen.float()


def _weigh_samples(feeds: Mapping[str, Tensor], n: int, tokens: bool) -> Tensor:
    if not tokens:
        return torch.ones(n)
    return (feeds[MASK].sum(1) - 1).clamp_min(0).float()
