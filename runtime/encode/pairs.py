"""An image and a text to the inputs of a model that embeds both."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from runtime.bundle.columns import Array, Columns, Encoded, Rows, take
from runtime.bundle.records import PYDANTIC_CONFIG
from runtime.bundle.tensors import TensorSpec
from runtime.encode.images import ImageEncoder, ImagePreprocess, make_image_encoder
from runtime.encode.texts import FEEDS, TextEncoder, TextPreprocess, make_text_encoder
from runtime.errors import UsageError


@dataclass(frozen=True)
class ImageTextPreprocess:
    """Images and texts, each as its own record says."""

    kind: Literal["image-text"] = "image-text"
    """Discriminator."""
    image: ImagePreprocess = field(default_factory=ImagePreprocess)
    """How an image becomes the first tower's input."""
    text: TextPreprocess = field(default_factory=lambda: TextPreprocess(padding="max_length", pooling="none"))
    """How a text becomes the other's; its `pooling` and `normalize` are not used."""

    __pydantic_config__: ClassVar[dict[str, object]] = PYDANTIC_CONFIG

    @property
    def tokenizer(self) -> str:
        """Return the tokenizer's file name inside the model's folder."""
        return self.text.tokenizer


@dataclass(frozen=True)
class ImageTextEncoder:
    """Samples with the columns "image" and "text" -> the model's inputs."""

    spec: ImageTextPreprocess
    image: ImageEncoder
    text: TextEncoder

    def encode(self, columns: Columns, rows: Rows = None) -> dict[str, Array]:
        """Return one batch: what the encoders of images and of texts make. UsageError."""
        texts = {"text": take(columns, "text", rows)}
        return self.image.encode(columns, rows) | self.text.encode(texts)

    def encode_with_facts(self, columns: Columns, rows: Rows, facts: tuple[str, ...]) -> Encoded:
        """Return the inputs; nothing more is known of them."""
        return self.encode(columns, rows), {}


def make_image_text_encoder(
    spec: ImageTextPreprocess, inputs: tuple[TensorSpec, ...], model_dir: Path | None
) -> ImageTextEncoder:
    """Make the encoder. UsageError unless inputs are one of images and some of tokens; BundleError: no tokenizer."""
    tokens = tuple(value for value in inputs if value.name in FEEDS)
    images = tuple(value for value in inputs if value.name not in FEEDS)
    if not tokens or len(images) != 1:
        shapes = ", ".join(f"{value.name} {list(value.shape)}" for value in inputs)
        raise UsageError(
            f"image-text preprocessing feeds one input of images, and {', '.join(FEEDS)}; the model has {shapes}"
        )
    return ImageTextEncoder(
        spec, make_image_encoder(spec.image, images), make_text_encoder(spec.text, tokens, model_dir)
    )
