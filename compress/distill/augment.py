"""Encoded images, changed at random: mirrored, shifted, blended. Arrays in, arrays out; nothing given is changed."""

from __future__ import annotations

import numpy as np

Random = np.random.Generator
CHANNELS = (1, 3)
"""How many an image may have, by which their dimension is known."""


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
    margins = [(0, 0), (0, 0), (padding, padding), (padding, padding)] if first else _channels_last_margins(padding)
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


def _channels_last_margins(padding: int) -> list[tuple[int, int]]:
    return [(0, 0), (padding, padding), (padding, padding), (0, 0)]
