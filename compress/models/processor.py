"""The processor that a model's folder has for images or sounds beside texts, as transformers makes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compress.errors import SourceError
from compress.models.huggingface import quiet
from runtime.bundle.columns import Array
from runtime.encode.chat import AUDIO, IMAGE, PLURALS
from runtime.encode.images import ImagePreprocess, image_pixels
from runtime.errors import UsageError

IDS, MASK = "input_ids", "attention_mask"
PARTS = {IMAGE: ("image_processor",), AUDIO: ("feature_extractor", "audio_processor")}
"""What of transformers' processors reads each kind of part."""


@dataclass(frozen=True)
class Processor:
    """Makes of a text that names images or sounds, and these, what the model reads. `folder`: the model's.

    `kind`: image or audio, whichever there are. `image_size`: height and width that images are brought to before.
    """

    folder: Path
    trust_remote_code: bool = False
    kind: str = IMAGE
    image_size: tuple[int, int] | None = None

    @property
    def resizing(self) -> ImagePreprocess:
        """Return what is done with an image before transformers' processor gets it."""
        return ImagePreprocess(resize=self.image_size, resample="bicubic")

    @cached_property
    def auto_processor(self) -> Any:
        """Return transformers' processor. SourceError."""
        from transformers import AutoProcessor

        try:
            with quiet(), without_films():
                made = AutoProcessor.from_pretrained(
                    self.folder, local_files_only=True, trust_remote_code=self.trust_remote_code
                )
        except Exception as error:  # whatever a processor's own code raises
            said = " ".join(str(error).split()).partition(". ")[0][:300]
            raise SourceError(
                f"{self.folder}: transformers cannot build its processor, which reads {PLURALS[self.kind]} ({said}): "
                "install what it names, or give texts alone"
            ) from error
        if all(getattr(made, part, None) is None for part in PARTS[self.kind]):
            what = PLURALS[self.kind]
            raise SourceError(f"{self.folder}: its files say nothing of {what}: copy preprocessor_config.json there")
        return made

    @property
    def rate(self) -> int:
        """Return how many samples of a sound it reads in a second. SourceError."""
        return int(self._extractor.sampling_rate)

    @property
    def _extractor(self) -> Any:
        """Return the part that reads sounds. SourceError."""
        parts = (getattr(self.auto_processor, name, None) for name in PARTS[AUDIO])
        return next(part for part in parts if part is not None)

    def encode(self, text: str, parts: Sequence[Array]) -> dict[str, Array]:
        """Return what the model reads of one rendered text and its images or sounds, in their order.

        `parts`: uint8 [H, W(, C)], or float32 [T] at `rate`.
        "input_ids" int64 [t], with as many tokens for each as the model has features of it, and by name what else
        there is, [n, ...]: pixels, sizes, kinds of tokens. UsageError.
        """
        made = self.expand(text, parts)[1]
        if self.kind != AUDIO:
            return made
        longest = max(map(len, parts))
        reach = getattr(self._extractor, "n_samples", longest)
        if longest > reach:  # WhisperFeatureExtractor cuts there without a word, unless its processor hands it pieces
            beginning = self.expand(text, [sound[:reach] for sound in parts])[1]
            if all(np.array_equal(made[name], beginning[name]) for name in made):
                raise UsageError(
                    f"the model's processor reads {reach / self.rate:g} of the {longest / self.rate:g} seconds of a "
                    "sound: give it in pieces, a sample each"
                )
        return made

    def expand(self, text: str, parts: Sequence[Array]) -> tuple[str, dict[str, Array]]:
        """Return what the processor tokenizes for a text with images or sounds, and what `encode` does. UsageError."""
        given: dict[str, Any] = {"audio": list(parts), "sampling_rate": self.rate} if self.kind == AUDIO else {}
        if self.kind == IMAGE:
            from PIL.Image import fromarray

            given = {"images": [[fromarray(image_pixels(image, self.resizing)) for image in parts]]}
        processor = self.auto_processor
        listener = _Listener(processor.tokenizer)
        try:
            processor.tokenizer = listener
            with quiet(), without_films():
                made = processor(text=[text], **given, add_special_tokens=False, return_tensors="pt")
        except Exception as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise UsageError(
                f"the model's processor fails on its text and {len(parts)} {PLURALS[self.kind]} ({said})"
            ) from error
        finally:
            processor.tokenizer = listener.tokenizer
        odd = [name for name, values in made.items() if not isinstance(values, torch.Tensor)]
        if odd:
            raise UsageError(
                f"the model's processor gives {odd[0]} of several shapes: give one {self.kind} a conversation"
            )
        arrays = {name: _to_array(values) for name, values in made.items() if name != MASK}
        # VoxtralProcessor takes `audio` beside a text, and says nothing of it: only its own template reads sounds
        if not any(values.dtype.kind == "f" for values in arrays.values()):
            raise UsageError(
                f"the model's processor leaves out the {PLURALS[self.kind]} of a rendered text: give texts alone"
            )
        return listener.heard, {**arrays, IDS: arrays[IDS][0].astype(np.int64)}


class _Listener:
    """A tokenizer in a processor, and the last text that it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.heard = tokenizer, ""

    def __call__(self, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        self.heard = text if isinstance(text, str) else "".join(text or ())
        return self.tokenizer(text, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def _to_array(values: torch.Tensor) -> Array:
    array: Array = (values.float() if values.is_floating_point() else values).numpy()
    return array


@contextmanager
def without_films() -> Iterator[None]:
    """Leave out the part of a processor that reads films while the context is open, where torchvision is missing.

    transformers' processors of films all need it, and a processor that has one is not built without.
    """
    from transformers import ProcessorMixin
    from transformers.utils.import_utils import is_torchvision_available

    kind: Any = ProcessorMixin
    if is_torchvision_available():
        yield
        return
    known = vars(kind)["get_attributes"]
    kind.get_attributes = classmethod(lambda cls: [n for n in known.__func__(cls) if n != "video_processor"])
    try:
        yield
    finally:
        kind.get_attributes = known
