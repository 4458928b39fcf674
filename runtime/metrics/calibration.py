"""Calibration: is a classifier right as often as it is sure?"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from runtime.metrics.accuracy import label_rank
from runtime.metrics.base import Columns, Metric, Outputs, class_labels
from runtime.metrics.fidelity import log_softmax

BINS = 15
"""Of equal width, as Guo et al. have them."""


def calibration_columns(outputs: Outputs, labels: Any) -> Columns:
    """Return each sample's correctness (0, 1) minus its confidence, float64 [N], and the bin of that, int64 [N].

    The confidence is the largest softmax probability.
    """
    logits = outputs["logits"]
    checked = class_labels(labels, logits.shape[1], len(logits))
    confidence = np.exp(log_softmax(logits.astype(np.float64)).max(axis=1))
    bins = np.minimum(np.ceil(confidence * BINS).astype(np.int64) - 1, BINS - 1)  # (0, 1/15], (1/15, 2/15], ...
    return (label_rank(logits, checked) < 1) - confidence, bins


def _sum_gaps(columns: Columns) -> np.ndarray:
    """Return the sum of correctness minus confidence in each bin, float64 [BINS]."""
    gaps: np.ndarray = np.bincount(columns[1], weights=columns[0], minlength=BINS)
    return gaps


def expected_calibration_error(columns: Columns) -> float:
    """Return the mean over samples of |accuracy - confidence| of their bin (Guo et al. 2017, arXiv:1706.04599)."""
    return float(np.abs(_sum_gaps(columns)).sum() / len(columns[0]))


def ece_influence(columns: Columns) -> np.ndarray:
    """Return what each sample adds to the error, float64 [N]."""
    influence: np.ndarray = np.sign(_sum_gaps(columns))[columns[1]] * columns[0]
    return influence - expected_calibration_error(columns)


def ece_bias(columns: Columns) -> float:
    """Return by how much the error of finite samples is too large at most, on average.

    A bin's gap is a mean m of noise s / sqrt(n), and E|m + noise| exceeds |m| by most where m is 0: by sqrt(2 / pi)
    standard errors. A perfectly calibrated model shows an error of just that size.
    """
    squares = np.bincount(columns[1], weights=columns[0] ** 2, minlength=BINS)
    return float(math.sqrt(2 / math.pi) * np.sqrt(squares).sum() / len(columns[0]))


def change_bins(ours: Columns, theirs: Columns) -> np.ndarray:
    """Return the samples that are right for one model alone, or that lie in another bin, or in one that turned."""
    signs = [np.sign(_sum_gaps(columns))[columns[1]] for columns in (ours, theirs)]
    right = [columns[0] > 0 for columns in (ours, theirs)]  # correctness minus confidence
    turned: np.ndarray = (ours[1] != theirs[1]) | (signs[0] != signs[1]) | (right[0] != right[1])
    return turned


ECE = Metric(
    name="ece",
    against="labels",
    higher_is_better=False,
    fits=("classes",),
    unit="fraction",
    range=(0.0, 1.0),
    about=f"expected calibration error: mean distance of accuracy from confidence, in {BINS} bins of confidence",
    reduce=calibration_columns,
    shape="classes",
    kind="statistic",
    statistic=expected_calibration_error,
    influence=ece_influence,
    bias=ece_bias,
    biased_change=True,
    turned=change_bins,
    on_request=True,
)
