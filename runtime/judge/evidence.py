"""Tell what is known about each metric of a bundle: baseline, candidate, their difference, each with its interval.

Gates are decided from this alone, whatever kind of metric it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from runtime.bundle.columns import Array
from runtime.bundle.format import Benchmark, Judgement
from runtime.errors import UsageError
from runtime.judge.slices import LABEL, Groups
from runtime.judge.stats import (
    HALL,
    RARE_CHANGES,
    Estimate,
    bound_rare_changes,
    change_scale,
    divide,
    exact,
    paired_difference,
    paired_ratio,
    process_interval,
    proportion_interval,
    skewed_interval,
    subtract,
    unknown,
)
from runtime.measure.requests import RequestTimes
from runtime.metrics import METRICS, Metric, Outputs, is_own, why_not
from runtime.metrics.base import Columns, Flaws, Link
from runtime.metrics.measured import ITL_PERCENTILES, LATENCY_PERCENTILES, MEASURED

PROCESS = "fresh processes"
_SIDE_OF_A_PERCENTILE = 2.5
"""Calls of a process beyond a percentile, below which the percentile is one odd call's."""


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
    retained: Estimate | None = None
    """The share of the baseline's value, or of a value that is better lower the baseline's over it; where asked for."""
    slices: Mapping[str, tuple[SliceEvidence, ...]] = field(default_factory=dict)
    """Column -> what is known of each of its slices."""
    recorded: bool = False
    """Whether it was computed when the bundle was built, by code that is not here."""
    columns: Columns = field(default=(), repr=False, compare=False)
    """The candidate's, a row for each sample, with which another model can be paired; nothing of what is measured."""


@dataclass(frozen=True)
class SliceEvidence:
    """What is known of a metric on one slice: `alone`, and `at_once`, its intervals holding for all slices together.

    `at_once` has the level of Bonferroni: of k slices each interval fails k times as seldom.
    """

    value: str
    alone: Evidence
    at_once: Evidence


def list_wanted_metrics(judgement: Judgement) -> tuple[str, ...] | None:
    """Return the quality metrics that the judgement asks for, those of its gates included; None for all that fit."""
    if not judgement.metrics:
        return None
    names = (*judgement.metrics, *(gate.metric for gate in judgement.gates))
    return tuple(dict.fromkeys(name for name in names if name in METRICS or is_own(name)))


def select_metrics(task: str, baseline: Outputs, labels: Any | None, judgement: Judgement) -> list[Metric]:
    """Choose the quality metrics: those that are asked for or, when none is, those that fit and add something.

    Needs only the baseline's outputs, so that it can refuse before the candidate runs. Raises UsageError for a metric
    that is asked for and does not fit, and for labels out of range; NonFiniteOutputs if the baseline is broken.
    """
    asked = list_wanted_metrics(judgement)
    must = {name for name in (*(gate.metric for gate in judgement.gates), *(asked or ())) if not is_own(name)}
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
    metrics: Sequence[Metric],
    candidate: Outputs,
    baseline: Outputs,
    labels: Any | None,
    judgement: Judgement,
    groups: Groups | None = None,
) -> dict[str, Evidence]:
    """Return evidence of each metric, and of each slice of `groups`.

    Raises NonFiniteOutputs, and RuntimeFailure where the two outputs differ in shape.
    """
    evidence = {}
    for metric in metrics:
        if metric.against != "baseline":
            ours, theirs = metric.columns(candidate, labels), metric.columns(baseline, labels)
            evidence[metric.name] = column_evidence(metric, ours, theirs, judgement, groups)
        else:
            evidence[metric.name] = column_evidence(
                metric, metric.columns(candidate, baseline), None, judgement, groups
            )
    return evidence


def column_evidence(
    metric: Metric, ours: Columns, theirs: Columns | None, judgement: Judgement, groups: Groups | None = None
) -> Evidence:
    """Return evidence of a metric from its columns for the candidate and, unless it is against it, for the baseline."""
    whole = _make_evidence(metric, ours, theirs, judgement, judgement.confidence)
    slices = {}
    for column, masks in (groups or {}).items():
        if not slices_by(metric, column):
            continue
        level = 1 - (1 - judgement.confidence) / len(masks)
        slices[column] = tuple(
            SliceEvidence(
                value,
                *(_make_evidence(metric, *rows, judgement, each) for each in (judgement.confidence, level)),
            )
            for value, mask in masks.items()
            for rows in [(_take_rows(ours, mask), None if theirs is None else _take_rows(theirs, mask))]
        )
    return replace(whole, slices=slices, columns=ours)


def slices_by(metric: Metric, column: str) -> bool:
    """Return whether a metric says something of each slice of a column.

    Of one class alone an average over classes says nothing, nor does a correlation: only means over samples do.
    """
    return metric.sliceable and (column != LABEL or metric.kind != "statistic")


def _take_rows(columns: Columns, mask: Array) -> Columns:
    return tuple(column[mask] for column in columns)


def _make_evidence(
    metric: Metric, ours: Columns, theirs: Columns | None, judgement: Judgement, level: float
) -> Evidence:
    if metric.counts is not None:
        counted = metric.counts(ours)
        ours, theirs = _take_rows(ours, counted), None if theirs is None else _take_rows(theirs, counted)
    n = len(ours[0])
    nothing = unknown(math.nan, "no samples", "none of them counts")
    estimates: Sequence[Estimate | None] = (None if theirs is None else nothing, nothing, nothing)
    if n:
        found = _METHODS[metric.kind](metric, theirs, ours, level)
        estimates = [None if estimate is None else _check_defined(estimate, n) for estimate in found]
    before, after, difference = estimates
    assert after is not None
    retained = None
    if before is not None and any(g.metric == metric.name and g.min_retained is not None for g in judgement.gates):
        retained = _estimate_retained(metric, ours, theirs, before, after, level) if n else nothing
    return Evidence(
        name=metric.name,
        unit=metric.unit,
        higher_is_better=metric.higher_is_better,
        n=n,
        counted=metric.counted,
        baseline=before,
        candidate=after,
        difference=difference,
        retained=retained,
    )


NO_VALUE = "the metric has no value on them"
"""Said of samples on which a metric is not defined, as R² where the labels are all the same."""


def _check_defined(estimate: Estimate, n: int) -> Estimate:
    """Return the estimate; one without any interval where the metric has no value on such samples."""
    if math.isnan(estimate.low) or math.isnan(estimate.high):
        return unknown(estimate.value, f"{n} samples", NO_VALUE)
    return estimate


def _estimate_retained(
    metric: Metric, ours: Columns, theirs: Columns | None, before: Estimate, after: Estimate, level: float
) -> Estimate:
    """Estimate the candidate's share of the baseline's value, paired by sample; the inverse where lower is better."""
    assert theirs is not None
    part, whole = (ours, theirs) if metric.higher_is_better else (theirs, ours)
    above, below = (after, before) if metric.higher_is_better else (before, after)
    if metric.kind == "proportion":
        both = int(np.count_nonzero((part[0] > 0) & (whole[0] > 0)))
        return paired_ratio(both, int(part[0].sum()) - both, int(whole[0].sum()) - both, len(part[0]), level)
    if math.isnan(above.value) or math.isnan(below.value):
        return unknown(math.nan, f"{len(ours[0])} samples", NO_VALUE)
    if above.value == below.value == 0:
        return unknown(1.0, f"{len(ours[0])} samples", "both values are 0, and there is no share of that")
    if below.value <= 0:
        return unknown(math.nan, f"{len(ours[0])} samples", f"there is no share of a value of {below.value:.4g}")
    share = above.value / below.value
    influence = (metric.influence(part) - share * metric.influence(whole)) / below.value
    estimate = skewed_interval(share, influence, level, _sample_weights(metric, whole))
    if metric.flaws is not None and estimate.method == HALL:
        changed = _find_changed(metric.flaws, ours, theirs)
        reach = metric.flaws.reach(whole) / below.value
        estimate = bound_rare_changes(estimate, 1.0, int(changed.sum()), len(changed), reach, level)
    if estimate.method == HALL and not below.low > 0:
        return unknown(share, f"{len(ours[0])} samples", "the value may be 0, and there is no share of that")
    return estimate


Estimates = tuple[Estimate | None, Estimate, Estimate | None]


def _subtract_ideal(metric: Metric, after: Estimate) -> Estimate | None:
    if metric.ideal is None:
        return None
    ideal = metric.ideal
    return change_scale(after, lambda value: value - ideal)


def _estimate_proportion(metric: Metric, theirs: Columns | None, ours: Columns, level: float) -> Estimates:
    """Estimate each proportion (Clopper-Pearson) and their difference (Tango)."""
    n = len(ours[0])
    after = proportion_interval(int(ours[0].sum()), n, level)
    if theirs is None:
        return None, after, _subtract_ideal(metric, after)
    change = ours[0] - theirs[0]
    gained, lost = int(np.count_nonzero(change > 0)), int(np.count_nonzero(change < 0))
    return proportion_interval(int(theirs[0].sum()), n, level), after, paired_difference(gained, lost, n, level)


def _estimate_statistic(metric: Metric, theirs: Columns | None, ours: Columns, level: float) -> Estimates:
    """Estimate each side by Hall's t; the difference from what each sample adds to both, so that it is paired."""
    after = _estimate_one_model(metric, ours, level)
    if theirs is None:
        return None, after, _subtract_ideal(metric, after)
    before = _estimate_one_model(metric, theirs, level)
    influence = metric.influence(ours) - metric.influence(theirs)
    difference = skewed_interval(after.value - before.value, influence, level, _sample_weights(metric, ours))
    if metric.turned is not None and difference.method == HALL and math.isinf(difference.high - difference.low):
        difference = _bound_leaps(difference, influence, metric.turned(ours, theirs), level)
    if metric.reach is not None and difference.method == HALL:
        changed = int(np.count_nonzero(ours[0] != theirs[0]))
        difference = bound_rare_changes(difference, 0.0, changed, len(ours[0]), metric.reach, level)
    if metric.bias is not None and metric.biased_change:  # either model's may be there alone
        low, high = difference.low - max(metric.bias(ours), 0.0), difference.high + max(metric.bias(theirs), 0.0)
        difference = replace(difference, low=low, high=high)
    if metric.link is not None and math.isfinite(metric.link.to(after.value)):
        difference = _widen_by_slope(difference, after, metric.link)
    if metric.flaws is not None and difference.method == HALL:
        differ, reach = _find_changed(metric.flaws, ours, theirs), metric.flaws.reach(ours)
        difference = bound_rare_changes(difference, 0.0, int(differ.sum()), len(differ), reach, level)
        widest = metric.flaws.widest
        difference = replace(difference, low=max(difference.low, -widest), high=min(difference.high, widest))
    return before, after, difference


def _find_changed(flaws: Flaws, ours: Columns, theirs: Columns) -> np.ndarray:
    """Return which samples differ in what counts, or in any column where the metric does not say, bool [N]."""
    if flaws.changed is not None:
        return flaws.changed(ours, theirs)
    pairs = zip(ours, theirs, strict=True)
    changed: np.ndarray = np.any([(a != b).reshape(len(a), -1).any(axis=1) for a, b in pairs], axis=0)
    return changed


def _estimate_one_model(metric: Metric, columns: Columns, level: float) -> Estimate:
    """Estimate the metric of one model."""
    value, influence, link = metric.statistic(columns), metric.influence(columns), metric.link
    if metric.shortage is not None and (lacking := metric.shortage(columns)):
        return unknown(value, f"{len(influence)} samples", lacking)
    weights = _sample_weights(metric, columns)
    if link is None or not math.isfinite(link.to(value)):
        estimate = skewed_interval(value, influence, level, weights)
    else:
        estimate = skewed_interval(link.to(value), link.slope(value) * influence, level, weights)
        estimate = replace(change_scale(estimate, link.back), value=value)
    if metric.flaws is not None and estimate.method == HALL:
        flawed = metric.flaws.of(columns)
        count, reach = int(flawed.sum()), metric.flaws.reach(columns)
        estimate = bound_rare_changes(estimate, metric.flaws.perfect, count, len(flawed), reach, level)
        perfect = metric.flaws.perfect
        if metric.higher_is_better:
            estimate = replace(estimate, high=min(estimate.high, perfect))
        else:
            estimate = replace(estimate, low=max(estimate.low, perfect))
    if metric.reach is not None and estimate.method == HALL:
        estimate = _bound_by_commonest(estimate, columns[0], metric.reach, level)
    if metric.bias is not None:
        bias = metric.bias(columns)
        estimate = replace(estimate, low=estimate.low - max(bias, 0.0), high=estimate.high + max(-bias, 0.0))
    return estimate


def _bound_leaps(difference: Estimate, influence: Array, turned: Array, level: float) -> Estimate:
    """Return the estimate of a change whose spread a few samples carry: their count bounds what they do.

    The others have an interval of their own; each of the two keeps half of what may be missed.
    """
    half = 1 - (1 - level) / 2
    calm = np.where(turned, 0.0, influence - influence.mean() + difference.value)
    others = skewed_interval(float(calm.mean()), calm, half)
    most = 2 * proportion_interval(int(turned.sum()), len(turned), half).high
    low, high = max(difference.low, others.low - most), min(difference.high, others.high + most)
    return replace(difference, low=low, high=high, method=RARE_CHANGES, lacking=others.lacking)


def _bound_by_commonest(estimate: Estimate, values: Array, reach: float, level: float) -> Estimate:
    """Return the estimate of a mean, bounded by how few samples have another than the commonest value."""
    known, counts = np.unique(values, return_counts=True)
    common, others = float(known[counts.argmax()]), int(len(values) - counts.max())
    bounded = bound_rare_changes(estimate, common, others, len(values), reach, level)
    # where all others lie to one side, so does the mean
    low = max(bounded.low, common) if common <= known[0] else bounded.low
    return replace(bounded, low=low, high=min(bounded.high, common) if common >= known[-1] and others else bounded.high)


def _sample_weights(metric: Metric, columns: Columns) -> np.ndarray | None:
    return None if metric.weights is None else metric.weights(columns)


def _widen_by_slope(difference: Estimate, after: Estimate, link: Link) -> Estimate:
    """Widen each end of a difference where the metric is steeper half way to the candidate's own end."""

    def stretch(end: float) -> float:
        if not math.isfinite(end):
            return 1.0
        return max(1.0, link.slope(after.value) / link.slope((after.value + end) / 2))

    value = difference.value
    low = value - (value - difference.low) * stretch(after.low)
    return replace(difference, low=low, high=value + (difference.high - value) * stretch(after.high))


_METHODS: Mapping[str, Callable[[Metric, Columns | None, Columns, float], Estimates]] = {
    "proportion": _estimate_proportion,
    "mean": _estimate_statistic,
    "statistic": _estimate_statistic,
}


def _to_milliseconds(second: float) -> float:
    return 1000 * second


def find_medians(seconds: Array) -> Array:
    """Return each process's median, [processes, models], of seconds [processes, models, ...]."""
    medians: Array = np.median(seconds.reshape(*seconds.shape[:2], -1), axis=2)
    return medians


def timing_evidence(
    name: str,
    percentile: float,
    seconds: Array,
    level: float,
    to_unit: Callable[[float], float] = _to_milliseconds,
) -> Evidence:
    """Return evidence of a percentile of calls, seconds [processes, models, rounds, calls], on the scale `to_unit`.

    Each process has its own percentile, of all its calls; the estimate is of their median. The speed-up of medians is,
    in each process, the median of the rounds' own ratios: what slows a round slows both of its models.
    """
    of_process = np.percentile(seconds.reshape(*seconds.shape[:2], -1), percentile, axis=2)  # [processes, models]
    ratios = None
    if percentile == 50 and seconds.shape[1] == 2:
        medians = np.median(seconds, axis=3)  # [processes, models, rounds]
        ratios = np.median(medians[:, 0] / medians[:, 1], axis=1)
    values = np.vectorize(to_unit, otypes=[float])(of_process)
    lacking = _lack_calls(percentile, seconds.shape[2] * seconds.shape[3])
    return process_evidence(name, values, level, ratios, lacking)


def _lack_calls(percentile: float, n_calls: int) -> str:
    """Return what is missing where a process made too few calls to show a percentile; "" where it made enough."""
    needed = 1 if percentile == 50 else math.ceil(_SIDE_OF_A_PERCENTILE / min(percentile / 100, 1 - percentile / 100))
    if n_calls >= needed:
        return ""
    return f"each process made {n_calls} calls, and at least {needed} are needed (benchmark.iterations)"


def process_evidence(
    name: str, values: Array, level: float, ratios: Array | None = None, lacking: str = ""
) -> Evidence:
    """Return evidence of a metric of which each process gives one value a model, [processes, models], in its unit.

    `ratios`: how many times as fast the candidate is in each process, where that is not the ratio of its values.
    `lacking`: why these values have no interval.
    """

    def estimate(seen: Array) -> Estimate:
        if lacking:
            return unknown(float(np.median(seen)), f"{len(seen)} fresh processes", lacking)
        return process_interval(seen, level)

    after = estimate(values[:, -1])
    if values.shape[1] == 1:
        return make_evidence(name, len(values), before=None, after=after, difference=None, speedup=None)
    slow, fast = (values[:, 1], values[:, 0]) if MEASURED[name].higher_is_better else (values[:, 0], values[:, 1])
    if ratios is None and (fast > 0).all():
        ratios = slow / fast
    return make_evidence(
        name,
        len(values),
        before=estimate(values[:, 0]),
        after=after,
        difference=estimate(values[:, 1] - values[:, 0]),
        speedup=None if ratios is None else estimate(ratios),
    )


def cost_evidence(seconds: Array, judgement: Judgement) -> Evidence:
    """Return evidence of the cost of a million samples, of calls with large batches as for `timing_evidence`."""
    settings = judgement.benchmark
    price = (settings.price_per_hour or 0.0) / 3600 / (settings.throughput_batch_size / 1e6)
    return timing_evidence("cost_per_million", 50, seconds, judgement.confidence, lambda second: price * second)


def range_evidence(
    name: str, baseline: tuple[float, ...] | None, candidate: tuple[float, ...], level: float
) -> Evidence:
    """Return evidence of what different processes saw of either model. `baseline`: None where there is none."""
    nothing = unknown(math.nan, "no process", "none opened it first")
    after = process_interval(np.array(candidate), level) if candidate else nothing
    if baseline is None:
        return make_evidence(name, len(candidate), before=None, after=after, difference=None, speedup=None)
    before = process_interval(np.array(baseline), level) if baseline else nothing
    return make_evidence(
        name,
        len(candidate),
        before=before,
        after=after,
        difference=subtract(after, before),
        speedup=divide(before, after) if MEASURED[name].speed else None,
    )


def size_evidence(baseline_bytes: int | None, candidate_bytes: int) -> dict[str, Evidence]:
    """Return evidence of size (bytes) and, with a baseline, of size_ratio (baseline / candidate); both exact."""
    if baseline_bytes is None:
        alone = exact(candidate_bytes)
        return {"size": make_evidence("size", 1, before=None, after=alone, difference=None, speedup=None)}
    before, after = exact(baseline_bytes), exact(candidate_bytes)
    ratio = exact(baseline_bytes / candidate_bytes)
    difference = exact(candidate_bytes - baseline_bytes)
    return {
        "size": make_evidence("size", 1, before=before, after=after, difference=difference, speedup=None),
        "size_ratio": make_evidence("size_ratio", 1, before=None, after=ratio, difference=None, speedup=None),
    }


def make_evidence(
    name: str,
    n: int,
    *,
    before: Estimate | None,
    after: Estimate,
    difference: Estimate | None,
    speedup: Estimate | None,
) -> Evidence:
    """Return evidence of a measured metric, unit and direction as in `MEASURED`; `n` processes were seen."""
    metric = MEASURED[name]
    return Evidence(name, metric.unit, metric.higher_is_better, n, PROCESS, after, before, difference, speedup)


def request_evidence(times: RequestTimes, judgement: Judgement) -> dict[str, Evidence]:
    """Return evidence of each metric of requests, by name; times have axes [processes, models, rounds(, tokens)]."""
    settings, level = judgement.benchmark, judgement.confidence
    batch, n_prompt = settings.batch_size, settings.batch_size * settings.prompt_tokens
    first, steps, per_token = times.first[..., None], times.steps, times.per_token[..., None]
    medians = {"ttft": first, "tpot": per_token}
    evidence = {name: timing_evidence(name, 50, seconds, level) for name, seconds in medians.items()}
    for name, percentile in {**ITL_PERCENTILES, **latency_percentiles(settings)}.items():
        evidence[name] = timing_evidence(name, percentile, steps, level)
    if times.of_prompts:
        evidence["prefill_rate"] = timing_evidence("prefill_rate", 50, first, level, lambda s: n_prompt / s)
    evidence["decode_rate"] = timing_evidence("decode_rate", 50, per_token, level, lambda s: batch / s)
    if settings.price_per_hour is not None:
        price = settings.price_per_hour / 3600 / (batch * settings.new_tokens / 1e6)  # of a second of a request
        evidence["cost_per_million"] = timing_evidence(
            "cost_per_million", 50, times.whole[..., None], level, lambda second: price * second
        )
    return evidence


def latency_percentiles(settings: Benchmark) -> dict[str, float]:
    """Return what is given of one call's time: metric -> percentile."""
    return {**LATENCY_PERCENTILES, "latency_percentile": settings.latency_percentile}
