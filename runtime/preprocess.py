"""The ONE implementation of image and text preprocessing: calibration, evaluation and serving all call it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, cast

import numpy as np

from runtime.columns import Array, Columns, Rows, take
from runtime.errors import UsageError
from runtime.images import make_image_encoder
from runtime.language import LanguageEncoder, LanguagePreprocess, make_language_encoder
from runtime.records import PYDANTIC_CONFIG, check_file_name, from_json, to_json
from runtime.texts import make_text_encoder, pool

if TYPE_CHECKING:
    from runtime.manifest import TensorSpec

__all__ = [
    "ImagePreprocess",
    "LanguageEncoder",
    "LanguagePreprocess",
    "PreprocessSpec",
    "Preprocessor",
    "TensorPreprocess",
    "TextPreprocess",
    "make_preprocessor",
    "pool",
    "spec_from_dict",
    "spec_to_dict",
]


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
        if any(size < 1 for size in (*sizes, *(self.crop or ()))):
            raise ValueError(f"resize {self.resize} and crop {self.crop} must be at least 1 pixel")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in {1, self.n_channels} or not all(map(math.isfinite, values)):
                raise ValueError(
                    f"{name} is {values}: give 1 or {self.n_channels} finite numbers for {self.channels} images"
                )
        if not math.isfinite(self.scale) or 0 in self.std:
            raise ValueError(f"scale {self.scale} must be finite and std {self.std} must not be 0")

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
        check_file_name("tokenizer", self.tokenizer)


@dataclass(frozen=True)
class TensorPreprocess:
    """Arrays that are the model's inputs already, one column for each input name."""

    kind: Literal["tensor"] = "tensor"
    """Discriminator."""

    __pydantic_config__: ClassVar[dict[str, object]] = PYDANTIC_CONFIG


PreprocessSpec = ImagePreprocess | TextPreprocess | LanguagePreprocess | TensorPreprocess

_KINDS: dict[str, type[PreprocessSpec]] = {
    "image": ImagePreprocess,
    "text": TextPreprocess,
    "tensor": TensorPreprocess,
    "language": LanguagePreprocess,
}


def spec_to_dict(spec: PreprocessSpec) -> dict[str, Any]:
    """The spec as JSON can hold it."""
    return cast(dict[str, Any], to_json(spec))


def spec_from_dict(data: Mapping[str, Any]) -> PreprocessSpec:
    """What `spec_to_dict` made; ValueError, naming the key, for anything else."""
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"preprocess.kind: {kind!r} is not one of {', '.join(_KINDS)}")
    return from_json(_KINDS[kind], dict(data), "preprocess")


class Preprocessor(Protocol):
    """Samples to a model's inputs, one batch at a time."""

    @property
    def spec(self) -> PreprocessSpec: ...

    def encode(self, columns: Columns, rows: Rows = None) -> dict[str, Array]:
        """The rows (default: all) as {input name: array}, in each input's dtype; UsageError if they do not fit."""
        ...


def make_preprocessor(
    spec: PreprocessSpec,
    inputs: tuple[TensorSpec, ...],
    model_dir: Path | None = None,
    vocab_size: int | None = None,
) -> Preprocessor:
    """What feeds a model that has `inputs`; `model_dir` holds the tokenizer where the spec is for text.

    With `vocab_size` a language model's encoder refuses token ids beyond it. UsageError if the spec cannot make these
    inputs; BundleError if the tokenizer cannot be read.
    """
    if isinstance(spec, ImagePreprocess):
        return make_image_encoder(spec, inputs)
    if isinstance(spec, TextPreprocess):
        return make_text_encoder(spec, inputs, model_dir)
    if isinstance(spec, LanguagePreprocess):
        return make_language_encoder(spec, inputs, model_dir, vocab_size)
    return TensorEncoder(spec, inputs)


@dataclass(frozen=True)
class TensorEncoder:
    """Samples with one column for each model input; other columns (label) are passed over."""

    spec: TensorPreprocess
    inputs: tuple[TensorSpec, ...]

    def encode(self, columns: Columns, rows: Rows = None) -> dict[str, Array]:
        """One batch: the columns in the inputs' dtypes; UsageError where a dtype or a shape does not fit."""
        return {i.name: _tensor(i, take(columns, i.name, rows)) for i in self.inputs}


def _tensor(spec: TensorSpec, column: Any) -> Array:
    values = np.asarray(column)
    if values.dtype.kind not in "biuf" or not np.can_cast(values.dtype, spec.dtype, "same_kind"):
        raise UsageError(f"column '{spec.name}' holds {values.dtype}, but the model's input is {spec.dtype}")
    fits = len(values.shape) == len(spec.shape) and all(
        have == want for have, want in zip(values.shape[1:], spec.shape[1:], strict=True) if isinstance(want, int)
    )
    if not fits:
        raise UsageError(f"column '{spec.name}' has shape {values.shape}, but the model's input is {spec.shape}")
    return np.ascontiguousarray(values, dtype=spec.dtype)
