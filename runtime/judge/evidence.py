"""Tell what is known about each metric of a bundle: baseline, candidate, their difference, each with its interval.

Gates are decided from this alone, whatever kind of metric it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from runtime.bundle.columns import Array
from runtime.bundle.format import Gate, Judgement
from runtime.errors import UsageError
from runtime.judge.copies import Draws
from runtime.judge.slices import LABEL, Groups
from runtime.metrics import Metric, Outputs
from runtime.metrics.base import Columns, Flaws, Link
from runtime.metrics.language import PART, RUN
from runtime.stats import (
    FEW_CARRIERS,
    HALL,
    MIN_SAMPLES,
    RARE_CHANGES,
    Estimate,
    bound_mean,
    bound_rare_changes,
    change_scale,
    count_equal,
    paired_difference,
    paired_ratio,
    proportion_interval,
    skewed_interval,
    unknown,
)
from runtime.tasks.metrics import METRICS, is_own, why_not

LEAST_RUNS = 9.5
"""Equal runs of a text's parts below which their scatter is not known: of ten, a token more or less."""


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

    Needs only the baseline's outputs, which fix what a metric takes of them (the threshold of `f1_at`), so that it can
    refuse before the candidate runs. Raises UsageError for a metric
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
    return [metric.settle(baseline, labels) for metric in chosen]


def quality_evidence(
    metrics: Sequence[Metric],
    candidate: Outputs,
    baseline: Outputs,
    labels: Any | None,
    judgement: Judgement,
    groups: Groups | None = None,
    draws: Draws | None = None,
) -> dict[str, Evidence]:
    """Return evidence of each metric, and of each slice of `groups`. `draws`: which samples are copies; None: none.

    Raises NonFiniteOutputs, and RuntimeFailure where the two outputs differ in shape.
    """
    evidence = {}
    for metric in metrics:
        if metric.against != "baseline":
            ours, theirs = metric.columns(candidate, labels), metric.columns(baseline, labels)
            evidence[metric.name] = column_evidence(metric, ours, theirs, judgement, groups, draws)
        else:
            evidence[metric.name] = column_evidence(
                metric, metric.columns(candidate, baseline), None, judgement, groups, draws
            )
    return evidence


def column_evidence(
    metric: Metric,
    ours: Columns,
    theirs: Columns | None,
    judgement: Judgement,
    groups: Groups | None = None,
    draws: Draws | None = None,
) -> Evidence:
    """Return evidence of a metric from its columns for the candidate and, unless it is against it, for the baseline."""
    draws = draws or Draws(np.arange(len(ours[0])))
    whole = _make_evidence(metric, ours, theirs, draws, judgement, judgement.confidence)
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
            for rows in [
                (_take_rows(ours, mask), None if theirs is None else _take_rows(theirs, mask), draws.take(mask))
            ]
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
    metric: Metric, ours: Columns, theirs: Columns | None, draws: Draws, judgement: Judgement, level: float
) -> Evidence:
    if metric.counts is not None:
        counted = metric.counts(ours)
        ours, theirs = _take_rows(ours, counted), None if theirs is None else _take_rows(theirs, counted)
        draws = draws.take(counted)
    n = draws.n
    few = _cut_few(metric, ours, theirs, draws)
    if few is not None and few.enough:
        ours, theirs, draws = few.ours, few.theirs, few.runs
    nothing = unknown(math.nan, "no samples", "none of them counts")
    estimates: Sequence[Estimate | None] = (None if theirs is None else nothing, nothing, nothing)
    if n:
        unbounded = _METHODS[metric.kind](metric, theirs, ours, draws, level)
        least, most = metric.range
        lowest, highest = (most, least) if metric.ideal is None else (metric.ideal, metric.ideal)  # what is subtracted
        ranges = (metric.range, metric.range, (least - lowest, most - highest))
        estimates = [
            None if estimate is None else _check_defined(_keep_within(estimate, ends), n)
            for estimate, ends in zip(unbounded, ranges, strict=True)
        ]
    if few is not None and not few.enough:
        estimates = [one and replace(one, lacking=one.lacking and few.lacking) for one in estimates]
    before, after, difference = estimates
    assert after is not None
    retained = None
    if before is not None and any(g.metric == metric.name and g.min_retained is not None for g in judgement.gates):
        retained = _estimate_retained(metric, ours, theirs, before, after, draws, level) if n else nothing
    return Evidence(
        name=metric.name,
        unit=metric.unit,
        higher_is_better=metric.higher_is_better,
        n=n,
        counted=metric.counted if draws.are_rows or draws.are_runs else f"different {metric.counted}",
        baseline=before,
        candidate=after,
        difference=difference,
        retained=retained,
    )


@dataclass(frozen=True)
class _FewTexts:
    """The columns of both models by parts of few texts, in runs; `lacking`: what more there must be, "" if enough."""

    ours: Columns
    theirs: Columns | None
    runs: Draws
    lacking: str

    @property
    def enough(self) -> bool:
        return not self.lacking


def _cut_few(metric: Metric, ours: Columns, theirs: Columns | None, draws: Draws) -> _FewTexts | None:
    """Return the parts of samples that are too few for an interval; None where they are not, or have no parts."""
    if metric.cut is None or not draws.n or not draws.are_rows or _count_equal(metric, ours, draws) >= MIN_SAMPLES:
        return None
    cut, other = metric.cut(ours), None if theirs is None else metric.cut(theirs)
    if cut is None or (theirs is not None and other is None):
        return None
    columns, run_of = cut
    runs = replace(Draws.number(run_of), are_runs=True)
    parts = Draws(np.arange(len(run_of)))
    short = max(MIN_SAMPLES / _count_equal(metric, columns, parts), LEAST_RUNS / _count_equal(metric, columns, runs))
    lacking = f"at least {math.ceil(draws.n * short)} would be needed" if short > 1 else ""
    return _FewTexts(columns, other and other[0], runs, lacking)


def _count_equal(metric: Metric, columns: Columns, draws: Draws) -> float:
    return count_equal(draws.n, draws.weigh(_sample_weights(metric, columns)))


def count_least_samples(gate: Gate, confidence: float, longest: int = 0) -> int:
    """Return how many samples can decide that a gate on quality holds, at the best that they can show.

    `longest`: the most tokens that one of them has; 0 where samples are no texts.
    """
    metric = METRICS[gate.metric]
    if metric.cut is not None and longest:
        pieces = (np.append(np.full(longest // size, size), longest % size) for size in (PART, PART * RUN))
        parts, runs = (count_equal(len(sizes), sizes) for sizes in pieces)
        return max(math.ceil(MIN_SAMPLES / parts), math.ceil(LEAST_RUNS / runs))
    if metric.kind != "proportion":
        return MIN_SAMPLES
    needed, tail = 1, (1 - confidence) / 2
    if gate.min is not None and 0 < gate.min < 1:  # all are right: Clopper-Pearson
        needed = math.ceil(math.log(tail) / math.log(gate.min))
    dropped = gate.max_drop if metric.ideal is None else None
    if dropped is not None and 0 < dropped < 1:  # none changed: Tango
        needed = max(needed, math.ceil(NormalDist().inv_cdf(1 - tail) ** 2 * (1 - dropped) / dropped))
    return needed


NO_VALUE = "the metric has no value on them"
"""Said of samples on which a metric is not defined, as R² where the labels are all the same."""


def _keep_within(estimate: Estimate, ends: tuple[float, float]) -> Estimate:
    """Return the estimate with the part of its interval that the metric can be in.

    What has no interval keeps none: the metric's own range is no finding.
    """
    if math.isinf(estimate.low) and math.isinf(estimate.high):
        return estimate
    low, high = max(estimate.low, min(ends[0], estimate.value)), min(estimate.high, max(ends[1], estimate.value))
    return replace(estimate, low=low, high=high)


def _check_defined(estimate: Estimate, n: int) -> Estimate:
    """Return the estimate; one without any interval where the metric has no value on such samples."""
    if math.isnan(estimate.low) or math.isnan(estimate.high):
        return unknown(estimate.value, f"{n} samples", NO_VALUE)
    return estimate


def _estimate_retained(
    metric: Metric,
    ours: Columns,
    theirs: Columns | None,
    before: Estimate,
    after: Estimate,
    draws: Draws,
    level: float,
) -> Estimate:
    """Estimate the candidate's share of the baseline's value, paired by sample; the inverse where lower is better."""
    assert theirs is not None
    part, whole = (ours, theirs) if metric.higher_is_better else (theirs, ours)
    above, below = (after, before) if metric.higher_is_better else (before, after)
    if metric.kind == "proportion":
        n = draws.count_equal(part[0] - whole[0])
        both, some, others = (
            float(counts.sum() * n / len(counts)) for counts in ((part[0] > 0) & (whole[0] > 0), part[0], whole[0])
        )
        return paired_ratio(both, some - both, others - both, n, level)
    if math.isnan(above.value) or math.isnan(below.value):
        return unknown(math.nan, f"{len(ours[0])} samples", NO_VALUE)
    if above.value == below.value == 0:
        return unknown(1.0, f"{len(ours[0])} samples", "both values are 0, and there is no share of that")
    if below.value <= 0:
        return unknown(math.nan, f"{len(ours[0])} samples", f"there is no share of a value of {below.value:.4g}")
    share = above.value / below.value
    influence = (metric.influence(part) - share * metric.influence(whole)) / below.value
    estimate = _estimate_influence(share, influence, _sample_weights(metric, whole), draws, level)
    if metric.flaws is not None and estimate.method in (HALL, FEW_CARRIERS):
        changed = _find_changed(metric.flaws, ours, theirs)
        reach = metric.flaws.reach(whole) / below.value
        estimate = bound_rare_changes(estimate, 1.0, *_count(draws, changed), reach, level)
    if estimate.method in (HALL, FEW_CARRIERS) and not below.low > 0:
        return unknown(share, f"{len(ours[0])} samples", "the value may be 0, and there is no share of that")
    return estimate


Estimates = tuple[Estimate | None, Estimate, Estimate | None]


def _subtract_ideal(metric: Metric, after: Estimate) -> Estimate | None:
    if metric.ideal is None:
        return None
    ideal = metric.ideal
    return change_scale(after, lambda value: value - ideal)


def _count(draws: Draws, marks: Array) -> tuple[float, float]:
    """Return how many of how many equal draws are marked, of marks [N]."""
    n = draws.count_equal(marks.astype(np.float64))
    return float(marks.sum()) * n / len(marks), n


def _estimate_influence(value: float, influence: Array, weights: Array | None, draws: Draws, level: float) -> Estimate:
    """Estimate a statistic by what each draw adds; of runs by that of each part, too, the wider interval of the two.

    Parts show the tail, of which runs are too few; runs, what neighbours have in common.
    """
    added, weighed = draws.add_up(influence), draws.weigh(weights)
    if not draws.are_runs:
        return skewed_interval(value, added, level, weighed)
    parts = skewed_interval(value, influence, level, weights)
    runs = skewed_interval(value, added, level, weighed, LEAST_RUNS)
    return replace(parts, low=min(parts.low, runs.low), high=max(parts.high, runs.high))


def _estimate_proportion(
    metric: Metric, theirs: Columns | None, ours: Columns, draws: Draws, level: float
) -> Estimates:
    """Estimate each proportion (Clopper-Pearson) and their difference (Tango)."""
    after = proportion_interval(*_count(draws, ours[0]), level)
    if theirs is None:
        return None, after, _subtract_ideal(metric, after)
    change = ours[0] - theirs[0]
    n = draws.count_equal(change)
    gained, lost = (float(np.count_nonzero(turned)) * n / len(change) for turned in (change > 0, change < 0))
    return proportion_interval(*_count(draws, theirs[0]), level), after, paired_difference(gained, lost, n, level)


def _estimate_statistic(metric: Metric, theirs: Columns | None, ours: Columns, draws: Draws, level: float) -> Estimates:
    """Estimate each side by Hall's t; the difference from what each sample adds to both, so that it is paired."""
    after = _estimate_one_model(metric, ours, draws, level)
    if theirs is None:
        return None, after, _subtract_ideal(metric, after)
    before = _estimate_one_model(metric, theirs, draws, level)
    influence = metric.influence(ours) - metric.influence(theirs)
    weights = _sample_weights(metric, ours)
    difference = _estimate_influence(after.value - before.value, influence, weights, draws, level)
    if metric.kind == "mean":
        least, most = metric.range
        difference = bound_mean(difference, (least - most, most - least), draws.count_equal(influence), level)
    if metric.turned is not None and difference.method == FEW_CARRIERS:
        difference = _bound_leaps(difference, influence, metric.turned(ours, theirs), draws, level)
    if metric.reach is not None and difference.method in (HALL, FEW_CARRIERS):
        difference = bound_rare_changes(difference, 0.0, *_count(draws, ours[0] != theirs[0]), metric.reach, level)
    if metric.bias is not None and metric.biased_change:  # either model's may be there alone
        low, high = difference.low - max(metric.bias(ours), 0.0), difference.high + max(metric.bias(theirs), 0.0)
        difference = replace(difference, low=low, high=high)
    if metric.link is not None and math.isfinite(metric.link.to(after.value)):
        difference = _widen_by_slope(difference, after, metric.link)
    if metric.flaws is not None:  # the count of what changed is exact, of however few
        differ, reach = _find_changed(metric.flaws, ours, theirs), metric.flaws.reach(ours)
        difference = bound_rare_changes(difference, 0.0, *_count(draws, differ), reach, level)
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


def _estimate_one_model(metric: Metric, columns: Columns, draws: Draws, level: float) -> Estimate:
    """Estimate the metric of one model."""
    value, influence, link = metric.statistic(columns), metric.influence(columns), metric.link
    if metric.shortage is not None and (lacking := metric.shortage(columns)):
        return unknown(value, f"{len(influence)} samples", lacking)
    weights = _sample_weights(metric, columns)
    if link is None or not math.isfinite(link.to(value)):
        estimate = _estimate_influence(value, influence, weights, draws, level)
    else:
        estimate = _estimate_influence(link.to(value), link.slope(value) * influence, weights, draws, level)
        estimate = replace(change_scale(estimate, link.back), value=value)
    if metric.kind == "mean":
        estimate = bound_mean(estimate, metric.range, draws.count_equal(influence), level)
    if metric.flaws is not None:
        flawed, reach = _count(draws, metric.flaws.of(columns)), metric.flaws.reach(columns)
        estimate = bound_rare_changes(estimate, metric.flaws.perfect, *flawed, reach, level)
        perfect = metric.flaws.perfect
        if metric.higher_is_better:
            estimate = replace(estimate, high=min(estimate.high, perfect))
        else:
            estimate = replace(estimate, low=max(estimate.low, perfect))
    if metric.reach is not None and estimate.method in (HALL, FEW_CARRIERS):
        estimate = _bound_by_commonest(estimate, columns[0], metric.reach, draws, level)
    if metric.bias is not None:
        bias = metric.bias(columns)
        estimate = replace(estimate, low=estimate.low - max(bias, 0.0), high=estimate.high + max(-bias, 0.0))
    return estimate


def _bound_leaps(difference: Estimate, influence: Array, turned: Array, draws: Draws, level: float) -> Estimate:
    """Return the estimate of a change whose spread a few samples carry: their count bounds what they do.

    The others have an interval of their own; each of the two keeps half of what may be missed.
    """
    half = 1 - (1 - level) / 2
    calm = np.where(turned, 0.0, influence - influence.mean() + difference.value)
    others = _estimate_influence(float(calm.mean()), calm, None, draws, half)
    most = 2 * proportion_interval(*_count(draws, turned), half).high
    low, high = max(difference.low, others.low - most), min(difference.high, others.high + most)
    return replace(difference, low=low, high=high, method=RARE_CHANGES, lacking=others.lacking)


def _bound_by_commonest(estimate: Estimate, values: Array, reach: float, draws: Draws, level: float) -> Estimate:
    """Return the estimate of a mean, bounded by how few samples have another than the commonest value."""
    known, counts = np.unique(values, return_counts=True)
    common = float(known[counts.argmax()])
    others, n = _count(draws, values != common)
    bounded = bound_rare_changes(estimate, common, others, n, reach, level)
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


_METHODS: Mapping[str, Callable[[Metric, Columns | None, Columns, Draws, float], Estimates]] = {
    "proportion": _estimate_proportion,
    "mean": _estimate_statistic,
    "statistic": _estimate_statistic,
}
