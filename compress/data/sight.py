"""How images reach a model that also sees, found by running its own processor on a few.

What a bundle's runtime has to do with an image is what the processor does with any: one text in the place where the
chat template names it, and pixels of one size, resized, cropped and normalized. Where the processor makes of an image
what its size asks for, a recipe brings all images to one size before (`chat.image_size`), and what is found is how its
patches come from an image of that.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from compress.data.chat import ChatEncoder
from compress.data.patches import find_patches
from compress.errors import SourceError
from compress.models.preprocess import make_image_preprocess
from compress.models.processor import IDS, MASK
from runtime.bundle.columns import Array
from runtime.bundle.manifest import PromptImages
from runtime.bundle.records import to_json
from runtime.encode.chat import ask_about, take_parts
from runtime.encode.images import ImagePreprocess, batch_pixels, normalize_pixels
from runtime.errors import UsageError

SIZES = ((48, 64), (64, 48), (900, 1400), (1500, 700))
"""Height and width of the images that a processor is tried with: smaller and larger than what models read."""
APART = 0.02
"""Mean difference of normalized pixels, of noise, in which two libraries round otherwise: of Pillow's own 1e-7."""
WAY_OUT = "use target: transformers, which runs the model's own code and processor"
USUAL_SIDES = (448, 384, 512, 768)
"""Of images: what is tried first where a recipe has to choose a size. 448 is 16 patches of 28 pixels and 14 of 32, as
Qwen's models have them; Gemma 4 makes every image as large as 768."""
MOST_SIDE = 2048
"""Of images that are tried: a number of a processor's settings may count pixels, or anything else."""


class UnreadImages(SourceError):
    """A runtime could not do with any image what a processor does; `size`: what images could be brought to before."""

    def __init__(self, problems: Sequence[str], size: tuple[int, int] | None) -> None:
        super().__init__(problems)
        self.size = size


@dataclass(frozen=True)
class Sight:
    """What a processor makes of one image, whatever its size."""

    images: PromptImages
    pixels: str
    """The input that its pixels are."""
    example: Mapping[str, Array]
    """All that the model reads of a question about an image, [1, ...]; only the pixels are of this one."""
    token_id: int
    """Of the token that stands for a row of its features."""
    n_tokens: int
    marks: tuple[str, ...]
    """Inputs [1, t] that are 1 where such a token is, else 0."""

    def make_feeds(self, of_text: Mapping[str, Array]) -> dict[str, Array]:
        """Return the feeds of the example, with empty caches as of a text's."""
        ids = self.example[IDS]
        return {**of_text, **self.example, MASK: np.ones_like(ids)}


def find_sight(chats: ChatEncoder) -> Sight:
    """Return how images reach the model. UnreadImages where a runtime could not do what its processor does."""
    try:
        return _find_sight(chats)
    except (UsageError, SourceError) as error:
        size = _find_size(chats)
        sized = f"set chat.image_size: {list(size)}, to which all images are then brought, or " if size else ""
        problems = [text if WAY_OUT in text else f"{text}; {sized}{WAY_OUT}" for text in error.problems]
        raise UnreadImages(problems, size) from error


def _find_size(chats: ChatEncoder) -> tuple[int, int] | None:
    """Return a size of images of which a runtime can do what the processor does: a usual one, or one that it names.

    None where there is none, and where the recipe names one.
    """
    text = chats.processor.auto_processor.image_processor.to_json_string()
    named = [int(number) for number in re.findall(r"(?<![\d.])\d+(?![\d.])", text)]
    sides = dict.fromkeys([*USUAL_SIDES, *named, *map(math.isqrt, named)])
    for side in (side for side in sides if 1 < side <= MOST_SIDE and chats.chat.image_size is None):
        with suppress(UsageError, SourceError):
            _find_sight(replace(chats, chat=chats.chat.model_copy(update={"image_size": (side, side)})))
            return side, side
    return None


def _find_sight(chats: ChatEncoder) -> Sight:
    images = draw_images()
    question = "What is it?"
    asked, without = (chats.render_prompt(take_parts(ask_about(some, question))[0]) for some in ([0], []))
    heard, made = zip(*(chats.processor.expand(asked, [image]) for image in images), strict=True)
    if len(set(heard)) > 1:
        raise SourceError("its processor makes as many tokens of an image as that is large, or cuts it into tiles")
    marker, text = _find_places(without, asked, heard[0])
    ids = made[0][IDS]
    if not np.array_equal(ids, chats.tokenizer(heard[0], add_special_tokens=False)[IDS]):
        raise SourceError("its processor makes other tokens of a text than its tokenizer")
    added = Counter(token for token in ids.tolist() if token in chats.tokenizer.added_tokens_decoder)
    added.subtract(Counter(chats.tokenizer(without, add_special_tokens=False)[IDS]))
    token, n_tokens = added.most_common(1)[0] if added else (-1, 0)
    if n_tokens < 1:
        raise SourceError("its processor has no token of its own that stands for a part of an image")
    marks = tuple(name for name, values in made[0].items() if _is_mark(values, ids))
    for name in marks:
        if not np.array_equal(made[0][name][0], ids == token):
            raise SourceError(f"its processor gives {name} that are not of images' tokens alone")
    pixels, processor, order = find_pixels(made), chats.processor, None
    if chats.chat.image_size is None:
        spec = find_preprocess(processor.auto_processor.image_processor, images, [each[pixels] for each in made])
    else:
        spec, order = find_patches(processor.resizing, lambda image: processor.expand(asked, [image])[1][pixels])
    example = {name: values for name, values in made[0].items() if name != IDS}
    return Sight(
        PromptImages(marker, text, to_json(spec), order),
        pixels,
        {IDS: ids[None], **example},
        token,
        n_tokens,
        marks,
    )


def _find_places(without: str, asked: str, heard: str) -> tuple[str, str]:
    """Return what the chat template writes for an image, and what the processor tokenizes there."""
    pairs = enumerate(zip(without, asked, strict=False))
    start = next((i for i, (one, other) in pairs if one != other), len(without))
    end = len(without) - start
    marker = asked[start : len(asked) - end]
    if not marker.strip() or not asked.endswith(without[start:]):
        raise SourceError("its chat template names no image where one is asked about")
    if not heard.startswith(asked[:start]) or not heard.endswith(without[start:]):
        raise SourceError("its processor changes more of a text than where an image is")
    text = heard[start : len(heard) - end]
    ends = marker[: len(marker) - len(marker.lstrip())], marker[len(marker.rstrip()) :]
    if text.startswith(ends[0]) and text.endswith(ends[1]):
        return marker.strip(), text[len(ends[0]) : len(text) - len(ends[1])]
    return marker, text


def _is_mark(values: Array, ids: Array) -> bool:
    return values.shape == (1, len(ids)) and values.dtype.kind in "iub"


def draw_images() -> list[Array]:
    """Return images of noise, of SIZES, uint8 [H, W, 3]."""
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (*size, 3), np.uint8) for size in SIZES]


def find_pixels(made: Sequence[Mapping[str, Array]]) -> str:
    """Return the input that pixels are: floats, of one size. All others are the same for any image.

    `made`: what a processor gives of each image. SourceError.
    """
    names = [name for name, values in made[0].items() if values.dtype.kind == "f"]
    for name in made[0]:
        one, *others = (each[name] for each in made)
        of_size = any(other.shape != one.shape for other in others)
        if of_size or (name not in names and not all(np.array_equal(other, one) for other in others)):
            raise SourceError(f"its processor gives {name} by the size of an image")
    if len(names) != 1:
        raise SourceError(f"its processor makes {' and '.join(names) or 'no floats'} of an image: one can be read")
    return names[0]


def find_preprocess(processor: Any, images: Sequence[Array], expected: Sequence[Array]) -> ImagePreprocess:
    """Return what makes the pixels that transformers' image processor has made of images. SourceError."""
    first = expected[0]
    if first.ndim < 4 or first.size != np.prod(first.shape[-3:]):
        raise SourceError("its processor cuts an image into tiles, or patches")
    spec = make_image_preprocess(json.loads(processor.to_json_string()), Path(type(processor).__name__))
    for image, values in zip(images, expected, strict=True):
        own = normalize_pixels(batch_pixels([image], spec), spec)[0]
        if own.shape != values.shape[-3:] or np.abs(own - values.reshape(own.shape)).mean() > APART:
            raise SourceError("its processor does more with an image than resizing, cropping and normalizing it")
    return spec
