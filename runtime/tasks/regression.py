"""One number or several for each sample: of tensors, images, sounds or texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.bundle.columns import Array
from runtime.bundle.tensors import TensorSpec
from runtime.errors import BundleError
from runtime.tasks.base import BatchFacts, ReadsAudio, ReadsImages, ReadsTexts, Task, Tensors, describe_shapes, rename

NUMBERS = "numbers"


class Regression(Task):
    """Predict numbers. Outputs: {"numbers": float32 [N, K]}."""

    name = "regression"
    about = "a number, or several, for each sample of arrays: a price, a dose, a remaining life"
    outputs = NUMBERS
    always = (NUMBERS,)

    def read_outputs(self, outputs: Tensors, batch: BatchFacts) -> dict[str, Array]:
        """Return {"numbers": float32 [n, K]} of the only floating output, [n], [n, K] or [n, K, 1]. BundleError."""
        found = [output for output in outputs.values() if output.dtype.kind == "f"]
        if len(found) != 1 or not 1 <= found[0].ndim <= 2 + (found[0].shape[2:] == (1,)):
            raise BundleError(
                f"a {self.name} model has one output of numbers, [batch] or [batch, numbers]; this model: "
                f"{describe_shapes(outputs)}"
            )
        return {NUMBERS: found[0].reshape(len(found[0]), -1).astype(np.float32, copy=False)}

    def predict(self, outputs: Tensors, class_names: Sequence[str]) -> list[Any] | None:
        """Return for each sample [{"label", "score"}, ...]: each number with its name, or its place."""
        named = [*class_names, *range(len(class_names), outputs[NUMBERS].shape[1])]
        return [
            [{"label": name, "score": number} for name, number in zip(named, row, strict=False)]
            for row in outputs[NUMBERS].tolist()
        ]

    def answers(self, outputs: Tensors, class_names: Sequence[str]) -> dict[str, Array]:
        """Return numbers float32 [n, K]."""
        return {NUMBERS: outputs[NUMBERS]}

    def answer_specs(self, outputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Return the spec of the numbers."""
        numbers = next((spec for spec in outputs if spec.dtype.startswith("float")), outputs[0])
        return (rename(numbers, NUMBERS, "float32", numbers.shape[1] if len(numbers.shape) > 1 else 1),)


class ImageRegression(Regression, ReadsImages):
    """Predict numbers for each image."""

    name = "image-regression"
    about = "a number, or several, for each image: an age, a weight, coordinates"


class AudioRegression(Regression, ReadsAudio):
    """Predict numbers for each sound."""

    name = "audio-regression"
    about = "a number, or several, for each sound"


class TextRegression(Regression, ReadsTexts):
    """Predict numbers for each text, or pair of texts."""

    name = "text-regression"
    about = "a number, or several, for each text or pair of texts: a rating, a similarity, a relevance"


REGRESSIONS = (Regression(), ImageRegression(), AudioRegression(), TextRegression())
