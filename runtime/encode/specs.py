"""How samples become inputs, as records: what a recipe and a manifest say of images, texts and tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from runtime.bundle.records import PYDANTIC_CONFIG, check_file_name

MOST_PIXELS, MOST_TOKENS = 2**14, 2**20
"""A side of an image; tokens that texts are filled up to."""
MOST_SCALE = 1e12
"""Of scale, mean and std: larger ones leave float32, in which pixels are normalised."""


@dataclass(frozen=True)
class ImagePreprocess:
    """uint8 images to a model's input: resize, centre crop, (pixel * scale - mean) / std."""

    kind: Literal["image"] = "image"
    """Discriminator."""
    resize: int | tuple[int, int] | None = None
    """A number: the shorter side, keeping proportions; [height, width]: exactly that."""
    crop: tuple[int, int] | None = None
    """Centre crop to [height, width], after resize."""
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
        if not all(1 <= size <= MOST_PIXELS for size in (*sizes, *(self.crop or ()))):
            raise ValueError(
                f"resize {self.resize} and crop {self.crop} must be at least 1 pixel, {MOST_PIXELS} at most"
            )
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
class TextPreprocess:
    """Texts to token ids, and for feature-extraction the model's hidden states to one embedding."""

    kind: Literal["text"] = "text"
    """Discriminator."""
    max_length: int = 128
    """Tokens, special ones included; longer texts are cut."""
    padding: Literal["longest", "max_length"] = "longest"
    """To the longest text of the batch, or always to `max_length`."""
    pooling: Literal["mean", "cls", "max", "none"] = "mean"
    """feature-extraction only: over the tokens that are not padding; none: the model's output is the embedding."""
    normalize: bool = True
    """feature-extraction only: divide by the L2 norm."""
    tokenizer: str = "tokenizer.json"
    """File name inside the model's folder."""

    __pydantic_config__: ClassVar[dict[str, object]] = PYDANTIC_CONFIG

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise ValueError(f"max_length is {self.max_length}, below 1")
        if self.max_length > MOST_TOKENS:
            raise ValueError(f"max_length is {self.max_length}, above {MOST_TOKENS}")
        check_file_name("tokenizer", self.tokenizer)


@dataclass(frozen=True)
class TensorPreprocess:
    """Arrays that are the model's inputs already, one column for each input name."""

    kind: Literal["tensor"] = "tensor"
    """Discriminator."""

    __pydantic_config__: ClassVar[dict[str, object]] = PYDANTIC_CONFIG
