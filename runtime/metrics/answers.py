"""What a classifier answers once `postprocess` has chosen: how often, and how often rightly."""

from __future__ import annotations

from typing import Any

import numpy as np

from runtime.metrics.base import FRACTION, Columns, Metric, Outputs, class_labels, share_of_sums


def mark_answered(outputs: Outputs, _: Any = None) -> Columns:
    """Return 1.0 where there is an answer, float64 [N]."""
    if "answered" not in outputs:
        return (np.ones(len(outputs["logits"])),)
    return (outputs["answered"].astype(np.float64),)


def mark_right_answers(outputs: Outputs, labels: Any) -> Columns:
    """Return 1.0 where the label is among a sample's answers, and where there are any, float64 [N] each."""
    logits, (given,) = outputs["logits"], mark_answered(outputs)
    checked = class_labels(labels, logits.shape[1], len(logits))
    chosen = outputs["top"] if "top" in outputs else logits.argmax(axis=1)[:, None]  # [N, k]
    return (chosen == checked[:, None]).any(axis=1) * given, given


COVERAGE = Metric(
    name="coverage",
    against="texts",
    **FRACTION,
    fits=("classes",),
    about="fraction of samples that are answered at all: those that postprocess.reject_below does not reject",
    reduce=mark_answered,
    shape="answers",
    kind="proportion",
    needs=("reject_below",),
)
ACCURACY_ANSWERED = Metric(
    name="accuracy_answered",
    against="labels",
    **FRACTION,
    fits=("classes",),
    about="fraction of the answered samples whose label is among the answers (postprocess.top_k of them, or one)",
    reduce=mark_right_answers,
    shape="answers",
    kind="statistic",
    **share_of_sums(),  # 0 where there is no answer, so that silence scores badly
    shortage=lambda columns: "" if columns[1].sum() else "no sample is answered",
    needs=("reject_below", "top_k"),
)
