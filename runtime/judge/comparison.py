"""Tell which differences between judged bundles are beyond noise.

Quality is paired: both candidates answered the same frozen samples, so that the difference is taken sample by sample,
by the methods that gates use. Speed is paired within one run alone: each candidate's speed-up over its own baseline,
timed in turns with it, is what two runs can be compared by. Sizes are exact.

Whoever asks twenty questions gets one wrong answer at 95 %: all intervals of a comparison hold at once (Bonferroni).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from runtime.bundle.format import Judgement
from runtime.errors import UsageError
from runtime.judge.evidence import NO_VALUE, column_evidence
from runtime.judge.recorded import as_metric, describe_own_metric
from runtime.judge.stats import Estimate, change_level, change_scale, divide, exact, subtract, unknown
from runtime.judge.stored import Interval, StoredFindings, StoredReport
from runtime.metrics import MEASURED, METRICS, Metric, is_own
from runtime.metrics.base import Columns

Verdict = Literal["better", "worse", "within noise", "not known"]
Scale = Literal["difference", "ratio"]
GRAIN = 0.001
"""Of a size: what names and versions inside of files may move it by."""
SAME_RUN = ("backend", "cpu", "threads", "os", "versions")
"""Of a run: where all of these are the same, its milliseconds and bytes of memory are of one machine and runtime."""


@dataclass(frozen=True)
class Difference:
    """One metric of two candidates. `change` is after minus before or, of speed, how many times as fast after is.

    The values of speed are each candidate's speed-up over its own baseline.
    """

    metric: str
    unit: str
    higher_is_better: bool
    scale: Scale
    before: float
    after: float
    change: Estimate
    verdict: Verdict
    remark: str = ""
    """What the interval does not say: that it is not paired, that machines differ, what is missing."""


@dataclass(frozen=True)
class Comparison:
    """What is known of the differences of a bundle from another one, all intervals holding at once."""

    before: str
    after: str
    confidence: float
    """Of all intervals together."""
    n_questions: int
    """Differences with an interval, those of further bundles of the same comparison included."""
    differences: tuple[Difference, ...]
    not_compared: dict[str, str]
    """Metric -> why."""
    notes: tuple[str, ...] = ()

    def find(self, verdict: Verdict) -> list[Difference]:
        """Return the differences of a verdict."""
        return [difference for difference in self.differences if difference.verdict == verdict]


def compare_reports(reports: Sequence[StoredReport], names: Collection[str] | None = None) -> tuple[Comparison, ...]:
    """Compare each report with the first. `names`: the metrics that are asked for; None: all that both have.

    Raises UsageError for fewer than two, and for reports that are not of the same task and frozen samples.
    """
    if len(reports) < 2:
        raise UsageError("give at least two bundles to compare")
    first, *others = reports
    problems = [problem for other in others for problem in find_incomparable(first, other)]
    if problems:
        raise UsageError(problems)
    pairs = [_Pair(first, other) for other in others]
    asked = [pair.list_questions(names) for pair in pairs]
    n_questions = sum(question.has_interval for questions in asked for question in questions)
    confidence = first.findings.confidence
    level = 1 - (1 - confidence) / max(n_questions, 1)
    return tuple(
        Comparison(
            pair.old.name,
            pair.new.name,
            confidence,
            n_questions,
            tuple(question.answer(level) for question in questions),
            pair.explain_left_out(names),
            tuple(pair.list_notes()),
        )
        for pair, questions in zip(pairs, asked, strict=True)
    )


def find_incomparable(old: StoredReport, new: StoredReport) -> list[str]:
    """Return why two reports cannot be compared at all; nothing where they can."""
    names = f"{old.name} and {new.name}"
    before, after = old.findings, new.findings
    if before.task != after.task:
        return [f"{names}: different tasks, {before.task} and {after.task}"]
    for report in (old, new):
        if report.findings.evaluation is None:
            return [
                f"{report.name}: the report does not say which samples it is of; give the bundle's folder, or judge it "
                f"anew with `compress validate`"
            ]
    assert before.evaluation is not None and after.evaluation is not None
    if before.evaluation.samples != after.evaluation.samples:
        sets = (f"{of.n_samples} samples of digest {of.evaluation.samples[:12]}" for of in (before, after))  # type: ignore[union-attr]
        return [
            f"{names}: judged on different evaluation sets ({' and '.join(sets)}); a difference may be the samples' own: "
            "build both with the same data.evaluation"
        ]
    return []


@dataclass(frozen=True)
class _Question:
    """One metric that two reports have: `answer` gives its difference at a level of confidence."""

    has_interval: bool
    answer: Callable[[float], Difference]


@dataclass(frozen=True)
class _Pair:
    """Two reports of the same frozen samples."""

    old: StoredReport
    new: StoredReport

    def list_questions(self, names: Collection[str] | None) -> list[_Question]:
        """Return a question for each metric that can be compared: quality, then speed, then size and memory."""
        return [
            question
            for listed in (self._list_quality, self._list_speed, self._list_weights)
            for name, question in listed()
            if isinstance(question, _Question) and (names is None or name in names)
        ]

    def explain_left_out(self, names: Collection[str] | None) -> dict[str, str]:
        """Return why each other metric of the two reports is not compared."""
        return {
            name: why
            for listed in (self._list_quality, self._list_speed, self._list_weights)
            for name, why in listed()
            if isinstance(why, str) and (names is None or name in names)
        }

    def list_notes(self) -> Iterator[str]:
        """Yield what a reader must know of the two judgements as a whole."""
        before, after = self.old.findings, self.new.findings
        unpaired = [report.name for report in (self.old, self.new) if not report.columns]
        if unpaired and before.candidate.metrics:
            yield (
                f"{' and '.join(unpaired)}: no values for each sample beside the report, so that quality is not paired: "
                "its intervals are wider than they need be; `compress validate` writes them"
            )
        if different := self._different_runs():
            yield f"measured on different {' and '.join(different)}: times and memory of the two do not compare"

    def _list_quality(self) -> Iterator[tuple[str, _Question | str]]:
        before, after = (report.findings.candidate.metrics for report in (self.old, self.new))
        for name in dict.fromkeys((*before, *after)):
            if name not in before or name not in after:
                yield name, f"{(self.old if name not in before else self.new).name} lacks it"
            elif before[name] is None or after[name] is None:
                yield name, f"it has no value in {(self.old if before[name] is None else self.new).name}"
            else:
                metric = self._find_metric(name)
                yield name, metric if isinstance(metric, str) else self._ask_quality(metric)

    def _find_metric(self, name: str) -> Metric | str:
        """Return the metric that both values are of, or why they are not of one metric."""
        before, after = self.old.findings.evaluation, self.new.findings.evaluation
        assert before is not None and after is not None
        if is_own(name):
            ours, theirs = ({m.name: m for m in of.own_metrics}.get(name) for of in (after, before))
            if ours is None or theirs is None:
                return "a report does not say which code it was computed by; judge that bundle anew"
            same = ours.sha256 == theirs.sha256 and ours.per_sample == theirs.per_sample
            return as_metric(ours) if same else "its file is another one"
        if name not in METRICS:
            return "this installation has no metric of that name"
        if METRICS[name].against == "baseline" and not set(before.baselines) & set(after.baselines):
            return "it is against the float model, and the two bundles have different ones"
        return METRICS[name]

    def _ask_quality(self, metric: Metric) -> _Question:
        why = self._explain_unpaired(metric)
        if not why:
            return _Question(True, lambda level: self._pair_samples(metric, level))
        ends = [report.findings.candidate.intervals.get(metric.name) for report in (self.old, self.new)]
        return _Question(all(map(_is_finite, ends)), lambda level: self._subtract_unpaired(metric, level, why))

    def _explain_unpaired(self, metric: Metric) -> str:
        """Return why the two cannot be paired by sample; "" where they can."""
        for report in (self.old, self.new):
            kept = report.columns.get(metric.name)
            if kept is None:
                return f"not paired: {report.name} keeps no values for each sample of it"
            value = report.findings.candidate.metrics[metric.name]
            if not _gives_value(metric, kept, value):
                return f"not paired: what {report.name} keeps of it was computed by another version of the metric"
        return ""

    def _pair_samples(self, metric: Metric, level: float) -> Difference:
        theirs, ours = (report.columns[metric.name] for report in (self.old, self.new))
        if is_own(metric.name):
            assert self.new.findings.evaluation is not None
            records = {record.name: record for record in self.new.findings.evaluation.own_metrics}
            metric = describe_own_metric(records[metric.name], ours, theirs)
        evidence = column_evidence(metric, ours, theirs, Judgement(confidence=level))
        assert evidence.difference is not None and evidence.baseline is not None
        values = evidence.baseline.value, evidence.candidate.value
        return _describe(metric, "difference", values, evidence.difference)

    def _subtract_unpaired(self, metric: Metric, level: float, why: str) -> Difference:
        before, after = (_read_estimate(report.findings, metric.name, level) for report in (self.old, self.new))
        return _describe(metric, "difference", (before.value, after.value), subtract(after, before), why)

    def _list_speed(self) -> Iterator[tuple[str, _Question | str]]:
        before, after = self.old.findings, self.new.findings
        timed = [name for name in MEASURED if name in before.ratio_intervals or name in after.ratio_intervals]
        for name in timed:
            lacking = [r.name for r in (self.old, self.new) if name not in r.findings.ratio_intervals]
            yield name, f"{' and '.join(lacking)} lacks it" if lacking else self._ask_speed(name)

    def _ask_speed(self, name: str) -> _Question | str:
        before, after = self.old.findings, self.new.findings
        assert before.evaluation is not None and after.evaluation is not None
        if not set(before.evaluation.baselines) & set(after.evaluation.baselines):
            return "each is a speed-up over its own float model, and these differ"
        if before.backend != after.backend:
            return f"measured on different backends, {before.backend} and {after.backend}"
        changed = [
            f"{key} {before.benchmark[key]} and {after.benchmark[key]}"
            for key in WORKLOAD
            if key in before.benchmark and before.benchmark[key] != after.benchmark.get(key)
        ]
        if changed:
            return f"timed otherwise: {', '.join(changed)}"
        finite = all(_is_finite(of.ratio_intervals.get(name)) for of in (before, after))
        return _Question(finite, lambda level: self._divide_speedups(name, level))

    def _divide_speedups(self, name: str, level: float) -> Difference:
        before, after = (_read_speedup(report.findings, name, level) for report in (self.old, self.new))
        found = _describe(MEASURED[name], "ratio", (before.value, after.value), divide(after, before))
        if self._different_runs():
            return replace(found, verdict="not known", remark="the runs were on different machines or runtimes")
        return found

    def _different_runs(self) -> list[str]:
        """Return in which words two runs differ, so that their times and memory are not of one machine and runtime."""
        before, after = ({**report.findings.environment, "backend": report.findings.backend} for report in (self.old, self.new))
        return [words for key, words in SAME_RUN.items() if before.get(key) != after.get(key)]

    def _list_weights(self) -> Iterator[tuple[str, _Question | str]]:
        sizes = [report.findings.candidate.size_bytes for report in (self.old, self.new)]
        if all(size is not None for size in sizes):
            yield "size", _Question(False, lambda level: _compare_sizes(*map(float, sizes)))  # type: ignore[arg-type]
        for name, field in (("peak_memory", "peak_memory_bytes"), ("energy", "")):
            pass
