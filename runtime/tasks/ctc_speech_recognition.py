"""Speech, written down letter by letter as it is heard: connectionist temporal classification (Graves et al. 2006)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.bundle.columns import Array, Columns
from runtime.bundle.tensors import TensorSpec
from runtime.errors import BundleError
from runtime.metrics.texts import pack_texts, unpack_texts
from runtime.tasks.base import BatchFacts, ReadsAudio, Tensors, describe_shapes, one_output, rename, softmax

if TYPE_CHECKING:
    from runtime.encode.split import Split

ANSWER, SCORE = "answer", "score"


class CtcSpeechRecognition(ReadsAudio):
    """Write down what is said: the likeliest class of each frame, repeated ones once.

    A class's name is what it writes: "" for the blank, and for special tokens, which no trained model chooses.
    Outputs: {"answer": int32 [N, W], as `runtime.metrics.texts.pack_texts` packs texts; "score": float32 [N], the mean
    probability of what is chosen}.
    """

    name = "ctc-speech-recognition"
    about = "what is said in a recording, by an encoder alone: wav2vec2, HuBERT and the like"
    outputs = "texts"
    always = (ANSWER, SCORE)
    longer_audio = "pauses"

    def read_outputs(self, outputs: Tensors, batch: BatchFacts) -> dict[str, Array]:
        """Return {"answer", "score"} of the only output [B, frames, classes]. BundleError."""
        found = [outputs["logits"]] if "logits" in outputs else [o for o in outputs.values() if o.ndim == 3]
        if len(found) != 1 or found[0].ndim != 3 or found[0].shape[2] != len(batch.class_names):
            raise BundleError(
                f"a {self.name} model has one output [batch, frames, classes], and a name for each class; this model: "
                f"{describe_shapes(outputs)}, and {len(batch.class_names)} names"
            )
        texts = [write_classes(row, batch.class_names) for row in found[0].argmax(axis=2)]
        with np.errstate(invalid="ignore"):
            score = softmax(found[0]).max(axis=2).mean(axis=1).astype(np.float32)  # NaN of a broken model
        return {ANSWER: pack_texts(texts), SCORE: score}

    def join_batches(self, name: str, parts: Sequence[Array]) -> Array:
        """Return one output of all samples; answers are filled up to the longest."""
        if name != ANSWER:
            return super().join_batches(name, parts)
        return pack_texts([text for part in parts for text in unpack_texts(part)])

    def join_rows(
        self, outputs: dict[str, Array], split: Split, columns: Columns, facts: BatchFacts
    ) -> dict[str, Array]:
        """Return the texts of each recording's pieces, one after the other."""
        if len(split.samples) == len(split.rows_each):
            return outputs
        pieces = zip(split.samples.tolist(), unpack_texts(outputs[ANSWER]), strict=True)
        texts = [" ".join(text for _, text in each if text) for _, each in groupby(pieces, key=lambda piece: piece[0])]
        return {ANSWER: pack_texts(texts), SCORE: split.average(outputs[SCORE]).astype(np.float32)}

    def predict(self, outputs: Tensors, class_names: Sequence[str]) -> list[Any] | None:
        """Return {"label": what was written, "score"} for each recording."""
        texts = unpack_texts(outputs[ANSWER])
        return [{"label": t, "score": s} for t, s in zip(texts, outputs[SCORE].tolist(), strict=True)]

    def answers(self, outputs: Tensors, class_names: Sequence[str]) -> dict[str, Array]:
        """Return label (str) and score float32, [n, 1] each."""
        texts = [[row["label"]] for row in self.predict(outputs, class_names) or []]
        return {"label": np.array(texts, np.object_), SCORE: outputs[SCORE][:, None]}

    def answer_specs(self, outputs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Return the specs of `answers`."""
        logits = one_output(outputs, "logits")
        return rename(logits, "label", "object", 1), rename(logits, SCORE, "float32", 1)


def write_classes(classes: Array, names: Sequence[str]) -> str:
    """Return the text of each frame's class, int64 [T]: of equal ones in a row the first alone writes its name."""
    return "".join(names[number] for number, _ in groupby(classes.tolist())).strip()
