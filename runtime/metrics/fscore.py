"""Precision, recall and F1, micro and macro averaged, as scikit-learn defines them with `zero_division=0`.

Macro averages over the classes that occur among the labels or the predictions. With one label per sample the micro
averages all equal accuracy; they are here because recipes name them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from runtime.metrics.accuracy import top1_columns
from runtime.metrics.base import FRACTION, Columns, Flaws, Metric, Outputs, class_labels

MIN_PER_CLASS = 10
"""Samples of the rarest class below which a macro average has no interval: one of them is worth too much."""
PerClass = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def predictions(outputs: Outputs, labels: Any) -> Columns:
    """Return (labels, predicted classes), int64 [N] each."""
    logits = outputs["logits"]
    return class_labels(labels, logits.shape[1], len(logits)), logits.argmax(axis=1)


def _divide_counts(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    ratio: np.ndarray = part / np.maximum(whole, 1)
    return ratio


def _precision(hits: np.ndarray, actual: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    return _divide_counts(hits, predicted)


def _recall(hits: np.ndarray, actual: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    return _divide_counts(hits, actual)


def _f1(hits: np.ndarray, actual: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    return _divide_counts(2 * hits, actual + predicted)


def _count_classes(columns: Columns) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count the hits, labels and predictions of each class, [C] each."""
    labels, predicted = columns
    n_classes = int(max(labels.max(), predicted.max())) + 1
    hits, actual, chosen = (
        np.bincount(x, minlength=n_classes) for x in (labels[labels == predicted], labels, predicted)
    )
    return hits, actual, chosen


def macro(per_class: PerClass, columns: Columns) -> float:
    """Return the mean of `per_class` over the classes that occur in (labels, predictions)."""
    hits, actual, predicted = _count_classes(columns)
    return float(per_class(hits, actual, predicted)[actual + predicted > 0].mean())


def macro_influence(per_class: PerClass, of_label: float, of_prediction: float, columns: Columns) -> np.ndarray:
    """Return what each sample adds to a macro average, float64 [N].

    The average is of hits / (of_label * actual + of_prediction * predicted). A hit adds to the fraction of its class,
    and every sample to the weighted count below that of its label and of its prediction.
    """
    labels, chosen = columns
    counts = _count_classes(columns)
    fraction, whole = per_class(*counts), of_label * counts[1] + of_prediction * counts[2]
    weight = len(labels) / np.maximum(whole, 0.5) / np.count_nonzero(counts[1] + counts[2])  # [C]
    taken = of_label * (fraction * weight)[labels] + of_prediction * (fraction * weight)[chosen]
    influence: np.ndarray = np.where(labels == chosen, weight[labels], 0.0) - taken
    return influence


def macro_bias(per_class: PerClass, of_label: float, of_prediction: float, columns: Columns) -> float:
    """Return by how much the macro average is off on average.

    It is each fraction's second-order bias, about -0.25 hm / w^3 for F1: h hits, m samples that are of the class or
    taken for it and not both, w = h + m / 2. A sample that is missed makes the whole larger, and weighs less where the
    whole is large already.
    """
    hits, actual, predicted = _count_classes(columns)
    fraction, whole = per_class(hits, actual, predicted), of_label * actual + of_prediction * predicted
    missed, mistaken = actual - hits, predicted - hits
    both = of_label + of_prediction
    products = hits * both * (fraction * both - 1) + fraction * (of_label**2 * missed + of_prediction**2 * mistaken)
    return float((products / np.maximum(whole, 1) ** 2)[actual + predicted > 0].mean())


def _find_shortage(columns: Columns) -> str:
    """Say which class has too few samples; "" where none has."""
    actual = _count_classes(columns)[1]
    rarest = int(np.where(actual > 0, actual, actual.max() + 1).argmin())
    if actual[rarest] >= MIN_PER_CLASS:
        return ""
    return f"class {rarest} has {actual[rarest]}; at least {MIN_PER_CLASS} of each class would be needed"


def _bound_reach(columns: Columns) -> float:
    """Return how much of a macro average is lost at most for each share of samples that turn: all of the rarest class.

    They are missing where they belong, and too many where they do not.
    """
    actual = _count_classes(columns)[1]
    occurring = actual[actual > 0]
    return float(2 * len(columns[0]) / (len(occurring) * occurring.min()))


def precision_macro(columns: Columns) -> float:
    """Return the mean over classes of hits / predicted."""
    return macro(_precision, columns)


def recall_macro(columns: Columns) -> float:
    """Return the mean over classes of hits / actual."""
    return macro(_recall, columns)


def f1_macro(columns: Columns) -> float:
    """Return the mean over classes of 2 hits / (actual + predicted)."""
    return macro(_f1, columns)


def _make_micro_metric(name: str) -> Metric:
    return Metric(
        name=f"{name}_micro",
        against="labels",
        **FRACTION,
        fits=("classes",),
        about=f"{name} over all decisions; equals top1 when each sample has one label",
        reduce=top1_columns,
        shape="classes",
        kind="proportion",
        on_request=True,
    )


def _make_macro_metric(
    name: str, statistic: Callable[[Columns], float], per_class: PerClass, of_label: float, of_prediction: float
) -> Metric:
    return Metric(
        name=f"{name}_macro",
        against="labels",
        **FRACTION,
        fits=("classes",),
        about=f"mean over classes of {name}",
        reduce=predictions,
        shape="classes",
        kind="statistic",
        statistic=statistic,
        influence=lambda columns: macro_influence(per_class, of_label, of_prediction, columns),
        bias=lambda columns: macro_bias(per_class, of_label, of_prediction, columns),
        shortage=_find_shortage,
        flaws=Flaws(of=lambda columns: columns[0] != columns[1], reach=_bound_reach),
    )


F_SCORES = (
    _make_micro_metric("precision"),
    _make_macro_metric("precision", precision_macro, _precision, 0.0, 1.0),
    _make_micro_metric("recall"),
    _make_macro_metric("recall", recall_macro, _recall, 1.0, 0.0),
    _make_micro_metric("f1"),
    _make_macro_metric("f1", f1_macro, _f1, 0.5, 0.5),
)
