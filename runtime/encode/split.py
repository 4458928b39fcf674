"""Samples that a model reads as several rows: a long text in windows, a long recording in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from runtime.bundle.columns import Array, Columns, count


@dataclass(frozen=True)
class Split:
    """The rows that samples are encoded as; every sample has at least one."""

    columns: Columns
    """Of the rows."""
    samples: Array
    """The number of each row's sample, int64 [rows], rising."""
    sizes: Array
    """How much of its sample each row holds, float64 [rows], in any unit."""

    @property
    def rows_each(self) -> Array:
        """Return the number of rows of each sample, int64 [N]."""
        return np.bincount(self.samples)

    def average(self, values: Array) -> Array:
        """Return the mean of each sample's rows, each weighted by its size: float64 [N, ...] of [rows, ...].

        That of a single row is the row itself, exactly.
        """
        shares = self.sizes / np.bincount(self.samples, self.sizes)[self.samples]
        starts = np.flatnonzero(np.diff(self.samples, prepend=-1))
        weighted = values.astype(np.float64) * shares.reshape(-1, *(1,) * (values.ndim - 1))
        means: Array = np.add.reduceat(weighted, starts)
        return means


@runtime_checkable
class SplitsSamples(Protocol):
    """An encoder that reads a long sample as several rows; what it encodes are rows."""

    def split_samples(self, columns: Columns) -> Split:
        """Return the rows of the samples. UsageError where a sample cannot be split."""
        ...


def split_samples(encoder: object, columns: Columns) -> Split:
    """Return the rows that an encoder reads samples as: the samples themselves, where it splits none. UsageError."""
    return encoder.split_samples(columns) if isinstance(encoder, SplitsSamples) else keep_whole(columns)


def keep_whole(columns: Columns) -> Split:
    """Return samples that are a row each."""
    n = count(columns)
    return Split(columns, np.arange(n), np.ones(n))


def repeat_samples(columns: Columns, samples: Array) -> dict[str, list[Any]]:
    """Return columns with the sample of each row."""
    return {name: [column[i] for i in samples] for name, column in columns.items()}
