"""uint8 images to a model's input, as a record says how.

Pillow is used only where a file is read, a size changed or colours converted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from runtime.bundle.columns import Array, Columns, Encoded, Rows, take
from runtime.bundle.manifest import PixelOrder
from runtime.bundle.pixels import import_pillow, load_pixels
from runtime.bundle.records import PYDANTIC_CONFIG
from runtime.bundle.tensors import TensorSpec
from runtime.errors import UsageError

MOST_PIXELS = 2**14
"""A side of an image."""
MOST_SCALE = 1e12
"""Of scale, mean and std: larger ones leave float32, in which pixels are normalised."""
LONGEST_SIDES = 32
"""Times the shorter side: a row of a thousand pixels, resized to 256 rows, would become a quarter of a million long."""


@dataclass(frozen=True)
class ImagePreprocess:
    """uint8 images to a model's input: resize, centre crop, (pixel * scale - mean) / std."""

    kind: Literal["image"] = "image"
    """Discriminator."""
    resize: int | tuple[int, int] | None = None
    """A number: the shorter side, keeping proportions; [height, width]: exactly that."""
    crop: tuple[int, int] | None = None
    """Centre crop to [height, width], after resize."""
    letterbox: tuple[int, int] | None = None
    """In place of resize and crop: as large as fits into [height, width], keeping proportions, and padded to it."""
    padding: int = 114
    """Value of the pixels that letterbox adds, 0 to 255."""
    anchor: Literal["centre", "top-left"] = "centre"
    """Where letterbox puts the image."""
    channels: Literal["RGB", "L"] = "RGB"
    """Colour, or one grey channel."""
    scale: float = 1 / 255
    """Multiplies the pixel values 0..255."""
    mean: tuple[float, ...] = (0.0,)
    """Subtracted after `scale`: one number, or one for each channel."""
    std: tuple[float, ...] = (1.0,)
    """Divides after `mean`: one number, or one for each channel."""
    layout: Literal["NCHW", "NHWC"] = "NCHW"
    """Order of the model input's dimensions."""
    resample: Literal["nearest", "bilinear", "bicubic", "lanczos"] = "bilinear"
    """Pillow's filter of that name."""

    __pydantic_config__: ClassVar[dict[str, object]] = PYDANTIC_CONFIG

    def __post_init__(self) -> None:
        sizes = (self.resize,) if isinstance(self.resize, int) else self.resize or ()
        if not all(1 <= size <= MOST_PIXELS for size in (*sizes, *(self.crop or ()), *(self.letterbox or ()))):
            raise ValueError(
                f"resize {self.resize}, crop {self.crop} and letterbox {self.letterbox} must be at least 1 pixel, "
                f"{MOST_PIXELS} at most"
            )
        if self.letterbox is not None and (self.resize is not None or self.crop is not None):
            raise ValueError("letterbox makes the whole size: leave resize and crop out")
        if not 0 <= self.padding <= 255:
            raise ValueError(f"padding is {self.padding}: give 0 to 255")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in {1, self.n_channels} or not all(abs(value) <= MOST_SCALE for value in values):
                raise ValueError(
                    f"{name} is {values}: give 1 or {self.n_channels} numbers for {self.channels} images, at most "
                    f"{MOST_SCALE:g} in size"
                )
        if not abs(self.scale) <= MOST_SCALE:
            raise ValueError(f"scale is {self.scale}: give a number of at most {MOST_SCALE:g} in size")
        if any(abs(value) < 1 / MOST_SCALE for value in self.std):
            raise ValueError(f"std is {self.std}: give numbers of at least {1 / MOST_SCALE:g} in size")

    @property
    def n_channels(self) -> int:
        return 3 if self.channels == "RGB" else 1


@dataclass(frozen=True)
class ImageEncoder:
    """Samples with the column "image" -> the model's one input."""

    spec: ImagePreprocess
    input: TensorSpec

    def encode(self, columns: Columns, rows: Rows = None) -> dict[str, Array]:
        """Return one batch: {input name: [n, C, H, W] or [n, H, W, C]}, in the input's dtype.

        "image" is a uint8 array [N, H, W] or [N, H, W, C], or a list of such images, file paths and Pillow images.
        UsageError where an image is not one, or is not of the size that the model takes.
        """
        return self._encode(take(columns, "image", rows))

    def encode_with_facts(self, columns: Columns, rows: Rows, facts: tuple[str, ...]) -> Encoded:
        """Return what `encode` does, and image_size int64 [n, 2] (height, width as they came) where it is wanted."""
        if not facts:
            return self.encode(columns, rows), {}
        images = [load_pixels(image, f"image {i}") for i, image in enumerate(take(columns, "image", rows))]
        sizes = np.array([image.shape[:2] for image in images], np.int64)
        return self._encode(images), dict.fromkeys(facts, sizes)

    def _encode(self, images: Any) -> dict[str, Array]:
        pixels = batch_pixels(images, self.spec)  # [n, H, W, C]
        self.check_size(pixels.shape[1:3])
        if self.input.dtype == "uint8":
            return {self.input.name: np.ascontiguousarray(_to_layout(pixels, self.spec))}
        return {self.input.name: normalize_pixels(pixels, self.spec).astype(self.input.dtype, copy=False)}

    def check_size(self, size: tuple[int, ...]) -> None:
        """Raise UsageError unless images of that (height, width), preprocessed, are what the model takes."""
        wanted = self.input.shape[2:4] if self.spec.layout == "NCHW" else self.input.shape[1:3]
        if any(isinstance(want, int) and want != have for want, have in zip(wanted, size, strict=True)):
            raise UsageError(
                f"images are {size[0]}x{size[1]} after preprocessing, but the model's input '{self.input.name}' takes "
                f"{wanted[0]}x{wanted[1]} (height x width): set preprocess.resize: [{wanted[0]}, {wanted[1]}], or crop"
            )


def make_image_encoder(spec: ImagePreprocess, inputs: tuple[TensorSpec, ...]) -> ImageEncoder:
    """Make the encoder; UsageError if the model's inputs are not one image tensor with the spec's channels."""
    if len(inputs) != 1 or len(inputs[0].shape) != 4:
        shapes = ", ".join(f"{i.name} {i.shape}" for i in inputs)
        raise UsageError(
            f"image preprocessing feeds one input of 4 dimensions; the model has {shapes}: use kind: tensor"
        )
    channels = inputs[0].shape[1 if spec.layout == "NCHW" else 3]
    if isinstance(channels, int) and channels != spec.n_channels:
        raise UsageError(
            f"input '{inputs[0].name}' {inputs[0].shape} has {channels} channels in layout {spec.layout}, "
            f"but channels: {spec.channels} makes {spec.n_channels}: set preprocess.channels or preprocess.layout"
        )
    if inputs[0].dtype == "uint8" and (spec.scale != 1 or set(spec.mean) != {0} or set(spec.std) != {1}):
        raise UsageError(f"input '{inputs[0].name}' takes uint8 pixels as they are: set scale: 1, mean: [0], std: [1]")
    if inputs[0].dtype not in ("uint8", "float16", "float32", "float64"):
        raise UsageError(f"input '{inputs[0].name}' is {inputs[0].dtype}; images can be made uint8 or floating-point")
    return ImageEncoder(spec, inputs[0])


def batch_pixels(images: Any, spec: ImagePreprocess) -> Array:
    """Return images as uint8 [n, H, W, C] with the spec's channels, resized and cropped."""
    if isinstance(images, np.ndarray) and images.dtype == np.uint8 and images.ndim in (3, 4):
        batch = images[..., None] if images.ndim == 3 and images.shape[2] not in (3, 4) else images
        as_it_is = spec.resize is None and spec.crop is None and spec.letterbox is None
        if batch.ndim == 4 and batch.shape[3] == spec.n_channels and as_it_is:
            return batch
        if batch.ndim == 3:
            raise UsageError(f"images {images.shape}: one image, not a batch; give image[None] or a list")
    pixels = [image_pixels(image, spec, f"image {i}") for i, image in enumerate(images)]
    sizes = sorted({image.shape[:2] for image in pixels})
    if len(sizes) > 1:
        shown = ", ".join(f"{h}x{w}" for h, w in sizes[:4])
        raise UsageError(f"images in one batch differ in size after preprocessing ({shown}): set resize [h, w] or crop")
    return np.stack(pixels)


def order_pixels(pixels: Array, order: PixelOrder) -> Array:
    """Return an image's pixels as a model that reads patches has them: float32 of `order.shape`. UsageError."""
    if pixels.size < order.n_pixels:
        raise UsageError(f"images.order takes {order.n_pixels} values of an image, and it has {pixels.size}")
    places = np.array(order.start)
    for count, step in order.loops:
        places = places[..., None] + step * np.arange(count)
    made = np.full(order.shape, order.rest, np.float32)
    made.reshape(-1)[: places.size] = pixels.reshape(-1)[places.reshape(-1)]
    return made


def image_pixels(image: Any, spec: ImagePreprocess, name: str = "image") -> Array:
    """Return one image as uint8 [H, W, C]: colours converted, then resized, then cropped."""
    pixels = _to_channels(load_pixels(image, name), spec)
    height, width = pixels.shape[:2]
    if spec.letterbox is not None:
        assert spec.letterbox is not None
        size, top, left = fit_letterbox(pixels.shape[0], pixels.shape[1], spec)
        canvas = np.full((*spec.letterbox, pixels.shape[2]), spec.padding, np.uint8)
        inside = pixels if size == pixels.shape[:2] else _resize(pixels, size, spec.resample)
        canvas[top : top + size[0], left : left + size[1]] = inside
        return canvas
    size = compute_resized(height, width, spec.resize)
    if isinstance(spec.resize, int) and max(size) > max(LONGEST_SIDES * spec.resize, height, width):
        raise UsageError(
            f"{name}: {height}x{width} becomes {size[0]}x{size[1]} with its shorter side resized to {spec.resize}: "
            f"cut it until its sides differ by at most {LONGEST_SIDES} times"
        )
    if size != (height, width):
        pixels = _resize(pixels, size, spec.resample)
    # a copy: the crop as a view would hold all pixels of a long image
    return pixels if spec.crop is None else centre_crop(pixels, spec.crop).copy()


def compute_resized(height: int, width: int, resize: int | tuple[int, int] | None) -> tuple[int, int]:
    """Return (height, width) after `resize`; of one number the longer side is truncated, as in torchvision."""
    if resize is None:
        return height, width
    if not isinstance(resize, int):
        return resize[0], resize[1]
    if height <= width:
        return resize, max(1, int(resize * width / height))
    return max(1, int(resize * height / width)), resize


def fit_letterbox(height: int, width: int, spec: ImagePreprocess) -> tuple[tuple[int, int], int, int]:
    """Return the (height, width) that an image has inside the letterbox, and the rows above and columns left of it.

    Sides are rounded as ultralytics' exporters do, and an odd row or column of padding comes below, or on the right.
    """
    assert spec.letterbox is not None
    ratio = min(spec.letterbox[0] / height, spec.letterbox[1] / width)
    size = max(1, round(height * ratio)), max(1, round(width * ratio))
    if spec.anchor == "top-left":
        return size, 0, 0
    return size, (spec.letterbox[0] - size[0]) // 2, (spec.letterbox[1] - size[1]) // 2


def centre_crop(pixels: Array, crop: tuple[int, int]) -> Array:
    """Cut the middle [h, w] out of [H, W, C]; black is added around a smaller image. torchvision's rounding."""
    for axis, want in enumerate(crop):
        missing = max(0, want - pixels.shape[axis])
        if missing:
            widths = [(0, 0)] * pixels.ndim
            widths[axis] = (missing // 2, missing - missing // 2)
            pixels = np.pad(pixels, widths)
    top, left = (round((have - want) / 2) for have, want in zip(pixels.shape[:2], crop, strict=True))
    return pixels[top : top + crop[0], left : left + crop[1]]


@dataclass(frozen=True)
class ImagePlacement:
    """Where an image lies on what a model saw of it; each pair is of heights and widths.

    The centre (y + 0.5) of an image's pixel lies at (y + 0.5) * scale - start on the window that the model saw.
    """

    size: tuple[int, int]
    """Of the image, in its own pixels."""
    scale: tuple[float, float]
    """Pixels of the window for each of the image's."""
    start: tuple[int, int]
    """Pixels, after resizing, that were cut off before the window; negative where some were added."""
    window: tuple[int, int]
    """Pixels that the model saw."""


def place_image(height: int, width: int, spec: ImagePreprocess) -> ImagePlacement:
    """Return where an image of that size lies on what `image_pixels` makes of it."""
    if spec.letterbox is not None:
        inside, top, left = fit_letterbox(height, width, spec)
        scale = (inside[0] / height, inside[1] / width)
        return ImagePlacement((height, width), scale, (-top, -left), spec.letterbox)
    resized = compute_resized(height, width, spec.resize)
    window = spec.crop or resized
    start = [
        round((have - want) / 2) if have >= want else -((want - have) // 2)
        for have, want in zip(resized, window, strict=True)
    ]
    scale = (resized[0] / height, resized[1] / width)
    return ImagePlacement((height, width), scale, (start[0], start[1]), (window[0], window[1]))


def normalize_pixels(pixels: Array, spec: ImagePreprocess) -> Array:
    """Turn uint8 [n, H, W, C] into float32 (pixel * scale - mean) / std in the spec's layout."""
    source = _to_layout(pixels, spec)
    values: Array = np.empty(source.shape, np.float32)
    per_channel = (-1, 1, 1) if spec.layout == "NCHW" else (-1,)
    mean = np.array(spec.mean, np.float32).reshape(per_channel)
    std = np.array(spec.std, np.float32).reshape(per_channel)
    for row in range(len(values)):  # image by image stays in the CPU's cache: twice as fast
        np.multiply(source[row], np.float32(spec.scale), out=values[row], dtype=np.float32)
        values[row] -= mean
        values[row] /= std
    return values


def _to_channels(pixels: Array, spec: ImagePreprocess) -> Array:
    """Convert [H, W] or [H, W, 1|3|4] to [H, W, C] with the spec's channels, as Pillow converts."""
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    if pixels.shape[2] == spec.n_channels:
        return pixels
    if spec.channels == "RGB":  # grey is repeated, alpha dropped
        return np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels[..., :3]
    return np.asarray(import_pillow().Image.fromarray(pixels).convert("L"))[..., None]


def _resize(pixels: Array, size: tuple[int, int], resample: str) -> Array:
    image = import_pillow().Image
    source = image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else np.ascontiguousarray(pixels))
    result = np.asarray(source.resize((size[1], size[0]), image.Resampling[resample.upper()]))
    return result.reshape(*size, -1)


def _to_layout(pixels: Array, spec: ImagePreprocess) -> Array:
    return pixels.transpose(0, 3, 1, 2) if spec.layout == "NCHW" else pixels
