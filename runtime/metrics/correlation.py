"""How a score per sample follows the labels: rank correlation, linear correlation, squared error.

The score is the model's one output value or, for feature extraction, the cosine between the embeddings of `text` and
`text_pair`. A correlation with a constant is undefined; here it is 0, so that a collapsed model scores badly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from runtime.metrics.base import Columns, Link, Metric, Outputs, score_labels, scores


def score_columns(outputs: Outputs, labels: Any) -> Columns:
    """Return (scores, labels), float64 [N] each."""
    given = scores(outputs)
    return given, score_labels(labels, len(given))


def squared_errors(outputs: Outputs, labels: Any) -> Columns:
    """Return (score - label)^2, float64 [N]."""
    given, wanted = score_columns(outputs, labels)
    return ((given - wanted) ** 2,)


def average_ranks(values: np.ndarray) -> np.ndarray:
    """Return ranks from 1, float64 [N]; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def pearson(columns: Columns) -> float:
    """Return the linear correlation in [-1, 1]; 0 where a column is constant."""
    a, b = (column - column.mean() for column in columns)
    norm = np.linalg.norm(a) * np.linalg.norm(b)
    constant = np.ptp(columns[0]) == 0 or np.ptp(columns[1]) == 0
    return 0.0 if constant or norm == 0 else float(np.clip(a @ b / norm, -1.0, 1.0))


def spearman(columns: Columns) -> float:
    """Return the Pearson correlation of the average ranks."""
    return pearson(tuple(average_ranks(column) for column in columns))


def pearson_influence(columns: Columns) -> np.ndarray:
    """Return what each sample adds to the linear correlation, float64 [N] (Devlin, Gnanadesikan & Kettenring 1975)."""
    if any(np.ptp(column) == 0 for column in columns):
        return np.zeros(len(columns[0]))
    r = pearson(columns)
    a, b = ((column - column.mean()) / column.std() for column in columns)
    influence: np.ndarray = a * b - r * (a * a + b * b) / 2
    return influence


def spearman_influence(columns: Columns) -> np.ndarray:
    """Return what each sample adds to the rank correlation, float64 [N].

    It adds by its own ranks, and by how much it shifts the others': it raises the rank of all that are above it, and by
    half of those that are equal, itself included.
    """
    if any(np.ptp(column) == 0 for column in columns):
        return np.zeros(len(columns[0]))
    a, b = (average_ranks(column) / len(column) for column in columns)
    a, b = a - a.mean(), b - b.mean()
    covariance, variance_a, variance_b = float(np.mean(a * b)), float(np.mean(a * a)), float(np.mean(b * b))
    of_covariance = a * b + _mean_above(columns[0], b) + _mean_above(columns[1], a)
    of_variance_a = a * a + 2 * _mean_above(columns[0], a)
    of_variance_b = b * b + 2 * _mean_above(columns[1], b)
    shares = of_variance_a / variance_a + of_variance_b / variance_b
    r = covariance / math.sqrt(variance_a * variance_b)
    influence: np.ndarray = of_covariance / math.sqrt(variance_a * variance_b) - r * shares / 2
    return influence


def _mean_above(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the sum of the weights of the samples above each, and half of those equal to it, over N; float64 [N]."""
    _, inverse = np.unique(values, return_inverse=True)
    of_value = np.bincount(inverse, weights=weights)
    above: np.ndarray = (of_value.sum() - np.cumsum(of_value) + of_value / 2)[inverse] / len(values)
    return above


def _fisher_z(r: float) -> float:
    return math.atanh(r) if abs(r) < 1 else math.copysign(math.inf, r)


FISHER = Link(to=_fisher_z, back=math.tanh, slope=lambda r: 1 / (1 - r * r))
"""Fisher's z of a correlation."""


def _make_correlation_metric(
    name: str, statistic: Callable[[Columns], float], influence: Callable[[Columns], np.ndarray], about: str
) -> Metric:
    return Metric(
        name=name,
        against="labels",
        higher_is_better=True,
        fits=("classes", "embeddings", "tensors", "numbers"),
        unit="correlation",
        range=(-1.0, 1.0),
        about=about,
        reduce=score_columns,
        shape="score",
        kind="statistic",
        statistic=statistic,
        influence=influence,
        link=FISHER,
    )


SPEARMAN = _make_correlation_metric(
    "spearman", spearman, spearman_influence, "rank correlation of the score with the label"
)
PEARSON = _make_correlation_metric(
    "pearson", pearson, pearson_influence, "linear correlation of the score with the label"
)
MSE = Metric(
    name="mse",
    against="labels",
    higher_is_better=False,
    fits=("classes", "tensors", "numbers"),
    unit="squared label",
    range=(0.0, math.inf),
    about="mean squared difference between the one output value and the label",
    reduce=squared_errors,
    shape="score",
)
