"""Where the values of an image's patches or tiles come from, found by giving a processor images that say it.

Each value has to be that of one pixel, normalized, or the same for all images. Which channel it is of shows where one
channel alone is bright; its row and column are read from images whose pixels are digits of these numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from compress.errors import SourceError
from runtime.bundle.columns import Array
from runtime.bundle.manifest import PixelOrder
from runtime.encode.images import ImagePreprocess, batch_pixels, normalize_pixels, order_pixels

CHANNELS, WHITE = 3, 255
DIGIT = 16
"""Values of a digit, 17 of 255 apart: no processor's rounding makes one another."""
CLOSE = 1e-4
"""Of normalized pixels, and of a digit's brightness: float32 leaves 5e-6 of Qwen2-VL's and Pixtral's, 1e-7 of Gemma 4's
and SmolVLM's."""
MakePixels = Callable[[Array], Array]
"""A processor: uint8 [height, width, 3] -> floats of any shape."""


class _Apart(Exception):
    """A processor does something else with an image."""


@dataclass(frozen=True)
class _Shades:
    """Of the values that come from pixels, the first of all, in their order."""

    channels: Array
    """int64 [n]"""
    low: Array
    """Of black, for each channel, float64 [3]."""
    span: Array
    """From black to white."""
    rest: float
    """What all values behind are."""


def find_patches(resizing: ImagePreprocess, make_pixels: MakePixels) -> tuple[ImagePreprocess, PixelOrder]:
    """Return how an image becomes what a processor makes of it, once it is `resizing.resize`, as a runtime does it.

    SourceError where the processor does more than normalizing and ordering pixels.
    """
    assert isinstance(resizing.resize, tuple)
    height, width = size = resizing.resize
    try:
        dark = make_pixels(np.zeros((*size, CHANNELS), np.uint8))
        shades = _find_shades(dark, size, make_pixels)
        rows, columns = (_read_places(axis, shades, size, make_pixels) for axis in (0, 1))
        index = (shades.channels * height + rows) * width + columns
        loops = find_loops(index)
        std = 1 / shades.span
        spec = replace(resizing, mean=_to_floats(-shades.low * std), std=_to_floats(std))
        order = PixelOrder(dark.shape, loops, int(index[0]), shades.rest)
        noise = batch_pixels([np.random.default_rng(0).integers(0, 256, (*size, CHANNELS), np.uint8)], spec)
        if np.abs(order_pixels(normalize_pixels(noise, spec), order) - make_pixels(noise[0])).max() > CLOSE:
            raise _Apart
    except _Apart:
        raise SourceError(
            f"its processor does more with an image of {height} x {width} than normalizing and ordering its pixels"
        ) from None
    return spec, order


def _find_shades(dark: Array, size: tuple[int, int], make_pixels: MakePixels) -> _Shades:
    """Return what comes from pixels; `dark`: what a processor makes of a black image. _Apart."""
    colours = WHITE * np.eye(CHANNELS, dtype=np.uint8)
    bright = [make_pixels(np.broadcast_to(colour, (*size, CHANNELS)).copy()) for colour in colours]
    if any(values.shape != dark.shape for values in bright):
        raise _Apart
    black, white = dark.reshape(-1), np.stack(bright).reshape(CHANNELS, -1)
    changed = white != black
    n, rest = int(changed.any(0).sum()), np.unique(black[~changed.any(0)])
    channels = changed.argmax(0)[:n]
    # each of one channel, those of pixels first, behind them one number
    if changed.sum() != n or not changed[:, :n].any(0).all() or len(rest) > 1 or len(np.unique(channels)) < CHANNELS:
        raise _Apart
    high = white[channels, np.arange(n)]
    first = [int(np.argmax(channels == channel)) for channel in range(CHANNELS)]
    low, top = (values[first].astype(np.float64) for values in (black, high))
    if max(np.abs(black[:n] - low[channels]).max(), np.abs(high - top[channels]).max()) > CLOSE:
        raise _Apart
    return _Shades(channels, low, top - low, float(rest[0]) if len(rest) else 0.0)


def _read_places(axis: int, shades: _Shades, size: tuple[int, int], make_pixels: MakePixels) -> Array:
    """Return the row (axis 0) or column (1) of the image that each value comes from, int64 [n]. _Apart."""
    along = np.arange(size[axis]).reshape((-1, 1, 1) if axis == 0 else (1, -1, 1))
    places, step = np.zeros(len(shades.channels), np.int64), 1
    while step < size[axis]:
        digits = along // step % DIGIT * (WHITE // (DIGIT - 1))
        made = make_pixels(np.broadcast_to(digits, (*size, CHANNELS)).astype(np.uint8)).reshape(-1)[: len(places)]
        values = (made - shades.low[shades.channels]) / shades.span[shades.channels] * (DIGIT - 1)
        found = np.rint(values).astype(np.int64)
        if np.abs(values - found).max() > CLOSE * WHITE:
            raise _Apart
        places, step = places + found * step, step * DIGIT
    return places


def _to_floats(values: Array) -> tuple[float, ...]:
    """Return numbers of float32 in as few digits as they were written in."""
    return tuple(float(f"{value:.6g}") for value in values)


def find_loops(index: Array) -> tuple[tuple[int, int], ...]:
    """Return counts and steps, the outermost first, of the loops that count places as `index` does, int64 [n]. _Apart
    where there are none.
    """
    loops: list[tuple[int, int]] = []
    while len(index) > 1:
        step = int(index[1] - index[0])
        breaks = np.flatnonzero(np.diff(index) != step)
        count = int(breaks[0]) + 1 if len(breaks) else len(index)
        blocks = index.reshape(-1, count) if len(index) % count == 0 else None
        if blocks is None or (blocks - blocks[:, :1] != step * np.arange(count)).any():
            raise _Apart
        loops.insert(0, (count, step))
        index = blocks[:, 0]
    return tuple(loops)
