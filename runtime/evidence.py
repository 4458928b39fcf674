"""What is known about each metric of a bundle: baseline, candidate and their difference, each with its interval.

Gates are decided from this alone, whatever kind of metric it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.bundle import Judgement
from runtime.errors import UsageError
from runtime.metrics import METRICS, Metric, Outputs, why_not
from runtime.metrics.base import Columns
from runtime.metrics.measured import MEASURED
from runtime.stats import (
    Estimate,
    bootstrap_means,
    bootstrap_percentiles,
    bootstrap_statistic,
    exact,
    paired_difference,
    percentile_interval,
    wilson,
)


@dataclass(frozen=True)
class Evidence:
    """All that is known about one metric.

    `difference` is candidate minus baseline (minus `ideal` for metrics against the baseline). `speedup` is how many
    times faster the candidate is. `n` counts what was observed, and `counted` says what that is.
    """

    name: str
    unit: str
    higher_is_better: bool
    n: int
    counted: str
    candidate: Estimate
    baseline: Estimate | None = None
    difference: Estimate | None = None
    speedup: Estimate | None = None


def wanted_metrics(judgement: Judgement) -> tuple[str, ...] | None:
    """The quality metrics that the judgement asks for, those of its gates included; None for all that fit."""
    if not judgement.metrics:
        return None
    names = (*judgement.metrics, *(gate.metric for gate in judgement.gates))
    return tuple(dict.fromkeys(name for name in names if name in METRICS))


def select_metrics(task: str, baseline: Outputs, labels: Any | None, judgement: Judgement) -> list[Metric]:
    """The quality metrics to compute: those that are asked for or, when none is, those that fit and add something.

    Needs only the baseline's outputs, so that it can refuse before the candidate runs. Raises UsageError for a metric
    that is asked for and does not fit, and for labels out of range; NonFiniteOutputs if the baseline is broken.
    """
    asked = wanted_metrics(judgement)
    must = {gate.metric for gate in judgement.gates} | set(asked or ())
    misfits = {name: why_not(metric, task, baseline, labels) for name, metric in METRICS.items()}
    fits = [name for name, problem in misfits.items() if problem is None]
    refused = [
        f"metric '{n}' {misfits[n]}; what fits here: {', '.join(fits)}" for n in METRICS if n in must and misfits[n]
    ]
    if refused:
        raise UsageError(refused)
    wanted = must if asked is not None else must | {n for n in fits if not METRICS[n].on_request}
    chosen = [METRICS[name] for name in fits if name in wanted]
    for metric in chosen:
        metric.columns(baseline, labels if metric.against == "labels" else baseline)
    return chosen


def quality_evidence(
    metrics: Sequence[Metric], candidate: Outputs, baseline: Outputs, labels: Any | None, judgement: Judgement
) -> dict[str, Evidence]:
    """Evidence of each metric. Raises NonFiniteOutputs, and RuntimeFailure where the two outputs differ in shape."""
    return {m.name: _metric_evidence(m, candidate, baseline, labels, judgement) for m in metrics}


def _metric_evidence(
    metric: Metric, candidate: Outputs, baseline: Outputs, labels: Any, judgement: Judgement
) -> Evidence:
    if metric.against != "baseline":
        ours, theirs = metric.columns(candidate, labels), metric.columns(baseline, labels)
        before, after, difference = _METHODS[metric.kind](metric, theirs, ours, judgement)
    else:
        ours = metric.columns(candidate, baseline)
        before, (_, after, difference) = None, _METHODS[metric.kind](metric, None, ours, judgement)
    return Evidence(
        name=metric.name,
        unit=metric.unit,
        higher_is_better=metric.higher_is_better,
        n=len(ours[0]),
        counted="samples",
        baseline=before,
        candidate=after,
        difference=difference,
    )


Estimates = tuple[Estimate | None, Estimate, Estimate | None]


def _minus_ideal(metric: Metric, after: Estimate) -> Estimate | None:
    if metric.ideal is None:
        return None
    value, low, high = (x - metric.ideal for x in (after.value, after.low, after.high))
    return Estimate(value, low, high, after.method)


def _proportion(metric: Metric, theirs: Columns | None, ours: Columns, judgement: Judgement) -> Estimates:
    """Wilson for each proportion, Tango for their difference."""
    n, level = len(ours[0]), judgement.confidence
    after = wilson(int(ours[0].sum()), n, level)
    if theirs is None:
        return None, after, _minus_ideal(metric, after)
    change = ours[0] - theirs[0]
    gained, lost = int(np.count_nonzero(change > 0)), int(np.count_nonzero(change < 0))
    return wilson(int(theirs[0].sum()), n, level), after, paired_difference(gained, lost, n, level)


def _bootstrapped(metric: Metric, theirs: Columns | None, ours: Columns, judgement: Judgement) -> Estimates:
    """Percentile bootstrap; the same draws for both sides, so that the difference is paired."""
    n, level = len(ours[0]), judgement.confidence

    def draw(columns: Columns) -> np.ndarray:
        if metric.kind == "mean":
            return bootstrap_means(columns[0], judgement.resamples, judgement.seed)
        return bootstrap_statistic(columns, metric.statistic, judgement.resamples, judgement.seed)

    value, replicates = metric.statistic(ours), draw(ours)
    after = percentile_interval(value, replicates, n, level)
    if theirs is None:
        return None, after, _minus_ideal(metric, after)
    value_before, before = metric.statistic(theirs), draw(theirs)
    difference = percentile_interval(value - value_before, replicates - before, n, level)
    return percentile_interval(value_before, before, n, level), after, difference


_METHODS: Mapping[str, Callable[[Metric, Columns | None, Columns, Judgement], Estimates]] = {
    "proportion": _proportion,
    "mean": _bootstrapped,
    "statistic": _bootstrapped,
}


def timing_evidence(
    name: str, percentile: float, seconds: np.ndarray, judgement: Judgement, batch_size: int | None = None
) -> Evidence:
    """Evidence of a percentile of paired times, seconds [2, rounds] (baseline, candidate).

    Latency in ms or, given `batch_size`, throughput in samples per second. Rounds are resampled in pairs. The speed-up
    of medians is the median of the rounds' own ratios: equal on an idle machine, and steadier on a busy one, because
    what slows a round slows both of its calls.
    """

    def scale(t: np.ndarray) -> np.ndarray:
        return 1000 * t if batch_size is None else batch_size / t

    n, level = seconds.shape[1], judgement.confidence
    value = np.percentile(seconds, percentile, axis=1)  # [2]
    draws = [bootstrap_percentiles(times, percentile, judgement.resamples, judgement.seed) for times in seconds]
    before, after = (
        percentile_interval(float(v), d, n, level) for v, d in zip(scale(value), map(scale, draws), strict=True)
    )
    shift = scale(draws[1]) - scale(draws[0])
    speedup, ratios = float(value[0] / value[1]), draws[0] / draws[1]
    if percentile == 50:
        paired = seconds[0] / seconds[1]  # [rounds]
        speedup, ratios = (
            float(np.median(paired)),
            bootstrap_percentiles(paired, 50, judgement.resamples, judgement.seed),
        )
    return measured(
        name,
        n,
        before=before,
        after=after,
        difference=percentile_interval(after.value - before.value, shift, n, level),
        speedup=percentile_interval(speedup, ratios, n, level),
    )


def range_evidence(name: str, baseline: tuple[float, ...], candidate: tuple[float, ...]) -> Evidence:
    """Evidence of a quantity seen in a few fresh processes: the median, and as its interval the whole range seen."""
    before, after = _range(baseline), _range(candidate)
    return measured(
        name,
        len(candidate),
        before=before,
        after=after,
        difference=Estimate(after.value - before.value, after.low - before.high, after.high - before.low, _RANGE),
        speedup=Estimate(before.value / after.value, before.low / after.high, before.high / after.low, _RANGE)
        if MEASURED[name].speed
        else None,
    )


_RANGE = "range of fresh processes"


def _range(seen: tuple[float, ...]) -> Estimate:
    return Estimate(float(np.median(seen)), min(seen), max(seen), _RANGE)


def size_evidence(baseline_bytes: int | None, candidate_bytes: int) -> dict[str, Evidence]:
    """Evidence of size (bytes) and, with a baseline, of size_ratio (baseline / candidate); both exact."""
    if baseline_bytes is None:
        alone = exact(candidate_bytes)
        return {"size": measured("size", 1, before=None, after=alone, difference=None, speedup=None)}
    before, after = exact(baseline_bytes), exact(candidate_bytes)
    ratio = exact(baseline_bytes / candidate_bytes)
    difference = exact(candidate_bytes - baseline_bytes)
    return {
        "size": measured("size", 1, before=before, after=after, difference=difference, speedup=None),
        "size_ratio": measured("size_ratio", 1, before=None, after=ratio, difference=None, speedup=None),
    }


Best = tuple[int, np.ndarray] | None
"""(batch size, seconds [rounds]) of the largest batch in time; None if even one sample is late."""


def throughput_under_latency_evidence(
    best: tuple[Best, Best], judgement: Judgement, name: str = "throughput_under_latency"
) -> Evidence:
    """Evidence of a rate, batch over median time, at each side's own largest batch in time."""
    before, before_draws, _ = _rate(best[0], judgement, judgement.seed)
    after, after_draws, n = _rate(best[1], judgement, judgement.seed + 1)  # not paired: the batches differ
    speedup = None
    if before.value > 0:
        draws = after_draws / before_draws
        speedup = percentile_interval(after.value / before.value, draws, n, judgement.confidence)
    difference = percentile_interval(after.value - before.value, after_draws - before_draws, n, judgement.confidence)
    return measured(name, n, before=before, after=after, difference=difference, speedup=speedup)


def _rate(best: Best, judgement: Judgement, seed: int) -> tuple[Estimate, np.ndarray, int]:
    """(throughput, its replicates [resamples], what was counted)."""
    if best is None:
        return exact(0.0), np.zeros(judgement.resamples), judgement.benchmark.iterations
    batch_size, seconds = best
    draws = batch_size / bootstrap_percentiles(seconds, 50, judgement.resamples, seed)
    value = batch_size / float(np.percentile(seconds, 50))
    return percentile_interval(value, draws, len(seconds), judgement.confidence), draws, len(seconds)


def measured(
    name: str,
    n: int,
    *,
    before: Estimate | None,
    after: Estimate,
    difference: Estimate | None,
    speedup: Estimate | None,
) -> Evidence:
    """Evidence of a measured metric, unit and direction as `MEASURED` says; `n` rounds or processes were seen."""
    metric = MEASURED[name]
    counted = "fresh processes" if name in ("peak_memory", "load_time") else "timed rounds"
    return Evidence(name, metric.unit, metric.higher_is_better, n, counted, after, before, difference, speedup)
