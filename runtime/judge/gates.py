"""Deciding a gate: does the whole confidence interval keep to the bound?

A gate passes when the whole two-sided interval (at `judgement.confidence`) is on the good side of its bound, fails when
the whole interval is on the bad side, and is undecided otherwise. Being two-sided, a pass at confidence 0.95 is a
one-sided test at 0.975. Undecided counts as fail unless the gate or the judgement says `undecided: pass`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from runtime.bundle.format import Benchmark, Gate, Judgement, Postprocess
from runtime.errors import UsageError
from runtime.judge.evidence import Evidence, slices_by
from runtime.judge.slices import LABEL, SET
from runtime.metrics import MEASURED
from runtime.metrics.measured import LEAST_RATIO
from runtime.stats import Estimate, change_scale, samples_needed
from runtime.tasks import find_task
from runtime.tasks.base import TEXT
from runtime.tasks.metrics import METRICS, check_name, fitting, is_own
from runtime.words import interval_words

Verdict = Literal["pass", "fail", "undecided"]


@dataclass(frozen=True)
class GateResult:
    """One rule of one gate, decided.

    `value` is what the rule bounds: the drop, the value or the speed-up; None where it could not be measured. `holds`
    is the verdict after `undecided` has been counted as fail or pass. `slice`: COLUMN=VALUE that the value is of.
    `rule`: "max_drop 0.01, worst label": its kind, its limit, and what it is of where that is no whole set.
    """

    metric: str
    rule: str
    value: float | None
    interval: tuple[float, float] | None
    verdict: Verdict
    holds: bool
    why: str
    slice: str = ""
    unit: str = ""
    """Of the value and the bound, as it stands behind a number: "x", " ms"."""
    method: str = ""
    """Which made the interval."""
    kind: str = ""
    limit: float | None = None
    of: str = ""

    def __post_init__(self) -> None:
        """Read the rule's parts, of a report of before they were fields of their own."""
        if not self.kind:
            rule, _, of = self.rule.partition(", ")
            kind, _, limit = rule.partition(" ")
            with suppress(ValueError):
                parts = {"limit": float(limit), "kind": kind, "of": of}
                self.__dict__.update(parts)

    @property
    def has_floor(self) -> bool:
        """Return whether the value is to be at least the limit."""
        return self.kind.startswith("min")


def check_gates(judgement: Judgement, task: str, has_labels: bool, postprocess: Postprocess | None = None) -> None:
    """Refuse, before anything runs, a gate or a metric that cannot be judged here: UsageError with every problem."""
    problems: list[str] = []
    if LABEL in judgement.slices and not has_labels:
        problems.append("slices: label: the evaluation set has no labels; leave it out, or slice by a column")
    for name in dict.fromkeys((*judgement.metrics, *(gate.metric for gate in judgement.gates))):
        try:
            _check_metric(name, task, has_labels, judgement, postprocess)
        except UsageError as error:
            problems += error.problems
    problems += [problem for gate in judgement.gates for problem in _rule_problems(gate)]
    problems += [problem for gate in judgement.gates for problem in _slice_problems(gate, judgement, task, has_labels)]
    if problems:
        raise UsageError(problems)


def _check_metric(
    name: str, task: str, has_labels: bool, judgement: Judgement, postprocess: Postprocess | None
) -> None:
    check_name(name)
    if is_own(name):
        return
    if name in MEASURED:
        _check_measured(name, task, judgement.benchmark)
        return
    metric = METRICS[name]
    fits = ", ".join(fitting(task, has_labels))
    if not metric.suits(find_task(task).outputs):
        raise UsageError(f"metric '{name}' does not fit task {task}; what fits: {fits}")
    if metric.against == "labels" and not has_labels:
        raise UsageError(f"metric '{name}' needs labels, and the evaluation set has none; without labels fit: {fits}")
    if metric.needs and not set(metric.needs) & set(postprocess.set_fields if postprocess else ()):
        raise UsageError(f"metric '{name}' needs postprocess: {{{' or '.join(metric.needs)}: ...}}")


def _check_measured(name: str, task: str, benchmark: Benchmark) -> None:
    kind = find_task(task).unit == "token", TEXT in find_task(task).columns
    if not MEASURED[name].suits(*kind):
        fits = ", ".join(other for other, metric in MEASURED.items() if metric.suits(*kind))
        raise UsageError(f"metric '{name}' does not fit task {task}; what fits: {fits}")
    if name == "throughput_under_latency" and benchmark.latency_limit_ms is None:
        raise UsageError("metric 'throughput_under_latency' needs benchmark.latency_limit_ms")
    if name == "goodput" and benchmark.ttft_limit_ms is None and benchmark.tpot_limit_ms is None:
        raise UsageError("metric 'goodput' needs benchmark.ttft_limit_ms or benchmark.tpot_limit_ms")
    if name == "cost_per_million" and benchmark.price_per_hour is None:
        raise UsageError("metric 'cost_per_million' needs benchmark.price_per_hour")


def _slice_problems(gate: Gate, judgement: Judgement, task: str, has_labels: bool) -> list[str]:
    """Report slices that nobody asked for, and metrics that say nothing of one."""
    column = gate.worst or (gate.slice or "").partition("=")[0]
    if not column:
        return []
    on = f"gate on '{gate.metric}': {'worst' if gate.worst else 'slice'}"
    if gate.metric in MEASURED:
        return [f"{on}: {gate.metric} is measured of the whole model, not of samples; leave it out"]
    if column not in (SET, *judgement.slices):
        there = ", ".join((*judgement.slices, SET))
        return [f"{on}: '{column}' is not among validate.slices; add it there, or use one of {there}"]
    if gate.metric in METRICS and not slices_by(METRICS[gate.metric], column):
        fits = ", ".join(name for name in fitting(task, has_labels) if slices_by(METRICS[name], column))
        return [f"{on}: {gate.metric} says nothing of the samples of one {column} alone; what does: {fits}"]
    return []


def _rule_problems(gate: Gate) -> list[str]:
    if gate.metric not in MEASURED and gate.metric not in METRICS:
        own = is_own(gate.metric) and gate.min_speedup is not None  # any other is refused by name already
        return [f"gate on '{gate.metric}': min_speedup is of times; use min_retained"] if own else []
    problems = list(_find_idle_rules(gate))
    speed = [name for name, metric in MEASURED.items() if metric.speed]
    if gate.min_speedup is not None and gate.metric not in speed:
        problems.append(f"gate on '{gate.metric}': min_speedup fits only {', '.join(speed)}")
    if gate.max_drop is not None and gate.metric in ("sqnr_db", "size_ratio"):
        problems.append(f"gate on '{gate.metric}': max_drop has no baseline value to drop from; use min")
    if gate.min_retained is not None and (gate.metric in MEASURED or METRICS[gate.metric].against == "baseline"):
        way = "max_drop, min_speedup or max" if gate.metric in MEASURED else "min or max"
        problems.append(
            f"gate on '{gate.metric}': min_retained is a share of the baseline's quality, which this is not; use {way}"
        )
    return problems


def _find_idle_rules(gate: Gate) -> Iterator[str]:
    """Yield a problem for each rule that holds whatever is measured."""
    metric = METRICS[gate.metric] if gate.metric in METRICS else MEASURED[gate.metric]
    least, most = metric.extremes
    for rule, bound in gate.bounds.items():
        idle = {"min": bound <= least, "max": bound >= most, "max_drop": bound >= most - least}
        if idle.get(rule, bound <= LEAST_RATIO):
            unit = f" {metric.unit}" if gate.metric in MEASURED else ""
            of = f"{gate.metric} lies between {least:g} and {most:g}{unit}"
            of = f"it is above {LEAST_RATIO:g}" if rule not in idle else of
            hint = f"; {bound:g} % is {bound / 100:g}" if rule == "max_drop" and most - least == 1 else ""
            yield f"gate on '{gate.metric}': nothing can miss {rule} {bound:g}: {of}{hint}"


def judge(
    judgement: Judgement,
    evidence: Mapping[str, Evidence],
    failures: Mapping[str, str] | None = None,
    elsewhere: Mapping[str, str] | None = None,
) -> tuple[GateResult, ...]:
    """Decide every rule of every gate.

    A metric in `failures` could not be measured: its gates fail, saying why. A metric in `elsewhere` cannot be told on
    this machine, for the reason there: its gates are undecided. A key "metric rule" is of one rule alone.
    """
    results = []
    for gate in judgement.gates:
        undecided_holds = (gate.undecided or judgement.undecided) == "pass"
        for rule, limit in gate.bounds.items():
            of = f"worst {gate.worst}" if gate.worst else gate.slice or ""
            name = f"{rule} {limit:g}" + (f", {of}" if of else "")
            parts: dict[str, Any] = {"kind": rule, "limit": limit, "of": of}
            if failures and gate.metric in failures:
                why = failures[gate.metric]
                results.append(GateResult(gate.metric, name, None, None, "fail", False, why, **parts))
            elif elsewhere and (reason := elsewhere.get(gate.metric) or elsewhere.get(f"{gate.metric} {rule}")):
                counted = "; counted as a pass" if undecided_holds else "; counted as a failure"
                why = reason + counted
                results.append(GateResult(gate.metric, name, None, None, "undecided", undecided_holds, why, **parts))
            else:
                bounded = _find_subject(gate, evidence[gate.metric], rule)
                decided = _decide_rule(bounded, name, rule, limit, judgement.confidence, undecided_holds)
                results.append(replace(decided, **parts))
    return tuple(results)


def overall(gates: tuple[GateResult, ...]) -> Verdict | Literal["unjudged"]:
    """Return unjudged without gates, fail if one fails, undecided if an undecided one does not hold, else pass."""
    if not gates:
        return "unjudged"
    if any(gate.verdict == "fail" for gate in gates):
        return "fail"
    return "pass" if all(gate.holds for gate in gates) else "undecided"


def find_bounded(evidence: Evidence, rule: str) -> Estimate:
    """Return what the rule bounds: the drop (positive is worse), the speed-up, or the candidate's value."""
    if rule == "max_drop":
        difference = evidence.difference
        if difference is None:
            raise UsageError(f"gate on '{evidence.name}': max_drop has no baseline value to drop from")
        if not evidence.higher_is_better:
            return difference
        return change_scale(difference, lambda change: -change + 0.0)
    if rule == "min_retained":
        if evidence.retained is None:
            raise UsageError(f"gate on '{evidence.name}': min_retained has no baseline value to be a share of")
        return evidence.retained
    if rule == "min_speedup":
        if evidence.speedup is None:
            raise UsageError(f"gate on '{evidence.name}': there is no baseline speed to compare with")
        return evidence.speedup
    return evidence.candidate


@dataclass(frozen=True)
class _Subject:
    """What one rule is about: its evidence, the estimate that is bounded, and of the worst slice what to add."""

    evidence: Evidence
    estimate: Estimate
    slice: str = ""
    remark: str = ""


def _find_subject(gate: Gate, evidence: Evidence, rule: str) -> _Subject:
    """Return what the rule bounds: of all samples, of the slice that the gate names, or of the worst one."""
    column, _, value = (gate.slice or "").partition("=")
    if not column and not gate.worst:
        return _Subject(evidence, find_bounded(evidence, rule))
    slices = evidence.slices.get(gate.worst or column, ())
    if not slices:
        raise UsageError(f"gate on '{gate.metric}': it is not known for each {gate.worst or column}")
    if column:
        one = next(part for part in slices if part.value == value).alone
        return _Subject(one, find_bounded(one, rule), gate.slice or "")
    sign = 1.0 if _is_floor(rule) else -1.0
    bounded = [find_bounded(part.alone, rule) for part in slices]
    at_once = [find_bounded(part.at_once, rule) for part in slices]
    values = [sign * each.value if math.isfinite(each.value) else math.inf for each in bounded]
    worst = values.index(min(values))
    # The true worst slice is one of them, so that all are good where each is at its own level. That one is bad may be
    # chance where one of many looks bad: that end has to hold for all at once.
    good = min(sign * (each.low if sign > 0 else each.high) for each in bounded)
    bad = min(sign * (each.high if sign > 0 else each.low) for each in at_once)
    low, high = sorted((sign * good, sign * bad))
    limiting = [
        (part, each)
        for part, each in zip(slices, bounded, strict=True)
        if sign * (each.low if sign > 0 else each.high) == good
    ]
    weakest, unclear = limiting[0]
    estimate = replace(bounded[worst], low=low, high=high, lacking=unclear.lacking)
    found = slices[worst]
    lacking = f": {unclear.lacking}" if unclear.lacking else ""
    few = f"; least is known of '{weakest.value}' ({weakest.alone.n} {evidence.counted}{lacking})"
    few = "" if weakest is found else few
    remark = f"the worst of {len(slices)} by {gate.worst} is '{found.value}'{few}"
    return _Subject(found.alone, estimate, f"{gate.worst}={found.value}", remark)


def _is_floor(rule: str) -> bool:
    """Return whether the bound is the least that is good."""
    return rule.startswith("min")


def _decide_rule(
    subject: _Subject, name: str, rule: str, limit: float, confidence: float, undecided_holds: bool
) -> GateResult:
    evidence, estimate = subject.evidence, subject.estimate
    low, high, bound = estimate.low, estimate.high, limit
    if not _is_floor(rule):  # a ceiling, held as the floor of what is negative
        low, high, bound = -high, -low, -bound
    verdict: Verdict = "pass" if low >= bound else "fail" if high < bound else "undecided"
    why = _explain_verdict(evidence, rule, estimate, limit, verdict, confidence)
    if subject.slice:
        why = f"{subject.remark or subject.slice}: {why}"
    if evidence.recorded:
        why += "; computed when the bundle was built"
    if verdict == "undecided":
        why += "; counted as a pass" if undecided_holds else "; counted as a failure"
    holds = verdict == "pass" or (verdict == "undecided" and undecided_holds)
    interval = (estimate.low, estimate.high)
    unit, method = _name_unit(evidence, rule), estimate.method
    return GateResult(evidence.name, name, estimate.value, interval, verdict, holds, why, subject.slice, unit, method)


def _explain_verdict(
    evidence: Evidence, rule: str, estimate: Estimate, limit: float, verdict: Verdict, confidence: float
) -> str:
    """Return the figure that is bounded with its interval; the rule that stands before it has the bound."""
    share = "retained share" if evidence.higher_is_better else "retained share (baseline over candidate)"
    what = {"max_drop": "drop ", "min_retained": f"{share} "}.get(rule, "")
    unit = _name_unit(evidence, rule)
    figure = f"{what}{estimate.value:.4g}{unit}"
    if estimate.method == "exact":
        return figure
    interval = f"{100 * confidence:g}% interval {interval_words(estimate.low, estimate.high)}"
    seen = f"{figure} ({interval}, {evidence.n} {evidence.counted})"
    return f"{seen}; {_format_needed(evidence, estimate, limit)}" if verdict == "undecided" else seen


def _name_unit(evidence: Evidence, rule: str) -> str:
    """Return the unit of what a rule bounds, as it stands behind a number: "x" of ratios, " ms" of times."""
    if rule == "min_speedup" or evidence.unit == "x":
        return "x"
    return f" {evidence.unit}" if evidence.name in MEASURED and rule != "min_retained" else ""


def _format_needed(evidence: Evidence, estimate: Estimate, limit: float) -> str:
    if not math.isfinite(estimate.high if limit >= estimate.value else estimate.low):
        return estimate.lacking
    if evidence.counted == "fresh processes":
        return "they differ by more than their distance from the bound"
    needed = samples_needed(estimate, limit, evidence.n)
    if needed is None:
        return "the value is so near the bound that more of them may not tell"
    return f"about {needed} would be needed" + (" (benchmark.iterations)" if evidence.counted == "timed rounds" else "")
