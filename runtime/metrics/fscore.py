"""Precision, recall and F1, micro and macro averaged, as scikit-learn defines them with `zero_division=0`.

Macro averages over the classes that occur among the labels or the predictions. With one label per sample the micro
averages all equal accuracy; they are here because recipes name them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from runtime.manifest import CLASSIFICATION
from runtime.metrics.accuracy import top1_columns
from runtime.metrics.base import Columns, Metric, Outputs, class_labels

PerClass = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def predictions(outputs: Outputs, labels: Any) -> Columns:
    """(labels, predicted classes), int64 [N] each."""
    logits = outputs["logits"]
    return class_labels(labels, logits.shape[1], len(logits)), logits.argmax(axis=1)


def _ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    ratio: np.ndarray = part / np.maximum(whole, 1)
    return ratio


def _precision(hits: np.ndarray, actual: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    return _ratio(hits, predicted)


def _recall(hits: np.ndarray, actual: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    return _ratio(hits, actual)


def _f1(hits: np.ndarray, actual: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    return _ratio(2 * hits, actual + predicted)


def macro(per_class: PerClass, columns: Columns) -> float:
    """Mean of `per_class` over the classes that occur in (labels, predictions)."""
    labels, predicted = columns
    n_classes = int(max(labels.max(), predicted.max())) + 1
    counts = [np.bincount(x, minlength=n_classes) for x in (labels[labels == predicted], labels, predicted)]  # [C] each
    present = counts[1] + counts[2] > 0
    return float(per_class(*counts)[present].mean())


def precision_macro(columns: Columns) -> float:
    """Mean over classes of hits / predicted."""
    return macro(_precision, columns)


def recall_macro(columns: Columns) -> float:
    """Mean over classes of hits / actual."""
    return macro(_recall, columns)


def f1_macro(columns: Columns) -> float:
    """Mean over classes of 2 hits / (actual + predicted)."""
    return macro(_f1, columns)


def _micro_metric(name: str) -> Metric:
    return Metric(
        name=f"{name}_micro",
        against="labels",
        higher_is_better=True,
        tasks=CLASSIFICATION,
        unit="fraction",
        about=f"{name} over all decisions; equals top1 when each sample has one label",
        reduce=top1_columns,
        shape="classes",
        kind="proportion",
        on_request=True,
    )


def _macro_metric(name: str, statistic: Callable[[Columns], float]) -> Metric:
    return Metric(
        name=f"{name}_macro",
        against="labels",
        higher_is_better=True,
        tasks=CLASSIFICATION,
        unit="fraction",
        about=f"mean over classes of {name}",
        reduce=predictions,
        shape="classes",
        kind="statistic",
        statistic=statistic,
    )


F_SCORES = (
    _micro_metric("precision"),
    _macro_metric("precision", precision_macro),
    _micro_metric("recall"),
    _macro_metric("recall", recall_macro),
    _micro_metric("f1"),
    _macro_metric("f1", f1_macro),
)
