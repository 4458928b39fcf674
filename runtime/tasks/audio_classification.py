"""Sounds, each of one class."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from runtime.bundle.columns import Array, Columns
from runtime.tasks.base import BatchFacts, Classification, ReadsAudio, choose_classes

if TYPE_CHECKING:
    from runtime.encode.split import Split


class AudioClassification(Classification, ReadsAudio):
    """Choose one class for each sound. The logits of a sound that is read in chunks are the mean of its chunks'."""

    name = "audio-classification"
    about = "one class for each sound: a spoken command, a noise, a speaker"
    longer_audio = "chunks"

    def join_rows(
        self, outputs: dict[str, Array], split: Split, columns: Columns, facts: BatchFacts
    ) -> dict[str, Array]:
        """Return the mean of the logits of each sound's chunks, and what is chosen of it.

        Each chunk counts by how much of the sound it holds: a last one of a tenth of the others' length a tenth.
        """
        if len(split.samples) == len(split.rows_each):
            return outputs
        return choose_classes(split.average(outputs["logits"]).astype(np.float32), facts.postprocess)
