"""How a score per sample follows the labels: rank correlation, linear correlation, squared error.

The score is the model's one output value or, for feature extraction, the cosine between the embeddings of `text` and
`text_pair`. A correlation with a constant is undefined; here it is 0, so that a collapsed model scores badly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from runtime.manifest import CLASSIFICATION, TASKS
from runtime.metrics.base import Columns, Metric, Outputs, score_labels, scores


def score_columns(outputs: Outputs, labels: Any) -> Columns:
    """(scores, labels), float64 [N] each."""
    given = scores(outputs)
    return given, score_labels(labels, len(given))


def squared_errors(outputs: Outputs, labels: Any) -> Columns:
    """(score - label)^2, float64 [N]."""
    given, wanted = score_columns(outputs, labels)
    return ((given - wanted) ** 2,)


def average_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1, float64 [N]; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def pearson(columns: Columns) -> float:
    """Linear correlation in [-1, 1]; 0 where a column is constant."""
    a, b = (column - column.mean() for column in columns)
    norm = np.linalg.norm(a) * np.linalg.norm(b)
    constant = np.ptp(columns[0]) == 0 or np.ptp(columns[1]) == 0
    return 0.0 if constant or norm == 0 else float(np.clip(a @ b / norm, -1.0, 1.0))


def spearman(columns: Columns) -> float:
    """Pearson correlation of the average ranks."""
    return pearson(tuple(average_ranks(column) for column in columns))


def _correlation(name: str, statistic: Callable[[Columns], float], about: str) -> Metric:
    return Metric(
        name=name,
        against="labels",
        higher_is_better=True,
        tasks=TASKS,
        unit="correlation",
        about=about,
        reduce=score_columns,
        shape="score",
        kind="statistic",
        statistic=statistic,
    )


SPEARMAN = _correlation("spearman", spearman, "rank correlation of the score with the label")
PEARSON = _correlation("pearson", pearson, "linear correlation of the score with the label")
MSE = Metric(
    name="mse",
    against="labels",
    higher_is_better=False,
    tasks=(*CLASSIFICATION, "generic"),
    unit="squared label",
    about="mean squared difference between the one output value and the label",
    reduce=squared_errors,
    shape="score",
)
