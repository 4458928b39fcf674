"""A training set as the loop asks for it: rows to micro-batches, images changed at random on the way. Torch.

The changes (mirrored, shifted, blended) take arrays and give new ones; nothing given is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compress.context import TrainSet
from compress.distill.batch import MASK, Batch, Mixed

Rows = np.ndarray
BatchOf = Callable[[Rows, np.random.Generator | None], Batch]
Random = np.random.Generator
CHANNELS = (1, 3)
"""How many an image may have, by which their dimension is known."""


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
        redraw = train.redraw if random is not None else None
        if random is not None and redraw is not None:
            feeds, targets = redraw(rows, int(random.integers(2**31)))
        else:
            feeds, targets = train.feeds(rows), None if train.labels is None else train.labels[rows]
        labels, mixed = _to_labels(targets), None
        if random is not None and augment.any:
            feeds, mixed = _augment_images(feeds, labels, augment, random)
        tensors = {
            parameters.get(name, name): torch.from_numpy(np.ascontiguousarray(array)) for name, array in feeds.items()
        }
        augmented = random is not None and (augment.any or redraw is not None)
        marked = train.loss_masks(rows) if tokens else None
        counted = None if marked is None else torch.from_numpy(marked)
        weights = _weigh_samples(tensors, labels, len(rows), tokens, counted)
        return Batch(rows, tensors, weights, labels, mixed, augmented, counted)

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


def _to_labels(targets: np.ndarray | None) -> Tensor | None:
    if targets is None:
        return None
    labels = torch.from_numpy(np.ascontiguousarray(targets))
    return labels.long() if targets.dtype.kind in "iu" else labels.float()


def _weigh_samples(
    feeds: Mapping[str, Tensor], labels: Tensor | None, n: int, tokens: bool, counted: Tensor | None
) -> Tensor:
    if not tokens:
        return torch.ones(n)
    if counted is not None:
        return counted[:, 1:].sum(1).float()
    if labels is not None:  # the tokens that a decoder writes; the mask is of what its encoder reads
        return (labels >= 0).sum(1).float()
    return (feeds[MASK].sum(1) - 1).clamp_min(0).float()


def is_channels_first(shape: tuple[int, ...]) -> bool:
    """Return True for [.., C, H, W], False for [.., H, W, C]. ValueError if neither has 1 or 3 channels."""
    if shape[-3] not in CHANNELS and shape[-1] not in CHANNELS:
        raise ValueError(f"{list(shape)} is neither [.., C, H, W] nor [.., H, W, C] with 1 or 3 channels")
    return shape[-3] in CHANNELS


def flip_images(images: np.ndarray, random: Random) -> np.ndarray:
    """Mirror each of [b, ...] left to right with probability one half."""
    chosen = random.random(len(images)) < 0.5
    result = images.copy()
    width = -1 if is_channels_first(images.shape) else -2
    result[chosen] = np.flip(images[chosen], axis=width)
    return result


def shift_images(images: np.ndarray, padding: int, random: Random) -> np.ndarray:
    """Shift each image by up to `padding` pixels; what comes in from outside is 0, the encoded mean colour."""
    first = is_channels_first(images.shape)
    height, width = images.shape[2:4] if first else images.shape[1:3]
    none, both = (0, 0), (padding, padding)
    margins = [none, none, both, both] if first else [none, both, both, none]
    padded = np.pad(images, margins)
    result = np.empty_like(images)
    for i, (y, x) in enumerate(random.integers(0, 2 * padding + 1, (len(images), 2)).tolist()):
        window = (slice(y, y + height), slice(x, x + width))
        result[i] = padded[i][(slice(None), *window) if first else (*window, slice(None))]
    return result


def blend_images(images: np.ndarray, alpha: float, random: Random) -> tuple[np.ndarray, np.ndarray, float]:
    """Blend each image with another of the batch; share ~ Beta(alpha, alpha).

    Returns (share * image + (1 - share) * another, the others' places in the batch [b], share).
    mixup, Zhang et al. 2018 (arXiv:1710.09412), one share for a batch as in its code.
    """
    share = float(random.beta(alpha, alpha))
    others = random.permutation(len(images))
    mixed = share * images + (1 - share) * images[others]
    return mixed.astype(images.dtype, copy=False), others, share
