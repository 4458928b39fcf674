"""Image files, and what else holds pixels, read into arrays. Pillow is imported only where it is needed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from runtime.bundle.columns import Array
from runtime.errors import MissingDependency, UsageError


def load_pixels(image: Any, name: str = "image") -> Array:
    """Return an array, a path or a Pillow image as uint8 [H, W] or [H, W, C] (C = 1, 3 or 4).

    A file is turned upright as its EXIF says. UsageError where it is none of these, or has more than 8 bits a channel.
    """
    if isinstance(image, np.ndarray):
        check_pixels(image, name)
        return image
    if isinstance(image, (str, Path)):
        return _read_image(Path(image), name)
    module = sys.modules.get("PIL.Image")  # who holds a Pillow image has imported Pillow
    if module is not None and isinstance(image, module.Image):
        return _from_pillow(image, name)
    raise UsageError(f"{name}: expected a uint8 array, a path or a Pillow image, found {type(image).__name__}")


def check_pixels(image: Array, name: str) -> None:
    """Raise UsageError unless `image` is uint8 [H, W] or [H, W, C] with 1, 3 or 4 channels."""
    if image.dtype != np.uint8:
        raise UsageError(f"{name}: pixels are {image.dtype}; give uint8 0..255, or use kind: tensor for ready inputs")
    if image.ndim not in (2, 3) or 0 in image.shape:
        raise UsageError(f"{name}: shape {image.shape}; an image is [height, width] or [height, width, channels]")
    if image.ndim == 3 and image.shape[2] not in (1, 3, 4):
        way_out = "; channels come last: transpose it" if image.shape[0] in (1, 3, 4) else ""
        raise UsageError(f"{name}: shape {image.shape} has {image.shape[2]} channels, not 1, 3 or 4{way_out}")


def import_pillow() -> Any:
    """Import Pillow with what is used of it. MissingDependency."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise MissingDependency("pillow", "reading, resizing or recolouring images") from error
    return PIL


def _read_image(path: Path, name: str) -> Array:
    with _open_image(path, name) as image:
        return _from_pillow(import_pillow().ImageOps.exif_transpose(image), name)


def read_image_size(path: str | Path, any_depth: bool) -> tuple[int, int]:
    """Return the (height, width) of an image file, upright, from its header alone: its pixels are not decoded.

    `any_depth`: it may have more than 8 bits a channel, as masks may. UsageError where it cannot be read.
    """
    with _open_image(Path(path), "image") as image:
        if not any_depth:
            _check_depth(image, f"image: {path}")
        # EXIF's tag of how the camera was held
        turned = image.getexif().get(0x0112, 1) >= 5  # by a quarter
        return (image.width, image.height) if turned else (image.height, image.width)


def _check_depth(image: Any, name: str) -> None:
    if image.mode.startswith(("I", "F")):
        raise UsageError(f"{name}: mode {image.mode} has more than 8 bits a channel; convert it to 8 bits first")


@contextmanager
def _open_image(path: Path, name: str) -> Iterator[Any]:
    """Yield a file as a Pillow image, not decoded yet; UsageError where that fails, or where decoding it does."""
    pillow = import_pillow()
    if path.exists() and not path.is_file():  # a FIFO would be waited for
        raise UsageError(f"{name}: {path} is no file; give the path of an image")
    try:
        with pillow.Image.open(path) as image:
            yield image
    except (OSError, ValueError, SyntaxError, pillow.Image.DecompressionBombError) as error:
        raise UsageError(f"{name}: {path} cannot be read as an image: {error}") from error


def _from_pillow(image: Any, name: str) -> Array:
    _check_depth(image, name)
    return np.asarray(image if image.mode in ("L", "RGB", "RGBA") else image.convert("RGB"))
