"""Images and texts, embedded so that those which belong together lie close: CLIP and its kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from runtime.bundle.columns import Array
from runtime.bundle.tensors import TensorSpec
from runtime.errors import BundleError, UsageError
from runtime.tasks.base import BatchFacts, Task, Tensors, describe_shapes, one_output, rename

IMAGES, TEXTS = "image_embeds", "text_embeds"


class ZeroShotImageClassification(Task):
    """Embed an image and its text. Outputs: {"image_embeds", "text_embeds"}: float32 [N, D], of length 1."""

    name = "zero-shot-image-classification"
    about = "an embedding for each image and each text, close where they belong together: search, zero-shot classes"
    columns = ("image", "text")
    required = 2
    preprocess = "image-text"
    outputs = "embedding pairs"
    always = (IMAGES, TEXTS)

    def read_outputs(self, outputs: Tensors, batch: BatchFacts) -> dict[str, Array]:
        """Return the two outputs of those names, each row divided by its length. BundleError."""
        found = [outputs[name] for name in self.always if name in outputs]
        if len(found) != 2 or found[0].ndim != 2 or found[0].shape != found[1].shape:
            raise BundleError(
                f"a model of images and texts has the outputs {IMAGES} and {TEXTS}, both [batch, width]; this model: "
                f"{describe_shapes(outputs)}"
            )
        return {name: _normalize(rows) for name, rows in zip(self.always, found, strict=True)}

    def answer_specs(self, outputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Return the specs of both embeddings."""
        both = [one_output(outputs, name) for name in self.always]
        return tuple(
            rename(spec, name, "float32", spec.shape[-1]) for name, spec in zip(self.always, both, strict=True)
        )

    def to_columns(self, samples: Any) -> dict[str, Any]:
        """Return columns as they are. UsageError for anything else: a sample is an image and a text."""
        if not isinstance(samples, Mapping):
            raise UsageError(f"a {self.name} model takes pairs: give {{image: [...], text: [...]}}, of one length")
        return dict(samples)


def _normalize(rows: Array) -> Array:
    values = rows.astype(np.float32, copy=False)
    lengths = np.linalg.norm(values.astype(np.float64), axis=1, keepdims=True)
    result: Array = (values / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)
    return result
