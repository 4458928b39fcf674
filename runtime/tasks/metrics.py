"""Every metric by name, those of the tasks and of installed packages too, and which fit a task's outputs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from runtime.errors import UsageError
from runtime.metrics import BUILT_IN, MEASURED
from runtime.metrics.accuracy import TOP5
from runtime.metrics.base import Metric, Outputs, float_outputs
from runtime.plugins import METRIC_GROUP, PluginTable, check_entry
from runtime.tasks import TASKS, find_task
from runtime.words import suggest

_OWN = {m.name: m for m in (*BUILT_IN, *(metric for task in TASKS.own.values() for metric in task.metrics()))}
METRICS: PluginTable[Metric] = PluginTable(METRIC_GROUP, _OWN, partial(check_entry, kind=Metric), taken=MEASURED)


def metric_names() -> tuple[str, ...]:
    """Return the names of all metrics, those of installed plug-ins too, without importing them."""
    return (*METRICS, *MEASURED)


OWN = re.compile(r"python:([^:]+\.py):([A-Za-z_]\w*)")
"""A metric of a recipe's own: its file and function. Computed where a bundle is built, and recorded there."""
OWN_FORM = "python:FILE.py:FUNCTION"


def is_own(name: str) -> bool:
    """Return whether the name is that of a metric of the recipe's own, which no table lists."""
    return name.startswith("python:")


def check_name(name: str) -> None:
    """Raise UsageError with a near name where `name` is not a metric."""
    known = metric_names()
    if is_own(name):
        if OWN.fullmatch(name) is None:
            raise UsageError(f"metric '{name}': write {OWN_FORM}, such as python:metrics.py:cost")
        return
    if name not in known:
        raise UsageError(f"unknown metric '{name}'{suggest_metric(name)}")


def suggest_metric(name: str, task: object = None) -> str:
    """Return which metrics may have been meant, of those that fit the task where it is one, as the end of an error."""
    if not isinstance(task, str) or task not in TASKS:
        return suggest(name, metric_names())
    outputs = find_task(task).outputs
    return suggest(name, [*(known for known, metric in METRICS.items() if metric.suits(outputs)), *MEASURED])


def fitting(task: str, has_labels: bool) -> tuple[str, ...]:
    """Return the names of the quality metrics that fit a task, with or without labels, and without `postprocess`."""
    outputs = find_task(task).outputs
    fits = {n: m for n, m in METRICS.items() if m.suits(outputs) and not m.needs}
    return tuple(name for name, metric in fits.items() if has_labels or metric.against != "labels")


def why_not(metric: Metric, task: str, outputs: Outputs, labels: Any | None) -> str | None:
    """Return why the metric cannot be computed from these outputs and labels; None where it can."""
    if not metric.suits(find_task(task).outputs):
        return f"does not fit task {task}"
    if metric.against == "labels" and labels is None:
        return "needs labels, and the evaluation set has none"
    if metric.misfit is not None:
        return metric.misfit(outputs, labels)
    return _SHAPE_CHECKS[metric.shape](metric, outputs, labels)


def _check_classes(metric: Metric, outputs: Outputs, labels: Any | None) -> str | None:
    logits = outputs["logits"]
    if logits.ndim != 2 or logits.shape[1] < 2:
        return f"needs logits of at least two classes, and the model's have shape {list(logits.shape)}"
    if metric is TOP5 and logits.shape[1] <= 5:
        return f"is always 1 with {logits.shape[1]} classes"
    if metric.against == "labels" and not np.issubdtype(np.asarray(labels).dtype, np.integer):
        return f"needs integer class ids, and the labels are {np.asarray(labels).dtype}"
    return None


def _check_score(metric: Metric, outputs: Outputs, labels: Any | None) -> str | None:
    shapes: Sequence[tuple[int, ...]] = [values.shape for values in float_outputs(outputs).values()]
    if "embeddings" in outputs:
        columns = outputs["embeddings"].shape[1]
        return None if columns == 2 else f"needs the columns text and text_pair, and there is {columns} text column"
    if len(shapes) != 1 or int(np.prod(shapes[0][1:])) != 1:
        return f"needs one output value per sample, and the outputs have shapes {[list(s) for s in shapes]}"
    if np.ptp(np.asarray(labels, dtype=np.float64)) == 0:
        return "needs labels that differ, and these are all the same"
    return None


def _check_outputs(metric: Metric, outputs: Outputs, labels: Any | None) -> str | None:
    return None if float_outputs(outputs) else f"needs a floating output, and there is none among {sorted(outputs)}"


def _check_answers(metric: Metric, outputs: Outputs, labels: Any | None) -> str | None:
    if "answered" not in outputs and "top" not in outputs:
        return f"needs postprocess: {' or '.join(metric.needs)}"
    return _check_classes(metric, outputs, labels)


def _check_tokens(metric: Metric, outputs: Outputs, labels: Any | None) -> str | None:
    missing = [name for name in ("nll", "n_tokens") if name not in outputs]
    if missing:
        return f"needs the sums nll and n_tokens of each sample, and there are only {sorted(outputs)}"
    if outputs["n_tokens"].max() > 0:
        return None
    parts = "answer" in outputs
    return "is of samples that are read in one part, and there is none" if parts else "needs samples of two tokens"


def _check_nothing(metric: Metric, outputs: Outputs, labels: Any | None) -> str | None:
    return None


_SHAPE_CHECKS = {
    "classes": _check_classes,
    "score": _check_score,
    "tokens": _check_tokens,
    "answers": _check_answers,
    "outputs": _check_outputs,
    "any": _check_nothing,
}
