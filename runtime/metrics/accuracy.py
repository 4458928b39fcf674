"""Accuracy: is the label the most likely class (top1), or among the five most likely (top5)?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from runtime.metrics.base import FRACTION, Columns, Metric, Outputs, class_labels


def label_rank(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Count the classes before the label, [N, C], [N] -> int64 [N]; of equal logits the lower class id is first."""
    of_label = np.take_along_axis(logits, labels[:, None], axis=1)  # [N, 1]
    earlier = np.arange(logits.shape[1])[None, :] < labels[:, None]  # [N, C]
    rank: np.ndarray = np.count_nonzero((logits > of_label) | ((logits == of_label) & earlier), axis=1)
    return rank


def _mark_hits(k: int, outputs: Outputs, labels: Any) -> Columns:
    logits = outputs["logits"]
    checked = class_labels(labels, logits.shape[1], len(logits))
    return ((label_rank(logits, checked) < k).astype(np.float64),)


def top1_columns(outputs: Outputs, labels: Any) -> Columns:
    """Return 1.0 where the label has the largest logit."""
    return _mark_hits(1, outputs, labels)


def top5_columns(outputs: Outputs, labels: Any) -> Columns:
    """Return 1.0 where the label is among the five largest logits."""
    return _mark_hits(5, outputs, labels)


def _make_fraction_metric(name: str, reduce: Callable[[Outputs, Any], Columns], about: str) -> Metric:
    return Metric(
        name=name,
        against="labels",
        **FRACTION,
        fits=("classes",),
        about=f"fraction of samples whose label {about}",
        reduce=reduce,
        shape="classes",
        kind="proportion",
    )


TOP1 = _make_fraction_metric("top1", top1_columns, "has the largest logit")
TOP5 = _make_fraction_metric("top5", top5_columns, "is among the five largest logits")
