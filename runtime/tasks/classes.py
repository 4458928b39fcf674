"""One class a sample: what the tasks that choose one share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.bundle.columns import Array
from runtime.bundle.tensors import TensorSpec
from runtime.errors import BundleError
from runtime.tasks.base import BatchFacts, Task, Tensors, describe_shapes, one_output, rename


class Classification(Task):
    """Choose one class for each sample. Outputs: {"logits": float32 [N, C]}."""

    outputs = "classes"
    always = ("logits",)

    def read_outputs(self, outputs: Tensors, batch: BatchFacts) -> dict[str, Array]:
        """Return {"logits": float32 [n, C]}: the output of that name, else the only one [B, C]. BundleError."""
        candidates = [outputs["logits"]] if "logits" in outputs else [o for o in outputs.values() if o.ndim == 2]
        if len(candidates) != 1 or candidates[0].ndim != 2:
            raise BundleError(
                f"a classifier has one output [batch, classes]; this model: {describe_shapes(outputs)}; "
                "call that output 'logits'"
            )
        return {"logits": candidates[0].astype(np.float32, copy=False)}

    def predict(self, outputs: Tensors, class_names: Sequence[str]) -> list[Any] | None:
        """Return {"label", "score"} for each sample; None for a single column, which is a score, not a choice."""
        return classify(outputs["logits"], class_names) if outputs["logits"].shape[1] > 1 else None

    def answers(self, outputs: Tensors, class_names: Sequence[str]) -> dict[str, Array]:
        """Return label (str) [n, 1], score float32 [n, 1] and logits [n, C]; where C is 1 the logits alone."""
        predictions = self.predict(outputs, class_names)
        if predictions is None:
            return {"logits": outputs["logits"]}
        return {
            "label": np.array([[str(prediction["label"])] for prediction in predictions], np.object_),
            "score": np.array([[prediction["score"]] for prediction in predictions], np.float32),
            "logits": outputs["logits"],
        }

    def answer_specs(self, outputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Return the specs of `answers`."""
        logits = one_output(outputs, "logits")
        scores = rename(logits, "logits", "float32", logits.shape[-1])
        choice = rename(logits, "label", "object", 1), rename(logits, "score", "float32", 1)
        return (scores,) if logits.shape[-1] == 1 else (*choice, scores)


def classify(logits: Array, class_names: Sequence[str]) -> list[dict[str, Any]]:
    """Return for each row of [N, C] {"label": class name (its number if it has none), "score": softmax probability}."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    scores = shifted / shifted.sum(axis=1, keepdims=True)  # [N, C]
    best = logits.argmax(axis=1)
    return [
        {"label": class_names[c] if c < len(class_names) else int(c), "score": float(s[c])}
        for c, s in zip(best, scores, strict=True)
    ]
