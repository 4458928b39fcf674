"""Tell which differences between judged bundles are beyond noise.

Quality is paired: both candidates answered the same frozen samples, so that the difference is taken sample by sample,
by the methods that gates use. Speed is paired within one run alone: what two runs can be compared by is each
candidate's speed-up over its own baseline, timed in turns with it. Sizes are exact.

Whoever asks twenty questions gets one wrong answer at 95 %: all intervals of a comparison hold at once (Bonferroni).
They tell what the samples and the rounds can tell: of one build of each bundle, not of what another seed would build.
The intervals of all slices hold at once, too, apart from those of the whole set: who slices finely pays for it in the
slices' intervals alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from runtime.bundle.columns import Array
from runtime.bundle.format import Judgement
from runtime.errors import UsageError
from runtime.judge.evidence import column_evidence, slices_by
from runtime.judge.findings import Comparison, Difference, DifferenceVerdict, Interval, SliceComparison, SliceDifference
from runtime.judge.recorded import as_metric, describe_own_metric
from runtime.judge.slices import Groups
from runtime.metrics import MEASURED, MeasuredMetric, Metric
from runtime.metrics.base import Columns
from runtime.report.report import Report
from runtime.report.slices import choose_slices
from runtime.report.stored import StoredReport, read_groups
from runtime.stats import PROCESSES, Estimate, change_level, change_scale, divide, exact, subtract, unknown
from runtime.tasks.metrics import METRICS, is_own

GRAIN = 0.001
"""Of a size: what names and versions inside of files may move it by."""
RUN_TO_RUN = 0.03
"""Of a speed-up: what another run of the same bundle on the same idle machine may move it by, beyond what the rounds of
one run show: where memory lies, the clock's pace (`benchmarks/comparison_noise.py`)."""
WORKLOAD = (
    *("batch_size", "throughput_batch_size", "sequence_length", "prompt_tokens", "new_tokens"),
    *("latency_percentile", "latency_limit_ms", "ttft_limit_ms", "tpot_limit_ms"),
)
"""Of `Findings.benchmark`: what is timed."""
MACHINE = {"backend": "backends", "cpu": "CPUs", "cores": "numbers of cores", "threads": "numbers of threads"}
NO_RUNTIMES = ("numpy", "tokenizers", "pillow")
"""Of `environment`'s versions: those that no model runs in."""


@dataclass(frozen=True)
class _Question:
    """A metric that two reports have: `answer` gives its difference at a level of confidence."""

    has_interval: bool
    answer: Callable[[float], Difference]


def compare_reports(reports: Sequence[StoredReport], names: Collection[str] | None = None) -> tuple[Comparison, ...]:
    """Compare each report with the first one. `names`: the metrics that are asked for; None: all that there are.

    Raises UsageError for fewer than two reports, and for those that are not of one task and the same frozen samples.
    """
    if len(reports) < 2:
        raise UsageError("compare: give at least two bundles")
    first, *others = reports
    if problems := [problem for other in others for problem in find_incomparable(first, other)]:
        raise UsageError(problems)
    asked = []
    for other in others:
        listed = {**_ask_size(first, other), **_ask_quality(first, other), **_ask_speed(first, other)}
        asked.append({name: found for name, found in listed.items() if names is None or name in names})
    questions = [{n: found for n, found in listed.items() if isinstance(found, _Question)} for listed in asked]
    n_intervals = sum(question.has_interval for listed in questions for question in listed.values())
    level = 1 - (1 - first.report.confidence) / max(n_intervals, 1)
    return tuple(
        Comparison(
            first.name,
            other.name,
            first.report.confidence,
            n_intervals,
            tuple(question.answer(level) for question in questions[place].values()),
            {name: why for name, why in asked[place].items() if isinstance(why, str)},
            _list_notes(first, other),
        )
        for place, other in enumerate(others)
    )


def find_incomparable(old: StoredReport, new: StoredReport) -> list[str]:
    """Return why two reports cannot be compared at all; nothing where they can."""
    names, before, after = f"{old.name} and {new.name}", old.report, new.report
    if before.task != after.task:
        return [f"{names}: different tasks, {before.task} and {after.task}"]
    for stored in (old, new):
        if stored.report.evaluation is None:
            return [
                f"{stored.name}: the report does not say which samples it is of; name the bundle's folder, or judge "
                "the bundle anew with `compress validate`"
            ]
    assert before.evaluation is not None and after.evaluation is not None
    if before.evaluation.samples != after.evaluation.samples:
        sets = " and ".join(_name_samples(report) for report in (before, after))
        return [
            f"{names}: different evaluation sets, {sets}: what differs may be the samples; build both with the same "
            "data.evaluation"
        ]
    return []


def _name_samples(report: Report) -> str:
    assert report.evaluation is not None
    digest = f"digest {report.evaluation.samples[:12]}"
    return f"{report.n_samples} samples ({digest})" if report.n_samples else digest


def list_different_runs(old: StoredReport, new: StoredReport) -> list[str]:
    """Return, in words, what of machine and runtime differs between two runs; nothing where milliseconds compare."""
    before, after = ({**stored.report.environment, "backend": stored.report.backend} for stored in (old, new))
    differ = [words for key, words in MACHINE.items() if before.get(key) != after.get(key)]
    return differ + ["versions of the runtime"] * (_list_runtimes(before) != _list_runtimes(after))


def _list_runtimes(environment: Mapping[str, object]) -> dict[str, object]:
    versions = environment.get("versions")
    known = versions if isinstance(versions, dict) else {}
    return {name: version for name, version in known.items() if name not in NO_RUNTIMES}


def _list_notes(old: StoredReport, new: StoredReport) -> tuple[str, ...]:
    """Return what a reader must know of the two judgements as a whole."""
    notes = []
    if unpaired := [stored.name for stored in (old, new) if not stored.columns]:
        notes.append(
            f"{' and '.join(unpaired)}: no values of single samples lie beside the report, so that quality is not "
            "paired, and its intervals are wider than they need be; `compress validate` writes these values."
        )
    if differ := list_different_runs(old, new):
        notes.append(f"Measured with different {', '.join(differ)}: no difference in speed is called real.")
    return tuple(notes)


def _ask_size(old: StoredReport, new: StoredReport) -> dict[str, _Question | str]:
    before, after = (stored.report.candidate.size_bytes for stored in (old, new))
    if before is None or after is None:
        return {}
    return {"size": _Question(False, lambda level: _compare_sizes(before, after))}


def _compare_sizes(before: float, after: float) -> Difference:
    found = _describe(MEASURED["size"], "difference", (before, after), exact(after - before))
    if 0 < abs(after - before) <= GRAIN * before:
        return replace(found, verdict="within noise", remark=f"less than {GRAIN:.1%}: names and versions in the file")
    return found


def _ask_quality(old: StoredReport, new: StoredReport) -> dict[str, _Question | str]:
    before, after = (stored.report.candidate.metrics for stored in (old, new))
    asked: dict[str, _Question | str] = {}
    known = [name for name in METRICS if name in before or name in after]
    for name in dict.fromkeys((*known, *before, *after)):
        if lacking := _name_lacking(before.get(name), after.get(name), old, new):
            asked[name] = lacking
            continue
        metric = find_metric(name, old, new)
        asked[name] = metric if isinstance(metric, str) else _ask_metric(metric, old, new)
    return asked


def find_metric(name: str, old: StoredReport, new: StoredReport) -> Metric | str:
    """Return the metric that both values are of, or why they are not of one metric."""
    before, after = old.report.evaluation, new.report.evaluation
    assert before is not None and after is not None
    if is_own(name):
        theirs, ours = ({record.name: record for record in of.own_metrics}.get(name) for of in (before, after))
        if theirs is None or ours is None:
            return "a report does not say which code computed it"
        if (theirs.sha256, theirs.per_sample) != (ours.sha256, ours.per_sample):
            return "the file that computes it is another one"
        columns = [stored.columns.get(name) for stored in (new, old)]
        return as_metric(ours) if None in columns else describe_own_metric(ours, *columns)  # type: ignore[arg-type]
    if name not in METRICS:
        return "no metric of that name is installed here"
    if METRICS[name].needs_baseline and not set(before.baselines) & set(after.baselines):
        return "it is against the float model, and that is another one in each bundle"
    return METRICS[name]


def _ask_metric(metric: Metric, old: StoredReport, new: StoredReport) -> _Question:
    if why := explain_unpaired(metric, old, new):
        ends = [stored.report.candidate.intervals.get(metric.name) for stored in (old, new)]
        return _Question(all(map(_is_known, ends)), lambda level: _subtract_unpaired(metric, old, new, level, why))
    return _Question(True, lambda level: pair_samples(metric, old, new, level))


def explain_unpaired(metric: Metric, old: StoredReport, new: StoredReport) -> str:
    """Return why two candidates cannot be paired by sample; "" where they can."""
    for stored in (old, new):
        columns, value = stored.columns.get(metric.name), stored.report.candidate.metrics[metric.name]
        if columns is None:
            return f"not paired: {stored.name} keeps no values of single samples"
        if not _gives_value(metric, columns, value):
            return f"not paired: another version of the metric computed that of {stored.name}"
    return ""


def _gives_value(metric: Metric, columns: Columns, value: float) -> bool:
    """Return whether the metric of these columns is the value that the report has: both are of one version of it."""
    try:
        counted = None if metric.counts is None else metric.counts(columns)
        found = metric.statistic(columns if counted is None else tuple(column[counted] for column in columns))
    except (ArithmeticError, IndexError, TypeError, ValueError):  # these are other columns than the metric's
        return False
    return math.isclose(found, value, rel_tol=1e-6, abs_tol=1e-9)


def pair_samples(metric: Metric, old: StoredReport, new: StoredReport, level: float) -> Difference:
    """Return the difference of two candidates on the same samples, by the methods that gates use."""
    judgement = Judgement(confidence=level)
    evidence = column_evidence(metric, new.columns[metric.name], old.columns[metric.name], judgement)
    assert evidence.difference is not None and evidence.baseline is not None
    return _describe(metric, "difference", (evidence.baseline.value, evidence.candidate.value), evidence.difference)


def _subtract_unpaired(metric: Metric, old: StoredReport, new: StoredReport, level: float, why: str) -> Difference:
    """Return the difference of two candidates from their own intervals, as if their samples were not the same."""
    before, after = (_read_estimate(stored.report, metric.name, level) for stored in (old, new))
    return _describe(metric, "difference", (before.value, after.value), subtract(after, before), why)


def _ask_speed(old: StoredReport, new: StoredReport) -> dict[str, _Question | str]:
    before, after = old.report, new.report
    assert before.evaluation is not None and after.evaluation is not None
    other_work = [
        f"{key} {before.benchmark[key]} and {after.benchmark[key]}"
        for key in WORKLOAD
        if key in before.benchmark and key in after.benchmark and before.benchmark[key] != after.benchmark[key]
    ]
    asked: dict[str, _Question | str] = {}
    for name in (name for name in MEASURED if name in before.ratio_intervals or name in after.ratio_intervals):
        if lacking := _name_lacking(before.ratios.get(name), after.ratios.get(name), old, new):
            asked[name] = lacking
        elif not set(before.evaluation.baselines) & set(after.evaluation.baselines):
            asked[name] = "it is a speed-up over the float model, and that is another one in each bundle"
        elif other_work:
            asked[name] = f"timed otherwise: {', '.join(other_work)}"
        else:
            asked[name] = _ask_speedup(name, old, new)
    return asked


def _ask_speedup(name: str, old: StoredReport, new: StoredReport) -> _Question:
    differ = bool(list_different_runs(old, new))
    known = all(_is_known(stored.report.ratio_intervals.get(name), above=0) for stored in (old, new))
    return _Question(known and not differ, lambda level: _divide_speedups(name, old, new, level, differ))


def _divide_speedups(name: str, old: StoredReport, new: StoredReport, level: float, differ: bool) -> Difference:
    """Return how many times as fast the new candidate is, from two runs, each one's rounds paired with its baseline."""
    before, after = (_read_speedup(stored.report, name, level) for stored in (old, new))
    change = divide(after, before)
    change = replace(change, low=change.low / (1 + RUN_TO_RUN), high=change.high * (1 + RUN_TO_RUN))
    found = _describe(MEASURED[name], "ratio", (before.value, after.value), change)
    return replace(found, verdict="not known", remark="measured on another machine or runtime") if differ else found


def _describe(
    metric: Metric | MeasuredMetric,
    scale: Literal["difference", "ratio"],
    values: tuple[float, float],
    change: Estimate,
    remark: str = "",
) -> Difference:
    """Return a metric's difference with its verdict: beyond noise where no change at all is outside of its interval."""
    same, higher_is_better = (1.0, True) if scale == "ratio" else (0.0, metric.higher_is_better)
    verdict: DifferenceVerdict = "within noise"
    least = 0.0 if scale == "ratio" else -math.inf
    if math.isnan(change.value) or (change.low == least and math.isinf(change.high)):
        verdict = "not known"
    elif change.low > same or change.high < same:
        verdict = "better" if (change.low > same) == higher_is_better else "worse"
    remarks = "; ".join(text for text in (remark, change.lacking) if text)
    return Difference(metric.name, metric.unit, metric.higher_is_better, scale, *values, change, verdict, remarks)


def _read_estimate(report: Report, name: str, level: float) -> Estimate:
    """Return a candidate's metric with the interval that its report has, at another level."""
    value, ends = report.candidate.metrics[name], report.candidate.intervals.get(name)
    if ends is None or not _is_known(ends):
        return unknown(value, f"{report.n_samples} samples", "a report has no interval of it")
    return change_level(Estimate(value, *ends, "unpaired"), report.confidence, level)


def _read_speedup(report: Report, name: str, level: float) -> Estimate:
    """Return how many times as fast as its baseline a candidate is, at another level than its report's."""
    value, ends = report.ratios[name], report.ratio_intervals[name]
    if not _is_known(ends, above=0):
        return Estimate(value, 0.0, math.inf, "no interval", "a run timed in too few processes for an interval")
    logs = Estimate(math.log(value), math.log(ends[0]), math.log(ends[1]), PROCESSES)
    return change_scale(change_level(logs, report.confidence, level), math.exp)


def _is_known(ends: Interval | None, above: float = -math.inf) -> bool:
    """Return whether an interval has both ends, the lower one above a bound."""
    return ends is not None and all(map(math.isfinite, ends)) and ends[0] > above


def _name_lacking(before: float | None, after: float | None, old: StoredReport, new: StoredReport) -> str:
    """Say which of two reports has no value of a metric; "" where both have one."""
    values = ((old.name, before), (new.name, after))
    lacking = [name for name, value in values if value is None or not math.isfinite(value)]
    return f"{' and '.join(lacking)} has no value of it" if lacking else ""


def compare_slices(old: StoredReport, new: StoredReport) -> SliceComparison | None:
    """Compare two reports of the same samples slice by slice, by the metrics that their own tables show.

    None where neither has slices. Raises BundleError for samples that are damaged.
    """
    asked = list_asked(old, new)
    if not asked:
        return None
    groups = {**read_groups(old), **read_groups(new)}
    paired: list[tuple[str, str, Array, Metric]] = []
    not_compared = {}
    for column, name in asked:
        metric = find_metric(name, old, new)
        why = metric if isinstance(metric, str) else _explain_not_sliced(metric, column, groups, old, new)
        if why:
            not_compared[f"{name} by {column}"] = why
        elif not isinstance(metric, str):
            paired += [(column, value, mask, metric) for value, mask in groups[column].items()]
    confidence = old.report.confidence
    level = 1 - (1 - confidence) / max(len(paired), 1)
    found = tuple(
        SliceDifference(column, value, int(mask.sum()), _pair_slice(metric, mask, old, new, level))
        for column, value, mask, metric in paired
    )
    return SliceComparison(confidence, found, not_compared)


def list_asked(old: StoredReport, new: StoredReport) -> list[tuple[str, str]]:
    """Return the (column, metric) that the tables of either report show and both candidates have."""
    shown = [(table.column, table.metric) for stored in (old, new) for table in choose_slices(stored.report)]
    sides = [stored.report.candidate.metrics for stored in (old, new)]
    return [pair for pair in dict.fromkeys(shown) if all(pair[1] in metrics for metrics in sides)]


def _explain_not_sliced(metric: Metric, column: str, groups: Groups, old: StoredReport, new: StoredReport) -> str:
    if column not in groups:
        return "a report alone does not say which samples a slice has; name the bundles' folders"
    if not slices_by(metric, column):
        return "of one class alone the metric says nothing"
    return explain_unpaired(metric, old, new)


def _pair_slice(metric: Metric, mask: Array, old: StoredReport, new: StoredReport, level: float) -> Difference:
    """Return the difference on the samples of one slice. mask: bool [N]."""
    rows = np.flatnonzero(mask)
    before, after = (
        replace(stored, columns={metric.name: tuple(column[rows] for column in stored.columns[metric.name])})
        for stored in (old, new)
    )
    return pair_samples(metric, before, after, level)


def order_slices(slices: Sequence[SliceDifference]) -> list[SliceDifference]:
    """Return the slices: what is worse, what is better, then the others; of each the largest change first."""
    order: tuple[DifferenceVerdict, ...] = ("worse", "better", "within noise", "not known")
    return sorted(slices, key=lambda s: (order.index(s.difference.verdict), -abs(s.difference.change.value)))
