"""A recipe's training set as passes read it: samples that are encoded when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from compress.data.samples import Samples
from compress.errors import SourceError
from compress.tasks import find_torch_task
from runtime.bundle.columns import take
from runtime.decode.scoring import language_encoder
from runtime.encode.language import LOSS_MASK, POSITIONS
from runtime.encode.preprocess import Preprocessor, split_samples
from runtime.errors import UsageError
from runtime.tasks import find_task
from runtime.tasks.predict import encoding_views

Feeds = dict[str, np.ndarray]
Redraw = Callable[[np.ndarray, int], tuple[Feeds, np.ndarray | None]]
"""As of `compress.context`, which stands above."""


@dataclass(frozen=True)
class EncodedSet:
    """A `TrainSet`. Where two texts of a sample are read apart (embeddings), each is a row of its own, without label.

    `views`: the columns that are encoded one by one, each of `size` rows: samples, or windows and chunks of long ones.
    `apart`: of rows that hold several samples, with the positions by which a torch model reads these apart.
    """

    views: Sequence[Mapping[str, Any]]
    size: int
    preprocessor: Preprocessor
    labels: np.ndarray | None = None
    apart: bool = False
    redraw: Redraw | None = None

    @property
    def n(self) -> int:
        """Return the number of rows: the samples of all views."""
        return self.size * len(self.views)

    def feeds(self, rows: np.ndarray) -> Feeds:
        """Encode the rows: [len(rows), ...] for each input; texts are padded to the longest of the rows.

        SourceError where the rows cannot be encoded.
        """
        try:
            parts = [(np.flatnonzero(rows // self.size == view), columns) for view, columns in enumerate(self.views)]
            if len(self.views) == 1:
                feeds = self.preprocessor.encode(self.views[0], rows)
                apart = self.apart and POSITIONS in self.views[0]
                return feeds | {POSITIONS: pad_rows(take(self.views[0], POSITIONS, rows))} if apart else feeds
            gathered: dict[str, list[Any]] = {name: [None] * len(rows) for name in parts[0][1]}
            for places, columns in parts:
                for place in places.tolist():
                    for name in gathered:
                        gathered[name][place] = columns[name][int(rows[place]) % self.size]
            return self.preprocessor.encode(gathered)
        except UsageError as error:
            raise SourceError([f"data.train: {problem}" for problem in error.problems]) from error

    def loss_masks(self, rows: np.ndarray) -> np.ndarray | None:
        """Return which of the rows' tokens are learned, int64 [len(rows), longest], filled up with 0; None: all."""
        if LOSS_MASK not in self.views[0]:
            return None
        return pad_rows(language_encoder(self.preprocessor).loss_masks(self.views[0], rows) or [])


def pad_rows(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return whole numbers [t] each as int64 [n, longest], filled up with 0 on the right."""
    padded = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded


def make_encoded_set(samples: Samples, preprocessor: Preprocessor, task: str, apart: bool = False) -> EncodedSet:
    """Make the encoded set of a task's samples, for the model that `preprocessor` feeds.

    Of a sample in several rows, each has its label, unless the task knows better (`TorchTask.make_targets`).
    """
    splits = [split_samples(preprocessor, view) for view in encoding_views(task, samples.columns)]
    labels = find_torch_task(task).make_targets(samples.columns, preprocessor)
    labels = None if labels is None or len(splits) > 1 else np.asarray(labels)
    rows = splits[0].samples
    if labels is not None and len(labels) == samples.n < len(rows):
        labels = labels[rows]
    redraw = None if samples.redraw is None else _make_redraw(samples.redraw, preprocessor, task)
    return EncodedSet([split.columns for split in splits], len(rows), preprocessor, labels, apart, redraw)


def _make_redraw(draw: Callable[[np.ndarray, int], dict[str, Any]], preprocessor: Preprocessor, task: str) -> Redraw:
    def redraw(rows: np.ndarray, seed: int) -> tuple[Feeds, np.ndarray | None]:
        columns = draw(rows, seed)
        labels = find_torch_task(task).make_targets(columns, preprocessor)
        try:
            return preprocessor.encode(columns), None if labels is None else np.asarray(labels)
        except UsageError as error:
            raise SourceError([f"data.train: {problem}" for problem in error.problems]) from error

    return redraw


def n_rows(task: str, n_samples: int, columns: Mapping[str, Any]) -> int:
    """Return how many rows so many samples with these columns (by role) give, before loading them: `EncodedSet.n`."""
    return n_samples * len(find_task(task).split_views(columns))
