"""Several labels a sample: area under the ROC curve, average precision, F1 at a threshold, as scikit-learn has them.

Scores are the logits [N, C], truth is 0 or 1 [N, C]. A macro average is the mean over the labels; those that no sample
or every sample has are left out of it where the metric has no value for them (AUC, average precision). micro: over all
decisions at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from runtime.errors import UsageError
from runtime.metrics.base import FRACTION, Columns, Flaws, Metric, Outputs, same_shapes

MIN_PER_LABEL = 10
"""Samples with (and without) the rarest label below which a macro average has no interval."""
THRESHOLDS = tuple(round(0.1 * tenth, 1) for tenth in range(1, 10))
"""Probabilities at which F1 can be asked for."""
Curve = Callable[[np.ndarray, np.ndarray], tuple[float, np.ndarray]]
"""(scores [M], truth [M]) -> (value, what each adds to it, float64 [M], mean 0)."""


def label_columns(outputs: Outputs, labels: Any) -> Columns:
    """Return (logits float64 [N, C], truth bool [N, C]). UsageError for labels that are not 0 or 1, or do not fit."""
    logits, given = outputs["logits"], np.asarray(labels)
    if given.shape != logits.shape or given.dtype.kind not in "biu":
        raise UsageError(f"labels: {given.dtype} {list(given.shape)} where 0 or 1 of {list(logits.shape)} are needed")
    wrong = np.flatnonzero(((given != 0) & (given != 1)).any(axis=1))
    if wrong.size:
        raise UsageError(f"labels: row {wrong[0]} holds other numbers than 0 and 1")
    return logits.astype(np.float64), given.astype(bool)


def find_label_misfit(outputs: Outputs, labels: Any) -> str | None:
    """Return why logits cannot be compared with these labels; None where they can."""
    logits, given = outputs["logits"], np.asarray(labels)
    if given.shape != logits.shape or given.dtype.kind not in "biu":
        return f"needs labels of 0 and 1 {list(logits.shape)}, and these are {given.dtype} {list(given.shape)}"
    if not _countable(given.astype(bool)).any():
        return "needs a label that some samples have and some have not"
    return None


def _countable(truth: np.ndarray) -> np.ndarray:
    """Return which labels some samples have and some have not, bool [C]."""
    told: np.ndarray = truth.min(axis=0) < truth.max(axis=0)
    return told


def rank_area(scores: np.ndarray, truth: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the area under the ROC curve, and what each adds: a positive, the negatives below it, and the reverse.

    Of equal scores half is counted (Mann & Whitney 1947; DeLong et al. 1988, whose components these are).
    """
    _, place = np.unique(scores, return_inverse=True)
    positive, negative = np.bincount(place, truth), np.bincount(place, ~truth)
    n_positive, n_negative = positive.sum(), negative.sum()
    negatives_below = (np.cumsum(negative) - negative / 2)[place]
    positives_above = (n_positive - np.cumsum(positive) + positive / 2)[place]
    area = float(negatives_below[truth].sum() / (n_positive * n_negative))
    of_positive, of_negative = negatives_below / n_negative - area, positives_above / n_positive - area
    return area, np.where(truth, of_positive / n_positive, of_negative / n_negative) * len(scores)


def average_precision(scores: np.ndarray, truth: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the mean over positives of the precision at their score, and what each adds.

    A positive adds its own precision, and raises that of all positives below it; a negative lowers it.
    """
    _, place = np.unique(-scores, return_inverse=True)  # highest first
    positive = np.bincount(place, truth)
    hits, taken = np.cumsum(positive), np.cumsum(np.bincount(place))  # at or above each score
    total = positive.sum()
    precision = hits / taken
    value = float((positive * precision).sum() / total)
    # a sample is counted at every positive whose score is at most its own
    raised = np.cumsum((positive / taken)[::-1])[::-1]
    lowered = np.cumsum((positive * precision / taken)[::-1])[::-1]
    own = np.where(truth, precision[place] - value + raised[place], 0.0) - lowered[place]
    return value, own / total * len(scores)


def macro(curve: Curve, columns: Columns) -> float:
    """Return the mean of a curve's value over the labels that have one; NaN where none has."""
    scores, truth = columns
    labels = np.flatnonzero(_countable(truth))
    return float(np.mean([curve(scores[:, label], truth[:, label])[0] for label in labels])) if labels.size else np.nan


def macro_influence(curve: Curve, columns: Columns) -> np.ndarray:
    """Return what each sample adds to `macro`, float64 [N]."""
    scores, truth = columns
    labels = np.flatnonzero(_countable(truth))
    added = [curve(scores[:, label], truth[:, label])[1] for label in labels]
    return np.mean(added, axis=0) if added else np.zeros(len(scores))


def micro(curve: Curve, columns: Columns) -> float:
    """Return a curve's value over all decisions; NaN where these are all of one kind."""
    scores, truth = columns
    return curve(scores.ravel(), truth.ravel())[0] if truth.any() and not truth.all() else np.nan


def micro_influence(curve: Curve, columns: Columns) -> np.ndarray:
    """Return what each sample adds to `micro`, float64 [N]: what its decisions do, together."""
    scores, truth = columns
    if not truth.any() or truth.all():
        return np.zeros(len(scores))
    added: np.ndarray = curve(scores.ravel(), truth.ravel())[1].reshape(scores.shape).mean(axis=1)
    return added


def _decide(threshold: float | None, outputs: Outputs, labels: Any) -> Columns:
    """Return (truth, choice), bool [N, C] each: what has at least that probability; None: what `postprocess` chose."""
    logits, truth = label_columns(outputs, labels)
    return truth, _choose(outputs) if threshold is None else logits >= math.log(threshold / (1 - threshold))


def _choose(outputs: Outputs) -> np.ndarray:
    """Return which labels are given, bool [N, C]: chosen by `postprocess`, else those of probability 0.5 and more."""
    marked: np.ndarray = outputs["chosen"] if "chosen" in outputs else outputs["logits"] >= 0
    return marked


def _count(columns: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Return hits, and half of truth and choices, float64 [N, C] each: F1 is the ratio of their sums."""
    truth, chosen = columns
    return (truth & chosen).astype(np.float64), (truth.astype(np.float64) + chosen) / 2


def f1_micro(columns: Columns) -> float:
    """Return F1 over all decisions."""
    hits, whole = _count(columns)
    return float(hits.sum() / max(whole.sum(), 0.5))


def f1_micro_influence(columns: Columns) -> np.ndarray:
    """Return what each sample adds to F1 over all decisions, float64 [N]."""
    hits, whole = (counts.sum(axis=1) for counts in _count(columns))
    influence: np.ndarray = (hits - f1_micro(columns) * whole) * len(hits) / max(whole.sum(), 0.5)
    return influence


def f1_macro(columns: Columns) -> float:
    """Return the mean over labels of F1; 0 for a label that nothing has and nothing is given."""
    hits, whole = (counts.sum(axis=0) for counts in _count(columns))
    return float((hits / np.maximum(whole, 0.5)).mean())


def f1_macro_influence(columns: Columns) -> np.ndarray:
    """Return what each sample adds to the mean over labels of F1, float64 [N]."""
    hits, whole = _count(columns)
    totals = np.maximum(whole.sum(axis=0), 0.5)
    scores = hits.sum(axis=0) / totals
    influence: np.ndarray = ((hits - scores * whole) * len(hits) / totals).mean(axis=1)
    return influence


def _agreement(outputs: Outputs, baseline: Outputs) -> Columns:
    """Return the share of each sample's labels that are decided as the baseline decides them, float64 [N]."""
    same_shapes({"logits": outputs["logits"]}, {"logits": baseline["logits"]})
    return ((_choose(outputs) == _choose(baseline)).mean(axis=1),)


def _rarest(truth: np.ndarray) -> tuple[int, int]:
    """Return the label of which most samples are alike, and how many are not."""
    counts = np.where(_countable(truth), np.minimum(truth.sum(axis=0), (~truth).sum(axis=0)), len(truth))
    return int(counts.argmin()), int(counts.min())


def _shortage(place: int, columns: Columns) -> str:
    label, count = _rarest(columns[place])
    if count >= MIN_PER_LABEL:
        return ""
    return f"label {label} tells {count} samples from the others; at least {MIN_PER_LABEL} would be needed"


def _decisions_shortage(place: int, columns: Columns) -> str:
    n = int(columns[place].sum())
    return "" if n >= MIN_PER_LABEL else f"the samples have {n} labels; at least {MIN_PER_LABEL} would be needed"


def _mark_misranked(columns: Columns) -> np.ndarray:
    """Return which samples have a label that stands above one that they have not, or the reverse, over all samples."""
    scores, truth = columns
    least = np.where(truth, scores, np.inf).min(axis=0)
    most = np.where(truth, -np.inf, scores).max(axis=0)
    wrong: np.ndarray = np.where(truth, scores <= most, scores >= least).any(axis=1)
    return wrong


def _reach_ranks(columns: Columns) -> float:
    return len(columns[1]) * (1 + math.log(1 + _rarest(columns[1])[1])) / max(_rarest(columns[1])[1], 1)


def _make_curve_metrics(name: str, curve: Curve, about: str) -> tuple[Metric, ...]:
    def make(average: str, statistic: Any, influence: Any, shortage: Any, over: str) -> Metric:
        return Metric(
            name=f"{name}_{average}",
            against="labels",
            **FRACTION,
            fits=("label sets",),
            about=f"{about}, {over}",
            reduce=label_columns,
            misfit=find_label_misfit,
            kind="statistic",
            statistic=partial(statistic, curve),
            influence=partial(influence, curve),
            shortage=shortage,
            flaws=Flaws(of=_mark_misranked, reach=_reach_ranks),
        )

    return (
        make("macro", macro, macro_influence, partial(_shortage, 1), "mean over labels"),
        make("micro", micro, micro_influence, partial(_decisions_shortage, 1), "over all decisions at once"),
    )


def _make_f1_metrics(threshold: float | None) -> tuple[Metric, ...]:
    """Make F1 of what is given, or on request at a probability, whatever is given."""
    on_request = threshold is not None
    ending = f"_at_{threshold:g}" if on_request else ""
    those = f"the labels of probability {threshold:g} and more" if on_request else "the labels that are given"

    def make(average: str, statistic: Any, influence: Any, shortage: Any, reach: Any, over: str) -> Metric:
        return Metric(
            name=f"label_f1_{average}{ending}",
            against="labels",
            **FRACTION,
            fits=("label sets",),
            about=f"F1 of {those}, {over}",
            reduce=partial(_decide, threshold),
            misfit=find_label_misfit,
            kind="statistic",
            statistic=statistic,
            influence=influence,
            shortage=shortage,
            flaws=Flaws(of=lambda columns: (columns[0] != columns[1]).any(axis=1), reach=reach),
            on_request=on_request,
        )

    def reach_micro(columns: Columns) -> float:
        return float(2 * len(columns[0]) * columns[0].sum(axis=1).max(initial=1) / max(columns[0].sum(), 1))

    def reach_macro(columns: Columns) -> float:
        return 2 * len(columns[0]) / max(_rarest(columns[0])[1], 1)

    return (
        make(
            "micro",
            f1_micro,
            f1_micro_influence,
            partial(_decisions_shortage, 0),
            reach_micro,
            "over all decisions at once",
        ),
        make("macro", f1_macro, f1_macro_influence, partial(_shortage, 0), reach_macro, "mean over labels"),
    )


LABEL_AGREEMENT = Metric(
    name="label_agreement",
    against="baseline",
    **FRACTION,
    fits=("label sets",),
    about="fraction of decisions, label by label, that are the baseline's",
    reduce=_agreement,
    ideal=1.0,
    flaws=Flaws(of=lambda columns: columns[0] < 1, reach=lambda columns: 1.0),
)
MULTI_LABEL = (
    *_make_curve_metrics("auc", rank_area, "area under the ROC curve"),
    *_make_curve_metrics("average_precision", average_precision, "average precision"),
    *_make_f1_metrics(None),
    LABEL_AGREEMENT,
    *(metric for threshold in THRESHOLDS for metric in _make_f1_metrics(threshold)),
)
