"""Any number of classes for each sample: of tensors, images, sounds or texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.bundle.columns import Array
from runtime.bundle.tensors import TensorSpec
from runtime.tasks.base import Classification, ReadsAudio, ReadsImages, ReadsTexts, Tensors, one_output, rename

LIKELY = 0.5
"""Probability from which on a class is given."""


class MultiLabelClassification(Classification):
    """Say of each class whether a sample has it. Outputs: {"logits": float32 [N, C]}, probabilities by the sigmoid."""

    name = "multi-label-classification"
    about = "any number of classes for each sample of arrays"
    outputs = "label sets"

    def predict(self, outputs: Tensors, class_names: Sequence[str]) -> list[Any] | None:
        """Return for each sample {"label", "score"} of its classes, the likeliest first; [] where it has none."""
        answers = []
        for row in probabilities(outputs["logits"]):
            chosen = [int(place) for place in np.argsort(-row, kind="stable") if row[place] >= LIKELY]
            answers.append(
                [{"label": class_names[c] if c < len(class_names) else c, "score": float(row[c])} for c in chosen]
            )
        return answers

    def answers(self, outputs: Tensors, class_names: Sequence[str]) -> dict[str, Array]:
        """Return score float32 [n, C], each class's probability, and logits [n, C]."""
        return {"score": probabilities(outputs["logits"]), "logits": outputs["logits"]}

    def answer_specs(self, outputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Return the specs of `answers`."""
        logits = one_output(outputs, "logits")
        return tuple(rename(logits, name, "float32", logits.shape[-1]) for name in ("score", "logits"))


class ImageMultiLabelClassification(MultiLabelClassification, ReadsImages):
    """Say of each class whether an image shows it."""

    name = "image-multi-label-classification"
    about = "any number of classes for each image: what it shows"


class AudioMultiLabelClassification(MultiLabelClassification, ReadsAudio):
    """Say of each class whether a sound has it."""

    name = "audio-multi-label-classification"
    about = "any number of classes for each sound: what is heard in it"


class TextMultiLabelClassification(MultiLabelClassification, ReadsTexts):
    """Say of each class whether a text has it."""

    name = "text-multi-label-classification"
    about = "any number of classes for each text: its topics, its tone"


MULTI_LABEL_TASKS = (
    MultiLabelClassification(),
    ImageMultiLabelClassification(),
    AudioMultiLabelClassification(),
    TextMultiLabelClassification(),
)


def probabilities(logits: Array) -> Array:
    """Return the sigmoid of logits [N, C], float32."""
    values: Array = np.exp(-np.logaddexp(0.0, -logits.astype(np.float64))).astype(np.float32)
    return values
