"""Find what the candidate answers otherwise than the baseline: which samples, and which class is taken for which."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.bundle.columns import Array
from runtime.metrics import Metric, Outputs
from runtime.metrics.base import Columns
from runtime.tasks import find_task
from runtime.tasks.base import name_classes
from runtime.tasks.metrics import METRICS, why_not

MOST_SAMPLES = 24
"""Samples that a report keeps."""
MOST_ITEMS, MOST_CHARACTERS, DIGITS = 50, 1000, 5
"""Of an answer that a report keeps: items of a list, characters of a text, digits of a number."""
MOST_PAIRS = 5000
"""Pairs of classes that a report lists; the rarest are left out."""


@dataclass(frozen=True)
class ChangedSample:
    """What both models answer to one sample: as `Task.predict` gives it; None where outputs are all there is to say."""

    sample: int
    """Its number among the frozen samples, from 0 on."""
    baseline: Any
    candidate: Any
    values: dict[str, tuple[float | None, float]]
    """Metric -> (baseline, candidate), of this sample alone; None of the baseline where it is what is compared with."""


@dataclass(frozen=True)
class Changes:
    """The samples that changed most by a metric against the baseline, the most changed first."""

    metric: str
    n_changed: int | None
    """How many samples changed; None where the metric has no "as it was", so that every sample changes by a little."""
    samples: tuple[ChangedSample, ...]


def find_changes(
    task: str, candidate: Outputs, baseline: Outputs, labels: Any | None, class_names: Sequence[str]
) -> Changes | None:
    """Find the samples whose outputs changed most; None where no metric compares a sample with the baseline's.

    The task's own metric decides (the agreement of classes, boxes, words), and where samples are equal by it the next.
    """
    metrics = _find_comparing(task, baseline, labels)[:2]
    if not metrics:
        return None
    columns = {metric.name: metric.columns(candidate, baseline) for metric in metrics}
    first, counted = metrics[0], _find_changed(metrics[0], columns[metrics[0].name])
    losses = [_compute_losses(metric, columns[metric.name]) for metric in metrics]
    order = np.lexsort([-of_metric for of_metric in reversed(losses)])  # the last key counts first
    changed = losses[0] != losses[0].min() if counted is None else counted
    rows = order[changed[order]][:MOST_SAMPLES]
    taken = [{name: values[rows] for name, values in outputs.items()} for outputs in (baseline, candidate)]
    answers = [find_task(task).predict(outputs, class_names) if len(rows) else [] for outputs in taken]
    before, after = (shorten(of_model or [None] * len(rows)) for of_model in answers)
    # what a sample's own outputs say something by, as the nats of a text; nothing for most tasks
    fits = [m for m in METRICS.values() if m.against == "texts" and m.kind == "statistic" and m.sliceable]
    own = [metric for metric in fits if why_not(metric, task, baseline, labels) is None][:1]
    values = _compute_values(metrics[:1] + own, candidate, baseline, rows)
    samples = tuple(map(ChangedSample, rows.tolist(), before, after, values))
    return Changes(first.name, None if counted is None else int(np.count_nonzero(counted)), samples)


def _find_comparing(task: str, baseline: Outputs, labels: Any | None) -> list[Metric]:
    """Return the metrics that compare each sample with the baseline's, those of the task's own outputs first."""
    metrics = [
        metric
        for metric in METRICS.values()
        if metric.against == "baseline" and metric.sliceable and why_not(metric, task, baseline, labels) is None
    ]
    return sorted(metrics, key=lambda metric: metric.fits is None)


def _find_changed(metric: Metric, columns: Columns) -> Array | None:
    """Return which samples changed, bool [N]; None where the metric does not tell changed samples from others."""
    if metric.fits is None:
        return None
    if metric.flaws is not None:
        return np.asarray(metric.flaws.of(columns), bool)
    return columns[0] != metric.ideal if metric.kind in ("proportion", "mean") and metric.ideal == 1 else None


def _compute_losses(metric: Metric, columns: Columns) -> Array:
    """Return by how much each sample makes the metric worse, float64 [N]."""
    sign = -1.0 if metric.higher_is_better else 1.0
    losses: Array = sign * np.asarray(metric.influence(columns), np.float64)
    return np.where(np.isfinite(losses), losses, 0.0)


def _compute_values(
    metrics: Sequence[Metric], candidate: Outputs, baseline: Outputs, rows: Array
) -> list[dict[str, tuple[float | None, float]]]:
    """Return for each of the rows what each metric is of it alone."""
    values: list[dict[str, tuple[float | None, float]]] = [{} for _ in rows]
    for metric in metrics:
        compared = metric.against == "baseline"
        ours = metric.columns(candidate, baseline if compared else None)
        theirs = None if compared else metric.columns(baseline, None)
        for row, of_row in zip(rows, values, strict=True):
            after = _compute_alone(metric, ours, row)
            before = None if theirs is None else _compute_alone(metric, theirs, row)
            if after is not None:
                of_row[metric.name] = (before, after)
    return values


def _compute_alone(metric: Metric, columns: Columns, row: int) -> float | None:
    """Return the metric of one sample; None where it has no value of that alone."""
    alone = tuple(column[row : row + 1] for column in columns)
    if metric.counts is not None and not metric.counts(alone).all():
        return None
    value = metric.statistic(alone)
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def shorten(answer: Any) -> Any:
    """Return an answer as JSON values, cut to what a report keeps."""
    if isinstance(answer, Mapping):
        return {str(name): shorten(item) for name, item in answer.items()}
    if isinstance(answer, (list, tuple)):
        return [shorten(item) for item in answer[:MOST_ITEMS]]
    if isinstance(answer, str):
        return answer if len(answer) <= MOST_CHARACTERS else answer[:MOST_CHARACTERS] + "…"
    if isinstance(answer, (float, np.floating)):
        return float(f"{answer:.{DIGITS}g}") if math.isfinite(answer) else None
    if isinstance(answer, np.generic):
        return answer.item()
    return answer


@dataclass(frozen=True)
class ConfusedPair:
    """How many samples of the class `label` each model takes for the class `taken_for`."""

    label: str
    taken_for: str
    baseline: int
    candidate: int


@dataclass(frozen=True)
class Confusion:
    """A confusion matrix without its zeros, `pairs` with the commonest first, those of no confusion included."""

    n_classes: int
    classes: tuple[str, ...]
    """Those that `pairs` name, in the order of the model's outputs."""
    pairs: tuple[ConfusedPair, ...]
    n_left_out: int = 0
    turned: int = 0
    """Samples to which the two models give different classes."""


def count_confusions(
    task: str, candidate: Outputs, baseline: Outputs, labels: Any | None, class_names: Sequence[str]
) -> Confusion | None:
    """Count which class is taken for which; None where the model chooses no single class, or there are no labels."""
    if why_not(METRICS["top1"], task, baseline, labels) is not None:
        return None
    chosen = [outputs["logits"].argmax(axis=1) for outputs in (baseline, candidate)]
    n_classes = baseline["logits"].shape[1]
    given = np.asarray(labels)
    counts = [_count_cells(given, one, n_classes) for one in chosen]
    cells = sorted(counts[0].keys() | counts[1].keys(), key=lambda cell: (-counts[1].get(cell, 0), cell))
    names = name_classes({c for cell in cells[:MOST_PAIRS] for c in cell}, class_names)
    pairs = [
        ConfusedPair(names[label], names[taken], *(count.get((label, taken), 0) for count in counts))
        for label, taken in cells[:MOST_PAIRS]
    ]
    turned = int(np.count_nonzero(chosen[0] != chosen[1]))
    return Confusion(n_classes, tuple(names.values()), tuple(pairs), len(cells) - len(pairs), turned)


def _count_cells(labels: Array, chosen: Array, n_classes: int) -> dict[tuple[int, int], int]:
    """Count (label, class chosen), zeros left out."""
    cells, counts = np.unique(labels.astype(np.int64) * n_classes + chosen, return_counts=True)
    return {divmod(int(cell), n_classes): int(count) for cell, count in zip(cells, counts, strict=True)}
