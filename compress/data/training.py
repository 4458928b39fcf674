"""A recipe's training set as passes read it: samples that are encoded when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from compress.data.samples import Samples
from compress.errors import SourceError
from runtime.errors import UsageError
from runtime.predict import encoding_views
from runtime.preprocess import Preprocessor

Feeds = dict[str, np.ndarray]


@dataclass(frozen=True)
class EncodedSet:
    """A `TrainSet`. Where two texts of a sample are read apart (embeddings), each is a row of its own, without label.

    `views`: the columns that are encoded one by one, each of `size` samples.
    """

    views: Sequence[Mapping[str, Any]]
    size: int
    preprocessor: Preprocessor
    labels: np.ndarray | None = None

    @property
    def n(self) -> int:
        """Rows: the samples of all views."""
        return self.size * len(self.views)

    def feeds(self, rows: np.ndarray) -> Feeds:
        """[len(rows), ...] for each input; texts are padded to the longest of the rows.

        SourceError where the rows cannot be encoded.
        """
        try:
            parts = [(np.flatnonzero(rows // self.size == view), columns) for view, columns in enumerate(self.views)]
            if len(self.views) == 1:
                return self.preprocessor.encode(self.views[0], rows)
            return self.preprocessor.encode(_gathered(parts, rows, self.size))
        except UsageError as error:
            raise SourceError([f"data.train: {problem}" for problem in error.problems]) from error


def encoded_set(samples: Samples, preprocessor: Preprocessor, task: str) -> EncodedSet:
    """The samples of a task, for the model that `preprocessor` feeds."""
    views = encoding_views(task, samples.columns)
    labels = samples.columns.get("label")
    return EncodedSet(views, samples.n, preprocessor, None if labels is None or len(views) > 1 else np.asarray(labels))


def _gathered(
    parts: Sequence[tuple[np.ndarray, Mapping[str, Any]]], rows: np.ndarray, size: int
) -> dict[str, list[Any]]:
    """The rows' samples out of several views, as columns of their own, in the rows' order."""
    found: dict[str, list[Any]] = {name: [None] * len(rows) for name in parts[0][1]}
    for places, columns in parts:
        for place in places.tolist():
            for name in found:
                found[name][place] = columns[name][int(rows[place]) % size]
    return found


def n_rows(task: str, n_samples: int, columns: Mapping[str, Any]) -> int:
    """Rows that so many samples with these columns (by role) are, before they are loaded: `EncodedSet.n`."""
    return n_samples * (2 if task == "feature-extraction" and "text_pair" in columns else 1)
