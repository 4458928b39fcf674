"""Accuracy: is the label the most likely class (top1), or among the five most likely (top5)?"""

from __future__ import annotations

from typing import Any

import numpy as np

from runtime.metrics.base import CLASSIFICATION, Columns, Metric, Outputs, class_labels


def label_rank(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """How many classes come before the label, [N, C], [N] -> int64 [N]; of equal logits the lower class id is first."""
    of_label = np.take_along_axis(logits, labels[:, None], axis=1)  # [N, 1]
    earlier = np.arange(logits.shape[1])[None, :] < labels[:, None]  # [N, C]
    rank: np.ndarray = np.count_nonzero((logits > of_label) | ((logits == of_label) & earlier), axis=1)
    return rank


def _within(k: int, outputs: Outputs, labels: Any) -> Columns:
    logits = outputs["logits"]
    checked = class_labels(labels, logits.shape[1], len(logits))
    return ((label_rank(logits, checked) < k).astype(np.float64),)


def top1_columns(outputs: Outputs, labels: Any) -> Columns:
    """1.0 where the label has the largest logit."""
    return _within(1, outputs, labels)


def top5_columns(outputs: Outputs, labels: Any) -> Columns:
    """1.0 where the label is among the five largest logits."""
    return _within(5, outputs, labels)


TOP1 = Metric(
    name="top1",
    against="labels",
    higher_is_better=True,
    tasks=CLASSIFICATION,
    unit="fraction",
    about="fraction of samples whose label has the largest logit",
    reduce=top1_columns,
    shape="classes",
    kind="proportion",
)
TOP5 = Metric(
    name="top5",
    against="labels",
    higher_is_better=True,
    tasks=CLASSIFICATION,
    unit="fraction",
    about="fraction of samples whose label is among the five largest logits",
    reduce=top5_columns,
    shape="classes",
    kind="proportion",
)
