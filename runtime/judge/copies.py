"""Count copies of one sample as what they are: drawn once, they tell no more than one of them does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.bundle.columns import Array
from runtime.bundle.samples import digest_rows


@dataclass(frozen=True)
class Draws:
    """Which rows of an evaluation set are copies of one another; values are of rows, intervals of draws."""

    of_row: Array
    """The draw of each row, int64 [N], numbered from 0."""
    are_runs: bool = False
    """Whether rows are parts of samples, and draws runs of neighbours among them."""

    @classmethod
    def number(cls, names: Array) -> Draws:
        """Number the draws of rows that are the same where their names are, [N]."""
        return cls(np.unique(names, return_inverse=True)[1].reshape(len(names)))

    @property
    def n(self) -> int:
        """Return how many draws there are."""
        return int(self.of_row.max(initial=-1)) + 1

    @property
    def are_rows(self) -> bool:
        """Return whether no row is another's copy."""
        return self.n == len(self.of_row)

    def take(self, mask: Array) -> Draws:
        """Return the draws of some of the rows."""
        return Draws.number(self.of_row[mask])

    def add_up(self, influence: Array) -> Array:
        """Return what each draw adds to a statistic, its copies together, [N] -> float64 [draws] of the same mean."""
        if self.are_rows:
            return influence
        mean = influence.mean()
        added: Array = mean + np.bincount(self.of_row, influence - mean) * self.n / len(influence)
        return added

    def weigh(self, weights: Array | None) -> Array | None:
        """Return how much each draw counts, [N] -> float64 [draws]."""
        return weights if self.are_rows else np.bincount(self.of_row, weights)

    def count_equal(self, values: Array) -> float:
        """Return how many equal draws say as much of the mean of values [N], at most `n`.

        Kish's number for the numbers of copies, or that of the scatter of the draws' sums if they scatter more (Korn &
        Graubard 1998, Surv. Methodol. 24:193).
        """
        rows = len(values)
        if self.are_rows:
            return rows
        apart = values - values.mean()
        kish, scatter = rows**2 / float(np.sum(np.bincount(self.of_row) ** 2)), np.bincount(self.of_row, apart)
        squares = float(np.sum(scatter**2))
        return max(1.0, min(kish, rows * float(np.sum(apart**2)) / squares)) if squares > 0 else kish


def find_draws(columns: Mapping[str, Any]) -> Draws:
    """Return which samples are equal in all columns, labels too."""
    return Draws.number(np.array(digest_rows(columns)))


def describe_copies(draws: Draws) -> str | None:
    """Say how many samples are copies; None where none is."""
    if draws.are_rows:
        return None
    rows = len(draws.of_row)
    return (
        f"{rows - draws.n} of {rows} evaluation samples are copies of others: values are of all {rows}, intervals of "
        f"the {draws.n} different ones."
    )
