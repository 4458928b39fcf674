"""Any number of classes for each sample: of tensors, images, sounds or texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from runtime.bundle.columns import Array
from runtime.bundle.manifest import Postprocess
from runtime.bundle.tensors import TensorSpec
from runtime.tasks.base import (
    BatchFacts,
    Classification,
    ReadsAudio,
    ReadsImages,
    ReadsTexts,
    Task,
    Tensors,
    mark_chosen,
    name_class,
    one_output,
    rename,
)

CHOSEN = "chosen"


class MultiLabelClassification(Classification):
    """Say of each class whether a sample has it. Outputs: {"logits": float32 [N, C]}, probabilities by the sigmoid.

    With `postprocess` also {"chosen": bool [N, C]}, the classes that are given; without it those of probability 0.5.
    """

    name = "multi-label-classification"
    about = "any number of classes for each sample of arrays"
    outputs = "label sets"
    postprocess_fields = ("threshold", "top_k")

    def read_outputs(self, outputs: Tensors, batch: BatchFacts) -> dict[str, Array]:
        """Return the logits, as a classifier's, and what is chosen of them. BundleError."""
        read = super().read_outputs(outputs, replace(batch, postprocess=None))
        if batch.postprocess is not None and batch.postprocess.set_fields:
            read[CHOSEN] = mark_chosen(probabilities(read["logits"]), batch.postprocess)
        return read

    def predict(self, outputs: Tensors, class_names: Sequence[str]) -> list[Any] | None:
        """Return for each sample {"label", "score"} of its classes, the likeliest first; [] where it has none."""
        scores = probabilities(outputs["logits"])
        marked = outputs[CHOSEN] if CHOSEN in outputs else mark_chosen(scores, None)
        answers = []
        for row, given in zip(scores, marked, strict=True):
            chosen = [int(place) for place in np.argsort(-row, kind="stable") if given[place]]
            answers.append([{"label": name_class(c, class_names), "score": float(row[c])} for c in chosen])
        return answers

    def answers(self, outputs: Tensors, class_names: Sequence[str]) -> dict[str, Array]:
        """Return score float32 [n, C], each class's probability, logits [n, C], and what was chosen, bool [n, C]."""
        chosen = {CHOSEN: outputs[CHOSEN]} if CHOSEN in outputs else {}
        return {"score": probabilities(outputs["logits"]), "logits": outputs["logits"]} | chosen

    def answer_specs(self, outputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Return the specs of `answers`; `outputs`: those of the model, then `postprocess_specs`."""
        logits = one_output(outputs, "logits")
        given = tuple(rename(logits, name, "float32", logits.shape[-1]) for name in ("score", "logits"))
        return (*given, *(rename(logits, s.name, s.dtype, logits.shape[-1]) for s in outputs if s.name == CHOSEN))

    def check_postprocess(self, how: Postprocess | None, n_classes: int | None = None) -> None:
        """Raise UsageError for a field that it does not take, or for more classes than there are; one may be chosen."""
        Task.check_postprocess(self, how, n_classes)

    def postprocess_specs(self, how: Postprocess | None, batch: int | str) -> tuple[TensorSpec, ...]:
        """Return the spec of what is chosen, where that is added."""
        return (TensorSpec(CHOSEN, "bool", (batch, "classes")),) if how is not None and how.set_fields else ()


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
